"""`qkablate sync`: upload offline logs to Weights & Biases."""

import itertools
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from qkablate.cli.arguments import Parser, refuse_missing, take_out
from qkablate.cli.names import find_by_name, known_names
from qkablate.errors import UserError, print_stderr, sanitize
from qkablate.runs.lease_wait import observe_leases
from qkablate.sweeps.planning.manifest import read_manifest
from qkablate.sweeps.running.state import SweepState
from qkablate.table import format_bytes, format_count, format_list, print_next_commands, print_table
from qkablate.tracking.wandb import mode
from qkablate.tracking.wandb.offline_log import OfflineLog
from qkablate.tracking.wandb.sync import SyncPlan, lock_folders, plan_sync, send_logs

HELP = """qkablate sync: upload offline logs, with their files, to Weights & Biases.

Usage: qkablate sync [SWEEP | RUN …] [--dry-run] [out=FOLDER]

Each argument is a folder, or the beginning of a name or id; the default is
everything in `out`. A sweep includes its runs. Logs that were uploaded before
are skipped, and an interrupted upload is continued by the next call. The
sessions of a run that was resumed become one W&B run. Runs that are being
trained are skipped.

Examples
  qkablate sync                    everything in outputs
  qkablate sync quick --dry-run    what would be uploaded
  qkablate sync quick              a sweep: its runs, and the run with its
                                   results
  qkablate sync merged_w-d128      a run

It needs a key (`wandb login`, or WANDB_API_KEY); the server is W&B's, or
WANDB_BASE_URL. Without a key, `wandb leet FOLDER/wandb` shows a run in the
terminal.

Flags
{flags}

Exit codes: 0 everything is uploaded · 1 something could not be uploaded · 2 a
mistake in the command, or no key · 130 interrupted
"""
_MAX_LINKS = 5
_PROGRESS_LINES = 20  # without a terminal


PARSER = Parser(HELP, ("sweep", "run"), ("out=",))
PARSER.switch("--dry-run", "list what would be uploaded; contact no server")


def main(argv: list[str]) -> int:
    """Upload offline logs, or list them."""
    args = PARSER.parse(argv)
    words, out = take_out(args.words)
    refuse_missing(out)
    folders = _find_folders(words, out)
    if not args.dry_run and not mode.has_key():
        raise UserError("sync needs a key: `wandb login`, or WANDB_API_KEY; --dry-run needs none")
    if not args.dry_run and (error := mode.server_address_error()):
        raise UserError(error)
    plan = plan_sync(folders)
    _warn(plan)
    if args.dry_run:
        return _list(plan, args.words)
    if not plan.logs:
        before = f"; {format_count(plan.uploaded, 'log')} uploaded before" if plan.uploaded else ""
        print(f"nothing to upload{before}")
        return 1 if plan.rejected else 0
    server = mode.server_address()
    if problem := mode.probe_server(server):
        print_stderr(f"qkablate: W&B: {problem}; nothing was uploaded")
        return 1
    return _upload(plan, server)


def _find_folders(words: list[str], out: str) -> dict[Path, bool]:
    """Return the folders of runs and sweeps, each with whether it is being trained in."""
    root = Path(out).expanduser()
    runs = [] if words else sorted(path.parent for path in root.glob("runs/*/wandb"))
    sweeps = [] if words else [root / "sweeps" / name for name in known_names("sweep", root)]
    for word in words:
        kind, folder = find_by_name(word, out, ("sweep", "run"))
        (runs if kind == "run" else sweeps).append(folder)
    launchers: dict[Path, list[Path]] = {}
    for sweep in sweeps:
        try:
            sweep_state = SweepState(read_manifest(sweep))
        except UserError as error:
            if words:
                raise
            print_stderr(f"skipped: {error}")
            continue
        launchers[sweep] = sweep_state.launcher_folders()
        if words:  # without them `runs` has all
            sweep_state.refresh()
            runs += [state.folder for state in sweep_state.states.values()]
    runs = [run for run in dict.fromkeys(runs) if run.is_dir()]
    observer = observe_leases([*runs, *itertools.chain(*launchers.values())])
    busy = {sweep: any(map(observer.is_leased, found)) for sweep, found in launchers.items()}
    return {run: observer.is_leased(run) for run in runs} | busy


def _warn(plan: SyncPlan) -> None:
    for name in plan.busy:
        print_stderr(f"skipped: {name} is being trained")
    if plan.unreadable:
        number = format_count(len(plan.unreadable), "log")
        print_stderr(f"{number} cannot be read: the run was killed in its first second")
    for file, reason in plan.rejected.items():
        print_stderr(f"not uploaded: {file}: {reason}")
    for log in plan.logs:
        if missing := [path.name for path in log.paths if not path.exists()]:
            names = format_list(missing, 3)
            print_stderr(f"without its files: {log.name}: {names} moved away, as by --rerun")


def _list(plan: SyncPlan, words: list[str]) -> int:
    rows = []
    for log in plan.logs:
        size = log.file.stat().st_size + sum(p.stat().st_size for p in log.paths if p.is_file())
        folder = str(plan.folders[log.file])
        rows.append([sanitize(log.name), sanitize(log.id), format_bytes(size), sanitize(folder)])
    with suppress(BrokenPipeError):
        if rows:
            print_table(["run", "id", "size", "folder"], rows, 2)
            print()
        print(f"{format_count(len(rows), 'log')} to upload; {plan.uploaded:,} uploaded before")
        if rows:
            print_next_commands(["sync", *words])
    return 1 if plan.rejected else 0


def _upload(plan: SyncPlan, server: str) -> int:
    from tqdm import tqdm

    total, printed = len(plan.logs), 0

    def update(done: int) -> None:
        nonlocal printed
        bar.update(done - bar.n)
        if bar.disable and done - printed >= max(1, total // _PROGRESS_LINES):
            printed = done
            print_stderr(f"uploaded {done} of {total}")

    outputs = {folder.resolve().parent.parent for folder in plan.folders.values()}
    try:
        with (
            lock_folders(outputs) as locks,
            tqdm(total=total, desc="uploading", unit=" logs", disable=None) as bar,
        ):
            result = send_logs(plan.logs, server, locks, update)
    except BlockingIOError as error:
        print_stderr(f"qkablate: another `qkablate sync` is running in '{error}'")
        return 1
    except KeyboardInterrupt:
        print_stderr("qkablate: interrupted; the same command uploads the rest")
        return 130
    reasons: dict[str, list[str]] = {}
    for file, reason in result.failed.items():
        reasons.setdefault(reason, []).append(plan.folders[file].name)
    for reason, names in reasons.items():
        runs = format_list(names, 3)
        print_stderr(f"qkablate: W&B: not uploaded: {runs}: {reason}; the same command retries")
    with suppress(BrokenPipeError):
        print(f"{len(result.logs):,} of {format_count(total, 'log')} uploaded")
        for link in _choose_links(result.logs, result.links):
            print(f"  {link}")
    return 1 if result.failed or plan.rejected else 0


def _choose_links(logs: list[OfflineLog], links: dict[str, str]) -> Iterable[str]:
    """Return the links of the runs if they are few, else those of sweeps and projects."""
    by_id = {log.id: links[log.id] for log in logs if log.id in links}
    if len(by_id) <= _MAX_LINKS:
        return by_id.values()
    sweeps = [link for id, link in by_id.items() if id.startswith("sweep-")]
    return [*sweeps, *dict.fromkeys(link.rpartition("/runs/")[0] for link in by_id.values())]

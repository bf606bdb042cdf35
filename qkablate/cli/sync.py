"""`qkablate sync`: what was recorded offline goes to Weights & Biases."""

import fcntl
import os
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qkablate.cli.hydra.configs import next_commands, take_flags, take_out
from qkablate.cli.status import sweep_names
from qkablate.errors import UserError, nearest, printable, tell
from qkablate.runs.lease import SILENCE, Observer
from qkablate.runs.run import meant
from qkablate.table import counted, print_table, short_bytes, some

HELP = """qkablate sync: send what was recorded offline to Weights & Biases, with its files.

Usage: qkablate sync [SWEEP | RUN …] [--dry-run] [out=FOLDER]

Each is a folder, or how its name or id begins; unsaid, all that lies in `out`. A sweep comes with
its runs. What is at the server is not sent again, and a call that was broken off is gone on with by
the next one. The sittings of a run that was resumed become one run. A run that is being trained is
left for later.

Examples
  qkablate sync                    everything in outputs
  qkablate sync quick --dry-run    what that would be
  qkablate sync quick              a sweep: its runs, and the run that holds its answer
  qkablate sync merged_w-d128      a run

It takes a key (`wandb login`, or WANDB_API_KEY); the server is W&B's, or WANDB_BASE_URL. Without
one, `wandb leet FOLDER/wandb` shows a run in the terminal.

Flags
  --dry-run   list what would be sent; ask no server

Exit codes: 0 all is there · 1 something could not be sent · 2 a mistake in the command, or no key ·
130 interrupted
"""
_MOST_LINKS = 5
_PARTS = 20  # lines of progress where there is no terminal


@dataclass
class Plan:
    """What there is to do."""

    logs: list[Any] = field(default_factory=list)
    folders: dict[Path, Path] = field(default_factory=dict)  # by log
    there: int = 0  # logs that are at the server
    busy: list[str] = field(default_factory=list)
    empty: list[Path] = field(default_factory=list)  # killed before anything was written
    bad: dict[Path, str] = field(default_factory=dict)


def main(argv: list[str]) -> int:
    flags, words = take_flags(argv, ("--help", "-h", "--dry-run"))
    if {"--help", "-h"} & {*flags}:
        print(HELP, end="")
        return 0
    words, out = take_out(words)
    from qkablate.tracking.wandb.mode import has_key, server, silence_of, wrong_server

    dry = "--dry-run" in flags
    folders = _folders(words, Path(out).expanduser())
    if not dry and not has_key():
        raise UserError("sync needs a key: `wandb login`, or WANDB_API_KEY; --dry-run needs none")
    if not dry and (wrong := wrong_server()):
        raise UserError(wrong)
    plan = _plan(folders)
    _tell(plan)
    if dry:
        return _list(plan, argv)
    if not plan.logs:
        what = f"{counted(plan.there, 'log')} sent before"
        print(f"nothing to send{f'; {what}' if plan.there else ''}")
        return 1 if plan.bad else 0
    if silence := silence_of(server()):
        tell(f"qkablate: W&B: {silence}; nothing was sent")
        return 1
    return _send(plan, server())


def _folders(words: list[str], out: Path) -> dict[Path, bool]:
    """The folders of runs and sweeps, and whether each is being worked at."""
    observer = Observer()
    runs: list[Path] = []
    sweeps: list[Path] = []
    for word in words:
        kind, folder = _meant(word, out)
        (runs if kind == "runs" else sweeps).append(folder)
    if not words:
        runs = sorted(path.parent for path in out.glob("runs/*/wandb"))
        sweeps = sorted(path.parent for path in out.glob("sweeps/*/manifest.json"))
    found: dict[Path, bool] = {}
    for sweep in sweeps:
        busy, own = _of_sweep(sweep, with_runs=bool(words))
        found[sweep] = busy
        runs += own
    runs = [run for run in dict.fromkeys(runs) if run.is_dir()]
    unsure = [run for run in runs if not observer.judge(run).sure]
    if unsure:
        names = some([run.name for run in unsure], 3)
        tell(f"qkablate: waiting up to {SILENCE:.0f} s for a sign of life of who trains {names}")
    for run in unsure:
        observer.settle(run)
    return {run: observer.is_owned(run) for run in runs} | found


def _of_sweep(folder: Path, *, with_runs: bool) -> tuple[bool, list[Path]]:
    from qkablate.sweeps.planning import manifest
    from qkablate.sweeps.running.state import Standing

    standing = Standing(manifest.read(folder))
    if with_runs:
        standing.look()
    states = standing.states.values() if with_runs else ()
    return standing.is_run(), [state.folder for state in states]


def _meant(word: str, out: Path) -> tuple[str, Path]:
    files = {"sweeps": "manifest.json", "runs": "config.yaml"}
    folder = os.path.expanduser(word)  # these functions take any word, however odd
    for kind, file in files.items():
        if os.path.isfile(os.path.join(folder, file)):
            return kind, Path(folder)
    found, known = [], set[str]()
    for kind, file in files.items():
        names = sorted(path.parent.name for path in out.glob(f"{kind}/*/{file}"))
        known |= {part for name in names for part in (name, name.rpartition("-")[0])}
        if word and (match := meant(word, names, kind)):
            found.append((kind, out / kind / match))
    if len(found) > 1:
        raise UserError(f"'{word}' is a sweep ({found[0][1].name}) and a run; give the folder")
    if not found:
        raise UserError(f"there is no sweep or run '{word}' in '{out}'{nearest(word, known)}")
    return found[0]


def _plan(folders: dict[Path, bool]) -> Plan:
    from qkablate.tracking.wandb.offline_log import begun, logs, read, synced_mark

    plan = Plan()
    for folder, busy in folders.items():
        files = logs(folder)
        new = [file for file in files if not synced_mark(file).exists()]
        plan.there += len(files) - len(new)
        if busy:
            plan.busy += [folder.name] * bool(new)
            continue
        for file in new:
            try:
                log = read(file)
            except ValueError:
                plan.empty.append(file)
            except OSError as error:
                plan.bad[file] = error.strerror or str(error)
            else:
                if why := _strange(log, folder):
                    plan.bad[file] = why
                else:
                    plan.logs.append(log)
                    plan.folders[file] = folder
    plan.logs.sort(key=lambda log: begun(log.file))
    return plan


def _strange(log: Any, folder: Path) -> str:
    """Why a log is not sent: a stranger's could name any file here, and W&B would take it."""
    if log.strange:
        return printable(log.strange)
    own = [folder.resolve()]
    if place := os.environ.get("WANDB_DATA_DIR"):
        own.append(Path(place).resolve())
    for path in log.paths:
        whole = path.resolve()
        if whole.exists() and not any(whole.is_relative_to(root) for root in own):
            return printable(f"it wants to send '{path}', which is not the run's")
    logs = log.file.with_name("logs")  # of W&B's processes, with links of its own
    for path in log.file.parent.rglob("*"):
        if path.is_symlink() and path.parent != logs:
            return printable(f"'{path.name}' is a link, and would be written through")
    return ""


def _tell(plan: Plan) -> None:
    for name in plan.busy:
        tell(f"left for later: {name} is being trained")
    if plan.empty:
        number = counted(len(plan.empty), "log")
        tell(f"nothing can be read in {number}: killed in its first second, or damaged")
    for file, why in plan.bad.items():
        tell(f"not sent: {file}: {why}")
    for log in plan.logs:
        if missing := [path.name for path in log.paths if not path.exists()]:
            names = some(missing, 3)
            tell(f"without its files: {log.name}: {names} moved away, as by --rerun; its rows go")


def _list(plan: Plan, argv: list[str]) -> int:
    rows = []
    for log in plan.logs:
        size = log.file.stat().st_size + sum(p.stat().st_size for p in log.paths if p.is_file())
        where = str(plan.folders[log.file])
        rows.append([printable(log.name), printable(log.id), short_bytes(size), printable(where)])
    with suppress(BrokenPipeError):
        if rows:
            print_table(["run", "id", "size", "folder"], rows, 2)
            print()
        print(f"{counted(len(rows), 'log')} to send; {plan.there:,} sent before")
        if rows:
            next_commands(["sync", *(word for word in argv if word != "--dry-run")])
    return 1 if plan.bad else 0


def _send(plan: Plan, server: str) -> int:
    from tqdm import tqdm

    from qkablate.tracking.wandb.sync import send

    locks = _locked({folder.resolve().parent.parent for folder in plan.folders.values()})
    if locks is None:
        return 1
    total, told = len(plan.logs), 0
    bar = tqdm(total=total, desc="sending", unit=" logs", disable=not sys.stderr.isatty())

    def tick(done: int) -> None:
        nonlocal told
        bar.update(done - bar.n)
        if bar.disable and done - told >= max(1, total // _PARTS):
            told = done
            tell(f"sent {done} of {total}")

    try:
        with bar:
            outcome = send(plan.logs, server, locks, tick)
    except KeyboardInterrupt:
        tell("qkablate: stopped; the same command sends the rest")
        return 130
    finally:
        for lock in locks:
            os.close(lock)
    reasons: dict[str, list[str]] = {}
    for file, why in outcome.failed.items():
        reasons.setdefault(why, []).append(file.parent.parent.parent.name)
    for why, names in reasons.items():
        tell(f"qkablate: W&B: not sent: {some(names, 3)}: {why}; the same command tries again")
    with suppress(BrokenPipeError):
        print(f"{len(outcome.logs):,} of {counted(total, 'log')} sent")
        for link in _links(outcome.logs, outcome.links):
            print(f"  {link}")
    return 1 if outcome.failed or plan.bad else 0


def _links(logs: list[Any], links: dict[str, str]) -> Iterable[str]:
    """Of the runs, if they are few; else of sweeps and projects."""
    own = {log.id: links[log.id] for log in logs if log.id in links}
    if len(own) <= _MOST_LINKS:
        return own.values()
    of_sweeps = [link for id, link in own.items() if id.startswith("sweep-")]
    return [*of_sweeps, *dict.fromkeys(link.rpartition("/runs/")[0] for link in own.values())]


def _locked(places: Iterable[Path]) -> list[int] | None:
    """Two calls at once would send everything twice. The folders themselves are locked."""
    held = []
    for place in sorted(places):
        held.append(os.open(place, os.O_RDONLY))
        try:
            fcntl.flock(held[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            for one in held:
                os.close(one)
            tell(f"qkablate: another `qkablate sync` is at work in '{place}'")
            return None
        except OSError:
            pass  # a network file system that locks no folder
    return held


def words() -> list[str]:
    """What can be typed after `qkablate sync`."""
    runs = [path.parent.name for path in Path("outputs/runs").glob("*/wandb")]
    return [*sweep_names(), *runs, "--dry-run", "out="]

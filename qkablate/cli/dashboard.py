"""`qkablate dashboard`: the saved view of a sweep in W&B."""

import dataclasses
import json
import shlex
import sys

from qkablate.cli.arguments import Parser, find_sweep_and_out, out_words
from qkablate.config import TrackingConfig
from qkablate.disk import expand_user, write_atomic
from qkablate.errors import UserError, print_stderr, require_extra, sanitize
from qkablate.runs.records import read_json, write_json
from qkablate.runs.run import refuse_links
from qkablate.sweeps.planning.manifest import read_manifest
from qkablate.sweeps.running.state import SweepState
from qkablate.table import format_bytes, format_count, print_next_commands
from qkablate.tracking.wandb.mode import has_key, project_and_entity, resolve_mode
from qkablate.tracking.wandb.offline_log import find_logs, synced_mark
from qkablate.tracking.wandb.service import keep_files_in

FILE = "dashboard.json"
_STDOUT = "-"

HELP = f"""qkablate dashboard: the saved view of a sweep in W&B.

Usage: qkablate dashboard [SWEEP] [--entity NAME] [--project NAME]
                          [--spec [FILE]] [out=FOLDER]

SWEEP is a sweep's folder, or the beginning of its name or id; the default is
the newest sweep.

Examples
  qkablate dashboard                        save the newest sweep's view
  qkablate dashboard quick --entity team    in a team's project
  qkablate dashboard quick --spec           the view as JSON, without a network
  qkablate dashboard quick --spec view.json

The view shows the runs of the sweep only, grouped by variant (by arm and
learning rate where there are several per variant): losses over tokens with
bands over seeds, the gaps, verdicts and charts logged by the sweep's own run,
sizes, learning rates, circuits, attention and speed. The same command, given
again, updates the view and overwrites manual changes; to keep them, copy the
view in W&B's menu. The links of saved views are kept in {FILE}, in the
sweep's folder.

Flags
{{flags}}

Exit codes: 0 the view is saved or written · 2 it cannot be, or a mistake in the
command
"""


PARSER = Parser(HELP, ("sweep",), ("out=",))
default = "default: tracking.{0} of the sweep, WANDB_{1}, or "
PARSER.option("--entity", "NAME", default.format("entity", "ENTITY") + "the owner of the key")
PARSER.option("--project", "NAME", default.format("project", "PROJECT") + "qkablate")
PARSER.option(
    "--spec",
    "[FILE]",
    "write the view as JSON instead, to stdout or to a file that ends in .json; the run"
    " with the sweep's results is pinned only if the entity is known",
)


def main(argv: list[str]) -> int:
    """Save the view of a sweep, or write it as JSON."""
    args = PARSER.parse(_name_stdout(argv))
    folder, out = find_sweep_and_out(args.words)
    sweep_state = SweepState(read_manifest(folder))
    require_extra("dashboard", "wandb_workspaces")
    tracking = sweep_state.manifest.tracking
    project, entity = project_and_entity(
        dataclasses.replace(
            tracking,
            entity=args.entity or tracking.entity,
            project=args.project or tracking.project,
        )
    )
    if args.spec:
        sweep_state.refresh()
        _write(args.spec, sweep_state, entity or "", project)
        if args.spec != _STDOUT:
            named = {"--entity": args.entity, "--project": args.project}
            options = [word for pair in named.items() if pair[1] for word in pair]
            print_next_commands(["dashboard", *args.words, *options])
        return 0
    _check_online()
    refuse_links(folder)
    keep_files_in(folder.absolute() / "wandb")
    sweep_state.refresh()
    _save(sweep_state, entity, project, out)
    print_next_commands(["report", folder.name, *out_words(out)])
    return 0


def _name_stdout(argv: list[str]) -> list[str]:
    """Return the words with `--spec=-` for a `--spec` without a file."""
    return [
        f"--spec={_STDOUT}" if word == "--spec" and not following.endswith(".json") else word
        for word, following in zip(argv, [*argv[1:], ""], strict=False)
    ]


def _check_online() -> None:
    """Raise UserError unless W&B is online and there is a key."""
    if not has_key():
        raise UserError(
            "saving a view needs a key of W&B (`wandb login`, or WANDB_API_KEY); --spec FILE writes"
            " it without a key"
        )
    if (mode := resolve_mode(TrackingConfig())) != "online":
        raise UserError(
            f"WANDB_MODE is {mode}, and a view is saved online; --spec FILE writes it to a file"
        )


def _write(spec: str, sweep_state: SweepState, entity: str, project: str) -> None:
    from qkablate.dashboard.view import make_workspace, view_content

    text = json.dumps(view_content(make_workspace(sweep_state, entity, project)), indent=1) + "\n"
    if spec == _STDOUT:
        sys.stdout.write(text)
        return
    try:
        write_atomic(expand_user("--spec", spec), text)
    except OSError as error:
        raise UserError(f"--spec: '{spec}' cannot be written: {error.strerror}") from None
    print(sanitize(f"{spec}  {format_bytes(len(text.encode()))}"))


def _save(sweep_state: SweepState, entity: str | None, project: str, out: str) -> None:
    from qkablate.dashboard.view import connect, find_urls, make_workspace, mixes_arms, save_view

    app_url, owner = connect()
    entity = entity or owner
    if not entity:
        raise UserError("W&B does not say whose key this is; give --entity NAME")
    path = sweep_state.manifest.folder / FILE
    known = find_urls(read_json(path))
    saved = save_view(make_workspace(sweep_state, entity, project), app_url, known)
    workspace = saved.url.partition("?")[0]  # one view per project is kept
    kept = [saved.url, *(url for url in known if url.partition("?")[0] != workspace)]
    write_json(path, {"views": kept})
    print(sanitize(f"{'saved' if saved.is_new else 'updated'}  {saved.url}"))
    print(sanitize(f"shows  the runs of group {sweep_state.manifest.group} in {entity}/{project}"))
    if saved.lost:
        print_stderr(f"{saved.lost} is gone or cannot be read: a new view was saved")
    for line in _find_missing(sweep_state, out):
        print_stderr(line)
    if mixes_arms(sweep_state.manifest):
        print_stderr(
            "tracking.job_type is the same for all arms: means are per variant, not per arm"
        )


def _find_missing(sweep_state: SweepState, out: str) -> list[str]:
    """Return warnings about runs that were not uploaded to W&B."""
    manifest = sweep_state.manifest
    if manifest.tracking.wandb == "disabled":
        return ["tracking.wandb is disabled: W&B has no data of runs trained with it"]
    waiting = sum(
        not synced_mark(log).exists()
        for folder in (manifest.folder, *(state.folder for state in sweep_state.states.values()))
        for log in find_logs(folder)
    )
    if not waiting:
        return []
    command = shlex.join(["qkablate", "sync", manifest.folder.name, *out_words(out)])
    return [f"{format_count(waiting, 'log')} recorded offline and not uploaded yet: {command}"]

"""`qkablate dashboard`: the saved view of a sweep in W&B."""

import dataclasses
import json
import shlex
import sys
from pathlib import Path
from typing import Any

from qkablate.cli.hydra.configs import need_extra, next_commands, take_flags
from qkablate.cli.status import sweep_names, sweep_words
from qkablate.errors import UserError, printable, refuse_secrets, tell
from qkablate.table import counted, short_bytes

FILE = "dashboard.json"

HELP = f"""qkablate dashboard: the saved view of a sweep in W&B.

Usage: qkablate dashboard [SWEEP] [--entity NAME] [--project NAME] [--spec [FILE]] [out=FOLDER]

SWEEP is a sweep's folder, or how its name or id begins; unsaid, the newest one.

Examples
  qkablate dashboard                        the newest sweep: save its view, print the link
  qkablate dashboard quick --entity team    in a team's project
  qkablate dashboard quick --spec           the view as JSON: no server, no key, no network
  qkablate dashboard quick --spec view.json

It shows the runs of the sweep alone, grouped by variant (by arm and learning rate where a variant
stands more than once): losses by tokens with bands over seeds, the gaps, verdicts and pictures that
the sweep's own run holds, sizes, learning rates, circuits, attention, speed. The same command
again updates that view, and replaces what was changed in it by hand: W&B's menu makes a copy. Which
view it is stands in {FILE}, in the sweep's folder.

Flags
  --entity NAME    unsaid: track.entity of the sweep, WANDB_ENTITY, or whose key it is
  --project NAME   unsaid: track.project of the sweep, WANDB_PROJECT, or qkablate
  --spec [FILE]    write the view as JSON instead, to the screen or to a file that ends in .json;
                   the sweep's own run is pinned only where --entity or the like says in whose place

Exit codes: 0 it is saved or written · 2 it cannot be, or a mistake in the command
"""


def main(argv: list[str]) -> int:
    argv, spec = _take_spec(argv)
    flags, words = take_flags(argv, ("--help", "-h", "--spec"), ("--entity", "--project"))
    if {"--help", "-h"} & {*flags}:
        print(HELP, end="")
        return 0
    refuse_secrets(flags)
    word, out = sweep_words(words)

    from qkablate.runs.run import refuse_strangers
    from qkablate.sweeps.planning import manifest
    from qkablate.sweeps.running.state import Standing
    from qkablate.tracking.wandb.mode import place
    from qkablate.tracking.wandb.service import stay_within

    folder = manifest.find(word, out)
    standing = Standing(manifest.read(folder))
    need_extra("dashboard", "wandb_workspaces")
    track = standing.manifest.track
    project, entity = place(
        dataclasses.replace(
            track,
            entity=flags.get("--entity", track.entity),
            project=flags.get("--project", track.project),
        )
    )
    if spec is not None:
        standing.look()
        _write(spec, standing, entity or "", project)
        if spec:
            next_commands(["dashboard", *words, *_flags(flags)])
        return 0
    _check_online()
    refuse_strangers(folder)
    stay_within(folder.absolute() / "wandb")
    standing.look()
    _save(standing, entity, project, out)
    next_commands(["report", folder.name, *_where(out)])
    return 0


def _take_spec(argv: list[str]) -> tuple[list[str], str | None]:
    """The other words, and where to write; "" is the screen."""
    rest: list[str] = []
    spec = None
    words = list(argv)
    while words:
        word = words.pop(0)
        flag, equals, value = word.partition("=")
        if flag != "--spec":
            rest.append(word)
            continue
        if equals and not value:
            raise UserError("--spec: a file is missing after =")
        if not equals and words and words[0].endswith(".json"):
            value = words.pop(0)
        if spec not in (None, value):
            raise UserError("--spec is given twice")
        spec = value
    return rest, spec


def _where(out: str) -> list[str]:
    return [] if out == "outputs" else [f"out={out}"]


def _flags(flags: dict[str, str]) -> list[str]:
    return [word for pair in flags.items() for word in pair]


def _check_online() -> None:
    """UserError unless W&B may be asked, and would know us."""
    from qkablate.config import TrackConfig
    from qkablate.tracking.wandb.mode import has_key, resolve_mode

    if not has_key():
        raise UserError(
            "a view is saved at W&B, and that needs a key (`wandb login`, or WANDB_API_KEY);"
            " --spec FILE writes it without"
        )
    if (mode := resolve_mode(TrackConfig())) != "online":
        raise UserError(f"WANDB_MODE is {mode}, and a view is saved online; --spec FILE writes it")


def _write(spec: str, standing: Any, entity: str, project: str) -> None:
    from qkablate.dashboard.server import content
    from qkablate.dashboard.view import view
    from qkablate.runs.records import write_atomic

    text = json.dumps(content(view(standing, entity, project)), indent=1) + "\n"
    if not spec:
        sys.stdout.write(text)
        return
    try:
        write_atomic(Path(spec).expanduser(), text)
    except (OSError, RuntimeError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise UserError(f"--spec: '{spec}' cannot be written: {why}") from None
    print(printable(f"{spec}  {short_bytes(len(text.encode()))}"))


def _save(standing: Any, entity: str | None, project: str, out: str) -> None:
    from qkablate.dashboard.server import connect, save, urls
    from qkablate.dashboard.view import mixed, view
    from qkablate.runs.records import read_json, write_atomic

    server = connect()
    entity = entity or server.entity
    if not entity:
        raise UserError("W&B does not say whose key this is; give --entity NAME")
    path = standing.manifest.folder / FILE
    known = urls(read_json(path))
    saved = save(view(standing, entity, project), server.app_url, known)
    place = saved.url.partition("?")[0]  # one view for each: others are of other projects
    kept = [saved.url, *(url for url in known if url.partition("?")[0] != place)]
    write_atomic(path, json.dumps({"views": kept}, indent=1) + "\n")
    print(printable(f"{'saved' if saved.is_new else 'updated'}  {saved.url}"))
    print(printable(f"shows  the runs of group {standing.manifest.group} in {entity}/{project}"))
    if saved.lost:
        tell(f"{saved.lost} is gone or cannot be read: this is a new one")
    for line in _missing(standing, out):
        tell(line)
    if mixed(standing.manifest):
        tell("track.job_type is one for all arms: means are by variant, over more than seeds")


def _missing(standing: Any, out: str) -> list[str]:
    """What the view cannot show yet: runs that W&B has not been sent."""
    from qkablate.tracking.wandb.offline_log import logs, synced_mark

    manifest = standing.manifest
    if manifest.track.wandb == "disabled":
        return ["track.wandb is disabled: W&B knows nothing of the runs that were trained so"]
    waiting = sum(
        not synced_mark(log).exists()
        for folder in (manifest.folder, *(state.folder for state in standing.states.values()))
        for log in logs(folder)
    )
    if not waiting:
        return []
    command = shlex.join(["qkablate", "sync", manifest.folder.name, *_where(out)])
    return [f"{counted(waiting, 'log')} recorded offline and not sent yet: {command}"]


def words() -> list[str]:
    """What can be typed after `qkablate dashboard`."""
    return [*sweep_names(), "--entity", "--project", "--spec", "out="]

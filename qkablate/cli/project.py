"""`qkablate project`: a trained run put into another form and healed, so that a gap is split into
what the form cannot represent and what training does not find.
"""

import dataclasses
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qkablate.cli.hydra.configs import jobs, take_flags, take_out
from qkablate.cli.results import need_analysis
from qkablate.errors import UserError, tell
from qkablate.report.text.projection import tell_split
from qkablate.table import print_json

if TYPE_CHECKING:
    from qkablate.config import Config
    from qkablate.training.resolve import Plan
    from qkablate.training.warm_start.restore import Restored

HELP = """qkablate project: a trained run put into another form, and healed.

Usage: qkablate project RUN [RUN …] variant=NAME [heal.steps=200] [key=value …] [--json]

RUN is a run's folder, or how its name or its id begins. What is outside the two circuits is copied;
each layer's circuits are set from the trained ones as well as the form can hold them, heads in the
places where they lose least. Then two runs train, each in its folder: the projected model, and the
trained one as it is, for as many steps with the same settings and batches, which go on where RUN
stopped. The variant's own run from scratch is found if it is there. So a gap is split:

  at once       projected − trained
  healed        the same after healing: what the form cannot represent is no more than this
  from scratch  the variant's run − RUN
  training      from scratch − healed: what training does not find is no less than this

The rate of healing is 0.3 of RUN's (optim.lr), with a warm-up of a twentieth of the steps. From
scratch the variant trains at RUN's rate; where there are runs of it at other rates, all else alike,
the one with the lowest validation loss is taken. A variant that was tried at RUN's rate alone may
do better at another: then training is blamed for too much. Several RUNs are one arm with several
seeds: then each gap has its mean and its interval.

What RUN learned is looked for in your own cache, by its fingerprint. No path that stands in RUN's
folder is read: where the text is not prepared, give data.path (or data.name) yourself. W&B's keys,
threads and caches are yours, too, and not RUN's.

Keys
  variant=NAME       the form, or variant.qk=…, variant.ov=…, as in train
  heal.steps=200     steps of both runs
  optim.lr=RATE      and what else of train and optim is to be another than RUN's
  track.KEY=…        as in train; W&B's group is healed-… of RUN's arm, unless said
  data.cache=FOLDER  where RUN's data is prepared (default: where it is unless said)
  data.path=PATH     the text RUN has learned, where it is not prepared yet
  out=outputs        where runs/ lies

Examples
  qkablate project standard variant=no_q
  qkablate project standard variant=low_rank_w variant.rank=4 heal.steps=1000
  qkablate project standard-d128-h4-s0 standard-d128-h4-s1 standard-d128-h4-s2 variant=shared_qk

A run that was stopped or killed goes on when the same command is given again; what is done is not
done twice.

Exit codes: 0 · 1 a run failed, or another process owns it · 2 a mistake in the command ·
3 diverged · 128 + signal interrupted, as 130 by Ctrl-C (checkpoint written)
"""
KEYS = (
    *("variant=", "heal.steps=", "optim.lr=", "data.cache=", "data.path=", "out="),
    *("--json", "--help"),
)


@dataclasses.dataclass(frozen=True)
class Task:
    """One RUN: what is to be trained, and what it is compared with."""

    parent: "Restored"
    continued: "Plan"
    projected: "Plan"
    scratch: "Plan | None"  # None where RUN itself did not begin from fresh weights


def main(argv: list[str]) -> int:
    flags, words = take_flags(argv, ("--help", "-h", "--json"))
    if {"--help", "-h"} & {*flags}:
        print(HELP, end="")
        return 0
    runs, words, steps = parse(words)
    words, out = take_out(words)
    need_analysis()
    tasks = _planned(runs, words, steps, out)
    from qkablate.runs.run import EXIT_CODES

    for task in tasks:
        for plan in (task.continued, task.projected):
            status = _train(plan)
            if status != "done":
                return EXIT_CODES.get(status, 1)
    found = _described(tasks, words)
    with suppress(BrokenPipeError):
        if "--json" in flags:
            print_json(found)
        else:
            tell_split(found, out)
    return 0


def words() -> Iterator[str]:
    """What can be typed after `qkablate project`."""
    yield from (path.parent.name for path in sorted(Path("outputs/runs").glob("*/config.yaml")))
    yield from KEYS


def parse(words: list[str]) -> tuple[list[str], list[str], int]:
    """The runs, the words that belong to a run, and the steps of healing."""
    from qkablate.training.warm_start.finetune import STEPS

    runs, rest, steps = [], [], str(STEPS)
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or "/" in key:
            runs.append(word)
        elif key == "heal.steps":
            steps = value
        elif key == "heal" or key.startswith("heal."):
            raise UserError(f"{key}: there is no such key (nearest: heal.steps)")
        else:
            rest.append(word)
    form = "qkablate project RUN variant=NAME"
    if not runs:
        raise UserError(f"no run given: write {form}")
    if not any(word.partition("=")[0].partition(".")[0] == "variant" for word in rest):
        raise UserError(f"variant: into which form? write {form}")
    if not (steps.isascii() and steps.isdecimal() and 1 <= int(steps[:17]) <= 2**53):
        raise UserError(f"heal.steps: '{steps}' is not a whole number from 1")
    return runs, rest, int(steps)


def _planned(runs: list[str], words: list[str], steps: int, out: str) -> list[Task]:
    """Everything looked at before anything is trained."""
    from qkablate.config import StartConfig
    from qkablate.runs.run import find_run
    from qkablate.training.resolve import plan
    from qkablate.training.warm_start import finetune
    from qkablate.training.warm_start.start import parent_of

    given = [word.partition("=")[0].lstrip("+") for word in words]
    finetune.check_given(given)
    parents = []
    for run in runs:
        folder = str(find_run(run, out))
        parents.append(parent_of(StartConfig(run=folder), out))
    finetune.check_alike(parents)
    tasks = []
    for parent in parents:
        planned = jobs([*words, *finetune.composed(parent.config, given, steps), f"out={out}"])
        if len(planned) > 1:
            raise UserError(f"one form at a time, not {len(planned)}: give each key one value")
        wish = planned[0].config
        healed = [finetune.healed(parent, wish, given, own) for own in (False, True)]
        data = finetune.data_of(parent, healed[0], given)
        made = [plan(config, data=data) for config in healed]
        fresh = None
        if parent.config.start.run is None:
            fresh = plan(finetune.scratch(parent, wish, given), writes=False, data=data)
        tasks.append(Task(parent, made[0], made[1], fresh))
    return tasks


def _lost(task: Task) -> list[dict[str, Any]]:
    """What the projection loses, layer by layer."""
    from qkablate.training.environment import as_begun
    from qkablate.training.warm_start.start import lost_of

    plan, _ = as_begun(task.projected, processes=1)
    return [
        {"layer": layer, **dataclasses.asdict(lost), "heads": list(lost.heads)}
        for layer, lost in enumerate(lost_of(plan, task.parent.model))
    ]


def _train(planned: "Plan") -> str:
    """Train one run, or find it done; its status."""
    from qkablate.cli.train import settled
    from qkablate.runs.lease import Lost, Owned
    from qkablate.training.session import run
    from qkablate.training.signals import Stopped

    result = planned.run.result
    if result is not None and result["status"] != "failed":
        return str(result["status"])
    try:
        outcome = run(planned, observer=settled(planned.run.folder))
    except (Owned, Lost) as other:
        tell(f"qkablate: {other}")
        return "owned"
    except Stopped as stopped:
        raise SystemExit(stopped.exit_code) from None
    if outcome.signal:
        raise SystemExit(128 + outcome.signal)
    status = str(outcome.result["status"])
    if status != "done":
        said = outcome.result.get("error") or "the loss was not finite any more"
        tell(f"qkablate: {planned.run.folder.name}: {status}: {said}")
    return status


def _described(tasks: list[Task], words: list[str]) -> dict[str, Any]:
    from qkablate.analysis.comparison.projection_gap import means, split

    runs = []
    for task in tasks:
        scratch, told = _scratch(task.scratch, words)
        folders: dict[str, Any] = {
            "parent": task.parent.folder,
            "continued": task.continued.run.folder,
            "projected": task.projected.run.folder,
            "scratch": scratch,
        }
        names = {key: path and path.resolve().name for key, path in folders.items()}
        runs.append(
            {
                "seed": task.parent.config.seed,
                "folders": names,
                **told,
                "layers": _lost(task),
                **split(**folders),
            }
        )
    config = tasks[0].projected.config
    return {
        "variant": config.variant.name,
        "of": tasks[0].parent.config.variant.name,
        "steps": config.train.steps,
        "lr": config.optim.lr,
        "n": len(runs),
        "runs": runs,
        "mean": means(runs),
    }


def _scratch(fresh: "Plan | None", words: list[str]) -> tuple[Path | None, dict[str, Any]]:
    """The run from scratch, at the best of the rates that it was trained at, and what to say of it:
    where none is done, what becomes one.
    """
    from qkablate.analysis.comparison.projection_gap import at_rates
    from qkablate.training.warm_start.finetune import RATE

    told: dict[str, Any] = {"scratch_status": None, "scratch_lr": None, "scratch_lrs": []}
    if fresh is None:
        return None, told | {"scratch_command": None}
    folder, result, config = fresh.run.folder, fresh.run.result, fresh.config
    rates = at_rates(folder, fresh.identity)
    if rates:
        best = next(iter(rates))
        told |= {"scratch_status": "done", "scratch_lr": best, "scratch_lrs": sorted(rates)}
        return rates[best], told | {"scratch_command": None}
    if result is not None:
        told |= {"scratch_status": result["status"], "scratch_lr": config.optim.lr}
        if result["status"] == "diverged":  # as it would again
            lower = dataclasses.replace(config.optim, lr=float(f"{RATE * config.optim.lr:.6g}"))
            config = dataclasses.replace(config, optim=lower)
    command = _command(config, words)
    return None if result is None else folder, told | {"scratch_command": command}


def _command(config: "Config", words: list[str]) -> str:
    """What trains this run: the words for all that this machine would not settle so by itself."""
    import shlex

    from qkablate.config import flatten
    from qkablate.config.sweep import as_quoted
    from qkablate.training import hardware

    own = [word for word in words if word.partition("=")[0].partition(".")[0] == "variant"]
    sized = [f"model.{key}={value}".lower() for key, value in vars(config.model).items()]
    base = [f"data={config.data.source}", f"seed={config.seed}"]
    needed = {"data.path": config.data.path, "data.name": config.data.name}
    base += [f"{key}={as_quoted(value)}" for key, value in needed.items() if value is not None]
    (plain,) = jobs([*own, *base, *sized, f"train.steps={config.train.steps}"])
    settled = flatten(hardware.resolve(plain.config))
    differ = []
    for key, value in flatten(config).items():
        part = key.partition(".")[0]
        sized_apart = part == "model" and value != flatten(type(config)())[key]
        told = part not in ("track", "variant", "start", "threads", "diagnose")
        apart = told and value != settled[key]
        no_cooldown = key == "optim.cooldown" and config.optim.schedule != "wsd"
        if (apart or sized_apart or (key == "train.steps" and value != 1000)) and not no_cooldown:
            differ.append(f"{key}={as_quoted(value)}")
    return shlex.join(["qkablate", "train", *own, *base, *differ])

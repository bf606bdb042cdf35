"""`qkablate project`: convert a trained run to another variant and fine-tune it.

So the gap of the variant is split into what it cannot represent and what training does not find.
"""

import dataclasses
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qkablate.cli.arguments import Parser, convert_value, split_runs, take_out, whole_number
from qkablate.cli.conversions import has_several_variants, print_conversions
from qkablate.compose.configs import compose_jobs
from qkablate.compose.grid import split_engine_words
from qkablate.config import Config
from qkablate.errors import UserError, print_stderr
from qkablate.runs.lease import AlreadyRunning, LeaseLost
from qkablate.runs.lease_wait import observe_leases
from qkablate.runs.run import EXIT_CODES
from qkablate.table import print_json
from qkablate.training.signals import Stopped

if TYPE_CHECKING:
    from qkablate.training.resolve import RunPlan
    from qkablate.training.warm_start.decomposition import Decomposition

HELP = """qkablate project: convert a trained run to another variant and fine-tune it.

Usage: qkablate project RUN [RUN …] variant=NAME [finetune.steps=200]
                        [key=value …] [--json]
       qkablate project RUN [RUN …] variant=all|NAME,NAME… [--table]
                        [finetune.steps=200] [engine=…] [--dry-run] [--json]

RUN is a run's folder, or a unique beginning of its name or id. All weights
outside the two circuits are copied; the circuits of each layer are set to the
closest ones that the variant can represent, with the heads assigned so that the
error is smallest. Then two runs are trained, each in its own folder: the
projected model, and the trained model as it is, for the same number of steps,
with the same settings and the batches that follow those of RUN. The variant's
own run from scratch is used if it exists. So a gap is split:

  before        projected − trained, before fine-tuning
  finetuned     the same after fine-tuning: an upper bound of what the variant
                cannot represent
  from scratch  the variant's run − RUN
  training      from scratch − finetuned: a lower bound of what training does
                not find

The learning rate of fine-tuning is 0.3 of RUN's (optim.lr), with a warm-up of a
fifth of the steps (optim.warmup). From scratch the variant is trained at RUN's
rate; if there are runs at other rates, all else equal, the one with the lowest
validation loss is used. If there are none, another rate may be better, and
`training` is overestimated. Several RUNs are one arm with several seeds: each
gap then has its mean and its interval.

Several variants, or all, are a sweep of short runs: `status`, `results` and
`report` read it, it trains on any engine, and the table has a row for each
variant: its parameters, the errors of the projection (relative, root mean
square over layers), the validation loss before and after fine-tuning, and the
gap in test loss to the trained model, which is trained further for as long.
Variants that RUN cannot be projected to are named with the reason.

RUN's data is looked up in your own cache, by its fingerprint. Paths in RUN's
config are never opened: if the text is not prepared, give data.path (or
data.name).
The columns of pairs are RUN's, unless yours have other names: then give
data.source_field and data.target_field, too.
W&B's keys, threads and caches are yours, not RUN's.

Keys
  variant=NAME       the variant, or variant.qk=…, variant.ov=…, as in train
  finetune.steps=200 steps of both runs
  optim.lr=RATE      and other keys of train and optim that are to differ from
                     RUN's
  tracking.KEY=…     as in train; the default group in W&B is finetuned-… with
                     RUN's arm
  data.cache=FOLDER  where RUN's data is prepared (default: as in train)
  data.path=PATH     the text that RUN was trained on, if it is not prepared yet
  out=outputs        the folder that holds runs/
  engine=local       with --table or several variants: where to train, with
                     workers, runs_per_gpu, on_failure and engine.… as in sweep
  data=NAME          of an imported model: the data to fine-tune on (default:
                     stdlib), and all of data.*
  seed=range(3)      of an imported model: the seeds of its data's order

Flags
{flags}

Examples
  qkablate project standard variant=no_q
  qkablate project standard variant=low_rank_w variant.rank=4 finetune.steps=50
  qkablate project standard-d128-h4-s0 standard-d128-h4-s1 variant=shared_qk
  qkablate project standard variant=all --table
  qkablate project gpt2 variant=all finetune.steps=1 --dry-run

The same command, given again, resumes runs that were stopped or killed and
skips those that are done.

Exit codes: 0 done · 1 a run failed, or another process trains it · 2 a mistake
in the command · 3 diverged · 128 + signal interrupted, as 130 by Ctrl-C
(checkpoint written)
"""
KEYS = ("variant=", "finetune.steps=", "optim.lr=", "data.cache=", "data.path=", "out=", "engine=")
_USAGE = "qkablate project RUN variant=NAME"


PARSER = Parser(HELP, ("run",), KEYS)
PARSER.switch("--table", "train a sweep and print its table, also for one variant")
PARSER.switch("--dry-run", "of a sweep: show its runs, time and memory; train nothing")
PARSER.switch("--json", "print JSON")


def main(argv: list[str]) -> int:
    """Train what is missing, and print the parts of the gap."""
    args = PARSER.parse(argv)
    runs, overrides, steps = _parse_words(args.words)
    overrides, out = take_out(overrides, unpack=False)
    from qkablate.analysis.publication.archive import refuse_archives

    refuse_archives(out)
    if args.table or has_several_variants(overrides):
        return print_conversions(args, runs, overrides, steps, out)
    engine_words, _ = split_engine_words(overrides)
    if engine_words or args.dry_run:
        word = engine_words[0] if engine_words else "--dry-run"
        raise UserError(f"{word}: is for sweeps; add --table, or give several variants")
    from qkablate.training.warm_start.decomposition import plan_decompositions

    decompositions = plan_decompositions(runs, overrides, steps, out, _compose)
    for decomposition in decompositions:
        for plan in (decomposition.continued, decomposition.projected):
            status = _train_unless_done(plan)
            if status != "done":
                return EXIT_CODES.get(status, 1)
    result = _describe(decompositions, overrides)
    if args.json:
        print_json(result)
    else:
        from qkablate.report.text.projection import print_projection

        print_projection(result, out)
    return 0


def _parse_words(words: list[str]) -> tuple[list[str], list[str], int]:
    """Return the runs, the overrides, and the steps of fine-tuning."""
    from qkablate.training.warm_start.finetuning import DEFAULT_STEPS

    runs, pairs = split_runs(words)
    overrides, steps = [], DEFAULT_STEPS
    for pair in (pair.lstrip("+") for pair in pairs):
        key, _, value = pair.partition("=")
        if key == "finetune.steps":
            steps = convert_value(key, value, whole_number(1, 2**53))
        elif key.partition(".")[0] in ("finetune", "heal"):
            raise UserError(f"{key}: there is no such key (nearest: finetune.steps)")
        else:
            overrides.append(pair)
    if not runs:
        raise UserError(f"no run given: write {_USAGE}")
    if not any(word.partition("=")[0].partition(".")[0] == "variant" for word in overrides):
        raise UserError(f"variant: not given; write {_USAGE}")
    return runs, overrides, steps


def _compose(overrides: list[str]) -> Config:
    jobs = compose_jobs(overrides)
    if len(jobs) > 1:
        raise UserError(f"these are {len(jobs)} runs: give each key one value")
    return jobs[0].config


def _train_unless_done(plan: "RunPlan") -> str:
    """Train a run unless it is done, and return its status."""
    from qkablate.training.vmapped.program import train_planned

    result = plan.run.result
    if result is not None and result["status"] != "failed":
        return str(result["status"])
    try:
        outcome = train_planned(plan, observer=observe_leases([plan.run.folder]))
    except (AlreadyRunning, LeaseLost) as error:
        print_stderr(f"qkablate: {error}")
        return "failed"
    except Stopped as stopped:
        raise SystemExit(stopped.exit_code) from None
    if outcome.signal:
        raise SystemExit(128 + outcome.signal)
    status = str(outcome.result["status"])
    if status != "done":
        reason = outcome.result.get("error") or "the loss became non-finite"
        print_stderr(f"qkablate: {plan.run.folder.name}: {status}: {reason}")
    return status


def _describe(decompositions: list["Decomposition"], overrides: list[str]) -> dict[str, Any]:
    from qkablate.analysis.comparison.projection_gap import decompose_gap, mean_gaps

    runs, gaps = [], []
    for decomposition in decompositions:
        scratch, description = _find_scratch(decomposition, overrides)
        folders: dict[str, Any] = {
            "parent": decomposition.parent.folder,
            "continued": decomposition.continued.run.folder,
            "projected": decomposition.projected.run.folder,
            "scratch": scratch,
        }
        gaps.append(decompose_gap(**folders))
        runs.append(
            {
                "seed": decomposition.parent.config.seed,
                "folders": {key: path and path.resolve().name for key, path in folders.items()},
                **description,
                "layers": [
                    {"layer": layer, **dataclasses.asdict(loss), "heads": list(loss.heads)}
                    for layer, loss in decomposition.projection_errors()
                ],
                **vars(gaps[-1]),
            }
        )
    config = decompositions[0].projected.config
    return {
        "variant": config.variant.name,
        "of": decompositions[0].parent.config.variant.name,
        "steps": config.train.steps,
        "lr": config.optim.lr,
        "n": len(runs),
        "runs": runs,
        "mean": {
            part: {split: dataclasses.asdict(mean) for split, mean in by_split.items()}
            for part, by_split in mean_gaps(gaps).items()
        },
    }


def _find_scratch(
    decomposition: "Decomposition", overrides: list[str]
) -> tuple[Path | None, dict[str, Any]]:
    """Return the run from scratch and its description, or a command that trains it."""
    from qkablate.analysis.comparison.projection_gap import find_scratch_run
    from qkablate.training.warm_start.decomposition import scratch_overrides

    plan, parent = decomposition.scratch, decomposition.parent
    description: dict[str, Any] = {"scratch_status": None, "scratch_lr": None}
    description |= {"scratch_is_equally_tuned": True, "scratch_lrs": [], "scratch_command": None}
    if plan is None:
        return None, description
    folder, result = plan.run.folder, plan.run.result
    if best := find_scratch_run(folder, plan.identity, parent.folder, parent.identity):
        description |= {"scratch_status": "done", "scratch_lr": best.lr, "scratch_lrs": best.lrs}
        description["scratch_is_equally_tuned"] = best.is_equally_tuned
        return best.folder, description
    words = ["qkablate", "train", *scratch_overrides(plan, overrides, _compose)]
    description["scratch_command"] = shlex.join(words)
    if result is None:
        return None, description
    description |= {"scratch_status": result["status"], "scratch_lr": plan.config.optim.lr}
    return folder, description

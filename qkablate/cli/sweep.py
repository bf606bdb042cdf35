"""`qkablate sweep`: train a frozen grid of runs, on this machine or on a cluster."""

import textwrap

from qkablate.api.sweep import MANY, plan_sweep
from qkablate.cli.arguments import Parser, folder, one_of
from qkablate.cli.launch import run_and_print, show_plan
from qkablate.compose.configs import open_hydra
from qkablate.compose.grid import read_request
from qkablate.compose.words import refuse_repeated
from qkablate.config import conf_dir
from qkablate.errors import UserError

HELP = """qkablate sweep: train a grid of runs, frozen before the first one starts.

Usage: qkablate sweep [sweep=NAME] [control=none,params,flops]
                      [key=value,value …] [--flag …]

Keys are those of `qkablate train`; several values make an axis. The same
command, given again, resumes the sweep; runs that are done are not repeated.

Examples
  qkablate sweep sweep=quick               4 variants, 4 sizes, 3 seeds
  qkablate sweep sweep=quick --dry-run     its plan, and how long it takes here
  qkablate sweep sweep=quick variant=standard,merged_w 'seed=range(6)'
  qkablate sweep variant=standard,no_q 'seed=range(6)' control=none,params
  qkablate sweep variant=standard,merged_w 'seed=range(6)' sweep.tune=true
  qkablate sweep sweep=quick 'sweep.filter=["model.d_model//model.heads >= 32"]'
  qkablate status                          the progress, from another shell

Sweeps (sweep=…): files in conf/sweep, or in DIR/sweep with --config-dir DIR
{sweeps}

Controls: what is held equal (control=…)
  none      every arm keeps the size it is given
  params    the number of parameters of the baseline, without embeddings
  flops     the number of training FLOPs per token
  control.adjust=mlp       what is adjusted: mlp (its width), d_model, layers;
                           several in one sweep are written
                           control=params,params-d_model
  control.tolerance=0.01   largest mismatch; an arm beyond it is left out, with
                           the reason

Keys of a sweep
  sweep.baseline=standard  the variant that arms of the same size are compared
                           with; or a map of keys; or null
  sweep.filter=[…]         keep only the arms for which all of these are true
  sweep.floor=true         also train variant=uniform, which a baseline has to
                           beat before "no difference" can mean anything
  sweep.design=grid        or one_at_a_time: the first values of all axes, then
                           each other value with the rest at their first
  sweep.also={data: NAME}  train every arm once more with these settings
  sweep.tune=true          choose optim.lr and variant.lr for every arm on
                           validation, then train all seeds at the best rates
  sweep.tuning_seeds=[1000,1001,1002]
                           seeds of the runs that choose the rates
  sweep.share_prefix=true  with optim.schedule=wsd, runs that differ in length
                           begin at the longest one's checkpoints; same numbers
  sweep.name=NAME          the first part of the folder's name
  engine=local             where to train: local (here), slurm (job arrays),
                           ray; `engine.…` has the keys of each:
                           docs/clusters.md
  workers=auto             runs side by side; auto: one per GPU, or one per core
                           on a CPU; on a cluster as many as fit
  runs_per_gpu=1           runs that share a GPU, with workers=auto
  on_failure=continue      or stop

Flags
{flags}

Exit codes: 0 every run is done or has diverged · 1 some are not · 2 a mistake
in the command · 128 + signal interrupted, as 130 by Ctrl-C (checkpoints
written; twice: at once)
"""


def _describe_sweeps() -> str:
    files = sorted((conf_dir() / "sweep").glob("*.yaml"))
    first = {file.stem: file.read_text(encoding="utf-8").splitlines()[0] for file in files}
    lines = (f"  {name:<9} {line.removeprefix('# ')}" for name, line in first.items())
    return "\n".join(textwrap.fill(line, 80, subsequent_indent=" " * 12) for line in lines)


PARSER = Parser(HELP.replace("{sweeps}", _describe_sweeps()))
PARSER.switch("--dry-run", "show arms, runs, sizes, time and memory; train nothing")
PARSER.option("--config-dir", "DIR", "a folder with sweep/, variant/, data/ … of your own", folder)
PARSER.option("--retry", "failed", "train failed runs again, too", one_of(["failed"]))
PARSER.switch("--yes", f"confirm a grid of more than {MANY:,} runs")
PARSER.switch("--json", "with --dry-run: print the plan as JSON")


def main(argv: list[str]) -> int:
    """Plan the sweep, then show the plan or train its runs."""
    args = PARSER.parse(argv)
    if args.json and not args.dry_run:
        raise UserError("--json needs --dry-run; `qkablate status --json` shows a sweep")
    refuse_repeated(args.words)
    with open_hydra(args.config_dir):
        request = read_request(args.words)
        if request.count() > MANY and not args.yes:
            raise UserError(
                f"this grid has {request.count():,} runs, before anything is left out; add --yes to"
                " confirm"
            )
        own = [] if args.config_dir is None else ["--config-dir", args.config_dir]
        command = ["sweep", *own, *args.words, *["--yes"] * args.yes]
        manifest, slots = plan_sweep(request, command)
    if args.dry_run:
        return show_plan(manifest, slots, request, as_json=args.json)
    return run_and_print(manifest, slots, request, retry=args.retry is not None)

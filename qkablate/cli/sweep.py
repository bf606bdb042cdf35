"""`qkablate sweep`: a grid, frozen, trained on this machine or a cluster."""

import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from qkablate.cli.hydra.configs import next_commands, take_flags
from qkablate.cli.hydra.grid import Asked, composing
from qkablate.dashboard.sweep_run import shown
from qkablate.disk import make_folder
from qkablate.errors import UserError, tell
from qkablate.table import print_json

MANY = 10_000  # runs that are asked for again

HELP = """qkablate sweep: a whole grid of runs, frozen before the first one starts.

Usage: qkablate sweep [sweep=NAME] [control=none,params,flops] [key=value,value …] [--flag …]

Keys are those of `qkablate train`; several values make an axis. What the same command has done it
does not do again: it goes on.

Examples
  qkablate sweep sweep=quick                        4 variants × 2 widths × 2 head counts × 2 seeds
  qkablate sweep sweep=quick --dry-run              what that is, and how long it takes here
  qkablate sweep sweep=quick variant=standard,merged_w model.d_model=64,128 seed=range(6)
  qkablate sweep variant=standard,no_q seed=range(6) control=none,params
  qkablate sweep variant=standard,merged_w seed=range(6) sweep.tune=true
  qkablate sweep sweep=quick 'sweep.where=["model.d_model // model.heads >= 32"]'
  qkablate status                                   the same table from another shell

Sweeps (sweep=…), each a file in conf/sweep
{sweeps}

What is held equal (control=…)
  none      every arm at the size it is given
  params    as many parameters as the baseline, embeddings apart
  flops     as many training FLOPs per token
  control.knob=mlp         what pays: mlp (its width), d_model, layers
  control.tolerance=0.01   largest mismatch; an arm beyond it is left out, with the reason

Keys of a sweep
  sweep.baseline=standard  what an arm is compared with, at its size; or a map of keys; or null
  sweep.where=[…]          only the arms of which all of these are true
  sweep.tune=true          choose optim.lr for every arm on validation (sweep.tuning_seeds), then
                           run the seeds at the best
  sweep.name=NAME          how the sweep's folder begins
  engine=local             where: local (here), slurm (job arrays of a cluster), ray;
                           `engine.…` has the keys of each: docs/clusters.md
  workers=auto             runs side by side; auto: one per GPU, on a CPU one per core, on a
                           cluster all that it has room for
  per_gpu=1                runs that share a GPU, with workers=auto
  on_failure=continue      or stop

Flags
  --dry-run        show arms, runs, sizes, time and memory; train nothing
  --retry failed   train failed runs again, too
  --yes            yes, more than {many:,} runs
  --json           with --dry-run: the plan as JSON

Exit codes: 0 every run is done or has diverged · 1 some are not · 2 a mistake in the command ·
128 + signal interrupted, as 130 by Ctrl-C (checkpoints written; twice: at once)
"""


def main(argv: list[str]) -> int:
    alone = ("--help", "-h", "--dry-run", "--yes", "--json")
    flags, words = take_flags(argv, alone, ("--retry",))
    if {"--help", "-h"} & {*flags}:
        print(HELP.format(sweeps=_sweeps(), many=MANY), end="")
        return 0
    if flags.get("--retry", "failed") != "failed":
        raise UserError(f"--retry: takes failed, not '{flags['--retry']}'")
    if "--json" in flags and "--dry-run" not in flags:
        raise UserError("--json goes with --dry-run; `qkablate status --json` shows a sweep")
    with composing() as composer:
        asked = composer.ask(words)
        if asked.count() > MANY and "--yes" not in flags:
            raise UserError(
                f"this grid has {asked.count():,} runs, before anything is left out; add --yes if"
                " that is what you mean"
            )
        command = ["sweep", *words, *(["--yes"] if "--yes" in flags else [])]
        manifest, slots = expanded(asked, composer.config, command)
    if "--dry-run" in flags:
        return dry_run(manifest, slots, asked, as_json="--json" in flags)
    try:
        return launch(manifest, slots, asked, retry="--retry" in flags)
    except OSError as error:  # a full disk, say: what is on it stays
        tell(f"qkablate: {error}")
        return 1


def expanded(
    asked: Asked, compose: Callable[[dict[str, str]], Any], command: list[str]
) -> tuple[Any, list[str | None]]:
    """The manifest, and a slot for each run that can run at once."""
    from tqdm import tqdm

    from qkablate.sweeps.engines.factory import check, check_runs
    from qkablate.sweeps.planning.expand import Expansion, Grid
    from qkablate.sweeps.planning.packing import pack

    engine = asked.settings.engine
    check(engine)
    elsewhere = engine.name != "local"
    grid = Grid(asked.settings.sweep, asked.controls, asked.choices, elsewhere)
    with tqdm(
        desc="expanding", unit=" arms", leave=False, disable=not sys.stderr.isatty(), delay=0.5
    ) as bar:

        def note(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        manifest = Expansion(grid, compose, note).manifest(["qkablate", *command])
    _check_out(manifest.out)
    manifest, slots = pack(manifest, asked.settings)
    check_runs(engine, manifest)
    return manifest, slots


def _check_out(out: str) -> None:
    try:
        make_folder(Path(out).expanduser() / "sweeps")
    except OSError as error:
        raise UserError(f"out: cannot write in '{out}': {error.strerror}") from None


def dry_run(manifest: Any, slots: list[str | None], asked: Asked, *, as_json: bool) -> int:
    from qkablate.sweeps.planning import text
    from qkablate.sweeps.planning.estimate import estimate, is_here
    from qkablate.sweeps.running.state import Standing

    standing = Standing(manifest)
    standing.look()
    done = [id for id, state in standing.states.items() if state.status in ("done", "diverged")]
    engine = asked.settings.engine
    # On a cluster, this machine is one that people log in to: it times one run alone, if any.
    timed = slots if engine.name == "local" else slots[:1]
    estimated = estimate(manifest, timed) if is_here(manifest) else None
    if as_json:
        print_json(text.as_json(manifest, len(slots), estimated, done))
        return 0
    with suppress(BrokenPipeError):
        print("\n".join(text.lines(manifest, len(slots), estimated, done, engine)))
        next_commands(manifest.command[1:])
    return 0


def launch(manifest: Any, slots: list[str | None], asked: Asked, *, retry: bool) -> int:
    """Train what is not done, and tell how it ended."""
    from qkablate.sweeps.engines.factory import opened
    from qkablate.sweeps.planning import text
    from qkablate.sweeps.planning.manifest import freeze
    from qkablate.sweeps.running import summary
    from qkablate.sweeps.running.launcher import Launcher
    from qkablate.sweeps.running.progress_table import Board
    from qkablate.tracking.wandb.mode import resolve_mode

    wandb = resolve_mode(manifest.track) != "disabled"
    engine = asked.settings.engine
    plan = text.lines(manifest, len(slots), engine=engine)
    typed = asked.choices.get("threads", ["auto"]) != ["auto"]
    # On a cluster a run has the cores it asks for; one that has begun keeps its threads anyway.
    keep = not typed and engine.name == "local"
    manifest = freeze(manifest, plan, keep_threads=keep)
    board = Board()
    board.note(f"sweep    {manifest.folder}")
    for line in text.summary(manifest, len(slots), engine=engine):
        board.note(line)
    launcher = Launcher(
        manifest,
        opened(asked.settings, manifest, slots, wandb=wandb, note=board.note),
        board,
        retry_failed=retry,
        stop_on_failure=asked.settings.on_failure == "stop",
    )
    code = launcher.run()
    last = launcher.trained and not launcher.standing.is_run()
    address = None
    if last and wandb:
        more = shown(manifest.folder, board.note)
        address = summary.mirror(launcher.standing, board.note, more)
    with suppress(BrokenPipeError):
        _print_end(launcher, address)
    return code


def _print_end(launcher: Any, address: str | None) -> None:
    from qkablate.sweeps.running import summary
    from qkablate.tracking.wandb.run import OFFLINE

    print()
    summary.print_arms(launcher.standing)
    summary.print_failures(launcher.standing)
    manifest = launcher.manifest
    name = f"{manifest.name}-{manifest.id}"
    print(f"\nresults  {manifest.folder / 'results.csv'}")
    recorded = address == OFFLINE
    if address and not recorded:
        print(f"W&B      {address}")
    where = [] if manifest.out == "outputs" else [f"out={manifest.out}"]
    shown = ["results", "report"] if launcher.standing.counts()["done"] else ["status"]
    also = [[verb, name, *where] for verb in (*shown, *["sync"] * recorded)]
    next_commands(*summary.next_words(launcher.standing), *also)


def _sweeps() -> str:
    from qkablate.config import conf_dir

    files = sorted((conf_dir() / "sweep").glob("*.yaml"))
    first = {file.stem: file.read_text(encoding="utf-8").splitlines()[0] for file in files}
    return "\n".join(f"  {name:<9} {line.removeprefix('# ')}" for name, line in first.items())

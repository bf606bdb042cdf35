"""Show the plan and the outcome of a sweep: for `qkablate sweep` and `qkablate claim run`."""

import sys
from contextlib import suppress

from qkablate.api.sweep import SweepOutcome, run_sweep
from qkablate.cli.arguments import out_words
from qkablate.compose.grid import SweepRequest
from qkablate.errors import print_stderr
from qkablate.screen import find_screen
from qkablate.sweeps.planning.manifest import Manifest
from qkablate.sweeps.running import results
from qkablate.sweeps.running.state import SweepState
from qkablate.table import print_json, print_next_commands, print_text
from qkablate.tracking.wandb.run import OFFLINE


def show_plan(
    manifest: Manifest, slots: list[str | None], request: SweepRequest, *, as_json: bool
) -> int:
    """Print the plan of a sweep with its estimated time, and return the exit code."""
    from qkablate.sweeps.planning import text
    from qkablate.sweeps.planning.estimate import NotTimedError, estimate_arms

    sweep_state = SweepState(manifest)
    sweep_state.refresh()
    ended = ("done", "diverged")
    done = {id: s.run.arm for id, s in sweep_state.states.items() if s.status in ended}
    engine = request.settings.engine
    # On a cluster this is the login node: at most one run is timed here.
    timed = slots if engine.name == "local" else slots[:1]
    estimated, reason = None, ""
    try:
        estimated = estimate_arms(manifest, timed)
    except NotTimedError as error:
        reason = str(error)
    share = request.settings.sweep.share_prefix
    count = len(slots)
    if as_json:
        print_json(text.plan_to_json(manifest, count, estimated, done, share_prefix=share))
        return 0
    screen = find_screen(sys.stdout)
    lines = text.format_plan(
        manifest, count, estimated, done, engine, share_prefix=share, screen=screen
    )
    print("\n".join(lines))
    if reason:
        print_text(f"cost     not estimated: {reason}", " " * 9)
    print_next_commands(manifest.command[1:])
    return 0


def run_and_print(
    manifest: Manifest, slots: list[str | None], request: SweepRequest, *, retry: bool
) -> int:
    """Train the runs that are not done, print the outcome, and return the exit code."""
    try:
        outcome = run_sweep(manifest, slots, request, retry=retry)
    except OSError as error:  # as of a full disk; what is written so far stays
        print_stderr(f"qkablate: {error}")
        return 1
    with suppress(BrokenPipeError):
        _print_outcome(outcome)
    return outcome.code


def _print_outcome(outcome: SweepOutcome) -> None:
    manifest, sweep_state, address = outcome.manifest, outcome.sweep_state, outcome.wandb
    print()
    results.print_arms(sweep_state)
    results.print_failures(sweep_state)
    name = f"{manifest.name}-{manifest.id}"
    print(f"\nresults  {manifest.folder / 'results.csv'}")
    is_offline = address == OFFLINE
    if address and not is_offline:
        print(f"W&B      {address}")
    verbs = ["results", "report"] if sweep_state.status_counts()["done"] else ["status"]
    also = [[verb, name, *out_words(manifest.out)] for verb in (*verbs, *["sync"] * is_offline)]
    print_next_commands(*results.resume_commands(sweep_state), *also)

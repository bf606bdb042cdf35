"""Plan, show and run a sweep: for `qkablate sweep` and `qkablate claim run`."""

import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from qkablate.cli.arguments import out_words
from qkablate.cli.hydra.configs import make_config
from qkablate.cli.hydra.grid import SweepRequest
from qkablate.dashboard.sweep_run import make_sweep_tables
from qkablate.disk import make_folder
from qkablate.errors import UserError, print_stderr
from qkablate.runs.lease import TIMEOUT, LeaseObserver
from qkablate.screen import find_screen
from qkablate.sweeps.engines.factory import check_engine, check_resources, open_engine
from qkablate.sweeps.planning.manifest import Manifest, freeze
from qkablate.sweeps.running import results
from qkablate.sweeps.running.progress_table import ProgressTable
from qkablate.sweeps.running.state import SweepState
from qkablate.table import format_list, print_json, print_next_commands, print_text
from qkablate.tracking.wandb.mode import resolve_mode
from qkablate.tracking.wandb.run import OFFLINE

if TYPE_CHECKING:
    from qkablate.sweeps.running.launcher import Launcher


def observe_leases(folders: list[Path]) -> LeaseObserver:
    """Return an observer that knows whether these runs are being trained.

    A lease of another machine, or from before a reboot, can only be judged by its heartbeat.
    """
    observer = LeaseObserver()
    unsure = [folder for folder in folders if not observer.observe(folder).sure]
    if unsure:
        holder = observer.observe(unsure[0]).holder if len(unsure) == 1 else "other processes"
        names = format_list([folder.name for folder in unsure], 3)
        print_stderr(
            f"qkablate: waiting up to {TIMEOUT:.0f} s for a heartbeat of {holder} ({names})"
        )
    for folder in unsure:
        observer.wait_until_sure(folder)
    return observer


def plan_sweep(request: SweepRequest, command: list[str]) -> tuple[Manifest, list[str | None]]:
    """Return the manifest, and a slot for every run that can run at once."""
    from tqdm import tqdm

    from qkablate.sweeps.planning.expand import Grid, expand_grid
    from qkablate.sweeps.planning.packing import pack

    engine = request.settings.engine
    check_engine(engine)
    is_remote = engine.name != "local"
    grid = Grid(request.settings.sweep, request.controls, request.choices, is_remote)
    with tqdm(desc="expanding", unit=" arms", leave=False, disable=None, delay=0.5) as bar:

        def note(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        manifest = expand_grid(grid, make_config, ["qkablate", *command], note)
    try:
        make_folder(Path(manifest.out).expanduser() / "sweeps")
    except OSError as error:
        raise UserError(f"out: cannot write in '{manifest.out}': {error.strerror}") from None
    manifest, slots = pack(manifest, request.settings)
    check_resources(engine, manifest)
    return manifest, slots


def show_plan(
    manifest: Manifest, slots: list[str | None], request: SweepRequest, *, as_json: bool
) -> int:
    """Print the plan of a sweep with its estimated time, and return the exit code."""
    from qkablate.sweeps.planning import text
    from qkablate.sweeps.planning.estimate import NotTimedError, estimate_arms

    sweep_state = SweepState(manifest)
    sweep_state.refresh()
    done = [id for id, state in sweep_state.states.items() if state.status in ("done", "diverged")]
    engine = request.settings.engine
    # On a cluster this is the login node: at most one run is timed here.
    timed = slots if engine.name == "local" else slots[:1]
    estimated, reason = None, ""
    try:
        estimated = estimate_arms(manifest, timed)
    except NotTimedError as error:
        reason = str(error)
    if as_json:
        print_json(text.plan_to_json(manifest, len(slots), estimated, done))
        return 0
    screen = find_screen(sys.stdout)
    lines = text.format_plan(manifest, len(slots), estimated, done, engine, screen=screen)
    print("\n".join(lines))
    if reason:
        print_text(f"cost     not estimated: {reason}", " " * 9)
    print_next_commands(manifest.command[1:])
    return 0


def run_sweep(
    manifest: Manifest, slots: list[str | None], request: SweepRequest, *, retry: bool
) -> int:
    """Train the runs that are not done, print the outcome, and return the exit code."""
    from qkablate.sweeps.planning import text
    from qkablate.sweeps.running.launcher import Launcher

    wandb = resolve_mode(manifest.tracking) != "disabled"
    engine = request.settings.engine
    plan = text.format_plan(manifest, len(slots), engine=engine)
    has_threads = request.choices.get("threads", ["auto"]) != ["auto"]
    # On a cluster a run gets the cores it asks for; a run that is resumed keeps its threads anyway.
    keep_threads = not has_threads and engine.name == "local"
    manifest = freeze(manifest, plan, keep_threads=keep_threads)
    table = ProgressTable()
    summary = text.format_plan(manifest, len(slots), engine=engine, is_summary=True)
    for line in (f"sweep    {manifest.folder}", *summary):
        table.note(line)
    launcher = Launcher(
        manifest,
        open_engine(request.settings, manifest, slots, wandb=wandb, note=table.note),
        table,
        retry_failed=retry,
        stop_on_failure=request.settings.on_failure == "stop",
    )
    code = launcher.run()
    is_last = launcher.trained and not launcher.sweep_state.is_running()
    address = None
    if is_last and wandb:
        tables = make_sweep_tables(manifest.folder, table.note)
        address = results.log_summary(launcher.sweep_state, table.note, tables)
    with suppress(BrokenPipeError):
        _print_outcome(launcher, address)
    return code


def _print_outcome(launcher: "Launcher", address: str | None) -> None:
    print()
    results.print_arms(launcher.sweep_state)
    results.print_failures(launcher.sweep_state)
    manifest = launcher.manifest
    name = f"{manifest.name}-{manifest.id}"
    print(f"\nresults  {manifest.folder / 'results.csv'}")
    is_offline = address == OFFLINE
    if address and not is_offline:
        print(f"W&B      {address}")
    verbs = ["results", "report"] if launcher.sweep_state.status_counts()["done"] else ["status"]
    also = [[verb, name, *out_words(manifest.out)] for verb in (*verbs, *["sync"] * is_offline)]
    print_next_commands(*results.resume_commands(launcher.sweep_state), *also)

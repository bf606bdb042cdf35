"""`qkablate status`: the progress of a sweep."""

import sys
import time
from contextlib import suppress
from pathlib import Path

from qkablate.cli.arguments import Parser, find_sweep_and_out, out_words
from qkablate.errors import UserError, print_stderr, sanitize
from qkablate.runs.lease import LeaseObserver
from qkablate.runs.run import NoMatch
from qkablate.screen import find_screen
from qkablate.sweeps.planning.manifest import read_manifest
from qkablate.sweeps.running.progress_table import UNLIMITED, ProgressTable, render_table
from qkablate.sweeps.running.results import (
    describe_missing_runs,
    print_arms,
    result_rows,
    resume_commands,
)
from qkablate.sweeps.running.state import SweepState
from qkablate.table import print_csv, print_json, print_next_commands, print_text

HELP = """qkablate status: the progress of a sweep, read from the folders of its runs.

Usage: qkablate status [SWEEP] [--watch | --json | --csv] [out=FOLDER]

SWEEP is a sweep's folder, or the beginning of its name or id; the default is
the newest sweep.

Examples
  qkablate status                     the newest sweep
  qkablate status quick --watch       until it ends, or Ctrl-C
  qkablate status quick --json        counts, and every run with its state
  qkablate status quick --csv         one row per run

Flags
{flags}

Exit codes: 0 every run is done or has diverged · 1 some are not · 2 a mistake
in the command
"""
_INTERVAL = 2.0  # seconds between two updates of --watch


PARSER = Parser(HELP, ("sweep",), ("out=",))
PARSER.switch(
    "--watch",
    "update every two seconds while any run is being trained; on a terminal it waits for a sweep"
    " that has not started",
)
PARSER.switch("--json", "print JSON")
PARSER.switch("--csv", "print CSV")


def main(argv: list[str]) -> int:
    """Print the progress of a sweep."""
    args = PARSER.parse(argv)
    modes = [f"--{name}" for name in ("csv", "json", "watch") if getattr(args, name)]
    if len(modes) > 1:
        raise UserError(f"{' and '.join(modes)}: give one of them")
    if args.watch and sys.stderr.isatty():
        _wait_until_active(args.words)
    folder, out = find_sweep_and_out(args.words)
    sweep_state = SweepState(read_manifest(folder), LeaseObserver(by_file_times=True))
    sweep_state.refresh()
    if args.watch:
        table = ProgressTable()
        if not sys.stderr.isatty() and _is_active(sweep_state):
            print("\n".join(render_table(sweep_state)), flush=True)
        table.show(sweep_state)
        while _is_active(sweep_state):
            time.sleep(_INTERVAL)
            sweep_state.refresh()
            table.show(sweep_state)
    counts = sweep_state.status_counts()
    is_finished = sweep_state.is_finished()
    with suppress(BrokenPipeError):
        if args.json:
            print_json(
                {
                    "sweep": folder.name,
                    "folder": str(folder),
                    "runs": sweep_state.expected_runs(),
                    **counts,
                    "seconds_left": sweep_state.seconds_left(),
                    "states": result_rows(sweep_state),
                }
            )
        elif args.csv:
            print_csv(result_rows(sweep_state))
        elif not args.watch or not sys.stderr.isatty():
            screen = find_screen(sys.stdout)
            lines = render_table(sweep_state, screen.width + 1 if screen.width else UNLIMITED)
            print("\n".join(map(screen.paint_words, lines)))
            if missing := describe_missing_runs(sweep_state):
                print_text(sanitize(f"  {missing}"))
            is_running = sweep_state.is_running() and not sweep_state.is_finished()
            if is_running and not counts["running"]:
                print("  its launcher is starting or waiting for runs")
            if counts["done"]:
                print()
                print_arms(sweep_state)
                if (written := folder / "results.csv").exists():  # archives have none
                    print(f"\nresults  {written}")
            if is_running:  # a second launcher would only share the work
                commands = [["status", folder.name, "--watch", *out_words(out)]]
            else:
                commands = resume_commands(sweep_state)
            if counts["done"]:
                commands.append(["results", folder.name, *out_words(out)])
            if commands:
                print_next_commands(*commands)
        sys.stdout.flush()
    return 0 if is_finished else 1


def _is_active(sweep_state: SweepState) -> bool:
    return sweep_state.status_counts()["running"] > 0 or sweep_state.is_running()


def _wait_until_active(words: list[str]) -> None:
    """Wait until the sweep is being trained, and say so; a finished one named in full is shown."""
    said = ""
    while True:
        try:
            folder, _ = find_sweep_and_out(words)
        except NoMatch as error:
            reason = str(error)
        else:
            sweep_state = SweepState(read_manifest(folder), LeaseObserver(by_file_times=True))
            sweep_state.refresh()
            is_named = any(Path(word).name == folder.name for word in words)
            if _is_active(sweep_state) or (is_named and sweep_state.is_finished()):
                return
            reason = f"{folder.name} is {'finished' if sweep_state.is_finished() else 'stopped'}"
        if reason != said:
            print_stderr(f"qkablate: {reason}; waiting for a sweep to start (Ctrl-C ends this)")
            said = reason
        time.sleep(_INTERVAL)

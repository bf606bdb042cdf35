"""`qkablate status`: where a sweep stands, from any shell, at any time."""

import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from qkablate.cli.hydra.configs import next_commands, take_flags, take_out
from qkablate.errors import UserError
from qkablate.table import print_csv, print_json

HELP = """qkablate status: where a sweep stands, read from its runs' folders.

Usage: qkablate status [SWEEP] [--watch | --json | --csv] [out=FOLDER]

SWEEP is a sweep's folder, or how its name or id begins; unsaid, the newest one.

Examples
  qkablate status                     the newest sweep
  qkablate status quick --watch       until it ends, or Ctrl-C
  qkablate status quick --json        counts, and every run with its state
  qkablate status quick --csv         a row a run, rebuilt from the runs now

Flags
  --watch   draw it again every two seconds, while anything runs
  --json, --csv

Exit codes: 0 every run is done or has diverged · 1 some are not · 2 a mistake in the command
"""
_EVERY = 2.0


def main(argv: list[str]) -> int:
    flags, words = take_flags(argv, ("--help", "-h", "--watch", "--json", "--csv"))
    if {"--help", "-h"} & {*flags}:
        print(HELP, end="")
        return 0
    if len(flags) > 1:
        raise UserError(f"{' and '.join(sorted(flags))}: give one of the two")
    word, out = sweep_words(words)

    from qkablate.sweeps.planning import manifest
    from qkablate.sweeps.running.progress_table import Board, picture
    from qkablate.sweeps.running.results_table import rows
    from qkablate.sweeps.running.state import Standing
    from qkablate.sweeps.running.summary import next_words, print_arms

    folder = manifest.find(word, out)
    standing = Standing(manifest.read(folder))
    standing.look()
    if "--watch" in flags:
        board = Board()
        if not sys.stderr.isatty() and (standing.counts()["running"] or standing.is_run()):
            print("\n".join(picture(standing)), flush=True)
        while True:
            board.show(standing)
            if not standing.counts()["running"] and not standing.is_run():
                break
            time.sleep(_EVERY)
            standing.look()
    counts = standing.counts()
    finished = counts["done"] + counts["diverged"] == standing.expected()
    with suppress(BrokenPipeError):
        if "--json" in flags:
            print_json(
                {
                    "sweep": folder.name,
                    "folder": str(folder),
                    "runs": standing.expected(),
                    **{status: counts[status] for status in counts},
                    "seconds_left": standing.seconds_left(),
                    "states": rows(standing),
                }
            )
        elif "--csv" in flags:
            print_csv(rows(standing))
        elif "--watch" not in flags or not sys.stderr.isatty():
            print("\n".join(picture(standing)))
            if counts["done"]:
                print()
                print_arms(standing)
                print(f"\nresults  {folder / 'results.csv'}")
            commands = next_words(standing)
            if counts["done"]:
                where = [] if out == "outputs" else [f"out={out}"]
                commands.append(["results", folder.name, *where])
            if commands:
                next_commands(*commands)
        sys.stdout.flush()
    return 0 if finished else 1


def sweep_words(words: list[str]) -> tuple[str | None, str]:
    """The sweep that is named, if one is, and where to look for it."""
    words, out = take_out(words)
    if len(words) > 1:
        raise UserError(f"'{words[1]}': one sweep at a time, and '{words[0]}' was given")
    return (words[0] if words else None), out


def sweep_names() -> list[str]:
    return [path.name for path in Path("outputs/sweeps").glob("*-*")]


def words() -> Iterable[str]:
    """What can be typed after `qkablate status`."""
    return [*sweep_names(), "--watch", "--json", "--csv", "out="]

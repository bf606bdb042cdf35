"""`qkablate compare`: two runs side by side."""

from contextlib import suppress
from pathlib import Path
from typing import Any

from qkablate.cli.hydra.configs import next_commands, take_flags, take_out
from qkablate.cli.results import need_analysis
from qkablate.errors import UserError, printable
from qkablate.table import print_json, print_table, short

HELP = """qkablate compare: two runs side by side, for a quick look.

Usage: qkablate compare RUN RUN [--json] [out=FOLDER]

RUN is a run's folder, or how its name or its id begins. The gap is the first one's loss minus the
second one's. One pair is a number: `qkablate sweep` and `qkablate results` say what it is worth.

Examples
  qkablate compare merged_w standard
  qkablate compare merged_w-d128-h4-s0 standard-d128-h4-s0 --json

Exit codes: 0 · 2 a mistake in the command
"""


def main(argv: list[str]) -> int:
    flags, words = take_flags(argv, ("--help", "-h", "--json"))
    if {"--help", "-h"} & {*flags}:
        print(HELP, end="")
        return 0
    words, out = take_out(words)
    if len(words) != 2:
        raise UserError(f"give two runs, not {len(words)}: qkablate compare RUN RUN")
    need_analysis()

    from qkablate.analysis.comparison.two_runs import duel
    from qkablate.runs.run import find_run

    found = duel(*(find_run(word, out) for word in words))
    with suppress(BrokenPipeError):
        if "--json" in flags:
            print_json(found)
        else:
            _print(found)
    return 0


def _print(found: dict[str, Any]) -> None:
    rows = [["status", *found["status"], ""]]
    for split, losses in found["loss"].items():
        gap = found["gap"].get(split)
        told = "" if gap is None else f"{gap:+.4f} ({found['perplexity_percent'][split]:+.2f} %)"
        rows.append([f"{split} loss", *map(_loss, losses), told])
    for key, what in (("params", "parameters"), ("flops_per_token", "FLOPs/token")):
        one, other = found[key]
        ratio = f"× {one / other:.3f}" if _is_number(one) and _is_number(other) and other else ""
        rows.append([what, *(short(v) if _is_number(v) else "–" for v in (one, other)), ratio])
    head = ["", *found["runs"], "gap"]
    print_table(head, [[*map(printable, row)] for row in rows])
    if found["val_gap"]:
        told = "  ".join(f"{short(row['tokens'])}: {row['gap']:+.4f}" for row in found["val_gap"])
        print(f"\nvalidation gap by tokens  {told}")
    for title, differing in (("they differ in", found["differ"]), ("and in", found["unlike"])):
        for key, (one, other) in differing.items():
            print(printable(f"{title:<15} {key}: {one} · {other}"))
    if not found["paired"]:
        print("\nno pair: other seeds, or other data; the gap is between more than two arms")
    print("\none pair is a number, and no verdict; a sweep over seeds makes a comparison")
    next_commands(["sweep", "--help"])


def words() -> list[str]:
    """What can be typed after `qkablate compare`."""
    return [*(path.parent.name for path in Path("outputs/runs").glob("*/config.yaml")), "--json"]


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def _loss(value: Any) -> str:
    return f"{value:.4f}" if _is_number(value) else "–"

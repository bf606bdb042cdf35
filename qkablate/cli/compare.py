"""`qkablate compare`: two runs side by side."""

import dataclasses
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from qkablate.cli.arguments import Parser, take_out
from qkablate.errors import UserError, sanitize
from qkablate.table import format_short, print_json, print_next_commands, print_table

if TYPE_CHECKING:
    from qkablate.analysis.comparison.two_runs import RunComparison

HELP = """qkablate compare: two runs side by side, for a quick look.

Usage: qkablate compare RUN RUN [--json] [out=FOLDER]

RUN is a run's folder, or the beginning of its name or id. The gap is the loss of the first run
minus that of the second. A single pair has no interval: `qkablate sweep` and `qkablate results`
compare over several seeds.

Examples
  qkablate compare merged_w standard
  qkablate compare merged_w-d128-h4-s0 standard-d128-h4-s0 --json

Flags
{flags}

Exit codes: 0 · 2 a mistake in the command
"""


PARSER = Parser(HELP, ("run",), ("out=",))
PARSER.switch("--json", "print JSON")


def main(argv: list[str]) -> int:
    """Print two runs side by side."""
    args = PARSER.parse(argv)
    words, out = take_out(args.words)
    if len(words) != 2:
        raise UserError(f"give two runs, not {len(words)}: qkablate compare RUN RUN")

    from qkablate.analysis.comparison.two_runs import compare_runs
    from qkablate.runs.run import find_run

    found = compare_runs(*(find_run(word, out) for word in words))
    with suppress(BrokenPipeError):
        if args.json:
            print_json(dataclasses.asdict(found))
        else:
            _print(found)
    return 0


def _print(found: "RunComparison") -> None:
    rows = [["status", *found.status, ""]]
    for split, losses in found.loss.items():
        gap = found.gap.get(split)
        told = "" if gap is None else f"{gap:+.4f} ({found.perplexity_percent[split]:+.2f} %)"
        rows.append([f"{split} loss", *map(_loss, losses), told])
    for key, what in (("params", "parameters"), ("flops_per_token", "FLOPs/token")):
        one, other = getattr(found, key)
        ratio = f"× {one / other:.3f}" if _is_number(one) and _is_number(other) and other else ""
        rows.append([what, *(format_short(v) if _is_number(v) else "–" for v in (one, other)), ratio])
    head = ["", *found.runs, "gap"]
    print_table(head, [[*map(sanitize, row)] for row in rows])
    if found.val_gap:
        told = "  ".join(f"{format_short(row.tokens)}: {row.gap:+.4f}" for row in found.val_gap)
        print(f"\nvalidation gap by tokens  {told}")
    for title, differing in (("they differ in", found.differ), ("and in", found.unlike)):
        for key, (one, other) in differing.items():
            print(sanitize(f"{title:<15} {key}: {one} · {other}"))
    if not found.paired:
        print("\nno pair: other seeds, or other data; the gap is between more than two arms")
    print("\none pair is a number, and no verdict; a sweep over seeds makes a comparison")
    print_next_commands(["sweep", "--help"])


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def _loss(value: Any) -> str:
    return f"{value:.4f}" if _is_number(value) else "–"

"""`qkablate compare`: two runs side by side."""

import dataclasses
from typing import TYPE_CHECKING

from qkablate.cli.arguments import Parser, take_out
from qkablate.config import variants
from qkablate.errors import UserError, sanitize
from qkablate.report.text.table import format_known
from qkablate.runs.records import is_number
from qkablate.table import (
    format_short,
    print_json,
    print_next_commands,
    print_table,
    print_text,
)

if TYPE_CHECKING:
    from qkablate.analysis.comparison.two_runs import RunComparison

HELP = """qkablate compare: two runs side by side, for a quick look.

Usage: qkablate compare RUN RUN [--json] [out=FOLDER]

RUN is a run's folder, or the beginning of its name or id. Where a word matches
several runs, the newest two are taken that were trained alike: same model,
data, steps and seed. The gap is the loss of the first run minus that of the
second. A single pair has no interval: `qkablate sweep` and `qkablate results`
compare over several seeds.

Examples
  qkablate compare merged_w standard
  qkablate compare merged_w-d128-h4-s0 standard-d128-h4-s0 --json

Flags
{flags}

Exit codes: 0 the comparison is printed · 2 a mistake in the command
"""


PARSER = Parser(HELP, ("run",), ("out=",))
PARSER.switch("--json", "print JSON")


def main(argv: list[str]) -> int:
    """Print two runs side by side."""
    args = PARSER.parse(argv)
    words, out = take_out(args.words)
    if len(words) != 2:
        raise UserError(f"give two runs, not {len(words)}: qkablate compare RUN RUN")

    from qkablate.analysis.comparison.two_runs import compare_runs, find_pair

    comparison = compare_runs(*find_pair(words[0], words[1], out))
    if args.json:
        print_json(dataclasses.asdict(comparison))
    else:
        _print(comparison)
    return 0


def _print(comparison: "RunComparison") -> None:
    rows = [["status", *comparison.status, ""]]
    for split, losses in comparison.loss.items():
        gap, percent = comparison.gap.get(split), comparison.perplexity_percent.get(split)
        text = "" if gap is None else f"{gap:+.4f} ({percent:+.2f} %)"
        rows.append([f"{split} loss", *map(format_known, losses), text])
    for key, label in (("params", "parameters"), ("flops_per_token", "FLOPs/token")):
        first, second = values = getattr(comparison, key)
        ratio = f"× {first / second:.3f}" if all(map(is_number, values)) and second else ""
        rows.append([label, *(format_short(v) if is_number(v) else "–" for v in values), ratio])
    print_table(["", *comparison.runs, "gap"], [[*map(sanitize, row)] for row in rows])
    if comparison.val_gap:
        gaps = (f"{format_short(row.tokens)}: {row.gap:+.4f}" for row in comparison.val_gap)
        print()
        print_text(f"validation gap by tokens  {'  '.join(gaps)}")
    for title, differing in (("they differ in", comparison.differ), ("and in", comparison.unlike)):
        for key, (first, second) in differing.items():
            print_text(sanitize(f"{title:<15} {key}: {first} · {second}"), " " * 16)
    if not comparison.paired:
        print()
        print_text("not a pair: their seeds or data differ, which affects the gap, too")
    print()
    print_text(
        "one pair gives a number, not a verdict; a sweep over several seeds gives a comparison"
    )
    names = [str(name) for name in comparison.differ.get("variant.name", ())]
    is_known = names and {*names} <= {*variants()}
    axes = [f"variant={','.join(names)}", "seed=range(6)", "--dry-run"]
    print_next_commands(["sweep", *(axes if is_known else ["--help"])])

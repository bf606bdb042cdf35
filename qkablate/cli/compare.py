"""`qkablate compare`: two runs side by side."""

import dataclasses
import shlex
from typing import TYPE_CHECKING

from qkablate.cli.arguments import Parser, out_words, take_out
from qkablate.cli.names import find_by_name
from qkablate.errors import UserError, sanitize
from qkablate.report.text.table import format_known
from qkablate.runs.listing import shorten_names
from qkablate.runs.records import is_number
from qkablate.runs.run import find_runs
from qkablate.table import (
    format_count,
    format_nats,
    format_short,
    print_json,
    print_next_commands,
    print_table,
    print_text,
)

if TYPE_CHECKING:
    from qkablate.analysis.comparison.two_runs import RunComparison

HELP = """qkablate compare: two runs side by side, for a quick look.

Usage: qkablate compare RUN BASELINE [--json] [out=FOLDER]

RUN and BASELINE are runs' folders, or the beginnings of their names or ids.
Where a word matches several runs, the newest two are taken that were trained
alike: same model, data, steps and seed. A gap is the loss of RUN minus that of
BASELINE, as in `qkablate results`: above 0, RUN is worse. A single pair has no
interval: `qkablate sweep` and `qkablate results` compare over several seeds.

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
        raise UserError(f"give two runs, not {len(words)}: qkablate compare RUN BASELINE")
    counts = {word: _count_runs(word, out) for word in words}

    from qkablate.analysis.comparison.two_runs import compare_runs, find_pair, propose_sweep

    pair = find_pair(words[0], words[1], out)
    comparison = compare_runs(*pair)
    if args.json:
        print_json(dataclasses.asdict(comparison))
        return 0
    if matches := [f"'{w}' matches {format_count(n, 'run')}" for w, n in counts.items() if n > 1]:
        print_text(sanitize(f"{', '.join(matches)}: the newest two trained alike are compared"))
    _print(comparison)
    sweep = propose_sweep(*pair)
    print_next_commands(
        ["sweep", *sweep, *out_words(out), "--dry-run"] if sweep else ["sweep", "--help"]
    )
    return 0


def _count_runs(word: str, out: str) -> int:
    """Return the number of runs that a word matches; UserError if none."""
    try:
        return len(find_runs(word, out))
    except UserError as error:
        if not _is_sweep(word, out):
            raise
        command = shlex.join(["qkablate", "results", word, *out_words(out)])
        raise UserError(f"'{word}' is a sweep, not a run: {command}") from error


def _is_sweep(word: str, out: str) -> bool:
    try:
        return find_by_name(word, out, ["sweep"])[0] == "sweep"
    except UserError:
        return False


def _print(comparison: "RunComparison") -> None:
    from qkablate.analysis.comparison.two_runs import EVAL_TOKENS

    short = shorten_names(comparison.runs)
    first_name, second_name = (short[name] for name in comparison.runs)
    print_text(sanitize(f"{first_name} compared with {second_name}"))
    print()
    labels = [*map(str, comparison.differ.get("variant.name", ("first", "second")))]
    rows = [["status", *comparison.status, ""]]
    for split, losses in comparison.loss.items():
        gap, percent = comparison.gap.get(split), comparison.perplexity_percent.get(split)
        text = "" if gap is None else f"{format_nats(gap)} (perplexity {percent:+z.2f} %)"
        rows.append([f"{split} loss", *map(format_known, losses), text])
    for name, shares in comparison.test.items():
        cells = ("–" if share is None else f"{share:.1%}" for share in shares)
        rows.append([f"test {name}", *cells, ""])
    sizes = {
        "params": comparison.params,
        "with embeddings": comparison.total_params,
        "FLOPs/token": comparison.flops_per_token,
    }
    for label, values in sizes.items():
        first, second = values
        ratio = f"ratio {first / second:.3f}" if all(map(is_number, values)) and second else ""
        rows.append([label, *(format_short(v) if is_number(v) else "–" for v in values), ratio])
    columns = ["", *labels, " − ".join(labels)]
    print_table([*map(sanitize, columns)], [[*map(sanitize, row)] for row in rows])
    if comparison.val_gap:
        gaps = (f"{format_short(row.tokens)}: {format_nats(row.gap)}" for row in comparison.val_gap)
        print()
        print_text(f"validation gap by tokens  {'  '.join(gaps)}")
    if EVAL_TOKENS in comparison.differ:
        print()
        print_text(f"no validation gap: the two evaluations differ in {EVAL_TOKENS}")
    if "data_fingerprint" in comparison.unlike:
        print()
        print_text("no gaps: the two were trained on different data")
    if comparison.unequal_tests:
        print()
        print_text(sanitize(f"no test gap: {comparison.unequal_tests}"))
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

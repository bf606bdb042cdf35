"""`qkablate variants`: the catalogue of variants."""

import sys
import textwrap
from collections.abc import Iterable

from qkablate.cli.arguments import Parser
from qkablate.errors import UserError, not_one_of
from qkablate.screen import find_screen
from qkablate.table import (
    print_heading,
    print_json,
    print_next_commands,
    print_table,
    print_text,
)

HELP = """qkablate variants: the catalogue of variants.

Usage: qkablate variants [NAME …] [--json]

A variant parametrizes the scores of a head, scale · x_iᵀ B_h x_j, and the
output of a position, x_jᵀ M_h. Parameters are per layer, without biases: d is
d_model, h heads, k d_head, r variant.rank, g variant.groups, T model.context.

The two circuits combine freely; an unsupported combination is rejected with the
reason.

Flags
{flags}

Examples
  qkablate train variant=low_rank_w variant.rank=8
  qkablate train variant.qk=merged variant.ov=no_o      a combination without a
                                                        name of its own
  qkablate cost variant=standard,merged_w --at gpt-j    its cost
  qkablate verify variant=merged_w                      its exact checks

Exit codes: 0 the catalogue is printed · 2 a mistake in the command
"""


PARSER = Parser(HELP)
PARSER.switch("--json", "print JSON")


def main(argv: list[str]) -> int:
    """Print the catalogue."""
    args = PARSER.parse(argv)
    from qkablate.api.catalogue import variants
    from qkablate.attention import OV_CIRCUITS, QK_CIRCUITS
    from qkablate.attention.modifiers import NORMS

    known = {row.name: row for row in variants()}
    for word in args.words:
        if word not in known:
            raise UserError(f"variant {not_one_of(word, known, 'qkablate variants')}")
    shown = [known[word] for word in args.words] or [*known.values()]
    rows = [{"variant": row.name, **vars(row)} for row in shown]
    if args.json:
        print_json([{key: row[key] for key in row if key != "name"} for row in rows])
        return 0
    columns = ["variant", "parameters", "without", "equation", "source"]
    cells = [[row[column] for column in columns] for row in rows]
    print_table(columns, cells, left=5, wrap=("parameters", "without", "equation", "source"))
    print()
    print_text("Parameters per layer: d d_model, h heads, k d_head, r rank, g groups, T context.")
    print_text("Where an equation defines only one of B_h and M_h, the other is that of standard.")
    if args.words:
        return 0
    print()
    print_heading("Freely combined")
    width = min(100, find_screen(sys.stdout).width or 100)
    axes: dict[str, Iterable[str]]
    axes = {"qk": QK_CIRCUITS, "ov": OV_CIRCUITS, "norm": NORMS, "mask_self": ("false", "true")}
    for key, names in axes.items():
        line = f"  variant.{key:<9}  {', '.join(names)}"
        print(textwrap.fill(line, width, subsequent_indent=" " * 21))
    print_next_commands(["cost"], ["verify"], ["train", "variant=merged_w"])
    return 0

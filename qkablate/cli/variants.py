"""`qkablate variants`: the catalogue of variants."""

import sys
import textwrap
from collections.abc import Iterable
from typing import Any

from qkablate.cli.arguments import Parser
from qkablate.config import ModelConfig, VariantConfig, resolve_variant, variants
from qkablate.errors import UserError
from qkablate.screen import find_screen
from qkablate.table import (
    print_heading,
    print_json,
    print_next_commands,
    print_table,
    print_text,
)

HELP = """qkablate variants: the catalogue of variants.

Usage: qkablate variants [--json]

A variant parametrizes the scores of a head, scale · x_iᵀ B_h x_j, and the output of a position,
x_jᵀ M_h. Parameters are per layer, without biases: d is d_model, h heads, k d_head, r variant.rank,
g variant.groups, T model.context.

The two circuits combine freely; an unsupported combination is rejected with the reason.

Flags
{flags}

Examples
  qkablate train variant=low_rank_w variant.rank=8
  qkablate train variant.qk=merged variant.ov=no_o      a combination without a name of its own
  qkablate cost variant=standard,merged_w --at gpt-j    its cost
  qkablate verify variant=merged_w                      its exact checks
"""


PARSER = Parser(HELP)
PARSER.switch("--json", "print JSON")


def main(argv: list[str]) -> int:
    """Print the catalogue."""
    args = PARSER.parse(argv)
    if args.words:
        raise UserError(f"'{args.words[0]}': `qkablate variants` takes no arguments")
    from qkablate.attention import OV_CIRCUITS, QK_CIRCUITS
    from qkablate.attention.modifiers import NORMS

    rows = [_row(name, entry) for name, entry in sorted(variants().items(), key=_order)]
    if args.json:
        print_json(rows)
        return 0
    columns = ["variant", "parameters", "without", "equation", "source"]
    cells = [[row[column] for column in columns] for row in rows]
    print_table(columns, cells, left=5, wrap=("parameters", "without", "equation", "source"))
    print()
    print_text("Parameters per layer: d d_model, h heads, k d_head, r rank, g groups, T context.")
    print_text("Where an equation defines only one of B_h and M_h, the other is that of standard.")
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


def _order(item: tuple[str, dict[str, Any]]) -> tuple[bool, bool, bool, str]:
    """Return a sort key: standard, then variants that change scores, values, both."""
    name, entry = item
    changes_ov, changes_qk = entry["ov"] != "separate", entry["qk"] != "separate"
    return name != "standard", changes_ov, changes_ov and changes_qk, name


def _row(name: str, entry: dict[str, Any]) -> dict[str, Any]:
    from qkablate.attention.ov.factored import SeparateOV
    from qkablate.attention.qk.factored import SeparateQK
    from qkablate.models.catalogue import make_attention

    model = ModelConfig()
    variant = resolve_variant(VariantConfig(**entry), model)
    layer = make_attention(model, variant)
    removes = [part for part in (layer.qk.removes, layer.ov.removes) if part]
    # Parts that are those of standard are not mentioned.
    changed = [part for part in (layer.qk, layer.norm, layer.ov) if part is not None]
    changed = [p for p in changed if type(p) not in (SeparateQK, SeparateOV)] or [layer.qk]
    equations = [part.equation for part in changed] if name != "standard" else [layer.equation]
    equations += ["no token attends to itself"] if layer.mask_self else []
    groups = entry.get("groups")
    count = "" if groups == 1 else f"{groups} "
    params = layer.params if groups is None else layer.params.replace(" g ", f" {count}")
    return {
        "variant": name,
        "qk": variant.qk,
        "ov": variant.ov,
        "norm": variant.norm,
        "mask_self": variant.mask_self,
        "parameters": params,
        "without": ", ".join(dict.fromkeys(removes)),
        "equation": "; ".join(equations),
        "source": "; ".join(dict.fromkeys(part.source for part in changed if part.source)),
    }

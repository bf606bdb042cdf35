"""`qkablate verify`: the exact checks, on fresh weights or on a run's own."""

import dataclasses
import sys
from typing import Any

from qkablate.cli.compose import jobs, next_commands, proposed, take_flags, varies
from qkablate.cli.table import counted, print_json, print_table
from qkablate.config import Config, variants
from qkablate.errors import UserError, tell

HELP = """qkablate verify: that a variant is what it says, to the last digits of fp64.

Usage: qkablate verify [key=value …] [--json]
       qkablate verify RUN [variant.file=PATH] [--json]

Without RUN: fresh random weights, all variants or those of `variant=…`, at the size of the model
keys. With RUN, a run's folder or id: its last checkpoint, every layer, on what the layer sees when
the model reads random tokens.

Each check is an identity: two ways to the same numbers. `residual` is the largest difference,
relative to the largest number; `fp32` the same in single precision, with the tolerance that its
rounding allows. fp64 decides. Exit code 1 if one does not hold.

Examples
  qkablate verify
  qkablate verify variant=merged_w,shared_qk model.bias=true
  qkablate verify variant=standard model.position=rope
  qkablate verify variant.file=my_variant.py
  qkablate verify outputs/runs/merged_w-d128-h4-s0-…
"""
LENGTH = 24  # tokens of a sequence that is looked at
LARGEST = 2**36  # heads · d_model³: about a minute for each variant


def main(argv: list[str]) -> int:
    flags, words = take_flags(argv, ("--help", "-h", "--json"))
    if {"--help", "-h"} & {*flags}:
        print(HELP, end="")
        return 0
    runs = [word for word in words if "=" not in word]
    words = [word for word in words if "=" in word]
    if len(runs) > 1:
        raise UserError(f"'{runs[1]}': one run at a time")
    lines, following = _of_a_run(runs[0], words) if runs else _fresh(words)
    holds = all(line.holds for line in lines)
    if "--json" in flags:
        print_json([{**dataclasses.asdict(line), "holds": line.holds} for line in lines])
    else:
        _print(lines)
        if holds:
            next_commands(following)
    return 0 if holds else 1


def _fresh(words: list[str]) -> tuple[list[Any], list[str]]:
    """The outcomes, and what to type next."""
    implied = "" if varies(words, "variant") else f"variant={','.join(variants())}"
    planned = jobs(words, implied)
    for job in planned:
        _check_size(job.config)
    from tqdm import tqdm

    from qkablate.catalogue import attention, settle
    from qkablate.verify import fresh_layer, stream, verify

    lines: list[Any] = []
    for job in tqdm(planned, leave=False, disable=not sys.stderr.isatty()):
        try:
            config, _ = settle(job.config)
            layer = attention(config.model, config.variant, kernel=config.attention.kernel)
        except UserError as refused:
            if len(planned) == 1:
                raise
            tell(f"left out: {refused}")
            continue
        layer = fresh_layer(layer.double().eval(), config.seed)
        x_BTD = stream(config.model.d_model, min(LENGTH, config.model.context), config.seed)
        lines += verify(config.variant.name, [layer], [x_BTD], fresh=True)
    return lines, ["train", *proposed(planned).words]


def _check_size(config: Config) -> None:
    """A decomposition of every B_h takes d³ steps a head."""
    model = config.model
    if model.heads * model.d_model**3 > LARGEST:
        raise UserError(
            f"model.d_model: {model.heads} matrices of {model.d_model:,} × {model.d_model:,} would"
            " take minutes and more to decompose; what is true at a small size is true at this one,"
            " too, so name a smaller one"
        )


def _of_a_run(word: str, words: list[str]) -> tuple[list[Any], list[str]]:
    given = dict(word.split("=", 1) for word in words)
    if unknown := given.keys() - {"out", "variant.file", "variant.qk", "variant.ov"}:
        raise UserError(
            f"'{min(unknown)}': a run has its own keys; beside it, out, variant.file, variant.qk"
            " and variant.ov can be given"
        )
    from tqdm import tqdm

    from qkablate.training.restore import find_run, restore
    from qkablate.verify import streams_of, verify

    found = restore(
        find_run(word, given.get("out", "outputs")),
        variant_file=given.get("variant.file"),
        qk=given.get("variant.qk"),
        ov=given.get("variant.ov"),
    )
    model = found.model.double()
    streams = streams_of(model, min(LENGTH, found.config.model.context), found.config.seed)
    layers = counted(len(streams), "layer")
    tell(f"{found.folder.resolve().name}, step {found.step}, {layers}")
    outcomes = verify(found.config.variant.name, model.attentions(), streams, fresh=False)
    bar = tqdm(outcomes, unit=" checks", leave=False, disable=not sys.stderr.isatty())
    return list(bar), ["sample", word, *words]


def _print(lines: list[Any]) -> None:
    rows = []
    for line in lines:
        single = f"{line.residual_fp32:.1e} of {line.tolerance_fp32:.0e}"
        double = f"{line.residual:.1e} of {line.tolerance:.0e}"
        exact = line.tolerance == 0
        rows.append(
            [
                line.variant,
                line.check,
                f"{line.residual:g} of 0" if exact else double,
                "" if exact else single,
                "holds" if line.holds else "VIOLATED",
                line.says,
            ]
        )
    columns = ["variant", "check", "residual", "fp32", "verdict", "identity"]
    print_table(columns, rows, left=6, wrap=("identity",))
    bad = [line for line in lines if not line.holds]
    names = {line.variant for line in lines}
    checked = f"{counted(len(lines), 'check')} of {counted(len(names), 'variant')}"
    print(f"\n{checked}: {len(bad)} violated")
    for line in bad:
        print(f"  {line.variant}: {line.check}: {line.says}")

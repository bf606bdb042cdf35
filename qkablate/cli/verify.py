"""`qkablate verify`: the exact checks, on fresh weights or on a run's own."""

import copy
import dataclasses
import sys
from typing import Any

from qkablate.cli.hydra.configs import Job, built, jobs, next_commands, proposed, take_flags, varies
from qkablate.config import TEXT_SOURCES, Config, variants
from qkablate.errors import UserError, tell
from qkablate.table import counted, print_json, print_table

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
LENGTH = 136  # tokens of a sequence that is looked at: more than a block of queries
MOST_STEPS = 2**37  # some two minutes


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
    _check_size(planned)
    import torch
    from tqdm import tqdm

    from qkablate.models.catalogue import attention
    from qkablate.verify import fresh_layer, stream, verify

    with torch.device("meta"):
        kept = built(planned, lambda c: attention(c.model, c.variant, kernel=c.attention.kernel))
    lines: list[Any] = []
    for job, empty in tqdm(kept, leave=False, disable=not sys.stderr.isatty()):
        model, seed = job.config.model, job.config.seed
        # One layer's numbers at a time.
        layer = fresh_layer(copy.deepcopy(empty).to_empty(device="cpu").double().eval(), seed)
        x_BTD = stream(model.d_model, min(LENGTH, model.context), seed)
        lines += verify(job.config.variant.name, [layer], [x_BTD], fresh=True)
    return lines, ["train", *proposed([job for job, _ in kept]).words]


def steps(planned: list[Job]) -> int:
    """Of decomposing every B_h: d³ a head."""
    return sum(job.config.model.heads * job.config.model.d_model**3 for job in planned)


def _check_size(planned: list[Job]) -> None:
    for job in planned:
        _check_small(job.config)
    if steps(planned) > MOST_STEPS:
        d_model = max(job.config.model.d_model for job in planned)
        raise UserError(
            f"model.d_model: to decompose {counted(len(planned), 'variant')} at d {d_model:,} would"
            " take many minutes; what is true at a small size is true at this one, too: name fewer"
            " variants, or a smaller size"
        )


def _check_small(config: Config) -> None:
    for key in ("context", "d_model"):
        if getattr(config.model, key) < 2:
            raise UserError(f"model.{key}: what is checked needs 2 or more")


def _of_a_run(word: str, words: list[str]) -> tuple[list[Any], list[str]]:
    given = dict(word.split("=", 1) for word in words)
    if unknown := given.keys() - {"out", "variant.file", "variant.qk", "variant.ov"}:
        raise UserError(
            f"'{min(unknown)}': a run has its own keys; beside it, out, variant.file, variant.qk"
            " and variant.ov can be given"
        )
    from tqdm import tqdm

    from qkablate.training.warm_start.restore import find_run, restore
    from qkablate.verify import streams_of, verify

    found = restore(
        find_run(word, given.get("out", "outputs")),
        variant_file=given.get("variant.file"),
        qk=given.get("variant.qk"),
        ov=given.get("variant.ov"),
    )
    _check_small(found.config)
    model = found.model.double()
    streams = streams_of(model, min(LENGTH, found.config.model.context), found.config.seed)
    layers = counted(len(streams), "layer")
    tell(f"{found.folder.resolve().name}, step {found.step}, {layers}")
    outcomes = verify(found.config.variant.name, model.attentions(), streams, fresh=False)
    bar = tqdm(outcomes, unit=" checks", leave=False, disable=not sys.stderr.isatty())
    proposed = ["sample", word, *words]
    if found.config.data.source not in TEXT_SOURCES:  # a task's tokens are no text
        proposed = ["data", "info", f"data={found.config.data.source}"]
    return list(bar), proposed


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

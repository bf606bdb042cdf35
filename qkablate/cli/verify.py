"""`qkablate verify`: exact checks of variants, on fresh weights or on those of a run."""

import copy
import dataclasses
import itertools
from typing import TYPE_CHECKING

from qkablate.cli.arguments import (
    CIRCUIT_KEYS,
    Parser,
    propose_sample,
    restore_run,
    runs_and_keys,
    split_runs,
)
from qkablate.compose.configs import (
    Job,
    build_jobs,
    choose_next,
    compose_jobs,
    training_commands,
)
from qkablate.config import Config, stream_width
from qkablate.config.variant import SITES, variant_sites
from qkablate.errors import UserError, print_stderr
from qkablate.table import (
    format_count,
    print_json,
    print_next_commands,
    print_table,
    print_text,
)

if TYPE_CHECKING:
    from qkablate.attention import Attention
    from qkablate.verify import CheckResult

HELP = """qkablate verify: check the identities that define a variant, in fp64.

Usage: qkablate verify [key=value …] [--json]
       qkablate verify RUN [out=FOLDER] [variant.file=PATH] [variant.qk=NAME]
                       [variant.ov=NAME] [--json]

Without RUN: fresh random weights, all variants or those of `variant=…`, at the
size of the model keys. With RUN, a run's folder or id: its newest checkpoint,
every layer, on the layer's inputs when the model reads random tokens.

Each check is an identity: two ways to compute the same numbers. `residual` is
the largest difference, relative to the largest number; `fp32` is the same in
single precision, with the tolerance that its rounding allows. fp64 decides. The
exit code is 1 if an identity is violated. A model with an encoder is checked by
site, its cross-attention on two streams of different lengths.

Examples
  qkablate verify
  qkablate verify variant=merged_w,shared_qk model.bias=true
  qkablate verify variant=standard model.position=rope
  qkablate verify variant.file=my_variant.py
  qkablate verify merged_w-d128-h4-s0

Flags
{flags}

Exit codes: 0 every check holds · 1 one does not · 2 a mistake in the command
"""
LENGTH = 136  # tokens per sequence: more than one block of queries


PARSER = Parser(HELP, ("run",))
PARSER.switch("--json", "print JSON")


def main(argv: list[str]) -> int:
    """Check variants and print the residuals."""
    args = PARSER.parse(argv)
    runs, words = split_runs(args.words)
    if len(runs) > 1:
        raise UserError(f"'{runs[1]}': one run at a time")
    outcomes, proposed = _verify_run(runs[0], words) if runs else _verify_fresh(words)
    holds = all(outcome.holds for outcome in outcomes)
    if args.json:
        print_json([{**dataclasses.asdict(o), "holds": o.holds} for o in outcomes])
    else:
        _print(outcomes)
        if holds and proposed:
            print_next_commands(*proposed)
    return 0 if holds else 1


def _verify_fresh(words: list[str]) -> tuple[list["CheckResult"], list[list[str]]]:
    """Return the outcomes on fresh weights, and commands to propose."""
    planned = compose_jobs(words, of_all_variants=True)
    _check_sizes(planned)
    import torch
    from tqdm import tqdm

    from qkablate.verify import random_streams, randomize_layer, verify

    with torch.device("meta"):
        kept = build_jobs(planned, _make_layers)
    outcomes: list[CheckResult] = []
    for job, layers in tqdm(kept, leave=False, disable=None):
        variant, model, seed = job.config.variant.name, job.config.model, job.config.seed
        for site, empty in layers.items():
            # One layer at a time is held in memory.
            layer = copy.deepcopy(empty).to_empty(device="cpu").double().eval()
            streams = random_streams(model, site, LENGTH, seed)
            outcomes += verify(
                variant, [randomize_layer(layer, seed)], [streams], fresh=True, site=site
            )
    return outcomes, training_commands(choose_next([job for job, _ in kept]))


def _make_layers(config: Config) -> dict[str, "Attention"]:
    """Return a layer of each site that carries the variant."""
    from qkablate.models.catalogue import make_attention

    model, variant, kernel = config.model, config.variant, config.attention.kernel
    sites = variant_sites(variant, model)
    return {site: make_attention(model, variant, site, kernel=kernel) for site in sites}


def _check_sizes(planned: list[Job]) -> None:
    from qkablate.models.cost import MAX_DECOMPOSITION, decomposition_steps

    for job in planned:
        _check_size(job.config)
    if sum(decomposition_steps(job.config.model) for job in planned) > MAX_DECOMPOSITION:
        models = [job.config.model for job in planned]
        d_model = max(stream_width(model, site) for model in models for site in SITES[model.form])
        raise UserError(
            f"model.d_model: to decompose {format_count(len(planned), 'variant')} at d {d_model:,}"
            " would take many minutes; the identities do not depend on the size: name fewer"
            " variants, or a smaller size"
        )


def _check_size(config: Config) -> None:
    for key in ("context", "d_model", "encoder_d_model", "source"):
        value = getattr(config.model, key)
        if value is not None and value < 2:
            raise UserError(f"model.{key}: the checks need 2 or more")


def _verify_run(word: str, words: list[str]) -> tuple[list["CheckResult"], list[list[str]]]:
    """Return the outcomes on a run's weights, and commands to propose."""
    known = {"out", *CIRCUIT_KEYS}
    if unknown := {word.partition("=")[0] for word in words} - known:
        raise UserError(
            f"'{min(unknown)}': with a run, only the keys out, variant.file, variant.qk and"
            " variant.ov can be given"
        )
    _, values = runs_and_keys(words, known)
    restored = restore_run(word, values)
    from tqdm import tqdm

    from qkablate.verify import record_inputs, verify

    config = restored.config
    _check_size(config)
    recorded = record_inputs(restored.model.double(), LENGTH, config.seed)
    count = format_count(sum(len(layers) for layers, _ in recorded.values()), "layer")
    print_stderr(f"{restored.folder.resolve().name}, step {restored.step}, {count}")
    outcomes = itertools.chain.from_iterable(
        verify(config.variant.name, *layers, fresh=False, site=site)
        for site, layers in recorded.items()
    )
    bar = tqdm(outcomes, unit=" checks", leave=False, disable=None)
    return list(bar), [propose_sample(config, [word, *words])]


def _print(outcomes: list["CheckResult"]) -> None:
    rows, has_sites = [], any(line.site != "decoder" for line in outcomes)
    for line in outcomes:
        single = f"{line.residual_fp32:.1e} of {line.tolerance_fp32:.0e}"
        double = f"{line.residual:.1e} of {line.tolerance:.0e}"
        residuals = [double, single] if line.tolerance else [f"{line.residual:g} of 0", ""]
        verdict = "holds" if line.holds else "VIOLATED"
        site = [line.site] * has_sites
        rows.append([line.variant, *site, line.check, verdict, *residuals, line.says])
    columns = ["variant", *["site"] * has_sites, "check", "verdict", "residual", "fp32", "identity"]
    print_table(columns, rows, left=6 + has_sites, wrap=("identity",), keys=2 + has_sites)
    bad = [line for line in outcomes if not line.holds]
    names = {line.variant for line in outcomes}
    checked = f"{format_count(len(outcomes), 'check')} of {format_count(len(names), 'variant')}"
    print(f"\n{checked}: {len(bad)} violated")
    for line in bad:
        at = f" ({line.site})" if has_sites else ""
        print_text(f"  {line.variant}{at}: {line.check}: {line.says}")

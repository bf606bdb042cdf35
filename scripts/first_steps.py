"""Print how far the first step of AdamW and of Muon moves scores and outputs, relative to standard.

    python scripts/first_steps.py model.context=96
    python scripts/first_steps.py variant=mla variant.rank=8,16,32,64
    python scripts/first_steps.py variant=merged_w,no_q model=llama_nano variant.rope_dims=8

At the rates of `variant.lr=matched`, on a random loss that is linear in the scores, or in the
outputs at the initial weights of attention. A step of AdamW lowers it by η Σ|gradient|, and one of
Muon by 0.2 η √(larger side) · Σ gradient · update for each matrix, where the update has singular
values near 1; what is no matrix is AdamW's.
A ratio of 1 is a matched rate. Standard has the same rotated dimensions.
"""

import argparse
import itertools
import sys

import torch
from torch import Tensor

from qkablate.attention import Attention
from qkablate.compose.configs import compose_jobs
from qkablate.config import ModelConfig, VariantConfig, resolve_variant
from qkablate.errors import UserError
from qkablate.models.build import build_model
from qkablate.table import print_table
from qkablate.training.optim.muon import RMS, find_attention_matrices, orthogonalize

PARTS = ("scores", "outputs")
OPTIMIZERS = ("adamw", "muon")
VOCABULARY = 256


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("words", nargs="*", metavar="key=value", help="keys of `qkablate train`")
    parser.add_argument("--sequences", type=int, default=24)
    args = parser.parse_intermixed_args()
    if args.sequences < 1:
        parser.error(f"--sequences: {args.sequences} is below 1")
    try:
        compare(args.words, args.sequences)
    except UserError as error:
        print(f"first_steps.py: {error}", file=sys.stderr)
        sys.exit(2)


def compare(words: list[str], sequences: int) -> None:
    """Print a row for each variant and site."""
    rows = []
    for job in compose_jobs(words, of_all_variants=True):
        model, variant = job.config.model, job.config.variant
        reference = resolve_variant(VariantConfig(rope_dims=variant.rope_dims), model)
        references = first_layers(model, reference)
        for site, layer in first_layers(model, variant).items():
            streams = random_streams(layer, model.context, sequences)
            cells = []
            for part, optimizer in itertools.product(PARTS, OPTIMIZERS):
                speed = first_step(layer, part, streams, optimizer)
                ratio = speed / first_step(references[site], part, streams, optimizer)
                cells.append(f"{ratio:.2f}" if speed else "–")
            rows.append([variant.name, site, *cells])
    head = [f"{part}, {optimizer}" for part in PARTS for optimizer in OPTIMIZERS]
    print_table(["variant", "site", *head], rows, left=2)


def first_layers(model: ModelConfig, variant: VariantConfig) -> dict[str, Attention]:
    """Return the first initialized layer of each site that carries the variant."""
    built = build_model(model, variant, VOCABULARY).init_(0)
    return {site: layer.module for site, layer in built.variant_layers().items()}


def random_streams(layer: Attention, length: int, sequences: int) -> tuple[Tensor, Tensor | None]:
    """Return random streams of the queries and, in cross-attention, of the keys."""
    spec = layer.qk.spec

    def draw(seed: int, length: int, width: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(sequences, length, width, generator=generator)

    x_BTD = draw(0, length, spec.d_model)
    return x_BTD, draw(1, spec.source or length, spec.d_keys) if spec.is_cross else None


def first_step(
    layer: Attention, part: str, streams: tuple[Tensor, Tensor | None], optimizer: str
) -> float:
    """Return how much a first step lowers a random loss of the scores or outputs, for η = 1."""
    x_BTD, y_BSD = streams
    keys_BSD = x_BTD if y_BSD is None else y_BSD
    if part == "scores":
        s_BHTS = layer.scores(x_BTD, y_BSD, causal=layer.qk.spec.causal)
        moved = s_BHTS[s_BHTS.isfinite()]
    else:
        v_BGSV = layer.ov.values(keys_BSD, layer.qk.keys(keys_BSD))
        v_BHSV = v_BGSV.repeat_interleave(layer.qk.spec.heads // v_BGSV.shape[1], 1)
        weights_BHTS = layer.weights(x_BTD, y_BSD, causal=layer.qk.spec.causal).detach()
        moved = layer.ov.write(weights_BHTS @ v_BHSV)
    if not moved.requires_grad:  # scores without parameters
        return 0.0
    direction = torch.randn(moved.shape, generator=torch.Generator().manual_seed(2))
    matrices = find_attention_matrices(layer)
    rates = {parameter: rate for parameter, rate, _ in layer.rates()}
    gradients = torch.autograd.grad((moved * direction).sum(), [*rates], allow_unused=True)
    total = 0.0
    for parameter, gradient in zip(rates, gradients, strict=True):
        if gradient is None:
            continue
        if optimizer == "adamw" or parameter not in matrices:
            lowered = gradient.abs().sum()
        else:
            g_NRC = matrices[parameter].split(gradient)
            lowered = RMS * max(g_NRC.shape[1:]) ** 0.5 * (g_NRC * orthogonalize(g_NRC)).sum()
        total += rates[parameter] * float(lowered)
    return total


if __name__ == "__main__":
    main()

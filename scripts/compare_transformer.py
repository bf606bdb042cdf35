"""Compare the training speed of qkablate's encoder-decoder and of torch's nn.Transformer.

Same machine, same sizes and parameters, same padded batches of pairs (expressions of the standard
library and their postfix notation). nn.Transformer is trained as
its documentation shows, in fp32: pre-norm, padding and causal masks, cross-entropy, AdamW,
clipping; qkablate runs its Trainer's own step, in the precision of `auto` and in fp32. They take
turns, in a different order each round: tokens/s (positions of source and target) is the median over
the rounds, the ratio the median (minimum … maximum) within a round. Warm-up and compilation are not
timed.
"""

import argparse
import statistics
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import compare_nanogpt as compare
import torch
from compare_nanogpt import WARMUP, Qkablate, measure, warm_up
from hydra import compose, initialize_config_dir
from torch import Tensor, nn
from torch.nn import functional as F

from qkablate.compose.register import register
from qkablate.config import Config, conf_dir, from_hydra
from qkablate.data.batches import IGNORE, PAD
from qkablate.errors import UserError, not_one_of
from qkablate.training import hardware
from qkablate.training.optim import learning_rate
from qkablate.training.prefetcher import Prefetcher, batch_reader
from qkablate.training.resolve import RunPlan, plan_run

EXAMPLE = """examples
  python scripts/compare_transformer.py
  python scripts/compare_transformer.py --shapes small --variants standard,no_q --rounds 21
"""


@dataclass(frozen=True)
class Shape:
    layers: int  # of the encoder, and of the decoder
    d_model: int
    heads: int
    context: int  # of the source, and of the target
    batch_size: int
    steps: int  # in one round


SHAPES = {"small": Shape(2, 64, 4, 24, 32, steps=20), "large": Shape(4, 256, 8, 96, 16, steps=2)}


class Translator(nn.Module):
    """An nn.Transformer with token and position embeddings and a tied output projection."""

    def __init__(self, shape: Shape, vocabulary: int) -> None:
        super().__init__()
        width = shape.d_model
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(2 * shape.context, width)  # of the source, of the target
        with warnings.catch_warnings(action="ignore"):  # of a fast path of evaluation
            self.transformer = nn.Transformer(
                width, shape.heads, shape.layers, shape.layers, 4 * width, dropout=0.0,
                activation="gelu", batch_first=True, norm_first=True, bias=False,
            )  # fmt: skip
        causal_TT = nn.Transformer.generate_square_subsequent_mask(shape.context)
        self.register_buffer("causal_TT", causal_TT < 0)

    def forward(self, source_NS: Tensor, tokens_NT: Tensor, targets_NT: Tensor) -> Tensor:
        is_padding_NS = source_NS == PAD
        x_NSD, y_NTD = (
            self.tokens(ids.clamp(min=0)) + table
            for ids, table in zip(
                (source_NS, tokens_NT), self.positions.weight.chunk(2), strict=True
            )
        )
        hidden_NTD = self.transformer(
            x_NSD, y_NTD, tgt_mask=self.causal_TT, tgt_is_causal=True,
            src_key_padding_mask=is_padding_NS, memory_key_padding_mask=is_padding_NS,
        )  # fmt: skip
        logits_NTV = hidden_NTD @ self.tokens.weight.T
        return F.cross_entropy(logits_NTV.flatten(0, 1), targets_NT.flatten(), ignore_index=IGNORE)


class TorchTransformer:
    """nn.Transformer and a common training step for it."""

    def __init__(self, shape: Shape, plan: RunPlan, compiled: bool) -> None:
        self.name = f"nn.Transformer (fp32, {'compiled' if compiled else 'eager'})"
        self.config = config = plan.config
        torch.manual_seed(config.seed)
        self.model = Translator(shape, plan.data.vocabulary).to(config.device)
        first, second = config.optim.betas
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), config.optim.lr, (first, second), fused=True
        )
        self.forward = torch.compile(self.model) if compiled else self.model
        self.prefetcher = Prefetcher(batch_reader(config, plan.data), config.device)

    def step(self, step: int) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.config.optim, step, int(self.config.train.steps))
        (batch,) = self.prefetcher.take(step)
        self.forward(*batch.inputs, batch.targets_NA).backward()
        self.prefetcher.prefetch(step + 1)
        nn.utils.clip_grad_norm_(self.model.parameters(), self.config.optim.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def configure(shape: Shape, variant: str, steps: int, folder: Path, precision: str) -> Config:
    """Return the config of `qkablate train` with this shape."""
    words = [f"model.{key}={getattr(shape, key)}" for key in ("layers", "d_model", "heads")]
    words += ["model=nano_translator", "data=stdlib_pairs", f"data.max_length={shape.context}"]
    words += [f"model.context={shape.context}", f"train.batch_size={shape.batch_size}"]
    words += [f"variant={variant}", f"train.steps={steps}", f"out={folder}"]
    words.append(f"precision={precision}")
    return from_hydra(compose("train", [*words, "tracking.wandb=disabled"]))


def run(label: str, args: argparse.Namespace, folder: Path) -> None:
    """Print the rows of one shape."""
    shape = SHAPES[label]
    steps = WARMUP + args.rounds * shape.steps
    auto = plan_run(configure(shape, "standard", steps, folder, "auto"))
    plans = [
        plan_run(configure(shape, name, steps, folder, precision))
        for name in args.variants
        for precision in dict.fromkeys((auto.config.precision, "fp32"))
    ]
    hardware.configure_process(auto.config)
    peers = [TorchTransformer(shape, auto, compiled) for compiled in (False, True)]
    candidates: list[Any] = [*peers, *(Qkablate(plan) for plan in plans)]
    warm_up(label, candidates)
    tokens = 2 * shape.batch_size * shape.context
    speeds = measure(candidates, args.rounds, shape.steps, tokens)
    of_torch = [speeds[peer.name] for peer in peers]
    best = max(of_torch, key=statistics.median)
    for name, speed in speeds.items():
        ratios = [a / b for a, b in zip(speed, best, strict=True)]
        print(
            f"{label:<7}{name:<42}{statistics.median(speed):>10,.0f}"
            f"{statistics.median(ratios):>8.2f}  ({min(ratios):.2f} … {max(ratios):.2f})",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n\n")[0],
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--shapes", default="small,large", help="default: small,large")
    parser.add_argument("--variants", default="standard", help="default: standard")
    parser.add_argument("--rounds", type=int, default=15, help="default: 15")
    args = parser.parse_args()
    args.shapes, args.variants = args.shapes.split(","), args.variants.split(",")
    if wrong := next((name for name in args.shapes if name not in SHAPES), None):
        raise UserError(f"--shapes: {not_one_of(wrong, SHAPES, '--help')}")
    register()
    with (
        initialize_config_dir(str(conf_dir()), version_base="1.3"),
        tempfile.TemporaryDirectory() as folder,
    ):
        config = hardware.resolve(configure(SHAPES["small"], "standard", 1, Path(folder), "auto"))
        print(f"{compare.format_header(config)}, {time.strftime('%H:%M')}\n")
        print(f"{'shape':<49}{'tokens/s':>10}   ratio to the best nn.Transformer")
        for label in args.shapes:
            run(label, args, Path(folder))


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        print(f"compare_transformer: {error}", file=sys.stderr)
        sys.exit(2)

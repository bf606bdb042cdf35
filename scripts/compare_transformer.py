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
import warnings
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from compare_nanogpt import WARMUP
from hydra import compose
from torch import Tensor, nn
from torch.nn import functional as F
from torch_peer import TorchPeer, compare_with_peers, run_script

from qkablate.config import Config, from_hydra
from qkablate.data.batches import IGNORE, PAD
from qkablate.training.resolve import RunPlan

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


def make_peers(plan: RunPlan, shape: Shape) -> list[TorchPeer]:
    """Return nn.Transformer, eager and compiled."""
    peers = []
    for compiled in (False, True):
        torch.manual_seed(plan.config.seed)
        model = Translator(shape, plan.data.vocabulary)
        peers.append(TorchPeer("nn.Transformer", model, plan, compiled))
    return peers


def configure(label: str, variant: str, rounds: int, folder: Path, precision: str) -> Config:
    """Return the config of `qkablate train` with this shape."""
    shape = SHAPES[label]
    words = [f"model.{key}={getattr(shape, key)}" for key in ("layers", "d_model", "heads")]
    words += ["model=nano_translator", "data=stdlib_pairs", f"data.max_length={shape.context}"]
    words += [f"model.context={shape.context}", f"train.batch_size={shape.batch_size}"]
    words += [f"variant={variant}", f"train.steps={WARMUP + rounds * shape.steps}"]
    words += [f"out={folder}", f"precision={precision}", "tracking.wandb=disabled"]
    return from_hydra(compose("train", words))


def compare_shape(label: str, args: argparse.Namespace, folder: Path) -> None:
    shape = SHAPES[label]
    tokens, peers = 2 * shape.batch_size * shape.context, partial(make_peers, shape=shape)
    compare_with_peers(label, args, folder, configure, peers, shape.steps, tokens)


if __name__ == "__main__":
    run_script(
        __doc__ or "",
        EXAMPLE,
        "nn.Transformer",
        SHAPES,
        "small,large",
        15,
        configure,
        compare_shape,
    )

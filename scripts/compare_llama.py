"""Compare the training speed of qkablate's Llama block and of one written plainly in torch.

Same machine, same sizes and parameters, same batches. The peer is the block of Llama 2 as one
writes it in torch: nn.RMSNorm, SwiGLU, rotary positions, F.scaled_dot_product_attention, AdamW,
clipping, in fp32, eager and compiled. qkablate runs its Trainer's own step, in the precision of
`auto` and in fp32. They take turns, in a different order each round: tokens/s is the median over
the rounds, the ratio the median (minimum … maximum) within a round. Before, the peer is given
qkablate's weights: both must have the same loss. Warm-up and compilation are not timed.
"""

import argparse
from pathlib import Path
from typing import Any

import compare_nanogpt as compare
import torch
from compare_nanogpt import DEFAULT, SHAPES, WARMUP
from torch import Tensor, nn
from torch.nn import functional as F
from torch_peer import TorchPeer, compare_with_peers, run_script

from qkablate.config import Config
from qkablate.config.variant import mlp_units
from qkablate.training.resolve import RunPlan

EXAMPLE = """examples
  python scripts/compare_llama.py
  python scripts/compare_llama.py --shapes small --variants standard,no_q --rounds 21
"""


class Block(nn.Module):
    """A block of Llama 2 without grouped keys."""

    def __init__(self, d_model: int, heads: int, units: int, eps: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.RMSNorm(d_model, eps), nn.RMSNorm(d_model, eps)
        self.w_q, self.w_k, self.w_v, self.w_o = (
            nn.Linear(d_model, d_model, bias=False) for _ in range(4)
        )
        self.gate, self.up = (nn.Linear(d_model, units, bias=False) for _ in range(2))
        self.down = nn.Linear(units, d_model, bias=False)

    def forward(self, x_BTD: Tensor, cos_TK: Tensor, sin_TK: Tensor) -> Tensor:
        batch, context, d_model = x_BTD.shape
        normed_BTD = self.norm_1(x_BTD)
        q_BHTK, k_BHTK, v_BHTK = (
            matrix(normed_BTD).view(batch, context, self.heads, -1).transpose(1, 2)
            for matrix in (self.w_q, self.w_k, self.w_v)
        )
        q_BHTK, k_BHTK = (rotate(part, cos_TK, sin_TK) for part in (q_BHTK, k_BHTK))
        o_BHTK = F.scaled_dot_product_attention(q_BHTK, k_BHTK, v_BHTK, is_causal=True)
        x_BTD = x_BTD + self.w_o(o_BHTK.transpose(1, 2).reshape(batch, context, d_model))
        normed_BTD = self.norm_2(x_BTD)
        out_BTD: Tensor = x_BTD + self.down(F.silu(self.gate(normed_BTD)) * self.up(normed_BTD))
        return out_BTD


def rotate(x_BHTK: Tensor, cos_TK: Tensor, sin_TK: Tensor) -> Tensor:
    """Rotate pairs of dimensions half a head apart."""
    first, second = x_BHTK.chunk(2, -1)
    return x_BHTK * cos_TK + torch.cat([-second, first], -1) * sin_TK


class Llama(nn.Module):
    """Blocks of Llama 2 between an embedding and the output that is tied to it."""

    def __init__(self, config: Config, vocabulary: int, units: int) -> None:
        super().__init__()
        model = config.model
        self.tokens = nn.Embedding(vocabulary, model.d_model)
        self.blocks = nn.ModuleList(
            Block(model.d_model, model.heads, units, model.norm_eps) for _ in range(model.layers)
        )
        self.norm = nn.RMSNorm(model.d_model, model.norm_eps)
        width = model.d_model // model.heads
        rates_K = model.rope_theta ** -(torch.arange(0, width, 2) / width)
        angles_TK = torch.arange(model.context)[:, None] * torch.cat([rates_K, rates_K])
        self.register_buffer("cos_TK", angles_TK.cos())
        self.register_buffer("sin_TK", angles_TK.sin())

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        x_BTD = self.tokens(tokens_BT)
        for block in self.blocks:
            x_BTD = block(x_BTD, self.cos_TK, self.sin_TK)
        logits_BTV = self.norm(x_BTD) @ self.tokens.weight.T
        return F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())


@torch.no_grad()
def copy_weights(ours: Any, theirs: Any) -> None:
    """Copy qkablate's weights, whose matrices act on rows."""
    pairs = [(theirs.tokens, ours.token_embedding.weight), (theirs.norm, ours.norm.weight)]
    for block, own in zip(theirs.blocks, ours.blocks, strict=True):
        qk, ov, mlp = own.attention.qk, own.attention.ov, own.mlp
        pairs += [(block.norm_1, own.norm_1.weight), (block.norm_2, own.norm_2.weight)]
        pairs += [(block.w_q, qk.w_q.T), (block.w_k, qk.w_k.T)]
        pairs += [(block.w_v, ov.w_v.T), (block.w_o, ov.w_o.T)]
        pairs += [(block.gate, mlp.gate.weight), (block.up, mlp.up.weight)]
        pairs += [(block.down, mlp.down.weight)]
    for module, weight in pairs:
        module.weight.copy_(weight)


def make_peers(plan: RunPlan) -> list[TorchPeer]:
    """Return the plain model with qkablate's weights, eager and compiled."""
    config, peers = plan.config, []
    ours: Any = plan.build().to_empty(device="cpu").init_(config.seeds.init)
    for compiled in (False, True):
        model = Llama(config, plan.data.vocabulary, mlp_units(config.model))
        copy_weights(ours, model)
        peers.append(TorchPeer("Llama block in torch", model, plan, compiled))
    assert_same_loss(ours.to(config.device), peers[0])
    return peers


@torch.no_grad()
def assert_same_loss(ours: nn.Module, peer: TorchPeer) -> None:
    """Check that both are the same function of the same parameters."""
    counts = [sum(p.numel() for p in model.parameters()) for model in (ours, peer.model)]
    assert counts[0] == counts[1], counts
    (batch,) = peer.prefetcher.take(0)
    logits_NV = ours(*batch.inputs).flatten(0, 1)
    own = F.cross_entropy(logits_NV, batch.targets_NA.flatten())
    torch.testing.assert_close(own, peer.model(*batch.inputs, batch.targets_NA), rtol=1e-4, atol=0)


def configure(label: str, variant: str, rounds: int, folder: Path, precision: str) -> Config:
    """Return the config of `qkablate train model=llama_nano` with this shape."""
    shape = SHAPES[label]
    more = ("model=llama_nano", f"precision={precision}")
    return compare.configure(shape, variant, WARMUP + rounds * shape.steps, folder, *more)


def compare_shape(label: str, args: argparse.Namespace, folder: Path) -> None:
    shape = SHAPES[label]
    tokens = shape.batch_size * shape.context
    compare_with_peers(label, args, folder, configure, make_peers, shape.steps, tokens)


if __name__ == "__main__":
    run_script(
        __doc__ or "",
        EXAMPLE,
        "block in torch",
        SHAPES,
        ",".join(DEFAULT),
        9,
        configure,
        compare_shape,
    )

"""Compare the training speed of qkablate's Llama block and of one written plainly in torch.

Same machine, same sizes and parameters, same batches. The peer is the block of Llama 2 as one
writes it in torch: nn.RMSNorm, SwiGLU, rotary positions, F.scaled_dot_product_attention, AdamW,
clipping, in fp32, eager and compiled. qkablate runs its Trainer's own step, in the precision of
`auto` and in fp32. They take turns, in a different order each round: tokens/s is the median over
the rounds, the ratio the median (minimum … maximum) within a round. Before, the peer is given
qkablate's weights: both must have the same loss. Warm-up and compilation are not timed.
"""

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import compare_nanogpt as compare
import torch
from compare_nanogpt import DEFAULT, SHAPES, WARMUP, Qkablate, Shape, measure, warm_up
from hydra import initialize_config_dir
from torch import Tensor, nn
from torch.nn import functional as F

from qkablate.compose.register import register
from qkablate.config import Config, conf_dir
from qkablate.config.variant import mlp_units
from qkablate.errors import UserError, not_one_of
from qkablate.training import hardware
from qkablate.training.optim import learning_rate
from qkablate.training.prefetcher import Prefetcher, batch_reader
from qkablate.training.resolve import RunPlan, plan_run

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


class TorchLlama:
    """The plain model and a common training step for it."""

    def __init__(self, plan: RunPlan, compiled: bool) -> None:
        self.name = f"Llama block in torch (fp32, {'compiled' if compiled else 'eager'})"
        self.config = config = plan.config
        ours: Any = plan.build().to_empty(device="cpu").init_(config.seeds.init)
        self.model: Any = Llama(config, plan.data.vocabulary, mlp_units(config.model))
        copy_weights(ours, self.model)
        self.model.to(config.device)
        first, second = config.optim.betas
        vectors = [p for p in self.model.parameters() if p.dim() < 2]
        matrices = [p for p in self.model.parameters() if p.dim() >= 2]
        self.optimizer = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": config.optim.weight_decay},
                {"params": vectors, "weight_decay": 0.0},
            ],
            config.optim.lr,
            (first, second),
            fused=True,
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


def assert_same_loss(plan: RunPlan, peer: TorchLlama) -> None:
    """Check that both are the same function of the same parameters."""
    ours = plan.build().to_empty(device="cpu").init_(plan.config.seeds.init).to(plan.config.device)
    counts = [sum(p.numel() for p in model.parameters()) for model in (ours, peer.model)]
    assert counts[0] == counts[1], counts
    (batch,) = peer.prefetcher.take(0)
    with torch.no_grad():
        logits_BTV = ours(*batch.inputs)
        own = F.cross_entropy(logits_BTV.flatten(0, 1).float(), batch.targets_NA.flatten())
        other = peer.model(*batch.inputs, batch.targets_NA)
    torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-4)


def run(label: str, args: argparse.Namespace, folder: Path) -> None:
    """Print the rows of one shape."""
    shape = SHAPES[label]
    torch.compiler.reset()  # guards of the last shape would slow this one down
    steps = WARMUP + args.rounds * shape.steps
    auto = plan_run(configure(shape, "standard", steps, folder, "auto"))
    hardware.configure_process(auto.config)
    peers = [TorchLlama(auto, compiled) for compiled in (False, True)]
    fp32 = plan_run(configure(shape, "standard", steps, folder, "fp32"))
    assert_same_loss(fp32, peers[0])
    plans = [
        plan_run(configure(shape, name, steps, folder, precision))
        for name in args.variants
        for precision in dict.fromkeys((auto.config.precision, "fp32"))
    ]
    candidates: list[Any] = [*peers, *(Qkablate(plan) for plan in plans)]
    warm_up(label, candidates)
    speeds = measure(candidates, args.rounds, shape.steps, shape.batch_size * shape.context)
    best = max((speeds[p.name] for p in peers if p in candidates), key=statistics.median)
    for name, speed in speeds.items():
        ratios = [a / b for a, b in zip(speed, best, strict=True)]
        print(
            f"{label:<7}{name:<42}{statistics.median(speed):>10,.0f}"
            f"{statistics.median(ratios):>8.2f}  ({min(ratios):.2f} … {max(ratios):.2f})",
            flush=True,
        )


def configure(shape: Shape, variant: str, steps: int, folder: Path, precision: str) -> Config:
    """Return the config of `qkablate train model=llama_nano` with this shape."""
    more = ("model=llama_nano", f"precision={precision}")
    return compare.configure(shape, variant, steps, folder, *more)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n\n")[0],
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--shapes", default=",".join(DEFAULT), help="small, large, gpt2")
    parser.add_argument("--variants", default="standard", help="default: standard")
    parser.add_argument("--rounds", type=int, default=9, help="default: 9")
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
        print(f"{'shape':<49}{'tokens/s':>10}   ratio to the best block in torch")
        for label in args.shapes:
            run(label, args, Path(folder))


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        print(f"compare_llama: {error}", file=sys.stderr)
        sys.exit(2)

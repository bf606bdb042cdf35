"""Time one attention layer, forward and backward, for every variant relative to standard.

    python scripts/time_layers.py
    python scripts/time_layers.py --shape 4,12,1024,768 --precision fp32 --variants merged_w

All variants take turns in one process; the table shows medians, the FLOP ratio (a causal query sees
half the keys, for every variant), and whether the time is within 1.5 × max(1, FLOP ratio).
"""

import argparse
import platform
import statistics
import subprocess
import time
from collections.abc import Callable

import torch

from qkablate import __version__
from qkablate.config import ModelConfig, VariantConfig, resolve_variant, variants
from qkablate.errors import UserError
from qkablate.models.catalogue import make_attention
from qkablate.models.cost import compute_attention_cost, mean_causal_keys
from qkablate.training.hardware import has_fast_bf16

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
ALLOWED = 1.5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shape", default="16,6,256,384", help="batch, heads, context, d_model")
    parser.add_argument("--precision", default="fp32,bf16")
    parser.add_argument("--variants", default="")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--kernel", default="auto")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    batch, heads, context, d_model = (int(part) for part in args.shape.split(","))
    names = args.variants.split(",") if args.variants else ["standard", *variants()]
    names = list(dict.fromkeys(["standard", *names]))
    print(
        f"qkablate {__version__} ({_commit()}), torch {torch.__version__}, {platform.processor()},"
        f" {args.device}, {args.threads} threads, B {batch}, h {heads}, T {context}, d {d_model}"
    )
    for precision in args.precision.split(","):
        if precision == "bf16" and args.device == "cpu" and not has_fast_bf16():
            print("bf16 is slower than fp32 on this CPU")
        _report(names, precision, batch, heads, context, d_model, args)


def _report(
    names: list[str],
    precision: str,
    batch: int,
    heads: int,
    context: int,
    d_model: int,
    args: argparse.Namespace,
) -> None:
    model = ModelConfig(d_model=d_model, heads=heads, context=context)
    steps, flops, kernels = {}, {}, {}
    for name in names:
        variant = resolve_variant(VariantConfig(**variants()[name]), model)
        try:
            layer = make_attention(
                model, variant, device=args.device, precision=precision, kernel=args.kernel
            )
        except UserError as refused:
            print(f"left out: {refused}")
            continue
        layer = layer.to(args.device)
        for parameter in layer.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
        steps[name] = _make_step(layer, batch, context, d_model, precision, args.device)
        keys = mean_causal_keys(context)
        cost = compute_attention_cost(
            layer, keys=keys, context=context, tokens_per_pass=batch * context
        )
        flops[name], kernels[name] = cost.flops, layer.kernel
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(args.rounds + 2):
        for name, step in steps.items():
            took = step()
            if turn >= 2:
                times[name].append(took)
    base = statistics.median(times["standard"])
    print(f"\n{precision:<22}  {'kernel':<9}  {'ms':>8}  {'time':>6}  {'FLOPs':>6}  {'allowed':>7}")
    for name, seconds in times.items():
        median, ratio = statistics.median(seconds), flops[name] / flops["standard"]
        allowed = ALLOWED * max(1.0, ratio)
        over = "" if median / base <= allowed else "  OVER"
        print(
            f"{name:<22}  {kernels[name]:<9}  {1000 * median:8.1f}  {median / base:6.2f}"
            f"  {ratio:6.2f}  {allowed:7.2f}{over}"
        )


def _make_step(
    layer: torch.nn.Module, batch: int, context: int, d_model: int, precision: str, device: str
) -> Callable[[], float]:
    x_BTD = torch.randn(batch, context, d_model, device=device, requires_grad=True)
    grad_BTD = torch.randn(batch, context, d_model, device=device)

    def step() -> float:
        if device != "cpu":
            torch.cuda.synchronize()
        began = time.perf_counter()
        with torch.autocast(device, DTYPES[precision], enabled=precision != "fp32"):
            out_BTD = layer(x_BTD)
        (out_BTD * grad_BTD).sum().backward()
        if device != "cpu":
            torch.cuda.synchronize()
        took = time.perf_counter() - began
        x_BTD.grad = None
        layer.zero_grad(set_to_none=True)
        return took

    return step


def _commit() -> str:
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return done.stdout.strip() or "no commit"


if __name__ == "__main__":
    main()

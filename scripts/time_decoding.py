"""Time a decoding step of one attention layer: standard, and mla, absorbed and by head.

    python scripts/time_decoding.py
    python scripts/time_decoding.py --contexts 1024,16384 --rank 512 --device cuda

A step attends from one new token of each sequence to a full cache. mla caches r numbers a token.
The layer's own step absorbs W_k and W_v: each head scores and averages the latent stream itself;
"by head" computes the keys and values of every head from it first. All take turns; the table shows
medians, and medians of the ratios to standard within a round. Both ways of mla give the same.
"""

import argparse
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from qkablate import __version__
from qkablate.attention.cache import Cache
from qkablate.config import ModelConfig, VariantConfig, resolve_variant, variants
from qkablate.models.catalogue import make_attention

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--contexts", default="256,1024,4096")
    parser.add_argument("--shape", default="8,12,768", help="sequences, heads, d_model")
    parser.add_argument("--rank", type=int, default=128, help="of mla's latent stream")
    parser.add_argument("--precision", default="fp32", choices=DTYPES)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--kernel", default="auto")
    args = parser.parse_args()
    batch, heads, d_model = (int(part) for part in args.shape.split(","))
    print(
        f"qkablate {__version__}, torch {torch.__version__}, {platform.machine()}, {args.device},"
        f" {torch.get_num_threads()} threads, {args.precision}, B {batch}, h {heads}, d {d_model},"
        f" r {args.rank}"
    )
    print(f"{'context':>8}  {'':<16}{'ms':>8}{'ratio':>8}{'cache per token':>18}")
    for context in map(int, args.contexts.split(",")):
        _report(batch, heads, d_model, context, args)


@torch.no_grad()
def _report(batch: int, heads: int, d_model: int, context: int, args: argparse.Namespace) -> None:
    dtype, device = DTYPES[args.precision], args.device
    model = ModelConfig(d_model=d_model, heads=heads, context=context, bias=False)
    torch.manual_seed(0)
    seen_BSD = torch.randn(batch, context - 1, d_model, device=device, dtype=dtype)
    new_B1D = torch.randn(batch, 1, d_model, device=device, dtype=dtype)
    ways: dict[str, Callable[[], Tensor]] = {}
    sizes: dict[str, int] = {}
    for name in ("standard", "mla"):
        rank = {"rank": args.rank} if name == "mla" else {}
        chosen = resolve_variant(VariantConfig(**variants()[name] | rank), model)
        layer: Any = make_attention(
            model, chosen, device=device, precision=args.precision, kernel=args.kernel
        )
        layer = layer.to(device, dtype).eval()
        for parameter in layer.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
        cache = Cache(context)
        layer(seen_BSD, cache=cache)
        size = cache.bytes_per_token()
        if name == "standard":
            ways[name], sizes[name] = _own_step(layer, cache, new_B1D), size
        else:
            ways["mla, absorbed"] = _own_step(layer, cache, new_B1D)
            ways["mla, by head"] = _by_head(layer, cache, new_B1D)
            sizes |= {"mla, absorbed": size, "mla, by head": size}
    tolerance = 1e-3 if dtype == torch.float32 else 0.1
    torch.testing.assert_close(
        ways["mla, absorbed"](), ways["mla, by head"](), rtol=tolerance, atol=tolerance
    )
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    order = list(ways)
    for turn in range(args.rounds):
        shift = turn % len(order)
        for name in (*order[shift:], *order[:shift]):
            _synchronize(device)
            began = time.perf_counter()
            ways[name]()
            _synchronize(device)
            seconds[name].append(time.perf_counter() - began)
    for name, own in seconds.items():
        ratios = [a / b for a, b in zip(own, seconds["standard"], strict=True)]
        print(
            f"{context:>8}  {name:<16}{1e3 * statistics.median(own):>8.2f}"
            f"{statistics.median(ratios):>8.2f}{sizes[name]:>12,} bytes",
            flush=True,
        )


def _own_step(layer: Any, cache: Cache, new_B1D: Tensor) -> Callable[[], Tensor]:
    """Return the layer's own step at the end of the cache, which it does not lengthen."""
    length = cache.length

    def step() -> Tensor:
        cache.length = length
        out_B1D: Tensor = layer(new_B1D, cache=cache)
        return out_B1D

    return step


def _by_head(layer: Any, cache: Cache, new_B1D: Tensor) -> Callable[[], Tensor]:
    """Return the step in which every head has keys and values of its own."""
    length = cache.length

    def step() -> Tensor:
        cache.length = length
        c_B1SR = cache.append("k", layer.qk.keys(new_B1D))
        o_BH1K = F.scaled_dot_product_attention(
            layer.qk.head_queries(new_B1D),
            layer.qk.head_keys(c_B1SR),
            layer.ov.head_values(c_B1SR),
            scale=layer.scale,
        )
        out_B1D: Tensor = layer.ov.write_heads(o_BH1K)
        return out_B1D

    return step


def _synchronize(device: str) -> None:
    if device != "cpu":
        torch.accelerator.synchronize()


if __name__ == "__main__":
    main()

"""Compare qkablate with models written in torch: their training step, the rounds and the rows."""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import compare_nanogpt as compare
import torch
from compare_nanogpt import Qkablate, measure, warm_up
from hydra import initialize_config_dir
from torch import nn

from qkablate.compose.register import register
from qkablate.config import Config, conf_dir
from qkablate.errors import UserError, not_one_of
from qkablate.training import hardware
from qkablate.training.optim import learning_rate
from qkablate.training.prefetcher import Prefetcher, batch_reader
from qkablate.training.resolve import RunPlan, plan_run

# The config of a shape's label, a variant, a number of rounds, a folder and a precision.
Configure = Callable[[str, str, int, Path, str], Config]


class TorchPeer:
    """A model that returns its loss, and a common training step for it."""

    def __init__(self, name: str, model: nn.Module, plan: RunPlan, compiled: bool) -> None:
        self.name = f"{name} (fp32, {'compiled' if compiled else 'eager'})"
        self.config = config = plan.config
        self.model = model.to(config.device)
        parameters = list(self.model.parameters())
        groups = [
            {
                "params": [p for p in parameters if (p.dim() >= 2) is decays],
                "weight_decay": config.optim.weight_decay * decays,
            }
            for decays in (True, False)
        ]
        betas = (config.optim.betas[0], config.optim.betas[1])
        self.optimizer = torch.optim.AdamW(groups, config.optim.lr, betas, fused=True)
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


def compare_with_peers(
    label: str,
    args: argparse.Namespace,
    folder: Path,
    configure: Configure,
    make_peers: Callable[[RunPlan], list[TorchPeer]],
    steps: int,
    tokens: int,
) -> None:
    """Print the rows of one shape; a round has so many steps of so many tokens."""
    torch.compiler.reset()  # guards of the last shape would slow this one down
    auto = plan_run(configure(label, "standard", args.rounds, folder, "auto"))
    hardware.configure_process(auto.config)
    peers = make_peers(auto)
    plans = [
        plan_run(configure(label, name, args.rounds, folder, precision))
        for name in args.variants
        for precision in dict.fromkeys((auto.config.precision, "fp32"))
    ]
    candidates: list[Any] = [*peers, *(Qkablate(plan) for plan in plans)]
    warm_up(label, candidates)
    speeds = measure(candidates, args.rounds, steps, tokens)
    theirs = [speeds[peer.name] for peer in peers if peer in candidates]
    best = max(theirs, key=statistics.median)
    for name, speed in speeds.items():
        ratios = [a / b for a, b in zip(speed, best, strict=True)]
        print(
            f"{label:<7}{name:<42}{statistics.median(speed):>10,.0f}"
            f"{statistics.median(ratios):>8.2f}  ({min(ratios):.2f} … {max(ratios):.2f})",
            flush=True,
        )


def run_script(
    doc: str,
    examples: str,
    peer: str,
    shapes: dict[str, Any],
    default: str,
    rounds: int,
    configure: Configure,
    compare_shape: Callable[[str, argparse.Namespace, Path], None],
) -> None:
    """Parse the command line, compare every shape, and exit with 2 at a user's mistake."""
    parser = argparse.ArgumentParser(
        description=doc.split("\n\n")[0],
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--shapes", default=default, help=f"{', '.join(shapes)}; default: {default}"
    )
    parser.add_argument("--variants", default="standard", help="default: standard")
    parser.add_argument("--rounds", type=int, default=rounds, help=f"default: {rounds}")
    args = parser.parse_args()
    names, args.variants = args.shapes.split(","), args.variants.split(",")
    try:
        if wrong := next((name for name in names if name not in shapes), None):
            raise UserError(f"--shapes: {not_one_of(wrong, shapes, '--help')}")
        register()
        with (
            initialize_config_dir(str(conf_dir()), version_base="1.3"),
            tempfile.TemporaryDirectory() as folder,
        ):
            config = hardware.resolve(configure(names[0], "standard", 1, Path(folder), "auto"))
            print(f"{compare.format_header(config)}, {time.strftime('%H:%M')}\n")
            print(f"{'shape':<49}{'tokens/s':>10}   ratio to the best {peer}")
            for label in names:
                compare_shape(label, args, Path(folder))
    except UserError as error:
        print(f"{parser.prog.removesuffix('.py')}: {error}", file=sys.stderr)
        sys.exit(2)

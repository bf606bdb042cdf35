"""Time the steps of runs that train as one vmapped program against those of the runs alone.

    python scripts/time_vmap.py
    python scripts/time_vmap.py --shapes 16:4:16,32:8:32 --counts 4,8

Both take turns in one process; the ratio is of medians: how many steps of all runs a program takes
in the time in which the runs, one after the other, take one each.
"""

import argparse
import itertools
import statistics
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch

from qkablate import __version__
from qkablate.compose.configs import make_config, open_hydra
from qkablate.errors import UserError
from qkablate.runs.run import read_cpu_name
from qkablate.training import hardware
from qkablate.training.distributed.ranks import SINGLE_PROCESS
from qkablate.training.resolve import RunPlan, plan_run
from qkablate.training.step import StepFactory, TrainStep
from qkablate.training.vmapped.stack import RunStack, StackedStep


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shapes", default="32:16:64,64:16:64", help="d_model:batch:context, …")
    parser.add_argument("--counts", default="4,8,16", help="runs of a program")
    parser.add_argument("--precisions", default="fp32")
    parser.add_argument("--variant", default="standard")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    cpu, threads = read_cpu_name(), 1
    torch.set_num_threads(threads)
    print(f"qkablate {__version__}, torch {torch.__version__}, {cpu}, {threads} thread")
    with TemporaryDirectory() as folder, open_hydra():
        text = Path(folder, "text.txt")
        text.write_bytes(np.random.default_rng(0).integers(97, 123, 2**16).astype("u1").tobytes())
        cells = (args.precisions.split(","), args.shapes.split(","), args.counts.split(","))
        for precision, shape, count in itertools.product(*cells):
            if shape.count(":") != 2 or not count.isdecimal() or int(count) < 2:
                raise UserError(
                    f"shape '{shape}', count '{count}': allowed is d_model:batch:context, as"
                    " 32:16:64, and 2 runs or more"
                )
            d_model, batch, context = shape.split(":")
            words = {
                **{"variant": args.variant, "data": "text", "data.path": str(text)},
                **{"data.cache": f"{folder}/cache", "out": folder, "tracking.wandb": "disabled"},
                **{"model.layers": "2", "model.heads": "4", "model.d_model": d_model},
                **{"model.context": context, "train.batch_size": batch, "train.vmap": "2"},
                **{"precision": precision, "threads": str(threads), "device": "cpu"},
            }
            plan = plan_run(make_config(words))
            alone, together = time_steps(plan, int(count), args.rounds)
            print(
                f"{precision} d {d_model} B {batch} T {context} K {count}: alone {1e3 * alone:.1f}"
                f" ms a step, together {1e3 * together:.1f} ms; ratio {alone / together:.2f}",
                flush=True,
            )


def time_steps(plan: RunPlan, count: int, rounds: int) -> tuple[float, float]:
    """Return the median seconds of a run's step, alone and in a program of `count` runs."""
    hardware.configure_process(plan.config)
    single = _make_step(plan, TrainStep)
    stack = RunStack([_make_step(plan, StackedStep) for _ in range(count)])
    alone, together = list[float](), list[float]()
    for number in range(rounds + 1):
        alone += [_time(lambda n: single(n), 2 * number + i) for i in range(2)]
        together.append(_time(lambda n: stack([n] * count), number) / count)
    return statistics.median(alone[2:]), statistics.median(together[1:])


def _time(action, number: int) -> float:  # type: ignore[no-untyped-def]
    return hardware.time_action(lambda: action(number), "cpu")


def _make_step(plan: RunPlan, kind: StepFactory):  # type: ignore[no-untyped-def]
    model = plan.build().to_empty(device="cpu").init_(0)
    return kind(plan, model, None, SINGLE_PROCESS)


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        print(f"time_vmap: {error}", file=sys.stderr)
        sys.exit(2)

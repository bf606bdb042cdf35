"""Compare the training speed of qkablate and nanoGPT: same machine, same shape, same tokens.

nanoGPT runs as in its train.py, eager and compiled: fp32 on a CPU, autocast on a GPU. qkablate runs
its Trainer's own step. Both see the same windows of one text at the same learning rates. They take
turns, in a different order each round: tokens/s is the median over the rounds, the ratio the median
(minimum … maximum) within a round. Compilation and warm-up are not timed.
"""

import argparse
import contextlib
import hashlib
import importlib.util
import io
import statistics
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hydra import compose, initialize_config_dir
from torch import Tensor

from qkablate.attention.kernels import matmul
from qkablate.compose.register import register
from qkablate.config import Config, conf_dir, from_hydra, variants
from qkablate.data.batches import sequential_batches
from qkablate.data.corpus import Corpus
from qkablate.errors import UserError, nearest_hint
from qkablate.randomness import named_generator
from qkablate.runs.run import describe_environment
from qkablate.training import hardware
from qkablate.training.loop import Trainer
from qkablate.training.optim import learning_rate
from qkablate.training.resolve import RunPlan, plan_run

WARMUP = 5  # steps before the clock starts
EVAL_BATCH = 8192  # tokens
EXAMPLE = """examples
  python scripts/compare_nanogpt.py --nanogpt ~/src/nanoGPT
  python scripts/compare_nanogpt.py --nanogpt ~/src/nanoGPT --shapes small --variants standard,no_q
"""


@dataclass(frozen=True)
class Shape:
    layers: int
    d_model: int
    heads: int
    context: int
    batch_size: int
    steps: int  # in one round


SHAPES = {
    "small": Shape(4, 128, 4, 64, 12, steps=50),
    "large": Shape(6, 384, 6, 256, 16, steps=4),
    "gpt2": Shape(12, 768, 12, 1024, 16, steps=5),
}
DEFAULT = ("small", "large")


class Qkablate:
    """The Trainer of a qkablate run."""

    def __init__(self, plan: RunPlan) -> None:
        config = plan.config
        how = "graphs" if config.compile == "graphs" else "compiled" if config.compile else "eager"
        self.name = f"qkablate {config.variant.name} ({config.precision}, {how})"
        model = plan.build().to_empty(device="cpu").init_(config.seeds.init).to(config.device)
        self.trainer = Trainer(plan, model, None)

    def step(self, step: int) -> None:
        matmul.set_backend(self.trainer.config.matmul)  # a setting of the whole process
        self.trainer._step(step)

    def loss(self) -> float:
        matmul.set_backend(self.trainer.config.matmul)
        return self.trainer.evaluate("val")["loss"]


class NanoGPT:
    """The model and optimizer of nanoGPT, with the training step of its train.py."""

    def __init__(self, module: Any, plan: RunPlan, compiled: bool, data: Path) -> None:
        config, self.plan, self.data = plan.config, plan, data
        kind = "cuda" if config.device.startswith("cuda") else "cpu"
        precision = config.precision if kind == "cuda" else "fp32"
        self.name = f"nanoGPT ({precision}, {'compiled' if compiled else 'eager'})"
        model, optim = config.model, config.optim
        torch.manual_seed(config.seed)
        shape = {"n_layer": model.layers, "n_head": model.heads, "n_embd": model.d_model}
        shape |= {"block_size": model.context, "vocab_size": plan.data.vocabulary}
        with contextlib.redirect_stdout(io.StringIO()):  # it prints its parameter count
            gpt = module.GPT(module.GPTConfig(**shape, dropout=0.0, bias=False))
            self.model = gpt.to(config.device)
            self.optimizer = gpt.configure_optimizers(
                optim.weight_decay, optim.lr, tuple(optim.betas), kind
            )
        self.forward = torch.compile(self.model) if compiled else self.model
        self.scaler = torch.amp.GradScaler(kind, enabled=precision == "fp16")
        self.autocast: contextlib.AbstractContextManager[Any] = (
            torch.autocast(kind, hardware.DTYPES[precision])
            if kind == "cuda"
            else contextlib.nullcontext()
        )
        self.batch = self.read_batch(0)

    def step(self, step: int) -> None:
        config = self.plan.config
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(config.optim, step, int(config.train.steps))
        with self.autocast:
            loss = self.forward(*self.batch)[1]
        self.batch = self.read_batch(step + 1)  # while a GPU is still busy with the forward pass
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), config.optim.clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)

    def read_batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Return the windows that qkablate draws for this step, read as train.py does."""
        config, tokens = self.plan.config, np.memmap(self.data, dtype=np.uint16, mode="r")
        context, size = config.model.context, config.train.batch_size
        generator = named_generator(config.seeds.data, "batch", step)
        starts = generator.integers(len(tokens) - context, size=size)

        def windows(shift: int) -> Tensor:
            rows = (tokens[i + shift : i + shift + context].astype(np.int64) for i in starts)
            batch = torch.stack([torch.from_numpy(row) for row in rows])
            pinned = batch.pin_memory() if config.device.startswith("cuda") else batch
            return pinned.to(config.device, non_blocking=True)

        return windows(0), windows(1)

    @torch.no_grad()
    def loss(self) -> float:
        self.model.eval()
        context, device = self.plan.config.model.context, self.plan.config.device
        tokens_N, losses = get_corpus(self.plan).split("val"), []
        for batch in sequential_batches(
            tokens_N, batch_size=EVAL_BATCH // context, context=context
        ):
            tokens, targets = batch.tokens_NT, batch.targets_NA
            with self.autocast:
                losses.append(self.model(tokens.to(device), targets.to(device))[1].item())
        self.model.train()
        return statistics.fmean(losses)


def get_corpus(plan: RunPlan) -> Corpus:
    """Return the text of a run, whose tokens nanoGPT is given, too."""
    assert isinstance(plan.data, Corpus)
    return plan.data


def configure(shape: Shape, variant: str, steps: int, folder: Path, *more: str) -> Config:
    """Return the config of `qkablate train` with this shape."""
    words = [f"model.{key}={getattr(shape, key)}" for key in ("layers", "d_model", "heads")]
    words += [f"model.context={shape.context}", f"train.batch_size={shape.batch_size}"]
    words += [f"variant={variant}", f"train.steps={steps}", "tracking.wandb=disabled", *more]
    config = from_hydra(compose("train", words))
    config.out, config.data.cache = str(folder), str(folder / "data")
    config.data.val_tokens = 4 * EVAL_BATCH + 1  # fills whole batches
    return config


def make_candidates(module: Any, shape: Shape, args: argparse.Namespace, folder: Path) -> list[Any]:
    """Return nanoGPT eager and compiled, then every variant in `auto` precision.

    On a CPU, where nanoGPT trains in fp32, in that too; on a GPU compiled ones with graphs, too.
    """
    steps = WARMUP + args.rounds * (args.steps or shape.steps)
    auto = plan_run(configure(shape, "standard", steps, folder))
    hardware.configure_process(auto.config)
    data = folder / "nanogpt.bin"
    get_corpus(auto).split("train").astype(np.uint16).tofile(data)
    candidates: list[Any] = [NanoGPT(module, auto, compiled, data) for compiled in (False, True)]
    is_cuda = auto.config.device.startswith("cuda")
    precisions = dict.fromkeys((auto.config.precision, *(() if is_cuda else ("fp32",))))
    compile_modes = {auto.config.compile: None}
    if args.compile:
        compile_modes |= dict.fromkeys((True, "graphs") if is_cuda else (True,))
    for variant, precision, compiled in product(args.variants, precisions, compile_modes):
        words = (f"precision={precision}", f"compile={compiled}")
        candidates.append(Qkablate(plan_run(configure(shape, variant, steps, folder, *words))))
    ours = candidates[2].trainer.train_step.prefetcher.take(0)[0]
    pairs = zip(candidates[0].batch, (ours.tokens_NT, ours.targets_NA), strict=True)
    assert all(torch.equal(theirs.cpu(), mine.cpu()) for theirs, mine in pairs)
    return candidates


def warm_up(label: str, candidates: list[Any]) -> None:
    """Train each candidate for some steps, and remove those that fail."""
    for candidate in list(candidates):
        try:
            for step in range(WARMUP):
                candidate.step(step)
        except RuntimeError as error:  # e.g. without a C++ compiler
            print(f"{label:<7}{candidate.name}: left out: {str(error).strip().splitlines()[0]}")
            candidates.remove(candidate)


def measure(candidates: list[Any], rounds: int, steps: int, tokens: int) -> dict[str, list[float]]:
    """Return the tokens per second of each candidate in each round."""
    speeds: dict[str, list[float]] = {candidate.name: [] for candidate in candidates}
    for turn in range(rounds):
        first, shift = WARMUP + turn * steps, turn % len(candidates)
        for candidate in (*candidates[shift:], *candidates[:shift]):
            synchronize()
            began = time.perf_counter()
            for step in range(first, first + steps):
                candidate.step(step)
            synchronize()
            speeds[candidate.name].append(steps * tokens / (time.perf_counter() - began))
    return speeds


def synchronize() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def compare(label: str, module: Any, args: argparse.Namespace, folder: Path) -> None:
    """Print the rows of one shape."""
    shape = SHAPES[label]
    torch.compiler.reset()  # guards of the last shape would slow this one down
    candidates = make_candidates(module, shape, args, folder)
    before = {candidate.name: candidate.loss() for candidate in candidates}
    warm_up(label, candidates)
    steps, tokens = args.steps or shape.steps, shape.batch_size * shape.context
    speeds = measure(candidates, args.rounds, steps, tokens)
    theirs = [speeds[candidate.name] for candidate in candidates if isinstance(candidate, NanoGPT)]
    best = max(theirs, key=statistics.median)
    for candidate in candidates:
        ratios = [a / b for a, b in zip(speeds[candidate.name], best, strict=True)]
        print(
            f"{label:<7}{candidate.name:<38}{statistics.median(speeds[candidate.name]):>10,.0f}"
            f"{statistics.median(ratios):>8.2f}  ({min(ratios):.2f} … {max(ratios):.2f})"
            f"{before[candidate.name]:>9.4f}{candidate.loss():>9.4f}",
            flush=True,
        )


def import_model(checkout: Path) -> Any:
    """Import model.py of a nanoGPT checkout; sys.path is not changed."""
    file = checkout.expanduser() / "model.py"
    if not file.is_file():
        raise UserError(f"--nanogpt: there is no model.py in '{checkout}'")
    spec = importlib.util.spec_from_file_location("nanogpt_model", file)
    assert spec is not None
    assert spec.loader is not None
    sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise UserError(f"--nanogpt: '{file}' cannot be imported: {error}") from None
    if not (hasattr(module, "GPT") and hasattr(module, "GPTConfig")):
        raise UserError(f"--nanogpt: '{file}' has no GPT and GPTConfig; is it nanoGPT's?")
    return module


def format_header(config: Config, module: Path | None = None) -> str:
    """Return lines on the machine and the versions; `module` is nanoGPT's model.py."""
    facts = describe_environment(config, hardware.describe_device(config))
    machine, versions, code = facts["machine"], facts["versions"], facts["code"]
    device = "" if config.device == "cpu" else f", {machine['device']}"
    state = f"{code['commit'][:12]}{' + changes' if code['diff'] else ''}" if code else "no git"
    theirs = ""
    if module is not None:
        digest = hashlib.sha256(module.read_bytes()).hexdigest()[:12]
        theirs = f", nanoGPT's model.py {digest} (sha256)"
    return (
        f"{machine['cpu']}, {machine['cores']} cores, {config.threads} threads{device}\n"
        f"torch {versions['torch']}, qkablate {versions['qkablate']} ({state}){theirs}\n"
        f"{time.strftime('%Y-%m-%d %H:%M %z')}"
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n\n")[0],
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )

    def names(text: str) -> list[str]:
        return text.split(",")

    parser.add_argument("--nanogpt", type=Path, required=True, help="a checkout of nanoGPT")
    parser.add_argument("--shapes", type=names, default=[*DEFAULT], help="small, large, gpt2")
    parser.add_argument("--variants", type=names, default=["standard"], help="default: standard")
    parser.add_argument("--rounds", type=int, default=9, help="rounds (default: 9)")
    parser.add_argument("--steps", type=int, help="steps of a round (default: by shape)")
    parser.add_argument(
        "--compile",
        action="store_true",
        help="also time qkablate compiled, and on a GPU with CUDA graphs",
    )
    args = parser.parse_args()
    for flag, values, known in (
        ("--shapes", args.shapes, SHAPES),
        ("--variants", args.variants, variants()),
    ):
        if wrong := next((name for name in values if name not in known), None):
            listed = f"{', '.join(known)}{nearest_hint(wrong, known)}"
            raise UserError(f"{flag}: '{wrong}' is not one of {listed}")
    if args.rounds < 1 or (args.steps is not None and args.steps < 1):
        raise UserError("--rounds, --steps: give 1 or more")
    return args


def main() -> None:
    args = parse_arguments()
    module = import_model(args.nanogpt)
    warnings.filterwarnings("ignore", module="torch")
    register()
    with (
        initialize_config_dir(str(conf_dir()), version_base="1.3"),
        tempfile.TemporaryDirectory() as folder,
    ):
        config = hardware.resolve(configure(SHAPES["small"], "standard", 1, Path(folder)))
        print(format_header(config, Path(module.__file__)))
        title = f"\n{'shape':<7}{'':<38}{'tokens/s':>10}{'ratio to the best nanoGPT':>27}"
        print(f"{title}{'loss':>5} before after")
        for label in args.shapes:
            compare(label, module, args, Path(folder))


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        print(f"compare_nanogpt: {error}", file=sys.stderr)
        sys.exit(2)

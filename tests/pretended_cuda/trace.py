"""A run on the pretended device: the loop as it is, with what it launches and waits for."""

import dataclasses
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._pytree import tree_map

from qkablate.compose.configs import make_config, open_hydra
from qkablate.config import VariantConfig, resolve_variant, variants
from qkablate.data import Data
from qkablate.models import blocked_loss
from qkablate.models.base import Model
from qkablate.training import checkpoint, loop
from qkablate.training.checkpoint import Checkpoint
from qkablate.training.distributed.ranks import SINGLE_PROCESS
from qkablate.training.recorders import evaluation
from qkablate.training.recorders.checkpoint_writer import CheckpointWriter
from qkablate.training.resolve import RunPlan, plan_run
from qkablate.training.vmapped.stack import RunStack, StackedStep
from tests.pretended_cuda import watch
from tests.pretended_cuda.cases import STEPS, run_words
from tests.pretended_cuda.device import WIDEST, pretended_cuda
from tests.pretended_cuda.kept import Kept


class Lazy:
    """Data that is read with values, though the device has none."""

    def __init__(self, data: Data) -> None:
        self._data = data

    def __getattr__(self, name: str) -> Any:
        return getattr(self._data, name)

    def batches(self, **options: Any) -> "Lazy":
        with unset_fake_temporarily():
            return Lazy(self._data.batches(**options))  # type: ignore[arg-type]

    def step(self, step: int) -> Any:
        with unset_fake_temporarily():
            return self._data.step(step)  # type: ignore[union-attr]

    def sample(self, *args: Any, **options: Any) -> Any:
        with unset_fake_temporarily():
            return self._data.sample(*args, **options)

    def split_batches(self, *args: Any, **options: Any) -> Iterator[Any]:
        with unset_fake_temporarily():
            batches = list(self._data.split_batches(*args, **options))
        yield from batches


@contextmanager
def in_phase(watched: watch.Watch, name: str) -> Iterator[None]:
    """Count what happens in the context for a phase."""
    before, watched.phase = watched.phase, name
    try:
        yield
    finally:
        watched.phase = before


def phase(watched: watch.Watch, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function, which counts for a phase."""

    def counted(*args: Any, **options: Any) -> Any:
        with in_phase(watched, name):
            return function(*args, **options)

    return counted


def write(state: Checkpoint) -> int:
    """Write a checkpoint with zeros for the values that there are not; return its step, read."""

    def fill(leaf: Any) -> Any:
        if isinstance(leaf, FakeTensor):
            assert leaf.device.type == "cpu", "a checkpoint on the device"
            return torch.zeros(leaf.shape, dtype=leaf.dtype)
        return leaf

    with unset_fake_temporarily(), tempfile.TemporaryDirectory() as folder:
        weights, saved = tree_map(fill, (state.weights, state.state))
        path = checkpoint.save(Path(folder), Checkpoint(state.progress, weights, saved))
        return checkpoint.load(path, "cpu").progress.step


def trace(
    words: dict[str, str],
    capability: tuple[int, int],
    blocks: bool,
    folder: Path,
    runs: int = 1,
) -> dict[str, Any]:
    """Train, evaluate and write a checkpoint; return what was noticed.

    Several runs only take their steps, as one program.
    """
    whole = run_words(words, folder)
    loop.WARM_UP = 0  # no step is waited for to measure the speed
    evaluation.EVAL_TOKENS["cuda"] = evaluation.EVAL_NUMBERS = 1024  # several batches
    blocked_loss.LOGITS_PER_BLOCK = 2**15 if blocks else 2**25
    with pretended_cuda(capability):
        with unset_fake_temporarily(), open_hydra():
            # Hydra takes a third of a second for each choice of groups that is new to it.
            config = make_config({key: value for key, value in whole.items() if key != "variant"})
            named = VariantConfig(**variants()[whole.get("variant", "standard")])
            variant = resolve_variant(named, config.model)
            plan = plan_run(dataclasses.replace(config, variant=variant))
        return _train(plan) if runs == 1 else _train_program([plan] * runs)


def build_on_cuda(plan: RunPlan) -> Model:
    """Return the model on the device; `Module.to` cannot move what has no values."""
    with unset_fake_temporarily():
        model = plan.build()
    for module in model.modules():
        kinds: list[dict[str, Any]] = [module._parameters, module._buffers]
        for tensors in kinds:
            for name, tensor in tensors.items():
                if tensor is not None:
                    moved: Tensor = torch.empty(tensor.shape, dtype=tensor.dtype, device="cuda")
                    is_weight = isinstance(tensor, torch.nn.Parameter)
                    tensors[name] = torch.nn.Parameter(moved) if is_weight else moved
    return model


def _train_program(plans: list[RunPlan]) -> dict[str, Any]:
    for plan in plans:
        if not isinstance(plan.data, Lazy):
            object.__setattr__(plan, "data", Lazy(plan.data))
    with watch.Watch() as watched:
        steps = [StackedStep(plan, build_on_cuda(plan), None, SINGLE_PROCESS) for plan in plans]
        stack = RunStack(steps)
        watched.phase = "step"
        for step in range(STEPS):
            stack([step] * len(plans))
    return _noticed(watched)


def _noticed(watched: watch.Watch) -> dict[str, Any]:
    kinds = {
        "reads": watched.reads,
        "uploads": watched.uploads,
        "waits": watched.waits,
        "wide": watched.wide,
    }
    found = {
        kind: {name: dict(events) for name, events in counted.items()}
        for kind, counted in kinds.items()
    }
    return {"kinds": [*kinds], **found}


def _train(plan: RunPlan) -> dict[str, Any]:
    object.__setattr__(plan, "data", Lazy(plan.data))
    rows: list[dict[str, Any]] = []
    written: list[int] = []

    class Rows:
        def log(self, row: dict[str, Any]) -> None:
            rows.append(row)

    watched = watch.Watch()
    with watched:
        model = build_on_cuda(plan)
        checkpoints = CheckpointWriter("cuda", lambda state: written.append(write(state)))
        trainer = loop.Trainer(
            plan,
            model,
            None,
            loggers=[Rows()],
            save=checkpoints.save,
        )
        trainer._step = phase(watched, "step", trainer._step)  # type: ignore[method-assign]
        trainer._log_training = phase(watched, "log", trainer._log_training)  # type: ignore[method-assign]
        trainer.evaluate = phase(watched, "evaluate", trainer.evaluate)  # type: ignore[method-assign]
        trainer.checkpoint = phase(watched, "checkpoint", trainer.checkpoint)  # type: ignore[method-assign]
        watched.phase = "loop"
        probed = max(WIDEST, default=0)
        kept = Kept(model)
        with torch.autograd.graph.saved_tensors_hooks(kept.pack, lambda saved: saved):
            for _ in trainer.fit():
                pass
        checkpoints.wait()
        watched.phase = "full precision"  # as a map of the attention is computed
        model.eval()
        inputs = [
            torch.zeros(1, n, dtype=torch.int64, device="cuda") for n in model.input_lengths()
        ]
        model(*inputs)
    return {
        **_noticed(watched),
        "kernel": model.kernel,
        "rows": [sorted(row) for row in rows],
        "written": written,
        "probed": probed,
        "kept": kept.bytes,
    }

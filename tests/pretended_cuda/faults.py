"""Faults of CUDA code that a CPU forgives, each planted in the package for one trace."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

from qkablate.attention import layer, modifiers
from qkablate.attention.kernels import dispatch
from qkablate.models import gpt
from qkablate.training import hardware, loop, optim, prefetcher, step
from qkablate.training.optim.adamw import AdamW
from qkablate.training.recorders import evaluation

Fault = Callable[[], AbstractContextManager[None]]
FAULTS: dict[str, Fault] = {}


@contextmanager
def replaced(owner: Any, name: str, new: Any) -> Iterator[None]:
    """Replace an attribute."""
    old = getattr(owner, name)
    setattr(owner, name, new)
    try:
        yield
    finally:
        setattr(owner, name, old)


def _rotate(name: str) -> Callable[[Callable[[Tensor], Tensor]], None]:
    """Plant a function in the place of the rotation of queries and keys."""

    def register(function: Callable[[Tensor], Tensor]) -> None:
        def rotate(self: Any, x: Tensor, first: int = 0) -> Tensor:
            return function(x)

        FAULTS[name] = lambda: replaced(modifiers.Rope, "forward", rotate)

    return register


@_rotate("arange without a device")
def _(x: Tensor) -> Tensor:
    return (x * torch.arange(x.shape[-2], dtype=torch.float32)[:, None]).type_as(x)


@_rotate("eye moved to the device")
def _(x: Tensor) -> Tensor:
    return (x @ torch.eye(x.shape[-1]).to(x)).contiguous()


@_rotate("tensor made of a list")
def _(x: Tensor) -> Tensor:
    return (x * torch.tensor([1.0, 2.0], device=x.device)[0]).type_as(x)


@_rotate("float of a tensor")
def _(x: Tensor) -> Tensor:
    return x * float(x.detach().abs().max())


@_rotate("branch on a tensor")
def _(x: Tensor) -> Tensor:
    return x if (x > 0).any() else -x


@_rotate("reading by a mask")
def _(x: Tensor) -> Tensor:
    return x + x[x.detach() > 0].sum()


@_rotate("assigning by a mask")
def _(x: Tensor) -> Tensor:
    y = x.clone()
    y[x.detach() > 0] = 0
    return y


@_rotate("nonzero")
def _(x: Tensor) -> Tensor:
    return x + (x.detach() > 0).nonzero().sum()


@_rotate("last stride")
def _(x: Tensor) -> Tensor:
    return x.mT.contiguous().mT


@_rotate("fp64 angles")
def _(x: Tensor) -> Tensor:
    angle = torch.arange(x.shape[-2], device=x.device, dtype=torch.float64)[:, None]
    return (x * angle.cos()).type_as(x)


def _self_mask(like: Tensor, first: int, queries: int, keys: int, keep_first: bool) -> Tensor:
    mask = like.new_zeros(queries, keys)
    query = torch.arange(queries, device=like.device)
    mask[query, query] = -torch.inf
    return mask


FAULTS["assigning a number by indices"] = lambda: replaced(layer, "self_mask", _self_mask)


def _attend(*args: Any, kernel: str, **options: Any) -> Tensor:
    return _real_attend(*args, kernel="math", **options)


_real_attend = dispatch.attend
FAULTS["all weights are kept"] = lambda: replaced(layer, "attend", _attend)


def _attend_by_flash(*args: Any, kernel: str, **options: Any) -> Tensor:
    return _real_attend(*args, kernel="flash", **options)


for name in ("flash with a mask", "flash with padding"):
    FAULTS[name] = lambda: replaced(layer, "attend", _attend_by_flash)


def _checkpoint(block: Any, *args: Any, **options: Any) -> Any:
    return block(*args)


FAULTS["nothing is recomputed"] = lambda: replaced(gpt, "checkpoint", _checkpoint)


def _moving(change: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    def move(batch: Any, device: str) -> Any:
        inputs = tuple(map(change, batch.inputs))
        return batch._replace(inputs=inputs, targets_NA=change(batch.targets_NA))

    return move


@contextmanager
def _feeding(change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    with replaced(prefetcher, "on_device", _moving(change)):
        yield


FAULTS["batches are not pinned"] = lambda: _feeding(
    lambda x: x.contiguous().to("cuda", non_blocking=True)
)
FAULTS["batches are not contiguous"] = lambda: _feeding(
    lambda x: x.pin_memory().to("cuda", non_blocking=True)
)
FAULTS["batches are copied at once"] = lambda: _feeding(
    lambda x: x.contiguous().pin_memory().to("cuda")
)
FAULTS["batches stay on the CPU"] = lambda: _feeding(lambda x: x)


def _after(owner: Any, name: str, action: Callable[..., Any]) -> Fault:
    """Return a fault that does something after each call of a method."""
    real = getattr(owner, name)

    def call(self: Any, *args: Any, **options: Any) -> Any:
        result = real(self, *args, **options)
        action(self, result)
        return result

    return lambda: replaced(owner, name, call)


FAULTS["a wait after each step"] = _after(
    step.TrainStep, "__call__", lambda self, norm: hardware.synchronize("cuda")
)
FAULTS["the norm is read after each step"] = _after(
    step.TrainStep, "__call__", lambda self, norm: norm.cpu()
)
FAULTS["each batch of an evaluation is read"] = _after(
    evaluation.PendingLosses, "append", lambda self, _: self._losses[-1].cpu()
)
FAULTS["the log reads twice"] = _after(
    loop.Trainer, "_log", lambda self, _: float(self.train_step.loss_sum)
)


FAULTS["the peak is not reset"] = lambda: replaced(
    hardware, "reset_peak_memory", lambda device: None
)


def _clip(parameters: Any, limit: float) -> Tensor:
    return _real_clip(parameters, limit, error_if_nonfinite=True)


_real_clip = torch.nn.utils.clip_grad_norm_
FAULTS["clipping checks for NaN"] = lambda: replaced(step, "clip_grad_norm_", _clip)


def _unfused(*args: Any, **options: Any) -> Any:
    return _real_optimizer(*args, **options | {"fused": False})


_real_optimizer = AdamW
FAULTS["the optimizer is not fused"] = lambda: replaced(optim, "AdamW", _unfused)

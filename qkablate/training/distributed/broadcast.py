"""What one process has, for all: numbers as tensors, one by one, for they may be many."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed


@dataclass(frozen=True)
class _Like:
    """A tensor without its numbers."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str


def broadcast(value: Any, device: str, first: bool) -> Any:
    """The first process's value, with tensors on this one's device where they are on that one's."""
    tensors: list[Tensor] = []

    def describe(tensor: Tensor) -> _Like:
        tensors.append(tensor)
        return _Like(tuple(tensor.shape), tensor.dtype, tensor.device.type)

    def make(like: _Like) -> Tensor:
        on = "cpu" if like.device == "cpu" else device
        tensors.append(torch.empty(like.shape, dtype=like.dtype, device=on))
        return tensors[-1]

    described = [changed(value, Tensor, describe) if first else None]
    distributed.broadcast_object_list(described, src=0)
    if not first:
        value = changed(described[0], _Like, make)
    for tensor in tensors:
        distributed.broadcast(tensor.detach(), src=0)
    return value


def changed(value: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """With every `kind` in it changed."""
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, dict):
        return {key: changed(part, kind, change) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(changed(part, kind, change) for part in value)
    return value

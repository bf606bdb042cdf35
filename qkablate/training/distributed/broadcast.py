"""Broadcast of nested values from rank 0, tensors one by one because they may be large."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed


@dataclass(frozen=True)
class _TensorSpec:
    """A tensor without its values."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str


def broadcast(value: Any, device: str, is_source: bool) -> Any:
    """Return rank 0's value; tensors on its accelerator arrive on this rank's `device`."""
    tensors: list[Tensor] = []

    def describe(tensor: Tensor) -> _TensorSpec:
        tensors.append(tensor)
        return _TensorSpec(tuple(tensor.shape), tensor.dtype, tensor.device.type)

    def allocate(spec: _TensorSpec) -> Tensor:
        target = "cpu" if spec.device == "cpu" else device
        tensors.append(torch.empty(spec.shape, dtype=spec.dtype, device=target))
        return tensors[-1]

    skeleton = [map_instances(value, Tensor, describe) if is_source else None]
    distributed.broadcast_object_list(skeleton, src=0)
    if not is_source:
        value = map_instances(skeleton[0], _TensorSpec, allocate)
    for tensor in tensors:
        distributed.broadcast(tensor.detach(), src=0)
    return value


def map_instances(value: Any, kind: type, function: Callable[[Any], Any]) -> Any:
    """Apply a function to every instance of `kind` in nested dicts, lists and tuples."""
    if isinstance(value, kind):
        return function(value)
    if isinstance(value, dict):
        return {key: map_instances(part, kind, function) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map_instances(part, kind, function) for part in value)
    return value

"""Broadcast of nested values from rank 0, tensors one by one because they may be large."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed
from torch.utils._pytree import tree_map_only


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

    skeleton = [tree_map_only(Tensor, describe, value) if is_source else None]
    distributed.broadcast_object_list(skeleton, src=0)
    if not is_source:
        value = tree_map_only(_TensorSpec, allocate, skeleton[0])
    for tensor in tensors:
        distributed.broadcast(tensor.detach(), src=0)
    return value

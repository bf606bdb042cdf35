"""Sharding of weights, gradients and moments over the ranks (FSDP2).

Checkpoints hold full tensors, so that a run resumes with any number of processes, sharded or not.
"""

from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._pytree import tree_map_only

from qkablate.models.base import Model


def shard_model(model: Model, device: str, count: int) -> None:
    """Shard the model block by block: a block is gathered only while it is computed."""
    mesh = init_device_mesh(device.partition(":")[0], (count,))
    for block in model.sharding_units():
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for name in ("loss", "loss_and_hits", "log_probabilities"):
        register_fsdp_forward_method(model, name)


def shard_optimizer_state(
    state: dict[str, Any], optimizer: torch.optim.Optimizer
) -> dict[str, Any]:
    """Return this rank's part of an optimizer state that all ranks have in full."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    shards = {
        i: {
            name: shard_like(value, parameters[i]) if value.dim() else value  # 0: the step
            for name, value in entry.items()
        }
        for i, entry in state["state"].items()
    }
    return {**state, "state": shards}


def shard_like(value: torch.Tensor, like: DTensor) -> DTensor:
    """Return this rank's part of a tensor that all ranks have in full, sharded like another."""
    moved = value.to(like.device)
    return distribute_tensor(moved, like.device_mesh, like.placements, src_data_rank=None)


def unshard(value: Any, keep: bool = True) -> Any:
    """Gather full tensors on the CPU, one at a time; None in their place unless `keep`."""

    def gather(tensor: DTensor) -> torch.Tensor | None:
        full: torch.Tensor = tensor.full_tensor().detach()
        return full.cpu() if keep else None

    return tree_map_only(DTensor, gather, value)

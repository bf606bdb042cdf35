"""A model whose weights, gradients and moments are spread over the processes: FSDP2. In checkpoints
they are whole, so that a run goes on with any number of processes, sharded or not.
"""

from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor

from qkablate.models.gpt import GPT
from qkablate.training.distributed.broadcast import changed


def shard(model: GPT, device: str, count: int) -> None:
    """Block by block: a block is whole only while it is computed."""
    mesh = init_device_mesh(device.partition(":")[0], (count,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for name in ("loss", "graded", "log_probabilities"):
        register_fsdp_forward_method(model, name)


def parts(state: dict[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """This process's part of an optimiser's state, which all have whole."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]

    def part(value: torch.Tensor, like: DTensor) -> torch.Tensor:
        if not value.dim():  # the step
            return value
        moved = value.to(like.device)
        return distribute_tensor(moved, like.device_mesh, like.placements, src_data_rank=None)

    own = {
        i: {name: part(value, parameters[i]) for name, value in entry.items()}
        for i, entry in state["state"].items()
    }
    return {**state, "state": own}


def whole(value: Any, keep: bool = True) -> Any:
    """With all parts put together, one tensor at a time; None for those that are not kept."""

    def put_together(tensor: DTensor) -> torch.Tensor | None:
        full: torch.Tensor = tensor.full_tensor().detach()
        return full.cpu() if keep else None

    return changed(value, DTensor, put_together)

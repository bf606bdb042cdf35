"""The runs that can be vmapped, and how many of them make a program."""

from dataclasses import replace

import torch

from qkablate.config import Config
from qkablate.models.base import Model
from qkablate.training import hardware
from qkablate.training.hardware import BYTES_PER_PARAMETER

MANY = 16  # runs of a program with train.vmap=auto, if they fit into memory
# d_model × tokens of a forward pass up to which a program is faster than its runs one after the
# other: measured on a CPU (docs/performance.md). On a GPU, where kernels of small models take less
# time than their launch, 16 runs at a tenth of this were 33 times as fast as one.
PAYS = {"cpu": 2**14, "cuda": 2**20}
_USABLE = 0.8  # of the free memory


def find_obstacle(config: Config, model: Model, loss_blocks: int) -> str:
    """Return why a run cannot be vmapped; '' if it can."""
    train = config.train
    kernels = {layer.module.kernel for layer in model.attention_layers()}
    obstacles = {
        "model.dropout draws for one run at a time": config.model.dropout > 0,
        "train.checkpoint_activations recomputes a run's activations": train.checkpoint_activations,
        "train.fsdp shards one run": train.fsdp,
        "precision=fp16 scales the loss of one run": config.precision == "fp16",
        "compile=true compiles the step of one run": bool(config.compile),
        "the kernels `blocked` and `wide` have no batched form": bool(
            kernels & {"blocked", "wide"}
        ),
        "its logits are computed in blocks, to save memory": loss_blocks > 1,
        "variant.file may hold what torch cannot vmap": config.variant.file is not None,
        "there is no fused AdamW on mps": config.device == "mps",
    }
    return next((text for text, is_true in obstacles.items() if is_true), "")


def resolve_vmap(config: Config, obstacle: str, params: int | None = None) -> Config:
    """Return the config with train.vmap as a number; 1 where there is an obstacle.

    `auto` needs the number of parameters; without it, as for a run of no sweep, it is 1.
    """
    count = config.train.vmap
    if count == "auto":
        count = 1 if params is None else _choose_count(config, params)
    return replace(config, train=replace(config.train, vmap=1 if obstacle else int(count)))


def _choose_count(config: Config, params: int) -> int:
    """Return 1 where a program does not pay; it depends on no timing, since it enters the id."""
    tokens = config.train.batch_size * config.model.context
    kind = config.device.partition(":")[0]
    if tokens * config.model.d_model > PAYS.get(kind, 0):
        return 1
    free = hardware.free_memory() if kind == "cpu" else _gpu_memory(config.device)
    return int(max(2, min(MANY, _USABLE * free / bytes_per_run(config, params))))


def _gpu_memory(device: str) -> float:
    """Return the memory of the GPU, used or not: the same wherever there is one of its kind."""
    if not (device.startswith("cuda") and torch.cuda.is_available()):
        return float("inf")
    return float(torch.cuda.get_device_properties(device).total_memory)


def bytes_per_run(config: Config, params: int) -> float:
    """Return a bound of the memory of a run in a program: weights, moments and activations."""
    model = config.model
    width = 24 * model.d_model + 2 * model.heads * model.context
    layers = model.layers * (3 if model.form == "encoder_decoder" else 1)
    return (
        bytes_per_parameter(config) * params
        + 4.0 * config.train.batch_size * model.context * layers * width
    )


def bytes_per_parameter(config: Config) -> float:
    """Return the bytes of weights, two moments and gradients.

    In a program the gradients are there twice, as autograd returns them and as one row, and three
    times where those of micro-batches are added; under Muon there are momentum, matrices and
    updates as well.
    """
    if config.train.vmap == 1:
        return BYTES_PER_PARAMETER
    muon = 16 if config.optim.optimizer == "muon" else 0
    return BYTES_PER_PARAMETER + (8 if config.train.grad_accum > 1 else 4) + muon

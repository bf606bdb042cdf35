"""The batches of each step on the device that computes with them."""

from collections.abc import Callable, Sequence

from torch import Tensor

from qkablate.config import Config
from qkablate.data import Batch, Data
from qkablate.data.batches import predict_windows


class Prefetcher:
    """Batches of each step; on a GPU the next step's are copied while this one's are computed."""

    def __init__(self, read: Callable[[int], Sequence[Batch]], device: str) -> None:
        """Prepare the batches that `read` returns for a step."""
        self.read, self._device = read, device
        self._ahead: tuple[int, list[Batch]] = (-1, [])

    def take(self, step: int) -> list[Batch]:
        """Return the batches of a step."""
        ready, batches = self._ahead
        return batches if ready == step else self._fetch(step)

    def prefetch(self, step: int) -> None:
        """Start to copy the batches of a step to the GPU."""
        if self._device.startswith("cuda"):
            self._ahead = step, self._fetch(step)

    def _fetch(self, step: int) -> list[Batch]:
        return [on_device(batch, self._device) for batch in self.read(step)]


def batch_reader(config: Config, data: Data) -> Callable[[int], Sequence[Batch]]:
    """Return the function that reads a step's batches; a run with a parent reads on after it."""
    batches = data.batches(
        seed=config.seeds.data,
        batch_size=config.train.batch_size,
        grad_accum=config.train.grad_accum,
        context=config.model.context,
    )
    offset = config.init_from.step or 0
    return lambda step: batches.step(offset + step)


def on_device(batch: Batch, device: str) -> Batch:
    """Return the batch on a device; copies to CUDA are asynchronous.

    The host waits for a copy of what is not pinned, or not contiguous: windows are cut there.
    """
    if device == "cpu":
        return batch
    pin = device.startswith("cuda")

    def move(tensor: Tensor) -> Tensor:
        return (tensor.contiguous().pin_memory() if pin else tensor).to(device, non_blocking=pin)

    if batch.windows_NW is not None:
        moved = predict_windows(move(batch.windows_NW))
        return batch._replace(**moved._asdict() | {"weight": batch.weight})
    positions_NA = batch.positions_NA
    return batch._replace(
        inputs=tuple(map(move, batch.inputs)),
        targets_NA=move(batch.targets_NA),
        positions_NA=None if positions_NA is None else move(positions_NA),
    )

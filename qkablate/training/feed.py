"""The batches of each step on the device that computes with them."""

from collections.abc import Callable, Sequence

from torch import Tensor

from qkablate.data import Batch, TrainingBatches


class Feed:
    """Batches of each step; on a GPU the next step's are copied while this one's are computed."""

    def __init__(
        self,
        batches: TrainingBatches,
        device: str,
        shard: Callable[[Sequence[Batch]], Sequence[Batch]] = lambda batches: batches,
        offset: int = 0,
    ) -> None:
        """Feed this process's `shard` of each step's batches; step 0 is at `offset` in the data."""
        self._batches, self._device, self._shard, self._offset = batches, device, shard, offset
        self._ahead: tuple[int, list[Batch]] = (-1, [])

    def take(self, step: int) -> list[Batch]:
        """Return the batches of a step."""
        ready, batches = self._ahead
        return batches if ready == step else self._fetch(step)

    def fetch_ahead(self, step: int) -> None:
        """Start to copy the batches of a step to the GPU."""
        if self._device.startswith("cuda"):
            self._ahead = step, self._fetch(step)

    def _fetch(self, step: int) -> list[Batch]:
        batches = self._shard(self._batches.step(self._offset + step))
        return [on_device(batch, self._device) for batch in batches]


def on_device(batch: Batch, device: str) -> Batch:
    """Return the batch on a device; copies to CUDA are asynchronous, from pinned memory."""
    if device == "cpu":
        return batch
    pin = device.startswith("cuda")

    def move(tensor: Tensor) -> Tensor:
        return (tensor.pin_memory() if pin else tensor).to(device, non_blocking=pin)

    positions_NA = batch.positions_NA
    return batch._replace(
        inputs=tuple(map(move, batch.inputs)),
        targets_NA=move(batch.targets_NA),
        positions_NA=None if positions_NA is None else move(positions_NA),
    )

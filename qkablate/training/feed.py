"""The batches of each step, where they are computed with."""

from collections.abc import Callable, Sequence

from torch import Tensor

from qkablate.data import Batch, Steps


class Feed:
    """On a GPU the next step's batches are on their way, from pinned memory, while this one's
    computes: a kernel is only queued when Python goes on.
    """

    def __init__(
        self,
        steps: Steps,
        device: str,
        own: Callable[[Sequence[Batch]], Sequence[Batch]] = lambda batches: batches,
        first: int = 0,
    ) -> None:
        """`own`: which of a step's batches this process takes; `first`: where in the order of the
        batches step 0 stands.
        """
        self._steps, self._device, self._own, self._first = steps, device, own, first
        self._ahead: tuple[int, list[Batch]] = (-1, [])

    def take(self, step: int) -> list[Batch]:
        ready, batches = self._ahead
        return batches if ready == step else self._fetch(step)

    def fetch_ahead(self, step: int) -> None:
        if self._device.startswith("cuda"):
            self._ahead = step, self._fetch(step)

    def _fetch(self, step: int) -> list[Batch]:
        batches = self._own(self._steps.step(self._first + step))
        return [on_device(batch, self._device) for batch in batches]


def on_device(batch: Batch, device: str) -> Batch:
    if device == "cpu":
        return batch
    pin = device.startswith("cuda")

    def moved(tensor: Tensor) -> Tensor:
        return (tensor.pin_memory() if pin else tensor).to(device, non_blocking=pin)

    where_NA = batch.where_NA
    return Batch(
        moved(batch.tokens_NT),
        moved(batch.targets_NA),
        None if where_NA is None else moved(where_NA),
        batch.slices,
    )

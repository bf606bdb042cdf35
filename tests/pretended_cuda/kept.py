"""Measure what a block keeps for the backward pass, on a pretended device or a real one."""

from torch import Tensor

from qkablate.models.base import Model


def storage(tensor: Tensor) -> int:
    """Return the number of a tensor's storage."""
    return int(tensor.untyped_storage()._cdata)


class Kept:
    """Bytes that the first block keeps for the backward pass: the most of all steps."""

    def __init__(self, model: Model) -> None:
        self._passes: list[dict[int, int]] = [{}]  # of each forward pass, by storage
        self._is_inside = False
        self._weights = {storage(weight) for weight in model.parameters()}
        block = model.sharding_units()[0]  # type: ignore[index]
        block.register_forward_pre_hook(lambda *_: self._enter())
        block.register_forward_hook(lambda *_: self._leave())

    def _enter(self) -> None:
        self._is_inside = True
        self._passes.append({})

    def _leave(self) -> None:
        self._is_inside = False

    def pack(self, tensor: Tensor) -> Tensor:
        """Count a tensor that is saved."""
        if self._is_inside and tensor.device.type == "cuda":
            number = storage(tensor)
            if number not in self._weights:
                self._passes[-1][number] = tensor.untyped_storage().nbytes()
        return tensor

    @property
    def bytes(self) -> int:
        return max(sum(storages.values()) for storages in self._passes)

"""Caches of the positions that a decoder has seen. Suffixes as in qk/base.py, and R rows."""

from torch import Tensor


class Cache:
    """Decoder cache of a layer: the stream, the keys or the values, as the circuits require."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.length = capacity, 0
        self.tensors: dict[str, Tensor] = {}

    def append(self, name: str, new: Tensor) -> Tensor:
        """Return all of `name` so far, new included; positions are dimension -2."""
        if name not in self.tensors:
            self.tensors[name] = new.new_empty(*new.shape[:-2], self.capacity, new.shape[-1])
        end = self.length + new.shape[-2]
        if end > self.capacity:
            raise ValueError(f"the cache has {self.capacity} positions, {end} are needed")
        self.tensors[name][..., self.length : end, :] = new
        return self.tensors[name][..., :end, :]

    def select(self, rows_R: Tensor) -> None:
        """Keep these sequences, some of them several times."""
        self.tensors = {name: tensor[rows_R] for name, tensor in self.tensors.items()}

    def bytes_per_token(self) -> int:
        """Return the size of one position of one sequence."""
        tensors = self.tensors.values()
        return sum(t[0].numel() // self.capacity * t.element_size() for t in tensors)


class SourceCache(Cache):
    """Cache of a cross-attention layer: keys and values of a source, computed once.

    A circuit that reads the source itself needs none. The length is the number of queries so far.
    """

"""Launches, waits and copies of a traced program, by phase of training."""

import traceback
from collections import Counter, defaultdict
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.pretended_cuda.device import PINNED, WAITS, WIDEST
from tests.pretended_cuda.kept import storage

NEVER = 2**62  # what an integer on the device counts as
# Their results have a length that depends on values.
_DATA_DEPENDENT = {"nonzero", "masked_select", "_unique2", "unique_dim", "equal", "is_nonzero"}


def where() -> str:
    """Return the innermost line of the package."""
    for frame in reversed(traceback.extract_stack()):
        if "/qkablate/" in frame.filename and "/tests/" not in frame.filename:
            return f"{frame.filename.rpartition('/qkablate/')[2]}:{frame.lineno}"
    return "elsewhere"


class Watch(TorchDispatchMode):
    """Counters of events by phase; the keys say what happened, and in which line."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = "start"
        self.reads: defaultdict[str, Counter[str]] = defaultdict(Counter)  # wait for a value
        self.uploads: defaultdict[str, Counter[str]] = defaultdict(Counter)  # block the host
        self.waits: defaultdict[str, Counter[str]] = defaultdict(Counter)  # explicit ones
        WAITS[:] = [lambda name: self._count(self.waits, name)]
        self.wide: defaultdict[str, Counter[str]] = defaultdict(Counter)  # compute in fp64

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, func._opname
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        on_cuda = any(x.device.type == "cuda" for x in tensors)
        if name == "_local_scalar_dense" and isinstance(args[0], torch._subclasses.FakeTensor):
            if on_cuda:
                self._count(self.reads, "item")
            kind = args[0].dtype
            return False if kind == torch.bool else 1.0 if kind.is_floating_point else NEVER
        if on_cuda:
            self._check_indices(name, args)
        out = func(*args, **kwargs)
        if name in ("_to_copy", "copy_"):
            self._check_copy(name, args, kwargs, out)
        outs = [x for x in tree_leaves(out) if isinstance(x, Tensor) and x.device.type == "cuda"]
        WIDEST[:] = [max([*WIDEST, *(x.nbytes for x in outs)], default=0)]
        if any(x.dtype == torch.float64 and x.dim() for x in outs):
            self._count(self.wide, name)
        return out

    def _count(self, counter: defaultdict[str, Counter[str]], what: str) -> None:
        counter[self.phase][f"{what} {where()}"] += 1

    def _check_indices(self, name: str, args: Any) -> None:
        """Notice indices that wait for the device or for the host."""
        if name in _DATA_DEPENDENT:
            self._count(self.reads, name)
        if name not in ("index", "index_put", "index_put_", "_index_put_impl_"):
            return
        indices = [index for index in args[1] if index is not None]
        if any(index.dtype == torch.bool for index in indices):
            self._count(self.reads, f"{name} by a mask")
        given = [*indices, *args[2:3]]  # the values that are assigned, too
        if args[0].device.type == "cuda" and any(x.device.type == "cpu" for x in given):
            self._count(self.uploads, f"{name} of a CPU tensor")

    def _check_copy(self, name: str, args: Any, kwargs: Any, out: Tensor) -> None:
        """Notice copies that the host waits for."""
        source = args[1] if name == "copy_" else args[0]
        is_async = bool(kwargs.get("non_blocking") or (name == "copy_" and any(args[2:])))
        if source.device.type == "cuda" and out.device.type == "cpu" and not is_async:
            self._count(self.reads, "copy")
        if source.device.type == "cpu" and out.device.type == "cuda":
            pinned = storage(source) in PINNED
            reasons = {
                "synchronous": not is_async,
                "not pinned": not pinned,
                "not contiguous": not source.is_contiguous(),
                "converted": source.dtype != out.dtype,
            }
            for reason in (reason for reason, holds in reasons.items() if holds):
                self._count(self.uploads, f"copy {reason}")

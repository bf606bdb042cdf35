"""The processes of one run, as torchrun starts them. The first one leads: it alone owns the run and
writes. Of a step's passes the r-th of W processes computes r, r + W, …, so that a run is the same
run however many train it. Alone, which is the rule, all of this does nothing and imports nothing.
"""

import dataclasses
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

from qkablate.config import Config
from qkablate.errors import UserError
from qkablate.redaction import redacted
from qkablate.training.signals import Signals

if TYPE_CHECKING:
    from torch import Tensor

    from qkablate.models.gpt import GPT

T = TypeVar("T")

# How long the others wait until the first one has prepared the data and owns the run.
_PREPARING = timedelta(days=7)
_VARIABLES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    "MASTER_ADDR",
    "MASTER_PORT",
)


@dataclass
class Ranks:
    """This process among those of its run."""

    rank: int = 0
    count: int = 1
    local_rank: int = 0  # on this machine
    local_count: int = 1
    _preparing: Any = None  # the group of those that wait, until the first one has told them all
    _sharded: Any = None  # the model, where each has a part of it

    @classmethod
    def found(cls) -> "Ranks":
        """As torchrun's variables say; alone where one of them is missing."""
        if not all(os.environ.get(name) for name in _VARIABLES):
            return cls()
        return cls(*(int(os.environ[name]) for name in _VARIABLES[:4]))

    @property
    def first(self) -> bool:
        return self.rank == 0

    def keep_quiet(self) -> None:
        """The first process speaks for all; only what breaks is heard from the others, too."""
        if not self.first:
            sys.stdout = sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
            sys.excepthook = lambda *what: print(
                redacted("".join(traceback.format_exception(*what))), file=sys.__stderr__
            )

    def settled(self, config: Config) -> Config:
        """With this process's device and threads; UserError for what cannot be shared."""
        if self.count == 1:
            return config
        accumulate = config.train.accumulate
        if accumulate % self.count:
            raise UserError(
                f"train.accumulate: {accumulate} passes a step cannot be shared by {self.count}"
                f" processes; give a multiple of {self.count}"
            )
        if ":" in config.device or config.device == "mps":
            raise UserError(
                f"device: {config.device} is one device, and there are {self.count} processes"
                " (allowed: auto, cpu, cuda)"
            )
        if config.train.shard and config.compile is True:
            raise UserError("train.shard: true needs compile=false")
        threads = config.threads
        if threads == "auto":  # torchrun would have it be one
            cores = (
                os.sched_getaffinity(0) if sys.platform == "linux" else range(os.cpu_count() or 1)
            )
            threads = max(1, len(cores) // self.local_count)
        return dataclasses.replace(
            config,
            device=self._device(config.device),
            threads=threads,
            compile=False if config.train.shard else config.compile,
        )

    def _device(self, name: str) -> str:
        import torch

        if name == "cpu" or not torch.cuda.is_available():
            return "cpu" if name == "auto" else name
        if self.local_count > torch.cuda.device_count():
            raise UserError(
                f"device: {self.local_count} processes on this machine need a GPU each, and torch"
                f" sees {torch.cuda.device_count()} (allowed: cpu)"
            )
        return f"cuda:{self.local_rank}"

    def join(self, device: str) -> None:
        """Meet the others."""
        if self.count == 1:
            return
        import torch
        from torch import distributed

        cuda = device.startswith("cuda")
        if cuda:
            torch.cuda.set_device(device)
        distributed.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
        self._preparing = distributed.new_group(backend="gloo", timeout=_PREPARING)

    def leave(self) -> None:
        """End together: torchrun ends all as soon as one has ended with an error."""
        if self.count == 1:
            return
        from torch import distributed

        if distributed.is_initialized():
            with suppress(RuntimeError):  # the first one did not come to its end
                self.wait()
            distributed.destroy_process_group()

    def tell(self, what: Any) -> None:
        """The first process's word to those that `hear`: what to train, or how it ended before
        there was anything to train. Only the first word counts.
        """
        if self.first and self._preparing is not None:
            from torch import distributed

            group, self._preparing = self._preparing, None
            distributed.broadcast_object_list([what], src=0, group=group)

    def hear(self) -> Any:
        from torch import distributed

        word, group, self._preparing = [None], self._preparing, None
        distributed.broadcast_object_list(word, src=0, group=group)
        return word[0]

    def refuse(self, reason: str) -> None:
        """What any but the first does with a mistake it has found before `join`. The first finds it
        too, and torchrun ends all as soon as that has said it; else it hears of it here.
        """
        self.join("cpu")
        if not isinstance(self.hear(), int):
            self.gather(reason)

    def share(self, value: Any, device: str) -> Any:
        """What the first process has, for all: tensors one by one, for they may be large."""
        if self.count == 1:
            return value
        from qkablate.training.distributed import broadcast as sharing

        return sharing.broadcast(value, device, self.first)

    def own(self, items: Sequence[T]) -> Sequence[T]:
        """Of what all see."""
        return items[self.rank :: self.count]

    def deal(self, items: Iterable[T]) -> Iterator[tuple[T, bool]]:
        """Every W-th item. All get as many: one may come a second time, and then does not count."""
        rest = iter(items)
        while some := list(islice(rest, self.count)):
            counts = self.rank < len(some)
            yield some[self.rank if counts else 0], counts

    def most(self, number: int) -> int:
        """The largest of all numbers."""
        if self.count == 1:
            return number
        import torch
        from torch import distributed

        largest = torch.tensor(number, dtype=torch.int64)
        distributed.all_reduce(largest, distributed.ReduceOp.MAX)
        return int(largest)

    def least(self, number: int) -> int:
        return -self.most(-number)

    def wait(self) -> None:
        """Until all are here."""
        self.most(0)

    def gather(self, value: T) -> list[T]:
        """What each process has, in their order."""
        if self.count == 1:
            return [value]
        from torch import distributed

        values: list[Any] = [None] * self.count
        distributed.all_gather_object(values, value)
        return values

    def stopping(self, signals: Signals) -> bool:
        """Whether a signal has come to any of them, for all at the same step."""
        if self.count == 1:
            return bool(signals)
        if agreed := self.most(signals.received):  # one may come while they agree on none
            signals.received = agreed
        return bool(agreed)

    def in_parts(self, config: Config) -> bool:
        """Whether no process has all of the weights."""
        return config.train.shard and self.count > 1

    def spread(self, model: "GPT", device: str) -> None:
        """Give each process a part of the model."""
        if self.count > 1:
            from qkablate.training.distributed import sharding

            sharding.shard(model, device, self.count)
            self._sharded = model

    def parts(self, state: dict[str, Any], optimizer: Any) -> dict[str, Any]:
        """The optimiser's state, as this process needs it."""
        if self._sharded is None:
            return state
        from qkablate.training.distributed import sharding

        return sharding.parts(state, optimizer)

    def whole(self, value: Any, keep: bool = True) -> Any:
        """What was given out in parts, for whoever keeps it."""
        if self._sharded is None:
            return value
        from qkablate.training.distributed import sharding

        return sharding.whole(value, keep)

    def parallel(self, model: "GPT", loss: Callable[..., "Tensor"]) -> Callable[..., "Tensor"]:
        """The loss, with gradients that are averaged over all processes."""
        if self.count == 1 or self._sharded is not None:
            return loss
        from torch.nn import Module
        from torch.nn.parallel import DistributedDataParallel

        class Loss(Module):
            def __init__(self) -> None:
                super().__init__()
                self.model = model

            def forward(self, *inputs: Any) -> "Tensor":
                return loss(*inputs)

        with warnings.catch_warnings():  # broadcast_buffers has a second name from torch 2.13 on
            warnings.simplefilter("ignore", FutureWarning)
            return DistributedDataParallel(
                Loss(), broadcast_buffers=False, gradient_as_bucket_view=True
            )

    def averaging(self, loss: Any, now: bool) -> AbstractContextManager[Any]:
        """Average the gradients in this pass, or leave that to a later one."""
        if self._sharded is not None:
            self._sharded.set_requires_gradient_sync(now)
            return nullcontext()
        return nullcontext() if self.count == 1 or now else loss.no_sync()

    def lost(self, error: BaseException) -> bool:
        """Whether this is what the end of another process looks like from here."""
        if self.count == 1 or not isinstance(error, RuntimeError):
            return False
        from torch import distributed

        return isinstance(error, distributed.DistError) or "gloo" in str(error)


ALONE = Ranks()

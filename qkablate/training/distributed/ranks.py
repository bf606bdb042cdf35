"""The processes of one run, as torchrun starts them.

Rank 0 leads: it alone holds the run's lease and writes. Of a step's micro-batches, rank r of W
computes r, r + W, …, so that a run is the same with any number of processes. A single process skips
all communication and imports nothing for it.
"""

import dataclasses
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

from qkablate.config import Config
from qkablate.errors import UserError, print_stderr
from qkablate.redaction import redact
from qkablate.runs.run import count_cores, label
from qkablate.training.signals import Signals

if TYPE_CHECKING:
    from torch import Tensor

    from qkablate.models.base import Model

T = TypeVar("T")

# How long the other ranks wait for rank 0 to prepare the data and to get the lease.
_PREPARATION_TIMEOUT = timedelta(days=7)
_NUMBERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")  # of torchrun's variables


@dataclass
class Ranks:
    """This process among those of its run."""

    rank: int = 0
    count: int = 1
    local_rank: int = 0  # on this machine
    local_count: int = 1
    _job_group: Any = None  # the process group that waits for rank 0's job
    _sharded_model: Any = None  # the model, if its weights are sharded
    peer_failure_printed: bool = field(default=False, init=False)

    @classmethod
    def from_environment(cls) -> "Ranks":
        """Return the ranks of torchrun's variables, or a single process if one is missing."""
        if not all(map(os.environ.get, (*_NUMBERS, "MASTER_ADDR", "MASTER_PORT"))):
            return cls()
        return cls(*(int(os.environ[name]) for name in _NUMBERS))

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def silence_others(self) -> None:
        """Discard the output of all ranks but the first, except for uncaught exceptions."""
        if not self.is_first:
            sys.stdout = sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
            sys.excepthook = lambda *error: print(
                redact("".join(traceback.format_exception(*error))), file=sys.__stderr__
            )

    def resolve(self, config: Config) -> Config:
        """Resolve this process's device and threads; raise UserError for unsupported settings."""
        if self.count == 1:
            return config
        grad_accum = config.train.grad_accum
        if grad_accum % self.count:
            raise UserError(
                f"train.grad_accum: {grad_accum} passes a step cannot be shared by {self.count}"
                f" processes; give a multiple of {self.count}"
            )
        if ":" in config.device or config.device == "mps":
            raise UserError(
                f"device: {config.device} is one device, and there are {self.count} processes"
                " (allowed: auto, cpu, cuda)"
            )
        if config.compile == "graphs":
            raise UserError(
                "compile: graphs needs one process, since graphs hold no communication (allowed:"
                " auto, true, false)"
            )
        if config.train.fsdp and config.compile is True:
            raise UserError("train.fsdp: true needs compile=false")
        threads = config.threads
        if threads == "auto":  # torchrun would set 1
            threads = max(1, count_cores() // self.local_count)
        if config.train.vmap != 1 and self.is_first:
            print_stderr(f"{label(config)} is not vmapped: {self.count} processes train it")
        return dataclasses.replace(
            config,
            train=dataclasses.replace(config.train, vmap=1),
            device=self._resolve_device(config.device),
            threads=threads,
            compile=False if config.train.fsdp else config.compile,
        )

    def _resolve_device(self, name: str) -> str:
        import torch

        if name == "cpu" or not torch.cuda.is_available():
            return "cpu" if name == "auto" else name
        if self.local_count > torch.cuda.device_count():
            raise UserError(
                f"device: {self.local_count} processes on this machine need a GPU each, and torch"
                f" sees {torch.cuda.device_count()} (allowed: cpu)"
            )
        return f"cuda:{self.local_rank}"

    def connect(self, device: str) -> None:
        """Initialize the process group."""
        if self.count == 1:
            return
        import torch
        from torch import distributed

        cuda = device.startswith("cuda")
        if cuda:
            torch.cuda.set_device(device)
        distributed.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
        self._job_group = distributed.new_group(backend="gloo", timeout=_PREPARATION_TIMEOUT)

    def disconnect(self) -> None:
        """Exit together: torchrun kills all ranks as soon as one exits with an error."""
        if self.count == 1:
            return
        from torch import distributed

        if distributed.is_initialized():
            with suppress(RuntimeError):  # rank 0 has failed
                self.all_max(0)  # waits for all
            distributed.destroy_process_group()

    def send_job(self, job: Any) -> None:
        """Send config and id of a run, or an exit code; only the first call of rank 0 counts."""
        if self.is_first and self._job_group is not None:
            self.exchange_job(job)

    def exchange_job(self, job: Any = None) -> Any:
        """Return rank 0's job: rank 0 gives it, the others wait for it."""
        from torch import distributed

        jobs, group, self._job_group = [job], self._job_group, None
        distributed.broadcast_object_list(jobs, src=0, group=group)
        return jobs[0]

    def reject(self, reason: str) -> None:
        """Report a mistake that another rank than the first found before `connect`.

        If rank 0 finds it too, torchrun kills all ranks once it is printed; otherwise rank 0
        receives the reason here.
        """
        self.connect("cpu")
        if not isinstance(self.exchange_job(), int):
            self.all_gather(reason)

    def shard(self, items: Sequence[T]) -> Sequence[T]:
        """Return this rank's share."""
        return items[self.rank :: self.count]

    def shard_eval(self, items: Iterable[T]) -> Iterator[tuple[T, bool]]:
        """Yield every W-th item, equally many on each rank.

        The last items may be repeated on some ranks; the second value says whether an item counts.
        """
        rest = iter(items)
        while group := list(islice(rest, self.count)):
            counts = self.rank < len(group)
            yield group[self.rank if counts else 0], counts

    def all_max(self, number: int) -> int:
        """Return the maximum over all ranks."""
        if self.count == 1:
            return number
        import torch
        from torch import distributed

        largest = torch.tensor(number, dtype=torch.int64)
        distributed.all_reduce(largest, distributed.ReduceOp.MAX)
        return int(largest)

    def all_gather(self, value: T) -> list[T]:
        """Return the values of all ranks, in order of rank."""
        if self.count == 1:
            return [value]
        from torch import distributed

        values: list[Any] = [None] * self.count
        distributed.all_gather_object(values, value)
        return values

    def agree_to_stop(self, signals: Signals) -> bool:
        """Return whether any rank received a signal, the same on all ranks at the same step."""
        if self.count == 1:
            return bool(signals)
        if number := self.all_max(signals.received):  # a signal may arrive during the reduction
            signals.received = number
        return bool(number)

    def has_sharded_weights(self, config: Config) -> bool:
        """Return whether the weights are sharded, so that no rank has all of them."""
        return config.train.fsdp and self.count > 1

    def shard_model(self, model: "Model", device: str) -> None:
        """Shard the model's weights over the ranks."""
        if self.count > 1:
            from qkablate.training.distributed.sharding import shard_model

            shard_model(model, device, self.count)
            self._sharded_model = model

    def shard_optimizer_state(self, state: dict[str, Any], optimizer: Any) -> dict[str, Any]:
        """Return this rank's part of the full optimizer state."""
        if self._sharded_model is None:
            return state
        from qkablate.training.distributed.sharding import shard_optimizer_state

        return shard_optimizer_state(state, optimizer)

    def unshard(self, value: Any, keep: bool = True) -> Any:
        """Gather the full tensors in a value, on the ranks that `keep` them."""
        if self._sharded_model is None:
            return value
        from qkablate.training.distributed.sharding import unshard

        return unshard(value, keep)

    def data_parallel(
        self, model: "Model", loss: Callable[..., "Tensor"]
    ) -> Callable[..., "Tensor"]:
        """Return the loss with gradients averaged over all ranks (DDP)."""
        if self.count == 1 or self._sharded_model is not None:
            return loss
        from torch.nn import Module
        from torch.nn.parallel import DistributedDataParallel

        module = Module()
        module.model, module.forward = model, loss
        with warnings.catch_warnings():  # torch 2.13 renames broadcast_buffers
            warnings.simplefilter("ignore", FutureWarning)
            return DistributedDataParallel(
                module,
                broadcast_buffers=False,
                gradient_as_bucket_view=True,
                find_unused_parameters=bool(model.unused_parameters()),
            )

    def sync_gradients(self, loss: Any, enabled: bool) -> AbstractContextManager[Any]:
        """Average the gradients in this pass, or leave that to a later one."""
        if self._sharded_model is not None:
            self._sharded_model.set_requires_gradient_sync(enabled)
            return nullcontext()
        return nullcontext() if self.count == 1 or enabled else loss.no_sync()

    def is_peer_failure(self, error: BaseException) -> bool:
        """Return whether the error means that another rank has exited."""
        if self.count == 1 or not isinstance(error, RuntimeError):
            return False
        from torch import distributed

        return isinstance(error, distributed.DistError) or "gloo" in str(error)

    @contextmanager
    def report_peer_failure(self) -> Iterator[None]:
        """Print that another rank has exited, if an error within the context means that.

        Signals must still be handled here: torchrun sends SIGTERM as soon as a rank has exited.
        """
        try:
            yield
        except RuntimeError as error:
            if self.is_peer_failure(error):
                others = f"qkablate: another of the {self.count} processes has ended"
                print_stderr(f"{others}; the same command resumes from the last checkpoint")
                self.peer_failure_printed = True
            raise


SINGLE_PROCESS = Ranks()

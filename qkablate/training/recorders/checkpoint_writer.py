"""Writing of checkpoints: beside training on a GPU, at their step on a CPU."""

import copy
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from qkablate.training.checkpoint import Checkpoint

MAX_PINNED = 2**32  # bytes of a checkpoint


class CheckpointWriter:
    """Context in which checkpoints are written; it ends when the last one is.

    On CUDA a thread serializes and writes while training goes on. On a CPU there is none: it would
    take the cores of training, and go on writing where a process is suspended in the middle of one.
    A new checkpoint waits for the one before it. `write` must raise where it may no longer write.
    """

    def __init__(self, device: str, write: Callable[[Checkpoint], object]) -> None:
        self._write, self._has_thread = write, device.startswith("cuda")
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def save(self, state: Checkpoint) -> None:
        """Write a checkpoint of this moment; raise what an earlier one failed with."""
        if not self._has_thread:
            self._write(state)
            return
        self.wait()
        taken, ready = snapshot(state)

        def run() -> None:
            try:
                ready()
                self._write(taken)
            except BaseException as error:
                self._error = error

        # Not a daemon: should an impatient user interrupt `wait`, it still ends before the process.
        self._thread = threading.Thread(target=run, name="checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Wait until everything is written; raise what that failed with."""
        self._join()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None or issubclass(kind, Exception):
            self.wait()
        else:  # a second Ctrl-C: nothing takes its place
            self._join()


def snapshot(state: Checkpoint) -> tuple[Checkpoint, Callable[[], None]]:
    """Return a copy on the CPU that training does not change, and a wait until it is complete.

    Copies from a GPU are queued after the steps until now and before the next one, and the host
    goes on; it waits for those of a large model, whose pinned memory would be lacking elsewhere.
    """
    content: tuple[dict[str, Tensor], dict[str, Any]] = (state.weights, state.state)
    tensors = [x for x in tree_leaves(content) if isinstance(x, Tensor) and x.is_cuda]
    is_queued = 0 < sum(tensor.nbytes for tensor in tensors) <= MAX_PINNED

    def take(tensor: Tensor) -> Tensor:
        if not (tensor.is_cuda and is_queued):
            return tensor.detach().to("cpu", copy=True)
        pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return pinned.copy_(tensor.detach(), non_blocking=True)

    weights, training = tree_map_only(Tensor, take, content)
    taken = Checkpoint(copy.deepcopy(state.progress), weights, training)
    if not is_queued:
        return taken, lambda: None
    event = torch.cuda.Event()
    event.record()
    return taken, event.synchronize

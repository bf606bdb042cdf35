"""How many runs share the machine, and with how many threads each."""

import os

from qkablate.errors import UserError


def pack(
    workers: int | str, per_gpu: int, device: str, threads: str, runs: int
) -> tuple[list[str | None], int | None]:
    """A slot for each run that can run at once (the GPU it stands for, or None), and the threads of
    a run where the user gives none. Measured on two cores: two runs of one thread each are done
    sooner than one after the other with two, so `auto` gives a core to each."""
    if not device.startswith("cuda") and device != "auto":
        return _on_cpu(workers, threads, runs)
    import torch  # counting leaves no trace on the GPUs; what trains is a process of its own

    found = torch.cuda.device_count()
    if found == 0:
        return _on_cpu(workers, threads, runs)
    if ":" in device:
        raise UserError(
            f"device: a sweep takes the GPUs as they come; give device=cuda, not {device}"
        )
    count = workers if isinstance(workers, int) else min(found * per_gpu, runs)
    own = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    names = own.split(",") if own else [str(number) for number in range(found)]
    return [names[number % found] for number in range(count)], None


def _on_cpu(workers: int | str, threads: str, runs: int) -> tuple[list[str | None], int | None]:
    linux = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if linux else os.cpu_count() or 1
    each = int(threads) if threads.isdecimal() else None
    count = workers if isinstance(workers, int) else max(1, min(runs, cores // (each or 1)))
    return [None] * count, each or max(1, cores // count)

"""Hardware of this machine: its capabilities, and every `auto` that depends on them."""

import contextlib
import ctypes
import dataclasses
import importlib.util
import os
import resource
import shutil
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from qkablate.attention.kernels import matmul
from qkablate.attention.kernels.choice import Gpu
from qkablate.config import Config
from qkablate.config.compilation import compiling_pays
from qkablate.errors import ImpossibleConfig, UserError

BYTES_PER_PARAMETER = 16  # weights, gradients, two moments
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def resolve(config: Config, *, remote: bool = False) -> Config:
    """Resolve device, precision, matmul, compile and threads; raise UserError if impossible.

    A `remote` run is trained on another machine, which may have a GPU where this one has none.
    """
    is_absent = remote and config.device == "cuda" and not torch.cuda.is_available()
    if is_absent:
        precisions = "bf16 (fp16 where the GPUs are older than Ampere) or fp32"
        for key, allowed in (("precision", precisions), ("compile", "true, false or graphs")):
            if getattr(config, key) == "auto":
                raise UserError(
                    f"{key}: auto depends on the GPU, and this machine has none; give {allowed}"
                )
        device, threads = config.device, 1
        if config.attention.kernel == "auto":  # otherwise the GPU would choose another one
            config = dataclasses.replace(
                config, attention=dataclasses.replace(config.attention, kernel="portable")
            )
    else:
        device, threads = _resolve_device(config.device), torch.get_num_threads()
    precision = _resolve_precision(config.precision, device)
    config = dataclasses.replace(config, device=device, precision=precision)
    if config.compile == "graphs":
        _check_graphs(config)
    return dataclasses.replace(
        config,
        matmul=_resolve_matmul(config.matmul, device, precision),
        compile=config.compile if is_absent else _resolve_compile(config),
        threads=threads if config.threads == "auto" else config.threads,
    )


def _resolve_device(name: str) -> str:
    has_mps = torch.backends.mps.is_available()
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "mps" if has_mps else "cpu"
    kind, _, index = name.partition(":")
    if kind == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if count == 0:
            raise UserError(f"device: {name} requested, but torch sees no GPU here (allowed: cpu)")
        if index and int(index) >= count:
            raise UserError(f"device: {name} requested, but the last GPU here is cuda:{count - 1}")
    if kind == "mps" and not has_mps:
        raise UserError("device: mps requested, but torch sees no Apple GPU here (allowed: cpu)")
    return name


def _resolve_precision(name: str, device: str) -> str:
    kind = device.partition(":")[0]
    if name == "fp16" and kind != "cuda":
        raise ImpossibleConfig(
            f"precision: fp16 needs a CUDA device, not {kind} (allowed: bf16, fp32)"
        )
    if name != "auto":
        return name
    if kind == "cuda":
        # Older GPUs emulate bf16; their tensor cores are for fp16.
        return "bf16" if torch.cuda.get_device_capability(device)[0] >= 8 else "fp16"
    return "bf16" if kind == "cpu" and has_fast_bf16() else "fp32"


def _resolve_matmul(name: str, device: str, precision: str) -> str:
    available = torch.backends.mkldnn.is_available()
    supported = device == "cpu" and precision == "fp32"
    if name == "onednn" and not supported:
        raise ImpossibleConfig(
            f"matmul: onednn multiplies in fp32 on a CPU, not in {precision} on {device}"
            " (allowed: torch)"
        )
    if name == "onednn" and not available:
        raise UserError("matmul: this build of torch has no oneDNN (allowed: torch)")
    if name != "auto":
        return name
    return "onednn" if supported and available and has_slow_fp32() else "torch"


def _resolve_compile(config: Config) -> bool | str:
    """Return whether to compile, or `graphs`.

    `auto` compiles on CUDA if the run is long enough, and if what that needs is installed.
    """
    requested, device = config.compile, config.device
    cuda = device.startswith("cuda")
    # A vmapped program is not compiled: `auto` means that it may be vmapped.
    may_gain = cuda and config.train.vmap == 1 and compiling_pays(config)
    if requested is False or (requested == "auto" and not may_gain):
        return False
    # The compilers of inductor (on a CPU) and Triton (on CUDA), and the headers they need.
    compiler = os.environ.get("CC" if cuda else "CXX")
    compilers = [compiler] if compiler else ["gcc", "clang"] if cuda else ["g++", "clang++"]
    missing = ""
    if not any(shutil.which(name.split()[0]) for name in compilers):
        missing = f"a compiler ({' or '.join(compilers)})"
    elif not Path(sysconfig.get_path("include"), "Python.h").exists():
        missing = "Python's headers (Python.h)"
    elif cuda and importlib.util.find_spec("triton") is None:
        missing = "triton"
    elif cuda and torch.cuda.get_device_capability(device)[0] < 7:
        missing = "a GPU of capability 7.0 or newer"
    if missing and requested != "auto":
        raise UserError(
            f"compile: {str(requested).lower()} needs {missing}, which is missing here"
            " (allowed: false)"
        )
    return False if missing else requested == "auto" or requested


def _check_graphs(config: Config) -> None:
    """Raise if the steps of a run cannot be replayed as CUDA graphs."""
    reason = ""
    if not config.device.startswith("cuda"):
        reason = f"replays CUDA graphs, and the device is {config.device}"
    elif config.model.dropout:
        reason = "needs model.dropout=0: nobody has tested that a replay draws new masks"
    elif config.train.grad_accum > 1:
        reason = "needs train.grad_accum=1: a replay overwrites the gradients of the one before"
    if reason:
        raise ImpossibleConfig(f"compile: graphs {reason} (allowed: auto, true, false)")


def compile_loss(loss: Callable[..., Any], config: Config, *, graphs: bool = False) -> Any:
    """Return a loss compiled as the config says; `graphs` where its calls may become graphs.

    Not dynamic: otherwise the first compilation decides about later ones, and a resumed run would
    compute in another way than an uninterrupted one.
    """
    if not config.compile:
        return loss
    if not (graphs and config.compile == "graphs"):
        return torch.compile(loss, dynamic=False)
    compiled = torch.compile(loss, dynamic=False, mode="reduce-overhead")

    def replay(*args: Any, **kwargs: Any) -> Any:
        torch.compiler.cudagraph_mark_step_begin()  # tensors of the last step may be overwritten
        return compiled(*args, **kwargs).clone()  # evaluation keeps the losses of many batches

    return replay


def has_fast_bf16() -> bool:
    """Return whether this CPU multiplies faster in bf16 than in fp32.

    Decided by its instructions, not by a timing: the answer is part of a run's id.
    """
    capabilities = _cpu_capabilities()
    if not torch.backends.mkldnn.is_available():  # has the bf16 kernels
        return False
    if capabilities.get("amx_bf16") or capabilities.get("bf16"):  # Intel's, ARM's
        return True
    # Intel's CPUs with AMX run the vector instruction at half the rate of fp32, and virtual
    # machines may hide AMX: there bf16 takes twice the time.
    is_intel = "Intel" in str(capabilities.get("cpu_name", "Intel"))
    return bool(
        capabilities.get("avx512_bf16") and not (capabilities.get("avx512_fp16") and is_intel)
    )


def has_slow_fp32() -> bool:
    """Return whether torch's fp32 matmuls are slow here: MKL does not use AVX-512 on AMD."""
    capabilities = _cpu_capabilities()
    amd = "AMD" in str(capabilities.get("cpu_name", ""))
    return bool(amd and capabilities.get("avx512_f") and torch.backends.mkl.is_available())


def _cpu_capabilities() -> Mapping[str, Any]:
    return torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}


def find_gpu(config: Config) -> Gpu | None:
    """Return the properties of the config's GPU; None without one, or if it is a remote one."""
    if not (config.device.startswith("cuda") and torch.cuda.is_available()):
        return None
    return Gpu(
        capability=torch.cuda.get_device_capability(config.device),
        # Its backward pass has no deterministic algorithm.
        cudnn=torch.backends.cudnn.is_available() and not config.deterministic,
        triton=importlib.util.find_spec("triton") is not None,
    )


def configure_process(config: Config) -> None:
    """Apply the settings that hold for the whole process."""
    assert isinstance(config.threads, int)
    torch.set_num_threads(config.threads)
    matmul.set_backend(config.matmul)
    if config.device == "cpu":
        _keep_freed_memory()
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # needed by cuBLAS
    _set_deterministic(config.deterministic)
    torch.backends.cudnn.deterministic = config.deterministic
    if config.compile:
        # Earlier compilations count towards a limit past which torch silently stays eager.
        torch.compiler.reset()
    if config.device.startswith("cuda"):
        if ":" in config.device:
            torch.cuda.set_device(config.device)
        torch.backends.cuda.matmul.allow_tf32 = False  # fp32 means fp32


def _keep_freed_memory() -> None:
    """Make glibc keep freed memory: page faults to get it back take up to a fifth of a step."""
    with contextlib.suppress(OSError, AttributeError):  # another libc
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(-4, 0)  # M_MMAP_MAX: no mapped blocks
        mallopt(-1, -1)  # M_TRIM_THRESHOLD: never trim the heap


def _set_deterministic(enabled: bool) -> None:
    """Set the flag if it differs: setting it imports torch's compiler, which takes two seconds."""
    if enabled != torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(enabled)


def autocast(config: Config) -> contextlib.AbstractContextManager[Any]:
    """Return the autocast context of the config's precision."""
    kind = config.device.partition(":")[0]
    half = config.precision != "fp32"
    return torch.autocast(kind, DTYPES[config.precision] if half else None, enabled=half)


def seed_generators(device: str, key: int) -> None:
    """Seed the global generators, which dropout draws from.

    torch.manual_seed does so for every device torch knows, at ten times the cost.
    """
    value = key % 2**63
    torch.default_generator.manual_seed(value)
    if device.startswith("cuda"):
        torch.cuda.manual_seed(value)
    elif device == "mps":
        torch.mps.manual_seed(value)


def measure_peak_flops(config: Config, size: int | None = None) -> float:
    """Measure the FLOP/s of large matmuls on this device in this precision, the unit of `mfu`."""
    if size is None:  # 1,024 with one thread would cost a short run 0.1 s
        size = 512 if config.device == "cpu" and config.threads in (1, 2) else 1024
        size = 8192 if config.device.startswith("cuda") else size
    # Not ones: a GPU is faster where bits do not change.
    generator = torch.Generator().manual_seed(0)
    draws = (torch.randn(size, generator=generator).to(config.device) for _ in range(4))
    a, b = (torch.outer(next(draws), next(draws)).to(DTYPES[config.precision]) for _ in range(2))
    seconds = min(time_action(lambda: matmul.linear(a, b), config.device) for _ in range(5))
    return 2 * size**3 / seconds


_peaks: dict[tuple[str, ...], float] = {}


def known_peak_flops(config: Config) -> float:
    """Return the peak of `measure_peak_flops`, measured once in this process.

    The runs of a program share it: on a GPU, measuring it for each of them took two fifths of the
    time to their first step.
    """
    key = (config.device, config.precision, str(config.threads), config.matmul)
    if key not in _peaks:
        _peaks[key] = measure_peak_flops(config)
    return _peaks[key]


def time_action(action: Callable[[], object], device: str) -> float:
    """Return the seconds that an action takes on a device."""
    synchronize(device)
    began = time.perf_counter()
    action()
    synchronize(device)
    return time.perf_counter() - began


def synchronize(device: str) -> None:
    """Wait until the device has computed everything queued."""
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
    elif device == "mps":
        torch.mps.synchronize()


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether memory ran out; on a CPU only torch's message says so.

    A RuntimeError counts, too, that was raised while such a one was handled: the end of the capture
    of a CUDA graph raises one.
    """
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    if not isinstance(error, RuntimeError):
        return False
    cause = None if error.__suppress_context__ else error.__context__
    return "can't allocate memory" in str(error) or (cause is not None and is_out_of_memory(cause))


def free_memory() -> float:
    """Return the bytes that this process and its children may still allocate, or infinity."""
    limits = [float("inf")]
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        available = next(line for line in lines if line.startswith("MemAvailable:"))
        limits.append(1024.0 * int(available.split()[1]))
    with contextlib.suppress(OSError, ValueError):  # a container's limit
        folder = Path("/sys/fs/cgroup")
        limit, used = ((folder / f"memory.{name}").read_text() for name in ("max", "current"))
        limits.append(float(int(limit) - int(used)))
    return min(limits)


def peak_memory(device: str) -> int:
    """Return the peak memory of this process in bytes, on the device it computes on."""
    if device.startswith("cuda"):
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def reset_peak_memory(device: str) -> None:
    """Start to measure the peak memory anew where that is possible: on a GPU."""
    if device.startswith("cuda"):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def describe_device(config: Config) -> dict[str, Any]:
    """Describe the device for environment.json."""
    if config.device.startswith("cuda"):
        device = torch.cuda.get_device_properties(config.device)
        return {"device": device.name, "device_memory": device.total_memory}
    return {"device": config.device, "cpu_capability": torch.backends.cpu.get_cpu_capability()}


@contextlib.contextmanager
def preserve_process_state() -> Iterator[None]:
    """Restore the settings of the process when the context ends."""
    threads, backend = torch.get_num_threads(), matmul.get_backend()
    deterministic = torch.are_deterministic_algorithms_enabled()
    tf32 = torch.backends.cuda.matmul.allow_tf32
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            torch.set_num_threads(threads)
            matmul.set_backend(backend)
            _set_deterministic(deterministic)
            torch.backends.cudnn.deterministic = deterministic
            torch.backends.cuda.matmul.allow_tf32 = tf32

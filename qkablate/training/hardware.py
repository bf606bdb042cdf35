"""What this machine can do: every `auto` that depends on it is resolved here."""

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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from qkablate.attention.kernels import matmul as products
from qkablate.config import Config
from qkablate.errors import Impossible, UserError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def resolve(config: Config, *, elsewhere: bool = False) -> Config:
    """The config with device, precision, compile and threads settled, or why they can't be.
    `elsewhere`: it is trained on another machine, which may have a GPU where this one has none.
    """
    if elsewhere and config.device == "cuda" and not torch.cuda.is_available():
        return _unseen(config)
    device = _device(config.device)
    precision = _precision(config.precision, device)
    threads = config.threads
    return dataclasses.replace(
        config,
        device=device,
        precision=precision,
        products=_products(config.products, device, precision),
        compile=_compile(config.compile, device),
        threads=torch.get_num_threads() if threads == "auto" else threads,
    )


def _unseen(config: Config) -> Config:
    """What a GPU that is not here would have settled, the user has to."""
    precisions = "bf16 (fp16 where the GPUs are older than Ampere) or fp32"
    for key, allowed in (("precision", precisions), ("compile", "true or false")):
        if getattr(config, key) == "auto":
            raise UserError(
                f"{key}: auto is settled by the GPU, and there is none on this machine; give"
                f" {allowed}"
            )
    return dataclasses.replace(
        config,
        products=_products(config.products, config.device, config.precision),
        threads=1 if config.threads == "auto" else config.threads,
    )


def _device(name: str) -> str:
    has_mps = torch.backends.mps.is_available()
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "mps" if has_mps else "cpu"
    kind, _, index = name.partition(":")
    if kind == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if count == 0:
            raise UserError(f"device: {name} asked for, but torch sees no GPU here (allowed: cpu)")
        if index and int(index) >= count:
            raise UserError(f"device: {name} asked for, but the last GPU here is cuda:{count - 1}")
    if kind == "mps" and not has_mps:
        raise UserError("device: mps asked for, but torch sees no Apple GPU here (allowed: cpu)")
    return name


def _precision(name: str, device: str) -> str:
    kind = device.partition(":")[0]
    if name == "fp16" and kind != "cuda":
        raise Impossible(f"precision: fp16 needs a CUDA device, not {kind} (allowed: bf16, fp32)")
    if name != "auto":
        return name
    if kind == "cuda":
        # Older GPUs emulate bf16; their tensor cores are for fp16.
        return "bf16" if torch.cuda.get_device_capability(device)[0] >= 8 else "fp16"
    return "bf16" if kind == "cpu" and fast_bf16() else "fp32"


def _products(name: str, device: str, precision: str) -> str:
    here = torch.backends.mkldnn.is_available()
    possible = device == "cpu" and precision == "fp32"
    if name == "onednn" and not possible:
        raise Impossible(
            f"products: onednn multiplies in fp32 on a CPU, not in {precision} on {device}"
            " (allowed: torch)"
        )
    if name == "onednn" and not here:
        raise UserError("products: this build of torch has no oneDNN (allowed: torch)")
    if name != "auto":
        return name
    return "onednn" if possible and here and slow_fp32() else "torch"


def _compile(wish: bool | str, device: str) -> bool:
    """`auto` compiles on CUDA, where everything is there that compiling needs."""
    cuda = device.startswith("cuda")
    if wish is False or (wish == "auto" and not cuda):
        return False
    # What inductor (on a CPU) and Triton (on CUDA) call, and the headers they compile against.
    own = os.environ.get("CC" if cuda else "CXX")
    compilers = [own] if own else ["gcc", "clang"] if cuda else ["g++", "clang++"]
    missing = ""
    if not any(shutil.which(name.split()[0]) for name in compilers):
        missing = f"a compiler ({' or '.join(compilers)})"
    elif not Path(sysconfig.get_path("include"), "Python.h").exists():
        missing = "Python's headers (Python.h)"
    elif cuda and importlib.util.find_spec("triton") is None:
        missing = "triton"
    elif cuda and torch.cuda.get_device_capability(device)[0] < 7:
        missing = "a GPU of capability 7.0 or newer"
    if missing and wish is True:
        raise UserError(f"compile: true needs {missing}, which is not here (allowed: false)")
    return not missing


def fast_bf16() -> bool:
    """Whether this CPU multiplies faster in bf16 than in fp32. A question of what it is, and not
    of a time that was taken: the answer is part of a run's id.
    """
    found = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    if not torch.backends.mkldnn.is_available():  # which has the products
        return False
    if found.get("amx_bf16") or found.get("bf16"):  # the latter is ARM's
        return True
    # Intel's CPUs that are meant to use AMX have the vector instruction at half the rate of fp32,
    # and virtual machines may hide AMX: there bf16 takes twice the time.
    meant_for_amx = found.get("avx512_fp16") and "Intel" in str(found.get("cpu_name", "Intel"))
    return bool(found.get("avx512_bf16") and not meant_for_amx)


def slow_fp32() -> bool:
    """Whether torch's products in fp32 leave half of this CPU unused: they are MKL's, which keeps
    AVX-512 for Intel's. Like the above, a question of what it is.
    """
    found = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    amd = "AMD" in str(found.get("cpu_name", ""))
    return bool(amd and found.get("avx512_f") and torch.backends.mkl.is_available())


def flash_in_half(config: Config) -> bool:
    """Whether products are 16 bits wide on a device whose flash kernel takes them."""
    if config.precision == "fp32":
        return False
    cuda = config.device.startswith("cuda")
    if cuda and not torch.cuda.is_available():  # it is elsewhere, and bf16 is for those that do
        return config.precision == "bf16"
    return not cuda or torch.cuda.get_device_capability(config.device)[0] >= 8


def prepare(config: Config) -> None:
    """Set what holds for the whole process."""
    assert isinstance(config.threads, int)
    torch.set_num_threads(config.threads)
    products.choose(config.products)
    if config.device == "cpu":
        _keep_memory()
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS asks for it
    _be_deterministic(config.deterministic)
    torch.backends.cudnn.deterministic = config.deterministic
    if config.compile:
        # What earlier runs of this process compiled counts towards a limit past which torch
        # silently goes back to eager.
        torch.compiler.reset()
    if config.device.startswith("cuda"):
        if ":" in config.device:
            torch.cuda.set_device(config.device)
        torch.backends.cuda.matmul.allow_tf32 = False  # fp32 says fp32


def _keep_memory() -> None:
    """Have malloc keep what is freed, for the next step: glibc gives large blocks back, and to take
    them again, a page at a time, costs up to a fifth of a step.
    """
    with contextlib.suppress(OSError, AttributeError):  # another libc
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(-4, 0)  # M_MMAP_MAX: no block is the system's own
        mallopt(-1, -1)  # M_TRIM_THRESHOLD: nor is the end of the heap


def _be_deterministic(wish: bool) -> None:
    """Only where it changes anything: torch imports its compiler to do so, in two seconds."""
    if wish != torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(wish)


def autocast(config: Config) -> contextlib.AbstractContextManager[Any]:
    kind = config.device.partition(":")[0]
    half = config.precision != "fp32"
    return torch.autocast(kind, DTYPES[config.precision] if half else None, enabled=half)


def seed(device: str, key: int) -> None:
    """Set the global generators, for what draws from them (dropout): torch.manual_seed does the
    same for every device torch knows, at ten times the cost.
    """
    value = key % 2**63
    torch.default_generator.manual_seed(value)
    if device.startswith("cuda"):
        torch.cuda.manual_seed(value)
    elif device == "mps":
        torch.mps.manual_seed(value)


def peak_flops(config: Config, size: int | None = None) -> float:
    """FLOP/s of large matrix products on this device in this precision: what `mfu` is a part of."""
    if size is None:  # 1,024 with one thread would cost a short run 0.1 s
        few = config.device == "cpu" and config.threads in (1, 2)
        size = 8192 if config.device.startswith("cuda") else 512 if few else 1024
    a, b = (
        torch.ones(size, size, dtype=DTYPES[config.precision], device=config.device)
        for _ in range(2)
    )
    best = float("inf")
    for _ in range(5):
        synchronize(config.device)
        began = time.perf_counter()
        products.linear(a, b)
        synchronize(config.device)
        best = min(best, time.perf_counter() - began)
    return 2 * size**3 / best


def synchronize(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
    elif device == "mps":
        torch.mps.synchronize()


def is_out_of_memory(error: BaseException) -> bool:
    """Whether it was memory that was missing; torch on a CPU says it in words alone."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def free_memory() -> float:
    """Bytes that this process and its children may still take; infinite where nobody says."""
    known = []
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        own = next(line for line in lines if line.startswith("MemAvailable:"))
        known.append(1024.0 * int(own.split()[1]))
    with contextlib.suppress(OSError, ValueError):  # a container's own limit
        folder = Path("/sys/fs/cgroup")
        most, now = ((folder / f"memory.{what}").read_text() for what in ("max", "current"))
        known.append(float(int(most) - int(now)))
    return min(known, default=float("inf"))


def peak_memory(device: str) -> int:
    """The most bytes that this process has held at one moment, on the device it computes on."""
    if device.startswith("cuda"):
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def describe(config: Config) -> dict[str, Any]:
    """What environment.json says of the device."""
    if config.device.startswith("cuda"):
        properties = torch.cuda.get_device_properties(config.device)
        return {"device": properties.name, "device_memory": properties.total_memory}
    return {"device": config.device, "cpu_capability": torch.backends.cpu.get_cpu_capability()}


@contextlib.contextmanager
def process_state() -> Iterator[None]:
    """Put back what a run sets, for the next one in this process."""
    threads, multiplies = torch.get_num_threads(), products.chosen()
    deterministic = torch.are_deterministic_algorithms_enabled()
    tf32 = torch.backends.cuda.matmul.allow_tf32
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            torch.set_num_threads(threads)
            products.choose(multiplies)
            _be_deterministic(deterministic)
            torch.backends.cudnn.deterministic = deterministic
            torch.backends.cuda.matmul.allow_tf32 = tf32

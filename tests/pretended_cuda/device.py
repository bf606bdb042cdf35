"""A pretended CUDA device. Import this first: it must be loaded before torch uses any device.

Under FakeTensorMode tensors on "cuda" have shapes, strides and types, and no values.
"""

import contextlib
import ctypes
import threading
from collections.abc import Callable, Iterator
from typing import Any

from tests.pretended_cuda.library import build_library, torch_folder

ctypes.CDLL(str(torch_folder() / "lib" / "libtorch_cpu.so"), mode=ctypes.RTLD_GLOBAL)
ctypes.CDLL(str(build_library()))

import numpy as np  # noqa: E402
import torch  # noqa: E402
from torch import Tensor  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from tests.pretended_cuda.kept import storage  # noqa: E402

CAPABILITY = [9, 0]
PINNED: dict[int, Tensor] = {}  # by storage, which is kept so that its number stays its own
WAITS: list[Callable[[str], None]] = []  # called with the name of an explicit wait
WIDEST: list[int] = []  # bytes of the tensors that count to the peak memory
aten = torch.ops.aten


def wait(name: str) -> None:
    """Note an explicit wait for the device; another thread may wait while training goes on."""
    if threading.current_thread() is threading.main_thread():
        for listener in WAITS:
            listener(name)


def _pin(tensor: Tensor, *_: Any) -> Tensor:
    pinned = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    pinned.copy_(tensor)
    PINNED[storage(pinned)] = pinned
    return pinned


def _numpy(tensor: Tensor, **options: Any) -> np.ndarray:
    if isinstance(tensor, FakeTensor):
        assert tensor.device.type == "cpu", "numpy of a CUDA tensor"
        dtype = str(tensor.dtype).removeprefix("torch.")
        return np.zeros(tensor.shape, dtype)
    return _real_numpy(tensor, **options)


_real_numpy = Tensor.numpy


class _Event:
    """An event on the only stream."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record(self, *_: Any) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        wait("event")


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Return the shape of SDPA's result; raise RuntimeError where the forced kernel would."""
    if torch.is_autocast_enabled("cuda"):
        half = torch.get_autocast_dtype("cuda")
        q, k, v = (x.to(half) for x in (q, k, v))
        attn_mask = None if attn_mask is None else attn_mask.to(half)
    backends = torch.backends.cuda
    is_fp32, widths = q.dtype == torch.float32, (q.shape[-1], k.shape[-1], v.shape[-1])
    strided = any(x.stride(-1) != 1 for x in (q, k, v))
    if any(x.device.type != "cuda" for x in (q, k, v)) or not q.dtype == k.dtype == v.dtype:
        raise RuntimeError("q, k and v differ in device or type")
    if not q.shape[:2] == k.shape[:2] == v.shape[:2]:
        raise RuntimeError("q, k and v differ in batch or heads")
    if backends.flash_sdp_enabled():
        if is_fp32 or attn_mask is not None or strided or CAPABILITY[0] < 8:
            raise RuntimeError("No available kernel: flash")
        if len({*widths}) > 1 or widths[0] > 256 or (is_causal and q.shape[-2] != k.shape[-2]):
            raise RuntimeError("No available kernel: flash, by its sizes")
        missing = -widths[0] % 8
        q, k, v = (F.pad(x, (0, missing)) for x in (q, k, v)) if missing else (q, k, v)
        flash = aten._scaled_dot_product_flash_attention
        out: Tensor = flash(q, k, v, dropout_p, is_causal, scale=scale)[0]
    elif backends.cudnn_sdp_enabled():
        if is_fp32 or strided or CAPABILITY[0] < 8 or max(widths) > 128:
            raise RuntimeError("No available kernel: cudnn")
        keeps = any(x.requires_grad for x in (q, k, v)) and torch.is_grad_enabled()
        cudnn = aten._scaled_dot_product_cudnn_attention
        out = cudnn(q, k, v, attn_mask, keeps, dropout_p, is_causal, scale=scale)[0]
    elif backends.mem_efficient_sdp_enabled():
        unit = 4 if is_fp32 else 8
        if strided or any(width % unit for width in widths) or widths[0] != widths[1]:
            raise RuntimeError("No available kernel: efficient")
        if attn_mask is not None and (missing := -attn_mask.shape[-1] % 16):
            attn_mask = F.pad(attn_mask, (0, missing))[..., : attn_mask.shape[-1]]
        keeps = any(x.requires_grad for x in (q, k, v)) and torch.is_grad_enabled()
        efficient = aten._scaled_dot_product_efficient_attention
        out = efficient(q, k, v, attn_mask, keeps, dropout_p, is_causal, scale=scale)[0]
    else:
        assert backends.math_sdp_enabled()
        math = aten._scaled_dot_product_attention_math
        out = math(q, k, v, attn_mask, dropout_p, is_causal, scale=scale)[0]
    return out


@contextlib.contextmanager
def pretended_cuda(capability: tuple[int, int]) -> Iterator[None]:
    """Create tensors on "cuda" without values, as on a GPU of this capability."""
    CAPABILITY[:] = capability
    PINNED.clear()
    with FakeTensorMode(allow_non_fake_inputs=True):
        yield


def _install() -> None:
    """Replace what asks the driver."""
    cuda = torch.cuda
    random = torch.zeros(16, dtype=torch.uint8)
    for name, function in {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "get_device_capability": lambda device=None: tuple(CAPABILITY),
        "is_bf16_supported": lambda *_, **__: CAPABILITY[0] >= 8,
        "get_rng_state": lambda device=None: random,
        "set_rng_state": lambda state, device=None: None,
        "synchronize": lambda device=None: wait("synchronize"),
        "empty_cache": lambda: None,
        "reset_peak_memory_stats": lambda device=None: WIDEST.clear(),
        "max_memory_allocated": lambda device=None: 0,
        "Event": _Event,
        "_lazy_init": lambda: None,
        "_is_in_bad_fork": lambda: False,
        "_exchange_device": lambda device: 0,
        "_maybe_exchange_device": lambda device: 0,
    }.items():
        setattr(cuda, name, function)
    torch.backends.cudnn.is_available = lambda: True
    # Without it torch warns that a CPU build has no accelerator.
    torch.accelerator.is_available = lambda: False
    FakeTensorMode.avoid_device_init = property(lambda self: True)  # type: ignore[assignment]
    for owner, name, function in (
        (Tensor, "pin_memory", _pin),
        (Tensor, "numpy", _numpy),
        (F, "scaled_dot_product_attention", attend),
    ):
        setattr(owner, name, function)


_install()

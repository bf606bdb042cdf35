"""The choice of an attention kernel: a pure function of shapes, precision and hardware."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypedDict

# Those that a user may request, see dispatch.py.
KERNELS = ("math", "flash", "cudnn", "efficient", "folded", "blocked", "wide")
# Context lengths from which blocks are faster on a CPU (not measured on GPUs, where they must be
# requested): for heads that share a wide key or value, for separate heads, for the latter in bf16.
MIN_BLOCKED_SHARED, MIN_BLOCKED, MIN_BLOCKED_BF16 = 128, 256, 512
# Widths up to which flash trains on every GPU that has it, and on those with more shared memory.
FLASH_WIDTH, MAX_FLASH_WIDTH = 192, 256
CUDNN_WIDTH = 128
MAX_WIDE_VALUE = 256  # a row of values stays on the chip
# Attention weights of a head per number of its queries, from which they decide about the memory.
MIN_WIDE_RATIO = 4


@dataclass(frozen=True)
class Gpu:
    """Properties of a CUDA device that decide which kernels it has."""

    capability: tuple[int, int]
    cudnn: bool = False  # cuDNN is installed and may be used
    triton: bool = False


class KernelOptions(TypedDict, total=False):
    """Options of a layer that decide its kernel; no parameter is moved or cast."""

    device: str
    precision: str  # fp32, bf16, fp16
    gpu: Gpu | None  # None: unknown, or no GPU
    kernel: str  # auto: the fastest; portable: the fastest that all GPUs have
    padding: bool  # some of the keys may be padding


@dataclass(frozen=True)
class Shapes:
    """Properties of a layer that decide which kernels support it and which is the fastest."""

    heads: int
    key_heads: int
    value_heads: int
    width: int  # of the score product
    value_width: int
    device: str = "cpu"
    precision: str = "fp32"  # of matmuls
    gpu: Gpu | None = None
    dropout: float = 0.0
    score_bias: bool = False  # something is added to the scores, or keys may be padding
    learned_bias: bool = False  # and needs a gradient
    context: int = 0  # maximal number of positions

    @property
    def is_half(self) -> bool:
        return self.precision != "fp32"

    @property
    def is_shared_and_wide(self) -> bool:
        """Return whether all heads share a key wider than the values, or such a value."""
        wide_key = self.key_heads == 1 and self.width > self.value_width
        wide_value = self.value_heads == 1 and self.value_width > self.width
        return self.heads > 1 and (wide_key or wide_value)


def choose_kernel(shapes: Shapes, *, portable: bool = False) -> str:
    """Return the kernel for these shapes.

    A wide key (or value) shared by all heads is folded, in blocks where the context is long; small
    differences in width are padded for a fused kernel. The `portable` choice is the same for all
    GPUs that compute in this precision.
    """
    context = 0 if shapes.dropout else shapes.context  # blocks do not support dropout
    if shapes.width == 0:
        return "static"
    if shapes.learned_bias:
        return "folded"
    if shapes.device == "cuda":
        return _choose_on_cuda(shapes, None if portable else shapes.gpu)
    if shapes.is_shared_and_wide:
        return "blocked" if shapes.device == "cpu" and context >= MIN_BLOCKED_SHARED else "folded"
    if shapes.device != "cpu":
        return "math"
    if shapes.width > shapes.value_width or shapes.dropout:
        return "blocked" if context >= MIN_BLOCKED else "folded"
    if shapes.is_half and context:  # flash is slow in bf16
        return "blocked" if context >= MIN_BLOCKED_BF16 else "folded"
    return "flash"


def _choose_on_cuda(shapes: Shapes, gpu: Gpu | None) -> str:
    # Of an unknown GPU: what the weakest one with native arithmetic of this precision has.
    known = gpu or Gpu((8, 6) if shapes.precision == "bf16" else (7, 5))
    width, value_width, context = shapes.width, shapes.value_width, shapes.context

    def supports(kernel: str) -> bool:
        return not next(_reasons(kernel, shapes, known), "")

    if shapes.is_shared_and_wide:
        # The weights that it saves for the gradient (fp32, and a copy in 16 bits) against the
        # gradient of the shared key (value), which `efficient` computes for every head.
        pays = context * (3 if shapes.is_half else 1) >= max(width, value_width)
        if pays and supports("efficient"):
            return "efficient"
        if context >= MIN_WIDE_RATIO * width and supports("wide"):
            return "wide"
        return "folded"
    if width <= value_width:
        is_hopper = known.capability == (9, 0)  # where torch prefers cuDNN, too
        if is_hopper and not shapes.dropout and supports("cudnn"):
            return "cudnn"
        if supports("flash"):
            return "flash"
    return "efficient" if supports("efficient") else "math"


def unsupported_reason(kernel: str, shapes: Shapes) -> str:
    """Return why a requested kernel does not support these shapes; empty if it does.

    Ends with the kernels that do.
    """
    reason = next(_reasons(kernel, shapes, shapes.gpu), "")
    if not reason:
        return ""
    others = (name for name in KERNELS if not next(_reasons(name, shapes, shapes.gpu), ""))
    return f"{kernel} {reason} (allowed: {', '.join(['auto', 'portable', *others])})"


def _reasons(kernel: str, shapes: Shapes, gpu: Gpu | None) -> Iterator[str]:
    """Yield all reasons why a kernel does not support these shapes, as predicates.

    Of an unknown GPU the best is assumed.
    """
    widths = (shapes.width, shapes.value_width)
    capability = gpu.capability if gpu else (9, 0)
    sm = f"sm{capability[0]}{capability[1]}"
    if kernel in ("auto", "portable", "math", "folded"):
        return
    if shapes.width == 0:
        yield "needs queries and keys, and this variant has none"
    if shapes.learned_bias and kernel != "efficient":
        yield "does not support learned score biases"
    if shapes.dropout and (kernel in ("blocked", "wide")):
        yield "does not support dropout"
    if kernel == "blocked":
        return
    if kernel == "flash" and shapes.device == "cpu":
        if shapes.dropout:
            yield "does not support dropout on a CPU"
        return
    if shapes.device != "cuda":
        is_flash = kernel == "flash"
        yield f"is not available on {shapes.device}" if is_flash else "is a CUDA kernel"
    if kernel == "wide":
        if gpu and not gpu.triton:
            yield "needs triton, which is not installed"
        if gpu and capability < (8, 0):
            yield f"needs a GPU of capability 8.0 or newer, not {sm}"
        if shapes.value_width > MAX_WIDE_VALUE:
            yield f"needs values of width up to {MAX_WIDE_VALUE}, not {shapes.value_width}"
        return
    if any(width % 8 for width in widths):
        yield f"needs widths divisible by 8, not {widths[0]} and {widths[1]}"
    if kernel == "efficient":
        if shapes.precision == "bf16" and capability < (8, 0):
            yield f"has no bf16 on {sm}"
        return
    if not shapes.is_half:
        yield "needs 16 bits, not fp32"
    if shapes.score_bias:
        yield "does not support a bias of the scores, nor padding"
    if capability < (8, 0):
        yield f"needs a GPU of capability 8.0 or newer, not {sm}"
    if kernel == "cudnn" and gpu and not gpu.cudnn:
        yield "needs cuDNN, and deterministic=false"
    if kernel == "cudnn" and shapes.dropout * 16 % 1:
        yield f"takes dropout in sixteenths only, not {shapes.dropout}"
    most = CUDNN_WIDTH if kernel == "cudnn" else _max_flash_width(capability)
    if max(widths) > most:
        yield f"needs widths up to {most} on {sm}, not {max(widths)}"


def _max_flash_width(capability: tuple[int, int]) -> int:
    """Return the widest head that flash trains; its backward pass needs much shared memory."""
    is_small = (8, 6) <= capability <= (8, 9) or capability[0] >= 12
    return FLASH_WIDTH if is_small else MAX_FLASH_WIDTH

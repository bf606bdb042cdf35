"""Training losses compiled for a pretended GPU: the generated kernels, and what an assembler says.

A process: a line of JSON asks, a line of JSON answers. Inductor generates code and runs nothing;
Triton compiles the kernels for real architectures with the ptxas that it brings.
"""

import contextlib
import functools
import importlib
import itertools
import json
import re
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.pretended_cuda import device  # first: see there

import torch  # isort: skip
import torch._dynamo.device_interface as interfaces  # isort: skip
import torch._inductor.utils as inductor_utils  # isort: skip
import triton  # isort: skip
from torch._functorch import config as functorch_config  # isort: skip
from torch._functorch._aot_autograd.utils import make_boxed_func  # isort: skip
from torch._inductor import compile_fx, graph  # isort: skip
from torch._inductor import config as inductor_config  # isort: skip
from torch._subclasses.fake_tensor import unset_fake_temporarily  # isort: skip
from torch.nn import functional as F  # isort: skip
from triton.backends.compiler import GPUTarget  # isort: skip
from triton.compiler import ASTSource  # isort: skip

from qkablate.attention.kernels import dispatch  # isort: skip
from qkablate.attention.kernels.blocked import matmul_dtype  # isort: skip
from qkablate.compose.configs import make_config, open_hydra  # isort: skip
from qkablate.training import hardware  # isort: skip
from qkablate.models.gpt import GPT  # isort: skip
from qkablate.models.catalogue import resolve_circuits  # isort: skip
from qkablate.training.resolve import build_empty_model  # isort: skip
from tests.pretended_cuda import faults  # isort: skip
from tests.pretended_cuda.faults import replaced  # isort: skip
from tests.pretended_cuda.cases import WORDS  # isort: skip
from tests.pretended_cuda.trace import build_on_cuda  # isort: skip

triton_utils: Any = importlib.import_module("torch.utils._triton")
ARCHITECTURES = (80, 90)
SHARED_MEMORY = 99 * 1024  # of a block on the GPUs that have the least
VOCABULARY = 256
H100 = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3",
    **{"major": 9, "minor": 0, "total_memory": 85 * 2**30, "multi_processor_count": 132},
    **{"warp_size": 32, "regs_per_multiprocessor": 65536, "max_threads_per_block": 1024},
    **{"max_threads_per_multi_processor": 2048, "shared_memory_per_block": 49152},
    **{"shared_memory_per_block_optin": 232448, "shared_memory_per_multiprocessor": 233472},
    **{"L2_cache_size": 50 * 2**20, "gcnArchName": "", "is_integrated": 0, "uuid": "x"},
    **{"memory_bus_width": 5120, "clock_rate": 1980000, "memory_clock_rate": 2619000},
)


class Driver:
    """The driver of a GPU on which nothing runs."""

    def get_current_target(self) -> Any:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", 0)

    def get_current_stream(self, device: object = None) -> int:
        return 0


class _Generated(Exception):
    """The code is there; nothing is to be loaded."""


def install() -> None:
    """Replace what inductor and Triton ask the driver."""
    torch.cuda.get_device_properties = lambda device=None: H100  # type: ignore[assignment,return-value]
    for name, answer in {
        **{"is_available": True, "current_device": 0, "get_compute_capability": 90},
        **{"get_device_properties": H100, "is_triton_capable": True, "synchronize": None},
        **{"raise_if_triton_unavailable": None, "memory_allocated": 0, "set_device": None},
        "get_raw_stream": 0,
    }.items():
        setattr(interfaces.CudaInterface, name, staticmethod(functools.partial(_answer, answer)))
    answers = {
        (interfaces.CudaInterface.Worker, "get_device_properties"): H100,
        (triton_utils, "has_triton_tma_device"): False,
        (triton_utils, "has_triton_experimental_host_tma"): False,
        (inductor_utils, "is_big_gpu"): True,
    }
    for name in ("has_triton", "has_triton_package"):
        answers |= {(owner, name): True for owner in (triton_utils, inductor_utils)}
    for (owner, name), value in answers.items():
        setattr(owner, name, staticmethod(functools.partial(_answer, value)))
    triton.runtime.driver.set_active(Driver())
    inductor_config.fx_graph_cache = inductor_config.fx_graph_remote_cache = False
    inductor_config.joint_graph_constant_folding = False  # computes with values
    inductor_config.shape_padding = False  # measures the product that it would pad
    inductor_config.compile_threads = 1
    functorch_config.enable_autograd_cache = False


def _answer(answer: Any, *_: object, **__: object) -> Any:
    return answer


def attend_as(kernel: str) -> Callable[..., torch.Tensor]:
    """Return the operator that `scaled_dot_product_attention` becomes with a forced kernel."""
    aten = torch.ops.aten

    def attend(
        q: Any,
        k: Any,
        v: Any,
        mask: Any = None,
        dropout: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
    ) -> Any:
        half = matmul_dtype(q)
        q, k, v = (x.to(half) for x in (q, k, v))
        if kernel == "flash":
            op = aten._scaled_dot_product_flash_attention
            return op(q, k, v, dropout, is_causal, scale=scale)[0]
        if kernel == "cudnn":
            op = aten._scaled_dot_product_cudnn_attention
            return op(q, k, v, mask, True, dropout, is_causal, scale=scale)[0]
        if kernel == "efficient":
            op = aten._scaled_dot_product_efficient_attention
            return op(q, k, v, mask, True, dropout, is_causal, scale=scale)[0]
        return aten._scaled_dot_product_attention_math(
            q, k, v, mask, dropout, is_causal, scale=scale
        )[0]

    return attend


def generate(words: dict[str, str]) -> list[str]:
    """Return the generated code of the forward and of the backward pass."""
    codes: list[str] = []

    def stop(self: Any) -> None:
        wrapper = self.codegen_with_cpp_wrapper() if self.cpp_wrapper else self.codegen()
        code = wrapper[0]
        codes.append(code if isinstance(code, str) else code.value)
        raise _Generated

    def inner(module: Any, inputs: Any, **options: Any) -> Any:
        try:
            compile_fx.compile_fx_inner(module, inputs, **options)
        except Exception as error:
            if "_Generated" not in repr(error):
                raise
        return make_boxed_func(module.forward)

    def backend(module: Any, inputs: Any) -> Any:
        return compile_fx.compile_fx(module, inputs, inner_compile=inner)

    torch._dynamo.reset()
    with device.pretended_cuda((9, 0)):
        with unset_fake_temporarily(), open_hydra():
            resolved = hardware.resolve(make_config(WORDS | {"data": "shakespeare"} | words))
            config = resolve_circuits(resolved)[0]
        empty = SimpleNamespace(build=lambda: build_empty_model(config, VOCABULARY))
        model = build_on_cuda(empty)  # type: ignore[arg-type]
        lengths = (*model.input_lengths(), config.model.context)
        batch = [
            torch.zeros(config.train.batch_size, n, dtype=torch.int64, device="cuda")
            for n in lengths
        ]
        with (
            replaced(graph.GraphLowering, "compile_to_module", stop),
            replaced(graph.GraphLowering, "_compile_to_module", stop),
            replaced(dispatch, "force_backend", lambda kernel: contextlib.nullcontext()),
            replaced(F, "scaled_dot_product_attention", attend_as(model.kernel)),
            hardware.autocast(config),
        ):
            loss = torch.compile(model.loss, dynamic=False, backend=backend, fullgraph=True)
            loss(*batch).backward()
    return codes


KERNEL = re.compile(
    r"^(triton_\w+) = async_compile\.triton\('\w+', '''(.*?)''', device_str='cuda'\)",
    re.MULTILINE | re.DOTALL,
)
LAUNCH = re.compile(
    r"^\s+(?:\w+ = )?(triton_\w+\.run|extern_kernels\.\w+|torch\.ops\.aten\.\w+)", re.M
)
BLOCKS = {
    "pointwise": {"XBLOCK": 128, "YBLOCK": 8},
    "reduction": {"XBLOCK": 1, "R0_BLOCK": 1024},
    "persistent_reduction": {"XBLOCK": 1, "YBLOCK": 8},
}
_assembled: dict[str, str] = {}


def assemble(source: str) -> str:
    """Return why a generated kernel cannot be compiled for an architecture; '' if it can."""
    # The same but for its name, in the programs of many variants.
    key = re.sub(r"triton_\w+?_(\w+)_\d+\b", r"\1", source)
    if key not in _assembled:
        _assembled[key] = _assemble(source)
    return _assembled[key]


def _assemble(source: str) -> str:
    seen: dict[str, Any] = {}

    def record(kind: str, **options: Any) -> Callable[[Any], Any]:
        seen.update(options, kind=kind)
        return lambda function: seen.setdefault("function", function)

    source = re.sub(r"@triton_heuristics\.(\w+)\(", r"@record('\1', ", source)
    source = source.replace("triton_helpers.set_driver_to_gpu()", "")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.py"  # Triton reads the source of a function from its file
        file.write_text(source, encoding="utf-8")
        exec(
            compile(source, str(file), "exec"),
            {"record": record, "__name__": "kernel", "__file__": str(file)},
        )
        function, meta = seen["function"], seen["triton_meta"]
        blocks = {n: b for n, b in BLOCKS[seen["kind"]].items() if n in function.arg_names}
        constants = {**meta.get("constants", {}), **blocks}
        signature = {name: meta["signature"].get(name, "constexpr") for name in function.arg_names}
        signature |= dict.fromkeys(constants, "constexpr")
        numbered = {(function.arg_names.index(n),): value for n, value in constants.items()}
        kernel = ASTSource(function, signature, numbered, (meta.get("configs") or [{}])[0])
        for architecture in ARCHITECTURES:
            try:
                target = GPUTarget("cuda", architecture, 32)
                triton.compile(kernel, target=target, options={"num_warps": 4})
            except Exception as error:
                return f"sm_{architecture}: {type(error).__name__}: {str(error)[:300]}"
    return ""


def examine(words: dict[str, str]) -> dict[str, Any]:
    """Compile the loss of a run; return what its programs launch, and the faults of its kernels."""
    codes = generate(words)
    kernels = [found for code in codes for found in KERNEL.findall(code)]
    reasons = {name: assemble(source) for name, source in kernels}
    return {
        "passes": len(codes),
        "launches": [len(LAUNCH.findall(code.partition("def call(")[2])) for code in codes],
        "kernels": len(kernels),
        "fp64": [name for name, source in kernels if re.search("float64|fp64", source)],
        "rejected": {name: reason for name, reason in reasons.items() if reason},
    }


def assemble_wide(precision: str) -> dict[str, str]:
    """Return why kernels of wide.py cannot be compiled for an architecture, or be launched."""
    from qkablate.attention.kernels import wide

    tile, part = (32, 64) if precision == "fp32" else (64, 128)
    constants = {"G": 1, "Y": 12, "CAUSAL": True, "BIASED": True, "VALUES": 64}
    constants |= {"TILE": tile, "STEP": tile, "PART": part}
    rejected = {}
    for kernel, architecture in itertools.product(
        (wide._forward, wide._dq, wide._dk, wide._dv), ARCHITECTURES
    ):
        names, types = kernel.arg_names, {"scale": "fp32", "LSE": "*fp32", "DELTA": "*fp32"}
        others = {name: f"*{precision}" if name.isupper() else "i32" for name in names}
        signature = others | {name: types[name] for name in names if name in types}
        signature |= {name: "constexpr" for name in names if name in constants}
        numbered = {(names.index(n),): value for n, value in constants.items() if n in names}
        target = GPUTarget("cuda", architecture, 32)
        try:
            compiled = triton.compile(ASTSource(kernel, signature, numbered), target=target)
            if compiled.metadata.shared > SHARED_MEMORY:
                raise MemoryError(f"{compiled.metadata.shared} bytes of shared memory")
        except Exception as error:
            rejected[f"{kernel.__name__} sm_{architecture}"] = str(error)[:300]
    return rejected


def _graph_break(self: Any, *args: Any) -> Any:
    torch._dynamo.graph_break()
    return _real_loss(self, *args)


def _bogus(code: re.Match[str]) -> str:
    """Return a kernel with an instruction that no GPU has."""
    options = "dtype=tl.int32, is_pure=False, pack=1"
    line = f"    tl.inline_asm_elementwise('bogus.b32 $0;', '=r', [], {options})\n"
    return f"{code[0]}\n{line}"


_real_loss = GPT.loss
_real_assemble = _assemble
FAULTS: dict[str, Callable[[], contextlib.AbstractContextManager[None]]] = {
    "the graph breaks": lambda: replaced(GPT, "loss", _graph_break),
    "angles in fp64": faults.FAULTS["fp64 angles"],
    "nothing is fused": lambda: inductor_config.patch(max_fusion_size=1),
    "an unknown instruction": lambda: replaced(
        sys.modules[__name__],
        "_assemble",
        lambda source: _real_assemble(
            re.sub(r"def triton_\w+\(.*?\):(?=\n)", _bogus, source, flags=re.S)
        ),
    ),
}


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Return what a request asks for, or the error."""
    fault = FAULTS[request["fault"]]() if request["fault"] else contextlib.nullcontext()
    _assembled.clear() if request["fault"] else None
    try:
        if "wide" in request["words"]:
            return {"rejected": assemble_wide(request["words"]["wide"])}
        with fault:
            return examine(request["words"])
    except Exception as error:
        lines = traceback.format_exc()
        return {"error": f"{type(error).__name__}: {error}", "traceback": lines}
    finally:
        _assembled.clear() if request["fault"] else None


def main() -> None:
    """Answer until the input ends."""
    install()
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()

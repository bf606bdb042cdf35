"""Resolution of `auto` by hardware."""

import platform
import subprocess
import sys

import pytest
import torch

from qkablate.attention.kernels import matmul
from qkablate.attention.kernels.choice import Gpu
from qkablate.config import Config, ModelConfig, TrainConfig
from qkablate.errors import UserError
from qkablate.training import hardware
from qkablate.training.hardware import (
    compile_loss,
    find_gpu,
    is_out_of_memory,
    measure_peak_flops,
    resolve,
)

INTEL = {"cpu_name": "Intel Xeon"}


@pytest.mark.parametrize(
    ("capabilities", "precision"),
    [
        ({}, "fp32"),
        ({"avx512_f": True}, "fp32"),
        # Cooper Lake, and AMD's: the instruction has the full rate.
        (INTEL | {"avx512_bf16": True}, "bf16"),
        ({"avx512_bf16": True, "avx512_fp16": True, "cpu_name": "AMD EPYC"}, "bf16"),
        # Since Sapphire Rapids AMX is what is fast; a virtual machine may hide it.
        (INTEL | {"avx512_bf16": True, "avx512_fp16": True, "amx_bf16": True}, "bf16"),
        (INTEL | {"avx512_bf16": True, "avx512_fp16": True}, "fp32"),
        ({"avx512_bf16": True, "avx512_fp16": True}, "fp32"),
        ({"bf16": True, "architecture": "aarch64"}, "bf16"),
    ],
)
def test_auto_precision_is_the_fast_one(monkeypatch, capabilities, precision):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.cpu.get_capabilities", lambda: capabilities, raising=False)
    assert resolve(Config(device="cpu")).precision == precision


@pytest.mark.parametrize(
    ("cpu", "precision", "expected"),
    [
        ({"cpu_name": "AMD EPYC", "avx512_f": True}, "fp32", "onednn"),
        ({"cpu_name": "AMD EPYC", "avx512_f": True}, "bf16", "torch"),
        ({"cpu_name": "AMD EPYC"}, "fp32", "torch"),
        ({"cpu_name": "Intel(R) Xeon(R)", "avx512_f": True}, "fp32", "torch"),
        ({}, "fp32", "torch"),
    ],
    ids=str,
)
def test_auto_matmul_is_the_fast_one(monkeypatch, cpu, precision, expected):
    monkeypatch.setattr("torch.cpu.get_capabilities", lambda: cpu)
    monkeypatch.setattr("torch.backends.mkl.is_available", lambda: True)
    monkeypatch.setattr("torch.backends.mkldnn.is_available", lambda: True)
    assert resolve(Config(device="cpu", precision=precision)).matmul == expected
    if precision == "bf16":
        with pytest.raises(UserError, match="matmul: onednn multiplies in fp32 on a CPU, not in"):
            resolve(Config(device="cpu", precision=precision, matmul="onednn"))


_FAULTS = """
import resource, torch
from qkablate.config import Config
from qkablate.training import hardware

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(2**24)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

hardware.configure_process(Config(device="cpu", threads=1, compile=False, matmul="torch"))
print([faults() for _ in range(30)][-1])  # malloc has to find its place first
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="this is how glibc allocates")
def test_freed_memory_is_kept_for_the_next_step():
    """Otherwise each of these tensors costs 16,384 page faults every time.

    In its own process, because glibc returns the heaps of other threads than the main one.
    """
    done = subprocess.run([sys.executable, "-c", _FAULTS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 100


@pytest.fixture
def gpu(monkeypatch):
    """Pretend to have a GPU and all that compiling needs."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    monkeypatch.setattr("pathlib.Path.exists", lambda path: True)


@pytest.mark.parametrize(
    ("compiled", "steps", "expected"),
    [
        *(("auto", 1000, False), ("auto", 10**6, True), ("graphs", 1000, "graphs")),
        *((True, 1000, True), (False, 10**6, False)),
    ],
)
def test_compile_on_a_gpu(gpu, compiled, steps, expected):
    asked = Config(device="cuda", precision="bf16", compile=compiled, train=TrainConfig(steps))
    assert resolve(asked).compile == expected


def test_compile_auto_is_false_on_a_cpu():
    asked = Config(device="cpu", precision="fp32", train=TrainConfig(10**6))
    assert resolve(asked).compile is False


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"device": "cpu"}, "graphs replays CUDA graphs, and the device is cpu"),
        ({"model": ModelConfig(dropout=0.1)}, "graphs needs model.dropout=0"),
        ({"train": TrainConfig(10, grad_accum=2)}, "graphs needs train.grad_accum=1"),
    ],
    ids=str,
)
@pytest.mark.parametrize("remote", [True, False])
def test_graphs_that_cannot_be_are_refused(gpu, monkeypatch, keys, reason, remote):
    if remote:
        monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    base = {"device": "cuda", "precision": "bf16", "compile": "graphs"}
    with pytest.raises(UserError, match=f"compile: {reason}"):
        resolve(Config(**base | keys), remote=remote)


def test_missing_compiler_is_named_with_the_value_that_needs_it(gpu, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for value in ("graphs", True):
        with pytest.raises(UserError, match=f"compile: {str(value).lower()} needs triton, which"):
            resolve(Config(device="cuda", precision="bf16", compile=value))


def test_plan_for_an_absent_gpu_has_portable_kernels(gpu, monkeypatch):
    asked = Config(device="cuda", precision="bf16", compile=False)
    here = resolve(asked, remote=True)
    assert (here.attention.kernel, find_gpu(here)) == (
        "auto",
        Gpu((9, 0), cudnn=False, triton=True),
    )
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    elsewhere = resolve(asked, remote=True)
    assert (elsewhere.attention.kernel, find_gpu(elsewhere)) == ("portable", None)


def test_deterministic_runs_do_not_use_cudnn(gpu, monkeypatch):
    monkeypatch.setattr("torch.backends.cudnn.is_available", lambda: True)
    for deterministic in (True, False):
        gpu = find_gpu(Config(device="cuda", deterministic=deterministic))
        assert gpu.cudnn is not deterministic


@pytest.mark.parametrize("compiled", [False, True, "graphs"])
def test_loss_becomes_a_graph_only_where_asked(monkeypatch, compiled):
    calls = []
    monkeypatch.setattr("torch.compile", lambda f, **how: calls.append(how) or f)
    monkeypatch.setattr("torch.compiler.cudagraph_mark_step_begin", lambda: calls.append("step"))
    config = Config(compile=compiled)
    plain, graphed = (compile_loss(abs, config, graphs=g) for g in (False, True))
    minus_two = torch.tensor(-2)
    assert (plain(minus_two), graphed(minus_two)) == (2, 2)
    static, graphs = {"dynamic": False}, {"dynamic": False, "mode": "reduce-overhead"}
    expected = {False: [], True: [static, static], "graphs": [static, graphs, "step"]}
    assert calls == expected[compiled]


def test_losses_of_earlier_replays_are_kept(monkeypatch):
    """A CUDA graph writes its output to the same memory whenever it is replayed."""
    output = torch.zeros(())

    def record(loss, **_):
        return lambda *args, **options: output.copy_(loss(*args, **options))

    monkeypatch.setattr("torch.compile", record)
    monkeypatch.setattr("torch.compiler.cudagraph_mark_step_begin", lambda: output.fill_(torch.nan))
    loss = compile_loss(torch.nn.functional.l1_loss, Config(compile="graphs"), graphs=True)
    zero_N = torch.zeros(2)
    losses = [loss(torch.full((2,), float(i)), zero_N, reduction="sum") for i in range(3)]
    assert torch.stack(losses).tolist() == [0, 2, 4]


def test_the_peak_is_measured_with_numbers_that_differ(monkeypatch):
    """A GPU draws less power, and is faster, where it multiplies ones."""
    operands = []
    monkeypatch.setattr(matmul, "linear", lambda *pair: operands.extend(pair))
    config = Config(device="cpu", precision="bf16", threads=1)
    assert measure_peak_flops(config, 64) > 0
    for operand in operands[:2]:
        assert operand.shape == (64, 64)
        assert operand.dtype == torch.bfloat16
        assert len(operand.unique()) > 500


def test_runs_of_a_process_share_one_measurement_of_the_peak(monkeypatch):
    measured = iter([3e9, 5e9])
    monkeypatch.setattr(hardware, "_peaks", {})
    monkeypatch.setattr(hardware, "measure_peak_flops", lambda config: next(measured))
    first, other = (Config(device="cpu", precision=name) for name in ("fp32", "bf16"))
    peaks = [hardware.known_peak_flops(config) for config in (first, other, first)]
    assert peaks == [3e9, 5e9, 3e9]


class Capture:
    """Ends with an error of its own after one within it, as the capture of a CUDA graph does."""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        raise RuntimeError("operation failed due to a previous error during capture")


@pytest.mark.parametrize(
    ("error", "says"), [(torch.OutOfMemoryError("no memory"), True), (ValueError("no"), False)]
)
def test_memory_that_runs_out_in_a_capture_is_seen(error, says):
    with pytest.raises(RuntimeError, match="during capture") as caught, Capture():
        raise error
    assert is_out_of_memory(caught.value) is says
    assert is_out_of_memory(error) is says


@pytest.mark.parametrize("error", [UserError("a mistake"), OSError("a full disk")])
def test_other_errors_while_memory_runs_out_are_their_own(error):
    error.__context__ = torch.OutOfMemoryError("no memory")
    assert not is_out_of_memory(error)

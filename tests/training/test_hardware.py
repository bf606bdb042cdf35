"""Resolution of `auto` by hardware."""

import platform
import subprocess
import sys

import pytest
import torch

from qkablate.attention.kernels import matmul
from qkablate.config import Config
from qkablate.errors import UserError
from qkablate.training.hardware import measure_peak_flops, resolve

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

"""What `auto` makes of a machine."""

import pytest

from qkablate.config import Config
from qkablate.training.hardware import resolve

INTEL = {"cpu_name": "Intel Xeon"}


@pytest.mark.parametrize(
    ("found", "precision"),
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
def test_a_cpu_is_used_in_the_precision_that_is_faster_there(monkeypatch, found, precision):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.cpu.get_capabilities", lambda: found, raising=False)
    assert resolve(Config(device="cpu")).precision == precision

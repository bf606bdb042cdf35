"""The process of a run shares its machine with others."""

import os

import pytest

from qkablate.sweeps.running.worker import limit_compilers


@pytest.mark.parametrize(
    ("cores", "packed", "compilers"), [(64, 1, 8), (64, 16, 4), (2, 2, 1), (2, 8, 1), (12, 0, 8)]
)
def test_run_compiles_with_its_share_of_the_cores(monkeypatch, cores, packed, compilers):
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "3")
    limit_compilers(packed)
    assert os.environ["TORCHINDUCTOR_COMPILE_THREADS"] == "3"  # the user's
    monkeypatch.delenv("TORCHINDUCTOR_COMPILE_THREADS")
    monkeypatch.setattr("qkablate.sweeps.running.worker.count_cores", lambda: cores)
    limit_compilers(packed)
    assert os.environ["TORCHINDUCTOR_COMPILE_THREADS"] == str(compilers)

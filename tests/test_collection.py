"""Test workers must agree on the tests: ids depend neither on the clock nor on the hash seed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def collected_ids(hash_seed: int, clock_shift: float, tmp_path: Path) -> list[str]:
    """Return the ids of all tests, collected in a new process."""
    shared = ["-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
    options = ["-o", "addopts=--strict-markers --import-mode=importlib"]
    done = subprocess.run(
        [sys.executable, *shared, *options, "-p", "tests.shifted_clock", str(ROOT / "tests")],
        cwd=ROOT,
        env={
            **os.environ,
            "PYTHONHASHSEED": str(hash_seed),
            "PYTHONPATH": str(ROOT),
            "QKABLATE_TEST_CLOCK_SHIFT": str(clock_shift),
            "HOME": str(tmp_path),
        },
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [line for line in done.stdout.splitlines() if "::" in line]


@pytest.mark.slow
def test_tests_have_the_same_ids_in_every_process(tmp_path):
    first = collected_ids(1, 0.0, tmp_path)
    assert len(first) > 1000
    assert first == collected_ids(2, 86_401.5, tmp_path)

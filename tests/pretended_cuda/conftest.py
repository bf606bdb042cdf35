"""A process with a pretended GPU, one for all tests."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.pretended_cuda.cases import PRECISIONS, Case
from tests.pretended_cuda.library import build_library, missing_reason

Traced = dict[str, Any]


@pytest.fixture(scope="session")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[subprocess.Popen[str]]:
    """Start the process; skip where there can be none."""
    if reason := missing_reason():
        pytest.skip(f"a pretended GPU {reason}")
    build_library()
    folder = tmp_path_factory.mktemp("pretended")
    root = str(Path(__file__).parents[2])
    environment = os.environ | {"PYTHONPATH": root, "HOME": str(folder), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "tests.pretended_cuda.worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=folder,
        env=environment,
    ) as worker:
        yield worker
        assert worker.stdin is not None
        worker.stdin.close()


@pytest.fixture
def trace(process: subprocess.Popen[str]) -> Callable[..., Traced]:
    """Return the function that traces a case, or several runs of it, with a fault if given one."""

    def run(case: Case, fault: str | None = None, runs: int = 1) -> Traced:
        assert process.stdin is not None
        assert process.stdout is not None
        capability = PRECISIONS[case.precision][1]
        request = {"settings": case.settings, "capability": capability, "blocks": case.blocks}
        process.stdin.write(json.dumps(request | {"fault": fault, "runs": runs}) + "\n")
        process.stdin.flush()
        result: Traced = json.loads(process.stdout.readline())
        return result

    return run

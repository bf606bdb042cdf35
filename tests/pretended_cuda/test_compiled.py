"""Compiled training without a device: one graph, few launches, no fp64, kernels that assemble."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from qkablate.config import variants
from tests.pretended_cuda.library import build_library, missing_reason

ROOT = Path(__file__).parents[2]
MOST_LAUNCHES = 80  # of a layer with embedding, loss and their gradients
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None
        and not os.environ.get("QKABLATE_NEEDS_COMPILER"),
        reason="needs triton",
    ),
]
EXTRA = [
    {"variant": "standard", "precision": "fp16", "model.position": "rope"},
    {"variant": "standard", "precision": "fp32", "model.position": "alibi"},
    {"variant": "merged_w", "precision": "bf16", "model.dropout": "0.1"},
    {"variant": "merged_w", "precision": "bf16", "model.context": "20"},
]


@pytest.fixture(scope="module")
def examine(tmp_path_factory):
    """Return the function that compiles a run in a process with a pretended GPU."""
    if reason := missing_reason():
        give_up = pytest.fail if os.environ.get("QKABLATE_NEEDS_COMPILER") else pytest.skip
        give_up(f"a pretended GPU {reason}")
    build_library()
    folder = tmp_path_factory.mktemp("compiled")
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    caches = {name: str(folder) for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "HOME")}
    command = [sys.executable, "-W", "ignore", "-m", "tests.pretended_cuda.compiled"]
    environment = os.environ | caches | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, text=True, cwd=folder, env=environment, **pipes) as process:

        def ask(words, fault=None):
            process.stdin.write(json.dumps({"words": words, "fault": fault}) + "\n")
            process.stdin.flush()
            return json.loads(process.stdout.readline())

        yield ask
        process.stdin.close()


def findings(found):
    """Return what is wrong with the programs of a run."""
    if "error" in found:
        return [found["error"]]
    assert found["passes"] == 2
    assert found["kernels"] > 5
    few = sum(found["launches"]) <= MOST_LAUNCHES
    return [
        *([] if few else [f"{found['launches']} launches"]),
        *(f"fp64 in {name}" for name in found["fp64"]),
        *(f"{name}: {reason}" for name, reason in found["rejected"].items()),
    ]


@pytest.mark.parametrize(
    "words", [*({"variant": name, "precision": "bf16"} for name in variants()), *EXTRA], ids=str
)
def test_training_compiles_into_one_graph_of_few_kernels(examine, words):
    assert findings(examine(words)) == []


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_kernel_for_wide_keys_assembles(examine, precision):
    assert examine({"wide": precision}) == {"rejected": {}}


@pytest.mark.parametrize(
    ("fault", "finding"),
    [
        ("the graph breaks", "Unsupported"),
        ("angles in fp64", "fp64 in triton_"),
        ("nothing is fused", "launches"),
        ("an unknown instruction", "PTXASError"),
    ],
)
def test_a_planted_fault_is_found(examine, fault, finding):
    words = {"variant": "standard", "precision": "bf16", "model.position": "rope"}
    assert any(finding in line for line in findings(examine(words, fault)))

"""Training on a pretended GPU: errors of device, type and shape; waits; copies; memory.

Nothing is computed: tensors on "cuda" have no values, and kernels give the shapes of their results.
"""

import itertools
import os

import pytest

from qkablate.config import variants
from tests.pretended_cuda.cases import CASES, CHOSEN, FORMS, IMPOSSIBLE, PADDED, Case, product

# Where the program may wait for the device, and how often: an evaluation begins and ends the two
# steps, and each of them, and the checkpoint, asks for the first step that is not finite.
READS = {"log": 1, "evaluate": 2, "loop": 2}
CHECKPOINT_READS = 2  # of numbers; of tensors there are as many as the run has
WAITS = {"loop": 3}  # before what does not count to the speed
SHARE = 1.0 if os.environ.get("QKABLATE_ALL_TRACES") == "1" else 1 / 24


def findings(case, traced):
    """Return what is wrong with a trace."""
    if "error" in traced:
        return [traced["error"]]
    found = []
    counts = {
        kind: {p: sum(n.values()) for p, n in traced[kind].items()} for kind in traced["kinds"]
    }
    for name, count in counts["reads"].items():
        if name not in ("start", "checkpoint") and count > READS.get(name, 0):
            found.append(f"reads while {name}: {traced['reads'][name]}")
    for kind, allowed in (("waits", WAITS), ("uploads", {}), ("wide", {})):
        for name, count in counts[kind].items():
            if name != "start" and count > allowed.get(name, 0):
                found.append(f"{kind} while {name}: {traced[kind][name]}")
    if traced["probed"]:
        found.append(f"the peak memory is at least {traced['probed']} bytes before training")
    if traced["kept"] > case.kept_bytes:
        found.append(f"kept {traced['kept']} bytes of at most {case.kept_bytes}")
    return found


def check(case, traced):
    """Check that a run is sound, and that it did what it was to do."""
    assert "error" not in traced, traced["traceback"]
    assert findings(case, traced) == []
    assert case.kernel in ("auto", traced["kernel"])
    assert traced["written"] == [2]
    assert [row for row in traced["rows"] if "train/loss" in row]
    assert sum("val/loss" in row for row in traced["rows"]) == 2
    assert sum(traced["reads"]["log"].values()) == 1
    assert sum(traced["reads"]["evaluate"].values()) == 2


@pytest.mark.slow
@pytest.mark.parametrize("case", [*CASES, *FORMS], ids=lambda case: case.name)
def test_runs_are_sound_on_cuda(trace, case):
    check(case, trace(case))


def test_the_cases_cover_every_variant_and_pair():
    assert {case.variant for case in CASES} == {case.variant for case in CHOSEN} == {*variants()}
    columns = [{case[place] for case in CASES} for place in range(1, 7)]
    pairs = {
        ((i, a), (j, b))
        for (i, first), (j, second) in itertools.combinations(enumerate(columns), 2)
        for a, b in itertools.product(first, second)
    }
    missing = pairs - set().union(*(case.pairs for case in CASES))
    assert {(a, b) for (_, a), (_, b) in missing} == IMPOSSIBLE
    assert {"encoder", "encoder_decoder"} <= {
        word.partition("=")[2] for case in FORMS for word in case.words.split()
    }


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", product([*variants()], SHARE), ids=lambda case: case.name)
def test_a_sample_of_all_runs_is_sound(trace, case):
    """With QKABLATE_ALL_TRACES=1 it is all of them."""
    traced = trace(case)
    if traced.get("error", "").startswith("ImpossibleConfig"):
        assert "rope" in traced["error"]  # the only setting that some variants do not support
    else:
        check(case, traced)


PROGRAMS = [
    Case("standard", "bf16", position="rope"),
    Case("merged_w", "fp32", position="alibi"),
    Case("shared_qk_reformer", "bf16"),
    Case("no_q", "bf16", words="optim=muon"),
]


@pytest.mark.parametrize("case", PROGRAMS, ids=lambda case: case.name)
def test_steps_of_vmapped_runs_read_nothing(trace, case):
    """Their batches are copied from pinned memory."""
    traced = trace(case, runs=2)
    assert "error" not in traced, traced["traceback"]
    found = [traced[kind].get("step", {}) for kind in ("reads", "waits", "wide", "uploads")]
    assert found == [{}, {}, {}, {}]


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", CHOSEN, ids=lambda case: case.variant)
def test_the_chosen_kernel_keeps_little(trace, case):
    """With it no variant keeps a weight for each pair of positions of each window."""
    traced = trace(case)
    check(case, traced)
    assert traced["kernel"] == CHOSEN[case]


ROPE = Case("standard", "bf16", "flash", "rope")
# By fault: the run that it is planted in, and what is said about it.
PLANTED = {
    "arange without a device": (ROPE, "device"),
    "eye moved to the device": (ROPE, "uploads while step"),
    "tensor made of a list": (ROPE, "uploads while step"),
    "float of a tensor": (ROPE, "reads while step"),
    "branch on a tensor": (ROPE, "reads while step"),
    "reading by a mask": (ROPE, ""),
    "assigning by a mask": (ROPE, "reads while step"),
    "nonzero": (ROPE, ""),
    "last stride": (ROPE, "No available kernel: flash"),
    "fp64 angles": (ROPE, "wide while step"),
    "assigning a number by indices": (Case("shared_qk_reformer", "bf16"), "uploads while step"),
    "all weights are kept": (Case("standard", "bf16", kept=20), "kept"),
    "flash with a mask": (Case("standard", "bf16", position="alibi"), "No available kernel: flash"),
    "flash with padding": (Case("standard", "bf16", words=PADDED), "No available kernel: flash"),
    "nothing is recomputed": (Case("standard", "bf16", recompute=True, kept=2), "kept"),
    "batches are not pinned": (ROPE, "copy not pinned"),
    "batches are not contiguous": (ROPE, "copy not contiguous"),
    "batches are copied at once": (ROPE, "copy synchronous"),
    "batches stay on the CPU": (ROPE, "device"),
    "a wait after each step": (ROPE, "waits while step"),
    "the norm is read after each step": (ROPE, "reads while step"),
    "each batch of an evaluation is read": (ROPE, "reads while evaluate"),
    "the log reads twice": (ROPE, "reads while log"),
    "the peak is not reset": (ROPE, "the peak memory is at least"),
    "clipping checks for NaN": (ROPE, "reads while step"),
    "the optimizer is not fused": (Case("standard", "fp16-sm75"), "reads while step"),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_is_found(trace, fault):
    case, expected = PLANTED[fault]
    found = findings(case, trace(case, fault))
    assert found
    assert any(expected in line for line in found), found

"""The number of concurrent runs, and their threads and GPUs."""

from collections import Counter
from dataclasses import replace

import pytest

from qkablate.config import Config, EngineConfig, SweepConfig
from qkablate.errors import UserError
from qkablate.sweeps.planning.manifest import Arm, Manifest, SweepRun
from qkablate.sweeps.planning.packing import memory_gb_per_run, pack


def plan_of(*threads: int | None, device: str = "cpu", runs: int = 100) -> Manifest:
    """Return a plan with one arm per number of threads; None: not given."""
    arms = {}
    for number, given in enumerate(threads):
        words = {} if given is None else {"threads": str(given)}
        config = Config(device=device, threads=given or 99)
        arm = Arm(f"arm{number}", "standard", ["none"], None, words, config, {}, 5, 1, 1, 1.0)
        arms[arm.name] = arm
    names = list(arms)
    of = [SweepRun(f"{n:012x}", "run", names[n % len(names)], False, {}) for n in range(runs)]
    return Manifest("grid", "outputs", arms, of, [], [], 0)


def packed(manifest: Manifest, **settings) -> tuple[list[str | None], list[int]]:
    """Return the slots, and the threads of each arm."""
    found, slots = pack(manifest, SweepConfig(**settings))
    return slots, [arm.config.threads for arm in found.arms.values()]


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """Simulate a machine with eight cores, much memory and four GPUs."""

    def make(cores: int = 8, gpus: int = 4, free: float = 2.0**50) -> None:
        monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(cores)), raising=False)
        monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
        monkeypatch.setattr("qkablate.training.hardware.free_memory", lambda: free)

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    make()
    return make


def test_cpu_has_one_slot_per_core(machine):
    assert packed(plan_of(None)) == ([None] * 8, [1])
    machine(cores=1)
    assert packed(plan_of(None)) == ([None], [1])


def test_runs_for_a_gpu_need_one(machine):
    machine(gpus=0)
    with pytest.raises(UserError, match="torch sees no CUDA GPU here"):
        packed(plan_of(None, device="cuda"))


def test_few_runs_share_all_cores():
    assert packed(plan_of(None, runs=2)) == ([None] * 2, [4])
    assert packed(plan_of(None, runs=1)) == ([None], [8])
    assert packed(plan_of(None, runs=3)) == ([None] * 3, [2])


@pytest.mark.parametrize(("given", "slots"), [(1, 8), (2, 4), (3, 2), (8, 1), (64, 1)])
def test_given_threads_are_kept(given, slots):
    assert packed(plan_of(given)) == ([None] * slots, [given])


def test_largest_given_threads_limit_the_slots():
    slots, threads = packed(plan_of(1, 4))
    assert (len(slots), threads) == (2, [1, 4])


@pytest.mark.parametrize(("workers", "threads"), [(1, 8), (3, 2), (8, 1), (12, 1)])
def test_given_workers_are_kept(workers, threads):
    assert packed(plan_of(None), workers=workers) == ([None] * workers, [threads])
    assert packed(plan_of(5), workers=workers) == ([None] * workers, [5])


def test_overrides_of_each_arm_contain_its_threads():
    """The command of one run thereby repeats it with the same threads."""
    found, _ = pack(plan_of(None, 3), SweepConfig())
    assert [arm.overrides["threads"] for arm in found.arms.values()] == ["4", "3"]


def test_packing_changes_no_id():
    before = plan_of(None)
    after, _ = pack(before, SweepConfig())
    assert after.runs == before.runs
    assert after.id == before.id


def test_memory_limits_the_slots(machine):
    machine(free=2.0**30)
    few, _ = packed(plan_of(None))
    assert 1 <= len(few) < 8
    machine(free=0.0)
    assert packed(plan_of(None)) == ([None], [8])
    assert packed(plan_of(None), workers=8)[0] == [None] * 8


def test_unknown_memory_limits_nothing(machine):
    machine(free=float("inf"))
    assert packed(plan_of(None)) == ([None] * 8, [1])


def test_each_gpu_is_a_slot():
    assert packed(plan_of(None, device="cuda"))[0] == ["0", "1", "2", "3"]
    assert packed(plan_of(None, device="cuda", runs=3))[0] == ["0", "1", "2"]


def test_runs_that_share_gpus_are_spread_evenly():
    slots, _ = packed(plan_of(None, device="cuda"), runs_per_gpu=2)
    assert Counter(slots) == dict.fromkeys("0123", 2)
    slots, _ = packed(plan_of(None, device="cuda", runs=6), runs_per_gpu=2)
    assert sorted(Counter(slots).values()) == [1, 1, 2, 2]
    slots, _ = packed(plan_of(None, device="cuda"), workers=6)
    assert sorted(Counter(slots).values()) == [1, 1, 2, 2]
    assert packed(plan_of(None, device="cuda"), workers=1)[0] == ["0"]


@pytest.mark.parametrize("names", ["3,5", "GPU-8932f937,MIG-3eb87630"])
def test_visible_gpus_keep_their_names(machine, monkeypatch, names):
    machine(gpus=2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", names)
    assert packed(plan_of(None, device="cuda"))[0] == names.split(",")


def test_names_after_an_invalid_gpu_are_not_used(machine, monkeypatch):
    """CUDA reads the variable in the same way."""
    machine(gpus=1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,-1,3")
    assert packed(plan_of(None, device="cuda"))[0] == ["2"]


@pytest.mark.parametrize("device", ["cuda:1", "cuda:0"])
def test_numbered_gpu_is_rejected(device):
    with pytest.raises(UserError, match=f"device: .* give device=cuda, not {device}"):
        pack(plan_of(None, device=device), SweepConfig())


def test_memory_of_a_translator_includes_its_encoder():
    def bound(**shape):
        manifest = plan_of(None)
        (arm,) = manifest.arms.values()
        model = replace(arm.config.model, context=512, **shape)
        arms = {arm.name: replace(arm, config=replace(arm.config, model=model))}
        return memory_gb_per_run(replace(manifest, arms=arms), EngineConfig())

    decoder, translator = bound(), bound(form="encoder_decoder")
    assert bound(form="encoder_decoder", source=2048) > translator > decoder + 1

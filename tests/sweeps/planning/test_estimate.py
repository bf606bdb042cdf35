"""The estimated cost of a sweep, from the timings of two arms."""

import itertools
import math
from dataclasses import replace

import pytest

from qkablate.config import EVAL_COST, Config, DataConfig, ModelConfig, TrainConfig
from qkablate.data.text.references import peak_bytes
from qkablate.sweeps.planning import estimate as module
from qkablate.sweeps.planning.estimate import RunEstimate, Timing, estimate_arms, estimate_sweep
from qkablate.sweeps.planning.manifest import Arm, Manifest, SweepRun

STEPS, EVERY, VAL, TOKENS = 1000, 250, 8 * 64 * 10, 8 * 64
READINGS = STEPS // EVERY + 3  # two splits of VAL tokens and one of the training split


def arm_of(flops: float, params: int = 1000, steps: int = STEPS) -> Arm:
    """Return an arm with this many FLOPs per step."""
    config = Config(
        model=ModelConfig(context=64),
        data=DataConfig(val_tokens=VAL),
        train=TrainConfig(
            steps=steps, batch_size=8, eval_every=EVERY, eval_tokens=VAL, test_tokens=VAL
        ),
        threads=1,
    )
    name = f"f{flops:g}-p{params}-s{steps}"
    facts = {"vocabulary": 97}
    return Arm(
        name,
        "standard",
        ["none"],
        None,
        {},
        config,
        facts,
        config.data.val_tokens,
        params,
        params,
        flops / TOKENS,
    )


def plan_of(tmp_path, *arms: Arm, runs: int = 1, finals: int = 0) -> Manifest:
    changes = [{"seed": seed, "optim.lr": 1e-3} for seed in range(runs)]
    every = [
        SweepRun(f"{arm.name}-{change['seed']}", "run", arm.name, finals > 0, change)
        for arm in arms
        for change in changes
    ]
    later = [{"seed": 100 + seed} for seed in range(finals)]
    return Manifest("grid", str(tmp_path), {arm.name: arm for arm in arms}, every, later, [], 0)


@pytest.fixture
def timed(monkeypatch):
    """Simulate timings by FLOPs; return the names of the arms that were timed."""
    timed_arms = []

    def make(seconds, start=2.0, memory=lambda flops: int(1e8 + flops)):
        def measure(arm, manifest, slots, cache):
            flops = arm.flops * TOKENS
            timed_arms.append(arm.name)
            cache[arm.name] = flops
            return Timing(flops, seconds(flops), start, memory(flops))

        monkeypatch.setattr(module, "_measure", measure)
        monkeypatch.setattr("qkablate.training.hardware.free_memory", lambda: 2.0**50)
        return timed_arms

    return make


def steps_of(estimate: RunEstimate, start: float = 2.0) -> float:
    """Return the seconds per step of an estimate, without start and evaluations."""
    return (estimate.seconds - start) / (STEPS + READINGS * VAL / TOKENS * EVAL_COST)


def affine(flops: float) -> float:
    return 1e-3 + flops * 1e-9


def test_timed_arms_have_their_measured_cost(timed, tmp_path):
    timed_arms = timed(affine)
    arms = [arm_of(flops) for flops in (3e6, 1e6, 9e6)]
    estimates = estimate_arms(plan_of(tmp_path, *arms), [None] * 2)
    assert set(estimates) == {arm.name for arm in arms}
    assert {*timed_arms} == {arms[1].name, arms[2].name}  # the smallest and the largest
    for arm in arms[1:]:
        flops = arm.flops * TOKENS
        assert steps_of(estimates[arm.name]) == pytest.approx(affine(flops))
        assert estimates[arm.name].bytes == pytest.approx(1e8 + flops)
        assert not estimates[arm.name].extrapolated


def test_estimate_is_linear_between_timed_arms(timed, tmp_path):
    timed(lambda flops: 1e-9 * flops if flops in (1e6, 9e6) else math.nan)
    arms = {flops: arm_of(flops) for flops in (1e6, 2e6, 5e6, 8.5e6, 9e6)}
    estimates = estimate_arms(plan_of(tmp_path, *arms.values()), [None] * 1)
    for flops, arm in arms.items():
        assert steps_of(estimates[arm.name]) == pytest.approx(1e-9 * flops)
        assert estimates[arm.name].bytes == pytest.approx(1e8 + flops)


def test_arms_too_large_to_time_are_extrapolated_and_marked(timed, tmp_path):
    timed_arms = timed(affine)
    # At the smallest arm's rate, eight steps of the last would take more than twenty seconds.
    arms = [arm_of(flops) for flops in (1e6, 1e8, 1e9, 1e12)]
    estimates = estimate_arms(plan_of(tmp_path, *arms), [None] * 1)
    assert {*timed_arms} == {arms[0].name, arms[2].name}
    assert [estimates[arm.name].extrapolated for arm in arms] == [False, False, False, True]
    assert steps_of(estimates[arms[3].name]) == pytest.approx(affine(1e12))


def test_arms_that_may_not_fit_in_memory_are_not_timed(timed, tmp_path, monkeypatch):
    timed_arms = timed(affine)
    monkeypatch.setattr("qkablate.training.hardware.free_memory", lambda: 1e9)
    small, large = arm_of(1e6), arm_of(2e6, params=10**8)
    estimates = estimate_arms(plan_of(tmp_path, small, large), [None] * 1)
    assert {*timed_arms} == {small.name}
    assert estimates[large.name].extrapolated
    assert estimates[large.name].bytes >= 16e8  # weights, gradients and two moments of four bytes


def test_time_is_proportional_to_flops_with_one_timing(timed, tmp_path, monkeypatch):
    timed(lambda flops: 100.0)  # slower than the limit
    small, large = arm_of(1e6), arm_of(3e6)
    estimates = estimate_arms(plan_of(tmp_path, small, large), [None] * 1)
    assert steps_of(estimates[small.name]) == pytest.approx(100)
    assert steps_of(estimates[large.name]) == pytest.approx(300)


def test_single_arm_is_not_extrapolated(timed, tmp_path):
    timed(affine)
    arm = arm_of(1e6)
    (estimate,) = estimate_arms(plan_of(tmp_path, arm), [None] * 1).values()
    assert steps_of(estimate) == pytest.approx(affine(1e6))
    assert not estimate.extrapolated


@pytest.mark.parametrize("seconds", [affine, lambda flops: 1e-3, lambda flops: flops**0.5 * 1e-6])
def test_more_flops_never_take_less_time_or_memory(timed, tmp_path, seconds):
    timed(seconds)
    arms = [arm_of(10**power) for power in (5, 5.5, 6, 6.1, 7, 8, 9, 10, 12, 14)]
    estimates = estimate_arms(plan_of(tmp_path, *arms), [None] * 1)
    for one, other in itertools.pairwise(estimates[arm.name] for arm in arms):
        assert one.seconds <= other.seconds * (1 + 1e-9)
        assert one.bytes <= other.bytes * (1 + 1e-9)
        assert one.extrapolated <= other.extrapolated


def test_noisy_timings_give_positive_estimates(timed, tmp_path):
    timed({1e6: 2e-3, 1.1e6: 1e-3}.get)  # the larger one was faster by chance
    arms = [arm_of(flops) for flops in (1e6, 1.1e6)]
    for estimate in estimate_arms(plan_of(tmp_path, *arms), [None] * 1).values():
        assert estimate.seconds > 0
        assert estimate.bytes > 0


def test_longer_training_takes_longer(timed, tmp_path):
    timed(affine)
    short, long = arm_of(1e6), arm_of(1e6, steps=4 * STEPS)
    estimates = estimate_arms(plan_of(tmp_path, short, long), [None] * 1)
    assert 3.9 < (estimates[long.name].seconds - 2) / (estimates[short.name].seconds - 2) < 4


def fixed(**seconds: float) -> dict[str, RunEstimate]:
    return {name: RunEstimate(value, 1.0, False) for name, value in seconds.items()}


def named(tmp_path, runs: int, finals: int = 0, *names: str) -> Manifest:
    arms = [
        Arm(
            name, name, ["none"], None, {}, Config(train=TrainConfig(steps=STEPS)), {}, 5, 1, 1, 1.0
        )
        for name in names or ("a", "b", "c")
    ]
    return plan_of(tmp_path, *arms, runs=runs, finals=finals)


@pytest.mark.parametrize(
    ("slots", "total"),
    [
        (1, 2 * (7 + 5 + 3)),
        (2, 15),  # 7 5 3 and 7 5 3
        (3, 10),  # 7 3, 7 3 and 5 5
        (4, 8),  # 7, 7, 5 3 and 5 3
        (100, 7),
    ],
)
def test_total_time_packs_largest_runs_first(tmp_path, slots, total):
    assert estimate_sweep(named(tmp_path, 2), fixed(a=5.0, b=3.0, c=7.0), slots).seconds == total


def test_done_runs_cost_nothing(tmp_path):
    manifest = named(tmp_path, 2)
    times = fixed(a=5.0, b=3.0, c=7.0)
    done = {run.id: run.arm for run in manifest.runs}
    assert estimate_sweep(manifest, times, 1, done).seconds == 0
    del done[next(id for id, arm in done.items() if arm == "b")]
    assert estimate_sweep(manifest, times, 1, done).seconds == 3


def test_all_runs_of_tuning_are_counted(tmp_path):
    times = fixed(a=5.0, b=3.0, c=7.0)
    refinement = 2 * 2  # on both sides of the best rate, with both tuning seeds
    total = estimate_sweep(named(tmp_path, 2, 3), times, 1).seconds
    assert total == (2 + refinement + 3) * 15
    manifest = named(tmp_path, 2, 3)
    done = {run.id: run.arm for run in manifest.runs} | {"refined": "a", "final": "c"}
    assert estimate_sweep(manifest, times, 1, done).seconds == (refinement + 3) * 15 - 5 - 7


@pytest.mark.parametrize(
    ("source", "evaluates", "objective"),
    [
        *(("text", True, None), ("text", False, None), ("recall", True, None)),
        *(("text", True, "causal"), ("text", True, "mlm")),
    ],
)
def test_memory_includes_the_references_of_the_first_run_on_a_text(
    timed, tmp_path, source, evaluates, objective
):
    timed(affine)
    arm = arm_of(1e6)
    config = replace(
        arm.config,
        device="cpu",
        data=replace(arm.config.data, source=source, objective=objective),
        train=replace(arm.config.train, evaluate_test=evaluates),
    )
    (estimate,) = estimate_arms(plan_of(tmp_path, replace(arm, config=config)), [None]).values()
    are_measured = source == "text" and evaluates and objective != "mlm"
    references = peak_bytes(arm.tokens, arm.config.data.test_tokens) if are_measured else 0
    assert estimate.bytes == pytest.approx(1e8 + 1e6 + references)

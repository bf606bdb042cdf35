"""The function distance: known distributions, pairs, twins, missing runs."""

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qkablate.analysis.comparison.function_distance import (
    Predictions,
    measure_distances,
    neighbors,
    symmetric_kl,
)
from qkablate.analysis.comparison.gaps import find_families
from qkablate.analysis.comparison.summary import describe_study
from qkablate.analysis.stats import Sample
from qkablate.runs import predictions
from qkablate.runs.predictions import PredictionsHeader
from tests.analysis.references import to_json

STEPS = (0, 6, 12)
PER_STEP = 32
WORDS = ("variant=standard,no_q,standard_reassociated", "seed=range(4)")


def log_softmax(raw):
    raw = np.asarray(raw, np.float64)
    raw = raw - raw.max(axis=-1, keepdims=True)
    return (raw - np.log(np.exp(raw).sum(axis=-1, keepdims=True))).astype(np.float32)


def pair(lift):
    """Two tokens; the first with probability 1/2 + lift."""
    return np.log(np.array([[0.5 + lift, 0.5 - lift]] * 3)).astype(np.float32)


def expected(one, other):
    """By hand, one number after the other."""
    total = 0.0
    for p_row, q_row in zip(one, other, strict=True):
        p, q = [math.exp(v) for v in p_row], [math.exp(v) for v in q_row]
        forth = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
        back = sum(b * math.log(b / a) for a, b in zip(p, q, strict=True))
        total += (forth + back) / 2
    return total / len(one)


# The number


@settings(deadline=None)
@given(st.integers(1, 6), st.integers(2, 9), st.integers(0, 2**32 - 1))
def test_distance_is_the_mean_of_both_kl_divergences(positions, vocabulary, seed):
    rng = np.random.default_rng(seed)
    one, other = (log_softmax(rng.normal(0, 3, (positions, vocabulary))) for _ in range(2))
    found = symmetric_kl(Predictions(one), Predictions(other))
    assert found == pytest.approx(expected(one, other), rel=1e-4, abs=1e-6)
    assert found == symmetric_kl(Predictions(other), Predictions(one))


def test_divergence_of_two_coins_is_the_known_one():
    """KL of 3/4 and 1/4 is ½ ln 3 in both directions."""
    found = symmetric_kl(Predictions(pair(0.25)), Predictions(pair(-0.25)))
    assert found == pytest.approx(math.log(3) / 2, rel=1e-6)


def test_distance_of_equal_predictions_is_zero():
    own = log_softmax(np.random.default_rng(0).normal(size=(5, 300)))
    assert symmetric_kl(Predictions(own), Predictions(own.copy())) == 0


def test_tiny_distances_do_not_vanish():
    """Differences of 1e-6 make some 1e-13, as their squares say, on any normalization."""
    rng = np.random.default_rng(0)
    raw = rng.normal(size=(50, 100))
    moved = raw + rng.normal(0, 1e-4, raw.shape)
    found = symmetric_kl(Predictions(log_softmax(raw)), Predictions(log_softmax(moved)))
    p = np.exp(log_softmax(raw).astype(float))
    delta = moved - raw
    spread = (p * delta**2).sum(1) - (p * delta).sum(1) ** 2
    assert found == pytest.approx(spread.mean() / 2, rel=0.02)


@pytest.mark.parametrize(
    ("count", "found"), [(0, []), (1, []), (2, ["ab"]), (3, ["ab", "bc", "ca"])]
)
def test_neighbors_are_each_pair_once(count, found):
    assert ["".join(two) for two in neighbors("abc"[:count])] == found


# Of sweeps


@pytest.fixture
def predicting(cached_world):
    """Return a sweep whose finished runs keep the predictions `lift(run, step)`; None: no file."""

    def make(lift, words=WORDS):
        world = cached_world(*words).finish(lambda run: 2.0 + run.changes["seed"])
        for run in world.runs():
            for step in STEPS:
                value = lift(run, step)
                if value is not None:
                    put(world, run, step, pair(value))
        return world

    return make


def put(world, of, step, logs, **more):
    arm = world.manifest.arms[of.arm]
    own = PredictionsHeader(of.id, step, arm.facts["data_fingerprint"], "a" * 64, len(logs), 16)
    predictions.write_predictions(world.run_folder(of), dataclasses.replace(own, **more), logs)


def lifted(run, step):
    """no_q is 0.1 from its baseline, rounding 0.001, and the next seed 0.02."""
    own = {"no_q": 0.1, "standard_reassociated": 0.001}.get(run.arm.partition("-")[0], 0.0)
    return 0.02 * run.changes["seed"] + own * step / 12


def only(world):
    (found,) = measure_distances(find_families(world.study()))
    return found


def named(found, arm):
    return next(one for one in found.distances if one.arm.startswith(arm))


def of_kind(found, kind):
    return next(one for one in found.distances if one.kind == kind)


def counts(distance):
    return [reading.n for reading in distance.readings]


def geometric_mean(values):
    return math.prod(values) ** (1 / len(values))


def test_pairs_and_rounding_pairs_are_compared(predicting):
    found = only(predicting(lifted))
    assert found.faults == []
    assert found.positions == 3
    assert [one.kind for one in found.distances] == ["arm", "rounding", "seeds"]
    for name, own in (("no_q", 0.1), ("standard_reassociated", 0.001)):
        one = named(found, name)
        assert [reading.tokens for reading in one.readings] == [step * PER_STEP for step in STEPS]
        assert counts(one) == [4, 4, 4]
        values = [expected(pair(0.02 * s), pair(0.02 * s + own)) for s in range(4)]
        assert one.end == one.readings[-1].mean == pytest.approx(geometric_mean(values), rel=1e-3)
        ends = Sample(tuple(map(math.log, values))).interval()
        assert one.interval == pytest.approx([math.exp(end) for end in ends], rel=2e-3)
        assert (one.readings[0].mean, one.readings[0].band) == (0, None)
        low, high = one.interval
        assert low < one.end < high
        wide = one.readings[-1].band
        assert wide[0] < low < high < wide[1]
    seeds = of_kind(found, "seeds")
    values = [expected(pair(0.02 * a), pair(0.02 * b)) for a, b in ((0, 1), (1, 2), (2, 3), (3, 0))]
    assert seeds.readings[0].mean == pytest.approx(geometric_mean(values), rel=1e-3)
    assert counts(seeds) == [4, 4, 4]
    assert {reading.band for reading in seeds.readings} == {None}  # neighbors share runs
    assert seeds.interval is None


def test_summary_is_json_serializable(predicting):
    (found,) = describe_study(predicting(lifted).study()).function_distance
    to_json(found)
    no_q, rounding, seeds = found.distances
    assert no_q.n == 4
    assert no_q.times_another_seed == pytest.approx(no_q.end / seeds.end)
    assert no_q.times_rounding == pytest.approx(no_q.end / rounding.end)
    assert rounding.times_rounding is None
    assert seeds.times_another_seed is None
    assert [one.tokens for one in no_q.readings] == [step * PER_STEP for step in STEPS]


def test_equal_runs_have_distance_zero(predicting):
    found = only(predicting(lambda run, step: 0.0))
    assert {one.end for one in found.distances} == {0.0}
    (described,) = describe_study(predicting(lambda run, step: 0.0).study()).function_distance
    assert {one.times_rounding for one in described.distances} == {None}


def test_two_seeds_are_one_neighbor_pair(predicting):
    words = ("variant=standard,no_q", "seed=range(2)")
    assert counts(of_kind(only(predicting(lifted, words)), "seeds")) == [1, 1, 1]
    words = ("variant=standard,no_q", "seed=5")
    found = only(predicting(lifted, words))
    assert [one.kind for one in found.distances] == ["arm"]
    assert found.distances[0].interval is None


def test_runs_that_keep_nothing_have_no_distance(predicting):
    world = predicting(lambda run, step: None)
    assert measure_distances(find_families(world.study())) == []
    assert describe_study(world.study()).function_distance == []


def test_unpaired_runs_are_not_compared(predicting):
    world = predicting(lifted)
    lost = next(run for run in world.runs() if run.arm.startswith("no_q"))
    world.write(lost, "failed")
    found = only(world)
    assert counts(named(found, "no_q")) == [3, 3, 3]
    assert counts(named(found, "standard_reassociated")) == [4, 4, 4]


def run_named(world, arm, seed):
    return next(r for r in world.runs() if r.arm.startswith(arm) and r.changes["seed"] == seed)


def test_missing_or_damaged_files_are_named_and_skipped(predicting):
    world = predicting(lifted)
    absent, torn, gone = (run_named(world, "no_q", seed) for seed in (0, 1, 2))
    folders = [world.run_folder(run) / "predictions" for run in (absent, torn, gone)]
    (folders[0] / "step-00000012.safetensors").unlink()
    (folders[1] / "step-00000006.safetensors").write_bytes(b"torn")
    for path in folders[2].iterdir():
        path.unlink()
    found = only(world)
    assert counts(named(found, "no_q")) == [3, 2, 2]
    assert found.faults == [
        f"{absent.name} keeps no predictions of step 12",
        f"{gone.name} keeps no predictions",
        f"{torn.name}/predictions/step-00000006.safetensors: its header is too long",
    ]


def test_damaged_baseline_is_named_once(predicting):
    world = predicting(lifted)
    run = run_named(world, "standard-", 1)
    path = world.run_folder(run) / "predictions" / "step-00000012.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    found = only(world)
    assert len(found.faults) == 1
    assert [counts(one)[-1] for one in found.distances] == [3, 3, 3]


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"run": "ba9876543210"}, "another run"),
        ({"data_fingerprint": "0" * 64}, "its data differ"),
        ({"context": 32}, "model.context=32"),
    ],
)
def test_file_of_another_run_is_not_compared(predicting, more, reason):
    world = predicting(lifted)
    put(world, run_named(world, "no_q", 0), 12, pair(0.3), **more)
    found = only(world)
    assert counts(named(found, "no_q"))[-1] == 3
    (fault,) = found.faults
    assert reason in fault


def test_different_positions_are_not_compared(predicting):
    world = predicting(lifted)
    put(world, run_named(world, "no_q", 0), 12, pair(0.3), positions_sha256="b" * 64)
    put(world, run_named(world, "no_q", 1), 12, pair(0.3)[:2])
    found = only(world)
    assert counts(named(found, "no_q"))[-1] == 2
    assert found.faults == ["no_q-d16-h2: 2 pairs of files at different positions are not compared"]


def test_end_is_that_of_training_or_not_known(predicting):
    found = only(predicting(lambda run, step: None if step == 12 else lifted(run, step)))
    assert {one.end for one in found.distances} == {None}
    (described,) = describe_study(
        predicting(lambda r, s: None if s == 12 else 0.1).study()
    ).function_distance
    assert described.distances[0].n == 0


def test_large_sweep_uses_fewer_readings(predicting, monkeypatch):
    monkeypatch.setattr("qkablate.analysis.comparison.function_distance._MAX_PAIRS", 8)
    found = only(predicting(lifted))
    assert {len(one.readings) for one in found.distances} == {1}
    assert named(found, "no_q").end is not None

"""The gap while training: common readings, bands that hold at all of them, growth."""

import json
import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qkablate.analysis.comparison.curves import (
    READINGS,
    arm_curve,
    describe_curve,
    fit_slopes,
    gap_curve,
    thin,
)
from qkablate.analysis.comparison.gaps import find_families
from qkablate.analysis.comparison.summary import describe_study
from qkablate.analysis.stats import ALPHA
from qkablate.analysis.study.loss_curves import TRAIN, VAL
from tests.analysis.references import to_json

PER_STEP = 32  # tokens: two sequences of sixteen
STEPS = (1, 2, 4, 6, 8, 10, 12)


@pytest.fixture
def curved(cached_world):
    """Return a function that writes curves of two finished arms with four seeds.

    `draw(loss)` writes loss(run, tokens) for each run, or no reading where it is None.
    """

    def draw(loss, seeds=4):
        world = cached_world("variant=standard,no_q", f"seed=range({seeds})").finish(
            lambda run: 2.0 + run.changes["seed"]
        )
        for run in world.runs():
            read = {step: loss(run, step * PER_STEP) for step in STEPS}
            world.curve(run, {step: value for step, value in read.items() if value is not None})
        return world

    return draw


def only_gap(world):
    (family,) = find_families(world.study())
    (found,) = family.gaps
    return found


def is_arm(run):
    return run.arm.startswith("no_q")


def test_gap_is_read_where_all_runs_were_read(curved):
    def loss(run, tokens):
        if is_arm(run) and run.changes["seed"] == 2 and tokens == 6 * PER_STEP:
            return None
        if not is_arm(run) and run.changes["seed"] == 1 and tokens == 1 * PER_STEP:
            return None
        return 3 + run.changes["seed"] - tokens / 1000 + 0.25 * is_arm(run)

    shown = gap_curve(only_gap(curved(loss)))
    assert shown.tokens == [step * PER_STEP for step in (2, 4, 8, 10, 12)]
    assert all(sample.values == pytest.approx((0.25,) * 4) for sample in shown.samples)


def test_unpaired_run_does_not_restrict_the_readings(curved):
    world = curved(lambda run, tokens: 3.0 + 0.1 * is_arm(run))
    spoilt = next(run for run in world.runs() if is_arm(run))
    world.write(spoilt, "failed")
    world.curve(spoilt, {5: 100.0})
    shown = gap_curve(only_gap(world))
    assert shown.tokens == [step * PER_STEP for step in STEPS]
    assert {sample.n for sample in shown.samples} == {3}


def test_band_is_wider_than_each_interval_and_adjusted_for_all_readings(curved):
    rng = random.Random(0)
    shown = gap_curve(only_gap(curved(lambda run, tokens: 3 + rng.gauss(0, 0.1))))
    assert len(shown.band()) == len(STEPS)
    for sample, (low, high) in zip(shown.samples, shown.band(), strict=True):
        inner = sample.interval()
        assert low < inner[0] < inner[1] < high
        assert (low, high) == pytest.approx(sample.interval(1 - ALPHA / len(STEPS)))


def test_one_reading_has_the_band_of_its_interval(curved):
    rng = random.Random(1)
    world = curved(lambda run, tokens: rng.random() if tokens == 4 * PER_STEP else None)
    shown = gap_curve(only_gap(world))
    assert shown.band() == [shown.samples[0].interval()]
    assert shown.growth.n == 0
    assert describe_curve(only_gap(world)).growth_per_doubling.mean is None


def test_growth_is_the_slope_over_the_last_doubling_alone(curved):
    slope = {0: 0.01, 1: 0.02, 2: -0.03, 3: 0.0}

    def loss(run, tokens):
        own = 5 - math.log(tokens)
        if not is_arm(run):
            return own
        if tokens < 6 * PER_STEP:  # before the last doubling anything may have been
            return own + 100 * (-1) ** tokens
        return own + 0.3 + slope[run.changes["seed"]] * math.log2(tokens)

    shown = gap_curve(only_gap(curved(loss)))
    assert shown.growth.values == pytest.approx([*slope.values()])


def test_gap_that_stays_does_not_grow(curved):
    shown = gap_curve(only_gap(curved(lambda run, tokens: 4 - tokens / 1e3 + 0.2 * is_arm(run))))
    assert shown.growth.values == pytest.approx((0.0,) * 4, abs=1e-12)


def test_slopes_are_those_of_least_squares():
    rng = np.random.default_rng(0)
    tokens = [100, 130, 150, 190, 200]
    gaps = rng.normal(size=(6, 5))
    expected = np.polynomial.polynomial.polyfit(np.log2(tokens), gaps.T, 1)[1]
    assert fit_slopes(tokens, gaps).values == pytest.approx(expected.tolist())
    assert fit_slopes(tokens[:1], gaps[:, :1]).n == fit_slopes([], gaps[:, :0]).n == 0


def test_without_metrics_there_is_no_curve(cached_world):
    world = cached_world("variant=standard,no_q", "seed=range(4)").finish(lambda run: 2.0)
    assert gap_curve(only_gap(world)) is None
    assert describe_curve(only_gap(world)) is None
    assert describe_study(world.study()).curves == []


def test_one_run_without_metrics_leaves_no_common_reading(curved):
    world = curved(lambda run, tokens: 3.0)
    (world.run_folder(world.runs()[0]) / "metrics.jsonl").unlink()
    assert gap_curve(only_gap(world)) is None


def test_readings_that_never_meet_make_no_curve(curved):
    world = curved(lambda run, tokens: 3.0 if is_arm(run) == (tokens > 6 * PER_STEP) else None)
    assert gap_curve(only_gap(world)) is None


def test_without_pairs_there_is_no_curve(curved):
    world = curved(lambda run, tokens: 3.0)
    world.finish(lambda run: "failed" if is_arm(run) else 2.0)
    assert gap_curve(only_gap(world)) is None


def test_one_pair_has_a_curve_and_no_band(curved):
    found = only_gap(curved(lambda run, tokens: 3 + 0.1 * is_arm(run), seeds=1))
    assert gap_curve(found).band() == [None] * len(STEPS)
    described = describe_curve(found)
    assert [reading.mean for reading in described.readings] == pytest.approx([0.1] * 7)
    assert all(reading.band is None and reading.n == 1 for reading in described.readings)
    to_json(described)


def test_torn_lines_take_no_reading_away(curved):
    world = curved(lambda run, tokens: 3 + 0.1 * is_arm(run))
    for run in world.runs():
        with (world.run_folder(run) / "metrics.jsonl").open("a") as file:
            file.write('{"tokens": 384, "val/loss": NaN}\n{"tokens": 384, "val/lo')
    shown = gap_curve(only_gap(world))
    assert shown.tokens[-1] == 12 * PER_STEP
    assert shown.samples[-1].mean == pytest.approx(0.1)


# An arm by itself, and the other loss.


def entry_of(world, variant="no_q"):
    return next(entry for entry in world.study().entries if entry.arm.variant == variant)


def test_curve_of_an_arm_is_the_mean_of_its_runs(curved):
    world = curved(lambda run, tokens: 3 + run.changes["seed"] - tokens / 1000 + is_arm(run))
    shown = arm_curve(entry_of(world))
    assert shown.tokens == [step * PER_STEP for step in STEPS]
    assert {sample.n for sample in shown.samples} == {4}
    assert [sample.mean for sample in shown.samples] == pytest.approx(
        [3 + 1.5 - tokens / 1000 + 1 for tokens in shown.tokens]
    )
    assert len(shown.growth.values) == 4


@pytest.mark.parametrize("end", ["failed", "diverged", None])
def test_only_runs_that_are_done_have_a_say_in_an_arms_curve(curved, end):
    world = curved(lambda run, tokens: 3.0 + run.changes["seed"])
    spoilt = next(run for run in world.runs() if is_arm(run) and run.changes["seed"] == 3)
    if end is None:
        (world.run_folder(spoilt) / "result.json").unlink()
    else:
        world.write(spoilt, end)
    world.curve(spoilt, {1: 100.0, 5: 100.0})
    shown = arm_curve(entry_of(world))
    assert shown.tokens == [step * PER_STEP for step in STEPS]
    assert [sample.mean for sample in shown.samples] == pytest.approx([4.0] * len(STEPS))
    assert {sample.n for sample in shown.samples} == {3}


def test_arm_without_finished_run_has_no_curve(curved):
    world = curved(lambda run, tokens: 3.0)
    world.finish(lambda run: "failed" if is_arm(run) else 2.0)
    assert arm_curve(entry_of(world)) is None
    assert arm_curve(entry_of(world, "standard")) is not None


def write_both(world, run, val, train):
    rows = [{"tokens": tokens, VAL: loss} for tokens, loss in val.items()]
    rows += [{"tokens": tokens, TRAIN: loss} for tokens, loss in train.items()]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (world.run_folder(run) / "metrics.jsonl").write_text(text)


@pytest.fixture
def both(curved):
    """Training is read three times as often, and its gap is 0.5 where that of validation is 0.1."""
    world = curved(lambda run, tokens: 3.0)
    for run in world.runs():
        own, seed = is_arm(run), run.changes["seed"]
        val = dict.fromkeys((96, 192, 384), 4 + seed + 0.1 * own)
        train = dict.fromkeys(range(32, 385, 32), 5 + seed + 0.5 * own)
        write_both(world, run, val, train)
    return world


def test_gap_in_training_loss_is_read_of_it_alone(both):
    shown = gap_curve(only_gap(both), TRAIN)
    assert shown.tokens == [*range(32, 385, 32)]
    assert all(sample.values == pytest.approx((0.5,) * 4) for sample in shown.samples)
    shown = gap_curve(only_gap(both))
    assert shown.tokens == [96, 192, 384]
    assert all(sample.values == pytest.approx((0.1,) * 4) for sample in shown.samples)


def test_curve_of_an_arm_in_training_loss(both):
    shown = arm_curve(entry_of(both), TRAIN)
    assert shown.tokens == [*range(32, 385, 32)]
    assert [sample.mean for sample in shown.samples] == pytest.approx([7.0] * 12)


def test_without_readings_of_training_there_is_no_curve_of_it(curved):
    world = curved(lambda run, tokens: 3.0)
    assert gap_curve(only_gap(world), TRAIN) is None
    assert arm_curve(entry_of(world), TRAIN) is None


# Fewer readings.


@pytest.fixture
def long(curved):
    """200 readings of validation, of which the last are noisy."""
    rng = random.Random(2)
    world = curved(lambda run, tokens: 3.0)
    for run in world.runs():
        readings = {32 * i: 3 + rng.gauss(0, 0.1) * (i > 100) for i in range(1, 201)}
        write_both(world, run, readings, {})
    return world


@pytest.mark.parametrize("make", [gap_curve, arm_curve])
@pytest.mark.parametrize("most", [2, 6, 20])
def test_at_most_so_many_readings_are_shown_and_growth_is_measured_over_all(long, make, most):
    found = only_gap(long) if make is gap_curve else entry_of(long)
    whole, few = make(found, most=10_000), make(found, most=most)
    assert len(few.tokens) <= most < len(whole.tokens)
    assert {*few.tokens} <= {*whole.tokens}
    assert (few.tokens[0], few.tokens[-1]) == (whole.tokens[0], whole.tokens[-1])
    by_tokens = dict(zip(whole.tokens, whole.samples, strict=True))
    assert [by_tokens[tokens] for tokens in few.tokens] == few.samples
    assert few.growth == whole.growth
    late = [tokens for tokens in whole.tokens if 2 * tokens >= whole.tokens[-1]]
    values = np.array([by_tokens[tokens].values for tokens in late]).T
    assert whole.growth.values == pytest.approx(fit_slopes(late, values).values)
    assert len(late) > 10


def test_curves_are_limited_by_default(long):
    assert len(gap_curve(only_gap(long)).tokens) <= READINGS < 200
    assert len(gap_curve(only_gap(long)).band()) == len(gap_curve(only_gap(long)).tokens)


RISING = st.lists(st.integers(1, 10**12), min_size=1, max_size=300, unique=True).map(sorted)


@settings(deadline=None)
@given(RISING, st.integers(2, 60))
def test_thinned_readings_are_a_rising_part_with_both_ends(tokens, most):
    found = thin(tokens, most)
    assert len(found) <= max(most, 1)
    assert {*found} <= {*tokens}
    assert found == sorted({*found})
    assert (found[0], found[-1]) == (tokens[0], tokens[-1])


@settings(deadline=None)
@given(RISING, st.integers(0, 20))
def test_few_readings_are_not_thinned(tokens, more):
    assert thin(tokens, len(tokens) + more) == tokens


def test_thinned_readings_stand_evenly_on_a_logarithmic_scale():
    found = thin([*range(1, 4097)], 13)
    assert found == [2**i for i in range(13)]
    assert thin([10, 20, 30, 1000, 1001], 2) == [10, 1001]

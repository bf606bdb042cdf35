"""Lengths and sizes: growth of the gap, and what tokens or parameters an arm is worth."""

import math
import random
from dataclasses import replace
from types import SimpleNamespace

import pytest

from qkablate.analysis.comparison.gaps import find_families
from qkablate.analysis.scaling.series import (
    describe_series,
    equivalent_log_factor,
    find_series,
    measure_growth,
)
from tests.analysis.references import to_json

HORIZONS = ("variant=standard,no_q", "seed=range(4)", "train.steps=12,24,48,96")
SIZES = ("variant=standard,no_q", "seed=range(4)", "model.d_model=16,32,64")


def is_arm(run):
    return run.arm.startswith("no_q")


def power_law(x):
    return 1.5 + 4 * x**-0.3


def of_tokens(world, loss):
    """`loss(run, tokens)` for every run."""
    return world.finish(lambda run: loss(run, world.manifest.arms[run.arm].tokens))


def only_series(world):
    (found,) = find_series(find_families(world.study()))
    return found


def test_growth_per_doubling_is_recovered(cached_world):
    slope = {0: 0.02, 1: 0.03, 2: -0.01, 3: 0.0}
    world = of_tokens(
        cached_world(*HORIZONS),
        lambda run, tokens: (
            power_law(tokens)
            + run.changes["seed"] / 10
            + is_arm(run) * (0.1 + slope[run.changes["seed"]] * math.log2(tokens))
        ),
    )
    found = only_series(world)
    assert (found.along, found.x) == ("tokens", [384.0, 768.0, 1536.0, 3072.0])
    assert measure_growth(found).values == pytest.approx([*slope.values()])


def test_arm_worth_fewer_tokens_is_detected(cached_world):
    """Equal the baseline at 0.8 × the tokens, up to noise."""
    rng = random.Random(0)
    worth = {seed: 0.8 * math.exp(rng.gauss(0, 0.02)) for seed in range(4)}
    world = of_tokens(
        cached_world(*HORIZONS),
        lambda run, tokens: (
            power_law(tokens * (worth[run.changes["seed"]] if is_arm(run) else 1))
            + run.changes["seed"] / 10
        ),
    )
    described = describe_series(only_series(world))
    found = described.equivalent
    assert found.times == pytest.approx(0.8, abs=0.02)
    assert found.n == 4
    low, high = found.interval
    assert low < 0.8 < high
    assert high - low < 0.1
    to_json(described)


@pytest.mark.parametrize("times", [0.125, 0.5, 0.9, 1.0, 1.5, 2.0])
@pytest.mark.parametrize("exponent", [0.06, 0.3, 1.2])
def test_worth_on_a_power_law_is_exact(cached_world, times, exponent):
    world = of_tokens(
        cached_world(*HORIZONS),
        lambda run, tokens: (
            1.5
            + (tokens / 384 * (times if is_arm(run) else 1)) ** -exponent
            + run.changes["seed"] / 10
        ),
    )
    worth = equivalent_log_factor(only_series(world))
    assert worth.values == pytest.approx((math.log(times),) * 4, abs=1e-3)


def test_equal_arms_are_worth_the_same_whatever_their_curve(cached_world):
    curve = {384: 4.0, 768: 3.5, 1536: 3.4, 3072: 2.8}
    world = of_tokens(
        cached_world(*HORIZONS), lambda run, tokens: curve[tokens] + run.changes["seed"]
    )
    assert equivalent_log_factor(only_series(world)).values == (0.0,) * 4


def test_error_of_tuning_is_part_of_the_worth(cached_world):
    """An error of the gap is one of tokens, by the slope of the baseline's curve."""
    found = only_series(
        of_tokens(cached_world(*HORIZONS), lambda run, tokens: 1.5 + (tokens / 384) ** -0.5)
    )
    *others, last = found.gaps
    fields = ("arm", "baseline", "pairs", "arm_diverged", "baseline_diverged")
    sample = replace(last.sample, extra_variance=1e-4)
    gaps = [*others, SimpleNamespace(sample=sample, **{f: getattr(last, f) for f in fields})]
    worth = equivalent_log_factor(replace(found, gaps=gaps))
    assert worth.extra_variance == pytest.approx(1e-4 / (0.5 * 8**-0.5) ** 2, rel=1e-2)


def test_diverged_run_leaves_growth_and_worth_unknown(cached_world):
    """The runs that remain are not all that was trained."""

    def loss(run, tokens):
        if is_arm(run) and (run.changes["seed"], tokens) == (1, 768):
            return "diverged"
        return power_law(tokens) + is_arm(run) * 0.01 * math.log2(tokens)

    found = only_series(of_tokens(cached_world(*HORIZONS), loss))
    assert measure_growth(found).n == 0
    assert equivalent_log_factor(found).n == 0


def test_arm_worth_more_tokens_is_extrapolated(cached_world):
    world = of_tokens(
        cached_world(*HORIZONS),
        lambda run, tokens: power_law(tokens * (1.25 if is_arm(run) else 1)),
    )
    found = describe_series(only_series(world)).equivalent
    assert found.times == pytest.approx(1.25, abs=0.001)


NOT_MEASURED = {
    "baseline does not fall": lambda run, tokens: 3.0 - is_arm(run) * 0.1,
    "baseline rises at the end": lambda run, tokens: (
        2.9 if is_arm(run) else {384: 4.0, 768: 3.0, 1536: 2.5, 3072: 2.6}[tokens]
    ),
    "far beyond the longest": lambda run, tokens: power_law(tokens * (2.1 if is_arm(run) else 1)),
    "far better than all": lambda run, tokens: 0.1 if is_arm(run) else power_law(tokens),
    "worse than the shortest": lambda run, tokens: 9.0 if is_arm(run) else power_law(tokens),
}


@pytest.mark.parametrize("loss", NOT_MEASURED.values(), ids=NOT_MEASURED.keys())
def test_unmeasured_values_are_called_not_measured(cached_world, loss):
    found = only_series(of_tokens(cached_world(*HORIZONS), loss))
    assert describe_series(found).equivalent is None
    assert equivalent_log_factor(found).n == 0


def test_two_lengths_measure_no_worth_and_no_growth(cached_world):
    world = cached_world("variant=standard,no_q", "seed=range(4)", "train.steps=12,24")
    found = only_series(of_tokens(world, lambda run, tokens: power_law(tokens) + is_arm(run) / 50))
    described = describe_series(found)
    assert described.equivalent is None
    assert described.growth_per_doubling.n == 0
    assert [point.mean for point in described.points] == pytest.approx([0.02, 0.02])


def test_one_length_makes_no_series(cached_world):
    world = cached_world("variant=standard,no_q", "seed=range(4)")
    assert find_series(find_families(of_tokens(world, lambda run, tokens: 2.0).study())) == []


def test_seed_with_a_missing_pair_is_excluded(cached_world):
    def loss(run, tokens):
        if is_arm(run) and (run.changes["seed"], tokens) == (1, 768):
            return "failed"
        return power_law(tokens) + is_arm(run) * 0.01 * math.log2(tokens)

    found = only_series(of_tokens(cached_world(*HORIZONS), loss))
    assert measure_growth(found).n == 3
    assert equivalent_log_factor(found).n == 3
    assert [one.sample.n for one in found.gaps] == [4, 3, 4, 4]


def test_sizes_give_equivalent_parameters(cached_world):
    world = cached_world(*SIZES)
    params = {name: arm.params for name, arm in world.manifest.arms.items()}

    def loss(run):
        beside = world.manifest.arms[run.arm].baseline or run.arm
        return 1.5 + 20 * (params[beside] * (0.7 if is_arm(run) else 1)) ** -0.4

    found = only_series(world.finish(loss))
    assert found.along == "parameters"
    assert found.x == [float(params[f"standard-d{d}-h2"]) for d in (16, 32, 64)]
    assert found.name == "no_q-h2"
    described = describe_series(found)
    assert described.growth_per_doubling is None
    assert measure_growth(found).n == 0
    assert described.equivalent.times == pytest.approx(0.7, abs=1e-3)


def test_controls_are_not_mixed(cached_world):
    world = cached_world(
        "variant=standard,no_q", "seed=range(2)", "train.steps=12,24,48", "control=none,params"
    )
    found = find_series(
        find_families(
            of_tokens(
                world, lambda run, tokens: power_law(tokens) + run.arm.endswith("params") / 10
            ).study()
        )
    )
    assert len(found) == 2
    for one in found:
        assert len({tuple(gap.arm.arm.controls) for gap in one.gaps}) == 1
        assert one.x == [384.0, 768.0, 1536.0]
    assert {one.name for one in found} == {"no_q-d16-h2", "no_q-d16-h2-params"}


def test_rates_are_not_mixed(cached_world):
    world = cached_world(
        "variant=standard,no_q", "seed=0", "train.steps=12,24,48", "optim.lr=1e-3,2e-3"
    )
    found = find_series(
        find_families(of_tokens(world, lambda run, tokens: power_law(tokens)).study())
    )
    assert sorted({gap.arm.rate for gap in one.gaps} == {1e-3} for one in found) == [False, True]
    for one in found:
        assert len(one.gaps) == 3
        assert len({gap.arm.rate for gap in one.gaps}) == 1
        assert all(gap.arm.rate == gap.baseline.rate for gap in one.gaps)


def test_warmups_as_an_axis_are_series_of_their_own(cached_world):
    """No gap is left out, or shown as that of another setting."""
    world = cached_world(
        "variant=standard,no_q", "seed=0", "train.steps=12,24,48", "optim.warmup=1,2"
    )
    of_tokens(
        world,
        lambda run, tokens: power_law(tokens) + is_arm(run) * (0.1 if "warmup=1" in run.arm else 0),
    )
    found = find_series(find_families(world.study()))
    assert {one.name for one in found} == {"no_q-d16-h2-warmup=1", "no_q-d16-h2-warmup=2"}
    for one in found:
        expected = 0.1 if one.name.endswith("1") else 0.0
        assert [gap.sample.mean for gap in one.gaps] == pytest.approx([expected] * 3)


def test_tuned_lengths_form_a_single_series(cached_world):
    """A longer training may be tuned to another rate: that is the same arm."""
    world = cached_world(
        "variant=standard,no_q", "seed=0,1", "train.steps=12,24,48", "sweep.tune=true"
    )
    best = {384: 5e-4, 768: 1e-3, 1536: 2e-3}
    of_tokens(
        world,
        lambda run, tokens: (
            power_law(tokens) + math.log(run.changes["optim.lr"] / best[tokens]) ** 2
        ),
    )
    assert world.study().is_complete
    found = only_series(world)
    assert [gap.arm.rate for gap in found.gaps] == [*best.values()]
    assert describe_series(found).equivalent.times == pytest.approx(1.0)


def test_heads_and_widths_are_not_mixed_with_lengths(cached_world):
    world = cached_world(
        "variant=standard,no_q", "seed=0", "train.steps=12,24,48", "model.heads=2,4"
    )
    found = find_series(
        find_families(of_tokens(world, lambda run, tokens: power_law(tokens)).study())
    )
    assert [(one.along, one.name) for one in found] == [
        ("tokens", "no_q-d16-h2"),
        ("tokens", "no_q-d16-h4"),
    ]
    for one in found:
        assert {gap.arm.arm.config.model.heads for gap in one.gaps} == {int(one.name[-1])}


def test_sweep_of_lengths_and_sizes_has_a_line_for_each(cached_world):
    world = cached_world(
        "variant=standard,no_q", "seed=0", "train.steps=12,24", "model.d_model=16,32"
    )
    found = find_series(find_families(of_tokens(world, lambda run, tokens: 2.0).study()))
    assert sorted(one.along for one in found) == ["parameters"] * 2 + ["tokens"] * 2
    for one in found:
        models = {gap.arm.arm.config.model.d_model for gap in one.gaps}
        lengths = {gap.arm.tokens for gap in one.gaps}
        assert (len(models), len(lengths)) == ((1, 2) if one.along == "tokens" else (2, 1))


def test_missing_runs_at_one_length_leave_the_others_measured(cached_world):
    world = of_tokens(
        cached_world(*HORIZONS),
        lambda run, tokens: None if tokens == 3072 else power_law(tokens) + is_arm(run) / 50,
    )
    described = describe_series(only_series(world))
    assert [point.n for point in described.points] == [4, 4, 4, 0]
    assert described.equivalent is None
    to_json(described)


def test_growth_needs_annealed_learning_rates(cached_world):
    world = of_tokens(
        cached_world(*HORIZONS, "optim.lr_final=1.0"),
        lambda run, tokens: power_law(tokens) + 0.01 * is_arm(run) + run.changes["seed"] / 10,
    )
    assert find_series(find_families(world.study())) == []

"""Gaps: pairs by seed, and missing runs."""

import dataclasses
import math
import random

import numpy as np
import pytest
from scipy import stats

from qkablate.analysis.comparison.gaps import (
    describe_noise_floor,
    find_families,
    measure_gap,
    perplexity_percent,
)
from qkablate.analysis.comparison.summary import describe_gap
from qkablate.analysis.stats import ALPHA, detectable_effect, power_two_sided
from tests.analysis.references import TTests, holm_reference, to_json

PAIR = ("variant=standard,no_q", "seed=range(4)")


def variant(run):
    return run.arm.split("-")[0]


def loss_of(run):
    """Return a loss with a gap of 0.1 plus 0.01 per seed."""
    seed = run.changes["seed"]
    return 2.0 + seed / 7 + (0.1 + seed / 100 if variant(run) == "no_q" else 0.0)


def noisy(rng, means):
    """Losses by arm, with a part that a seed gives to all arms alike."""
    shared = [rng.gauss(0, 0.1) for _ in range(100)]
    return lambda run: means[variant(run)] + shared[run.changes["seed"] % 100] + rng.gauss(0, 0.02)


def only_gap(world):
    (family,) = find_families(world.study())
    (found,) = family.gaps
    return found


def test_gaps_are_paired_by_seed(world):
    loss = {"standard": 2.0, "no_q": 2.3}
    made = world("variant=standard,no_q", "seed=range(6)").finish(
        lambda run: loss[run.arm.split("-")[0]] + run.changes["seed"] / 7
    )
    study = made.study()
    assert study.is_complete
    (family,) = find_families(study)
    (found,) = family.gaps
    assert family.baseline.name == "standard-d16-h2"
    assert found.sample.n == 6
    assert found.sample.mean == pytest.approx(0.3)
    assert found.correlation == pytest.approx(1.0)
    assert math.isclose(sum(found.pairs.values()), 1.8)


def test_pair_shares_all_seeds(cached_world):
    world = cached_world("variant=standard,no_q", "seed=0,1", "seeds.init=1,2", "seeds.data=7")
    found = only_gap(
        world.finish(
            lambda run: (
                run.changes["seed"]
                + 10 * run.changes.get("seeds.init", run.changes["seed"])
                + (variant(run) == "no_q") * (0.5 + run.changes["seed"] / 4)
            )
        )
    )
    assert len(found.pairs) == 4
    for key, value in found.pairs.items():
        seeds = dict(key)
        assert seeds["seeds.data"] == 7
        assert seeds.get("seeds.init", 1) in (1, 2)  # unsaid where it is the seed itself
        assert value == pytest.approx(0.5 + seeds["seed"] / 4)
    assert len({*found.pairs}) == 4
    assert sorted(dict(key)["seed"] for key in found.pairs) == [0, 0, 1, 1]


def test_unpaired_runs_are_named_with_their_separate_seeds(cached_world):
    world = cached_world("variant=standard,no_q", "seed=0", "seeds.init=1,2")
    found = only_gap(
        world.finish(
            lambda run: (
                "failed" if variant(run) == "no_q" and run.changes["seeds.init"] == 2 else 2.0
            )
        )
    )
    assert len(found.pairs) == 1
    (told_of,) = found.unpaired
    assert "s0" in told_of
    assert "seeds.init=2" in told_of


def test_order_of_runs_changes_nothing(cached_world):
    (family,) = find_families(cached_world(*PAIR).finish(loss_of).study())
    (found,) = family.gaps
    rng = random.Random(3)
    for _ in range(20):
        arms = []
        for entry in (found.arm, found.baseline):
            records = [*entry.records.items()]
            rng.shuffle(records)
            arms.append(dataclasses.replace(entry, records=dict(records)))
        again = measure_gap(*arms)
        assert [*again.pairs.items()] == [*found.pairs.items()]
        assert again.sample.bca == found.sample.bca
        assert again.unpaired == found.unpaired


def test_order_of_seeds_on_the_command_line_changes_nothing(cached_world):
    forth = only_gap(cached_world("variant=standard,no_q", "seed=0,1,2").finish(loss_of))
    back = only_gap(cached_world("variant=no_q,standard", "seed=2,0,1").finish(loss_of))
    assert forth.pairs == back.pairs
    assert forth.arm.name == back.arm.name == "no_q-d16-h2"


@pytest.mark.parametrize("side", ["standard", "no_q"])
@pytest.mark.parametrize(
    ("outcome", "word"),
    [
        (None, "waiting"),
        ("failed", "failed"),
        ("diverged", "diverged"),
        ({"loss": {"val": 2.0, "test": math.nan}}, "damaged"),
        ({"id": "another"}, "damaged"),
        ({"loss": {"val": 2.0, "test": None}}, "did not evaluate the test split"),
    ],
)
def test_missing_run_removes_only_its_pair(cached_world, side, outcome, word):
    found = only_gap(
        cached_world(*PAIR).finish(
            lambda run: (
                outcome if (variant(run), run.changes["seed"]) == (side, 2) else loss_of(run)
            )
        )
    )
    assert {dict(key)["seed"]: pytest.approx(value) for key, value in found.pairs.items()} == {
        0: 0.1,
        1: 0.11,
        3: 0.13,
    }
    (told_of,) = found.unpaired
    assert told_of.startswith("s2")
    assert f"{side}-d16-h2 {word}" in told_of
    assert (found.arm_diverged, found.baseline_diverged) == (
        int(word == "diverged" and side == "no_q"),
        int(word == "diverged" and side == "standard"),
    )


def test_both_missing_runs_of_a_pair_are_named(cached_world):
    ends = {"standard": "failed", "no_q": "diverged"}
    found = only_gap(
        cached_world(*PAIR).finish(
            lambda run: ends[variant(run)] if run.changes["seed"] == 0 else loss_of(run)
        )
    )
    (told_of,) = found.unpaired
    assert "standard-d16-h2 failed" in told_of
    assert "no_q-d16-h2 diverged" in told_of


def test_run_without_counterpart_is_listed_as_unpaired(cached_world):
    found = only_gap(cached_world(*PAIR).finish(loss_of))
    (first, *_) = found.baseline.records
    fewer = {key: record for key, record in found.baseline.records.items() if key != first}
    again = measure_gap(found.arm, dataclasses.replace(found.baseline, records=fewer))
    assert len(again.pairs) == 3
    assert again.unpaired == ["s0: standard-d16-h2 has no such run"]


def test_runs_on_different_data_are_unpaired(cached_world):
    world = cached_world(*PAIR).finish(loss_of)
    for run in world.runs():
        if variant(run) == "no_q" and run.changes["seed"] in (1, 3):
            world.write(run, {"data_fingerprint": "another", "loss": {"val": 9.0, "test": 9.0}})
    found = only_gap(world)
    assert [dict(key)["seed"] for key in found.pairs] == [0, 2]
    assert found.sample.mean == pytest.approx(0.11)
    assert len(found.unpaired) == 2
    assert all("different data" in line for line in found.unpaired)


def test_runs_that_read_other_parts_of_the_test_split_are_unpaired(cached_world):
    world = cached_world(*PAIR).finish(loss_of)
    for run in world.runs():
        if run.changes["seed"] == 1 or (variant(run) == "no_q" and run.changes["seed"] == 3):
            world.write(run, {"test_tokens": 6144, "loss": {"val": 9.0, "test": loss_of(run)}})
    found = only_gap(world)
    assert [dict(key)["seed"] for key in found.pairs] == [0, 1, 2]  # seed 1: both the same part
    assert found.unpaired == [
        "s3: their test losses are of 6,144 tokens and of the whole split;"
        " train.test_tokens=all reads all"
    ]


def test_vmapped_run_is_not_paired_with_one_that_is_not(cached_world):
    world = cached_world(*PAIR).finish(loss_of)
    for run in world.runs():
        if run.changes["seed"] == 1 or (variant(run) == "no_q" and run.changes["seed"] == 3):
            world.write(run, {"vmap": True, "loss": {"val": 9.0, "test": loss_of(run)}})
    found = only_gap(world)
    assert [dict(key)["seed"] for key in found.pairs] == [0, 1, 2]  # seed 1: both were
    assert found.unpaired == ["s3: only one of the two was vmapped (train.vmap)"]


def test_tuning_runs_never_enter_gaps(cached_world):
    """Not even where one of them says that it read the test split."""

    def loss(run):
        if run.tuning:
            val = 2 + math.log(run.changes["optim.lr"] / 1e-3) ** 2
            return {"loss": {"train": 1.0, "val": val, "test": 77.0}}
        return loss_of(run)

    study = cached_world("variant=standard,no_q", "seed=range(3)", "sweep.tune=true").finish(loss)
    study = study.study()
    (family,) = find_families(study)
    (found,) = family.gaps
    assert [dict(key)["seed"] for key in found.pairs] == [0, 1, 2]
    assert found.sample.values == pytest.approx((0.1, 0.11, 0.12))
    assert found.unpaired == []
    assert not any(loss == 77.0 for entry in study.entries for loss in entry.losses.values())


def test_rates_pair_rate_by_rate(cached_world):
    by_rate = {1e-3: 0.1, 2e-3: 0.4}
    world = cached_world("variant=standard,no_q", "seed=range(3)", "optim.lr=1e-3,2e-3").finish(
        lambda run: (
            2
            + run.changes["seed"] / 7
            + 5 * run.changes["optim.lr"]
            + by_rate[run.changes["optim.lr"]] * (variant(run) == "no_q")
        )
    )
    found = find_families(world.study())
    assert len(found) == 2
    for family in found:
        (one,) = family.gaps
        assert one.arm.rate == family.baseline.rate
        assert one.sample.values == pytest.approx((by_rate[one.arm.rate],) * 3)


@pytest.mark.slow
def test_p_values_are_adjusted_by_holm_within_a_family(cached_world):
    world = cached_world("variant=standard,no_q,shared_qk,merged_w,tied_kv", "seed=range(6)")
    rng = random.Random(0)
    for _ in range(10):
        means = {
            name: 2 + rng.choice((0, 0, 0.02, 0.04))
            for name in ("standard", "no_q", "shared_qk", "merged_w", "tied_kv")
        }
        (family,) = find_families(world.finish(noisy(rng, means)).study())
        assert [found.arm.arm.variant for found in family.gaps] == [*means][1:]
        raw = []
        for found in family.gaps:
            sides = [[*side.losses.values()] for side in (found.arm, found.baseline)]
            gaps_1N = np.subtract(*map(np.array, sides))[None]
            raw.append(2 * min(p.item() for p in TTests(gaps_1N).p_values(0.0)))
        assert [found.sample.p for found in family.gaps] == pytest.approx(raw)
        assert family.holm == pytest.approx(holm_reference(raw))
        assert family.comparisons == 4


def test_p_values_are_adjusted_over_all_sizes(cached_world):
    world = cached_world("variant=standard,no_q", "seed=range(3)", "model.d_model=16,32")
    found = find_families(world.finish(loss_of).study())
    assert [family.baseline.name for family in found] == ["standard-d16-h2", "standard-d32-h2"]
    assert [len(family.gaps) for family in found] == [1, 1]
    raw = [family.gaps[0].sample.p for family in found]
    assert [p for family in found for p in family.holm] == pytest.approx(holm_reference(raw))
    assert {family.comparisons for family in found} == {2}


def test_detectable_effect_uses_the_adjusted_alpha(cached_world):
    rng = random.Random(1)
    world = cached_world("variant=standard,no_q,shared_qk,merged_w,tied_kv", "seed=range(6)")
    names = ("standard", "no_q", "shared_qk", "merged_w", "tied_kv")
    loss = noisy(rng, dict.fromkeys(names, 2.0))
    # Of tied_kv one pair is left: a number, and no comparison.
    world.finish(
        lambda run: "failed" if variant(run) == "tied_kv" and run.changes["seed"] else loss(run)
    )
    (family,) = find_families(world.study())
    assert family.comparisons == 3
    *tested, alone = family.gaps
    for found in tested:
        least = family.detectable(found)
        assert least == pytest.approx(detectable_effect(found.sample.sd, 6, ALPHA / 3))
        assert power_two_sided(least, found.sample.sd, 6, ALPHA / 3) == pytest.approx(0.8, abs=1e-3)
        assert least > detectable_effect(found.sample.sd, 6)
    assert alone.sample.n == 1
    assert family.detectable(alone) is None
    assert family.holm[3] is None
    raw = [found.sample.p for found in tested]
    assert family.holm[:3] == pytest.approx(holm_reference(raw))


def test_single_pair_has_a_gap_without_a_p_value(cached_world):
    world = cached_world("variant=standard,no_q", "seed=3").finish(loss_of)
    (family,) = find_families(world.study())
    described = describe_gap(family, 0, {})
    assert described.n == 1
    assert described.mean == pytest.approx(0.13)
    for key in ("sd", "interval", "p", "p_holm", "bca", "sign_flip", "detectable", "correlation"):
        assert getattr(described, key) is None
    assert family.gaps[0].bounds() is None
    assert family.comparisons == 0
    to_json(described)


def test_no_pairs_give_no_estimate(cached_world):
    (family,) = find_families(cached_world(*PAIR).finish(lambda run: "diverged").study())
    described = describe_gap(family, 0, {})
    assert described.n == 0
    assert described.mean is described.perplexity_percent is described.p is None
    assert (described.arm_diverged, described.baseline_diverged) == (4, 4)
    assert len(described.unpaired) == 4
    to_json(described)


@pytest.mark.parametrize("side", ["standard", "no_q", "both", "neither"])
def test_where_runs_diverged_the_bounds_are_open(cached_world, side):
    own = (side,) if side != "both" else ("standard", "no_q")
    seed_of = {"standard": 1, "no_q": 2}
    found = only_gap(
        cached_world("variant=standard,no_q", "seed=range(5)").finish(
            lambda run: (
                "diverged"
                if variant(run) in own and run.changes["seed"] == seed_of[variant(run)]
                else loss_of(run)
            )
        )
    )
    low, high = found.bounds()
    inside = found.sample.interval()
    assert low == (-math.inf if "standard" in own else inside[0])
    assert high == (math.inf if "no_q" in own else inside[1])
    narrow = found.bounds(0.5)
    assert narrow[0] >= low
    assert narrow[1] <= high


def test_failed_run_opens_no_bound(cached_world):
    found = only_gap(
        cached_world(*PAIR).finish(
            lambda run: "failed" if run.changes["seed"] == 1 else loss_of(run)
        )
    )
    assert found.bounds() == found.sample.interval()


def test_correlation_is_that_of_the_pairs(cached_world):
    rng = random.Random(5)
    found = only_gap(
        cached_world(*PAIR).finish(
            lambda run: (
                "failed" if (variant(run), run.changes["seed"]) == ("no_q", 0) else rng.random()
            )
        )
    )
    both = [[entry.losses[key] for key in found.pairs] for entry in (found.arm, found.baseline)]
    assert len(both[0]) == 3
    assert found.correlation == pytest.approx(stats.pearsonr(*both).statistic)


@pytest.mark.parametrize("constant", ["standard", "no_q", "both"])
def test_there_is_no_correlation_with_a_constant(cached_world, constant):
    found = only_gap(
        cached_world(*PAIR).finish(
            lambda run: 2.1 if constant in (variant(run), "both") else loss_of(run)
        )
    )
    assert found.correlation is None


def test_two_pairs_have_no_correlation(cached_world):
    found = only_gap(cached_world("variant=standard,no_q", "seed=range(2)").finish(loss_of))
    assert found.sample.n == 2
    assert found.correlation is None


def test_rounding_gap_measures_the_effect_of_rounding(cached_world):
    gaps = {"standard": 0.0, "no_q": 0.2, "standard_reassociated": 0.001}
    world = cached_world("variant=standard,no_q,standard_reassociated", "seed=range(4)")
    world.finish(
        lambda run: (
            2
            + run.changes["seed"] / 7
            + gaps[variant(run)] * (1 if run.changes["seed"] % 2 else -1)
        )
    )
    (family,) = find_families(world.study())
    assert family.rounding_gap is not None
    assert family.rounding_gap.arm.arm.variant == "standard_reassociated"
    floor = describe_noise_floor(family)
    assert floor.rounding.mean == pytest.approx(0.0)
    assert floor.rounding.sd == pytest.approx(stats.tstd([-1e-3, 1e-3, -1e-3, 1e-3]))
    assert floor.seeds_sd == pytest.approx(stats.tstd([0, 1 / 7, 2 / 7, 3 / 7]))


def test_family_without_reordered_arm_has_no_rounding_gap(cached_world):
    (family,) = find_families(cached_world(*PAIR).finish(loss_of).study())
    assert family.rounding_gap is None
    assert describe_noise_floor(family).rounding is None


def test_rounding_gap_is_found_with_reassociated_baseline(cached_world):
    world = cached_world(
        "variant=standard,no_q,standard_reassociated",
        "seed=range(2)",
        "sweep.baseline=standard_reassociated",
    )
    (family,) = find_families(world.finish(loss_of).study())
    assert family.rounding_gap.arm.arm.variant == "standard"


def test_perplexity_gap_is_relative_to_the_baseline():
    assert perplexity_percent(0.0) == 0.0
    assert perplexity_percent(math.log(2)) == pytest.approx(100.0)
    assert perplexity_percent(math.log(0.5)) == pytest.approx(-50.0)
    assert perplexity_percent(1e-9) == pytest.approx(1e-7)
    assert math.isfinite(perplexity_percent(1e9))
    assert perplexity_percent(-1e9) == -100.0


def test_perplexity_has_the_interval_of_the_gap(cached_world):
    (family,) = find_families(cached_world(*PAIR).finish(loss_of).study())
    described = describe_gap(family, 0, {})
    assert described.perplexity_percent == pytest.approx(100 * (math.exp(0.115) - 1))
    low, high = described.interval
    assert described.perplexity_percent_interval == pytest.approx(
        [100 * (math.exp(low) - 1), 100 * (math.exp(high) - 1)]
    )


def test_no_baseline_gives_no_gaps(cached_world):
    world = cached_world("variant=standard,no_q", "seed=0,1", "sweep.baseline=null")
    assert find_families(world.finish(loss_of).study()) == []


def test_identical_arms_have_a_zero_gap(cached_world):
    (family,) = find_families(
        cached_world(*PAIR).finish(lambda run: 2 + run.changes["seed"] / 7).study()
    )
    described = describe_gap(family, 0, {})
    assert (described.mean, described.sd, described.detectable) == (0.0, 0.0, 0.0)
    assert described.interval == (0.0, 0.0)
    assert described.p == described.p_holm == 1.0
    to_json(described)

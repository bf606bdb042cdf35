"""Compute gains: known truths are covered, and what the runs cannot tell is refused."""

import dataclasses
import math

import numpy as np
import pytest

from qkablate.analysis.comparison.gaps import find_families
from qkablate.analysis.scaling.compute_gain import find_largest_budget, fit_grids, jackknife
from qkablate.analysis.stats import Sample
from tests.analysis.scaling.truths import SHORT, TRUTHS, cover, noiseless_gain
from tests.analysis.worlds import describe_checked

GRID = ("variant=standard,no_q", "seed=range(5)", "train.steps=12,24,48,96")
SIZES = "model.d_model=16,32,64"
E, A, ALPHA, B, BETA = 1.2, 100.0, 0.4, 30.0, 0.35  # the best sizes are among the trained
WORTH = 0.8  # tokens of the arm count for less


def law(params, tokens, size_term=A):
    return E + size_term * params**-ALPHA + B * tokens**-BETA


def finish(world, noise=0.0, worth=WORTH, size_term=A):
    """End every run with the loss of the law, plus what its seed and the run itself add."""
    rng = np.random.default_rng(1)
    of_seed = rng.normal(0, noise, 100)

    def loss(run):
        arm = world.manifest.arms[run.arm]
        tokens = arm.tokens * (worth if arm.variant == "no_q" else 1)
        own = rng.normal(0, noise / 2)
        return law(arm.params, tokens, size_term) + of_seed[run.changes["seed"]] + own

    return world.finish(loss)


def only_fit(world):
    (fit,) = fit_grids(find_families(world.study()))
    return fit


@pytest.fixture
def grid(cached_world):
    return cached_world(*GRID, SIZES)


def true_token_factor(fit):
    """Solve L_baseline(N_baseline, x·D) = L_arm(N_arm, worth·D) for x."""
    gap = fit.gaps[-1]
    tokens = gap.arm.tokens
    loss = law(gap.arm.arm.params, WORTH * tokens)
    rest = loss - E - A * gap.baseline.arm.params**-ALPHA
    return (rest / B) ** (-1 / BETA) / tokens


def test_gains_of_a_known_law_are_found(grid):
    fit = only_fit(finish(grid))
    summary = fit.summary
    assert (summary.reason, summary.sizes, summary.lengths, summary.seeds) == ("", 3, 4, 5)
    assert summary.training_tokens.times == pytest.approx(true_token_factor(fit), rel=0.01)
    assert 0.5 < summary.compute.times < 1  # it needs fewer FLOPs than the arm
    arm, baseline = fit.laws
    loss = arm.lowest_loss(summary.flops)
    assert baseline.least_flops(loss) == pytest.approx(
        summary.compute.times * summary.flops, rel=0.01
    )
    assert summary.asymptote.mean == pytest.approx(
        A * (fit.gaps[-1].arm.arm.params ** -ALPHA - fit.gaps[-1].baseline.arm.params ** -ALPHA),
        abs=5e-3,
    )
    for described in summary.laws:
        assert described.held_out_largest < 5e-3
        assert described.held_out.endswith("but for its shortest training")


def test_four_sizes_are_checked_without_the_largest(cached_world):
    grid = cached_world(*GRID, "model.d_model=16,32,48,64")
    for described in only_fit(finish(grid)).summary.laws:
        assert described.held_out == "the largest size"
        assert described.held_out_largest < 2e-2


def test_interval_widens_with_the_noise_and_holds_the_truth(grid):
    widths = []
    for noise in (0.002, 0.01):
        fit = only_fit(finish(grid, noise))
        low, high = fit.summary.training_tokens.interval
        assert low < true_token_factor(fit) < high
        widths.append(math.log(high / low))
    assert widths[1] > 2 * widths[0]


def test_summary_is_written_as_json_and_tables(grid):
    study = finish(grid, 0.002).study()
    describe_checked(study)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (
            (*GRID, "model.d_model=16,32"),
            "2 sizes × 4 lengths of training; a scaling law",
        ),
        (
            ("variant=standard,no_q", "seed=range(5)", "train.steps=12,24", SIZES),
            "3 sizes × 2 lengths of training; a scaling law takes 3 × 3 at least",
        ),
        (
            ("variant=standard,no_q", "seed=range(2)", "train.steps=12,24,48", SIZES),
            "2 seeds with every run of both arms, and 3 are needed; ",
        ),
    ],
)
def test_too_few_runs_are_refused(cached_world, words, reason):
    summary = only_fit(finish(cached_world(*words))).summary
    assert summary.reason.startswith(reason)
    assert (summary.compute, summary.asymptote) == (None, None)


def test_gain_beyond_the_baseline_s_reach_is_refused(grid):
    """An arm whose tokens count ten times has a loss that the baseline would reach far away."""
    summary = only_fit(finish(grid, worth=10)).summary
    assert summary.training_tokens.times is None
    assert summary.training_tokens.reason.startswith(
        "the length that the baseline needs is beyond 2"
    )


def test_loss_that_does_not_fall_is_no_law(grid):
    world = grid.finish(lambda run: 2.0 + run.changes["seed"] / 100)
    summary = only_fit(world).summary
    assert summary.reason == "no_q-h2: its loss does not fall with parameters as a power"


def test_one_size_or_length_makes_no_grid(cached_world):
    assert fit_grids(find_families(finish(cached_world(*GRID)).study())) == []


def test_jackknife_of_a_linear_measure_is_the_sample_itself():
    """The pseudo-values of a mean are the numbers."""
    values = np.array([1.0, 4.0, 2.0, 9.0])

    class Mean:
        def __init__(self, numbers):
            self.mean = numbers.mean()

    without = [[Mean(np.delete(values, i))] * 2 for i in range(4)]
    sample = jackknife(lambda a, b: a.mean, [Mean(values)] * 2, without)
    assert sample.values == pytest.approx(values)


@pytest.mark.parametrize(
    ("truth", "gain"), [("equal", 1.0), ("tokens worth 0.9", 0.9), ("parameters worth 0.8", 0.8)]
)
def test_compute_gain_of_a_rescaled_law_is_the_scale(truth, gain):
    """The baseline has the loss of an arm whose tokens count w times after w·D tokens."""
    assert noiseless_gain(TRUTHS[truth], TRUTHS["equal"]) == pytest.approx(math.log(gain), abs=5e-3)


@pytest.mark.parametrize("size_term", [10.0, 1000.0])
def test_best_size_beyond_the_trained_ones_gives_no_gain(size_term):
    law = (1.2, size_term, 0.34, 400.0, 0.4)
    assert noiseless_gain(law, law) == "out of reach"


def test_divergence_is_named_and_refused(grid):
    world = grid.finish(
        lambda run: "diverged" if run.changes["seed"] == 1 and "no_q-d64" in run.arm else 2.0
    )
    summary = only_fit(world).summary
    assert summary.reason.startswith("1 run of no_q-d64-h2")
    assert "diverged: the law would be of the others alone" in summary.reason


def test_grids_that_differ_in_a_setting_are_told_apart(cached_world):
    words = (*GRID[:2], "train.steps=12,24,48", SIZES, "train.batch_size=2,4")
    fits = fit_grids(find_families(finish(cached_world(*words)).study()))
    assert [fit.summary.arm for fit in fits] == ["no_q-h2-batch_size=2", "no_q-h2-batch_size=4"]
    laws = {law.arm for fit in fits for law in fit.summary.laws}
    assert len(laws) == 4


def test_two_lengths_with_two_warmups_are_no_three_lengths(cached_world):
    words = (*GRID[:2], "train.steps=12,24", SIZES, "optim.warmup=1,2")
    fits = fit_grids(find_families(finish(cached_world(*words)).study()))
    assert [fit.summary.arm for fit in fits] == ["no_q-h2-warmup=1", "no_q-h2-warmup=2"]
    assert [(fit.summary.sizes, fit.summary.lengths) for fit in fits] == [(3, 2)] * 2
    assert all("3 × 3" in fit.summary.reason for fit in fits)


def test_heads_as_an_axis_are_grids_of_their_own(cached_world):
    words = (*GRID[:2], "train.steps=12,24,48", SIZES, "model.heads=2,4")
    fits = fit_grids(find_families(finish(cached_world(*words)).study()))
    assert [(fit.summary.arm, fit.summary.sizes) for fit in fits] == [
        ("no_q-h2", 3),
        ("no_q-h4", 3),
    ]


def test_error_of_tuning_widens_the_interval(grid, monkeypatch):
    study = finish(grid, 0.002).study()
    narrow = fit_grids(find_families(study))[0].summary
    entries = [dataclasses.replace(entry, tuning_variance=1e-4) for entry in study.entries]
    wide = fit_grids(find_families(dataclasses.replace(study, entries=entries)))[0].summary
    for name in ("training_tokens", "parameters"):
        ends = [getattr(summary, name).interval for summary in (narrow, wide)]
        assert math.log(ends[1][1] / ends[1][0]) > 2 * math.log(ends[0][1] / ends[0][0])
    widths = [high - low for low, high in (narrow.asymptote.interval, wide.asymptote.interval)]
    assert widths[1] > 2 * widths[0]


@pytest.mark.exhaustive
@pytest.mark.parametrize("truth", TRUTHS)
def test_interval_of_the_compute_gain_covers_the_truth(truth):
    """3 sizes × 4 lengths × 5 seeds; 93 % at least, within three standard errors of 75 studies."""
    found = cover(truth, seeds=5, noise=0.005, studies=75)
    assert found.given > 0.9 * found.studies
    assert found.part == 1  # of the budget of the largest run
    assert found.rate > 0.93 - 3 * math.sqrt(0.93 * 0.07 / found.given)


@pytest.mark.exhaustive
@pytest.mark.parametrize("truth", ["equal", "a higher floor"])
def test_interval_covers_where_the_largest_budget_is_out_of_reach(truth):
    found = cover(truth, seeds=5, noise=0.005, studies=50, lengths=SHORT)
    assert found.given > 0.9 * found.studies
    assert 0.1 < found.part < 0.5
    assert found.rate > 0.93 - 3 * math.sqrt(0.93 * 0.07 / found.given)


def test_tuned_arms_share_the_law_of_their_baseline(cached_world):
    """Its name says nothing of the rates, which were chosen for each arm and size."""
    words = ("variant=standard,no_q,qk_norm", *GRID[1:], SIZES, "sweep.tune=true")
    world = cached_world(*words)
    best = {"standard": 1.0, "no_q": 2.0, "qk_norm": 0.5}

    def loss(run):
        arm = world.manifest.arms[run.arm]
        factor = run.changes["optim.lr"] / float(arm.config.optim.lr) / best[arm.variant]
        circuit = run.changes.get("variant.lr", 1.0)
        return law(arm.params, arm.tokens) + math.log(factor) ** 2 + math.log(circuit) ** 2

    summaries = [fit.summary for fit in fit_grids(find_families(world.finish(loss).study()))]
    assert {s.arm for s in summaries} == {"no_q-h2", "qk_norm-h2"}
    assert {s.baseline for s in summaries} == {"standard-h2"}
    assert len({law for s in summaries for law in s.laws}) == 3


def test_compute_is_compared_where_the_best_size_is_within_reach(grid):
    """The best size for the largest budget is small and trains long where size matters little."""
    fit = only_fit(finish(grid, size_term=A / 4))
    summary = fit.summary
    assert summary.compute.times is not None
    assert summary.compute_flops < summary.flops / 2
    times = summary.compute.times
    arm, baseline = fit.laws
    needed = baseline.least_flops(arm.lowest_loss(summary.compute_flops))
    assert times == pytest.approx(needed / summary.compute_flops, rel=0.01)
    # Without noise all refits are alike: for the next budget the arm or the baseline is the limit.
    loss = arm.lowest_loss(summary.compute_flops * 2**0.25)
    assert loss is None or baseline.least_flops(loss) is None


def test_budgets_are_tried_from_the_largest_down():
    tried = []

    def measure(flops):
        tried.append(flops)
        return Sample((1.0, 2.0)) if flops < 300 else "too far"

    flops, sample, reason = find_largest_budget(measure, 800.0, 100.0)
    assert tried == sorted(tried, reverse=True)
    assert flops == tried[-1] == pytest.approx(800 / 2**1.5)
    assert (sample.mean, reason) == (1.5, "too far")
    assert find_largest_budget(measure, 200.0, 100.0)[::2] == (200.0, "")
    most, reason, _ = find_largest_budget(lambda _: "too far", 800.0, 100.0)
    assert (most, reason) == (800.0, "too far, nor is it within reach for a smaller budget")

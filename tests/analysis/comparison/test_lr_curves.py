"""Learning rates: the best and how sure that is, what missing it costs, and gaps beside them."""

import dataclasses
import itertools
import math
import random

import numpy as np
import pytest
from scipy import optimize, stats

from qkablate.analysis.comparison.lr_curves import (
    LrCurve,
    RateLosses,
    describe_lr_curves,
    find_lr_curves,
    gap_at_rates,
)
from qkablate.analysis.comparison.summary import describe_study
from qkablate.sweeps.planning.manifest import Rates
from tests.analysis.references import to_json

LADDER = [2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3]
TUNED = ("variant=standard,no_q", "seed=range(2)", "sweep.tune=true")
RATES = ("variant=standard,no_q", "seed=range(3)", "optim.lr=5e-4,1e-3,2e-3,4e-3")


def bowl(losses):
    """Return a learning-rate curve with these losses by rate and seed."""
    return LrCurve(
        "an arm",
        {Rates(r, 1.0): {(("seed", s),): v for s, v in own.items()} for r, own in losses.items()},
    )


def parabola(rate, least, curvature=0.1):
    return 2 + curvature * math.log(rate / least) ** 2


CIRCUIT = 1.3


def circuit_cost(run):
    """Return what the circuit's rate costs, where it is searched."""
    return parabola(run.changes.get("variant.lr", CIRCUIT), CIRCUIT) - 2


def is_arm(run):
    return run.arm.startswith("no_q")


def described(study):
    return describe_lr_curves(study, find_lr_curves(study))


@pytest.mark.parametrize("least", [7e-4, 1e-3, 1.3e-3, 1.9e-3])
def test_optimum_of_a_parabola_is_recovered(least):
    """Though one seed is everywhere a whole nat above the other."""
    found = bowl({r: {s: parabola(r, least) + s for s in (0, 1)} for r in LADDER})
    assert found.surface.optimum.lr == pytest.approx(least)
    low, high = found.optimum_interval
    assert low == pytest.approx(least, rel=1e-3)
    assert high == pytest.approx(least, rel=1e-3)


def test_interval_of_the_optimum_covers_it():
    """95 of 100, within three standard errors of 600 simulated bowls."""
    rng = np.random.default_rng(0)
    rates = LADDER[1:4]  # others have less weight, and the interval errs to the wide side
    covered = told = 0
    count = 600
    for _ in range(count):
        least = math.exp(rng.uniform(math.log(0.8e-3), math.log(1.25e-3)))
        own = rng.normal(0, 0.3, 3)
        found = bowl(
            {
                r: {s: parabola(r, least) + own[s] + rng.normal(0, 0.005) for s in range(3)}
                for r in rates
            }
        ).optimum_interval
        if found is not None:
            told += 1
            covered += found[0] <= least <= found[1]
    assert told == count
    assert abs(covered / told - 0.95) < 3 * math.sqrt(0.95 * 0.05 / count)


def test_interval_of_a_noisy_optimum_is_none_or_covers_it():
    """Expect no interval where the curvature may be zero: any rate is possible."""
    rng = np.random.default_rng(1)
    missed = none = 0
    count = 300
    for _ in range(count):
        found = bowl(
            {
                r: {s: parabola(r, 1e-3, 0.03) + rng.normal(0, 0.03) for s in range(2)}
                for r in LADDER
            }
        ).optimum_interval
        if found is None:
            none += 1
        else:
            missed += not found[0] <= 1e-3 <= found[1]
    assert none > 10
    assert missed / count < 0.05 + 3 * math.sqrt(0.95 * 0.05 / count)


def test_interval_is_fiellers():
    """Its ends are where a t test of slope + 2 curvature x no longer rejects."""
    rng, seeds = np.random.default_rng(2), range(4)
    rates = LADDER[1:4]  # the best and one on each side: these are always read
    losses = {r: {s: parabola(r, 1.1e-3) + rng.normal(0, 0.004) for s in seeds} for r in rates}
    found = bowl(losses)
    assert found.best == Rates(1e-3, 1.0)
    points = [(math.log(r / 1e-3), s, v) for r, own in losses.items() for s, v in own.items()]
    design = [[x, x * x, *(s == seed for seed in seeds)] for x, s, _ in points]
    losses_P = [v for *_, v in points]
    params, covariance = optimize.curve_fit(
        lambda rows_PK, *params: rows_PK @ params, np.array(design, float), losses_P, [0.0] * 6
    )
    t = stats.t.isf(0.025, len(points) - 6)
    for end in found.optimum_interval:
        x = math.log(end / 1e-3)
        derivative = np.array([1, 2 * x, 0, 0, 0, 0])
        error = math.sqrt(derivative @ covariance @ derivative)
        assert abs(derivative @ params) / error == pytest.approx(t, rel=1e-4)


@pytest.mark.parametrize(
    ("seed", "optimum", "interval", "curvature"),
    [
        (2, 0.00109582814612, (0.00106799798465, 0.00112750378415), 0.0900319688090),
        (3, 0.00106581907903, (0.000979474152131, 0.00119187378551), 0.115624536212),
        (5, 0.00104840757437, (0.000935191097064, 0.00122236199190), 0.0985518317871),
        (6, 0.00120304712281, None, 0.0534341506040),
    ],
)
def test_parabola_equals_the_fit_of_statsmodels(seed, optimum, interval, curvature):
    """Frozen values of statsmodels' OLS with Fieller's interval."""
    rng = np.random.default_rng(seed)
    losses = {
        r: {s: parabola(r, 1.1e-3) + rng.normal(0, 0.004) * (seed - 1) for s in range(4)}
        for r in LADDER[1:4]
    }
    found = bowl(losses)
    assert found.surface.optimum.lr == pytest.approx(optimum, rel=1e-10)
    assert found.surface.hessian_KK[0, 0] / 2 == pytest.approx(curvature, rel=1e-10)
    assert found.optimum_interval == (interval and pytest.approx(interval, rel=1e-10))


# Of a tuned arm: a valley that is nearly flat along ln lr − ln circuit.
VALLEY = {
    0.595: {0.002: 1.047, 0.004: 0.88, 0.008: 0.744, 0.016: 0.691, 0.032: 0.703},
    1.19: {0.002: 0.94, 0.004: 0.796, 0.008: 0.695, 0.016: 0.666, 0.032: 0.636, 0.064: 0.705},
    1.68: {0.032: 0.617, 0.045: 0.61},
    2.38: {
        0.002: 0.882, 0.004: 0.692, 0.008: 0.622, 0.016: 0.621, 0.023: 0.643, 0.032: 0.62,
        0.045: 0.648, 0.064: 0.646,
    },
    3.37: {0.023: 0.631, 0.032: 0.79},
    4.76: {0.016: 0.622, 0.032: 0.859, 0.064: 3.362},
}  # fmt: skip


def test_nearly_flat_surface_has_no_interval_of_the_optimum():
    """Its ends are farther away than floating-point numbers reach."""
    found = LrCurve(
        "an arm",
        {
            Rates(lr, circuit): {(("seed", 0),): loss}
            for circuit, losses in VALLEY.items()
            for lr, loss in losses.items()
        },
    )
    assert found.surface is not None
    assert found.surface.offset_covariance[0, 0] ** 0.5 > 300
    assert found.optimum_interval is None


def test_flat_or_concave_curve_has_no_optimum():
    for losses in ({0: lambda r: 2.0}, {0: lambda r: parabola(r, 1e-3, -0.1)}):
        fit = bowl({r: {s: losses[0](r) + s for s in (0, 1)} for r in LADDER}).surface
        assert fit is None or not fit.is_certain


def test_too_few_points_have_no_optimum():
    assert bowl({1e-3: {0: 2.0}}).surface is None
    assert bowl({r: {0: parabola(r, 1e-3), 1: 2.0} for r in LADDER[:2]}).surface is None
    assert bowl({r: {0: parabola(r, 5e-4)} for r in LADDER[:3]}).surface is None
    assert bowl({r: {0: None} for r in LADDER}).surface is None


def test_best_rate_on_the_edge_is_detected():
    for least, edge in ((2e-4, True), (5e-3, True), (5e-4, False), (2e-3, False)):
        assert bowl({r: {0: parabola(r, least)} for r in LADDER}).is_on_edge is edge
    assert bowl({1e-3: {0: 2.0}}).is_on_edge
    everywhere = bowl({r: {0: None} for r in LADDER})
    assert everywhere.best is None
    assert everywhere.is_on_edge


def test_best_rate_is_that_of_the_rules_of_the_search():
    """Later rules take the middle of the rates that solve a task, the first ones the least loss."""
    solved = dict(zip(LADDER, ({0: v} for v in (0.5, 2e-3, 2e-3, 1e-3, 0.5)), strict=True))
    found = bowl(solved)
    assert found.best.lr == 1e-3
    assert dataclasses.replace(found, rules=1).best.lr == 2e-3


def test_rate_at_which_a_seed_diverges_is_never_the_best():
    losses = {r: {0: parabola(r, 2e-3), 1: parabola(r, 2e-3)} for r in LADDER}
    losses[2e-3] = {0: 1.0, 1: None}
    losses[4e-3] = {0: None, 1: None}
    found = bowl(losses)
    assert found.best == Rates(1e-3, 1.0)
    assert Rates(2e-3, 1.0) not in found.means


def test_best_rate_beside_a_diverged_one_is_not_bracketed():
    losses = {r: {0: parabola(r, 1e-3), 1: parabola(r, 1e-3)} for r in LADDER}
    assert not bowl(losses).is_on_edge
    assert bowl(losses | {2e-3: {0: 2.0, 1: None}}).is_on_edge
    assert not bowl(losses | {4e-3: {0: 2.0, 1: None}}).is_on_edge


def test_bound_of_the_excess_is_above_the_estimate():
    noise = itertools.cycle((0.004, -0.003, 0.001, -0.002, 0.0))
    found = bowl({r: {s: parabola(r, 1e-3) + next(noise) for s in range(3)} for r in LADDER})
    surface = found.surface
    _, bound = surface.excess(found.best)
    assert bound >= surface.excess_loss(found.best) >= 0


def test_order_in_which_rates_are_known_changes_nothing():
    losses = {r: {s: parabola(r, 1.2e-3) + s + r for s in (0, 1)} for r in LADDER}
    backwards = bowl(dict(reversed([*losses.items()])))
    assert backwards.best == bowl(losses).best
    assert backwards.surface.optimum == pytest.approx(bowl(losses).surface.optimum)
    assert backwards.is_on_edge == bowl(losses).is_on_edge


def test_sensitivity_by_hand():
    losses = {1e-4: 9.0, 2.5e-4: 3.0, 5e-4: 2.5, 1e-3: 2.0, 2e-3: 2.25, 4e-3: 7.0, 8e-3: 9.0}
    found = bowl({r: {0: v - 0.5, 1: v + 0.5} for r, v in losses.items()})
    # From a quarter to four times the best; a loss above that before training counts as it.
    assert found.sensitivity(5.0) == pytest.approx((1.0 + 0.5 + 0.0 + 0.25 + 3.0) / 5)
    assert found.sensitivity(100.0) == pytest.approx((1.0 + 0.5 + 0.0 + 0.25 + 5.0) / 5)


def test_diverged_rate_costs_as_much_as_not_to_train():
    found = bowl({5e-4: {0: 2.5}, 1e-3: {0: 2.0}, 2e-3: {0: None}})
    assert found.sensitivity(5.0) == pytest.approx((0.5 + 0.0 + 3.0) / 3)
    assert found.sensitivity(math.inf) is None
    assert bowl({1e-3: {0: None}}).sensitivity(5.0) is None
    assert bowl({1e-3: {0: 2.0}}).sensitivity(1.0) == 0.0


def test_gaps_at_separate_rates_are_paired():
    one = bowl({1e-3: {0: 2.5, 1: 2.75, 2: None}, 2e-3: {0: 2.0, 1: 2.0, 2: 2.0}})
    other = bowl({1e-3: {0: 2.0, 1: 2.0, 2: 2.0}, 2e-3: {1: 1.0, 2: 1.5}})
    assert gap_at_rates(one, Rates(1e-3, 1.0), other, Rates(1e-3, 1.0)).values == (0.5, 0.75)
    assert gap_at_rates(one, Rates(2e-3, 1.0), other, Rates(2e-3, 1.0)).values == (1.0, 0.5)
    assert gap_at_rates(one, Rates(1e-3, 1.0), other, Rates(2e-3, 1.0)).values == (1.75,)
    assert gap_at_rates(one, Rates(4e-3, 1.0), other, Rates(1e-3, 1.0)).n == 0


def test_tuned_sweep_has_lr_curves_of_its_tuning_runs(cached_world):
    least = {"standard": 1e-3, "no_q": 3e-3}
    world = cached_world(*TUNED).finish(
        lambda run: (
            parabola(run.changes["optim.lr"], least[run.arm.split("-")[0]])
            + circuit_cost(run)
            + run.changes["seed"] / 1e4
            + is_arm(run) / 4
        )
    )
    study = world.study()
    assert study.is_complete
    one, other = described(study)
    assert (one.arm, one.chosen, one.on_the_edge) == ("standard-d16-h2", Rates(1e-3, 1.3), False)
    # The ladder ends at 4e-3, where no_q is best: it was extended.
    assert (other.chosen, other.on_the_edge) == (Rates(3e-3, 1.3), False)
    assert other.best.lr == pytest.approx(4e-3 / 2**0.5)  # half a step from the best of the ladder
    halves = {row.lr for row in other.val_loss} - {*LADDER, 8e-3}
    assert sorted(halves) == pytest.approx([4e-3 / 2**0.5, 4e-3 * 2**0.5])
    assert one.optimum == pytest.approx(Rates(1e-3, CIRCUIT))
    assert other.optimum == pytest.approx(Rates(3e-3, CIRCUIT))
    assert (one.runs, other.runs) == (21, 24)
    assert one.gap_at_default is one.gap_at_best is None
    costs = [
        parabola(curve.best.lr, least) + parabola(curve.best.circuit, CIRCUIT)
        for curve, least in ((one, 1e-3), (other, 3e-3))
    ]
    at_best = 0.25 + costs[1] - costs[0]
    assert other.gap_at_best.mean == pytest.approx(at_best)
    assert other.gap_at_best.n == 1  # of the seed that both arms are tuned on
    to_json([one, other])
    assert not any(curve.is_on_edge for curve in find_lr_curves(study).values())


def test_lr_curves_use_validation_losses_of_tuning_runs(cached_world):
    world = cached_world(*TUNED).finish(
        lambda run: (
            parabola(run.changes["optim.lr"], 1e-3) + circuit_cost(run)
            if run.tuning
            else 55.0 + run.changes["seed"]
        )
    )
    found = find_lr_curves(world.study())
    keys = {key for own in found.values() for by_seed in own.losses.values() for key in by_seed}
    assert keys == {(("seed", 1000),)}  # of three the only one, where two rates are searched
    assert max(max(own.means.values()) for own in found.values()) < 10


def test_arms_run_at_three_rates_have_lr_curves(cached_world):
    world = cached_world(*RATES).finish(
        lambda run: (
            parabola(run.changes["optim.lr"], 1.5e-3 if is_arm(run) else 1e-3)
            + run.changes["seed"] / 10
            + 0.1 * is_arm(run)
        )
    )
    study = world.study()
    one, other = described(study)
    assert one.best.lr == 1e-3
    assert one.chosen is None
    assert other.best.lr in (1e-3, 2e-3)
    assert one.optimum.lr == pytest.approx(1e-3)
    assert other.optimum.lr == pytest.approx(1.5e-3)
    assert other.gap_at_default.mean == pytest.approx(0.1 + parabola(1e-3, 1.5e-3) - 2)
    assert other.gap_at_best.mean == pytest.approx(0.1 + parabola(other.best.lr, 1.5e-3) - 2)
    start = math.log(world.manifest.arms["standard-d16-h2"].facts["vocabulary"])
    losses = [parabola(rate, 1e-3) for rate in (5e-4, 1e-3, 2e-3, 4e-3)]
    cost = sum(min(loss, start) - 2 for loss in losses) / 4
    assert one.sensitivity == pytest.approx(cost)


def test_two_rates_make_no_lr_curve(cached_world):
    world = cached_world("variant=standard,no_q", "seed=range(2)", "optim.lr=1e-3,2e-3")
    assert find_lr_curves(world.finish(lambda run: 2.0).study()) == {}


def test_failed_waiting_and_damaged_runs_are_not_diverged(cached_world):
    ends = {0: "failed", 1: None, 2: {"loss": {"val": math.nan, "test": None}}}
    world = cached_world(*RATES).finish(
        lambda run: (
            ends[run.changes["seed"]]
            if is_arm(run) and run.changes["optim.lr"] == 1e-3
            else parabola(run.changes["optim.lr"], 1e-3)
        )
    )
    found = find_lr_curves(world.study())["no_q-d16-h2"]
    assert 1e-3 not in {rates.lr for rates in found.losses}
    assert found.best.lr in (5e-4, 2e-3)
    to_json(described(world.study()))


def test_diverged_runs_are_shown_as_such(cached_world):
    world = cached_world(*RATES).finish(
        lambda run: (
            "diverged"
            if run.changes["optim.lr"] == 4e-3
            else parabola(run.changes["optim.lr"], 1.1e-3)
        )
    )
    for one in described(world.study()):
        assert one.val_loss[-1] == RateLosses(4e-3, one.default.circuit, [None] * 3)
        assert not one.on_the_edge
        assert one.best.lr == 1e-3


def test_arm_that_diverges_at_every_rate_has_no_best_rate(cached_world):
    world = cached_world(*TUNED).finish(
        lambda run: "diverged" if is_arm(run) else parabola(run.changes["optim.lr"], 1e-3)
    )
    study = world.study()
    _, other = described(study)
    assert other.best is other.chosen is other.optimum is other.sensitivity is None
    assert other.on_the_edge
    assert other.gap_at_best.n == 0
    to_json(describe_study(study))


HALF = {
    "a run of the lowest rate waits": lambda run: (
        None if (run.changes["seed"], run.changes["optim.lr"]) == (1000, 2.5e-4) else 0.0
    ),
    "a run of the highest rate waits": lambda run: (
        None if (run.changes["seed"], run.changes["optim.lr"]) == (1000, 4e-3) else 0.0
    ),
    "a run of the highest rate failed": lambda run: (
        "failed" if (run.changes["seed"], run.changes["optim.lr"]) == (1000, 4e-3) else 0.0
    ),
    "a run of the best rate failed": lambda run: (
        "failed" if (run.changes["seed"], run.changes["optim.lr"]) == (1000, 1e-3) else 0.0
    ),
    "nothing is run": lambda run: None,
}


@pytest.mark.parametrize("end", HALF.values(), ids=HALF.keys())
@pytest.mark.parametrize("both", [False, True], ids=["one arm", "both arms"])
def test_sweep_that_is_still_tuning_can_be_looked_at(cached_world, end, both):
    def loss(run):
        found = end(run) if both or is_arm(run) else 0.0
        if found != 0.0:
            return found
        return (
            parabola(run.changes["optim.lr"], 1e-3)
            + circuit_cost(run)
            + random.Random(run.id).gauss(0, 1e-3)
        )

    study = cached_world(*TUNED).finish(loss).study()
    assert not study.is_complete
    described = describe_study(study)
    to_json(described)
    (one,) = described.gaps
    checks = {check.name: check for check in one.audit}
    assert checks["runs"].state == "warning"
    assert "no learning rate was chosen" in checks["runs"].message
    assert checks["learning rate"].state == "warning"

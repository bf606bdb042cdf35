"""The search for learning rates: the runs that follow from given results."""

import dataclasses
import json
import math
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qkablate.compose.configs import make_config, open_hydra
from qkablate.compose.grid import read_request
from qkablate.errors import UserError
from qkablate.sweeps.planning.expand import Grid, expand_grid
from qkablate.sweeps.planning.manifest import Rates
from qkablate.sweeps.planning.tuning import (
    CIRCUITS,
    EXTENSIONS,
    LOWER,
    circuit_ladder,
    lr_ladder,
    next_runs,
)

MIDDLE = 1e-3
SEEDS = (1000, 1001, 1002)
ARMS = ("standard-d16-h2", "standard_reassociated-d16-h2")


@pytest.fixture(scope="module")
def expand(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tuning")
    (folder / "corpus.txt").write_text("the cat sat on the mat\n" * 400, encoding="utf-8")
    words = ["model.layers=1", "model.d_model=16", "model.heads=2", "model.context=16", "data=text"]
    words += [f"data.path={folder / 'corpus.txt'}", f"data.cache={folder / 'cache'}", "threads=1"]
    words += ["sweep.tune=true", "sweep.floor=false"]

    def run(*more, variant="standard,standard_reassociated", circuit_lr="same"):
        given = [] if circuit_lr is None else [f"variant.lr={circuit_lr}"]
        with open_hydra():
            asked = read_request([*words, f"variant={variant}", *given, *more])
            grid = Grid(asked.settings.sweep, asked.controls, asked.choices)
            return expand_grid(grid, make_config, [])

    return run


@pytest.fixture(scope="module")
def manifest(expand):
    """Return a plan of two arms with five rates and three tuning seeds, then three final seeds."""
    found = expand("seed=range(3)")
    assert tuple(found.arms) == ARMS
    return found


def find_next_runs(manifest, results):
    """Return what follows from results by id."""
    return next_runs(manifest, lambda run: results.get(run.id), {})


def done(loss):
    return {"status": "done", "loss": {"train": loss, "val": loss, "test": None}}


DIVERGED = {"status": "diverged", "loss": {"train": None, "val": None, "test": None}}
FAILED = {"status": "failed", "error": "ValueError: no"}


def octave(run):
    """Return the rate's distance from the middle in octaves."""
    return round(2 * math.log2(run.changes["optim.lr"] / MIDDLE)) / 2


def losses_around(best):
    """Return losses with their minimum so many octaves from the middle."""
    return lambda run: done(2 + (octave(run) - best) ** 2 + run.changes["seed"] / 1e4)


def trained(manifest, world, order=None):
    """Train all runs one after another as they become known; return runs and results by id."""
    results, known = {}, {run.id: run for run in manifest.runs}
    while waiting := [run for run in known.values() if run.id not in results]:
        run = order.choice(waiting) if order else waiting[0]
        results[run.id] = world(run)
        runs, _ = find_next_runs(manifest, results)
        assert {id for id, other in known.items() if other not in manifest.runs} <= {
            run.id for run in runs
        }  # no requested run is withdrawn
        known |= {run.id: run for run in runs}
    return known, results


def nearly(lr, circuit=1.0):
    """Return rates that equal these to two digits."""
    return pytest.approx(Rates(lr, circuit), rel=0.05)


def search_rates(manifest, results):
    """Return the search of each arm, and the final runs."""
    runs, searches = find_next_runs(manifest, results)
    assert [search.arm for search in searches] == [*manifest.arms]
    return {search.arm: search for search in searches}, [run for run in runs if not run.tuning]


@pytest.mark.parametrize(("rules", "octaves"), [(2, {-0.5}), (1, {0.5, 1})])
def test_a_solved_task_takes_a_middle_rate_but_in_earlier_sweeps(manifest, rules, octaves):
    """Rounding makes the loss least at the highest rate that solves the task."""
    sweep = replace(manifest, tuning_rules=rules)
    _, results = trained(
        sweep, lambda run: done(1e-9 / run.changes["optim.lr"] if octave(run) <= 1 else 0.9)
    )
    found, finals = search_rates(sweep, results)
    assert {search.state for search in found.values()} == {"chosen"}
    assert finals
    assert {octave(run) for run in finals} <= octaves


def test_first_runs_are_the_ladder(manifest):
    assert {(run.arm, octave(run), run.changes["seed"]) for run in manifest.runs} == {
        (arm, number, seed) for arm in ARMS for number in range(-2, 3) for seed in SEEDS
    }
    assert len(manifest.runs) == 30
    assert all(run.tuning for run in manifest.runs)
    assert [run["seed"] for run in manifest.finals] == [0, 1, 2]


@pytest.mark.parametrize("best", [-1, 0, 1])
def test_best_rate_inside_the_ladder_is_chosen(manifest, best):
    known, results = trained(manifest, losses_around(best))
    searches, finals = search_rates(manifest, results)
    for search in searches.values():
        assert (search.state, search.rates) == ("chosen", nearly(MIDDLE * 2**best))
        assert search.at_minimum
        assert len(search.losses) == 7  # two more, half an octave from the best
        assert all(len(losses) == 3 for losses in search.losses.values())
    halves = {octave(run) for run in known.values()} - {*range(-2, 3)}
    assert halves == {best - 0.5, best + 0.5}
    assert len(known) == len(manifest.runs) + len(finals) + 12


@pytest.mark.parametrize("best", [-7, -3, -2, 2, 3, 4, 7])
def test_best_rate_on_an_edge_extends_the_ladder(manifest, best):
    known, results = trained(manifest, losses_around(best))
    searches, _ = search_rates(manifest, results)
    more = [run for run in known.values() if run.tuning and run not in manifest.runs]
    beyond = [run for run in more if octave(run).is_integer()]
    assert {octave(run) for run in more if run not in beyond} == {best - 0.5, best + 0.5}
    step = 1 if best > 0 else -1
    octaves = range(3 * step, best + 2 * step, step)
    assert sorted((run.arm, octave(run), run.changes["seed"]) for run in beyond) == sorted(
        (arm, number, seed) for arm in ARMS for number in octaves for seed in SEEDS
    )
    for search in searches.values():
        assert (search.state, search.rates) == ("chosen", nearly(MIDDLE * 2.0**best))


@pytest.mark.parametrize("side", [-1, 1])
def test_number_of_extensions_is_bounded(manifest, side):
    known, results = trained(manifest, losses_around(100 * side))
    searches, finals = search_rates(manifest, results)
    last = MIDDLE * 2.0 ** (side * (2 + EXTENSIONS))
    for search in searches.values():
        assert (search.state, search.rates) == ("on the edge", nearly(last))
        assert len(search.losses) == 5 + EXTENSIONS
    assert len(finals) == 6
    assert len(known) == 2 * (3 * (5 + EXTENSIONS) + 3)


def test_lower_rates_are_tried_if_all_diverge(manifest):
    known, results = trained(manifest, lambda run: DIVERGED)
    searches, finals = search_rates(manifest, results)
    assert {octave(run) for run in known.values()} == {*range(-2 - EXTENSIONS, 3)}
    assert {(search.state, search.rates) for search in searches.values()} == {("diverged", None)}
    assert not finals


def test_best_rate_below_divergence_is_chosen(manifest):
    world = losses_around(-4)
    known, results = trained(manifest, lambda r: DIVERGED if octave(r) > -4 else world(r))
    searches, _ = search_rates(manifest, results)
    for search in searches.values():
        assert (search.state, search.rates) == ("chosen", nearly(MIDDLE / 16))
    assert min(octave(run) for run in known.values()) == -5


def test_rate_with_one_diverged_seed_is_never_chosen(manifest):
    """Here it is the best one by the other seed."""
    world = losses_around(1)

    def cliff(run):
        return DIVERGED if octave(run) == 1 and run.changes["seed"] == SEEDS[0] else world(run)

    _, results = trained(manifest, cliff)
    searches, finals = search_rates(manifest, results)
    assert all(search.rates == nearly(MIDDLE * 2**0.5) for search in searches.values())
    assert not any(search.at_minimum for search in searches.values())
    assert len(finals) == 6
    for search in searches.values():
        assert None in search.losses[Rates(2 * MIDDLE, 1.0)].values()


def test_failed_run_blocks_only_its_own_arm(manifest):
    world = losses_around(0)
    (failed,) = (
        run
        for run in manifest.runs
        if (run.arm, octave(run), run.changes["seed"]) == (ARMS[1], -2, SEEDS[1])
    )
    _, results = trained(manifest, lambda run: FAILED if run == failed else world(run))
    searches, finals = search_rates(manifest, results)
    assert (searches[ARMS[0]].state, searches[ARMS[1]].state) == ("chosen", "stuck")
    assert searches[ARMS[1]].rates is None
    assert {run.arm for run in finals} == {ARMS[0]}
    results[failed.id] = world(failed)  # tried again
    runs, _ = find_next_runs(manifest, results)
    results |= {run.id: world(run) for run in runs if run.tuning}
    assert {search.state for search in search_rates(manifest, results)[0].values()} == {"chosen"}


def test_search_waits_for_missing_results(manifest):
    _, results = trained(manifest, losses_around(0))
    for missing in manifest.runs:
        searches, finals = search_rates(
            manifest, {id: r for id, r in results.items() if id != missing.id}
        )
        assert (searches[missing.arm].state, searches[missing.arm].rates) == ("tuning", None)
        assert {run.arm for run in finals} == {*ARMS} - {missing.arm}
    runs, searches = find_next_runs(manifest, {})
    assert not runs
    assert {search.state for search in searches} == {"tuning"}


@pytest.mark.slow
def test_final_runs_use_all_seeds_at_the_chosen_rate(expand):
    manifest = expand("seed=0,1", "seeds.init=0,7")

    def world(run):
        return losses_around(1 if run.arm == ARMS[0] else -1)(run)

    _, results = trained(manifest, world)
    _, finals = search_rates(manifest, results)
    assert len(finals) == 2 * 2 * 2
    for run in finals:
        config = manifest.config_of(run)
        assert config.optim.lr == (2 * MIDDLE if run.arm == ARMS[0] else MIDDLE / 2)
        assert config.train.evaluate_test
    for arm in ARMS:
        configs = [manifest.config_of(run) for run in finals if run.arm == arm]
        seeds = {(c.seed, c.seeds.init, c.seeds.data, c.seeds.dropout) for c in configs}
        assert seeds == {(0, 0, 0, 0), (0, 7, 0, 0), (1, 0, 1, 1), (1, 7, 1, 1)}


def test_tuning_runs_never_evaluate_the_test_split(manifest):
    known, _ = trained(manifest, losses_around(3))
    for run in known.values():
        assert manifest.config_of(run).train.evaluate_test is not run.tuning
        arm = manifest.arms[run.arm]
        assert arm.run(run.changes, tuning=True).id != arm.run(run.changes).id
        assert run.id == arm.run(run.changes, tuning=run.tuning).id


def random_world(chance):
    """Return losses, divergences and failures, drawn for every rate and seed."""
    drawn = {}

    def world(run):
        key = (run.arm, octave(run), run.changes["seed"])
        if key not in drawn:
            kind = random.Random(f"{chance}{key}")
            odds = kind.random()
            drawn[key] = DIVERGED if odds < 0.2 else FAILED if odds < 0.22 else None
            drawn[key] = drawn[key] or done(kind.random())
        return drawn[key]

    return world


@pytest.mark.exhaustive
@settings(deadline=None, max_examples=25)
@given(st.integers(0, 2**32), st.integers(0, 2**32))
def test_search_is_independent_of_the_order_of_results(manifest, chance, order):
    """Neither the runs nor the choices depend on it."""
    known, results = trained(manifest, random_world(chance))
    others, same = trained(manifest, random_world(chance), random.Random(order))
    assert known.keys() == others.keys()
    assert results == same
    # Nor do they depend on the order of the manifest's runs or on finished searches.
    shuffled = random.Random(order).sample(manifest.runs, len(manifest.runs))
    again = dataclasses.replace(manifest, runs=shuffled)
    searches, finals = search_rates(manifest, results)
    mixed_results = dict(random.Random(order).sample([*results.items()], len(results)))
    mixed, others = search_rates(again, mixed_results)
    assert {run.id for run in finals} == {run.id for run in others}
    for name, search in searches.items():
        assert (search.rates, search.state) == (mixed[name].rates, mixed[name].state)
    kept, partly = {}, {}
    for id, result in results.items():
        partly[id] = result
        next_and_searches = next_runs(manifest, lambda run: partly.get(run.id), kept)
        assert next_and_searches == find_next_runs(manifest, partly)


# Two dimensions.


@pytest.fixture(scope="module")
def two_dimensional(expand):
    """Return a plan of an arm without W_q beside its baseline and uniform attention."""
    return expand("seed=range(3)", "sweep.floor=true", variant="no_q", circuit_lr=None)


def circuit_octave(run):
    return math.log2(run.changes.get("variant.lr", 1.0))


def bowl_around(lr, circuit):
    """Return losses with their minimum so many octaves from the middle, and from 1."""

    def world(run):
        x, y = octave(run) - lr, circuit_octave(run) - circuit
        return done(2 + x * x + 0.5 * x * y + 0.2 * y * y * ("variant.lr" in run.changes))

    return world


def test_search_of_two_rates_takes_as_many_runs_as_that_of_one(two_dimensional):
    arms = {arm.variant: arm for arm in two_dimensional.arms.values()}
    for variant in ("standard", "no_q", "uniform"):
        runs = [run for run in two_dimensional.runs if run.arm == arms[variant].name]
        assert len(runs) == 15
        if variant == "uniform":  # it has no scores
            assert {run.changes["seed"] for run in runs} == {*SEEDS}
            assert not [run for run in runs if "variant.lr" in run.changes]
            continue
        assert {run.changes["seed"] for run in runs} == {SEEDS[0]}
        ladder = circuit_ladder(arms[variant].matched_lr)
        assert {run.changes["variant.lr"] for run in runs} == {*ladder}
        for run in runs:
            assert two_dimensional.config_of(run).variant.lr == run.changes["variant.lr"]


@pytest.mark.parametrize(("lr", "circuit"), [(0.3, 0.5), (-1.2, -1.6), (2.7, 3.1), (0.0, -4.2)])
def test_minimum_between_the_rates_is_found_in_both_dimensions(two_dimensional, lr, circuit):
    known, results = trained(two_dimensional, bowl_around(lr, circuit))
    searches, finals = search_rates(two_dimensional, results)
    for search in (searches["no_q-d16-h2"], searches["standard-d16-h2"]):
        assert (search.state, search.at_minimum) == ("chosen", True)
        assert search.rates == nearly(MIDDLE * 2**lr, 2**circuit)
        own = [run for run in finals if run.arm == search.arm]
        assert {(r.changes["optim.lr"], r.changes["variant.lr"]) for r in own} == {search.rates}
        tried = [run for run in known.values() if run.tuning and run.arm == search.arm]
        assert len(tried) == search.runs <= 15 + CIRCUITS * EXTENSIONS + 6 + 2


def confirming(manifest, known, arm="no_q-d16-h2"):
    """Return the octaves of the rates that an arm's search has confirmed, and the seeds."""
    runs = [run for run in known.values() if run.tuning and run.arm == arm]
    runs = [run for run in runs if run.changes["seed"] != SEEDS[0]]
    return sorted({octave(run) for run in runs}), {run.changes["seed"] for run in runs}


def test_choice_is_confirmed_on_the_other_seeds(two_dimensional):
    known, results = trained(two_dimensional, bowl_around(0, 0.5))
    searches, _ = search_rates(two_dimensional, results)
    assert confirming(two_dimensional, known) == ([0], {*SEEDS[1:]})
    search = searches["no_q-d16-h2"]
    assert [*search.confirmed] == [search.rates]
    assert search.to_json()["confirmed"][0]["by_seed"] == [*search.confirmed[search.rates].values()]
    assert not searches["uniform-d16-h2"].confirmed  # all seeds have searched
    earlier = replace(two_dimensional, tuning_rules=2)
    known, results = trained(earlier, bowl_around(0, 0.5))
    assert confirming(earlier, known) == ([], set())


@pytest.mark.parametrize("failure", [done(9.0), DIVERGED])
@pytest.mark.parametrize(("highest", "chosen"), [(0, 0), (-0.6, -1), (-1.4, -2)])
def test_lower_rates_are_chosen_where_other_seeds_fail(two_dimensional, failure, highest, chosen):
    """All seeds but that of the search fail at higher rates."""
    usual = bowl_around(0, 0.5)

    def world(run):
        fails = run.changes["seed"] != SEEDS[0] and octave(run) > highest
        return failure if fails and "variant.lr" in run.changes else usual(run)

    known, results = trained(two_dimensional, world)
    searches, finals = search_rates(two_dimensional, results)
    search = searches["no_q-d16-h2"]
    assert (search.state, search.at_minimum) == ("chosen", chosen == 0)
    assert math.log2(search.rates.lr / MIDDLE) == pytest.approx(chosen, abs=0.1)
    tried, _ = confirming(two_dimensional, known)
    assert len(tried) == len(search.confirmed) <= 1 + LOWER
    own = [run for run in finals if run.arm == search.arm]
    assert {(r.changes["optim.lr"], r.changes["variant.lr"]) for r in own} == {search.rates}


def test_choice_stands_where_other_seeds_end_higher_at_all_rates(two_dimensional):
    usual = bowl_around(0, 0.5)

    def world(run):
        loss = usual(run)["loss"]["val"]
        return done(loss + (0.3 if run.changes["seed"] != SEEDS[0] else 0.0))

    _, results = trained(two_dimensional, world)
    search = search_rates(two_dimensional, results)[0]["no_q-d16-h2"]
    assert (search.rates, search.at_minimum) == (nearly(MIDDLE, 2**0.5), True)


def test_choice_stands_where_the_other_seeds_diverge_at_all_rates(two_dimensional):
    usual = bowl_around(0, 0.5)

    def world(run):
        return DIVERGED if run.changes["seed"] in SEEDS[1:] else usual(run)

    _, results = trained(two_dimensional, world)
    search = search_rates(two_dimensional, results)[0]["no_q-d16-h2"]
    assert search.rates == nearly(MIDDLE, 2**0.5)
    assert len(search.confirmed) == 1 + LOWER


@pytest.mark.slow
@settings(deadline=None, max_examples=5)
@given(st.integers(0, 2**32), st.integers(0, 2**32))
def test_confirmation_is_independent_of_the_order_of_results(two_dimensional, chance, order):
    known, results = trained(two_dimensional, random_world(chance))
    others, same = trained(two_dimensional, random_world(chance), random.Random(order))
    assert (known.keys(), results) == (others.keys(), same)


def test_given_circuit_rate_is_not_searched(expand):
    for typed in ("same", "0.3"):
        manifest = expand("seed=range(3)", f"variant.lr={typed}", variant="no_q")
        runs = [run for run in manifest.runs if run.arm.startswith("no_q")]
        assert len(runs) == 15
        assert not any("variant.lr" in run.changes for run in runs)
        (rate,) = {manifest.config_of(run).variant.lr for run in runs}
        assert rate == (1.0 if typed == "same" else 0.3)


def test_circuit_ladder_holds_matched_and_same_unless_they_are_close():
    assert circuit_ladder(0.01) == [0.01, 0.1, 1.0]
    assert circuit_ladder(100) == [1, 10, 100]
    assert circuit_ladder(2.0) == [pytest.approx(2**k, rel=0.01) for k in (-0.5, 0.5, 1.5)]


# The ladder.


def test_ladder_has_five_rates_around_the_configs_own():
    assert lr_ladder([], 1e-3) == [2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3]
    assert lr_ladder([], 8e-3) == [2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2]
    assert lr_ladder([8e-3], 1e-3) == lr_ladder([], 8e-3)


def test_given_rates_are_used_unchanged():
    given = [4e-3, 1e-3, 2e-3, 5e-4, 8e-3, 6e-3]
    assert lr_ladder(given, 1e-3) == [5e-4, 1e-3, 2e-3, 4e-3, 6e-3, 8e-3]


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ([1e-3, 2e-3], "2 rates given"),
        ([1e-3, 2e-3, 4e-3, 8e-3], "4 rates given"),
        ([1e-3, 1e-3, 1e-3, 2e-3, 4e-3], "3 rates given"),
        ([1e-3, 2e-3, 4e-3, 8e-3, 2e-2], "may differ by a factor of two at most"),
        ([1e-3, 1e-2, 1e-1, 1.0, 10.0], "may differ by a factor of two at most"),
    ],
)
def test_short_or_coarse_ladder_is_rejected(given, why):
    with pytest.raises(UserError, match=rf"optim\.lr: .*{why}"):
        lr_ladder(given, 1e-3)


def test_extensions_stay_within_the_bounds_of_the_key(expand):
    """`optim.lr` is 1000 at most: the printed command of every run works."""
    manifest = expand("seed=0", "optim.lr=200")
    known, _ = trained(manifest, losses_around(100))
    assert max(run.changes["optim.lr"] for run in known.values()) <= 1000


# End to end.


@pytest.mark.slow
def test_tuned_sweep_end_to_end(qkablate, tiny, tmp_path):
    words = ["sweep", *tiny, "model.layers=1", "variant=no_q", "sweep.baseline=null", "workers=2"]
    words += ["sweep.tune=true", "sweep.tuning_seeds=[1000]", "seed=0,1", "optim.lr=3e-2"]
    first = qkablate(*words)
    assert first.code == 0, first.err
    results = {}
    for path in tmp_path.glob("outputs/runs/*/result.json"):
        result = json.loads(path.read_text(encoding="utf-8"))
        results[result["id"]] = result
    tried = {id: result for id, result in results.items() if result["seed"] == 1000}
    finals = {id: result for id, result in results.items() if id not in tried}
    assert {result["status"] for result in results.values()} == {"done"}
    assert len(tried) >= 5
    assert sorted(result["seed"] for result in finals.values()) == [0, 1]
    assert all(result["loss"]["test"] is None for result in tried.values())
    assert all(result["loss"]["test"] > 0 for result in finals.values())
    assert all(result["loss"]["val"] > 0 for result in results.values())

    (folder,) = tmp_path.glob("outputs/sweeps/*/")
    (search,) = json.loads((folder / "lr_search.json").read_text(encoding="utf-8"))
    assert search["arm"] == "no_q-d16-h2"
    assert search["state"] in ("chosen", "on the edge")
    points = {(p["lr"], p["circuit"]): p["by_seed"] for p in search["val_loss"]}
    assert len(points) == len(tried)
    assert sorted(loss for (loss,) in points.values()) == sorted(
        result["loss"]["val"] for result in tried.values()
    )
    chosen = search["chosen"]
    assert {result["lr"]["factor"] for result in finals.values()} == {chosen["circuit"]}
    assert f"{chosen['lr']:.3g} (circuit × {chosen['circuit']:.3g})" in first.out

    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("outputs/runs/*/*")}
    again = qkablate(*words)
    assert again.code == 0
    assert again.out == first.out
    assert {path: path.stat().st_mtime_ns for path in tmp_path.glob("outputs/runs/*/*")} == before

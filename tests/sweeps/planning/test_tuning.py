"""The search for learning rates: the runs that follow from given results."""

import dataclasses
import json
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qkablate.cli.hydra.grid import open_composer
from qkablate.errors import UserError
from qkablate.sweeps.planning.expand import Grid, expand_grid
from qkablate.sweeps.planning.tuning import EXTENSIONS, lr_ladder, next_runs

MIDDLE = 1e-3
SEEDS = (1000, 1001)
ARMS = ("standard-d16-h2", "no_q-d16-h2")


@pytest.fixture(scope="module")
def expand(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tuning")
    (folder / "corpus.txt").write_text("the cat sat on the mat\n" * 400, encoding="utf-8")
    words = ["model.layers=1", "model.d_model=16", "model.heads=2", "model.context=16", "data=text"]
    words += [f"data.path={folder / 'corpus.txt'}", f"data.cache={folder / 'cache'}", "threads=1"]
    words += ["variant=standard,no_q", "sweep.tune=true"]

    def run(*more):
        with open_composer() as composer:
            asked = composer.request([*words, *more])
            grid = Grid(asked.settings.sweep, asked.controls, asked.choices)
            return expand_grid(grid, composer.config, [])

    return run


@pytest.fixture(scope="module")
def manifest(expand):
    """Return a plan of two arms with five rates and two tuning seeds, then three final seeds."""
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
    return round(math.log2(run.changes["optim.lr"] / MIDDLE))


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


def search_rates(manifest, results):
    """Return the search of each arm, and the final runs."""
    runs, searches = find_next_runs(manifest, results)
    assert [search.arm for search in searches] == [*manifest.arms]
    return {search.arm: search for search in searches}, [run for run in runs if not run.tuning]


def test_first_runs_are_the_ladder(manifest):
    assert {(run.arm, octave(run), run.changes["seed"]) for run in manifest.runs} == {
        (arm, number, seed) for arm in ARMS for number in range(-2, 3) for seed in SEEDS
    }
    assert len(manifest.runs) == 20
    assert all(run.tuning for run in manifest.runs)
    assert [run["seed"] for run in manifest.finals] == [0, 1, 2]


@pytest.mark.parametrize("best", [-1, 0, 1])
def test_best_rate_inside_the_ladder_is_chosen(manifest, best):
    known, results = trained(manifest, losses_around(best))
    searches, finals = search_rates(manifest, results)
    for search in searches.values():
        assert (search.state, search.rate) == ("chosen", MIDDLE * 2**best)
        assert len(search.losses) == 5
        assert all(len(losses) == 2 for losses in search.losses.values())
    assert len(known) == len(manifest.runs) + len(finals)


@pytest.mark.parametrize("best", [-7, -3, -2, 2, 3, 4, 7])
def test_best_rate_on_an_edge_extends_the_ladder(manifest, best):
    known, results = trained(manifest, losses_around(best))
    searches, _ = search_rates(manifest, results)
    beyond = [run for run in known.values() if run.tuning and run not in manifest.runs]
    step = 1 if best > 0 else -1
    octaves = range(3 * step, best + 2 * step, step)
    assert sorted((run.arm, octave(run), run.changes["seed"]) for run in beyond) == sorted(
        (arm, number, seed) for arm in ARMS for number in octaves for seed in SEEDS
    )
    for search in searches.values():
        assert (search.state, search.rate) == ("chosen", pytest.approx(MIDDLE * 2.0**best))


@pytest.mark.parametrize("side", [-1, 1])
def test_number_of_extensions_is_bounded(manifest, side):
    known, results = trained(manifest, losses_around(100 * side))
    searches, finals = search_rates(manifest, results)
    last = MIDDLE * 2.0 ** (side * (2 + EXTENSIONS))
    for search in searches.values():
        assert (search.state, search.rate) == ("on the edge", pytest.approx(last))
        assert len(search.losses) == 5 + EXTENSIONS
    assert len(finals) == 6
    assert len(known) == 2 * (2 * (5 + EXTENSIONS) + 3)


def test_lower_rates_are_tried_if_all_diverge(manifest):
    known, results = trained(manifest, lambda run: DIVERGED)
    searches, finals = search_rates(manifest, results)
    assert {octave(run) for run in known.values()} == {*range(-2 - EXTENSIONS, 3)}
    assert {(search.state, search.rate) for search in searches.values()} == {("diverged", None)}
    assert not finals


def test_best_rate_below_divergence_is_chosen(manifest):
    world = losses_around(-4)
    known, results = trained(manifest, lambda r: DIVERGED if octave(r) > -4 else world(r))
    searches, _ = search_rates(manifest, results)
    for search in searches.values():
        assert (search.state, search.rate) == ("chosen", pytest.approx(MIDDLE / 16))
    assert min(octave(run) for run in known.values()) == -5


def test_rate_with_one_diverged_seed_is_never_chosen(manifest):
    """Here it is the best one by the other seed."""
    world = losses_around(1)

    def cliff(run):
        return DIVERGED if octave(run) == 1 and run.changes["seed"] == SEEDS[0] else world(run)

    _, results = trained(manifest, cliff)
    searches, finals = search_rates(manifest, results)
    assert {search.rate for search in searches.values()} <= {MIDDLE, 2**2 * MIDDLE}
    assert len(finals) == 6
    for search in searches.values():
        assert sorted(search.losses[2 * MIDDLE], key=str)[-1] is None


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
    assert searches[ARMS[1]].rate is None
    assert {run.arm for run in finals} == {ARMS[0]}
    results[failed.id] = world(failed)  # tried again
    assert {search.state for search in search_rates(manifest, results)[0].values()} == {"chosen"}


def test_search_waits_for_missing_results(manifest):
    _, results = trained(manifest, losses_around(0))
    for missing in manifest.runs:
        searches, finals = search_rates(
            manifest, {id: r for id, r in results.items() if id != missing.id}
        )
        assert (searches[missing.arm].state, searches[missing.arm].rate) == ("tuning", None)
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


@pytest.mark.slow
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
        assert (search.rate, search.state) == (mixed[name].rate, mixed[name].state)
    kept, partly = {}, {}
    for id, result in results.items():
        partly[id] = result
        next_and_searches = next_runs(manifest, lambda run: partly.get(run.id), kept)
        assert next_and_searches == find_next_runs(manifest, partly)


# The ladder.


@pytest.fixture
def config(manifest):
    return next(iter(manifest.arms.values())).config


def test_ladder_has_five_rates_around_the_configs_own(config):
    assert lr_ladder([], config) == [2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3]
    own = dataclasses.replace(config, optim=dataclasses.replace(config.optim, lr=8e-3))
    assert lr_ladder([], own) == [2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2]
    assert lr_ladder([8e-3], config) == lr_ladder([], own)


def test_given_rates_are_used_unchanged(config):
    given = [4e-3, 1e-3, 2e-3, 5e-4, 8e-3, 6e-3]
    assert lr_ladder(given, config) == [5e-4, 1e-3, 2e-3, 4e-3, 6e-3, 8e-3]


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ([1e-3, 2e-3], "2 rates are too few"),
        ([1e-3, 2e-3, 4e-3, 8e-3], "4 rates are too few"),
        ([1e-3, 1e-3, 1e-3, 2e-3, 4e-3], "3 rates are too few"),
        ([1e-3, 2e-3, 4e-3, 8e-3, 2e-2], "at most a factor of two apart"),
        ([1e-3, 1e-2, 1e-1, 1.0, 10.0], "at most a factor of two apart"),
    ],
)
def test_short_or_coarse_ladder_is_rejected(config, given, why):
    with pytest.raises(UserError, match=rf"optim\.lr: .*{why}"):
        lr_ladder(given, config)


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
    points = {point["lr"]: point["by_seed"] for point in search["val_loss"]}
    assert len(points) == len(tried)
    assert sorted(loss for (loss,) in points.values()) == sorted(
        result["loss"]["val"] for result in tried.values()
    )
    assert search["chosen"] == min(points, key=lambda rate: points[rate][0])
    assert f"{search['chosen']:.3g}" in first.out

    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("outputs/runs/*/*")}
    again = qkablate(*words)
    assert again.code == 0
    assert again.out == first.out
    assert {path: path.stat().st_mtime_ns for path in tmp_path.glob("outputs/runs/*/*")} == before

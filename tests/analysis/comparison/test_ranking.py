"""Ranks with their uncertainty, and Pareto fronts of loss and cost."""

import dataclasses
import itertools
import json
import math
import random

import pytest
from scipy import stats

from qkablate.analysis.comparison.gaps import find_families
from qkablate.analysis.comparison.ranking import (
    find_dominated,
    find_fronts,
    find_rankings,
    read_times,
)
from qkablate.analysis.stats import Sample
from qkablate.errors import UserError

ARMS = ("standard", "no_q", "shared_qk", "tied_kv")
FOUR = (f"variant={','.join(ARMS)}", "seed=range(4)")
PAIR = ("variant=standard,no_q", "seed=range(3)")
COSTS = ("params", "training FLOPs", "KV bytes per token")


def variant(run):
    return run.arm.split("-")[0]


def make_loss(rng, means, noise):
    return lambda run: means[variant(run)] + run.changes["seed"] / 10 + rng.gauss(0, noise)


def holm(p_values):
    """By its definition."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    adjusted, most = [0.0] * len(p_values), 0.0
    for place, i in enumerate(order):
        most = max(most, min(1.0, (len(p_values) - place) * p_values[i]))
        adjusted[i] = most
    return adjusted


def ranges(losses):
    """Return the best and the worst rank of each arm, by tests of all pairs."""
    pairs = [*itertools.combinations(losses, 2)]
    adjusted = holm([stats.ttest_rel(losses[a], losses[b]).pvalue for a, b in pairs])
    found = {name: [1, len(losses)] for name in losses}
    for (a, b), p in zip(pairs, adjusted, strict=True):
        if p < 0.05:
            better, worse = (a, b) if sum(losses[a]) < sum(losses[b]) else (b, a)
            found[worse][0] += 1
            found[better][1] -= 1
    return found


@pytest.mark.slow
def test_ranks_are_those_no_pair_test_excludes(cached_world):
    world, rng = cached_world(*FOUR), random.Random(0)
    seen = set()
    for _ in range(25):
        means = {name: 2 + rng.choice((0, 0.05, 0.2)) for name in ARMS}
        study = world.finish(make_loss(rng, means, rng.choice((0.001, 0.02, 0.1)))).study()
        (ranking,) = find_rankings(find_families(study))
        losses = {entry.name: [*entry.losses.values()] for entry in study.entries}
        expected = ranges(losses)
        assert {row.arm: [row.best_rank, row.worst_rank] for row in ranking.ranks} == expected
        assert [row.mean for row in ranking.ranks] == sorted(row.mean for row in ranking.ranks)
        assert ranking.unranked == []
        seen |= {(first, last) for first, last in expected.values()}
    assert {(1, 4), (1, 1)} <= seen  # nothing known, and all


def test_clearly_different_arms_have_one_rank_each(cached_world):
    means = dict(zip(ARMS, (2.0, 3.0, 1.0, 4.0), strict=True))
    world = cached_world(*FOUR).finish(make_loss(random.Random(1), means, 0.001))
    (ranking,) = find_rankings(find_families(world.study()))
    assert [(row.arm.split("-")[0], row.best_rank, row.worst_rank) for row in ranking.ranks] == [
        ("shared_qk", 1, 1),
        ("standard", 2, 2),
        ("no_q", 3, 3),
        ("tied_kv", 4, 4),
    ]


@pytest.mark.slow
def test_one_seed_gives_no_ranks(cached_world):
    world = cached_world("variant=standard,no_q,shared_qk", "seed=0").finish(
        make_loss(random.Random(1), dict(zip(ARMS, (1, 2, 3, 4), strict=True)), 0.0)
    )
    (ranking,) = find_rankings(find_families(world.study()))
    assert {(row.best_rank, row.worst_rank) for row in ranking.ranks} == {(1, 3)}


def test_arms_that_compute_the_very_same_share_their_ranks(cached_world):
    world = cached_world(*PAIR).finish(lambda run: 2 + run.changes["seed"])
    (ranking,) = find_rankings(find_families(world.study()))
    assert {(row.best_rank, row.worst_rank) for row in ranking.ranks} == {(1, 2)}


@pytest.mark.parametrize(
    "words", [("optim.lr_final=1.0",), ("optim.schedule=wsd", "optim.cooldown=0.0")]
)
def test_runs_in_the_middle_of_their_schedule_are_not_ranked(cached_world, words):
    world = cached_world(*PAIR, *words).finish(lambda run: 2 + run.changes["seed"] / 10)
    study = world.study()
    (ranking,) = find_rankings(find_families(study))
    assert ranking.ranks == []
    assert len(ranking.unranked) == 2
    assert all("is not annealed" in line for line in ranking.unranked)
    assert find_fronts(study, {}) == []


@pytest.mark.slow
def test_annealed_wsd_is_ranked(cached_world):
    world = cached_world(*PAIR, "optim.schedule=wsd").finish(lambda run: 2.0)
    (ranking,) = find_rankings(find_families(world.study()))
    assert len(ranking.ranks) == 2


def test_arms_that_diverge_or_are_not_done_are_named_and_not_ranked(cached_world):
    def loss(run):
        if variant(run) == "no_q":
            return "diverged" if run.changes["seed"] == 2 else 1.0
        if variant(run) == "shared_qk":
            return "failed"
        return 2 + run.changes["seed"] / 10

    study = cached_world(*FOUR).finish(loss).study()
    (ranking,) = find_rankings(find_families(study))
    assert [row.arm.split("-")[0] for row in ranking.ranks] == ["standard", "tied_kv"]
    assert ranking.unranked == [
        "no_q-d16-h2: 1 of 4 runs diverged",
        "shared_qk-d16-h2: no run is done",
    ]
    assert {(row.best_rank, row.worst_rank) for row in ranking.ranks} == {(1, 2)}
    shown = {row.arm for front in find_fronts(study, {}) for row in front.arms}
    assert shown == {"standard-d16-h2", "tied_kv-d16-h2"}
    json.dumps(dataclasses.asdict(ranking), allow_nan=False)


@pytest.mark.slow
def test_each_control_has_a_ranking_of_its_own(cached_world):
    world = cached_world(
        "variant=standard,no_q,shared_qk", "seed=0,1", "control=none,params,flops"
    ).finish(lambda run: 2 + run.changes["seed"] / 10)
    study = world.study()
    entries = {entry.name: entry for entry in study.entries}
    found = {ranking.equal: ranking for ranking in find_rankings(find_families(study))}
    assert [*found] == ["tokens", "params", "flops"]
    for axis, control in (("tokens", "none"), ("params", "params"), ("flops", "flops")):
        names = {row.arm for row in found[axis].ranks}
        assert "standard-d16-h2" in names
        for row in found[axis].ranks:
            arm = entries[row.arm].arm
            assert arm.baseline is None or control in arm.controls
        assert len(names) == 3


def test_lengths_and_sizes_are_ranked_separately(cached_world):
    world = cached_world("variant=standard,no_q", "seed=0,1", "train.steps=12,24").finish(
        lambda run: 2.0
    )
    study = world.study()
    tokens = {entry.name: entry.tokens for entry in study.entries}
    found = find_rankings(find_families(study))
    assert len(found) == 2
    for ranking in found:
        assert len({tokens[row.arm] for row in ranking.ranks}) == 1


def cost_of(arm, cost):
    return {
        "params": arm.params,
        "training FLOPs": arm.train_flops,
        "KV bytes per token": 2 * arm.kv_cache_numbers,
    }[cost]


@pytest.mark.slow
def test_fronts_are_pareto_optimal(cached_world):
    world, rng = cached_world(*FOUR, "control=none,params"), random.Random(2)
    for _ in range(15):
        means = {name: 2 + rng.choice((0, 0.05, 0.1)) for name in ARMS}
        noise = rng.choice((0.0, 0.003, 0.05))
        study = world.finish(make_loss(rng, means, noise)).study()
        found = {front.cost: front for front in find_fronts(study, {})}
        assert {*found} <= {*COSTS}
        dominated = dominated_pairs(study)
        for cost in COSTS:
            points = {
                entry.name: (cost_of(entry.arm, cost), math.fsum(entry.losses.values()) / 4)
                for entry in study.entries
            }
            if len({price for price, _ in points.values()}) == 1:
                assert cost not in found
                continue
            assert {row.arm for row in found[cost].arms} == {*points}
            for row in found[cost].arms:
                price, mean = points[row.arm]
                assert (row.cost, row.mean) == (price, pytest.approx(mean))
                beaters = [
                    other
                    for other, (p, m) in points.items()
                    if p <= price and m <= mean and (p, m) != (price, mean)
                ]
                assert row.is_optimal is (not beaters)
                beaten = any((row.arm, other) in dominated for other in beaters)
                assert row.is_significant is (not beaters or beaten)


def dominated_pairs(study):
    """Return all pairs of arms, the second as cheap by some cost, with a gap above 0 by Holm."""
    p_values = {}
    for cost in COSTS:
        if len({cost_of(entry.arm, cost) for entry in study.entries}) == 1:
            continue
        for entry, other in itertools.permutations(study.entries, 2):
            if cost_of(other.arm, cost) <= cost_of(entry.arm, cost):
                gaps = [entry.losses[key] - other.losses[key] for key in entry.losses]
                if len({*gaps}) == 1:
                    p = 0.0 if gaps[0] > 0 else 1.0 if gaps[0] < 0 else 0.5
                else:
                    p = float(stats.ttest_1samp(gaps, 0, alternative="greater").pvalue)
                p_values[entry.name, other.name] = p
    adjusted = holm([*p_values.values()])
    return {pair for pair, p in zip(p_values, adjusted, strict=True) if p < 0.05}


def test_rates_of_one_arm_compete_on_validation_loss(cached_world):
    """The rate that is best on test by luck is not the one that is shown."""

    def loss(run):
        lucky = run.changes["optim.lr"] == 0.004
        test = 2.0 - 0.1 * lucky + run.changes["seed"] / 10
        return {"loss": {"train": 2.0, "val": 2.0 + 0.1 * lucky, "test": test}}

    world = cached_world(*PAIR, "optim.lr=0.002,0.004").finish(loss)
    study = world.study()
    assert len(study.entries) == 4
    for front in find_fronts(study, {}):
        assert len(front.arms) == 2
        assert all("0.002" in row.arm for row in front.arms)


def test_two_pairs_do_not_make_an_arm_dominated():
    assert find_dominated({("a", "b"): Sample((0.1, 0.1))}) == set()
    assert find_dominated({("a", "b"): Sample((0.1, 0.1, 0.1))}) == {("a", "b")}


def test_fronts_are_among_arms_that_saw_the_same_tokens(cached_world):
    world = cached_world("variant=standard,no_q", "seed=0,1", "train.steps=12,24").finish(
        lambda run: 2.0 if "steps=24" in run.arm else 3.0
    )
    found = find_fronts(world.study(), {})
    assert {front.tokens for front in found} == {384, 768}
    for front in found:
        assert {row.arm.rpartition("=")[2] for row in front.arms} == {
            "12" if front.tokens == 384 else "24"
        }


def row_of(**more):
    """Return a row as `qkablate cost --measure --json` prints it."""
    sizes = {"variant": "standard", "d_model": 16, "heads": 2, "layers": 1, "context": 16}
    return {**sizes, "vocabulary": 256, "params": 1, "step_ms": 2.5, "step_ratio": 1.0, **more}


@pytest.fixture
def times(tmp_path):
    def write(content):
        path = tmp_path / "times.json"
        path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
        return str(path)

    return write


@pytest.mark.slow
def test_times_are_matched_by_variant_and_sizes(cached_world, times):
    world = cached_world("variant=standard,no_q", "seed=0", "model.d_model=16,32")
    study = world.finish(lambda run: 2.0).study()
    rows = [
        row_of(),
        row_of(variant="no_q", step_ms=1.5),
        row_of(variant="no_q", d_model=32, step_ms=3.5),
        row_of(variant="standard", d_model=64, step_ms=99.0),
        row_of(variant="standard", d_model=32, layers=9, step_ms=99.0),
        row_of(variant="mqa", step_ms=99.0),
    ]
    found = read_times(times(rows), study)
    assert found == {"standard-d16-h2": 2.5, "no_q-d16-h2": 1.5, "no_q-d32-h2": 3.5}
    (front,) = [front for front in find_fronts(study, found) if front.cost == "ms per step"]
    assert {row.arm: row.cost for row in front.arms} == found


@pytest.mark.slow
def test_times_of_the_default_mlp_do_not_apply_to_another_width(cached_world, times):
    world = cached_world("variant=standard,no_q", "seed=0", "control=none,params")
    study = world.finish(lambda run: 2.0).study()
    found = read_times(times([row_of(), row_of(variant="no_q", step_ms=1.5)]), study)
    assert found == {"standard-d16-h2": 2.5, "no_q-d16-h2": 1.5}
    ratio = study.arms["no_q-d16-h2-params"].config.model.mlp_ratio
    row = row_of(variant="no_q", **{"model.mlp_ratio": ratio}, step_ms=4.0)
    assert read_times(times([row]), study) == {"no_q-d16-h2-params": 4.0}


BAD = {
    "empty": b"",
    "half": b'[{"variant": "standard", "step_ms": 2',
    "binary": bytes(range(256)),
    "deep": b"[" * 20_000,
    "a map": {"variant": "standard", "step_ms": 2.5},
    "null": None,
    "no rows": [],
    "rows of nothing": [None],
    "rows of words": ["standard"],
    "rows of numbers": [1],
    "no time": [{"variant": "standard"}],
    "time null": [row_of(step_ms=None)],
    "time a word": [row_of(step_ms="fast")],
    "time a list": [row_of(step_ms=[2.5])],
    "time NaN": [row_of(step_ms=math.nan)],
    "time infinite": [row_of(step_ms=math.inf)],
    "time no float": [row_of(step_ms=10**400)],
    "time negative": [row_of(step_ms=-1.0)],
    "no arm": [row_of(variant="mqa")],
    "no size": [row_of(d_model=8)],
    "lists as sizes": [row_of(d_model=[16])],
    "nothing but a time": [{"step_ms": 2.5}],
}


@pytest.mark.parametrize("content", BAD.values(), ids=BAD.keys())
def test_file_without_times_is_a_one_line_error(cached_world, times, content):
    study = cached_world(*PAIR).study()
    with pytest.raises(UserError, match="--times") as told:
        read_times(times(content), study)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize("path", ["nowhere.json", ".", "a\0b", "", "~nobody-has-this-name/t.json"])
def test_unreadable_times_path_is_a_one_line_error(cached_world, path):
    study = cached_world(*PAIR).study()
    with pytest.raises(UserError, match="--times"):
        read_times(path, study)

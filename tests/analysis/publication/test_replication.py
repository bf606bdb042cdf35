"""Agreement of published numbers with others: what is not known agrees with nothing."""

import math
import re
from types import SimpleNamespace

import numpy as np
import pytest

from qkablate.analysis.claims.samples import Exact, Median
from qkablate.analysis.publication.replication import (
    check_places,
    check_trainable,
    compare_parts,
    compare_run,
    sample_runs,
)
from qkablate.analysis.stats import Sample
from qkablate.compose.configs import make_config, open_hydra
from qkablate.config import Config, DataConfig, InitFromConfig, config_names
from qkablate.errors import UserError
from tests.analysis.publication.made_up import make_archive, make_run

HERE = {"versions": {"torch": "2"}, "machine": {"cpu": "fast"}}


def judge(*samples, diverged=False):
    parts = [
        SimpleNamespace(name=f"p{i}", sample=sample, open_above=diverged, open_below=False)
        for i, sample in enumerate(samples)
    ]
    return SimpleNamespace(parts=[SimpleNamespace(part=part) for part in parts])


def agree(first, second):
    return [part.agrees for part in compare_parts(first, second)]


def test_two_draws_of_one_truth_agree_in_95_percent():
    draw = np.random.default_rng(0).normal
    count = 400
    found = [
        agree(judge(Sample(tuple(draw(0, 1, 8)))), judge(Sample(tuple(draw(0, 2, 12)))))[0]
        for _ in range(count)
    ]
    assert abs(sum(found) / count - 0.95) < 0.035


def test_other_truth_disagrees():
    first, second = Sample((0.0, 0.1, -0.1, 0.05)), Sample((1.0, 1.1, 0.9, 1.05))
    assert agree(judge(first), judge(second)) == [False]
    (part,) = compare_parts(judge(first), judge(second))
    assert part.difference == pytest.approx(1.0)
    wide = Sample(second.values, 4.0)  # its tuning has an error larger than the difference
    assert agree(judge(first), judge(wide)) == [True]


def test_levels_are_adjusted_for_the_number_of_parts():
    first, second = Sample((0.0, 0.1, -0.1, 0.05)), Sample((0.15, 0.25, 0.05, 0.2))
    (alone,) = compare_parts(judge(first), judge(second))
    among = compare_parts(judge(*[first] * 10), judge(*[second] * 10))[0]
    assert among.interval[0] < alone.interval[0] < alone.interval[1] < among.interval[1]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (Sample(()), Sample((0.0, 0.1, 0.2))),
        (Sample((0.1,)), Sample((0.1,))),
        (Median((0.1,) * 16), Median((0.9, 0.8, 0.7))),  # of which no interval is known
        (Sample((0.0, 0.1, 0.2)), Sample((math.inf, 0.1, 0.2))),
    ],
)
def test_unknown_difference_does_not_agree(first, second):
    assert agree(judge(first), judge(second)) == [False]
    assert agree(judge(second), judge(first)) == [False]


def test_missing_and_diverged_parts_do_not_agree():
    sample = Sample((0.0, 0.1, 0.2))
    assert agree(judge(sample), judge(sample)) == [True]
    assert agree(judge(sample, sample), judge(sample)) == [True, False]
    assert agree(judge(sample), judge(sample, diverged=True)) == [False]


def test_counted_numbers_must_be_equal_and_medians_overlap():
    assert agree(judge(Exact((0.5,))), judge(Exact((0.5,)))) == [True]
    assert agree(judge(Exact((0.5,))), judge(Exact((0.51,)))) == [False]
    endless = Median((math.inf,) * 8)
    assert agree(judge(endless), judge(endless)) == [True]
    low, high = Median(tuple(range(10))), Median(tuple(range(20, 30)))
    assert agree(judge(low, low), judge(low, high)) == [True, False]


def compare(published, own, cpu="fast", threads=1, others=(), device="cpu", resumed=()):
    run = make_run(published, threads=1) | {"environment": "e"}
    runs = {"a1": run} | {f"b{i}": make_run(loss, seed=i) for i, loss in enumerate(others, 2)}
    archive = make_archive(runs, environments={"e": {**HERE, "resumed": resumed}})
    loss = {"val": own, "test": own + 0.5}
    result = None if own is None else {"status": "done", "loss": loss, "threads": threads}
    return compare_run(archive, "a1", "name", result, "2", cpu, device)


def test_same_machine_must_give_every_bit():
    assert compare(2.0, 2.0).agrees
    assert compare(2.0, 2.0).difference == 0
    run = compare(2.0, np.nextafter(2.0, 3))
    assert not run.agrees
    assert run.reasons == ()


def test_other_machine_may_differ_as_seeds_do():
    run = compare(2.0, 2.25, cpu="other", others=(2.1, 2.2))
    assert run.agrees
    assert run.reasons == ("cpu fast there, other here",)
    assert not compare(2.0, 3.0, cpu="other", others=(2.1, 2.2)).agrees
    alone = compare(2.0, 2.0, cpu="other")  # a single run has no spread
    assert (alone.difference, alone.tolerance, alone.agrees) == (0, None, True)
    assert compare(2.0, 2.01, cpu="other").agrees is None
    resumed = compare(2.0, 2.25, others=(2.1, 2.2), resumed=[{"machine": {"cpu": "other"}}])
    assert resumed.reasons == ("cpu fast, then other there, fast here",)
    assert compare(2.0, 2.0, threads=2).reasons == ("threads 1 there, 2 here",)


def test_gpu_need_not_give_every_bit():
    run = compare(2.0, 2.25, others=(2.1, 2.2), device="cuda")
    assert run.agrees
    assert run.reasons == ("the order of sums on cuda is not fixed",)


def test_run_that_was_not_trained_or_failed_does_not_agree():
    assert not compare_run(make_archive({"a1": make_run(2.0)}), "a1", "n", None, "2", "f").agrees
    failed = {"status": "failed", "loss": {"val": 2.0, "test": 2.5}}
    assert not compare_run(make_archive({"a1": make_run(2.0)}), "a1", "n", failed, "2", "f").agrees


def test_sample_of_runs_is_of_those_that_are_done():
    runs = {f"{i:x}": make_run(2.0, seed=i) for i in range(9)}
    runs["bad"] = make_run(2.0, status="diverged")
    archive = make_archive(runs)
    assert sample_runs(archive, 20) == sample_runs(make_archive(dict(reversed(runs.items()))), 20)
    assert {*sample_runs(archive, 20)} == runs.keys() - {"bad"}
    assert len(sample_runs(archive, 2)) == 2


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"source": "text", "path": "/home/them/book.txt"}, "data.path"),
        ({"source": "pairs", "path": "pairs.tsv"}, "data.path"),
        ({"source": "hub", "name": "json", "files": "/home/them/*.json"}, "data.files"),
        ({"source": "hub", "name": "text", "files": "https://example.org/x"}, "data.files"),
        ({"source": "hub", "name": "~/data"}, "data.name"),
        ({"source": "hub", "name": "./data"}, "data.name"),
        ({"source": "hub", "name": "a/../b"}, "data.name"),
        ({"source": "hub", "name": "a/b/c"}, "data.name"),
        ({"source": "hub", "name": "a/b", "files": "/etc/passwd"}, "data.files"),
        ({"source": "hub", "name": "a/b", "files": "../../etc/passwd"}, "data.files"),
        ({"source": "hub", "name": "a/b", "files": "zip://x::/etc/x"}, "data.files"),
        ({"source": "hub", "name": "a/b", "files": "file:/etc/hostname"}, "data.files"),
    ],
    ids=str,
)
def test_files_of_others_are_not_read(settings, key):
    config = Config(data=DataConfig(**settings))
    value = settings[key.removeprefix("data.")]
    with pytest.raises(
        UserError, match=f"an arm reads {re.escape(f'{key}={value}')}, which its author"
    ):
        check_places(config, {}, "an arm")
    with pytest.raises(UserError, match="give your own copy"):
        check_places(config, {key: "other"}, "an arm")
    check_places(config, {key: value}, "an arm")


def test_folder_of_this_machine_is_no_data_set_of_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = Config(data=DataConfig(source="hub", name="a/b"))
    check_places(config, {}, "an arm")
    (tmp_path / "a" / "b").mkdir(parents=True)
    with pytest.raises(UserError, match=r"data\.name=a/b"):
        check_places(config, {}, "an arm")


@pytest.mark.parametrize("name", sorted({*config_names("data")} - {"text", "pairs", "hub"}))
def test_data_that_the_tool_names_are_read(name):
    with open_hydra():
        config = make_config({"data": name}, resolved=False)
    check_places(config, {}, "an arm")


def test_data_of_the_hub_and_tasks_are_read():
    for settings in ({}, {"source": "hub", "name": "a/b", "files": "x/*.json"}, {"source": "copy"}):
        check_places(Config(data=DataConfig(**settings)), {}, "an arm")


def test_code_of_others_is_not_run():
    config = SimpleNamespace(
        variant=SimpleNamespace(file="x.py"), init_from=SimpleNamespace(run=None)
    )
    arm = SimpleNamespace(name="mine", config=config, facts={}, parents={})
    with pytest.raises(UserError, match="mine is of a variant file"):
        check_trainable(arm)
    config.variant.file = None
    check_trainable(arm)
    arm.parents["7"] = InitFromConfig(run="/home/victim/run")
    with pytest.raises(UserError, match="mine begins from another run"):
        check_trainable(arm)
    arm.parents.clear()
    arm.facts["circuits_from_outside"] = {"qk": "ab"}
    with pytest.raises(UserError, match="mine is of a variant file"):
        check_trainable(arm)

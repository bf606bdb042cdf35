"""Summaries of sweeps in every state: valid JSON, aligned tables, no control characters."""

import dataclasses
import json
import math
import random
import unicodedata

import pytest

from qkablate.analysis.claims.verdict import Part
from qkablate.analysis.comparison.summary import describe_study
from qkablate.cli.results import print_tables
from qkablate.report.text.table import Table, format_markdown
from qkablate.report.text.tables import make_tables
from qkablate.table import print_json
from tests.analysis.references import to_json

THREE = "variant=standard,no_q,shared_qk"


def loss_of(run):
    """Noise that is the run's own, and in tuning runs a bowl."""
    noise = random.Random(f"{run.arm} {run.changes}").gauss(0, 0.01)
    rate = 0.1 * math.log(run.changes["optim.lr"] / 1e-3) ** 2
    return 2.0 + run.changes["seed"] % 10 / 7 + rate + noise + 0.1 * run.arm.startswith("no_q")


def half(run):
    return loss_of(run) if (len(run.arm) + run.changes["seed"]) % 2 else None


def one_of_each(run):
    return (loss_of(run), "failed", "diverged", None)[run.changes["seed"] % 4]


def no_arm(run):
    return "failed" if run.arm.startswith("no_q") else loss_of(run)


def late(run):
    """Tuned, and the final runs still to come."""
    return loss_of(run) if run.tuning else None


SWEEPS = {
    "complete": ((THREE, "seed=range(4)"), loss_of),
    "alike": ((THREE, "seed=range(4)"), lambda run: 2.0),
    "empty": ((THREE, "seed=range(4)"), lambda run: None),
    "half": ((THREE, "seed=range(4)"), half),
    "one of each": ((THREE, "seed=range(4)"), one_of_each),
    "failed": ((THREE, "seed=range(2)"), lambda run: "failed"),
    "diverged": ((THREE, "seed=range(2)"), lambda run: "diverged"),
    "one arm failed": ((THREE, "seed=range(2)"), no_arm),
    "one seed": ((THREE, "seed=7"), loss_of),
    "two seeds": ((THREE, "seed=3,4"), loss_of),
    "one arm": (("variant=standard", "seed=range(2)"), loss_of),
    "no baseline": ((THREE, "seed=range(2)", "sweep.baseline=null"), loss_of),
    "no baseline, empty": ((THREE, "seed=range(2)", "sweep.baseline=null"), lambda run: None),
    "controls": ((THREE, "seed=range(2)", "control=none,params,flops"), loss_of),
    "rates": ((THREE, "seed=range(2)", "optim.lr=5e-4,1e-3,2e-3"), loss_of),
    "rates, half": ((THREE, "seed=range(2)", "optim.lr=5e-4,1e-3,2e-3"), half),
    "lengths": ((THREE, "seed=range(2)", "train.steps=12,24,48"), loss_of),
    "lengths, half": ((THREE, "seed=range(2)", "train.steps=12,24,48"), half),
    "sizes": ((THREE, "seed=range(2)", "model.d_model=16,32"), loss_of),
    "twin": (("variant=standard,no_q,standard_reassociated", "seed=range(3)"), loss_of),
    "not annealed": ((THREE, "seed=range(2)", "optim.lr_final=1.0"), loss_of),
    "tuned": ((THREE, "seed=range(2)", "sweep.tune=true"), loss_of),
    "tuned, finals to come": ((THREE, "seed=range(2)", "sweep.tune=true"), late),
    "tuned, empty": ((THREE, "seed=range(2)", "sweep.tune=true"), lambda run: None),
    "tuned, one arm failed": ((THREE, "seed=range(2)", "sweep.tune=true"), no_arm),
    "tuned, one of each": ((THREE, "seed=range(2)", "sweep.tune=true"), one_of_each),
    "tuned, diverged": ((THREE, "seed=range(2)", "sweep.tune=true"), lambda run: "diverged"),
}


@pytest.fixture(params=SWEEPS.values(), ids=SWEEPS.keys())
def sweep(request, cached_world):
    words, loss = request.param
    world = cached_world(*words).finish(loss)
    for run in world.runs():
        if world.run_folder(run).exists() and not run.tuning:
            world.curve(run, {step: 4 - step / 10 + run.changes["seed"] for step in (2, 6, 12)})
    return world


def to_plain(value):
    """Return the value with lists in place of tuples, as JSON has them."""
    if isinstance(value, dict):
        return {key: to_plain(inner) for key, inner in value.items()}
    return [*map(to_plain, value)] if isinstance(value, list | tuple) else value


@pytest.mark.exhaustive
def test_every_sweep_is_summarized_without_nan(sweep):
    study = sweep.study()
    found = describe_study(study)
    assert json.loads(to_json(found)) == to_plain(dataclasses.asdict(found))
    finals = {run.name: run for run in sweep.runs() if not run.tuning}
    shown = [one.run for arm in found.arms for one in arm.runs]
    assert sorted(shown) == sorted(finals)
    assert {arm.arm.partition(" lr ")[0] for arm in found.arms} == {*sweep.manifest.arms}
    for arm in found.arms:
        losses = [one.test_loss for one in arm.runs if one.test_loss is not None]
        assert arm.n == len(losses)
        assert arm.mean == (pytest.approx(sum(losses) / len(losses)) if losses else None)
        for one in arm.runs:
            assert (one.test_loss is not None) == (one.status == "done")
            assert finals[one.run].changes["seed"] == one.seeds["seed"]
    assert found.complete == study.is_complete
    for one in found.gaps:
        assert len(one.pairs) == one.n
        assert one.p is None if one.n < 2 else 0 <= one.p <= one.p_holm <= 1
        assert (one.interval is None) == (one.n < 2)
        assert (one.detectable is None) == (one.n < 2)
    shown_tables = make_tables(found)
    assert shown_tables[0].rows
    for table in shown_tables:
        assert_lines_up(table)


def assert_lines_up(table):
    """Check that all rows have the same number of cells, on the terminal and in Markdown."""
    for row in table.rows:
        assert len(row) == len(table.columns)
        assert all(isinstance(cell, str) for cell in row)
        assert not any(word in cell for word in ("nan", "None") for cell in row)
    lines = [line for line in format_markdown(table).splitlines() if line.startswith("|")]
    assert len(lines) == len(table.rows) + 2
    assert {line.count("|") for line in lines} == {len(table.columns) + 1}


@pytest.mark.parametrize("name", ["complete", "alike", "empty", "one of each", "one seed"])
def test_margin_is_answered_in_every_condition(cached_world, name):
    words, loss = SWEEPS[name]
    found = describe_study(cached_world(*words).finish(loss).study(), {}, 0.01)
    to_json(found)
    for one in found.gaps:
        assert one.margin.nats == 0.01
        assert (one.margin.p_noninferior is None) == (one.n < 2)
        assert (one.margin.p_equivalent is None) == (one.n < 2)
    for table in make_tables(found):
        assert_lines_up(table)


def test_margin_is_tested_once_per_gap(cached_world, monkeypatch):
    world = cached_world(THREE, "seed=range(3)", "model.d_model=16,32,48")
    study, calls, p_below = world.finish(loss_of).study(), [], Part.p_below
    monkeypatch.setattr(
        Part, "p_below", lambda part, bound: (calls.append(part), p_below(part, bound))[1]
    )
    gaps = describe_study(study, margin=0.01).gaps
    assert len(gaps) == 6
    assert len(calls) == 2 * len(gaps)  # not worse, and equivalent


def test_first_table_has_every_arm_and_loss(cached_world):
    world = cached_world(THREE, "seed=range(4)").finish(one_of_each)
    first = make_tables(describe_study(world.study()))[0]
    assert [row[0] for row in first.rows] == [*world.manifest.arms]
    for row in first.rows:
        assert row[3] == "1/4"
        assert row[-1].split(" ", 1)[1] == "(failed) (diverged) (waiting)"


def test_gap_table_shows_each_decision(cached_world):
    loss = {"standard": 2.0, "no_q": 2.5, "shared_qk": 1.5}

    def far(run):
        noise = random.Random(run.id).gauss(0, 1e-3)
        return loss[run.arm.split("-")[0]] + run.changes["seed"] / 7 + noise

    world = cached_world(THREE, "seed=range(4)").finish(far)
    _, gaps, ranks, *_ = make_tables(describe_study(world.study()))
    assert [(row[0], row[3]) for row in gaps.rows] == [
        ("no_q-d16-h2", "worse"),
        ("shared_qk-d16-h2", "better"),
    ]
    assert gaps.notes[:2] == [
        "worse at this rate (not tuned): no_q-d16-h2",
        "better at this rate (not tuned): shared_qk-d16-h2",
    ]
    assert [row[1] for row in ranks.rows] == ["1", "2", "3"]
    world.write(next(run for run in world.runs() if run.arm.startswith("no_q")), "diverged")
    assert make_tables(describe_study(world.study()))[1].rows[0][3] == "arm diverged"


@pytest.mark.parametrize(("gap", "says"), [(0.0, "equivalent"), (-0.03, "not worse")])
def test_margin_adds_equivalence_to_the_table(cached_world, gap, says):
    def close(run):
        seed = run.changes["seed"]
        # The gaps alternate: far too noisy to be found, and below the margin of 1.
        sign = (-1) ** seed * (0.3 if gap == 0 else 1.3) + (-0.9 if gap else 0)
        return 2 + seed / 7 + (sign if run.arm.startswith("no_q") else 0)

    world = cached_world("variant=standard,no_q", "seed=range(10)", "sweep.floor=true").finish(
        close
    )
    found = describe_study(world.study(), {}, 1.0)
    assert make_tables(found)[1].rows[0][3] == says
    margin = found.gaps[0].margin
    assert margin.p_noninferior < 0.05
    assert (margin.p_equivalent < 0.05) == (says == "equivalent")
    assert margin.seeds_if_zero >= 2
    assert len(make_tables(found)[1].columns) == 15


def test_one_seed_is_a_number_in_the_table(cached_world):
    world = cached_world(THREE, "seed=7").finish(loss_of)
    table = make_tables(describe_study(world.study()))[1]
    rows = table.rows
    assert sum("3 are needed" in note for note in table.notes) == 1  # the audit's
    assert {(row[2], row[3], row[4], row[5], row[8]) for row in rows} == {
        ("–", "too few pairs", "–", "1", "–")
    }


def test_left_out_arms_are_listed(cached_world):
    world = cached_world("variant=standard,mqa,gqa", "variant.groups=1,2", "seed=0")
    left = describe_study(world.study()).left_out
    assert {one.arm for one in left} == {one.arm for one in world.manifest.left_out}
    assert all(one.reason for one in left)


def test_times_make_a_front_of_their_own(cached_world):
    world = cached_world("variant=standard,no_q", "seed=range(2)").finish(loss_of)
    times = {"standard-d16-h2": 2.0, "no_q-d16-h2": 1.0}
    found = describe_study(world.study(), times)
    assert [front.cost for front in found.fronts][-1] == "ms per step"
    assert any("1 ms per step" in row[1] for row in make_tables(found)[-1].rows)


EVIL = "\x1b[31m\x9b2J\x07\u202e"


def evil_world(world):
    """Every word of these folders steers a terminal."""
    first, second, *_ = [run for run in world.runs() if run.arm.startswith("no_q")]
    world.write(second, {"status": "failed", "error": EVIL, "loss": {"val": None}})
    words = {"precision": EVIL, "device": EVIL, "kernel": EVIL, "version": EVIL}
    world.write(first, {**words, "init": {"match": EVIL}})
    environment = {"versions": {"torch": EVIL}, "machine": {"cpu": EVIL}, "code": {"commit": EVIL}}
    (world.run_folder(first) / "environment.json").write_text(json.dumps(environment))
    return world.study()


def is_quiet(text):
    return not any(c != "\n" and unicodedata.category(c) in ("Cc", "Cf") for c in text)


def test_control_characters_do_not_reach_the_terminal(cached_world, capsys):
    world = cached_world("variant=standard,no_q", "seed=range(3)").finish(loss_of)
    found = describe_study(evil_world(world))
    reasons = [one.reason for arm in found.arms for one in arm.runs]
    assert EVIL in reasons
    print_tables(make_tables(found))
    shown = capsys.readouterr().out
    assert "mixed" in shown
    assert is_quiet(shown)


@pytest.mark.parametrize("form", ["table", "md", "csv", "json"])
def test_no_format_contains_control_characters(cached_world, qkablate, form):
    world = cached_world("variant=standard,no_q", "seed=range(3)").finish(loss_of)
    evil_world(world)
    done = qkablate("results", str(world.folder), "--format", form)
    assert done.code == 1
    assert is_quiet(done.out)


def test_cell_with_a_bar_stays_one_cell():
    table = Table("a title", ["a", "b"], [["x|y", "1"], ["| |", "2"]], ["a note"])
    assert_lines_up(table)


def test_printed_json_equals_the_summary(cached_world, capsys):
    world = cached_world("variant=standard,no_q", "seed=range(3)").finish(loss_of)
    found = describe_study(world.study())
    print_json(json.loads(to_json(found)))
    assert json.loads(capsys.readouterr().out) == json.loads(to_json(found))

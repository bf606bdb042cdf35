"""The tables of a report: every arm and every run has its row, and says what it is."""

import json
import re
import shlex

import pytest

from qkablate.analysis.study.standalone_runs import read_standalone_runs
from qkablate.report import rows
from qkablate.report.charts.curves import MAX_RUNS
from qkablate.report.section import Section

THREE = ("variant=standard,no_q,shared_qk", "seed=range(6)")
ONE = ("variant=standard,no_q", "seed=range(2)")
TUNED = ("variant=standard,no_q", "seed=range(2)", "sweep.tune=true")
ENDS = {("no_q", 1): "diverged", ("no_q", 4): "failed", ("shared_qk", 2): None}


@pytest.fixture(scope="module")
def mixed(make_world, loss_of, section_of):
    """One run diverged, one failed, one is still to come."""

    def end(run):
        return ENDS.get((run.arm.split("-")[0], run.changes["seed"]), loss_of(run))

    return section_of(make_world(*THREE).finish(end))


def verdicts(section):
    """Each row by its column."""
    return [dict(zip(rows.COLUMNS, row, strict=True)) for row in rows.make_verdict_rows(section)]


def texts(section, column):
    return {row["arm"].text: row[column].text for row in verdicts(section)}


# Verdicts


def test_every_arm_has_a_row_and_baselines_are_marked(section):
    found = verdicts(section)
    assert [row["arm"].text for row in found] == [entry.name for entry in section.study.entries]
    assert len(found) == 6
    gaps = {one.arm: one for one in section.summary.gaps}
    for row in found:
        name, verdict = row["arm"].text, row["verdict"].text
        if name.startswith("standard"):
            assert verdict == "baseline"
            assert row["gap, nats [95 %]"].text == row["p (Holm)"].text == "–"
        else:
            assert verdict.split(" ")[0] == gaps[name].decision.split(" ")[0]
            assert row["pairs n"].text == "6"


def test_arm_without_baseline_is_not_compared(cached_world, loss_of, section_of):
    words = ("variant=no_q,shared_qk", "seed=range(2)", "sweep.baseline=null")
    section = section_of(cached_world(*words).finish(loss_of))
    assert {*texts(section, "verdict").values()} == {"compared with none"}
    assert all("[" in text for text in texts(section, "test loss, nats [95 %]").values())


def test_done_runs_are_counted_with_the_status_of_the_others(mixed):
    assert texts(mixed, "runs done") == {
        "standard-d16-h2": "6/6",
        "no_q-d16-h2": "4/6 (1 diverged, 1 failed)",
        "shared_qk-d16-h2": "5/6 (1 waiting)",
    }
    assert texts(mixed, "pairs n")["no_q-d16-h2"] == "4"
    assert "∞" in texts(mixed, "gap, nats [95 %]")["no_q-d16-h2"]


def test_arm_with_an_audit_warning_is_marked(mixed):
    for name, verdict in texts(mixed, "verdict").items():
        assert verdict.endswith((" !", " ✗")) == (name != "standard-d16-h2")


def first_number(text):
    return float(re.search(r"[+-]?[\d.,]+", text)[0].replace(",", ""))


@pytest.mark.parametrize("name", ["section", "mixed"])
def test_rows_are_sorted_by_value(request, name):
    for row in verdicts(request.getfixturevalue(name)):
        for column, cell in row.items():
            if cell.text == "–":
                assert cell.key is None, column
            elif column == "verdict":
                assert cell.text.removesuffix(" !").removesuffix(" ✗") == cell.key
            elif isinstance(cell.key, str):
                assert cell.text == cell.key, column
            elif column == "FLOPs per token":
                assert float(cell.text.split(" ")[0]) * 1000 == pytest.approx(cell.key, rel=0.01)
            elif cell.text.startswith("<"):
                assert cell.key < 1e-4
            else:
                near = 10.0 ** -len(cell.text.split(" ")[0].partition(".")[2])
                assert first_number(cell.text) == pytest.approx(cell.key, abs=near), column


def test_sizes_are_relative_to_the_baseline(section):
    arms = {entry.name: entry.arm for entry in section.study.entries}
    for name, text in texts(section, "parameters").items():
        more = 100 * (arms[name].params / arms[f"standard{name[name.index('-') :]}"].params - 1)
        assert text.startswith(f"{arms[name].params:,}")
        assert (f"({more:+.1f} %)" in text) == (arms[name].variant != "standard")
    for name, text in texts(section, "KV bytes per token").items():
        assert text == f"{2 * arms[name].kv_cache_numbers:,}"


def test_rows_exist_before_the_first_result(cached_world, section_of):
    section = section_of(cached_world(*ONE))
    assert {*texts(section, "runs done").values()} == {"0/2 (2 waiting)"}
    assert {*texts(section, "gap, nats [95 %]").values()} == {"–"}
    assert {*texts(section, "test loss, nats [95 %]").values()} == {"–"}
    assert texts(section, "verdict")["no_q-d16-h2"].startswith("no pairs")


# Audit


def test_audit_lists_the_worst_first(mixed, section):
    order = ["invalid", "warning", "note", "ok"]
    for found in (mixed, section):
        audited = rows.make_audit_rows(found)
        states = [order.index(row[0].split(" ")[1]) for row in audited]
        assert states == sorted(states)
        assert all(len(row) == 4 for row in audited)
    assert any(
        "1 diverged" in row[2] and row[0] == "! warning" for row in rows.make_audit_rows(mixed)
    )


def test_each_audit_result_is_listed_once_with_its_arms(section):
    audited = rows.make_audit_rows(section)
    asked = {check.name for one in section.summary.gaps for check in one.audit}
    assert {row[1] for row in audited} == asked
    assert len(asked) == 16
    assert len({tuple(row) for row in audited}) == len(audited)
    matched = [row for row in audited if row[1] == "matched"]
    assert sorted(row[3] for row in matched) == [
        *("no_q-d16-h2, shared_qk-d16-h2", "no_q-d32-h2, shared_qk-d32-h2")
    ]


def test_invalid_checks_are_listed_first(cached_world, loss_of, section_of):
    world = cached_world(*ONE).finish(loss_of)
    run = next(run for run in world.runs() if run.arm.startswith("no_q"))
    (world.run_folder(run) / "result.json").write_text("{")
    first = rows.make_audit_rows(section_of(world))[0]
    assert first[:2] == ["✗ invalid", "runs"]
    assert "damaged" in first[2]


# Runs


def test_every_run_has_a_row_with_its_command(mixed):
    head, found = rows.make_run_rows(mixed)
    assert head == rows.RUN_COLUMNS
    assert len(found) == 18
    by_run = {row[0]: row for row in found}
    for record in mixed.study.records:
        row = dict(zip(head, by_run[record.folder.name], strict=True))
        assert row["status"].startswith(record.status)
        assert row["seed"] == str(record.run.changes["seed"])
        assert float(row["lr"].split(" (circuit")[0]) == record.run.changes["optim.lr"]
        losses = (row["validation loss"], row["test loss"])
        if record.status == "done":
            assert losses == (f"{record.val:.4f}", f"{record.test:.4f}")
        else:
            assert losses == ("–", "–")
        words = mixed.study.overrides_of(record.run)
        assert shlex.split(row["command"]) == ["qkablate", "train", *words]
    statuses = [row[1] for row in found if not row[1].startswith("done")]
    assert sorted(statuses) == [
        "diverged: not finite at step 3",
        "failed: ValueError: no",
        "waiting",
    ]


def test_tuning_runs_are_marked(cached_world, loss_of, section_of):
    section = section_of(cached_world(*TUNED).finish(loss_of))
    _, found = rows.make_run_rows(section)
    tuning = [row for row in found if row[0].endswith(" (tuning)")]
    assert len(found) == len(tuning) + 4
    assert len(tuning) == sum(len(runs) for runs in section.study.tuning.values()) > 30
    assert all(row[5] == "–" and row[4] != "–" for row in tuning)
    assert all("train.evaluate_test=false" in row[-1] for row in tuning)
    assert not any("evaluate_test" in row[-1] for row in found if row not in tuning)


def test_many_runs_are_listed_by_arm(mixed, monkeypatch):
    assert MAX_RUNS == 200
    monkeypatch.setattr(rows, "MAX_RUNS", 17)
    head, found = rows.make_run_rows(mixed)
    assert head == rows.ARM_COLUMNS
    told = {row[0]: dict(zip(head, row, strict=True)) for row in found}
    assert [row["done"] for row in told.values()] == ["6/6", "4/6", "5/6"]
    for entry in mixed.study.entries:
        row = told[entry.name]
        every = row["test loss of every seed"].split(" · ")
        assert len(every) == 6
        for record, text in zip(entry.records.values(), every, strict=True):
            assert text.startswith(f"{record.seed_label} ")
            if record.status == "done":
                assert text == f"{record.seed_label} {record.test:.4f}"
            else:
                assert f"({record.status}" in text
        first = next(iter(entry.records.values()))
        words = mixed.study.overrides_of(first.run)
        assert shlex.split(row["command"]) == ["qkablate", "train", *words]
    monkeypatch.setattr(rows, "MAX_RUNS", 18)
    assert rows.make_run_rows(mixed)[0] == rows.RUN_COLUMNS


def test_many_tuning_runs_are_listed_by_arm(cached_world, loss_of, section_of, monkeypatch):
    monkeypatch.setattr(rows, "MAX_RUNS", 10)
    section = section_of(
        cached_world(*TUNED, "sweep.tuning_seeds=[10,11,12,13,14,15]").finish(loss_of)
    )
    _, found = rows.make_run_rows(section)
    tuning = [row for row in found if row[0].endswith(" (tuning)")]
    for arm in section.study.arms:  # at three rates of its circuit, with two of six seeds
        of_arm = [row for row in tuning if row[0].startswith(arm)]
        seeds = [len(row[3].split(" · ")) for row in of_arm]
        assert [row[2] for row in of_arm] == [f"{count}/{count}" for count in seeds]
        assert {2} < {*seeds} <= {2, 4, 6}  # the others confirm the choice
        assert sum(seeds) == sum(
            len(own) for (name, _), own in section.study.tuning.items() if name == arm
        )


def test_damaged_run_is_named(cached_world, loss_of, section_of):
    world = cached_world(*ONE).finish(loss_of)
    one, other, *_ = world.runs()
    (world.run_folder(one) / "result.json").write_text("[")
    source = (world.run_folder(other) / "result.json").read_text()
    (world.run_folder(other) / "result.json").write_text(source.replace(other.id, "0" * 12))
    found = {row[0]: row[1] for row in rows.make_run_rows(section_of(world))[1]}
    assert found[one.name] == "damaged: its result.json cannot be read"
    assert found[other.name] == "damaged: its result.json is another run's"


def test_unreadable_folder_is_named(cached_world, loss_of, section_of):
    world = cached_world("variant=standard,no_q", "seed=0,1").finish(loss_of)
    folder = world.run_folder(world.runs()[0])
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    folder.symlink_to(folder)  # which nobody can read, root neither
    section = section_of(world)
    (told,) = rows.find_problems(section)
    assert told.startswith(f"{folder.name}: waiting: ")
    assert "symbolic link" in told


def test_problems_are_listed_by_run(cached_world, loss_of, section_of):
    world = cached_world(*THREE)
    assert rows.find_problems(section_of(world)) == []
    world.finish(lambda run: "diverged" if "no_q" in run.arm else loss_of(run))
    assert rows.find_problems(section_of(world)) == []  # a result, and no accident
    runs = world.runs()
    for run in runs[:12]:
        world.write(run, "failed")
    (world.run_folder(runs[12]) / "result.json").write_text("{")
    said = rows.find_problems(section_of(world))
    assert sum("failed: ValueError: no" in line for line in said) >= 10
    assert any("2 more failed" in line for line in said)
    (damaged,) = [line for line in said if "damaged" in line]
    assert runs[12].name in damaged


def test_standalone_runs_have_rows(train, tmp_path):
    folder = train(tmp_path, "train.steps=2", "train.batch_size=2")
    study = read_standalone_runs([folder])
    section = Section(folder.name, f"read from {folder}", study)
    head, found = rows.make_run_rows(section)
    (row,) = found
    result = json.loads((folder / "result.json").read_text())
    assert row[0] == folder.name
    assert row[1] == "done"
    assert row[head.index("test loss")] == f"{result['loss']['test']:.4f}"
    assert texts(section, "runs done") == {"standard-d16-h2": "1/1"}
    params = result["params"]
    assert texts(section, "parameters") == {
        "standard-d16-h2": f"{params['total'] - params['embedding']:,}"
    }


# Surroundings


def test_environment_is_that_of_the_runs(cached_world, loss_of, section_of):
    world = cached_world(*ONE).finish(loss_of)
    first, *_ = world.runs()
    environment = {"versions": {"torch": "2.14.0"}, "machine": {"cpu": "another CPU"}}
    (world.run_folder(first) / "environment.json").write_text(json.dumps(environment))
    found = dict(rows.make_environment_rows(section_of(world)))
    assert found["CPU"].startswith("a CPU (3 runs), another CPU (1 run")
    assert found["torch"].startswith("2.13.0 (3 runs), 2.14.0 (1 run")
    assert (found["device"], found["precision"], found["threads"]) == ("cpu", "fp32", "1")


def test_environment_is_unknown_without_a_result(cached_world, section_of):
    found = rows.make_environment_rows(section_of(cached_world(*ONE)))
    assert {told for _, told in found} == {"unknown: no run has a result"}

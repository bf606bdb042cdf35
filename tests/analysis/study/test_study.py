"""Runs read from their folders: each has its status; damaged and hostile ones do not count."""

import json
import math
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from qkablate.analysis.comparison.gaps import find_families
from qkablate.analysis.comparison.summary import describe_study
from qkablate.analysis.study.loss_curves import START, TRAIN, VAL, read_loss_curves
from qkablate.analysis.study.study import read_facts, read_study, tuning_losses
from qkablate.errors import UserError
from qkablate.runs.lease import hold_lease
from tests.analysis.worlds import describe_checked

PAIR = ("variant=standard,no_q", "seed=range(3)")
DEEP = 20_000  # levels: more than any parser of ours goes down


def loss_of(run):
    return 2.0 + run.changes["seed"] / 10 + (0.3 if run.arm.startswith("no_q") else 0.0)


@pytest.fixture
def pair(cached_world):
    """Two arms, three seeds, everything done; one run of no_q is there to be spoilt."""
    return cached_world(*PAIR).finish(loss_of)


@pytest.fixture
def victim(pair):
    (run,) = [r for r in pair.runs() if r.arm.startswith("no_q") and r.changes["seed"] == 1]
    return run


def record_of(study, run):
    (record,) = [r for r in study.records if r.folder.name == run.name]
    return record


def assert_dropped(world, run, status="damaged"):
    """Check that the run has this status, its pair is gone, and no other number changed."""
    study = world.study()
    record = record_of(study, run)
    assert (record.status, record.loss) == (status, None)
    assert record.reason
    assert not study.is_complete
    assert (study.ended, study.expected) == (5, 6)
    (family,) = find_families(study)
    (found,) = family.gaps
    assert [*found.pairs.values()] == pytest.approx([0.3, 0.3])
    assert len(found.unpaired) == 1
    assert status in found.unpaired[0]
    assert "s1" in found.unpaired[0]
    described = describe_checked(study)
    assert not described.complete
    shown = {one.run: one for arm in described.arms for one in arm.runs}
    assert shown[run.name].status == status
    assert shown[run.name].test_loss is None
    if status == "damaged":
        assert shown[run.name].val_loss is None
        assert [c.state for c in described.gaps[0].audit if c.name == "runs"] == ["invalid"]


def test_every_run_of_the_manifest_is_listed_with_its_status(cached_world):
    world = cached_world("variant=standard,no_q,shared_qk", "seed=range(3)")
    ends = [2.0, "diverged", "failed", None, {}, 2.5, 2.0, 2.0, 2.0]
    for run, end in zip(world.runs(), ends, strict=True):
        world.write(run, end)
    unfinished = world.runs()[4]
    (world.run_folder(unfinished) / "result.json").unlink()
    study = world.study()
    found = {record.folder.name: record.status for record in study.records}
    assert [found[run.name] for run in world.manifest.runs] == [
        *("done", "diverged", "failed", "waiting", "interrupted"),
        *("done", "done", "done", "done"),
    ]
    assert (study.ended, study.expected, study.is_complete) == (6, 9, False)
    described = describe_checked(study)
    told = {one.run: one.status for arm in described.arms for one in arm.runs}
    assert told == found


def test_run_somebody_trains_now_is_running(cached_world):
    world = cached_world(*PAIR)
    first, *_ = world.runs()
    folder = world.run_folder(first)
    folder.mkdir(parents=True)
    with hold_lease(folder):
        study = world.study()
        assert record_of(study, first).status == "running"
        assert not study.is_complete
        describe_checked(study)


def test_sweep_that_has_not_begun_has_all_runs_waiting(cached_world):
    study = cached_world(*PAIR).study()
    assert {record.status for record in study.records} == {"waiting"}
    assert len(study.records) == study.expected == 6
    assert study.ended == 0
    assert not study.is_complete
    assert all(arm.n == 0 and arm.mean is None for arm in describe_checked(study).arms)


def test_diverged_counts_as_ended_and_failed_does_not(cached_world):
    world = cached_world(*PAIR).finish(lambda run: "diverged")
    assert world.study().is_complete
    world.finish(lambda run: "failed")
    assert not world.study().is_complete
    assert world.study().ended == 0
    assert all(record.reason == "ValueError: no" for record in world.study().records)


def whole(world, run):
    return json.loads((world.run_folder(run) / "result.json").read_text())


NO_RESULTS = {
    "empty": b"",
    "a space": b" \n",
    "a list": b"[]",
    "null": b"null",
    "a number": b"2.5",
    "a word": b'"done"',
    "an empty map": b"{}",
    "zeros": b"\0" * 300,
    "binary": bytes(range(256)),
    "utf-16": '{"status": "done"}'.encode("utf-16"),
    "a deep list": b"[" * DEEP,
    "a deep list that ends": b"[" * DEEP + b"]" * DEEP,
    "a deep map": b'{"loss":' * DEEP,
    "two of them": b'{"status": "done"}{"status": "done"}',
    "a number of 5000 digits": b'{"tokens": ' + b"9" * 5000 + b"}",
}


@pytest.mark.parametrize("content", NO_RESULTS.values(), ids=NO_RESULTS.keys())
def test_invalid_result_is_damaged(pair, victim, content):
    (pair.run_folder(victim) / "result.json").write_bytes(content)
    assert_dropped(pair, victim)


def test_result_cut_anywhere_is_damaged(pair, victim):
    path = pair.run_folder(victim) / "result.json"
    content = path.read_bytes()
    for end in range(0, len(content), 23):
        path.write_bytes(content[:end])
        study = pair.study()
        assert record_of(study, victim).status == "damaged"
        assert not study.is_complete
    assert_dropped(pair, victim)


def test_folder_in_place_of_the_result_is_damaged(pair, victim):
    path = pair.run_folder(victim) / "result.json"
    path.unlink()
    path.mkdir()
    assert_dropped(pair, victim)


HUGE = 10**400  # a number as JSON may say it, and no float
BROKEN = {
    "no loss": {"loss": None},
    "loss a word": {"loss": "2.0"},
    "loss a list": {"loss": [2.0, 2.1, 2.0]},
    "loss a number": {"loss": 2.0},
    "loss empty": {"loss": {}},
    "no test": {"loss": {"val": 2.0}},
    "val null": {"loss": {"val": None, "test": 2.0}},
    "val NaN": {"loss": {"val": math.nan, "test": 2.0}},
    "val a word": {"loss": {"val": "2.0", "test": 2.0}},
    "val true": {"loss": {"val": True, "test": 2.0}},
    "test NaN": {"loss": {"val": 2.0, "test": math.nan}},
    "test infinite": {"loss": {"val": 2.0, "test": math.inf}},
    "test below all": {"loss": {"val": 2.0, "test": -math.inf}},
    "test a word": {"loss": {"val": 2.0, "test": "2.0"}},
    "test a list": {"loss": {"val": 2.0, "test": [2.0]}},
    "test true": {"loss": {"val": 2.0, "test": True}},
    "test no float": {"loss": {"val": 2.0, "test": HUGE}},
    "status unknown": {"status": "finished"},
    "status null": {"status": None},
    "status a list": {"status": ["done"]},
    "status a number": {"status": 1},
    "status waiting": {"status": "waiting"},
    "tokens null": {"tokens": None},
    "tokens a word": {"tokens": "many"},
    "tokens no float": {"tokens": HUGE},
    "seconds NaN": {"seconds": math.nan},
    "packed a word": {"packed": "two"},
    "a program of a word": {"program_runs": "two"},
    "diverged nowhere": {"status": "diverged", "diverged_at": None},
    "another run": {"id": "0123456789ab"},
    "nobody's": {"id": None},
    "a list's": {"id": ["0123456789ab"]},
}


@pytest.mark.parametrize("more", BROKEN.values(), ids=BROKEN.keys())
def test_inconsistent_result_is_damaged(pair, victim, more):
    pair.write(victim, more)
    assert_dropped(pair, victim)


def test_result_of_another_run_is_damaged(pair, victim):
    other = next(run for run in pair.runs() if run.arm != victim.arm)
    source, target = (pair.run_folder(run) / "result.json" for run in (other, victim))
    target.write_bytes(source.read_bytes())
    assert_dropped(pair, victim)
    assert "another run" in record_of(pair.study(), victim).reason


def log_distance(run):
    """Return a squared logarithmic distance from the rates 1e-3 and, if it is searched, 1.4."""
    lr, circuit = run.changes["optim.lr"], run.changes.get("variant.lr", 1.4)
    return math.log(lr / 1e-3) ** 2 + math.log(circuit / 1.4) ** 2 / 10


def test_another_runs_result_chooses_no_learning_rate(cached_world):
    """It counts for nothing: neither in the final runs' rate nor among the losses by rate."""

    def loss(run):
        if run.changes["optim.lr"] == 2e-3:
            return {"id": "0123456789ab", "loss": {"train": 1.0, "val": 1.0, "test": None}}
        return 2 + log_distance(run)

    study = cached_world("variant=standard,no_q", "seed=range(2)", "sweep.tune=true").finish(loss)
    study = study.study()
    for (_, rates), records in study.tuning.items():
        expected = {"damaged"} if rates.lr == 2e-3 else {"done"}
        assert {record.status for record in records.values()} == expected
    assert not study.is_complete
    assert all(search.rates is None for search in study.lr_searches.values())
    rows = [row for curve in describe_checked(study).learning_rates for row in curve.val_loss]
    assert not any(1.0 in row.by_seed for row in rows)


VALUES = {
    "null": None,
    "NaN": math.nan,
    "infinite": math.inf,
    "negative": -1,
    "a word": "x",
    "an escape": "\x1b[31m\u202e",
    "a list": [],
    "a list of lists": [[1], {}],
    "a map": {},
    "a map of maps": {"match": {"a": []}, "test": {}, "val": []},
    "a map of NaN": {"match": math.nan, "test": math.nan, "val": math.nan, "train": math.nan},
    "true": True,
    "no float": HUGE,
    "long": "y" * 100_000,
}


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES.keys())
def test_no_result_value_causes_traceback_or_nan(cached_world, value):
    world = cached_world("variant=standard,no_q", "seed=0").finish(loss_of)
    (run, *_) = [r for r in world.runs() if r.arm.startswith("no_q")]
    content = whole(world, run)
    keys = [(key,) for key in content] + [("loss", key) for key in content["loss"]]
    cases = [("done", key) for key in keys]
    cases += [
        (status, key) for status in ("failed", "diverged") for key in keys if key[0] == "loss"
    ]
    for status, (first, *rest) in cases:
        changed = {**content, "status": status, "diverged_at": 3}
        changed[first] = {**content[first], rest[0]: value} if rest else value
        world.write(run, changed)
        record = record_of(study := world.study(), run)
        if record.loss is not None:
            assert (status, record.loss) == ("done", changed["loss"]["test"])
            assert math.isfinite(record.loss)
        describe_checked(study)


ENVIRONMENTS = {
    "empty": b"",
    "half": b'{"versions": {"tor',
    "a list": b"[1]",
    "null": b"null",
    "binary": bytes(range(256)),
    "deep": b"[" * DEEP,
    "lists inside": b'{"versions": [], "machine": [1], "code": [2]}',
    "words inside": b'{"versions": "a", "machine": "b", "code": "c"}',
    "NaN inside": b'{"versions": {"torch": NaN}, "machine": {"cpu": NaN}}',
    "odd code": b'{"code": {"commit": {"a": 1}, "diff": ["x"]}}',
    "code of nothing": b'{"code": {"commit": "", "diff": null}}',
}


@pytest.mark.parametrize("content", ENVIRONMENTS.values(), ids=ENVIRONMENTS.keys())
def test_invalid_environment_keeps_the_losses(pair, victim, content):
    (pair.run_folder(victim) / "environment.json").write_bytes(content)
    study = pair.study()
    assert study.is_complete
    assert record_of(study, victim).loss == pytest.approx(2.4)
    described = describe_checked(study)
    assert described.gaps[0].n == 3
    states = {check.name: check.state for check in described.gaps[0].audit}
    assert states["code"] == "warning"  # of the other run of the pair it is known


def test_missing_environment_is_reported_and_losses_are_kept(pair):
    for run in pair.runs():
        (pair.run_folder(run) / "environment.json").unlink()
    found = describe_checked(pair.study()).gaps[0]
    checks = {check.name: check.message for check in found.audit}
    assert found.n == 3
    assert "0.1.0" in checks["code"]  # what is known instead of a commit
    assert checks["machine"] == "cpu (unknown)"


def test_uncommitted_edits_are_part_of_the_code_version(pair, victim):
    folder = pair.run_folder(victim)
    environment = json.loads((folder / "environment.json").read_text())
    clean = read_facts(folder, {})["code"]
    assert clean == "0123456789"
    seen = {clean}
    for diff in ("- a\n+ b\n", "- a\n+ c\n"):
        environment["code"]["diff"] = diff
        (folder / "environment.json").write_text(json.dumps(environment))
        code = read_facts(folder, {})["code"]
        assert code.startswith(f"{clean}+")
        seen.add(code)
    assert len(seen) == 3


def write_lines(folder: Path, *lines: bytes) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_bytes(b"\n".join(lines))


def test_course_of_a_run_is_its_validation_losses_by_tokens(tmp_path):
    write_lines(
        tmp_path,
        b'{"step": 2, "tokens": 64, "val/loss": 3.5}',
        b'{"step": 1, "tokens": 32, "train/loss": 4.0}',
        b'{"step": 1, "tokens": 32, "val/loss": 4}',
        b'{"step": 2, "tokens": 64, "val/loss": 3.25}',  # read anew after an interruption
    )
    assert read_loss_curves(tmp_path)[VAL] == {32: 4.0, 64: 3.25}
    assert [*read_loss_curves(tmp_path)[VAL]] == [32, 64]


GARBAGE = {
    "nothing": b"",
    "torn": b'{"step": 3, "tokens": 96, "val/lo',
    "torn at a number": b'{"step": 3, "tokens": 96, "val/loss": ',
    "binary": bytes(set(range(256)) - {10, 13}),
    "zeros": b"\0" * 500,
    "a list": b'["tokens", "val/loss"]',
    "a word": b'"tokens val/loss"',
    "a number": b"3",
    "null": b"null",
    "a NaN loss": b'{"tokens": 96, "val/loss": NaN}',
    "an infinite loss": b'{"tokens": 96, "val/loss": -Infinity}',
    "a null loss": b'{"tokens": 96, "val/loss": null}',
    "a loss in words": b'{"tokens": 96, "val/loss": "3.0"}',
    "a true loss": b'{"tokens": 96, "val/loss": true}',
    "a list of losses": b'{"tokens": 96, "val/loss": [3.0]}',
    "a loss that is no float": b'{"tokens": 96, "val/loss": ' + b"9" * 400 + b"}",
    "tokens in words": b'{"tokens": "96", "val/loss": 3.0}',
    "half a token": b'{"tokens": 96.5, "val/loss": 3.0}',
    "no tokens": b'{"tokens": 0, "val/loss": 3.0}',
    "fewer than none": b'{"tokens": -96, "val/loss": 3.0}',
    "true tokens": b'{"tokens": true, "val/loss": 3.0}',
    "null tokens": b'{"tokens": null, "val/loss": 3.0}',
    "unsaid tokens": b'{"step": 3, "val/loss": 3.0}',
    "deep": b"[" * DEEP,
    "a deep map": b'{"tokens":' * DEEP,
}


@pytest.mark.parametrize("line", GARBAGE.values(), ids=GARBAGE.keys())
def test_lines_without_a_reading_are_skipped(tmp_path, line):
    good = b'{"step": 1, "tokens": 32, "val/loss": 4.0}', b'{"tokens": 64, "val/loss": 3.5}'
    write_lines(tmp_path, line, good[0], line, good[1], line)
    assert read_loss_curves(tmp_path)[VAL] == {32: 4.0, 64: 3.5}


def test_missing_loss_curve_is_empty(tmp_path):
    assert read_loss_curves(tmp_path)[VAL] == {}
    assert read_loss_curves(tmp_path / "nowhere")[VAL] == {}
    (tmp_path / "metrics.jsonl").mkdir()
    assert read_loss_curves(tmp_path) == {VAL: {}, TRAIN: {}, START: {}}


def write_readings(folder, count, *, val_every=1, damage=()):
    """Write metrics.jsonl as a run does; a torn line before each of the steps in `damage`."""
    lines = []
    for step in range(1, count + 1):
        row = {"step": step, "tokens": 32 * step}
        if step in damage:
            lines.append(b'{"tokens": 7, "val/loss": 3.0, "train/loss": 3.0, "ti')
        lines.append(json.dumps(row | {"train/loss": 5 - step / count}).encode())
        if step % val_every == 0:
            lines.append(json.dumps(row | {"val/loss": 4 - step / count}).encode())
    write_lines(folder, *lines)
    return folder


def steps_of(course):
    return [tokens // 32 for tokens in course]


def test_both_losses_are_read_each_at_its_own_steps(tmp_path):
    found = read_loss_curves(write_readings(tmp_path, 12, val_every=4))
    assert {*found} == {VAL, TRAIN, START}
    assert found[TRAIN] == pytest.approx({32 * s: 5 - s / 12 for s in range(1, 13)})
    assert found[VAL] == pytest.approx({32 * s: 4 - s / 12 for s in (4, 8, 12)})


def test_row_may_hold_both_losses(tmp_path):
    write_lines(tmp_path, b'{"tokens": 32, "val/loss": 4.0, "train/loss": 5.0}')
    assert read_loss_curves(tmp_path) == {VAL: {32: 4.0}, TRAIN: {32: 5.0}, START: {}}


def test_bad_value_of_one_metric_keeps_the_other(tmp_path):
    write_lines(tmp_path, b'{"tokens": 32, "val/loss": "nan", "train/loss": 5.0}')
    assert read_loss_curves(tmp_path) == {VAL: {}, TRAIN: {32: 5.0}, START: {}}


def test_reading_before_training_is_no_part_of_the_curve(tmp_path):
    write_lines(tmp_path, b'{"tokens": 0, "val/loss": 5.5}', b'{"tokens": 32, "val/loss": 4.0}')
    assert read_loss_curves(tmp_path) == {VAL: {32: 4.0}, TRAIN: {}, START: {0: 5.5}}


@pytest.mark.parametrize("count", [1, 2, 33, 64])
def test_short_curves_are_not_thinned(tmp_path, count):
    found = read_loss_curves(write_readings(tmp_path, count))
    for metric in (VAL, TRAIN):
        assert steps_of(found[metric]) == [*range(1, count + 1)]


@pytest.mark.parametrize("count", [65, 128, 1000, 5000])
def test_long_curves_keep_sixteen_readings_per_doubling_and_the_last(tmp_path, count):
    found = read_loss_curves(write_readings(tmp_path, count))
    for metric in (VAL, TRAIN):
        steps = steps_of(found[metric])
        assert (steps[0], steps[-1]) == (1, count)
        assert steps == sorted({*steps})
        assert len(steps) <= 16 * math.log2(count) + 2
        late = [one / before for before, one in pairwise(steps) if before > 32]
        assert max(late) < 1.1
    assert found[VAL][32 * count] == pytest.approx(3.0)


def test_each_loss_is_thinned_by_its_own_readings(tmp_path):
    found = read_loss_curves(write_readings(tmp_path, 320, val_every=10))
    assert steps_of(found[VAL]) == [*range(10, 321, 10)]  # 32 of them
    assert len(found[TRAIN]) < 110


@pytest.mark.parametrize(("short", "long"), [(40, 41), (64, 1000), (77, 78), (300, 5000)])
def test_runs_of_different_lengths_keep_the_same_readings(tmp_path, short, long):
    """Keep the same readings up to the end of the shorter run, so that a pair shares them."""
    one = read_loss_curves(write_readings(tmp_path / "short", short))
    other = read_loss_curves(write_readings(tmp_path / "long", long))
    for metric in (VAL, TRAIN):
        assert {step for step in steps_of(other[metric]) if step < short} <= {
            *steps_of(one[metric])
        }


def test_lost_line_costs_a_pair_one_reading(tmp_path):
    whole = read_loss_curves(write_readings(tmp_path / "whole", 1000))
    folder = write_readings(tmp_path / "lost", 1000)
    lines = (folder / "metrics.jsonl").read_bytes().splitlines()
    del lines[101:103]  # of step 51 and what follows
    write_lines(folder, *lines)
    found = read_loss_curves(folder)
    for metric in (VAL, TRAIN):
        assert len({*whole[metric]} - {*found[metric]}) <= 1


def test_damaged_lines_are_skipped_in_both_runs(tmp_path):
    found = read_loss_curves(write_readings(tmp_path, 12, damage=(1, 5, 12)))
    for metric, start in ((VAL, 4), (TRAIN, 5)):
        assert found[metric] == pytest.approx({32 * s: start - s / 12 for s in range(1, 13)})


def test_damaged_lines_invent_no_readings(tmp_path):
    whole = read_loss_curves(write_readings(tmp_path / "whole", 1000))
    found = read_loss_curves(write_readings(tmp_path / "torn", 1000, damage=range(3, 1000, 50)))
    for metric, start in ((VAL, 4), (TRAIN, 5)):
        expected = {tokens: start - tokens / 32 / 1000 for tokens in found[metric]}
        assert found[metric] == pytest.approx(expected)
        assert [*found[metric]] == sorted(found[metric])
        assert abs(len(found[metric]) - len(whole[metric])) < 20
        assert 32 * 1000 in found[metric]


UNFINISHED = ("nothing", "torn", "binary", "zeros", "a list", "a word", "null", "deep")


@pytest.mark.parametrize("name", UNFINISHED)
def test_garbage_in_the_metrics_of_an_unfinished_run_leaves_it_unfinished(pair, victim, name):
    folder = pair.run_folder(victim)
    (folder / "result.json").unlink()
    write_lines(folder, GARBAGE[name], GARBAGE[name][:3000])
    study = pair.study()
    assert record_of(study, victim).status == "interrupted"
    assert not study.is_complete
    assert describe_checked(study).gaps[0].n == 2


def test_file_or_a_broken_link_in_a_folders_place_is_a_run_not_done(pair):
    file, link, circle, *_ = pair.runs()
    for run in (file, link, circle):
        folder = pair.run_folder(run)
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()
    pair.run_folder(file).write_text("no folder")
    pair.run_folder(link).symlink_to("nowhere")
    pair.run_folder(circle).symlink_to(pair.run_folder(circle).name)
    study = pair.study()
    for run in (file, link, circle):
        assert record_of(study, run).status == "waiting"
    assert (study.ended, study.expected) == (3, 6)
    describe_checked(study)


def test_moved_sweep_gives_the_same_study(pair, tmp_path):
    before = describe_study(pair.study())
    folder = tmp_path / "elsewhere" / "sweeps" / pair.folder.name
    Path(pair.manifest.out).rename(tmp_path / "elsewhere")
    study = read_study(folder)
    assert study.is_complete
    assert describe_study(study) == before


def test_run_under_another_label_is_found_by_its_id(pair, victim):
    folder = pair.run_folder(victim)
    folder.rename(folder.with_name(f"renamed-{victim.id}"))
    study = pair.study()
    assert study.is_complete
    assert describe_checked(study).gaps[0].n == 3


def test_folder_without_a_sweep_is_a_user_error(tmp_path, pair):
    with pytest.raises(UserError, match="is not a sweep"):
        read_study(tmp_path)
    for content in ("", "[]", "null", '{"format": 1}', "[" * DEEP):
        (pair.folder / "manifest.json").write_text(content)
        with pytest.raises(UserError) as told:
            pair.study()
        assert "\n" not in str(told.value)


def test_rates_that_differ_are_entries_of_their_own(cached_world):
    world = cached_world("variant=standard,no_q", "seed=range(2)", "optim.lr=1e-3,2e-3")
    study = world.finish(loss_of).study()
    assert [(entry.name, entry.rate) for entry in study.entries] == [
        ("standard-d16-h2 lr 0.001", 1e-3),
        ("standard-d16-h2 lr 0.002", 2e-3),
        ("no_q-d16-h2 lr 0.001", 1e-3),
        ("no_q-d16-h2 lr 0.002", 2e-3),
    ]
    for entry in study.entries[2:]:
        assert study.baseline_of(entry).rate == entry.rate
    assert study.baseline_of(study.entries[0]) is None


def test_tuning_runs_are_not_compared(cached_world):
    world = cached_world("variant=standard,no_q", "seed=range(2)", "sweep.tune=true").finish(
        lambda run: 2 + log_distance(run)
    )
    study = world.study()
    assert study.is_complete
    assert study.expected == len(world.runs()) == 2 * (23 + 2)
    assert [entry.rate for entry in study.entries] == [1e-3, 1e-3]
    assert {dict(key)["seed"] for entry in study.entries for key in entry.records} == {0, 1}
    tuning = [record for records in study.tuning.values() for record in records.values()]
    seeds = Counter(dict(record.seeds)["seed"] for record in tuning)
    assert seeds == {1000: 42, 1001: 2, 1002: 2}  # two rates are searched; the others confirm
    assert all(len(own) == 1 for own in tuning_losses(study.tuning, "no_q-d16-h2").values())
    assert all(record.test is None and record.val is not None for record in tuning)


def test_arm_without_chosen_rate_is_listed_as_waiting(cached_world):
    world = cached_world("variant=standard,no_q", "seed=range(2)", "sweep.tune=true")
    study = world.study()
    assert [(entry.rate, len(entry.records)) for entry in study.entries] == [(None, 0)] * 2
    assert study.expected == 2 * (5 * 3 + 2)  # the final runs are waited for, too
    assert not study.is_complete
    describe_checked(study)


def test_course_that_was_changed_is_not_shown(tmp_path, capsys):
    from qkablate.runs.records import seal_result, write_json

    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text('{"step": 3, "tokens": 96, "val/loss": 2.5}\n')
    loss = {"val": 2.5, "test": 2.5}
    result = {"status": "done", "loss": loss, "tokens": 96, "seconds": 1.0}
    write_json(tmp_path / "result.json", seal_result(result, metrics))
    assert read_loss_curves(tmp_path)["val/loss"] == {96: 2.5}
    metrics.write_text(metrics.read_text().replace("2.5", "2.6"))
    assert read_loss_curves(tmp_path)["val/loss"] == {}
    assert "metrics.jsonl' is damaged" in capsys.readouterr().err

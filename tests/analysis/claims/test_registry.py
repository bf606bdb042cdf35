"""Claims on disk: registered once, read back unchanged, and compared with later edits."""

import dataclasses
import json
import os
import shutil
from datetime import datetime

import pytest

from qkablate.analysis.claims.parse import load_claim, parse_claim
from qkablate.analysis.claims.registry import (
    STATISTICS,
    claim_grid,
    describe_changes,
    edits_since,
    find_registrations,
    read_registration,
    register_claim,
)
from qkablate.errors import UserError
from qkablate.runs.records import write_json
from qkablate.sweeps.running.state import SweepState, link_run

CLAIM = {
    "says": "Keys alone are enough.",
    "source": "a comment",
    "seeds": [3, 4],
    "tuning_seeds": 0,
    "grid": {"variant": "standard,no_q"},
    "filter": ["model.d_model > 1"],
    "baseline": {"variant": "standard"},
    "parts": {
        "within": {"arm": "no_q", "kind": "noninferior", "margin": 0.01},
        "equal": {"arm": {"variant": "no_q", "model.heads": 2}, "kind": "better", "margin": 0},
    },
}


def claim(name="mine", at="small", words=None, margin=0.01, **given):
    parts = CLAIM["parts"] | {"within": CLAIM["parts"]["within"] | {"margin": margin}}
    return parse_claim(name, CLAIM | {"parts": parts} | given, at, words or {})


def tree(folder):
    return {
        path: (path.lstat().st_mtime_ns, path.read_bytes() if path.is_file() else None)
        for path in folder.rglob("*")
    }


CLAIMS = {
    "simple": claim(),
    "at the other scale": claim(at="gpu"),
    "with words": claim(words={"train.steps": "30", "data.path": "a b/ü.txt"}),
    "a line break": claim(says="one\ntwo", source="«ü» ∑"),
    "no baseline": claim(baseline=None),
    "tuned": claim(tuning_seeds=2, seeds=8),
    "shipped": load_claim("one_head"),
    "shipped, at the other scale": load_claim("deep_head", "gpu"),
}


@pytest.mark.parametrize("one", CLAIMS.values(), ids=CLAIMS)
def test_claim_is_read_back_as_it_was_written(tmp_path, one):
    found = register_claim(one, str(tmp_path / "out"))
    assert found.claim == one
    assert found.claim.hash == one.hash
    assert found.folder == tmp_path / "out" / "claims" / one.folder_name
    assert found.sweeps == {}
    assert read_registration(found.folder) == found
    (only,) = find_registrations(str(tmp_path / "out"), one.name)
    assert only == found


def test_registration_is_readable_and_has_its_seeds(tmp_path):
    one = claim(tuning_seeds=2)
    folder = register_claim(one, str(tmp_path)).folder
    content = json.loads((folder / "claim.json").read_text())
    assert content["hash"] == one.hash
    assert content["claim"]["says"] == one.says
    assert content["source"] == one.source
    assert content["final_seeds"] == one.seeds_of("final", 4)
    assert content["tuning_seeds"] == one.seeds_of("tuning", 2)
    assert content["claim"]["parts"]["within"]["margin"] == 0.01
    assert datetime.fromisoformat(content["registered"]).tzinfo is not None


def test_claim_is_written_once(tmp_path):
    first = register_claim(claim(), str(tmp_path))
    before = tree(tmp_path)
    assert register_claim(claim(), str(tmp_path)) == first
    assert register_claim(claim(source="elsewhere"), str(tmp_path)) == first
    assert tree(tmp_path) == before


def test_other_claims_have_other_folders_and_are_found_by_their_name_alone(tmp_path):
    for one in (claim(), claim(margin=0.02), claim(at="gpu"), claim("mine_too"), claim("min")):
        register_claim(one, str(tmp_path))
    assert len(list(tmp_path.glob("claims/*/claim.json"))) == 5
    assert len(find_registrations(str(tmp_path), "mine")) == 3
    assert len(find_registrations(str(tmp_path), "mine_too")) == 1
    assert len(find_registrations(str(tmp_path), "min")) == 1
    assert find_registrations(str(tmp_path), "m") == []
    assert find_registrations(str(tmp_path / "elsewhere"), "mine") == []


def test_they_are_found_oldest_first(tmp_path):
    for hour, margin in ((12, 0.01), (10, 0.02), (11, 0.03)):
        folder = register_claim(claim(margin=margin), str(tmp_path)).folder
        content = json.loads((folder / "claim.json").read_text())
        write_json(
            folder / "claim.json", content | {"registered": f"2026-01-01T{hour}:00:00+00:00"}
        )
    margins = [
        one.claim.parts["within"].margin for one in find_registrations(str(tmp_path), "mine")
    ]
    assert margins == [0.02, 0.03, 0.01]


def test_folder_can_be_moved_with_its_runs(tmp_path):
    register_claim(claim(), str(tmp_path / "out"))
    shutil.move(tmp_path / "out", tmp_path / "moved")
    (found,) = find_registrations(str(tmp_path / "moved"), "mine")
    assert found.claim == claim()


def edit(content, path, value):
    *inner, last = path.split(".")
    for key in inner:
        content = content[key]
    content[last] = value


EDITS = {
    "claim.parts.within.margin": 0.02,
    "claim.parts.within.kind": "better",
    "claim.parts.within.axis": "params",
    "claim.seeds": [2],
    "claim.tuning_seeds": 2,
    "claim.grid.variant": "standard,merged_w",
    "claim.filter": [],
    "claim.baseline": None,
    "claim.name": "yours",
    "claim.scale": "gpu",
    "claim.words": {"train.steps": "3"},
    "claim.parts": [],
    "claim.parts.within": None,
    "claim.parts.within.more": 1,
    "claim.more": 1,
    "claim": None,
    "hash": "0" * 64,
    "says": None,
}


@pytest.mark.parametrize("place", [place for place in EDITS if place != "says"])
def test_registration_changed_by_hand_is_rejected(tmp_path, place):
    folder = register_claim(claim(), str(tmp_path)).folder
    content = json.loads((folder / "claim.json").read_text())
    edit(content, place, EDITS[place])
    (folder / "claim.json").write_text(json.dumps(content))
    assert_damaged(folder, tmp_path)


@pytest.mark.parametrize("key", ["hash", "claim", "format", "source"])
def test_registration_with_a_missing_key_is_rejected(tmp_path, key):
    folder = register_claim(claim(), str(tmp_path)).folder
    content = json.loads((folder / "claim.json").read_text())
    del content[key]
    (folder / "claim.json").write_text(json.dumps(content))
    assert_damaged(folder, tmp_path)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "3", "null", '"claim"', "[" * 20_000, "\0", '{"claim": {}}']
)
def test_damaged_file_is_not_read(tmp_path, text):
    folder = register_claim(claim(), str(tmp_path)).folder
    (folder / "claim.json").write_text(text)
    assert_damaged(folder, tmp_path)


def test_file_of_another_claim_is_rejected(tmp_path):
    one, other = (
        register_claim(claim(margin=margin), str(tmp_path)).folder for margin in (0.01, 0.02)
    )
    shutil.copy(one / "claim.json", other / "claim.json")
    assert_damaged(other, tmp_path)


def assert_damaged(folder, out):
    path = folder / "claim.json"
    before = path.read_bytes()
    for ask in (
        lambda: read_registration(folder),
        lambda: register_claim(claim(), str(out)) and find_registrations(str(out), "mine"),
    ):
        with pytest.raises(UserError) as error:
            ask()
        assert str(error.value) == f"'{path}' is damaged, or was changed by hand"
    assert path.read_bytes() == before


# What was edited.


def test_edits_are_described_key_by_key():
    assert describe_changes(claim(), claim()) == []
    assert describe_changes(claim(), claim(margin=0.02)) == ["parts.within.margin: 0.01 → 0.02"]
    assert describe_changes(claim(), claim(seeds=6)) == ["seeds: [3, 4] → [6]"]
    assert describe_changes(claim(), claim(source="other")) == []
    assert describe_changes(claim(), claim(says="Other.")) == [
        "says: Keys alone are enough. → Other."
    ]
    grid = {"variant": "standard,no_q", "model.heads": 2}
    assert describe_changes(claim(), claim(grid=grid)) == ["grid.model.heads: 4 → 2"]
    more = {"variant": "standard,no_q", "model.bias": True}
    assert describe_changes(claim(), claim(grid=more)) == ["grid.model.bias: unset → true"]
    assert describe_changes(claim(grid=more), claim()) == ["grid.model.bias: true → unset"]
    list_edits = describe_changes(claim(), claim(baseline="no_q", tuning_seeds=2))
    assert {line.partition(":")[0] for line in list_edits} >= {"tuning_seeds"}
    assert any(line.startswith("baseline") for line in list_edits)
    parts = {"within": CLAIM["parts"]["within"]}
    list_edits = describe_changes(claim(), claim(parts=parts))
    assert list_edits
    assert all(line.startswith("parts.equal.") and "unset" in line for line in list_edits)


def test_two_claims_that_differ_always_tell_something():
    others = [claim(margin=0.02), claim(filter=[]), claim(baseline=None), *CLAIMS.values()]
    for other in others:
        assert bool(describe_changes(claim(), other)) == (other.hash != claim().hash)


@pytest.fixture
def ran(world, tmp_path):
    """Register a claim, and give the runs of its first look a result: as many as are wanted."""

    def run(one, results=1):
        one_ = dataclasses.replace(one, grid=dict(CLAIM["grid"]), words={})
        grid, words = claim_grid(one_, 2)
        made = world(*words, grid=grid)
        registration = register_claim(one, str(tmp_path / "outputs"))
        registration.add(2, made.folder)
        for known in made.runs()[:results]:
            made.write(known, 2.0)
        sweep_state = SweepState(made.manifest)
        sweep_state.refresh()
        for state in sweep_state.states.values():
            link_run(made.manifest, state)
        return registration

    return run


def list_edits(one, tmp_path):
    return edits_since(one, find_registrations(str(tmp_path / "outputs"), one.name))


def test_edit_after_results_is_reported_with_time_and_change(ran, tmp_path):
    before = ran(claim())
    (line,) = list_edits(claim(margin=0.02), tmp_path)
    assert before.when in line
    assert "parts.within.margin: 0.01 → 0.02" in line
    assert "\n" not in line
    assert list_edits(claim(), tmp_path) == []
    assert list_edits(claim(source="Otherwise said."), tmp_path) == []
    assert len(list_edits(claim(says="Otherwise said."), tmp_path)) == 1


def test_wording_registered_before_the_runs_is_no_edit(ran, tmp_path):
    """Both were written down before anything was known; an edit after that is one."""
    register_claim(claim(margin=0.02), str(tmp_path / "outputs"))
    ran(claim())
    assert list_edits(claim(margin=0.02), tmp_path) == []
    register_claim(claim(margin=0.03), str(tmp_path / "outputs"))
    assert len(list_edits(claim(margin=0.03), tmp_path)) == 1


def test_edit_before_any_result_does_not_count(ran, tmp_path):
    ran(claim(), results=0)
    assert list_edits(claim(margin=0.02), tmp_path) == []


def test_edit_before_any_sweep_does_not_count(tmp_path):
    register_claim(claim(), str(tmp_path / "outputs"))
    assert list_edits(claim(margin=0.02), tmp_path) == []


def test_another_scale_another_data_set_or_another_name_is_another_claim(ran, tmp_path):
    ran(claim())
    others = (claim(at="gpu"), claim(words={"train.steps": "30"}), claim("yours"), claim("mine_2"))
    for other in others:
        assert list_edits(other, tmp_path) == []


def test_same_overrides_make_the_same_claim(ran, tmp_path):
    words = {"train.steps": "30"}
    ran(claim(words=words))
    assert len(list_edits(claim(words=words, margin=0.02), tmp_path)) == 1
    assert list_edits(claim(margin=0.02), tmp_path) == []


def test_every_edit_is_described(ran, tmp_path):
    ran(claim())
    ran(claim(margin=0.02))
    lines = list_edits(claim(margin=0.03), tmp_path)
    assert len(lines) == 2
    assert {line.rpartition(": ")[2] for line in lines} == {"0.01 → 0.03", "0.02 → 0.03"}


def test_edit_counts_where_its_earlier_wording_is_gone(ran, tmp_path):
    first = ran(claim())
    ran(claim(at="gpu"))  # another claim
    second = ran(claim(margin=0.02))
    assert second.earlier == {first.claim.hash}
    shutil.rmtree(first.folder)
    (line,) = list_edits(claim(margin=0.02), tmp_path)
    assert f"an earlier wording ({first.claim.hash[:12]}), which is not here" in line


@pytest.mark.parametrize(
    ("ended", "count"), [("2026-01-01T09:00:00+0100", 1), ("2026-01-01T11:00:00+0100", 0)]
)
def test_results_elsewhere_count_by_their_time(ran, tmp_path, ended, count):
    """The edit was registered where the runs of the earlier wording were not."""
    edit = register_claim(claim(margin=0.02), str(tmp_path / "outputs"))
    assert edit.earlier == frozenset()
    content = json.loads((edit.folder / "claim.json").read_text())
    write_json(edit.folder / "claim.json", content | {"registered": "2026-01-01T09:00:00.5+00:00"})
    first = ran(claim())
    (path,) = first.sweeps[2].glob("runs/*/result.json")
    result = json.loads(path.read_text()) | {"ended": ended}
    write_json(path, result)
    assert len(list_edits(claim(margin=0.02), tmp_path)) == count


def test_wordings_that_others_know_of_are_added(tmp_path):
    mine = register_claim(claim(), str(tmp_path))
    content = json.loads((mine.folder / "claim.json").read_text())
    theirs = content | {"registered": "2026-01-01", "earlier": ["ab"]}
    assert register_claim(claim(), str(tmp_path), theirs).earlier == {"ab"}
    assert read_registration(mine.folder) == register_claim(claim(), str(tmp_path))
    assert read_registration(mine.folder).when == mine.when


# Its sweeps.


@pytest.mark.slow
def test_sweeps_are_ordered_by_number_of_seeds(world, tmp_path):
    one = claim(seeds=[3, 4, 12])
    found = register_claim(one, str(tmp_path / "outputs"))
    folders = []
    for seeds in (12, 3, 4):
        grid, words = claim_grid(dataclasses.replace(one, grid=dict(CLAIM["grid"])), seeds)
        made = world(*words, grid=grid)
        found.add(seeds, made.folder)
        found.add(seeds, made.folder)
        folders.append(made.folder)
    (found.folder / "nothing").mkdir()
    (found.folder / "n7").symlink_to("nowhere")
    assert [path.resolve() for path in found.sweeps.values()] == [
        folders[i].resolve() for i in (1, 2, 0)
    ]
    assert {path.name for path in found.folder.iterdir()} == {
        *("claim.json", "n3", "n4", "n12", "n7", "nothing")
    }
    # They are relative: the whole moves.
    assert not os.path.isabs(os.readlink(found.folder / "n3"))
    shutil.move(tmp_path / "outputs", tmp_path / "moved")
    (moved,) = find_registrations(str(tmp_path / "moved"), "mine")
    assert len(moved.sweeps) == 3


def test_look_has_one_sweep(tmp_path):
    found = register_claim(claim(), str(tmp_path))
    one, other = tmp_path / "sweeps" / "one", tmp_path / "sweeps" / "other"
    found.add(2, one)
    with pytest.raises(UserError) as error:
        found.add(2, other)
    text = str(error.value)
    assert "\n" not in text
    assert "one" in text
    assert "other" in text
    assert "out=FOLDER" in text
    assert (found.folder / "n2").resolve() == one.resolve()
    found.add(3, other)


def test_grid_has_the_seeds_of_the_hash(world):
    one = dataclasses.replace(claim(tuning_seeds=2), grid=dict(CLAIM["grid"]))
    grid, words = claim_grid(one, 3)
    assert words == ["control=none"]
    made = world(*words, grid=grid)
    assert [describe_changes["seed"] for describe_changes in made.manifest.finals] == one.seeds_of(
        "final", 3
    )
    assert {run.changes["seed"] for run in made.manifest.runs} == {*one.seeds_of("tuning", 2)}
    assert made.manifest.name == "claim-mine"
    untuned = dataclasses.replace(one, tuning_seeds=0)
    grid, words = claim_grid(untuned, 3)
    made = world(*words, grid=grid)
    assert made.manifest.finals == []
    assert {run.changes["seed"] for run in made.manifest.runs} == {*untuned.seeds_of("final", 3)}
    assert not any(run.tuning for run in made.manifest.runs)


def test_grid_satisfies_the_axes_of_the_parts():
    part = CLAIM["parts"]["within"]
    for axes, control in (
        (["tokens"], "none"),
        (["params"], "params"),
        (["flops", "params"], "flops,params"),
        (["tokens", "flops", "tokens"], "none,flops"),
    ):
        parts = {f"p{number}": part | {"axis": axis} for number, axis in enumerate(axes)}
        assert claim_grid(claim(parts=parts), 2)[1] == [f"control={control}"]


def test_order_of_keys_in_a_file_makes_no_other_sweep(world):
    several = {"variant": "standard,no_q", "model.heads": "1,2"}
    ids = []
    for grid in (several, dict(reversed(several.items()))):
        one = claim(grid=grid)
        given, words = claim_grid(one, 2)
        ids.append((one.hash, world(*words, grid=given).manifest.id))
    assert ids[0] == ids[1]


def test_registration_tells_its_statistics(tmp_path):
    """Those of the time before they were recorded are the first."""
    folder = register_claim(claim(), str(tmp_path)).folder
    assert read_registration(folder).statistics == STATISTICS
    content = json.loads((folder / "claim.json").read_text())
    del content["statistics"]
    write_json(folder / "claim.json", content)
    assert read_registration(folder).statistics == 1


def test_published_registration_keeps_its_time_and_statistics(tmp_path):
    published = {"registered": "2026-01-01", "statistics": 1, "earlier": ["ab"]}
    content = json.loads(
        (register_claim(claim(), str(tmp_path / "a")).folder / "claim.json").read_text()
    )
    copied = register_claim(claim(), str(tmp_path / "b"), content | published)
    assert (copied.when, copied.statistics) == ("2026-01-01", 1)
    assert copied.earlier == {"ab"}

"""Manifests round-trip or are rejected, and sweeps are found by name, id or folder."""

import dataclasses
import hashlib
import json
import os
import random
from contextlib import suppress
from pathlib import Path

import pytest

from qkablate.compose.configs import make_config, open_hydra
from qkablate.compose.grid import read_request
from qkablate.errors import UserError
from qkablate.sweeps.planning import manifest as manifests
from qkablate.sweeps.planning.expand import Grid, expand_grid
from qkablate.sweeps.planning.manifest import MANIFEST_FILE, find_sweep, freeze, read_manifest


@pytest.fixture(scope="module")
def expanded(tmp_path_factory):
    """Return two sweeps with a value in every field: one with seeds, one that is tuned."""
    folder = tmp_path_factory.mktemp("expanded")
    corpus = folder / "a b, ∑.txt"
    corpus.write_text("the cat sat on the mat, ähnlich ∑\n" * 200, encoding="utf-8")
    small = ["model.layers=1", "model.d_model=16", "model.context=16", "threads=1"]
    data = ["data=text", f"data.path='{corpus}'", f"data.cache={folder / 'cache'}"]
    words = ["variant=no_q,merged_w", "model.heads=2,3,4", "seed=0,1", "seeds.init=1"]
    words += ["control=none,params", "tracking.tags=['ä',b]", "sweep.filter=['model.heads < 4']"]

    def expand(*more):
        request = read_request([*small, *data, *words, *more])
        grid = Grid(request.settings.sweep, request.controls, request.choices)
        return expand_grid(grid, make_config, ["qkablate", "sweep", *words, *more])

    with open_hydra():
        return {"seeds": expand(), "tuned": expand("sweep.tune=true", "sweep.name=tuned")}


@pytest.fixture(params=["seeds", "tuned"])
def manifest(request, expanded, tmp_path):
    return dataclasses.replace(expanded[request.param], out=str(tmp_path / "outputs"))


@pytest.fixture
def written(expanded, tmp_path):
    """Return the folder of a frozen sweep."""
    sweep = dataclasses.replace(expanded["seeds"], out=str(tmp_path / "outputs"))
    freeze(sweep, ["the plan"])
    return sweep.folder


@pytest.mark.slow
def test_manifest_round_trips(manifest):
    assert manifest.left_out
    assert manifest.excluded
    assert {arm.mismatch for arm in manifest.arms.values()} > {None}
    manifest.write()
    found = read_manifest(manifest.folder)
    assert found == manifest
    assert (found.id, found.folder) == (manifest.id, manifest.folder)
    for run in manifest.runs:
        assert found.config_of(run) == manifest.config_of(run)
        arm, other = manifest.arms[run.arm], found.arms[run.arm]
        assert other.overrides_of(run) == arm.overrides_of(run)
    for arm, other in zip(manifest.arms.values(), found.arms.values(), strict=True):
        assert type(other.config.model) is type(arm.config.model)
        for changes in manifest.finals:
            assert other.run({**changes, "optim.lr": 1e-3}) == arm.run(
                {**changes, "optim.lr": 1e-3}
            )
    found.write()  # and so on
    assert read_manifest(manifest.folder) == manifest


def test_frozen_manifest_is_never_overwritten(manifest):
    first = freeze(manifest, ["the plan"])
    before = {path: path.read_bytes() for path in manifest.folder.iterdir()}
    assert {path.name for path in before} == {MANIFEST_FILE, "plan.txt"}
    later = dataclasses.replace(manifest, command=["another", "command"])
    assert later.folder == manifest.folder
    assert freeze(later, ["another plan"]) == first == manifest
    assert {path: path.read_bytes() for path in manifest.folder.iterdir()} == before


def test_rates_are_chosen_by_the_rules_of_the_first_time(manifest):
    assert manifest.tuning_rules > 1
    freeze(dataclasses.replace(manifest, tuning_rules=1), ["the plan"])
    assert freeze(manifest, ["the plan"]).tuning_rules == 1
    assert read_manifest(manifest.folder).tuning_rules == 1


def test_keys_that_change_no_result_are_those_typed_today(manifest):
    """For instance the settings that let a run fit in memory."""
    freeze(manifest, ["the plan"])
    today = {"checkpoint_activations": True, "fsdp": True, "checkpoint_every": 7}

    def with_settings_of_today(arm):
        train = dataclasses.replace(arm.config.train, **today)
        return dataclasses.replace(arm, config=dataclasses.replace(arm.config, train=train))

    later = dataclasses.replace(
        manifest, arms={name: with_settings_of_today(arm) for name, arm in manifest.arms.items()}
    )
    assert later.folder == manifest.folder
    for arm in freeze(later, ["another plan"]).arms.values():
        assert {key: getattr(arm.config.train, key) for key in today} == today


def read_error(folder):
    """Return the error of reading a manifest, which must change nothing."""
    path = folder / MANIFEST_FILE
    before = path.read_bytes() if path.is_file() else None
    with pytest.raises(UserError) as error:
        read_manifest(folder)
    message = str(error.value)
    assert "\n" not in message
    assert str(folder) in message
    assert (path.read_bytes() if path.is_file() else None) == before
    return message


def replace_text(folder, old, new):
    """Replace the first occurrence of a text in the manifest."""
    text = (folder / MANIFEST_FILE).read_text(encoding="utf-8")
    assert old in text
    (folder / MANIFEST_FILE).write_text(text.replace(old, new, 1), encoding="utf-8")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"seed": 0', '"seed": 2'),
        ('"variant": "no_q"', '"variant": "no_k"'),
        ('"d_model": 16', '"d_model": 17'),
        ('"lr": 0.001', '"lr": 0.002'),
        ('"bias": false', '"bias": true'),
        ('"excluded": ', '"excluded": 1'),
        ('"optim.lr"', '"optim.Lr"'),
    ],
)
def test_changed_value_is_rejected(written, old, new):
    replace_text(written, old, new)
    assert "damaged (its checksum does not match)" in read_error(written)


def test_flipped_byte_is_rejected(written):
    content, original = (written / MANIFEST_FILE).read_bytes(), read_manifest(written)
    chance = random.Random(0)
    for place in chance.sample(range(len(content)), 300):
        damaged = bytearray(content)
        damaged[place] ^= 1 << chance.randrange(8)
        (written / MANIFEST_FILE).write_bytes(damaged)
        with suppress(UserError):
            assert (
                read_manifest(written) == original
            )  # for instance one kind of white space that has become another


@pytest.mark.parametrize("kept", [0, 1, 100, 0.5, -1, -2])
def test_truncated_file_is_rejected(written, kept):
    content = (written / MANIFEST_FILE).read_bytes()
    number = int(kept * len(content)) if isinstance(kept, float) else kept
    (written / MANIFEST_FILE).write_bytes(content[:number])
    if number == -1:
        assert read_manifest(written).runs  # only the end of the line is missing
    else:
        assert "damaged" in read_error(written)


@pytest.mark.parametrize(
    "content",
    [
        b"not JSON",
        b"[]",
        b"3",
        b"null",
        b'"format"',
        b"\xff\xfe\x00",
        b"\0" * 5000,
        b"[" * 100_000,
        b'{"format": 1, "arms": ' + b"[" * 100_000,
        b'{"format": 1}',
        b'{"format": 1, "sha256": "0"}',
        b'{"format": 1, "sha256": NaN}',
        b'{"a": {}}{"b": {}}',
    ],
    ids=lambda content: repr(content[:24]),
)
def test_invalid_content_is_rejected(written, content):
    (written / MANIFEST_FILE).write_bytes(content)
    message = read_error(written)
    assert "damaged" in message or "reads format" in message


def rewrite(folder, change):
    """Change the content of a manifest and update its checksum."""
    content = json.loads((folder / MANIFEST_FILE).read_text(encoding="utf-8"))
    del content["sha256"]
    change(content)
    content["sha256"] = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    (folder / MANIFEST_FILE).write_text(json.dumps(content), encoding="utf-8")


KEYS = ["name", "arms", "runs", "finals", "left_out", "excluded", "command"]


@pytest.mark.parametrize("key", KEYS)
def test_missing_key_is_rejected(written, key):
    rewrite(written, lambda content: None)
    assert read_manifest(written).runs  # the following error is not that of the checksum
    rewrite(written, lambda content: content.pop(key))
    assert "damaged" in read_error(written)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("arms", []),
        ("arms", 3),
        ("arms", None),
        ("arms", {"one": 3}),
        ("arms", {"one": {}}),
        ("arms", {"one": {"config": 3}}),
        ("runs", 3),
        ("runs", [3]),
        ("runs", [{}]),
        ("runs", [{"id": "a", "color": "blue"}]),
        ("left_out", None),
        ("left_out", [[]]),
    ],
    ids=str,
)
def test_value_of_wrong_type_is_rejected(written, key, value):
    rewrite(written, lambda content: content.update({key: value}))
    assert "damaged" in read_error(written)


@pytest.mark.parametrize("number", [0, 2, "1", None])
def test_other_format_is_named(written, number):
    rewrite(written, lambda content: content.update(format=number, version="9.9.9"))
    message = read_error(written)
    assert "was written by qkablate 9.9.9" in message
    assert f"(format {number})" in message


def test_folder_without_manifest_is_rejected(written):
    (written / MANIFEST_FILE).unlink()
    assert f"is not a sweep: it has no {MANIFEST_FILE}" in read_error(written)
    (written / MANIFEST_FILE).mkdir()
    read_error(written)


@pytest.mark.parametrize("content", [b"", b"not JSON", b'{"format": 2, "version": "9"}'])
def test_unreadable_manifest_is_never_overwritten(expanded, written, content):
    (written / MANIFEST_FILE).write_bytes(content)
    again = dataclasses.replace(expanded["seeds"], out=str(written.parent.parent))
    assert again.folder == written
    with pytest.raises(UserError):
        freeze(again, ["another plan"])
    assert (written / MANIFEST_FILE).read_bytes() == content
    assert (written / "plan.txt").read_text(encoding="utf-8") == "the plan\n"


def test_moved_sweep_finds_its_runs(written, tmp_path):
    before = read_manifest(written)
    (tmp_path / "archive").mkdir()
    (tmp_path / "outputs").rename(tmp_path / "archive" / "of 2026")
    folder = tmp_path / "archive" / "of 2026" / "sweeps" / written.name
    found = read_manifest(folder)
    assert found.folder == folder
    assert (found.id, found.arms, found.runs) == (before.id, before.arms, before.runs)
    assert {found.config_of(run).out for run in found.runs} == {str(folder.parent.parent)}


# Finding a sweep.


@pytest.fixture
def three(expanded, tmp_path):
    """Freeze three sweeps, the newest last; return them by name."""
    found = {}
    kinds = {"alpha": "seeds", "alpha_two": "tuned", "beta": "seeds"}
    for number, (name, kind) in enumerate(kinds.items()):
        own = expanded[kind]
        arms = own.arms if number else dict(reversed(own.arms.items()))  # a different id
        sweep = dataclasses.replace(own, name=name, arms=arms, out=str(tmp_path / "outputs"))
        freeze(sweep, [])
        os.utime(sweep.folder / MANIFEST_FILE, (1e9 + number, 1e9 + number))
        found[name] = sweep
    (tmp_path / "outputs" / "sweeps" / "alpha-without").mkdir()
    return found


def test_sweep_is_found_by_prefix_of_its_name(three):
    assert find_sweep("beta", "outputs").resolve() == three["beta"].folder
    assert find_sweep("b", "outputs").resolve() == three["beta"].folder
    assert find_sweep("alpha_", "outputs").resolve() == three["alpha_two"].folder
    assert find_sweep("alpha-", "outputs").resolve() == three["alpha"].folder
    for sweep in three.values():
        assert find_sweep(sweep.folder.name, "outputs").resolve() == sweep.folder


def test_sweep_is_found_by_prefix_of_its_id(three):
    for sweep in three.values():
        assert find_sweep(sweep.id, "outputs").resolve() == sweep.folder
        assert find_sweep(sweep.id[:8], "outputs").resolve() == sweep.folder


def test_newest_sweep_is_the_default(three):
    assert find_sweep(None, "outputs").resolve() == three["beta"].folder
    os.utime(three["alpha"].folder / MANIFEST_FILE, (2e9, 2e9))
    assert find_sweep(None, "outputs").resolve() == three["alpha"].folder


def test_sweep_is_found_by_its_folder(three, tmp_path):
    for sweep in three.values():
        name = sweep.folder.name
        for word in (str(sweep.folder), f"outputs/sweeps/{name}", f"outputs/sweeps/{name}/"):
            assert find_sweep(word, "nowhere").resolve() == sweep.folder


@pytest.mark.parametrize("where", ["sweeps", "sweep", "runs"])
def test_runs_are_found_from_any_working_folder(three, tmp_path, monkeypatch, where):
    sweep = three["beta"]
    folder = {"sweeps": sweep.folder.parent, "sweep": sweep.folder, "runs": sweep.folder / "runs"}
    (sweep.folder / "runs").mkdir()
    monkeypatch.chdir(folder[where])
    word = {"sweeps": sweep.folder.name, "sweep": ".", "runs": ".."}[where]
    found = read_manifest(find_sweep(word, "outputs"))
    assert Path(found.out).resolve() == tmp_path / "outputs"
    assert found.folder.resolve() == sweep.folder


def test_ambiguous_name_is_rejected_with_its_candidates(three):
    with pytest.raises(UserError, match="'alph' matches 2 sweeps: ") as error:
        find_sweep("alph", "outputs")
    assert three["alpha"].folder.name in str(error.value)
    assert three["alpha_two"].folder.name in str(error.value)
    with pytest.raises(UserError, match="matches 3 sweeps"):
        find_sweep("", "outputs")


@pytest.mark.parametrize(
    "word",
    [
        "gamma",
        "alpha-without",
        "*",
        "[",
        "..",
        "outputs/sweeps",
        "a" * 5000,
        "~no-such-user",
    ],
    ids=lambda word: word[:12],
)
def test_unknown_sweep_is_rejected_in_one_line(three, word):
    with pytest.raises(UserError) as error:
        find_sweep(word, "outputs")
    assert "\n" not in str(error.value)


def test_unknown_sweep_names_the_nearest(three):
    name = three["beta"].folder.name
    with pytest.raises(UserError, match=rf"there is no sweep 'x{name}'.*\(nearest: {name}\)"):
        find_sweep(f"x{name}", "outputs")


def test_empty_output_folder_is_rejected(tmp_path):
    for out in ("outputs", "~/outputs"):
        for word in (None, "quick"):
            with pytest.raises(UserError, match=r"there is no sweep ('quick' )?in"):
                find_sweep(word, out)


def test_interrupted_freeze_is_repeated(expanded, tmp_path, monkeypatch):
    """A process that is killed before the manifest is written leaves no sweep."""
    sweep = dataclasses.replace(expanded["seeds"], out=str(tmp_path / "outputs"))

    def killed(path, text):
        if path.name == MANIFEST_FILE:
            raise KeyboardInterrupt
        path.write_text(text[: len(text) // 2], encoding="utf-8")

    with monkeypatch.context() as patched:
        patched.setattr(manifests, "write_atomic", killed)
        with pytest.raises(KeyboardInterrupt):
            freeze(sweep, ["the plan"])
    assert freeze(sweep, ["the plan"]) == sweep
    assert read_manifest(sweep.folder) == sweep
    assert (sweep.folder / "plan.txt").read_text(encoding="utf-8") == "the plan\n"


@pytest.mark.parametrize("key", ["label", "id"])
def test_run_with_invalid_name_is_rejected(written, key):
    rewrite(written, lambda content: content["runs"][0].update({key: "../../x"}))
    assert "is not a valid name" in read_error(written)


def test_config_comes_from_the_command_not_from_the_file(manifest):
    freeze(manifest, ["the plan"])

    def change(content):
        for arm in content["arms"].values():
            arm["config"]["variant"]["file"] = "evil.py"
            arm["config"]["data"]["cache"] = "/elsewhere"

    rewrite(manifest.folder, change)
    assert freeze(manifest, ["the plan"]) == manifest

"""What is frozen is read as it was written, or not at all; and a sweep is found by what it is
called.
"""

import dataclasses
import hashlib
import json
import os
import random
from contextlib import suppress
from pathlib import Path

import pytest

from qkablate.cli.hydra.grid import composing
from qkablate.errors import UserError
from qkablate.sweeps.planning import manifest as manifests
from qkablate.sweeps.planning.expand import Expansion, Grid
from qkablate.sweeps.planning.manifest import FILE, find, freeze, read


@pytest.fixture(scope="module")
def expanded(tmp_path_factory):
    """Two sweeps with something in every field: one of seeds, one that is tuned."""
    folder = tmp_path_factory.mktemp("expanded")
    corpus = folder / "a b, ∑.txt"
    corpus.write_text("the cat sat on the mat, ähnlich ∑\n" * 200, encoding="utf-8")
    small = ["model.layers=1", "model.d_model=16", "model.context=16", "threads=1"]
    data = ["data=text", f"data.path='{corpus}'", f"data.cache={folder / 'cache'}"]
    words = ["variant=no_q,merged_w", "model.heads=2,3,4", "seed=0,1", "seeds.init=1"]
    words += ["control=none,params", "track.tags=['ä',b]", "sweep.where=['model.heads < 4']"]

    def expand(*more):
        asked = composer.ask([*small, *data, *words, *more])
        grid = Grid(asked.settings.sweep, asked.controls, asked.choices)
        return Expansion(grid, composer.config).manifest(["qkablate", "sweep", *words, *more])

    with composing() as composer:
        return {"seeds": expand(), "tuned": expand("sweep.tune=true", "sweep.name=tuned")}


@pytest.fixture(params=["seeds", "tuned"])
def manifest(request, expanded, tmp_path):
    return dataclasses.replace(expanded[request.param], out=str(tmp_path / "outputs"))


@pytest.fixture
def written(expanded, tmp_path):
    """The folder of a frozen sweep."""
    sweep = dataclasses.replace(expanded["seeds"], out=str(tmp_path / "outputs"))
    freeze(sweep, ["the plan"])
    return sweep.folder


def test_it_is_read_as_it_was_written(manifest):
    assert manifest.left_out
    assert manifest.excluded
    assert {arm.mismatch for arm in manifest.arms.values()} > {None}
    manifest.write()
    found = read(manifest.folder)
    assert found == manifest
    assert (found.id, found.folder) == (manifest.id, manifest.folder)
    for run in manifest.runs:
        assert found.config_of(run) == manifest.config_of(run)
        assert found.words_of(run) == manifest.words_of(run)
    for arm, other in zip(manifest.arms.values(), found.arms.values(), strict=True):
        assert type(other.config.model) is type(arm.config.model)
        for changes in manifest.finals:
            assert other.run({**changes, "optim.lr": 1e-3}) == arm.run(
                {**changes, "optim.lr": 1e-3}
            )
    found.write()  # and so on
    assert read(manifest.folder) == manifest


def test_what_was_frozen_first_stays(manifest):
    first = freeze(manifest, ["the plan"])
    before = {path: path.read_bytes() for path in manifest.folder.iterdir()}
    assert {path.name for path in before} == {FILE, "plan.txt"}
    later = dataclasses.replace(manifest, command=["another", "command"])
    assert later.folder == manifest.folder
    assert freeze(later, ["another plan"]) == first == manifest
    assert {path: path.read_bytes() for path in manifest.folder.iterdir()} == before


def test_what_changes_no_result_is_as_it_is_typed_today(manifest):
    """As the cure of a run that was out of memory."""
    freeze(manifest, ["the plan"])
    today = {"checkpoint_activations": True, "shard": True, "checkpoint_every": 7}

    def asked(arm):
        train = dataclasses.replace(arm.config.train, **today)
        return dataclasses.replace(arm, config=dataclasses.replace(arm.config, train=train))

    later = dataclasses.replace(
        manifest, arms={name: asked(arm) for name, arm in manifest.arms.items()}
    )
    assert later.folder == manifest.folder
    for arm in freeze(later, ["another plan"]).arms.values():
        assert {key: getattr(arm.config.train, key) for key in today} == today


def refused(folder):
    """What is said of it, by those who read and by those who begin; and nothing is touched."""
    path = folder / FILE
    before = path.read_bytes() if path.is_file() else None
    with pytest.raises(UserError) as error:
        read(folder)
    said = str(error.value)
    assert "\n" not in said
    assert str(folder) in said
    assert (path.read_bytes() if path.is_file() else None) == before
    return said


def replaced(folder, old, new):
    """One place of the file, another."""
    text = (folder / FILE).read_text(encoding="utf-8")
    assert old in text
    (folder / FILE).write_text(text.replace(old, new, 1), encoding="utf-8")


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
def test_a_changed_value_is_damage(written, old, new):
    replaced(written, old, new)
    assert "damaged (it does not have its checksum)" in refused(written)


def test_a_flipped_byte_is_noticed_wherever_it_lies(written):
    whole, original = (written / FILE).read_bytes(), read(written)
    chance = random.Random(0)
    for place in chance.sample(range(len(whole)), 300):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << chance.randrange(8)
        (written / FILE).write_bytes(damaged)
        with suppress(UserError):
            assert read(written) == original  # a blank, say, that has become another


@pytest.mark.parametrize("kept", [0, 1, 100, 0.5, -1, -2])
def test_a_truncated_file_is_damage(written, kept):
    whole = (written / FILE).read_bytes()
    number = int(kept * len(whole)) if isinstance(kept, float) else kept
    (written / FILE).write_bytes(whole[:number])
    if number == -1:
        assert read(written).runs  # only the end of the line is missing
    else:
        assert "damaged" in refused(written)


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
def test_what_is_no_manifest_is_damage(written, content):
    (written / FILE).write_bytes(content)
    said = refused(written)
    assert "damaged" in said or "reads format" in said


def sealed(folder, change):
    """Another content, with the checksum that belongs to it."""
    content = json.loads((folder / FILE).read_text(encoding="utf-8"))
    del content["sha256"]
    change(content)
    content["sha256"] = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    (folder / FILE).write_text(json.dumps(content), encoding="utf-8")


KEYS = ["name", "arms", "runs", "finals", "left_out", "excluded", "command"]


@pytest.mark.parametrize("key", KEYS)
def test_a_missing_key_is_damage(written, key):
    sealed(written, lambda content: None)
    assert read(written).runs  # what follows is not refused for its checksum
    sealed(written, lambda content: content.pop(key))
    assert "damaged" in refused(written)


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
        ("runs", [{"id": "a", "colour": "blue"}]),
        ("left_out", None),
        ("left_out", [[]]),
    ],
    ids=str,
)
def test_a_value_of_another_kind_is_damage(written, key, value):
    sealed(written, lambda content: content.update({key: value}))
    assert "damaged" in refused(written)


@pytest.mark.parametrize("number", [0, 2, "1", None])
def test_another_format_is_named(written, number):
    sealed(written, lambda content: content.update(format=number, version="9.9.9"))
    said = refused(written)
    assert "was written by qkablate 9.9.9" in said
    assert f"(format {number})" in said


def test_a_folder_without_one_is_no_sweep(written):
    (written / FILE).unlink()
    assert f"is no sweep: it has no {FILE}" in refused(written)
    (written / FILE).mkdir()
    refused(written)


@pytest.mark.parametrize("content", [b"", b"not JSON", b'{"format": 2, "version": "9"}'])
def test_nothing_is_frozen_over_what_cannot_be_read(expanded, written, content):
    (written / FILE).write_bytes(content)
    again = dataclasses.replace(expanded["seeds"], out=str(written.parent.parent))
    assert again.folder == written
    with pytest.raises(UserError):
        freeze(again, ["another plan"])
    assert (written / FILE).read_bytes() == content
    assert (written / "plan.txt").read_text(encoding="utf-8") == "the plan\n"


def test_moved_with_its_runs_it_is_still_read(written, tmp_path):
    before = read(written)
    (tmp_path / "archive").mkdir()
    (tmp_path / "outputs").rename(tmp_path / "archive" / "of 2026")
    folder = tmp_path / "archive" / "of 2026" / "sweeps" / written.name
    found = read(folder)
    assert found.folder == folder
    assert (found.id, found.arms, found.runs) == (before.id, before.arms, before.runs)
    assert {found.config_of(run).out for run in found.runs} == {str(folder.parent.parent)}


# Which sweep is meant.


@pytest.fixture
def three(expanded, tmp_path):
    """Sweeps by name, the newest last."""
    found = {}
    kinds = {"alpha": "seeds", "alpha_two": "tuned", "beta": "seeds"}
    for number, (name, kind) in enumerate(kinds.items()):
        own = expanded[kind]
        arms = own.arms if number else dict(reversed(own.arms.items()))  # an id of its own
        sweep = dataclasses.replace(own, name=name, arms=arms, out=str(tmp_path / "outputs"))
        freeze(sweep, [])
        os.utime(sweep.folder / FILE, (1e9 + number, 1e9 + number))
        found[name] = sweep
    (tmp_path / "outputs" / "sweeps" / "alpha-without").mkdir()
    return found


def test_a_sweep_is_found_by_how_its_name_begins(three):
    assert find("beta", "outputs").resolve() == three["beta"].folder
    assert find("b", "outputs").resolve() == three["beta"].folder
    assert find("alpha_", "outputs").resolve() == three["alpha_two"].folder
    assert find("alpha-", "outputs").resolve() == three["alpha"].folder
    for sweep in three.values():
        assert find(sweep.folder.name, "outputs").resolve() == sweep.folder


def test_a_sweep_is_found_by_how_its_id_begins(three):
    for sweep in three.values():
        assert find(sweep.id, "outputs").resolve() == sweep.folder
        assert find(sweep.id[:8], "outputs").resolve() == sweep.folder


def test_unsaid_it_is_the_newest(three):
    assert find(None, "outputs").resolve() == three["beta"].folder
    os.utime(three["alpha"].folder / FILE, (2e9, 2e9))
    assert find(None, "outputs").resolve() == three["alpha"].folder


def test_a_sweep_is_found_by_its_folder(three, tmp_path):
    for sweep in three.values():
        name = sweep.folder.name
        for word in (str(sweep.folder), f"outputs/sweeps/{name}", f"outputs/sweeps/{name}/"):
            assert find(word, "nowhere").resolve() == sweep.folder


@pytest.mark.parametrize("where", ["sweeps", "sweep", "runs"])
def test_its_runs_are_beside_it_wherever_we_stand(three, tmp_path, monkeypatch, where):
    sweep = three["beta"]
    folder = {"sweeps": sweep.folder.parent, "sweep": sweep.folder, "runs": sweep.folder / "runs"}
    (sweep.folder / "runs").mkdir()
    monkeypatch.chdir(folder[where])
    word = {"sweeps": sweep.folder.name, "sweep": ".", "runs": ".."}[where]
    found = read(find(word, "outputs"))
    assert Path(found.out).resolve() == tmp_path / "outputs"
    assert found.folder.resolve() == sweep.folder


def test_an_ambiguous_name_is_refused_with_those_it_may_be(three):
    with pytest.raises(UserError, match="'alph' may be any of 2 sweeps: ") as error:
        find("alph", "outputs")
    assert three["alpha"].folder.name in str(error.value)
    assert three["alpha_two"].folder.name in str(error.value)
    with pytest.raises(UserError, match="any of 3 sweeps"):
        find("", "outputs")


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
def test_what_is_no_sweep_is_told_in_one_line(three, word):
    with pytest.raises(UserError) as error:
        find(word, "outputs")
    assert "\n" not in str(error.value)


def test_the_nearest_name_is_told(three):
    name = three["beta"].folder.name
    with pytest.raises(UserError, match=rf"there is no sweep 'x{name}'.*\(nearest: {name}\)"):
        find(f"x{name}", "outputs")


def test_no_sweep_at_all(tmp_path):
    for out in ("outputs", "~/outputs"):
        for word in (None, "quick"):
            with pytest.raises(UserError, match="there is no sweep in"):
                find(word, out)


def test_what_was_written_half_is_not_there(expanded, tmp_path, monkeypatch):
    """Killed before the last stroke, it is begun anew."""
    sweep = dataclasses.replace(expanded["seeds"], out=str(tmp_path / "outputs"))

    def killed(path, text):
        if path.name == FILE:
            raise KeyboardInterrupt
        path.write_text(text[: len(text) // 2], encoding="utf-8")

    with monkeypatch.context() as patched:
        patched.setattr(manifests, "write_atomic", killed)
        with pytest.raises(KeyboardInterrupt):
            freeze(sweep, ["the plan"])
    assert freeze(sweep, ["the plan"]) == sweep
    assert read(sweep.folder) == sweep
    assert (sweep.folder / "plan.txt").read_text(encoding="utf-8") == "the plan\n"


@pytest.mark.parametrize("key", ["label", "id"])
def test_a_run_that_is_no_name_is_damage(written, key):
    sealed(written, lambda content: content["runs"][0].update({key: "../../x"}))
    assert "is no name" in refused(written)


def test_what_is_trained_is_what_is_typed_and_not_what_a_file_names(manifest):
    freeze(manifest, ["the plan"])

    def change(content):
        for arm in content["arms"].values():
            arm["config"]["variant"]["file"] = "evil.py"
            arm["config"]["data"]["cache"] = "/elsewhere"

    sealed(manifest.folder, change)
    assert freeze(manifest, ["the plan"]) == manifest

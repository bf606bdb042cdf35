"""Models restored from run folders, which are untrusted."""

import importlib.metadata
import json
import os
import pickle
import re
import shutil
from pathlib import Path

import pytest
import safetensors.torch
import torch

from qkablate.errors import UserError
from qkablate.models import catalogue
from qkablate.runs.run import find_run
from qkablate.training import checkpoint
from qkablate.training.warm_start.restore import restore
from tests.training.helpers import replace_file, weights_of

STEPS = ("train.steps=3", "train.batch_size=2")
CIRCUIT = """
from pathlib import Path
from qkablate.attention.qk.factored import SeparateQK
with open({journal!r}, "a") as file:
    file.write("imported\\n")
class Mine(SeparateQK):
    equation = "mine"
"""


@pytest.fixture(scope="module")
def trained(train, tmp_path_factory):
    return train(tmp_path_factory.mktemp("trained"), *STEPS, "variant=merged_w")


@pytest.fixture
def run(trained, tmp_path):
    """Copy the trained run, to damage it."""
    return Path(shutil.copytree(trained, tmp_path / "outputs" / "runs" / trained.name))


def tree(folder: Path) -> dict[str, object]:
    """Return names, contents and times of all files in a folder."""
    return {
        str(path.relative_to(folder)): (
            path.stat().st_mtime_ns,
            path.read_bytes() if path.is_file() else None,
        )
        for path in folder.rglob("*")
    }


def test_restored_model_has_trained_weights(run):
    restored = restore(run)
    weights = safetensors.torch.load_file(weights_of(run))
    state = restored.model.state_dict()
    assert state.keys() == weights.keys()
    assert all(torch.equal(state[name], weights[name]) for name in weights)
    assert (restored.step, restored.folder, restored.model.training) == (3, run, False)
    assert restored.config.variant.name == "merged_w"
    assert restored.tokenizer().vocabulary == 256


def test_restoring_writes_nothing(run):
    before = tree(run)
    restore(run).tokenizer()
    weights_of(run).write_bytes(b"damaged")
    after = tree(run)
    with pytest.raises(UserError):
        restore(run)
    assert tree(run) == after != before


def test_newest_intact_checkpoint_is_used(run, capsys):
    (older,) = (run / "checkpoints").glob("step-*")
    newer = Path(shutil.copytree(older, older.with_name("step-00000009")))
    (newer / "weights.safetensors").write_bytes(b"damaged")
    (newer.parent / ".step-00000011.tmp").mkdir()
    before = tree(run)
    assert restore(run).step == 3
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "step-00000009' is damaged (weights.safetensors does not have its checksum)" in err
    assert tree(run) == before


def test_weights_are_hashed_only_if_searched_by_hash(run, monkeypatch):
    """Hashing reads all weights once more."""
    hashed = []

    def weights_sha256(path, original=checkpoint.weights_sha256):
        hashed.append(path)
        return original(path)

    monkeypatch.setattr(checkpoint, "weights_sha256", weights_sha256)
    path = restore(run).checkpoint
    assert hashed == []
    assert restore(run, weights=checkpoint.weights_sha256(path)).checkpoint == path
    with pytest.raises(UserError, match="no longer has weights with the sha256 000000000000…"):
        restore(run, weights="0" * 64)


def test_nothing_is_unpickled(run, tmp_path):
    class Harm:
        def __reduce__(self):
            return Path.touch, (tmp_path / "harm",)

    replace_file(weights_of(run).with_name("state.pt"), pickle.dumps(Harm()))
    assert restore(run).step == 3
    weights_of(run).with_name("state.pt").unlink()
    assert restore(run).step == 3
    replace_file(weights_of(run), pickle.dumps(Harm()))
    with pytest.raises(UserError, match=r"is damaged \(weights\.safetensors: "):
        restore(run)
    assert not (tmp_path / "harm").exists()


def rewrite(old, new):
    def change(run):
        path = run / "config.yaml"
        text = path.read_text(encoding="utf-8")
        assert re.search(old, text), old
        path.write_text(re.sub(old, lambda _: new, text, count=1), encoding="utf-8")

    return change


def no_config(run):
    (run / "config.yaml").unlink()


def no_checkpoint(run):
    shutil.rmtree(run / "checkpoints")


def damaged_weights(run):
    weights_of(run).write_bytes(weights_of(run).read_bytes()[:-1])


def no_sums(run):
    weights_of(run).with_name("SHA256SUMS").unlink()


def other_progress(run):
    replace_file(weights_of(run).with_name("progress.json"), b'{"stp": 1}')


def hostile_progress(run):
    replace_file(weights_of(run).with_name("progress.json"), b'{"step": "\\u001b]0;x\\u0007"}')


def whole_numbers(run):
    weights = safetensors.torch.load_file(weights_of(run))
    weights = {name: tensor.to(torch.int64) for name, tensor in weights.items()}
    replace_file(weights_of(run), safetensors.torch.save(weights))


BAD = [
    (hostile_progress, "progress.json.step is not of type int"),
    (whole_numbers, "cannot be loaded: blocks.0.attention.ov.w_o has dtype torch.int64"),
    (no_config, "is not a run folder: it has no config.yaml"),
    (no_checkpoint, "has no checkpoint yet"),
    (damaged_weights, "is damaged (weights.safetensors does not have its checksum)"),
    (no_sums, "SHA256SUMS"),
    (other_progress, "is damaged ("),
    (rewrite(r"(?s).*", ""), "config.yaml' is damaged: it is not what a run writes"),
    (rewrite(r"(?s).*", "- 1"), "config.yaml' is damaged: it is not what a run writes"),
    (rewrite(r"(?s)\nidentity:.*", ""), "is damaged: it is not what a run writes (KeyError"),
    (rewrite("variant:", "variant: {"), "config.yaml' is damaged: "),
    (rewrite("variant:", "variant: !!python/name:os.system"), "could not determine a constructor"),
    (rewrite("heads: 2", "heads: two"), "is damaged: model.heads: 'two' is not a whole number"),
    (rewrite("heads: 2", "haeds: 2"), "is damaged: model.haeds: there is no such key"),
    (rewrite("heads: 2", "heads: 3"), "model.heads: 3 does not divide model.d_model=16"),
    (rewrite("heads: 2", "heads: 4"), "the weights in '"),
    (rewrite("layers: 2", "layers: 3"), "blocks.2.attention.ov.w_o is missing, and (16, 16) is"),
    (rewrite("d_model: 16", "d_model: 1048576"), "is expected"),
    (rewrite("vocabulary: 256", "vocabulary: 255"), "is (256, 16), and (255, 16) is expected"),
    (rewrite("vocabulary: 256", "vocabulary: many"), "is damaged: a vocabulary of 'many'"),
    (rewrite("rank: null", "rank: auto"), "no model can be built from"),
    (rewrite("qk: merged", "qk: no_q"), "blocks.0.attention.qk.w_k is missing, and (16, 16)"),
    (rewrite("out: .*", "out: ${oc.env:SECRET}"), "contains no ${…}"),
    (rewrite("out: .*", 'out: "\\x24{oc.env:SECRET}"'), "contains no ${…}"),
    (rewrite("(?s)seed: 0.*?out: ", "seed: &a 0\nseeds: *a\nout: "), "contains no alias"),
    (rewrite(r"outside: \{\}", "outside: [1]"), "is damaged: it is not what a run writes"),
    (rewrite(r"outside: \{\}", "outside: {a: 1}"), "are not names and hashes"),
    (rewrite(r"outside: \{\}", "outside: {a: b}"), "not the circuit that the run was trained with"),
    (
        rewrite("qk: merged", "qk: foreign"),
        "give variant.qk=foreign, because a run's package is imported",
    ),
    (
        rewrite("ov: separate", "ov: foreign"),
        "give variant.ov=foreign, because a run's package is imported",
    ),
]


@pytest.mark.parametrize(("damage", "line"), BAD, ids=[line[:40] for _, line in BAD])
def test_damaged_folders_are_rejected(run, monkeypatch, damage, line):
    monkeypatch.setenv("SECRET", "planted")
    damage(run)
    before = tree(run)
    with pytest.raises(UserError) as caught:
        restore(run)
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "planted" not in str(caught.value)
    assert tree(run) == before


TOKENIZERS = [
    ("{", "is damaged: it does not describe one of bytes, chars"),
    ('["bytes"]', "is damaged: it does not describe one of bytes, chars"),
    ("[" * 100_000, "is damaged: it does not describe one of bytes, chars"),
    ('{"name": ["bytes"]}', "is damaged: it does not describe one of bytes, chars"),
    ('{"name": "chars"}', "is damaged: its characters are not a text of distinct characters"),
    ('{"name": "chars", "characters": "aa"}', "not a text of distinct characters"),
    ('{"name": "chars", "characters": "abc"}', "it has 3 tokens, the model 256"),
]


@pytest.mark.parametrize(("content", "line"), TOKENIZERS)
def test_damaged_tokenizers_are_rejected(run, content, line):
    (run / "tokenizer.json").write_text(content)
    with pytest.raises(UserError) as caught:
        restore(run).tokenizer()
    assert line in str(caught.value)


def test_missing_tokenizer_is_allowed_for_bytes_only(run):
    """Older runs have no tokenizer: bytes need none, characters do."""
    (run / "tokenizer.json").unlink()
    assert restore(run).tokenizer().vocabulary == 256
    rewrite("tokenizer: bytes", "tokenizer: chars")(run)
    with pytest.raises(UserError, match="does not exist"):
        restore(run).tokenizer()


def test_character_tokenizer_needs_no_corpus(train, tmp_path):
    run = train(tmp_path, *STEPS, "data.tokenizer=chars")
    (tmp_path / "corpus.txt").unlink()
    shutil.rmtree(tmp_path / "cache")
    tokenizer = restore(run).tokenizer()
    text = "tähnich ∑\n"
    assert tokenizer.decode(tokenizer.encode(text.encode())).decode() == text
    kept = json.loads((run / "tokenizer.json").read_text(encoding="utf-8"))
    assert kept == tokenizer.describe()


def test_circuit_file_is_imported_only_if_given(train, tmp_path):
    """A run folder that names a file must not cause its execution."""
    file, journal = tmp_path / "mine.py", tmp_path / "journal"
    file.write_text(CIRCUIT.format(journal=str(journal)))
    run = train(tmp_path, *STEPS, f"variant.file={file}")
    catalogue._load.cache_clear()
    journal.unlink()
    with pytest.raises(UserError, match=r"a circuit from a file, 'mine'; give variant\.file=PATH"):
        restore(run)
    other = tmp_path / "elsewhere" / "mine.py"
    other.parent.mkdir()
    other.write_text(file.read_text() + "# changed\n")
    with pytest.raises(UserError, match="is not the file the run was trained with"):
        restore(run, variant_file=str(other))
    with pytest.raises(UserError, match="cannot read"):
        restore(run, variant_file=str(tmp_path / "nowhere" / "mine.py"))
    renamed = Path(shutil.copy(file, tmp_path / "yours.py"))
    with pytest.raises(UserError, match=r"must have the name of the circuit, 'mine\.py'"):
        restore(run, variant_file=str(renamed))
    assert not journal.exists()
    file.rename(other)  # what counts is what is in it
    restored = restore(run, variant_file=str(other))
    assert restored.model.attention_layers()[0].module.qk.equation == "mine"
    assert journal.read_text() == "imported\n"


def test_unneeded_circuit_is_rejected(run, tmp_path):
    (tmp_path / "mine.py").write_text(CIRCUIT.format(journal=str(tmp_path / "journal")))
    with pytest.raises(UserError, match="trained with no circuit from a file"):
        restore(run, variant_file=str(tmp_path / "mine.py"))
    with pytest.raises(UserError, match="trained with 'merged', not 'separate'"):
        restore(run, qk="separate")
    assert restore(run, qk="merged").step == 3
    assert not (tmp_path / "journal").exists()


def test_package_circuit_is_imported_only_if_named(train, tmp_path, monkeypatch):
    file, journal = tmp_path / "theirs.py", tmp_path / "journal"
    file.write_text(CIRCUIT.format(journal=str(journal)))

    class Entry:
        value = "theirs:Mine"

        def load(self):
            catalogue._load.cache_clear()
            return catalogue.load_file(str(file)).circuit

    installed = [Entry()]
    real = importlib.metadata.entry_points

    def entry_points(**wanted):
        ours = wanted == {"group": "qkablate.circuits", "name": "theirs"}
        return installed if ours else real(**wanted)

    monkeypatch.setattr("qkablate.models.catalogue.metadata.entry_points", entry_points)
    run = train(tmp_path, *STEPS, "variant.qk=theirs")
    journal.unlink()
    with pytest.raises(UserError, match=r"give variant\.qk=theirs"):
        restore(run)
    assert not journal.exists()
    assert restore(run, qk="theirs").model.attention_layers()[0].module.qk.equation == "mine"
    file.write_text(file.read_text() + "# changed\n")
    with pytest.raises(UserError, match="theirs: not the circuit that the run was trained with"):
        restore(run, qk="theirs")
    installed.clear()
    with pytest.raises(UserError, match="theirs: not the circuit that the run was trained with"):
        restore(run, qk="theirs")


def test_find_run(tmp_path):
    names = ("a-d8-h2-s1-0123456789ab", "a-d8-h2-s10-0a23456789ab", "b_w-d8-h2-s1-f123456789ab")
    for age, name in enumerate(names):
        folder = tmp_path / "outputs" / "runs" / name
        folder.mkdir(parents=True)
        (folder / "config.yaml").touch()
        os.utime(folder / "config.yaml", (1e9 - age, 1e9 - age))  # the newest is named first
    (tmp_path / "outputs" / "runs" / "begun-0").mkdir()
    (tmp_path / "b_w").mkdir()  # a folder that is no run hides none
    runs = Path("outputs/runs")
    for word, name in [
        (names[0], names[0]),
        (names[0][:-2], names[0]),
        ("a-d8-h2-s1", names[0]),
        ("a-d8-h2-s10", names[1]),
        ("b", names[2]),
        ("b_w", names[2]),
        ("01", names[0]),
        ("f123456789ab", names[2]),
    ]:
        assert find_run(word) == runs / name, word
    folder = tmp_path / "outputs" / "runs" / names[1]
    for word in (f"outputs/runs/{names[1]}", f"outputs/runs/{names[1]}/", str(folder)):
        assert find_run(word, out="/nowhere").resolve() == folder
    for word, line in [
        ("a", "'a' matches 2 runs: "),
        ("0", "'0' matches 2 runs"),
        ("b_v", "there is no run 'b_v' in 'outputs' (nearest: b_w)"),
        ("outputs", "'outputs' is not a run: it has no config.yaml"),
        ("", "give a run"),
        ("x" * 5000, "there is no run 'xxx"),
    ]:
        with pytest.raises(UserError, match=re.escape(line)):
            find_run(word)
    with pytest.raises(UserError, match="there is no run 'a' in 'elsewhere', which does not exist"):
        find_run("a", out="elsewhere")


def test_config_that_does_not_fit_the_id_is_damaged(train, tmp_path):
    """Change the heads, which changes no shape of the weights."""
    run = train(tmp_path, *STEPS, "variant=standard")
    rewrite("heads: 2", "heads: 4")(run)
    with pytest.raises(UserError, match="do not match the id of the run"):
        restore(run)


def test_deeply_nested_config_is_rejected(run):
    (run / "config.yaml").write_text('{"a":' * 200_000)
    with pytest.raises(UserError, match="too deep"):
        restore(run)

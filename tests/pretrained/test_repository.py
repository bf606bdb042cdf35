"""Published models from the Hub, its cache, or a folder; each mistake is one line.

The Hub here is a server on this machine. Nothing reaches the real one.
"""

import hashlib
import json
import re

import pytest

from qkablate.training.warm_start.restore import restore
from tests.cli.helpers import assert_refused
from tests.data import fake_hub
from tests.data.fake_hub import commit
from tests.pretrained.published import split_weights, write_published

FILE = "GET .*/resolve/"
HEAD = "HEAD .*/resolve/"
INFO = "/api/models/"


@pytest.fixture(autouse=True)
def hf_home(tmp_path, monkeypatch):
    """Return HF_HOME, which is empty."""
    fake_hub.isolate_client(monkeypatch, tmp_path / "hf")
    return tmp_path / "hf"


@pytest.fixture
def hub(monkeypatch):
    with fake_hub.serving() as hub:
        fake_hub.point_client(monkeypatch, hub.address)
        yield hub


@pytest.fixture
def lose_network(monkeypatch):
    """Return a function after which no server answers."""
    with fake_hub.missing_server() as address:
        yield lambda: fake_hub.point_client(monkeypatch, address)


def read_files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def publish(folder, parts=1):
    """Return the files of a random model, and write them into a folder."""
    write_published(folder)
    if parts > 1:
        split_weights(folder, parts)
    return read_files(folder)


def import_json(qkablate, *words):
    done = qkablate("import", *words, "--json")
    assert done.code == 0, done.err
    return json.loads(done.out)


def assert_nothing_is_written(tmp_path):
    assert [*tmp_path.glob("outputs/runs/*"), *tmp_path.glob("outputs/runs/.*")] == []


@pytest.mark.parametrize("parts", [1, 3])
def test_model_of_the_hub_is_that_of_the_folder(qkablate, hub, tmp_path, parts):
    files = publish(tmp_path / "mine", parts)
    hub.models["owner/name"] = files | {"pytorch_model.bin": b"\x80", "modeling.py": b"raise"}
    found = import_json(qkablate, "owner/name")
    assert found["origin"]["repository"] == "owner/name"
    assert found["origin"]["revision"] == commit(hub.models["owner/name"])
    sums = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    sums.pop("model.safetensors.index.json", None)
    assert found["origin"]["sha256"] == sums
    folder = tmp_path / found["folder"]
    assert json.loads((folder / "origin.json").read_text()) == found["origin"]
    assert sorted(hub.downloads()) == sorted(files)
    own = import_json(qkablate, "mine", "out=own")
    weights, expected = (
        restore(tmp_path / path).model.state_dict() for path in (folder, own["folder"])
    )
    assert {*weights} == {*expected}
    assert all(weights[name].equal(expected[name]) for name in weights)
    # The weights alone are the identity of a run, wherever they came from.
    assert own["run"].rpartition("-")[2] == found["run"].rpartition("-")[2]


def test_second_import_takes_nothing_from_the_network(qkablate, hub, tmp_path, lose_network):
    hub.models["owner/name"] = publish(tmp_path / "mine", 2)
    first = import_json(qkablate, "owner/name")
    assert len(hub.downloads()) == 4
    hub.requests.clear()
    again = import_json(qkablate, "owner/name")
    assert hub.downloads() == []
    assert (first["is_new"], again["is_new"]) == (True, False)
    lose_network()
    for words in (["owner/name"], ["owner/name", f"revision={first['origin']['revision']}"]):
        offline = import_json(qkablate, *words, "out=another")
        assert offline["origin"] == first["origin"]


def test_revision_is_a_branch_or_a_commit(qkablate, hub, tmp_path, lose_network):
    old = hub.models["owner/name@old"] = publish(tmp_path / "old")
    hub.models["owner/name"] = old | {"README.md": b"changed"}
    assert import_json(qkablate, "owner/name")["origin"]["revision"] != commit(old)
    for revision in ("old", commit(old)):
        found = import_json(qkablate, "owner/name", f"revision={revision}")
        assert found["origin"]["revision"] == commit(old)
    assert_refused(qkablate("import", "owner/name", "revision=new"), "owner/name has no 'new'")
    lose_network()
    found = import_json(qkablate, "owner/name", "revision=old")
    assert found["origin"]["revision"] == commit(old)
    done = qkablate("import", "owner/name", "revision=new")
    assert_refused(done, "revision 'new' of owner/name cannot be reached")


@pytest.mark.parametrize("revision", ["../../x", "/etc", "a/../../b", "", "a\x1b[31m"])
def test_revision_that_is_a_path_is_rejected(qkablate, hub, tmp_path, revision, lose_network):
    hub.models["owner/name"] = publish(tmp_path / "mine")
    assert_refused(qkablate("import", "owner/name", f"revision={revision}"), "revision")
    lose_network()
    assert_refused(qkablate("import", "owner/name", f"revision={revision}"), "revision")


@pytest.mark.parametrize("status", [401, 404])
def test_missing_repository_is_one_line(qkablate, hub, tmp_path, status):
    hub.refused["owner/name"] = status
    done = qkablate("import", "owner/name")
    assert_refused(done, "owner/name: the Hub has no such model, or it is private", "HF_TOKEN")
    assert_nothing_is_written(tmp_path)


@pytest.mark.parametrize("status", [401, 403])
def test_gated_repository_is_one_line(qkablate, hub, tmp_path, status):
    hub.models["owner/name"] = publish(tmp_path / "mine")
    hub.gated["owner/name"] = status
    done = qkablate("import", "owner/name")
    assert_refused(done, "owner/name: its owner grants access on request", "HF_TOKEN")
    assert_nothing_is_written(tmp_path)


@pytest.mark.parametrize("status", [400, 403, 500, 503])
def test_error_of_the_server_is_one_line(qkablate, hub, tmp_path, status):
    hub.refused["owner/name"] = status
    hub.error_code = ""
    assert_refused(qkablate("import", "owner/name"), "owner/name: it cannot be downloaded")
    assert_nothing_is_written(tmp_path)


@pytest.mark.parametrize("status", [403, 503])
def test_error_of_the_server_leaves_what_is_cached(qkablate, hub, tmp_path, status):
    hub.models["owner/name"] = publish(tmp_path / "mine")
    first = import_json(qkablate, "owner/name")
    hub.refused["owner/name"] = status
    hub.error_code = ""
    done = qkablate("import", "owner/name", "--json")
    assert done.code == 0, done.err
    assert "HF_HOME has it" in done.err
    assert json.loads(done.out)["run"] == first["run"]


def test_vocabulary_of_a_gpt2_is_read(qkablate, hub, tmp_path):
    write_published(tmp_path / "mine", vocabulary=50257)
    other = json.dumps({"Hello": 1}).encode()
    hub.models["owner/name"] = read_files(tmp_path / "mine") | {"vocab.json": other}
    assert import_json(qkablate, "owner/name")["has_tokenizer"] is False
    assert "vocab.json" in hub.downloads()
    write_published(tmp_path / "llama", "llama")
    hub.models["owner/llama"] = read_files(tmp_path / "llama") | {"vocab.json": other}
    import_json(qkablate, "owner/llama")
    assert [*hub.downloads()].count("vocab.json") == 1


def test_pickle_alone_is_not_downloaded(qkablate, hub, tmp_path):
    files = publish(tmp_path / "mine")
    files["pytorch_model.bin"] = files.pop("model.safetensors")
    hub.models["owner/name"] = files
    assert_refused(qkablate("import", "owner/name"), "a pickle alone", "never read")
    assert "pytorch_model.bin" not in hub.downloads()
    assert_nothing_is_written(tmp_path)


@pytest.mark.parametrize(
    ("missing", "reason"),
    [("config.json", "no config.json"), ("model.safetensors", "no model.safetensors")],
)
def test_incomplete_repository_is_one_line(qkablate, hub, tmp_path, missing, reason):
    files = publish(tmp_path / "mine")
    files.pop(missing)
    hub.models["owner/name"] = files
    assert_refused(qkablate("import", "owner/name"), "owner/name has", reason)
    assert_nothing_is_written(tmp_path)


@pytest.mark.parametrize("name", ["../../x.safetensors", "/x.safetensors", "absent.safetensors"])
def test_index_of_the_hub_names_files_beside_it(qkablate, hub, tmp_path, hf_home, name):
    files = publish(tmp_path / "mine", 2)
    index = {"weight_map": {"wte.weight": name}}
    files["model.safetensors.index.json"] = json.dumps(index).encode()
    hub.models["owner/name"] = files
    assert_refused(qkablate("import", "owner/name"), name.rpartition("/")[2])
    assert {*hub.downloads()} == {"config.json", "model.safetensors.index.json"}
    assert_nothing_is_written(tmp_path)


@pytest.mark.parametrize("content", [b"<html>", b"[]", b"7", b'{"siblings": [3]}', b'{"id": []}'])
def test_answer_that_is_not_the_hubs_is_one_line(qkablate, hub, tmp_path, content):
    hub.files["api/models/owner/name"] = content
    hub.files["api/models/owner/name/revision/main"] = content
    assert_refused(qkablate("import", "owner/name"), "owner/name")
    assert_nothing_is_written(tmp_path)


@pytest.mark.parametrize("silent", ["HEAD /$", INFO, HEAD])
def test_server_that_hangs_is_noticed_at_once(qkablate, hub, tmp_path, silent):
    hub.models["owner/name"] = publish(tmp_path / "mine")
    hub.silent = silent
    assert_refused(qkablate("import", "owner/name"), "owner/name")
    # The client of the Hub alone would ask again, for minutes.
    assert len([line for line in hub.requests if re.search(silent, line)]) == 1
    assert_nothing_is_written(tmp_path)


def test_download_that_stops_is_one_line_and_goes_on(qkablate, hub, tmp_path, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # between two attempts
    hub.models["owner/name"] = publish(tmp_path / "mine")
    hub.broken = "GET .*safetensors"
    done = qkablate("import", "owner/name")
    assert done.code == 2
    assert "owner/name: it cannot be downloaded" in done.err.splitlines()[-1]
    assert_nothing_is_written(tmp_path)
    hub.broken = ""
    assert import_json(qkablate, "owner/name")["is_new"]


def test_incomplete_cache_is_one_line(qkablate, hub, tmp_path, hf_home, lose_network):
    """Another program may have asked for a part of the model."""
    hub.models["owner/name"] = publish(tmp_path / "mine", 2)
    import_json(qkablate, "owner/name")
    lose_network()
    for name in ("part-1.safetensors", "model.safetensors.index.json", "config.json"):
        (path,) = hf_home.glob(f"hub/models--owner--name/snapshots/*/{name}")
        path.unlink()
        done = qkablate("import", "owner/name", "out=another")
        assert_refused(
            done, "owner/name", "HF_HOME", name if "config" not in name else "cannot be reached"
        )
    assert not [*tmp_path.glob("another/runs/*")]


@pytest.mark.slow
def test_command_reads_the_environment(hub, tmp_path, spawn):
    """Nothing is patched in another process."""
    hub.models["owner/name"] = publish(tmp_path / "mine")
    process = spawn("import", "owner/name", "--json")
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert json.loads(out)["origin"]["revision"] == commit(hub.models["owner/name"])
    process = spawn("import", "owner/other")
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out, err.count("\n")) == (2, "", 1)

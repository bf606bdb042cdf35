"""What stands in the files of a run, and what is read of them."""

import dataclasses
import json
from contextlib import suppress

import pytest

from qkablate.config import (
    Config,
    TrackConfig,
)
from qkablate.runs.records import (
    publish_json,
    read_config,
    read_json,
    read_row,
    row_line,
    write_json,
)
from qkablate.runs.run import Run


def test_json_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "result.json"
    write_json(path, {"a": 1})
    with pytest.raises(ValueError, match="JSON"):
        write_json(path, {"a": float("nan")})
    assert read_json(path) == {"a": 1}
    assert sorted(file.name for file in tmp_path.iterdir()) == ["home", "result.json"]
    path.write_text('{"a": ')
    assert read_json(path) is None


def test_what_is_published_stays(tmp_path):
    path = tmp_path / "result.json"
    publish_json(path, {"a": 1})
    with pytest.raises(FileExistsError):
        publish_json(path, {"a": 2})
    assert read_json(path) == {"a": 1}
    assert sorted(file.name for file in tmp_path.iterdir()) == ["home", "result.json"]


def test_a_frozen_config_is_read_as_plain_data(tmp_path):
    run, config = Run(tmp_path, "label", "id"), Config(track=TrackConfig(tags=["a: b", "ä ∑"]))
    with run.owned():
        run.freeze(config, {"heads": 4, "nothing": None, "circuits_from_outside": {"mine": "f"}})
    found = read_config(run.folder)
    plain = json.loads(json.dumps(dataclasses.asdict(config)))  # a tuple comes back as a list
    identity = found.pop("identity")
    assert identity == {"heads": 4, "nothing": None, "circuits_from_outside": {"mine": "f"}}
    assert found.pop("id") == "id"
    assert found == plain
    kinds = {type(value) for value in [found, *found.values(), *found["model"].values()]}
    assert kinds <= {dict, list, str, int, float, bool, type(None)}


NO_CONFIGS = {
    "nothing": b"",
    "a list": b"- a\n- b\n",
    "a word": b"seed",
    "a number": b"3\n",
    "null": b"null\n",
    "two of them": b"a: 1\n---\nb: 2\n",
    "half": b"variant:\n  name: no_q\n  qk: [",
    "an alias": b"a: &a [1, 2]\nb: *a\n",
    "aliases of aliases": b"a: &a [1]\nb: &b [*a, *a]\nc: [*b, *b]\n",
    "an alias that is nothing": b"a: *b\n",
    "an interpolation": b"a: ${b}\nb: 1\n",
    "an interpolation in a word": b"a: before ${b} after\n",
    "an interpolation in a list": b"a: [1, ['${b}']]\n",
    "an interpolation in a key": b"'${b}': 1\n",
    "the environment": b"a: ${oc.env:PLANTED}\n",
    "code": b"a: !!python/object/apply:os.mkdir ['made']\n",
    "an object": b"a: !!python/name:os.system\n",
    "a tag of nobody": b"a: !mine 3\n",
    "binary": bytes(range(256)),
    "zeros": b"\0" * 300,
    "no utf-8": b"a: \xff\xfe\n",
    "utf-16": "a: 1\n".encode("utf-16"),
    "tabs": b"a:\n\tb: 1\n",
    "several lines wrong": b"a: [\n" * 9,
    "deep": b"[" * 5_000,
    "a deep map": b"{a: " * 5_000,
    "a day that is none": b"a: 2020-13-45\n",
    "a date in words": b"a: !!timestamp soon\n",
    "a number that is empty": b"a: !!int ''\n",
    "a float that is empty": b"a: !!float ''\n",
    "a number in words": b"a: !!int many\n",
    "truth in words": b"a: !!bool perhaps\n",
    "a number of 5000 digits": b"a: " + b"9" * 5000 + b"\n",
    "a list for a key": b"? [a]\n: 1\n",
}


@pytest.mark.parametrize("content", NO_CONFIGS.values(), ids=NO_CONFIGS)
def test_what_no_run_writes_is_no_config_and_says_why_in_a_line(tmp_path, monkeypatch, content):
    monkeypatch.setenv("PLANTED", "planted-secret-key")
    (tmp_path / "config.yaml").write_bytes(content)
    with pytest.raises(ValueError, match=r"\S") as told:
        read_config(tmp_path)
    assert "\n" not in str(told.value)
    assert len(str(told.value)) < 300
    assert "planted-secret-key" not in str(told.value)
    assert not (tmp_path / "made").exists()


def test_a_config_that_is_not_there_says_so_in_a_line(tmp_path):
    with pytest.raises(ValueError, match="No such file") as told:
        read_config(tmp_path / "nowhere")
    assert "\n" not in str(told.value)
    (tmp_path / "config.yaml").mkdir()
    with pytest.raises(ValueError, match="directory"):
        read_config(tmp_path)


@pytest.mark.parametrize("word", ["$", "$b", "{b}", "$ {b}", "cost: 3 $", "&a", "*a"])
def test_words_that_only_look_so_are_words(tmp_path, word):
    (tmp_path / "config.yaml").write_text(f"a: {json.dumps(word)}  # ${{b}}\n")
    assert read_config(tmp_path) == {"a": word}


def test_a_result_that_was_changed_is_none(tmp_path):
    from qkablate.runs.records import read_result, sealed

    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("{}")
    result = {"status": "done", "loss": {"val": 1.25, "test": 1.5}, "tokens": 1, "seconds": 1.0}
    write_json(tmp_path / "result.json", result)  # as those of before, without a checksum
    assert read_result(tmp_path) == result
    write_json(tmp_path / "result.json", sealed(result, metrics))
    assert read_result(tmp_path) == sealed(result, metrics)
    text = (tmp_path / "result.json").read_text().replace("1.25", "1.35")
    (tmp_path / "result.json").write_text(text)
    assert read_result(tmp_path) is None


@pytest.mark.parametrize("row", [{"step": 3, "val/loss": 1 / 3}, {"a": ["é", None, {"b": []}]}])
def test_a_row_that_was_changed_tells_nothing_else(row):
    line = row_line(row)
    assert json.loads(line).items() >= row.items()
    assert read_row(line).items() >= row.items()
    for place in range(len(line)):
        for bit in range(8):
            changed = line[:place] + bytes([line[place] ^ 1 << bit]) + line[place + 1 :]
            with suppress(ValueError):  # unless it is the word "crc32" that was changed
                assert read_row(changed).items() >= row.items()


def test_older_rows_have_no_checksum():
    assert read_row(b'{"step": 3}') == {"step": 3}
    with pytest.raises(ValueError, match="checksum"):
        read_row(row_line({"step": 3}).replace(b"3", b"4", 1))

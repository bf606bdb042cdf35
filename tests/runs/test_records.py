"""Files of a run: JSON, rows of metrics, config and result."""

import dataclasses
import json
from contextlib import suppress

import pytest

from qkablate.config import (
    Config,
    TrackingConfig,
)
from qkablate.runs.records import (
    decode_row,
    encode_row,
    read_config,
    read_json,
    write_json,
    write_json_once,
)
from qkablate.runs.run import Run


def test_json_is_written_completely_or_not_at_all(tmp_path):
    path = tmp_path / "result.json"
    write_json(path, {"a": 1})
    with pytest.raises(ValueError, match="JSON"):
        write_json(path, {"a": float("nan")})
    assert read_json(path) == {"a": 1}
    assert sorted(file.name for file in tmp_path.iterdir()) == ["home", "result.json"]
    path.write_text('{"a": ')
    assert read_json(path) is None


def test_write_json_once_keeps_the_first_file(tmp_path):
    path = tmp_path / "result.json"
    write_json_once(path, {"a": 1})
    with pytest.raises(FileExistsError):
        write_json_once(path, {"a": 2})
    assert read_json(path) == {"a": 1}
    assert sorted(file.name for file in tmp_path.iterdir()) == ["home", "result.json"]


def test_frozen_config_is_read_as_plain_data(tmp_path):
    run, config = (
        Run(tmp_path, "label", "id"),
        Config(tracking=TrackingConfig(tags=["a: b", "ä ∑"])),
    )
    with run.hold_lease():
        run.freeze(config, {"heads": 4, "nothing": None, "circuits_from_outside": {"mine": "f"}})
    content = read_config(run.folder)
    plain = json.loads(json.dumps(dataclasses.asdict(config)))  # tuples become lists
    identity = content.pop("identity")
    assert identity == {"heads": 4, "nothing": None, "circuits_from_outside": {"mine": "f"}}
    assert content.pop("id") == "id"
    assert content == plain
    kinds = {type(value) for value in [content, *content.values(), *content["model"].values()]}
    assert kinds <= {dict, list, str, int, float, bool, type(None)}


INVALID_CONFIGS = {
    "nothing": b"",
    "a list": b"- a\n- b\n",
    "a word": b"seed",
    "a number": b"3\n",
    "null": b"null\n",
    "two documents": b"a: 1\n---\nb: 2\n",
    "truncated": b"variant:\n  name: no_q\n  qk: [",
    "an alias": b"a: &a [1, 2]\nb: *a\n",
    "aliases of aliases": b"a: &a [1]\nb: &b [*a, *a]\nc: [*b, *b]\n",
    "an undefined alias": b"a: *b\n",
    "an interpolation": b"a: ${b}\nb: 1\n",
    "an interpolation in text": b"a: before ${b} after\n",
    "an interpolation in a list": b"a: [1, ['${b}']]\n",
    "an interpolation in a key": b"'${b}': 1\n",
    "the environment": b"a: ${oc.env:PLANTED}\n",
    "code": b"a: !!python/object/apply:os.mkdir ['made']\n",
    "an object": b"a: !!python/name:os.system\n",
    "an unknown tag": b"a: !mine 3\n",
    "binary": bytes(range(256)),
    "zeros": b"\0" * 300,
    "invalid utf-8": b"a: \xff\xfe\n",
    "utf-16": "a: 1\n".encode("utf-16"),
    "tabs": b"a:\n\tb: 1\n",
    "many errors": b"a: [\n" * 9,
    "deep": b"[" * 5_000,
    "a deep map": b"{a: " * 5_000,
    "an invalid date": b"a: 2020-13-45\n",
    "a date as text": b"a: !!timestamp soon\n",
    "an empty number": b"a: !!int ''\n",
    "an empty float": b"a: !!float ''\n",
    "a number as text": b"a: !!int many\n",
    "a boolean as text": b"a: !!bool perhaps\n",
    "a number of 5000 digits": b"a: " + b"9" * 5000 + b"\n",
    "a list as key": b"? [a]\n: 1\n",
}


@pytest.mark.parametrize("content", INVALID_CONFIGS.values(), ids=INVALID_CONFIGS)
def test_invalid_config_is_rejected_in_one_line(tmp_path, monkeypatch, content):
    monkeypatch.setenv("PLANTED", "planted-secret-key")
    (tmp_path / "config.yaml").write_bytes(content)
    with pytest.raises(ValueError, match=r"\S") as error:
        read_config(tmp_path)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 300
    assert "planted-secret-key" not in str(error.value)
    assert not (tmp_path / "made").exists()


def test_missing_config_is_rejected_in_one_line(tmp_path):
    with pytest.raises(ValueError, match="No such file") as error:
        read_config(tmp_path / "nowhere")
    assert "\n" not in str(error.value)
    (tmp_path / "config.yaml").mkdir()
    with pytest.raises(ValueError, match="directory"):
        read_config(tmp_path)


@pytest.mark.parametrize("word", ["$", "$b", "{b}", "$ {b}", "cost: 3 $", "&a", "*a"])
def test_harmless_special_characters_are_kept(tmp_path, word):
    (tmp_path / "config.yaml").write_text(f"a: {json.dumps(word)}  # ${{b}}\n")
    assert read_config(tmp_path) == {"a": word}


def test_changed_result_is_not_read(tmp_path):
    from qkablate.runs.records import read_result, seal_result

    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("{}")
    result = {"status": "done", "loss": {"val": 1.25, "test": 1.5}, "tokens": 1, "seconds": 1.0}
    write_json(tmp_path / "result.json", result)  # older results have no checksum
    assert read_result(tmp_path) == result
    write_json(tmp_path / "result.json", seal_result(result, metrics))
    assert read_result(tmp_path) == seal_result(result, metrics)
    text = (tmp_path / "result.json").read_text().replace("1.25", "1.35")
    (tmp_path / "result.json").write_text(text)
    assert read_result(tmp_path) is None


@pytest.mark.parametrize("row", [{"step": 3, "val/loss": 1 / 3}, {"a": ["é", None, {"b": []}]}])
def test_changed_row_is_rejected(row):
    line = encode_row(row)
    assert json.loads(line).items() >= row.items()
    assert decode_row(line).items() >= row.items()
    for position in range(len(line)):
        for bit in range(8):
            changed = line[:position] + bytes([line[position] ^ 1 << bit]) + line[position + 1 :]
            with suppress(ValueError):  # unless the key "crc32" was changed
                assert decode_row(changed).items() >= row.items()


def test_rows_without_checksum_are_read():
    assert decode_row(b'{"step": 3}') == {"step": 3}
    with pytest.raises(ValueError, match="checksum"):
        decode_row(encode_row({"step": 3}).replace(b"3", b"4", 1))

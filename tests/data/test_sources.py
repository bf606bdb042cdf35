"""Files of every kind, and what is wrong with some."""

import gzip
import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from qkablate.config import DataConfig
from qkablate.data.sources import files, read
from qkablate.errors import UserError


def documents(path: Path | str, field: str | None = None) -> list[str]:
    config = DataConfig(source="text", path=str(path), field=field)
    return [b"".join(pieces).decode() for pieces in read(files(config), field)]


def zstd(data: bytes) -> bytes:
    return pyarrow.Codec("zstd").compress(data, asbytes=True)


def parquet(path: Path, **columns) -> bytes:
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    return path.read_bytes()


def test_the_standard_library():
    names = [str(file) for file in files(DataConfig())]
    assert len(names) > 100
    assert not any("site-packages" in name or "/test/" in name for name in names)


@pytest.mark.parametrize("pack", [lambda data: data, gzip.compress, zstd], ids=["", ".gz", ".zst"])
@pytest.mark.parametrize("kind", [".txt", ".jsonl", ".parquet"])
def test_every_kind_of_file(tmp_path, request, pack, kind):
    texts = ["one\ntext", "zwei ∑", "three"]
    suffix = request.node.callspec.id.split("-")[1]
    if kind == ".txt":
        data = "".join(texts).encode()
    elif kind == ".jsonl":
        data = "\n".join(json.dumps({"n": i, "text": t}) for i, t in enumerate(texts)).encode()
    else:
        data = parquet(tmp_path / "plain", n=[1, 2, 3], text=texts)
    path = tmp_path / f"data{kind}{suffix}"
    path.write_bytes(pack(data))
    assert documents(path) == (["".join(texts)] if kind == ".txt" else texts)


def test_folder_file_and_pattern(tmp_path):
    for name in ("b/2.txt", "a.txt", "c/d/3.md", ".hidden/4.txt", "c/.5.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    assert documents(tmp_path) == ["a.txt", "b/2.txt", "c/d/3.md"]
    assert documents(tmp_path / "a.txt") == ["a.txt"]
    assert documents(tmp_path / "*" / "*.txt") == ["b/2.txt"]
    assert documents(f"{tmp_path}/**/*.md") == ["c/d/3.md"]


def test_the_field_of_rows(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"body": "x", "text": "y"}\n\n{"body": null, "text": "w"}\n')
    assert documents(path, "body") == ["x"]
    assert documents(path) == ["y", "w"]


def test_long_rows_and_long_files(tmp_path):
    """Longer than what is read at once, with characters across the border."""
    text = "∑𝄞é" * 300_000
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    (tmp_path / "b.jsonl").write_text(json.dumps({"text": text}, ensure_ascii=False) + "\n")
    assert documents(tmp_path) == [text, text]


@pytest.mark.parametrize(
    ("name", "content", "field", "line"),
    [
        ("a.txt", b"abc\xff\xfe", None, "is not UTF-8 text (byte 3)"),
        ("a.txt", b"x" * 2**20 + b"\xe2\x88", None, "is not UTF-8 text (byte 1048576)"),
        ("a.txt", b"x" * (2**20 - 1) + b"\xe2A", None, "is not UTF-8 text (byte 1048575)"),
        ("a.txt", b"ab\0c", None, "is no text: byte 2 is 0"),
        ("a.txt.gz", b"this is no gzip", None, "cannot read"),
        ("a.txt.gz", gzip.compress(b"x" * 9999, mtime=0)[:-9], None, "cannot read"),
        ("a.txt.gz", gzip.compress(b"")[:10] + b"\xff" * 9, None, "cannot read"),
        ("a.jsonl.gz", gzip.compress(b"")[:10] + b"\xff" * 9, None, "cannot read"),
        ("a.txt.zst", b"this is no zstd", None, "cannot read"),
        ("a.parquet", b"this is no parquet", None, "cannot read"),
        ("a.jsonl", b'{"text": "a"}\n{"text": ', None, "line 2 of"),
        ("a.jsonl", b'{"text": "a\xff"}', None, "line 1 of"),
        ("a.jsonl", b'{"text": "\\ud800"}', None, "is not UTF-8 text"),
        ("a.jsonl", b'["text"]', None, "has no text 'text'"),
        ("a.jsonl", b'{"text": 1}', None, "'text' is no text in line 1"),
        ("a.jsonl", b'{"body": "x"}', "boddy", "has no text 'boddy'; it has body"),
        ("a.txt", b"x", "text", "data.field: 'text' is for rows: .jsonl and .parquet files"),
    ],
)
def test_what_is_wrong_is_one_line(tmp_path, name, content, field, line):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError) as error:
        documents(tmp_path / name, field)
    assert line in str(error.value)
    assert "\n" not in str(error.value)


def test_a_column_that_is_no_text(tmp_path):
    parquet(tmp_path / "a.parquet", text=[1, 2], body=["x", "y"])
    with pytest.raises(UserError, match=r"data\.field: 'text' is no text in"):
        documents(tmp_path / "a.parquet")
    assert documents(tmp_path / "a.parquet", "body") == ["x", "y"]


@pytest.mark.parametrize("path", ["nothing.txt", "*.none", "empty"])
def test_what_is_not_there(tmp_path, path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"data\.path: "):
        documents(tmp_path / path)


def test_a_parquet_whose_text_is_no_utf8(tmp_path):
    path = tmp_path / "a.parquet"
    table = pyarrow.table({"text": ["a" * 20]})
    pyarrow.parquet.write_table(table, path, compression="none", use_dictionary=False)
    path.write_bytes(path.read_bytes().replace(b"a" * 20, b"\xff" * 20))
    with pytest.raises(UserError, match="'text' is not UTF-8 text in"):
        documents(path)

"""Text files of every format, and errors in them."""

import gzip
import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from qkablate.config import DataConfig
from qkablate.data.sources import find_files, read_documents
from qkablate.errors import UserError


def documents(path: Path | str, field: str | None = None) -> list[str]:
    config = DataConfig(source="text", path=str(path), field=field)
    return [b"".join(pieces).decode() for pieces in read_documents(find_files(config), field)]


def zstd(data: bytes) -> bytes:
    return pyarrow.Codec("zstd").compress(data, asbytes=True)


def parquet(path: Path, **columns) -> bytes:
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    return path.read_bytes()


def test_standard_library_files_are_found():
    names = [str(file) for file in find_files(DataConfig())]
    assert len(names) > 100
    assert not any("site-packages" in name or "/test/" in name for name in names)


@pytest.mark.parametrize("pack", [lambda data: data, gzip.compress, zstd], ids=["", ".gz", ".zst"])
@pytest.mark.parametrize("kind", [".txt", ".jsonl", ".parquet"])
def test_every_format_and_compression_is_read(tmp_path, request, pack, kind):
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


def test_folder_file_and_pattern_select_files(tmp_path):
    for name in ("b/2.txt", "a.txt", "c/d/3.md", ".hidden/4.txt", "c/.5.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    assert documents(tmp_path) == ["a.txt", "b/2.txt", "c/d/3.md"]
    assert documents(tmp_path / "a.txt") == ["a.txt"]
    assert documents(tmp_path / "*" / "*.txt") == ["b/2.txt"]
    assert documents(f"{tmp_path}/**/*.md") == ["c/d/3.md"]


def test_field_of_rows_can_be_chosen(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"body": "x", "text": "y"}\n\n{"body": null, "text": "w"}\n')
    assert documents(path, "body") == ["x"]
    assert documents(path) == ["y", "w"]


def test_text_longer_than_the_buffer_is_read(tmp_path):
    """With characters across the boundaries of the buffer."""
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
        ("a.txt", b"ab\0c", None, "is not text: byte 2 is 0"),
        ("a.txt.gz", b"this is no gzip", None, "cannot read"),
        ("a.txt.gz", gzip.compress(b"x" * 9999, mtime=0)[:-9], None, "cannot read"),
        ("a.txt.gz", gzip.compress(b"", mtime=0)[:10] + b"\xff" * 9, None, "cannot read"),
        ("a.jsonl.gz", gzip.compress(b"", mtime=0)[:10] + b"\xff" * 9, None, "cannot read"),
        ("a.txt.zst", b"this is no zstd", None, "cannot read"),
        ("a.parquet", b"this is no parquet", None, "cannot read"),
        ("a.jsonl", b'{"text": "a"}\n{"text": ', None, "line 2 of"),
        ("a.jsonl", b'{"text": "a\xff"}', None, "line 1 of"),
        ("a.jsonl", b'{"text": "\\ud800"}', None, "is not UTF-8 text"),
        ("a.jsonl", b'["text"]', None, "has no text 'text'"),
        ("a.jsonl", b'{"text": 1}', None, "'text' is not text in line 1"),
        ("a.jsonl", b'{"body": "x"}', "boddy", "has no text 'boddy'; it has body"),
        ("a.txt", b"x", "text", "data.field: 'text' applies to rows: .jsonl and .parquet files"),
    ],
)
def test_invalid_file_is_reported_in_one_line(tmp_path, name, content, field, line):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError) as error:
        documents(tmp_path / name, field)
    assert line in str(error.value)
    assert "\n" not in str(error.value)


def test_column_of_numbers_is_rejected(tmp_path):
    parquet(tmp_path / "a.parquet", text=[1, 2], body=["x", "y"])
    with pytest.raises(UserError, match=r"data\.field: 'text' is not text in"):
        documents(tmp_path / "a.parquet")
    assert documents(tmp_path / "a.parquet", "body") == ["x", "y"]


@pytest.mark.parametrize("path", ["nothing.txt", "*.none", "empty"])
def test_missing_path_is_rejected(tmp_path, path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"data\.path: "):
        documents(tmp_path / path)


def test_parquet_with_invalid_utf8_is_rejected(tmp_path):
    path = tmp_path / "a.parquet"
    table = pyarrow.table({"text": ["a" * 20]})
    pyarrow.parquet.write_table(table, path, compression="none", use_dictionary=False)
    path.write_bytes(path.read_bytes().replace(b"a" * 20, b"\xff" * 20))
    with pytest.raises(UserError, match="'text' is not UTF-8 text in"):
        documents(path)

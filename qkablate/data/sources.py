"""Where text comes from: documents, by the split they were published in, where they were."""

import codecs
import glob
import gzip
import json
import os
import sysconfig
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from qkablate.config import DataConfig
from qkablate.errors import UserError

Document = Iterable[bytes]  # its text, a piece after the other
Source = Iterable[tuple[str, Iterable[Document]]]  # by the split they were published in, or ""

_PIECE = 2**20
_IN_ROWS = (".jsonl", ".parquet")
# What comes of a file that is cut, no .gz at all, or a bomb.
_DAMAGED = (OSError, EOFError, MemoryError, zlib.error)
# Tests, vendored packages, and tables of numbers that are no text.
_NOT_TEXT = {
    "test",
    "tests",
    "idle_test",
    "site-packages",
    "dist-packages",
    "encodings",
    "pydoc_data",
}


def files(config: DataConfig) -> list[Path]:
    """The files that make the corpus."""
    if config.source == "stdlib":
        return _stdlib_files()
    assert config.path is not None
    given = os.path.expanduser(config.path)
    path = Path(given)
    if path.is_file():
        found = [path]
    elif path.is_dir():
        found = sorted(f for f in path.rglob("*") if f.is_file() and not _hidden(f, path))
    else:
        found = sorted(Path(f) for f in glob.glob(given, recursive=True) if os.path.isfile(f))
        if not found:
            raise UserError(f"data.path: there is no file, folder or pattern '{config.path}'")
    if not found:
        raise UserError(f"data.path: the folder '{config.path}' holds no file")
    if config.field and not any(_kind(file) in _IN_ROWS for file in found):
        raise UserError(f"data.field: '{config.field}' is for rows: .jsonl and .parquet files")
    return found


def read(found: list[Path], field: str | None) -> Iterator[Document]:
    """Their documents: a file of plain text is one, a row of .jsonl or .parquet is one."""
    for file in found:
        try:
            if _kind(file) == ".jsonl":
                yield from ([text] for text in _json_rows(file, field or "text"))
            elif _kind(file) == ".parquet":
                yield from ([text] for text in _parquet_rows(file, field or "text"))
            else:
                yield _plain(file)
        except _DAMAGED as error:
            raise _unreadable(file, error) from None


def _kind(file: Path) -> str:
    """What is in it: its suffix, but for that of its compression."""
    name = file.with_suffix("") if file.suffix.lower() in (".gz", ".zst") else file
    return name.suffix.lower()


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    if file.suffix.lower() == ".gz":
        with gzip.open(file, "rb") as unpacked:
            yield unpacked
    elif file.suffix.lower() == ".zst":
        import pyarrow

        with pyarrow.CompressedInputStream(file.open("rb"), "zstd") as unpacked:
            yield unpacked
    else:
        with file.open("rb") as plain:
            yield plain


def _plain(file: Path) -> Iterator[bytes]:
    """The text of a file, which must be UTF-8."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    begins = 0  # where in the file stands what the decoder looks at
    try:
        with _opened(file) as opened:
            while piece := opened.read(_PIECE):
                if (zero := piece.find(b"\0")) >= 0:
                    at = begins + len(decoder.getstate()[0]) + zero
                    raise UserError(f"data.path: '{file}' is no text: byte {at} is 0")
                begun = len(decoder.getstate()[0])
                decoder.decode(piece)
                begins += begun + len(piece) - len(decoder.getstate()[0])
                yield piece
            decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        at = begins + error.start
        raise UserError(f"data.path: '{file}' is not UTF-8 text (byte {at})") from None
    except _DAMAGED as error:
        raise _unreadable(file, error) from None


def _json_rows(file: Path, field: str) -> Iterator[bytes]:
    with _opened(file) as opened:
        for number, line in enumerate(_lines(opened), 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                raise UserError(f"data.path: line {number} of '{file}' is not JSON") from None
            known = row if isinstance(row, dict) else {}
            text = known.get(field)
            if text is None and field in known:
                continue
            if not isinstance(text, str):
                raise _no_text(field, f"line {number} of '{file}'", known)
            try:
                yield text.encode("utf-8")
            except UnicodeEncodeError:  # half of a surrogate pair
                raise UserError(f"data.path: line {number} of '{file}' is not UTF-8 text") from None


def _lines(opened: IO[bytes]) -> Iterator[bytes]:
    """Lines of any stream; not all of pyarrow's can be asked for them."""
    held: list[bytes] = []
    while piece := opened.read(_PIECE):
        first, *others = piece.split(b"\n")
        held.append(first)
        for other in others:
            yield b"".join(held)
            held = [other]
    yield b"".join(held)


def _parquet_rows(file: Path, field: str) -> Iterator[bytes]:
    import pyarrow
    import pyarrow.parquet

    try:
        with _opened(file) as opened:
            # Its end must be read first, so a compressed one is unpacked as a whole.
            packed = file.suffix.lower() in (".gz", ".zst")
            table = pyarrow.parquet.ParquetFile(
                pyarrow.BufferReader(opened.read()) if packed else opened
            )
            columns = {c.name: c.type for c in table.schema_arrow}
            kind = columns.get(field)
            if kind not in (pyarrow.string(), pyarrow.large_string(), pyarrow.string_view()):
                raise _no_text(field, f"'{file}'", columns)
            for batch in table.iter_batches(columns=[field]):
                yield from (str(text).encode() for text in batch.column(0).to_pylist() if text)
    except pyarrow.ArrowException as error:
        raise _unreadable(file, error) from None
    except UnicodeDecodeError:  # pyarrow looks at a column's text only when it is asked for it
        raise UserError(f"data.path: '{field}' is not UTF-8 text in '{file}'") from None


def _no_text(field: str, place: str, known: dict[Any, Any]) -> UserError:
    if field in known:
        return UserError(f"data.field: '{field}' is no text in {place}")
    has = f"; it has {', '.join(map(str, known))}" if known else ""
    return UserError(f"data.field: {place} has no text '{field}'{has}")


def _unreadable(file: Path, error: Exception) -> UserError:
    said = str(error).splitlines() or [type(error).__name__]
    reason = getattr(error, "strerror", None) or said[0]
    return UserError(f"data.path: cannot read '{file}': {reason}")


def _stdlib_files() -> list[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    found = []
    for folder, inner, names in os.walk(root):
        inner[:] = set(inner) - _NOT_TEXT  # what is not walked into costs nothing
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    if len(found) < 100:
        raise UserError(
            f"data: this Python has no standard library sources in {root};"
            " write data=text data.path=FILE_OR_FOLDER"
        )
    return sorted(found)


def _hidden(file: Path, root: Path) -> bool:
    return any(part.startswith(".") for part in file.relative_to(root).parts)

"""Documents of text files, by the split they were published in, if any."""

import codecs
import glob
import gzip
import io
import json
import os
import sysconfig
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from qkablate.config import DataConfig
from qkablate.config.data import COLUMNS
from qkablate.errors import UserError, nearest_hint

Document = Iterable[bytes]  # its text, in pieces
Source = Iterable[tuple[str, Iterable[Document]]]  # by published split, or ""

_PIECE = 2**20
# Raised by files that are truncated, not compressed, or decompression bombs.
_DAMAGED = (OSError, EOFError, MemoryError, zlib.error)
# Tests, vendored packages, and tables of numbers.
_NOT_TEXT = {"test", "tests", "idle_test", "encodings", "pydoc_data"}
_NOT_TEXT |= {"site-packages", "dist-packages"}


def find_files(config: DataConfig) -> list[Path]:
    """Return the files of a corpus; UserError if there are none."""
    if config.source in ("stdlib", "stdlib_pairs", "stdlib_tags"):
        return _stdlib_files()
    assert config.path is not None
    pattern = os.path.expanduser(config.path)
    path = Path(pattern)
    if parallel := parallel_files(config):
        files = parallel
    elif path.is_file():
        files = [path]
    elif path.is_dir():
        visible = (f for f in path.rglob("*") if "/." not in f"/{f.relative_to(path)}")
        files = sorted(file for file in visible if file.is_file())
    else:
        files = sorted(Path(f) for f in glob.glob(pattern, recursive=True) if os.path.isfile(f))
        if not files:
            raise UserError(f"data.path: there is no file, folder or pattern '{config.path}'")
    if not files:
        raise UserError(f"data.path: the folder '{config.path}' has no file")
    if config.field and not any(kind_of(file) in _ROW_READERS for file in files):
        raise UserError(f"data.field: '{config.field}' applies to rows: .jsonl and .parquet files")
    return files


def parallel_files(config: DataConfig) -> list[Path]:
    """Return the files PATH.SOURCE and PATH.TARGET of pairs, if there are."""
    fields = [str(getattr(config, key)) for key in COLUMNS]
    if config.source != "pairs" or os.sep in "".join(fields):  # a suffix leads to no other folder
        return []
    files = [Path(f"{os.path.expanduser(str(config.path))}.{field}") for field in fields]
    present = [file for file in files if file.is_file()]
    if len(present) == 1:
        (missing,) = {*files} - {*present}
        raise UserError(f"data.path: '{present[0]}' is there, but not '{missing}'")
    return present


def read_documents(files: list[Path], field: str | None) -> Iterator[Document]:
    """Yield documents: a file of plain text is one, a row of .jsonl or .parquet is one."""
    for file in files:
        try:
            if read_rows := _ROW_READERS.get(kind_of(file)):
                yield from ([text] for text in read_rows(file, field or "text"))
            else:
                yield _read_plain(file)
        except _DAMAGED as error:
            raise _read_error(file, error) from None


def kind_of(file: Path) -> str:
    """Return the suffix of a file without that of its compression."""
    name = file.with_suffix("") if file.suffix.lower() in (".gz", ".zst") else file
    return name.suffix.lower()


def _open(file: Path) -> Any:
    """Open a file to read, decompressing it."""
    if file.suffix.lower() == ".gz":
        return gzip.open(file, "rb")
    if file.suffix.lower() == ".zst":
        import pyarrow

        return io.BufferedReader(pyarrow.CompressedInputStream(file.open("rb"), "zstd"))
    return file.open("rb")


def _read_plain(file: Path) -> Iterator[bytes]:
    """Yield the text of a file, which must be UTF-8."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    read = held = 0  # bytes read, and the last of them, which the decoder holds
    try:
        with _open(file) as stream:
            while piece := stream.read(_PIECE):
                if (zero := piece.find(b"\0")) >= 0:
                    raise UserError(f"data.path: '{file}' is not text: byte {read + zero} is 0")
                decoder.decode(piece)
                read, held = read + len(piece), len(decoder.getstate()[0])
                yield piece
            decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        at = read - held + error.start
        raise UserError(f"data.path: '{file}' is not UTF-8 text (byte {at})") from None
    except _DAMAGED as error:
        raise _read_error(file, error) from None


def _read_json_rows(file: Path, field: str) -> Iterator[bytes]:
    with _open(file) as stream:
        for number, line in enumerate(stream, 1):
            if not line.strip():
                continue
            fields = parse_row(line, number, file)
            text = fields.get(field)
            if text is None and field in fields:
                continue
            if not isinstance(text, str):
                raise field_error("field", field, f"line {number} of '{file}'", fields)
            if "\0" in text:
                raise _zero_error(f"line {number} of '{file}'")
            try:
                yield text.encode("utf-8")
            except UnicodeEncodeError:  # half of a surrogate pair
                raise UserError(f"data.path: line {number} of '{file}' is not UTF-8 text") from None


def _read_parquet_rows(file: Path, field: str) -> Iterator[bytes]:
    import pyarrow
    import pyarrow.parquet

    try:
        with _open(file) as stream:
            # It is read from its end, so a compressed file is decompressed as a whole.
            compressed = file.suffix.lower() in (".gz", ".zst")
            table = pyarrow.parquet.ParquetFile(
                pyarrow.BufferReader(stream.read()) if compressed else stream
            )
            columns = {c.name: c.type for c in table.schema_arrow}
            kind = columns.get(field)
            if kind not in (pyarrow.string(), pyarrow.large_string(), pyarrow.string_view()):
                raise field_error("field", field, f"'{file}'", columns)
            batches = table.iter_batches(columns=[field])
            texts = (text for batch in batches for text in batch.column(0).to_pylist())
            for number, text in enumerate(texts, 1):
                if text and "\0" in text:
                    raise _zero_error(f"row {number} of '{file}'")
                if text:
                    yield text.encode()
    except pyarrow.ArrowException as error:
        raise _read_error(file, error) from None
    except UnicodeDecodeError:  # pyarrow decodes a column when it is converted
        raise UserError(f"data.path: '{field}' is not UTF-8 text in '{file}'") from None


_ROW_READERS = {".jsonl": _read_json_rows, ".parquet": _read_parquet_rows}


def read_lines(file: Path) -> Iterator[str]:
    """Yield the lines of a file, which must be UTF-8."""
    text = b"".join(_read_plain(file)).decode("utf-8-sig")  # Excel writes a byte-order mark
    yield from (line.removesuffix("\r") for line in text.removesuffix("\n").split("\n") if text)


def parse_row(line: str | bytes, number: int, file: Path) -> dict[str, Any]:
    """Return the object in a line of a .jsonl file; an empty one for other JSON."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        raise UserError(f"data.path: line {number} of '{file}' is not JSON") from None
    return row if isinstance(row, dict) else {}


def field_error(key: str, field: str, place: str, fields: dict[Any, Any]) -> UserError:
    """Return the error for a column, named by a key, that is missing or not text."""
    if field in fields:
        return UserError(f"data.{key}: '{field}' is not text in {place}")
    known = f"; it has {', '.join(map(str, fields))}{nearest_hint(field, fields)}" if fields else ""
    return UserError(f"data.{key}: {place} has no text '{field}'{known}")


def _zero_error(place: str) -> UserError:
    """Return the error for text with the byte that ends a document."""
    return UserError(f"data.path: {place} is not text: it has the byte 0")


def _read_error(file: Path, error: Exception) -> UserError:
    lines = str(error).splitlines() or [type(error).__name__]
    reason = getattr(error, "strerror", None) or lines[0]
    return UserError(f"data.path: cannot read '{file}': {reason}")


def _stdlib_files() -> list[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    files = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = set(subfolders) - _NOT_TEXT
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    if len(files) < 100:
        raise UserError(
            f"data: this Python has no standard library sources in {root};"
            " use data=text data.path=FILE_OR_FOLDER"
        )
    return sorted(files)


def describe_source(config: DataConfig) -> str:
    """Return the key and value that name the text, as the user typed them."""
    key = next((key for key in ("path", "files", "name") if getattr(config, key)), "source")
    return f"data.{key}: '{getattr(config, key)}'"

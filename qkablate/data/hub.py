"""Documents from the library `datasets`: the Hub, its caches, local files and URLs.

No code of a data set is ever run. Without a network, HF_HOME is used.
"""

import glob
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from qkablate.config import DataConfig
from qkablate.data.network import is_reachable
from qkablate.data.sources import Source, describe_source
from qkablate.errors import UserError, nearest_hint

# Names of published held-out splits.
_HELD_OUT = {"val": ("validation", "valid", "val", "dev"), "test": ("test",)}
FILE_FORMATS = ("text", "json", "csv", "parquet")  # formats of data.files, not data sets
# Other readers of `datasets`, some versions of which unpickle what they read.
OTHER_READERS = {
    *("arrow", "audiofolder", "cache", "conll", "eval", "fasta", "fastq", "genbank", "generator"),
    *("harbor", "hdf5", "iceberg", "imagefolder", "lance", "meshfolder", "mmcif", "niftifolder"),
    *("pandas", "pdb", "pdffolder", "spark", "sql", "tsfile", "videofolder", "vortex"),
    *("webdataset", "xml"),
}
_REMOTE = r"(https?|hf|s3|gs)://"
_NO_NETWORK = (
    "prepare it on a machine with a network and point data.cache or HF_HOME there, or use"
    " data=stdlib"
)


def read_documents(config: DataConfig) -> Source:
    """Return the documents: rows, or groups of rows from one that matches `document_start` on.

    UserError at once if the data set is unavailable, or later, when the documents are read.
    """
    splits = open_splits(config)
    return ((split, _documents(rows, config)) for split, rows in splits)


def open_splits(config: DataConfig) -> Iterator[tuple[str, Any]]:
    """Return the splits with their rows, not read yet; "" if none is held out.

    UserError at once if the data set is unavailable.
    """
    online = find_local_files(config) is not None or _is_reachable(config)
    if not online and not _is_cached(config):
        hint = "" if "/" in str(config.name) or config.files else " and no folder of that name"
        raise UserError(
            f"{describe_source(config)} cannot be reached: no network{hint}; {_NO_NETWORK}"
        )
    return _splits(config, online)


def find_local_files(config: DataConfig) -> list[Path] | None:
    """Return the files of the text if it is on this machine, otherwise None."""
    name, files = os.path.expanduser(config.name or ""), os.path.expanduser(config.files or "")
    if name in FILE_FORMATS:
        if not files:
            raise UserError(f"data.files: data.name={name} needs data.files=FILE, PATTERN or URL")
        if config.subset or config.revision:
            key = "subset" if config.subset else "revision"
            raise UserError(f"data.{key}: files read by data.name={name} have none")
        if re.search(_REMOTE, files):
            return None
        matches = sorted(glob.glob(files.rpartition("::")[2], recursive=True))
        if not matches:
            raise UserError(f"data.files: there is no file or pattern '{config.files}'")
        return [Path(file) for file in matches]
    if name in OTHER_READERS:
        formats = ", ".join(FILE_FORMATS)
        hint = f"; the folder is ./{name}" if os.path.isdir(name) else ""
        raise UserError(f"data.name: '{name}' is not a supported format (allowed: {formats}){hint}")
    if os.path.isdir(name):
        if config.revision:
            raise UserError(f"data.revision: the folder '{config.name}' has none")
        return sorted(file for file in Path(name).rglob("*") if file.is_file())
    if name.startswith((".", "/")) or name.count("/") > 1:
        raise UserError(f"data.name: there is no folder '{config.name}'")
    return None


def split_of(name: str) -> str:
    """Return the split that a published name stands for, or ""."""
    names = {"train": ("train",), **_HELD_OUT}
    return next((split for split, known in names.items() if name.lower() in known), "")


def _splits(config: DataConfig, online: bool) -> Iterator[tuple[str, Any]]:
    loaded = _load(config, online)
    train = config.split or "train"
    splits = {"train": train}
    for split, names in _HELD_OUT.items():
        name = next((name for name in names if name in loaded), None)
        if name and name != train.partition("[")[0]:
            splits[split] = name
    if train not in loaded:
        raise UserError(f"data.split: '{config.name}' has no '{train}'; it has {', '.join(loaded)}")
    published = len(splits) > 1
    for split, name in splits.items():
        yield split if published else "", loaded[name]


def _documents(rows: Any, config: DataConfig) -> Iterator[Iterable[bytes]]:
    """Yield the documents of a split."""
    columns = read_columns(rows, config, {"field": config.field or "text"})
    # The byte 0 ends a document.
    texts: Iterator[str] = (text.replace("\0", " ") for (text,) in columns)
    if config.document_start:
        texts = _group_rows(texts, re.compile(config.document_start))
    yield from ([text.encode("utf-8", "replace")] for text in texts)


def read_columns(
    rows: Any, config: DataConfig, fields: Mapping[str, str]
) -> Iterator[tuple[str, ...]]:
    """Yield the texts of the columns that some keys name; `a.b` is the part b of a column a."""
    names, columns = rows.column_names, []
    for key, field in fields.items():
        column = field if names is None or field in names else field.partition(".")[0]
        if names is not None and column not in names:
            known = f"{', '.join(names)}{nearest_hint(field, names)}"
            raise UserError(f"data.{key}: '{config.name}' has no '{field}'; it has {known}")
        columns.append(column)
    try:
        if names is not None or "." not in "".join(columns):
            rows = rows.select_columns([*dict.fromkeys(columns)])
        for row in rows:
            texts = []
            for key, field in fields.items():
                text = find_value(row, field)
                if text is not None and not isinstance(text, str):
                    raise UserError(f"data.{key}: '{field}' of '{config.name}' is not text")
                texts.append(text or "")
            yield tuple(texts)
    except UserError:
        raise
    except KeyError:  # the columns of a stream may be unknown
        keys, wanted = " or ".join(fields), "' or '".join(fields.values())
        raise UserError(f"data.{keys}: '{config.name}' has no '{wanted}'") from None
    except Exception as error:  # the library wraps none of them
        raise _load_error(describe_source(config), error) from None


def find_value(row: Mapping[str, Any], field: str) -> Any:
    """Return the value of a field of a row, None without one; `a.b` is the part b of a.

    KeyError where a has no such part.
    """
    column, _, part = field.partition(".")
    if field not in row and isinstance(row.get(column), dict):
        return row[column][part]
    return row.get(field)


def _group_rows(rows: Iterable[str], start: re.Pattern[str]) -> Iterator[str]:
    """Join rows that are lines into documents."""
    text = ""
    for row in rows:
        if start.search(row):
            if text.strip():  # blank lines before the first document
                yield text
            text = ""
        text += row if row.endswith("\n") else f"{row}\n"
    if text.strip():
        yield text


def _load(config: DataConfig, online: bool) -> dict[str, Any]:
    """Return the splits by name."""
    import datasets

    name = os.path.expanduser(config.name or "")
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # errors are raised as well
    options: dict[str, Any] = {"name": config.subset, "revision": config.revision}
    if config.files is not None:
        is_path = name in FILE_FORMATS
        options["data_files"] = os.path.expanduser(config.files) if is_path else config.files
    if name == "text":
        options["sample_by"] = "document"
    # Local data, and data that is truncated, need not be copied into the library's cache.
    local = find_local_files(config) is not None
    options["streaming"] = online and (local or config.max_tokens is not None)
    source = describe_source(config)
    with _offline(not online):
        try:
            loaded = dict(_load_dataset(name, options, online))
            if config.split and "[" in config.split:
                source = f"data.split: '{config.split}' of '{config.name}'"
                options |= {"streaming": False, "split": config.split}
                loaded[config.split] = _load_dataset(name, options, online)
        except UserError:
            raise
        except Exception as error:
            raise _load_error(source, error, online) from None
    return loaded


def _load_dataset(name: str, options: dict[str, Any], online: bool) -> Any:
    import datasets
    import huggingface_hub

    cause: Exception = ConnectionError(f"HF_HOME has no revision '{options['revision']}' of it")
    if online or options["revision"] is None:  # its own cache ignores revisions
        try:
            return datasets.load_dataset(name, **options)
        except (ConnectionError, ValueError) as error:
            if online:
                raise
            cause = error
    # Without a network the library reads its own cache only, not that of the Hub's client.
    try:
        folder = huggingface_hub.snapshot_download(
            name, repo_type="dataset", revision=options["revision"], local_files_only=True
        )
    except huggingface_hub.errors.IncompleteSnapshotError:
        raise
    except huggingface_hub.errors.LocalEntryNotFoundError:
        raise cause from None
    _check_parts(Path(folder))
    streamed = "split" not in options  # slices need the whole data set
    return datasets.load_dataset(folder, **options | {"revision": None, "streaming": streamed})


def _check_parts(folder: Path) -> None:
    """Raise UserError if a numbered part is missing, as train-00001-of-00007.parquet."""
    counts: dict[str, tuple[int, int]] = {}
    for file in folder.rglob("*-of-*"):
        if match := re.match(r"(.*)-\d+-of-(\d+)", str(file)):
            counts[match[1]] = (counts.get(match[1], (0, 0))[0] + 1, int(match[2]))
    for name, (present, total) in counts.items():
        if present < total:
            raise UserError(
                f"data.name: HF_HOME has {present} of {total} parts of '{Path(name).name}', and"
                f" there is no network; {_NO_NETWORK}"
            )


def _is_reachable(config: DataConfig) -> bool:
    import huggingface_hub.constants as constants

    if constants.HF_HUB_OFFLINE:
        return False
    files = config.files if config.name in FILE_FORMATS else None
    server = re.search(r"https?://[^/]+", files or "")
    return is_reachable(server[0] if server else constants.ENDPOINT)


def _is_cached(config: DataConfig) -> bool:
    """Return whether HF_HOME may have it, without importing the library, which is slow."""
    import huggingface_hub.constants as constants

    if config.name in FILE_FORMATS:
        return False
    name = str(config.name)
    prepared = os.environ.get("HF_DATASETS_CACHE") or Path(constants.HF_HOME, "datasets")
    user, _, last = name.rpartition("/")  # TinyStories → tiny_stories, as the library has it
    last = re.sub(r"([A-Z]+)([A-Z][a-z])", r"\1_\2", last)
    last = re.sub(r"([a-z\d])([A-Z])", r"\1_\2", last).lower()
    folders = (
        Path(constants.HF_HUB_CACHE, f"datasets--{name.replace('/', '--')}"),
        Path(prepared, f"{user}___{last}" if user else last),
    )
    return any(folder.is_dir() for folder in folders)


@contextmanager
def _offline(is_offline: bool) -> Iterator[None]:
    """Switch both libraries to offline mode; otherwise they retry for half a minute."""
    import datasets.config
    import huggingface_hub.constants as constants

    before = constants.HF_HUB_OFFLINE
    datasets.config.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE = before or is_offline
    try:
        yield
    finally:
        datasets.config.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE = before


def _load_error(source: str, error: Exception, online: bool = True) -> UserError:
    """Return the library's message as one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    message = lines[0] if lines else type(error).__name__
    if isinstance(error, RuntimeError) and "scripts are no longer supported" in message:
        message = (
            "it is a script, and code of data sets is never run;"
            " data.revision=refs/convert/parquet may have it as files"
        )
    elif isinstance(error, StopIteration):  # raised for empty files
        message = "it is empty"
    elif isinstance(error, (ConnectionError, TimeoutError)) or "httpx" in type(error).__module__:
        message = f"cannot be reached: {message}; {_NO_NETWORK}"
    elif not online:
        message += f"; there is no network: {_NO_NETWORK}"
    return UserError(f"{source}: {message}")

"""Documents by the library `datasets`: from the Hub, from its caches, from local files and URLs.

No code of a data set is ever run. Without a network what HF_HOME holds is used.
"""

import glob
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from qkablate.config import DataConfig
from qkablate.data.network import reachable
from qkablate.data.sources import Document, Source
from qkablate.errors import UserError

# The names under which a held-out split is published.
_HELD_OUT = {"val": ("validation", "valid", "val", "dev"), "test": ("test",)}
_READERS = ("text", "json", "csv", "parquet")  # of files: no sets, but ways to read data.files
_ELSEWHERE = r"(https?|hf|s3|gs)://"
_NO_NETWORK = (
    "prepare it where there is one and point data.cache or HF_HOME there, or use data=stdlib"
)


def documents(config: DataConfig) -> Source:
    """Every row is a document, or all rows from one that matches `document_start` to the next.
    That it is within reach is seen at once, the rest when the documents are asked for.
    """
    online = local_files(config) is not None or _reachable(config)
    if not online and not _cached(config):
        also = "" if "/" in str(config.name) or config.files else " and no folder of that name"
        raise UserError(f"{_place(config)} is out of reach: no network{also}; {_NO_NETWORK}")
    return _splits(config, online)


def local_files(config: DataConfig) -> list[Path] | None:
    """Those that the text is in, where it is on this machine and not elsewhere."""
    name, files = os.path.expanduser(config.name or ""), os.path.expanduser(config.files or "")
    if name in _READERS:
        if not files:
            raise UserError(f"data.files: data.name={name} needs data.files=FILE, PATTERN or URL")
        if config.subset or config.revision:
            key = "subset" if config.subset else "revision"
            raise UserError(f"data.{key}: files that data.name={name} reads have none")
        if re.search(_ELSEWHERE, files):
            return None
        found = sorted(glob.glob(files.rpartition("::")[2], recursive=True))
        if not found:
            raise UserError(f"data.files: there is no file or pattern '{config.files}'")
        return [Path(file) for file in found]
    if os.path.isdir(name):
        if config.revision:
            raise UserError(f"data.revision: a folder, as '{config.name}', has none")
        return sorted(file for file in Path(name).rglob("*") if file.is_file())
    if name.startswith((".", "/")) or name.count("/") > 1:
        raise UserError(f"data.name: there is no folder '{config.name}'")
    return None


def _splits(config: DataConfig, online: bool) -> Source:
    loaded = _load(config, online)
    train = config.split or "train"
    splits = {"train": train}
    for ours, names in _HELD_OUT.items():
        found = next((name for name in names if name in loaded), None)
        if found and found != train.partition("[")[0]:
            splits[ours] = found
    if train not in loaded:
        raise UserError(f"data.split: '{config.name}' has no '{train}'; it has {', '.join(loaded)}")
    published = len(splits) > 1
    for ours, theirs in splits.items():
        yield ours if published else "", _documents(loaded[theirs], config)


def _documents(rows: Any, config: DataConfig) -> Iterator[Document]:
    texts = _texts(rows, config)
    if config.document_start:
        texts = _grouped(texts, re.compile(config.document_start))
    yield from ([text.encode("utf-8", "replace")] for text in texts)


def _texts(rows: Any, config: DataConfig) -> Iterator[str]:
    field = config.field or "text"
    known = rows.column_names
    if known is not None and field not in known:
        raise UserError(f"data.field: '{config.name}' has no '{field}'; it has {', '.join(known)}")
    try:
        for row in rows.select_columns([field]):
            text = row.get(field)
            if text is not None and not isinstance(text, str):
                raise UserError(f"data.field: '{field}' of '{config.name}' is no text")
            yield text or ""
    except UserError:
        raise
    except KeyError:  # of what is streamed the columns may not be known before
        raise UserError(f"data.field: '{config.name}' has no '{field}'") from None
    except Exception as error:  # whatever the library meets on its way: it wraps none of it
        raise _failed(_place(config), error) from None


def _grouped(rows: Iterable[str], start: re.Pattern[str]) -> Iterator[str]:
    """Rows are lines: put them together into the documents that they make."""
    text = ""
    for row in rows:
        if start.search(row):
            if text.strip():  # blank lines before the first are no document
                yield text
            text = ""
        text += row if row.endswith("\n") else f"{row}\n"
    if text.strip():
        yield text


def _load(config: DataConfig, online: bool) -> dict[str, Any]:
    """The splits, by name."""
    import datasets

    assert config.name is not None
    name = os.path.expanduser(config.name)

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # what matters is raised as well
    words: dict[str, Any] = {"name": config.subset, "revision": config.revision}
    if config.files is not None:
        words["data_files"] = config.files
        if name in _READERS:
            words["data_files"] = os.path.expanduser(config.files)
    if name == "text":
        words["sample_by"] = "document"
    # What is local or cut off at some point need not be copied into the library's cache.
    local = local_files(config) is not None
    words["streaming"] = online and (local or config.max_tokens is not None)
    split = config.split if config.split and "[" in config.split else None
    place = _place(config)
    with _offline(not online):
        try:
            loaded = dict(_found(name, words, online))
            if split is not None:
                place = f"data.split: '{split}' of '{config.name}'"
                loaded[split] = _found(name, words | {"streaming": False, "split": split}, online)
        except UserError:
            raise
        except Exception as error:
            raise _failed(place, error, online) from None
    return loaded


def _found(name: str, words: dict[str, Any], online: bool) -> Any:
    import datasets
    import huggingface_hub

    refused: Exception = ConnectionError(f"HF_HOME has no revision '{words['revision']}' of it")
    if online or words["revision"] is None:  # its own cache is not told apart by revisions
        try:
            return datasets.load_dataset(name, **words)
        except (ConnectionError, ValueError) as error:
            if online:
                raise
            refused = error
    # Without a network the library knows its own cache alone, and not what the Hub's client holds.
    try:
        folder = huggingface_hub.snapshot_download(
            name, repo_type="dataset", revision=words["revision"], local_files_only=True
        )
    except huggingface_hub.errors.IncompleteSnapshotError:
        raise
    except huggingface_hub.errors.LocalEntryNotFoundError:
        raise refused from None
    _check_whole(Path(folder))
    streamed = "split" not in words  # a part can only be cut off what is there as a whole
    return datasets.load_dataset(folder, **words | {"revision": None, "streaming": streamed})


def _check_whole(folder: Path) -> None:
    """That no part is missing of those that their names count: train-00001-of-00007.parquet."""
    counts: dict[str, tuple[int, int]] = {}
    for file in folder.rglob("*-of-*"):
        if found := re.match(r"(.*)-\d+-of-(\d+)", str(file)):
            counts[found[1]] = (counts.get(found[1], (0, 0))[0] + 1, int(found[2]))
    for what, (there, whole) in counts.items():
        if there < whole:
            raise UserError(
                f"data.name: HF_HOME holds {there} of {whole} parts of '{Path(what).name}', and"
                f" there is no network; {_NO_NETWORK}"
            )


def _reachable(config: DataConfig) -> bool:
    import huggingface_hub.constants as constants

    if constants.HF_HUB_OFFLINE:
        return False
    if config.files is not None and config.name in _READERS:
        found = re.search(r"https?://[^/]+", config.files)
        return reachable(found[0] if found else constants.ENDPOINT)
    return reachable(constants.ENDPOINT)


def _cached(config: DataConfig) -> bool:
    """Whether HF_HOME may hold it; looked up before the library is imported, which takes a
    while.
    """
    import huggingface_hub.constants as constants

    if config.name in _READERS:
        return False
    name = str(config.name)
    prepared = os.environ.get("HF_DATASETS_CACHE") or Path(constants.HF_HOME, "datasets")
    owner, _, last = name.rpartition("/")  # TinyStories → tiny_stories, as the library has it
    last = re.sub(r"([A-Z]+)([A-Z][a-z])", r"\1_\2", last)
    last = re.sub(r"([a-z\d])([A-Z])", r"\1_\2", last).lower()
    places = (
        Path(constants.HF_HUB_CACHE, f"datasets--{name.replace('/', '--')}"),
        Path(prepared, f"{owner}___{last}" if owner else last),
    )
    return any(place.is_dir() for place in places)


@contextmanager
def _offline(offline: bool) -> Iterator[None]:
    """Tell both libraries that there is no network: otherwise they try for half a minute."""
    import datasets.config
    import huggingface_hub.constants as constants

    before = constants.HF_HUB_OFFLINE
    datasets.config.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE = before or offline
    try:
        yield
    finally:
        datasets.config.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE = before


def _failed(place: str, error: Exception, online: bool = True) -> UserError:
    """One line for what the library said over many."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = lines[0] if lines else type(error).__name__
    if isinstance(error, RuntimeError) and "scripts are no longer supported" in said:
        said = (
            "it is a script, and no code of a data set is run;"
            " data.revision=refs/convert/parquet may have it as files"
        )
    elif isinstance(error, StopIteration):  # what the library makes of empty files
        said = "it is empty"
    elif isinstance(error, (ConnectionError, TimeoutError)) or "httpx" in type(error).__module__:
        said = f"out of reach: {said}; {_NO_NETWORK}"
    elif not online:
        said += f"; there is no network: {_NO_NETWORK}"
    return UserError(f"{place}: {said}")


def _place(config: DataConfig) -> str:
    """What a user wrote for where the text is."""
    return f"data.files: '{config.files}'" if config.files else f"data.name: '{config.name}'"

"""Prepared tokens on disk: made once, in whole, even when many runs start at the same moment."""

import fcntl
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from qkablate.config import DataConfig
from qkablate.data import sources, tokenizers
from qkablate.errors import UserError

FORMAT = 1  # raised when the same files would be prepared into other tokens
SPLITS = ("train", "val", "test")
DOCUMENT_END = b"\0"  # closes every document of a corpus of several


@dataclass(frozen=True)
class Dataset:
    """A prepared corpus."""

    folder: Path
    fingerprint: str  # of the tokens and the tokenizer, whatever the path they came by
    vocabulary: int
    tokens: dict[str, int]
    bytes: dict[str, int]
    dtype: str
    tokenizer: dict[str, Any]  # its description, from which it can be loaded

    def split(self, name: str) -> np.ndarray:
        return np.memmap(self.folder / f"{name}.bin", dtype=self.dtype, mode="r")

    def bits_per_byte(self, name: str, loss: float) -> float:
        """From nats per token, so that tokenizers compare."""
        return loss / float(np.log(2)) * self.tokens[name] / self.bytes[name]


def open_dataset(config: DataConfig) -> Dataset:
    """The prepared corpus, prepared now if it is not there yet."""
    files = sources.files(config)
    cache = cache_dir(config)
    folder = cache / _key(config, files)
    if not (folder / "manifest.json").is_file():
        try:
            cache.mkdir(parents=True, exist_ok=True)
            with _locked(folder.with_suffix(".lock"), f"preparing {config.source}"):
                if not (folder / "manifest.json").is_file():
                    _prepare(config, files, folder)
        except OSError as error:
            reason = error.strerror or error
            raise UserError(f"data.cache: cannot write in '{cache}': {reason}") from None
    return _load(folder)


def cache_dir(config: DataConfig) -> Path:
    if config.cache != "auto":
        return Path(config.cache).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "qkablate" / "data"


def _load(folder: Path) -> Dataset:
    try:
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        dataset = Dataset(
            folder=folder,
            fingerprint=manifest["fingerprint"],
            vocabulary=manifest["vocabulary"],
            tokens=manifest["tokens"],
            bytes=manifest["bytes"],
            dtype=manifest["dtype"],
            tokenizer=manifest["tokenizer"],
        )
        for split in SPLITS:
            size = (folder / f"{split}.bin").stat().st_size
            if size != dataset.tokens[split] * np.dtype(dataset.dtype).itemsize:
                raise ValueError(f"{split}.bin has {size} bytes")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"data.cache: '{folder}' is damaged ({error}); remove that folder"
        ) from None
    return dataset


def _prepare(config: DataConfig, files: list[Path], folder: Path) -> None:
    texts = _documents(config, files)
    tokenizer = tokenizers.make(config.tokenizer, texts)
    dtype = tokenizers.smallest_dtype(tokenizer.vocabulary)
    temporary = folder.with_suffix(".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(mode=0o700)
    try:
        documents = [tokenizer.encode(text) for text in texts]
        tokens, size, hashes = {}, {}, {}
        for split, parts in _split(config, documents).items():
            stream = np.concatenate([*parts, np.empty(0, dtype)], dtype=dtype, casting="unsafe")
            with (temporary / f"{split}.bin").open("wb") as file:
                file.write(stream.tobytes())
                os.fsync(file.fileno())
            tokens[split], size[split] = len(stream), int(tokenizer.token_bytes[stream].sum())
            hashes[split] = hashlib.sha256(stream.tobytes()).hexdigest()
        identity = {"format": FORMAT, "tokenizer": tokenizer.describe(), "sha256": hashes}
        manifest = {
            **identity,
            "fingerprint": _digest(identity),
            "source": config.source,
            "files": len(files),
            "vocabulary": tokenizer.vocabulary,
            "dtype": dtype.name,
            "tokens": tokens,
            "bytes": size,
        }
        with (temporary / "manifest.json").open("w", encoding="utf-8") as text_file:
            json.dump(manifest, text_file, indent=1)
            os.fsync(text_file.fileno())
        shutil.rmtree(folder, ignore_errors=True)
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _documents(config: DataConfig, files: list[Path]) -> list[bytes]:
    """The documents, each once, in the order of their hashes."""
    texts = [sources.read(file) for file in files]
    if not any(texts):
        raise UserError(f"data.path: '{config.path}' is empty")
    if len(texts) == 1:
        return texts
    unique = {hashlib.sha256(text).digest(): text + DOCUMENT_END for text in texts if text}
    return [unique[digest] for digest in sorted(unique)]


def _split(config: DataConfig, documents: list[np.ndarray]) -> dict[str, list[np.ndarray]]:
    """The pieces of each split; test and val hold at most 5 % of the corpus each.

    Several documents: in the order of their hashes the first make the test split, the next the
    validation split, the rest train; what a bound cuts off a document is not used. One document:
    90 % of it to train on, then validation, then test.
    """
    share = sum(map(len, documents)) // 20
    room = {"test": min(config.test_tokens, share), "val": min(config.val_tokens, share)}
    if len(documents) == 1:
        train, val, test = np.split(documents[0], [-2 * share, -share] if share else [1, 1])
        return {"train": [train], "val": [val[: room["val"]]], "test": [test[: room["test"]]]}
    splits: dict[str, list[np.ndarray]] = {"train": [], "val": [], "test": []}
    for tokens in documents:
        split = next((s for s in ("test", "val") if room[s] > 0), "train")
        kept = tokens if split == "train" else tokens[: room[split]]
        if split != "train":
            room[split] -= len(kept)
        splits[split].append(kept)
    return splits


def _key(config: DataConfig, files: list[Path]) -> str:
    """Names the prepared folder by what would be prepared: files as they stand, and the rules."""
    stats = [(str(file.absolute()), file.stat()) for file in files]
    listing = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
    rules = [FORMAT, config.source, config.tokenizer, config.val_tokens, config.test_tokens]
    return f"{config.source}-{config.tokenizer}-{_digest([rules, listing])[:12]}"


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


@contextmanager
def _locked(path: Path, doing: str) -> Iterator[None]:
    """Hold the lock at `path`; the system lets go of it when the process ends, however it ends."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"waiting for another process that is {doing}", file=sys.stderr)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield

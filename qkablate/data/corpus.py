"""A prepared corpus: tokens on disk, made once, in whole, even when many runs start at one moment.

<cache>/<source>-<tokenizer>-<key>/
    train.bin val.bin test.bin   token ids
    tokenizer.json               what turns them back into text
    manifest.json                sources, counts, split rule, checksums, fingerprint
"""

import fcntl
import functools
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from qkablate.config import TEXT_SOURCES, DataConfig
from qkablate.data import hub, sources
from qkablate.data.batches import Batch, Windows, spread, whole
from qkablate.data.eval_metrics import Tally
from qkablate.data.prepare import SPLITS, prepare, within_reach
from qkablate.data.progress import Progress
from qkablate.disk import make_folder, open_file, read_file, sync_folder
from qkablate.errors import Impossible, UserError

FORMAT = 1  # raised when the same text would be prepared into other tokens
_LAYOUT = 3  # raised when the prepared folder has other files


@dataclass(frozen=True)
class Corpus:
    """Text as tokens."""

    folder: Path
    fingerprint: str  # of the tokens and the tokenizer, whatever the path they came by
    vocabulary: int
    tokens: dict[str, int]
    bytes: dict[str, int]
    dtype: str
    tokenizer: dict[str, Any] = field(repr=False)  # its description, from which it can be loaded
    manifest: dict[str, Any] = field(repr=False)

    answers = 1.0  # the part of the positions that answer: all

    @property
    def name(self) -> str:
        return called(self.manifest["sources"])

    @property
    def told(self) -> str:
        tokens = self.tokens
        return (
            f"{self.name}, {self.tokenizer['name']}: {tokens['train']:,} tokens to train on,"
            f" {tokens['val']:,} to validate, {tokens['test']:,} to test"
        )

    def split(self, name: str) -> np.ndarray:
        if not self.tokens[name]:  # an empty file cannot be mapped
            return np.empty(0, dtype=self.dtype)
        return np.memmap(self.folder / f"{name}.bin", dtype=self.dtype, mode="r")

    def check_context(self, context: int) -> None:
        for split, tokens in self.tokens.items():
            if tokens <= context:
                raise Impossible(
                    f"model.context: {context} is longer than the data: the {split} split holds"
                    f" {tokens} tokens and must hold {context + 1} at least"
                )

    def batches(self, *, seed: int, batch_size: int, accumulate: int, context: int) -> Windows:
        return Windows(
            self.split("train"),
            seed=seed,
            batch_size=batch_size,
            accumulate=accumulate,
            context=context,
        )

    def reading(self, split: str, *, batch_size: int, context: int) -> Iterator[Batch]:
        """A whole split; of the training split as much as there is to validate on."""
        most = self.tokens["val"] if split == "train" else None
        return whole(self.split(split)[:most], batch_size=batch_size, context=context)

    def sample(self, split: str, *, count: int, context: int) -> Batch:
        return spread(self.split(split), count=count, context=context)

    def measures(self, split: str, tally: Tally) -> dict[str, float]:
        """What an evaluation says of a split."""
        loss = tally.all.mean
        return {"loss": loss, "bits_per_byte": self.bits_per_byte(split, loss)}

    def bits_per_byte(self, name: str, loss: float) -> float:
        """From nats per token, so that tokenizers compare."""
        return loss / float(np.log(2)) * self.tokens[name] / self.bytes[name]


def called(source: dict[str, Any]) -> str:
    """What a person calls a text, from where it came from."""
    return str(next(source[key] for key in ("path", "files", "name", "source") if source.get(key)))


def open_corpus(config: DataConfig) -> Corpus:
    """The prepared corpus, prepared now if it is not there yet."""
    folder = prepared_folder(config)
    cache = folder.parent
    try:
        if not (folder / "manifest.json").is_file():
            make_folder(cache)
            with _locked(folder.with_suffix(".lock"), f"preparing {config.source}"):
                if not (folder / "manifest.json").is_file():
                    _prepare(config, folder)
    except OSError as error:
        reason = error.strerror or error
        raise UserError(f"data.cache: cannot write in '{cache}': {reason}") from None
    return load(folder)


def look(config: DataConfig) -> None:
    """UserError for what is neither prepared nor within reach; imports nothing heavy."""
    if config.source in TEXT_SOURCES and not is_prepared(config):
        within_reach(config)


def is_prepared(config: DataConfig) -> bool:
    folder = prepared_folder(config)
    try:
        return (folder / "manifest.json").is_file()
    except OSError as error:
        raise UserError(f"data.cache: cannot read '{folder}': {error.strerror}") from None


def cache_dir(config: DataConfig) -> Path:
    if config.cache is not None and config.cache != "auto":
        return Path(os.path.expanduser(config.cache))
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "qkablate" / "data"


def prepared_folder(config: DataConfig) -> Path:
    """Named by what would be prepared: files as they stand, or what is asked of the Hub."""
    keys = ("name", "files", "subset", "revision", "split", "document_start")
    try:
        files = hub.local_files(config) if config.source == "hub" else sources.files(config)
        stats = [(str(file.absolute()), file.stat()) for file in files or ()]
    except OSError as error:
        place = f"data.{'name' if config.source == 'hub' else 'path'}"
        raise UserError(f"{place}: cannot read '{error.filename}': {error.strerror}") from None
    what: list[Any] = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
    what += [getattr(config, key) for key in keys]
    rules = [FORMAT, _LAYOUT, config.source, config.tokenizer, config.vocab_size, config.field]
    rules += [config.max_tokens, config.val_tokens, config.test_tokens]
    key = _digest([rules, what])[:12]
    return cache_dir(config) / f"{config.source}-{config.tokenizer}-{key}"


def load(folder: Path) -> Corpus:
    """What is prepared in a folder, once its checksums are right."""
    try:
        manifest = json.loads(read_file(folder / "manifest.json"))
        tokenizer = json.loads(read_file(folder / "tokenizer.json"))
        checksum = manifest.pop("checksum")
        if checksum != _digest(manifest):
            raise ValueError("manifest.json does not have its checksum")
        if _digest(tokenizer) != manifest["tokenizer_sha256"]:
            raise ValueError("tokenizer.json does not have its checksum")
        corpus = Corpus(
            folder=folder,
            fingerprint=manifest["fingerprint"],
            vocabulary=manifest["vocabulary"],
            tokens=manifest["tokens"],
            bytes=manifest["bytes"],
            dtype=manifest["dtype"],
            tokenizer=tokenizer,
            manifest=manifest,
        )
        for split in SPLITS:
            path = folder / f"{split}.bin"
            stat = path.stat()
            if stat.st_size != corpus.tokens[split] * np.dtype(corpus.dtype).itemsize:
                raise ValueError(f"{split}.bin has {stat.st_size} bytes")
            if _sha256(path, stat.st_size, stat.st_mtime_ns) != manifest["sha256"][split]:
                raise ValueError(f"{split}.bin does not have its checksum")
            if stat.st_size and int(corpus.split(split).max()) >= corpus.vocabulary:
                raise ValueError(f"{split}.bin has a token beyond the vocabulary")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(
            f"data.cache: '{folder}' is damaged ({error}); remove that folder"
        ) from None
    return corpus


def find(fingerprint: str, cache: Path) -> Corpus | None:
    """What is prepared in a cache and has these tokens, whatever it was made of."""
    for path in sorted(cache.glob("*/manifest.json")):
        try:
            if json.loads(read_file(path))["fingerprint"] == fingerprint:
                return load(path.parent)
        except (OSError, ValueError, LookupError, TypeError, RecursionError):
            continue  # no manifest
    return None


def _prepare(config: DataConfig, folder: Path) -> None:
    temporary = folder.with_suffix(".tmp")
    for interrupted in (folder, temporary):
        shutil.rmtree(interrupted, ignore_errors=True)
    temporary.mkdir()
    progress = Progress(f"data={config.source}")
    try:
        found = prepare(config, temporary, progress)
        tokenizer = found.pop("tokenizer")
        identity = {"format": FORMAT, "tokenizer": tokenizer, "sha256": found["sha256"]}
        manifest = {
            "fingerprint": _digest(identity),
            "format": FORMAT,
            "tokenizer": tokenizer["name"],
            "tokenizer_sha256": _digest(tokenizer),
            **found,
        }
        manifest["checksum"] = _digest(manifest)
        for name, content in (("tokenizer", tokenizer), ("manifest", manifest)):
            with (temporary / f"{name}.json").open("w", encoding="utf-8") as text_file:
                json.dump(content, text_file, indent=1)
                text_file.flush()
                os.fsync(text_file.fileno())
        sync_folder(temporary)
        temporary.rename(folder)
        sync_folder(folder.parent)
    finally:
        progress.close()
        shutil.rmtree(temporary, ignore_errors=True)


@functools.lru_cache(maxsize=64)
def _sha256(path: Path, size: int, changed: int) -> str:
    """Of a file as it stood then: once a process is enough."""
    with open_file(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


@contextmanager
def _locked(path: Path, doing: str) -> Iterator[None]:
    """Hold the lock at `path`; the system lets go of it when the process ends, however it ends."""
    with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"waiting for another process that is {doing}", file=sys.stderr)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield

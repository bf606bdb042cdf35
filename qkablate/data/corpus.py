"""Prepared corpus: tokens on disk, written once, also if many runs start at the same time.

<cache>/<source>-<tokenizer>-<key>/
    train.bin val.bin test.bin   token ids
    val.ends.bin test.ends.bin   end of each document in its split, in tokens
    val.files.bin test.files.bin number of the file of each, where files have several
    tokenizer.json               description of the tokenizer
    manifest.json                sources, counts, split rule, checksums, fingerprint
"""

import functools
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from qkablate.config import DataConfig
from qkablate.config.data import HELD_OUT_SPLITS, PAIRS_OF_FILES, PREPARED_SOURCES, SPLITS
from qkablate.data import hub, sources
from qkablate.data.batches import (
    Batch,
    RandomWindows,
    group_neighbors,
    sequential_batches,
    spread_windows,
)
from qkablate.data.eval_metrics import EvalMetrics
from qkablate.data.prepare import CorpusManifest, open_source, prepare, read_manifest
from qkablate.data.progress import Progress
from qkablate.data.tokenizers import Tokenizer, load_tokenizer
from qkablate.disk import hash_file, hold_lock, make_folder, read_file, sync_folder, write_synced
from qkablate.errors import ImpossibleConfig, UserError
from qkablate.strict_json import hash_json, parse_json

FORMAT = 1  # raised when the same text would be prepared into other tokens
_LAYOUT = 4  # raised when the prepared folder has other files


class Corpus:
    """Text as tokens."""

    answer_fraction = 1.0  # every position has a target
    chance = None  # the accuracy is not counted
    pad = None  # windows are full

    def __init__(self, folder: Path, manifest: CorpusManifest, tokenizer: dict[str, Any]) -> None:
        self.folder, self.manifest = folder, manifest
        self.tokenizer = tokenizer  # its description
        self.name, self.fingerprint = manifest.source_name, manifest.fingerprint
        self.vocabulary, self.tokens = manifest.vocabulary, manifest.tokens

    @property
    def description(self) -> str:
        tokens = self.tokens
        return (
            f"{self.name}, {self.tokenizer['name']}: {tokens['train']:,} tokens to train on,"
            f" {tokens['val']:,} to validate, {tokens['test']:,} to test"
        )

    def split(self, name: str) -> np.ndarray:
        """Return the tokens of a split, mapped from disk."""
        if not self.tokens[name]:  # an empty file cannot be mapped
            return np.empty(0, dtype=self.manifest.dtype)
        return np.memmap(self.folder / f"{name}.bin", dtype=self.manifest.dtype, mode="r")

    def check_context(self, context: int) -> None:
        for split, tokens in self.tokens.items():
            if tokens <= context:
                raise ImpossibleConfig(
                    f"model.context: {context} is longer than the data: the {split} split holds"
                    f" {tokens} tokens and must hold {context + 1} at least"
                )

    def batches(
        self, *, seed: int, batch_size: int, grad_accum: int, context: int
    ) -> RandomWindows:
        return RandomWindows(self.split("train"), seed, batch_size, grad_accum, context)

    def split_batches(
        self,
        split: str,
        *,
        batch_size: int,
        context: int,
        limit: int | None = None,
        by_document: bool = False,
    ) -> Iterator[Batch]:
        """Yield a whole split, or some `limit` tokens spread over it.

        Of the training split, as much as the validation split has is read at most. Of the test
        split the beginning is read, and its answers are counted by document; `by_document`, those
        of validation are, too, also of a single document.
        """
        groups = self.document_groups(split) if by_document or split == "test" else None
        if by_document and groups is None:
            groups = np.zeros(self.tokens[split], np.int64)
        end = self.tokens["val"] if split == "train" else None
        if split == "test":
            end, limit = self.test_tokens(limit), None
        return sequential_batches(
            self.split(split)[:end],
            batch_size=batch_size,
            context=context,
            limit=limit,
            groups=groups,
        )

    def test_tokens(self, limit: int | None) -> int:
        """Return how many tokens of the test split are read: the first `limit`, two at least."""
        return self.tokens["test"] if limit is None else min(self.tokens["test"], max(2, limit))

    def document_groups(self, split: str) -> np.ndarray | None:
        """Return the document of each token of a held-out split; None if there is only one.

        Of very many documents, neighbors are counted as one.
        """
        ends = self.document_ends(split)
        if len(ends) < 2:
            return None
        return np.repeat(group_neighbors(len(ends)), np.diff(ends, prepend=0))

    def document_ends(self, split: str) -> np.ndarray:
        """Return where each document of a held-out split ends, in tokens."""
        return self._read_array(f"{split}.ends.bin")

    def document_files(self, split: str) -> np.ndarray | None:
        """Return the number of the file of each document of a held-out split, if it is known."""
        return self._read_array(f"{split}.files.bin") if self.manifest.files_sha256 else None

    def count_files(self) -> dict[str, int]:
        """Return the number of files of the held-out splits whose files are known."""
        files = {split: self.document_files(split) for split in HELD_OUT_SPLITS}
        return {split: len(np.unique(n)) for split, n in files.items() if n is not None}

    def _read_array(self, name: str) -> np.ndarray:
        return np.fromfile(self.folder / name, dtype=np.uint64).astype(np.int64)

    def sample(self, split: str, *, count: int, context: int) -> Batch:
        return spread_windows(self.split(split), count=count, context=context)

    def metrics(self, split: str, totals: EvalMetrics) -> dict[str, float]:
        """Return the metrics of an evaluated split."""
        loss = totals.all.mean
        # All tokens but the first are predicted. Parts of other splits are spread over them.
        read = totals.all.count + 1 if split == "test" else None
        bits = self.bits_per_byte(split, loss, read)
        return {"loss": loss} if bits is None else {"loss": loss, "bits_per_byte": bits}

    def bits_per_byte(self, split: str, loss: float, read: int | None = None) -> float | None:
        """Convert a loss in nats per token of a split, or of its first `read` tokens.

        So tokenizers can be compared. None where the bytes of these tokens are not known, as
        OpenAI's files are not here.
        """
        tokens, size = self.tokens[split], self.manifest.bytes[split]
        if read is not None and read < tokens:
            try:
                token_bytes = load_tokenizer(self.tokenizer).token_bytes
            except (UserError, ValueError):
                return None
            tokens, size = read, int(token_bytes[self.split(split)[:read]].sum())
        return loss / float(np.log(2)) * tokens / size


def open_corpus(config: DataConfig, tokenizer: Tokenizer | None = None) -> Corpus:
    """Return the prepared corpus, preparing it first if needed.

    A given `tokenizer` takes the place of one that would be made from the text.
    """
    folder = prepared_folder(config)
    if tokenizer is not None:
        if is_prepared(config) and (own := load_corpus(folder)).tokenizer == tokenizer.describe():
            return own
        key = hash_json([folder.name, tokenizer.describe()])[:12]
        folder = folder.with_name(f"{config.source}-{config.tokenizer}-{key}")
    cache = folder.parent
    try:
        if not (folder / "manifest.json").is_file():
            make_folder(cache)
            other = f"another process that is preparing {config.source}"
            with hold_lock(folder.with_suffix(".lock"), waits_for=other):
                if not (folder / "manifest.json").is_file():
                    _prepare(config, folder, tokenizer)
    except OSError as error:
        reason = error.strerror or error
        raise UserError(f"data.cache: cannot write in '{cache}': {reason}") from None
    return load_corpus(folder)


def check_available(config: DataConfig) -> None:
    """Raise UserError if a text is neither prepared nor available; imports nothing heavy."""
    if config.source in PREPARED_SOURCES and not is_prepared(config):
        open_source(config)


def is_prepared(config: DataConfig) -> bool:
    """Return whether a text is prepared."""
    folder = prepared_folder(config)
    try:
        return (folder / "manifest.json").is_file()
    except OSError as error:
        raise UserError(f"data.cache: cannot read '{folder}': {error.strerror}") from None


def cache_dir(config: DataConfig) -> Path:
    """Return the folder of all prepared texts."""
    if config.cache is not None and config.cache != "auto":
        folder = os.path.expanduser(config.cache)
        if os.path.isfile(folder):  # false for a name that is too long, too
            raise UserError(f"data.cache: '{folder}' is not a folder")
        return Path(folder)
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "qkablate" / "data"


def prepared_folder(config: DataConfig) -> Path:
    """Return the folder of a text, named by its files as they are now or its keys on the Hub."""
    keys = ("name", "files", "subset", "revision", "split", "document_start")
    is_hub = config.source == "hub" or (config.source == "pairs" and config.path is None)
    try:
        find = hub.find_local_files if is_hub else sources.find_files
        stats = [(str(file.absolute()), file.stat()) for file in find(config) or ()]
    except OSError as error:
        key = f"data.{'name' if is_hub else 'path'}"
        raise UserError(f"{key}: cannot read '{error.filename}': {error.strerror}") from None
    content: list[Any] = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
    content += [getattr(config, key) for key in keys]
    rules = [FORMAT, _LAYOUT, config.source, config.tokenizer, config.vocab_size, config.field]
    rules += [config.max_tokens, config.val_tokens, config.test_tokens]
    if config.source == "pairs":
        rules += [config.source_field, config.target_field]
    if config.max_length is not None:
        rules.append(config.max_length)
    if config.tokenizer == "words":
        rules.append("distinct")  # sentences that are equal as tokens are left out
    if config.source in PAIRS_OF_FILES:
        rules.append("files")  # that the pairs are from
    key = hash_json([rules, content])[:12]
    return cache_dir(config) / f"{config.source}-{config.tokenizer}-{key}"


def load_corpus(folder: Path) -> Corpus:
    """Return what is prepared in a folder; UserError if a checksum is wrong."""
    try:
        manifest = read_manifest(folder)
        tokenizer = parse_json(read_file(folder / "tokenizer.json"))
        if hash_json(tokenizer) != manifest.tokenizer_sha256:
            raise ValueError("the checksum of tokenizer.json is wrong")
        corpus = Corpus(folder, manifest, tokenizer)
        for split in SPLITS:
            path, tokens = folder / f"{split}.bin", corpus.tokens[split]
            size = path.stat().st_size
            if size != tokens * np.dtype(manifest.dtype).itemsize:
                raise ValueError(f"{path.name} has {size} bytes")
            _verify_sha256(path, manifest.sha256[split])
            if tokens and int(corpus.split(split).max()) >= corpus.vocabulary:
                raise ValueError(f"{path.name} has a token beyond the vocabulary")
        for split in HELD_OUT_SPLITS:
            _verify_sha256(folder / f"{split}.ends.bin", manifest.ends_sha256[split])
            ends = corpus.document_ends(split)
            if (np.diff(ends, prepend=0) < 0).any() or ends[-1:].tolist() != [corpus.tokens[split]]:
                raise ValueError(f"the documents of {split}.ends.bin do not end with its tokens")
        for split, expected in (manifest.files_sha256 or {}).items():
            path = folder / f"{split}.files.bin"
            _verify_sha256(path, expected)
            if path.stat().st_size != (folder / f"{split}.ends.bin").stat().st_size:
                raise ValueError(f"{path.name} does not have a number for each document")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(
            f"data.cache: '{folder}' is damaged ({error}); remove that folder"
        ) from None
    return corpus


def find_corpus(
    fingerprint: str, cache: Path, derive: Callable[[str], str] | None = None
) -> Corpus | None:
    """Return the corpus of a cache with these tokens, if any.

    The fingerprint may be one that is derived from the corpus's own.
    """
    for path in sorted(cache.glob("*/manifest.json")):
        with suppress(OSError, ValueError, LookupError, TypeError):
            own = parse_json(read_file(path))["fingerprint"]
            if (derive(own) if derive else own) == fingerprint:
                return load_corpus(path.parent)
    return None


def _prepare(config: DataConfig, folder: Path, tokenizer: Tokenizer | None) -> None:
    temporary = folder.with_suffix(".tmp")
    for interrupted in (folder, temporary):
        shutil.rmtree(interrupted, ignore_errors=True)
    temporary.mkdir()
    progress = Progress(f"data={config.source}")
    try:
        entries = prepare(config, temporary, progress, tokenizer)
        description = entries.pop("tokenizer")
        identity = {"format": FORMAT, "tokenizer": description, "sha256": entries["sha256"]}
        manifest = CorpusManifest(
            fingerprint=hash_json(identity),
            format=FORMAT,
            tokenizer=description["name"],
            tokenizer_sha256=hash_json(description),
            **entries,
        )
        manifest = replace(manifest, checksum=manifest.compute_checksum())
        for name, content in (("tokenizer", description), ("manifest", asdict(manifest))):
            write_synced(temporary / f"{name}.json", json.dumps(content, indent=1))
        sync_folder(temporary)
        temporary.rename(folder)
        sync_folder(folder.parent)
    finally:
        progress.close()
        shutil.rmtree(temporary, ignore_errors=True)


def _verify_sha256(path: Path, expected: str) -> None:
    stat = path.stat()
    if _sha256(path, stat.st_size, stat.st_mtime_ns) != expected:
        raise ValueError(f"the checksum of {path.name} is wrong")


@functools.lru_cache(maxsize=64)
def _sha256(path: Path, size: int, changed: int) -> str:
    """Return the hash of a file of this size and time, computed once in a process."""
    return hash_file(path)

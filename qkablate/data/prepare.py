"""Documents → splits → tokens on disk.

A published split is kept. Otherwise the split of a document depends on its hash alone; few
documents are split by position, as a single one is.
"""

import itertools
import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from qkablate.config import DataConfig
from qkablate.config.data import HELD_OUT_SPLITS, PAIR_SOURCES, PAIRS_OF_FILES, SPLITS
from qkablate.data import hub, sources, tokenizers
from qkablate.data.document_store import (
    HELD_OUT_FRACTION,
    STDLIB_HELD_OUT_FRACTION,
    DocumentStore,
    Spans,
    TokenBudget,
    held_out_split,
)
from qkablate.data.pairs.sources import SPLIT_RULES, open_pairs
from qkablate.data.progress import Progress
from qkablate.data.sources import Source, describe_source
from qkablate.data.text import bpe
from qkablate.data.tokenizers import Tokenizer
from qkablate.data.writer import DOCUMENT_END, SplitWriter
from qkablate.disk import read_file
from qkablate.errors import UserError
from qkablate.strict_json import from_json, hash_json, parse_json

MIN_HASHED_DOCUMENTS = 300  # fewer are not sure to fill splits of 3 %
MIN_HELD_OUT_DOCUMENTS = 100  # of a full split, where there are as many
_MIN_EXCERPT_BYTES = 1024
_MIN_SUBWORD_BYTES = 3  # lower bound of the mean bytes of a subword token in natural text
BPE_SAMPLE_BYTES = 2**25  # of the training split


@dataclass(frozen=True)
class CorpusManifest:
    """Content of manifest.json."""

    fingerprint: str  # of the tokens and the tokenizer, whatever the path of the text
    format: int
    tokenizer: str
    tokenizer_sha256: str
    sources: dict[str, Any]
    split: str  # the rule, in words
    duplicates: int
    vocabulary: int
    dtype: Literal["uint8", "uint16", "uint32"]
    documents: dict[str, int]
    tokens: dict[str, int]
    bytes: dict[str, int]
    sha256: dict[str, str]
    ends_sha256: dict[str, str]  # of the held-out splits
    files_sha256: dict[str, str] | None = None  # of the held-out splits; None: not known
    checksum: str = ""

    @property
    def source_name(self) -> str:
        """Name of the text, for people."""
        keys = ("path", "files", "name", "source")
        return str(next(self.sources[key] for key in keys if self.sources.get(key)))

    def compute_checksum(self) -> str:
        """Return the hash of all other fields with a value."""
        content = {key: value for key, value in asdict(self).items() if value is not None}
        del content["checksum"]
        return hash_json(content)


def read_manifest(folder: Path) -> CorpusManifest:
    """Read manifest.json; ValueError if it is not what `prepare` writes."""
    manifest = from_json(CorpusManifest, parse_json(read_file(folder / "manifest.json")))
    if manifest.checksum != manifest.compute_checksum():
        raise ValueError("the checksum of manifest.json is wrong")
    return manifest


def prepare(
    config: DataConfig, folder: Path, progress: Progress, tokenizer: Tokenizer | None = None
) -> dict[str, Any]:
    """Write <split>.bin into `folder`; return their entries of the manifest and the tokenizer.

    A given `tokenizer` takes the place of one that would be made from the text.
    """
    source, known = open_source(config)
    known = tokenizer or known
    store = DocumentStore(folder / "documents")
    progress.stage("reading")
    store.fill(source, TokenBudget(config), progress)
    if not store.size:
        raise UserError(f"{describe_source(config)} is empty")
    splits, rule = _divide(store, config)
    is_pairs = config.source in PAIR_SOURCES
    closed = is_pairs or any(len(spans) > 1 for spans in splits.values())
    closed = closed and (known is None or known.end is not None)
    tokenizer = known or _make_tokenizer(config, store, splits, closed, progress)
    progress.stage("writing", store.size)
    writer = SplitWriter(
        *(folder, store, tokenizer, closed, progress),
        is_pairs=is_pairs,
        has_files=config.source in PAIRS_OF_FILES,
        is_distinct=config.tokenizer == "words",
        max_length=config.max_length,
    )
    limits = {"train": config.max_tokens, "val": config.val_tokens, "test": config.test_tokens}
    written = {split: writer.write(split, splits[split], limits[split]) for split in SPLITS}
    for split in SPLITS:
        if written[split]["tokens"] < 2:
            hint = "; raise data.max_tokens" if store.truncated else ""
            hint = f"; raise data.max_length={config.max_length}" if writer.left_out else hint
            raise UserError(
                f"{describe_source(config)} is too little text: nothing is left for {split}{hint}"
            )
    os.remove(folder / "documents")
    source_keys = ["source", "path", "name", "files", "subset", "revision", "split", "field"]
    source_keys += ["source_field", "target_field"]
    if writer.left_out:
        rule += f"; {writer.left_out:,} pairs of more than {config.max_length} tokens are left out"
    if repeats := ", ".join(f"{count:,} of {split}" for split, count in writer.repeats.items()):
        rule += f"; repeats of a sentence, with rare words as <unknown>, are left out: {repeats}"
    return {
        "sources": {
            key: value for key in source_keys if (value := getattr(config, key)) is not None
        },
        "split": rule,
        "duplicates": store.duplicates,
        "vocabulary": tokenizer.vocabulary,
        "dtype": writer.dtype.name,
        "tokenizer": tokenizer.describe(),
        **{  # that split has all keys
            key: {split: written[split][key] for split in SPLITS if key in written[split]}
            for key in written["test"]
        },
    }


def _divide(store: DocumentStore, config: DataConfig) -> tuple[dict[str, Spans], str]:
    """Return the documents of each split, and the rule in words."""
    arranged = store.arrange()
    splits = {split: arranged[split][0] for split in HELD_OUT_SPLITS if len(arranged[split][0])}
    missing = [split for split in HELD_OUT_SPLITS if split not in splits]
    spans, hashes = arranged["train" if len(arranged["train"][0]) else ""]
    if not missing or not len(spans):
        rule = SPLIT_RULES.get(config.source, "as published")
        return {**dict.fromkeys(SPLITS, spans), **splits}, rule
    names = " and ".join(missing)
    if config.source in PAIR_SOURCES:
        raise UserError(f"{describe_source(config)}: no pair is left for {names}")
    if len(spans) < MIN_HASHED_DOCUMENTS and not store.truncated:  # else their number is not known
        parts = _by_position(store, spans, len(missing))
        rule = f"by position: the last 5 % each for {names}"
        return {**splits, **dict(zip(("train", *missing), parts, strict=True))}, rule
    held_out = STDLIB_HELD_OUT_FRACTION if config.source == "stdlib" else HELD_OUT_FRACTION
    kinds = np.array([held_out_split(value, held_out) or "train" for value in hashes.tolist()])
    splits["train"] = spans[~np.isin(kinds, missing)]
    token_bytes = 1 if config.tokenizer in ("bytes", "chars") else _MIN_SUBWORD_BYTES
    tokens = {"val": config.val_tokens, "test": config.test_tokens}
    for split in missing:
        own = kinds == split
        size = token_bytes * tokens[split]
        splits[split] = _cut_excerpts(store, spans[own], hashes[own], size)
    return splits, (
        f"by the sha256 of a document: {held_out:.0%} each are held out for {names}; an excerpt"
        f" of each is used, 1/{MIN_HELD_OUT_DOCUMENTS} of the split or what it takes to fill it"
    )


def _cut_excerpts(store: DocumentStore, spans: Spans, hashes: np.ndarray, size: int) -> Spans:
    """Cut long documents of a split of `size` bytes, so that the split is not a few of them.

    The start of an excerpt depends on the hash of its document; the rest is in no split.
    """
    limit = max(
        size // MIN_HELD_OUT_DOCUMENTS,
        _MIN_EXCERPT_BYTES,
        _filling_limit(spans[:, 1] - spans[:, 0], size),
    )
    excerpts = []
    for (start, end), value in zip(spans.tolist(), hashes.tolist(), strict=True):
        excerpt = start, end
        if (excess := end - start - limit) > 0:
            first = store.character_start(start + int(value * 2**20 % 1 * excess))
            excerpt = first, store.character_start(first + limit)
        excerpts.append(excerpt)
    return np.array(excerpts, dtype=np.int64).reshape(-1, 2)


def _filling_limit(sizes: np.ndarray, total: int) -> int:
    """Return the smallest limit on each size with which their sum still reaches the total."""
    sizes = np.sort(sizes)
    below = np.cumsum(sizes) - sizes
    larger = len(sizes) - np.arange(len(sizes))  # the number of those that are no smaller
    enough = np.flatnonzero(below + sizes * larger >= total)
    if not len(enough):
        return int(sizes.max(initial=0))
    first = enough[0]
    return -int(-(total - below[first]) // larger[first])


def _by_position(store: DocumentStore, spans: Spans, missing: int) -> list[Spans]:
    """Split off the last `missing` parts of 5 %, between documents if one ends close by."""
    ends = np.cumsum(spans[:, 1] - spans[:, 0])
    share = int(ends[-1]) // 20
    parts: list[Spans] = []
    rest, before = spans, 0
    for left in range(missing, 0, -1):
        cut = int(ends[-1]) - left * share
        nearest = int(ends[np.abs(ends - cut).argmin()])
        if abs(nearest - cut) <= share // 2 and nearest > before:  # no part is empty
            cut = nearest
        part, rest = _cut(store, rest, cut - before)
        parts, before = [*parts, part], cut
    return [*parts, rest]


def _cut(store: DocumentStore, spans: Spans, size: int) -> tuple[Spans, Spans]:
    """Return the first `size` bytes, up to a whole character, and the rest."""
    if not len(spans):
        return spans, spans
    ends = np.cumsum(spans[:, 1] - spans[:, 0])
    index = int(np.searchsorted(ends, size))  # the first that ends there or later
    start, end = spans[index].tolist()
    middle = store.character_start(end - (int(ends[index]) - size))
    left = np.vstack([spans[:index], [[start, middle]]])
    right = np.vstack([[[middle, end]], spans[index + 1 :]])
    return left[left[:, 0] < left[:, 1]], right[right[:, 0] < right[:, 1]]


def open_source(config: DataConfig) -> tuple[Source, Tokenizer | None]:
    """Return the text, not read yet, and the tokenizer unless it is made from the text.

    UserError where one of them is not available.
    """
    if config.source in PAIR_SOURCES:
        source = open_pairs(config)
    elif config.source == "hub":
        source = hub.read_documents(config)
    else:
        source = [("", sources.read_documents(sources.find_files(config), config.field))]
    if config.tokenizer in ("chars", "bpe", "words"):
        return source, None
    return source, tokenizers.load_tokenizer({"name": config.tokenizer})


def _make_tokenizer(
    config: DataConfig,
    store: DocumentStore,
    splits: dict[str, Spans],
    closed: bool,
    progress: Progress,
) -> Tokenizer:
    """Return the tokenizer that is made from the text."""
    if config.tokenizer == "chars":
        # Of all splits: a character that does not occur has no token.
        pieces = itertools.chain.from_iterable(map(store.text, splits.values()))
        texts = (text for text, _ in pieces)
        return tokenizers.CharTokenizer.of(itertools.chain([DOCUMENT_END] * closed, texts))
    assert config.vocab_size is not None
    progress.stage("learning", config.vocab_size, "tokens")
    texts = (text for text, _ in store.text(splits["train"]))
    if config.source in PAIR_SOURCES:  # no token has a part of both sentences
        texts = (text.replace(DOCUMENT_END, b"\n") for text in texts)
    if config.tokenizer == "words":
        return tokenizers.WordTokenizer.of(texts, config.vocab_size)
    sample = _first(BPE_SAMPLE_BYTES, texts)
    merged = bpe.learn_tokens(map(bytes.decode, sample), config.vocab_size - 1, progress.update)
    return tokenizers.BpeTokenizer(merged)


def _first(size: int, texts: Iterable[bytes]) -> Iterator[bytes]:
    for text in texts:
        yield text
        size -= len(text)
        if size <= 0:
            return

"""Losses on text without any attention: Witten-Bell n-grams and a general compressor.

Both learn from the beginning of the training split and are measured on as much of the test split
as the run reads, in nats per token. They are computed when the first run on a text ends, and kept
with the prepared data: neither the start of a run nor its training waits for them.
"""

import json
import lzma
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from qkablate.data.corpus import Corpus
from qkablate.data.tokenizers import load_tokenizer
from qkablate.disk import hold_lock, read_file, write_atomic
from qkablate.errors import UserError
from qkablate.strict_json import from_json, parse_json

MAX_ORDER = 5
MAX_TRAIN_TOKENS = 2**21
_FORMAT = 1  # raised when the same tokens would give other numbers
# As large as any text here, so that the compressor remembers all of it.
_LZMA = [{"id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": 2**26}]


@dataclass(frozen=True)
class MeasuredReferences:
    """Test losses in nats per token, as they are cached."""

    format: int
    data_fingerprint: str
    tokens: int  # that they learned from
    test_tokens: int
    ngram: list[float]  # of orders 1 to 5
    lzma: float | None  # None where the text of the tokens is not available


def measure_text_references(
    corpus: Corpus, tokens: int, limit: int | None = None
) -> MeasuredReferences:
    """Return the losses after learning from at most `tokens` tokens, from the cache if possible.

    They are those of the test split, or of what a run with this `limit` reads of it.
    """
    test_tokens = corpus.test_tokens(limit)
    tokens = min(tokens, corpus.tokens["train"], MAX_TRAIN_TOKENS)
    path = corpus.folder / f"references-{tokens}-{test_tokens}.json"
    with ExitStack() as stack:
        # Runs that end together measure once; a read-only cache has no lock.
        with suppress(OSError):
            stack.enter_context(hold_lock(corpus.folder / "references.lock"))
        if (cached := _read(path, corpus.fingerprint)) is not None:
            return cached
        train, test = corpus.split("train")[:tokens], corpus.split("test")[:test_tokens]
        measured = MeasuredReferences(
            format=_FORMAT,
            data_fingerprint=corpus.fingerprint,
            tokens=tokens,
            test_tokens=test_tokens,
            ngram=ngram_losses(train, test, corpus.vocabulary),
            lzma=_lzma_loss(corpus, train, test),
        )
        with suppress(OSError):  # a cache that others have prepared may be read-only
            write_atomic(path, json.dumps(asdict(measured)).encode())
    return measured


def peak_bytes(tokens: int, test_tokens: int) -> int:
    """Return the memory that `measure_text_references` needs for so many tokens of both splits.

    The compressor's hash table has 2^24 entries of 4 bytes for this size of its dictionary, and is
    filled at random places; the n-grams of a text, which repeat, take 80 bytes per token of the
    training text and 40 per token of the test text.
    """
    return 2**26 + 80 * min(tokens, MAX_TRAIN_TOKENS) + 40 * test_tokens


def ngram_losses(
    train: np.ndarray, test: np.ndarray, vocabulary: int, orders: int = MAX_ORDER
) -> list[float]:
    """Return the mean loss of every test token but the first, by models of order 1, 2, ….

    Interpolated n-grams with the smoothing of Witten and Bell (1991), method C:

        P(w | h) = (c(hw) + T(h) P(w | h')) / (c(h) + T(h)),

    where T(h) is the number of different tokens seen after the context h, and h' is h without its
    first token. The model of order 0 is uniform.
    """
    train, test = train.astype(np.int64), test.astype(np.int64)
    probability = np.full(len(test), 1 / vocabulary)
    # The number of the context of each token among those seen in training; -1: not seen.
    context, test_context = np.zeros(len(train), np.int64), np.zeros(len(test), np.int64)
    contexts, losses = 1, []
    for _ in range(min(orders, len(train))):
        grams, gram, count = np.unique(
            context * vocabulary + train, return_inverse=True, return_counts=True
        )
        total = np.bincount(grams // vocabulary, weights=count, minlength=contexts)
        distinct = np.bincount(grams // vocabulary, minlength=contexts)
        wanted = test_context * vocabulary + test
        found = np.minimum(np.searchsorted(grams, wanted), len(grams) - 1)
        seen = (test_context >= 0) & (grams[found] == wanted)
        # The end of the training text may be a context without a continuation.
        known = (test_context >= 0) & (distinct[test_context] > 0)
        here = test_context[known]
        probability[known] = (
            np.where(seen, count[found], 0)[known] + distinct[here] * probability[known]
        ) / (total[here] + distinct[here])
        losses.append(float(-np.log(probability[1:]).mean()))
        # The context of the next order ends with the token before: one n-gram further left.
        context, train, contexts = gram[:-1], train[1:], len(grams)
        test_context = np.concatenate([[-1], np.where(seen, found, -1)[:-1]])
    return losses + losses[-1:] * (orders - len(losses))


def _lzma_loss(corpus: Corpus, train: np.ndarray, test: np.ndarray) -> float | None:
    """Return what the test text adds to the compressed training text, per token."""
    if corpus.tokenizer["name"] == "bytes":
        before, after = train.tobytes(), test.tobytes()
    else:
        try:
            tokenizer = load_tokenizer(corpus.tokenizer)
        except (UserError, ValueError):  # OpenAI's files are not here
            return None
        before, after = (tokenizer.decode(part.tolist()) for part in (train, test))
    added = _compressed_size(before + after) - _compressed_size(before)
    return float(added * 8 * np.log(2) / len(test))


def _compressed_size(text: bytes) -> int:
    return len(lzma.compress(text, lzma.FORMAT_RAW, filters=_LZMA))


def _read(path: Path, fingerprint: str) -> MeasuredReferences | None:
    """Return what is cached, if it is of this data."""
    try:
        cached = from_json(MeasuredReferences, parse_json(read_file(path)))
    except (OSError, ValueError):
        return None
    fits = (cached.format, cached.data_fingerprint) == (_FORMAT, fingerprint)
    return cached if fits and len(cached.ngram) == MAX_ORDER else None

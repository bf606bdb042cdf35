"""Masked language modelling of a text (Devlin et al. 2019), for an encoder.

In every window 15 % of the tokens are to be predicted. Of these 80 % are replaced by the mask, 10 %
by a random token, and 10 % are kept. As in BERT, the mask is a token of its own in the embedding
and in the output, and the token that ends a document is never masked. No target and no random token
is the mask.

Shape suffixes: N windows, T context, A answers.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from qkablate.data.batches import DOCUMENT, IGNORE, Batch, evenly_spaced
from qkablate.data.corpus import Corpus
from qkablate.data.eval_metrics import EvalMetrics
from qkablate.data.tokenizers import load_tokenizer
from qkablate.errors import ImpossibleConfig
from qkablate.randomness import named_generator
from qkablate.strict_json import hash_json

PREDICTED, MASKED, RANDOM = 0.15, 0.8, 0.1  # of all tokens; of the predicted ones
_FORMAT = 1  # raised when the same text would be masked in another way


def masked_fingerprint(fingerprint: str, context: int) -> str:
    """Return the fingerprint of a masked text, by that of the text and the length of windows."""
    return hash_json(["mlm", _FORMAT, context, fingerprint])


class MaskedText:
    """Windows of a corpus, some of whose tokens are masked."""

    chance = None
    pad = None  # windows are full

    def __init__(self, corpus: Corpus, context: int) -> None:
        self.corpus, self.length = corpus, context
        self.tokenizer, self.name, self.tokens = corpus.tokenizer, corpus.name, corpus.tokens
        self.fingerprint = masked_fingerprint(corpus.fingerprint, context)
        self.mask = corpus.vocabulary
        self.vocabulary = corpus.vocabulary + 1
        self.answers = max(1, round(PREDICTED * context))  # of a window
        self.answer_fraction = self.answers / context

    @property
    def description(self) -> str:
        return f"{self.corpus.description}; {self.answers} of {self.length} tokens masked"

    @functools.cached_property
    def end(self) -> int | None:
        """The token that ends a document."""
        return load_tokenizer(self.tokenizer).end

    def check_context(self, context: int) -> None:
        for split, tokens in self.tokens.items():
            if tokens < context:
                raise ImpossibleConfig(
                    f"model.context: {context} is longer than the data: the {split} split holds"
                    f" {tokens} tokens"
                )

    def mask_windows(
        self, tokens_NT: np.ndarray, rng: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return windows with masks, and the targets and their positions in each window."""
        tokens_NT = tokens_NT.astype(np.int64)
        order_NT = rng.random(tokens_NT.shape)
        order_NT[tokens_NT == self.end] = 2  # chosen last, and not asked for
        chosen_NA = np.argpartition(order_NT, self.answers - 1, axis=1)[:, : self.answers]
        positions_NA = np.sort(chosen_NA, axis=1)
        answers_NA = np.take_along_axis(tokens_NT, positions_NA, axis=1)
        kind_NA = rng.random(answers_NA.shape)
        random_NA = rng.integers(self.mask, size=answers_NA.shape)
        read_NA = np.where(kind_NA < MASKED + RANDOM, random_NA, answers_NA)
        read_NA[kind_NA < MASKED] = self.mask
        is_end_NA = answers_NA == self.end
        np.put_along_axis(tokens_NT, positions_NA, np.where(is_end_NA, answers_NA, read_NA), axis=1)
        return tokens_NT, np.where(is_end_NA, IGNORE, answers_NA), positions_NA

    def batches(
        self, *, seed: int, batch_size: int, grad_accum: int, context: int
    ) -> "RandomMaskedWindows":
        return RandomMaskedWindows(self, seed, batch_size, grad_accum)

    def split_batches(
        self,
        split: str,
        *,
        batch_size: int,
        context: int,
        limit: int | None = None,
        by_document: bool = False,
    ) -> Iterator[Batch]:
        """Yield the windows of a whole split, or of some `limit` tokens spread over it.

        The last window ends with the split, and begins inside the one before. Of the training
        split, as much as the validation split has is read at most. Of the test split the beginning
        is read, and its answers are counted by document; `by_document`, those of validation are,
        too, also of a single document. The last batch is filled with windows that do not count.
        """
        total = self._readable(split)
        windows = -(-total // self.length)
        count = windows if limit is None or limit >= total else max(1, limit // self.length)
        rows = np.arange(count) if split == "test" else evenly_spaced(count, windows)
        groups = None
        if by_document or split == "test":
            groups = self.corpus.document_groups(split)
        if by_document and groups is None:
            groups = np.zeros(self.corpus.tokens[split], np.int64)
        for first in range(0, len(rows), batch_size):
            indices_N = np.arange(first, first + batch_size)
            yield self._read(split, rows[indices_N % len(rows)], indices_N < len(rows), groups)

    def test_tokens(self, limit: int | None) -> int:
        """Return how many tokens of the test split are read: the first windows within `limit`."""
        total = self.tokens["test"]
        return total if limit is None else min(total, max(1, limit // self.length) * self.length)

    def sample(self, split: str, *, count: int, context: int) -> Batch:
        rows = evenly_spaced(count, self._readable(split) // self.length)
        return self._read(split, rows, np.ones(len(rows), bool))

    def _readable(self, split: str) -> int:
        """Return how many tokens of a split are evaluated at most."""
        limit = self.tokens["val"] if split == "train" else self.tokens[split]
        return min(self.tokens[split], limit)

    def _read(
        self, split: str, rows: np.ndarray, counts_N: np.ndarray, groups: np.ndarray | None = None
    ) -> Batch:
        """Return windows of a split by number; the masks of each depend on nothing else."""
        tokens = self.corpus.split(split)
        total = self._readable(split)
        starts_N = np.minimum(rows * self.length, total - self.length)
        parts = [
            self.mask_windows(
                tokens[None, start : start + self.length], named_generator(0, "mask", split, row)
            )
            for row, start in zip(rows.tolist(), starts_N.tolist(), strict=True)
        ]
        tokens_NT, targets_NA, positions_NA = map(np.concatenate, zip(*parts, strict=True))
        targets_NA[~counts_N] = IGNORE
        slices = {}
        if groups is not None:
            slices[DOCUMENT] = groups[starts_N[:, None] + positions_NA]
        return _make_batch(tokens_NT, targets_NA, positions_NA, slices)

    def metrics(self, split: str, totals: EvalMetrics) -> dict[str, float]:
        """Return the metrics of an evaluated split, of its masked tokens."""
        return {"loss": totals.all.mean, "accuracy": totals.all.accuracy}


@dataclass(frozen=True)
class RandomMaskedWindows:
    """Training batches of random windows with random masks; both depend on (seed, step) alone."""

    text: MaskedText
    seed: int
    batch_size: int
    grad_accum: int

    def step(self, step: int) -> list[Batch]:
        """Return the micro-batches of a step."""
        text, count = self.text, self.batch_size * self.grad_accum
        windows = sliding_window_view(text.corpus.split("train"), text.length)
        starts_N = named_generator(self.seed, "batch", step).integers(len(windows), size=count)
        masked = text.mask_windows(windows[starts_N], named_generator(self.seed, "mask", step))
        parts = (np.split(part, self.grad_accum) for part in masked)
        return [_make_batch(*micro) for micro in zip(*parts, strict=True)]


def _make_batch(
    tokens_NT: np.ndarray,
    targets_NA: np.ndarray,
    positions_NA: np.ndarray,
    slices: dict[str, np.ndarray] | None = None,
) -> Batch:
    import torch

    return Batch(
        (torch.from_numpy(tokens_NT),),
        torch.from_numpy(targets_NA),
        torch.from_numpy(positions_NA),
        slices,
    )

"""Pairs of source and target as batches for an encoder-decoder.

A prepared corpus holds them one after the other, each sentence closed by the token `end`, which
also precedes the target that the decoder reads. Shorter sources are filled with PAD, shorter
targets, as the decoder reads them, with `end`; what is filled does not count.

Shape suffixes: N pairs, S source, T context, A answers.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from qkablate.config import ModelConfig
from qkablate.config.data import SPLITS
from qkablate.data.batches import DOCUMENT, IGNORE, PAD, Batch, evenly_spaced, group_neighbors
from qkablate.data.corpus import Corpus
from qkablate.data.eval_metrics import EvalMetrics
from qkablate.data.tokenizers import load_tokenizer
from qkablate.errors import ImpossibleConfig, UserError
from qkablate.randomness import named_generator


class Split:
    """The pairs of a split."""

    def __init__(self, tokens: np.ndarray, end: int) -> None:
        ends = np.flatnonzero(tokens == end)
        ends = ends[: len(ends) // 2 * 2]  # the last pair may be cut off
        starts = np.concatenate([[0], ends[:-1] + 1]) if len(ends) else ends
        self.tokens = tokens
        # First token and length of each sentence, without its end: rows of source and target.
        self.starts_N2 = starts.reshape(-1, 2)
        self.lengths_N2 = (ends - starts).reshape(-1, 2)

    def __len__(self) -> int:
        return len(self.starts_N2)

    def sentence(self, pair: int, side: int) -> np.ndarray:
        """Return the tokens of the source (0) or the target (1) of a pair."""
        start = self.starts_N2[pair, side]
        return self.tokens[start : start + self.lengths_N2[pair, side]]

    def padded(self, rows_N: np.ndarray, side: int, width: int, *, ends: bool) -> np.ndarray:
        """Return sentences, with their ends or without, in rows of one width."""
        columns_W = np.arange(width)
        known_NW = columns_W < self.lengths_N2[rows_N, side][:, None] + ends
        index_NW = np.where(known_NW, self.starts_N2[rows_N, side][:, None] + columns_W, 0)
        padded_NW: np.ndarray = np.where(known_NW, self.tokens[index_NW].astype(np.int64), PAD)
        return padded_NW


class Pairs:
    """Pairs of a corpus, for a model with these lengths of source and target."""

    answer_fraction = 1.0
    chance = None  # accuracy of the best guess that does not depend on the source: not known

    def __init__(self, corpus: Corpus, model: ModelConfig) -> None:
        self.corpus, self.tokenizer = corpus, corpus.tokenizer
        self.name, self.fingerprint = corpus.name, corpus.fingerprint
        self.source, self.length = model.source or model.context, model.context
        self.vocabulary = corpus.vocabulary
        end = load_tokenizer(corpus.tokenizer).end
        assert end is not None
        self.end = end
        self.splits = {name: Split(corpus.split(name), end) for name in SPLITS}
        for name, split in self.splits.items():
            if not len(split):
                raise UserError(f"data: {self.name} has too few pairs: the {name} split has none")
        self.tokens = {name: len(split) * self.length for name, split in self.splits.items()}

    @property
    def description(self) -> str:
        train, val, test = (len(self.splits[name]) for name in SPLITS)
        return (
            f"{self.name}, {self.tokenizer['name']}: {train:,} pairs to train on, {val:,} to"
            f" validate, {test:,} to test"
        )

    def longest(self) -> tuple[int, int]:
        """Return the length of the longest source, and of the longest target with its end."""
        lengths_2 = np.max([split.lengths_N2.max(axis=0) for split in self.splits.values()], axis=0)
        return int(lengths_2[0]), int(lengths_2[1]) + 1

    def check_context(self, context: int) -> None:
        """Check that every sentence fits the model."""
        lengths_N2 = np.concatenate([split.lengths_N2 for split in self.splits.values()])
        sources, targets = (lengths_N2 > (self.source, context - 1)).sum(axis=0).tolist()
        if not sources and not targets:
            return
        key = "source" if sources else "context"
        problems = [f"{sources:,} sources are longer than {self.source} tokens"] * bool(sources)
        problems += [f"{targets:,} targets, with an end, than {context}"] * bool(targets)
        source, target = self.longest()
        raise ImpossibleConfig(
            f"model.{key}: of {len(lengths_N2):,} pairs {' and '.join(problems)}; the longest need"
            f" model.source={source} model.context={target}, or data.max_length leaves out the"
            " longer ones"
        )

    def batch(self, split: str, rows_N: np.ndarray) -> Batch:
        """Return pairs of a split as the model reads them."""
        import torch

        pairs = self.splits[split]
        sources_NS = pairs.padded(rows_N, 0, self.source, ends=False)
        answers_NA = pairs.padded(rows_N, 1, self.length, ends=True)
        tokens_NT = np.roll(answers_NA, 1, axis=1)
        tokens_NT[:, 0] = self.end
        is_padding_NA = answers_NA == PAD
        tokens_NT[is_padding_NA] = self.end
        targets_NA = np.where(is_padding_NA, IGNORE, answers_NA)
        inputs = (torch.from_numpy(sources_NS), torch.from_numpy(tokens_NT))
        return Batch(inputs, torch.from_numpy(targets_NA), slices={})

    def batches(
        self, *, seed: int, batch_size: int, grad_accum: int, context: int
    ) -> "RandomPairs":
        return RandomPairs(self, seed, batch_size, grad_accum)

    def split_batches(
        self,
        split: str,
        *,
        batch_size: int,
        context: int,
        limit: int | None = None,
        by_document: bool = False,
    ) -> Iterator[Batch]:
        """Yield a whole split, or pairs of some `limit` tokens spread over it.

        Of the training split, as many pairs as the validation split has are read at most, and of
        the test split the first ones, whose answers are counted by document, too; `by_document`,
        those of validation are as well, also of a single document. The last batch is filled with
        pairs that do not count.
        """
        count = len(self.splits["val" if split == "train" else split])
        rows = evenly_spaced(count, len(self.splits[split]))
        if split == "test":
            rows = rows[: self._first_within(limit)]
        elif limit is not None:
            rows = rows[evenly_spaced(max(1, limit // self.length), len(rows))]
        groups = self.document_groups(split) if by_document or split == "test" else None
        if by_document and groups is None:
            groups = np.zeros(len(self.splits[split]), np.int64)
        for first in range(0, len(rows), batch_size):
            indices_N = np.arange(first, first + batch_size)
            batch = self.batch(split, rows[indices_N % len(rows)])
            batch.targets_NA[indices_N >= len(rows)] = IGNORE
            if groups is not None:
                groups_N = groups[rows[indices_N % len(rows)]]
                groups_NA = np.broadcast_to(groups_N[:, None], batch.targets_NA.shape)
                batch = batch._replace(slices={**(batch.slices or {}), DOCUMENT: groups_NA})
            yield batch

    def document_groups(self, split: str) -> np.ndarray | None:
        """Return the document of each pair of a held-out split; None if there is only one.

        Pairs of one file are alike: the file is their document, or the pair itself where the files
        are not known. Of very many pairs, neighbors are counted as one.
        """
        count, files = len(self.splits[split]), self.corpus.document_files(split)
        groups = group_neighbors(count) if files is None else files[:count]  # of whole pairs
        return groups if (groups != groups[0]).any() else None

    def test_tokens(self, limit: int | None) -> int:
        """Return how many tokens of the test split are read: the first pairs within `limit`.

        Of a part of them, the targets' own tokens are counted, which do not depend on how far the
        model's context is filled with padding: runs with equal counts have read the same pairs.
        """
        pairs, count = self.splits["test"], self._first_within(limit)
        if count == len(pairs):
            return self.tokens["test"]
        return int(pairs.lengths_N2[:count, 1].sum())

    def _first_within(self, limit: int | None) -> int:
        """Return how many pairs of the test split are read."""
        count = len(self.splits["test"])
        return count if limit is None else min(count, max(1, limit // self.length))

    def sample(self, split: str, *, count: int, context: int) -> Batch:
        return self.batch(split, evenly_spaced(count, len(self.splits[split])))

    def metrics(self, split: str, totals: EvalMetrics) -> dict[str, float]:
        """Return the metrics of an evaluated split: a pair is right if all its tokens are."""
        return {
            "loss": totals.all.mean,
            "accuracy": totals.all.accuracy,
            "exact": totals.sequences.accuracy,
        }


@dataclass(frozen=True)
class RandomPairs:
    """Training batches of random pairs."""

    pairs: Pairs
    seed: int
    batch_size: int
    grad_accum: int

    def step(self, step: int) -> list[Batch]:
        """Return the micro-batches of a step."""
        count = self.batch_size * self.grad_accum
        generator = named_generator(self.seed, "batch", step)
        rows = generator.integers(len(self.pairs.splits["train"]), size=count)
        return [self.pairs.batch("train", part) for part in np.split(rows, self.grad_accum)]

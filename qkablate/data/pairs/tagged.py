"""Sentences with a tag for some of their words, which an encoder gives at the words' positions.

Shape suffixes: N sentences, T context, V vocabulary, K tags.
"""

from functools import cached_property
from typing import NamedTuple

import numpy as np

from qkablate.config import ModelConfig
from qkablate.data.batches import IGNORE, Batch
from qkablate.data.corpus import Corpus
from qkablate.data.eval_metrics import EvalMetrics
from qkablate.data.pairs.pairs import Pairs
from qkablate.data.pairs.roles import TAGS
from qkablate.data.tokenizers import Tokenizer, load_tokenizer
from qkablate.errors import ImpossibleConfig


class TagBaselines(NamedTuple):
    """Accuracies on the test split of guesses that take no context, learned in training."""

    chance: float  # always the most common tag
    word: float  # each word's most common tag


def name_tags(tokenizer: Tokenizer) -> dict[int, str]:
    """Return the names of the tags that a tokenizer knows, by rising token."""
    known = [tag for tag in TAGS if not tokenizer.unknown(tag)]
    ids = {int(tokenizer.encode(tag.encode())[0]): tag for tag in known}
    return {i: ids[i].strip("<>") for i in sorted(ids) if tokenizer.decode([i]).decode() == ids[i]}


class TaggedSentences(Pairs):
    """Sentences of a corpus as sources, and the tags of their words as targets."""

    def __init__(self, corpus: Corpus, model: ModelConfig) -> None:
        super().__init__(corpus, model)
        self.tags = name_tags(load_tokenizer(self.tokenizer))  # the place of one is its slice

    @property
    def description(self) -> str:
        return self.describe()

    def describe(self, limit: int | None = None) -> str:
        """Describe the data for a run that reads `limit` tokens of the test split."""
        counts = super().description.replace("pairs", "sentences")
        word = self.measure_baselines(limit).word
        return f"{counts}; each word's most common tag is right at {word:.1%}"

    def measure_baselines(self, limit: int | None = None) -> TagBaselines:
        """Return the accuracies on the test split, or on what a run with this `limit` reads."""
        overall, guesses_V = self._guesses
        words, tags = self._tagged_words("test", self._first_within(limit))
        return TagBaselines(
            float((tags == overall).mean()), float((guesses_V[words] == tags).mean())
        )

    @cached_property
    def _guesses(self) -> tuple[int, np.ndarray]:
        """The most common tag of the training split, and that of each word."""
        words, tags = self._tagged_words("train", len(self.splits["train"]))
        counts_VK = np.zeros((self.vocabulary, len(self.tags)), np.int64)
        np.add.at(counts_VK, (words, tags), 1)
        overall = int(counts_VK.sum(axis=0).argmax())
        guesses_V = np.where(counts_VK.any(axis=1), counts_VK.argmax(axis=1), overall)
        return overall, guesses_V

    def _tagged_words(self, split: str, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the tagged words of the first `count` sentences, and the numbers of the tags."""
        sentences, (width, _) = self.splits[split], self.longest()
        rows_N = np.arange(count)
        words_NT, tags_NT = (sentences.padded(rows_N, i, width, ends=False) for i in (0, 1))
        has_tag_NT = np.isin(tags_NT, [*self.tags])
        return words_NT[has_tag_NT], np.searchsorted([*self.tags], tags_NT[has_tag_NT])

    def check_context(self, context: int) -> None:
        longest, _ = self.longest()
        if longest > context:
            raise ImpossibleConfig(
                f"model.context: {context} is shorter than the longest sentence of"
                f" data={self.name}; use model.context={longest} or more"
            )

    def batch(self, split: str, rows_N: np.ndarray) -> Batch:
        """Return sentences of a split as the model reads them."""
        import torch

        sentences = self.splits[split]
        tokens_NT = sentences.padded(rows_N, 0, self.length, ends=False)
        tags_NT = sentences.padded(rows_N, 1, self.length, ends=False)
        targets_NT = np.where(np.isin(tags_NT, [*self.tags]), tags_NT, IGNORE)
        slices = {"tag": np.searchsorted([*self.tags], targets_NT)}
        return Batch((torch.from_numpy(tokens_NT),), torch.from_numpy(targets_NT), slices=slices)

    def metrics(self, split: str, totals: EvalMetrics) -> dict[str, float]:
        """Return the metrics of an evaluated split, also by tag."""
        metrics = super().metrics(split, totals)
        names = [*self.tags.values()]
        for index, sums in sorted(totals.slices["tag"].items()):
            name = names[index]
            metrics |= {f"accuracy/tag/{name}": sums.accuracy, f"loss/tag/{name}": sums.mean}
        return metrics

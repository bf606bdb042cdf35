"""Losses that n-grams and a compressor reach on the text of some runs, and who is behind them.

A run that has not beaten the best n-gram has learned nothing that needs attention, so variants of
attention cannot differ by what attention is needed for.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from qkablate.runs.records import is_number
from qkablate.table import format_list

KEY = "text_references"  # in result.json
THIS_RUN = "this run"  # the name of a run that is shown alone


@dataclass(frozen=True)
class TextReferences:
    """Test losses on one text in nats per token, and the runs compared with them."""

    data_fingerprint: str
    tokens: int  # that n-grams and compressor learned from
    ngram: list[float]  # of orders 1, 2, …
    lzma: float | None
    runs: dict[str, int]  # by arm, the runs that are done
    behind: dict[str, int]  # by arm, those that have not beaten the best n-gram

    @property
    def best_ngram(self) -> float:
        return min(self.ngram)

    def __str__(self) -> str:
        lzma = "" if self.lzma is None else f", lzma {self.lzma:.2f}"
        order = 1 + self.ngram.index(self.best_ngram)
        text = (
            f"{order}-gram {self.best_ngram:.2f}{lzma} nats per token, learned from"
            f" {self.tokens:,} tokens"
        )
        if not self.behind:
            return f"{text}; every run beats the best n-gram"
        names = [
            name if count == self.runs[name] == 1 else f"{name} ({count}/{self.runs[name]})"
            for name, count in self.behind.items()
        ]
        if names == [THIS_RUN]:
            return f"{text}; this run does not beat the best n-gram"
        return f"{text}; runs that do not beat the best n-gram: {format_list(names, 6)}"


def has_beaten_ngrams(result: Mapping[str, Any]) -> bool | None:
    """Return whether a run beats the best n-gram; None if that is unknown."""
    found = find_text_references([("", result)])
    return not found[0].behind if found else None


def find_text_references(results: Iterable[tuple[str, Mapping[str, Any]]]) -> list[TextReferences]:
    """Return the references in some results, given with the names of their arms, by text."""
    found: dict[tuple[Any, ...], tuple[Counter[str], Counter[str]]] = {}
    for arm, result in results:
        references, loss = result.get(KEY), (result.get("loss") or {}).get("test")
        if not isinstance(references, dict) or not is_number(loss):
            continue
        ngram, lzma = references.get("ngram"), references.get("lzma")
        tokens = references.get("tokens")
        if not (isinstance(ngram, list) and ngram and all(map(is_number, ngram))):
            continue
        if type(tokens) is not int or not (lzma is None or is_number(lzma)):
            continue
        key = str(result.get("data_fingerprint")), tokens, tuple(ngram), lzma
        runs, behind = found.setdefault(key, (Counter(), Counter()))
        runs[arm] += 1
        behind[arm] += loss >= min(ngram)
    return [
        TextReferences(fingerprint, tokens, [*ngram], lzma, dict(runs), dict(+behind))
        for (fingerprint, tokens, ngram, lzma), (runs, behind) in found.items()
    ]

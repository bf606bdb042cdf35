"""Standard error of a gap over the documents of the test split.

The interval over seeds takes the test split as given. Other documents would give another gap: by
how much, the spread of the gap from document to document shows. Of pairs and tags a document is a
file, or the pair itself where no files are known.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from qkablate.runs.document_losses import DocumentLosses

Pairs = Sequence[tuple[DocumentLosses | None, DocumentLosses | None]]


@dataclass(frozen=True)
class DocumentError:
    """Standard error of a mean gap over documents, in nats per token."""

    se: float
    documents: int


def document_error(pairs: Pairs) -> DocumentError | None:
    """Estimate the error of a gap over documents from the losses of paired runs.

    None for a single document, for a task, and for runs without losses by document. The gap is a
    ratio of sums over documents, and its error that of the jackknife, which leaves out one at a
    time: without document i, with a difference dᵢ and a share wᵢ of the n tokens, the gap moves by
    (dᵢ - gap · wᵢ n) / (1 - wᵢ) n. The usual error of a ratio (Cochran 1977, section 6.3) lacks the
    1 - wᵢ and is too small where a few documents are large (MacKinnon, Nielsen and Webb 2023). The
    differences are means over the pairs.
    """
    found = _mean_difference(pairs)
    return None if found is None else DocumentError(ratio_error(*found), len(found[1]))


def error_of_difference(pairs: Pairs, others: Pairs) -> DocumentError | None:
    """Estimate the error of a gap less another one on the same documents; None on others."""
    found, other = _mean_difference(pairs), _mean_difference(others)
    if found is None or other is None or not np.array_equal(found[1], other[1]):
        return None
    return DocumentError(ratio_error(found[0] - other[0], found[1]), len(found[1]))


def _mean_difference(pairs: Pairs) -> tuple[np.ndarray, np.ndarray] | None:
    """Return the mean difference of the losses of each document, and its tokens."""
    known = [(run, other) for run, other in pairs if run is not None and other is not None]
    if not known or len(known) < len(pairs):
        return None
    tokens = known[0][0].tokens
    if len(tokens) < 2 or not all(np.array_equal(r.tokens, tokens) for pair in known for r in pair):
        return None
    return np.asarray(np.mean([run.losses - other.losses for run, other in known], axis=0)), tokens


def ratio_error(sums: np.ndarray, counts: np.ndarray) -> float:
    """Return the standard error of Σ sums / Σ counts over two documents or more: the jackknife."""
    total, documents = counts.sum(), len(counts)
    moves = (sums - sums.sum() / total * counts) / (total - counts)
    return float(np.sqrt((documents - 1) / documents * (moves**2).sum()))

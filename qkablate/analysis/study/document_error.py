"""Standard error of a gap over the documents of the test split.

The interval over seeds takes the test split as given. Other documents would give another gap: by
how much, the spread of the gap from document to document shows. Of pairs and tags a document is a
file, or the pair itself where no files are known.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from qkablate.runs.document_losses import DocumentLosses


@dataclass(frozen=True)
class DocumentError:
    """Standard error of a mean gap over documents, in nats per token."""

    se: float
    documents: int


def document_error(
    pairs: Sequence[tuple[DocumentLosses | None, DocumentLosses | None]],
) -> DocumentError | None:
    """Estimate the error of a gap over documents from the losses of paired runs.

    None for a single document, for a task, and for runs without losses by document. The gap is a
    ratio of sums over documents, and its error that of the jackknife, which leaves out one at a
    time: without document i, with a difference dᵢ and a share wᵢ of the n tokens, the gap moves by
    (dᵢ - gap · wᵢ n) / (1 - wᵢ) n. The usual error of a ratio (Cochran 1977, section 6.3) lacks the
    1 - wᵢ and is too small where a few documents are large (MacKinnon, Nielsen and Webb 2023). The
    differences are means over the pairs.
    """
    known = [(run, other) for run, other in pairs if run is not None and other is not None]
    if not known or len(known) < len(pairs):
        return None
    tokens = known[0][0].tokens
    count = len(tokens)
    if count < 2 or not all(np.array_equal(r.tokens, tokens) for pair in known for r in pair):
        return None
    return DocumentError(ratio_error(_mean_difference(known), tokens), count)


def error_of_difference(
    pairs: Sequence[tuple[DocumentLosses | None, DocumentLosses | None]],
    others: Sequence[tuple[DocumentLosses | None, DocumentLosses | None]],
) -> DocumentError | None:
    """Estimate the error of a gap less another one on the same documents; None on others."""
    if document_error(pairs) is None or document_error(others) is None:
        return None
    known, subtracted = (
        [(run, other) for run, other in own if run is not None and other is not None]
        for own in (pairs, others)
    )
    tokens = known[0][0].tokens
    if not np.array_equal(tokens, subtracted[0][0].tokens):
        return None
    difference = _mean_difference(known) - _mean_difference(subtracted)
    return DocumentError(ratio_error(difference, tokens), len(tokens))


def _mean_difference(pairs: Sequence[tuple[DocumentLosses, DocumentLosses]]) -> np.ndarray:
    return np.asarray(np.mean([run.losses - other.losses for run, other in pairs], axis=0))


def ratio_error(sums: np.ndarray, counts: np.ndarray) -> float:
    """Return the standard error of Σ sums / Σ counts over two documents or more: the jackknife."""
    total, documents = counts.sum(), len(counts)
    moves = (sums - sums.sum() / total * counts) / (total - counts)
    return float(np.sqrt((documents - 1) / documents * (moves**2).sum()))

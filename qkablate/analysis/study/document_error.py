"""Standard error of a gap over the documents of the test text.

The interval over seeds takes the test text as given. Other documents would give another gap: by
how much, the spread of the gap from document to document shows.
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
    ratio of sums over documents, so its variance is that of the ratio estimator (Cochran 1977,
    section 6.3): document i, with a difference dᵢ and nᵢ tokens, contributes dᵢ - gap · nᵢ. The
    differences are means over the pairs.
    """
    known = [(run, other) for run, other in pairs if run is not None and other is not None]
    if not known or len(known) < len(pairs):
        return None
    tokens = known[0][0].tokens
    count, total = len(tokens), tokens.sum()
    if count < 2 or not all(np.array_equal(r.tokens, tokens) for pair in known for r in pair):
        return None
    difference = np.mean([run.losses - other.losses for run, other in known], axis=0)
    residuals = difference - difference.sum() / total * tokens
    se = np.sqrt(count / (count - 1) * (residuals**2).sum()) / total
    return DocumentError(float(se), count)

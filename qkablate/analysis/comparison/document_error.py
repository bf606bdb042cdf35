"""Standard error of a gap over the documents of the test text.

The interval over seeds takes the test text as given. Other documents would give another gap: by
how much, the spread of the gap from document to document shows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from qkablate.analysis.comparison.gaps import Gap


@dataclass(frozen=True)
class DocumentError:
    """Standard error of a mean gap over documents, in nats per token."""

    se: float
    documents: int


def measure_document_error(gap: Gap) -> DocumentError | None:
    """Estimate the error of a gap over documents, its mean over seeds taken first.

    None for a single document, for a task, and for runs without losses by document.
    """
    pairs = []
    for key in gap.pairs:
        run = gap.arm.records[key].document_losses
        other = gap.baseline.records[key].document_losses
        if run is None or other is None or not np.array_equal(run.tokens, other.tokens):
            return None
        pairs.append((run.losses - other.losses, run.tokens))
    return document_error(pairs)


def document_error(pairs: Sequence[tuple[np.ndarray, np.ndarray]]) -> DocumentError | None:
    """Estimate the error from each pair's differences (in nats) and tokens by document.

    The gap is a ratio of sums over documents, so its variance is that of the ratio estimator
    (Cochran 1977, section 6.3): document i, with a difference dᵢ and nᵢ tokens, contributes
    dᵢ - gap · nᵢ.
    """
    if not pairs or len({tokens.tobytes() for _, tokens in pairs}) > 1 or len(pairs[0][1]) < 2:
        return None
    tokens = pairs[0][1]
    differences = np.mean([difference for difference, _ in pairs], axis=0)
    count, total = len(tokens), tokens.sum()
    residuals = differences - differences.sum() / total * tokens
    se = np.sqrt(count / (count - 1) * (residuals**2).sum()) / total
    return DocumentError(float(se), count)

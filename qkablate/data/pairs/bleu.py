"""BLEU of translations, by sacrebleu (Post, 2018)."""

from collections.abc import Sequence
from typing import NamedTuple

from qkablate.errors import require_extra


class Bleu(NamedTuple):
    """A score from 0 to 100, and what it depends on."""

    score: float
    signature: str


def score_bleu(hypotheses: Sequence[str], references: Sequence[str]) -> Bleu:
    """Return the BLEU of a corpus with one reference each; UserError without sacrebleu."""
    require_extra("translate", "sacrebleu")
    from sacrebleu.metrics.bleu import BLEU

    metric = BLEU()
    score = metric.corpus_score([*hypotheses], [[*references]]).score
    return Bleu(score, str(metric.get_signature()))

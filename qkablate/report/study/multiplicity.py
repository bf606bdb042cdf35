"""Adjust the verdicts of a study for all parts of all its claims."""

from qkablate.analysis.claims.judgement import PartJudgement
from qkablate.analysis.comparison.decision import Verdict
from qkablate.analysis.stats import ALPHA, holm
from qkablate.report.study.claims import StudiedClaim
from qkablate.report.text.table import escape_markdown


def find_fragile(parts: list[PartJudgement]) -> list[PartJudgement]:
    """Return the decided parts that Holm's method over all `parts` leaves undecided."""
    adjusted = holm([_p_of_verdict(part) for part in parts])
    pairs = zip(parts, adjusted, strict=True)
    return [part for part, p in pairs if p >= ALPHA and _p_of_verdict(part) < ALPHA]


def format_multiplicity(claims: list[StudiedClaim]) -> str:
    """Say how many verdicts remain; '' where there is none."""
    names = {id(part): one.claim.name for one in claims for part in one.deciding}
    parts = [part for one in claims for part in one.deciding]
    decided = sum(_p_of_verdict(part) < ALPHA for part in parts)
    if not decided:
        return ""
    fragile = find_fragile(parts)
    text = (
        f"Of {decided} decided parts, {decided - len(fragile)} remain decided when they are"
        f" adjusted for all {len(parts)} parts of these claims (Holm, {100 * ALPHA:g} %), and not"
        " for those of each claim alone."
    )
    if not fragile:
        return text
    own = sorted({f"{names[id(part)]} ({part.part.name})" for part in fragile})
    return f"{text} The others: {escape_markdown(', '.join(own))}."


def _p_of_verdict(judged: PartJudgement) -> float:
    """Return the p-value of the test that decided a part; 1 where none did."""
    match judged.word:
        case Verdict.SUPPORTED:
            return judged.part.p_supported
        case Verdict.REFUTED:
            return judged.part.p_refuted
        case Verdict.EQUIVALENT:
            return judged.part.p_equivalent
    return 1.0

"""Adjust the verdicts of a study for all parts of all its claims."""

from qkablate.analysis.claims.judgement import PartJudgement
from qkablate.analysis.claims.samples import Exact
from qkablate.analysis.comparison.decision import Verdict
from qkablate.analysis.stats import ALPHA, holm
from qkablate.report.study.claims import StudiedClaim
from qkablate.report.text.table import escape_markdown


def p_of_verdict(judged: PartJudgement) -> float:
    """Return the p-value of the test that decided a part; 1 where none did."""
    match judged.word:
        case Verdict.SUPPORTED:
            return judged.part.p_supported
        case Verdict.REFUTED:
            return judged.part.p_refuted
        case Verdict.EQUIVALENT:
            return judged.part.p_equivalent
    return 1.0


def find_fragile(parts: list[PartJudgement]) -> list[PartJudgement]:
    """Return the decided parts that Holm's method over all `parts` leaves undecided."""
    known = [p_of_verdict(part) for part in parts]
    adjusted = zip(parts, known, holm(known), strict=True)
    return [part for part, p, adjusted_p in adjusted if p < ALPHA <= adjusted_p]


def format_multiplicity(claims: list[StudiedClaim]) -> str:
    """Say how many verdicts remain; '' where there is none."""
    owners = {id(part): one.claim.name for one in claims for part in one.deciding}
    parts = [part for one in claims for part in one.deciding]
    decided = [part for part in parts if p_of_verdict(part) < ALPHA]
    if not decided:
        return ""
    fragile = find_fragile(parts)
    samples = [part.part.sample for part in decided]
    same = sum(isinstance(sample, Exact) or sample.sd == 0 for sample in samples)
    text = (
        f"Of {len(decided)} decided parts, {same} have no variance: counts of parameters, or"
        f" accuracies of exactly 100 % in every run. Adjusted for all {len(parts)} parts of these"
        f" claims and not for those of each claim (Holm, {100 * ALPHA:g} %),"
        f" {len(decided) - len(fragile)} of the {len(decided)} remain decided."
    )
    if not fragile:
        return text
    own = sorted({f"{owners[id(part)]} ({part.part.name})" for part in fragile})
    return f"{text} The others: {escape_markdown(', '.join(own))}."

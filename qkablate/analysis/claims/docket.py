"""Which runs a claim is judged by: those of its own registration, look by look."""

from qkablate.analysis.claims.claim import Claim
from qkablate.analysis.claims.judgement import Judgement, judge_claim
from qkablate.analysis.claims.registry import edited_since, registrations
from qkablate.analysis.study.study import read_study
from qkablate.errors import UserError


def judged(looks: list[Judgement]) -> Judgement | None:
    """The one that counts, or None before the first sweep: the newest, but for seeds beyond those
    declared, which count when all of them are there.
    """
    counting = (one for one in looks if one.verdict or one.n in one.claim.seeds)
    return next(counting, looks[0] if looks else None)


def judgements(claim: Claim, out: str) -> list[Judgement]:
    """By each of its looks, the newest first."""
    before = registrations(out, claim.name)
    own = next((one for one in before if one.claim.hash == claim.hash), None)
    reasons = edited_since(claim, before)
    if own is None or not own.sweeps:
        others = [
            one
            for one in before
            if one.sweeps and (one.claim.scale, one.claim.words) == (claim.scale, claim.words)
        ]
        if not others:
            return []
        own = others[-1]  # its runs, by the claim as it is worded now
        reasons = [*reasons, "these are the runs of then; `qkablate claim run` trains its own"]
    try:
        looks = [*own.sweeps.values()][::-1]
        return [judge_claim(claim, read_study(sweep), reasons) for sweep in looks]
    except UserError:
        if own.claim.hash == claim.hash:
            raise
        return []  # it asks for arms that were not there

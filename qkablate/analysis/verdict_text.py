"""A claim and its verdict, for a person."""

from qkablate.analysis.audit import MARKS
from qkablate.analysis.claim import Claim, Selector
from qkablate.analysis.judgement import Judged, Judgement
from qkablate.errors import printable
from qkablate.table import aligned

_KINDS = {
    "noninferior": "is not worse than {} by {:g}",
    "equivalent": "is within ± {1:g} of {0}",
    "better": "is better than {} by more than {:g}",
    "worse": "is worse than {} by more than {:g}",
}
_DISTANCES = {
    "noninferior": "ends less than {1:g} from {0}, on average",
    "worse": "ends more than {1:g} from {0}, on average",
}
_CLAIMED = {
    "noninferior": "< {:g}",
    "equivalent": "within ± {:g}",
    "better": "< −{:g}",
    "worse": "> {:g}",
}
_WHERE = {"longest": "", "each": ", at each length", "growth": ", per doubling of tokens"}


def claim_lines(claim: Claim) -> list[str]:
    """What is claimed, and how it is tested."""
    said = [f"{claim.title}: {claim.says}", f"source    {claim.source}"]
    for name, spec in claim.parts.items():
        kinds = _KINDS if spec.of == "gap" else _DISTANCES
        kind = kinds[spec.kind].format(_side(spec.against), spec.margin)
        where = f"at equal {spec.axis}{_WHERE[spec.horizon]}"
        said.append(f"part      {name}: {_side(spec.arm)} {kind}, {where}")
    looks = " then ".join(map(str, claim.seeds))
    tuned = f"; rates tuned on {claim.tuning_seeds} other seeds" if claim.tuning_seeds else ""
    said.append(f"seeds     {looks}, from its hash {claim.hash[:12]}{tuned}")
    return [*map(printable, said)]


def _side(selector: Selector) -> str:
    return " ".join(v if k == "variant" else f"{k}={v}" for k, v in selector.items())


def lines(found: Judgement) -> list[str]:
    """The verdict, what it rests on, and what would settle it."""
    label = " (exploratory)" if found.exploratory else ""
    said = [*claim_lines(found.claim), "", f"{found.word}{label}"]
    said += [f"  exploratory: {reason}" for reason in found.exploratory]
    if found.verdict is None:
        ended, expected = found.study.ended, found.study.expected
        said.append(f"  {ended} of {expected} runs have ended; a verdict takes all of them")
        return [*map(printable, said)]
    rows = [
        _row(one, word, found.alpha)
        for one, word in zip(found.judged, found.verdict.parts, strict=True)
    ]
    level = f"{100 * (1 - 2 * found.alpha):.3g} % interval"
    head = ["part", "n", "gap", level, "sd", "claimed", "verdict"]
    said += ["", *aligned(head, rows), "", "audit", *_audit(found.judged)]
    for name, seeds in found.needed().items():
        told = f"{seeds} seeds would settle it" if seeds else "no number of seeds would settle it"
        said += ["", f"{name}: at the gap and the spread measured here {told}"]
    return [*map(printable, [*said, "", f"runs  {found.study.manifest.folder}"])]


def _row(one: Judged, word: str, alpha: float) -> list[str]:
    part, sample = one.part, one.part.sample
    low, high = sample.interval(1 - 2 * alpha) or (None, None)
    ends = [
        "−∞" if part.open_below else "–" if low is None else f"{low:+.4f}",
        "∞" if part.open_above else "–" if high is None else f"{high:+.4f}",
    ]
    mean = f"{sample.mean:+.4f}" if sample.n else "–"
    sd = "–" if sample.sd is None else f"{sample.sd:.4f}"
    claimed = _CLAIMED[part.kind].format(part.margin)
    return [part.name, str(sample.n), mean, f"[{', '.join(ends)}]", sd, claimed, word]


def _audit(judged: list[Judged]) -> list[str]:
    """Every check once, with the parts it is said of where these are not all."""
    said: dict[tuple[str, str, str], list[str]] = {}
    for one in judged:
        for check in one.checks:
            said.setdefault((check.name, check.state, check.says), []).append(one.part.name)
    found = []
    for (name, state, says), parts in said.items():
        of = "" if len(parts) == len(judged) else f"  ({', '.join(parts)})"
        found.append(f"  {MARKS[state] or '✓'} {name:<14} {says}{of}")
    return found

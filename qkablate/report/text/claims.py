"""A claim and its verdict, for a person."""

from qkablate.analysis.claims.claim import Claim, Selector
from qkablate.analysis.claims.judgement import Judged, Judgement
from qkablate.analysis.comparison.audit import BROKEN, MARKS, WARNING
from qkablate.analysis.comparison.gaps import per_cent
from qkablate.analysis.stats import Spread, detectable
from qkablate.errors import printable
from qkablate.table import aligned, nats

_KINDS = {
    "noninferior": "is not worse than {} by {:g}",
    "equivalent": "is within ± {1:g} of {0}",
    "better": "is better than {} by more than {:g}",
    "worse": "is worse than {} by more than {:g}",
}
_SPREADS = {
    "noninferior": "and {} spread by less than {:g} from pair to pair",
    "worse": "and {} spread by more than {:g} from pair to pair",
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
        kinds = _KINDS if spec.of == "gap" else _SPREADS
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
    doubts = {
        check.name
        for one in found.judged
        for check in one.checks
        if check.state in (WARNING, BROKEN)
    }
    said = [*claim_lines(found.claim), "", f"{found.word}{label}"]
    said += [f"  exploratory: {reason}" for reason in found.exploratory]
    if doubts and found.verdict:
        said.append(f"  the audit warns: {', '.join(sorted(doubts))}")
    if found.verdict is None:
        ended, expected = found.study.ended, found.study.expected
        said.append(f"  {ended} of {expected} runs have ended; a verdict takes all of them")
        return [*map(printable, said)]
    head, rows = part_table(found)
    said += ["", *aligned(head, rows), "", *(f"  {line}" for line in beside(found))]
    said += ["", "audit", *_audit(found.judged)]
    said += [line for needs in settling(found) for line in ("", needs)]
    return [*map(printable, [*said, "", f"runs  {found.study.manifest.folder}"])]


def part_table(found: Judgement) -> tuple[list[str], list[list[str]]]:
    """A row for each part; without a verdict, what is known so far is not told."""
    level = f"{100 * (1 - 2 * found.alpha):.3g} % interval"
    head = ["part", "n", "gap", level, "sd", "claimed", "verdict"]
    words = found.verdict.parts if found.verdict else []
    pairs = zip(found.judged, words, strict=False)
    return head, [_row(one, word, found.alpha) for one, word in pairs]


def beside(found: Judgement) -> list[str]:
    """What stands beside the intervals, part by part."""
    if found.verdict is None:
        return []
    return [line for one in found.judged for line in _beside(one, found.alpha)]


def _row(one: Judged, word: str, alpha: float) -> list[str]:
    part, sample = one.part, one.part.sample
    low, high = sample.interval(1 - 2 * alpha) or (None, None)
    ends = [
        "−∞" if part.open_below else "–" if low is None else nats(low),
        "∞" if part.open_above else "–" if high is None else nats(high),
    ]
    mean = nats(sample.mean) if sample.n else "–"
    sd = "–" if sample.sd is None else f"{sample.sd:.4f}"
    claimed = _CLAIMED[part.kind].format(part.margin)
    return [part.name, str(sample.n), mean, f"[{', '.join(ends)}]", sd, claimed, word]


def _beside(one: Judged, alpha: float) -> list[str]:
    """What stands beside a part's interval, and every gap it is made of."""
    part, sample = one.part, one.part.sample
    if sample.n < 2:
        return []
    said = []
    if sample.bca and sample.sign_flip is not None and sample.sd:
        low, high = sample.bca
        least = detectable(sample.sd, sample.n, 2 * alpha)
        said += [f"could have found {least:.4f}", f"BCa 95 % [{nats(low)}, {nats(high)}]"]
        said += [f"sign flip p {sample.sign_flip:.4f}"]
    if one.comparison.spec.horizon != "growth" and not isinstance(sample, Spread):
        said.append(f"perplexity {per_cent(sample.mean):+.2f} %")
    every = " ".join(map(nats, sample.values))
    return [f"{part.name}: {', '.join([*said, f'gaps {every}'])}"]


def settling(found: Judgement) -> list[str]:
    """What would settle the parts that are open."""
    return [f"{name}: {_would_settle(found, name, n)}" for name, n in found.needed().items()]


def _would_settle(found: Judgement, name: str, seeds: int | None) -> str:
    part = next(one.part for one in found.judged if one.part.name == name)
    if part.sample.n < 2:
        return "nothing was measured"
    if seeds is None:
        return "at the gap and the spread measured here no number of seeds would settle it"
    word = part.would_be(seeds, found.alpha, len(found.judged))
    return (
        f"were the gap {nats(part.sample.mean)} and its spread {part.sample.sd:.4f}, as measured,"
        f" {seeds} seeds would show it {word} four times of five"
    )


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

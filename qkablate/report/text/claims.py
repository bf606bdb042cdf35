"""A claim and its verdict as text and as JSON."""

import dataclasses
import math

from qkablate.analysis.claims.claim import OVER_LENGTHS, TEXT, Claim, PartSpec, Selector
from qkablate.analysis.claims.judgement import Judgement, PartJudgement
from qkablate.analysis.claims.measures import Unit
from qkablate.analysis.claims.samples import Exact
from qkablate.analysis.claims.verdict import Part, SeedsNeeded, is_deciding
from qkablate.analysis.comparison.audit import MARKS, group_checks
from qkablate.analysis.comparison.gaps import perplexity_percent
from qkablate.analysis.stats import Interval
from qkablate.analysis.study.study import Study
from qkablate.errors import sanitize
from qkablate.report.text.numbers import format_value
from qkablate.report.text.table import Table, format_interval, format_known
from qkablate.screen import PLAIN, Screen
from qkablate.table import format_count, format_list, format_nats, format_table

_KINDS = {
    "noninferior": "is not worse than {} by {}",
    "equivalent": "is within ± {1} of {0}",
    "better": "is better than {} by more than {}",
    "worse": "is worse than {} by more than {}",
}
_OF_SIZES = {
    "spread": {
        "noninferior": "and {} spread by less than {} from pair to pair",
        "worse": "and {} spread by more than {} from pair to pair",
    },
    "course": {
        "noninferior": "and {} are never {} apart after the warm-up",
        "worse": "and {} are more than {} apart at some time after the warm-up",
    },
}
_CLAIMED = {
    "noninferior": "< {}",
    "equivalent": "within ± {}",
    "better": "< −{}",
    "worse": "> {}",
}
_CLAIMED_OF_COSTS = {
    "noninferior": "not worse by {}",
    "equivalent": "within ± {}",
    "better": "better by {}",
    "worse": "worse by {}",
}
_WHERE = {"longest": "", "each": ", at each length", "growth": ", per doubling of tokens"}
_WHERE |= {"asymptote": ", extrapolated to infinitely many tokens"}


def format_claim(claim: Claim) -> list[str]:
    """Return the claim and its test plan as lines."""
    lines = [f"{claim.title}: {claim.says}", f"source    {claim.source}"]
    lines += [f"part      {name}: {format_spec(spec)}" for name, spec in claim.parts.items()]
    sites = claim.grid.get("variant.sites", "all")
    if sites != "all" and "," not in sites:
        lines.append(f"sites     a variant is at {sites}, and standard attention at the others")
    looks = " then ".join(map(str, claim.seeds))
    tuned = ""
    if claim.tuning_seeds:
        tuned = f"; rates tuned on {claim.tuning_seeds} other seeds"
        if claim.tuning_seeds >= 3:
            tuned += ", on a third of them where optim.lr and variant.lr are searched together"
    lines.append(f"seeds     {looks}, from its hash {claim.hash[:12]}{tuned}")
    return [*map(sanitize, lines)]


def format_spec(spec: PartSpec) -> str:
    """Format what a part says: no_q is not worse than standard by 0.01, at equal tokens."""
    arm, against = map(_format_side, (spec.arm, spec.against))
    kinds = _OF_SIZES.get(spec.of, _KINDS)
    text = f"{arm} {kinds[spec.kind].format(against, _format_margin(spec))}"
    text += f" in {spec.measure.noun}" if spec.of != "gap" and spec.of not in _OF_SIZES else ""
    text += f", compared with the same at {_format_side(spec.than)}" if spec.than else ""
    if spec.measure.is_of_runs or spec.axis != "tokens":
        text += f", at equal {spec.axis}{_WHERE[spec.horizon]}"
    text += f" ({spec.adjust} adjusted)" if spec.adjust != "mlp" else ""
    return text + (f", on {' and '.join(spec.data)}" if spec.data != (TEXT,) else "")


def _format_side(side: Selector) -> str:
    return " ".join(v if k == "variant" else f"{k}={v}" for k, v in side.items())


def _format_margin(spec: PartSpec) -> str:
    is_ratio = spec.measure.unit is Unit.RATIO
    return f"{100 * spec.margin:g} %" if is_ratio else f"{spec.margin:g}"


def format_judgement(judgement: Judgement, screen: Screen = PLAIN) -> list[str]:
    """Return the verdict, its evidence, and what would decide it, as lines for a screen."""
    label = " (exploratory)" if judgement.exploratory else ""
    doubts = {check.name for part in judgement.parts for check in part.checks if check.is_warning}

    def lines(*texts: str) -> list[str]:
        return [part for text in texts for part in screen.wrap(sanitize(text), "    ")]

    verdict = [f"{judgement.headline}{label}"]
    verdict += [f"  on {dataset}: {word}" for dataset, word in judgement.datasets.items()]
    text = lines(*format_claim(judgement.claim), "")
    text += map(screen.paint_words, lines(*verdict))
    text += lines(*(f"  unless {condition}" for condition in judgement.unless))
    text += lines(*(f"  exploratory: {reason}" for reason in judgement.exploratory))
    if not judgement.has_ended:
        return text + lines(f"  {format_missing(judgement.study)}")
    if doubts:
        text += lines(f"  the audit warns: {', '.join(sorted(doubts))}")
    head, rows = make_part_table(judgement)
    table = format_table(head, [[*map(sanitize, row)] for row in rows], screen=screen)
    text += ["", *table, "", *lines(*(f"  {line}" for line in format_details(judgement)))]
    text += ["", screen.paint("audit", "bold"), *lines(*format_audit(judgement.parts))]
    text += lines(*(line for needs in format_seeds_needed(judgement) for line in ("", needs)))
    assert judgement.study.manifest is not None  # claims are judged by sweeps
    return [*text, *lines("", f"runs  {judgement.study.manifest.folder}")]


def format_missing(study: Study) -> str:
    """Return what the verdict of a claim still needs."""
    runs = count_with_verb(study.expected)
    if study.ended < study.expected:
        return f"{study.ended:,} of {runs} ended; the verdict needs all of them"
    return f"all {runs} ended; the verdict needs seconds and memory, measured alone"


def count_with_verb(runs: int) -> str:
    """Return a number of runs with `has` or `have`."""
    return f"{format_count(runs, 'run')} {'has' if runs == 1 else 'have'}"


def format_conditions(judgement: Judgement) -> str:
    """Return the failures that would overturn the verdict, by part if there are several."""
    names: dict[str, list[str]] = {}
    for judged in judgement.parts:
        if judged.unless and is_deciding(judged.word, judgement.word):
            names.setdefault(" or ".join(judged.unless), []).append(judged.part.name)
    if len(judgement.parts) == 1:
        return next(iter(names))
    return ", or ".join(f"in {format_list(own)} {failures}" for failures, own in names.items())


def make_part_table(judgement: Judgement) -> tuple[list[str], list[list[str]]]:
    """Return header and rows of the parts; no rows before the verdict."""
    level = f"{100 * (1 - 2 * judgement.alpha):.3g} % interval"
    units = {judged.unit for judged in judgement.parts}
    estimate = "gap" if units == {Unit.NATS} else "estimate"
    head = ["part", "n", estimate, level, "sd", "claimed", "verdict"]
    shown = judgement.parts if judgement.has_ended else ()
    return head, [_row(judged, judgement.alpha) for judged in shown]


def make_claim_table(judgement: Judgement) -> Table:
    """Return the table of parts, with all further evidence as notes."""
    notes = [f"unless {condition}" for condition in judgement.unless]
    notes += [*judgement.exploratory, *format_details(judgement), *format_seeds_needed(judgement)]
    return Table("parts of the claim", *make_part_table(judgement), notes)


def format_details(judgement: Judgement) -> list[str]:
    """Return further statistics, part by part."""
    shown = [
        judged
        for judged in judgement.parts
        if judged.part.sample.n > 1 or judged.comparison.spec.horizon == "asymptote"
    ]
    return [_format_details(judged, judgement.alpha) for judged in shown if judgement.has_ended]


def _row(judged: PartJudgement, alpha: float) -> list[str]:
    part, sample, unit = judged.part, judged.part.sample, judged.unit
    claimed = (_CLAIMED if unit is Unit.NATS else _CLAIMED_OF_COSTS)[part.kind]
    estimate = format_value(unit, unit.natural(sample.mean)) if sample.n else "–"
    ends = [format_value(unit, end) for end in judged.interval(1 - 2 * alpha)]
    cells = [part.name, str(sample.n), estimate, f"[{', '.join(ends)}]"]
    sd = format_known(None if isinstance(sample, Exact) else sample.sd)
    return [*cells, sd, claimed.format(_format_margin(judged.comparison.spec)), judged.word]


def _format_details(judged: PartJudgement, alpha: float) -> str:
    sample, spec, text = judged.part.sample, judged.comparison.spec, []
    is_bounded = not (judged.part.open_above or judged.part.open_below)
    if is_bounded and sample.bca and sample.sign_flip is not None and sample.sd:
        text += [
            f"detectable {_format_detectable(judged, alpha)} (one-sided)",
            f"BCa 95 % (seeds alone) {_format_bca(judged, sample.bca)}",
            f"sign flip p {sample.sign_flip:.4f}",
        ]
    if spec.of == "gap" and spec.horizon not in OVER_LENGTHS and spec.than is None:
        text.append(f"perplexity {perplexity_percent(sample.mean):+z.2f} %")
    if spec.of == "gap" and (spec.horizon in OVER_LENGTHS or spec.than is not None):
        for gap in judged.gaps:
            ends = format_interval(gap.bounds(1 - 2 * alpha))
            text.append(f"gap of {gap.arm.name} {format_nats(gap.sample.mean)} {ends}")
    if spec.horizon == "asymptote":
        levels = "an extrapolation"
        if judged.part.open_below or judged.part.open_above:
            levels = "not extrapolated, since runs diverged"
        elif not sample.n:
            levels = (
                "the losses do not level off as a power of D, or too few seeds have all lengths"
            )
        text.append(f"{levels}, from {len(judged.gaps)} lengths of training")
    for gap in [gap for gap in judged.gaps if gap.arm.chance is not None]:  # on tasks
        answers = [e.exact if spec.of == "exact" else e.accuracy for e in gap.sides]
        arm, baseline, chance = (format_known(x, ".1%") for x in [*answers, gap.arm.chance])
        if spec.of == "exact":
            text.append(f"exact match {arm} against {baseline}")
        else:
            text.append(f"accuracy {arm} against {baseline}, chance {chance}")
    text += [f"{judged.word} unless {' or '.join(judged.unless)}"] * bool(judged.unless)
    counts: dict[str, int] = {}
    for gap in judged.gaps:
        counts |= {gap.arm.name: gap.arm_outliers, gap.baseline.name: gap.baseline_outliers}
    text += [f"outliers: {failed} of {name}" for name, failed in counts.items() if failed]
    if spec.of == "spread":
        text.append(
            f"{sample.n} pairs cannot exclude rare large gaps: one that occurs in fewer than one"
            f" pair of {max(2, sample.n // 3)} may not have been seen"
        )
    every = " ".join(format_value(judged.unit, judged.unit.natural(v)) for v in sample.values)
    is_gap = judged.unit is Unit.NATS and spec.horizon not in OVER_LENGTHS
    what = "gaps" if is_gap else "values"
    return f"{judged.part.name}: {', '.join([*text, f'{what} {every}'])}"


def _format_detectable(judged: PartJudgement, alpha: float) -> str:
    size = judged.part.sample.detectable(2 * alpha)
    if size is None or judged.unit is not Unit.RATIO:
        return format_known(size)
    return format_value(judged.unit, judged.unit.natural(size))


def _format_bca(judged: PartJudgement, bca: Interval) -> str:
    low, high = judged.unit.natural_interval(*bca)
    if judged.unit is not Unit.RATIO:
        return format_interval((low, high))
    return f"[{format_value(judged.unit, low)}, {format_value(judged.unit, high)}]"


def format_seeds_needed(judgement: Judgement) -> list[str]:
    """Return how many more seeds would decide each open part."""
    parts = {judged.part.name: judged.part for judged in judgement.parts}
    return [
        f"{name}: more seeds needed: {_format_more_seeds(needed, parts[name])}"
        for name, needed in judgement.seeds_needed().items()
    ]


def _format_more_seeds(needed: SeedsNeeded | None, part: Part) -> str:
    sample = part.sample
    if needed is None and math.inf in map(abs, sample.values):
        return "unknown, as some runs do not reach the loss"
    if needed is None:
        return "unknown, no spread was measured"
    if needed.low is None and (part.open_above or part.open_below):
        return "unknown, as runs diverged"
    if needed.low is None and not part.is_sensitive:
        return (
            "not reachable: the baseline does not beat `uniform` by enough for such a margin; raise"
            " train.steps"
        )
    if needed.low is None and sample.extra_variance:
        error = format_known(math.sqrt(sample.extra_variance))
        return (
            f"not reachable: the tuning of the rates alone has a standard error of {error}; more"
            " tuning_seeds would reduce it"
        )
    if needed.low is None:
        return "not reachable, as no number of seeds would decide it"
    low, n = max(1, needed.low - sample.n), sample.n
    if needed.high is None:
        return f"{low:,} or more, without an upper end: the truth may lie on the margin"
    return (
        f"between {low:,} and {max(low, needed.high - n):,} (for 80 % power; 80 % prediction"
        " interval, by what these pairs tell of gap and spread)"
    )


def format_audit(judged_parts: list[PartJudgement]) -> list[str]:
    """Return every check once, with its parts unless it applies to all."""
    groups = group_checks((part.part.name, c) for part in judged_parts for c in part.checks)
    return [
        f"  {MARKS[check.state] or '✓'} {check.name:<14} {check.message}"
        + ("" if len(parts) == len(judged_parts) else f"  ({', '.join(parts)})")
        for check, parts in groups.items()
    ]


def judgement_to_json(judgement: Judgement) -> dict[str, object]:
    """Return the judgement as JSON values."""
    claim, needed = judgement.claim, judgement.seeds_needed()
    return {
        "claim": claim.name,
        "scale": claim.scale,
        "says": claim.says,
        "source": claim.source,
        "hash": claim.hash,
        "verdict": judgement.word,
        "scope": judgement.scope,
        "unless": judgement.unless,
        "data": judgement.datasets,
        "exploratory": judgement.exploratory,
        "sweep": judgement.study.name,
        "seeds": judgement.n,
        "declared_seeds": [*claim.seeds],
        "alpha": judgement.alpha,
        "parts": [
            _part_to_json(judged, judgement.alpha)
            | {"verdict": judged.word, "seeds_needed": needed.get(judged.part.name)}
            for judged in judgement.parts
        ],
    }


def _part_to_json(judged: PartJudgement, alpha: float) -> dict[str, object]:
    part, sample, spec, unit = judged.part, judged.part.sample, judged.comparison.spec, judged.unit
    arms = [*filter(None, [*judged.comparison.pairs, judged.comparison.than])]
    interval = [_finite(end) for end in judged.interval(1 - 2 * alpha)]
    return {
        "part": part.name,
        "kind": part.kind,
        "margin": spec.margin,
        "of": spec.of,
        "unit": unit.value,
        "arms": arms,
        "than": judged.comparison.than is not None,  # then the last two arms are subtracted
        "data": judged.comparison.dataset,
        "accuracy": [[entry.accuracy for entry in gap.sides] for gap in judged.gaps],
        "chance": [gap.arm.chance for gap in judged.gaps],
        "axis": spec.axis,
        "adjust": spec.adjust,
        "horizon": spec.horizon,
        "n": sample.n,
        "mean": _finite(unit.natural(sample.mean)) if sample.n else None,
        "sd": sample.sd,
        "interval": None if interval == [None, None] else interval,
        "interval_level": 1 - 2 * alpha,
        "p_supported": part.p_supported,
        "p_refuted": part.p_refuted,
        "bca": sample.bca and unit.natural_interval(*sample.bca),
        "sign_flip": sample.sign_flip,
        "detectable": sample.detectable(2 * alpha),
        "arm_diverged": sum(gap.arm_diverged for gap in judged.gaps),
        "baseline_diverged": sum(gap.baseline_diverged for gap in judged.gaps),
        "arm_outliers": sum(gap.arm_outliers for gap in judged.gaps),
        "baseline_outliers": sum(gap.baseline_outliers for gap in judged.gaps),
        "unpaired": [line for gap in judged.gaps for line in gap.unpaired],
        "values": [_finite(unit.natural(value)) for value in sample.values],
        "audit": [dataclasses.asdict(check) for check in judged.checks],
    }


def _finite(value: float) -> float | None:
    """Return the number, or None for one that JSON does not have."""
    return value if math.isfinite(value) else None

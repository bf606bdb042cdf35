"""A summary in two sentences for readers without a background in statistics."""

from collections import Counter

from qkablate.analysis.comparison.audit import BROKEN, WARNING, AuditCheck
from qkablate.analysis.comparison.decision import Decision, Verdict
from qkablate.analysis.comparison.summary import GapSummary
from qkablate.analysis.stats import ALPHA, holm
from qkablate.report.section import Section, format_n
from qkablate.report.text.numbers import format_gap, format_loss, half_width
from qkablate.table import format_count, format_digits, format_list, format_nats, format_short

_VERDICTS = {
    Verdict.SUPPORTED: "The runs support it",
    Verdict.REFUTED: "The runs refute it",
    Verdict.EQUIVALENT: "The runs show that there is no such difference",
}


def summarize(section: Section) -> list[str]:
    """Return the summary of a section as sentences."""
    if section.judgement is not None:
        return _summarize_claim(section)
    if not section.summary.gaps:
        return _summarize_runs(section)
    measured = [one for one in section.summary.gaps if one.n or one.decision.is_divergence]
    if not measured:
        return [f"{_format_progress(section)}There is no completed pair of runs to compare yet."]
    if all(one.n < 2 and not one.decision.is_divergence for one in measured):
        return [
            f"{_format_progress(section)}With one seed, {_format_gaps(measured)}.",
            "A single pair cannot separate a difference from chance; run more seeds to estimate the"
            " seed-to-seed spread.",
        ]
    return [
        f"{_format_progress(section)}{_summarize_gaps(section, measured)}.",
        _format_power(measured),
    ]


def _format_progress(section: Section) -> str:
    counts, study = section.counts, section.study
    bad = [f"{counts[word]} {word}" for word in ("diverged", "failed", "damaged") if counts[word]]
    if study.is_complete:
        return f"Of {format_count(study.expected, 'run')}, {' and '.join(bad)}. " if bad else ""
    told = f"{study.ended:,} of {_count_with_verb(study.expected)} ended"
    return f"So far ({', '.join([told, *bad])}): "


def _count_with_verb(runs: int) -> str:
    return f"{format_count(runs, 'run')} {'has' if runs == 1 else 'have'}"


def _summarize_gaps(section: Section, measured: list[GapSummary]) -> str:
    """Describe each variant once, by its decisions over all sizes."""
    entries, words = section.entries, _joint_decisions(measured)
    by_variant: dict[str, list[GapSummary]] = {}
    asked = Counter(entries[one.arm].arm.variant for one in section.summary.gaps)
    for one in measured:
        by_variant.setdefault(entries[one.arm].arm.variant, []).append(one)
    told: dict[str, list[str]] = {word: [] for word in _PHRASES}
    for variant, gaps in by_variant.items():
        own_words = {words[one.arm] for one in gaps}
        both = {Decision.BETTER, Decision.WORSE} <= own_words
        word = "mixed" if both else min(own_words, key=[*_PHRASES].index)
        own = [one for one in gaps if word in ("mixed", words[one.arm])]
        told[word].append(f"{variant}{_format_extent(own, asked[variant], word)}")
    beside = _join(sorted({entries[one.baseline].arm.variant for one in measured}))
    nats = measured[0].margin and f"{measured[0].margin.nats:g} nats"
    parts = [
        _PHRASES[word].format(_join(names), margin=nats, every=len(measured))
        for word, names in told.items()
        if names
    ]
    return f"Compared with {beside} on the same data and seeds, {'; '.join(parts)}"


def _joint_decisions(measured: list[GapSummary]) -> dict[str, str]:
    """Return the decision of each arm, with p adjusted by Holm over all gaps together."""
    tested = {one.arm: one.p for one in measured if one.p is not None}
    adjusted = dict(zip(tested, holm([*tested.values()]), strict=True))
    chance = {arm for arm, p in adjusted.items() if p >= ALPHA}
    found = {one.arm: one.decision for one in measured}
    return {
        arm: "alone" if decision.is_directed and arm in chance else decision
        for arm, decision in found.items()
    }


# In order of precedence: a difference found at one size is reported, whatever the other sizes show.
_PHRASES: dict[str, str] = {
    "mixed": "better in some comparisons and worse in others: {}",
    Decision.BETTER: "{} did better (lower test loss)",
    Decision.WORSE: "{} did worse (higher test loss)",
    Decision.ARM_DIVERGED: "runs diverged for {}",
    Decision.BASELINE_DIVERGED: "baseline runs diverged in pairs with {}",
    "alone": "{} differed at its own size, but not after adjusting for all {every} comparisons",
    Decision.NO_DIFFERENCE_FOUND: "no difference was found for {}",
    Decision.NOT_WORSE: "{} was not worse by {margin}",
    Decision.EQUIVALENT: "{} was equivalent within ± {margin}",
    Decision.ONE_PAIR: "there is only one pair for {}",
    Decision.NO_PAIRS: "there are no pairs for {}",
}


def _join(names: list[str], most: int = 4) -> str:
    """Join names: a, b and c."""
    if len(names) > most:
        return format_list(names, most - 1)
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def _format_extent(gaps: list[GapSummary], asked: int, word: str) -> str:
    """Format the extent: (in 2 of 4 comparisons, by 0.012 to 0.015 nats)."""
    at = f"in {len(gaps)} of {asked} comparisons" if asked > 1 and word != "mixed" else ""
    by = _format_sizes(gaps) if word in (Decision.BETTER, Decision.WORSE) else ""
    return f" ({', '.join(filter(None, [at, by]))})" if at or by else ""


def _format_sizes(gaps: list[GapSummary]) -> str:
    sizes = sorted(
        (abs(one.mean), format_digits(abs(one.mean), half_width(one.interval)))
        for one in gaps
        if one.mean is not None
    )
    low, high = sizes[0][1], sizes[-1][1]
    return f"by {low} nats" if low == high else f"by {low} to {high} nats"


def _format_power(measured: list[GapSummary]) -> str:
    """Format sample sizes, smallest detectable effects and audit warnings."""
    rests = f"This is based on {format_n([one.n for one in measured])} pairs of runs per arm"
    found = [one.detectable for one in measured if one.detectable is not None]
    if found:
        low, high = (f"{value:.2g}" for value in (min(found), max(found)))
        sizes = f"{low} nats" if low == high else f"{low} to {high} nats (by arm)"
        rests += f", which detect a true gap of {sizes} with 80 % power"
        if any(one.decision == Decision.NO_DIFFERENCE_FOUND for one in measured):
            rests += "; “no difference found” does not mean equal"
    return f"{rests}{_format_warnings([check for one in measured for check in one.audit])}."


def _format_warnings(checks: list[AuditCheck]) -> str:
    """Format the names of audit warnings; missing runs are reported elsewhere."""
    doubts = {check.name for check in checks if check.state in (WARNING, BROKEN)}
    told = ", ".join(sorted(doubts - {"runs", "pairs"}))
    return f"; the audit warns of other possible causes: {told}" if told else ""


def _format_gaps(measured: list[GapSummary]) -> str:
    told = [
        f"{one.arm} is {format_nats(one.mean)} nats from {one.baseline}"
        for one in measured
        if one.mean is not None
    ]
    return format_list(told, 3)


def _summarize_runs(section: Section) -> list[str]:
    """Of runs that are compared with nothing."""
    told = []
    for arm in section.summary.arms:
        entry = section.entries[arm.arm]
        if arm.n == 1:
            loss = next(iter(entry.losses.values()))
            told.append(f"{arm.arm} reached {loss:.4f} after {format_short(arm.tokens)} tokens")
        elif arm.n:
            own = format_loss(entry.sample)
            told.append(f"{arm.arm} reached {own} ({format_n([arm.n])})")
    if not told:
        said = f"{_format_progress(section)}No run is done yet."
        return [said]
    return [
        f"{_format_progress(section)}Test loss in nats per token: {format_list(told)}.",
        "There is no baseline to compare with: train the same seeds with "
        f"{'another variant' if 'standard' in section.styles else 'variant=standard'}.",
    ]


def _summarize_claim(section: Section) -> list[str]:
    found = section.judgement
    assert found is not None
    if found.verdict is None:
        ended, expected = found.study.ended, found.study.expected
        return [
            f"There is no verdict yet: {ended:,} of {_count_with_verb(expected)} ended, and all"
            " are needed."
        ]
    diverged = any(one.part.open_below or one.part.open_above for one in found.parts)
    why = "some runs diverged" if diverged else "there are too few for this margin"
    said = _VERDICTS.get(found.word, f"The runs are inconclusive: {why}")
    if found.exploratory:
        said += ", but this is exploratory and confirms nothing"
    told = []
    for one, word in zip(found.parts, found.verdict.parts, strict=True):
        sample = one.part.sample
        if sample.n:
            interval = sample.interval(1 - 2 * found.alpha)
            spec = one.comparison.spec
            gap = (
                format_loss(sample, 1 - 2 * found.alpha)
                if spec.of == "spread"
                else format_gap(
                    sample.mean, interval, below=one.part.open_below, above=one.part.open_above
                )
            )
            what = "growth per doubling" if spec.horizon == "growth" else spec.of
            told.append(f"{one.part.name}: {what} {gap} ({format_n([sample.n])}), {word}")
    level = f"{100 * (1 - 2 * found.alpha):.3g} %"
    return [
        f"{said}{_format_warnings([check for one in found.parts for check in one.checks])}.",
        f"Measured, in nats per token with {level} interval: {format_list(told)}."
        if told
        else "Nothing could be measured: there is no completed pair of runs.",
    ]

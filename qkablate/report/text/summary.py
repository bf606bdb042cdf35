"""A summary in two sentences for readers without a background in statistics."""

from collections import Counter

from qkablate.analysis.claims.judgement import PartJudgement
from qkablate.analysis.claims.measures import Unit
from qkablate.analysis.comparison.audit import AuditCheck
from qkablate.analysis.comparison.decision import (
    BEFORE_ATTENTION,
    BEFORE_NGRAMS,
    WITHOUT_CONTENT,
    Decision,
    RateScope,
    Verdict,
)
from qkablate.analysis.comparison.summary import GapSummary
from qkablate.report.section import Section, format_n
from qkablate.report.text.claims import count_with_verb, format_conditions, format_missing
from qkablate.report.text.forms import summarize_forms
from qkablate.report.text.numbers import (
    format_gap,
    format_gap_summary,
    format_loss,
    format_value,
    half_width,
)
from qkablate.table import format_count, format_digits, format_list, format_nats, format_short

_MAX_LINES = 8  # of gaps, above the summary
_VERDICTS = {
    Verdict.SUPPORTED: "The runs support it",
    Verdict.REFUTED: "The runs refute it",
    Verdict.EQUIVALENT: "The runs find no difference of this size",
    Verdict.INSENSITIVE: "The experiment is insensitive: `uniform` is almost as good",
    Verdict.MIXED: "The runs show no such difference in some parts, and not in others",
}


def summarize(section: Section) -> list[str]:
    """Return the summary of a section as sentences."""
    if section.judgement is not None:
        return _summarize_claim(section)
    if section.is_imported:
        return summarize_forms(section)
    if not section.summary.gaps:
        return _summarize_runs(section)
    measured = [gap for gap in section.summary.gaps if gap.n or gap.decision.is_divergence]
    if not measured:
        return [f"{_format_progress(section)}There is no completed pair of runs to compare yet."]
    if all(gap.n < 2 and not gap.decision.is_divergence for gap in measured):
        gaps = [f"{g.arm} is {format_nats(g.mean or 0.0)} nats from {g.baseline}" for g in measured]
        behind = _describe_baselines(section, measured)
        return [
            f"{_format_progress(section)}With one seed, {format_list(gaps, 3)}"
            f"{f'; {behind}' if behind else ''}.",
            "A single pair cannot separate a difference from chance; run more seeds to estimate the"
            " seed-to-seed spread.",
        ]
    by_data: dict[str, list[GapSummary]] = {}
    for gap in measured:
        by_data.setdefault(section.entries[gap.arm].arm.config.data.source, []).append(gap)
    sentences = [
        f"On {source}, {_summarize_gaps(section, gaps, 'compared')}."
        for source, gaps in by_data.items()
    ]
    if len(by_data) == 1:
        sentences = [f"{_summarize_gaps(section, measured)}."]
    sentences[0] = f"{_format_progress(section)}{sentences[0]}"
    return [*sentences, _format_power(measured)]


def list_gaps(section: Section) -> list[str]:
    """Return a line per data set and arm, the signed gap first; per variant where arms are many."""
    if section.judgement is not None:
        return []
    groups: dict[tuple[str, str], list[GapSummary]] = {}
    measured = [gap for gap in section.summary.gaps if gap.mean is not None]
    sources = {name: entry.arm.config.data.source for name, entry in section.entries.items()}
    for gap in measured:
        variant = section.entries[gap.arm].arm.variant
        name = section.labels[gap.arm] if len(measured) <= _MAX_LINES else variant
        groups.setdefault((sources[gap.arm], name), []).append(gap)
    lines = []
    for (source, name), gaps in groups.items():
        on = f" on {source}" if len({*sources.values()}) > 1 and source not in name else ""
        lines.append(f"{_format_range(gaps)}  {name}{on}: {_format_words(gaps)}")
    if (more := len(lines) - _MAX_LINES) > 0:
        lines[_MAX_LINES:] = [f"{more} more: see the table below"]
    return lines


def _format_range(gaps: list[GapSummary]) -> str:
    """Format the gap with its interval, or the range of several."""
    if len(gaps) == 1:
        return format_gap_summary(gaps[0])
    low, high = (
        format_digits(gap.mean or 0.0, half_width(gap.interval), signed=True)
        for gap in (min(gaps, key=_mean), max(gaps, key=_mean))
    )
    return f"{low} to {high}"


def _mean(gap: GapSummary) -> float:
    return gap.mean or 0.0


def _format_words(gaps: list[GapSummary]) -> str:
    """Format the verdicts with the number of arms that have each."""
    words = Counter(gap.verdict for gap in gaps)
    if len(gaps) == 1:
        return gaps[0].verdict
    return "; ".join(f"{word} (in {n} of {len(gaps)})" for word, n in words.most_common())


def _format_progress(section: Section) -> str:
    counts, study = section.counts, section.study
    bad = [f"{counts[word]} {word}" for word in ("diverged", "failed", "damaged") if counts[word]]
    if study.is_complete:
        text = f"Of {format_count(study.expected, 'run')}, {' and '.join(bad)}. " if bad else ""
        return text + _format_diverged_arms(section)
    ended = f"{study.ended:,} of {count_with_verb(study.expected)} ended"
    return f"So far ({', '.join([ended, *bad])}): "


def _format_diverged_arms(section: Section) -> str:
    """Name the arms that have no pairs because they diverged at every learning rate."""
    names = section.study.diverged_arms
    return f"At every learning rate {format_list(names)} diverged. " if names else ""


def _summarize_gaps(
    section: Section, measured: list[GapSummary], compared: str = "Compared"
) -> str:
    """Describe each variant once, by its decisions over all sizes."""
    variant_of = {name: entry.arm.variant for name, entry in section.entries.items()}
    if any(variant_of[gap.arm] == variant_of[gap.baseline] for gap in measured):
        variant_of = {name: name for name in variant_of}  # they differ in something else
    source_of = {name: entry.arm.config.data.source for name, entry in section.entries.items()}
    sources = {source_of[gap.arm] for gap in measured}
    gaps = [gap for gap in section.summary.gaps if source_of[gap.arm] in sources]
    totals = Counter(variant_of[gap.arm] for gap in gaps)
    decisions: dict[str, str] = {
        gap.arm: "depends" if gap.rates == RateScope.SIGN_DEPENDS else gap.decision
        for gap in measured
    }
    names: dict[str, list[str]] = {word: [] for word in _PHRASES}
    for variant in dict.fromkeys(variant_of[gap.arm] for gap in measured):
        gaps = [gap for gap in measured if variant_of[gap.arm] == variant]
        words = {decisions[gap.arm] for gap in gaps}
        mixed = {Decision.BETTER, Decision.WORSE} <= words
        word = "mixed" if mixed else min(words, key=[*_PHRASES].index)
        described = [gap for gap in gaps if word in ("mixed", decisions[gap.arm])]
        names[word].append(f"{variant}{_format_extent(described, totals[variant], word)}")
    baselines = _join(sorted({variant_of[gap.baseline] for gap in measured}))
    nats = measured[0].margin and f"{measured[0].margin.nats:g} nats"
    parts = [_PHRASES[word].format(_join(own), margin=nats) for word, own in names.items() if own]
    where = "on the same data and seeds"
    if any(entry.arm.is_finetuned for entry in section.entries.values()):
        where = "both trained further for as many steps from the same runs"
    text = f"{compared} with {baselines} {where}, {'; '.join(parts)}"
    decided = [gap for gap in measured if gap.is_decided]
    scopes = {scope for gap in decided for scope in gap.scopes} - {RateScope.SIGN_DEPENDS}
    text += f"; this holds {_join(sorted(scopes))}" if scopes else ""
    if behind := _describe_baselines(section, measured):
        explained = {BEFORE_ATTENTION, BEFORE_NGRAMS, WITHOUT_CONTENT}
        text += f"{':' if scopes & explained else ';'} {behind}"
    return text


def _describe_baselines(section: Section, gaps: list[GapSummary]) -> str:
    """Name the baselines that attention has not helped yet.

    The floor is named with "worse" alone: otherwise the decision is "insensitive" already.
    """
    behind = {
        "beat the best n-gram": [gap for gap in gaps if gap.before_attention],
        "clearly beat `uniform`": [gap for gap in gaps if BEFORE_ATTENTION in gap.scopes],
        "clearly beat `static_scores`": [gap for gap in gaps if WITHOUT_CONTENT in gap.scopes],
    }
    texts = []
    for what, found in behind.items():
        names = sorted({section.entries[gap.baseline].arm.variant for gap in found})
        if names:
            texts.append(f"{_join(names)} {'does' if len(names) == 1 else 'do'} not {what}")
    return " and ".join(texts)


# In order of precedence: a difference found at one size is reported, whatever the other sizes show.
_PHRASES: dict[str, str] = {
    "depends": "there is no verdict on {}: the sign of the gap depends on the learning rate",
    "mixed": "better in some comparisons and worse in others: {}",
    Decision.BETTER: "{} did better (lower test loss)",
    Decision.WORSE: "{} did worse (higher test loss)",
    Decision.ARM_DIVERGED: "runs diverged for {}",
    Decision.BASELINE_DIVERGED: "baseline runs diverged in pairs with {}",
    Decision.NO_DIFFERENCE_FOUND: "no difference was found for {}",
    Decision.INSENSITIVE: "the experiment is insensitive for {}, as the baseline is not known to"
    " clearly beat `uniform`",
    Decision.NOT_WORSE: "not worse by {margin}: {}",
    Decision.EQUIVALENT: "equivalent within ± {margin}: {}",
    Decision.FEW_PAIRS: "there are fewer than three pairs for {}",
    Decision.NO_PAIRS: "there are no pairs for {}",
}


def _join(names: list[str], most: int = 4) -> str:
    """Join names: a, b and c."""
    if len(names) > most:
        return format_list(names, most - 1)
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def _format_extent(gaps: list[GapSummary], total: int, word: str) -> str:
    """Format the extent: (in 2 of 4 comparisons, by 0.012 to 0.015 nats)."""
    at = f"in {len(gaps)} of {total} comparisons" if total > 1 and word != "mixed" else ""
    by = _format_sizes(gaps) if word in (Decision.BETTER, Decision.WORSE) else ""
    return f" ({', '.join(filter(None, [at, by]))})" if at or by else ""


def _format_sizes(gaps: list[GapSummary]) -> str:
    sizes = sorted(
        (abs(gap.mean), format_digits(abs(gap.mean), half_width(gap.interval)))
        for gap in gaps
        if gap.mean is not None
    )
    low, high = sizes[0][1], sizes[-1][1]
    return f"by {low} nats" if low == high else f"by {low} to {high} nats"


def _format_power(measured: list[GapSummary]) -> str:
    """Format sample sizes, smallest detectable effects and audit warnings."""
    text = f"This is based on {format_n([gap.n for gap in measured])} pairs of runs per arm"
    effects = [gap.detectable for gap in measured if gap.detectable is not None]
    has_none = any(gap.decision == Decision.NO_DIFFERENCE_FOUND for gap in measured)
    if effects:
        low, high = (f"{value:.2g}" for value in (min(effects), max(effects)))
        sizes = f"{low} nats" if low == high else f"{low} to {high} nats (by arm)"
        text += f", which detect a true gap of {sizes} with 80 % power"
        text += "; “no difference found” does not mean equal" * has_none
    # A difference that was found needs no floor.
    checks = [c for gap in measured for c in gap.audit if has_none or c.name != "floor"]
    return f"{text}{_format_warnings(checks)}."


def _format_warnings(checks: list[AuditCheck]) -> str:
    """Format the names of audit warnings; runs and baselines are reported elsewhere."""
    names = {check.name for check in checks if check.is_warning}
    text = ", ".join(sorted(names - {"runs", "pairs", "n-grams", "content"}))
    return f"; the audit warns of other possible causes: {text}" if text else ""


def _summarize_runs(section: Section) -> list[str]:
    """Summarize runs without a baseline."""
    losses = []
    for arm in section.summary.arms:
        entry = section.entries[arm.arm]
        if arm.n == 1:
            loss = next(iter(entry.losses.values()))
            losses.append(f"{arm.arm} reached {loss:.4f} after {format_short(arm.tokens)} tokens")
        elif arm.n:
            losses.append(f"{arm.arm} reached {format_loss(entry.sample)} ({format_n([arm.n])})")
    if not losses:
        return [f"{_format_progress(section)}No run is done yet."]
    measured = f"Test loss in {section.study.loss_unit}: {format_list(losses)}."
    return [
        f"{_format_progress(section)}{measured}",
        "There is no baseline to compare with: train the same seeds with "
        f"{'another variant' if 'standard' in section.styles else 'variant=standard'}.",
    ]


def _summarize_claim(section: Section) -> list[str]:
    judgement = section.judgement
    assert judgement is not None
    if not judgement.has_ended:
        return [f"There is no verdict yet: {format_missing(judgement.study)}."]
    diverged = any(judged.part.open_below or judged.part.open_above for judged in judgement.parts)
    cause = "some runs diverged" if diverged else "their intervals hold more than one answer"
    sides = [side for judged in judgement.parts for gap in judged.gaps for side in gap.sides]
    compared = {side.name for side in sides}
    if names := [name for name in judgement.study.diverged_arms if name in compared]:
        cause = f"at every learning rate {format_list(names)} diverged"
    verdict = _VERDICTS.get(judgement.word, f"The runs are inconclusive: {cause}")
    verdict += f" {_join(judgement.scope)}" if judgement.scope else ""
    verdict += f", unless {format_conditions(judgement)}" if judgement.unless else ""
    verdict += ", but this is exploratory and confirms nothing" if judgement.exploratory else ""
    warnings = _format_warnings([check for judged in judgement.parts for check in judged.checks])
    level = 1 - 2 * judgement.alpha
    deciding_first = sorted(judgement.parts, key=lambda judged: judged.word != judgement.word)
    measured = [
        f"{_format_part(judged, level)}, {judged.word}"
        for judged in deciding_first
        if judged.part.sample.n
    ]
    are_nats = all(judged.unit is Unit.NATS for judged in judgement.parts)
    unit = f"in {section.study.loss_unit} " if are_nats else ""
    return [
        f"{verdict}{warnings}.",
        f"Measured, {unit}with {100 * level:.3g} % interval: {format_list(measured)}."
        if measured
        else "Nothing could be measured: there is no completed pair of runs.",
    ]


def _format_part(judged: PartJudgement, level: float) -> str:
    """Format what was measured of a part: within: gap +0.012 [+0.008, +0.016] (n = 4)."""
    part, spec, sample = judged.part, judged.comparison.spec, judged.part.sample
    if judged.unit is not Unit.NATS:
        values = (judged.unit.natural(sample.mean), *judged.interval(level))
        mean, low_text, high_text = (format_value(judged.unit, value) for value in values)
        text = f"{mean} [{low_text}, {high_text}]"
    elif not sample.is_signed:
        text = format_gap(sample.mean, sample.interval(level), above=part.open_above, signed=False)
    else:
        sides = {"below": part.open_below, "above": part.open_above}
        text = format_gap(sample.mean, sample.interval(level), **sides)
    over_lengths = {"growth": "growth per doubling", "asymptote": "gap extrapolated to ∞ tokens"}
    quantity = over_lengths.get(spec.horizon, spec.of.replace("_", " "))
    return f"{part.name}: {quantity} {text} ({format_n([sample.n])})"

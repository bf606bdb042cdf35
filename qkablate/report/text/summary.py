"""The answer in two sentences, for somebody who knows what a test loss is and no statistics."""

from collections import Counter
from typing import Any

from qkablate.analysis.claims.verdict import EQUIVALENT, REFUTED, SUPPORTED
from qkablate.analysis.comparison.audit import BROKEN, WARNING, Check
from qkablate.analysis.stats import ALPHA, holm
from qkablate.report.section import Chapter, span
from qkablate.report.text.numbers import told_gap, told_loss
from qkablate.report.text.tables import says
from qkablate.table import counted, digits, nats, short, some

_VERDICTS = {
    SUPPORTED: "The runs support it",
    REFUTED: "The runs refute it",
    EQUIVALENT: "The runs show that there is no such difference",
}


def answer(chapter: Chapter) -> list[str]:
    if chapter.judgement is not None:
        return _of_claim(chapter)
    if not chapter.found["gaps"]:
        return _of_runs(chapter)
    measured = [one for one in chapter.found["gaps"] if one["n"] or says(one) in _DIVERGED]
    if not measured:
        return [f"{_so_far(chapter)}No pair of runs is there yet, so there is nothing to say."]
    if max(one["n"] for one in measured) < 2 and not {*map(says, measured)} & {*_DIVERGED}:
        return [
            f"{_so_far(chapter)}With one seed, {_numbers(measured)}.",
            "One pair is a number and no answer: chance alone makes such gaps, and only more seeds"
            " show how large ones.",
        ]
    return [f"{_so_far(chapter)}{_compared(chapter, measured)}.", _caution(measured)]


def _so_far(chapter: Chapter) -> str:
    counts, study = chapter.counts, chapter.study
    bad = [f"{counts[word]} {word}" for word in ("diverged", "failed", "damaged") if counts[word]]
    if study.is_complete:
        return f"Of {counted(study.expected, 'run')}, {' and '.join(bad)}. " if bad else ""
    told = f"{study.ended:,} of {_have(study.expected)} ended"
    return f"So far ({', '.join([told, *bad])}): "


def _have(runs: int) -> str:
    return f"{counted(runs, 'run')} {'has' if runs == 1 else 'have'}"


def _compared(chapter: Chapter, measured: list[dict[str, Any]]) -> str:
    """Every variant once, by what was found of it at any of its sizes."""
    entries, words = chapter.entries, _said(measured)
    by_variant: dict[str, list[dict[str, Any]]] = {}
    asked = Counter(entries[one["arm"]].arm.variant for one in chapter.found["gaps"])
    for one in measured:
        by_variant.setdefault(entries[one["arm"]].arm.variant, []).append(one)
    told: dict[str, list[str]] = {word: [] for word in _TOLD}
    for variant, gaps in by_variant.items():
        own_words = {words[one["arm"]] for one in gaps}
        both = {"better", "worse"} <= own_words
        word = "mixed" if both else min(own_words, key=[*_TOLD].index)
        own = [one for one in gaps if word in ("mixed", words[one["arm"]])]
        told[word].append(f"{variant}{_how(own, asked[variant], word)}")
    beside = _listed(sorted({entries[one["baseline"]].arm.variant for one in measured}))
    nats = measured[0]["margin"] and f"{measured[0]['margin']['nats']:g} nats"
    parts = [
        _TOLD[word].format(_listed(names), margin=nats, every=len(measured))
        for word, names in told.items()
        if names
    ]
    return f"Compared with {beside} on the same data and seeds, {'; '.join(parts)}"


def _said(measured: list[dict[str, Any]]) -> dict[str, str]:
    """What is said of each arm where all of them are told in one sentence: among very many some
    stand out by chance, so that p is adjusted by Holm over them all.
    """
    known = [one for one in measured if one["p"] is not None]
    adjusted = holm([one["p"] for one in known])
    chance = {one["arm"] for one, p in zip(known, adjusted, strict=True) if p >= ALPHA}
    found = {one["arm"]: says(one) for one in measured}
    return {
        arm: "alone" if word in ("better", "worse") and arm in chance else word
        for arm, word in found.items()
    }


_DIVERGED = ("diverges", "baseline diverges")
# What is told first decides: what was found at one size is told, whatever else was not.
_TOLD = {
    "mixed": "better in some comparisons and worse in others is {}",
    "better": "{} did better (lower test loss)",
    "worse": "{} did worse (higher test loss)",
    "diverges": "runs diverged of {}",
    "baseline diverges": "runs of the baseline diverged beside {}",
    "alone": "{} stood out at its own size, and not among all {every} comparisons",
    "none found": "no difference was found for {}",
    "not worse": "{} did not do worse by {margin}",
    "equivalent": "{} lay within ± {margin}",
    "a number": "one pair only is there of {}",
    "nothing": "nothing is known of {}",
}


def _listed(names: list[str], most: int = 4) -> str:
    """a, b and c."""
    if len(names) > most:
        return some(names, most - 1)
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def _how(gaps: list[dict[str, Any]], asked: int, word: str) -> str:
    """(in 2 of 4 comparisons, by 0.012 to 0.015 nats)."""
    at = f"in {len(gaps)} of {asked} comparisons" if asked > 1 and word != "mixed" else ""
    by = _by(gaps) if word in ("better", "worse") else ""
    return f" ({', '.join(filter(None, [at, by]))})" if at or by else ""


def _by(gaps: list[dict[str, Any]]) -> str:
    sizes = sorted(
        (abs(one["mean"]), digits(abs(one["mean"]), (one["interval"][1] - one["interval"][0]) / 2))
        for one in gaps
    )
    low, high = sizes[0][1], sizes[-1][1]
    return f"by {low} nats" if low == high else f"by {low} to {high} nats"


def _caution(measured: list[dict[str, Any]]) -> str:
    """How much it rests on, and what it could not have seen."""
    rests = f"This rests on {span([one['n'] for one in measured])} pairs of runs an arm"
    found = [one["detectable"] for one in measured if one["detectable"] is not None]
    if found:
        low, high = (f"{value:.2g}" for value in (min(found), max(found)))
        sizes = f"{low} nats" if low == high else f"{low} to {high} nats (by arm)"
        rests += f", which find a true gap of {sizes} four times of five, a smaller one less often"
        if any(says(one) == "none found" for one in measured):
            rests += ": no difference found does not mean equal"
    return f"{rests}{_doubts([Check(**check) for one in measured for check in one['audit']])}."


def _doubts(checks: list[Check]) -> str:
    """What the audit warns of; missing runs are counted elsewhere."""
    doubts = {check.name for check in checks if check.state in (WARNING, BROKEN)}
    told = ", ".join(sorted(doubts - {"runs", "pairs"}))
    return f"; the audit warns of what else may have moved the gaps: {told}" if told else ""


def _numbers(measured: list[dict[str, Any]]) -> str:
    told = [f"{one['arm']} is {nats(one['mean'])} nats from {one['baseline']}" for one in measured]
    return some(told, 3)


def _of_runs(chapter: Chapter) -> list[str]:
    """Of runs that are compared with nothing."""
    told = []
    for arm in chapter.found["arms"]:
        entry = chapter.entries[arm["arm"]]
        if arm["n"] == 1:
            loss = next(iter(entry.losses.values()))
            told.append(f"{arm['arm']} reached {loss:.4f} after {short(arm['tokens'])} tokens")
        elif arm["n"]:
            own = told_loss(entry.sample)
            told.append(f"{arm['arm']} reached {own} ({span([arm['n']])})")
    if not told:
        said = f"{_so_far(chapter)}No run is done yet, so there is nothing to say."
        return [said]
    return [
        f"{_so_far(chapter)}Test loss in nats per token: {some(told)}.",
        "There is nothing here to compare with: the same seeds with "
        f"{'another variant' if 'standard' in chapter.looks else 'variant=standard'} would be.",
    ]


def _of_claim(chapter: Chapter) -> list[str]:
    found = chapter.judgement
    assert found is not None
    if found.verdict is None:
        ended, expected = found.study.ended, found.study.expected
        return [
            f"There is no verdict yet: {ended:,} of {_have(expected)} ended, and it"
            " takes all of them."
        ]
    diverged = any(one.part.open_below or one.part.open_above for one in found.judged)
    why = "some diverged, and have no gap" if diverged else "there are too few for this margin"
    said = _VERDICTS.get(found.word, f"The runs cannot tell: {why}")
    if found.exploratory:
        said += ", but this is exploratory and confirms nothing"
    told = []
    for one, word in zip(found.judged, found.verdict.parts, strict=True):
        sample = one.part.sample
        if sample.n:
            interval = sample.interval(1 - 2 * found.alpha)
            spec = one.comparison.spec
            gap = (
                told_loss(sample, 1 - 2 * found.alpha)
                if spec.of == "spread"
                else told_gap(
                    sample.mean, interval, below=one.part.open_below, above=one.part.open_above
                )
            )
            what = "growth per doubling" if spec.horizon == "growth" else spec.of
            told.append(f"{one.part.name}: {what} {gap} ({span([sample.n])}), {word}")
    level = f"{100 * (1 - 2 * found.alpha):.3g} %"
    return [
        f"{said}{_doubts([check for one in found.judged for check in one.checks])}.",
        f"Measured, in nats per token with {level} interval: {some(told)}."
        if told
        else "Nothing could be measured: there is no pair of runs that are done.",
    ]

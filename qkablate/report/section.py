"""One part of a report: a sweep, a claim or some runs, with everything that is told of it."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from qkablate.analysis.claims.judgement import Judgement
from qkablate.analysis.comparison.gaps import Family, families
from qkablate.analysis.comparison.head_metrics import MEASURES, Watched, watch
from qkablate.analysis.comparison.summary import describe
from qkablate.analysis.study.attention_maps import Example, example_of
from qkablate.analysis.study.study import TRAIN, VAL, Entry, Study
from qkablate.report.palette import Look, looks

_CURVE = 5  # readings of validation that make a curve
_LOOKS, _ALL_LOOKS = 24, 2_000  # diagnosing steps that are read of a run, and of all runs


@dataclass(frozen=True)
class Chapter:
    title: str
    where: str  # it was read from
    study: Study
    found: Mapping[str, Any]  # all that is described of the study
    judgement: Judgement | None = None  # of a claim
    beside: tuple[str, ...] = ()  # variants of other chapters on the page

    @classmethod
    def of(
        cls,
        title: str,
        where: str,
        study: Study,
        margin: float | None = None,
        judgement: Judgement | None = None,
    ) -> "Chapter":
        return cls(title, where, study, describe(study, margin=margin), judgement)

    @property
    def is_of_a_sweep(self) -> bool:
        return (self.study.manifest.folder / "manifest.json").exists()

    @cached_property
    def families(self) -> list[Family]:
        return families(self.study)

    @cached_property
    def looks(self) -> dict[str, Look]:
        return looks([*self.variants, *self.beside])

    @property
    def variants(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(entry.arm.variant for entry in self.study.entries))

    @cached_property
    def entries(self) -> dict[str, Entry]:
        return {entry.name: entry for entry in self.study.entries}

    @cached_property
    def groups(self) -> dict[str, list[Entry]]:
        """What is drawn in one panel: the arms that stand against one baseline, with it, and those
        that stand against none.
        """
        found: dict[str, list[Entry]] = {}
        for family in self.families:
            found[family.baseline.name] = [family.baseline, *(g.arm for g in family.gaps)]
        placed = {entry.name for group in found.values() for entry in group}
        alone = [entry for entry in self.study.entries if entry.name not in placed]
        for entry in alone:
            found.setdefault(entry.name if len(alone) <= 4 else "", []).append(entry)
        return found

    @cached_property
    def heads(self) -> dict[str, Watched]:
        """What diagnosing steps measured of every arm, where they did."""
        most = max(2, min(_LOOKS, _ALL_LOOKS // max(1, len(self.study.records))))
        found = (watch(entry, MEASURES, most) for entry in self.study.entries)
        return {own.entry.name: own for own in found if own.runs}

    @cached_property
    def examples(self) -> list[Example]:
        """What the first run of every arm does with one text, where that was kept."""
        found = (example_of(entry) for entry in self.study.entries)
        return [own for own in found if own is not None]

    @cached_property
    def metric(self) -> str:
        """Whose curves are drawn: validation's, unless it was read a few times only."""
        begun = [record for record in self.study.records if record.courses[TRAIN]]
        done = [record for record in begun if record.status == "done"] or begun
        many = sum(len(record.courses[VAL]) >= _CURVE for record in done)
        return TRAIN if done and 2 * many < len(done) else VAL

    @cached_property
    def counts(self) -> Counter[str]:
        """Of the runs, by status; those included that are known to come."""
        tuning = [r for by_seed in self.study.tuning.values() for r in by_seed.values()]
        found = Counter(record.status for record in [*self.study.records, *tuning])
        found["waiting"] += max(0, self.study.expected - found.total())
        return +found


def together(chapters: Sequence[Chapter]) -> list[Chapter]:
    """On one page, where a variant has one look."""
    every = tuple(variant for chapter in chapters for variant in chapter.variants)
    return [replace(chapter, beside=every) for chapter in chapters]


def span(numbers: list[int]) -> str:
    low, high = min(numbers, default=0), max(numbers, default=0)
    return f"n = {low}" if low == high else f"n = {low} to {high}"


def place_of(name: str, variant: str) -> str:
    """d64-h2 of merged_w-d64-h2: what an arm's name says beyond its variant."""
    return name.removeprefix(variant).strip("- ")

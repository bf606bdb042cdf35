"""A section of the report: a sweep, a claim or standalone runs, with their analysis."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from qkablate.analysis.claims.judgement import Judgement
from qkablate.analysis.comparison.gaps import Family, find_families
from qkablate.analysis.comparison.head_metrics import MEASURES, HeadMetrics, read_head_metrics
from qkablate.analysis.comparison.summary import StudySummary, describe_study
from qkablate.analysis.scaling.compute_gain import GridFit, fit_grids
from qkablate.analysis.study.attention_maps import ArmAttention, read_arm_attention
from qkablate.analysis.study.inspection import Inspection, read_arm_inspection
from qkablate.analysis.study.loss_curves import TRAIN, VAL
from qkablate.analysis.study.study import Entry, Study
from qkablate.report.palette import Style, assign_styles

_MIN_CURVE = 5  # validation readings that make a curve
_MAX_STEPS, _MAX_ALL_STEPS = 24, 2_000  # diagnostic steps read of one run, and of all runs


@dataclass(frozen=True)
class Section:
    """A study with its summary and, for a claim, its judgement."""

    title: str
    source: str  # where it was read from
    study: Study
    margin: float | None = None
    judgement: Judgement | None = None  # of a claim
    other_variants: tuple[str, ...] = ()  # of the other sections on the page
    milliseconds: Mapping[str, float] = field(default_factory=dict)  # of a step, by arm

    @cached_property
    def summary(self) -> StudySummary:
        scaling = [fit.summary for fit in self.grid_fits]
        return describe_study(self.study, self.milliseconds, self.margin, self.families, scaling)

    @cached_property
    def families(self) -> list[Family]:
        return find_families(self.study)

    @cached_property
    def grid_fits(self) -> list[GridFit]:
        return fit_grids(self.families)

    @cached_property
    def styles(self) -> dict[str, Style]:
        return assign_styles([*self.variants, *self.other_variants])

    @property
    def variants(self) -> tuple[str, ...]:
        """Return what has a style: the variants, and arms with the variant of their baseline."""
        return tuple(dict.fromkeys(self.style_names.values()))

    @cached_property
    def style_names(self) -> dict[str, str]:
        """Return what each arm is drawn as: its variant, with settings if its baseline has it."""
        names = {entry.name: entry.arm.variant for entry in self.study.entries}
        for family in self.families:
            variant, own = family.baseline.arm.variant, _split_name(family.baseline)
            for arm in (gap.arm for gap in family.gaps):
                if arm.arm.variant == variant:
                    more = "".join(part for part in _split_name(arm) if part not in own)
                    names[arm.name] = f"{variant} {more.strip('- ')}".strip()
        return names

    @cached_property
    def entries(self) -> dict[str, Entry]:
        return {entry.name: entry for entry in self.study.entries}

    @cached_property
    def labels(self) -> dict[str, str]:
        """Names of the arms without what all of them share: no_q of no_q-d64-h4 at one size."""
        parts = {entry.name: _split_name(entry) for entry in self.study.entries}
        shared = set.intersection(*map(set, parts.values())) if len(parts) > 1 else set()
        labels = {
            name: self.entries[name].arm.variant + "".join(p for p in own if p not in shared)
            for name, own in parts.items()
        }
        return labels if len({*labels.values()}) == len(labels) else {name: name for name in labels}

    @cached_property
    def groups(self) -> dict[str, list[Entry]]:
        """The arms of each panel: a baseline with its arms and floor, then arms without one."""
        groups: dict[str, list[Entry]] = {}
        for family in self.families:
            group = [family.baseline, *(gap.arm for gap in family.gaps)]
            floors = [gap.floor.arm for gap in family.gaps if gap.floor is not None]
            for floor in floors:
                if floor not in group:
                    group.append(floor)
            groups[family.baseline.name] = group
        placed = {entry.name for group in groups.values() for entry in group}
        alone = [entry for entry in self.study.entries if entry.name not in placed]
        for entry in alone:
            groups.setdefault(entry.name if len(alone) <= 4 else "", []).append(entry)
        return groups

    @cached_property
    def heads(self) -> dict[str, HeadMetrics]:
        """Head metrics of each arm that has diagnostics."""
        most = max(2, min(_MAX_STEPS, _MAX_ALL_STEPS // max(1, len(self.study.records))))
        metrics = (read_head_metrics(entry, MEASURES, most) for entry in self.study.entries)
        imported = (inspection.heads for inspection in self.inspections.values())
        return {arm.entry.name: arm for arm in (*metrics, *imported) if arm.runs}

    @cached_property
    def inspections(self) -> dict[str, Inspection]:
        """Measures of `qkablate inspect` of each imported run, by its arm."""
        found = {entry.name: read_arm_inspection(entry) for entry in self.study.entries}
        return {name: inspection for name, inspection in found.items() if inspection is not None}

    @property
    def is_imported(self) -> bool:
        """True if every run was imported, so that none was trained."""
        records = self.study.all_records
        return bool(records) and all(record.status == "imported" for record in records)

    @cached_property
    def examples(self) -> list[ArmAttention]:
        """Attention maps of the first run of each arm that has any."""
        imported = (inspection.attention for inspection in self.inspections.values())
        return [*filter(None, (*map(read_arm_attention, self.study.entries), *imported))]

    @cached_property
    def metric(self) -> str:
        """The loss that curves show: validation, or training where validation has few readings."""
        started = [record for record in self.study.records if record.loss_curves[TRAIN]]
        done = [record for record in started if record.status == "done"] or started
        many = sum(len(record.loss_curves[VAL]) >= _MIN_CURVE for record in done)
        return TRAIN if done and 2 * many < len(done) else VAL

    @cached_property
    def counts(self) -> Counter[str]:
        """Number of runs by status; expected runs that have no folder yet are waiting."""
        counts = Counter(record.status for record in self.study.all_records)
        counts["waiting"] += max(0, self.study.expected - counts.total())
        return +counts


def _split_name(entry: Entry) -> list[str]:
    """Return the parts of an arm's name after its variant, each with the separator before it."""
    name = entry.name.removeprefix(entry.arm.variant)
    return re.split(r"(?=(?<!\de)-)|(?= lr )", name)  # 1e-3 is one part


def share_styles(sections: Sequence[Section]) -> list[Section]:
    """Give each variant the same style in all sections of a page."""
    every = tuple(variant for section in sections for variant in section.variants)
    return [replace(section, other_variants=every) for section in sections]


def format_n(numbers: list[int]) -> str:
    """Format sample sizes: n = 4, or n = 2 to 4."""
    low, high = min(numbers, default=0), max(numbers, default=0)
    return f"n = {low}" if low == high else f"n = {low} to {high}"


def size_label(name: str, variant: str) -> str:
    """Return the part of an arm's name after its variant: d64-h2 of merged_w-d64-h2."""
    return name.removeprefix(variant).strip("- ")

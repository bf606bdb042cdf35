"""The claims of the study: those with published runs, and those that have none yet."""

import math
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from qkablate.analysis.claims.claim import Claim, PartSpec, Selector
from qkablate.analysis.claims.judgement import (
    Judgement,
    PartJudgement,
    counting_judgement,
    judge_looks,
)
from qkablate.analysis.claims.measures import Unit
from qkablate.analysis.claims.parse import claim_names, load_claim
from qkablate.analysis.claims.registry import Registration
from qkablate.analysis.publication.archive import SUFFIX
from qkablate.analysis.publication.unpack import open_archives, unpacked_claims
from qkablate.report.section import Section

LEVEL = 0.9  # of the intervals in the table, whatever a claim is judged at
_ALL = 0.9995  # of the answers, as shown to a tenth of a percent
RESULTS = "results"  # the folder of the archives in that of the study


@dataclass(frozen=True)
class StudiedClaim:
    """A claim with published runs."""

    registration: Registration
    judgement: Judgement

    @property
    def claim(self) -> Claim:
        return self.registration.claim

    @property
    def slug(self) -> str:
        """Name of the claim's pictures and of its place on the page."""
        return self.claim.folder_name

    @property
    def archive(self) -> str:
        return f"{RESULTS}/{self.claim.folder_name}{SUFFIX}"

    @cached_property
    def section(self) -> Section:
        return Section(
            self.claim.title, "published runs", self.judgement.study, None, self.judgement
        )

    @property
    def verdict(self) -> str:
        """The verdict, what it is limited to, and whether it is exploratory."""
        judged = self.judgement
        if not judged.has_ended:
            return f"{judged.word} ({judged.study.ended} of {judged.study.expected} runs)"
        unless = ", barring outliers" if judged.unless else ""
        return f"{judged.headline}{unless}{' (exploratory)' if judged.exploratory else ''}"

    @property
    def deciding(self) -> list[PartJudgement]:
        """The parts, those with the verdict of the claim first; none before its verdict."""
        judged = self.judgement
        parts = judged.parts if judged.has_ended else []
        return sorted(parts, key=lambda part: part.word != judged.word)

    def format_costs(self, most: int = 4) -> str:
        """Return what the variants of the parts cost, with intervals: positive is worse.

        A part has its verdict where that is not the claim's.
        """
        judged = self.judgement
        counts = Counter(part.comparison.part for part in judged.parts)
        costs = []
        for part in self.deciding:
            own, name = part.comparison.part, part.part.name
            size = name.removeprefix(own) if counts[own] > 1 else ""
            word = f" ({part.word})" if part.word != judged.word else ""
            costs.append(_format_cost(part, size) + word)
        more = [f"{len(costs) - most} more"] if len(costs) > most else []
        return "; ".join([*costs[:most], *more]) or "–"

    @property
    def command(self) -> str:
        """The command that trains and judges the claim."""
        scale = "" if self.claim.scale == "small" else f" scale={self.claim.scale}"
        words = "".join(f" {key}={value}" for key, value in self.claim.words.items())
        return f"qkablate claim run {self.claim.name}{scale}{words}"

    @property
    def minutes(self) -> float:
        """Minutes of training of all its runs, added up; vmapped ones share those of a program."""
        seconds = (record.training_seconds for record in self.judgement.study.all_records)
        return math.fsum(s for s in seconds if s is not None) / 60


def _format_cost(judged: PartJudgement, size: str) -> str:
    part, spec = judged.part, judged.comparison.spec
    is_standards = spec.arm.get("variant") == "standard" != spec.against.get("variant")
    text = _format_arms(spec, is_standards) + size
    text += f" on {judged.comparison.world}" if len(spec.data) > 1 else ""
    text += f" at equal {spec.axis}" if spec.axis != "tokens" else ""
    if part.sample.interval(LEVEL) is None:
        return f"{text}: unknown"
    records = [r for gap in judged.gaps for entry in gap.sides for r in entry.records.values()]
    if spec.of == "accuracy" and min(record.accuracy or 0 for record in records) > _ALL:
        return f"{text}: +0.000, as all runs answer everything"
    low, high = judged.interval(LEVEL)
    mean = judged.unit.natural(part.sample.mean)
    if judged.unit is Unit.RATIO:
        if is_standards:
            mean, low, high = 1 / mean, 1 / high, 1 / low
        return f"{text}: {spec.measure.noun} × {mean:.3g} [{low:.3g}, {high:.3g}]"
    if is_standards != (judged.unit is Unit.SHARE):
        mean, low, high = -mean, -high, -low
    worth = _attention_worth(judged)
    if worth is not None and is_standards:  # the floor was compared with the variant
        worth += mean
    unit = _unit(spec) if worth is None else f"of {worth:.3f} {_unit(spec)}"
    return f"{text}: {mean:+.3f} [{low:+.3f}, {high:+.3f}] {unit}"


def _unit(spec: PartSpec) -> str:
    if spec.measure.unit is not Unit.NATS:
        return spec.measure.noun
    nats = "nats" if spec.of == "gap" else f"nats ({spec.measure.noun})"
    return nats + {"growth": " per doubling of tokens", "asymptote": " (extrapolated)"}.get(
        spec.horizon, ""
    )


def _attention_worth(judged: PartJudgement) -> float | None:
    """Return what the baseline gains by attention, in the part's unit; None if it is unknown."""
    gap, measure = judged.gaps[0], judged.comparison.spec.measure
    is_plain = len(judged.gaps) == 1 and measure.name in ("gap", "train_loss", "accuracy", "exact")
    costs = [*measure.costs(gap.floor).values()] if is_plain and gap.floor is not None else []
    return math.fsum(costs) / len(costs) if costs else None


def _format_arms(spec: PartSpec, is_standards: bool) -> str:
    """Return the variant of a part, and what it is compared with unless that is standard."""
    arm, against = (spec.against, spec.arm) if is_standards else (spec.arm, spec.against)
    is_plain = against.get("variant") == "standard" and all(
        arm.get(key, value) == value for key, value in against.items() if key != "variant"
    )
    against_it = "" if is_plain else f" against {_format_side(against)}"
    than = f" less that at {_format_side(spec.than)}" if spec.than else ""
    return f"{_format_side(arm)}{against_it}{than}"


def _format_side(side: Selector) -> str:
    words = []
    for key, value in side.items():
        shown = "null" if value is None else value
        words.append(f"{shown}" if key == "variant" else f"{key.rpartition('.')[-1]}={shown}")
    return " ".join(words)


def read_claims(study: Path) -> list[StudiedClaim]:
    """Read the claims of the archives in a study's folder, in the order of `claim list`."""
    root = open_archives(study / RESULTS)
    if root is None:
        return []
    claims = []
    for registration in unpacked_claims(root):
        judgement = counting_judgement(judge_looks(registration.claim, str(root)))
        if judgement is not None:
            claims.append(StudiedClaim(registration, judgement))
    order = claim_names()
    return sorted(
        claims,
        key=lambda studied: (
            order.index(studied.claim.name) if studied.claim.name in order else len(order),
            studied.claim.folder_name,
        ),
    )


def find_open_claims(claims: list[StudiedClaim]) -> list[Claim]:
    """Return the shipped claims of which no run is published."""
    published = {studied.claim.name for studied in claims}
    return [load_claim(name) for name in claim_names() if name not in published]

"""Conversions of trained runs to other variants: errors of the projection, and what they cost.

The cost is a gap to the same runs trained on in their own variant, at once and after fine-tuning.
"""

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from qkablate.analysis.comparison.gaps import Gap, find_families
from qkablate.analysis.stats import Sample
from qkablate.analysis.study.loss_curves import START
from qkablate.analysis.study.study import Record, Study
from qkablate.runs.records import is_number, read_json
from qkablate.runs.run import PROJECTION_LOSSES

ERRORS = ("qk_scores", "ov_output")


@dataclass(frozen=True)
class Conversion:
    """One variant that trained runs were converted to."""

    arm: str
    variant: str
    params: int  # without embeddings
    params_percent: float  # of those of the trained model
    errors: dict[str, float] | None  # relative, root mean square over layers and runs
    at_once: Sample  # validation loss before the first step, of each run
    at_once_gap: Sample
    val: Sample  # after fine-tuning
    val_gap: Sample
    test_gap: Sample
    runs: int  # planned
    diverged: int


def find_conversions(study: Study) -> list[Conversion]:
    """Return the conversions in a study, the smallest loss after fine-tuning first."""
    gaps = [gap for family in find_families(study) for gap in family.gaps]
    found = [_describe(gap) for gap in gaps if gap.arm.arm.is_finetuned]
    return sorted(found, key=lambda c: (c.val.mean if c.val.n else math.inf, c.params))


def baseline_losses(study: Study) -> tuple[Sample, Sample]:
    """Return the validation losses of the trained model, before and after it is trained on."""
    names = {gap.baseline.name for family in find_families(study) for gap in family.gaps}
    records = [r for e in study.entries if e.name in names for r in e.records.values()]
    return _sample(map(_initial_loss, records)), _sample(map(_final_loss, records))


def _describe(gap: Gap) -> Conversion:
    arm, baseline = gap.sides
    records = [*arm.records.values()]
    pairs = [(r, baseline.records.get(key)) for key, r in arm.records.items()]
    known = [(ours, theirs) for ours, theirs in pairs if theirs is not None]
    return Conversion(
        arm=arm.name,
        variant=arm.arm.variant,
        params=arm.arm.params,
        params_percent=100 * arm.arm.params / baseline.arm.params,
        errors=_mean_errors(record.folder for record in records),
        at_once=_sample(map(_initial_loss, records)),
        at_once_gap=_sample(_difference(_initial_loss(a), _initial_loss(b)) for a, b in known),
        val=_sample(map(_final_loss, records)),
        val_gap=_sample(_difference(_final_loss(a), _final_loss(b)) for a, b in known),
        test_gap=gap.sample,
        runs=len(records),
        diverged=len(arm.with_status("diverged")),
    )


def _initial_loss(record: Record) -> float | None:
    return record.loss_curves.get(START, {}).get(0)


def _final_loss(record: Record) -> float | None:
    return record.val if record.status == "done" else None


def _difference(value: float | None, other: float | None) -> float | None:
    return None if value is None or other is None else value - other


def _sample(values: Iterable[float | None]) -> Sample:
    return Sample(tuple(value for value in values if value is not None))


def _mean_errors(folders: Iterable[Path]) -> dict[str, float] | None:
    """Return the root mean squares of the projection's errors over layers and runs."""
    layers = [layer for folder in folders for layer in _read_errors(folder)]
    if not layers:
        return None
    return {key: math.sqrt(statistics.fmean(own[key] ** 2 for own in layers)) for key in ERRORS}


def _read_errors(folder: Path) -> list[dict[str, float]]:
    """Return the errors by layer that a run has recorded; [] if it has none or they are damaged."""
    content = read_json(folder / "start" / PROJECTION_LOSSES)
    layers = content if isinstance(content, list) else []
    if not all(
        isinstance(own, dict) and all(is_number(own.get(k)) for k in ERRORS) for own in layers
    ):
        return []
    return layers

"""Conversions of trained runs to other variants: errors of the projection, and what they cost.

The cost is the gap, before and after fine-tuning, to the same runs trained further in their own
variant.
"""

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from qkablate.analysis.comparison.gaps import Gap, find_families
from qkablate.analysis.stats import Sample
from qkablate.analysis.study.loss_curves import START
from qkablate.analysis.study.study import Entry, Record, Study
from qkablate.runs.records import is_number, read_json
from qkablate.runs.run import PROJECTION_ERRORS

ERRORS = ("qk_scores", "ov_output")


@dataclass(frozen=True)
class Conversion:
    """One variant that trained runs were converted to."""

    arm: str
    variant: str
    params: int  # without embeddings
    params_percent: float | None  # of those of the trained model
    errors: dict[str, float] | None  # relative, root mean square over layers and runs
    before_finetuning: Sample  # validation loss before the first step, of each run
    gap_before_finetuning: Sample
    val: Sample  # after fine-tuning
    val_gap: Sample
    test_gap: Sample
    runs: int  # planned
    diverged: int
    open_above: bool  # a run diverged: the gaps after fine-tuning have no upper bound
    open_below: bool  # a run of the baseline diverged


@dataclass(frozen=True)
class Conversions:
    """A trained model, which may have several seeds, and the variants that it was converted to."""

    baseline: Entry  # its own runs, trained further in their own variant
    before_finetuning: Sample  # their validation loss before the first step
    val: Sample
    variants: list[Conversion]  # the smallest loss after fine-tuning first


def find_conversions(study: Study) -> list[Conversions]:
    """Return the conversions in a study, by trained model."""
    found = []
    for family in find_families(study):
        gaps = [gap for gap in family.gaps if gap.arm.arm.is_finetuned]
        if gaps and family.baseline.arm.is_finetuned:
            records = [*family.baseline.records.values()]
            before_finetuning, val = (
                _sample(map(read, records)) for read in (_initial_loss, _final_loss)
            )
            variants = sorted(
                map(_describe, gaps), key=lambda c: (c.val.mean if c.val.n else math.inf, c.params)
            )
            found.append(Conversions(family.baseline, before_finetuning, val, variants))
    return found


def _describe(gap: Gap) -> Conversion:
    arm, baseline = gap.sides
    records = [*arm.records.values()]
    pairs = [(r, baseline.records.get(key)) for key, r in arm.records.items()]
    known = [(ours, theirs) for ours, theirs in pairs if theirs is not None]
    return Conversion(
        arm=arm.name,
        variant=arm.arm.variant,
        params=arm.arm.params,
        params_percent=100 * arm.arm.params / baseline.arm.params if baseline.arm.params else None,
        errors=_mean_errors(record.folder for record in records),
        before_finetuning=_sample(map(_initial_loss, records)),
        gap_before_finetuning=_sample(
            _difference(_initial_loss(a), _initial_loss(b)) for a, b in known
        ),
        val=_sample(map(_final_loss, records)),
        val_gap=_sample(_difference(_final_loss(a), _final_loss(b)) for a, b in known),
        test_gap=gap.sample,
        runs=len(records),
        diverged=len(arm.with_status("diverged")),
        open_above=gap.arm_diverged > 0,
        open_below=gap.baseline_diverged > 0,
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
    content = read_json(folder / "start" / PROJECTION_ERRORS)
    layers = content if isinstance(content, list) else []
    if not all(
        isinstance(own, dict) and all(is_number(own.get(k)) for k in ERRORS) for own in layers
    ):
        return []
    return layers

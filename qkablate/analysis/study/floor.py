"""Assay sensitivity: an experiment in which nothing could have shown says nothing.

The floor of a comparison is `uniform`, attention that averages all tokens, in the model of its
baseline. Where the baseline does not beat it clearly, arms look alike because attention made no
difference.
"""

from qkablate.analysis.study.study import Entry, Study
from qkablate.sweeps.planning.manifest import FLOOR, without_variant

MARGINS = 3  # by which the baseline has to beat the floor


def find_floor(study: Study, baseline: Entry) -> Entry | None:
    """Return the floor in the baseline's model, at the same rate if it has several."""
    model = without_variant(baseline.arm.overrides)
    floors = [
        entry
        for entry in study.entries
        if entry.arm.config.variant.name == FLOOR
        and entry.arm.mismatch is None  # at the model's own size
        and without_variant(entry.arm.overrides) == model
    ]
    if len(floors) > 1:
        floors = [floor for floor in floors if floor.rate == baseline.rate]
    return floors[0] if floors else None

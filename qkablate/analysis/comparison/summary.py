"""All that a sweep says, as one structure of plain types."""

from collections.abc import Mapping
from typing import Any

from qkablate.analysis.claims.verdict import Part
from qkablate.analysis.comparison.audit import Check, audit
from qkablate.analysis.comparison.curves import describe_curve
from qkablate.analysis.comparison.function_distance import distances
from qkablate.analysis.comparison.gaps import (
    Family,
    describe_arm,
    describe_gap,
    families,
    noise_floor,
)
from qkablate.analysis.comparison.lr_curves import Bowl, bowls, describe_bowls
from qkablate.analysis.comparison.ranking import describe_ranking, fronts, rankings
from qkablate.analysis.comparison.scaling import describe_series, series
from qkablate.analysis.stats import ALPHA, holm, needed, power_within
from qkablate.analysis.study.study import Study
from qkablate.report.text.distance import describe_distances


def describe(
    study: Study, milliseconds: Mapping[str, float] | None = None, margin: float | None = None
) -> dict[str, Any]:
    """Everything, in plain types. With a margin, also which arms are not worse by it."""
    found = families(study)
    found_bowls = bowls(study)
    return {
        "sweep": study.name,
        "complete": study.is_complete,
        "arms": [describe_arm(entry) for entry in study.entries],
        "gaps": [
            describe_gap(family, number)
            | {"margin": margin and describe_margin(family, number, margin)}
            | {
                "audit": [
                    check.as_json() for check in audit_of(family, number, found_bowls, margin)
                ]
            }
            for family in found
            for number in range(len(family.gaps))
        ],
        "noise_floor": [noise_floor(family) for family in found],
        "curves": [
            shown
            for family in found
            for g in family.gaps
            if (shown := describe_curve(g)) is not None
        ],
        "function_distance": describe_distances(distances(found)),
        "series": [describe_series(one) for one in series(found)],
        "learning_rates": describe_bowls(study),
        "rankings": [describe_ranking(one) for one in rankings(found)],
        "fronts": fronts(study, milliseconds or {}),
        "left_out": [vars(left) for left in study.manifest.left_out],
    }


def audit_of(
    family: Family, number: int, found_bowls: dict[str, Bowl], margin: float | None = None
) -> list[Check]:
    """Of a gap in a report."""
    one = family.gaps[number]
    controls = one.arm.arm.controls
    return audit(
        one,
        found_bowls,
        axis="tokens" if "none" in controls else controls[0],
        margin=margin,
        twin=family.twin,
        least=family.detectable(one),
    )


def describe_margin(family: Family, number: int, margin: float) -> dict[str, Any]:
    """Whether an arm is not worse by the margin, and whether it is within it either way: one-sided
    t tests, by Holm over the family; and the seeds that show the latter of an arm that is alike.
    """
    parts = [Part.of("", "equivalent", margin, one) for one in family.gaps]
    known = [i for i, part in enumerate(parts) if part.sample.n > 1]
    if number not in known:
        return {"nats": margin, "p_noninferior": None, "p_equivalent": None, "seeds_needed": None}
    place, sd = known.index(number), parts[number].sample.sd or 0.0
    alpha = ALPHA / len(known)
    return {
        "nats": margin,
        "p_noninferior": holm([parts[i].p_below(margin) for i in known])[place],
        "p_equivalent": holm([parts[i].p_nil for i in known])[place],
        "seeds_needed": needed(lambda n: power_within(0.0, margin, sd, n, alpha)) if sd else 2,
    }

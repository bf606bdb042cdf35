"""The sweep that would remove the first obstacle to an answer."""

from qkablate.analysis.comparison.summary import StudySummary
from qkablate.analysis.stats import MIN_PAIRS
from qkablate.analysis.study.study import Study

LONGER = 4  # times as many steps


def propose_next_sweep(study: Study, summary: StudySummary) -> list[str] | None:
    """Return the arguments of that sweep: longer runs, then more seeds, then tuning.

    Its name is new, as two sweeps of one name would be ambiguous.
    """
    manifest = study.manifest
    if manifest is None or manifest.command[1:2] != ["sweep"]:
        return None
    changes = {}
    if any(gap.before_attention or gap.at_floor for gap in summary.gaps):
        steps = max(int(entry.arm.config.train.steps) for entry in study.entries)
        changes = {"train.steps": str(LONGER * steps), "sweep.name": f"{manifest.name}-longer"}
    elif summary.gaps and len({record.seeds for record in study.records}) < MIN_PAIRS:
        changes = {"seed": "range(6)", "sweep.name": f"{manifest.name}-more-seeds"}
    elif summary.tuning is not None:
        return summary.tuning.command
    kept = [w for w in manifest.command[1:] if w.partition("=")[0] not in ("out", *changes)]
    return [*kept, *(f"{key}={value}" for key, value in changes.items())] if changes else None

"""The sweep that would remove the first obstacle to an answer."""

import itertools

from qkablate.analysis.comparison.decision import WITHOUT_CONTENT
from qkablate.analysis.comparison.summary import StudySummary
from qkablate.analysis.stats import MIN_PAIRS
from qkablate.analysis.study.study import Study

LONGER = 4  # times as long
_SEEDS = 6


def propose_next_sweep(study: Study, summary: StudySummary) -> list[str] | None:
    """Return the arguments of that sweep: longer runs, then more seeds, then tuning.

    Its name is new, as two sweeps of one name would be ambiguous.
    """
    manifest = study.manifest
    if manifest is None or manifest.command[1:2] != ["sweep"]:
        return None
    words = manifest.command[1:]
    needs_length = any(
        gap.before_attention or gap.at_floor or WITHOUT_CONTENT in gap.scopes
        for gap in summary.gaps
    )
    needs_seeds = summary.gaps and len({record.seeds for record in study.records}) < MIN_PAIRS
    if not needs_length and not needs_seeds:
        return summary.tuning.command if summary.tuning is not None else None
    changes = _more_seeds(study) if needs_seeds else {}
    if needs_length:
        if manifest.fixes_length:
            return None
        changes = _longer(study) | changes
    changes["sweep.name"] = f"{manifest.name}-{'longer' if needs_length else 'more-seeds'}"
    kept = [w for w in words if w.lstrip("+").partition("=")[0] not in ("out", *changes)]
    return [*kept, *(f"{key}={value}" for key, value in changes.items())]


def _longer(study: Study) -> dict[str, str]:
    """Return a longer length for every length of the runs, in the key that gives it."""
    arms = [entry.arm for entry in study.entries]
    key, lengths = "train.tokens", [arm.overrides.get("train.tokens", "null") for arm in arms]
    if "null" in lengths:
        key, lengths = "train.steps", [str(arm.config.train.steps) for arm in arms]
    return {key: ",".join(str(LONGER * int(length)) for length in dict.fromkeys(lengths))}


def _more_seeds(study: Study) -> dict[str, str]:
    """Return the seeds of the runs and new ones, which tuning has not used."""
    given = {record.seed for record in study.records}
    used = given | {record.seed for record in study.all_records}
    if study.manifest is not None:
        used |= {*study.manifest.tuning_seeds}
    new = (seed for seed in itertools.count() if seed not in used)
    seeds = sorted([*given, *itertools.islice(new, _SEEDS - len(given))])
    is_range = seeds == [*range(_SEEDS)]
    return {"seed": f"range({_SEEDS})" if is_range else ",".join(map(str, seeds))}

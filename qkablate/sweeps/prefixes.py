"""The steps that the runs of a sweep have in common, which the longest trains for all."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from qkablate.runs.prefix import Prefix, find_prefix
from qkablate.runs.run import identity
from qkablate.sweeps.planning.manifest import Manifest, SweepRun


@dataclass(frozen=True)
class TrainedSteps:
    """The steps of a sweep's runs, and those of them that are trained."""

    whole: int
    trained: int
    fractions: Mapping[str, float]  # trained of each run that branches off, by its id


def find_run_prefix(manifest: Manifest, run: SweepRun) -> Prefix | None:
    """Return the prefix of a run; None if it has none."""
    arm = manifest.arms[run.arm]
    if arm.config.optim.schedule != "wsd":  # thousands of runs may have none
        return None
    config = arm.config_of(run.changes, tuning=run.tuning)
    return find_prefix(config, identity(config, **arm.facts))


def count_trained_steps(manifest: Manifest, runs: Iterable[SweepRun]) -> TrainedSteps:
    """Count the steps of these runs if the longest of those with one prefix trains it for all."""
    whole = 0
    longest: dict[str, tuple[int, str]] = {}
    members: dict[str, tuple[Prefix, int]] = {}
    for run in runs:
        steps = int(manifest.arms[run.arm].config.train.steps)
        whole += steps
        if prefix := find_run_prefix(manifest, run):
            members[run.id] = prefix, steps
            longest[prefix.id] = max((steps, run.id), longest.get(prefix.id, (0, "")))
    fractions = {
        id: 1 - prefix.steps / steps
        for id, (prefix, steps) in members.items()
        if longest[prefix.id][1] != id
    }
    saved = sum(members[id][0].steps for id in fractions)
    return TrainedSteps(whole, whole - saved, fractions)

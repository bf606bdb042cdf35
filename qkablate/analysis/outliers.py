"""Outliers: rare failures of training, which few seeds cannot exclude.

An interval of n seeds knows nothing of a failure that it has not seen: with one run in eight an
outlier, 45 % of arms with six seeds show none, and their mean is too low by an eighth of its size.
"""

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from scipy import stats

from qkablate.analysis.study.study import Entry, Seeds
from qkablate.sweeps.planning.tuning_losses import OUTLIER

TYPICAL_SIZE = 0.12  # nats: assumed at least, also where the arms have no outlier
_MADS = 5  # 1 of 3.5 million normal numbers is so far above the mean
_MIN_RUNS = 4  # the median deviation of three numbers is the smaller of two distances
_SCALE = 1 / stats.norm.ppf(0.75)  # makes the MAD of normal numbers their standard deviation


def find_outliers(losses: Mapping[Seeds, float]) -> dict[Seeds, float]:
    """Return the distance to the median, in nats, of each run far above the others of its arm.

    Far is 5 scaled median absolute deviations, so that ordinary noise is never a failure, and 0.05
    nats, the limit of tuning, so that quiet arms have none that do not matter.
    """
    if len(losses) < _MIN_RUNS:
        return {}
    median = statistics.median(losses.values())
    deviation = _SCALE * statistics.median(abs(loss - median) for loss in losses.values())
    limit = max(_MADS * deviation, OUTLIER)
    return {key: loss - median for key, loss in losses.items() if loss - median > limit}


@dataclass(frozen=True)
class FailureRisk:
    """Failures seen in the runs of one arm, and their size."""

    arm: str
    failed: int
    runs: int
    size: float = TYPICAL_SIZE  # nats
    weight: float = 1.0  # of a run in the estimate: below 1 in a slope over several lengths
    unit: str = "nats"

    def unseen_shift(self, alpha: float) -> float:
        """Return the shift of the mean, in nats, by failures that the runs do not exclude.

        It is the size times the excess of the Clopper–Pearson bound over the rate that was seen.
        Without a failure it is nearly size · ln(1/α) / n, the rule of three. A bound of the mean
        moved by this shift errs in at most α of the studies where no failure was seen: either the
        failures shift the mean by less, and the test errs as often as it may, or they are so
        frequent that n runs without any have probability α.
        """
        if self.failed == self.runs:
            return 0.0 if self.runs else self.weight * self.size
        most = float(stats.beta.isf(alpha, self.failed + 1, self.runs - self.failed))
        return self.weight * self.size * (most - self.failed / self.runs)

    def describe_condition(self, room: float) -> str:
        """Return the failure that would shift a bound by `room`: one run in k.

        Without room, as where Holm's method decides and an equal share of α does not, the rarest
        failure would.
        """
        size = f"{self.size:.2g} {self.unit}"
        if room <= 0:
            return f"a run of {self.arm}, however rarely, is an outlier by {size}"
        one_in = math.ceil(self.weight * self.size / room)
        return f"one run in {max(2, one_in):,} of {self.arm} is an outlier by {size}"


def measure_risks(arm: Entry, baseline: Entry) -> tuple[FailureRisk, FailureRisk]:
    """Return the failures of both arms; their size is that of the worst in either."""
    failed, others = find_outliers(arm.losses), find_outliers(baseline.losses)
    size = max([TYPICAL_SIZE, *failed.values(), *others.values()])
    risk = FailureRisk(arm.name, len(failed), len(arm.losses), size)
    return risk, FailureRisk(baseline.name, len(others), len(baseline.losses), size)

"""Gaps: the test loss of an arm minus that of its paired baseline, in nats, seed by seed."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from scipy import stats

from qkablate.analysis.stats import (
    ALPHA,
    Interval,
    Sample,
    detectable,
    holm,
    sign_flip_speaks_from,
)
from qkablate.analysis.study.study import Entry, Record, Seeds, Study


@dataclass(frozen=True)
class Gap:
    """Of one arm against another."""

    arm: Entry
    baseline: Entry
    pairs: Mapping[Seeds, float]
    unpaired: list[str]  # what is missing of a pair, and why
    arm_diverged: int
    baseline_diverged: int

    @cached_property
    def sample(self) -> Sample:
        return Sample(tuple(self.pairs.values()))

    def bounds(self, level: float = 1 - ALPHA) -> Interval | None:
        """The t interval; a side on which runs diverged is open: what they would have added to the
        mean of the others has no end.
        """
        found = self.sample.interval(level)
        if found is None:
            return None
        low, high = found
        return (
            -math.inf if self.baseline_diverged else low,
            math.inf if self.arm_diverged else high,
        )

    @cached_property
    def correlation(self) -> float | None:
        """Between the two arms over seeds: what pairing is worth."""
        if len(self.pairs) < 3:
            return None
        both = [[entry.losses[key] for key in self.pairs] for entry in (self.arm, self.baseline)]
        if any(len({*losses}) == 1 for losses in both):
            return None
        return float(stats.pearsonr(*both).statistic)


def gap(arm: Entry, baseline: Entry) -> Gap:
    """Pair the runs of two arms by their seeds."""
    pairs: dict[Seeds, float] = {}
    unpaired = []
    diverged = {"arm": 0, "baseline": 0}
    for key in sorted({*arm.records, *baseline.records}):
        one, other = arm.records.get(key), baseline.records.get(key)
        why = [_missing(entry, record) for entry, record in ((arm, one), (baseline, other))]
        for side, record in (("arm", one), ("baseline", other)):
            diverged[side] += record is not None and record.status == "diverged"
        if one is None or other is None or any(why):
            shown = one or other
            unpaired.append(f"{shown.seed if shown else ''}: {'; '.join(filter(None, why))}")
        elif one.facts["data_fingerprint"] != other.facts["data_fingerprint"]:
            unpaired.append(f"{one.seed}: the two were trained on different data")
        else:
            assert one.loss is not None
            assert other.loss is not None
            pairs[key] = one.loss - other.loss
    return Gap(arm, baseline, pairs, unpaired, diverged["arm"], diverged["baseline"])


def _missing(entry: Entry, record: Record | None) -> str:
    """Why a run has no part in a pair; '' if it has."""
    if record is None:
        return f"{entry.name} has no such run"
    if record.status != "done":
        return f"{entry.name} {record.status}"
    return "" if record.loss is not None else f"{entry.name} read no test split"


@dataclass(frozen=True)
class Family:
    """The arms of one size against their baseline: judged together, by Holm."""

    baseline: Entry
    gaps: list[Gap]

    @cached_property
    def holm(self) -> list[float | None]:
        """Adjusted p of each gap, None where one pair or none is there."""
        known = [g.sample.p for g in self.gaps if g.sample.p is not None]
        adjusted = iter(holm(known))
        return [None if g.sample.p is None else next(adjusted) for g in self.gaps]

    @cached_property
    def comparisons(self) -> int:
        return sum(g.sample.p is not None for g in self.gaps)

    def detectable(self, found: Gap) -> float | None:
        """The smallest gap that would have been found four times of five, whatever the others."""
        sd = found.sample.sd
        return (
            None if sd is None else detectable(sd, found.sample.n, ALPHA / max(1, self.comparisons))
        )

    @property
    def sign_flip_speaks_from(self) -> int:
        return sign_flip_speaks_from(max(1, self.comparisons))

    @cached_property
    def twin(self) -> Gap | None:
        """Standard attention multiplied in another order: how far apart two runs come by rounding
        alone.
        """
        for found in self.gaps:
            names = {found.arm.arm.variant, self.baseline.arm.variant}
            if names == {"standard", "standard_reassociated"}:
                return found
        return None


def families(study: Study) -> list[Family]:
    """Every arm that has a baseline, by baseline, in the order of the plan."""
    found: dict[str, Family] = {}
    for entry in study.entries:
        baseline = study.baseline_of(entry)
        if baseline is not None and baseline is not entry:
            family = found.setdefault(baseline.name, Family(baseline, []))
            family.gaps.append(gap(entry, baseline))
    return list(found.values())


def _percent(one: float, other: float) -> float | None:
    """How much more; None where it is not known, as of runs without a result."""
    return 100 * (one / other - 1) if one and other else None


def per_cent(nats: float) -> float:
    """A gap in nats, as a part of the baseline's perplexity."""
    return 100 * math.expm1(min(nats, 700.0))


def describe_arm(entry: Entry) -> dict[str, Any]:
    """An arm on its own, every run of it visible."""
    sample = entry.sample
    return {
        "arm": entry.name,
        "variant": entry.arm.variant,
        "controls": entry.arm.controls,
        "lr": entry.rate,
        "steps": int(entry.arm.config.train.steps),
        "tokens": entry.tokens,
        "params": entry.arm.params,
        "training_flops": entry.arm.work,
        **describe_sample(sample),
        "runs": [
            {"run": record.folder.name, "seeds": dict(record.seeds), "status": record.status}
            | {"test_loss": record.loss, "val_loss": record.val}
            | ({"reason": record.reason} if record.reason else {})
            for record in entry.records.values()
        ],
    }


def describe_gap(family: Family, number: int) -> dict[str, Any]:
    found = family.gaps[number]
    interval = found.sample.interval()
    known = found.sample.n > 0
    return {
        "arm": found.arm.name,
        "baseline": family.baseline.name,
        **describe_sample(found.sample),
        "params_percent": _percent(found.arm.arm.params, found.baseline.arm.params),
        "flops_percent": _percent(found.arm.arm.flops, found.baseline.arm.flops),
        "perplexity_percent": per_cent(found.sample.mean) if known else None,
        "perplexity_percent_interval": interval and [per_cent(side) for side in interval],
        "p": found.sample.p,
        "p_holm": family.holm[number],
        "comparisons": family.comparisons,
        "bca": found.sample.bca and [*found.sample.bca],
        "sign_flip": found.sample.sign_flip,
        "sign_flip_speaks_from": family.sign_flip_speaks_from,
        "detectable": family.detectable(found),
        "correlation": found.correlation,
        "arm_diverged": found.arm_diverged,
        "baseline_diverged": found.baseline_diverged,
        "pairs": [{"seeds": dict(key), "gap": value} for key, value in found.pairs.items()],
        "unpaired": found.unpaired,
    }


def describe_sample(sample: Sample) -> dict[str, Any]:
    interval = sample.interval()
    return {
        "n": sample.n,
        "mean": sample.mean if sample.n else None,
        "sd": sample.sd,
        "interval": interval and [*interval],
    }


def noise_floor(family: Family) -> dict[str, Any]:
    """What is no difference at this size: between seeds, and by rounding alone."""
    spread = family.baseline.sample.sd
    twin = family.twin.sample if family.twin else None
    return {
        "baseline": family.baseline.name,
        "seeds_sd": spread,
        "rounding": None if twin is None else describe_sample(twin),
    }


def told(seeds: Iterable[Seeds]) -> str:
    """0, 1, 2: what pairs share."""
    return ", ".join(str(dict(key)["seed"]) for key in seeds)

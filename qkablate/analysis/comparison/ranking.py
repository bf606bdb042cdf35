"""Ranks with their uncertainty at equal tokens, parameters or FLOPs, and Pareto fronts of cost."""

import itertools
import json
import math
import statistics
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from qkablate.analysis.comparison.audit import is_annealed
from qkablate.analysis.comparison.gaps import Family, adjust, measure_gap
from qkablate.analysis.stats import ALPHA, MIN_PAIRS, Estimate, Sample, describe_sample, holm
from qkablate.analysis.study.study import Entry, Study
from qkablate.config import flatten
from qkablate.config.sweep import split_control
from qkablate.errors import UserError
from qkablate.runs.records import is_number
from qkablate.sweeps.planning.manifest import Arm

AXES = {"tokens": "none", "params": "params", "flops": "flops"}  # what is equal → its control
Priced = tuple[Entry, float]  # the runs of an arm at one rate, and their cost


@dataclass(frozen=True)
class Rank:
    """Range of ranks of one arm that the runs do not rule out."""

    arm: str
    mean: float
    n: int
    best_rank: int
    worst_rank: int


@dataclass(frozen=True, kw_only=True)
class RankedPair(Estimate):
    """Gap between two ranked arms, its p-value adjusted by Holm over all pairs."""

    arm: str
    against: str
    p_holm: float | None


@dataclass(frozen=True)
class Ranking:
    """Ranks of the arms of one size under one control."""

    equal: str  # tokens, params, flops
    adjusted: str  # the size that is adjusted for it
    size: str  # name of the baseline
    ranks: list[Rank]
    unranked: list[str]  # with reasons
    pairs: list[RankedPair]


def find_rankings(families: list[Family]) -> list[Ranking]:
    """Rank the arms of each size, length and control."""
    rankings = []
    for family in families:
        controls = dict.fromkeys(c for gap in family.gaps for c in gap.arm.arm.controls)
        for control in sorted(
            controls, key=lambda name: [*AXES.values()].index(split_control(name)[0])
        ):
            arms = [gap.arm for gap in family.gaps if control in gap.arm.arm.controls]
            rankings.append(_rank(control, family.baseline, arms))
    return rankings


def _rank(control: str, baseline: Entry, arms: list[Entry]) -> Ranking:
    reasons = [(entry, _why_unranked(entry)) for entry in (baseline, *arms)]
    entries = [entry for entry, reason in reasons if not reason]
    unranked = [f"{entry.name}: {reason}" for entry, reason in reasons if reason]
    pairs = list(itertools.combinations(entries, 2))
    samples = [measure_gap(arm, other).sample for arm, other in pairs]
    adjusted = adjust([sample.p if sample.n >= MIN_PAIRS else None for sample in samples])
    ahead, behind = Counter[str](), Counter[str]()  # arms ahead of, and behind, each arm
    for (arm, other), sample, p in zip(pairs, samples, adjusted, strict=True):
        if p is not None and p < ALPHA:
            better, worse = (arm, other) if sample.mean < 0 else (other, arm)
            ahead[worse.name] += 1
            behind[better.name] += 1
    ranks = [
        Rank(e.name, e.sample.mean, e.sample.n, 1 + ahead[e.name], len(entries) - behind[e.name])
        for e in sorted(entries, key=lambda entry: entry.sample.mean)
    ]
    described = [
        RankedPair(arm=arm.name, against=other.name, p_holm=p, **vars(describe_sample(sample)))
        for (arm, other), sample, p in zip(pairs, samples, adjusted, strict=True)
    ]
    match, adjust_key = split_control(control)
    quantity = next(axis for axis, name in AXES.items() if name == match)
    return Ranking(quantity, adjust_key, baseline.name, ranks, unranked, described)


def _why_unranked(entry: Entry) -> str:
    """Return the reason why an arm has neither a rank nor a place on a front; '' if it has."""
    if not is_annealed(entry.arm.config.optim):
        return "its learning rate is not annealed"
    if not entry.losses:
        return "no run is done"
    diverged = len(entry.with_status("diverged"))
    return f"{diverged} of {len(entry.records)} runs diverged" if diverged else ""


@dataclass(frozen=True)
class FrontArm:
    """One arm in the plane of cost and loss."""

    arm: str
    cost: float
    mean: float
    is_optimal: bool  # no other arm has a lower mean at the same cost or less
    is_significant: bool  # False: another one has, but the difference is not significant


@dataclass(frozen=True)
class Front:
    """Arms of one length and data set, by one cost."""

    tokens: int
    data: str  # its source
    data_fingerprint: str
    cost: str
    arms: list[FrontArm]


def find_fronts(study: Study, milliseconds: Mapping[str, float]) -> list[Front]:
    """Find the arms that no arm of the same tokens and data beats at the same cost or less.

    The rates of one arm compete on validation loss, so that the test loss of the best is not the
    luckiest of several. That an arm is dominated is adjusted by Holm over all pairs of arms at any
    rate and for any cost: in at most 5 % of studies it is said of an arm that is not.
    """
    planes: list[tuple[int, str, str, list[Priced]]] = []
    groups: dict[tuple[int, str], list[Entry]] = {}
    for entry in study.entries:
        if not _why_unranked(entry):
            data = str(entry.arm.facts.get("data_fingerprint"))
            groups.setdefault((entry.tokens, data), []).append(entry)
    for (tokens, data), entries in groups.items():
        costs = [(entry, _costs(entry.arm, milliseconds)) for entry in entries]
        for cost in costs[0][1]:
            known = [(entry, price) for entry, c in costs if (price := c[cost]) is not None]
            if len({price for _, price in known}) > 1:
                planes.append((tokens, data, cost, known))
    gaps = {
        (entry.name, other.name): measure_gap(entry, other).sample
        for *_, priced in planes
        for (entry, cost), (other, price) in itertools.permutations(priced, 2)
        if price <= cost
    }
    dominated = find_dominated(gaps)
    fronts = []
    for tokens, data, cost, priced in planes:
        best = {id(entry) for entry in _best_rates([entry for entry, _ in priced])}
        chosen = [(entry, price) for entry, price in priced if id(entry) in best]
        arms = [_place_on_front(entry, price, chosen, dominated) for entry, price in chosen]
        arms.sort(key=lambda arm: (arm.cost, arm.mean))
        source = chosen[0][0].arm.config.data.source
        fronts.append(Front(tokens, source, data, cost, arms))
    return fronts


def find_dominated(gaps: Mapping[tuple[str, str], Sample]) -> set[tuple[str, str]]:
    """Return the pairs (arm, other) whose gap is positive, by one-sided tests and Holm."""
    p_values = [sample.p_above(0) if sample.n >= MIN_PAIRS else 1.0 for sample in gaps.values()]
    return {pair for pair, p in zip(gaps, holm(p_values), strict=True) if p < ALPHA}


def _best_rates(entries: list[Entry]) -> list[Entry]:
    """Return the entry of each arm with the smallest mean validation loss."""
    by_arm: dict[str, list[Entry]] = {}
    for entry in entries:
        key = str((entry.settings_without("variant.lr"), entry.arm.controls))
        by_arm.setdefault(key, []).append(entry)

    def validation_loss(entry: Entry) -> float:
        values = [entry.records[key].val for key in entry.losses]
        known = [value for value in values if value is not None]
        return statistics.fmean(known) if known else math.inf

    return [min(at_rates, key=validation_loss) for at_rates in by_arm.values()]


def _costs(arm: Arm, milliseconds: Mapping[str, float]) -> dict[str, float | None]:
    """Return the known costs of an arm; the sizes of runs without a result may be unknown."""
    return {
        "params": float(arm.params) or None,
        "training FLOPs": arm.train_flops or None,
        "KV bytes per token": None if arm.kv_cache_numbers is None else 2.0 * arm.kv_cache_numbers,
        "ms per step": milliseconds.get(arm.name),
    }


def _place_on_front(
    entry: Entry, cost: float, priced: list[Priced], dominated: set[tuple[str, str]]
) -> FrontArm:
    mean = entry.sample.mean
    better = [
        other.name
        for other, price in priced
        if price <= cost
        and other.sample.mean <= mean
        and (price, other.sample.mean) != (cost, mean)
    ]
    is_significant = not better or any((entry.name, name) in dominated for name in better)
    return FrontArm(entry.name, cost, mean, not better, is_significant)


def read_times(path: str, study: Study) -> dict[str, float]:
    """Read milliseconds per step by arm from the output of `qkablate cost --measure --json`."""
    try:
        text = Path(path).expanduser().read_bytes()
    except (OSError, RuntimeError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise UserError(f"--times: '{path}' cannot be read: {reason}") from None
    try:
        rows = json.loads(text)
        if not isinstance(rows, list):
            raise ValueError
        times = [(dict(row), row["step_ms"]) for row in rows]
        sized = all({"variant", "d_model", "heads", "layers", "context"} <= {*r} for r, _ in times)
        if not sized or not all(is_number(ms) and ms > 0 for _, ms in times):
            raise ValueError
    except (RecursionError, ValueError, KeyError, TypeError):
        command = "`qkablate cost --measure --json`"
        raise UserError(f"--times: '{path}' is not the output of {command}") from None
    by_arm = {}
    for arm in study.arms.values():
        flat = flatten(arm.config) | {"variant": arm.variant, **vars(arm.config.model)}
        for row, ms in times:
            # A row names the MLP ratio only if it was varied; otherwise it is the default.
            shared = {"model.mlp_ratio": 4.0} | {key: row[key] for key in row if key in flat}
            if shared.items() <= flat.items():
                by_arm[arm.name] = ms
    if not by_arm:
        raise UserError(f"--times: '{path}' has no arm of this sweep at its size")
    return by_arm

"""Who is ahead, as far as anybody can tell: ranks with their range, at equal tokens, parameters or
FLOPs; and the arms that no other beats at less cost.
"""

import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qkablate.analysis.comparison.audit import is_annealed
from qkablate.analysis.comparison.gaps import Family, describe_sample, gap
from qkablate.analysis.stats import ALPHA, Sample, holm
from qkablate.analysis.study.study import Entry, Study
from qkablate.config import flatten
from qkablate.errors import UserError
from qkablate.runs.records import is_number

AXES = {"tokens": "none", "params": "params", "flops": "flops"}  # what is equal → its control


@dataclass(frozen=True)
class Ranked:
    entry: Entry
    mean: float
    n: int
    first: int  # the best and the worst rank that the runs leave possible
    last: int


@dataclass(frozen=True)
class Ranking:
    axis: str
    size: str  # the baseline's name
    rows: list[Ranked]
    unranked: list[str]  # and why
    pairs: list[tuple[str, str, Sample, float | None]]  # of all arms, with p by Holm over them


def rankings(families: list[Family]) -> list[Ranking]:
    """One for each size, length and control in which there are arms to rank."""
    found = []
    for family in families:
        for axis, control in AXES.items():
            own = [g.arm for g in family.gaps if control in g.arm.arm.controls]
            if own:
                found.append(_rank(axis, family.baseline, own))
    return found


def _rank(axis: str, baseline: Entry, arms: list[Entry]) -> Ranking:
    entries, unranked = [], []
    for entry in (baseline, *arms):
        if not is_annealed(entry.arm.config.optim):
            unranked.append(f"{entry.name}: its learning rate does not come down")
        elif not entry.losses:
            unranked.append(f"{entry.name}: no run is done")
        elif diverged := len(entry.having("diverged")):
            unranked.append(f"{entry.name}: {diverged} of {len(entry.records)} runs diverged")
        else:
            entries.append(entry)
    pairs = list(itertools.combinations(entries, 2))
    samples = [gap(one, other).sample for one, other in pairs]
    known = [number for number, sample in enumerate(samples) if sample.p is not None]
    adjusted = dict(zip(known, holm([samples[i].p or 0.0 for i in known]), strict=True))
    ahead = dict.fromkeys((entry.name for entry in entries), 0)
    behind = dict(ahead)
    for number, p in adjusted.items():
        if p < ALPHA:
            one, other = pairs[number]
            better, worse = (one, other) if samples[number].mean < 0 else (other, one)
            ahead[worse.name] += 1
            behind[better.name] += 1
    rows = [
        Ranked(
            entry,
            entry.sample.mean,
            len(entry.losses),
            1 + ahead[entry.name],
            len(entries) - behind[entry.name],
        )
        for entry in entries
    ]
    every = [
        (one.name, other.name, samples[number], adjusted.get(number))
        for number, (one, other) in enumerate(pairs)
    ]
    return Ranking(axis, baseline.name, sorted(rows, key=lambda row: row.mean), unranked, every)


def describe_ranking(ranking: Ranking) -> dict[str, Any]:
    return {
        "equal": ranking.axis,
        "size": ranking.size,
        "ranks": [
            {"arm": row.entry.name, "mean": row.mean, "n": row.n}
            | {"best_rank": row.first, "worst_rank": row.last}
            for row in ranking.rows
        ],
        "unranked": ranking.unranked,
        "pairs": [
            {"arm": one, "against": other, **describe_sample(sample), "p_holm": p}
            for one, other, sample, p in ranking.pairs
        ],
    }


def fronts(study: Study, milliseconds: Mapping[str, float]) -> list[dict[str, Any]]:
    """Of all arms that saw as many tokens of the same data: which are beaten by none that costs no
    more. `surely` is false where an arm is beaten by its mean alone: its runs leave it possible
    that it is not.
    """
    found = []
    groups: dict[tuple[int, str], list[Entry]] = {}
    for entry in study.entries:
        done = entry.losses and not entry.having("diverged")
        if done and is_annealed(entry.arm.config.optim):
            data = str(entry.arm.facts.get("data_fingerprint"))
            groups.setdefault((entry.tokens, data), []).append(entry)
    for (tokens, _), entries in groups.items():
        for cost in ("params", "training FLOPs", "KV bytes per token", "ms per step"):
            priced = {e.name: _cost(cost, e, milliseconds) for e in entries}
            known = [e for e in entries if priced[e.name] is not None]
            if len({priced[e.name] for e in known}) > 1:
                rows = [_on_front(e, known, priced) for e in known]
                rows.sort(key=lambda row: (row["cost"], row["mean"]))
                found.append({"tokens": tokens, "cost": cost, "arms": rows})
    return found


def _cost(cost: str, entry: Entry, milliseconds: Mapping[str, float]) -> float | None:
    arm = entry.arm
    if cost == "ms per step":
        return milliseconds.get(arm.name)
    if cost == "KV bytes per token":
        return None if arm.cached is None else 2.0 * arm.cached  # of 16-bit numbers
    # Of runs without a result, sizes may be unknown.
    return (float(arm.params) if cost == "params" else arm.flops) or None


def _on_front(entry: Entry, entries: list[Entry], priced: Mapping[str, Any]) -> dict[str, Any]:
    cost, mean = priced[entry.name], entry.sample.mean
    beaten_by = []
    for other in entries:
        theirs = other.sample.mean
        if (priced[other.name], theirs) != (cost, mean) and priced[other.name] <= cost:
            beaten_by += [other] * (theirs <= mean)
    surely = any(gap(entry, other).sample.p_above(0) < ALPHA for other in beaten_by)
    return {
        "arm": entry.name,
        "cost": cost,
        "mean": mean,
        "on_front": not beaten_by,
        "surely": surely or not beaten_by,
    }


def read_times(path: str, study: Study) -> dict[str, float]:
    """Milliseconds a step by arm, from what `qkablate cost --measure --json` printed: of the arms
    whose variant and sizes a row of it has.
    """
    try:
        rows = json.loads(Path(path).expanduser().read_text(encoding="utf-8"))
        if not isinstance(rows, list):
            raise ValueError
        times = [(dict(row), row["step_ms"]) for row in rows]
        named = all({"variant", "d_model", "heads", "layers", "context"} <= {*r} for r, _ in times)
        if not named or not all(is_number(ms) and ms > 0 for _, ms in times):
            raise ValueError
    except (OSError, RuntimeError, ValueError, KeyError, TypeError):
        raise UserError(
            f"--times: '{path}' is not what `qkablate cost --measure --json` prints"
        ) from None
    found = {}
    for arm in study.manifest.arms.values():
        flat = flatten(arm.config) | {"variant": arm.variant, **vars(arm.config.model)}
        for row, ms in times:
            shared = {key: value for key, value in row.items() if key in flat}
            # A row says of the MLP only where it was varied: else it is the default.
            ratio = {"model.mlp_ratio": row.get("model.mlp_ratio", 4.0)}
            if all(flat[key] == value for key, value in (shared | ratio).items()):
                found[arm.name] = ms
    if not found:
        raise UserError(f"--times: '{path}' has none of this sweep's arms at their sizes")
    return found

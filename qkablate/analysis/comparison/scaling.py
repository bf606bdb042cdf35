"""The gap over whole trainings of several lengths, and over sizes. What tokens or parameters an arm
is worth is read off the baseline's own curve, from three points on, never from the middle of a
run.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from qkablate.analysis.comparison.audit import is_annealed
from qkablate.analysis.comparison.curves import slopes
from qkablate.analysis.comparison.gaps import Family, Gap, describe_sample
from qkablate.analysis.stats import Sample
from qkablate.analysis.study.study import Entry, Seeds

LEAST = 3  # points that a curve is drawn through
_LENGTH = ("train.steps", "train.tokens", "train.eval_every", "optim.warmup")
_SIZES = ("model.d_model", "model.layers")


@dataclass(frozen=True)
class Series:
    """The gaps of one arm against its baseline, along what grows."""

    along: str  # tokens or parameters
    name: str
    x: list[float]  # of the baseline
    gaps: list[Gap]


def series(families: Sequence[Family]) -> list[Series]:
    """Arms that differ in their length alone, and such as differ in one of the keys of size."""
    found = []
    for along, keys in (("tokens", _LENGTH), *(("parameters", (key,)) for key in _SIZES)):
        groups: dict[tuple[Any, ...], list[Gap]] = {}
        for family in families:
            for one in family.gaps:
                annealed = all(is_annealed(entry.arm.config.optim) for entry in _both(one))
                if not annealed or not _x(along, one.baseline):
                    continue
                groups.setdefault(_without(one, keys), []).append(one)
        for gaps in groups.values():
            by_x = {_x(along, one.baseline): one for one in gaps}
            if len(by_x) > 1:
                x = sorted(by_x)
                ordered = [by_x[value] for value in x]
                found.append(Series(along, _name(ordered[0], along, keys), x, ordered))
    return found


def _x(along: str, entry: Entry) -> float:
    return float(entry.tokens if along == "tokens" else entry.arm.params)


def _without(found: Gap, keys: tuple[str, ...]) -> tuple[Any, ...]:
    """What two gaps share that lie on one line. What a control solved for moves with the size."""
    pays = {"model.mlp_ratio"} if found.arm.arm.controls != ["none"] else set()
    apart = {*keys, *pays, "threads", "optim.lr"}
    own = [sorted((k, v) for k, v in e.arm.words.items() if k not in apart) for e in _both(found)]
    one_rate = found.arm.name == found.arm.arm.name
    return str(own), tuple(found.arm.arm.controls), None if one_rate else found.arm.rate


def _both(found: Gap) -> tuple[Entry, Entry]:
    return found.arm, found.baseline


def _name(found: Gap, along: str, keys: tuple[str, ...]) -> str:
    arm = found.arm.arm
    model, own = arm.config.model, [arm.variant]
    for key, text in (("d_model", f"d{model.d_model}"), ("heads", f"h{model.heads}")):
        if f"model.{key}" not in keys:
            own.append(text)
    control = [] if "none" in arm.controls else arm.controls
    return "-".join([*own, *control])


def growth(along: Series) -> Sample:
    """Each seed's change of the gap per doubling of tokens, over three whole trainings or more."""
    if along.along != "tokens" or len(along.gaps) < LEAST:
        return Sample(())
    keys = _common(along)
    if not keys:
        return Sample(())
    gaps_ST = np.array([[one.pairs[key] for one in along.gaps] for key in keys])
    return slopes([int(x) for x in along.x], gaps_ST)


def _common(along: Series) -> list[Seeds]:
    """Seeds of which every pair is there, in order."""
    first, *rest = along.gaps
    return [key for key in first.pairs if all(key in other.pairs for other in rest)]


def equivalent(along: Series) -> Sample:
    """What the arm's longest training (or largest size) is worth: the natural logarithm of how many
    times the tokens (or parameters) the baseline needs for the same loss, a number a seed. Empty
    where it was not measured: fewer than three points, or far beyond them.
    """
    if len(along.gaps) < LEAST:
        return Sample(())
    x = [math.log(value) for value in along.x]
    found = []
    for key in _common(along):
        curve = [one.baseline.losses[key] for one in along.gaps]
        worth = _read_off(x, curve, along.gaps[-1].arm.losses[key])
        if worth is None:
            return Sample(())
        found.append(worth - x[-1])
    return Sample(tuple(found))


def _read_off(x: list[float], losses: list[float], loss: float) -> float | None:
    """Where a falling curve has this loss: between its points, and as far beyond the last as that
    is from the one before.
    """
    if any(after >= before for before, after in pairwise(losses)):
        return None  # the baseline itself does not gain by more
    if loss > losses[0]:
        return None
    for i in range(len(x) - 1):
        if loss >= losses[i + 1] or i == len(x) - 2:
            part = (losses[i] - loss) / (losses[i] - losses[i + 1])
            return x[i] + part * (x[i + 1] - x[i]) if part <= 2 else None
    return None


def describe_series(along: Series) -> dict[str, Any]:
    worth = equivalent(along)
    interval = worth.interval()
    what = "equivalent_tokens" if along.along == "tokens" else "equivalent_parameters"
    return {
        "arm": along.name,
        "along": along.along,
        "points": [
            {"at": x, "arm": one.arm.name, **describe_sample(one.sample)}
            for x, one in zip(along.x, along.gaps, strict=True)
        ],
        "growth_per_doubling": describe_sample(growth(along)) if along.along == "tokens" else None,
        what: "not measured"
        if not worth.n
        else {
            "times": math.exp(worth.mean),
            "interval": interval and [math.exp(side) for side in interval],
            "n": worth.n,
        },
    }

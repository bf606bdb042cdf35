"""A claim: a hypothesis in parts, written down before its runs. Its hash is what its seeds are made
of: a claim that is changed has other seeds, so that no run of before can count for it.
"""

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from qkablate.analysis.comparison.audit import is_annealed
from qkablate.analysis.comparison.ranking import AXES
from qkablate.analysis.comparison.scaling import LEAST
from qkablate.config import flatten
from qkablate.config.sweep import as_word
from qkablate.errors import UserError
from qkablate.sweeps.planning.manifest import Arm

MEASURES = ("gap", "spread")
HORIZONS = ("longest", "each", "growth")
# What changes no number: not part of a claim.
FREE = (
    *("out", "device", "threads", "workers", "per_gpu", "on_failure", "track"),
    "engine",
    *("data.cache", "train.checkpoint_every", "diagnose"),
)
Selector = Mapping[str, Any]


@dataclass(frozen=True)
class PartSpec:
    """What one part says: where the gap of an arm lies."""

    kind: str
    margin: float  # nats; with horizon=growth, nats per doubling of tokens
    arm: Selector
    against: Selector
    of: str  # gap, or spread: its standard deviation from pair to pair
    axis: str  # what is equal: tokens, params, flops
    horizon: str  # longest, each: of the lengths of training; growth: the gap's change with them


@dataclass(frozen=True)
class Claim:
    name: str
    says: str
    source: str
    untestable: str | None = None  # why there is nothing to run yet
    scale: str = ""
    seeds: tuple[int, ...] = ()  # n; several are looks, at which α is spent bit by bit
    tuning_seeds: int = 0  # 0: every arm at the rate it is given
    grid: Mapping[str, str] = field(default_factory=dict)
    words: Mapping[str, str] = field(default_factory=dict)  # of the grid, on the command line
    where: tuple[str, ...] = ()
    baseline: Any = "standard"
    parts: Mapping[str, PartSpec] = field(default_factory=dict)

    @property
    def content(self) -> dict[str, Any]:
        """All that decides a verdict."""
        own = dataclasses.asdict(self)
        return {key: own[key] for key in own if key not in ("source", "untestable")}

    @property
    def hash(self) -> str:
        text = json.dumps(self.content, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def title(self) -> str:
        return f"{self.name} ({self.scale})"

    @property
    def folder_name(self) -> str:
        return f"{self.name}-{self.scale}-{self.hash[:12]}"

    def seeds_of(self, purpose: str, count: int) -> list[int]:
        """`final` or `tuning` ones: whoever wrote the claim could not know them before."""
        texts = (f"{self.hash}/{purpose}/{number}" for number in range(count))
        return [int.from_bytes(hashlib.sha256(t.encode()).digest()[:4]) >> 1 for t in texts]


@dataclass(frozen=True)
class Comparison:
    """What one part asks of the arms of a sweep."""

    part: str
    spec: PartSpec
    name: str
    pairs: list[tuple[str, str]]  # arm and the one it stands against; several for growth


def comparisons(claim: Claim, arms: Iterable[Arm]) -> list[Comparison]:
    """What the parts ask of these arms; UserError where an arm that is asked for is not there."""
    arms = list(arms)
    found = []
    for name, spec in claim.parts.items():
        pairs = _pairs(claim, spec, arms)
        if not pairs:
            sides = " against ".join(
                ", ".join(f"{k}={v}" for k, v in side.items()) for side in (spec.arm, spec.against)
            )
            raise UserError(f"parts.{name}: the grid has no {sides} at equal {spec.axis}")
        groups: dict[tuple[str, ...], list[tuple[Arm, Arm]]] = {}
        for one, other in sorted(pairs, key=lambda pair: pair[0].tokens):
            groups.setdefault(_place(claim, one, other), []).append((one, other))
        for place, group in groups.items():
            lengths = {one.tokens for one, _ in group}
            if spec.horizon == "growth":
                _check_growth(name, group)
                names = [(one.name, other.name) for one, other in group]
                found.append(Comparison(name, spec, _called(name, place), names))
                continue
            for one, other in group:
                if spec.horizon == "each" or one.tokens == max(lengths):
                    several = spec.horizon == "each" and len(lengths) > 1
                    at = (*place, f"{one.tokens:,} tokens") if several else place
                    pair = (one.name, other.name)
                    found.append(Comparison(name, spec, _called(name, at), [pair]))
    return found


def _check_growth(part: str, group: list[tuple[Arm, Arm]]) -> None:
    if len({one.tokens for one, _ in group}) < LEAST:
        raise UserError(
            f"parts.{part}: growth is measured over {LEAST} lengths of training or more"
        )
    for arm in (arm for pair in group for arm in pair):
        if not is_annealed(arm.config.optim):
            raise UserError(
                f"parts.{part}: growth takes whole schedules, and the learning rate of {arm.name}"
                " does not come down"
            )


def _called(name: str, place: tuple[Any, ...]) -> str:
    return " ".join([name, *map(str, place)])


def _place(claim: Claim, one: Arm, other: Arm) -> tuple[str, ...]:
    """Where in the grid a pair stands, besides its length."""
    keys = [key for key in claim.grid if "," in claim.grid[key] or "(" in claim.grid[key]]
    flat, beside = _flat(one), _flat(other)
    shared = [k for k in keys if k in flat and flat[k] == beside[k]]
    return tuple(
        f"{key.rpartition('.')[2]}={flat[key]}"
        for key in shared
        if key != "variant" and not key.startswith("train.")
    )


def _pairs(claim: Claim, spec: PartSpec, arms: list[Arm]) -> list[tuple[Arm, Arm]]:
    ones = [arm for arm in arms if _is(arm, spec.arm) and _is_under(arm, spec.axis)]
    others = [arm for arm in arms if _is(arm, spec.against) and _is_under(arm, spec.axis)]
    pairs = [(one, other) for one in ones for other in others if one.name != other.name]
    # They agree in all that the claim varies and neither side was asked for by.
    keys = [key for key in claim.grid if key not in {"variant", *spec.arm, *spec.against}]
    return [
        (one, other)
        for one, other in pairs
        if all(one.words[k] == other.words[k] for k in keys if k in one.words and k in other.words)
    ]


def _is(arm: Arm, selector: Selector) -> bool:
    flat = _flat(arm)
    typed = arm.words.get("variant", "standard")
    return all(
        value in (arm.variant, typed) if key == "variant" else _is_same(flat.get(key), value)
        for key, value in selector.items()
    )


def _is_same(one: str | None, other: str) -> bool:
    """4 and 4.0 are."""
    try:
        return one == other or float(one or "") == float(other)
    except ValueError:
        return False


def _is_under(arm: Arm, axis: str) -> bool:
    """Whether the arm stands in the grid under what holds this equal. A baseline needs nothing
    solved for it, and stands under all.
    """
    return AXES[axis] in arm.controls or (arm.baseline is None and arm.mismatch is None)


def _flat(arm: Arm) -> dict[str, str]:
    return {key: as_word(value) for key, value in flatten(arm.config).items()}

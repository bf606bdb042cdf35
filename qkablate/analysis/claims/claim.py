"""Claims: hypotheses in parts; their seeds follow from their hash, so no earlier run counts."""

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from qkablate.analysis.comparison.audit import is_annealed
from qkablate.analysis.comparison.ranking import AXES
from qkablate.analysis.comparison.scaling import MIN_POINTS
from qkablate.config import Role, flatten
from qkablate.config.sweep import as_word
from qkablate.errors import UserError
from qkablate.sweeps.planning.manifest import Arm

MEASURES = ("gap", "spread")
HORIZONS = ("longest", "each", "growth")
# Keys that change no number: not part of a claim.
NON_CLAIM_KEYS = Role.LOCAL | Role.ONE_PER_SWEEP | Role.LAUNCH
Selector = Mapping[str, Any]


@dataclass(frozen=True)
class PartSpec:
    """Specification of one part: a bound on the gap of an arm."""

    kind: str
    margin: float  # nats; with horizon=growth, nats per doubling of tokens
    arm: Selector
    against: Selector
    of: str  # gap, or spread: its standard deviation from pair to pair
    axis: str  # what is equal: tokens, params, flops
    horizon: str  # longest, each: of the lengths of training; growth: the gap's change with them
    task: bool = False  # on the task of its scale, not on the data of the grid


@dataclass(frozen=True)
class Claim:
    """A registered hypothesis with everything that decides its verdict."""

    name: str
    says: str
    source: str
    untestable: str | None = None  # the reason, if it cannot be run yet
    scale: str = ""
    seeds: tuple[int, ...] = ()  # n; several are interim looks, which share α
    tuning_seeds: int = 0  # 0: no tuning
    grid: Mapping[str, str] = field(default_factory=dict)
    words: Mapping[str, str] = field(default_factory=dict)  # grid's keys set on the command line
    filter: tuple[str, ...] = ()
    baseline: Any = "standard"
    task: Mapping[str, Any] = field(default_factory=dict)  # settings of the arms on the task
    parts: Mapping[str, PartSpec] = field(default_factory=dict)

    @property
    def content(self) -> dict[str, Any]:
        """Fields that decide the verdict."""
        fields = dataclasses.asdict(self)
        return {key: fields[key] for key in fields if key not in ("source", "untestable")}

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
        """Derive the `final` or `tuning` seeds, unknown to the author of the claim."""
        texts = (f"{self.hash}/{purpose}/{number}" for number in range(count))
        return [int.from_bytes(hashlib.sha256(t.encode()).digest()[:4]) >> 1 for t in texts]


@dataclass(frozen=True)
class Comparison:
    """The arm and its opponent that a part compares; for growth, a pair per training length."""

    part: str
    spec: PartSpec
    name: str
    pairs: list[tuple[str, str]]  # arm and its opponent; several for growth


def find_comparisons(claim: Claim, arms: Iterable[Arm]) -> list[Comparison]:
    """Return the comparisons that the parts call for; UserError if an arm is missing."""
    arms = list(arms)
    comparisons = []
    for name, spec in claim.parts.items():
        pairs = _find_pairs(claim, spec, arms)
        if not pairs:
            sides = " against ".join(
                ", ".join(f"{k}={v}" for k, v in side.items()) for side in (spec.arm, spec.against)
            )
            raise UserError(f"parts.{name}: the grid has no {sides} at equal {spec.axis}")
        groups: dict[str, list[tuple[Arm, Arm]]] = {}
        for arm, other in sorted(pairs, key=lambda pair: pair[0].tokens):
            title = " ".join([name, *_shared_values(claim, spec, arm, other)])
            groups.setdefault(title, []).append((arm, other))
        for title, group in groups.items():
            names = [(arm.name, other.name) for arm, other in group]
            lengths = [arm.tokens for arm, _ in group]
            if spec.horizon == "growth":
                _check_growth(name, group)
                comparisons.append(Comparison(name, spec, title, names))
                continue
            for tokens, pair in zip(lengths, names, strict=True):
                if spec.horizon == "each" or tokens == max(lengths):
                    several = spec.horizon == "each" and len({*lengths}) > 1
                    at = f" {tokens:,} tokens" if several else ""
                    comparisons.append(Comparison(name, spec, f"{title}{at}", [pair]))
    return comparisons


def _check_growth(part: str, group: list[tuple[Arm, Arm]]) -> None:
    if len({arm.tokens for arm, _ in group}) < MIN_POINTS:
        raise UserError(
            f"parts.{part}: growth is measured over {MIN_POINTS} lengths of training or more"
        )
    for arm in itertools.chain(*group):
        if not is_annealed(arm.config.optim):
            raise UserError(
                f"parts.{part}: growth needs whole schedules, and the learning rate of {arm.name}"
                " is not annealed"
            )


def _shared_values(claim: Claim, spec: PartSpec, arm: Arm, other: Arm) -> tuple[str, ...]:
    """Return the varied settings that a pair shares, besides its length."""
    keys = [key for key in claim.grid if "," in claim.grid[key] or "(" in claim.grid[key]]
    flat, other_flat = ({**side.overrides, **_flatten(side)} for side in (arm, other))
    return tuple(
        f"{key.rpartition('.')[2]}={flat[key]}"
        for key in keys
        if key in flat and flat[key] == other_flat.get(key)
        if key != "variant" and not (spec.task and key in claim.task)
        if not key.startswith("train.")
    )


def _find_pairs(claim: Claim, spec: PartSpec, arms: list[Arm]) -> list[tuple[Arm, Arm]]:
    comparable = [
        arm
        for arm in arms
        # Baselines are under the control of every axis.
        if AXES[spec.axis] in arm.controls or (arm.baseline is None and arm.mismatch is None)
        # Trained on the data of the part: those of the grid, or the task.
        if not claim.task or _is_on_task(arm, claim.task) == spec.task
    ]
    firsts = [arm for arm in comparable if _matches(arm, spec.arm)]
    others = [arm for arm in comparable if _matches(arm, spec.against)]
    # The two agree in every varied key that selects neither side.
    keys = claim.grid.keys() - {"variant", *spec.arm, *spec.against}

    def agree(a: Mapping[str, str], b: Mapping[str, str]) -> bool:
        return all(a[key] == b[key] for key in keys & a.keys() & b.keys())

    pairs = itertools.product(firsts, others)
    return [(a, b) for a, b in pairs if a.name != b.name and agree(a.overrides, b.overrides)]


def _is_on_task(arm: Arm, task: Mapping[str, Any]) -> bool:
    return all(_is_same(arm.overrides.get(key), as_word(value)) for key, value in task.items())


def _matches(arm: Arm, selector: Selector) -> bool:
    flat = _flatten(arm)
    typed = arm.overrides.get("variant", "standard")
    return all(
        value in (arm.variant, typed) if key == "variant" else _is_same(flat.get(key), value)
        for key, value in selector.items()
    )


def _is_same(value: str | None, other: str) -> bool:
    """Compare two values as numbers if they are numbers: 4 equals 4.0."""
    try:
        return value == other or float(value or "") == float(other)
    except ValueError:
        return False


def _flatten(arm: Arm) -> dict[str, str]:
    return {key: as_word(value) for key, value in flatten(arm.config).items()}

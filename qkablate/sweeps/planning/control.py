"""The size at which an arm costs what its baseline costs, in whole units.

The width of the MLP is adjusted, alone or after d_model or layers have moved in whole steps. With
all other keys fixed, a cost is affine in the MLP's width, so two sizes give it for every width; up
to rounding, where the MLPs of an encoder and a decoder differ in width.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Protocol

from qkablate.config import ModelConfig, stream_width
from qkablate.config.sweep import ControlConfig
from qkablate.config.variant import mlp_share, mlp_units
from qkablate.errors import UserError

REACH = 16  # steps searched on either side of where the arm's own MLP ratio meets the target
_GAP = 8  # refused steps in a row after which all are (rope refuses some head widths)
UNIT = {"params": "parameters", "flops": "training FLOPs per token"}
_Changes = Mapping[str, int | float]


class ModelSize(Protocol):
    """The cost of a model, such as an arm's."""

    @property
    def params(self) -> int: ...  # without embeddings
    @property
    def flops(self) -> float: ...  # of training, per token (forward and backward)


_Measure = Callable[[_Changes], ModelSize]


@dataclass(frozen=True)
class ControlMatch:
    """The adjusted keys of a matched arm."""

    changes: dict[str, int | float]
    mismatch: float  # (cost - target) / target


class ControlOutOfReach(Exception):
    """No size of this arm costs what its baseline costs; the text is the reason, in one line."""


def match_baseline(
    control: ControlConfig, target: ModelSize, start: ModelConfig, measure: _Measure
) -> ControlMatch:
    """Return the changes that make the arm at `start` cost as much as `target`.

    `measure` returns the arm's size with some keys changed; it raises UserError where these make no
    model. Raise ControlOutOfReach if no size is within the tolerance.
    """
    search = _Search(control, target, start, measure)
    unchanged = search.size({})
    if unchanged is not None and search.mismatch(unchanged) == 0:
        return ControlMatch({}, 0.0)
    if start.mlp_ratio == 0:
        raise ControlOutOfReach("has no MLP whose width could be adjusted (model.mlp_ratio is 0)")
    options = search.options()
    for option in sorted(options, key=lambda o: (o.distance, abs(o.n - search.start_n), o.n)):
        if search.fits(option):
            changes = search.changes(option.n, option.units)
            if (size := search.size(changes)) is not None:
                return ControlMatch(changes, search.mismatch(size))
    raise ControlOutOfReach(search.reason(options))


@dataclass(frozen=True)
class _Candidate:
    """The best MLP at n steps of the coarse key."""

    n: int
    units: int  # below 1: nothing is left for the MLP
    mismatch: float
    distance: Fraction  # of the MLP's ratio from the one at the start
    min_distance: float  # a lower bound of the distance, here and at all steps further out
    cost_without_mlp: float


class _Search:
    """One arm at all its sizes: n whole steps of the coarse key, and a width of the MLP."""

    def __init__(
        self, control: ControlConfig, target: ModelSize, start: ModelConfig, measure: _Measure
    ) -> None:
        self.control, self.start, self._measure = control, start, measure
        self.target = self.cost(target)
        self.key = "layers" if control.adjust == "layers" else "d_model"
        self.step = {
            "mlp": start.d_model,  # one step: only the MLP changes
            # By one for each head: coarser steps would leave the whole difference to the MLP.
            "d_model": start.heads * (2 if start.position == "rope" else 1),
            "layers": 1,
        }[control.adjust]
        self.start_n: int = max(1, getattr(start, self.key) // self.step)
        self.refusal = ""  # why the first refused size was refused
        self._sizes: dict[tuple[tuple[str, int | float], ...], ModelSize | None] = {}

    def cost(self, size: ModelSize) -> float:
        return size.params if self.control.match == "params" else size.flops

    def mismatch(self, size: ModelSize) -> float:
        return (self.cost(size) - self.target) / self.target

    def fits(self, option: _Candidate) -> bool:
        return option.units >= 1 and abs(option.mismatch) <= self.control.tolerance

    def size(self, changes: _Changes) -> ModelSize | None:
        """Return the size, measured once; None where it is refused."""
        key = tuple(changes.items())
        if key not in self._sizes:
            try:
                self._sizes[key] = self._measure(changes)
            except UserError as error:
                self._sizes[key] = None
                self.refusal = self.refusal or str(error)
        return self._sizes[key]

    def changes(self, n: int, units: int) -> dict[str, int | float]:
        """Return the keys whose values differ from those at the start."""
        changes: dict[str, int | float] = {}
        d_model = self._d_model(n)
        if n * self.step != getattr(self.start, self.key):
            changes[f"model.{self.key}"] = n * self.step
        if units != mlp_units(self.start, d_model):
            ratio = units / d_model / mlp_share(self.start)
            # As the model reads it.
            assert mlp_units(replace(self.start, mlp_ratio=ratio), d_model) == units
            changes["model.mlp_ratio"] = ratio
        return changes

    def options(self) -> list[_Candidate]:
        """Return the options around the crossing, outwards until no better one can follow."""
        if self.control.adjust == "mlp":
            only = self._solve(self.start_n)
            return [] if only is None else [only]
        crossing, best = self._crossing(), math.inf
        options = []
        for side in (
            range(crossing, max(0, crossing - REACH), -1),
            range(crossing + 1, crossing + 1 + REACH),
        ):
            for n in side:
                if (option := self._solve(n)) is None:
                    continue
                options.append(option)
                if option.units < 1 or option.min_distance > best:
                    break
                if self.fits(option):
                    best = min(best, float(option.distance))
        return options

    def reason(self, options: list[_Candidate]) -> str:
        with_mlp = [option for option in options if option.units >= 1]
        if not options or any(self.fits(option) for option in with_mlp):
            return self.refusal
        nearest = min(with_mlp or options, key=lambda option: abs(option.mismatch))
        at = "" if self.control.adjust == "mlp" else f" at model.{self.key}={nearest.n * self.step}"
        if with_mlp:
            tried = f" of {len(options)} sizes" if len(options) > 1 else ""
            return (
                f"the nearest{tried}, an MLP of {nearest.units:,} units{at}, misses by"
                f" {_percent(nearest.mismatch)} (tolerance {_percent(self.control.tolerance)})"
            )
        return (
            f"needs an MLP of {nearest.units:,} units{at} (without one it has"
            f" {nearest.cost_without_mlp:,.0f} {UNIT[self.control.match]}, the baseline"
            f" {self.target:,.0f})"
        )

    def _d_model(self, n: int) -> int:
        return self.start.d_model if self.key == "layers" else n * self.step

    def _nominal(self, n: int) -> int:
        """Return the MLP's width at the ratio of the start."""
        return max(1, mlp_units(self.start, self._d_model(n)))

    def _cost_at(self, n: int, units: int) -> float | None:
        size = self.size(self.changes(n, units))
        return None if size is None else self.cost(size)

    def _solve(self, n: int) -> _Candidate | None:
        """Return the MLP that meets the target best at n steps; None where n is refused."""
        d_model, nominal = self._d_model(n), self._nominal(n)
        other = nominal - 1 if nominal > 1 else 2
        # The MLP of an encoder of another width has the same ratio, rounded to whole units.
        rounds = stream_width(self.start, "encoder") != self.start.d_model
        if rounds:
            other = nominal + d_model  # one more in the ratio, in whole units on both sides
        cost, other_cost = self._cost_at(n, nominal), self._cost_at(n, other)
        if cost is None or other_cost is None:
            return None
        slope = (cost - other_cost) / (nominal - other)
        exact = nominal + (self.target - cost) / slope

        def mismatch(units: int) -> float:
            exact_cost = self._cost_at(n, units) if rounds and units >= 1 else None
            linear_cost = cost + (units - nominal) * slope
            return ((linear_cost if exact_cost is None else exact_cost) - self.target) / self.target

        below = math.floor(exact)
        near = range(below - 1, below + 3) if rounds else (below, below + 1)
        units = min(near, key=lambda m: (abs(mismatch(m)), abs(m - nominal)))
        ratio = self.start.mlp_ratio * mlp_share(self.start)
        return _Candidate(
            n=n,
            units=units,
            mismatch=mismatch(units),
            distance=abs(Fraction(units, d_model) - Fraction(ratio)),
            # Unrounded, the ratio only falls as n grows; rounding moves it by half of this.
            min_distance=abs(exact / d_model - ratio) - 1 / d_model,
            cost_without_mlp=cost - nominal * slope,
        )

    def _crossing(self) -> int:
        """Return the last n, or 0, at which the start's MLP ratio costs at most the target."""
        low, high = 0, self.start_n
        while self._is_affordable(high):
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._is_affordable(middle) else (low, middle)
        return low

    def _is_affordable(self, n: int) -> bool:
        """Treat a refused size as the next larger one, so that the answer changes only once."""
        for larger in range(n, n + _GAP):
            cost = self._cost_at(larger, self._nominal(larger))
            if cost is not None:
                return cost <= self.target
        return False


def _percent(part: float) -> str:
    return f"{100 * abs(part):.3g} %"

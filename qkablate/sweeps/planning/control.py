"""The size at which an arm costs what its baseline costs, in whole units.

The MLP pays, alone or after d_model or layers have moved in whole steps. At fixed other keys a cost
is affine in the MLP's width, so two sizes price all widths.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction

from qkablate.config import ModelConfig
from qkablate.config.sweep import ControlConfig
from qkablate.errors import UserError

REACH = 16  # steps looked at on either side of where the target is met at the arm's own MLP ratio
GAP = 8  # so many steps refused in a row are taken for all (rope refuses some head widths)
UNIT = {"params": "parameters", "flops": "training FLOPs per token"}


@dataclass(frozen=True)
class Size:
    params: int  # embeddings apart: what is compared
    total: int  # with them
    flops: float  # of training, per token (forward and backward)


@dataclass(frozen=True)
class Matched:
    changes: dict[str, int | float]  # the keys of the config that pay
    size: Size
    mismatch: float  # (own - target) / target


class OutOfReach(Exception):
    """No size of this arm costs what its baseline costs; says why in one line."""


def match(
    control: ControlConfig,
    target: Size,
    start: ModelConfig,
    measure: Callable[[Mapping[str, int | float]], Size],
) -> Matched:
    """The keys that make the arm which starts at `start` cost as much as `target`. `measure` gives
    the arm's size with some keys changed, or UserError where that has no meaning.
    """
    arm = _Arm(control, target, start, measure)
    own = arm.size({})
    if own is not None and arm.mismatch(own) == 0:
        return Matched({}, own, 0.0)
    if start.mlp_ratio == 0:
        raise OutOfReach("has no MLP that could pay (model.mlp_ratio is 0)")
    options = arm.options()
    for option in sorted(options, key=lambda o: (o.distance, abs(o.n - arm.own), o.n)):
        if arm.fits(option):
            changes = arm.changes(option.n, option.units)
            if (size := arm.size(changes)) is not None:
                return Matched(changes, size, arm.mismatch(size))
    raise OutOfReach(arm.reason(options))


@dataclass(frozen=True)
class _Option:
    """n steps of the coarse key, and the MLP that then comes nearest to the target."""

    n: int
    units: int  # below 1: nothing is left for the MLP
    mismatch: float
    distance: Fraction  # of the MLP's ratio from the one at the start
    least: float  # what the distance is at least, here and at all steps further out
    bare: float  # the cost of everything but the MLP


class _Arm:
    """One arm at all its sizes; of the coarse key it has n whole steps (one, where only the MLP
    moves).
    """

    def __init__(
        self,
        control: ControlConfig,
        target: Size,
        start: ModelConfig,
        measure: Callable[[Mapping[str, int | float]], Size],
    ) -> None:
        self.control, self.start, self._measure = control, start, measure
        self.target = self.cost(target)
        self.key = "layers" if control.knob == "layers" else "d_model"
        self.step = {
            "mlp": start.d_model,
            # Heads that are multiples of 8 wide stay so; others keep what they share with 8.
            "d_model": start.heads * math.gcd(8, start.d_model // start.heads),
            "layers": 1,
        }[control.knob]
        self.own: int = max(1, getattr(start, self.key) // self.step)
        self.refusal = ""  # why the first size that was refused was
        self._known: dict[tuple[tuple[str, int | float], ...], Size | None] = {}

    def cost(self, size: Size) -> float:
        return size.params if self.control.match == "params" else size.flops

    def mismatch(self, size: Size) -> float:
        return (self.cost(size) - self.target) / self.target

    def fits(self, option: _Option) -> bool:
        return option.units >= 1 and abs(option.mismatch) <= self.control.tolerance

    def size(self, changes: Mapping[str, int | float]) -> Size | None:
        """Measured once; None where it is refused."""
        key = tuple(changes.items())
        if key not in self._known:
            try:
                self._known[key] = self._measure(changes)
            except UserError as error:
                self._known[key] = None
                self.refusal = self.refusal or str(error)
        return self._known[key]

    def changes(self, n: int, units: int) -> dict[str, int | float]:
        """Of the start; what the config says already is not written anew."""
        changes: dict[str, int | float] = {}
        d_model = self._d_model(n)
        if n * self.step != getattr(self.start, self.key):
            changes[f"model.{self.key}"] = n * self.step
        if units != round(self.start.mlp_ratio * d_model):
            ratio = units / d_model
            assert round(ratio * d_model) == units  # as the model reads it
            changes["model.mlp_ratio"] = ratio
        return changes

    def options(self) -> list[_Option]:
        """Those around the crossing, outwards until no better one can come."""
        if self.control.knob == "mlp":
            only = self._solve(self.own)
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
                if option.units < 1 or option.least > best:
                    break
                if self.fits(option):
                    best = min(best, float(option.distance))
        return options

    def reason(self, options: list[_Option]) -> str:
        """Why none of these is a match."""
        whole = [option for option in options if option.units >= 1]
        if not options or any(self.fits(option) for option in whole):
            return self.refusal
        nearest = min(whole or options, key=lambda option: abs(option.mismatch))
        at = "" if self.control.knob == "mlp" else f" at model.{self.key}={nearest.n * self.step}"
        if whole:
            tried = f" of {len(options)} sizes" if len(options) > 1 else ""
            return (
                f"the nearest{tried}, an MLP of {nearest.units:,} units{at}, misses by"
                f" {_percent(nearest.mismatch)} (tolerance {_percent(self.control.tolerance)})"
            )
        return (
            f"needs an MLP of {nearest.units:,} units{at} (without one it comes to"
            f" {nearest.bare:,.0f} {UNIT[self.control.match]}, the baseline to {self.target:,.0f})"
        )

    def _d_model(self, n: int) -> int:
        return self.start.d_model if self.key == "layers" else n * self.step

    def _nominal(self, n: int) -> int:
        """The MLP's width at the ratio of the start."""
        return max(1, round(self.start.mlp_ratio * self._d_model(n)))

    def _cost_at(self, n: int, units: int) -> float | None:
        size = self.size(self.changes(n, units))
        return None if size is None else self.cost(size)

    def _solve(self, n: int) -> _Option | None:
        d_model, nominal = self._d_model(n), self._nominal(n)
        other = nominal - 1 if nominal > 1 else 2
        cost, neighbour = self._cost_at(n, nominal), self._cost_at(n, other)
        if cost is None or neighbour is None:
            return None
        slope = (cost - neighbour) / (nominal - other)
        exact = nominal + (self.target - cost) / slope

        def missed(units: int) -> float:
            return (cost + (units - nominal) * slope - self.target) / self.target

        below = math.floor(exact)
        units = min(below, below + 1, key=lambda m: (abs(missed(m)), abs(m - nominal)))
        ratio = self.start.mlp_ratio
        return _Option(
            n=n,
            units=units,
            mismatch=missed(units),
            distance=abs(Fraction(units, d_model) - Fraction(ratio)),
            # Unrounded, the ratio only falls as n grows; rounding moves it by half of this.
            least=abs(exact / d_model - ratio) - 1 / d_model,
            bare=cost - nominal * slope,
        )

    def _crossing(self) -> int:
        """The last n at which the arm costs no more than the target at its own MLP ratio, or 0."""
        low, high = 0, self.own
        while self._affordable(high):
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._affordable(middle) else (low, middle)
        return low

    def _affordable(self, n: int) -> bool:
        """A refused size counts as the next larger one, so that the answer changes only once."""
        for larger in range(n, n + GAP):
            cost = self._cost_at(larger, self._nominal(larger))
            if cost is not None:
                return cost <= self.target
        return False


def _percent(part: float) -> str:
    return f"{100 * abs(part):.3g} %"

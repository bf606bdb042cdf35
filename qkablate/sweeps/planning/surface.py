"""The quadratic surface of the loss over the logarithms of the learning rates, and its minimum."""

import itertools
import math
import statistics
from collections.abc import Hashable
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache

import numpy as np
from scipy.special import ndtri, stdtrit

from qkablate.sweeps.planning.manifest import Rates
from qkablate.sweeps.planning.tuning_losses import (
    RULES,
    Losses,
    choose_middle,
    find_outlying_rates,
    find_solved_rates,
    mean_losses,
    seed_residuals,
)

# Distance from the best rate in ln lr. Further out, curves are steeper where training breaks: such
# losses have less weight, and beyond none.
_NEAR, _FAR = math.log(2) * 1.01, math.log(4) * 1.01
_FAR_WEIGHT = 0.1
_FARTHEST = 100.0  # distance of the minimum in ln lr: far beyond what is believed
_HIGH = 0.25  # nats above the best: no quadratic surface reaches so far
_CERTAIN = 0.95  # of a positive curvature, and of the bound of the excess
_POINTS = 2**16  # surfaces of the bootstrap: errors are mostly right within a tenth of a percent
Points = tuple[tuple[Rates, tuple[tuple[Hashable, float | None], ...]], ...]  # losses, hashable


@dataclass(frozen=True)
class Surface:
    """Weighted least-squares surface near the best rates: seeds' intercepts, slopes, curvatures.

    K counts the searched rates: ln lr, or ln lr and ln circuit, as distances from `center`.
    """

    center: Rates
    slope_K: np.ndarray
    hessian_KK: np.ndarray
    covariance_PP: np.ndarray  # of the slopes and of the entries of the Hessian, in this order
    noise: float  # standard deviation of a loss around the surface
    freedom: float  # observations count by their weights
    lowest_K: np.ndarray  # distances of the farthest rates that were tried nearby
    highest_K: np.ndarray

    @property
    def size(self) -> int:
        return len(self.slope_K)

    @cached_property
    def is_convex(self) -> bool:
        """True if the surface has a minimum."""
        return bool(np.linalg.eigvalsh(self.hessian_KK)[0] > 0)

    @cached_property
    def is_certain(self) -> bool:
        """True if every curvature is surely positive and the minimum lies among the rates tried."""
        errors_K = np.sqrt(np.diag(self.covariance_PP)[self.size :][: self.size])
        t = float(stdtrit(self.freedom, _CERTAIN))
        if not self.is_convex or np.any(np.diag(self.hessian_KK) <= t * errors_K):
            return False
        inside_K = (self.lowest_K <= self.offset) & (self.offset <= self.highest_K)
        return bool(np.all(inside_K))

    @cached_property
    def offset(self) -> np.ndarray:
        """Logarithmic distance of the minimum from the center."""
        return -np.linalg.solve(self.hessian_KK, self.slope_K)

    @cached_property
    def offset_covariance(self) -> np.ndarray:
        """Covariance of the minimum's place, by the delta method."""
        # H · offset = −slope, so d offset = −H⁻¹ (d slope + dH · offset).
        jacobian_KP = np.zeros((self.size, len(self.covariance_PP)))
        jacobian_KP[:, : self.size] = np.eye(self.size)
        for column, (row, other) in enumerate(_pairs(self.size), self.size):
            jacobian_KP[row, column] += self.offset[other]
            if row != other:
                jacobian_KP[other, column] += self.offset[row]
        jacobian_KP = np.linalg.solve(self.hessian_KK, jacobian_KP)
        return np.asarray(jacobian_KP @ self.covariance_PP @ jacobian_KP.T)

    @cached_property
    def optimum(self) -> Rates:
        """The rates at the minimum."""
        # The minimum of a surface that hardly bends may lie beyond all numbers.
        offsets = [max(-_FARTHEST, min(_FARTHEST, offset)) for offset in self.offset]
        lr, circuit = [*map(math.exp, offsets), 1.0][:2]
        return Rates(self.center.lr * lr, self.center.circuit * circuit)

    def excess_loss(self, rates: Rates) -> float:
        """Return the loss at some rates beyond the minimum, in nats."""
        distance_K = _log_distance(rates, self.center, self.size) - self.offset
        return float(distance_K @ self.hessian_KK @ distance_K) / 2

    def excess(self, rates: Rates) -> tuple[float, float]:
        """Return the expected square and the upper 95 % bound of the loss beyond the true minimum.

        In nats² and nats.
        """
        excess_S = self._excess_losses(rates)
        return float(np.mean(excess_S**2)), float(np.quantile(excess_S, _CERTAIN))

    def _excess_losses(self, rates: Rates) -> np.ndarray:
        """Return the loss of some rates beyond the minimum of each of many surfaces.

        The surfaces are distributed around the fitted one by its covariance (a parametric
        bootstrap, at evenly spread points in place of random ones). The minimum of each is sought
        among the rates tried nearby: the search has shown that it lies there. So a surface with an
        uncertain curvature has an excess, too, and the choice of a grid point is charged with its
        distance. Only convex surfaces count, where there are any: a saddle has its minimum in a
        corner, which overstates the excess.
        """
        mean_P = np.array([*self.slope_K, *(self.hessian_KK[p] for p in _pairs(self.size))])
        variances_P, directions_PP = np.linalg.eigh(self.covariance_PP)
        directions_PP *= np.where(directions_PP.sum(axis=0) < 0, -1, 1)  # eigh leaves signs open
        scaled_PP = directions_PP * np.sqrt(np.maximum(variances_P, 0))
        beta_SP = mean_P + _normal_points(len(mean_P)) @ scaled_PP.T
        convex_S = _are_convex(beta_SP)
        if convex_S.any():
            beta_SP = beta_SP[convex_S]
        own_S = beta_SP @ _terms(_log_distance(rates, self.center, self.size)[None])[0]
        least_S = _least_losses(beta_SP, self.lowest_K, self.highest_K)
        return np.asarray(np.maximum(own_S - least_S, 0))


def _are_convex(beta_SP: np.ndarray) -> np.ndarray:
    """Return which surfaces, given by their coefficients, are convex."""
    if beta_SP.shape[1] == 2:
        return np.asarray(beta_SP[:, 1] > 0)
    _, _, xx_S, yy_S, xy_S = beta_SP.T
    return np.asarray((xx_S > 0) & (xx_S * yy_S > xy_S**2))


def _least_losses(beta_SP: np.ndarray, low_K: np.ndarray, high_K: np.ndarray) -> np.ndarray:
    """Return the minimum of each surface among some rates."""
    if len(low_K) == 1:
        slope_S, curvature_S = beta_SP.T
        return _least_on_a_line(slope_S, curvature_S, low_K[0], high_K[0])
    x_S, y_S, xx_S, yy_S, xy_S = beta_SP.T

    def given_x(at: np.ndarray) -> np.ndarray:
        line_S = _least_on_a_line(y_S + xy_S * at, yy_S, low_K[1], high_K[1])
        return np.asarray(at * x_S + at**2 * xx_S / 2 + line_S)

    def given_y(at: np.ndarray) -> np.ndarray:
        line_S = _least_on_a_line(x_S + xy_S * at, xx_S, low_K[0], high_K[0])
        return np.asarray(at * y_S + at**2 * yy_S / 2 + line_S)

    # It lies on an edge, or inside, where the slopes of both rates are zero.
    inside_S = _stationary(x_S * yy_S - xy_S * y_S, xx_S * yy_S - xy_S**2, low_K[0], high_K[0])
    edges = [given_x(low_K[0]), given_x(high_K[0]), given_y(low_K[1]), given_y(high_K[1])]
    return np.asarray(np.min([given_x(inside_S), *edges], axis=0))


def _least_on_a_line(
    slope_S: np.ndarray, curvature_S: np.ndarray, low: float, high: float
) -> np.ndarray:
    """Return the minima of parabolas between two ends."""
    places = _stationary(slope_S, curvature_S, low, high), low, high
    losses = [at * slope_S + at**2 * curvature_S / 2 for at in places]
    return np.asarray(np.min(losses, axis=0))


def _stationary(
    slope_S: np.ndarray, curvature_S: np.ndarray, low: float, high: float
) -> np.ndarray:
    """Return where parabolas are stationary, or the nearer end if that is outside of the ends."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):  # of straight lines
        return np.asarray(np.clip(np.nan_to_num(-slope_S / curvature_S), low, high))


def _pairs(size: int) -> list[tuple[int, int]]:
    """Return the entries of the Hessian: its diagonal first."""
    return [*((k, k) for k in range(size)), *itertools.combinations(range(size), 2)]


@cache
def _normal_points(size: int) -> np.ndarray:
    """Return points that fill the standard normal distribution evenly, as SP."""
    from scipy.stats import qmc  # slow to import

    sobol_SP = qmc.Sobol(size, scramble=False).random(_POINTS)
    return np.asarray(ndtri(sobol_SP + 0.5 / _POINTS))


def _log_distance(rates: Rates, center: Rates, size: int) -> np.ndarray:
    return np.array([math.log(a / b) for a, b in zip(rates, center, strict=True)][:size])


def _terms(logs_NK: np.ndarray) -> np.ndarray:
    """Return the regressors of slopes and of the Hessian's entries at some distances, as NP."""
    columns = [*logs_NK.T]
    for row, other in _pairs(logs_NK.shape[1]):
        columns.append(logs_NK[:, row] * logs_NK[:, other] / (1 + (row == other)))
    return np.stack(columns, axis=1)


def fit_surface(losses: Losses, *, both: bool = True) -> Surface | None:
    """Fit the surface near the best rates; None where too few rates determine it.

    With `both`, the circuit's rate is a dimension if several were tried; otherwise each of its
    rates has intercepts of its own, and all have the same slope and curvature in ln lr.
    """
    means = mean_losses(losses)
    for rates in find_outlying_rates(losses):
        del means[rates]
    if not means:
        return None
    best = min(means, key=means.__getitem__)
    circuits = sorted({rates.circuit for rates in means})
    place = circuits.index(best.circuit)
    near = circuits[max(0, place - 2) : place + 3] if both else circuits
    both = both and len(circuits) > 1
    around = [r for r in means if abs(math.log(r.lr / best.lr)) <= _FAR and r.circuit in near]
    low = {r: losses[r] for r in around if means[r] <= means[best] + _HIGH}
    return _fit(best, low, both=both) or _fit(best, {r: losses[r] for r in around}, both=both)


def _fit(best: Rates, losses: Losses, *, both: bool) -> Surface | None:
    """Fit the surface to all of these losses; None where they do not determine it."""
    size = 2 if both else 1
    if any(len({rates[k] for rates in losses}) < 3 for k in range(size)):
        return None
    points = [
        (rates, seed, loss)
        for rates in losses
        for seed, loss in losses[rates].items()
        if loss is not None
    ]
    logs_PK = np.array([_log_distance(rates, best, size) for rates, _, _ in points])
    groups = [(seed,) if both else (seed, rates.circuit) for rates, seed, _ in points]
    intercepts_PG = np.array(
        [[group == kind for kind in dict.fromkeys(groups)] for group in groups]
    )
    design_PQ = np.hstack([_terms(logs_PK), intercepts_PG])
    nearby_P = np.abs(logs_PK[:, 0]) <= _NEAR
    weight_P = np.where(nearby_P, 1.0, _FAR_WEIGHT)
    freedom = float(weight_P.sum()) - design_PQ.shape[1]
    if freedom < 1:  # with few seeds, all the losses are needed
        weight_P = np.ones(len(points))
        freedom = float(len(points) - design_PQ.shape[1])
    if freedom < 1 or np.linalg.matrix_rank(design_PQ) < design_PQ.shape[1]:
        return None
    root_P = np.sqrt(weight_P)
    loss_P = np.array([loss for *_, loss in points])
    weighted_PQ, target_P = design_PQ * root_P[:, None], loss_P * root_P
    beta_Q = np.linalg.lstsq(weighted_PQ, target_P, rcond=None)[0]
    residual_P = target_P - weighted_PQ @ beta_Q
    variance = float(residual_P @ residual_P) / freedom
    kept = size + len(_pairs(size))
    covariance_QQ = variance * np.linalg.inv(weighted_PQ.T @ weighted_PQ)
    hessian_KK = np.zeros((size, size))
    for value, (row, other) in zip(beta_Q[size:kept], _pairs(size), strict=True):
        hessian_KK[row, other] = hessian_KK[other, row] = value
    return Surface(
        center=best,
        slope_K=beta_Q[:size],
        hessian_KK=hessian_KK,
        covariance_PP=covariance_QQ[:kept, :kept],
        noise=math.sqrt(variance),
        freedom=freedom,
        lowest_K=logs_PK[nearby_P].min(axis=0),
        highest_K=logs_PK[nearby_P].max(axis=0),
    )


def find_surface(losses: Losses) -> Surface | None:
    """Return the surface in both dimensions, or that in ln lr alone where it is more certain."""
    surfaces = [fit_surface(losses, both=both) for both in (True, False)]
    known = [surface for surface in surfaces if surface is not None]
    return max(known, key=lambda surface: (surface.is_certain, surface.is_convex), default=None)


def choose_rates(losses: Losses, rules: int = RULES) -> tuple[Rates, Surface | None]:
    """Return the rates to train at, and the surface that they are the minimum of.

    The minimum is rounded to two digits. If it is uncertain in both dimensions it is that in ln lr
    at the best of the circuit's rates; if that is uncertain, too, these are the rates tried with
    the smallest mean + standard error, or the next lower `optim.lr` if its mean is within one
    standard error: loss is flat there, and training less often fails. Where a task is solved they
    are in the middle of the rates that solve it.
    """
    if rules > 1 and (solved := find_solved_rates(losses)):
        return choose_middle(solved), None
    surface = find_surface(losses)
    if surface is not None and surface.is_certain:
        lr, circuit = surface.optimum
        if surface.size == 2:
            circuit = float(f"{circuit:.2g}")
        return Rates(float(f"{lr:.2g}"), circuit), surface
    means, failed = mean_losses(losses), find_outlying_rates(losses)
    residuals = seed_residuals(losses)

    def risk(rates: Rates) -> tuple[bool, float]:
        own = residuals[rates]
        error = statistics.stdev(own) / math.sqrt(len(own)) if len(own) > 1 else 0.0
        return rates in failed, means[rates] + error

    best = min(means, key=risk)
    error = surface.noise / math.sqrt(len(residuals[best])) if surface else 0.0
    lower = [r for r in means if r.circuit == best.circuit and r.lr < best.lr and r not in failed]
    if lower and means[max(lower)] <= means[best] + error:
        best = max(lower)
    return best, None


@lru_cache(maxsize=1024)  # the interval and the audit of every part ask for the same
def _excess(points: Points, rates: Rates) -> tuple[float, float] | None:
    """Return moment and bound of the excess, by a surface in all dimensions that allow one."""
    losses = {at: dict(by_seed) for at, by_seed in points}
    surface = fit_surface(losses) or fit_surface(losses, both=False)
    return None if surface is None else surface.excess(rates)


def _points(losses: Losses) -> Points:
    return tuple((at, tuple(by_seed.items())) for at, by_seed in losses.items())


def excess_bound(losses: Losses, rates: Rates) -> float:
    """Return the upper 95 % bound, in nats, of what imperfect rates cost an arm."""
    excess = _excess(_points(losses), rates)
    return math.inf if excess is None else excess[1]


def excess_moment(losses: Losses, rates: Rates) -> float:
    """Return the expected squared loss, in nats², that imperfect rates cost an arm.

    Where no surface can be fitted it is the distance to the next best of the other rates; where
    there are none, nothing is known, and the audit says that no minimum is certain.
    """
    if (excess := _excess(_points(losses), rates)) is not None:
        return excess[0]
    means = mean_losses(losses)
    others = [loss for other, loss in means.items() if other.lr != rates.lr]
    if not others:
        return 0.0
    return (min(others) - means.get(rates, min(means.values()))) ** 2

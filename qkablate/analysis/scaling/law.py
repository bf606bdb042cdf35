"""Scaling laws: the loss by parameters and tokens, and the cheapest way to a loss.

L = E + A·N^−α + B·D^−β (Hoffmann and others 2022), N without embeddings. The fit is robust: beyond
three standard errors a residual counts by its size, not its square. Nothing is read off a law
beyond twice the range of what was trained.
"""

import itertools
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy import optimize

REACH = 2.0  # how far beyond the sizes and lengths of the runs a law is read
_EXPONENTS = (0.02, 4.0)
_STARTS = (0.1, 0.3, 0.8, 1.6)  # of both exponents
_REFINED = 3  # of the best starts
_GRID = 1_000  # sizes among which the cheapest is searched

Array = np.ndarray


@dataclass(frozen=True)
class Observations:
    """Mean losses of one arm at several sizes and lengths."""

    params_P: Array  # without embeddings
    tokens_P: Array
    losses_P: Array
    flops_P: Array  # of training, per token
    error: float  # typical standard error of a loss, in nats

    def where(self, keep_P: Array) -> "Observations":
        """Return the points for which the mask is true."""
        params_P, tokens_P = self.params_P[keep_P], self.tokens_P[keep_P]
        losses_P, flops_P = self.losses_P[keep_P], self.flops_P[keep_P]
        return Observations(params_P, tokens_P, losses_P, flops_P, self.error)


@dataclass(frozen=True)
class ScalingLaw:
    """L = E + A·(N/N₀)^−α + B·(D/D₀)^−β, and the range of N and D in which it is read."""

    irreducible: float  # E, nats
    size_term: float  # A, nats at N₀ parameters
    size_exponent: float
    token_term: float  # B, nats at D₀ tokens
    token_exponent: float
    data: Observations

    @cached_property
    def _centre(self) -> tuple[float, float]:
        return _centre(self.data)

    @property
    def values(self) -> Array:
        """The five constants, for the optimizer."""
        terms = self.size_term, self.size_exponent, self.token_term, self.token_exponent
        return np.array([self.irreducible, *terms])

    @property
    def uncentred_terms(self) -> tuple[float, float]:
        """A and B as in A·N^−α + B·D^−β."""
        n0, d0 = self._centre
        return self.size_term * n0**self.size_exponent, self.token_term * d0**self.token_exponent

    @property
    def problem(self) -> str:
        """The reason why nothing is read off the law, or ''."""
        low, high = _EXPONENTS
        for term, exponent, along in (
            (self.size_term, self.size_exponent, "parameters"),
            (self.token_term, self.token_exponent, "tokens"),
        ):
            if term < self.data.error or exponent <= 1.01 * low:
                return f"its loss does not fall with {along} as a power"
            if exponent >= 0.99 * high:
                return f"its loss falls with {along} faster than any power law here"
        return ""

    def loss(self, params: Array | float, tokens: Array | float) -> Array:
        """Return the loss at these parameters and tokens."""
        n0, d0 = self._centre
        of_size = self.size_term * (np.asarray(params) / n0) ** -self.size_exponent
        of_tokens = self.token_term * (np.asarray(tokens) / d0) ** -self.token_exponent
        return self.irreducible + of_size + of_tokens

    @cached_property
    def _sizes(self) -> tuple[Array, Array]:
        """Sizes within reach, and their FLOPs per token."""
        params, first = np.unique(self.data.params_P, return_index=True)
        log_n, log_f = np.log(params), np.log(self.data.flops_P[first])
        grid = np.linspace(log_n[0] - np.log(REACH), log_n[-1] + np.log(REACH), _GRID)
        slopes = np.diff(log_f) / np.diff(log_n)
        flops = np.interp(grid, log_n, log_f)
        flops += np.minimum(grid - log_n[0], 0) * slopes[0]
        flops += np.maximum(grid - log_n[-1], 0) * slopes[-1]
        return np.exp(grid), np.exp(flops)

    @property
    def _token_range(self) -> tuple[float, float]:
        tokens = self.data.tokens_P
        return float(tokens.min()) / REACH, float(tokens.max()) * REACH

    def lowest_loss(self, flops: float) -> float | None:
        """Return the loss of the best size for so many FLOPs of training; None out of reach."""
        params, per_token = self._sizes
        tokens = flops / per_token
        return self._least(self.loss(params, tokens), tokens)

    def least_flops(self, loss: float) -> float | None:
        """Return the FLOPs of training that reach a loss at the best size; None out of reach."""
        params, per_token = self._sizes
        tokens = self._tokens_for(loss, params)
        return self._least(per_token * tokens, tokens)

    def _least(self, values: Array, tokens: Array) -> float | None:
        """Return the least value over the sizes; None if its size or length is out of reach.

        Of what is within reach, the least would lie at the edge, and be no optimum.
        """
        at = int(np.argmin(values))
        low, high = self._token_range
        is_inside = 0 < at < len(values) - 1 and low <= tokens[at] <= high
        return float(values[at]) if is_inside else None

    def _tokens_for(self, loss: float, params: Array | float) -> Array:
        """Return the tokens after which each size has a loss; infinity where it never has."""
        rest = loss - self.loss(params, np.inf)
        _, d0 = self._centre
        with np.errstate(divide="ignore", invalid="ignore"):
            tokens = d0 * (rest / self.token_term) ** (-1 / self.token_exponent)
        return np.where(rest > 0, tokens, np.inf)

    def tokens_for(self, loss: float, params: float) -> float | None:
        """Return the tokens after which this size has a loss; None out of reach."""
        tokens = float(self._tokens_for(loss, params))
        low, high = self._token_range
        return tokens if low <= tokens <= high else None

    def params_for(self, loss: float, tokens: float) -> float | None:
        """Return the size that has a loss after so many tokens; None out of reach."""
        n0, _ = self._centre
        rest = loss - float(self.loss(np.inf, tokens))
        if rest <= 0:
            return None
        params = n0 * (rest / self.size_term) ** (-1 / self.size_exponent)
        sizes, _ = self._sizes
        return float(params) if sizes[0] <= params <= sizes[-1] else None


def fit_law(data: Observations, start: ScalingLaw | None = None) -> ScalingLaw:
    """Fit the law to mean losses, from many starts or from a law of nearly the same losses."""
    n0, d0 = _centre(data)
    log_n, log_d, losses = np.log(data.params_P / n0), np.log(data.tokens_P / d0), data.losses_P
    lower, upper = losses.min(), losses.max() - losses.min()
    scale = max(3 * data.error, 1e-3 * upper, 1e-9)

    def terms(x: Array) -> tuple[Array, Array]:
        return np.exp(-x[2] * log_n), np.exp(-x[4] * log_d)

    def residuals(x: Array) -> Array:
        of_size, of_tokens = terms(x)
        return np.asarray(x[0] + x[1] * of_size + x[3] * of_tokens - losses)

    def jacobian(x: Array) -> Array:
        of_size, of_tokens = terms(x)
        columns = [np.ones_like(losses), of_size, -x[1] * of_size * log_n]
        columns += [of_tokens, -x[3] * of_tokens * log_d]
        return np.stack(columns, axis=1)

    low = np.array([0, 0, _EXPONENTS[0], 0, _EXPONENTS[0]])
    most = max(10 * upper, 10 * lower, 1e-6)
    high = np.array([max(lower, 1e-12), most, _EXPONENTS[1], most, _EXPONENTS[1]])

    def refine(x: Array) -> optimize.OptimizeResult:
        inside = np.clip(x, low + 1e-9 * (high - low), high - 1e-9 * (high - low))
        return optimize.least_squares(
            *(residuals, inside, jacobian, (low, high)),
            **{"loss": "huber", "f_scale": scale, "x_scale": np.maximum(inside, 1e-3)},
            **{"xtol": 1e-10, "ftol": 1e-12, "gtol": 1e-12, "max_nfev": 300},
        )

    starts = [] if start is None else [start.values]
    if start is None:
        for alpha, beta in itertools.product(_STARTS, _STARTS):
            columns = [np.ones_like(losses), np.exp(-alpha * log_n), np.exp(-beta * log_d)]
            (e, a, b), _ = optimize.nnls(np.stack(columns, axis=1), losses)
            starts.append(np.array([e, a, alpha, b, beta]))
        starts.sort(key=lambda x: float(np.square(residuals(x)).sum()))
    best = min(map(refine, starts[:_REFINED]), key=lambda result: float(result.cost))
    e, a, alpha, b, beta = map(float, best.x)
    return ScalingLaw(e, a, alpha, b, beta, data)


def _centre(data: Observations) -> tuple[float, float]:
    """Return the geometric means of the parameters and of the tokens."""
    n0, d0 = (float(np.exp(np.log(x).mean())) for x in (data.params_P, data.tokens_P))
    return n0, d0

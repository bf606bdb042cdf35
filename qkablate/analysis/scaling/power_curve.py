"""Curves that level off: losses L∞ + B·D^−β by tokens or parameters D."""

import numpy as np
from scipy import optimize

LEAST_EXPONENT, MOST_EXPONENT = 0.05, 3.0  # a curve of the least is nearly straight in ln D


def make_design(log_d: np.ndarray, exponent: float) -> np.ndarray:
    """Return the matrix by which (L∞, B) gives the losses."""
    return np.stack([np.ones_like(log_d), np.exp(-exponent * log_d)], axis=1)


def find_exponent(log_d: np.ndarray, losses_AT: np.ndarray) -> float:
    """Return the β that all curves share, with the least squared error."""

    def residual(log_exponent: float) -> float:
        design = make_design(log_d, float(np.exp(log_exponent)))
        rest = losses_AT.T - design @ (np.linalg.pinv(design) @ losses_AT.T)
        return float(np.square(rest).sum())

    grid = np.linspace(np.log(LEAST_EXPONENT), np.log(MOST_EXPONENT), 30)
    best = int(np.argmin([residual(x) for x in grid]))
    ends = grid[max(0, best - 1)], grid[min(len(grid) - 1, best + 1)]
    found = optimize.minimize_scalar(residual, bounds=ends, method="bounded")
    return float(np.exp(found.x))

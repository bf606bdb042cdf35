"""Tables of a section."""

from types import SimpleNamespace

import pytest

from qkablate.analysis.comparison.lr_curves import RateLosses
from qkablate.report.text.tables import make_rate_table
from qkablate.sweeps.planning.manifest import Rates


def curve(optimum):
    """Return a summary of a curve whose rates are 0.001 and 0.004, and multipliers 1 and 2."""
    return SimpleNamespace(
        arm="no_q",
        runs=4,
        best=Rates(0.004, 1.0),
        optimum=optimum,
        optimum_interval=(0.001, 0.009),
        sensitivity=0.01,
        default=Rates(0.001, 1.0),
        gap_at_default=None,
        gap_at_best=None,
        on_the_edge=False,
        val_loss=[RateLosses(lr, c, [2.0]) for lr in (0.001, 0.004) for c in (1.0, 2.0)],
    )


@pytest.mark.parametrize(
    ("optimum", "shown"),
    [
        (Rates(0.003, 1.5), ["0.003 (circuit × 1.5)", "[0.001, 0.009]"]),
        (Rates(0.016, 0.25), ["0.016 (circuit × 0.25)", "[0.001, 0.009]"]),
        (Rates(0.017, 1.0), ["–", "–"]),
        (Rates(0.003, 7.26e6), ["–", "–"]),  # a surface that hardly bends
        (None, ["–", "–"]),
    ],
)
def test_optimum_far_beyond_the_rates_tried_is_not_shown(optimum, shown):
    (row,) = make_rate_table([curve(optimum)]).rows
    assert row[3:5] == shown

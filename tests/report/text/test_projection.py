"""Tables of conversions: what is known of variants some of whose runs diverged."""

import math
from types import SimpleNamespace

import pytest

from qkablate.analysis.comparison.conversions import Conversion, Conversions
from qkablate.analysis.stats import Sample
from qkablate.report.charts.conversions import conversion_chart
from qkablate.report.text.projection import conversion_tables, conversions_to_json

GAPS = Sample((0.1, 0.12, 0.11))
LOSSES = Sample((2.1, 2.12, 2.11))


@pytest.fixture
def study(monkeypatch):
    """Return a function that makes a study of one variant, converted with four seeds."""
    config = SimpleNamespace(train=SimpleNamespace(steps=8), optim=SimpleNamespace(lr=1e-3))
    arm = SimpleNamespace(variant="standard", params=100, config=config)
    baseline = SimpleNamespace(arm=arm, name="standard")

    def make(*, above=False, below=False):
        own = Conversion(
            arm="no_q", variant="no_q", params=90, params_percent=90.0, errors=None,
            before_finetuning=LOSSES, gap_before_finetuning=GAPS, val=LOSSES, val_gap=GAPS,
            test_gap=GAPS, runs=4, diverged=int(above), open_above=above, open_below=below,
        )  # fmt: skip
        found = Conversions(baseline, LOSSES, LOSSES, [own])
        for module in ("text.projection", "charts.conversions"):
            monkeypatch.setattr(f"qkablate.report.{module}.find_conversions", lambda _: [found])
        return SimpleNamespace(name="x", left_out=[], loss_unit="nats per token")

    return make


@pytest.mark.parametrize(
    ("sides", "shown", "ends"),
    [
        ({}, "+0.110 [+0.085, +0.135]", (True, True)),
        ({"above": True}, "+0.110 [+0.085, ∞)", (True, False)),
        ({"below": True}, "+0.110 (−∞, +0.135]", (False, True)),
    ],
)
def test_interval_is_unbounded_where_runs_diverged(study, sides, shown, ends):
    made = study(**sides)
    (table,) = conversion_tables(made)
    assert table.rows[1][table.columns.index("gap in test loss [95 %]")] == shown
    (row,) = conversions_to_json(made)["variants"]
    for key in ("val_gap", "test_gap"):
        assert tuple(end is not None for end in row[key]["interval"]) == ends
    assert all(map(math.isfinite, row["gap_before_finetuning"]["interval"]))
    chart = conversion_chart(SimpleNamespace(study=made, styles={}))
    before, after = (panel.spec["data"]["values"] for panel in chart.panels)
    assert before[0]["low"] is not None
    assert (after[0]["low"] is None) == bool(sides)
    assert ("unbounded" in chart.caption) == bool(sides)

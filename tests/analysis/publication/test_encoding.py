"""Encoding of published runs: what was packed comes back."""

import json

import pytest

from qkablate.analysis.publication.encoding import (
    MAX_READINGS,
    from_columns,
    pack_curve,
    thin,
    to_columns,
    unpack_curve,
)
from tests.analysis.publication.made_up import make_run


def test_measures_by_slice_come_back():
    """A task has `accuracy` and `accuracy/<slice>/<label>`: a key may begin with another."""
    measures = {"accuracy": 0.9, "accuracy/gap/4-7": 0.7, "loss/gap/4-7": 0.1, "empty": {}}
    runs = {id: make_run(loss, measures={"test": measures}) for id, loss in (("a", 1), ("b", 2))}
    assert from_columns(json.loads(json.dumps(to_columns(runs)))) == runs


def test_curve_is_rounded_and_thinned():
    curve = {64 * step: 3 - step / 7 for step in range(1, 12)}
    assert unpack_curve(pack_curve(curve, 1000)) == pytest.approx(curve, abs=0.0005)
    long = {step: float(step) for step in range(1, 5001)}
    kept = thin(long)
    assert 32 <= len(kept) <= MAX_READINGS
    assert {1, 5000} <= kept.keys()
    assert kept.items() <= long.items()
    assert thin({}) == {}


def test_thinned_curve_keeps_its_first_readings():
    """The reading before training is kept, and the others do not crowd at the next one."""
    curve = {8192 * step: float(step) for step in range(300)}
    kept = thin(curve)
    assert {0, 8192, 299 * 8192} <= kept.keys()
    assert len(kept) <= MAX_READINGS
    assert len(thin({t: loss for t, loss in curve.items() if t})) <= len(kept)
    assert [*unpack_curve(pack_curve(curve, 1000))][:3] == [0, 8192, 16384]

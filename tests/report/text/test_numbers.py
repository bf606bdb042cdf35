"""Numbers show the digits that their interval supports, and no others."""

import math
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qkablate.analysis.stats import Sample
from qkablate.report.text.numbers import format_gap, format_loss, half_width
from qkablate.table import format_digits

NUMBER = r"[+-]?[\d]+(?:\.\d+)?"
means = st.floats(-1e6, 1e6, allow_nan=False)
halves = st.floats(1e-12, 1e6)


def places(text):
    return len(text.partition(".")[2])


@pytest.mark.parametrize(
    ("mean", "interval", "said"),
    [
        (0.0123456, (0.0081, 0.0166), "+0.0123 [+0.0081, +0.0166]"),
        (0.0123456, (-0.01, 0.03), "+0.012 [-0.010, +0.030]"),
        (0.3, (0.1, 0.5), "+0.30 [+0.10, +0.50]"),
        (-2.5, (-7.5, 2.5), "-2.5 [-7.5, +2.5]"),
        (1234.5, (1000.0, 1469.0), "+1234 [+1000, +1469]"),
        (-0.0001, (-0.0202, 0.02), "+0.000 [-0.020, +0.020]"),
        (0.5, None, "+0.5000, no interval"),
        (0.25, (0.25, 0.25), "+0.2500 [+0.2500, +0.2500]"),
        (0.0, (0.0, 0.0), "+0.0000 [+0.0000, +0.0000]"),
    ],
)
def test_gap_is_rounded_to_its_interval(mean, interval, said):
    assert format_gap(mean, interval) == said


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ((2.0, 2.1, 2.2), "2.10 [1.85, 2.35]"),
        ((2.0,), "2.0000, no interval"),
        ((2.0, 2.0), "2.0000 [2.0000, 2.0000]"),
    ],
)
def test_loss_is_rounded_to_its_interval(values, said):
    assert format_loss(Sample(values)) == said


@settings(max_examples=300, deadline=None)
@given(mean=means, half=st.floats(2e-5, 99.0))
def test_last_digit_is_between_a_tenth_and_a_hundredth_of_the_half_width(mean, half):
    step = 10.0 ** -places(format_digits(mean, half))
    if half < 10:  # beyond, whole numbers are shown
        assert half / 100 * (1 - 1e-9) <= step <= half / 10 * (1 + 1e-9)
    else:
        assert step == 1


@settings(max_examples=300, deadline=None)
@given(mean=means, half=st.floats(1e-5, 1e6))
def test_rounded_value_is_close_to_the_value(mean, half):
    said = format_gap(mean, (mean - half, mean + half))
    found = [float(number) for number in re.findall(NUMBER, said)]
    assert len(found) == 3
    error = max(half / 10, 1e-6) + abs(mean) * 1e-12
    for told, meant in zip(found, (mean, mean - half, mean + half), strict=True):
        assert abs(told - meant) <= error
    assert found[1] <= found[0] <= found[2]


@settings(max_examples=300, deadline=None)
@given(mean=means, half=st.none() | halves | st.just(0.0))
def test_zero_has_no_minus_sign(mean, half):
    interval = None if half is None else (mean - half, mean + half)
    for said in re.findall(NUMBER, format_gap(mean, interval)):
        assert float(said) != 0 or not said.startswith("-")
        assert said[0] in "+-"
    for value in (mean, -1e-9, -0.0):
        said = format_digits(value, half)
        assert float(said) != 0 or not said.startswith("-")


@settings(max_examples=200, deadline=None)
@given(values=st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=8))
def test_any_losses_are_formatted_as_numbers(values):
    said = format_loss(Sample(tuple(values)))
    assert re.fullmatch(rf"{NUMBER}(, no interval| \[{NUMBER}, {NUMBER}\])", said)


def test_mean_and_bounds_have_equal_decimals():
    for half in (3e-7, 2e-4, 0.05, 4.0, 300.0):
        said = re.findall(NUMBER, format_gap(0.1234567, (0.1234567 - half, 0.1234567 + half)))
        assert len({places(number) for number in said}) == 1


def test_interval_is_unbounded_on_the_side_of_diverged_runs():
    interval = (0.01, 0.03)
    assert format_gap(0.02, interval, above=True) == "+0.020 [+0.010, ∞)"
    assert format_gap(0.02, interval, below=True) == "+0.020 (−∞, +0.030]"
    assert format_gap(0.02, interval, below=True, above=True) == "+0.020 (−∞, ∞)"


def test_half_width_is_half_the_interval():
    assert half_width((1.0, 4.0)) == 1.5
    assert half_width(None) is None
    assert half_width((2.0, 2.0)) == 0.0


@pytest.mark.parametrize("half", [math.inf, math.nan, 0.0, -1.0, None])
def test_zero_width_keeps_four_decimals(half):
    assert format_digits(1.23456789, half) == "1.2346"

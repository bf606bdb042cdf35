"""Sums of decimal numbers."""

import numpy as np
import pytest

from tests.data.tasks.test_padded import make, pairs_of


def draw(held_out=False, count=2000, **keys):
    """Return (number, number, sum) as text, and the slices."""
    task = make("add", **keys)
    examples = task.draw(np.random.default_rng(0), np.full(count, held_out))
    problems = []
    for source, target in pairs_of(task, examples):
        first, second = source.replace(" ", "").split("+")
        problems.append((first, second, target.removesuffix(" end").replace(" ", "")))
    return problems, examples.slices


@pytest.mark.parametrize("held_out", [False, True])
def test_targets_are_sums_in_reading_order(held_out):
    for first, second, answer in draw(held_out)[0]:
        assert str(int(first) + int(second)) == answer
        assert str(int(first)) == first  # no zero at the beginning
        assert str(int(second)) == second


def test_every_leading_digit_is_equally_frequent():
    numbers = [number for problem in draw()[0] for number in problem[:2] if len(number) > 1]
    found = np.bincount([int(number[0]) for number in numbers])[1:]
    assert found == pytest.approx([len(numbers) / 9] * 9, rel=0.2)


def test_every_length_is_equally_frequent():
    problems, slices = draw()
    longest = [max(len(first), len(second)) for first, second, _ in problems]
    assert slices["digits"][:, 0].tolist() == longest
    assert np.bincount(longest)[1:] == pytest.approx([2000 / 3] * 3, rel=0.1)
    assert any(len(first) < len(second) for first, second, _ in problems)
    assert any(len(first) > len(second) for first, second, _ in problems)


def test_longer_numbers_are_held_out():
    problems, slices = draw(held_out=True)
    longest = [max(len(first), len(second)) for first, second, _ in problems]
    assert {*longest} == {4, 5}
    assert slices["pair"].all()


def test_carries_reach_a_new_digit():
    sums = {answer for *_, answer in draw(digits=1, count=500)[0]}
    assert {"0", "9", "10", "18"} <= sums

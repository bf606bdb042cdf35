"""Who stands where: the cheapest of all orders."""

import itertools
import random

import pytest

from qkablate.attention.projection.assignment import cheapest


def total(cost, places):
    return sum(row[place] for row, place in zip(cost, places, strict=True))


@pytest.mark.parametrize("count", range(1, 7))
def test_cheapest_of_all_orders(count):
    """With ties, infinities of size and negative costs, as brute force finds it."""
    chance = random.Random(count)
    for values in ([0, 1], [-3.5, 0.25, 1e9], range(100)):
        for _ in range(20):
            cost = [[float(chance.choice(values)) for _ in range(count)] for _ in range(count)]
            found = cheapest(cost)
            assert sorted(found) == [*range(count)]
            least = min(total(cost, order) for order in itertools.permutations(range(count)))
            assert total(cost, found) == pytest.approx(least)


def test_of_equals_everyone_stays():
    assert cheapest([[0.5] * 12] * 12) == [*range(12)]

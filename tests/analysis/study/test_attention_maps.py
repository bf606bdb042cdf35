"""What is asked of heads on one text: numbers that are known beforehand."""

import numpy as np
import pytest

from qkablate.analysis.study.attention_maps import Example, seen
from qkablate.runs.attention_map import rounded


def made(a_LHTT):
    tokens = tuple(map(str, range(a_LHTT.shape[-1])))
    return Example("an arm", "standard", "s0", tokens, rounded(a_LHTT))


def test_a_head_that_looks_everywhere_alike_gives_each_the_equal_share():
    own = made((np.tril(np.ones((32, 32))) / np.arange(1, 33)[:, None])[None, None])
    expected = sum(1 / n for n in range(3, 33)) / 30
    assert own.equal_share == pytest.approx(expected)
    for name in ("previous", "first", "self"):
        assert own.asked[name].shape == (1, 1)
        assert own.asked[name][0, 0] == pytest.approx(expected, abs=0.5 / 255)


def test_every_head_has_its_own_numbers():
    eye = np.eye(6)
    first = np.zeros((6, 6))
    first[:, 0] = 1
    before = np.eye(6, k=-1)
    before[0, 0] = 1
    own = made(np.array([[eye, first], [before, (eye + before) / 2]]))
    assert own.asked["self"] == pytest.approx(np.array([[1, 0], [0, 0.5]]), abs=0.003)
    assert own.asked["first"] == pytest.approx(np.array([[0, 1], [0, 0]]), abs=0.003)
    assert own.asked["previous"] == pytest.approx(np.array([[0, 0], [1, 0.5]]), abs=0.003)


def test_of_two_tokens_nothing_is_asked():
    assert made(np.array([[[[1, 0], [0.5, 0.5]]]])).asked == {}


@pytest.mark.parametrize(
    ("token", "told"),
    [
        (b"a", "a"),
        (b" the", " the"),
        ("∑".encode(), "∑"),
        (b"\xe2\x88", "e2 88"),
        (b"\n\t", "\\n\\t"),
        (b"\0", "\\x00"),
        ("\u202e".encode(), "\\u202e"),
        (b"x" * 100, "x" * 16),
        (b"", ""),
    ],
)
def test_a_token_is_told_in_signs_that_can_be_seen(token, told):
    assert seen(token) == told

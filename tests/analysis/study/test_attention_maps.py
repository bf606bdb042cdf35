"""Measures of heads on one text, against numbers that are known beforehand."""

import numpy as np
import pytest

from qkablate.analysis.study.attention_maps import ArmAttention, show_token
from qkablate.runs.attention_map import quantize


def make_attention(a_LHTT):
    tokens = tuple(map(str, range(a_LHTT.shape[-1])))
    return ArmAttention("an arm", "standard", "s0", tokens, quantize(a_LHTT))


def test_uniform_attention_gives_each_target_the_uniform_share():
    own = make_attention((np.tril(np.ones((32, 32))) / np.arange(1, 33)[:, None])[None, None])
    expected = sum(1 / n for n in range(3, 33)) / 30
    assert own.uniform_share == pytest.approx(expected)
    for name in ("previous", "first", "self"):
        assert own.mean_weights[name].shape == (1, 1)
        assert own.mean_weights[name][0, 0] == pytest.approx(expected, abs=0.5 / 255)


def test_every_head_has_its_own_numbers():
    eye = np.eye(6)
    first = np.zeros((6, 6))
    first[:, 0] = 1
    before = np.eye(6, k=-1)
    before[0, 0] = 1
    own = make_attention(np.array([[eye, first], [before, (eye + before) / 2]]))
    assert own.mean_weights["self"] == pytest.approx(np.array([[1, 0], [0, 0.5]]), abs=0.003)
    assert own.mean_weights["first"] == pytest.approx(np.array([[0, 1], [0, 0]]), abs=0.003)
    assert own.mean_weights["previous"] == pytest.approx(np.array([[0, 0], [1, 0.5]]), abs=0.003)


def test_two_tokens_have_no_target_weights():
    assert make_attention(np.array([[[[1, 0], [0.5, 0.5]]]])).mean_weights == {}


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
def test_token_is_shown_in_visible_characters(token, told):
    assert show_token(token) == told

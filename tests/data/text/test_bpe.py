"""Learned byte-pair encoding."""

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st

from qkablate.data import tokenizers
from qkablate.data.text import bpe

TEXT = ["low lower lowest", "new newer newest wide wider widest"] * 3


def learn(texts, size):
    return bpe.learn_tokens(texts, size, lambda count: None)


def test_merges_follow_the_pair_counts():
    """Ab occurs 3 times, then ab+c twice; pairs that occur once are not merged."""
    assert learn(["abc", "abc", "abd"], 300)[256:] == [b"ab", b"abc"]


def test_ties_are_broken_by_lower_ids():
    assert learn(["ba", "ba", "cd", "cd"], 257)[256:] == [b"ba"]  # (98, 97) < (99, 100)


def test_pairs_in_a_run_do_not_overlap():
    """Aaa has one pair to merge, not two."""
    assert learn(["aaa aaa"], 300)[256:] == [b"aa", b"aaa"]


def test_tokens_are_distinct():
    tokens = learn(TEXT, 400)
    assert len({*tokens}) == len(tokens)
    assert tokens[:256] == [bytes([i]) for i in range(256)]


def test_tokens_do_not_depend_on_order_or_splits_of_texts():
    tokens = learn(TEXT, 300)
    assert learn(TEXT[::-1], 300) == tokens
    assert (
        learn([word for text in TEXT for word in regex.findall(bpe.PATTERN, text)], 300) == tokens
    )


def test_small_text_gives_fewer_tokens():
    assert len(learn(["ab"], 1000)) == 256
    assert len(learn([], 1000)) == 256


@pytest.mark.slow
@given(st.text())
@settings(max_examples=300, deadline=None)
def test_pattern_covers_all_text(text):
    assert "".join(regex.findall(bpe.PATTERN, text)) == text


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"])))
@settings(max_examples=300, deadline=None)
def test_round_trip(text):
    tokenizer = tokenizers.BpeTokenizer(learn(TEXT, 300))
    ids = tokenizer.encode(text.encode())
    assert tokenizer.decode(ids) == text.encode()
    assert int(tokenizer.token_bytes[ids].sum()) == len(text.encode())


def test_learned_tokens_are_used():
    tokenizer = tokenizers.BpeTokenizer(learn(TEXT, 300))
    assert len(tokenizer.encode(b"lowest newest")) < 7

"""The byte-pair encoding that we learn."""

import regex
from hypothesis import given, settings
from hypothesis import strategies as st

from qkablate.data import bpe, tokenizers

TEXT = ["low lower lowest", "new newer newest wide wider widest"] * 3


def learn(texts, size):
    return bpe.learn(texts, size, lambda count: None)


def test_merges_follow_the_counts_by_hand():
    """ab stands 3 times, then ab+c twice; what stands once is never merged."""
    assert learn(["abc", "abc", "abd"], 300)[256:] == [b"ab", b"abc"]


def test_ties_go_to_the_lower_ids():
    assert learn(["ba", "ba", "cd", "cd"], 257)[256:] == [b"ba"]  # (98, 97) < (99, 100)


def test_runs_do_not_overlap():
    """aaa has one pair to merge, not two."""
    assert learn(["aaa aaa"], 300)[256:] == [b"aa", b"aaa"]


def test_no_token_twice():
    tokens = learn(TEXT, 400)
    assert len({*tokens}) == len(tokens)
    assert tokens[:256] == [bytes([i]) for i in range(256)]


def test_the_order_of_the_texts_and_their_cuts_do_not_matter():
    tokens = learn(TEXT, 300)
    assert learn(TEXT[::-1], 300) == tokens
    assert (
        learn([word for text in TEXT for word in regex.findall(bpe.PATTERN, text)], 300) == tokens
    )


def test_fewer_tokens_where_there_is_no_more_to_merge():
    assert len(learn(["ab"], 1000)) == 256
    assert len(learn([], 1000)) == 256


@given(st.text())
@settings(max_examples=300, deadline=None)
def test_the_pattern_loses_nothing(text):
    assert "".join(regex.findall(bpe.PATTERN, text)) == text


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"])))
@settings(max_examples=300, deadline=None)
def test_round_trip(text):
    tokenizer = tokenizers.Learned(learn(TEXT, 300))
    ids = tokenizer.encode(text.encode())
    assert tokenizer.decode(ids) == text.encode()
    assert int(tokenizer.token_bytes[ids].sum()) == len(text.encode())


def test_it_is_used():
    tokenizer = tokenizers.Learned(learn(TEXT, 300))
    assert len(tokenizer.encode(b"lowest newest")) < 7

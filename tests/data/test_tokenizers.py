"""Text to ids and back."""

import json
import string

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qkablate.data import tokenizers
from qkablate.data.tokenizers import (
    BpeTokenizer,
    ByteTokenizer,
    CharTokenizer,
    WordTokenizer,
    split_chunks,
)

ANY = st.text(alphabet=st.characters(exclude_categories=["Cs"]))


@given(ANY)
@settings(deadline=None)
def test_round_trips(text):
    data = text.encode()
    for tokenizer in (ByteTokenizer(), CharTokenizer.of([data])):
        again = tokenizers.load_tokenizer(json.loads(json.dumps(tokenizer.describe())))
        ids = again.encode(data)
        assert again.decode(ids) == data
        assert ids.tolist() == tokenizer.encode(data).tolist()
        assert int(again.token_bytes[ids].sum()) == len(data)


def test_unknown_characters_are_listed():
    assert ByteTokenizer().unknown("anything ∑") == ""
    chars = CharTokenizer.of([b"hello", "wörld".encode()])
    assert chars.describe() == {"name": "chars", "characters": "dehlorwö"}
    assert chars.unknown("wörld") == ""
    assert chars.unknown("Hey, hey 𝄞") == "Hy, 𝄞"  # each once, in their order


def test_characters_keep_the_order_of_the_description():
    tokenizer = tokenizers.load_tokenizer({"name": "chars", "characters": "ba"})
    assert tokenizer.encode(b"ab").tolist() == [1, 0]
    assert tokenizer.decode([1, 0]) == b"ab"


def test_frequent_words_have_tokens():
    words = WordTokenizer.of([b"b a b\n", "<unknown> b ü a".encode()], 4)
    again = tokenizers.load_tokenizer(json.loads(json.dumps(words.describe())))
    assert again.vocabulary == 4
    ids = again.encode("a  b\nü <unknown> <>".encode()).tolist()
    assert again.decode(ids) == b"a b <unknown> <unknown> <unknown>"
    assert again.token_bytes[ids].tolist() == [1, 1, 9, 9, 9]


def test_document_end_is_a_zero_byte():
    learned = BpeTokenizer([bytes([i]) for i in range(256)])
    for tokenizer in (ByteTokenizer(), CharTokenizer("\0ab"), WordTokenizer(["a"]), learned):
        assert tokenizer.decode([tokenizer.end]) == b"\0"
        assert tokenizer.token_bytes[tokenizer.end] == 1
    assert learned.vocabulary == 257
    assert CharTokenizer("ab").end is None


@pytest.mark.parametrize(
    "description",
    [
        None,
        [],
        {},
        {"name": "x"},
        {"name": ["bytes"]},
        {"name": "chars"},
        {"name": "words", "words": ["a", "a"]},
        {"name": "words", "words": ["a", 1]},
        {"name": "chars", "characters": "aa"},
        {"name": "bpe"},
        {"name": "bpe", "merged": "aGk="},
        {"name": "bpe", "merged": [1]},
        {"name": "bpe", "merged": ["?"]},
        {"name": "bpe", "merged": [""]},
        {"name": "bpe", "merged": ["aGk=", "aGk="]},
        {"name": "bpe", "merged": ["YQ=="]},  # a single byte, which it has already
    ],
)
def test_invalid_description_is_refused(description):
    with pytest.raises(ValueError, match=r"."):
        tokenizers.load_tokenizer(description)


@given(st.text(alphabet="aé∑𝄞 \n", max_size=200), st.integers(4, 40))
@settings(deadline=None)
def test_chunks_are_whole_characters(text, size):
    data = text.encode()
    parts = list(split_chunks(data, size))
    assert b"".join(parts) == data
    assert all(0 < len(part) <= size for part in parts)
    assert all(part.decode() for part in parts)  # no character is cut


@pytest.mark.parametrize(
    "text", [" " * 1_000_000, "a" * 1_000_000, "é\t" * 300_000, "\n" * 700_000]
)
def test_huge_line_is_encoded(text):
    """The stack of tiktoken overflows on the first of these."""
    merged = ["".join(pair).encode() for pair in zip(string.ascii_letters, "  ", strict=False)]
    tokenizer = BpeTokenizer([*(bytes([i]) for i in range(256)), b"  ", b"aa", *merged])
    assert tokenizer.decode(tokenizer.encode(text.encode())) == text.encode()


@pytest.mark.parametrize(
    ("vocabulary", "dtype"),
    [(2, "uint8"), (256, "uint8"), (257, "uint16"), (65536, "uint16"), (65537, "uint32")],
)
def test_smallest_dtype_holds_all_ids(vocabulary, dtype):
    assert tokenizers.smallest_dtype(vocabulary) == np.dtype(dtype)

"""`qkablate train`: what stands around the run."""

import re

import pytest

from qkablate.cli.train import find_config_flags
from qkablate.data import corpus
from qkablate.errors import UserError


@pytest.mark.parametrize(
    ("words", "flags"),
    [
        ([], []),
        (["variant=merged_w"], []),
        (["--config-dir", "own", "seed=1"], ["--config-dir", "own"]),
        (["--config-dir=own"], ["--config-dir=own"]),
    ],
)
def test_flags_of_other_configurations_are_kept_for_the_next_commands(words, flags):
    assert find_config_flags(words) == flags


def test_a_short_run_says_of_how_many_tokens_its_losses_are(qkablate, tiny):
    words = [*tiny, "train.eval_tokens=64"]
    assert "val and train of 64 tokens, test of the whole split" in qkablate("train", *words).out
    part = qkablate("train", *tiny, "train.test_tokens=32").out
    assert "test of 32 tokens" in part
    whole = qkablate("train", *tiny, "train.eval_tokens=all", "seed=1").out
    assert "loss" in whole
    assert "val and train of" not in whole


@pytest.mark.parametrize(
    ("words", "notes"),
    [
        (
            ["variant=qk_norm", "variant.norm=none"],
            ["qk_norm with variant.norm=none model.heads=2 is standard"],
        ),
        (["variant=gqa"], ["gqa with model.heads=2 is mqa"]),
        (["variant=low_rank_w", "variant.rank=4"], []),
    ],
)
def test_a_variant_that_its_keys_make_another_one_is_named(qkablate, tiny, words, notes):
    done = qkablate("train", *words, *tiny)
    assert done.code == 0
    assert [line for line in done.err.splitlines() if " with " in line] == notes


def test_bits_per_byte_that_are_not_known_are_left_out(qkablate, tiny, monkeypatch):
    """Those of a part of the test split need the files of its tokenizer."""
    words = [*tiny, "train.test_tokens=32"]
    assert re.search(r"bits +val [\d.]+   test [\d.]+   per byte", qkablate("train", *words).out)

    def load(_):
        raise UserError("the files of 'gpt2' are not cached")

    monkeypatch.setattr(corpus, "load_tokenizer", load)
    done = qkablate("train", *words, "seed=1")
    assert re.search(r"bits +val [\d.]+   per byte", done.out)

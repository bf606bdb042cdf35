"""Tagged sentences as batches, and the accuracies that take no context."""

import numpy as np
import pytest

from qkablate.config import DataConfig, ModelConfig
from qkablate.config.data import SPLITS
from qkablate.data import IGNORE, TaggedSentences, find_data, open_data, sources
from qkablate.data.batches import PAD
from qkablate.data.tokenizers import load_tokenizer
from qkablate.errors import UserError

MODEL = ModelConfig(form="encoder", context=10)
# The word `x` is an argument twice as often as a value, in every file.
LINES = ["f(x, {n})", "g(x, {n})", "{n} + x + 1"]


@pytest.fixture
def config(tmp_path, monkeypatch):
    for i in range(60):
        lines = (f"{line.format(n=f'name_{i}')}\n" for line in LINES)
        (tmp_path / f"{i}.py").write_text("".join(lines))
    monkeypatch.setattr(sources, "find_files", lambda _: sorted(tmp_path.glob("*.py")))
    return DataConfig(
        source="stdlib_tags", tokenizer="words", vocab_size=257, cache=str(tmp_path / "cache")
    )


@pytest.fixture
def data(config):
    return open_data(config, MODEL)


def test_modules_are_held_out(data):
    tokenizer = load_tokenizer(data.tokenizer)
    names = {}
    for split in SPLITS:
        sentences = data.splits[split]
        texts = [tokenizer.decode(sentences.sentence(i, 0)) for i in range(len(sentences))]
        names[split] = {word for text in texts for word in text.split() if b"name_" in word}
    assert not names["train"] & (names["val"] | names["test"])
    assert all(len(data.splits[split]) for split in SPLITS)


def test_tags_are_asked_for_at_their_words(data):
    tokenizer = load_tokenizer(data.tokenizer)
    batch = data.batch("train", np.arange(len(data.splits["train"])))
    assert [*data.tags.values()].count("argument") == 1
    for tokens, targets in zip(batch.tokens_NT.tolist(), batch.targets_NA.tolist(), strict=True):
        words = [tokenizer.decode([token]).decode() for token in tokens if token != PAD]
        tags = ["" if tag == IGNORE else data.tags[tag] for tag in targets[: len(words)]]
        if words[1] == "(":
            assert words[0] in ("f", "g")
            assert tags == ["call", "", "argument", "", "argument", ""]
        else:
            assert tags == ["value", "", "value", "", ""]
        assert {*targets[len(words) :]} == {IGNORE}


def test_baselines_are_the_best_guesses_of_the_training_split(data):
    """Four of eight names are arguments; those of a held-out module are not known."""
    assert data.chance == data.baselines.chance == pytest.approx(4 / 8)
    assert data.baselines.word == pytest.approx(6 / 8)
    assert data.description.endswith("; each word's most common tag is right at 75.0%")


def test_metrics_are_also_given_by_tag(data):
    from qkablate.data import EvalMetrics

    totals = EvalMetrics()
    for batch in data.split_batches("test", batch_size=4, context=10):
        hits = batch.targets_NA.numpy() == next(
            tag for tag, name in data.tags.items() if name == "value"
        )
        totals.add_answers(batch, np.ones(hits.shape), hits)
    metrics = data.metrics("test", totals)
    assert metrics["accuracy"] == pytest.approx(2 / 8)
    assert metrics["exact"] == pytest.approx(1 / 3)
    assert metrics["accuracy/tag/value"] == 1
    assert metrics["accuracy/tag/argument"] == metrics["accuracy/tag/call"] == 0


def test_data_is_found_by_its_fingerprint(config, data):
    assert isinstance(find_data(config, MODEL, data.fingerprint), TaggedSentences)


def test_short_contexts_and_other_forms_are_rejected(config):
    with pytest.raises(UserError, match=r"use model.context=6 or more"):
        open_data(config, ModelConfig(form="encoder", context=5)).check_context(5)
    for form in ("decoder", "encoder_decoder"):
        with pytest.raises(UserError, match=f"has tags of words for model.form=encoder.*{form}"):
            open_data(config, ModelConfig(form=form))

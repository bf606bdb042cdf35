"""Masked language modelling: what is masked, and that it depends on the right things alone."""

import dataclasses

import numpy as np
import pytest
import torch

from qkablate.config import DataConfig, ModelConfig
from qkablate.data import IGNORE, MaskedText, find_data, iterate_windows, open_data
from qkablate.data.batches import DOCUMENT
from qkablate.errors import UserError

ENCODER = ModelConfig(form="encoder", context=40)
MASK = 256


@pytest.fixture
def config(tmp_path):
    """Documents of random letters, so that nothing but masking changes a token."""
    rng = np.random.default_rng(0)
    for i in range(400):
        letters = rng.integers(97, 123, size=int(rng.integers(60, 200)))
        (tmp_path / f"{i}.txt").write_bytes(letters.astype(np.uint8).tobytes())
    return DataConfig(
        source="text", objective="mlm", path=f"{tmp_path}/*.txt", cache=str(tmp_path / "cache")
    )


@pytest.fixture
def text(config):
    return open_data(config, ENCODER)


def train_batches(text, steps, seed=0, grad_accum=1):
    batches = text.batches(seed=seed, batch_size=16, grad_accum=grad_accum, context=40)
    return [batch for step in range(steps) for batch in batches.step(step)]


def stack(batches):
    """Return tokens, targets and positions of batches as arrays."""
    parts = [(b.tokens_NT.numpy(), b.targets_NA.numpy(), b.positions_NA.numpy()) for b in batches]
    return tuple(map(np.concatenate, zip(*parts, strict=True)))


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a[0] + a[1:3], b[0] + b[1:3], strict=True))


def test_fifteen_percent_of_every_window_are_predicted(text):
    tokens_NT, targets_NA, positions_NA = stack(train_batches(text, 4))
    assert tokens_NT.shape == (64, 40)
    assert targets_NA.shape == positions_NA.shape == (64, 6)
    assert all(len({*row}) == 6 for row in positions_NA.tolist())
    assert text.answer_fraction == 6 / 40


def test_of_these_eighty_percent_are_masked_and_ten_random(text):
    tokens_NT, targets_NA, positions_NA = stack(train_batches(text, 100))
    read_NA = np.take_along_axis(tokens_NT, positions_NA, axis=1)
    counts_NA = targets_NA != IGNORE
    read, targets = read_NA[counts_NA], targets_NA[counts_NA]
    masked, kept = read == MASK, read == targets
    assert masked.mean() == pytest.approx(0.8, abs=0.02)
    # A random token is the right one by chance once in 256.
    assert kept.mean() == pytest.approx(0.1 + 0.1 / 256, abs=0.015)
    random = read[~masked & ~kept]
    assert len({*random.tolist()}) > 200  # any byte, but no mask


def test_all_other_tokens_are_those_of_the_text(text):
    """Restored, every window is a part of the text; the mask and the end are never asked for."""
    content = text.corpus.split("train").tobytes()
    tokens_NT, targets_NA, positions_NA = stack(train_batches(text, 4))
    restored_NT = tokens_NT.copy()
    answers_NA = np.where(
        targets_NA == IGNORE, np.take_along_axis(tokens_NT, positions_NA, axis=1), targets_NA
    )
    np.put_along_axis(restored_NT, positions_NA, answers_NA, axis=1)
    assert all(row.astype(np.uint8).tobytes() in content for row in restored_NT)
    assert not {0, MASK} & {*targets_NA.ravel().tolist()}
    assert (restored_NT == 0).any()  # some windows have an end


def test_ends_of_documents_are_not_masked(text):
    windows_NT = np.zeros((3, 40), np.uint8)
    windows_NT[1, :2] = 97
    tokens_NT, targets_NA, _ = text.mask_windows(windows_NT, np.random.default_rng(0))
    assert (tokens_NT[:, 2:] == 0).all()
    assert (targets_NA != IGNORE).sum(axis=1).tolist() == [0, 2, 0]


def test_training_masks_depend_on_seed_and_step_alone(text):
    first, second = train_batches(text, 2)
    assert same(train_batches(text, 2)[1], second)
    assert not same(first, second)
    assert not same(train_batches(text, 1, seed=1)[0], first)
    whole = stack(train_batches(text, 1, grad_accum=2))
    assert whole[0].shape == (32, 40)


def test_masks_of_an_evaluation_are_the_same_however_it_is_batched(text):
    def rows(batch_size, limit=None):
        batches = text.split_batches("val", batch_size=batch_size, context=40, limit=limit)
        arrays = stack(batches)
        kept = (arrays[1] != IGNORE).any(axis=1)
        parts = (array[kept].tolist() for array in arrays)
        return [tuple(map(tuple, row)) for row in zip(*parts, strict=True)]

    whole = rows(16)
    assert rows(7) == whole
    assert len(whole) == -(-text.tokens["val"] // 40)
    some = rows(5, limit=200)
    assert len(some) == 5
    assert {*some} < {*whole}


def test_a_split_is_read_whole_and_counted_by_document(text):
    batches = [*text.split_batches("test", batch_size=8, context=40)]
    slices = np.concatenate([batch.slices[DOCUMENT] for batch in batches])
    _, targets_NA, _ = stack(batches)
    documents = text.corpus.manifest.documents["test"]
    counted = {*slices[targets_NA != IGNORE].tolist()}
    assert len(counted) == documents > 3
    val = next(text.split_batches("val", batch_size=8, context=40))
    assert val.slices == {}  # the accuracy is counted, too


def test_a_single_document_is_counted_on_request(config, tmp_path):
    file = tmp_path / "one.txt"
    file.write_text("the cat sat on the mat and saw a dog\n" * 2_000)
    one = dataclasses.replace(config, path=str(file))
    for text in (open_data(one, ENCODER), open_data(one, ENCODER).corpus):
        batch = next(text.split_batches("val", batch_size=2, context=40, by_document=True))
        assert {*batch.slices[DOCUMENT].ravel().tolist()} == {0}
        own = next(text.split_batches("val", batch_size=2, context=40))
        assert DOCUMENT not in (own.slices or {})


@pytest.mark.parametrize("limit", [None, 500])
def test_a_training_split_shorter_than_validation_is_read_whole(config, limit):
    text = open_data(dataclasses.replace(config, max_tokens=1000), ENCODER)
    assert text.tokens["train"] < text.tokens["val"]
    batches = [*text.split_batches("train", batch_size=8, context=40, limit=limit)]
    assert all(batch.inputs[0].shape == (8, 40) for batch in batches)
    counted = sum(int((batch.targets_NA[:, 0] != IGNORE).sum()) for batch in batches)
    assert counted == (-(-text.tokens["train"] // 40) if limit is None else limit // 40)
    assert text.sample("train", count=4, context=40).inputs[0].shape == (4, 40)


def test_fingerprint_is_that_of_the_masked_text(config, text):
    causal = dataclasses.replace(config, objective="causal")
    plain = open_data(causal, ModelConfig(context=40))
    assert plain.fingerprint == text.corpus.fingerprint != text.fingerprint
    assert plain.vocabulary + 1 == text.vocabulary == MASK + 1
    found = find_data(config, ENCODER, text.fingerprint)
    assert isinstance(found, MaskedText)
    assert found.fingerprint == text.fingerprint
    assert find_data(config, ENCODER, plain.fingerprint) is None
    # Other windows have other masks.
    assert open_data(config, dataclasses.replace(ENCODER, context=20)).fingerprint != (
        text.fingerprint
    )


@pytest.mark.parametrize(
    ("form", "objective", "line"),
    [
        ("encoder", "causal", "predicts the next token, which model.form=encoder reads"),
        ("encoder", None, "use data.objective=mlm"),
        ("decoder", "mlm", "use model.form=encoder, as in model=nano_encoder"),
        ("encoder_decoder", "mlm", "needs pairs of source and target"),
    ],
)
def test_objectives_of_other_forms_are_rejected(config, form, objective, line):
    """Before the text is prepared."""
    with pytest.raises(UserError) as error:
        open_data(dataclasses.replace(config, objective=objective), ModelConfig(form))
    assert line in str(error.value)
    assert "\n" not in str(error.value)


def test_short_splits_are_rejected(text):
    with pytest.raises(UserError, match="100000 is longer than the data: the train split holds"):
        text.check_context(100_000)


def test_windows_are_listed_as_a_run_sees_them(text):
    windows = iterate_windows(text, "train", seed=0, batch_size=16, grad_accum=1, context=40)
    batch, row = next(windows)
    assert row == 0
    assert same(batch, train_batches(text, 1)[0])

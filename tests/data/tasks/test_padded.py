"""Pairs of different lengths: every form reads the same pairs, and each target counts once."""

import numpy as np
import pytest

from qkablate.config import DataConfig, ModelConfig
from qkablate.config.data import PADDED_SOURCES
from qkablate.data import IGNORE, TASKS, EvalMetrics, open_data
from qkablate.data.batches import PAD
from qkablate.errors import UserError

KEYS = {"add": {"digits": 3, "extra_digits": 2}, "commands": {"phrases": 2, "held_out": 4}}
LENGTHS = {"add": (11, 7), "commands": (9, 49)}  # of the longest source and target


def make(name, form="encoder_decoder", longest=None, **keys):
    longest_source, longest_target = longest or LENGTHS[name]
    lengths = {
        "decoder": {"context": longest_source + longest_target},
        "encoder": {"context": longest_source},
        "encoder_decoder": {"context": longest_target, "source": longest_source},
    }
    data = DataConfig(
        source=name,
        tokenizer=None,
        cache=None,
        val_tokens=1000,
        test_tokens=3000,
        **KEYS[name] | keys,
    )
    return open_data(data, ModelConfig(form=form, **lengths[form]))


def pairs_of(task, examples):
    """Return the texts of the sources and of the targets."""
    if task.form == "decoder":  # the source is before the first answer
        sources = [
            row[:first]
            for row, first in zip(examples.tokens_NT, examples.positions_NA[:, 0], strict=True)
        ]
    else:
        sources = examples.tokens_NT if task.form == "encoder" else examples.sources_NS
    return [
        tuple(" ".join(task.format_token(t) for t in part.tolist() if t >= 0) for part in pair)
        for pair in zip(sources, examples.targets_NA, strict=True)
    ]


def test_every_padded_source_is_tested():
    assert {*PADDED_SOURCES} & {*TASKS} == {*KEYS}


@pytest.mark.parametrize("name", KEYS)
def test_every_form_reads_the_same_pairs(name):
    forms = ["decoder", "encoder_decoder", *(["encoder"] if name == "add" else [])]
    pairs = []
    for form in forms:
        task = make(name, form)
        examples = task.generate_test(np.random.default_rng(0), 50)
        pairs.append(pairs_of(task, examples))
        assert examples.tokens_NT.dtype == examples.targets_NA.dtype == np.int64
    assert all(others == pairs[0] for others in pairs)
    assert all(target.endswith(" end") for _, target in pairs[0])
    assert len({*map(len, next(zip(*pairs[0], strict=True)))}) > 3  # the lengths differ


@pytest.mark.parametrize("name", KEYS)
@pytest.mark.parametrize("form", ["decoder", "encoder_decoder"])
def test_decoder_reads_the_marker_and_then_the_target(name, form):
    task = make(name, form)
    examples = task.generate(np.random.default_rng(0), 50)
    for row, targets in enumerate(examples.targets_NA):
        answer = targets[targets != IGNORE].tolist()
        first = 0 if form == "encoder_decoder" else int(examples.positions_NA[row, 0])
        tokens = examples.tokens_NT[row].tolist()
        assert task.format_token(tokens[first]) == ">"
        assert tokens[first + 1 : first + len(answer)] == answer[:-1]
        assert {*tokens[first + len(answer) :]} <= {answer[-1]}  # padding is the end token
        assert (targets[: len(answer)] != IGNORE).all()
        if form == "decoder":
            expected = [*range(first, first + len(answer))]
            assert examples.positions_NA[row, : len(answer)].tolist() == expected


@pytest.mark.parametrize("name", KEYS)
def test_padding_is_at_the_end_of_sources_alone(name):
    examples = make(name).generate_test(np.random.default_rng(0), 50)
    is_padding_NS = examples.sources_NS == PAD
    assert is_padding_NS.any()
    assert (np.diff(is_padding_NS.astype(int), axis=1) >= 0).all()
    assert (examples.tokens_NT >= 0).all()


@pytest.mark.parametrize("name", KEYS)
@pytest.mark.parametrize("form", ["decoder", "encoder_decoder"])
def test_batches_have_one_shape(name, form):
    task = make(name, form)
    length = {"batch_size": 8, "context": task.length}
    steps = task.batches(seed=0, grad_accum=1, **length)
    batches = [steps.step(n)[0] for n in range(5)]
    for split in ("val", "test"):
        batches += task.split_batches(split, **length)
    shapes = {tuple(part.shape for part in (*batch.inputs, batch.targets_NA)) for batch in batches}
    assert len(shapes) == 1
    assert sum(batch.positions_NA is None for batch in batches) in (0, len(batches))


@pytest.mark.parametrize("name", KEYS)
@pytest.mark.parametrize("size", [1, 7, 64, 1000])
def test_evaluation_counts_every_target_once(name, size):
    task, totals, seen = make(name), EvalMetrics(), []
    for batch in task.split_batches("test", batch_size=size, context=task.length):
        counts_NA = batch.targets_NA.numpy() != IGNORE
        hits_NA = np.ones(counts_NA.shape, bool)
        hits_NA[:, 0] = np.broadcast_to(batch.slices["pair"], counts_NA.shape)[:, 0] == 0
        totals.add_answers(batch, np.ones(counts_NA.shape), hits_NA)
        seen += [
            (source, target)
            for source, target, counts in zip(
                batch.inputs[0].tolist(), batch.targets_NA.tolist(), counts_NA, strict=True
            )
            if counts.any()
        ]
    examples = task._split("test")
    expected = list(zip(examples.sources_NS.tolist(), examples.targets_NA.tolist(), strict=True))
    assert seen == expected
    assert totals.all.count == int((examples.targets_NA != IGNORE).sum())
    assert totals.sequences.count == len(expected)
    metrics = task.metrics("test", totals)
    assert metrics["exact"] == pytest.approx(0.75, abs=0.01)
    assert metrics["exact/pair/known"] == 1
    assert metrics["exact/pair/held_out"] == 0
    assert metrics["accuracy/pair/known"] == 1 > metrics["accuracy/pair/held_out"] > 0


@pytest.mark.parametrize("name", KEYS)
def test_only_the_test_split_has_pairs_that_are_held_out(name):
    task = make(name)
    for split, expected in (("train", 0), ("val", 0), ("test", 0.25)):
        batches = task.split_batches(split, batch_size=1, context=task.length)
        held_out = [bool(batch.slices["pair"].any()) for batch in batches]
        assert np.mean(held_out) == pytest.approx(expected, abs=0.01)
    training = task.batches(seed=0, batch_size=64, grad_accum=1, context=task.length)
    assert not any(training.step(step)[0].slices["pair"].any() for step in range(5))


@pytest.mark.parametrize(("name", "key"), [("add", "extra_digits"), ("commands", "held_out")])
def test_nothing_is_held_out_where_none_is_asked_for(name, key):
    examples = make(name, **{key: 0}).generate_test(np.random.default_rng(0), 50)
    assert not examples.slices["pair"].any()


@pytest.mark.parametrize(
    ("form", "lengths", "line"),
    [
        ("encoder_decoder", {"context": 7, "source": 10}, "model.source: 10 is too short"),
        ("encoder_decoder", {"context": 6, "source": 11}, "use model.context=7 or more"),
        ("encoder", {"context": 10}, "use model.context=11 or more"),
    ],
)
def test_model_that_is_too_short_is_rejected(form, lengths, line):
    data = DataConfig(source="add", tokenizer=None, cache=None, **KEYS["add"])
    with pytest.raises(UserError) as error:
        open_data(data, ModelConfig(form=form, **lengths))
    assert line in str(error.value)

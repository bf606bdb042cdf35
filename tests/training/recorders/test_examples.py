"""Examples of translators and encoders."""

import pytest
import torch

from qkablate.compose.configs import make_config, open_hydra
from qkablate.data import IGNORE
from qkablate.data.pairs.sentences import TargetTokens
from qkablate.models.translate import translate
from qkablate.training.recorders.examples import make_example_tables, make_examples
from qkablate.training.resolve import plan_run

SIZES = {"model.layers": 1, "model.d_model": 16, "model.heads": 2, "threads": 1, "device": "cpu"}
TRANSLATOR = {"model": "nano_translator", "data": "add", "model.context": 8, "model.source": 13}
MASKED = {"model": "nano_encoder", "data": "text", "data.objective": "mlm", "model.dropout": 0.5}


@pytest.fixture
def make_plan(text, tmp_path):
    def plan(words):
        if words["data"] == "text":
            words = words | {"data.path": text, "data.cache": tmp_path / "cache"}
        with open_hydra():
            words = words | SIZES | {"out": tmp_path / "outputs"}
            config = make_config({key: str(value) for key, value in words.items()})
        return plan_run(config)

    return plan


def make_model(plan, seed=0):
    return plan.build().to_empty(device="cpu").init_(seed)


def test_translations_are_those_of_greedy_decoding(make_plan):
    plan = make_plan(TRANSLATOR)
    model, task = make_model(plan), plan.data
    examples = make_examples(model, task, "test", 5)
    assert len(examples) == 5
    batch = task.sample("test", count=5, context=8)
    for row, example in enumerate(examples):
        source = [i for i in batch.inputs[0][row].tolist() if i >= 0]
        target = [i for i in batch.targets_NA[row].tolist() if i not in (IGNORE, task.end)]
        (output,) = translate(model.eval(), [source], TargetTokens(task.marker, task.end))
        texts = (" ".join(map(task.format_token, ids)) for ids in (source, target, output))
        assert (example.text, example.answers, example.output) == (*texts,)
        assert example.accuracy == (output == target)


def test_examples_are_the_same_for_all_models(make_plan):
    plan = make_plan(TRANSLATOR)
    one, other = (make_examples(make_model(plan, seed), plan.data, "test", 3) for seed in (0, 1))
    assert [e.text for e in one] == [e.text for e in other]
    assert [e.loss for e in one] != [e.loss for e in other]


def test_accuracy_and_loss_of_masked_windows_are_those_of_evaluation(make_plan):
    """Without dropout, and the model trains on as before."""
    plan = make_plan(MASKED)
    model = make_model(plan)
    examples = make_examples(model, plan.data, "val", 4)
    assert model.training
    batch = plan.data.sample("val", count=4, context=8)
    arguments = (*batch.inputs, batch.targets_NA, batch.positions_NA)
    with torch.no_grad():
        losses_NA, hits_NA = model.eval().loss_and_hits(*arguments)
    for row, example in enumerate(examples):
        assert example.loss == pytest.approx(float(losses_NA[row].mean()), rel=1e-5)
        assert example.accuracy == float(hits_NA[row].float().mean())
        assert example.text.count("▒") <= 1  # one of eight tokens is asked for
        assert len(example.answers) == 3  # with its quotation marks


def test_tables_have_the_words_of_each_form(make_plan):
    plans = map(make_plan, (TRANSLATOR, MASKED))
    pair, masked = (make_example_tables(plan, make_model(plan), print) for plan in plans)
    columns, rows = pair.tables["examples"]
    assert columns == ["source", "target", "output", "right", "nats_per_token"]
    assert len(rows) == 10
    assert {type(row[3]) for row in rows} == {bool}
    columns, rows = masked.tables["examples"]
    assert columns == ["text", "answers", "output", "accuracy", "nats_per_token"]


def test_decoders_and_tuning_runs_have_no_table(make_plan):
    """Tuning runs never read the test split."""
    for words in ({"model": "nano", "data": "copy"}, TRANSLATOR | {"train.evaluate_test": False}):
        plan = make_plan(words)
        assert make_example_tables(plan, make_model(plan), print) is None


def test_an_error_is_noted_and_loses_no_run(make_plan):
    plan, notes = make_plan(TRANSLATOR), []
    model = make_model(plan)
    with torch.no_grad():
        model.output_weight.fill_(float("inf"))
    assert make_example_tables(plan, model, notes.append) is None
    assert notes == [
        "W&B: no table of examples: the logits of the model are not finite: the run has diverged"
    ]

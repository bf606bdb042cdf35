"""`qkablate.train` as a user calls it."""

import signal

import pytest

import qkablate as api
from qkablate.errors import UserError
from qkablate.runs.run import Run
from qkablate.training.loop import Trainer
from tests.api.helpers import as_keys


@pytest.fixture
def keys(tiny):
    return as_keys(tiny)


def test_a_run_is_that_of_the_command(keys, tiny, qkablate):
    run = api.train(variant="no_q", seed=1, **keys)
    assert (run.status, run.reason, run.seed) == ("done", "", 1)
    assert run.val > 0
    assert run.test > 0
    assert run.config["variant.name"] == "no_q"
    assert run.config["train.steps"] == 12
    done = qkablate("train", "variant=no_q", "seed=1", *tiny)
    assert done.code == 0
    assert "this run ended before" in done.out
    assert f"test {run.test:.4f}" in done.out
    assert str(run.folder) in done.out


def test_a_second_call_returns_the_result(keys):
    first = api.train(**keys)
    ended = (first.folder / "result.json").stat().st_mtime_ns
    second = api.train(**keys)
    assert (second.run.id, second.test) == (first.run.id, first.test)
    assert (first.folder / "result.json").stat().st_mtime_ns == ended
    assert api.train(rerun=True, **keys).test == first.test
    assert (first.folder / "attempts" / "1").is_dir()
    where = {"data.cache": keys["data.cache"]}
    assert api.evaluate(first, split="test", tokens="all", **where).run == first.folder.name


def test_a_run_extends_a_shorter_one(keys):
    keys["optim.schedule"] = "wsd"
    shorter = api.train(**keys)
    longer = api.train(extend=True, **keys | {"train.steps": 20})
    assert longer.config["optim.warmup"] == shorter.config["optim.warmup"]
    with pytest.raises(UserError, match="no shorter wsd run"):
        api.train(extend=True, **keys)


MISTAKES = [
    ({"variant": "mergd_w"}, "variant: 'mergd_w' \\(nearest: merged_w\\) is not one of merged_w, "),
    ({"variant": "standard,no_q"}, "variant: "),
    ({"model.d_modle": 3}, r"model\.d_modle: .*nearest: model\.d_model"),
    ({"model.heads": 3}, r"model\.heads: 3 does not divide model\.d_model"),
    ({"seed": [0, 1]}, "seed: .*qkablate.sweep trains a run each"),
    ({"train.steps": "many"}, r"train\.steps: 'many' is not auto, or 1 or more"),
    ({"data": "text", "data.path": "missing.txt"}, r"data\.path: .*missing\.txt"),
]


@pytest.mark.parametrize(("mistake", "message"), MISTAKES)
def test_a_mistake_is_one_line_before_any_work(tmp_path, mistake, message):
    with pytest.raises(api.UserError, match=message) as caught:
        api.train(**mistake)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "outputs" / "runs").exists()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("no_q", r"train: 'no_q' needs its key, as in train\(variant='no_q'\)"),
        ({"seed": 1}, r"train: a dictionary of keys is written train\(\*\*settings\)"),
    ],
)
def test_argument_without_its_key_is_rejected(value, message):
    with pytest.raises(api.UserError, match=message):
        api.train(value)


def test_a_run_that_another_process_trains_is_left_alone(keys):
    run = api.train(**keys)
    with (
        Run(keys["out"], run.run.label, run.run.id).hold_lease(),
        pytest.raises(api.UserError, match="is being trained by"),
    ):
        api.train(**keys)


def test_a_failure_is_a_record(keys, monkeypatch):
    def fail(*_):
        raise RuntimeError("no more")

    monkeypatch.setattr("qkablate.training.loop.Trainer.fit", fail)
    run = api.train(**keys)
    assert (run.status, run.test) == ("failed", None)
    assert "no more" in run.reason


@pytest.mark.parametrize(
    ("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)]
)
def test_a_signal_stops_the_run_and_the_program(keys, monkeypatch, number, error):
    step = Trainer._step

    def stop(self, *arguments):
        if self.progress.step == 6:
            signal.raise_signal(number)
        return step(self, *arguments)

    monkeypatch.setattr(Trainer, "_step", stop)
    with pytest.raises(error):
        api.train(**keys)
    monkeypatch.setattr(Trainer, "_step", step)
    (interrupted,) = api.load_runs(keys["out"])
    assert interrupted.status == "interrupted"
    assert api.train(**keys).status == "done"

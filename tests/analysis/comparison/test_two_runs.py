"""Two runs side by side: what they differ in, and by how much."""

import dataclasses
import json
import math

import pytest

from qkablate.analysis.comparison.two_runs import GapReading, compare_runs, propose_sweep
from qkablate.errors import UserError
from tests.cli.helpers import SIZES, run_in

CONFIG = """
variant: {name: standard, qk: separate}
model: {d_model: 16, heads: 2}
optim: {lr: 0.001, betas: [0.9, 0.95]}
seed: 0
seeds: {init: 0, data: 0}
threads: 1
out: outputs
tracking: {wandb: auto}
id: one
identity: {device: cpu}
"""
RESULT = {
    "id": "one",
    "status": "done",
    "loss": {"train": 2.0, "val": 2.25, "test": 2.5},
    "params": {"total": 1000, "embedding": 200},
    "flops_per_token": 5000,
    "tokens": 384,
    "seconds": 1.5,
    "packed": 1,
    "data_fingerprint": "text",
    "precision": "fp32",
    "device": "cpu",
    "kernel": "flash",
    "threads": 1,
}


@pytest.fixture
def make(tmp_path):
    """Return a function that writes a synthetic run folder."""

    def write(name, config=CONFIG, result=RESULT, curve=()):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.yaml").write_text(config)
        if result is not None:
            text = result if isinstance(result, str) else json.dumps(result)
            (folder / "result.json").write_text(text)
        rows = [{"tokens": tokens, "val/loss": loss} for tokens, loss in curve]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return folder

    return write


def other_losses(**losses):
    return {**RESULT, "loss": {**RESULT["loss"], **losses}}


def check_json(comparison):
    """Check that a comparison has a JSON form without NaN, and return it."""
    json.dumps(dataclasses.asdict(comparison), allow_nan=False)
    return comparison


def test_two_arms_of_one_seed_are_a_pair(make):
    config = CONFIG.replace("name: standard, qk: separate", "name: no_q, qk: no_q")
    config = config.replace("id: one", "id: two").replace("threads: 1", "threads: 2")
    result = {**other_losses(test=2.75, val=2.5), "seconds": 3.0}
    result["params"] = {"total": 900, "embedding": 150}
    comparison = check_json(compare_runs(make("no_q", config, result), make("standard")))
    assert comparison.runs == ("no_q", "standard")
    assert comparison.status == ("done", "done")
    assert comparison.gap == {"train": 0.0, "val": 0.25, "test": 0.25}
    assert comparison.perplexity_percent["test"] == pytest.approx(100 * (math.exp(0.25) - 1))
    assert comparison.params == (750, 800)
    assert comparison.total_params == (900, 1000)
    assert comparison.seconds == (3.0, 1.5)
    assert comparison.differ == {
        "variant.name": ("no_q", "standard"),
        "variant.qk": ("no_q", "separate"),
    }
    assert comparison.unlike == {}
    assert comparison.paired


def test_gap_turns_round_with_the_runs(make):
    one, other = make("one", result=other_losses(test=3.0)), make("other")
    assert compare_runs(one, other).gap["test"] == -compare_runs(other, one).gap["test"] == 0.5


def test_run_beside_itself_differs_in_nothing(make):
    folder = make("one", curve=[(32, 3.0)])
    comparison = compare_runs(folder, folder)
    assert comparison.differ == comparison.unlike == {}
    assert {*comparison.gap.values()} == {0.0}
    assert comparison.val_gap == [GapReading(tokens=32, gap=0.0)]
    assert comparison.paired


@pytest.mark.parametrize("change", [("seed: 0", "seed: 1"), ("init: 0", "init: 5")])
def test_runs_of_other_seeds_are_not_paired(make, change):
    comparison = compare_runs(make("one", CONFIG.replace(*change)), make("other"))
    assert not comparison.paired
    assert len(comparison.differ) == 1


def test_runs_on_other_data_are_not_paired(make):
    comparison = compare_runs(
        make("one", result={**RESULT, "data_fingerprint": "songs"}), make("other")
    )
    assert not comparison.paired
    assert comparison.unlike == {"data_fingerprint": ("songs", "text")}


def test_other_circumstances_are_listed_and_runs_stay_paired(make):
    one = make("one", result={**RESULT, "kernel": "math", "precision": "bf16"})
    environment = {"versions": {"torch": "2.14"}, "machine": {"cpu": "a CPU"}}
    (one / "environment.json").write_text(json.dumps(environment))
    comparison = compare_runs(one, make("other"))
    assert comparison.unlike == {
        "precision": ("bf16", "fp32"),
        "kernel": ("math", "flash"),
        "torch": ("2.14", None),
        "cpu": ("a CPU", None),
    }
    assert comparison.paired


def test_key_missing_in_one_config_is_listed(make):
    comparison = compare_runs(make("one", CONFIG + "deterministic: true\n"), make("other"))
    assert comparison.differ == {"deterministic": (True, None)}


def test_curves_are_compared_at_common_readings(make):
    one = make("one", curve=[(32, 4.0), (64, 3.5), (96, 3.0)])
    other = make("other", curve=[(32, 3.5), (96, 3.25), (128, 3.0)])
    assert compare_runs(one, other).val_gap == [GapReading(32, 0.5), GapReading(96, -0.25)]


def test_validation_losses_of_other_tokens_have_no_gap(make):
    config = CONFIG + "train: {eval_tokens: 64}\n"
    one = make("one", config, curve=[(32, 4.0)])
    other = make("other", config.replace("64", "128"), curve=[(32, 3.5)])
    comparison = compare_runs(one, other)
    assert comparison.val_gap == []
    assert {*comparison.gap} == {"train", "test"}
    assert comparison.loss["val"] == (2.25, 2.25)


def test_test_losses_of_other_tokens_have_no_gap(make):
    one, other = make("one", result={**RESULT, "test_tokens": 64}), make("other")
    comparison = compare_runs(one, other)
    assert {*comparison.gap} == {"train", "val"}
    assert "of 64 tokens and of the whole split" in comparison.unequal_tests
    same = compare_runs(one, make("same", result={**RESULT, "test_tokens": 64}))
    assert "test" in same.gap
    assert not same.unequal_tests


@pytest.mark.parametrize(
    "result",
    [
        None,
        "",
        "[]",
        '{"status": "done"',
        "[" * 20_000,
        json.dumps(other_losses(test=math.nan)),
        json.dumps({**RESULT, "status": "finished"}),
        json.dumps({**RESULT, "loss": {}}),
    ],
    ids=["none", "empty", "a list", "half", "deep", "NaN", "no status", "no losses"],
)
def test_run_without_a_result_has_no_gap(make, result):
    comparison = check_json(
        compare_runs(make("one", result=result, curve=[(32, 4.0)]), make("other"))
    )
    assert comparison.status == ("no result", "done")
    assert comparison.gap == comparison.perplexity_percent == {}
    assert comparison.params == (None, 800)


@pytest.mark.parametrize("status", ["failed", "diverged"])
def test_run_without_loss_shows_its_status(make, status):
    result = {**RESULT, "status": status, "diverged_at": 3}
    result["loss"] = {"train": None, "val": None, "test": None}
    comparison = check_json(compare_runs(make("one", result=result), make("other")))
    assert comparison.status == (status, "done")
    assert comparison.gap == {}


@pytest.mark.parametrize(
    "train",
    [math.nan, math.inf, "2.0", True, [2.0], None, 10**400],
    ids=lambda value: str(value)[:8],
)
def test_missing_training_loss_has_no_gap(make, train):
    comparison = check_json(
        compare_runs(make("one", result=other_losses(train=train)), make("other"))
    )
    assert {*comparison.gap} == {"val", "test"}


def test_extreme_losses_give_finite_numbers(make):
    comparison = check_json(compare_runs(make("one", result=other_losses(test=1e6)), make("other")))
    assert comparison.gap["test"] == pytest.approx(1e6 - 2.5)


@pytest.mark.parametrize(
    "config",
    [
        "",
        "[1, 2]",
        "a: [",
        "3",
        "!!python/object/apply:os.system ['true']",
        "a: " + "[" * 20_000,
        "\0",
    ],
    ids=["empty", "a list", "half", "a number", "an object", "deep", "zero"],
)
def test_invalid_config_is_a_one_line_user_error(make, config):
    with pytest.raises(UserError, match=r"config\.yaml") as error:
        compare_runs(make("one", config), make("other"))
    assert "\n" not in str(error.value)


def test_missing_or_binary_config_is_a_user_error(make, tmp_path):
    with pytest.raises(UserError, match="cannot be read"):
        compare_runs(make("one"), tmp_path / "nowhere")
    broken = make("broken")
    (broken / "config.yaml").write_bytes(bytes(range(256)))
    with pytest.raises(UserError, match="cannot be read"):
        compare_runs(broken, make("other"))
    with pytest.raises(UserError, match="contains no alias"):
        compare_runs(make("circle", CONFIG + "own: &a [*a]\n"), make("third"))


@pytest.mark.parametrize(
    "odd",
    ["3: 4", "null: 1", "true: 1", "when: 2020-01-01", "rate: .nan", "m: {1: 2}"],
    ids=["number", "null", "true", "date", "NaN", "inner number"],
)
def test_odd_config_keys_and_values_are_shown_verbatim(make, odd):
    comparison = compare_runs(make("one", CONFIG + odd + "\n"), make("other"))
    assert len(comparison.differ) == 1
    check_json(comparison)


def test_two_trained_runs_side_by_side(train, tmp_path):
    folders = []
    for name in ("standard", "no_q"):
        (tmp_path / name).mkdir()
        words = [f"variant={name}", "train.steps=4", "train.batch_size=2", "train.eval_every=2"]
        folders.append(train(tmp_path / name, *words))
    comparison = check_json(compare_runs(folders[1], folders[0]))
    results = [json.loads((folder / "result.json").read_text()) for folder in folders]
    gap = results[1]["loss"]["test"] - results[0]["loss"]["test"]
    assert comparison.gap["test"] == pytest.approx(gap)
    assert comparison.differ["variant.name"] == ("no_q", "standard")
    assert comparison.params[0] < comparison.params[1]
    assert len(comparison.val_gap) >= 2
    assert not [key for key in comparison.unlike if key not in ("data_fingerprint", "kernel")]
    assert comparison.paired == ("data_fingerprint" not in comparison.unlike)


def train_beside(folder, *words):
    """Train a run in the same outputs as others, on the same text; its folder."""
    before = {*folder.glob("outputs/runs/*")}
    run_in(folder, "train", *SIZES, "train.steps=2", "train.batch_size=2", *words)
    (new,) = {*folder.glob("outputs/runs/*")} - before
    return new


@pytest.mark.parametrize("rate", ["between", "matched"])
def test_proposed_sweep_names_the_rate_of_the_circuit(tmp_path, rate):
    no_q, standard = (
        train_beside(tmp_path, f"variant={name}", f"variant.lr={rate}")
        for name in ("no_q", "standard")
    )
    words = propose_sweep(no_q, standard)
    assert words[0] == "variant=no_q,standard"
    assert {f"variant.lr={rate}", "train.steps=2", "model.d_model=16", "seed=range(6)"} <= {*words}
    assert not any(word.startswith(("seed=0", "threads", "sweep.baseline")) for word in words)


@pytest.mark.slow
def test_settings_that_follow_from_others_are_no_axes(tmp_path, capfd):
    short, long = train_beside(tmp_path), train_beside(tmp_path, "train.steps=12")
    words = propose_sweep(long, short)
    assert {"train.steps=12,2", "sweep.baseline={train.steps: 2}"} <= {*words}
    assert not any(word.startswith(("train.eval", "optim.warmup")) for word in words)
    capfd.readouterr()
    run_in(tmp_path, "sweep", *words, "--dry-run")
    assert "2 runs already" in capfd.readouterr().out
    wide = train_beside(tmp_path, "train.steps=12", "optim.warmup=5", "train.batch_size=16")
    words = propose_sweep(wide, long)  # 16 is the default
    assert {"train.batch_size=16,2", "optim.warmup=5,2", "train.steps=12"} <= {*words}
    heads = (train_beside(tmp_path, "variant=low_rank_w", f"model.heads={n}") for n in (1, 4))
    assert "model.heads=1,4" in propose_sweep(*heads)  # the ranks follow


def test_proposed_sweep_has_the_second_run_as_its_baseline(tmp_path):
    no_q, merged = (train_beside(tmp_path, f"variant={name}") for name in ("no_q", "merged_w"))
    assert "sweep.baseline=merged_w" in propose_sweep(no_q, merged)
    standard = train_beside(tmp_path)
    assert "sweep.baseline=merged_w" in propose_sweep(standard, merged)
    assert not any(w.startswith("sweep.baseline") for w in propose_sweep(merged, standard))
    short = train_beside(tmp_path, "variant=no_q", "model.context=8")
    words = propose_sweep(no_q, short)
    assert {"variant=no_q", "model.context=16,8", "sweep.baseline={model.context: 8}"} <= {*words}
    faster = train_beside(tmp_path, "variant=no_q", "optim.lr=0.01")
    words = propose_sweep(no_q, faster)  # runs of one arm: neither is a baseline
    assert words[0].startswith("optim.lr=")
    assert "sweep.baseline=null" in words
    biased = train_beside(tmp_path, "variant=no_q", "model.context=8", "model.bias=true")
    assert propose_sweep(biased, merged) is None  # three axes would be five arms more

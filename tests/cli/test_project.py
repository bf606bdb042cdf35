"""`qkablate project` as a user types it."""

import json
import shlex
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest

from qkablate.runs.records import read_config
from qkablate.runs.run import run_id
from tests.cli.helpers import assert_refused, copy_outputs, run_in, train_on_pairs

SIZES = ["model.layers=2", "model.d_model=16", "model.heads=2", "model.context=16", "threads=1"]
LENGTH = ["train.steps=30", "train.batch_size=4", "train.eval_every=10", "tracking.wandb=disabled"]
RUNS = (["seed=0"], ["seed=1"], ["seed=0", "variant=no_q"], ["seed=0", "model.heads=1"])


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return the outputs of standard with two seeds, no_q with one, and another size."""
    folder = tmp_path_factory.mktemp("project")
    for words in RUNS:
        run_in(folder, "train", *SIZES, *LENGTH, *words)
    return folder / "outputs"


@pytest.fixture
def outputs(trained, tmp_path, monkeypatch):
    """Return outputs whose data is prepared in the user's own cache."""
    monkeypatch.setenv("WANDB_MODE", "disabled")
    return copy_outputs(trained, tmp_path)


def reseal(folder, status, **changes):
    """Rewrite a run's result with a valid checksum."""
    path = folder / "result.json"
    content = {k: v for k, v in json.loads(path.read_text()).items() if k != "sha256"}
    path.write_text(json.dumps(content | {"status": status} | changes))


def reword(folder, **parts):
    """Rewrite a run's config with other values, as an untrusted sender could."""
    config = read_config(folder)
    for part, values in parts.items():
        config[part] = config[part] | values if isinstance(values, dict) else values
    (folder / "config.yaml").write_text(json.dumps(config))


def projected(qkablate, *words):
    done = qkablate("project", *words, "--json")
    assert done.code == 0, done.err
    return json.loads(done.out, parse_constant=pytest.fail)


def result(folder):
    return json.loads((folder / "result.json").read_text())


def trees(outputs, name):
    return {path: path.lstat().st_mtime_ns for path in (outputs / "runs").glob(f"{name}/*")}


def test_help(qkablate):
    done = qkablate("project", "--help")
    assert (done.code, done.err) == (0, "")
    assert "Usage: qkablate project RUN [RUN …] variant=NAME" in done.out
    for word in ("data.path=PATH", "data.cache=FOLDER", "lowest validation loss"):
        assert word in " ".join(done.out.split())


@pytest.mark.parametrize("verb", ["train", "project", "claim", "sweep"])
def test_every_signal_is_in_the_exit_codes(qkablate, verb):
    """Not those alone that are sent most often."""
    assert "128 + signal interrupted, as 130 by Ctrl-C" in qkablate(verb, "--help").out


@pytest.mark.slow
def test_gap_is_split_in_two(qkablate, outputs):
    """Every number comes from the files of a run, and finished runs are not trained again."""
    words = ["standard-d16-h2-s0", "variant=no_q", "finetune.steps=8"]
    output = projected(qkablate, *words)
    (one,) = output["runs"]
    folders = {key: outputs / "runs" / name for key, name in one["folders"].items()}
    assert folders["scratch"].name.startswith("no_q-d16-h2-s0-")
    assert folders["continued"].name.startswith("finetuned-standard-d16-h2-s0-")
    losses = {key: result(folder)["loss"] for key, folder in folders.items()}
    for split in ("val", "test"):
        healed = losses["projected"][split] - losses["continued"][split]
        scratch = losses["scratch"][split] - losses["parent"][split]
        assert one["gap"]["finetuned"][split] == healed
        assert one["gap"]["scratch"][split] == scratch
        assert one["gap"]["training"][split] == scratch - healed
    assert one["before_finetuning"]["parent"] == pytest.approx(losses["parent"]["val"], rel=1e-6)
    assert one["gap"]["before_finetuning"]["val"] > 0
    assert [layer["layer"] for layer in one["layers"]] == [0, 1]
    assert all(0 < layer["qk_scores"] < 1 and layer["ov_output"] < 1e-6 for layer in one["layers"])
    assert (output["n"], output["steps"], output["lr"]) == (1, 8, 3e-4)
    config = read_config(folders["projected"])
    assert (config["train"]["steps"], config["optim"]["warmup"], config["seed"]) == (8, 1, 0)
    assert config["init_from"]["step"] == 30
    before = trees(outputs, "*")
    assert projected(qkablate, *words) == output
    assert trees(outputs, "*") == before


@pytest.mark.slow
def test_continued_parent_is_trained_once(qkablate, outputs):
    one = projected(qkablate, "standard-d16-h2-s0", "variant=no_q", "finetune.steps=4")["runs"][0]
    other = projected(qkablate, "standard-d16-h2-s0", "variant=no_k", "finetune.steps=4")["runs"][0]
    assert one["folders"]["continued"] == other["folders"]["continued"]
    assert len([*(outputs / "runs").glob("finetuned-*")]) == 3


@pytest.mark.slow
def test_projection_onto_a_larger_form_has_no_gap_before_finetuning(qkablate, outputs):
    output = projected(qkablate, "standard-d16-h2-s0", "variant=merged_w", "finetune.steps=2")
    (one,) = output["runs"]
    assert abs(one["gap"]["before_finetuning"]["val"]) < 1e-5
    assert max(layer["qk"] for layer in one["layers"]) < 1e-6
    own = projected(qkablate, "standard-d16-h2-s0", "variant=standard", "finetune.steps=2")["runs"][
        0
    ]
    assert own["gap"]["finetuned"] == {"val": 0, "test": 0}
    assert own["folders"]["projected"] == own["folders"]["continued"]


@pytest.mark.slow
def test_command_of_a_missing_run_from_scratch_is_printed(qkablate, outputs):
    """The command that is shown trains the run that is then found."""
    words = ["standard-d16-h2-s0", "variant=low_rank_w", "variant.rank=3", "finetune.steps=2"]
    done = qkablate("project", *words)
    assert done.code == 0, done.err
    line = done.out.splitlines()[-1]
    assert line.startswith("  qkablate train variant=low_rank_w variant.rank=3 data=text seed=0 ")
    assert "n = 1 seed: no interval; pass several RUNs" in done.out
    again = shlex.split(line)[1:]
    assert qkablate(*again, "threads=1", "tracking.wandb=disabled").code == 0
    (one,) = projected(qkablate, *words)["runs"]
    assert one["scratch_command"] is None
    assert one["gap"]["training"]["test"] is not None


@pytest.mark.slow
def test_several_seeds_have_an_interval(qkablate, outputs):
    words = ["standard-d16-h2-s0", "standard-d16-h2-s1", "variant=no_q", "finetune.steps=2"]
    output = projected(qkablate, *words)
    gaps = [one["gap"]["finetuned"]["test"] for one in output["runs"]]
    found = output["mean"]["finetuned"]["test"]
    assert (found["n"], found["mean"]) == (2, pytest.approx(sum(gaps) / 2))
    assert found["interval"][0] < found["mean"] < found["interval"][1]
    assert output["mean"]["training"]["test"]["n"] == 1  # of one seed there is none from scratch
    done = qkablate("project", *words)
    assert "no interval; pass several RUNs" not in done.out
    assert "seed=1" in done.out.splitlines()[-1]


@pytest.mark.slow
def test_seeds_trained_in_different_folders_are_one_arm(qkablate, outputs):
    (parent,) = (outputs / "runs").glob("standard-d16-h2-s1-*")
    reword(parent, data={"cache": "elsewhere", "path": "there.txt"}, diagnostics={"every": 3})
    words = ["standard-d16-h2-s0", parent.name, "variant=no_q", "finetune.steps=2"]
    assert projected(qkablate, *words)["n"] == 2
    config = read_config(parent)
    config["identity"]["data_fingerprint"] = "another"
    config["id"] = run_id(config["identity"])
    (parent / "config.yaml").write_text(json.dumps(config))
    done = qkablate("project", *words)
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert "differ in data (" in done.err


@pytest.mark.slow
def test_given_keys_apply_to_both_runs(qkablate, outputs):
    words = ["optim.lr=1e-4", "train.batch_size=2", "optim.warmup=1", "tracking.tags=[x]"]
    (one,) = projected(qkablate, "standard-d16-h2-s0", "variant=no_q", "finetune.steps=3", *words)[
        "runs"
    ]
    for key in ("continued", "projected"):
        config = read_config(outputs / "runs" / one["folders"][key])
        assert (config["optim"]["lr"], config["train"]["batch_size"]) == (1e-4, 2)
        assert (config["optim"]["warmup"], config["optim"]["weight_decay"]) == (1, 0.1)
        assert config["variant"]["name"] == {"continued": "standard", "projected": "no_q"}[key]


@pytest.mark.exhaustive
def test_stopped_projection_is_resumed(qkablate, spawn, outputs):
    words = ["project", "standard-d16-h2-s0", "variant=no_q", "finetune.steps=6", "--json"]
    undisturbed = Path(shutil.copytree(outputs, outputs.parent / "calm", symlinks=True))
    expected = json.loads(qkablate(*words, f"out={undisturbed}").out)
    process = spawn(*words)
    while not [*(outputs / "runs").glob("finetuned-*/metrics.jsonl")] and process.poll() is None:
        time.sleep(0.002)
    process.send_signal(signal.SIGINT)
    process.communicate()
    assert process.returncode in (0, 130)
    done = qkablate(*words)
    assert done.code == 0, done.err
    assert json.loads(done.out)["runs"][0]["loss"] == expected["runs"][0]["loss"]


@pytest.mark.slow
def test_tracking_keys_are_the_users_not_the_parents(qkablate, outputs):
    (parent,) = (outputs / "runs").glob("standard-d16-h2-s0-*")
    theirs = {"group": "theirs", "job_type": "theirs", "tags": ["theirs"], "entity": "stranger"}
    reword(parent, tracking=theirs | {"project": "theirs", "log_every": 3})
    words = [parent.name, "variant=low_rank_w", "variant.rank=3", "finetune.steps=2"]
    one = projected(qkablate, *words, "tracking.project=mine")["runs"][0]
    for key in ("continued", "projected"):
        tracking = read_config(outputs / "runs" / one["folders"][key])["tracking"]
        assert tracking["group"] == "finetuned-standard-d16-h2"
        assert (tracking["job_type"], tracking["tags"], tracking["entity"]) == (None, [], None)
        assert (tracking["project"], tracking["log_every"]) == ("mine", 10)
    words[-1] = "finetune.steps=3"
    one = projected(qkablate, *words, "tracking.group=mine", "tracking.tags=[x]")["runs"][0]
    tracking = read_config(outputs / "runs" / one["folders"]["projected"])["tracking"]
    assert (tracking["group"], tracking["tags"]) == ("mine", ["x"])


def test_machine_settings_of_the_parents_folder_are_ignored(qkablate, outputs, tmp_path):
    (parent,) = (outputs / "runs").glob("standard-d16-h2-s0-*")
    elsewhere = tmp_path / "stranger"
    reword(
        parent,
        data={"cache": str(elsewhere / "cache"), "path": "/dev/stdin"},
        threads=7,
        out=str(elsewhere / "out"),
        train={"checkpoint_every": 1},
        diagnostics={"every": 1},
    )
    one = projected(qkablate, parent.name, "variant=no_q", "finetune.steps=2")["runs"][0]
    for key in ("continued", "projected"):
        config = read_config(outputs / "runs" / one["folders"][key])
        assert (config["data"]["cache"], config["threads"], config["out"]) == ("auto", 1, "outputs")
        assert config["train"]["checkpoint_every"] == 250
        assert config["diagnostics"]["every"] == config["train"]["eval_every"] == 10
    assert one["folders"]["scratch"].startswith("no_q-")  # the same run, by whatever path
    assert not elsewhere.exists()


@pytest.mark.slow
def test_unprepared_text_is_read_only_from_the_users_path(qkablate, outputs, trained, tmp_path):
    shutil.rmtree(tmp_path / "home" / ".cache")
    text = trained.parent / "corpus.txt"
    words = ["standard-d16-h2-s0", "variant=no_q", "finetune.steps=2"]
    done = qkablate("project", *words)
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
    assert "data.path: the data of 'standard-d16-h2-s0-" in done.err
    assert f"data.path={text}" in done.err
    assert not (tmp_path / "home" / ".cache").exists()
    other = tmp_path / "other.txt"
    other.write_text("something else altogether\n" * 300)
    done = qkablate("project", *words, f"data.path={other}")
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert "was trained on other data" in done.err
    assert not [*(outputs / "runs").glob("finetuned-*")]
    output = projected(qkablate, *words, f"data.path={text}", "data.cache=mine")
    assert output["runs"][0]["gap"]["finetuned"]["val"] is not None
    assert projected(qkablate, *words, "data.cache=mine")["runs"] == output["runs"]


FORMS = {
    "encoder": (["model=nano_encoder"], [], {"encoder 0"}),
    "translator": (
        *(["model=nano_translator"], ["variant.sites=cross"]),
        {"encoder 0", "decoder 0", "cross 0"},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_encoder_and_translator_of_a_task_are_projected(qkablate, tmp_path, monkeypatch, form):
    """In the translator only the attention to the source changes; other layers stay as they are."""
    monkeypatch.setenv("WANDB_MODE", "disabled")
    model, sites, places = FORMS[form]
    sizes = ["model.layers=1", "model.d_model=16", "model.heads=2", "threads=1", "train.steps=4"]
    task = ["data=reverse", "data.val_tokens=512", "data.test_tokens=512", "train.batch_size=4"]
    assert qkablate("train", *model, *sizes, *task).code == 0
    (parent,) = (tmp_path / "outputs" / "runs").iterdir()
    words = [parent.name, "variant=no_q", *sites, "finetune.steps=2"]
    (one,) = projected(qkablate, *words)["runs"]
    layers = {layer["layer"]: layer for layer in one["layers"]}
    assert {*layers} == places
    for place, layer in layers.items():
        is_changed = not sites or place == "cross 0"
        assert (layer["qk_scores"] > 1e-3, layer["qk"] > 1e-3) == (is_changed, is_changed)
        assert layer["ov_output"] < 1e-6
    assert one["before_finetuning"]["parent"] == pytest.approx(
        result(parent)["loss"]["val"], rel=1e-6
    )
    folders = {
        key: name and tmp_path / "outputs" / "runs" / name for key, name in one["folders"].items()
    }
    for part in ("continued", "projected"):
        assert result(folders[part])["loss"]["test"] == one["loss"][part]["test"]
    sizes = {part: result(folders[part])["params"]["total"] for part in ("continued", "projected")}
    changed = 1 if sites else len(layers)
    assert sizes["continued"] - sizes["projected"] == changed * 16 * 16  # W_q
    assert qkablate(*shlex.split(one["scratch_command"])[1:], "threads=1").code == 0
    (one,) = projected(qkablate, *words)["runs"]
    assert one["scratch_command"] is None
    assert one["gap"]["training"]["test"] is not None


@pytest.fixture(scope="module")
def trained_on_pairs(tmp_path_factory):
    """Return the outputs of a translator of the pairs of a file."""
    return train_on_pairs(tmp_path_factory.mktemp("pairs")).parent.parent


@pytest.fixture
def of_pairs(trained_on_pairs, tmp_path, monkeypatch):
    """Return outputs of a translator whose pairs are prepared in the user's own cache."""
    monkeypatch.setenv("WANDB_MODE", "disabled")
    return copy_outputs(trained_on_pairs, tmp_path)


def test_translator_of_pairs_is_projected(qkablate, of_pairs):
    """Its prepared pairs are found; the command that is shown trains the run that is missing."""
    words = ["standard", "variant=no_q", "finetune.steps=2"]
    (one,) = projected(qkablate, *words)["runs"]
    (parent,) = (of_pairs / "runs").glob("standard-*")
    for key in ("continued", "projected"):
        config = read_config(of_pairs / "runs" / one["folders"][key])
        assert config["data"]["source_field"] == "a"
        assert config["data"]["target_field"] == "b"
        fingerprint = read_config(parent)["identity"]["data_fingerprint"]
        assert config["identity"]["data_fingerprint"] == fingerprint
    assert one["before_finetuning"]["parent"] == pytest.approx(
        result(parent)["loss"]["val"], rel=1e-6
    )
    assert [layer["layer"] for layer in one["layers"]] == ["encoder 0", "decoder 0", "cross 0"]
    again = shlex.split(one["scratch_command"])[1:]
    assert qkablate(*again, "threads=1", "tracking.wandb=disabled").code == 0
    (one,) = projected(qkablate, *words)["runs"]
    assert one["scratch_command"] is None
    assert one["gap"]["training"]["test"] is not None


PLACES = {  # what the parent's folder says of its data, and what the user gives
    "same columns": ({}, "a\tb\n", []),
    "other columns": ({}, "x\ty\n", ["data.source_field=x", "data.target_field=y"]),
    "of the Hub": ({"path": None, "name": "owner/name", "subset": "de-en"}, "a\tb\n", []),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", PLACES)
def test_pairs_are_read_from_the_users_file(qkablate, of_pairs, trained_on_pairs, tmp_path, case):
    theirs, head, words = PLACES[case]
    shutil.rmtree(tmp_path / "home" / ".cache")
    (parent,) = (of_pairs / "runs").iterdir()
    reword(parent, data=theirs)
    start = ["standard", "variant=no_q", "finetune.steps=2"]
    done = qkablate("project", *start)
    assert_refused(done, " is not prepared in ", "data.name=" if "name" in theirs else "data.path=")
    rows = (trained_on_pairs.parent / "pairs.tsv").read_text().removeprefix("a\tb\n")
    (tmp_path / "mine.tsv").write_text(head + rows)
    (one,) = projected(qkablate, *start, "data.path=mine.tsv", *words)["runs"]
    for key in ("continued", "projected"):
        data = read_config(of_pairs / "runs" / one["folders"][key])["data"]
        assert (data["path"], data["name"], data["subset"]) == ("mine.tsv", None, None)
        assert f"{data['source_field']}\t{data['target_field']}\n" == head


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["data.source_field=a"], "data.path: data=pairs needs either data.path=FILE_OR_FOLDER or"),
        (["data.path=mine.tsv", "data.source_field=c"], "data.source_field: line 2 of 'mine.tsv'"),
        (["data.path=mine.tsv", "data.source_field=b"], "data.target_field: 'b' is the column"),
        (["data.path=mine.tsv", "data.tokenizer=bpe"], "data.tokenizer: is fixed by the trained"),
    ],
    ids=lambda x: str(x)[:50],
)
def test_mistakes_in_pairs(qkablate, of_pairs, trained_on_pairs, tmp_path, words, line):
    shutil.rmtree(tmp_path / "home" / ".cache")
    shutil.copy(trained_on_pairs.parent / "pairs.tsv", tmp_path / "mine.tsv")
    assert_refused(qkablate("project", "standard", "variant=no_q", *words), line)
    assert not [*(of_pairs / "runs").glob("finetuned-*")]


@pytest.mark.slow
@pytest.mark.parametrize("status", ["failed", "diverged"])
def test_failed_run_from_scratch_is_reported(qkablate, outputs, status):
    (folder,) = (outputs / "runs").glob("no_q-*")
    loss = dict.fromkeys(("train", "val", "test"))
    reseal(folder, status, loss=loss, error="x", diverged_at=3)
    words = ["standard-d16-h2-s0", "variant=no_q", "finetune.steps=2"]
    done = qkablate("project", *words)
    assert done.code == 0, done.err
    assert f"no_q from scratch, seed 0: {status}" in done.out
    line = done.out.splitlines()[-1]
    assert line.startswith("  qkablate train variant=no_q ")
    assert ("optim.lr=0.0003" in line) == (status == "diverged")
    again = shlex.split(line)[1:]
    assert qkablate(*again, "threads=1").code == 0
    (one,) = projected(qkablate, *words)["runs"]
    assert one["gap"]["training"]["test"] is not None
    assert one["scratch_lr"] == (3e-4 if status == "diverged" else 1e-3)


def is_at(folder, lr):
    return read_config(folder)["optim"]["lr"] == lr


@pytest.mark.slow
def test_run_from_scratch_is_tuned_as_much_as_its_parent(qkablate, outputs):
    words = ["standard-d16-h2-s0", "variant=no_q", "finetune.steps=2"]
    done = qkablate("project", *words)
    assert "no_q from scratch, seed 0: only learning rate 0.001" in done.out
    (folder,) = (outputs / "runs").glob("no_q-*")
    path = read_config(folder)["data"]["path"]
    same = [*SIZES, *LENGTH, "data=text", f"data.path={path}", "seed=0", "variant=no_q"]
    for more in (["optim.lr=4e-3"], ["optim.lr=1e-5"], ["optim.lr=8e-3", "optim.weight_decay=0"]):
        assert qkablate("train", *same, *more).code == 0
    # The parent had one rate: so has the run from scratch.
    (one,) = projected(qkablate, *words)["runs"]
    assert (one["scratch_lr"], one["scratch_lrs"]) == (1e-3, [1e-3])
    baseline = [word for word in same if word != "variant=no_q"]
    for lr in ("4e-3", "1e-5"):
        assert qkablate("train", *baseline, "variant=standard", f"optim.lr={lr}").code == 0
    best = next(
        path.name for path in (outputs / "runs").glob("standard-*-s0-*") if is_at(path, 4e-3)
    )
    words = [best, *words[1:]]
    done = qkablate("project", *words)
    assert "learning rate 0.004, the best of 3 by validation loss" in done.out
    (one,) = projected(qkablate, *words)["runs"]
    assert (one["scratch_lr"], one["scratch_lrs"]) == (4e-3, [1e-5, 1e-3, 4e-3])
    assert one["scratch_is_equally_tuned"]
    taken = result(outputs / "runs" / one["folders"]["scratch"])["loss"]
    assert one["loss"]["scratch"]["val"] == taken["val"] < result(folder)["loss"]["val"]


def test_next_command_finds_the_runs(qkablate, outputs):
    elsewhere = outputs.rename(outputs.parent / "else where")
    words = ["standard-d16-h2-s0", "variant=no_q", "finetune.steps=2", f"out={elsewhere}"]
    line = qkablate("project", *words).out.splitlines()[-1]
    assert line.startswith("  qkablate compare finetuned-no_q")
    done = qkablate(*shlex.split(line)[1:])
    assert done.code == 0, done.err


MISTAKES = [
    ([], "no run given: write qkablate project RUN variant=NAME"),
    (["standard-d16-h2-s0"], "variant: not given; write qkablate project"),
    (["nope", "variant=no_q"], "there is no run 'nope'"),
    (["standard", "variant=no_q"], "'standard' matches 3 runs: "),
    (["S", "variant=nope"], "variant: 'nope' is not one of "),
    (["S", "variant=no_q", "finetune.steps=0"], "finetune.steps: '0' is not a whole number from 1"),
    (["S", "variant=no_q", "finetune.stps=3"], "finetune.stps: there is no such key"),
    (["S", "variant=no_q", "train.steps=3"], "train.steps: write finetune.steps=200"),
    (["S", "variant=no_q", "model.d_model=32"], "model.d_model: is fixed by the trained run"),
    (["S", "variant=no_q", "data.tokenizer=chars"], "data.tokenizer: is fixed by the trained run"),
    (["S", "variant=no_q", "data.name=x"], "data.name: data=text has no such key"),
    (["S", "variant=no_q", "data=recall"], "data: is fixed by the trained run"),
    (["S", "variant=no_q", "seed=4"], "seed: is fixed by the trained run"),
    (["S", "variant=no_q", "optim.lrr=4"], "optim.lrr: there is no such key"),
    (["S", "variant=no_q", "optim.lr=1e-3,1e-4"], "these are 2 runs: give each key one value"),
    (["S", "variant=static_scores"], "the scores do not depend on x (possible: standard, "),
    (["S", "variant=no_qk"], "cannot be projected to no_qk: its scores cannot be set"),
    (["S", "variant=no_q", "--jsn"], "'--jsn' (nearest: --json) is not one of"),
    (["S", "S", "variant=no_q"], "share seed 0: several runs must be one arm"),
    (["S", "standard-d16-h1-s0", "variant=no_q"], "differ in model.heads (2 and 1)"),
    (["S", "no_q-d16-h2-s0", "variant=no_q"], "differ in variant.name (standard and no_q)"),
]


@pytest.mark.parametrize(("words", "line"), MISTAKES, ids=lambda x: str(x)[:50])
def test_mistakes(qkablate, outputs, words, line):
    """One line, exit code 2, before anything is trained."""
    done = qkablate("project", *("standard-d16-h2-s0" if word == "S" else word for word in words))
    assert (done.code, done.out) == (2, "")
    assert line in done.err
    assert done.err.startswith("qkablate: ")
    assert done.err.count("\n") == 1
    assert not [*(outputs / "runs").glob("finetuned-*")]


def test_run_without_a_checkpoint(qkablate, outputs):
    (folder,) = (outputs / "runs").glob("standard-d16-h2-s0-*")
    shutil.rmtree(folder / "checkpoints")
    done = qkablate("project", folder.name, "variant=no_q")
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert "has no checkpoint yet" in done.err


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion(qkablate, monkeypatch, outputs, shell):
    monkeypatch.setattr(sys, "argv", ["qkablate"])
    for line, expected in (
        ("qkablate pro", ["project"]),
        ("qkablate project fine", ["finetune.steps="]),
        ("qkablate project standard-d16-h1", [p.name for p in outputs.glob("runs/*-h1-*")]),
    ):
        monkeypatch.setenv("COMP_LINE", line)
        assert qkablate("-sc", f"query={shell}").out.split() == expected


@pytest.mark.slow
def test_damaged_projection_losses_are_computed_again(qkablate, outputs):
    words = ["standard-d16-h2-s0", "variant=no_q", "finetune.steps=2"]
    output = projected(qkablate, *words)["runs"][0]
    kept = outputs / "runs" / output["folders"]["projected"] / "start" / "projection_losses.json"
    assert json.loads(kept.read_text())[1]["qk"] == output["layers"][1]["qk"]
    for content in ("[]", "{", "[1, 2]", '[{"qk": 0}, {}]', "null", "[" * 10_000):
        kept.write_text(content)
        again = projected(qkablate, *words)["runs"][0]["layers"]
        assert [own["heads"] for own in again] == [own["heads"] for own in output["layers"]]
        assert [own["qk"] for own in again] == pytest.approx(
            [own["qk"] for own in output["layers"]]
        )

"""`qkablate sweep` as a user types it: what it says before, instead of and after the training."""

import json
import re
import shlex
import subprocess
import sys
import time

import pytest

from qkablate.analysis.study.study import read_study
from qkablate.config import conf_dir
from qkablate.sweeps.planning.estimate import Timing
from qkablate.sweeps.planning.manifest import read_manifest
from tests.cli.helpers import (
    assert_refused,
    complete,
    processes_of,
    proposed_commands,
    without_keys,
)


@pytest.fixture
def small(tiny):
    """Two arms of two runs."""
    words = [*tiny, "variant=standard,no_q", "seed=0,1", "workers=2", "sweep.floor=false"]
    return ["sweep", *words]


@pytest.fixture
def tree(tmp_path):
    """Everything below outputs, with its content."""

    def read():
        files = sorted((tmp_path / "outputs").rglob("*"))
        return {path: path.read_bytes() if path.is_file() else None for path in files}

    return read


@pytest.fixture
def nothing_timed(monkeypatch):
    """Dry runs that measure nothing: every step takes a millisecond."""
    flops, step, start = 1e6, 1e-3, 1.0
    monkeypatch.setattr(
        "qkablate.sweeps.planning.estimate._measure", lambda *_: Timing(flops, step, start, 10**8)
    )


@pytest.fixture
def nothing_trained(monkeypatch):
    """Freeze sweeps without starting them."""
    monkeypatch.setattr("qkablate.sweeps.running.launcher.Launcher.run", lambda self: 1)


def test_help_lists_every_sweep(qkablate):
    done = qkablate("sweep", "--help")
    assert done.code == 0
    listed = re.search(r"Sweeps.*?\n(.*?)\n\n", done.out, re.DOTALL)[1]
    sweeps = [line.split(maxsplit=1) for line in re.sub(r"\n {4,}", " ", listed).splitlines()]
    files = sorted((conf_dir() / "sweep").glob("*.yaml"))
    assert len(files) > 5
    first = [file.read_text(encoding="utf-8").splitlines()[0] for file in files]
    assert sweeps == [
        [file.stem, line.removeprefix("# ")] for file, line in zip(files, first, strict=True)
    ]
    assert qkablate("sweep", "-h").out == done.out


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", [["--help"], ["--retry", "x"], ["--json"], ["--nope"], [], ["sweep=quik"]]
)
def test_help_and_mistakes_need_no_torch(words):
    code = (
        "import sys, qkablate.cli\n"
        f"try: qkablate.cli.main({['sweep', *words]})\n"
        "except SystemExit: pass\n"
        "sys.exit(str({'torch', 'wandb'} & set(sys.modules) or '') or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


BARE = [
    ([], "the grid is empty: give sweep=quick, or axes such as variant="),
    (["workers=2"], "the grid is empty"),
    (["--nope"], "'--nope' is not one of "),
    (["--dryrun"], "(nearest: --dry-run)"),
    (["--resume"], "'--resume' is not a flag; the same command resumes by itself"),
    (["--again"], "'--again' is not one of --config-dir, --dry-run, --help, --json, --retry, "),
    (["--dry-run=1"], "--dry-run takes no value"),
    (["-m", "variant=standard,no_q"], "`qkablate sweep` is a grid already"),
    (
        ["sweep.baseline=none"],
        "sweep.baseline: 'none' is not a variant; for no baseline write null",
    ),
    (["sweep=quik"], "'quik' (nearest: quick) is not one of quick, "),
    (["sweep=quick,lr"], "sweep"),
]


@pytest.mark.parametrize(("words", "line"), BARE, ids=[" ".join(w) for w, _ in BARE])
def test_mistakes_without_a_grid(qkablate, tmp_path, words, line):
    done = qkablate("sweep", *words)
    assert_refused(done, line)
    assert "add -m" not in done.err  # sweep has no such flag
    assert not (tmp_path / "outputs").exists()


MISTAKES = [
    (
        ["variant=standard,mergd_w,no_q"],
        "variant: 'mergd_w' (nearest: merged_w) is not one of merged_w, ",
    ),
    (["--retry", "x"], "--retry: 'x' is not one of failed"),
    (["--retry"], "--retry: a value is missing"),
    (["sweep.tune=true", "sweep.tuning_seeds=[1,1]"], "tuning_seeds: [1, 1] has a seed twice"),
    (["sweep.tune=true", "sweep.tuning_seeds=[[1]]"], "[[1]] are not one or more seeds"),
    (["--json"], "--json needs --dry-run"),
    (["seed=range(0,1,0)"], "arg 3 must not be zero"),
    (["variant=1"], "must be a string or a list. Got int"),
    (["control=1"], "must be a string or a list. Got int"),
    (["x" * 300 + "=1"], f"'{'x' * 40}…' is too long for a key"),
    (["seed=range(10001)"], "this grid has 20,002 runs"),
    (["workers=0"], "workers: 0 is not auto, or a number from 1 to 4096"),
    (["engine.sbatch.qos=1"], "engine.sbatch: engine=local has no such key"),
    (
        ["engine=slurm", "engine.sbatch=3"],
        "engine.sbatch: '3' is not a map, as {constraint: a100} is",
    ),
    (["runs_per_gpu=0"], "runs_per_gpu: 0 is not a number from 1 to 64"),
    (["runs_per_gpu=x"], "runs_per_gpu: 'x' is not a whole number"),
    (["sweep.tune=maybe"], "sweep.tune: 'maybe' is not true or false"),
    (["on_failure=x"], "on_failure: 'x' is not one of continue, stop"),
    (
        ["control=params", "control.tolerance=2"],
        "control.tolerance: 2.0 is not a number from 0 to 1",
    ),
    (["control.tolerance=0.1"], "'control.tolerance=0.1' has no meaning with control=none"),
    (["control=parms"], "control: 'parms' (nearest: params) is not one of flops, none, params"),
    (["control=params", "sweep.baseline=null"], "control=params needs a baseline"),
    (["sweep.baseline=standrd"], "sweep.baseline: 'standrd' (nearest: standard) is not one of "),
    (['sweep.filter=["model.d_model > 99"]'], "sweep.filter: "),
    (['sweep.filter=["model.d_modl > 9"]'], "there is no key 'model.d_modl'"),
    (["sweep.nme=x"], "sweep.nme: there is no such key (nearest: sweep.name)"),
    (["sweep.name=../x"], "sweep.name: '../x' is not made of letters"),
    (["sweep.tune=true", "sweep.tuning_seeds=[1]"], "1 is a seed of the final runs"),
    (["sweep.tune=true", "optim.lr=1e-3,2e-3"], "optim.lr: 2 rates given"),
    (["sweep.tune=true", "optim.lr=fast"], "optim.lr: 'fast' is not a number"),
    (["sweep.tune=true", "optim.lr=-1e-3"], "optim.lr: -0.001 is not"),
    (["sweep.tune=true", "optim.lr=0,1e-3,2e-3,4e-3,8e-3"], "optim.lr: 0"),
    (["sweep.tune=true", "optim.lr=nan,1e-3,2e-3,4e-3,8e-3"], "optim.lr: nan is not a number"),
    (["optim.lr=1e-3,0"], "optim.lr: 0.0 is not a number"),
    (["seed=interval(0,1)"], "give single values, not an interval"),
    (["seed=range(0)"], "there is no value in it"),
    (["variant=[standard,no_q]"], "several values are written variant=standard,no_q"),
    (["model.heads=3,5"], "model.heads: 3 does not divide model.d_model=16"),
    (["data.path=/nope/x"], "data.path: there is no file, folder or pattern '/nope/x'"),
    (["tracking.wandb=online"], "tracking.wandb: online needs a key"),
    (["out=/proc/here"], "out: cannot write in '/proc/here'"),
    (["out=/proc/here", "--dry-run"], "out: cannot write in '/proc/here'"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("words", "line"), MISTAKES, ids=[" ".join(w) for w, _ in MISTAKES])
def test_mistakes(qkablate, small, tmp_path, nothing_timed, nothing_trained, words, line):
    assert_refused(qkablate(*without_keys(small, words), *words), line)
    assert list(tmp_path.glob("outputs/runs/*")) == []
    assert list(tmp_path.glob("outputs/sweeps/*")) == []


@pytest.mark.slow
def test_many_runs_need_a_confirmation(qkablate, small, nothing_timed, monkeypatch):
    monkeypatch.setattr("qkablate.cli.sweep.MANY", 3)
    assert_refused(qkablate(*small, "--dry-run"), "this grid has 4 runs")
    done = qkablate(*small, "--yes", "--dry-run")
    assert done.code == 0
    # And the command it proposes is one that works.
    proposed = shlex.split(done.out.rstrip().splitlines()[-1])
    assert qkablate(*proposed[1:], "--dry-run").code == 0, proposed


@pytest.mark.slow
def test_damaged_manifest_is_rejected(qkablate, small, tree, tmp_path, nothing_trained):
    assert qkablate(*small).code == 1
    (path,) = tmp_path.glob("outputs/sweeps/*/manifest.json")
    whole = path.read_text()
    for damaged in ("", '{"format": 1}', whole.replace('"seed": 1', '"seed": 2')):
        path.write_text(damaged)
        before = tree()
        assert_refused(qkablate(*small), f"'{path}' is damaged")
        assert tree() == before
    path.rename(tmp_path / "away")
    qkablate(*small)
    assert path.read_text() == whole


@pytest.mark.slow
def test_manifest_of_another_format_is_rejected(qkablate, small, tree, tmp_path, nothing_trained):
    assert qkablate(*small).code == 1
    (path,) = tmp_path.glob("outputs/sweeps/*/manifest.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 99, "version": "7.0"}))
    before = tree()
    assert_refused(qkablate(*small), f"'{path}' was written by qkablate 7.0 (format 99)")
    assert tree() == before


@pytest.mark.slow
def test_dry_run_shows_every_arm_and_trains_nothing(qkablate, small, tmp_path, monkeypatch):
    words = [*small, "control=none,params", "sweep.filter=[\"variant != 'standard'\"]"]
    told = qkablate(*words, "--dry-run")
    assert told.code == 0, told.err
    assert "qkablate: timing the first steps of no_q-d16-h2-params …" in told.err
    assert list(tmp_path.glob("outputs/runs/*")) == []
    assert list(tmp_path.glob("outputs/sweeps/*/")) == []
    # The second one knows what was measured.
    monkeypatch.setattr("multiprocessing.get_context", lambda *_: pytest.fail("measures again"))
    again = qkablate(*words, "--dry-run", "--json")
    plan = json.loads(again.out)
    assert again.code == 0
    arms = {arm["arm"]: arm for arm in plan["arms"]}
    assert set(arms) == {"standard-d16-h2", "no_q-d16-h2", "no_q-d16-h2-params"}
    rows = [line.split() for line in told.out[: told.out.index("\n\n")].splitlines()[1:]]
    assert [row[0] for row in rows] == [arm["arm"] for arm in plan["arms"]]
    assert [row[1] for row in rows] == [f"{arm['params']:,}" for arm in plan["arms"]]
    counts = {arm: sum(run["arm"] == arm for run in plan["runs"]) for arm in arms}
    assert set(counts.values()) == {2}
    assert len({run["id"] for run in plan["runs"]}) == 6
    assert arms["no_q-d16-h2"]["params"] < arms["standard-d16-h2"]["params"]
    assert abs(arms["no_q-d16-h2-params"]["mismatch"]) < 0.01
    assert all(arm["seconds_per_run"] > 0 and arm["bytes_per_run"] > 0 for arm in arms.values())
    assert plan["seconds"] >= max(arm["seconds_per_run"] for arm in arms.values())
    assert told.out.endswith(f"Next\n  {shlex.join(['qkablate', *words])}\n")


@pytest.mark.slow
def test_name_of_another_grid_is_noted(qkablate, small, nothing_timed, nothing_trained):
    qkablate(*small)
    assert "this name" not in qkablate(*small, "--dry-run").out  # the same sweep
    other = [*small, "train.steps=3"]
    for done in (qkablate(*other, "--dry-run").out, qkablate(*other).err):
        line = " ".join(done.split())  # long folders wrap
        assert re.search(r"name \S*outputs/sweeps/grid-[0-9a-f]+ has the same name", line)


def test_impossible_arms_are_named_with_the_reason(qkablate, small, nothing_timed):
    done = qkablate(*small, "model.heads=2,3", "--dry-run")
    assert done.code == 0
    plan = json.loads(qkablate(*small, "model.heads=2,3", "--dry-run", "--json").out)
    assert {arm["arm"] for arm in plan["arms"]} == {"standard-d16-h2", "no_q-d16-h2"}
    assert {left["arm"] for left in plan["left_out"]} == {"standard-d16-h3", "no_q-d16-h3"}
    for left in plan["left_out"]:
        assert left["arm"] in done.out
        assert left["reason"] in done.out


@pytest.mark.slow
def test_sweep_ends_with_a_table_and_the_next_commands(qkablate, small, tmp_path):
    done = qkablate(*small)
    assert done.code == 0, done.err
    (folder,) = tmp_path.glob("outputs/sweeps/*")
    table = [line.split() for line in done.out.strip().split("\n\n")[0].splitlines()]
    column = table[0].index("done")
    rows = {row[0]: row[column] for row in table[1:]}
    assert rows == {"standard-d16-h2": "2/2", "no_q-d16-h2": "2/2"}
    assert f"results  {folder}/results.csv\n" in done.out
    assert (folder / "results.csv").exists()
    assert list(tmp_path.glob("outputs/**/wandb")) == []
    proposed, report = map(shlex.split, done.out.splitlines()[-2:])
    assert proposed[:3] == ["qkablate", "results", folder.name]
    assert report[:3] == ["qkablate", "report", folder.name]
    assert "gaps to standard-d16-h2" in qkablate(*proposed[1:]).out
    # Again: nothing is trained, the table is the same; and a dry run knows.
    again = qkablate(*small)
    assert (again.code, again.out) == (0, done.out)
    assert "running" not in again.err
    plan = json.loads(qkablate(*small, "--dry-run", "--json").out)
    assert plan["done"] == sorted(run["id"] for run in plan["runs"])
    assert plan["seconds"] == 0


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion(qkablate, monkeypatch, tmp_path, shell):
    assert complete(qkablate, monkeypatch, "qkablate sw", shell) == ["sweep"]
    assert complete(qkablate, monkeypatch, "qkablate sweep sweep=qu", shell) == ["sweep=quick"]
    assert complete(qkablate, monkeypatch, "qkablate sweep control=fl", shell) == ["control=flops"]
    folder = tmp_path / "outputs" / "sweeps" / "quick-0123456789ab"
    folder.mkdir(parents=True)
    (folder / "manifest.json").touch()
    offered = complete(qkablate, monkeypatch, "qkablate status ", shell)
    assert {"quick-0123456789ab", "--watch", "--json", "--csv"} <= set(offered)
    assert complete(qkablate, monkeypatch, "qkablate status qu", shell) == ["quick-0123456789ab"]
    assert complete(qkablate, monkeypatch, "qkablate status --w", shell) == ["--watch"]


LONG_STEP = ["variant=standard", "seed=0", "train.grad_accum=1000000"]


@pytest.mark.slow
def test_plan_whose_steps_are_too_long_to_be_timed(qkablate, small, monkeypatch):
    monkeypatch.setattr("qkablate.sweeps.planning.estimate.LIMIT", 5.0)
    told = qkablate(*without_keys(small, LONG_STEP), *LONG_STEP, "--dry-run")
    assert told.code == 0, told.err
    assert "standard-d16-h2" in told.out
    reason = "the first steps of standard-d16-h2 take more than 5 s here"
    assert f"cost     not estimated: {reason}\n" in told.out


@pytest.mark.exhaustive
def test_killed_dry_run_leaves_no_process(spawn, small):
    planning = spawn(*without_keys(small, LONG_STEP), *LONG_STEP, "--dry-run")
    helpers = ["resource_tracker", "forkserver", "timing"]
    while len(processes_of(planning.pid)) < len(helpers):
        assert planning.poll() is None
        time.sleep(0.05)
    planning.kill()
    planning.communicate(timeout=30)  # ends when nobody holds its output any longer


@pytest.fixture
def own_configs(tmp_path, text):
    """Return a folder with a sweep, a variant and data of the user's."""
    files = {
        "sweep/mine": "# Mine.\nname: mine\naxes: {variant: 'standard,keyless', seed: '0,1'}\n"
        "fixed: {data: book}\n",
        "variant/keyless": "name: keyless\nqk: no_k\nov: separate\n",
        "data/book": f"source: text\npath: {text}\ntokenizer: bytes\n",
    }
    for name, content in files.items():
        path = tmp_path / "my" / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")
    return tmp_path / "my"


def without_data(tiny):
    return [word for word in tiny if word != "data=text" and not word.startswith("data.path")]


@pytest.mark.slow
def test_sweep_of_an_own_folder_trains(qkablate, tiny, own_configs, tmp_path):
    words = ["sweep", "--config-dir", str(own_configs), "sweep=mine", "workers=1", "seed=0"]
    done = qkablate(*words, *without_data(tiny), "train.steps=2")
    assert done.code == 0, done.err
    runs = sorted(path.name.split("-")[0] for path in (tmp_path / "outputs/runs").iterdir())
    assert runs == ["keyless", "standard", "uniform"]
    (folder,) = (tmp_path / "outputs/sweeps").iterdir()
    manifest = read_manifest(folder)
    assert manifest.command[:4] == ["qkablate", *words[:3]]
    assert read_study(folder).overrides_of(manifest.runs[0])[:2] == words[1:3]


def test_missing_config_folder_is_rejected(qkablate):
    done = qkablate("sweep", "--config-dir", "nowhere", "sweep=quick")
    assert_refused(done, "--config-dir: 'nowhere' is not a folder")


def test_misspelt_sweep_names_those_of_the_own_folder(qkablate, own_configs):
    done = qkablate("sweep", "--config-dir", str(own_configs), "sweep=mime")
    others = "more (`qkablate sweep --help` lists those of qkablate)"
    assert_refused(done, "sweep: 'mime' (nearest: mine) is not one of mine, ", others)


OWN_MISTAKES = {
    "axs: {seed: 1}": "sweep/mine.yaml: sweep.axs: there is no such key (nearest: sweep.axes);"
    " allowed: name, axes, ",
    "# @package _global_\nswep: {}": "sweep/mine.yaml: swep: there is no such key (nearest: sweep);"
    " allowed: sweep, control, ",
    "axes: 3": "sweep/mine.yaml: sweep.axes: not a map of keys to values",
    "fixed: [1]": "sweep/mine.yaml: not a map of keys to values",
    "[a, b]": "sweep/mine.yaml: not a map of keys to values",
    "3": "sweep/mine.yaml': not a map of keys to values",
    "axes: [a": "sweep=mine: not YAML: ",
    "train.steps: 9": "sweep/mine.yaml: train.steps is a key of the runs; write it in",
    "model: {layers: 1}": "sweep/mine.yaml: model is a key of the runs; write it in axes or fixed",
    "where: [a]": "sweep/mine.yaml: sweep.where: there is no such key (nearest: sweep.filter)",
    "axes: {varant: a}": "sweep.axes, sweep.fixed: varant: there is no such key (nearest: variant)",
    "axes: {workers: 2}": "sweep.axes, sweep.fixed: workers is a key of the sweep",
}


@pytest.mark.parametrize(("content", "line"), OWN_MISTAKES.items(), ids=lambda x: x[:20])
def test_mistake_in_an_own_sweep_is_one_line(qkablate, own_configs, content, line):
    (own_configs / "sweep/mine.yaml").write_text(content, encoding="utf-8")
    done = qkablate("sweep", "--config-dir", str(own_configs), "sweep=mine")
    assert_refused(done, line)
    assert "raised while" not in done.err


@pytest.mark.parametrize("words", [["sweep", "sweep=mine"], ["train", "variant=mine"]])
def test_own_file_that_is_not_utf8_is_named(qkablate, own_configs, words):
    group = words[1].partition("=")[0]
    file = own_configs / group / "mine.yaml"
    file.write_bytes(b"# \xff\n")
    done = qkablate(words[0], "--config-dir", str(own_configs), words[1])
    assert_refused(done, f"{group}=mine: '{file.resolve()}' is not UTF-8 text")


def test_unreadable_own_file_is_named_with_the_reason(qkablate, own_configs):
    file = own_configs / "sweep/mine.yaml"
    file.unlink()
    file.symlink_to("/proc/self/mem")  # opens, and cannot be read
    done = qkablate("sweep", "--config-dir", str(own_configs), "sweep=mine")
    assert_refused(done, "sweep=mine: '", "': Input/output error")


def test_train_proposes_the_own_folder_again(qkablate, tiny, own_configs):
    words = ["train", "--config-dir", str(own_configs), "variant=keyless", "data=book"]
    done = qkablate(*words, *without_data(tiny), "train.steps=2")
    assert done.code == 0, done.err
    for command in proposed_commands(done):
        assert command[command.index("--config-dir") + 1] == str(own_configs)


@pytest.mark.exhaustive
def test_sweep_of_translators_is_read_by_every_verb(qkablate):
    size = ("model.layers=1", "model.d_model=16", "model.heads=2", "train.steps=30", "threads=1")
    words = ("model=nano_translator", "data=reverse", "data.val_tokens=512", "data.test_tokens=512")
    axes = ("variant=standard,merged_w", "variant.sites=all,cross", "seed=range(3)")
    done = qkablate("sweep", *words, *axes, *size, "sweep.name=pairs", "--yes")
    assert done.code == 0, done.err
    for verb in ("results", "report", "status"):
        assert qkablate(verb, "pairs").code == 0
    table = qkablate("results", "pairs").out
    arms = ("standard-d16-h2", "merged_w-d16-h2", "merged_w_cross-d16-h2")
    assert all(re.search(rf"^{arm} ", table, re.MULTILINE) for arm in arms)
    assert "merged_w_cross-d16-h2-s0" in qkablate("ls").out
    compared = qkablate("compare", "standard-d16-h2-s0", "merged_w_cross-d16-h2-s0")
    assert compared.code == 0
    assert "they differ in  variant.sites: all · cross" in compared.out

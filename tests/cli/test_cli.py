"""The command as a user types it."""

import json
import os
import re
import shlex
import subprocess
import sys

import pytest

from qkablate import __version__
from qkablate.cli import VERBS
from qkablate.cli.train import print_next
from qkablate.config import KEYS, variants
from tests.cli.helpers import complete


def test_help(qkablate):
    for word in ("--help", "-h", "help"):
        done = qkablate(word)
        assert done.code == 0
        assert "qkablate train variant=merged_w" in done.out
    assert qkablate().out == done.out
    assert qkablate("help", "variants").out == qkablate("variants", "--help").out
    assert "verb 'varaints' (nearest: variants)" in qkablate("help", "varaints").err


@pytest.mark.parametrize("verb", [None, *VERBS])
def test_help_fits_80_columns_and_has_the_exit_codes(qkablate, verb):
    done = qkablate(*[verb] * bool(verb), "--help")
    assert done.code == 0
    assert [line for line in done.out.splitlines() if len(line) > 80] == []
    assert "Exit codes" in done.out or not verb


def test_version(qkablate):
    assert qkablate("--version").out == f"qkablate {__version__}\n"
    assert "qkablate --version" in qkablate("-v").err


def test_waiting_threads_give_up_their_core_unless_the_user_says_otherwise(qkablate, monkeypatch):
    """Libgomp reads this when torch is imported, which is after the command began."""
    for given, policy, found in ((None, None, "50000"), ("7", None, "7"), (None, "passive", None)):
        for name, value in (("GOMP_SPINCOUNT", given), ("OMP_WAIT_POLICY", policy)):
            monkeypatch.delenv(name, raising=False)
            if value is not None:
                monkeypatch.setenv(name, value)
        qkablate("--version")
        assert os.environ.get("GOMP_SPINCOUNT") == found


def test_unknown_verb(qkablate):
    done = qkablate("trian")
    assert done.code == 2
    assert done.err == (
        "qkablate: verb 'trian' (nearest: train) is not one of train, variants, verify, …"
        " (`qkablate --help` lists all 23)\n"
    )


@pytest.mark.parametrize(
    ("words", "typed"),
    [
        (["variant=merged_w", "seed=1"], "qkablate train variant=merged_w seed=1"),
        (["sweep=worlds"], "qkablate sweep sweep=worlds"),
        (["out=here", "ls", "data=recall"], "qkablate ls out=here data=recall"),
    ],
)
def test_settings_without_a_verb(qkablate, words, typed):
    done = qkablate(*words)
    assert done.code == 2
    assert done.err == f"qkablate: a verb is missing before {words[0]!r}; type: {typed}\n"


def test_interrupt_that_a_library_turns_into_another_error(qkablate, monkeypatch):
    def interrupted(argv):
        try:
            try:
                raise KeyboardInterrupt
            finally:
                _ = old  # noqa: F821
        except Exception as error:
            raise NameError("told anew") from error

    monkeypatch.setattr("qkablate.cli.train.main", interrupted)
    done = qkablate("train")
    assert done.code == 130
    assert done.err == "qkablate: interrupted; the same command resumes from the last checkpoint\n"


def test_python_m(spawn):
    process = spawn("--version")
    assert process.communicate()[0] == f"qkablate {__version__}\n"


@pytest.mark.slow
def test_train_help(qkablate):
    done = qkablate("train", "--help")
    assert done.code == 0
    text = " ".join(done.out.split())
    assert f"variant: {', '.join(sorted(variants()))}" in text
    for name, info in KEYS.items():
        assert f" {name}=" in text
        assert info.help in text
    assert "--rerun" in done.out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["model.heads=3"], "model.heads: 3 does not divide"),
        (
            ["variant=merged_w", "model.position=rope"],
            "merged_w is not supported: model.position=rope",
        ),
        (["variant.qk=mergd"], "(nearest: merged)"),
        (["attention.kernel=efficient", "device=cpu"], "efficient is a CUDA kernel"),
    ],
)
def test_cfg_job_of_an_impossible_config(qkablate, words, says):
    done = qkablate("train", *words, "--cfg", "job")
    assert (done.code, done.out) == (2, "")
    assert says in done.err


def test_cfg_job_of_a_user_config(qkablate, tmp_path):
    (tmp_path / "own" / "variant").mkdir(parents=True)
    (tmp_path / "own" / "variant" / "mine.yaml").write_text("name: mine\nqk: no_q\nov: separate\n")
    for words in (["--config-dir", "own"], ["--config-dir=own"]):
        done = qkablate("train", "variant=mine", *words, "--cfg", "job")
        assert (done.code, "qk: no_q" in done.out) == (0, True), done.err


def test_control_characters_are_not_echoed(qkablate):
    done = qkablate("train", "variant=\x1b[31mred")
    assert done.code == 2
    assert "\x1b" not in done.err


def test_cfg_job(qkablate):
    done = qkablate("train", "variant=merged_w", "--cfg", "job")
    assert done.code == 0
    assert "qk: merged" in done.out
    assert "hydra" not in done.out


def test_info(spawn):
    """In a process of its own: Hydra's --info leaves its log handlers behind."""
    process = spawn("train", "--info", "defaults")
    assert "variant/standard" in process.communicate()[0].replace(" ", "")
    assert process.returncode == 0


MISTAKES = [
    (["variant=mergedw"], "variant: 'mergedw' (nearest: merged_w) is not one of "),
    (
        ["model=nanoo"],
        "model: 'nanoo' (nearest: nano) is not one of nano, nano_encoder, llama_nano, …",
    ),
    (["train.stps=5"], "train.stps: there is no such key (nearest: train.steps)"),
    (["datas=text"], "datas: there is no such key"),
    (["+zzz=3"], "zzz: there is no such key"),
    (["model.d_model=abc"], "model.d_model: 'abc' is not a whole number"),
    (["seed=1.5"], "seed: '1.5' is not a whole number"),
    (["train.steps=1e3"], "train.steps: needs a whole number or auto; write 1000"),
    (["seeds=5"], "seeds: is a section, with the keys init, data, dropout; five seeds are"),
    (["seed=0-4"], "'0-4' is not a whole number; several are 'seed=range(5)' or seed=0,1,2"),
    (["variant=standard,", "merged_w"], "'variant=standard,': no space after the comma"),
    (["variant="], "variant: a value is missing"),
    (["seed="], "seed: a value is missing"),
    (["variant=mine.py"], "is not in the catalogue; your file is variant.file=mine.py"),
    (["--dry-run"], "'--dry-run' is a flag of `qkablate sweep`"),
    (["train.steps=null"], "train.steps: null is not a value"),
    (["tracking.tags=[a,null]"], "tracking.tags: null is not a value"),
    ([f"data.cache={__file__}"], f"data.cache: '{__file__}' is not a folder"),
    (["tracking.tags=foo"], "tracking.tags: a list is written [a,b]"),
    (["varient=merged_w"], "varient: there is no such key (nearest: variant)"),
    (["lr=1e-3"], "lr: there is no such key (nearest: variant.lr, optim.lr)"),
    (["--variant=merged_w"], "'--variant' is a key, not a flag: write variant=merged_w"),
    (["~model"], "'~model': keys cannot be removed"),
    (["seed=99999999999999999999"], "is not at most 9007199254740992"),
    (["seed.x=1"], "seed.x: there is no such key (nearest: seed)"),
    (["merged_w"], "'merged_w' is not key=value; write variant=merged_w"),
    (["merged"], "'merged' is not key=value (nearest: variant=merged_w)"),
    (["model.heads=[1"], "'model.heads=[1' cannot be read"),
    (["variant=standard,merged_w"], "has several values: add -m for a run each"),
    (["variant.sites=encoder,cross"], "sites of one run are joined by +, as encoder+cross"),
    (["--reurn"], "'--reurn' is not a flag of this verb (nearest: --rerun)"),
    (["model=null"], "model: null is not a value"),
    (["=3"], "'=3' is not key=value"),
    (["--cfg"], "--cfg: '' is not job or hydra or all"),
    (["--cfg", "jb"], "--cfg: 'jb' is not job or hydra or all"),
    (["--multirun=3"], "--multirun takes no value"),
    (["device=gpu"], "'gpu' (nearest: cuda) is not one of auto, cpu, cuda, cuda:N, mps"),
    (["tracking.wandb=off"], "(nearest: disabled)"),
    (["--variant", "no_q"], "a key is written without dashes: variant=VALUE"),
    (["seed=range(3)"], "'seed=range(3)' has several values: `qkablate train` trains one run"),
    (["--rerun=1"], "--rerun takes no value"),
    (["optim.betas=[a,b]"], "optim.betas: 'a' is not a number"),
    (["data=pairs", "data.path="], "data.path: data=pairs needs either data.path=FILE_OR_FOLDER"),
    (
        ["data=hub", "data.path=null", "data.name=x", "data.document_start='a{4294967295}'"],
        "data.document_start: not a regular expression: ",
    ),
    (["out=~/x"], "'out=~/x' cannot be read; quote a value with special characters"),
    (["variant.name=../../evil"], "variant.name"),
    (["variant.name=''"], "variant.name: '' is not made of letters"),
    (["train.steps=1", "optim.warmup=5"], "optim.warmup: 5 is not below the 1 steps"),
    (["model.mlp_ratio=0.01"], "model.mlp_ratio: 0.01 leaves the MLP without a single unit"),
    (["model.mlp=swiglu", "model.mlp_ratio=0"], "model.mlp: swiglu, but model.mlp_ratio=0"),
    (
        ["optim=muon", "variant.qk=uniform", "variant.ov=no_vo", "model.mlp_ratio=0"],
        "optim.optimizer: muon, but the blocks have no matrices; use adamw",
    ),
    (["-m", "--cfg", "job"], "Only one of --run, --multirun, --cfg"),
    (["--config-name", "--config-dir"], "--config-name: '--config-dir' is not a value"),
    (["x" * 300], f"'{'x' * 40}…' is too long for a key"),
    (["variant=" + "x" * 300], "is too long for a key or for one of its choices"),
    (["train\nsteps"], "'train�steps' is not key=value"),
    (["-m", "seed=range(0,1,0)"], "arg 3 must not be zero"),
    (["-m", "seed=range(1000000000)"], "more than 10,000 values"),
    (["-m", "variant=no_q,no_q"], "variant: no_q is given more than once"),
    (["-m", "seed=range(101)", "model.layers=range(1,101)"], "more than 10,000 jobs"),
    (["-m", "seed=interval(0,3)"], "give single values, not an interval"),
    (["-m", "variant=1,2"], "must be a string or a list. Got int (in variant=1)"),
    (["--config-name", "nope"], "there is no configuration called 'nope'"),
    (["model.heads=3"], "model.heads: 3 does not divide model.d_model=16"),
    (["train.steps=0"], "train.steps: 0 is not auto, or 1 or more"),
    (["optim.lr=nan"], "optim.lr: nan is not a number"),
    (["variant.qk=mergd"], "variant.qk: 'mergd' (nearest: merged) is not one of merged, "),
    (["precision=fp16"], "precision: fp16 needs a CUDA device, not cpu (allowed: bf16, fp32)"),
    (["data.path=/nope/x"], "data.path: there is no file, folder or pattern '/nope/x'"),
    (["model.context=5000"], "model.context: 5000 is longer than the data: the val split holds"),
    (["out=/proc/here"], "out: cannot write in '/proc/here'"),
    (["data.cache=/proc/here"], "data.cache: cannot write in '/proc/here'"),
    (["tracking.wandb=online"], "tracking.wandb: online needs a key"),
]


@pytest.mark.parametrize(("words", "line"), MISTAKES, ids=lambda x: str(x)[:40])
def test_mistakes(qkablate, tiny, tmp_path, words, line):
    """Print one line on stderr, exit with 2, and start no run."""
    done = qkablate("train", *tiny, *words)
    assert done.code == 2
    assert line in done.err
    assert done.err.startswith("qkablate: ")
    assert done.err.count("\n") == 1
    assert done.out == ""
    assert not list(tmp_path.glob("outputs/runs/*"))


def test_variant_that_names_a_file_without_its_suffix(qkablate, tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").touch()
    for words in (["train", *tiny, "variant=mine"], ["sweep", "variant=standard,mine"]):
        assert qkablate(*words).err.endswith("; your file is variant.file=mine.py\n")


@pytest.mark.parametrize("name", ["cuda", "cuda:3", "mps"])
def test_missing_device_is_rejected(qkablate, tiny, monkeypatch, name):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.backends.mps.is_available", lambda: False)
    done = qkablate("train", *tiny, f"device={name}")
    assert done.code == 2
    assert f"device: {name} requested, but torch sees no" in done.err


def test_out_is_a_file(qkablate, tiny, text):
    done = qkablate("train", *tiny, f"out={text}")
    assert done.code == 2
    assert "out: cannot write in" in done.err


def test_out_is_full(qkablate, tiny, monkeypatch):
    monkeypatch.setattr("qkablate.training.resolve.free_bytes", lambda folder: 1000)
    done = qkablate("train", *tiny)
    assert done.code == 2
    assert re.search(r"out: '.*' has 0 MB free; this run needs \d+ MB", done.err)


def test_compile_without_a_compiler(qkablate, tiny, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CXX", raising=False)
    done = qkablate("train", *tiny, "compile=true")
    assert done.code == 2
    assert "compile: true needs a compiler (g++ or clang++)" in done.err


def test_run_from_config_to_result(qkablate, tiny, tmp_path):
    done = qkablate("train", *tiny, "variant=merged_w", "seed=3")
    assert done.code == 0
    (folder,) = tmp_path.glob("outputs/runs/*")
    result = json.loads((folder / "result.json").read_text())
    assert folder.name == f"merged_w-d16-h2-s3-{result['id']}"
    wanted = (
        "id label status variant seed d_model heads layers context loss bits_per_byte params tokens"
        " steps seconds tokens_per_second precision device kernel threads data_fingerprint version"
    )
    assert set(wanted.split()) <= set(result)
    assert result["status"] == "done"
    assert set(result["loss"]) == {"train", "val", "test"}
    assert all(1 < loss < 6 for loss in result["loss"].values())
    params = result["params"]
    assert params["total"] == sum(v for k, v in params.items() if k != "total")
    assert (result["steps"], result["tokens"]) == (12, 12 * 2 * 16)
    assert result["init"] == {"mode": "matched", "match": "exact"}
    assert result["kernel"] == "folded"
    assert f"{result['loss']['val']:.4f}" in done.out
    assert str(folder) in done.out
    assert "qkablate train variant=standard seed=3" in done.out
    names = {file.name for file in folder.iterdir()}
    assert names >= {"config.yaml", "environment.json", "metrics.jsonl", "checkpoints"}
    # Nothing stray: no Hydra folders or logs beside the runs.
    assert {p.name for p in tmp_path.iterdir()} == {"home", "corpus.txt", "cache", "outputs"}
    assert [p.name for p in (tmp_path / "outputs").iterdir()] == ["runs"]


@pytest.mark.slow
def test_finished_run_is_not_trained_again(qkablate, tiny, tmp_path):
    first = qkablate("train", *tiny)
    (folder,) = tmp_path.glob("outputs/runs/*")
    before = (folder / "result.json").read_bytes()
    again = qkablate("train", *tiny)
    assert again.code == 0
    assert "this run ended before" in again.out
    assert (folder / "result.json").read_bytes() == before
    anew = qkablate("train", *tiny, "--rerun")
    assert anew.code == 0
    assert "ended before" not in anew.out
    assert (folder / "attempts" / "1" / "result.json").read_bytes() == before
    results = [json.loads(before), json.loads((folder / "result.json").read_text())]
    assert [r["attempt"] for r in results] == [1, 2]
    assert results[0]["loss"] == results[1]["loss"]
    assert first.code == 0


def test_printed_command_of_the_other_arm_works(qkablate, tiny):
    done = qkablate("train", *tiny, "variant=merged_w")
    (line,) = re.findall(r"  qkablate (train variant=standard .*)", done.out)
    assert qkablate(*shlex.split(line)).code == 0


@pytest.mark.exhaustive
@pytest.mark.parametrize("words", [["--help"], ["train", "--help"], ["train", "--cfg", "job"]])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_without_a_reader(spawn, monkeypatch, words, unbuffered):
    """Exit quietly in `qkablate --help | true`."""
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    process = spawn(*words)
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait(timeout=60) == 0


@pytest.mark.slow
def test_closed_streams(tiny, tmp_path):
    command = shlex.join([sys.executable, "-m", "qkablate", "train", *tiny])
    done = subprocess.run(["sh", "-c", f"{command} >&- 2>&-"], check=False)
    assert done.returncode == 0
    assert list(tmp_path.glob("outputs/runs/*/result.json"))


@pytest.mark.exhaustive
def test_multirun_over_every_variant(qkablate, tiny, tmp_path):
    done = qkablate("train", *tiny, "-m", "variant=glob(*)", "train.steps=1", "model.heads=4")
    assert done.code == 0
    assert len(list(tmp_path.glob("outputs/runs/*/result.json"))) == len(variants())


@pytest.mark.slow
def test_one_run_under_two_names_is_one_run(qkablate, tiny, tmp_path):
    done = qkablate("train", *tiny, "-m", "variant.name=a,b")
    assert done.code == 0
    assert len(list(tmp_path.glob("outputs/runs/*"))) == 1


@pytest.mark.slow
def test_multirun(qkablate, tiny, tmp_path):
    words = ["-m", "variant=standard,merged_w", "model.d_model=16,8", "seed=0,1"]
    done = qkablate("train", *tiny, *words)
    assert done.code == 0
    results = [json.loads(p.read_text()) for p in tmp_path.glob("outputs/runs/*/result.json")]
    assert len(results) == 8
    assert {(r["variant"], r["d_model"], r["seed"]) for r in results} == {
        (v, d, s) for v in ("standard", "merged_w") for d in (8, 16) for s in (0, 1)
    }
    table = done.out[done.out.rindex("\nrun ") :]
    assert table.count(" done ") == 8
    assert {p.name for p in (tmp_path / "outputs").iterdir()} == {"runs", "multirun"}
    again = qkablate("train", *tiny, *words)
    assert again.out.count("this run ended before") == 8
    assert len(list((tmp_path / "outputs" / "multirun").iterdir())) == 2


@pytest.mark.parametrize(
    "words", [["model.heads=2,3"], ["seed=0,1", "data.path=/nope"], ["model=nano,nanoo"]]
)
def test_multirun_starts_nothing_if_one_job_is_invalid(qkablate, tiny, tmp_path, words):
    done = qkablate("train", *tiny, "-m", *words)
    assert done.code == 2
    assert done.err.startswith("qkablate: ")
    assert done.err.count("\n") == 1
    assert "(in " in done.err
    assert not list(tmp_path.glob("outputs/runs/*"))
    assert not list(tmp_path.glob("outputs/multirun/*"))


def test_after_divergence_a_lower_rate_is_proposed(capsys, tmp_path):
    words = ["variant=no_q", "optim.lr=0.3", "train.steps=9"]
    print_next({"status": "diverged"}, words, tmp_path, 0.3)
    command = "qkablate train variant=no_q train.steps=9 optim.lr=0.03"
    assert capsys.readouterr().out == f"\nNext\n  {command}\n"


def test_after_a_run_its_pair_and_a_sweep_are_proposed(capsys, tmp_path):
    result = {"status": "done", "variant": "no_q", "seed": 2}
    words = ["variant=no_q", "seed=2", "train.steps=9", "out=else where"]
    print_next(result, words, tmp_path, 1e-3)
    assert capsys.readouterr().out.splitlines()[2:] == [
        "  qkablate train variant=standard seed=2 train.steps=9 'out=else where'",
        "  qkablate sweep variant=standard,no_q 'seed=range(6)' train.steps=9 'out=else where'",
    ]


@pytest.mark.parametrize(("variant", "other"), [("merged_w", "standard"), ("standard", "merged_w")])
def test_after_a_run_with_rotated_dimensions_its_pair_has_them_too(
    capsys, tmp_path, variant, other
):
    result = {"status": "done", "variant": f"{variant}_rope8", "seed": 2}
    words = ["model.position=rope", "variant.rope_dims=8"]
    print_next(result, [f"variant={variant}", *words], tmp_path, 1e-3)
    assert capsys.readouterr().out.splitlines()[2:] == [
        f"  qkablate train variant={other} seed=2 {' '.join(words)}",
        f"  qkablate sweep variant={other},{variant} 'seed=range(6)' {' '.join(words)}",
    ]


def test_after_a_run_of_mla_its_pair_has_the_dimensions_that_it_has_by_default(qkablate, tiny):
    done = qkablate("train", *tiny, "variant=mla", "model.position=rope")
    (proposed,) = (line for line in done.out.splitlines() if "train variant=standard" in line)
    assert proposed.endswith(" variant.rope_dims=4")
    assert "_rope4" in done.out


def test_after_a_run_of_an_own_file_its_comparison_is_proposed(capsys, tmp_path):
    words = ["variant.file=mine.py", "variant.ov=no_o", "variant.lr=2", "seed=2", "train.steps=9"]
    print_next({"status": "done", "variant": "mine+no_o", "seed": 2}, words, tmp_path, 1e-3)
    assert capsys.readouterr().out.splitlines()[2:] == [
        "  qkablate train variant=standard seed=2 train.steps=9",
        "  qkablate sweep variant.file=mine.py variant.ov=no_o 'seed=range(6)' variant.lr=2"
        " train.steps=9",
    ]


@pytest.mark.parametrize(
    ("variant", "rate", "other", "own", "shared"),
    [
        ("merged_w", "0.13", "standard", "merged_w 'seed=range(6)' variant.lr=0.13", ""),
        ("merged_w", "same", "standard", "standard,merged_w 'seed=range(6)'", " variant.lr=same"),
        ("standard", "2", "merged_w", "merged_w,standard 'seed=range(6)'", ""),
    ],
)
def test_the_proposed_baseline_has_no_rate_of_another_circuit(
    capsys, tmp_path, variant, rate, other, own, shared
):
    words = [f"variant={variant}", f"variant.lr={rate}"]
    print_next({"status": "done", "variant": variant, "seed": 2}, words, tmp_path, 1e-3)
    assert capsys.readouterr().out.splitlines()[2:] == [
        f"  qkablate train variant={other} seed=2{shared}",
        f"  qkablate sweep variant={own}{shared}",
    ]


@pytest.mark.parametrize("extra", [["--config-dir=mine", "--config-name", "big"], ["+exp=big"]])
def test_next_keeps_other_configurations(capsys, tmp_path, extra):
    result = {"status": "done", "variant": "no_q", "seed": 2}
    print_next(result, [*extra, "variant=no_q"], tmp_path, 1e-3)
    assert capsys.readouterr().out.splitlines()[2:] == [
        f"  qkablate train variant=standard seed=2 {' '.join(extra)}",
        f"  qkablate train -m variant=standard,no_q seed=0,1,2 {' '.join(extra)}",
    ]


@pytest.mark.slow
def test_multirun_continues_after_a_diverged_or_failed_run(qkablate, tiny, tmp_path):
    done = qkablate("train", *tiny, "-m", "optim.lr=1000,1e-3", "optim.clip=0", "model.norm=none")
    assert done.code == 3
    table = done.out[done.out.rindex("\nrun ") :]
    assert table.count(" diverged ") == 1
    assert table.count(" done ") == 1


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion(qkablate, monkeypatch, shell):
    assert complete(qkablate, monkeypatch, "qkablate tr", shell) == ["train"]
    assert complete(qkablate, monkeypatch, "qkablate train variant=shared_", shell) == [
        "variant=shared_qk",
        "variant=shared_qk_reformer",
    ]
    found = complete(qkablate, monkeypatch, "qkablate train model.d", shell)
    assert found == ["model.d_model=", "model.dropout="]
    assert complete(qkablate, monkeypatch, "qkablate nope model.d", shell) == []
    done = qkablate("-sc", f"install={shell}")
    assert done.code == 0
    assert "qkablate" in done.out


def test_completion_of_an_unknown_shell(qkablate):
    assert qkablate("-sc", "install=tcsh").code == 2


def test_run_with_configs_of_the_users_leads_to_a_sweep_with_them(capsys, tmp_path):
    result = {"status": "done", "variant": "no_q", "seed": 0}
    print_next(result, ["--config-dir", "mine", "variant=no_q", "data=book"], tmp_path, 1e-3)
    sweep = "qkablate sweep variant=standard,no_q 'seed=range(6)' --config-dir mine data=book"
    assert sweep in capsys.readouterr().out

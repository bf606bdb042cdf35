"""The package as users get it: wheel, commands of the documentation, pinned versions."""

import glob
import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from docs_hooks import make_notebook

import qkablate as qkablate_package
from qkablate.analysis.claims.parse import claim_names, load_claim
from qkablate.cli import main
from tests.data.fake_hub import isolate_client
from tests.pretrained.published import write_published

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
CLAIMS = (ROOT / "docs" / "claims.md").read_text(encoding="utf-8")
# The pages whose commands are run; tests/test_docs.py checks those of all pages.
_RUN = "command-line look-at-a-variant sweeps resume reports claims gaps statistics"
_RUN += " data encoders tasks pretrained"
PAGES = [
    (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8") for name in [*_RUN.split(), "wandb"]
]


def test_wheel_that_no_python_has_tried_fails(tmp_path):
    """Every Python that is not found is named; that none is found is a failure."""
    (tmp_path / "scripts").mkdir()
    script = shutil.copy(ROOT / "scripts" / "try-wheel", tmp_path / "scripts")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "uv").write_text('#!/bin/sh\n[ "$1" = build ]\n')  # finds and downloads nothing
    (tmp_path / "uv").chmod(0o755)
    done = subprocess.run(
        [script], env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, capture_output=True, text=True
    )
    assert done.returncode == 1
    for version in ("3.11", "3.12", "3.13"):
        assert f"Python {version}: NOT TRIED" in done.stdout
    assert "none of these Pythons was found" in done.stderr


def test_claims_are_cut_off_in_time_and_published(tmp_path):
    fake = '#!/bin/sh\necho "$@" >> "$CALLS"\n[ $1 != claim ] || echo trained\n'
    fake += '[ "$3" != long ] || exec sleep 60\n'
    (tmp_path / "qkablate").write_text(fake)
    (tmp_path / "qkablate").chmod(0o755)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "CALLS": str(tmp_path / "calls")}
    script = [ROOT / "scripts" / "run-claims"]
    words = ["2", "claims/short.yaml", "long", "later", "out=x", "data=text"]
    done = subprocess.run([*script, *words], env=env, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "claims/short.yaml  trained\nlong  trained\n"
    assert (tmp_path / "calls").read_text().splitlines() == [
        "claim run claims/short.yaml data=text out=x",
        "claim run long data=text out=x",
        "publish claims/short.yaml out=x",
        "publish long out=x",
    ]
    for words in ([], ["1h", "short"], ["60"], ["60", "out=x"]):
        done = subprocess.run([*script, *words], env=env, capture_output=True, text=True)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1)


@pytest.mark.parametrize(("backend", "seen"), [("cpu", "cpu"), ("", "unset")])
def test_image_gives_uv_a_build_of_torch_or_none(tmp_path, backend, seen):
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
    (line,) = re.findall(r"^RUN (.* uv pip .*)$", text, re.MULTILINE)
    for name, script in {"pip": "", "uv": 'echo "${UV_TORCH_BACKEND-unset}"'}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "UV_TORCH_BACKEND": backend}
    done = subprocess.run(["sh", "-c", line], env=env, capture_output=True, text=True, check=True)
    assert done.stdout == f"{seen}\n"


def test_image_is_built_without_history_environments_and_outputs():
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    assert {".git", ".venv", "outputs", "site", "**/__pycache__", ".*_cache"} <= {*ignored}


def test_docs_count_the_claims():
    claims = [load_claim(name) for name in claim_names()]
    assert f" {len(claims)} claims from the literature" in CLAIMS
    assert [claim.name for claim in claims if claim.untestable is not None] == []
    assert "not testable" not in CLAIMS


def commands() -> list[str]:
    """Return every qkablate command that these pages show in a block of shell."""
    blocks = re.findall(r"```(?:bash|sh|console)\n(.*?)```", "\n".join(PAGES), re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    found = [line.split(" #")[0].strip().removeprefix("$ ") for line in lines]
    # Tested below, in tests/sweeps, and in tests/analysis/scaling: a grid of sizes and lengths.
    own = ("my_claim.yaml", "--retry", "--scaling")
    return sorted({x for x in found if x.startswith("qkablate ") and not any(o in x for o in own)})


def test_the_docs_show_commands():
    assert len(commands()) >= 40
    assert "make train" in README
    assert "make test" in README


@pytest.fixture(scope="module")
def workspace(tmp_path_factory) -> Callable[..., Path]:
    """Return a function that trains into a folder of the given name, once for the module."""
    folders: dict[str, Path] = {}

    def make(name: str, *commands: list[str]) -> Path:
        if name not in folders:
            folder = folders[name] = tmp_path_factory.mktemp(Path(name).name)
            for words in commands:
                with pytest.raises(SystemExit) as exit_:
                    main([*words, f"out={folder / 'outputs'}"])
                assert exit_.value.code == 0
        return folders[name]

    return make


PUBLISHED = """says: Keys alone are enough.
source: a test
seeds: 3
tuning_seeds: 0
grid: {variant: "standard,no_q"}
parts: {within: {arm: no_q, kind: noninferior, margin: 3}}
"""


def _reads_published_runs(words: list[str]) -> bool:
    return words[0] in ("publish", "reproduce") or "docs/study" in " ".join(words)


PUBLISHED_MODELS = {"openai-community/gpt2": "gpt2", "HuggingFaceTB/SmolLM-135M": "llama"}


@pytest.fixture
def models(tmp_path, monkeypatch) -> None:
    """Keep random models of 256 tokens where the Hub's client keeps those of the page.

    GPT-2's own tokens are a file that is downloaded; tests/data/test_tiktoken.py makes one.
    """
    isolate_client(monkeypatch, tmp_path / "hf")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for name, family in PUBLISHED_MODELS.items():
        folder = tmp_path / "hf" / "hub" / f"models--{name.replace('/', '--')}"
        for below in ("refs", "snapshots"):
            (folder / below).mkdir(parents=True)
        (folder / "refs" / "main").write_text("0" * 40)
        write_published(folder / "snapshots" / ("0" * 40), family, 256, context=128)
    (tmp_path / "models").mkdir()
    write_published(tmp_path / "models" / "mine")


@pytest.fixture
def prepared(workspace, tiny, monkeypatch, tmp_path) -> Callable[[list[str]], None]:
    """Return a function that goes to a folder with the runs that a command reads."""

    def prepare(words: list[str]) -> None:
        verb, *names = words
        if "gpt2" in names[:1] and verb != "import":
            with pytest.raises(SystemExit) as exit_:
                main(["import", "gpt2"])
            assert exit_.value.code == 0
            return
        if _reads_published_runs(words):
            claim = tmp_path / "mine.yaml"
            claim.write_text(PUBLISHED, encoding="utf-8")
            folder = workspace("published", ["claim", "run", str(claim), *tiny])
            monkeypatch.chdir(folder)
            if not (folder / "docs").exists():
                (folder / "docs").mkdir()
                for publish in (["publish", "mine"], ["report", "--study", "docs/study"]):
                    with pytest.raises(SystemExit) as exit_:
                        main(publish)
                    assert exit_.value.code == 0
            return
        text = next((word for word in words if word.startswith("text=")), "")
        if verb == "sample" and text:  # an encoder
            data = ["data=stdlib_tags", "model.context=32"] if "(x" in text else ["data=reverse"]
            data = (
                ["data.objective=mlm", "data=stdlib", "model.context=32"]
                if "[MASK]" in text
                else data
            )
            train = ["train", "model=nano_encoder", "model.d_model=64", *data, "train.steps=3"]
            folder = workspace(f"encoder-{data[0][-3:]}", [*train, "tracking.wandb=disabled"])
        elif verb == "sample" and names[0] == "standard-d64":  # a translator
            data = ["data=reverse"]
            if "source=f(x + 1, y)[0]" in words:
                data = ["data=stdlib_pairs", "model.source=96", "model.context=97"]
            steps = ["train.steps=3", "data.test_tokens=512", "tracking.wandb=disabled"]
            train = ["train", "model=nano_translator", *data, *steps]
            folder = workspace(f"translator-{len(data)}", train)
        elif verb == "eval":  # each with its own cache
            folder = workspace(str(tmp_path), ["train", f"variant={names[0]}", *tiny])
        elif verb in ("sample", "inspect"):
            folder = workspace(names[0], ["train", f"variant={names[0]}", *tiny])
        elif verb in ("status", "results", "report", "sync", "dashboard"):
            sweep = ["sweep", *tiny, "variant=standard,no_q", "sweep.name=quick"]
            folder = workspace("sweep", sweep)
        elif verb == "compare":
            runs = [["train", f"variant={variant}", *tiny] for variant in names[:2]]
            folder = workspace("-".join(names[:2]), *runs)
        elif verb == "project":
            count = sum("=" not in name and not name.startswith("-") for name in names)
            runs = [["train", f"seed={seed}", *tiny] for seed in range(count)]
            folder = workspace(f"project-{len(runs)}", *runs)
        else:
            return
        monkeypatch.chdir(folder)

    return prepare


@pytest.mark.exhaustive
@pytest.mark.parametrize("command", commands())
def test_commands_of_the_docs_work(
    qkablate, models, prepared, tiny, text, command, tmp_path, shared_cache, monkeypatch
):
    """Run them as they are written, on a tiny model, with data and outputs in a test folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(shared_cache))
    words = shlex.split(command)[1:]
    (tmp_path / "book.txt").write_bytes(text.read_bytes())
    pairs = [f"sentence {number}\tSatz {number}\n" for number in range(300)]
    (tmp_path / "pairs.tsv").write_text("".join(["en\tde\n", *pairs]), encoding="utf-8")
    prepared(words)
    if _reads_published_runs(words):  # of a small claim in the place of a large one
        words = ["mine" if word == "directed" else word for word in words]
        own = [word for word in tiny if word.startswith("data.path=")]  # the claim's is not read
        done = qkablate(*words, *(own if words[0] == "reproduce" else []))
        # Intervals of 95 % miss in one of twenty cases, and then the command says so.
        may_differ = words[0] == "reproduce" and "--check" not in words
        differs = may_differ and "DISAGREES" in done.out
        assert done.code == int(differs), done.out + done.err
        return
    if words[0] == "data" and words[1] in ("info", "show"):
        assert qkablate("data", "prepare", *words[2:]).code == 0
    if words[0] == "report":  # a claim takes a hundred runs, and a shell expands the patterns
        words = [word for word in words if word != "directed"]
        words = [name for word in words for name in sorted(glob.glob(word)) or [word]]
    if words[0] == "sync":  # there is no server
        words = [*words, *["--dry-run"] * ("--dry-run" not in words)]
    if words[0] == "dashboard":
        pytest.importorskip("wandb_workspaces")
        words = [*words, "--spec"]
    if words[0] == "eval":
        words = [word.replace("book.txt", f"{tmp_path}/book.txt") for word in words]
        words += [word for word in tiny if word.startswith("data.cache=")]
    if words[0] == "project":
        words = [word.replace("-d128-h4-", "-d16-h2-") for word in words]
        words = ["variant=no_q,merged_w" if word == "variant=all" else word for word in words]
        # The location of the data is not read from the run's folder.
        words += [word for word in tiny if word.startswith(("data.", "tracking."))]
        if "gpt2" in words:  # which has no data and no length of a training
            words += ["data=text", "finetune.steps=2"]
    if "sweep.tune=true" in words:  # dozens of runs; tests/sweeps/planning/test_tuning.py tunes
        words.append("--dry-run")
    if words[:2] == ["claim", "run"]:  # a hundred runs; tests/cli/test_claim.py runs a small one
        own = [word for word in tiny if word.startswith(("threads", "tracking."))]
        done = qkablate(*words, *own, *(["--dry-run"] * ("--dry-run" not in words)))
        assert done.code == 0, done.err
        return
    if words[:2] == ["claim", "show"]:
        done = qkablate(*words)
        assert done.code == 1
        assert "not run yet" in done.out
        return
    if words[0] not in ("train", "sweep") or {"--help", "--cfg"} & set(words):
        assert qkablate(*words).code == 0
        return
    given = {word.split("=")[0] for word in words}
    smaller = [word for word in tiny if word.split("=")[0] not in given]
    if "data=directed" in words:  # a task reads no text
        smaller = [word for word in smaller if not word.startswith("data")]
    if "model=nano_translator" in words or "model=nano_encoder" in words:  # small already
        smaller = [word for word in smaller if not word.startswith(("data", "model."))]
    words = ["seed=range(2)" if word == "seed=range(6)" else word for word in words]
    if "train.steps" in given:
        words = ["train.steps=3" if word.startswith("train.steps=") else word for word in words]
    if "sweep=scaling" in words:  # dozens of tuned runs
        words += ["model.heads=1", "--dry-run"]
        smaller = [word for word in smaller if not word.startswith("model.heads")]
    if "--extend" in words:
        shorter = [word for word in words if word != "--extend" and "train.steps" not in word]
        assert qkablate(*shorter, "train.steps=2", *smaller).code == 0
    done = qkablate(*words, *smaller)
    assert done.code == 0, done.err


def test_constraints_pin_every_dependency():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = project["dependencies"] + extras["dev"]
    wanted += extras["dashboard"] + extras["docs"] + extras["tensorboard"] + extras["mlflow"]
    pinned = dict(
        line.lower().split("==")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if line and not line.startswith("#")
    )
    for need in wanted:
        name = re.match(r"[\w.-]+", need)[0].lower()
        assert name in {p.replace("_", "-") for p in pinned}, name


def test_make_help_lists_every_target():
    out = subprocess.run(["make", "-C", ROOT, "help"], capture_output=True, text=True).stdout
    for target in ("train", "test", "check", "docs", "venv"):
        assert f"make {target}" in out


@pytest.mark.slow
def test_claim_of_the_docs_plans(qkablate, tmp_path):
    (block,) = re.findall(r"```yaml\n(.*?)```", CLAIMS, re.DOTALL)
    assert len(block.splitlines()) <= 10
    (tmp_path / "my_claim.yaml").write_text(block, encoding="utf-8")
    words = ["model.d_model=16", "model.heads=2", "threads=1", "tracking.wandb=disabled"]
    done = qkablate("claim", "run", "my_claim.yaml", *words, "--dry-run")
    assert done.code == 0, done.err
    assert "3 comparisons of 8 pairs" in done.out
    assert "2 arms measured alone, 8 times" in done.out


@pytest.mark.exhaustive
def test_claim_of_the_docs_runs(qkablate, tmp_path):
    (block,) = re.findall(r"```yaml\n(.*?)```", CLAIMS, re.DOTALL)
    block = block.replace("seeds: 8", "seeds: 5\ntuning_seeds: 0")
    block = block.replace("train.eval_every: 100", "train.eval_every: 1\n  train.steps: 8")
    (tmp_path / "my_claim.yaml").write_text(block, encoding="utf-8")
    words = ["model.d_model=16", "model.heads=2", "model.layers=1"]
    words += ["threads=1", "tracking.wandb=disabled"]
    words += ["train.eval_tokens=1024", "train.test_tokens=2048"]
    done = qkablate("claim", "run", "my_claim.yaml", *words)
    assert done.code == 0, done.err
    for part in ("right", "early", "speed"):
        assert f"\n{part} " in done.out
    assert qkablate("report", "my_claim", "--format", "md").code == 0


def test_every_claim_is_in_the_table_of_the_docs():
    table = CLAIMS[CLAIMS.index("## What the discussions said") :]
    found = set(re.findall(r"`(\w+)`", table))
    assert {path.stem for path in (ROOT / "conf" / "claim").glob("*.yaml")} <= found


@pytest.mark.slow
def test_notebook_of_the_docs_runs(tmp_path):
    """Run its cells in order, as a script, on less data and a smaller model."""
    page = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    cells = json.loads(make_notebook(page))["cells"]
    code = "\n".join(cell["source"] for cell in cells if cell["cell_type"] == "code")
    smaller = {"model.layers": 1, "model.d_model": 16, "train.batch_size": 4, "train.steps": 4}
    for key, value in {**smaller, "data.vocab_size": 12}.items():
        code, count = re.subn(rf'("{key}": )\d+', rf"\g<1>{value}", code)
        assert count == 1, key
    (tmp_path / "page.py").write_text(code, encoding="utf-8")
    done = subprocess.run([sys.executable, "page.py"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for line in (
        "done: test loss ",
        "variant: 'shared_q' (nearest: shared_qk) is ",
        "n=4",
        "2 gaps",
    ):
        assert line in done.stdout
    for column in ("run, arm, variant, d_model, heads", "shared_qk-d16-h2", "standard | 4 d²"):
        assert column in done.stdout


@pytest.mark.slow
def test_variant_of_the_readme_is_verified_and_trained(qkablate, tiny, tmp_path):
    code = re.search(r"```python\n(.*?)```", README, re.DOTALL)[1]
    assert len(code.splitlines()) < 25
    (tmp_path / "next_head_q.py").write_text(code, encoding="utf-8")
    assert "qkablate verify variant.file=next_head_q.py" in README
    for words in (["verify"], ["train", *tiny]):
        done = qkablate(*words, "variant.file=next_head_q.py")
        assert done.code == 0, done.out + done.err


@pytest.mark.slow
def test_variant_of_the_docs_is_verified_and_trained(qkablate, tiny, tmp_path):
    """It has under 25 lines, and is verified, costed and trained like the built-in ones."""
    text = (ROOT / "docs" / "own-variant.md").read_text(encoding="utf-8")
    name = re.search(r"variant\.file=(\w+\.py)", text)[1]
    code = re.search(r"```python\n(.*?)```", text, re.DOTALL)[1]
    assert len(code.splitlines()) < 25
    (tmp_path / name).write_text(code, encoding="utf-8")
    shown = [
        line.split("  #")[0].split()[1:]
        for line in re.findall(r"^qkablate .*", text, re.MULTILINE)
        if name in line
    ]
    assert {words[0] for words in shown} == {"verify", "cost", "train"}
    for words in shown:
        done = qkablate(*words, *(tiny if words[0] == "train" else ()))
        assert done.code == 0, done.err
    folders = sorted((tmp_path / "outputs" / "runs").iterdir())
    labels = [folder.name.split("-d16")[0] for folder in folders]
    assert labels == ["residual_q+no_o", "residual_q"]
    again = qkablate("verify", folders[1].name, f"variant.file={name}")
    assert again.code == 0, again.err
    without = qkablate("verify", folders[1].name)
    assert (without.code, without.out) == (2, "")
    assert "give variant.file=PATH" in without.err


def test_every_name_of_the_api_exists_and_is_documented():
    page = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    for name in qkablate_package.__all__:
        assert getattr(qkablate_package, name).__name__ == name
        assert name in page
        assert name in dir(qkablate_package)
    with pytest.raises(AttributeError, match="'qkablate' has no attribute 'trian'"):
        _ = qkablate_package.trian

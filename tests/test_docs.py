"""The README and the documentation: length, commands, generated reference, diagrams."""

import importlib.util
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from diagrams import OV_FACTS, QK_FACTS, draw_variant
from docs_hooks import make_notebook
from reference import pages

from qkablate.attention import OV_CIRCUITS, QK_CIRCUITS
from qkablate.cli import VERBS, load_verb
from qkablate.cli.arguments import runs_and_keys
from qkablate.compose.configs import compose_jobs, open_hydra
from qkablate.compose.grid import read_request
from qkablate.compose.words import is_group
from qkablate.config import KEYS, is_key, variants
from qkablate.config.sweep import SWEEP_KEYS
from qkablate.errors import UserError

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
# Flags of Hydra, which `train` passes on.
HYDRA_FLAGS = {"-m", "--multirun", "--help", "--rerun", "--extend", "--cfg", "--info"}


def commands(file: Path) -> list[str]:
    """Return every qkablate command in the blocks of code of a page."""
    text = file.read_text(encoding="utf-8")
    blocks = "\n".join(re.findall(r"^```.*?\n(.*?)^```", text, re.DOTALL | re.MULTILINE))
    lines = re.sub(r"\\\n\s*", " ", blocks).splitlines()
    found = [re.match(r"(?:\$ |\s+|torchrun .*-m )?(qkablate [^\s:|].*)", line) for line in lines]
    return [re.split(r"\s+#|\s+> ", match[1])[0].strip() for match in found if match]


ALL = sorted({(file.name, line) for file in PAGES for line in commands(file)})


def check_command(words: list[str]) -> None:
    """Check the verb, the flags and the keys of a command; run nothing."""
    verb, *rest = words
    assert verb in VERBS
    parser = load_verb(verb).PARSER
    if verb == "train":
        assert {word for word in rest if word.startswith("-")} <= HYDRA_FLAGS
        keys = [w for w in rest if "=" in w and not w.lstrip("+").startswith(("hydra", "-"))]
        keys = [word for word in keys if "interval(" not in word]  # for sweepers that search
        compose_jobs(keys)
        return
    rest = [word for word in rest if word not in ("--help", "-h")]
    words = parser.parse(rest).words
    keys = [word for word in words if re.match(r"[\w.]+=", word) and not word.startswith("out=")]
    if verb == "sweep":
        with open_hydra():
            read_request(words)
        own = ("seed=", *{key.partition(".")[0] for key in SWEEP_KEYS})  # few jobs, quickly
        compose_jobs([word for word in keys if not word.startswith(own)])
    elif verb in ("cost", "data"):
        compose_jobs(keys)
    elif verb == "ls":
        for word in keys:
            load_verb("ls").parse_filter(word)
    elif verb in ("import", "export"):
        assert {key.partition("=")[0] for key in keys} <= {*load_verb(verb).KEYS}
    elif verb in ("sample", "inspect", "eval"):
        runs_and_keys(words, load_verb(verb).KEYS)
    else:
        for name in (key.partition("=")[0] for key in keys):
            known = is_key(name) or is_group(name)
            assert known or name in ("scale", "finetune.steps"), f"{name} is no key"


def test_readme_is_short():
    """The table of the answers grows with the study; the rest does not."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    answers = (ROOT / "docs" / "study" / "answers.txt").read_text(encoding="utf-8")
    assert len(text.replace(answers, "").splitlines()) <= 145


def test_pages_show_commands():
    assert len(ALL) > 60
    shown = {line.split()[1] for _, line in ALL}
    assert set(VERBS) <= shown


@pytest.mark.parametrize(("page", "command"), ALL)
def test_command_of_the_docs_is_valid(page, command, tmp_path):
    for name in re.findall(r"variant\.file=(\w+)\.py", command):
        (tmp_path / f"{name}.py").write_text("", encoding="utf-8")
    check_command(shlex.split(command)[1:])


@pytest.mark.parametrize(
    "command",
    [
        "trian",
        "train model.d_modle=3",
        "train data=texts",
        "train --reruns",
        "sweep variant=no_such_variant",
        "sweep --dry",
        "results --margins 0.01",
        "cost model.width=3",
        "verify model.width=3",
        "sample merged_w promt=a",
        "import gpt2 name=x",
    ],
)
def test_invalid_command_is_noticed(command):
    with pytest.raises((AssertionError, UserError)):
        check_command(command.split())


@pytest.fixture(scope="module")
def reference() -> dict[str, str]:
    return pages()


def test_reference_has_every_key(reference):
    rows = [line for line in reference["reference/keys.md"].splitlines() if line.startswith("| <")]
    names = [re.search(r"`([\w.]+)`", row)[1] for row in rows]
    assert sorted(names) == sorted([*KEYS, *SWEEP_KEYS])
    row = next(row for row in rows if "`optim.lr`" in row)
    assert "`0.001`" in row
    assert "1e-12 to 1,000" in row
    assert "| peak learning rate" in row


def test_reference_tells_what_is_part_of_the_id(reference):
    text = reference["reference/keys.md"]
    for key, part in (("seed", "yes"), ("data.path", "content"), ("out", "–"), ("threads", "–")):
        row = next(line for line in text.splitlines() if line.startswith(f"| <span id='{key}'"))
        assert row.endswith(f"| {part} |")


def test_reference_has_every_verb(reference):
    text = reference["reference/verbs.md"]
    for verb in VERBS:
        section = text[text.index(f"\n## {verb} ") :].split("\n## ")[1]
        assert len(section.splitlines()) > 5
        assert "{flags}" not in section


def test_reference_has_every_variant(reference):
    text = reference["reference/variants.md"]
    for name in variants():
        section = text.split(f"\n## {name}\n")[1].split("\n## ")[0]
        assert "<svg" in section
        assert "| parameters |" in section


def test_reference_has_every_preset(reference):
    for file in (ROOT / "conf").glob("*/*.yaml"):
        assert f"| `{file.stem}` |" in reference["reference/presets.md"]


def test_every_circuit_has_facts():
    assert QK_FACTS.keys() == QK_CIRCUITS.keys()
    assert OV_FACTS.keys() == OV_CIRCUITS.keys()


@pytest.mark.parametrize("name", variants())
def test_diagram_parses(name):
    entry = variants()[name]
    svg = draw_variant(entry["qk"], entry["ov"], entry["norm"], entry["mask_self"])
    root = ElementTree.fromstring(svg)
    assert root.get("stroke") == "currentColor"
    labels = ["".join(node.itertext()) for node in root.iter() if "text" in node.tag]
    texts = {label.replace("\u200b", "") for label in labels}
    assert {"x", "softmax", "out"} <= texts
    removed = [path for path in root.iter() if path.get("stroke", "").startswith("#")]
    facts = (QK_FACTS[entry["qk"]], OV_FACTS[entry["ov"]])
    assert len(removed) == sum(text.startswith("removed") for f in facts for text in f.describe())


def test_links_of_the_readme_lead_to_files():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for target in re.findall(r'(?:\]\(|src="|srcset=")([^)"#]+)', text):
        assert target.startswith("https://") or (ROOT / target).exists(), target


@pytest.mark.slow
def test_site_builds_without_warnings(tmp_path):
    if not all(map(importlib.util.find_spec, ("mkdocs", "material"))):
        pytest.skip("mkdocs-material is not installed")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "reference" / "variants.html").read_text(encoding="utf-8")
    assert page.count("<svg") > len(variants())
    for file in tmp_path.rglob("*.html"):  # nothing is loaded from another server
        html = file.read_text(encoding="utf-8")
        assert not re.findall(r"<(?:script|link|img)[^>]*(?:src|href)=\"?https?:", html)


def test_notebook_has_the_code_and_the_outputs_of_the_page():
    page = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    cells = json.loads(make_notebook(page))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    blocks = re.findall(r"```python\n(.*?)\n```", page, re.DOTALL)
    assert [cell["source"] for cell in code] == blocks
    outputs = [output["text"] for cell in code for output in cell["outputs"]]
    assert outputs == re.findall(r"```text\n(.*?)```", page, re.DOTALL)
    assert not any("```" in cell["source"] for cell in cells)
    assert len({cell["id"] for cell in cells}) == len(cells)

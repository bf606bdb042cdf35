"""The arrows of the house: imports go downwards, and what is light stays light."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import qkablate

ROOT = Path(qkablate.__file__).parent
GROUND = {"config", "disk", "errors", "randomness", "redaction", "table", "__init__"}
# What each part may import of the project, besides the ground floor.
MAY = {
    "attention": {"attention"},
    "data": {"data"},
    "models": {"models", "attention", "data"},
    "diagnostics": {"diagnostics", "models", "attention"},
    "verify": {"verify", "models", "attention"},
    "runs": {"runs"},
    "tracking": {"tracking", "runs"},
    "training": {
        *("training", "models", "diagnostics", "attention", "data", "runs", "tracking"),
    },
    "sweeps": {"sweeps", "training", "models", "data", "runs", "tracking"},
    "analysis": {"analysis", "report", "sweeps", "data", "runs"},
    "report": {"report", "analysis", "runs", "cli"},
    "dashboard": {
        *("dashboard", "report", "analysis", "sweeps", "data", "runs", "tracking", "cli"),
    },
    "cli": {
        *("cli", "dashboard", "report", "analysis", "verify", "sweeps", "training", "diagnostics"),
        *("models", "attention", "data", "runs", "tracking"),
    },
    "__main__": {"cli"},
}

LIGHT = ("config", "runs", "tracking", "errors")


def imports(file: Path) -> set[str]:
    """First and second names of every import in a file, wherever it stands."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {str(node.module)}
    return found


def part_of(file: Path) -> str:
    return file.relative_to(ROOT).parts[0].removesuffix(".py")


@pytest.mark.parametrize("file", sorted(ROOT.rglob("*.py")), ids=lambda f: str(f.relative_to(ROOT)))
def test_imports_go_downwards(file):
    part = part_of(file)
    ours = {name.split(".")[1] for name in imports(file) if name.startswith("qkablate.")}
    ours = {name for name in ours if (ROOT / name).exists() or (ROOT / f"{name}.py").exists()}
    if part in GROUND:
        assert ours <= GROUND
    elif part == "attention":  # knows torch, and nothing of this project
        assert ours <= MAY[part]
    else:
        assert part in MAY, f"{part} has no place in the house yet"
        assert ours <= MAY[part] | GROUND


@pytest.mark.parametrize("part", LIGHT)
def test_light_parts_need_no_torch(part):
    for file in [ROOT / f"{part}.py", *(ROOT / part).rglob("*.py")]:
        if file.exists():
            heavy = {name.split(".")[0] for name in imports(file)} & {"torch", "datasets"}
            assert not heavy, file


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["trian"]])
def test_the_command_itself_imports_nothing_heavy(words):
    code = (
        "import sys, qkablate.cli\n"
        f"try: qkablate.cli.main({words})\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'hydra', 'omegaconf', 'wandb', 'datasets', 'numpy'} & set(sys.modules)\n"
        "sys.exit(str(heavy) if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_analysis_needs_no_torch():
    names = [
        ".".join(("qkablate", *file.relative_to(ROOT).with_suffix("").parts))
        for part in ("analysis", "report")
        for file in (ROOT / part).rglob("*.py")
    ]
    names += [
        "qkablate.cli.results",
        "qkablate.cli.report",
        "qkablate.cli.compare",
        "qkablate.cli.claim",
    ]
    code = f"import sys, {', '.join(names)}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_text_is_prepared_without_torch():
    code = "import sys, qkablate.data, qkablate.cli.data; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0

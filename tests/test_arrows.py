"""The architecture, as docs/architecture.md describes it."""

import ast
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import qkablate

ROOT = Path(qkablate.__file__).parent
TESTS = Path(__file__).parent
# Modules of the lowest level: they import nothing of the project but each other.
GROUND = {
    "config",
    "disk",
    "errors",
    "randomness",
    "redaction",
    "screen",
    "strict_json",
    "table",
    "__init__",
}
# The packages that each package may import, besides itself and the lowest level.
ALLOWED = {
    "attention": set(),
    "data": set(),
    "runs": set(),
    "models": {"attention", "data"},
    "diagnostics": {"models", "attention"},
    "verify": {"models", "attention"},
    "tracking": {"runs"},
    "training": {"models", "diagnostics", "attention", "data", "runs", "tracking"},
    "pretrained": {"training", "models", "attention", "data", "runs"},
    "sweeps": {"training", "models", "data", "runs", "tracking"},
    "analysis": {"sweeps", "data", "runs"},
    "report": {"analysis", "runs"},
    "compose": {"sweeps", "models"},
    "dashboard": {"report", "analysis", "sweeps", "data", "runs", "tracking"},
    "api": {
        *("compose", "dashboard", "report", "analysis", "sweeps", "training", "models"),
        *("attention", "data", "runs", "tracking"),
    },
    "cli": {
        *("api", "compose", "dashboard", "report", "analysis", "verify", "sweeps", "training"),
        *("pretrained", "diagnostics", "models", "attention", "data", "runs", "tracking"),
    },
    "__main__": {"cli"},
}
LAZY = "qkablate"  # imports the names of the API when they are used
WITHOUT_TORCH = ("config", "runs", "tracking", "errors")
TESTS_OF_SEVERAL_MODULES = [
    *("test_arrows.py", "test_docs.py", "test_package.py"),
    *("analysis/test_hidden_truths.py", "analysis/test_measure_truths.py"),
    "analysis/test_simulation.py",
    *("attention/projection/test_convert.py", "attention/test_initialization.py"),
    *("attention/kernels/test_padding.py", "attention/test_padding.py", "models/test_padding.py"),
    "attention/kernels/test_gpu.py",
    *("attention/test_unequal_widths.py", "models/test_unequal_widths.py"),
    *("cli/test_cli.py", "cli/test_measure_gpu.py", "data/test_tiktoken.py"),
    *("report/charts/test_charts.py", "report/test_browser.py", "report/text/test_references.py"),
    *("sweeps/test_wandb.py", "training/distributed/test_distributed.py", "training/test_gpu.py"),
    *(
        "pretended_cuda/test_compiled.py",
        "pretended_cuda/test_traces.py",
        "tracking/wandb/test_agent.py",
        "verify/test_checks.py",
    ),
]
MOST_FILES = 12  # in a folder, __init__.py aside
FRAGMENT = re.compile(
    r"(What|Of|Whether|Who|Why|Which|When|How|That|Where|As|So that|In the place)\b(?! to\b)"
)


def module_name(file: Path) -> str:
    parts = file.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")


FILES = {module_name(file): file for file in sorted(ROOT.rglob("*.py"))}


def imported_names(file: Path) -> set[str]:
    """Return every name that a file imports, at any depth of the file."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def imported_modules(file: Path) -> set[str]:
    """Return the modules of the project that a file imports."""
    names = imported_names(file)
    return {name if name in FILES else name.rpartition(".")[0] for name in names} & FILES.keys()


def part_of(module: str) -> str:
    """Return the top-level package or module that a module belongs to."""
    return [*module.split("."), "__init__"][1]


@pytest.mark.parametrize("module", FILES)
def test_imports_go_downwards(module):
    part = part_of(module)
    imported = {part_of(name) for name in imported_modules(FILES[module])} - {part}
    if module == LAZY:
        assert imported <= {"api", "analysis"} | GROUND
    elif part in GROUND:
        assert imported <= GROUND
    elif part == "attention":  # knows torch, and nothing of this project
        assert not imported
    else:
        assert part in ALLOWED, f"{part} has no place in the architecture yet"
        assert imported <= ALLOWED[part] | GROUND


def import_circles() -> list[list[str]]:
    """Return the strongly connected components of the import graph (Tarjan, 1972)."""
    graph = {name: imported_modules(file) - {name} for name, file in FILES.items()}
    graph[LAZY] = set()
    index: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    circles = []

    def visit(module: str) -> None:
        index[module] = lowest[module] = len(index)
        stack.append(module)
        for other in graph[module]:
            if other not in index:
                visit(other)
            if other in stack:
                lowest[module] = min(lowest[module], lowest[other])
        if lowest[module] == index[module]:
            component = stack[stack.index(module) :]
            del stack[stack.index(module) :]
            if len(component) > 1:
                circles.append(sorted(component))

    for module in graph:
        if module not in index:
            visit(module)
    return circles


def test_no_modules_import_each_other_in_a_circle():
    assert import_circles() == []


def test_verbs_import_no_verbs():
    from qkablate.cli import VERBS, load_verb

    verbs = {load_verb(verb).__name__ for verb in VERBS}
    for module in FILES:
        if module.startswith("qkablate.cli."):
            assert not (imported_modules(FILES[module]) - {module}) & verbs, module


def test_folders_hold_a_dozen_files_at_most():
    from qkablate.cli import VERBS

    files = Counter(file.parent for file in FILES.values() if file.name != "__init__.py")
    verbs = [ROOT / "cli" / f"{verb.replace('-', '_')}.py" for verb in VERBS]
    files[ROOT / "cli"] -= len(verbs)
    assert all(verb.exists() for verb in verbs)
    assert {str(folder): n for folder, n in files.items() if n > MOST_FILES} == {}


def test_tests_mirror_the_package():
    """Every test file is named after a module or a package, but those that test several."""
    files = {file.relative_to(TESTS) for file in TESTS.rglob("test_*.py")}
    files = {file for file in files if file.parts[0] != "torture"}
    for file in sorted(files - {*map(Path, TESTS_OF_SEVERAL_MODULES)}):
        module = ROOT / file.with_name(file.name.removeprefix("test_"))
        assert module.exists() or module.with_suffix("").is_dir(), file


@pytest.mark.parametrize("part", WITHOUT_TORCH)
def test_light_parts_need_no_torch(part):
    for module, file in FILES.items():
        if part_of(module) == part:
            heavy = {name.split(".")[0] for name in imported_names(file)} & {"torch", "datasets"}
            assert not heavy, module


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["trian"]])
def test_the_command_itself_imports_nothing_heavy(words):
    code = (
        "import sys, qkablate.cli\n"
        f"try: qkablate.cli.main({words})\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'hydra', 'omegaconf', 'wandb', 'datasets', 'numpy', 'scipy'}\n"
        "heavy &= set(sys.modules)\n"
        "sys.exit(str(heavy) if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_analysis_needs_no_torch():
    names = [name for name in FILES if part_of(name) in ("analysis", "report")]
    names += [f"qkablate.cli.{verb}" for verb in ("results", "report", "compare", "claim")]
    code = f"import sys, {', '.join(names)}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_text_is_prepared_without_torch():
    code = "import sys, qkablate.data, qkablate.cli.data; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_the_package_imports_nothing_before_it_is_used():
    code = (
        "import sys, qkablate\n"
        "dir(qkablate), qkablate.__all__, qkablate.UserError\n"
        "heavy = {'torch', 'hydra', 'omegaconf', 'wandb', 'datasets', 'numpy', 'scipy'}\n"
        "heavy &= set(sys.modules)\n"
        "sys.exit(str(heavy) if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def docstrings(file: Path) -> list[tuple[int, str]]:
    """Return the line and the text of every docstring of a file."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    tree = ast.parse(file.read_text(encoding="utf-8"))
    nodes = [node for node in ast.walk(tree) if isinstance(node, kinds)]
    texts = [(getattr(node, "lineno", 1), ast.get_docstring(node)) for node in nodes]
    return [(line, text) for line, text in texts if text]


@pytest.mark.parametrize("top", [ROOT, TESTS, ROOT.parent / "scripts"], ids=lambda path: path.name)
def test_docstrings_are_sentences(top):
    fragments = [
        f"{file.relative_to(top)}:{line}: {text.splitlines()[0]}"
        for file in sorted(top.rglob("*.py"))
        for line, text in docstrings(file)
        if FRAGMENT.match(text)
    ]
    assert fragments == []


def test_a_fragment_is_recognized():
    assert FRAGMENT.match("What all see.")
    assert FRAGMENT.match("Why the scores are bilinear.")
    assert not FRAGMENT.match("Whatever is left is ignored.")
    assert not FRAGMENT.match("How to read a run folder.")
    assert not FRAGMENT.match("Return whether all ranks are done.")


@pytest.mark.parametrize("top", [ROOT, TESTS, ROOT.parent / "scripts"], ids=lambda path: path.name)
def test_no_private_name_is_imported_from_another_file(top):
    private = [
        f"{file.relative_to(top)}: {name}"
        for file in sorted(top.rglob("*.py"))
        for name in imported_names(file)
        if re.fullmatch(r"_[A-Za-z]\w*", name.rpartition(".")[2])
    ]
    assert private == []

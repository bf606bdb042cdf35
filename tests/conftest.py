"""Shared fixtures: a private home folder, tiny runs, the command here or in another process."""

import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from qkablate.cli import main

# pytest adds a handler to each logger that does not propagate, and torch traces what it compiles as
# soon as this one has a handler.
logging.getLogger("torch.__trace").propagate = True

SMALL = [
    *("model.layers=2", "model.d_model=16", "model.heads=2", "model.context=16"),
    *("tracking.wandb=disabled", "threads=1"),
]
TINY = [
    *SMALL,
    *("train.steps=12", "train.batch_size=2", "train.eval_every=6", "train.checkpoint_every=4"),
    "tracking.log_every=2",
]


@dataclass
class Done:
    """Outcome of a command."""

    code: int
    out: str
    err: str


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """No test reads or writes the user's own home, keys or cache; none changes the process."""
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("NETRC", raising=False)
    for name in [name for name in os.environ if name.startswith(("WANDB_", "HYDRA_"))]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the tests themselves run side by side
    yield home
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def shared_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder for what all tests prepare of the embedded data once."""
    base = tmp_path_factory.getbasetemp()
    return (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "prepared"


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """Return some 40 kB of text with learnable structure."""
    words = ["the", "cat", "sat", "on", "a", "mat", "and", "saw", "two", "dogs", "who", "ran"]
    choice = np.random.default_rng(0).integers(len(words), size=9000)
    path = tmp_path / "corpus.txt"
    path.write_text(" ".join(words[i] for i in choice) + "\n", encoding="utf-8")
    return path


@pytest.fixture
def tiny(tmp_path: Path, text: Path) -> list[str]:
    """Return the overrides of a run of half a second."""
    data = [f"data.path={text}", f"data.cache={tmp_path / 'cache'}"]
    return [*TINY, "data=text", *data, f"out={tmp_path / 'outputs'}"]


@pytest.fixture(scope="session")
def train() -> Callable[..., Path]:
    """Train a small model on a few lines, in a given folder; its run folder."""

    def run(folder: Path, *words: str) -> Path:
        corpus = folder / "corpus.txt"
        corpus.write_text("the cat sat on the mat, ähnlich ∑\n" * 200, encoding="utf-8")
        data = ["data=text", f"data.path={corpus}", f"data.cache={folder / 'cache'}"]
        with pytest.raises(SystemExit) as exit_:
            main(["train", *SMALL, *data, f"out={folder / 'outputs'}", *words])
        assert exit_.value.code == 0
        (path,) = (folder / "outputs" / "runs").iterdir()
        return path

    return run


@pytest.fixture
def qkablate(capfd: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    """Run the command in this process."""

    def run(*words: str) -> Done:
        capfd.readouterr()
        with pytest.raises(SystemExit) as exit_:
            main(list(words))
        out, err = capfd.readouterr()
        return Done(int(exit_.value.code or 0), out, err)

    return run


@pytest.fixture
def program() -> list[str]:
    """Return the words that start the command as a separate process."""
    return [sys.executable, "-m", "qkablate"]


@pytest.fixture
def spawn(program: list[str]) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start the command in a separate process."""
    started: list[subprocess.Popen[str]] = []

    def start(*words: str, before: tuple[str, ...] = ()) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [*before, *program, *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def largest():
    """Return a context that records the size of the largest tensor created in it."""

    class Largest(TorchDispatchMode):
        """Size of the largest tensor created in a context."""

        numbers = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            made = func(*args, **(kwargs or {}))
            for one in made if isinstance(made, tuple) else (made,):
                if isinstance(one, torch.Tensor):
                    self.numbers = max(self.numbers, one.numel())
            return made

    return Largest

"""Assertions and steps that the tests of several verbs share."""

import shlex
import shutil
import sys
from pathlib import Path

import pytest

from qkablate.cli import main

SIZES = ["model.layers=1", "model.d_model=16", "model.heads=2", "model.context=16", "threads=1"]
GAPS = {"no_q": 0.05, "shared_qk": 0.0}  # of the finished study
TEXT = "the cat sat on the mat, ähnlich ∑\n" * 200


def without_keys(words, others):
    """Return the words without those that set a key which the others set, too."""
    keys = {word.lstrip("+").partition("=")[0] for word in others}
    return [word for word in words if word.lstrip("+").partition("=")[0] not in keys]


def run_in(folder, *words, text=TEXT):
    """Run a command in this process, on a text in `folder`; return the folder of its outputs."""
    (folder / "corpus.txt").write_text(text, encoding="utf-8")
    paths = {"data.path": "corpus.txt", "data.cache": "cache", "out": "outputs"}
    with pytest.raises(SystemExit) as exit_:
        main([*words, "data=text", *(f"{key}={folder / name}" for key, name in paths.items())])
    assert exit_.value.code == 0
    return folder / "outputs"


def train_on_pairs(folder):
    """Train a translator on the pairs of a file, in `folder`; return the run."""
    lines = [f"{i * 7919}\t{str(i * 7919)[::-1]}\n" for i in range(1, 60)]
    (folder / "pairs.tsv").write_text("".join(["a\tb\n", *lines]))
    data = ["data=pairs", f"data.path={folder}/pairs.tsv", "data.source_field=a"]
    data += ["data.target_field=b", "data.tokenizer=chars", f"data.cache={folder}/cache"]
    sizes = ["model=nano_translator", "model.layers=1", "model.d_model=16", "model.heads=2"]
    sizes += ["train.steps=2", "train.batch_size=2", "tracking.wandb=disabled", "threads=1"]
    with pytest.raises(SystemExit) as exit_:
        main(["train", *sizes, *data, f"out={folder}/outputs"])
    assert exit_.value.code == 0
    (run,) = (folder / "outputs" / "runs").iterdir()
    return run


def copy_outputs(outputs, folder):
    """Copy what `run_in` has written into a test's folder, and the data into its user's cache."""
    shutil.copytree(outputs.parent / "cache", folder / "home" / ".cache" / "qkablate" / "data")
    return Path(shutil.copytree(outputs, folder / "outputs", symlinks=True))


def assert_refused(done, *lines):
    """Assert one line on stderr that contains all of `lines`, no output, and exit code 2."""
    assert (done.code, done.out) == (2, ""), done
    assert done.err.startswith("qkablate: ")
    assert done.err.count("\n") == 1
    for line in lines:
        assert line in done.err, done.err


def proposed_commands(done):
    """Return the commands under the last `Next`."""
    return [shlex.split(line) for line in done.out.rpartition("\nNext\n")[2].splitlines()]


def complete(qkablate, monkeypatch, line, shell="bash"):
    """Return what the shell's completion offers for a line."""
    monkeypatch.setenv("COMP_LINE", line)
    monkeypatch.setattr(sys, "argv", ["qkablate"])
    return qkablate("-sc", f"query={shell}").out.split()


def processes_of(pid):
    """Return the processes that a process has started, and theirs."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [one for child in children for one in (child, *processes_of(child))]

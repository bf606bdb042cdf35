"""Every section of `make gpu`, on a CPU and in a tiny size, so that nothing in it is unexecuted."""

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import measure_gpu
import pytest
import torch
from compare_nanogpt import Shape
from hydra import initialize_config_dir

from qkablate.compose.register import register
from qkablate.config import conf_dir

TINY = Shape(1, 16, 2, 16, 2, steps=1)
PEER = """
from dataclasses import dataclass
import torch
from torch.nn import functional as F

@dataclass
class GPTConfig:
    n_layer: int; n_head: int; n_embd: int; block_size: int; vocab_size: int
    dropout: float; bias: bool

class GPT(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.table = torch.nn.Embedding(config.vocab_size, config.n_embd)

    def configure_optimizers(self, decay, rate, betas, kind):
        return torch.optim.AdamW(self.parameters(), rate, betas, weight_decay=decay)

    def forward(self, idx, targets):
        logits = self.table(idx) @ self.table.weight.T
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())
"""


@pytest.fixture
def settings(tmp_path):
    register()
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        yield measure_gpu.Settings(
            tmp_path,
            device="cpu",
            shapes={"tiny": TINY},
            long=TINY,
            variants=("standard", "merged_w"),
            modes={"tiny": ("false", "graphs")},
            rounds=2,
            seeds=(1, 3),
            peak_size=32,
        )


def cells(text):
    """Return the rows of the table in a text, without its head."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert {*rows[1]} == {"---"}
    assert {len(row) for row in rows} == {len(rows[0])}
    return rows[2:]


def test_training_steps(settings):
    text = measure_gpu.training_steps(settings)
    rows = cells(text)
    assert [row[:2] for row in rows] == [["tiny", "standard"], ["tiny", "merged_w"]]
    for row in rows:
        milliseconds, tokens = float(row[5]), float(row[6].replace(",", ""))
        assert tokens * milliseconds / 1000 == pytest.approx(32, rel=0.02)  # of a step
        assert row[4] == "false"
        assert float(row[7].removesuffix(" %")) >= 0
        assert int(row[8]) > 50
        assert int(row[9].replace(",", "")) >= 0
    reason = "compile: graphs replays CUDA graphs, and the device is cpu"
    assert [line for line in text.splitlines() if "left out" in line] == [
        f"left out: tiny, {variant}, compile=graphs: {reason} (allowed: auto, true, false)"
        for variant in settings.variants
    ]


def test_launches_are_the_operators_on_a_cpu():
    x = torch.ones(3)
    one, three = (
        measure_gpu.count_launches(lambda n=n: [x.neg() for _ in range(n)], "cpu") for n in (1, 3)
    )
    assert 1 <= one < three


def test_memory_of_a_layer(settings):
    text = measure_gpu.layer_memory(settings)
    rows = cells(text)
    assert [row[:2] for row in rows] == [
        [variant, kernel] for variant in settings.variants for kernel in ("auto", "folded")
    ]
    assert {row[2] for row in rows if row[1] == "folded"} == {"folded"}
    assert all(float(row[5]) > 0 for row in rows)
    assert text.count("efficient is a CUDA kernel") == text.count("wide is a CUDA kernel") == 2


def test_many_seeds(settings):
    rows = cells(measure_gpu.many_seeds(settings))
    assert [row[0] for row in rows] == ["alone", "1", "3"]
    assert float(rows[0][2]) == 1
    milliseconds, ratio = float(rows[2][1]), float(rows[2][2])
    assert ratio == pytest.approx(3 * float(rows[0][1]) / milliseconds, rel=0.05)


@pytest.mark.slow
def test_the_tests_are_counted(settings):
    expected = r"\d+ passed" if torch.cuda.is_available() else r"\d+ skipped"
    assert re.search(expected, measure_gpu.run_tests(settings))


@pytest.mark.exhaustive
def test_nanogpt(settings, tmp_path, monkeypatch):
    """With a model that stands in for it; a failure is one line."""
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    assert measure_gpu.nanogpt(settings) == "not given: make gpu NANOGPT=FOLDER"
    flags = ("--shapes", "small", "--rounds", "1", "--steps", "1")
    given = replace(settings, nanogpt=tmp_path, nanogpt_flags=flags)
    assert "there is no model.py" in measure_gpu.nanogpt(given)
    (tmp_path / "model.py").write_text(PEER, encoding="utf-8")
    text = measure_gpu.nanogpt(given)
    assert re.search(r"small +nanoGPT \(\w+, compiled\) +[\d,]+ +\d+\.\d\d", text), text
    assert "qkablate standard" in text


def test_sections_are_shown(settings):
    shown = []
    measure_gpu.measure(settings, ["nanogpt", "seeds"], shown.append)
    assert "threads" in shown[0]
    assert shown[1].startswith("\n### Compare with nanoGPT")
    assert shown[3].startswith("\n### Measure seeds that train as one program")
    assert shown[4].startswith("standard, tiny")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--sections", "steps,sedes"], "--sections: 'sedes' is not one of tests, steps, memory,"),
        (["--variants", "standart"], "--variants: 'standart' is not one of standard,"),
    ],
)
def test_unknown_names_are_one_line(monkeypatch, words, line):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("sys.argv", ["measure_gpu.py", *words])
    with pytest.raises(measure_gpu.UserError, match=re.escape(line)):
        measure_gpu.main()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_ends_with_a_line():
    script = Path(measure_gpu.__file__)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    line = "gpu: torch sees no CUDA GPU here; `make bench` measures a CPU\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", line)

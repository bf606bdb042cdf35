"""Objectives that `qkablate train -m` returns to Hydra's sweepers."""

import json
import math
import os
import subprocess
from pathlib import Path

import pytest
from hydra.core.plugins import Plugins

from tests.cli.helpers import assert_refused

# A sweeper that tries two learning rates, as a package that Hydra finds by its name.
SWEEPER = """
import pathlib
from dataclasses import dataclass

from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper
from omegaconf import OmegaConf


@dataclass
class Conf:
    _target_: str = "hydra_plugins.two_rates.TwoRates"
    rates: str = "1e-3,1e-2"


ConfigStore.instance().store(group="hydra/sweeper", name="two_rates", node=Conf)


class TwoRates(Sweeper):
    def __init__(self, rates):
        self.rates = rates.split(",")

    def setup(self, *, hydra_context, task_function, config):
        self.folder = pathlib.Path(config.hydra.sweep.dir)
        self.launcher = Plugins.instance().instantiate_launcher(
            config=config, hydra_context=hydra_context, task_function=task_function
        )

    def sweep(self, arguments):
        losses = {}
        for number, rate in enumerate(self.rates):
            jobs = [[*arguments, f"optim.lr={rate}"]]
            (job,) = self.launcher.launch(jobs, initial_job_idx=number)
            losses[rate] = float(job.return_value)
        best = min(losses, key=losses.get)
        content = {"best_params": {"optim.lr": best}, "best_value": losses[best]}
        OmegaConf.save(content, self.folder / "optimization_results.yaml")
"""


@pytest.fixture
def returned(monkeypatch):
    """Return the list of what the jobs of a multirun return to Hydra."""
    values: list[object] = []
    name = "hydra._internal.core_plugins.basic_launcher.BasicLauncher"
    launcher = Plugins.instance().class_name_to_class[name]  # Hydra loads its own copy
    launch = launcher.launch

    def record(self, overrides, initial_job_idx):
        jobs = launch(self, overrides, initial_job_idx)
        values.extend(job.return_value for job in jobs)
        return jobs

    monkeypatch.setattr(launcher, "launch", record)
    return values


def test_job_returns_its_validation_loss(qkablate, tiny, tmp_path, returned):
    done = qkablate("train", "-m", *tiny, "seed=0,1", "train.steps=2")
    assert done.code == 0, done.err
    results = [json.loads(x.read_text()) for x in (tmp_path / "outputs").rglob("result.json")]
    assert len(results) == 2
    assert sorted(returned) == sorted(result["loss"]["val"] for result in results)


def test_finished_job_returns_its_loss_again(qkablate, tiny, returned):
    for _ in range(2):
        assert qkablate("train", "-m", *tiny, "seed=0", "train.steps=2").code == 0
    assert returned[0] == returned[1]
    assert math.isfinite(returned[0])


def test_diverged_job_returns_infinity(qkablate, tiny, returned):
    words = ["optim.lr=1000", "optim.clip=0", "optim.warmup=0", "precision=fp32"]
    assert qkablate("train", "-m", *tiny, *words, "train.steps=30").code == 3
    assert returned == [math.inf]


def test_value_of_a_sweeper_is_checked(qkablate, tiny):
    done = qkablate("train", "-m", *tiny, "seed=0,1", "hydra.sweeper.max_batch_size=abc")
    assert_refused(done, "hydra.sweeper.max_batch_size: 'abc' is not a whole number")


def train_with_sweeper(folder, program, *words):
    plugins = folder / "plugins" / "hydra_plugins"
    plugins.mkdir(parents=True, exist_ok=True)
    (plugins / "two_rates.py").write_text(SWEEPER, encoding="utf-8")
    root = str(Path(__file__).parents[3])
    path = os.pathsep.join([str(plugins.parent), root])
    return subprocess.run(
        [*program, "train", "-m", "hydra/sweeper=two_rates", *words],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )


@pytest.mark.slow
def test_sweeper_finds_the_best_rate(program, tiny, tmp_path):
    done = train_with_sweeper(tmp_path, program, *tiny)
    assert done.returncode == 0, done.stderr
    best, search = done.stdout.strip().splitlines()[-2:]
    assert best.startswith("best     val ")
    assert best.endswith(" at optim.lr=1e-2")
    assert Path(search.split()[1]).is_file()
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_search_without_a_loss_says_so(program, tiny, tmp_path):
    done = train_with_sweeper(tmp_path, program, *tiny, "model.heads=3")
    assert done.returncode == 2
    assert "search   no run has a validation loss" in done.stdout
    assert done.stderr.count("\n") == 2  # a line for each job

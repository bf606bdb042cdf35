"""Outputs of finished sweeps that the tests of several verbs share."""

import json
import shutil
from pathlib import Path

import pytest
import yaml

from qkablate.runs.run import Run, identity
from qkablate.sweeps.running.state import link_run
from tests.cli.helpers import GAPS, SIZES, run_in

SPREAD = (-0.002, -0.001, 0.0, 0.001, 0.002)
LENGTH = ["train.steps=12", "train.batch_size=2", "tracking.wandb=disabled"]
SWEEP = ["sweep.name=small", "variant=standard,no_q,shared_qk", "seed=range(5)", "workers=1"]
SWEEP += ["sweep.floor=false"]
CLAIM = {
    "says": "Keys alone are enough.",
    "source": "a comment",
    "seeds": 3,
    "tuning_seeds": 0,
    "grid": {"variant": "standard,no_q"},
    "parts": {"within": {"arm": "no_q", "kind": "noninferior", "margin": 3}},
}


def write_runs(launcher):
    """Write complete run folders with known gaps, instead of training."""
    manifest = launcher.manifest
    states = launcher.sweep_state.states.values()
    seeds = list(dict.fromkeys(state.run.changes["seed"] for state in states))
    for state in states:
        run, arm = state.run, manifest.arms[state.run.arm]
        index = seeds.index(run.changes["seed"])
        loss = 2 + index / 10 + GAPS.get(arm.variant, 0.0)
        if arm.variant != "standard":
            loss += SPREAD[index] * (1 if arm.variant == "no_q" else -1)
        target = Run(manifest.out, run.label, run.id)
        target.folder.mkdir(parents=True)
        config = arm.config_of(run.changes, tuning=run.tuning)
        target.freeze(config, identity(config, **arm.facts))
        rows = [
            {"step": step, "tokens": step * 32, "val/loss": loss + 1 / step - 1 / 12}
            for step in (1, 2, 4, 6, 8, 12)
        ]
        target.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
        embedding = arm.total_params - arm.params
        result = {
            **{"id": run.id, "label": run.label, "status": "done", "packed": 1, "threads": 1},
            **{"loss": {"train": loss, "val": loss, "test": loss}, "precision": "fp32"},
            **{"device": "cpu", "kernel": "flash", "compile": False, "attempt": 1},
            **{"data_fingerprint": arm.facts["data_fingerprint"], "seconds": 1.0, "steps": 12},
            **{"params": {"total": arm.total_params, "embedding": embedding}, "version": "0"},
            **{"tokens": arm.tokens, "flops_per_token": arm.flops},
            **{"init": {"mode": "matched", "match": "exact"}, "lr": {"mode": "matched"}},
        }
        (target.folder / "result.json").write_text(json.dumps(result))
        launcher.sweep_state.refresh_run(state)
        link_run(manifest, state)
    return 0


@pytest.fixture(scope="session")
def finished_study(tmp_path_factory):
    """Return the outputs of a claim with its verdict, and of a newer sweep of 15 runs."""
    folder = tmp_path_factory.mktemp("study")
    (folder / "mine.yaml").write_text(yaml.safe_dump(CLAIM), encoding="utf-8")
    text = "the cat sat on the mat\n" * 400
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("qkablate.sweeps.running.launcher.Launcher.run", write_runs)
        for words in (["claim", "run", str(folder / "mine.yaml")], ["sweep", *SWEEP]):
            run_in(folder, *words, *SIZES, *LENGTH, text=text)
    return folder / "outputs"


@pytest.fixture(scope="module")
def finished(finished_study):
    """Return the outputs that tests of this module copy; a module may have its own."""
    return finished_study


@pytest.fixture
def outputs(finished, tmp_path):
    """Return a copy of the finished outputs, where the command looks for them."""
    return Path(shutil.copytree(finished, tmp_path / "outputs", symlinks=True))


@pytest.fixture
def sweep(outputs):
    """Return the folder of the sweep."""
    (folder,) = (outputs / "sweeps").glob("small-*")
    return folder

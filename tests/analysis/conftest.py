"""Sweeps whose results are made up: frozen as real ones are, with folders no training wrote."""

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from qkablate.analysis.study.study import Study, read_study
from qkablate.cli.hydra.grid import composing
from qkablate.config import GridConfig
from qkablate.sweeps.planning.expand import Expansion, Grid
from qkablate.sweeps.planning.manifest import Manifest, SweepRun, freeze
from qkablate.sweeps.running.state import Standing

ENVIRONMENT = {
    "versions": {"torch": "2.13.0", "python": "3.11.7"},
    "machine": {"cpu": "a CPU"},
    "code": {"commit": "0123456789abcdef", "diff": ""},
    "threads": 1,
}


@dataclass
class World:
    """A frozen sweep, and the results one gives it."""

    manifest: Manifest

    @property
    def folder(self) -> Path:
        return self.manifest.folder

    def run_folder(self, run: SweepRun) -> Path:
        return Path(self.manifest.out) / "runs" / run.name

    def runs(self) -> list[SweepRun]:
        """All that are known now: with tuning, those that follow from the results so far, too."""
        standing = Standing(self.manifest)
        standing.look()
        return [state.run for state in standing.states.values()]

    def finish(self, loss: Callable[[SweepRun], Any]) -> "World":
        """Give every run its result: a number is the test loss of a run that is done (validation a
        tenth higher), a word a status without one, a map what result.json says otherwise; None
        leaves it waiting. Goes on while new runs follow.
        """
        written: set[str] = set()
        while new := [run for run in self.runs() if run.id not in written]:
            for run in new:
                written.add(run.id)
                self.write(run, loss(run))
        return self

    def write(self, run: SweepRun, outcome: Any) -> None:
        if outcome is None:
            return
        folder, arm = self.run_folder(run), self.manifest.arms[run.arm]
        result = self.result(run)
        if isinstance(outcome, str):
            result |= {"status": outcome, "error": "ValueError: no", "diverged_at": 3}
            result["loss"] = {"train": None, "val": None, "test": None}
        elif isinstance(outcome, dict):
            result |= outcome
        else:
            test = None if run.tuning else float(outcome)
            result["loss"] = {"train": test, "val": float(outcome) + 0.1, "test": test}
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "result.json").write_text(json.dumps(result))
        (folder / "environment.json").write_text(json.dumps(ENVIRONMENT))
        (folder / "config.yaml").write_text(f"seed: {arm.config.seed}\n")

    def result(self, run: SweepRun) -> dict[str, Any]:
        """What every result.json of this world says, but for its losses."""
        arm = self.manifest.arms[run.arm]
        return {
            "id": run.id,
            "label": run.label,
            "status": "done",
            "loss": {"train": 2.0, "val": 2.1, "test": 2.0},
            "params": {"total": arm.total_params},
            "flops_per_token": arm.flops,
            "init": {"mode": "matched", "match": "exact"},
            "lr": {"mode": "matched", "multiplier": {"qk": 1.0, "ov": 1.0}},
            "packed": 1,
            "precision": "fp32",
            "device": "cpu",
            "kernel": "flash",
            "compile": False,
            "threads": 1,
            "data_fingerprint": arm.facts["data_fingerprint"],
            "attempt": 1,
            "version": "0.1.0",
            "steps": arm.config.train.steps,
            "tokens": arm.tokens,
            "seconds": 1.0,
        }

    def curve(self, run: SweepRun, losses: dict[int, float]) -> None:
        """metrics.jsonl: validation losses by step."""
        arm = self.manifest.arms[run.arm]
        per_step = arm.tokens // int(arm.config.train.steps)
        rows = [
            {"step": step, "tokens": step * per_step, "val/loss": loss}
            for step, loss in losses.items()
        ]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (self.run_folder(run) / "metrics.jsonl").write_text(text)

    def study(self) -> Study:
        return read_study(self.folder)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> list[str]:
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "corpus.txt").write_text("the cat sat on the mat\n" * 400, encoding="utf-8")
    small = ["model.layers=1", "model.d_model=16", "model.heads=2", "model.context=16", "threads=1"]
    data = ["data=text", f"data.path={folder / 'corpus.txt'}", f"data.cache={folder / 'cache'}"]
    return [*small, "train.steps=12", "train.batch_size=2", "precision=fp32", *data]


@pytest.fixture
def world(corpus, tmp_path) -> Callable[..., World]:
    """Freeze a sweep of a small model: `world('variant=standard,no_q', 'seed=range(6)')`."""

    def freeze_sweep(*words: str, grid: GridConfig | None = None) -> World:
        with composing() as composer:
            given = {word.partition("=")[0] for word in words} | {*(grid.fixed if grid else ())}
            small = [word for word in corpus if word.partition("=")[0] not in given]
            asked = composer.ask([*small, *words], grid)
            manifest = Expansion(
                Grid(asked.settings.sweep, asked.controls, asked.choices), composer.config
            ).manifest(["qkablate", "sweep", *words])
        manifest = dataclasses.replace(manifest, out=str(tmp_path / "outputs"))
        return World(freeze(manifest, ["the plan"]))

    return freeze_sweep


@pytest.fixture(scope="session")
def _composed() -> dict[tuple[str, ...], Manifest]:
    return {}


@pytest.fixture
def cached_world(world, _composed, tmp_path) -> Callable[..., World]:
    """As `world`, of a sweep that many tests ask for: it is composed once for all of them."""

    def freeze_sweep(*words: str) -> World:
        if words not in _composed:
            _composed[words] = world(*words).manifest
        manifest = dataclasses.replace(_composed[words], out=str(tmp_path / "outputs"))
        return World(freeze(manifest, ["the plan"]))

    return freeze_sweep

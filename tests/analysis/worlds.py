"""Sweeps with synthetic results: frozen like real ones, without training."""

import dataclasses
import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from qkablate.analysis.comparison.summary import StudySummary, describe_study
from qkablate.analysis.study.study import Study, read_study
from qkablate.compose.configs import make_config, open_hydra
from qkablate.compose.grid import read_request
from qkablate.config import GridConfig
from qkablate.report.text.table import format_markdown
from qkablate.report.text.tables import make_tables
from qkablate.sweeps.planning.expand import Grid, expand_grid
from qkablate.sweeps.planning.floors import is_floor
from qkablate.sweeps.planning.manifest import Manifest, SweepRun, freeze
from qkablate.sweeps.running.state import SweepState
from tests.analysis.references import to_json

ENVIRONMENT = {
    "versions": {"torch": "2.13.0", "python": "3.11.7"},
    "machine": {"cpu": "a CPU"},
    "code": {"commit": "0123456789abcdef", "diff": ""},
    "threads": 1,
}


FLOOR_LEAD = 10.0  # nats


@dataclass
class World:
    """A frozen sweep that is given synthetic results."""

    manifest: Manifest

    @property
    def folder(self) -> Path:
        return self.manifest.folder

    def run_folder(self, run: SweepRun) -> Path:
        return Path(self.manifest.out) / "runs" / run.name

    def runs(self) -> list[SweepRun]:
        """Return all runs known so far, including those that follow from tuning."""
        sweep_state = SweepState(self.manifest)
        sweep_state.refresh()
        return [state.run for state in sweep_state.states.values()]

    def finish(self, loss: Callable[[SweepRun], Any]) -> "World":
        """Give every run a result, as long as new runs follow.

        A number is the test loss of a finished run (validation is 0.1 higher), a string a status
        without loss, a dict overrides of result.json; None leaves the run waiting. Floors that the
        sweep has added end FLOOR_LEAD higher.
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
        if isinstance(outcome, int | float) and is_floor(arm) and arm.baseline is None:
            outcome += FLOOR_LEAD
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
        """Return the result.json of a run, with default losses."""
        arm = self.manifest.arms[run.arm]
        return {
            "id": run.id,
            "label": run.label,
            "status": "done",
            "loss": {"train": 2.0, "val": 2.1, "test": 2.0},
            "params": {"total": arm.total_params},
            "flops_per_token": arm.flops,
            "init": {"mode": "matched", "match": "exact"},
            "lr": {
                "factor": arm.config_of(run.changes).variant.lr,
                "matched": arm.matched_lr,
                "multiplier": {"qk": 1.0, "ov": 1.0},
            },
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
        """Write metrics.jsonl with validation losses by step."""
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


def compose_manifest(small: Sequence[str], *words: str, grid: GridConfig | None = None) -> Manifest:
    """Plan a sweep of a small model, given its settings that `words` do not override.

    No floor is added to a sweep unless `words` ask for it; claims have theirs.
    """
    if grid is None:
        small = ["sweep.floor=false", *small]
    with open_hydra():
        given = {word.partition("=")[0] for word in words} | {*(grid.fixed if grid else ())}
        if "data" in given:  # the text has keys of its own
            given |= {"data.path", "data.cache"}
        defaults = [word for word in small if word.partition("=")[0] not in given]
        request = read_request([*defaults, *words], grid)
        return expand_grid(
            Grid(request.settings.sweep, request.controls, request.choices),
            make_config,
            ["qkablate", "sweep", *words],
        )


def freeze_world(manifest: Manifest, folder: Path) -> World:
    """Freeze a planned sweep in a folder."""
    return World(freeze(dataclasses.replace(manifest, out=str(folder / "outputs")), ["the plan"]))


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> list[str]:
    """Write a small text; return the settings of a small model on it."""
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "corpus.txt").write_text("the cat sat on the mat\n" * 400, encoding="utf-8")
    small = ["model.layers=1", "model.d_model=16", "model.heads=2", "model.context=16", "threads=1"]
    data = ["data=text", f"data.path={folder / 'corpus.txt'}", f"data.cache={folder / 'cache'}"]
    return [*small, "train.steps=12", "train.batch_size=2", "precision=fp32", *data]


@pytest.fixture
def world(corpus, tmp_path) -> Callable[..., World]:
    """Freeze a sweep of a small model: `world('variant=standard,no_q', 'seed=range(6)')`."""

    def freeze_sweep(*words: str, grid: GridConfig | None = None) -> World:
        return freeze_world(compose_manifest(corpus, *words, grid=grid), tmp_path)

    return freeze_sweep


@pytest.fixture(scope="session")
def cached_manifest(corpus) -> Callable[..., Manifest]:
    """Compose each sweep once per session."""
    return functools.cache(functools.partial(compose_manifest, tuple(corpus)))


@pytest.fixture
def cached_world(cached_manifest, tmp_path) -> Callable[..., World]:
    """Freeze a sweep as `world` does, composing it once for all tests."""
    return lambda *words: freeze_world(cached_manifest(*words), tmp_path)


def describe_checked(study: Study) -> StudySummary:
    """Return the summary of a study after checking that it can be written as JSON and tables."""
    summary = describe_study(study)
    to_json(summary)
    for table in make_tables(summary):
        assert format_markdown(table)
        assert {len(row) for row in table.rows} <= {len(table.columns)}
    return summary

"""Sections of sweeps whose results are made up, as those of tests/analysis are."""

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import pytest

from qkablate.analysis.claims.judgement import judge_claim
from qkablate.analysis.claims.parse import parse_claim
from qkablate.analysis.claims.registry import claim_grid
from qkablate.report.section import Section
from qkablate.sweeps.planning.floors import is_floor
from tests.analysis.worlds import (
    cached_manifest,
    cached_world,
    compose_manifest,
    corpus,
    freeze_world,
    world,
)

__all__ = ["cached_manifest", "cached_world", "corpus", "world"]

TRUTH = {"no_q": 0.05, "shared_qk": -0.03, "merged_w": 0.0}  # gaps; the others have none
STEPS = (2, 4, 6, 8, 10, 12)


@pytest.fixture(scope="session")
def make_world(cached_manifest, tmp_path_factory) -> Callable[..., Any]:
    """Freeze a sweep as `cached_world` does, in a folder that outlives the test."""
    return lambda *words: freeze_world(cached_manifest(*words), tmp_path_factory.mktemp("made"))


@pytest.fixture(scope="session")
def loss_of() -> Callable[..., float]:
    """Gaps as in TRUTH, with a little noise; a bowl by learning rate, least at 1e-3."""

    def loss(run: Any, truth: dict[str, float] = TRUTH) -> float:
        noise = random.Random(f"{run.arm} {run.changes}").gauss(0, 0.004)
        rate: float = run.changes["optim.lr"] / 1e-3
        shared: float = run.changes["seed"] % 10 / 7 + 0.1 * (rate - 1) ** 2 / rate
        return 2.0 + shared + noise + truth.get(run.arm.split("-")[0], 0.0)

    return loss


@pytest.fixture(scope="session")
def with_curves(loss_of) -> Callable[..., Any]:
    """Give all runs that have a folder their curves."""

    def write(world: Any, steps: tuple[int, ...] = STEPS) -> Any:
        for run in world.runs():
            if world.run_folder(run).exists():
                last = loss_of(run)
                world.curve(run, {step: last * (1 + 1 / step) for step in steps})
        return world

    return write


@pytest.fixture(scope="session")
def section_of() -> Callable[..., Section]:
    def make(world: Any, margin: float | None = None) -> Section:
        study = world.study()
        return Section(study.name, f"read from {study.manifest.folder}", study, margin)

    return make


@pytest.fixture(scope="session")
def finished(make_world, loss_of, with_curves) -> Any:
    """Three variants at two sizes with six seeds, all of them done. To look at, not to change."""
    words = ("variant=standard,no_q,shared_qk", "model.d_model=16,32", "seed=range(6)")
    return with_curves(make_world(*words).finish(loss_of))


@pytest.fixture(scope="session")
def section(finished, section_of) -> Section:
    result: Section = section_of(finished)
    return result


@pytest.fixture(scope="session")
def claimed(corpus, tmp_path_factory) -> Callable[..., Section]:
    """Return the section of a claim that is supported, or of an exploratory one."""
    grid = {"variant": "standard,no_q"}
    frozen: list[Any] = []

    def claim(says: str, **part: Any) -> Any:
        part = {"arm": "no_q", "kind": "noninferior", "margin": 0.01} | part
        content = {"says": says, "source": "a comment", "seeds": 4, "parts": {"within": part}}
        content |= {"tuning_seeds": 0, "grid": grid}
        return dataclasses.replace(parse_claim("mine", content, "small", {}), grid=grid)

    def judge(
        gap: float,
        ended: int = 8,
        says: str = "Keys alone are enough.",
        reasons: tuple[str, ...] = (),
        end: Callable[[int], Any] = lambda number: None,
        **part: Any,
    ) -> Section:
        """`end` says how the n-th run of no_q ends, where that is not its loss."""
        folder = tmp_path_factory.mktemp("claimed")
        own = claim("Keys alone are enough.")
        if not frozen:
            asked, words = claim_grid(own, 4)
            frozen.append(compose_manifest(corpus, *words, grid=asked))
        world = freeze_world(frozen[0], folder)
        offsets = (-0.001, 0.001, -0.0005, 0.0005)
        seeds = own.seeds_of("final", 4)
        floors = [run for run in world.runs() if is_floor(world.manifest.arms[run.arm])]
        for run in floors:
            world.write(run, 2.0 + seeds.index(run.changes["seed"]) / 7)
        for run in [run for run in world.runs() if run not in floors][:ended]:
            number = seeds.index(run.changes["seed"])
            loss = 2.0 + number / 7
            if run.arm.startswith("no_q"):
                loss = end(number) or loss + gap + offsets[number]
            world.write(run, loss)
        worded = claim(says, **part)
        found = judge_claim(worded, world.study(), [*reasons])
        title = f"claim {worded.title}"
        return Section(title, "read from here", found.study, judgement=found)

    return judge

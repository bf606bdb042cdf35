"""Two runs compared at a glance: one pair is a single number, not a verdict."""

import functools
import itertools
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qkablate.analysis.comparison.gaps import perplexity_percent
from qkablate.analysis.study.loss_curves import VAL, read_loss_curves
from qkablate.analysis.study.study import as_dict, read_facts
from qkablate.config import Role, has_role
from qkablate.errors import UserError
from qkablate.runs.records import is_number, read_config, read_result
from qkablate.runs.run import find_run, find_runs

# Circumstances that are equal in a fair comparison.
_LIKE = ["data_fingerprint", "precision", "matmul", "device", "kernel", "threads", "code"]
_LIKE += ["torch", "cpu"]
Both = tuple[Any, Any]  # a value of each run


@dataclass(frozen=True)
class GapReading:
    """Validation gap at one moment of training."""

    tokens: int
    gap: float


@dataclass(frozen=True)
class RunComparison:
    """Losses, sizes and differing settings of two runs."""

    runs: tuple[str, str]
    status: tuple[str, str]
    loss: dict[str, tuple[float | None, float | None]]  # by split
    gap: dict[str, float]
    perplexity_percent: dict[str, float]
    params: Both
    flops_per_token: Both
    seconds: Both
    packed: Both
    differ: dict[str, Both]  # config keys
    unlike: dict[str, Both]  # circumstances
    paired: bool
    val_gap: list[GapReading]


def find_pair(word: str, other: str, out: str) -> tuple[Path, Path]:
    """Return the runs that two words name: of several, the newest two that were trained alike."""
    runs, others = find_runs(word, out), find_runs(other, out)
    if len(runs) > 1 or len(others) > 1:
        read = functools.cache(_read_training)  # of thousands of runs, as few as possible
        for first, second in itertools.product(runs, others):
            if first != second and read(first) == read(second) is not None:
                return first, second
    return find_run(word, out), find_run(other, out)


def _read_training(folder: Path) -> dict[str, object] | None:
    """Return what decides a run's result besides its variant and learning rate."""
    with suppress(ValueError, KeyError, TypeError, AttributeError):
        identity = read_config(folder)["identity"]
        optim = {key: value for key, value in identity["optim"].items() if key != "lr"}
        own = ("variant", "kernel", "circuits_from_outside")
        return {key: identity[key] for key in identity if key not in own} | {"optim": optim}
    return None


def compare_runs(first: Path, second: Path) -> RunComparison:
    """Compare two runs; UserError if one cannot be read."""
    config, other_config = _read_config(first), _read_config(second)
    result, other_result = results = [read_result(run) or {} for run in (first, second)]
    facts, other_facts = read_facts(first, result), read_facts(second, other_result)
    differ = _differences(config, other_config, [*config, *other_config])
    unlike = _differences(facts, other_facts, _LIKE)
    losses = {s: (_loss(result, s), _loss(other_result, s)) for s in ("train", "val", "test")}
    gaps = {s: a - b for s, (a, b) in losses.items() if a is not None and b is not None}
    curve, other_curve = read_loss_curves(first)[VAL], read_loss_curves(second)[VAL]
    status, other_status = (str(one.get("status", "no result")) for one in results)
    params, other_params = (as_dict(one.get("params")).get("total") for one in results)
    keys = ("flops_per_token", "seconds", "packed")
    return RunComparison(
        runs=(first.resolve().name, second.resolve().name),
        status=(status, other_status),
        loss=losses,
        gap=gaps,
        perplexity_percent={split: perplexity_percent(value) for split, value in gaps.items()},
        params=(params, other_params),
        **{key: (result.get(key), other_result.get(key)) for key in keys},
        differ=differ,
        unlike=unlike,
        paired=all(results)
        and "data_fingerprint" not in unlike
        and not any(key.startswith("seed") for key in differ),
        val_gap=[GapReading(t, curve[t] - other_curve[t]) for t in curve if t in other_curve],
    )


def _differences(
    values: Mapping[str, object], others: Mapping[str, object], keys: Iterable[str]
) -> dict[str, Both]:
    pairs = {key: (values.get(key), others.get(key)) for key in keys}
    return {key: (value, other) for key, (value, other) in pairs.items() if value != other}


def _loss(result: Mapping[str, object], split: str) -> float | None:
    value = as_dict(result.get("loss")).get(split)
    return value if is_number(value) else None


def _read_config(folder: Path) -> dict[str, object]:
    """Return the leaves of a run's config as JSON values."""
    try:
        content = read_config(folder)
    except ValueError as error:
        raise UserError(f"'{folder / 'config.yaml'}' cannot be read: {error}") from None
    leaves = {
        f"{key}.{inner}" if inner != "" else str(key): value
        for key, part in content.items()
        if key not in ("id", "identity")
        for inner, value in (part.items() if isinstance(part, dict) else [("", part)])
    }
    return {
        key: value if isinstance(value, str | bool | None) or is_number(value) else str(value)
        for key, value in leaves.items()
        if not has_role(key, Role.LOCAL)
    }

"""Two runs compared at a glance: one pair is a single number, not a verdict."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from qkablate.analysis.comparison.gaps import perplexity_percent
from qkablate.analysis.study.study import VAL, read_facts, read_loss_curves
from qkablate.config import Role, has_role
from qkablate.errors import UserError
from qkablate.runs.records import is_number, read_config, read_result

_LIKE = ["data_fingerprint", "precision", "matmul", "device", "kernel", "threads", "code"]
_LIKE += ["torch", "cpu"]
Both = tuple[object, object]  # a value of each run


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


def compare_runs(first: Path, second: Path) -> RunComparison:
    """Compare two runs; UserError if one cannot be read."""
    configs = _read_config(first), _read_config(second)
    results = read_result(first) or {}, read_result(second) or {}
    facts = read_facts(first, results[0]), read_facts(second, results[1])
    differ = {
        key: (configs[0].get(key), configs[1].get(key))
        for key in dict.fromkeys([*configs[0], *configs[1]])
        if configs[0].get(key) != configs[1].get(key)
    }
    unlike = {
        key: (facts[0][key], facts[1][key]) for key in _LIKE if facts[0][key] != facts[1][key]
    }
    losses = {
        split: (_loss(results[0], split), _loss(results[1], split))
        for split in ("train", "val", "test")
    }
    gaps = {
        split: loss - other
        for split, (loss, other) in losses.items()
        if loss is not None and other is not None
    }
    curve, other_curve = read_loss_curves(first)[VAL], read_loss_curves(second)[VAL]

    def both(key: str) -> Both:
        return results[0].get(key), results[1].get(key)

    return RunComparison(
        runs=(first.resolve().name, second.resolve().name),
        status=(_status(results[0]), _status(results[1])),
        loss=losses,
        gap=gaps,
        perplexity_percent={split: perplexity_percent(value) for split, value in gaps.items()},
        params=(_total_params(results[0]), _total_params(results[1])),
        flops_per_token=both("flops_per_token"),
        seconds=both("seconds"),
        packed=both("packed"),
        differ=differ,
        unlike=unlike,
        paired=all(results)
        and "data_fingerprint" not in unlike
        and not any(key.startswith("seed") for key in differ),
        val_gap=[
            GapReading(tokens, loss - other_curve[tokens])
            for tokens, loss in curve.items()
            if tokens in other_curve
        ],
    )


def _status(result: Mapping[str, object]) -> str:
    return str(result.get("status", "no result"))


def _loss(result: Mapping[str, object], split: str) -> float | None:
    losses = result.get("loss")
    value = losses.get(split) if isinstance(losses, dict) else None
    return value if is_number(value) else None


def _total_params(result: Mapping[str, object]) -> object:
    params = result.get("params")
    return params.get("total") if isinstance(params, dict) else None


def _read_config(folder: Path) -> dict[str, object]:
    """Return the leaves of a run's config as JSON values."""
    try:
        content = read_config(folder)
    except ValueError as error:
        raise UserError(f"'{folder / 'config.yaml'}' cannot be read: {error}") from None
    leaves = {
        f"{key}.{inner}" if inner != "" else str(key): _json_value(value)
        for key, part in content.items()
        if key not in ("id", "identity")
        for inner, value in (part.items() if isinstance(part, dict) else [("", part)])
    }
    return {key: value for key, value in leaves.items() if not has_role(key, Role.LOCAL)}


def _json_value(value: object) -> object:
    """Return the value itself if JSON has it, else its text."""
    return (
        value if value is None or isinstance(value, str | bool) or is_number(value) else str(value)
    )

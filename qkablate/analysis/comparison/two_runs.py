"""Two runs side by side: a quick look. One pair is a number, whatever it says."""

from pathlib import Path
from typing import Any

from qkablate.analysis.comparison.gaps import per_cent
from qkablate.analysis.study.study import VAL, courses, facts_of
from qkablate.errors import UserError
from qkablate.runs.records import is_number, read_config, read_result

_LIKE = ["data_fingerprint", "precision", "products", "device", "kernel", "threads", "code"]
_LIKE += ["torch", "cpu"]
_FREE = ("id", "identity", "out", "track", "threads", "diagnose")


def duel(one: Path, other: Path) -> dict[str, Any]:
    """What two runs differ in, and by how much; UserError for what cannot be read."""
    folders = [one, other]
    configs, results = [_config(folder) for folder in folders], [read_result(f) for f in folders]
    facts = [
        facts_of(folder, result or {}) for folder, result in zip(folders, results, strict=True)
    ]
    differ = {
        key: [config.get(key) for config in configs]
        for key in dict.fromkeys([*configs[0], *configs[1]])
        if configs[0].get(key) != configs[1].get(key)
    }
    unlike = {key: [f.get(key) for f in facts] for key in _LIKE if facts[0][key] != facts[1][key]}
    losses = {
        split: [_loss(result, split) for result in results] for split in ("train", "val", "test")
    }
    gaps = {split: a - b for split, (a, b) in losses.items() if is_number(a) and is_number(b)}
    curves = [courses(folder)[VAL] for folder in folders]
    return {
        "runs": [folder.resolve().name for folder in folders],
        "status": [(result or {}).get("status", "no result") for result in results],
        "loss": losses,
        "gap": gaps,
        "perplexity_percent": {split: per_cent(value) for split, value in gaps.items()},
        "params": [_number((result or {}).get("params"), "total") for result in results],
        "flops_per_token": [(result or {}).get("flops_per_token") for result in results],
        "seconds": [(result or {}).get("seconds") for result in results],
        "packed": [(result or {}).get("packed") for result in results],
        "differ": differ,
        "unlike": unlike,
        "paired": all(results)
        and not unlike.get("data_fingerprint")
        and not any(key.startswith("seed") for key in differ),
        "val_gap": [
            {"tokens": tokens, "gap": curves[0][tokens] - curves[1][tokens]}
            for tokens in curves[0]
            if tokens in curves[1]
        ],
    }


def _loss(result: dict[str, Any] | None, split: str) -> float | None:
    value = ((result or {}).get("loss") or {}).get(split)
    return value if is_number(value) else None


def _number(value: Any, key: str) -> Any:
    return value.get(key) if isinstance(value, dict) else None


def _config(folder: Path) -> dict[str, Any]:
    """The leaves of a run's config, as data and nothing more."""
    try:
        content = read_config(folder)
    except ValueError as error:
        raise UserError(f"'{folder / 'config.yaml'}' cannot be read: {error}") from None
    return {
        f"{key}.{inner}" if inner != "" else str(key): _plain(value)
        for key, part in content.items()
        if key not in _FREE
        for inner, value in (part.items() if isinstance(part, dict) else [("", part)])
    }


def _plain(value: Any) -> Any:
    """What JSON can say as it is; all else as a text."""
    return (
        value if value is None or isinstance(value, str | bool) or is_number(value) else str(value)
    )

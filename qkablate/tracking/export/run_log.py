"""Log of a run, read from its folder: config, rows of metrics, result."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qkablate.config import ModelConfig
from qkablate.config.variant import layer_names
from qkablate.disk import read_file
from qkablate.errors import UserError
from qkablate.runs.records import decode_row, is_number, read_config, read_result, sha256
from qkablate.runs.run import count_attempts
from qkablate.strict_json import from_json
from qkablate.tracking.wandb.run import flatten_row

_SPLITS = ("loss", "bits_per_byte", "accuracy", "exact")  # measures of the result, by split


@dataclass(frozen=True)
class Row:
    """Metrics at a step, with the time in seconds since the epoch."""

    step: int
    time: float
    metrics: dict[str, float]


@dataclass(frozen=True)
class RunLog:
    """Config, metrics and result of a run, as plain names and values."""

    folder: Path
    attempt: int
    start: float  # seconds since the epoch
    config: dict[str, Any]  # {"optim.lr": 0.001, …}
    rows: list[Row]
    skipped: int  # number of damaged rows
    result: Mapping[str, Any] | None  # None: the run has not ended
    digest: str  # of the files that were read: the same log is written once

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    @property
    def final(self) -> dict[str, float]:
        """Final measures of a run that has ended, as final/val_loss."""
        if self.result is None:
            return {}
        values = {
            f"final/{split}_{measure}": value
            for measure in _SPLITS
            for split, value in (self.result.get(measure) or {}).items()
        }
        values["final/seconds"] = self.result.get("seconds")
        values["params"] = (self.result.get("params") or {}).get("total")
        return {name: value for name, value in values.items() if is_number(value)}

    @property
    def tags(self) -> dict[str, str]:
        """Labels by which tools group runs."""
        keys = {"variant": "variant.name", "data": "data.source", "seed": "seed"}
        tags = {name: str(self.config.get(key)) for name, key in keys.items()}
        return tags | {"status": str((self.result or {}).get("status", "unfinished"))}


def read_run_log(folder: Path) -> RunLog:
    """Read a run's folder; UserError if its config is damaged."""
    try:
        config = read_config(folder)
    except ValueError as error:
        raise UserError(f"'{folder}' is not a run that can be read: {error}") from None
    if not isinstance(config.get("id"), str):
        raise UserError(f"'{folder}' is not a run that can be read: it has no id")
    begun = folder / "environment.json"  # later sessions write the config anew, and keep this
    start = (begun if begun.exists() else folder / "config.yaml").stat().st_mtime
    contents = [_read(folder / name) for name in ("config.yaml", "metrics.jsonl", "result.json")]
    lines, names = contents[1].splitlines(), _layer_names(config)
    rows = [row for line in lines if (row := _read_row(line, start, names))]
    return RunLog(
        folder=folder,
        attempt=count_attempts(folder),
        start=start,
        config=dict(_flatten({key: x for key, x in config.items() if key != "identity"})),
        rows=rows,
        skipped=len(lines) - len(rows),
        result=read_result(folder),
        digest=sha256(b"\0".join(contents)),
    )


def _read(path: Path) -> bytes:
    try:
        return read_file(path)
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise UserError(f"'{path}' cannot be read: {error.strerror}") from None


def _layer_names(config: Mapping[str, Any]) -> list[str]:
    """Return the names of the attention layers; none if the model is not known here."""
    try:
        return layer_names(from_json(ModelConfig, config.get("model")))
    except ValueError:
        return []


def _read_row(line: bytes, start: float, names: Sequence[str]) -> Row | None:
    """Return the numbers of a row; None if it is damaged."""
    try:
        row = decode_row(line)
        step, seconds = row["step"], row.get("seconds", 0.0)
        metrics = {name: x for name, x in flatten_row(row, names).items() if is_number(x)}
    except (ValueError, KeyError, AttributeError, TypeError):
        return None
    if type(step) is not int or abs(step) >= 2**63 or not is_number(seconds):
        return None
    return Row(step, start + seconds, {k: x for k, x in metrics.items() if k not in _AXES})


_AXES = ("step", "seconds", "crc32")


def _flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value

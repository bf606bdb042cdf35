"""Listing of the runs in a folder: what each is, how far it came, and how old it is."""

import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qkablate.runs.lease import LeaseObserver
from qkablate.runs.records import is_number, read_config, read_result

# Files that a run writes while it is trained: the youngest tells its age.
_DATED = ("result.json", "metrics.jsonl", "config.yaml")
_ID = 4  # digits of an id that a short name keeps at least


@dataclass(frozen=True)
class RunListing:
    """One run in a list."""

    folder: Path
    status: str
    written: float  # seconds since the epoch
    settings: Mapping[str, Any] = field(default_factory=dict)  # its config: 'model.d_model': 128
    val: float | None = None
    test: float | None = None

    @property
    def name(self) -> str:
        return self.folder.name

    def get(self, key: str) -> Any:
        """Return a value of the config, None if it is unknown."""
        return self.settings.get(key)


def find_run_folders(out: str | Path) -> list[Path]:
    """Return the folders of the runs in `out`, the newest first."""
    folders = [path.parent for path in Path(out).expanduser().glob("runs/*/config.yaml")]
    return sorted(folders, key=lambda folder: (-last_written(folder), folder.name))


def last_written(folder: Path, names: Iterable[str] = _DATED) -> float:
    """Return when the youngest of a folder's files was written, in seconds since the epoch."""
    times = [0.0]
    for name in names:
        try:
            times.append(os.stat(folder / name).st_mtime)
        except OSError:
            continue
    return max(times)


def summarize_run(folder: Path, observer: LeaseObserver) -> RunListing:
    """Read what a list shows of a run; its status is `damaged` if its files cannot be read."""
    written = last_written(folder)
    try:
        config = read_config(folder)
        settings = _flatten({k: v for k, v in config.items() if k not in ("id", "identity")})
    except ValueError:
        return RunListing(folder, "damaged", written)
    result = read_result(folder)
    if result is None and os.path.isfile(folder / "origin.json"):
        unknown = ("data.", "train.", "optim.", "seed")  # the defaults are nobody's choice
        settings = {k: v for k, v in settings.items() if not k.startswith(unknown)}
        return RunListing(folder, "imported", written, settings)
    if result is None:
        is_leased = observer.is_leased(folder)
        status = "running" if is_leased else "interrupted"
        if os.path.exists(folder / "result.json") and not is_leased:
            status = "damaged"
        return RunListing(folder, status, written, settings)
    losses = [result["loss"].get(split) for split in ("val", "test")]
    val, test = (loss if is_number(loss) else None for loss in losses)
    return RunListing(folder, str(result["status"]), written, settings, val, test)


def _flatten(values: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        is_map = isinstance(value, dict)
        flat |= _flatten(value, f"{prefix}{key}.") if is_map else {f"{prefix}{key}": value}
    return flat


def format_age(seconds: float) -> str:
    """Format the time since something happened: 8 s, 3 min, 2 h, 5 days."""
    for size, unit in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds // size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def shorten_names(names: Iterable[str]) -> dict[str, str]:
    """Return for each `<label>-<id>` a beginning that no other of these names has."""
    names = list(names)
    short: dict[str, str] = {}
    for name in names:
        label, _, id = name.rpartition("-")
        others = [other for other in names if other != name]
        length = _ID
        while length < len(id) and any(o.startswith(f"{label}-{id[:length]}") for o in others):
            length += 1
        short[name] = f"{label}-{id[:length]}" if label else name
    return short


# What a short description shows, by the key that it may differ in.
_DESCRIBED = {"data.source": "", "optim.optimizer": "", "optim.lr": "lr ", "train.steps": "steps "}


def describe_runs(folders: Iterable[Path]) -> list[str]:
    """Return name, data, rate and steps of each run, where they differ, with status and age."""
    observer = LeaseObserver(by_file_times=True)
    runs = [summarize_run(folder, observer) for folder in folders]
    differ = [key for key in _DESCRIBED if len({str(run.get(key)) for run in runs}) > 1]
    texts = []
    for run in runs:
        parts = [f"{_DESCRIBED[key]}{run.get(key)}" for key in differ if run.get(key) is not None]
        age = format_age(time.time() - run.written)
        texts.append(f"{run.name} ({', '.join([*parts, run.status, f'{age} old'])})")
    return texts

"""Checkpoints: whole or not there, checked before use, nothing in them that could run code.

checkpoints/step-00000250/
    weights.safetensors   the model
    state.pt              optimiser and scaler, loadable with weights_only=True
    progress.json         step, sums, clocks, and where metrics.jsonl stood
    SHA256SUMS            of the three, as `sha256sum -c` reads it
"""

import hashlib
import json
import os
import shutil
import zipfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from qkablate.disk import make_folder, open_file, read_file, sync_folder
from qkablate.runs.records import read_row
from qkablate.training.hardware import is_out_of_memory
from qkablate.training.state import Progress

KEEP = 2  # the newest, and the one before it in case the newest is damaged
_FILES = ("weights.safetensors", "state.pt", "progress.json")


def bytes_needed(params: int) -> int:
    """Weights and two moments, in fp32, of all checkpoints that can exist at one moment."""
    return 12 * params * (KEEP + 1) + 2**24


@dataclass
class Checkpoint:
    """What training goes on from."""

    progress: Progress
    weights: dict[str, torch.Tensor]
    state: dict[str, Any] = field(default_factory=dict)


def save(folder: Path, checkpoint: Checkpoint) -> Path:
    """Write one checkpoint in full, then drop the oldest."""
    make_folder(folder)
    final = folder / f"step-{checkpoint.progress.step:08d}"
    temporary = folder / f".{final.name}.tmp"
    for unfinished in folder.glob(".step-*.tmp"):
        shutil.rmtree(unfinished)
    temporary.mkdir()
    weights = {name: tensor.contiguous() for name, tensor in checkpoint.weights.items()}
    safetensors.torch.save_file(weights, temporary / _FILES[0])
    torch.save(checkpoint.state, temporary / _FILES[1])
    (temporary / _FILES[2]).write_text(json.dumps(asdict(checkpoint.progress)), encoding="utf-8")
    sums = "".join(f"{_sha256(temporary / name)}  {name}\n" for name in _FILES)
    (temporary / "SHA256SUMS").write_text(sums, encoding="utf-8")
    for name in (*_FILES, "SHA256SUMS"):
        _sync_file(temporary / name)
    sync_folder(temporary)
    shutil.rmtree(final, ignore_errors=True)  # a damaged one of the same step
    temporary.rename(final)
    sync_folder(folder)
    keep_newest(folder, KEEP)
    return final


def load_newest(
    folder: Path, device: str, metrics: Path, note: Callable[[str], None]
) -> Checkpoint | None:
    """The newest checkpoint that is whole, with its rows in `metrics`; others are named."""
    rows = read_file(metrics) if metrics.exists() else b""
    for path in newest_first(folder):
        try:
            found = load(path, device)
            own = rows[: found.progress.metrics_end]
            if len(own) < found.progress.metrics_end or own[-1:] not in (b"", b"\n"):
                raise ValueError(f"{metrics.name} has lost rows since")
            if damaged := sum(map(_is_damaged, own.splitlines())):
                note(f"{metrics} is damaged: of its rows, {damaged} will not be shown")
            return found
        except (OSError, ValueError, TypeError) as error:
            note(f"checkpoint {path} is damaged ({error}): not used")
            # Out of the way of those to come: it must not count as one of the newest.
            shutil.rmtree(path.with_name(f"damaged-{path.name}"), ignore_errors=True)
            path.rename(path.with_name(f"damaged-{path.name}"))
    return None


def _is_damaged(line: bytes) -> bool:
    try:
        read_row(line)
    except ValueError:
        return True
    return False


def keep_newest(folder: Path, count: int) -> None:
    for old in newest_first(folder)[count:]:
        shutil.rmtree(old, ignore_errors=True)


def load(path: Path, device: str) -> Checkpoint:
    """One checkpoint; ValueError if it is not what was written."""
    found = load_weights(path, device)
    _check_sums(path, _FILES[1])
    found.state = _load_state(path / _FILES[1], device)
    return found


def _load_state(path: Path, device: str) -> dict[str, Any]:
    """Checked before it is read: what is packed, as nothing of ours is, may be of any size."""
    try:
        with zipfile.ZipFile(path) as archive:
            whole = sum(one.file_size for one in archive.infolist()) <= path.stat().st_size
        state = torch.load(path, map_location=device, weights_only=True) if whole else None
    except Exception as error:  # of many types, whatever is in it
        if is_out_of_memory(error):
            raise
        state = None
    if not isinstance(state, dict):
        raise ValueError(f"{path.name} is not what training writes")
    return state


def load_weights(path: Path, device: str) -> Checkpoint:
    """The same without state.pt, which only training needs."""
    _check_sums(path, _FILES[0], _FILES[2])
    try:
        progress = Progress(**json.loads(read_file(path / _FILES[2]).decode()))
    except RecursionError as error:
        raise ValueError(f"{_FILES[2]}: {error}") from None
    for name, value in asdict(Progress()).items():
        kinds = (int, float) if isinstance(value, float) else type(value)
        if not isinstance(getattr(progress, name), kinds):
            raise TypeError(f"{_FILES[2]}: {name} is {getattr(progress, name)!r}")
    try:
        weights = safetensors.torch.load_file(path / _FILES[0], device=device)
    except safetensors.SafetensorError as error:
        raise ValueError(f"{_FILES[0]}: {error}") from None
    return Checkpoint(progress, weights)


def weights_sha256(path: Path) -> str:
    """Of the weights in a checkpoint; ValueError or OSError if they are not what was written."""
    _check_sums(path, _FILES[0], _FILES[2])
    return _sha256(path / _FILES[0])


def newest_first(folder: Path) -> list[Path]:
    return sorted(folder.glob("step-*"), reverse=True)


def _check_sums(path: Path, *names: str) -> None:
    lines = read_file(path / "SHA256SUMS").decode("utf-8", "replace").splitlines()
    for name in names:
        if f"{_sha256(path / name)}  {name}" not in lines:
            raise ValueError(f"{name} does not have its checksum")


def _sha256(path: Path) -> str:
    with open_file(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync_file(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())

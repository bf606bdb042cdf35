"""Checkpoints: written atomically, verified before use, free of executable content.

checkpoints/step-00000250/
    weights.safetensors   the model
    state.pt              optimizer and gradient scaler, loadable with weights_only=True
    progress.json         step, sums, clocks, and the length of metrics.jsonl
    SHA256SUMS            of the three, in the format of `sha256sum -c`
"""

import errno
import json
import shutil
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import safetensors.torch
import torch

from qkablate.disk import hash_file, make_folder, read_file, sync_file, sync_folder
from qkablate.runs.records import decode_row
from qkablate.strict_json import from_json, parse_json
from qkablate.training.hardware import is_out_of_memory

KEEP = 2  # the newest, and the one before it in case the newest is damaged
_FILES = ("weights.safetensors", "state.pt", "progress.json")
# Errors of a disk, most often a network's, that say nothing of the file.
_UNREADABLE = (errno.EACCES, errno.EIO, errno.ESTALE, errno.ETIMEDOUT)


@dataclass
class TrainProgress:
    """The state of a run besides weights and optimizer, as plain numbers for JSON."""

    step: int = 0  # completed steps
    evaluated: int = -1  # step of the last validation
    diagnosed: int = -1  # step of the last diagnostics
    predicted: int = -1  # step of the last predictions
    loss_sum: float = 0.0  # training loss since the last row of metrics
    loss_count: int = 0
    loss_shares: list[float] = field(default_factory=list)  # loss_sum of each rank
    metrics_end: int = 0  # length of metrics.jsonl in bytes
    seconds: float = 0.0  # of all sessions
    speeds: list[float] = field(default_factory=list)  # tokens/s between rows, without warm-up
    val: dict[str, float] = field(default_factory=dict)  # metrics of the last validation

    def initial_loss_sum(self, rank: int, count: int) -> float:
        """Return the loss sum that one of `count` ranks resumes from."""
        if len(self.loss_shares) == count:
            return self.loss_shares[rank]
        return self.loss_sum if rank == 0 else 0.0


@dataclass
class Checkpoint:
    """The state that training resumes from."""

    progress: TrainProgress
    weights: dict[str, torch.Tensor]
    state: dict[str, Any] = field(default_factory=dict)


def bytes_needed(params: int, branches: int = 0) -> int:
    """Return the size of all checkpoints that can exist at once: fp32 weights and two moments."""
    return 12 * params * (KEEP + 1 + branches) + 2**24


def save(
    folder: Path,
    checkpoint: Checkpoint,
    *,
    keep: int | None = KEEP,
    others: Mapping[str, bytes] = MappingProxyType({}),
    verify: Callable[[], None] = lambda: None,
) -> Path:
    """Write a checkpoint with some other files atomically, then delete all but the newest.

    `verify` raises if the folder is another process's by now: then nothing gets a name.
    """
    make_folder(folder)
    final = folder / f"step-{checkpoint.progress.step:08d}"
    temporary = folder / f".{final.name}.tmp"
    for unfinished in folder.glob(".step-*.tmp"):
        shutil.rmtree(unfinished, ignore_errors=True)  # a launcher may be removing it, too
    try:
        _write(temporary, checkpoint, others)
    except Exception:
        shutil.rmtree(temporary, ignore_errors=True)  # on a full disk, what follows needs the room
        raise
    verify()
    shutil.rmtree(final, ignore_errors=True)  # a damaged one of the same step
    temporary.rename(final)
    sync_folder(folder)
    if keep is not None:
        keep_newest(folder, keep)
    return final


def _write(folder: Path, checkpoint: Checkpoint, others: Mapping[str, bytes]) -> None:
    """Write the files of a checkpoint to disk, in a new folder."""
    folder.mkdir()
    weights = {name: tensor.contiguous() for name, tensor in checkpoint.weights.items()}
    safetensors.torch.save_file(weights, folder / _FILES[0])
    torch.save(checkpoint.state, folder / _FILES[1])
    (folder / _FILES[2]).write_text(json.dumps(asdict(checkpoint.progress)), encoding="utf-8")
    for name, content in others.items():
        (folder / name).write_bytes(content)
    sums = "".join(f"{hash_file(folder / name)}  {name}\n" for name in (*_FILES, *others))
    (folder / "SHA256SUMS").write_text(sums, encoding="utf-8")
    for name in (*_FILES, *others, "SHA256SUMS"):
        sync_file(folder / name)
    sync_folder(folder)


def load_newest(
    folder: Path, device: str, metrics: Path, note: Callable[[str], None]
) -> Checkpoint | None:
    """Load the newest intact checkpoint whose rows are in `metrics`; note and skip damaged ones.

    OSError if there is none but one that the disk does not return: another try may succeed.
    """
    rows = read_file(metrics) if metrics.exists() else b""
    damaged = list[Path]()
    unread: OSError | None = None
    found: Checkpoint | None = None
    for path in find_checkpoints(folder):
        try:
            checkpoint = load(path, device)
            logged = rows[: checkpoint.progress.metrics_end]
            if len(logged) < checkpoint.progress.metrics_end or logged[-1:] not in (b"", b"\n"):
                raise ValueError(f"{metrics.name} has lost rows since")
            if lost := sum(map(_is_damaged, logged.splitlines())):
                note(f"{metrics} is damaged: {lost} of its rows will not be shown")
            found = checkpoint
            break
        except (OSError, ValueError, TypeError) as error:
            damaged.append(path)
            fault = "is damaged"
            if isinstance(error, OSError) and error.errno in _UNREADABLE:
                fault, unread = "cannot be read", error
            note(f"checkpoint {path} {fault} ({error}): not used")
    if found is None and unread is not None:
        raise unread  # before the loss of all that was trained
    for path in damaged:  # renamed, so that it does not count as one of the newest
        shutil.rmtree(path.with_name(f"damaged-{path.name}"), ignore_errors=True)
        path.rename(path.with_name(f"damaged-{path.name}"))
    return found


def _is_damaged(line: bytes) -> bool:
    try:
        decode_row(line)
    except ValueError:
        return True
    return False


def keep_newest(folder: Path, count: int) -> None:
    """Delete all but the newest checkpoints."""
    for path in find_checkpoints(folder)[count:]:
        shutil.rmtree(path, ignore_errors=True)


def load(path: Path, device: str) -> Checkpoint:
    """Load a checkpoint; raise ValueError if it is damaged."""
    checkpoint = load_weights(path, device)
    check_sums(path, _FILES[1])
    checkpoint.state = _load_state(path / _FILES[1], device)
    return checkpoint


def _load_state(path: Path, device: str) -> dict[str, Any]:
    """Load state.pt, unless it is compressed: then it could expand to any size."""
    try:
        with zipfile.ZipFile(path) as archive:
            stored = sum(file.file_size for file in archive.infolist()) <= path.stat().st_size
        state = torch.load(path, map_location=device, weights_only=True) if stored else None
    except Exception as error:  # damaged files raise many types
        if is_out_of_memory(error):
            raise
        state = None
    if not isinstance(state, dict):
        raise ValueError(f"{path.name} is not what training writes")
    return state


def load_weights(path: Path, device: str = "cpu") -> Checkpoint:
    """Load a checkpoint without state.pt, which only training needs."""
    check_sums(path, _FILES[0], _FILES[2])
    progress = from_json(TrainProgress, parse_json(read_file(path / _FILES[2])), _FILES[2])
    try:
        weights = safetensors.torch.load_file(path / _FILES[0], device=device)
    except safetensors.SafetensorError as error:
        raise ValueError(f"{_FILES[0]}: {error}") from None
    return Checkpoint(progress, weights)


def weights_sha256(path: Path) -> str:
    """Return the hash of a checkpoint's weights; raise ValueError or OSError if damaged."""
    check_sums(path, _FILES[0], _FILES[2])
    return hash_file(path / _FILES[0])


def find_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, newest first."""
    return sorted(folder.glob("step-*"), reverse=True)


def check_sums(path: Path, *names: str) -> None:
    """Raise ValueError for a file of a checkpoint that is not as it was written."""
    lines = read_file(path / "SHA256SUMS").decode("utf-8", "replace").splitlines()
    for name in names:
        if f"{hash_file(path / name)}  {name}" not in lines:
            raise ValueError(f"{name} does not have its checksum")

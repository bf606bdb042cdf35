"""Predictions of a model at fixed positions of the validation split, recorded while it trains.

They measure how far apart two runs are as functions, whatever their losses. Imports no torch.

<run>/predictions/step-00000250.safetensors
    log_probabilities   float32, positions × vocabulary
    its header          run, step, fingerprint of the data, hash of the positions, checksum

Shape suffixes: P positions, V vocabulary.
"""

import math
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from qkablate.config import Config
from qkablate.runs.tensor_file import TensorFile

FOLDER = "predictions"
MAX_FILES = 20  # of a run
MAX_POSITIONS = 1024
MAX_BYTES = 2**21  # of a file; a float16 could not tell rounding from a difference
_NAME = re.compile(r"step-(\d{8,18})\.safetensors")
_TOLERANCE = 1e-3  # of a float32 sum of probabilities


@dataclass(frozen=True)
class PredictionsHeader:
    """Origin of predictions; files are comparable if all but the run is equal."""

    run: str
    step: int
    data_fingerprint: str
    positions_sha256: str
    positions: int
    context: int


_FILE = TensorFile(PredictionsHeader, {"log_probabilities": (np.float32, 2)}, MAX_BYTES)


def position_count(vocabulary: int) -> int:
    """Return the number of recorded positions: 0 for more than half a million tokens."""
    return min(MAX_POSITIONS, MAX_BYTES // (4 * vocabulary))


def recorded_steps(config: Config) -> range:
    """Return the steps, but for the last, with recorded predictions.

    Those of the diagnostics, or every second, fourth, … of them where that were too many files: the
    steps of a longer run are among those of a shorter one, which may be a part of it.
    """
    last, every = int(config.train.steps), config.diagnostics.every
    every = int(config.train.eval_every if every == "auto" else every)
    if not every:
        return range(0)
    parts = math.ceil(math.ceil(last / every) / (MAX_FILES - 1))
    return range(0, last, every * 2 ** (parts - 1).bit_length())


def is_recorded(config: Config, step: int) -> bool:
    """Return whether predictions are recorded at a step."""
    steps = recorded_steps(config)
    return step in steps or (bool(steps) and step == config.train.steps)


def bytes_needed(config: Config) -> int:
    """Return the most bytes that a run's predictions take, whatever its vocabulary."""
    steps = recorded_steps(config)
    return (len(steps) + 1) * MAX_BYTES if steps else 0


def write_predictions(folder: Path, header: PredictionsHeader, log_PV: np.ndarray) -> None:
    """Write the predictions of a step into a run's folder."""
    _FILE.write(folder / FOLDER / f"step-{header.step:08d}.safetensors", header, log_PV)


def find_predictions(folder: Path) -> dict[int, Path]:
    """Return the files of a run's folder by step, without reading them."""
    if (folder / FOLDER).is_symlink():
        return {}
    paths = (folder / FOLDER).glob("step-*.safetensors")
    matches = ((_NAME.fullmatch(path.name), path) for path in paths)
    return dict(sorted((int(match[1]), path) for match, path in matches if match))


def read_predictions(path: Path) -> tuple[PredictionsHeader, np.ndarray]:
    """Read an untrusted file; ValueError for what `write_predictions` does not write."""
    header, (log_PV,) = _FILE.read(path)
    if header.step != int(path.stem.removeprefix("step-")):
        raise ValueError("its step is not that of its name")
    if len(log_PV) != header.positions:
        raise ValueError(f"it has {len(log_PV)} positions, its header says {header.positions}")
    with np.errstate(over="ignore", invalid="ignore"):
        sums_P = np.exp(log_PV, dtype=np.float64).sum(axis=1)
    if not (np.isfinite(log_PV).all() and (np.abs(sums_P - 1) < _TOLERANCE).all()):
        raise ValueError("its numbers are not log-probabilities")
    return header, log_PV

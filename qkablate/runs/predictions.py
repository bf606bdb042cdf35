"""What a model predicts at fixed positions of the validation split, kept while it trains: what
tells how far apart two runs are as functions, whatever their losses are. Imports no torch.

<run>/predictions/step-00000250.safetensors
    log_probabilities   float32, positions × vocabulary
    its metadata        run, step, fingerprint of the data, hash of the positions, checksum

Shape suffixes: P positions, V vocabulary.
"""

import hashlib
import json
import math
import re
import stat
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
from safetensors import SafetensorError

from qkablate.config import Config
from qkablate.disk import make_folder, read_file
from qkablate.runs.records import write_atomic

FOLDER = "predictions"
MOST_FILES = 20  # of one run
MOST_POSITIONS = 1024
MOST_BYTES = 2**21  # of one file; a float16 would tell no rounding from none
_NAME = re.compile(r"step-(\d{8,18})\.safetensors")
_TENSOR, ABOUT = "log_probabilities", "about"
_HEADER = 4096  # bytes: ours is far smaller
_SLACK = 1e-3  # of what float32 makes of a sum of probabilities


@dataclass(frozen=True)
class About:
    """What two files must share, all but the run, to be compared."""

    run: str
    step: int
    data_fingerprint: str
    positions_sha256: str
    positions: int
    context: int


def positions(vocabulary: int) -> int:
    """How many are kept: with a large vocabulary fewer, and beyond half a million tokens none."""
    return min(MOST_POSITIONS, MOST_BYTES // (4 * vocabulary))


def steps(config: Config) -> range:
    """At which predictions are kept, the last step apart: with every look at the model, or with
    every second, third, … of them where that were too many files.
    """
    last, every = int(config.train.steps), config.diagnose.every
    every = config.train.eval_every if every == "auto" else int(every)
    if not every:
        return range(0)
    looks = math.ceil(last / every)
    return range(0, last, every * math.ceil(looks / (MOST_FILES - 1)))


def are_kept(config: Config, step: int) -> bool:
    found = steps(config)
    return step in found or (bool(found) and step == config.train.steps)


def bytes_needed(config: Config) -> int:
    """Of a run, whatever its vocabulary."""
    found = steps(config)
    return (len(found) + 1) * MOST_BYTES if found else 0


def write(folder: Path, about: About, log_PV: np.ndarray) -> None:
    """In a run's folder; all of it or nothing, and the same bytes whenever it is done again."""
    make_folder(folder / FOLDER)
    for unfinished in (folder / FOLDER).glob(".step-*.tmp"):
        unfinished.unlink(missing_ok=True)
    log_PV = np.ascontiguousarray(log_PV, np.float32)
    # In one piece: of several the order would change from process to process.
    told = json.dumps({**asdict(about), "sha256": _checksum(about, log_PV)})
    content = safetensors.numpy.save({_TENSOR: log_PV}, {ABOUT: told})
    write_atomic(folder / FOLDER / f"step-{about.step:08d}.safetensors", content)


def kept(folder: Path) -> dict[int, Path]:
    """The files of a run's folder by step; nothing of them is read."""
    place = folder / FOLDER
    if place.is_symlink():
        return {}
    found = ((_NAME.fullmatch(path.name), path) for path in place.glob("step-*.safetensors"))
    return dict(sorted((int(name[1]), path) for name, path in found if name))


def read(path: Path) -> tuple[About, np.ndarray]:
    """One file, as data of a stranger: ValueError for what no run writes."""
    own, tensors = unpacked(path, MOST_BYTES)
    try:
        digest = own.pop("sha256")
        about = About(**own)
        log_PV = tensors[_TENSOR]
    except (LookupError, TypeError):
        raise ValueError("it is not what a run writes") from None
    _check(about, digest, log_PV, int(path.stem.removeprefix("step-")))
    return about, log_PV


def unpacked(path: Path, most: int) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """What a small safetensors file tells of itself, and its tensors, of so many bytes at most;
    ValueError for what cannot be read.
    """
    try:
        content = _content(path, most)
        size = int.from_bytes(content[:8], "little")
        if size > _HEADER:
            raise ValueError("its header is too long")
        own = dict(json.loads(json.loads(content[8 : 8 + size])["__metadata__"][ABOUT]))
        return own, safetensors.numpy.load(content)
    except OSError as error:
        raise ValueError(error.strerror or "it cannot be read") from None
    except (SafetensorError, LookupError, TypeError, AttributeError, RecursionError):
        raise ValueError("it is not what a run writes") from None


def _checksum(about: About, log_PV: np.ndarray) -> str:
    told = json.dumps(asdict(about), sort_keys=True).encode()
    return hashlib.sha256(told + log_PV.tobytes()).hexdigest()


def _content(path: Path, most: int) -> bytes:
    found = path.lstat()
    if not stat.S_ISREG(found.st_mode):
        raise ValueError("it is no file")
    if found.st_size > most + _HEADER:
        raise ValueError("it is too large")
    return read_file(path)


def _check(about: About, digest: Any, log_PV: np.ndarray, step: int) -> None:
    for key, kind in About.__annotations__.items():
        if type(getattr(about, key)) is not kind:
            raise ValueError(f"its {key} is not what a run writes")
    if about.step != step:
        raise ValueError("it is of another step than its name says")
    if log_PV.dtype != np.float32 or log_PV.ndim != 2 or not log_PV.size:
        raise ValueError(f"its numbers are {log_PV.dtype} {log_PV.shape}")
    if len(log_PV) != about.positions:
        raise ValueError(f"it has {len(log_PV)} positions, and says {about.positions}")
    if _checksum(about, log_PV) != digest:
        raise ValueError("it does not have its checksum")
    with np.errstate(over="ignore", invalid="ignore"):
        sums_P = np.exp(log_PV, dtype=np.float64).sum(axis=1)
    if not (np.isfinite(log_PV).all() and (np.abs(sums_P - 1) < _SLACK).all()):
        raise ValueError("its numbers are no log-probabilities")

"""What a run is: a frozen config, an id, a folder, an owner, a result. Imports neither torch nor
training, so that reports can read runs anywhere.

<out>/runs/<label>-<id>/
    config.yaml        resolved, with the identity that the id is the hash of
    tokenizer.json     what turns tokens back into text
    environment.json   versions, machine, threads, code
    metrics.jsonl      one row a line: the truth about the run's course
    checkpoints/       step-00000250/ …
    start/             what it began from, where that is a trained run: see training/start.py
    predictions/       what it predicts at fixed positions, while it trains: see predictions.py
    example.safetensors  the attention of one text, at the end: see example.py
    result.json        written last, in one stroke
    owner/             who trains it: see ownership.py
    attempts/          earlier attempts, after --rerun
"""

import dataclasses
import hashlib
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

from qkablate.config import Config
from qkablate.errors import UserError, nearest
from qkablate.redaction import redacted
from qkablate.runs.lease import Observer, Owner, is_owned, owning
from qkablate.runs.records import read_result, write_atomic
from qkablate.table import some

NUMERICS = 5  # raised whenever losses may move by a bit: old and new never share a run
PROJECTION = 2  # the same, of the weights that a run from a trained one begins with
# What cannot change a result, and the paths: no part of a run's id.
# (Of `attention`, the kernel that was chosen stands in the identity.)
_NOT_IDENTITY = ("data", "track", "out", "threads", "attention", "diagnose")
_PACKAGES = ("qkablate", "torch", "numpy", "hydra-core", "omegaconf", "safetensors", "wandb")
# The files of one attempt. The result goes first: from then on the run counts as unfinished.
_OF_ATTEMPT = (
    "result.json",
    "error.txt",
    "metrics.jsonl",
    "checkpoints",
    "predictions",
    "example.safetensors",
    "environment.json",
    "config.yaml",
    "tokenizer.json",
    "wandb",
)

EXIT_CODES = {"done": 0, "failed": 1, "diverged": 3}  # by the status that stands in result.json


def identity(
    config: Config,
    *,
    data_fingerprint: str,
    vocabulary: int,
    device: str,
    kernel: str,
    circuits_from_outside: Mapping[str, str],
) -> dict[str, Any]:
    """Everything that can change the result. The config must be resolved; of circuits from outside
    the package, the hashes of their files stand for them.
    """
    frozen = dataclasses.asdict(config)
    for key in _NOT_IDENTITY:
        del frozen[key]
    for key in ("checkpoint_every", "checkpoint_activations", "shard"):
        del frozen["train"][key]
    del frozen["variant"]["name"], frozen["variant"]["file"]
    if frozen["train"]["read_test"]:  # left out only where something is: it changes no number
        del frozen["train"]["read_test"]
    # Of what a run begins from its content counts, and not where it lies; of most there is nothing.
    known = frozen.pop("start")
    if known.pop("run") is not None:
        frozen["start"] = known | {"projection": PROJECTION}
    frozen |= {"circuits_from_outside": dict(circuits_from_outside)}
    frozen |= {"device": device, "kernel": kernel, "numerics": NUMERICS}
    return frozen | {"data_fingerprint": data_fingerprint, "vocabulary": vocabulary}


def run_id(identity: Mapping[str, Any]) -> str:
    text = json.dumps(identity, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def label(config: Config) -> str:
    """What a person reads; the id tells runs apart."""
    model, begun = config.model, "" if config.start.run is None else "healed-"
    return f"{begun}{config.variant.name}-d{model.d_model}-h{model.heads}-s{config.seed}"


class Run:
    """The folder of one run."""

    def __init__(self, out: str | Path, label: str, id: str) -> None:
        self.folder = Path(out).expanduser() / "runs" / f"{label}-{id}"
        if not self.folder.exists():  # the id decides: under another label it is the same run
            self.folder = next(self.folder.parent.glob(f"*-{id}"), self.folder)
        self.id, self.label = id, self.folder.name.removesuffix(f"-{id}")
        self.metrics = self.folder / "metrics.jsonl"
        self.checkpoints = self.folder / "checkpoints"
        self.start = self.folder / "start"

    @property
    def result(self) -> dict[str, Any] | None:
        """The result, if the run has ended."""
        return read_result(self.folder)

    @property
    def attempt(self) -> int:
        """1, and one more for every attempt put away by `restart`."""
        kept = [int(p.name) for p in (self.folder / "attempts").glob("*") if p.name.isdecimal()]
        return 1 + max(kept, default=0)

    @contextmanager
    def owned(self, observer: Observer | None = None) -> Iterator[Owner]:
        """Own the run while training it; raises Owned where someone else does."""
        refuse_strangers(self.folder)
        refuse_strangers(self.checkpoints)
        refuse_strangers(self.start)
        refuse_strangers(self.folder / "predictions")
        with owning(self.folder, observer) as owner:
            self._put_away()
            yield owner

    @property
    def is_owned(self) -> bool:
        """Whether a process is training it now."""
        return is_owned(self.folder)

    def restart(self) -> None:
        """Put what is there away under attempts/, to train anew."""
        if (self.folder / "config.yaml").exists():
            (self.folder / f"attempt-{self.attempt}.tmp").mkdir(exist_ok=True)
            self._put_away()

    def _put_away(self) -> None:
        """Carry out what `restart` decided, also if it was killed half-way."""
        for temporary in self.folder.glob("attempt-*.tmp"):
            for name in _OF_ATTEMPT:
                if (self.folder / name).exists():
                    (self.folder / name).rename(temporary / name)
            (self.folder / "attempts").mkdir(exist_ok=True)
            number = temporary.stem.removeprefix("attempt-")
            temporary.rename(self.folder / "attempts" / number)

    def freeze(self, config: Config, identity: Mapping[str, Any]) -> None:
        """Write the config, with the identity that the id is the hash of."""
        from omegaconf import OmegaConf

        content = {**dataclasses.asdict(config), "id": self.id, "identity": dict(identity)}
        write_atomic(self.folder / "config.yaml", OmegaConf.to_yaml(OmegaConf.create(content)))


def refuse_strangers(folder: Path) -> None:
    """What is written in a folder must not end up elsewhere because of what stands there."""
    if folder.is_dir():
        for entry in os.scandir(folder):
            if entry.is_symlink():
                raise UserError(f"'{entry.path}' is a link, and would be written through")
            if not (entry.is_file() or entry.is_dir()):
                raise UserError(f"'{entry.path}' is neither a file nor a folder")


def find_run(word: str, out: str | Path = "outputs") -> Path:
    """The run that a user means: its folder, or how its name or its id in `out` begins."""
    if not word:
        raise UserError("give a run: its folder, or how its name or its id begins")
    folder = os.path.expanduser(word)  # these functions take any word, however odd
    if os.path.isfile(os.path.join(folder, "config.yaml")):
        return Path(folder)
    runs = Path(out).expanduser() / "runs"
    names = sorted(path.parent.name for path in runs.glob("*/config.yaml"))
    if name := meant(word, names, "runs"):
        return runs / name
    if os.path.isdir(folder):
        raise UserError(f"'{word}' is no run: it has no config.yaml")
    if not names:
        raise UserError(f"there is no run '{word}', and none at all in '{runs}'")
    parts = {part for name in names for part in (name, name.rpartition("-")[0], name.split("-")[0])}
    raise UserError(
        f"there is no run '{word}', neither as a folder nor in '{runs}'{nearest(word, parts)}"
    )


def meant(word: str, names: list[str], what: str) -> str | None:
    """The `<label>-<id>` among the names that a word stands for."""
    ways = (  # the narrower meaning first: `…-s1` is also how `…-s10-…` begins
        [name for name in names if name == word],
        [name for name in names if name.rpartition("-")[0] == word],
        [name for name in names if name.startswith(word)],
        [name for name in names if name.rpartition("-")[2].startswith(word)],
    )
    found = next((way for way in ways if way), [])
    if len(found) > 1:
        raise UserError(f"'{word}' may be any of {len(found)} {what}: {some(found)}")
    return found[0] if found else None


def environment(config: Config, device: Mapping[str, Any], processes: int = 1) -> dict[str, Any]:
    """Versions, machine and code state; no variable of the environment, where keys live."""
    return {
        "versions": {"python": platform.python_version(), **versions()},
        "machine": {
            "host": socket.gethostname(),
            "platform": platform.platform(),
            "cpu": cpu_name(),
            "cores": len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count(),
            **device,
        },
        "threads": config.threads,
        "processes": processes,
        "code": _code_state(),
    }


def check_identity(content: Mapping[str, Any]) -> None:
    """ValueError where a frozen config is not what the run's id was made of."""
    identity = content["identity"]
    if run_id(identity) != content["id"] or not _holds(content, identity):
        raise ValueError("its values are not those that the run's id was made of")


def _holds(content: Mapping[str, Any], identity: Mapping[str, Any]) -> bool:
    """Whether all that is in both is the same; a device may have a number, and has none there."""
    return all(
        _holds(content[key], value) if isinstance(value, dict) else content[key] == value
        for key, value in identity.items()
        if key in content and key != "device"
    )


def free_bytes(folder: Path) -> int:
    return shutil.disk_usage(folder).free


def versions() -> dict[str, str]:
    """Of the packages that compute and write."""
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((x.split(":", 1)[1].strip() for x in lines if x.startswith("model name")), "")


def _code_state() -> dict[str, Any] | None:
    """Commit and diff of qkablate itself, where it runs from its own checkout."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None

    def git(*words: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(root), *words], capture_output=True, timeout=20, check=True
        )
        return done.stdout.decode("utf-8", "replace")

    try:
        diff = redacted(git("diff", "HEAD", "--", "qkablate", "conf"))  # somebody typed a key there
        return {"commit": git("rev-parse", "HEAD").strip(), "diff": diff[:1_000_000]}
    except (OSError, subprocess.SubprocessError):
        return None

"""Run: a frozen config, an id, a folder, a lease, a result.

Imports neither torch nor training, so that reports can read runs anywhere.

<out>/runs/<label>-<id>/
    config.yaml        resolved, with the identity that the id is the hash of
    tokenizer.json     description of the tokenizer
    environment.json   versions, machine, threads, code
    metrics.jsonl      one row per line: the authoritative metrics
    checkpoints/       step-00000250/ …
    branches/          checkpoints for runs of another length: see prefix.py
    start/             initial weights from another run: see training/warm_start/start.py
    predictions/       predictions at fixed positions, over training: see predictions.py
    origin.json        of an imported run: where its weights were published, with checksums
    inspection.json    of an imported run: what `inspect` has measured of it: see inspection.py
    attention_map.safetensors  attention over one text, at the end: see attention_map.py
    document_losses.safetensors  test loss by document: see document_losses.py
    result.json        written last, atomically
    lease/             the process that trains it: see lease.py
    attempts/          earlier attempts, after --rerun
"""

import dataclasses
import functools
import glob
import hashlib
import json
import os
import platform
import shlex
import shutil
import socket
import subprocess
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from qkablate import __version__
from qkablate.config import Config, Role, flatten, keys_with, read_limit
from qkablate.config.data import is_causal_text
from qkablate.disk import expand_user, write_atomic
from qkablate.errors import UserError, nearest_hint
from qkablate.redaction import redact
from qkablate.runs.lease import Lease, LeaseObserver, hold_lease, is_leased
from qkablate.runs.listing import describe_runs
from qkablate.runs.records import read_result

NUMERICS = 6  # raised whenever losses may move by a bit: old and new never share a run
CUDA_NUMERICS = 3  # the same for GPUs alone; runs of a CPU do not have it in their identity
PROJECTION = 2  # the same for the initial weights of runs that begin from a trained one
ENCODER_PROJECTION = 3  # the same where there is an encoder, whose source may be padded
_PACKAGES = ("torch", "numpy", "hydra-core", "omegaconf", "safetensors", "wandb")
# Files of an attempt. The result is moved first: from then on the run counts as unfinished.
_ATTEMPT_FILES = (
    "result.json",
    "error.txt",
    "metrics.jsonl",
    "checkpoints",
    "branches",
    "predictions",
    "attention_map.safetensors",
    "document_losses.safetensors",
    "environment.json",
    "config.yaml",
    "tokenizer.json",
    "wandb",
)

_MOST_SHOWN = 4  # runs that an ambiguous name is said to match

IMPORTED = "imported"  # the key of an identity that hashes the published weights of a run
ORIGIN_FILE = "origin.json"

EXIT_CODES = {"done": 0, "failed": 1, "diverged": 3}  # by the status in result.json


# Keys that are younger than the ids, with the values that every earlier run had.
_EARLIER = {
    "model.tied": True,
    "model.embedding_width": None,
    "model.form": "decoder",
    "model.encoder_layers": None,
    "model.encoder_d_model": None,
    "model.source": None,
    "model.mlp": "gelu",
    "model.norm_kind": "layer",
    "model.norm_eps": 1e-5,
    "model.rope_theta": 10000.0,
    "model.embedding_std": 0.02,
    "model.position_std": 0.02,
    "optim.optimizer": "adamw",
    "optim.momentum": 0.95,
    "variant.sites": "all",
    "variant.rope_dims": None,
}


def identity(
    config: Config,
    *,
    data_fingerprint: str,
    vocabulary: int,
    device: str,
    kernel: str,
    circuits_from_outside: Mapping[str, str],
) -> dict[str, Any]:
    """Return everything that can change the result.

    The config must be resolved; circuits from outside the package count by the hash of their file.
    """
    values = flatten(config)
    frozen: dict[str, Any] = {}
    for name in keys_with(Role.IDENTITY):
        section, _, leaf = name.rpartition(".")
        (frozen.setdefault(section, {}) if section else frozen)[leaf] = values[name]
    for name, default in _EARLIER.items():
        section, _, leaf = name.partition(".")
        if frozen[section][leaf] == default:
            del frozen[section][leaf]
    if config.train.evaluate_test:  # changes no number
        del frozen["train"]["evaluate_test"]
    if not config.train.evaluate_test or read_limit(config, "test") is None:
        del frozen["train"]["test_tokens"]  # none of the test split is read, or all
    if config.train.grad_accum > 1 and not is_causal_text(config.data):
        frozen["micro_batches"] = "by answers"  # earlier runs gave each the same weight
    if config.train.vmap != 1:  # on a GPU kernels may depend on how many runs there are
        frozen["vmap"] = "yes" if device == "cpu" else config.train.vmap
    if config.init_from.run is None:
        del frozen["init_from"]
    else:
        is_decoder = config.model.form == "decoder"
        frozen["init_from"]["projection"] = PROJECTION if is_decoder else ENCODER_PROJECTION
    frozen |= {"circuits_from_outside": dict(circuits_from_outside)}
    frozen |= {"device": device, "kernel": kernel, "numerics": NUMERICS}
    if device != "cpu":
        frozen["cuda_numerics"] = CUDA_NUMERICS
    return frozen | {"data_fingerprint": data_fingerprint, "vocabulary": vocabulary}


def run_id(identity: Mapping[str, Any]) -> str:
    """Return the id of a run: a short hash of its identity."""
    text = json.dumps(identity, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


PROJECTION_ERRORS = "projection_losses.json"  # of a fine-tuned run, by layer
# Keys whose values a label shows.
LABEL_KEYS = ("variant", "model.d_model", "model.heads", "seed")


def label(config: Config) -> str:
    """Return the readable part of a run's name; its id is what distinguishes it."""
    model, prefix = config.model, "" if config.init_from.run is None else "finetuned-"
    return f"{prefix}{config.variant.name}-d{model.d_model}-h{model.heads}-s{config.seed}"


class Run:
    """Folder of a run."""

    def __init__(self, out: str | Path, label: str, id: str) -> None:
        self.folder = Path(out).expanduser() / "runs" / f"{label}-{id}"
        if not self.folder.exists():  # the id decides: under another label it is the same run
            self.folder = next(self.folder.parent.glob(f"*-{id}"), self.folder)
        self.id, self.label = id, self.folder.name.removesuffix(f"-{id}")
        self.metrics = self.folder / "metrics.jsonl"
        self.checkpoints = self.folder / "checkpoints"
        self.start = self.folder / "start"  # with PROJECTION_ERRORS

    @property
    def result(self) -> dict[str, Any] | None:
        """Result of the run, if it has ended."""
        return read_result(self.folder)

    @property
    def attempt(self) -> int:
        """Number of the attempt: 1, and one more for every `restart`."""
        return count_attempts(self.folder)

    @contextmanager
    def hold_lease(self, observer: LeaseObserver | None = None) -> Iterator[Lease]:
        """Hold the run's lease; raise AlreadyRunning if another process does."""
        branches = self.folder / "branches"
        for folder in (self.folder, self.checkpoints, self.start, self.folder / "predictions"):
            refuse_links(folder)
        for folder in (branches, branches / "predictions"):
            refuse_links(folder)
        with hold_lease(self.folder, observer) as lease:
            self._archive_attempt()
            yield lease

    @property
    def is_leased(self) -> bool:
        """Return whether a process is training the run."""
        return is_leased(self.folder)

    def restart(self) -> None:
        """Move the files of this attempt into attempts/, to train again."""
        if (self.folder / "config.yaml").exists():
            (self.folder / f"attempt-{self.attempt}.tmp").mkdir(exist_ok=True)
            self._archive_attempt()

    def _archive_attempt(self) -> None:
        """Complete a `restart`, also one that was killed."""
        for temporary in self.folder.glob("attempt-*.tmp"):
            for name in _ATTEMPT_FILES:
                if (self.folder / name).exists():
                    (self.folder / name).rename(temporary / name)
            (self.folder / "attempts").mkdir(exist_ok=True)
            number = temporary.stem.removeprefix("attempt-")
            temporary.rename(self.folder / "attempts" / number)

    def freeze(self, config: Config, identity: Mapping[str, Any]) -> None:
        """Write the config with its identity, of which the id is the hash."""
        from omegaconf import OmegaConf

        content = {**dataclasses.asdict(config), "id": self.id, "identity": dict(identity)}
        write_atomic(self.folder / "config.yaml", OmegaConf.to_yaml(OmegaConf.create(content)))


def count_attempts(folder: Path) -> int:
    """Return the number of a run's attempt: 1, and one more for every `restart`."""
    earlier = [int(p.name) for p in (folder / "attempts").glob("*") if p.name.isdecimal()]
    return 1 + max(earlier, default=0)


def refuse_links(folder: Path) -> None:
    """Raise UserError if writing into the folder could follow a link or block on a FIFO."""
    if folder.is_dir():
        for entry in os.scandir(folder):
            if entry.is_symlink():
                raise UserError(f"'{entry.path}' is a link; qkablate does not write through links")
            if not (entry.is_file() or entry.is_dir()):
                raise UserError(f"'{entry.path}' is neither a file nor a folder")


def find_run(word: str, out: str | Path = "outputs") -> Path:
    """Return the folder of a run, given as a folder or as the start of its name or id."""
    found = find_runs(word, out)
    _reject_several(word, found, "runs")
    return found[0]


def find_runs(word: str, out: str | Path = "outputs") -> list[Path]:
    """Return the folders of the runs that a word may mean, the newest first; at least one."""
    if not word:
        raise UserError("give a run: its folder, or the start of its name or id")
    folder = os.path.expanduser(word)  # os.path accepts any text
    if os.path.isfile(os.path.join(folder, "config.yaml")):
        return [Path(folder)]
    runs = expand_user("out", str(out)) / "runs"
    paths = sorted(runs.glob("*/config.yaml"), key=lambda path: (-path.stat().st_mtime, path))
    names = [path.parent.name for path in paths]
    if matches := _matching_names(word, names):
        return [runs / name for name in matches]
    if os.path.isdir(folder):
        raise UserError(f"'{word}' is not a run: it has no config.yaml")
    parts = {part for name in names for part in (name, name.rpartition("-")[0], name.split("-")[0])}
    raise no_match("run", word, runs.parent, parts)


_START = {"run": "qkablate train", "sweep": "qkablate sweep sweep=quick"}


class NoMatch(UserError):
    """No run, sweep or claim has the name that was given."""


def no_match(kind: str, word: str | None, out: Path, known: Collection[str]) -> NoMatch:
    """Return the error that no `known` name in `out` matches a word; without one, there is none."""
    if word and "/" in word and not os.path.exists(path := os.path.expanduser(word)):
        parent = os.path.dirname(path.rstrip("/"))
        beside = [found.rstrip("/") for found in glob.glob(os.path.join(glob.escape(parent), "*/"))]
        return NoMatch(f"there is no folder '{word}'{nearest_hint(path.rstrip('/'), beside)}")
    text = f"there is no {kind} " + (f"'{word}' " if word is not None else "") + f"in '{out}'"
    if known:
        where = "" if str(out) == "outputs" else f" {shlex.quote(f'out={out}')}"
        lists = f"; `qkablate ls{where}` lists them"
        return NoMatch(text + (nearest_hint(word or "", known) or lists))
    start = f"; start one: {_START[kind]}" if kind in _START else ""
    return NoMatch(f"{text}{' (it has none)' if out.exists() else ', which does not exist'}{start}")


def match_name(word: str, folders: list[Path], plural: str) -> Path | None:
    """Return the folder `<label>-<id>` that a word abbreviates; UserError if it is ambiguous."""
    by_name = {folder.name: folder for folder in folders}
    matches = [by_name[name] for name in _matching_names(word, [*by_name])]
    _reject_several(word, matches, plural)
    return matches[0] if matches else None


def _matching_names(word: str, names: list[str]) -> list[str]:
    """Return the names that a word may abbreviate."""
    candidates = (  # exact labels first: `…-s1` is also the start of `…-s10-…`
        [name for name in names if name == word],
        [name for name in names if name.rpartition("-")[0] == word],
        [name for name in names if name.startswith(f"{word}-")],  # standard, not standard_r…
        [name for name in names if name.startswith(word)],
        [name for name in names if name.rpartition("-")[2].startswith(word)],
    )
    return next(filter(None, candidates), [])


def _reject_several(word: str, matches: list[Path], plural: str) -> None:
    """Raise UserError for a word that several folders match; it describes the first of them."""
    if len(matches) <= 1:
        return
    shown = matches[:_MOST_SHOWN]
    texts = describe_runs(shown) if plural == "runs" else [folder.name for folder in shown]
    more = f" and {len(matches) - len(shown)} more" if len(matches) > len(shown) else ""
    found = f"{len(matches)} {plural}: {', '.join(texts)}{more}"
    hint = "give more of one of these names"
    if plural in ("runs", "sweeps"):
        out = str(matches[0].parent.parent)
        words = ["qkablate", "ls", word, *([] if out == "outputs" else [f"out={out}"])]
        hint += f", or list them: {shlex.join(words)}"
    raise UserError(f"'{word}' matches {found}; {hint}")


def describe_environment(
    config: Config, device: Mapping[str, Any], processes: int = 1
) -> dict[str, Any]:
    """Return versions, machine and code state; no environment variables, which may hold keys."""
    return {
        "versions": {"python": platform.python_version(), **package_versions()},
        "machine": {
            "host": socket.gethostname(),
            "platform": platform.platform(),
            "cpu": read_cpu_name(),
            "cores": count_cores(),
            **device,
        },
        "threads": config.threads,
        "processes": processes,
        "code": _code_state(),
    }


def check_identity(content: Mapping[str, Any]) -> None:
    """Raise ValueError if a frozen config does not match the id of its run."""
    identity = content["identity"]
    if run_id(identity) != content["id"] or not _is_consistent(content, identity):
        raise ValueError("its values do not match the id of the run")


def _is_consistent(content: Mapping[str, Any], identity: Mapping[str, Any]) -> bool:
    """Return whether values in both are equal, but for the device, whose number may differ."""
    return all(
        _is_consistent(content[key], value) if isinstance(value, dict) else content[key] == value
        for key, value in identity.items()
        if key in content and key != "device"
    )


def free_bytes(folder: Path) -> int:
    """Return the free space of the disk."""
    return shutil.disk_usage(folder).free


def package_versions() -> dict[str, str]:
    """Return the versions of the packages that compute and write."""
    versions = {"qkablate": __version__}  # also where it runs from a folder
    for name in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


def count_cores() -> int:
    """Return the number of cores that this process may use."""
    affinity = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ()
    return len(affinity) or os.cpu_count() or 1


def read_cpu_name() -> str:
    """Return the model name of the CPU."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((x.split(":", 1)[1].strip() for x in lines if x.startswith("model name")), "")


def _code_state() -> dict[str, Any] | None:
    """Return commit and diff of qkablate, if it runs from its own checkout."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    with suppress(OSError, subprocess.SubprocessError):
        return _read_code_state(root)
    return None


@functools.cache
def _read_code_state(root: Path) -> dict[str, Any]:
    """Return commit and diff as they are when this process first asks, early in its life."""

    def git(*words: str) -> str:
        completed = subprocess.run(
            ["git", "-C", str(root), *words], capture_output=True, timeout=20, check=True
        )
        return completed.stdout.decode("utf-8", "replace")

    diff = redact(git("diff", "HEAD", "--", "qkablate", "conf"))  # it may hold a key
    return {"commit": git("rev-parse", "HEAD").strip(), "diff": diff[:1_000_000]}

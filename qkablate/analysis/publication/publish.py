"""Runs of a registered claim, from their folders into an archive."""

import json
import os
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from qkablate.analysis.claims.registry import FILE, Registration
from qkablate.analysis.publication.archive import SUFFIX, Archive, read_archive, refuse_malformed
from qkablate.analysis.publication.encoding import Fields, pack_curve
from qkablate.analysis.study.loss_curves import TRAIN, VAL
from qkablate.analysis.study.study import Record, as_dict, edits_checksum, make_record
from qkablate.config import Config, flatten
from qkablate.disk import hold_lock, make_folder, read_file
from qkablate.errors import UserError
from qkablate.runs.records import list_environments, read_json
from qkablate.strict_json import hash_json, parse_json
from qkablate.sweeps.planning.manifest import MANIFEST_FILE, SweepRun, read_manifest
from qkablate.sweeps.running.solo_results import FILE as SOLO
from qkablate.sweeps.running.state import SweepState

# Fields of result.json that the manifest has, or that are of the machine alone.
_DROPPED = {"id", "label", "variant", "seed", "d_model", "heads", "layers", "context", "wandb"}
_DROPPED |= {
    "published",
    "bits_per_byte",
    "tokens_per_second",
    "metrics_sha256",
    "sha256",
    "eval_tokens",
}
_REPEATED = {"loss", "bits_per_byte", "accuracy", "exact"}  # measures that stand in the result, too
_MACHINE = ("cpu", "cores", "cpu_capability", "device")
MeanLosses = tuple[list[float], list[int]]  # and tokens, by document
LOCK = ".lock"  # held by a process that adds runs to a folder
_DOCUMENT_SCALE = 1000  # of a sum of losses in nats
VAL_SCALE, TRAIN_SCALE = 100_000, 10_000  # of a reading


def publish(registration: Registration, folder: Path) -> tuple[Path, int, int]:
    """Add the runs that have ended to the claim's archive; return it, all runs and the new ones."""
    if not has_ended_runs(registration):
        raise UserError(f"{registration.claim.name}: no run of it has ended")
    make_folder(folder)
    with hold_lock(folder / LOCK, waits_for=f"another `qkablate publish` into '{folder}'"):
        path = folder / f"{registration.claim.folder_name}{SUFFIX}"
        existing = read_archive(path) if path.exists() else None
        known = {*existing.runs} if existing else set()
        archive = collect(registration, known)
        if existing is not None:
            with refuse_malformed(path):
                existing.merge(archive)
            archive = existing
        return archive.write(folder), len(archive.runs), len(archive.runs) - len(known)


def has_ended_runs(registration: Registration) -> bool:
    """Return whether a run of a claim has ended, and can be published."""
    return any(any(_ended(_read_state(sweep))) for sweep in registration.sweeps.values())


def _read_state(sweep: Path) -> SweepState:
    sweep_state = SweepState(read_manifest(sweep))
    sweep_state.refresh()
    return sweep_state


def _ended(sweep_state: SweepState) -> Iterator[str]:
    """Yield the ids of the runs that have ended."""
    for id, state in sweep_state.states.items():
        if state.status in ("done", "diverged"):
            yield id


def collect(registration: Registration, known: Collection[str] = ()) -> Archive:
    """Read the runs of a claim that have ended; those `known` are in the sums of no document."""
    archive = Archive(read_json(registration.folder / FILE))
    for n, sweep in registration.sweeps.items():
        sweep_state = _read_state(sweep)
        archive.looks[str(n)] = {
            "manifest": without_folders(parse_json(read_file(sweep / MANIFEST_FILE))),
            "solo": read_json(sweep / SOLO),
        }
        for id in _ended(sweep_state):
            if id not in archive.runs:
                record = make_record(sweep_state.states[id])
                archive.runs[id] = _pack_run(archive, record)
                if id not in known and not record.run.tuning:
                    _add_documents(archive, record)
    return archive


def without_folders(manifest: Fields) -> Fields:
    """Return a manifest without the accounts and folders of the machine on which nothing depends.

    The paths of data, circuits and parent runs stay: from them the runs are trained again. Of other
    paths in the command the last name stays.
    """
    manifest.pop("sha256")
    defaults = flatten(Config())
    local = [key for key in defaults if key in ("out", "data.cache") or key.startswith("tracking.")]
    for arm in manifest["arms"].values():
        for key in local:
            section, _, name = key.rpartition(".")
            (arm["config"][section] if section else arm["config"])[name] = defaults[key]
            arm["overrides"].pop(key, None)
    command = [word for word in manifest["command"] if word.partition("=")[0] not in local]
    words = [word if word.partition("=")[0] in defaults else _last_name(word) for word in command]
    return manifest | {"out": "outputs", "command": words}


def _last_name(word: str) -> str:
    """Return a word whose path, as in --from=PATH, is its last name alone."""
    flag, sign, path = word.rpartition("=")
    return f"{flag}{sign}{os.path.basename(os.path.normpath(path))}" if "/" in path else word


def _pack_run(archive: Archive, record: Record) -> Fields:
    result = read_json(record.folder / "result.json")
    packed = {key: value for key, value in result.items() if key not in _DROPPED}
    measures = packed.pop("measures", None) or {}
    packed["data"] = {k: v for k, v in as_dict(packed.get("data")).items() if k != "cache"}
    if any(set(values) - _REPEATED for values in measures.values() if isinstance(values, dict)):
        packed["measures"] = measures
    run: Fields = {
        "arm": record.run.arm,
        "tuning": record.run.tuning,
        "changes": dict(record.run.changes),
        "result": packed,
        "environment": _add_environment(archive, record.folder),
    }
    if not record.run.tuning:
        if record.final_train_loss is not None:
            packed["final_train_loss"] = record.final_train_loss
        curves = record.loss_curves
        run["val"] = pack_curve(curves["start"] | curves[VAL], VAL_SCALE)
        run["train"] = pack_curve(curves[TRAIN], TRAIN_SCALE)
    return run


def _add_environment(archive: Archive, folder: Path) -> str | None:
    """Add versions, machine and commit of a run, without the name of its host; return their key."""
    environments = list_environments(read_json(folder / "environment.json"))
    if not environments:
        return None
    kept, *resumed = map(_pack_environment, environments)
    kept |= {"resumed": resumed} if resumed else {}
    key = hash_json(kept)[:12]
    archive.environments[key] = kept
    return key


def _pack_environment(environment: Mapping[str, Any]) -> Fields:
    versions, machine, code = (
        as_dict(environment.get(part)) for part in ("versions", "machine", "code")
    )
    return {
        "versions": versions,
        "machine": {key: machine[key] for key in _MACHINE if key in machine},
        "code": {
            "commit": code.get("commit"),
            "edits": edits_checksum(code),
        },
    }


def document_group(run: SweepRun | Fields) -> str:
    """Return the key of the runs that are averaged with a run: its arm and rates."""
    arm, changes = (
        (run.arm, run.changes) if isinstance(run, SweepRun) else (run["arm"], run["changes"])
    )
    rates: Mapping[str, Any] = {k: v for k, v in changes.items() if not k.startswith("seed")}
    return f"{arm} {json.dumps(rates, sort_keys=True)}"


def _add_documents(archive: Archive, record: Record) -> None:
    """Add a run to the sums of its arm: whole numbers, so that their order changes nothing."""
    found = record.document_losses
    if found is None:
        return
    tokens = [int(n) for n in found.tokens]
    key = hash_json(tokens)[:12]
    losses = [round(float(loss) * _DOCUMENT_SCALE) for loss in found.losses]
    group = document_group(record.run)
    sums = archive.documents.setdefault(
        group, {"tokens": key, "losses": [0] * len(losses), "runs": 0}
    )
    if sums["tokens"] == key:
        archive.document_tokens[key] = tokens
        sums["losses"] = [a + b for a, b in zip(sums["losses"], losses, strict=True)]
        sums["runs"] += 1


def mean_document_losses(archive: Archive) -> dict[str, MeanLosses]:
    """Return the mean losses by document of the groups of runs that all have them."""
    runs = Counter(
        document_group(run)
        for run in archive.runs.values()
        if not run["tuning"] and run["result"]["status"] == "done"
    )
    return {
        group: (
            [loss / (_DOCUMENT_SCALE * runs[group]) for loss in sums["losses"]],
            archive.document_tokens[sums["tokens"]],
        )
        for group, sums in archive.documents.items()
        if runs[group] and sums["runs"] == runs[group]
    }

"""Archives as folders of runs, sweeps and claims, which every command reads as it reads others.

They are kept in the user's cache, by the content of the archives.
"""

import dataclasses
import json
import os
import secrets
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

from qkablate import __version__
from qkablate.analysis.claims.registry import FILE as CLAIM_FILE
from qkablate.analysis.claims.registry import Registration, read_registration
from qkablate.analysis.publication.archive import (
    FORMAT,
    NAME,
    Archive,
    find_archives,
    is_of_today,
    read_archive,
    refuse_malformed,
)
from qkablate.analysis.publication.encoding import Fields, unpack_curve
from qkablate.analysis.publication.publish import (
    MeanLosses,
    document_group,
    mean_document_losses,
)
from qkablate.disk import link_atomic, read_file
from qkablate.errors import UserError
from qkablate.runs.document_losses import DocumentLossesHeader, write_document_losses
from qkablate.runs.records import encode_row, sha256
from qkablate.runs.run import CUDA_NUMERICS, NUMERICS, identity
from qkablate.strict_json import hash_json
from qkablate.sweeps.planning.manifest import MANIFEST_FILE, Arm, SweepRun, read_manifest
from qkablate.sweeps.running.solo_results import FILE as SOLO_FILE


def open_archives(word: str | Path) -> Path | None:
    """Return the folder with the unpacked archives that a word names; None if it names none."""
    paths = find_archives(word)
    return unpack_archives(paths) if paths else None


def unpack_archives(paths: Iterable[Path]) -> Path:
    """Return a folder in the user's cache with the runs, sweeps and claims of some archives."""
    paths = list(paths)
    archives = [read_archive(path) for path in paths]
    digests = sorted(sha256(read_file(path)) for path in paths)
    versions = [FORMAT, __version__, NUMERICS, CUDA_NUMERICS]
    key = sha256(json.dumps([*versions, digests]).encode())[:24]
    folder = archive_cache() / key
    if not folder.is_dir():
        temporary = folder.with_name(f"{key}.{secrets.token_hex(4)}.tmp")
        try:
            temporary.mkdir(parents=True)
            for archive in archives:
                with refuse_malformed(archive.name):
                    write_archive(archive, temporary)
            temporary.rename(folder)
        except OSError as error:
            if not folder.is_dir():  # no other process was faster
                raise UserError(
                    f"'{folder.parent}' cannot be written: {error.strerror}; XDG_CACHE_HOME names"
                    " another cache"
                ) from None
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return folder


def unpacked_claims(folder: Path) -> list[Registration]:
    """Return the claims of unpacked archives, by name."""
    paths = sorted((folder / "claims").glob(f"*/{CLAIM_FILE}"))
    return [read_registration(path.parent) for path in paths]


def archive_cache() -> Path:
    """Return the folder of unpacked archives in the user's cache."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "qkablate" / "archives"


def write_archive(archive: Archive, out: Path) -> None:
    """Write the claim, its sweeps and its runs into a folder of outputs."""
    arms: list[Mapping[str, Arm]] = []  # of each look
    registered = out / "claims" / archive.name
    registered.mkdir(parents=True, exist_ok=True)
    _write_json(registered / CLAIM_FILE, archive.registration)
    for n, look in archive.looks.items():
        manifest = look["manifest"]
        if not manifest["runs"]:
            raise ValueError("a sweep has no runs")
        sweep = out / "sweeps" / f"{manifest['name']}-{manifest['id']}"
        sweep.mkdir(parents=True, exist_ok=True)
        _write_json(sweep / MANIFEST_FILE, manifest | {"sha256": hash_json(manifest)})
        own = read_manifest(sweep).arms
        if not is_of_today(manifest):  # ids become today's, by which the runs are found
            runs = [
                r | {"id": _plan(_find_arm(archive, r, r["id"], [own]), r).id}
                for r in manifest["runs"]
            ]
            renamed = manifest | {"runs": runs}
            _write_json(sweep / MANIFEST_FILE, renamed | {"sha256": hash_json(renamed)})
        if look["solo"] is not None:
            _write_json(sweep / SOLO_FILE, look["solo"])
        arms.append(own)
        link_atomic(registered / f"n{int(n)}", sweep)
    keeps_ids = all(is_of_today(look["manifest"]) for look in archive.looks.values())
    read_registration(registered)  # UserError, or one of MALFORMED, unless it is as it was written
    documents = mean_document_losses(archive)
    for id, run in archive.runs.items():
        arm = _find_arm(archive, run, id, arms)
        planned = _plan(arm, run)
        if (keeps_ids and planned.id != id) or not NAME.fullmatch(planned.name):
            raise UserError(f"{archive.name}: run {id} does not have the settings of its id")
        folder = out / "runs" / planned.name
        write_run(archive, run, arm, planned, folder, documents)


def _find_arm(archive: Archive, run: Fields, id: str, looks: list[Mapping[str, Arm]]) -> Arm:
    """Return the arm of a run; UserError if there is none.

    An arm of one name may have other settings in each look, such as its precision: then it is the
    one whose run has the id.
    """
    arms = [arms[run["arm"]] for arms in looks if run["arm"] in arms]
    if not arms:
        raise UserError(f"{archive.name}: a run is of no arm of its sweeps")
    return next((arm for arm in arms if _plan(arm, run).id == id), arms[-1])


def _plan(arm: Arm, run: Fields) -> SweepRun:
    """Return a published run as its arm plans it today."""
    return arm.run(run["changes"], tuning=run["tuning"])


def write_run(
    archive: Archive,
    run: Fields,
    arm: Arm,
    planned: SweepRun,
    folder: Path,
    documents: Mapping[str, MeanLosses],
) -> None:
    """Write the files of a published run into a folder, the result last."""
    config = arm.config_of(run["changes"], tuning=run["tuning"])
    folder.mkdir(parents=True, exist_ok=True)
    content = {**dataclasses.asdict(config), "id": planned.id}
    _write_json(folder / "config.yaml", content | {"identity": identity(config, **arm.facts)})
    if (environment := archive.environments.get(run["environment"] or "")) is not None:
        _write_json(folder / "environment.json", environment)
    if "val" in run:
        rows = [("val/loss", unpack_curve(run["val"])), ("train/loss", unpack_curve(run["train"]))]
        per_step = arm.tokens // int(config.train.steps)
        (folder / "metrics.jsonl").write_bytes(
            b"".join(
                encode_row({"step": tokens // per_step, "tokens": tokens, name: loss}) + b"\n"
                for name, curve in rows
                for tokens, loss in curve.items()
            )
        )
    result = {"id": planned.id, "label": planned.label, **run["result"]}
    result |= {"published": archive.name}
    found = None if run["tuning"] else documents.get(document_group(run))
    if result["status"] == "done" and found is not None:
        header = DocumentLossesHeader(planned.id, str(result.get("data_fingerprint")))
        write_document_losses(folder, header, *found)
    _write_json(folder / "result.json", result | {"sha256": hash_json(result)})


def _write_json(path: Path, content: Fields) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False) + "\n", encoding="utf-8")

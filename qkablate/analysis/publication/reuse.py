"""Published runs that count as done where a claim is run: they are not trained again."""

import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from qkablate.analysis.claims.claim import Claim
from qkablate.analysis.publication.archive import (
    Archive,
    figures,
    find_archives,
    is_of_today,
    read_archive,
    refuse_malformed,
)
from qkablate.analysis.publication.encoding import Fields
from qkablate.analysis.publication.publish import mean_document_losses
from qkablate.analysis.publication.unpack import write_run
from qkablate.disk import read_file, write_atomic
from qkablate.errors import UserError, print_stderr
from qkablate.runs.lease import AlreadyRunning
from qkablate.runs.run import Run
from qkablate.sweeps.planning.manifest import Manifest, SweepRun
from qkablate.table import format_list

# Keys that are chosen for a machine, and are part of a run's id.
_MACHINE_KEYS = ("matmul", "precision", "compile", "train.vmap")
_RESULT = "result.json"


def find_archive(folder: str, claim: Claim) -> Archive:
    """Return the archive of a claim in a folder; UserError if there is none."""
    paths = find_archives(folder)
    if not paths:
        raise UserError(f"--from: '{folder}' holds no archive of runs")
    if own := _paths_of(paths, claim):
        return read_archive(own[0])
    names = ", ".join(path.name.partition(".")[0] for path in paths[:4])
    raise UserError(f"--from: '{folder}' has no runs of {claim.folder_name}; it has {names}")


def is_published(folder: str, claim: Claim) -> bool:
    """Return whether a folder has an archive of a claim."""
    return bool(_paths_of(find_archives(folder), claim))


def _paths_of(archives: list[Path], claim: Claim) -> list[Path]:
    return [path for path in archives if path.name.startswith(f"{claim.folder_name}.")]


def machine_settings(archive: Archive, given: Mapping[str, Any]) -> list[str]:
    """Return the settings of the published runs that this machine might choose otherwise.

    With them another type of CPU plans the same runs, and those that are published count.
    """
    words = []
    with refuse_malformed(archive.name):
        arms = [arm for look in archive.looks.values() for arm in look["manifest"]["arms"].values()]
        for key in _MACHINE_KEYS:
            values = {str(_setting(arm["config"], key)).lower() for arm in arms}
            if key == "train.vmap" and len(values) > 1:  # some arms cannot be vmapped
                values = {_typed_value(archive, key) or "auto"}
            if len(values) == 1 and key not in given:
                words.append(f"{key}={values.pop()}")
        device = {str(arm["facts"]["device"]) for arm in arms}
        if len(device) == 1 and "device" not in given:
            words.append(f"device={device.pop()}")
    return words


def _typed_value(archive: Archive, key: str) -> str:
    """Return the value of a key in the command of the published runs; '' if it was not given."""
    words = [word for look in archive.looks.values() for word in look["manifest"]["command"]]
    typed = [word.partition("=")[2] for word in words if word.startswith(f"{key}=")]
    return typed[-1] if typed else ""


def _setting(config: Fields, key: str) -> Any:
    """Return a value of a published config; early ones have no train.vmap."""
    return config["train"].get("vmap", 1) if key == "train.vmap" else config[key]


def count_published(archive: Archive, manifest: Manifest) -> int:
    """Return how many published runs count as done.

    UserError unless all are of the plan, and those that have ended here have the same figures:
    otherwise what is trained with them could not be published.
    """
    with refuse_malformed(archive.name):
        total = len(archive.runs)
        count = sum(_is_planned(manifest, id, run) for id, run in archive.runs.items())
        if count < total:
            raise UserError(
                f"--from: {count or 'none'} of the {total} published runs"
                f" {'are' if count > 1 else 'is'} of this plan: {_explain(archive, manifest)}"
            )
        for id, (_, target) in _find_targets(archive, manifest).items():
            own = target.result if _has_ended(target) else None
            if own is not None and figures({"result": own}) != figures(archive.runs[id]):
                raise UserError(
                    f"--from: {target.folder.name} has ended in '{manifest.out}' with other figures"
                    " than the published ones; use another out=FOLDER"
                )
    return count


def follow_search(archive: Archive, manifest: Manifest, seeds: int) -> Manifest:
    """Return the plan with the published search for learning rates: its runs and its rules.

    Other rules would choose other rates than the published ones, after these were known.
    """
    if not manifest.finals:
        return manifest
    with refuse_malformed(archive.name):
        look = archive.looks.get(str(seeds)) or next(iter(archive.looks.values()))
        published = look["manifest"]
        if published["arms"].keys() != manifest.arms.keys():
            return manifest  # count_published says how they differ
        arms = {
            name: replace(arm, has_circuit_lr=published["arms"][name].get("has_circuit_lr", False))
            for name, arm in manifest.arms.items()
        }
        runs = [arms[r["arm"]].run(r["changes"], tuning=r["tuning"]) for r in published["runs"]]
        rules = published.get("tuning_rules", 1)
        return replace(manifest, arms=arms, runs=runs, tuning_rules=rules)


def note_tuning(archive: Archive, manifest: Manifest) -> None:
    """Warn about arms with one more tuned rate than when the archive was written."""
    with refuse_malformed(archive.name):
        published = [look["manifest"]["arms"] for look in archive.looks.values()]
        names = [
            name
            for name, arm in manifest.arms.items()
            if manifest.finals and arm.has_circuit_lr and arm.matched_lr == 1
            if any(name in arms and not arms[name].get("has_circuit_lr") for arms in published)
        ]
    if names:
        print_stderr(
            f"qkablate: {format_list(names)} had one tuned learning rate when these runs were"
            " published, and has two here (variant.lr, of queries and keys): it is tuned anew"
        )


def add_runs(archive: Archive, manifest: Manifest) -> None:
    """Write the published runs of a plan into its folder of runs, unless they are done there."""
    with refuse_malformed(archive.name):
        documents = mean_document_losses(archive)
    for id, (planned, target) in _find_targets(archive, manifest).items():
        if _has_ended(target):
            continue
        run, arm = archive.runs[id], manifest.arms[planned.arm]
        try:
            with target.hold_lease(), tempfile.TemporaryDirectory() as temporary:
                if _has_ended(target):  # meanwhile
                    continue
                target.restart()  # what was begun here is kept in attempts/
                folder = Path(temporary)
                with refuse_malformed(archive.name):
                    write_run(archive, run, arm, planned, folder, documents)
                names = sorted((path.name for path in folder.iterdir()), key=_RESULT.__eq__)
                for name in names:
                    write_atomic(target.folder / name, read_file(folder / name))
        except AlreadyRunning:
            continue  # it is trained now


def _find_targets(archive: Archive, manifest: Manifest) -> dict[str, tuple[SweepRun, Run]]:
    """Return the published runs as they are planned, and as they are here, by id."""
    targets = {}
    for id, run in archive.runs.items():
        planned = manifest.arms[run["arm"]].run(run["changes"], tuning=run["tuning"])
        targets[id] = planned, Run(manifest.out, planned.label, planned.id)
    return targets


def _has_ended(run: Run) -> bool:
    return (run.result or {}).get("status") in ("done", "diverged")


def _is_planned(manifest: Manifest, id: str, run: Fields) -> bool:
    arm = manifest.arms.get(run["arm"])
    return arm is not None and arm.run(run["changes"], tuning=run["tuning"]).id == id


def _explain(archive: Archive, manifest: Manifest) -> str:
    """Return the first setting in which a published arm differs from the plan's."""
    for look in archive.looks.values():
        for name, published in look["manifest"]["arms"].items():
            if (arm := manifest.arms.get(name)) is None:
                continue
            if not is_of_today(look["manifest"]):
                return "their numbers are of another version of qkablate"
            for key, value in arm.facts.items():
                if published["facts"].get(key) != value:
                    return f"{key} is {published['facts'].get(key)} there, and {value} here"
    return "their arms differ"

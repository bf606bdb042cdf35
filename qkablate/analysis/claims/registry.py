"""Claims on disk: each is written down before its first run, and never changed.

<out>/claims/<name>-<scale>-<hash>/
    claim.json   the claim as it was registered, its hash and its seeds
    n8           a link to the sweep with eight seeds: one for each look
"""

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from qkablate import __version__
from qkablate.analysis.claims.claim import Claim, PartSpec
from qkablate.analysis.comparison.ranking import AXES
from qkablate.config import GridConfig
from qkablate.disk import make_folder
from qkablate.errors import UserError
from qkablate.runs.records import read_json, write_json

FORMAT = 1
FILE = "claim.json"


@dataclass(frozen=True)
class Registration:
    """A claim as it was written down."""

    folder: Path
    claim: Claim
    when: str
    earlier: frozenset[str]  # hashes of claims of its name that had results when it was written

    @property
    def sweeps(self) -> dict[int, Path]:
        """Of its looks, by rising number of seeds."""
        linked = self._linked()
        return {n: linked[n] for n in sorted(linked) if (linked[n] / "manifest.json").exists()}

    @property
    def lost(self) -> list[Path]:
        """Sweeps that were begun, and are not there."""
        return [sweep for n, sweep in sorted(self._linked().items()) if n not in self.sweeps]

    def _linked(self) -> dict[int, Path]:
        links = [link for link in self.folder.glob("n*") if link.name[1:].isdecimal()]
        return {
            # Not as seen through the link: a sweep's runs lie beside its own folder.
            int(link.name[1:]): Path(os.path.normpath(self.folder / os.readlink(link)))
            for link in links
            if link.is_symlink()
        }

    def add(self, seeds: int, sweep: Path) -> None:
        """Link the sweep of a look, of which there is one."""
        path = self.folder / f"n{seeds}"
        if path.is_symlink() and path.resolve() != sweep.resolve():
            raise UserError(
                f"'{path}' is {path.resolve().name}, and here it would be {sweep.name}: data,"
                " device, precision or this program differ; another out=FOLDER keeps them apart"
            )
        target = os.path.relpath(sweep.resolve(), self.folder.resolve())
        temporary = self.folder / f".{path.name}.{os.getpid()}"
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(target)
        temporary.replace(path)


def grid_of(claim: Claim, seeds: int) -> tuple[GridConfig, list[str]]:
    """The claim as a sweep: its grid, and the words that go with it."""
    grid = GridConfig(
        name=f"claim-{claim.name}",
        fixed=dict(claim.grid),
        axes={"seed": ",".join(map(str, claim.seeds_of("final", seeds)))},
        baseline=claim.baseline,
        where=list(claim.where),
        tune=claim.tuning_seeds > 0,
        tuning_seeds=claim.seeds_of("tuning", max(1, claim.tuning_seeds)),
    )
    used = dict.fromkeys(AXES[spec.axis] for spec in claim.parts.values())
    return grid, [f"control={','.join(used)}"]


def register(claim: Claim, out: str) -> Registration:
    """Write it down, unless that was done before."""
    folder = Path(out).expanduser() / "claims" / claim.folder_name
    if not (folder / FILE).exists():
        make_folder(folder)
        most = claim.seeds[-1]
        write_json(
            folder / FILE,
            {
                "format": FORMAT,
                "registered": datetime.now(UTC).isoformat(),
                "version": __version__,
                "hash": claim.hash,
                "source": claim.source,
                "claim": claim.content,
                "final_seeds": claim.seeds_of("final", most),
                "tuning_seeds": claim.seeds_of("tuning", claim.tuning_seeds),
                "earlier": [
                    one.claim.hash for one in registrations(out, claim.name) if _has_results(one)
                ],
            },
        )
    return read_registration(folder)


def read_registration(folder: Path) -> Registration:
    content = read_json(folder / FILE)
    try:
        if content["format"] != FORMAT:
            raise UserError(
                f"'{folder / FILE}' was written by qkablate {content['version']} (format"
                f" {content['format']}); this is {__version__} and reads format {FORMAT}"
            )
        own = dict(content["claim"])
        own["parts"] = {key: PartSpec(**part) for key, part in own["parts"].items()}
        own["seeds"], own["where"] = tuple(own["seeds"]), tuple(own["where"])
        claim = Claim(source=str(content["source"]), **own)
        if claim.hash != content["hash"] or claim.folder_name != folder.resolve().name:
            raise ValueError
    except (KeyError, TypeError, ValueError, AttributeError):
        raise UserError(f"'{folder / FILE}' is damaged, or was changed by hand") from None
    when, earlier = str(content.get("registered")), content.get("earlier")
    return Registration(folder, claim, when, frozenset(map(str, earlier or ())))


def registrations(out: str, name: str) -> list[Registration]:
    """Of all claims of that name, oldest first."""
    folders = [folder for folder in _folders(out) if _name(folder) == name]
    return sorted(map(read_registration, folders), key=lambda one: one.when)


def registered_names(out: str) -> list[str]:
    return sorted({*map(_name, _folders(out))})


def _folders(out: str) -> list[Path]:
    return [file.parent for file in Path(out).expanduser().glob(f"claims/*-*-*/{FILE}")]


def _name(folder: Path) -> str:
    return folder.name.rsplit("-", 2)[0]


def changes(before: Claim, now: Claim) -> list[str]:
    """What was edited: `parts.within.margin: 0.01 → 0.02`."""
    one, other = (dict(_leaves(json.loads(json.dumps(c.content)))) for c in (before, now))
    return [
        f"{key}: {one.get(key, 'unsaid')} → {other.get(key, 'unsaid')}"
        for key in dict.fromkeys([*one, *other])
        if one.get(key) != other.get(key)
    ]


def _leaves(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _leaves(inner, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, value


def edited_since(claim: Claim, before: list[Registration]) -> list[str]:
    """Why a verdict on this claim is no confirmation: it was worded otherwise when runs of it were
    already there. Another scale, or other settings typed on the command line, is another claim.
    """
    own = [one for one in before if one.claim.hash == claim.hash]
    return [
        f"edited after the runs of {other.when}: {'; '.join(changes(other.claim, claim))}"
        for other in before
        if other.claim.hash != claim.hash
        and other.claim.scale == claim.scale
        and other.claim.words == claim.words
        and (other.claim.hash in own[0].earlier if own else _has_results(other))
    ]


def _has_results(registration: Registration) -> bool:
    sweeps = registration.sweeps.values()
    return any(any(sweep.glob("runs/*/result.json")) for sweep in sweeps)

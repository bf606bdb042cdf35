"""Claims on disk: each is registered before its first run, and never changed.

<out>/claims/<name>-<scale>-<hash>/
    claim.json   the claim as it was registered, its hash and its seeds
    n8           a link to the sweep with eight seeds: one for each look
"""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from qkablate import __version__
from qkablate.analysis.claims.claim import Claim
from qkablate.config import GridConfig
from qkablate.disk import link_atomic, make_folder
from qkablate.errors import UserError
from qkablate.runs.records import read_json, write_json
from qkablate.strict_json import from_json
from qkablate.sweeps.planning.manifest import read_manifest

FORMAT = 2
STATISTICS = 2  # raised with the rules by which claims are judged; 1: before it was recorded
FILE = "claim.json"


@dataclass(frozen=True)
class Registration:
    """A registered claim."""

    folder: Path
    claim: Claim
    when: str
    earlier: frozenset[str]  # hashes of claims of its name that already had results
    statistics: int = STATISTICS  # the rules when it was registered

    @property
    def sweeps(self) -> dict[int, Path]:
        """Sweeps of its looks, by rising number of seeds."""
        found = self._find_links().items()
        return {n: sweep for n, sweep in found if (sweep / "manifest.json").exists()}

    @property
    def lost(self) -> list[Path]:
        """Linked sweeps that no longer exist."""
        return [sweep for n, sweep in self._find_links().items() if n not in self.sweeps]

    def _find_links(self) -> dict[int, Path]:
        # Resolved by hand: the runs lie beside the sweep's folder, not beside the link.
        links = {
            int(link.name[1:]): Path(os.path.normpath(self.folder / os.readlink(link)))
            for link in self.folder.glob("n*")
            if link.name[1:].isdecimal() and link.is_symlink()
        }
        return dict(sorted(links.items()))

    def add(self, seeds: int, sweep: Path) -> None:
        """Link the sweep of a look; UserError if it has another one."""
        path = self.folder / f"n{seeds}"
        if path.is_symlink() and path.resolve() != sweep.resolve():
            raise UserError(
                f"'{path}' is sweep {path.resolve().name}, but these settings give {sweep.name}:"
                " data, device, matmul, precision, train.vmap or the version of qkablate differ;"
                " use another out=FOLDER"
            )
        link_atomic(path, sweep)


def claim_grid(claim: Claim, seeds: int) -> tuple[GridConfig, list[str]]:
    """Return the grid of the claim's sweep and the arguments that go with it."""
    grid = GridConfig(
        name=f"claim-{claim.name}",
        fixed=dict(claim.grid),
        axes={"seed": ",".join(map(str, claim.seeds_of("final", seeds)))},
        also=[dict(settings) for settings in claim.tasks.values()] or None,
        baseline=claim.baseline,
        filter=list(claim.filter),
        tune=claim.tuning_seeds > 0,
        tuning_seeds=claim.seeds_of("tuning", max(1, claim.tuning_seeds)),
    )
    used = dict.fromkeys(spec.control for spec in claim.parts.values())
    return grid, [f"control={','.join(used)}"]


def register_claim(
    claim: Claim, out: str, published: Mapping[str, Any] | None = None
) -> Registration:
    """Register a claim, unless it already is; `published` is how others have registered it."""
    folder = Path(out).expanduser() / "claims" / claim.folder_name
    known = {*((published or {}).get("earlier") or ())}  # to those who have published it
    if not (folder / FILE).exists():
        make_folder(folder)
        others = find_registrations(out, claim.name)
        earlier = [r.claim.hash for r in others if _is_wording_of(r, claim) and _has_results(r)]
        content = published or {
            "format": FORMAT,
            "statistics": STATISTICS,
            "registered": datetime.now(UTC).isoformat(),
            "version": __version__,
            "hash": claim.hash,
            "source": claim.source,
            "claim": claim.content,
            "final_seeds": claim.seeds_of("final", claim.seeds[-1]),
            "tuning_seeds": claim.seeds_of("tuning", claim.tuning_seeds),
        }
        write_json(folder / FILE, {**content, "earlier": sorted({*known, *earlier})})
    registration = read_registration(folder)
    if known <= registration.earlier:
        return registration
    content = read_json(folder / FILE) | {"earlier": sorted(known | registration.earlier)}
    write_json(folder / FILE, content)
    return read_registration(folder)


def read_registration(folder: Path) -> Registration:
    """Read a registered claim; UserError if it is damaged or was changed."""
    content = read_json(folder / FILE)
    try:
        if content["format"] != FORMAT:
            raise UserError(
                f"'{folder / FILE}' was written by qkablate {content['version']} (format"
                f" {content['format']}); this is {__version__} and reads format {FORMAT}"
            )
        claim = from_json(Claim, {**content["claim"], "source": content["source"]})
        if claim.hash != content["hash"] or claim.folder_name != folder.resolve().name:
            raise ValueError
    except (KeyError, TypeError, ValueError, AttributeError):
        raise UserError(f"'{folder / FILE}' is damaged, or was changed by hand") from None
    earlier = frozenset(map(str, content.get("earlier") or ()))
    statistics = content.get("statistics")
    statistics = statistics if type(statistics) is int else 1
    return Registration(folder, claim, str(content.get("registered")), earlier, statistics)


def find_registrations(out: str, name: str) -> list[Registration]:
    """Return the registrations of a name, the oldest first."""
    folders = [folder for folder, registered in _folders(out) if registered == name]
    return sorted(map(read_registration, folders), key=lambda registration: registration.when)


def registered_names(out: str) -> list[str]:
    """Return the names of all registered claims."""
    return sorted({name for _, name in _folders(out)})


def _folders(out: str) -> list[tuple[Path, str]]:
    """Return the folder and the name of each registered claim."""
    folders = (file.parent for file in Path(out).expanduser().glob(f"claims/*-*-*/{FILE}"))
    return [(folder, folder.name.rsplit("-", 2)[0]) for folder in folders]


def describe_changes(before: Claim, now: Claim) -> list[str]:
    """Describe edits of a claim: `parts.within.margin: 0.01 → 0.02`."""
    old, new = (dict(_leaves(json.loads(json.dumps(c.content)))) for c in (before, now))
    return [
        f"{key}: {old.get(key, 'unset')} → {new.get(key, 'unset')}"
        for key in dict.fromkeys([*old, *new])
        if old.get(key) != new.get(key)
    ]


def _leaves(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _leaves(inner, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, value


def edits_since(claim: Claim, before: list[Registration]) -> list[str]:
    """Return the edits of a claim since it had results; with them, its verdict confirms nothing."""
    same = [other for other in before if other.claim.hash == claim.hash]
    edits = [
        f"edited after the runs of {other.when}: {'; '.join(describe_changes(other.claim, claim))}"
        for other in before
        if other.claim.hash != claim.hash
        and _is_wording_of(other, claim)
        and (_is_earlier(other, same[0]) if same else _has_results(other))
    ]
    known = {other.claim.hash for other in before}
    lost = sorted(same[0].earlier - known) if same else []
    return edits + [
        f"edited after the runs of an earlier wording ({hash[:12]}), which is not here"
        for hash in lost
    ]


def _is_wording_of(registration: Registration, claim: Claim) -> bool:
    """Return whether a claim was registered at the same scale, with the same keys."""
    other = registration.claim
    return (other.scale, other.words) == (claim.scale, claim.words)


def _is_earlier(other: Registration, registration: Registration) -> bool:
    """Return whether a claim had results before another was registered, here or elsewhere."""
    if other.claim.hash in registration.earlier:
        return True
    with suppress(ValueError, TypeError):  # a time that is not known
        registered = datetime.fromisoformat(registration.when)
        return any(ended < registered for ended in _find_ends(other))
    return False


def _find_ends(registration: Registration) -> Iterator[datetime]:
    """Yield when the runs of a claim have ended, as far as it is known."""
    for sweep in registration.sweeps.values():
        planned = {run.id for run in read_manifest(sweep).runs}
        for path in sweep.parent.parent.glob("runs/*/result.json"):
            if path.parent.name.rpartition("-")[2] in planned:
                with suppress(ValueError):
                    yield datetime.fromisoformat(str((read_json(path) or {}).get("ended")))


def _has_results(registration: Registration) -> bool:
    return any(any(s.glob("runs/*/result.json")) for s in registration.sweeps.values())

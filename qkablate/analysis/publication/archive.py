"""Archives: the runs of a claim in one compressed JSON file, the same bytes for the same runs.

<folder>/<name>-<scale>-<hash>.json.gz
    registration   claim.json as it was registered: the claim, its hash, seeds and time
    looks          manifest of the sweep of each look, and what was measured alone
    environments   CPU, versions and commit of the runs
    runs           every run, of tuning too: id, rates, seeds, result; curves of the final runs
    documents      sum of the losses by document over the final runs of each arm
<folder>/SHA256SUMS

Left out is what makes runs large: checkpoints, predictions, diagnostics and attention maps. Losses
at the end are exact; curves are thinned to MAX_READINGS and rounded.
"""

import gzip
import json
import os
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from qkablate import __version__
from qkablate.analysis.publication.encoding import Fields, from_columns, to_columns
from qkablate.disk import make_folder, read_file, write_atomic
from qkablate.errors import UserError, sanitize
from qkablate.runs.records import is_number, sha256
from qkablate.runs.run import CUDA_NUMERICS, NUMERICS
from qkablate.strict_json import hash_json, parse_json

FORMAT = 1
SUFFIX = ".json.gz"
CHECKSUMS = "SHA256SUMS"
_MAX_BYTES = 2**28  # of an archive's JSON, and of what its runs have in common, for each run
_MAX_FIELDS = 10**7  # of all runs
_MAX_DOCUMENT_LOSSES = 10**8  # of all runs
NAME = re.compile(r"\w[\w+-]*")  # of a claim, a sweep, a run: they become folders
# Errors of content that is not what `Archive.write` writes.
MALFORMED: tuple[type[Exception], ...] = (
    *(ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError),
    zlib.error,
)
_UNREADABLE: tuple[type[Exception], ...] = (OSError, EOFError, *MALFORMED)
_FIGURES = ("status", "steps", "data_fingerprint", "diverged_at")
_SORTED = ("environments", "documents", "document_tokens")


@dataclass
class Archive:
    """The published runs of one claim."""

    registration: Fields
    looks: dict[str, Fields] = field(default_factory=dict)  # by their number of seeds
    environments: dict[str, Fields] = field(default_factory=dict)  # by their hash
    runs: dict[str, Fields] = field(default_factory=dict)  # by id
    documents: dict[str, Fields] = field(default_factory=dict)  # by arm and rates
    document_tokens: dict[str, list[int]] = field(default_factory=dict)  # by their hash

    @property
    def name(self) -> str:
        """Name of the folder of the registration."""
        claim = self.registration["claim"]
        return f"{claim['name']}-{claim['scale']}-{self.registration['hash'][:12]}"

    def merge(self, new: "Archive") -> None:
        """Add the runs of another archive of the claim; UserError if a run has other figures."""
        if new.name != self.name:
            raise ValueError("archives of two claims")
        for id in self.runs.keys() & new.runs.keys():
            if (here := figures(new.runs[id])) != (there := figures(self.runs[id])):
                raise UserError(
                    f"{self.name}: run {id} is published with {_format_difference(there, here)};"
                    " one id, two results: leave one of them out"
                )
        for seeds, look in new.looks.items():
            known = self.looks.setdefault(seeds, look)
            if known["manifest"]["id"] != look["manifest"]["id"]:
                raise UserError(
                    f"{self.name}: with {seeds} seeds {known['manifest']['id']} is published, and"
                    f" here it is {look['manifest']['id']}: data, device, matmul, precision,"
                    " train.vmap or this program differ; `qkablate claim run … --from FOLDER`"
                    " trains with the settings of the published runs"
                )
            rules = [one["manifest"].get("tuning_rules", 1) for one in (known, look)]
            if rules[0] != rules[1] and known["manifest"]["finals"]:  # rates were chosen
                raise UserError(
                    f"{self.name}: its learning rates are published as chosen by rules {rules[0]},"
                    f" and here by rules {rules[1]}; `qkablate claim run … --from FOLDER"
                    " out=ANOTHER` chooses them as published"
                )
            if _rows(look) > _rows(known):
                known["solo"] = look["solo"]
        added = new.runs.keys() - self.runs.keys()
        self.runs |= {id: new.runs[id] for id in added}
        self.environments |= new.environments
        self.document_tokens |= new.document_tokens
        for group, sums in new.documents.items():
            earlier = self.documents.get(group)
            if earlier is None:
                self.documents[group] = sums
            elif earlier["tokens"] == sums["tokens"] and added:
                pairs = zip(earlier["losses"], sums["losses"], strict=True)
                earlier["losses"] = [a + b for a, b in pairs]
                earlier["runs"] += sums["runs"]
        # One of the two may know of results of an earlier wording that the other does not.
        wordings = {h for one in (self, new) for h in one.registration.get("earlier") or ()}
        if new.registration["registered"] < self.registration["registered"]:
            self.registration = new.registration
        if wordings:
            self.registration = {**self.registration, "earlier": sorted(wordings)}

    def encode(self) -> bytes:
        """Return the archive as JSON with its checksum."""
        content = {
            "format": FORMAT,
            "version": __version__,
            "registration": self.registration,
            "looks": dict(sorted(self.looks.items(), key=lambda look: int(look[0]))),
            **{key: dict(sorted(getattr(self, key).items())) for key in _SORTED},
            "runs": to_columns(self.runs),
        }
        content["sha256"] = hash_json(content)
        # A manifest keeps its order: that of the arms is part of its id.
        return json.dumps(content, ensure_ascii=False).encode()

    def write(self, folder: Path) -> Path:
        """Write the archive into the folder, with its line in SHA256SUMS; return its path.

        The lines of other archives stay as they are. Only one process at a time may write.
        """
        make_folder(folder)
        path, content = folder / f"{self.name}{SUFFIX}", self.encode()
        before = read_file(path) if path.exists() else None
        changed = before is None or gzip.decompress(before) != content
        compressed = gzip.compress(content, 9, mtime=0) if changed or before is None else before
        if changed:  # both sums are listed until it is replaced: whoever kills this harms nothing
            listed = [sha256(before)] if before is not None else []
            _write_checksums(folder, path.name, [*listed, sha256(compressed)])
            write_atomic(path, compressed)
        _write_checksums(folder, path.name, [sha256(compressed)])
        return path


def is_of_today(manifest: Fields) -> bool:
    """Return whether the ids of a published sweep's runs are those of this version."""
    # The first archives do not say which numerics a GPU had.
    theirs = manifest["numerics"], manifest.get("cuda_numerics", 3)
    return theirs == (NUMERICS, CUDA_NUMERICS)


def figures(run: Fields) -> Fields:
    """Return the figures of a run that are equal wherever it was trained."""
    result = run["result"]
    return {"loss": result["loss"], **{key: result.get(key) for key in _FIGURES}}


def _format_difference(there: Fields, here: Fields) -> str:
    key = next(key for key in there if there[key] != here.get(key))
    return f"{key} {there[key]}, and here has {here.get(key)}"


def _rows(look: Fields) -> int:
    return len((look["solo"] or {}).get("rows", ()))


def archive_paths(folder: Path) -> list[Path]:
    """Return the archives of a folder, by name."""
    return sorted(path for path in folder.glob(f"*{SUFFIX}") if path.is_file())


def find_archives(word: str | Path) -> list[Path]:
    """Return the archive, or those of the folder, that a word names; [] if it names none."""
    path = Path(os.path.expanduser(word))
    try:
        if path.is_dir():
            return archive_paths(path)
        return [path] if path.name.endswith(SUFFIX) and path.is_file() else []
    except (OSError, ValueError):
        return []


def refuse_archives(out: str) -> None:
    """Raise UserError for a folder of archives as that of new runs: it would hide them."""
    if find_archives(out):
        raise UserError(
            f"out: '{out}' has archives of published runs, which are read only; give another folder"
        )


def read_archive(path: Path) -> Archive:
    """Read an archive; UserError if it is damaged, or not as SHA256SUMS has it."""
    try:
        compressed = read_file(path)
        checks = _read_checksums(path.parent)
        if path.name in checks and sha256(compressed) not in checks[path.name]:
            raise ValueError(f"its checksum is not that of {CHECKSUMS}")
        with gzip.open(path) as file:
            content = parse_json(file.read(_MAX_BYTES))
        if content.get("format") != FORMAT:
            raise UserError(
                f"'{path}' was written by qkablate {content.get('version')} (format"
                f" {content.get('format')}); this is {__version__} and reads format {FORMAT}"
            )
        if content.pop("sha256") != hash_json(content):
            raise ValueError("its checksum does not match")
        del content["format"], content["version"]
        _check_size(content)
        archive = Archive(**content)
        archive.runs = from_columns(content["runs"])
        _check_fields(archive)
    except _UNREADABLE as error:
        raise damaged(path, error) from None
    if path.name != (name := f"{archive.name}{SUFFIX}"):
        raise UserError(f"'{path}' holds the runs of another name: rename it to {name}")
    return archive


def _check_size(content: Fields) -> None:
    """Raise ValueError if runs or sums that are stored once would fill memory or disk as files."""
    tables = content["runs"]
    arms = [arm for look in content["looks"].values() for arm in look["manifest"]["arms"].values()]
    largest = max((len(json.dumps(arm)) for arm in arms), default=0)
    documents = max((len(sums["losses"]) for sums in content["documents"].values()), default=0)
    fields = characters = losses = 0
    for table in tables:
        count = len(table["ids"])
        fields += count * (len(table["equal"]) + len(table["each"]))
        characters += count * (len(json.dumps(table["equal"])) + largest)
        losses += count * documents
    if fields > _MAX_FIELDS or characters > _MAX_BYTES or losses > _MAX_DOCUMENT_LOSSES:
        raise ValueError("unpacked, its runs would be too large")


def _check_fields(archive: Archive) -> None:
    """Raise one of MALFORMED unless names are valid, and fields that others read are there."""
    names = [archive.name, *archive.runs]
    names += [look["manifest"][k] for look in archive.looks.values() for k in ("name", "id")]
    if bad := [name for name in names if not NAME.fullmatch(name)]:
        raise ValueError(f"{bad[0]!r} is not a valid name")
    if not archive.looks or not all(n.isdecimal() for n in archive.looks):
        raise ValueError("it has no sweep, or one without a number of seeds")
    for environment in archive.environments.values():
        later = environment.get("resumed", [])
        parts = [part for each in (environment, *later) for part in each.items()]
        if not all(isinstance(value, dict) for key, value in parts if key != "resumed"):
            raise ValueError("an environment is malformed")
    for run in archive.runs.values():
        archive.environments.get(run["environment"] or "")
        loss = figures(run)["loss"]
        if run["result"]["status"] == "done" and not is_number(loss["val"]):
            raise ValueError("a run that is done has no loss")


@contextmanager
def refuse_malformed(name: Path | str) -> Iterator[None]:
    """Raise UserError instead of an error that malformed content of an archive causes."""
    try:
        yield
    except MALFORMED as error:
        raise damaged(name, error) from None


def damaged(path: Path | str, error: BaseException) -> UserError:
    """Return the error of an archive that cannot be read."""
    reason = sanitize(" ".join(str(error).split()) or type(error).__name__)
    return UserError(f"'{path}' is not an archive of runs, or is damaged: {reason[:200]}")


def _read_checksums(folder: Path) -> dict[str, list[str]]:
    """Return the sums by the name of the file; two while an archive is being replaced."""
    checks: dict[str, list[str]] = {}
    with suppress(FileNotFoundError):
        for line in read_file(folder / CHECKSUMS).decode(errors="replace").splitlines():
            digest, _, name = line.partition(" ")
            checks.setdefault(name.strip(), []).append(digest)
    return checks


def _write_checksums(folder: Path, name: str, digests: list[str]) -> None:
    """Write the sums of one archive, and those of others that are listed and there."""
    checks = {k: v for k, v in _read_checksums(folder).items() if (folder / k).is_file()}
    checks[name] = digests
    lines = [f"{digest}  {k}\n" for k in sorted(checks) for digest in checks[k]]
    write_atomic(folder / CHECKSUMS, "".join(lines))

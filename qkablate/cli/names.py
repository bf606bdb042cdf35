"""Names of runs, sweeps and claims: list them, and find what a word means."""

import glob
import os
import re
import shlex
from collections.abc import Collection
from pathlib import Path

from qkablate.cli.arguments import claim_name
from qkablate.errors import UserError, nearest_hint, show_folder_as
from qkablate.runs.listing import find_run_folders
from qkablate.runs.run import match_name, no_match

# The file that makes a folder one of its kind.
KINDS = {"sweep": "manifest.json", "claim": "claim.json", "run": "config.yaml"}

Source = tuple[str, list[Path]]  # sweep, claim or runs, and the folders


def known_names(kind: str, out: str | Path = "outputs") -> list[str]:
    """Return the folder names of the runs, sweeps or claims in `out`."""
    folders = Path(out).expanduser().glob(f"{kind}s/*/{KINDS[kind]}")
    return sorted(path.parent.name for path in folders)


def kind_of_folder(folder: str, kinds: Collection[str]) -> str | None:
    """Return the kind of a folder, or None where it is none of these kinds."""
    files = ((kind, os.path.join(folder, KINDS[kind])) for kind in KINDS if kind in kinds)
    return next((kind for kind, file in files if os.path.isfile(file)), None)


def find_by_name(word: str, out: str, kinds: Collection[str]) -> tuple[str, Path]:
    """Return the kind and the folder that a word names: itself, or how a name or id begins."""
    folder = os.path.expanduser(word)  # os.path accepts any text
    if kind := kind_of_folder(folder, kinds):
        return kind, Path(folder)
    root = Path(out).expanduser()
    matches: list[tuple[str, Path]] = []
    ambiguous: list[str] = []
    known: set[str] = set()
    for kind in (kind for kind in KINDS if kind in kinds):
        paths = list(root.glob(f"{kind}s/*/{KINDS[kind]}"))
        folders = [path.parent for path in sorted(paths, key=lambda path: -path.stat().st_mtime)]
        for name in (folder.name for folder in folders):
            known |= {name, name.rpartition("-")[0], name.split("-")[0]}
        try:
            if word and (match := match_name(word, folders, f"{kind}s")):
                matches.append((kind, match))
        except UserError as error:
            ambiguous.append(str(error))
    if not matches and not ambiguous and "sweep" in kinds and "claim" not in kinds:
        sweeps = [f for f in root.glob(f"sweeps/claim-{glob.escape(word)}-*") if f.is_dir()]
        if sweeps:  # of the claim of this name
            return "sweep", max(sweeps, key=lambda folder: folder.stat().st_mtime)
    if len(matches) == 1 and not ambiguous:
        return matches[0]
    if matches or ambiguous:
        found = " and ".join(f"a {kind} ({folder.name})" for kind, folder in matches)
        texts = [f"'{word}' is {found}"] * bool(matches) + ambiguous
        hint = ["give the folder"] * (len(matches) + len(ambiguous) > 1)
        raise UserError("; ".join([*texts, *hint]))
    if "claim" in kinds:
        from qkablate.analysis.claims.parse import claim_names
        from qkablate.analysis.publication.archive import refuse_archives

        if word in claim_names():
            refuse_archives(out)
            where = "" if str(root) == "outputs" else f" {shlex.quote(f'out={root}')}"
            raise UserError(
                f"claim {word} has not been run in '{root}': qkablate claim run {word}{where}"
            )
        if not known and (nearest := nearest_hint(word, claim_names())):
            raise UserError(
                f"there is no claim '{word}'{nearest}, and none has been run in '{root}'"
            )
    *first, last = [kind for kind in KINDS if kind in kinds]
    choice = f"{', '.join(first)} or {last}" if first else last
    raise no_match(choice, word, root, known)


def find_sources(words: list[str], out: str, kinds: Collection[str] = KINDS) -> list[Source]:
    """Return what the words name: each sweep and each claim, and all runs together.

    Without words it is the newest sweep or, where there is none, every run.
    """
    from qkablate.sweeps.planning import manifest

    if not words:
        folders = find_run_folders(out)
        if folders and not known_names("sweep", out):
            return [("runs", folders)]
        return [("sweep", [manifest.find_sweep(None, out)])]
    sources: dict[Path | None, Source] = {}  # all runs are one source
    known: set[Path] = set()
    found = (source for word in words for source in _find_sources(word, out, kinds))
    for kind, folder in found:
        path = folder.resolve()
        if path not in known:
            known.add(path)
            key, name = (None, "runs") if kind == "run" else (path, kind)
            sources.setdefault(key, (name, []))[1].append(folder)
    return [*sources.values()]


_RUN_FILES = ["result.json", "metrics.jsonl", "checkpoints", "environment.json", "output.log"]
_RUN_FILES += ["lease", "attempts"]


def _find_sources(word: str, out: str, kinds: Collection[str]) -> list[tuple[str, Path]]:
    """Return what a word names: of archives every claim, or the sweep that counts for it.

    Claims come in the order of the study's questions.
    """
    from qkablate.analysis.publication.archive import find_archives

    if paths := find_archives(word):
        from qkablate.analysis.claims.judgement import counting_sweep
        from qkablate.analysis.publication.unpack import unpack_archives, unpacked_claims
        from qkablate.report.study.questions import rank_claim

        unpacked = unpack_archives(paths)
        show_folder_as(str(unpacked), word)
        claims = unpacked_claims(unpacked)
        claims.sort(key=lambda registration: rank_claim(registration.claim.name))
        if "claim" in kinds:
            return [("claim", claim.folder) for claim in claims]
        return [("sweep", counting_sweep(claim)) for claim in claims]
    return [_find_source(word, out, kinds)]


def _find_source(word: str, out: str, kinds: Collection[str]) -> tuple[str, Path]:
    folder = os.path.expanduser(word)
    if kind := kind_of_folder(folder, kinds):
        return kind, Path(folder)
    has_id = re.search(r"-[0-9a-f]{12}$", os.path.basename(os.path.normpath(folder)))
    if any(os.path.exists(os.path.join(folder, name)) for name in _RUN_FILES) or (
        has_id and os.path.isdir(folder)
    ):
        return "run", Path(folder)  # just started, or damaged: the report will say so
    return find_by_name(claim_name(word), out, kinds)

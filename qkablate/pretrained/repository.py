"""The files of a published model: in a folder, on the Hub, or in its local cache.

Only config.json, safetensors files and, of a GPT-2, vocab.json are read or downloaded; no code and
no pickle.
"""

import contextlib
import json
import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qkablate.data.network import is_reachable
from qkablate.disk import open_file
from qkablate.errors import UserError, nearest_hint, print_stderr, sanitize
from qkablate.strict_json import parse_json

NAMES = {
    name: f"openai-community/{name}" for name in ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")
}
CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
VOCABULARY = "vocab.json"  # ids of tokens
_MAX_JSON_BYTES = 2**24
_MAX_SHARDS = 1000
_SHARD = re.compile(r"[\w-][\w.-]{0,200}\.safetensors", re.ASCII)
_REVISION = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)*", re.ASCII)
_TIMEOUT = 2.0  # seconds for the Hub's answer about a repository
_ANSWERS = ("GatedRepoError", "RevisionNotFoundError", "RepositoryNotFoundError")  # of the Hub
_PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json", "model.bin")


@dataclass(frozen=True)
class Repository:
    """A published model: where it came from, and its files here."""

    repository: str | None  # its name on the Hub
    revision: str | None  # the commit there
    typed: str  # what the user typed
    folder: Path

    @property
    def name(self) -> str:
        """A name for the run."""
        last = (self.repository or os.path.abspath(os.path.expanduser(self.typed))).split("/")[-1]
        return re.sub(r"[^\w.-]+", "-", last, flags=re.ASCII).strip("-._")[:60] or "imported"

    def read_config(self) -> Any:
        """Return the content of config.json."""
        return _read_json(self.folder, CONFIG)

    def read_vocabulary(self) -> Any:
        """Return the ids of its tokens, where it has a file of them; None otherwise."""
        is_there = (self.folder / VOCABULARY).is_file()
        return _read_json(self.folder, VOCABULARY) if is_there else None

    def weight_files(self) -> list[Path]:
        """Return the files of the weights, in the order of their names."""
        if (self.folder / WEIGHTS).is_file():
            return [self.folder / WEIGHTS]
        if not (self.folder / INDEX).is_file():
            self._refuse_without_weights()
        names = shard_names(_read_json(self.folder, INDEX))
        for name in names:
            if not (self.folder / name).is_file():
                raise UserError(f"{self._place} has no {name}, which its {INDEX} names")
        return [self.folder / name for name in names]

    @property
    def _place(self) -> str:
        """Return where the files are, for messages."""
        if self.repository is None:
            return f"'{sanitize(self.typed)}'"
        return f"{self.repository} in HF_HOME"  # other programs may have loaded a part of it

    def _refuse_without_weights(self) -> None:
        if any((self.folder / name).exists() for name in _PICKLES):
            raise UserError(
                f"{self._place} has its weights as a pickle alone, which may run code and is never"
                " read; convert it with transformers: model.save_pretrained('FOLDER') writes"
                f" {WEIGHTS}"
            )
        raise UserError(f"{self._place} has no {WEIGHTS} and no {INDEX}")


def shard_names(index: Any) -> list[str]:
    """Return the files that an index names; UserError unless each is a file beside it."""
    places = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(places, dict) or not places:
        raise UserError(f"{INDEX}: it has no weight_map")
    names = {*map(str, places.values())}
    for name in sorted(names):
        if not _SHARD.fullmatch(name):
            raise UserError(
                f"{INDEX}: '{sanitize(name[:80])}' is not the name of a safetensors file beside it"
            )
    if len(names) > _MAX_SHARDS:
        raise UserError(f"{INDEX}: it names {len(names):,} files (allowed: {_MAX_SHARDS:,})")
    return sorted(names)


def find_repository(word: str, revision: str | None = None) -> Repository:
    """Return the model that a word names: a folder, a known name, or OWNER/NAME on the Hub."""
    folder = os.path.expanduser(word)
    if os.path.isdir(folder):
        if revision is not None:
            raise UserError(
                f"revision: only a model on the Hub has one; leave it out for the folder"
                f" '{sanitize(word)}'"
            )
        if not os.path.isfile(os.path.join(folder, CONFIG)):
            raise UserError(f"'{sanitize(word)}' is not a published model: it has no {CONFIG}")
        return Repository(None, None, word, Path(folder))
    name = NAMES.get(word, word)
    if not re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", name, re.ASCII):
        raise UserError(
            f"'{sanitize(word[:80])}'{nearest_hint(word, NAMES)} is neither a folder nor a name on"
            " the Hub; write"
            f" {', '.join(NAMES)}, OWNER/NAME or a folder with {CONFIG} and {WEIGHTS}"
        )
    if revision is not None and not _REVISION.fullmatch(revision):
        raise UserError(
            f"revision: '{sanitize(revision[:80])}' is not the name of a branch, tag or commit"
        )
    import huggingface_hub.constants as constants

    if not constants.HF_HUB_OFFLINE and is_reachable(constants.ENDPOINT):
        return _download(word, name, revision)
    return _find_cached(word, name, revision)


def _find_cached(word: str, name: str, revision: str | None) -> Repository:
    """Return the model as the Hub's cache on this machine has it."""
    from huggingface_hub import try_to_load_from_cache

    path = try_to_load_from_cache(name, CONFIG, revision=revision)
    if not isinstance(path, str):
        what = f"revision '{sanitize(revision)}' of {name}" if revision else name
        raise UserError(
            f"{what} cannot be reached: no network, and HF_HOME does not have it; run this on a"
            " machine with a network and copy its HF_HOME here, or give a folder with its"
            " config.json and model.safetensors"
        )
    folder = Path(path).parent
    return Repository(name, folder.name, word, folder)


def _download(word: str, name: str, revision: str | None) -> Repository:
    """Download the config and the weights into the Hub's cache, unless they are there."""
    import huggingface_hub

    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # an error is one line, ours
    revision = revision or "main"
    try:
        info = huggingface_hub.HfApi().model_info(name, revision=revision, timeout=_TIMEOUT)
        files = {file.rfilename for file in info.siblings or ()}
        if CONFIG not in files:
            raise UserError(f"{name} has no {CONFIG}: it is no model of transformers")
        # By its branch, so that the cache knows the commit of that where there is no network.
        folder = _load(name, CONFIG, revision).parent
        commit, config = folder.name, _read_json(folder, CONFIG)
        if VOCABULARY in files and isinstance(config, dict) and config.get("model_type") == "gpt2":
            _load(name, VOCABULARY, commit)
        if WEIGHTS in files:
            _load(name, WEIGHTS, commit)
        elif INDEX in files:
            for shard in shard_names(_read_json(_load(name, INDEX, commit).parent, INDEX)):
                if shard not in files:
                    raise UserError(f"{name} has no {shard}, which its {INDEX} names")
                _load(name, shard, commit)
        elif any(file in files for file in _PICKLES):
            raise UserError(
                f"{name} has its weights as a pickle alone, which may run code and is never read;"
                f" look for a repository with {WEIGHTS}"
            )
        else:
            raise UserError(f"{name} has no {WEIGHTS}")
        return Repository(name, commit, word, folder)
    except UserError:
        raise
    except Exception as error:  # of its client: the network, the disk, or an answer of another kind
        explanation = _explain(name, revision, error)
        if type(error).__name__ not in _ANSWERS:
            with contextlib.suppress(UserError):
                cached = _find_cached(word, name, revision)
                cached.weight_files()
                print_stderr(f"qkablate: {explanation}; HF_HOME has it")
                return cached
        raise UserError(explanation) from None


def _load(name: str, file: str, revision: str) -> Path:
    """Return a file in the Hub's cache, downloaded unless it is there."""
    import huggingface_hub as hub

    is_cached = isinstance(hub.try_to_load_from_cache(name, file, revision=revision), str)
    if not is_cached:  # the download would ask a server that does not answer for minutes
        address = hub.hf_hub_url(name, file, revision=revision)
        hub.get_hf_file_metadata(address, timeout=_TIMEOUT, endpoint=hub.constants.ENDPOINT)
    return Path(hub.hf_hub_download(name, file, revision=revision, etag_timeout=_TIMEOUT))


def _explain(name: str, revision: str | None, error: Exception) -> str:
    """Return what the Hub's refusal means."""
    kind = type(error).__name__
    if kind == "GatedRepoError":
        return f"{name}: its owner grants access on request; ask there, and set HF_TOKEN"
    if kind == "RevisionNotFoundError":
        return f"revision: {name} has no '{sanitize(str(revision))}'"
    if kind == "RepositoryNotFoundError":
        return f"{name}: the Hub has no such model, or it is private and needs HF_TOKEN"
    return f"{name}: it cannot be downloaded: {_first_line(error)}"


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return sanitize(lines[0][:200]) if lines else type(error).__name__


def _read_json(folder: Path, name: str) -> Any:
    """Return the content of a JSON file; UserError if it is none, or too large."""
    try:
        with open_file(folder / name) as file:
            content = file.read(_MAX_JSON_BYTES + 1)
    except OSError as error:
        raise UserError(f"{name}: it cannot be read: {error.strerror}") from None
    if len(content) > _MAX_JSON_BYTES:
        raise UserError(f"{name}: it is larger than {_MAX_JSON_BYTES // 2**20} MB")
    try:
        return parse_json(content)
    except ValueError:
        raise UserError(f"{name}: it is not JSON") from None


def origin_of(found: Repository, sha256: Mapping[str, str]) -> dict[str, Any]:
    """Return what origin.json says of a model, with the checksums of its files."""
    place: dict[str, Any] = {"repository": found.repository, "revision": found.revision}
    if found.repository is None:
        place = {"folder": found.typed}
    return {**place, "sha256": dict(sha256)}


def describe_origin(origin: Any) -> str:
    """Return the place that an origin.json names, which is untrusted."""
    if not isinstance(origin, dict):
        return "a checkpoint"
    name = origin.get("repository") or origin.get("folder") or "a checkpoint"
    revision = origin.get("revision")
    return sanitize(f"{name} at {str(revision)[:12]}" if revision else str(name))


def write_json_text(value: Any) -> str:
    """Return a config.json as transformers writes it."""
    return json.dumps(value, indent=2, sort_keys=True) + "\n"

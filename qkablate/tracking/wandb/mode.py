"""Whether W&B is asked at all, and where its server is; with no question to anyone."""

import configparser
import contextlib
import http.client
import netrc
import os
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from qkablate.config import TrackConfig
from qkablate.errors import UserError
from qkablate.redaction import redacted

CONNECT_SECONDS = 5  # for any answer of the server at all
# Where a key of `wandb login` stands in .netrc: W&B knows its own server by both names.
_HOSTS = {"api.wandb.ai", "api.forge.coreweave.com"}


def resolve_mode(track: TrackConfig) -> str:
    """online, offline or disabled; WANDB_MODE speaks where the config says auto."""
    mode = track.wandb
    if mode == "auto":
        mode = os.environ.get("WANDB_MODE", "auto").lower()
        mode = {"dryrun": "offline", "run": "online", "shared": "online"}.get(mode, mode)
        if mode not in ("auto", "online", "offline", "disabled"):
            raise UserError(f"WANDB_MODE: '{mode}' is not one of online, offline, disabled")
    if mode == "disabled":
        return mode
    if mode == "auto":
        return "online" if has_key() else "offline"
    if mode == "online" and not has_key():
        raise UserError(
            "track.wandb: online needs a key (`wandb login`, or WANDB_API_KEY);"
            " offline records now and syncs later"
        )
    return mode


def has_key() -> bool:
    """Whether W&B would find credentials without asking."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    path = Path(os.environ.get("NETRC") or "~/.netrc").expanduser()
    try:
        entries = netrc.netrc(path)
    except (OSError, netrc.NetrcParseError):
        return False
    try:
        own = urlsplit(_chosen_server() or "").netloc
    except ValueError:  # which `wrong_server` tells
        return False
    hosts = _HOSTS if not own or own in _HOSTS else {own}
    return any(entry[2] for entry in map(entries.authenticators, hosts) if entry)


def place(track: TrackConfig) -> tuple[str, str | None]:
    """The project, and the entity where one is named."""
    project = track.project or os.environ.get("WANDB_PROJECT") or "qkablate"
    return project, track.entity or os.environ.get("WANDB_ENTITY")


def _chosen_server() -> str | None:
    """The server's address, where a variable or `wandb login --host` gives one."""
    if os.environ.get("WANDB_BASE_URL"):
        return os.environ["WANDB_BASE_URL"]
    settings = configparser.ConfigParser(interpolation=None)
    try:
        folder = Path(os.environ.get("WANDB_CONFIG_DIR") or "~/.config/wandb").expanduser()
        settings.read(folder / "settings", encoding="utf-8")
    except (configparser.Error, ValueError):
        return None
    return settings.get("default", "base_url", fallback=None)


def server() -> str:
    """The address of the server that would be asked."""
    import wandb

    return _chosen_server() or str(wandb.Settings().base_url)


def wrong_server() -> str:
    """Why the address that was chosen is none, in W&B's eyes; '' if it may be one."""
    import wandb

    if not (url := _chosen_server()):
        return ""
    try:
        wandb.Settings(base_url=url)
    except ValueError as error:
        said = str(error).splitlines()
        why = said[2].partition(" [type=")[0].strip() if len(said) > 2 else said[0]
        where = "WANDB_BASE_URL" if os.environ.get("WANDB_BASE_URL") else "W&B's base_url"
        return redacted(f"{where}: '{url}' is no address of a server ({why})")
    return ""


def global_settings() -> Any:
    """W&B's, with what its files and variables say; silent, so that it never asks for a key. With
    a wrong address in its variable it would not even record offline.
    """
    import wandb

    with _without("WANDB_BASE_URL") if wrong_server() else contextlib.nullcontext():
        return wandb.setup(wandb.Settings(silent=True)).settings


@contextlib.contextmanager
def _without(name: str) -> Iterator[None]:
    value = os.environ.pop(name, None)
    try:
        yield
    finally:
        if value is not None:
            os.environ[name] = value


def silence_of(url: str) -> str:
    """Why nothing answers at the address, which is known in seconds; '' if anything does."""
    try:
        with urllib.request.urlopen(url, timeout=CONNECT_SECONDS):
            return ""
    except urllib.error.HTTPError:
        return ""  # an answer, too
    except (OSError, ValueError, http.client.HTTPException) as error:  # no address, or rubbish
        reason = getattr(error, "reason", error)
        if isinstance(reason, ssl.SSLCertVerificationError):
            return ""  # W&B may know more certificates than Python
        return f"{url} does not answer ({str(reason).strip() or type(reason).__name__})"

"""W&B's mode, key and server, found without a prompt."""

import configparser
import http.client
import netrc
import os
import ssl
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from qkablate.config import TrackingConfig
from qkablate.errors import UserError, not_one_of
from qkablate.redaction import redact

CONNECT_SECONDS = 5  # timeout of a probe of the server
# Names of W&B's own server in .netrc, where `wandb login` stores the key.
_HOSTS = {"api.wandb.ai", "api.forge.coreweave.com"}


def resolve_mode(tracking: TrackingConfig) -> str:
    """Return online, offline or disabled; `auto` asks WANDB_MODE, then whether there is a key."""
    mode = tracking.wandb
    if mode == "auto":
        mode = os.environ.get("WANDB_MODE", "auto").lower()
        mode = {"dryrun": "offline", "run": "online", "shared": "online"}.get(mode, mode)
        modes = ("online", "offline", "disabled")
        if mode not in ("auto", *modes):
            raise UserError(f"WANDB_MODE: {not_one_of(mode, modes)}")
    if mode == "auto":
        return "online" if has_key() else "offline"
    if mode == "online" and not has_key():
        raise UserError(
            "tracking.wandb: online needs a key (`wandb login`, or WANDB_API_KEY);"
            " offline records now and syncs later"
        )
    return mode


def has_key() -> bool:
    """Return whether W&B finds credentials without a prompt."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    path = Path(os.environ.get("NETRC") or "~/.netrc").expanduser()
    try:
        entries = netrc.netrc(path)
    except (OSError, netrc.NetrcParseError):
        return False
    try:
        host = urlsplit(_chosen_server() or "").netloc
    except ValueError:  # `server_address_error` reports it
        return False
    hosts = _HOSTS if not host or host in _HOSTS else {host}
    return any(entry[2] for entry in map(entries.authenticators, hosts) if entry)


def project_and_entity(tracking: TrackingConfig) -> tuple[str, str | None]:
    """Return the project, and the entity if one is named."""
    project = tracking.project or os.environ.get("WANDB_PROJECT") or "qkablate"
    return project, tracking.entity or os.environ.get("WANDB_ENTITY")


def _chosen_server() -> str | None:
    """Return the server's address if a variable or `wandb login --host` names one."""
    if os.environ.get("WANDB_BASE_URL"):
        return os.environ["WANDB_BASE_URL"]
    settings = configparser.ConfigParser(interpolation=None)
    try:
        folder = Path(os.environ.get("WANDB_CONFIG_DIR") or "~/.config/wandb").expanduser()
        settings.read(folder / "settings", encoding="utf-8")
    except (configparser.Error, ValueError):
        return None
    return settings.get("default", "base_url", fallback=None)


def server_address() -> str:
    """Return the address of the server in use."""
    import wandb

    return _chosen_server() or str(wandb.Settings().base_url)


def server_address_error() -> str:
    """Return why W&B rejects the chosen address, or '' if it accepts it."""
    import wandb

    url = _chosen_server()
    try:
        if url:
            wandb.Settings(base_url=url)
    except ValueError as error:
        lines = str(error).splitlines()
        reason = lines[2].partition(" [type=")[0].strip() if len(lines) > 2 else lines[0]
        source = "WANDB_BASE_URL" if os.environ.get("WANDB_BASE_URL") else "W&B's base_url"
        return redact(f"{source}: '{url}' is not the address of a server ({reason})")
    return ""


def global_settings() -> Any:
    """Return W&B's settings from its files and variables; silent, so that it never prompts.

    An invalid WANDB_BASE_URL is ignored: with it W&B would not even record offline.
    """
    import wandb

    address = os.environ.pop("WANDB_BASE_URL", None) if server_address_error() else None
    try:
        return wandb.setup(wandb.Settings(silent=True)).settings
    finally:
        if address is not None:
            os.environ["WANDB_BASE_URL"] = address


def probe_server(url: str) -> str:
    """Return why nothing answers at an address, or '' if anything does."""
    try:
        with urllib.request.urlopen(url, timeout=CONNECT_SECONDS):
            return ""
    except urllib.error.HTTPError:
        return ""  # an error page is an answer, too
    except (OSError, ValueError, http.client.HTTPException) as error:  # bad address, or not HTTP
        reason = getattr(error, "reason", error)
        if isinstance(reason, ssl.SSLCertVerificationError):
            return ""  # W&B may trust more certificates than Python
        return f"{url} does not answer ({str(reason).strip() or type(reason).__name__})"

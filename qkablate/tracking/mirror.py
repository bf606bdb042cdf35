"""Weights & Biases, a mirror of the journal: it may fail or be absent, and the run goes on.

Nothing is ever asked of the user: no key means offline, and an unreachable server does too.
"""

import configparser
import contextlib
import netrc
import os
import shlex
import ssl
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from qkablate.config import TrackConfig
from qkablate.errors import UserError
from qkablate.redaction import redacted
from qkablate.tracking.service import VARIABLE, stay_within

CONNECT_SECONDS = 5  # for any answer of the server at all
INIT_SECONDS = 10
FINISH_SECONDS = 30
# Where a key of `wandb login` stands in .netrc: W&B knows its own server by both names.
_HOSTS = {"api.wandb.ai", "api.forge.coreweave.com"}


@dataclass(frozen=True)
class Identity:
    """How the run is called in W&B."""

    id: str
    name: str
    group: str
    job_type: str
    tags: tuple[str, ...]


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
    own = urlsplit(_chosen_server() or "").netloc
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


class Mirror:
    """One W&B run. `log` and `close` never raise."""

    def __init__(
        self,
        track: TrackConfig,
        identity: Identity,
        folder: Path,
        config: dict[str, Any],
        note: Callable[[str], None],
    ) -> None:
        self._note = note
        self._run: Any = None
        self.address: str | None = None  # where to look: a URL, or the command that makes one
        mode = resolve_mode(track)
        if mode == "disabled":
            return
        self._recorded = folder.absolute() / "wandb"
        stay_within(self._recorded)
        try:
            if mode == "online" and (silence := silence_of(_global_settings().base_url)):
                self._note(f"W&B: {silence}; recording offline")
                mode = "offline"
            self._run = self._start(mode, track, identity, config)
        except Exception as error:
            self._note(f"W&B: {_first_line(error)}; recording offline instead")
            try:
                self._forget_everything()
                self._run = self._start("offline", track, identity, config)
            except Exception as again:
                self._note(f"W&B: {_first_line(again)}; going on without it")

    def log(self, row: dict[str, Any]) -> None:
        if self._run is None:
            return
        try:
            self._run.log(row, step=row["step"])
        except Exception as error:
            self._note(f"W&B: {_first_line(error)}; going on without it")
            run, self._run = self._run, None
            with contextlib.suppress(Exception):
                run.finish(exit_code=1)
            self._forget_everything()

    def table(self, name: str, columns: list[str], rows: list[list[Any]]) -> None:
        if self._run is None:
            return
        try:
            import wandb

            self._run.log({name: wandb.Table(columns=list[str | int](columns), data=rows)})
        except Exception as error:
            self._note(f"W&B: {_first_line(error)}")

    def close(self, summary: dict[str, Any], exit_code: int) -> None:
        if self._run is None:
            return
        run, self._run = self._run, None
        try:
            run.summary.update(summary)
            run.finish(exit_code=exit_code)
        except TimeoutError:
            self.address = self._sync_command("run")
            self._note(f"W&B: not all was sent in {FINISH_SECONDS} s; to send it: {self.address}")
        except Exception as error:
            self._note(f"W&B: {_first_line(error)}")

    def _start(
        self,
        mode: str,
        track: TrackConfig,
        identity: Identity,
        config: dict[str, Any],
    ) -> Any:
        import wandb

        _global_settings()
        project, entity = place(track)
        settings = wandb.Settings(
            silent=True,
            console="off",
            disable_git=True,  # of the folder we are in; its remote may hold a token
            init_timeout=INIT_SECONDS,
            finish_timeout=FINISH_SECONDS,
            finish_timeout_raises=True,
            x_transaction_log_flush_interval=1,
        )
        run = wandb.init(
            mode=mode,  # type: ignore[arg-type]
            dir=self._recorded.parent,
            id=identity.id,
            name=identity.name,
            resume="allow" if mode == "online" else None,
            reinit="create_new",
            project=project,
            entity=entity,
            group=identity.group,
            job_type=identity.job_type,
            tags=identity.tags,
            config=config,
            settings=settings,
        )
        self.address = (
            run.url and redacted(run.url) if mode == "online" else self._sync_command("offline-run")
        )
        return run

    def _forget_everything(self) -> None:
        """End W&B's process: it holds on to the id of a run that could not begin, or is broken."""
        import wandb

        with contextlib.suppress(Exception, SystemExit):
            wandb.teardown()
        os.environ.pop(VARIABLE, None)  # nor is one that others use the right one any more

    def _sync_command(self, kind: str) -> str:
        return f"wandb sync {shlex.quote(str(self._recorded))}/{kind}-*"


def _global_settings() -> Any:
    """W&B's, with what its files and variables say; silent, so that it never asks for a key."""
    import wandb

    return wandb.setup(wandb.Settings(silent=True)).settings


def silence_of(url: str) -> str:
    """Why nothing answers at the address, which is known in seconds; '' if anything does."""
    try:
        with urllib.request.urlopen(url, timeout=CONNECT_SECONDS):
            return ""
    except urllib.error.HTTPError:
        return ""  # an answer, too
    except OSError as error:
        reason = getattr(error, "reason", error)
        if isinstance(reason, ssl.SSLCertVerificationError):
            return ""  # W&B may know more certificates than Python
        return f"{url} does not answer ({reason})"


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]

"""Weights & Biases, a mirror of the journal: it may fail or be absent, and the run goes on.

Nothing is ever asked of the user: no key means offline, and an unreachable server does too.
"""

import contextlib
import netrc
import os
import shlex
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from qkablate.config import TrackConfig
from qkablate.errors import UserError

CONNECT_SECONDS = 3
INIT_SECONDS = 10
FINISH_SECONDS = 30


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
    path = os.environ.get("NETRC") or Path.home() / ".netrc"
    try:
        hosts = netrc.netrc(path).hosts
    except (OSError, netrc.NetrcParseError):
        return False
    own = os.environ.get("WANDB_BASE_URL")
    if own:
        return urlsplit(own).netloc in hosts
    import wandb

    return bool({urlsplit(wandb.setup().settings.base_url).netloc, "api.wandb.ai"} & set(hosts))


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
        # W&B keeps logs of its own in a cache folder; nothing is written outside the run's folder.
        os.environ.setdefault("WANDB_CACHE_DIR", str(folder.absolute() / "wandb" / "cache"))
        try:
            if mode == "online" and not self._reachable():
                mode = "offline"
            self._run = self._start(mode, track, identity, folder, config)
        except Exception as error:
            self._note(f"W&B: {_first_line(error)}; recording offline instead")
            try:
                self._run = self._start("offline", track, identity, folder, config)
            except Exception as again:
                self._note(f"W&B: {_first_line(again)}; going on without it")

    def log(self, row: dict[str, Any]) -> None:
        self._safely(lambda: self._run.log(row, step=row["step"]))

    def close(self, summary: dict[str, Any], exit_code: int) -> None:
        def finish() -> None:
            self._run.summary.update(summary)
            self._run.finish(exit_code=exit_code)

        self._safely(finish)
        self._run = None

    def _start(
        self,
        mode: str,
        track: TrackConfig,
        identity: Identity,
        folder: Path,
        config: dict[str, Any],
    ) -> Any:
        import wandb

        settings = wandb.Settings(
            silent=True,
            console="off",
            init_timeout=INIT_SECONDS,
            finish_timeout=FINISH_SECONDS,
            x_transaction_log_flush_interval=1,
        )
        run = wandb.init(
            mode=mode,  # type: ignore[arg-type]
            dir=folder,
            id=identity.id,
            name=identity.name,
            resume="allow" if mode == "online" else None,
            reinit="create_new",
            project=track.project or os.environ.get("WANDB_PROJECT") or "qkablate",
            entity=track.entity or os.environ.get("WANDB_ENTITY"),
            group=identity.group,
            job_type=identity.job_type,
            tags=identity.tags,
            config=config,
            settings=settings,
        )
        recorded = shlex.quote(str(folder / "wandb"))
        self.address = f"wandb sync {recorded}/offline-run-*" if mode == "offline" else run.url
        return run

    def _reachable(self) -> bool:
        """Whether anything answers at the server's address: a dead one is told in seconds."""
        import wandb

        url = urlsplit(wandb.setup().settings.base_url)
        port = url.port or (80 if url.scheme == "http" else 443)
        if os.environ.get("https_proxy") or os.environ.get("HTTPS_PROXY"):
            return True  # only the proxy could tell
        try:
            with socket.create_connection((url.hostname or "", port), timeout=CONNECT_SECONDS):
                return True
        except OSError as error:
            self._note(f"W&B: {url.hostname} cannot be reached ({error}); recording offline")
            return False

    def _safely(self, action: Callable[[], None]) -> None:
        if self._run is None:
            return
        try:
            action()
        except Exception as error:
            self._note(f"W&B: {_first_line(error)}; going on without it")
            run, self._run = self._run, None
            with contextlib.suppress(Exception):
                run.finish(exit_code=1)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]

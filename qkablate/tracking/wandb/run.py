"""Weights & Biases, a mirror of the journal: it may fail or be absent, and the run goes on.

Nothing is ever asked of the user: no key means offline, and an unreachable server does too.
"""

import contextlib
import json
import os
import shlex
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from qkablate.config import TrackConfig
from qkablate.disk import read_file
from qkablate.redaction import redacted
from qkablate.runs.records import is_number, read_row
from qkablate.tracking.wandb.mode import (
    global_settings,
    place,
    resolve_mode,
    silence_of,
    wrong_server,
)
from qkablate.tracking.wandb.offline_log import becomes_whole, unsent_mark, why_not
from qkablate.tracking.wandb.service import VARIABLE, stay_within

OFFLINE = "offline"  # the address of what the server does not have, or not all of
INIT_SECONDS = 10
FINISH_SECONDS = 25
ARTIFACT_SECONDS = 5  # that the server is asked whether it may be
MODEL_SECONDS = 300  # where a checkpoint is to be sent, too
POSITIONS = ("step", "tokens", "flops", "seconds")  # what a row stands at: axes, and no charts
# Of these a table of runs shows the best and the last reading; of all others W&B shows the last.
BEST: dict[str, tuple[str, Callable[[Iterable[float]], float]]] = {
    "val/loss": ("min", min),
    "val/bits_per_byte": ("min", min),
    "val/accuracy": ("max", max),
}


@dataclass(frozen=True)
class Identity:
    """How the run is called in W&B."""

    id: str
    name: str
    group: str
    job_type: str
    tags: tuple[str, ...]


@dataclass(frozen=True)
class Left:
    """What a run leaves behind: files that do not change any more, by their names in an artifact,
    and its result, which is not written yet.
    """

    result: dict[str, Any]
    files: Mapping[str, Path]
    model: Mapping[str, Path]


@dataclass(frozen=True)
class Shown:
    """What is to be seen of many runs."""

    tables: dict[str, tuple[list[str], list[list[Any]]]] = field(default_factory=dict)
    pages: dict[str, str] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)


class Mirror:
    """One W&B run. `log`, `show` and `close` never raise."""

    def __init__(
        self,
        track: TrackConfig,
        identity: Identity,
        folder: Path,
        config: dict[str, Any],
        note: Callable[[str], None],
    ) -> None:
        self._note, self._identity = note, identity
        self._run: Any = None
        self._file: Path | None = None  # W&B's log: also what is sent goes through it
        self._patience = MODEL_SECONDS if track.artifacts else FINISH_SECONDS
        self._best: dict[str, float] | None = None  # None: no row was logged here
        self.address: str | None = None  # where to look: a URL, or OFFLINE
        mode = resolve_mode(track)
        if mode == "disabled":
            return
        self._recorded = folder.absolute() / "wandb"
        stay_within(self._recorded)
        try:
            if mode == "online" and (
                silence := wrong_server() or silence_of(global_settings().base_url)
            ):
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

    @property
    def is_on(self) -> bool:
        return self._run is not None

    def log(self, row: dict[str, Any]) -> None:
        if self._run is None:
            return
        try:
            self._run.log(_flat(row), step=row["step"])
            self._keep_best(row)
        except Exception as error:
            self._note(f"W&B: {_first_line(error)}; going on without it")
            run, self._run = self._run, None
            with contextlib.suppress(Exception):
                run.finish(exit_code=1)
            self._forget_everything()

    def show(self, shown: Shown) -> None:
        """In one row, without a step."""
        if self._run is None:
            return
        try:
            import wandb

            row: dict[str, Any] = {
                name: wandb.Table(columns=list[str | int](columns), data=rows)
                for name, (columns, rows) in shown.tables.items()
            }
            # inject: W&B would put a style of its own into what is whole.
            row |= {name: wandb.Html(page, inject=False) for name, page in shown.pages.items()}
            self._run.log(row)
            self._run.summary.update(shown.summary)
        except Exception as error:
            self._note(f"W&B: {_first_line(error)}")

    def close(self, summary: dict[str, Any], exit_code: int, left: Left | None = None) -> None:
        if self._run is None:
            return
        run, self._run = self._run, None
        try:
            run.summary.update(summary)
            if left is not None:
                self._keep(run, left)
            run.finish(exit_code=exit_code)
            if self._file and not becomes_whole(self._file):
                self._note(
                    f"W&B: not all was recorded{why_not(self._file)}; our own files have it all"
                )
        except TimeoutError:
            self.address = OFFLINE
            command = shlex.join(["qkablate", "sync", str(self._recorded.parent)])
            self._note(f"W&B: not all was sent in {self._patience} s; to send it: {command}")
            with contextlib.suppress(OSError):
                if self._file:
                    unsent_mark(self._file).touch()
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

        global_settings()
        project, entity = place(track)
        settings = wandb.Settings(
            silent=True,
            console="off",
            disable_git=True,  # of the folder we are in; its remote may hold a token
            init_timeout=INIT_SECONDS,
            finish_timeout=self._patience,
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
        # Of the best readings W&B would know those of this sitting alone.
        run.define_metric("*", step_metric="step")
        for name in POSITIONS:
            run.define_metric(name, hidden=True)
        for name in BEST:
            run.define_metric(name, step_metric="step", summary="none")
        self._file = Path(run.settings.sync_file)
        self.address = run.url and redacted(run.url) if mode == "online" else OFFLINE
        return run

    def _keep_best(self, row: dict[str, Any]) -> None:
        """Of all sittings: the journal has the rows of those before."""
        names = [name for name in BEST if is_number(row.get(name))]
        if names and self._best is None:
            self._best = best(self._recorded.parent / "metrics.jsonl")
        for name in names:
            assert self._best is not None
            word, choose = BEST[name]
            self._best[name] = choose([row[name], self._best.get(name, row[name])])
            self._run.summary[name] = {word: self._best[name], "last": row[name]}

    def _keep(self, run: Any, left: Left) -> None:
        """As artifacts, whose files are sent from where they lie: nothing is copied."""
        import wandb

        try:
            result = Path(run.dir).with_name("result.json")
            text = json.dumps(left.result, indent=1, ensure_ascii=False)
            result.write_text(f"{text}\n", encoding="utf-8")
            parts = {"run": {**left.files, result.name: result}, "model": left.model}
            for kind, files in parts.items():
                if files:
                    artifact = wandb.Artifact(f"{kind}-{self._identity.id}", type=kind)
                    for name, path in files.items():
                        own = str(path.absolute())
                        artifact.add_file(own, name, policy="immutable", skip_cache=True)
                    _within(ARTIFACT_SECONDS, partial(run.log_artifact, artifact))
        except Exception as error:
            self._note(f"W&B: no artifact: {_first_line(error)}")

    def _forget_everything(self) -> None:
        """End W&B's process: it holds on to the id of a run that could not begin, or is broken."""
        import wandb

        with contextlib.suppress(Exception, SystemExit):
            wandb.teardown()
        os.environ.pop(VARIABLE, None)  # nor is one that others use the right one any more


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    """With the diagnostics as scalars, means over the heads of a layer: qk/stable_rank/L0. A
    spectrum has no such mean.
    """
    flat = {name: value for name, value in row.items() if name != "mechanism"}
    for part, found in row.get("mechanism", {}).items():
        for name, layers in found.items():
            for layer, heads in enumerate(layers):
                known = [value for value in heads or () if isinstance(value, float)]
                if known:
                    flat[f"{part}/{name}/L{layer}"] = sum(known) / len(known)
    return flat


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def best(metrics: Path) -> dict[str, float]:
    """The best readings that stand in a journal."""
    found: dict[str, float] = {}
    with contextlib.suppress(OSError):
        for line in read_file(metrics).splitlines():
            with contextlib.suppress(ValueError):
                row = read_row(line) if b'"val/' in line else {}
                for name in BEST.keys() & row.keys():
                    if is_number(row[name]):
                        found[name] = BEST[name][1]([row[name], found.get(name, row[name])])
    return found


def _within(seconds: float, action: Callable[[], object]) -> None:
    """W&B asks its server here, and has more patience with one that is gone."""
    errors: list[Exception] = []

    def act() -> None:
        try:
            action()
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise TimeoutError(f"no answer in {seconds} s")
    if errors:
        raise errors[0]

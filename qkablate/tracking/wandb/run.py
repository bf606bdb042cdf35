"""Logging to Weights & Biases. Optional; metrics.jsonl is authoritative.

If W&B fails, the run continues without it. There is never a prompt: without a key, or with an
unreachable server, it records offline.
"""

import contextlib
import json
import os
import shlex
import shutil
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from qkablate.config import TrackingConfig
from qkablate.disk import read_file
from qkablate.redaction import redact
from qkablate.runs.records import decode_row, is_number
from qkablate.tracking.wandb.mode import (
    global_settings,
    probe_server,
    project_and_entity,
    resolve_mode,
    server_address_error,
)
from qkablate.tracking.wandb.offline_log import unsent_mark, wait_until_complete, write_error
from qkablate.tracking.wandb.service import SERVICE_VARIABLE, keep_files_in, temporary_files_in

OFFLINE = "offline"  # the address of a run that is not, or not wholly, at the server
INIT_SECONDS = 10
FINISH_SECONDS = 25
ARTIFACT_SECONDS = 5  # timeout of the server's answer to a new artifact
MODEL_SECONDS = 300  # instead of FINISH_SECONDS where a checkpoint is uploaded, too
POSITIONS = ("step", "tokens", "flops", "seconds")  # axes of charts, without charts of their own
# The table of runs shows the best and the last value of these, and the last of all others.
BEST: dict[str, Callable[[Iterable[float]], float]] = {
    "val/loss": min,
    "val/bits_per_byte": min,
    "val/accuracy": max,
    "val/exact": max,
}


@dataclass(frozen=True)
class RunIdentity:
    """Name, group and tags of a run in W&B, as arguments of `wandb.init`."""

    id: str
    name: str
    group: str
    job_type: str
    tags: tuple[str, ...]


@dataclass(frozen=True)
class RunArtifacts:
    """Artifacts of a finished run: its final files by name, and the result to be written."""

    result: dict[str, Any]
    files: Mapping[str, Path]
    model: Mapping[str, Path]


@dataclass(frozen=True)
class LoggedTables:
    """Tables, pages and summary values of a run or a sweep."""

    tables: dict[str, tuple[list[str], list[list[Any]]]] = field(default_factory=dict)
    pages: dict[str, str] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)


class WandbRun:
    """One W&B run. `log`, `log_tables` and `close` never raise."""

    def __init__(
        self,
        tracking: TrackingConfig,
        identity: RunIdentity,
        folder: Path,
        config: dict[str, Any],
        note: Callable[[str], None],
        layers: Sequence[str] = (),  # names of the attention layers
    ) -> None:
        self._note, self._identity, self._layers = note, identity, layers
        self._run: Any = None
        self._file: Path | None = None  # W&B's log, which online sessions write, too
        self._finish_timeout = MODEL_SECONDS if tracking.artifacts else FINISH_SECONDS
        self.address: str | None = None  # a URL, or OFFLINE
        mode = resolve_mode(tracking)
        if mode == "disabled":
            return
        self._wandb_folder = folder.absolute() / "wandb"
        keep_files_in(self._wandb_folder)
        try:
            if mode == "online" and (
                problem := server_address_error() or probe_server(global_settings().base_url)
            ):
                self._note(f"W&B: {problem}; recording offline")
                mode = "offline"
            self._run = self._start(mode, tracking, config)
        except Exception as error:
            self._note(f"W&B: {_first_line(error)}; recording offline instead")
            try:
                self._stop_service()
                self._run = self._start("offline", tracking, config)
            except Exception as again:
                self._note(f"W&B: {_first_line(again)}; continuing without it")

    @property
    def is_on(self) -> bool:
        return self._run is not None

    def log(self, row: dict[str, Any]) -> None:
        if self._run is None:
            return
        try:
            self._run.log(flatten_row(row, self._layers), step=row["step"])
            for name in _update_best(self._best, row):
                self._run.summary[name] = {BEST[name].__name__: self._best[name], "last": row[name]}
        except Exception as error:
            self._note(f"W&B: {_first_line(error)}; continuing without it")
            run, self._run = self._run, None
            self._mark_unsent()
            with contextlib.suppress(Exception):
                run.finish(exit_code=1)
            self._stop_service()

    def log_tables(self, tables: LoggedTables, step: int | None = None) -> None:
        """Log tables and pages in the row of a step, or in one without a step."""
        if self._run is None:
            return
        keep_files_in(self._wandb_folder)  # another run of this process may have begun since
        try:
            import wandb

            with temporary_files_in(self._temporary):
                row: dict[str, Any] = {
                    name: wandb.Table(columns=list[str | int](columns), data=rows)
                    for name, (columns, rows) in tables.tables.items()
                }
                # inject=False: the pages are complete and need no style of W&B's.
                row |= {name: wandb.Html(page, inject=False) for name, page in tables.pages.items()}
                self._run.log(row if step is None else row | {"step": step}, step=step)
            self._run.summary.update(tables.summary)
        except Exception as error:
            self._note(f"W&B: {_first_line(error)}")

    def close(
        self, summary: dict[str, Any], exit_code: int, artifacts: RunArtifacts | None = None
    ) -> None:
        if self._run is None:
            return
        run, self._run = self._run, None
        keep_files_in(self._wandb_folder)
        try:
            run.summary.update(summary)
            if artifacts is not None:
                self._log_artifacts(run, artifacts)
            run.finish(exit_code=exit_code)
            if self._file and not wait_until_complete(self._file):
                reason = write_error(self._file)
                self._note(f"W&B: the log is incomplete{reason}; metrics.jsonl is complete")
        except TimeoutError:
            self._mark_unsent()
            command = shlex.join(["qkablate", "sync", str(self._wandb_folder.parent)])
            self._note(
                f"W&B: upload unfinished after {self._finish_timeout} s; to finish it: {command}"
            )
        except Exception as error:
            self._mark_unsent()
            self._note(f"W&B: {_first_line(error)}")
        shutil.rmtree(self._temporary, ignore_errors=True)

    @property
    def _temporary(self) -> Path:
        """Folder of W&B's temporary files, which it removes only where Python exits normally."""
        return self._wandb_folder / "tmp"

    def _mark_unsent(self) -> None:
        """Let `qkablate sync` upload a log that the server may not have in full."""
        self.address = OFFLINE
        with contextlib.suppress(OSError):
            if self._file:
                unsent_mark(self._file).touch()

    def _start(self, mode: str, tracking: TrackingConfig, config: dict[str, Any]) -> Any:
        import wandb

        global_settings()
        project, entity = project_and_entity(tracking)
        settings = wandb.Settings(
            silent=True,
            console="off",
            disable_git=True,  # the remote of the current folder may hold a token
            init_timeout=INIT_SECONDS,
            finish_timeout=self._finish_timeout,
            finish_timeout_raises=True,
            x_transaction_log_flush_interval=1,
        )
        run = wandb.init(
            mode=mode,  # type: ignore[arg-type]
            dir=self._wandb_folder.parent,
            resume="allow" if mode == "online" else None,
            reinit="create_new",
            project=project,
            entity=entity,
            config=config,
            settings=settings,
            **vars(self._identity),
        )
        # Losses first. W&B itself knows the best values of this session only.
        for name in ("val/loss", "train/loss", *BEST):
            run.define_metric(name, step_metric="step", summary="none" if name in BEST else None)
        for name in POSITIONS:
            run.define_metric(name, hidden=True)
        run.define_metric("*", step_metric="step")
        self._file = Path(run.settings.sync_file)
        self.address = run.url and redact(run.url) if mode == "online" else OFFLINE
        return run

    @cached_property
    def _best(self) -> dict[str, float]:
        """Best values over all sessions; metrics.jsonl has those of earlier ones."""
        best: dict[str, float] = {}
        with contextlib.suppress(OSError):
            for line in read_file(self._wandb_folder.parent / "metrics.jsonl").splitlines():
                with contextlib.suppress(ValueError):
                    _update_best(best, decode_row(line) if b'"val/' in line else {})
        return best

    def _log_artifacts(self, run: Any, artifacts: RunArtifacts) -> None:
        """Log artifacts whose files are uploaded in place, without copies."""
        import wandb

        try:
            result = Path(run.dir).with_name("result.json")
            text = json.dumps(artifacts.result, indent=1, ensure_ascii=False)
            result.write_text(f"{text}\n", encoding="utf-8")
            parts = {"run": {**artifacts.files, result.name: result}, "model": artifacts.model}
            for kind, files in parts.items():
                if files:
                    artifact = wandb.Artifact(f"{kind}-{self._identity.id}", type=kind)
                    for name, path in files.items():
                        artifact.add_file(
                            str(path.absolute()), name, policy="immutable", skip_cache=True
                        )
                    _call_with_timeout(ARTIFACT_SECONDS, partial(run.log_artifact, artifact))
        except Exception as error:
            self._note(f"W&B: no artifact: {_first_line(error)}")

    def _stop_service(self) -> None:
        """End W&B's process, which would keep the id of a run that failed to start or broke."""
        import wandb

        with contextlib.suppress(Exception, SystemExit):
            wandb.teardown()
        os.environ.pop(SERVICE_VARIABLE, None)  # a shared service must not be used again, either


def flatten_row(row: dict[str, Any], names: Sequence[str] = ()) -> dict[str, Any]:
    """Return a row with diagnostics as means over heads, as qk/stable_rank/L0, without spectra.

    Layers may have other `names`, such as encoder_L0.
    """
    flat = {name: value for name, value in row.items() if name != "diagnostics"}
    for part, measures in row.get("diagnostics", {}).items():
        for name, layers in measures.items():
            for layer, heads in enumerate(layers):
                values = [value for value in heads or () if isinstance(value, float)]
                if values:
                    label = names[layer] if layer < len(names) else f"L{layer}"
                    flat[f"{part}/{name}/{label}"] = sum(values) / len(values)
    return flat


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _update_best(best: dict[str, float], row: dict[str, Any]) -> list[str]:
    """Compare a row with the best values, and return the names that both have."""
    names = [name for name in BEST if is_number(row.get(name))]
    for name in names:
        best[name] = BEST[name]([row[name], best.get(name, row[name])])
    return names


def _call_with_timeout(seconds: float, action: Callable[[], object]) -> None:
    """Raise TimeoutError after some seconds: W&B itself would wait longer for its server."""
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

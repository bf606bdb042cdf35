"""The training loop: steps, validation, rows of metrics, checkpoints. Its setting is session.py."""

import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any, Protocol

import torch

from qkablate.data.batches import DOCUMENT
from qkablate.diagnostics import DiagnosticPanel
from qkablate.models.base import Model
from qkablate.runs import predictions
from qkablate.runs.document_losses import DocumentLossesHeader, write_document_losses
from qkablate.training import hardware
from qkablate.training.checkpoint import Checkpoint, TrainProgress
from qkablate.training.distributed.ranks import SINGLE_PROCESS, Ranks
from qkablate.training.recorders.branches import BranchRecorder, write_predictions_of_branches
from qkablate.training.recorders.diagnostics import make_panel, record_attention
from qkablate.training.recorders.evaluation import PredictionRecorder, evaluate_split
from qkablate.training.resolve import RunPlan
from qkablate.training.step import StepFactory, TrainStep

WARM_UP = 5  # steps of a session before its speed counts


class Diverged(Exception):
    """The loss is not finite. A result, not an error."""

    def __init__(self, step: int) -> None:
        super().__init__(f"the loss is not finite at step {step}")
        self.step = step


class Interrupted(Exception):
    """A stop was requested; the checkpoint is written."""


class MetricsLogger(Protocol):
    """A receiver of rows of metrics."""

    def log(self, row: dict[str, Any]) -> None: ...


class Trainer:
    """The training of one run, from a checkpoint or from the start."""

    def __init__(
        self,
        plan: RunPlan,
        model: Model,
        resumed: Checkpoint | None,
        *,
        loggers: Iterable[MetricsLogger] = (),
        save: Callable[[Checkpoint], None] = lambda _: None,
        branch: Callable[[Checkpoint], None] = lambda _: None,
        horizons: Collection[int] | None = None,  # see BranchRecorder
        stop: Callable[[], bool] = lambda: False,
        write: Callable[..., None] = lambda *_: None,  # calls a function with the run's folder
        began: float | None = None,
        ranks: Ranks = SINGLE_PROCESS,
        make_step: StepFactory = TrainStep,
    ) -> None:
        self.plan, self.config, self.model, self.ranks = plan, plan.config, model, ranks
        self.loggers, self.stop, self.write = list(loggers), stop, write
        self.save, self.branch = save, branch
        self.branches = BranchRecorder(plan, horizons)
        self.record_predictions = PredictionRecorder(plan, write)
        self.progress = TrainProgress() if resumed is None else resumed.progress
        self._saved = -1 if resumed is None else resumed.progress.step
        self.train_step = make_step(plan, model, resumed, ranks)
        self.throughput = Throughput(plan, ranks.count)
        self._began = time.perf_counter() if began is None else began

    def fit(self) -> Iterator[int]:
        """Train to the last step, yielding the number of each; raise Interrupted or Diverged."""
        train, progress = self.config.train, self.progress
        # A rank that has only a shard of the weights cannot measure them.
        sharded = self.ranks.has_sharded_weights(self.config)
        diagnose_every = 0 if sharded else self.config.diagnostics.every
        assert isinstance(train.steps, int)
        assert isinstance(train.eval_every, int)
        assert isinstance(diagnose_every, int)
        if self.ranks.count > 1 and progress.step < train.steps:
            self.train_step.fix_bucket_order(progress.step)
        while True:
            step = progress.step
            last = step == train.steps
            if (last or step % train.eval_every == 0) and progress.evaluated < step:
                with self.throughput.paused():
                    self._validate()
            is_due = diagnose_every > 0 and (last or step % diagnose_every == 0)
            if is_due and progress.diagnosed < step:
                with self.throughput.paused():
                    self._diagnose(last)
            if progress.predicted < step:
                self._predict(step)
            if self.branches.is_due(step):
                with self.throughput.paused():
                    self.branch(self._make_checkpoint())
            if last or (step and step % train.checkpoint_every == 0):
                with self.throughput.paused():
                    self.checkpoint()
            if last:
                return
            self._check_stop()
            yield step
            norm = self._step(step)
            progress.step += 1
            if progress.step % self.config.tracking.log_every == 0 or progress.step == train.steps:
                self._log_training(norm)

    def _step(self, step: int) -> torch.Tensor:
        norm = self.train_step(step)
        self.progress.loss_count += 1
        self.throughput.count_step()
        return norm

    def _log_training(self, norm: torch.Tensor) -> None:
        progress, step = self.progress, self.train_step
        norm = self.ranks.unshard(norm).to(step.loss_sum)
        # One wait for the device: a sum that is finite has had finite terms only.
        loss_sum, grad_norm = torch.stack([step.loss_sum, norm]).cpu().tolist()
        loss = sum(self.ranks.all_gather(loss_sum)) / progress.loss_count
        if not math.isfinite(loss):
            self._check_finite()
        step.loss_sum.zero_()
        progress.loss_count = 0
        row = {
            "train/loss": loss,
            "train/lr": step.optimizer.param_groups[0]["lr"],
            "train/grad_norm": grad_norm,
            **self.throughput.row(),
        }
        if speed := row.get("perf/tokens_per_second"):
            progress.speeds.append(speed)
        self._log(row)
        self.throughput.restart()

    def _validate(self) -> None:
        self._check_finite()
        metrics = self.evaluate("val")
        if not math.isfinite(metrics["loss"]):
            raise Diverged(self.progress.step)
        self.progress.val = metrics
        self._log({f"val/{name}": value for name, value in metrics.items()})
        self.progress.evaluated = self.progress.step

    def _predict(self, step: int) -> None:
        """Record predictions if they are due, here or in a run that branches off."""
        if predictions.is_recorded(self.config, step):
            save = predictions.write_predictions
        elif self.branches.is_predicted(step):
            save = write_predictions_of_branches
        else:
            return
        with self.throughput.paused():
            self.record_predictions(self.model, step, save)
        self.progress.predicted = step

    @cached_property
    def _panel(self) -> DiagnosticPanel:
        return make_panel(self.plan, self.model)

    def _diagnose(self, last: bool) -> None:
        """Record diagnostics on the first rank, which has the same weights as the others."""
        self._check_finite()
        if self.ranks.is_first:
            self._log({"diagnostics": self._panel.row()})
            if last:
                record_attention(self.plan, self.write, self.model, self.progress.step)
        self.progress.diagnosed = self.progress.step

    def evaluate(self, split: str) -> dict[str, float]:
        """Return the metrics of a split; record losses by document, if any."""
        totals = evaluate_split(self.plan, self.train_step, split, self._check_stop)
        if self.ranks.is_first and (documents := totals.slices.get(DOCUMENT)):
            sums = [documents[index] for index in sorted(documents)]
            header = DocumentLossesHeader(self.plan.run.id, self.plan.data.fingerprint)
            losses, counts = [s.loss for s in sums], [s.count for s in sums]
            self.write(write_document_losses, header, losses, counts)
        return self.plan.data.metrics(split, totals)

    def checkpoint(self) -> None:
        """Write a checkpoint, unless this step has one."""
        if self._saved == self.progress.step:
            return
        self.save(self._make_checkpoint())
        self._saved = self.progress.step

    def _make_checkpoint(self) -> Checkpoint:
        self._check_finite()
        self.progress.seconds, self._began = self.seconds(), time.perf_counter()
        return self.train_step.checkpoint(self.progress)

    def seconds(self) -> float:
        """Return the duration of all sessions until now."""
        return self.progress.seconds + time.perf_counter() - self._began

    def _check_stop(self) -> None:
        """Write a checkpoint and raise Interrupted if a stop was requested."""
        if self.stop():
            self.checkpoint()
            raise Interrupted

    def _check_finite(self) -> None:
        step = self.train_step.first_nonfinite()
        if step is not None:
            raise Diverged(step)

    def _log(self, row: dict[str, Any]) -> None:
        step = self.progress.step
        tokens = step * self.plan.tokens_per_step
        flops = tokens * self.plan.flops_per_token
        position = {"step": step, "tokens": tokens, "flops": flops}
        for logger in self.loggers:
            logger.log({**position, "seconds": round(self.seconds(), 3), **row})


class Throughput:
    """Speed of the steps since the last row, without warm-up, evaluation and checkpoints."""

    def __init__(self, plan: RunPlan, processes: int) -> None:
        self._plan, self._device = plan, plan.config.device
        self._peak = hardware.known_peak_flops(plan.config) * processes
        hardware.reset_peak_memory(plan.config.device)  # of the measurement
        self._warm_up = WARM_UP
        self.restart()

    def restart(self) -> None:
        """Start to measure the next row."""
        self._start, self._paused, self._steps = time.perf_counter(), 0.0, 0

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude what happens in the context."""
        hardware.synchronize(self._device)
        start = time.perf_counter()
        yield
        self._paused += time.perf_counter() - start

    def count_step(self) -> None:
        """Count a completed step."""
        self._steps += 1
        if self._warm_up:  # the first steps compile, warm caches and allocate
            self._warm_up -= 1
            hardware.synchronize(self._device)
            self.restart()

    def row(self) -> dict[str, float]:
        """Return the speed since the last row, or nothing during warm-up."""
        if not self._steps:
            return {}
        seconds = time.perf_counter() - self._start - self._paused
        speed = self._steps * self._plan.tokens_per_step / seconds
        flops = speed * self._plan.flops_per_token
        self._peak = max(self._peak, flops)  # the machine may have been busy when it was measured
        return {"perf/tokens_per_second": speed, "perf/mfu": flops / self._peak}

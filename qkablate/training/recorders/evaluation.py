"""Evaluation of a model on a split or a part of it, and its predictions at fixed positions of one.

Both draw no random numbers. Shape suffixes: N windows, T context, P positions, V vocabulary.
"""

import hashlib
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qkablate.config import Config, read_limit
from qkablate.data import IGNORE, Batch, Data, EvalMetrics
from qkablate.data.batches import evenly_spaced
from qkablate.models.base import Model
from qkablate.runs import predictions
from qkablate.runs.predictions import PredictionsHeader
from qkablate.training import hardware
from qkablate.training.distributed.ranks import SINGLE_PROCESS, Ranks
from qkablate.training.prefetcher import on_device
from qkablate.training.resolve import RunPlan
from qkablate.training.step import TrainStep

# Tokens per forward pass; on a CPU larger batches are no faster.
EVAL_TOKENS = {"cpu": 4096, "cuda": 8192, "mps": 8192}
EVAL_LOGITS = 2**25  # upper bound on the logits of a forward pass
EVAL_NUMBERS = 2**26  # the same of a layer's numbers, where more than EVAL_TOKENS are read at once
MAX_PENDING = 2**22  # answers whose losses wait on the device
TOKENS, WINDOWS = 1024, 8  # read for the predictions, whichever is more


def evaluate_split(
    plan: RunPlan, step: TrainStep, split: str, check_stop: Callable[[], None]
) -> EvalMetrics:
    """Return the sums over a split or a part of it; `check_stop` may raise."""
    context, limit = plan.config.model.context, read_limit(plan.config, split)
    size = choose_batch_size(plan.config, plan.data, split, limit)
    batches = plan.data.split_batches(split, batch_size=size, context=context, limit=limit)
    return sum_losses(plan.config, step, batches, check_stop)


def choose_batch_size(config: Config, data: Data, split: str, limit: int | None) -> int:
    """Return how many windows are evaluated at once, of a split or a part of it."""
    context = config.model.context
    at_once = min(eval_tokens(config), int(EVAL_LOGITS / data.vocabulary / data.answer_fraction))
    size = max(1, at_once // context)
    if limit is not None:
        read = min(limit, data.tokens["test"]) if split == "test" else limit
        windows = math.ceil(read / context)
        # Little padding. Longer readings of validation keep the size, on which last bits depend.
        parts = math.ceil(windows / size) if split == "test" else 1
        size = min(size, math.ceil(windows / parts))
    return size


@dataclass(frozen=True)
class ModelLosses:
    """A model and its losses outside of training."""

    model: Model

    @property
    def ranks(self) -> Ranks:
        return SINGLE_PROCESS

    def loss(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.model.loss(*args, **kwargs)

    def loss_and_hits(self, *args: Any) -> tuple[Tensor, Tensor]:
        return self.model.loss_and_hits(*args)


@torch.no_grad()
def sum_losses(
    config: Config,
    step: TrainStep | ModelLosses,
    batches: Iterable[Batch],
    check_stop: Callable[[], None] = lambda: None,
) -> EvalMetrics:
    """Return the sums over some batches of one shape; `check_stop` may raise."""
    totals, pending = EvalMetrics(), PendingLosses()
    training = step.model.training
    step.model.eval()
    try:
        for batch, counts in step.ranks.shard_eval(batches):
            check_stop()
            moved = on_device(batch, config.device)
            arguments = *moved.inputs, moved.targets_NA, moved.positions_NA
            with hardware.autocast(config):
                if batch.slices is None:
                    results: tuple[Tensor, ...] = (step.loss(*arguments, reduction="sum"),)
                else:
                    results = step.loss_and_hits(*arguments)
            if counts:
                pending.append(batch, *results)
            if pending.answers >= MAX_PENDING:
                pending.add_to(totals)
        pending.add_to(totals)
    finally:
        step.model.train(training)
    totals, *others = step.ranks.all_gather(totals)
    for other in others:
        totals.merge(other)
    return totals


def eval_tokens(config: Config) -> int:
    """Return the tokens of a forward pass: on CUDA, as many as keep a small model's GPU busy."""
    device, model = config.device.partition(":")[0], config.model
    if device != "cuda":
        return EVAL_TOKENS[device]
    widest = model.heads * max(model.d_model, model.context)  # numbers per token, of wide keys
    return min(max(EVAL_TOKENS[device], EVAL_NUMBERS // widest), 8 * EVAL_TOKENS[device])


class PendingLosses:
    """Results on the device, in order: they are read together, so that the device never waits."""

    def __init__(self) -> None:
        self.answers = 0
        self._batches: list[Batch] = []
        self._losses: list[Tensor] = []
        self._hits: list[Tensor] = []

    def append(self, batch: Batch, losses: Tensor, hits: Tensor | None = None) -> None:
        """Keep the total loss of a batch, or losses and hits of its answers."""
        self._batches.append(batch)
        self._losses.append(losses)
        if hits is not None:
            self._hits.append(hits)
        self.answers += batch.targets_NA.numel()

    def add_to(self, totals: EvalMetrics) -> None:
        """Read all results and add them."""
        batches = self._batches
        if not self._hits:
            losses = torch.stack(self._losses).cpu().tolist() if batches else []
            for batch, loss in zip(batches, losses, strict=True):
                totals.add_loss(loss, int((batch.targets_NA != IGNORE).sum()))
        else:
            # Hits as numbers of the losses' type: one copy brings both.
            pairs = zip(self._losses, self._hits, strict=True)
            both = [torch.stack([losses, hits.to(losses)]).flatten(1) for losses, hits in pairs]
            shapes = [batch.targets_NA.shape for batch in batches]
            ends = np.cumsum([shape.numel() for shape in shapes])[:-1]
            parts = np.split(torch.cat(both, 1).cpu().numpy(), ends, axis=1)
            for batch, shape, (losses_X, hits_X) in zip(batches, shapes, parts, strict=True):
                totals.add_answers(batch, losses_X.reshape(shape), hits_X.reshape(shape) > 0)
        self.answers, self._batches, self._losses, self._hits = 0, [], [], []


class PredictionRecorder:
    """Writes predictions into the run's folder, at positions that depend on the data alone."""

    def __init__(self, plan: RunPlan, write: Callable[..., None]) -> None:
        self.plan, self.write = plan, write
        context, device = plan.config.model.context, plan.config.device
        count = predictions.position_count(plan.data.vocabulary)
        self.parts: list[list[Tensor]] = []
        if not (count and predictions.recorded_steps(plan.config)):
            return
        windows = min(count, max(WINDOWS, TOKENS // context))
        batch = plan.data.sample("val", count=windows, context=context)
        rows_P, columns_P = find_answer_positions(batch, count)
        digest = hashlib.sha256()
        for tensor in (*batch.inputs, rows_P, columns_P):
            digest.update(np.ascontiguousarray(tensor.numpy(), np.int64).tobytes())
        self.make_header = partial(
            PredictionsHeader,
            run=plan.run.id,
            data_fingerprint=plan.data.fingerprint,
            positions_sha256=digest.hexdigest(),
            positions=len(rows_P),
            context=context,
        )
        size = max(1, EVAL_TOKENS[device.partition(":")[0]] // context)
        for first in range(0, len(batch.tokens_NT), size):
            chosen = (rows_P >= first) & (rows_P < first + size)
            if chosen.any():
                inputs = [tensor[first : first + size] for tensor in batch.inputs]
                part = [*inputs, rows_P[chosen] - first, columns_P[chosen]]
                self.parts.append([tensor.to(device) for tensor in part])

    @torch.no_grad()
    def __call__(
        self,
        model: Model,
        step: int,
        save: Callable[..., None] = predictions.write_predictions,
    ) -> None:
        """Save the predictions of a model that has trained for `step` steps."""
        if not self.parts:
            return
        model.eval()
        try:
            with hardware.autocast(self.plan.config):
                parts = [model.log_probabilities(*part).cpu().numpy() for part in self.parts]
        finally:
            model.train()
        log_PV = np.concatenate(parts)
        if np.isfinite(log_PV).all():  # otherwise the loop will report divergence
            self.write(save, self.make_header(step=step), log_PV)


def find_answer_positions(batch: Batch, count: int) -> tuple[Tensor, Tensor]:
    """Return window and position of `count` answers, spread evenly over those that count."""
    rows_P, answers_P = np.nonzero(batch.targets_NA.numpy() != IGNORE)
    chosen = evenly_spaced(count, len(rows_P))
    rows_P, answers_P = rows_P[chosen], answers_P[chosen]
    positions_NA = batch.positions_NA
    columns_P = answers_P if positions_NA is None else positions_NA.numpy()[rows_P, answers_P]
    return torch.from_numpy(rows_P), torch.from_numpy(np.ascontiguousarray(columns_P))

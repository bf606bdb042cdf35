"""Evaluation of a model on a split or a part of it, and its predictions at fixed positions of one.

Both draw no random numbers. Shape suffixes: N windows, T context, P positions, V vocabulary.
"""

import hashlib
import math
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from qkablate.config import read_limit
from qkablate.data import IGNORE, Batch, EvalMetrics
from qkablate.data.batches import evenly_spaced
from qkablate.models.base import Model
from qkablate.runs import predictions
from qkablate.runs.predictions import PredictionsHeader
from qkablate.training import hardware
from qkablate.training.feed import on_device
from qkablate.training.resolve import RunPlan
from qkablate.training.step import TrainStep

# Tokens per forward pass; on a CPU larger batches are no faster.
EVAL_TOKENS = {"cpu": 4096, "cuda": 8192, "mps": 8192}
EVAL_LOGITS = 2**25  # upper bound on the logits of a forward pass
TOKENS, WINDOWS = 1024, 8  # read for the predictions, whichever is more


@torch.no_grad()
def evaluate_split(
    plan: RunPlan, step: TrainStep, split: str, check_stop: Callable[[], None]
) -> EvalMetrics:
    """Return the sums over a split or a part of it; `check_stop` may raise."""
    config, data = plan.config, plan.data
    device, context = config.device, config.model.context
    tokens = EVAL_TOKENS[device.partition(":")[0]]
    at_once = min(tokens, int(EVAL_LOGITS / data.vocabulary / data.answer_fraction))
    size, limit = max(1, at_once // context), read_limit(config, split)
    if limit is not None:
        read = min(limit, data.tokens["test"]) if split == "test" else limit
        windows = math.ceil(read / context)
        # Little padding. Longer readings of validation keep the size, on which last bits depend.
        parts = math.ceil(windows / size) if split == "test" else 1
        size = min(size, math.ceil(windows / parts))
    totals = EvalMetrics()
    step.model.eval()
    try:
        batches = data.split_batches(split, batch_size=size, context=context, limit=limit)
        for batch, counts in step.ranks.shard_eval(batches):
            check_stop()
            moved = on_device(batch, device)
            arguments = *moved.inputs, moved.targets_NA, moved.positions_NA
            with hardware.autocast(config):
                if batch.slices is None:
                    loss = step.loss(*arguments, reduction="sum").item()
                    if counts:
                        totals.add_loss(loss, int((batch.targets_NA != IGNORE).sum()))
                else:
                    losses, hits = step.loss_and_hits(*arguments)
                    if counts:
                        totals.add_answers(batch, losses.cpu().numpy(), hits.cpu().numpy())
    finally:
        step.model.train()
    totals, *others = step.ranks.all_gather(totals)
    for other in others:
        totals.merge(other)
    return totals


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

"""Predictions at fixed positions of the validation split, which depend on the data alone.

Shape suffixes: N windows, T context, P positions, V vocabulary.
"""

import hashlib
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from qkablate.data import IGNORE, Batch
from qkablate.data.batches import evenly_spaced
from qkablate.models.base import Model
from qkablate.runs import predictions
from qkablate.runs.predictions import PredictionsHeader
from qkablate.training import hardware
from qkablate.training.recorders.evaluation import EVAL_TOKENS
from qkablate.training.resolve import RunPlan

TOKENS = 8192  # read for the predictions: an eighth of an evaluation by default


class PredictionRecorder:
    """Passes a model's predictions to `save`; draws no random numbers."""

    def __init__(
        self, plan: RunPlan, save: Callable[[PredictionsHeader, np.ndarray], None]
    ) -> None:
        self.plan, self.save = plan, save
        context, device = plan.config.model.context, plan.config.device
        count = predictions.position_count(plan.data.vocabulary)
        self.count = 0
        if not (count and predictions.recorded_steps(plan.config)):
            return
        windows = max(1, min(count, TOKENS // context))
        batch = plan.data.sample("val", count=windows, context=context)
        rows_P, columns_P = find_answer_positions(batch, count)
        self.count = len(rows_P)
        self.digest = _digest(*batch.inputs, rows_P, columns_P)
        size = max(1, EVAL_TOKENS[device.partition(":")[0]] // context)
        self.parts: list[list[Tensor]] = []
        for first in range(0, len(batch.tokens_NT), size):
            chosen = (rows_P >= first) & (rows_P < first + size)
            if chosen.any():
                inputs = [tensor[first : first + size] for tensor in batch.inputs]
                part = [*inputs, rows_P[chosen] - first, columns_P[chosen]]
                self.parts.append([tensor.to(device) for tensor in part])

    @torch.no_grad()
    def __call__(self, model: Model, step: int) -> None:
        """Save the predictions of a model that has trained for `step` steps."""
        if not self.count:
            return
        model.eval()
        try:
            with hardware.autocast(self.plan.config):
                parts = [model.log_probabilities(*part).cpu().numpy() for part in self.parts]
        finally:
            model.train()
        log_PV = np.concatenate(parts)
        if not np.isfinite(log_PV).all():  # the loop will report divergence
            return
        header = PredictionsHeader(
            run=self.plan.run.id,
            step=step,
            data_fingerprint=self.plan.data.fingerprint,
            positions_sha256=self.digest,
            positions=self.count,
            context=self.plan.config.model.context,
        )
        self.save(header, log_PV)


def find_answer_positions(batch: Batch, count: int) -> tuple[Tensor, Tensor]:
    """Return window and position of `count` answers, spread evenly over those that count."""
    rows_P, answers_P = np.nonzero(batch.targets_NA.numpy() != IGNORE)
    chosen = evenly_spaced(count, len(rows_P))
    rows_P, answers_P = rows_P[chosen], answers_P[chosen]
    positions_NA = batch.positions_NA
    columns_P = answers_P if positions_NA is None else positions_NA.numpy()[rows_P, answers_P]
    return torch.from_numpy(rows_P), torch.from_numpy(np.ascontiguousarray(columns_P))


def _digest(*parts: Tensor) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(np.ascontiguousarray(part.numpy(), np.int64).tobytes())
    return digest.hexdigest()

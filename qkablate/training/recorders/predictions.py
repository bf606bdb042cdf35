"""What a model says at fixed positions of the validation split, which depend on the data alone.

Shape suffixes: N windows, T context, P positions, V vocabulary.
"""

import hashlib
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from qkablate.data import IGNORE, Batch
from qkablate.data.batches import evenly
from qkablate.models.gpt import GPT
from qkablate.runs import predictions
from qkablate.runs.predictions import About
from qkablate.training import hardware
from qkablate.training.loop import EVAL_TOKENS
from qkablate.training.resolve import Plan

TOKENS = 8192  # that are read for it: an eighth of what an evaluation reads, unless it is told


class Predictor:
    """Has the model predict, and gives that to `keep`. Draws nothing."""

    def __init__(self, plan: Plan, keep: Callable[[About, np.ndarray], None]) -> None:
        self.plan, self.keep = plan, keep
        context, device = plan.config.model.context, plan.config.device
        count = predictions.positions(plan.data.vocabulary)
        self.count = 0
        if not (count and predictions.steps(plan.config)):
            return
        windows = max(1, min(count, TOKENS // context))
        batch = plan.data.sample("val", count=windows, context=context)
        rows_P, columns_P = places(batch, count)
        self.count = len(rows_P)
        self.digest = _digest(batch.tokens_NT, rows_P, columns_P)
        size = max(1, EVAL_TOKENS[device.partition(":")[0]] // context)
        self.parts: list[tuple[Tensor, Tensor, Tensor]] = []
        for first in range(0, len(batch.tokens_NT), size):
            own = (rows_P >= first) & (rows_P < first + size)
            if own.any():
                part = batch.tokens_NT[first : first + size], rows_P[own] - first, columns_P[own]
                self.parts.append((part[0].to(device), part[1].to(device), part[2].to(device)))

    @torch.no_grad()
    def __call__(self, model: GPT, step: int) -> None:
        if not self.count:
            return
        model.eval()
        try:
            with hardware.autocast(self.plan.config):
                parts = [model.log_probabilities(*part).cpu().numpy() for part in self.parts]
        finally:
            model.train()
        log_PV = np.concatenate(parts)
        if not np.isfinite(log_PV).all():  # it diverges, and the loop will say so
            return
        about = About(
            run=self.plan.run.id,
            step=step,
            data_fingerprint=self.plan.data.fingerprint,
            positions_sha256=self.digest,
            positions=self.count,
            context=self.plan.config.model.context,
        )
        self.keep(about, log_PV)


def places(batch: Batch, count: int) -> tuple[Tensor, Tensor]:
    """Window and place of so many answers, spread evenly over those that count."""
    rows_P, answers_P = np.nonzero(batch.targets_NA.numpy() != IGNORE)
    own = evenly(count, len(rows_P))
    rows_P, answers_P = rows_P[own], answers_P[own]
    where_NA = batch.where_NA
    columns_P = answers_P if where_NA is None else where_NA.numpy()[rows_P, answers_P]
    return torch.from_numpy(rows_P), torch.from_numpy(np.ascontiguousarray(columns_P))


def _digest(*parts: Tensor) -> str:
    found = hashlib.sha256()
    for part in parts:
        found.update(np.ascontiguousarray(part.numpy(), np.int64).tobytes())
    return found.hexdigest()

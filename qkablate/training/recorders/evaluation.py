"""Evaluation of a model on a whole split; draws no random numbers."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from qkablate.data import IGNORE, EvalMetrics
from qkablate.models.base import Model
from qkablate.training import hardware
from qkablate.training.distributed.ranks import Ranks
from qkablate.training.feed import on_device
from qkablate.training.resolve import RunPlan

# Tokens per forward pass; on a CPU larger batches are no faster.
EVAL_TOKENS = {"cpu": 4096, "cuda": 8192, "mps": 8192}
EVAL_LOGITS = 2**25  # upper bound on the logits of a forward pass


@dataclass(frozen=True)
class Evaluator:
    """Evaluation of one run's model."""

    plan: RunPlan
    model: Model
    loss: Callable[..., Tensor]
    loss_and_hits: Callable[..., tuple[Tensor, Tensor]]
    ranks: Ranks
    check_stop: Callable[[], None]  # called before each batch; raises to interrupt

    @torch.no_grad()
    def evaluate(self, split: str) -> EvalMetrics:
        """Return the sums over every token of a split."""
        config, data = self.plan.config, self.plan.data
        device, context = config.device, config.model.context
        tokens = EVAL_TOKENS[device.partition(":")[0]]
        limit = min(tokens, int(EVAL_LOGITS / data.vocabulary / data.answer_fraction))
        totals = EvalMetrics()
        self.model.eval()
        try:
            batches = data.split_batches(
                split, batch_size=max(1, limit // context), context=context
            )
            for batch, counts in self.ranks.shard_eval(batches):
                self.check_stop()
                moved = on_device(batch, device)
                arguments = *moved.inputs, moved.targets_NA, moved.positions_NA
                with hardware.autocast(config):
                    if batch.slices is None:
                        loss = self.loss(*arguments, reduction="sum").item()
                        if counts:
                            totals.add_loss(loss, int((batch.targets_NA != IGNORE).sum()))
                    else:
                        losses, hits = self.loss_and_hits(*arguments)
                        if counts:
                            totals.add_answers(batch, losses.cpu().numpy(), hits.cpu().numpy())
        finally:
            self.model.train()
        totals, *others = self.ranks.all_gather(totals)
        for other in others:
            totals.merge(other)
        return totals

"""Evaluation of a model on a whole split; draws no random numbers."""

from collections.abc import Callable

import torch

from qkablate.data import IGNORE, EvalMetrics
from qkablate.training import hardware
from qkablate.training.feed import on_device
from qkablate.training.resolve import RunPlan
from qkablate.training.step import TrainStep

# Tokens per forward pass; on a CPU larger batches are no faster.
EVAL_TOKENS = {"cpu": 4096, "cuda": 8192, "mps": 8192}
EVAL_LOGITS = 2**25  # upper bound on the logits of a forward pass


@torch.no_grad()
def evaluate_split(
    plan: RunPlan, step: TrainStep, split: str, check_stop: Callable[[], None]
) -> EvalMetrics:
    """Return the sums over every token of a split.

    `check_stop` is called before each batch and raises to interrupt.
    """
    config, data = plan.config, plan.data
    device, context = config.device, config.model.context
    tokens = EVAL_TOKENS[device.partition(":")[0]]
    limit = min(tokens, int(EVAL_LOGITS / data.vocabulary / data.answer_fraction))
    totals = EvalMetrics()
    step.model.eval()
    try:
        batches = data.split_batches(split, batch_size=max(1, limit // context), context=context)
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

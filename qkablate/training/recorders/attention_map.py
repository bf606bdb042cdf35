"""The attention of one text at the end of a run, the same text for all runs on the same data.

Shape suffixes: T tokens.
"""

from collections.abc import Callable

import numpy as np
import torch

from qkablate.diagnostics import attention_weights
from qkablate.models.base import Model
from qkablate.runs import attention_map
from qkablate.runs.attention_map import AttentionMapHeader
from qkablate.training.recorders.diagnostics import validation_tokens
from qkablate.training.resolve import RunPlan


def record_attention(
    plan: RunPlan,
    save: Callable[[AttentionMapHeader, np.ndarray, np.ndarray], None],
    model: Model,
    step: int,
) -> None:
    """Save the attention map of a model after `step` steps; draws no random numbers."""
    config, shape = plan.config, plan.config.model
    length = attention_map.token_count(shape.layers, shape.heads, shape.context)
    if not length:
        return
    tokens_T = validation_tokens(plan.data, shape.context)[0, :length]
    training = model.training
    model.eval()
    try:
        # In full precision, as `qkablate inspect` computes it.
        with torch.autocast(config.device.partition(":")[0], enabled=False):
            a_LHTT = attention_weights(model, tokens_T.to(config.device)).cpu().numpy()
    finally:
        model.train(training)
    if np.isfinite(a_LHTT).all():  # otherwise the loop will report divergence
        header = AttentionMapHeader(plan.run.id, step, plan.data.fingerprint)
        save(header, tokens_T.numpy(), attention_map.quantize(a_LHTT))

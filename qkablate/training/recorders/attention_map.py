"""The attention of one text at the end of a run, for those who want to see it: the same text for
all runs on the same data.

Shape suffixes: T tokens.
"""

from collections.abc import Callable

import numpy as np
import torch

from qkablate.diagnostics import attention_weights
from qkablate.models.gpt import GPT
from qkablate.runs import attention_map
from qkablate.runs.attention_map import About
from qkablate.training.recorders.diagnostics import validation_tokens
from qkablate.training.resolve import Plan


class Exemplify:
    """Looks at the model, and gives what it sees to `keep`. Draws nothing."""

    def __init__(self, plan: Plan, keep: Callable[[About, np.ndarray, np.ndarray], None]) -> None:
        self.plan, self.keep = plan, keep

    def __call__(self, model: GPT, step: int) -> None:
        config = self.plan.config
        own = config.model
        length = attention_map.length(own.layers, own.heads, own.context)
        if not length:
            return
        tokens_T = validation_tokens(self.plan.data, own.context)[0, :length]
        training = model.training
        model.eval()
        try:
            # In full precision, as `qkablate inspect` looks at it.
            with torch.autocast(config.device.partition(":")[0], enabled=False):
                a_LHTT = attention_weights(model, tokens_T.to(config.device)).cpu().numpy()
        finally:
            model.train(training)
        if not np.isfinite(a_LHTT).all():  # it diverges, and the loop will say so
            return
        about = About(self.plan.run.id, step, self.plan.data.fingerprint)
        self.keep(about, tokens_T.numpy(), attention_map.rounded(a_LHTT))

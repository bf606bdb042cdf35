"""Answers of a model at the positions of a window.

Shape suffixes: N windows, A answers, P answers that count, V vocabulary.
"""

import torch

from qkablate.data.batches import IGNORE, Batch
from qkablate.models.base import Model


@torch.inference_mode()
def answer_window(model: Model, batch: Batch, row: int) -> tuple[list[int], float]:
    """Return the most likely token at each target of a row, and the nats per target."""
    targets_A, positions_NA = batch.targets_NA[row], batch.positions_NA
    (answers_P,) = torch.nonzero(targets_A != IGNORE, as_tuple=True)
    columns_P = answers_P if positions_NA is None else positions_NA[row, answers_P]
    read = *(tokens_NT[row : row + 1] for tokens_NT in batch.inputs), columns_P * 0, columns_P
    device = model.output_weight.device
    log_PV = model.log_probabilities(*(tensor.to(device) for tensor in read)).cpu()
    losses_P = -log_PV.gather(1, targets_A[answers_P, None])
    return log_PV.argmax(1).tolist(), float(losses_P.mean())

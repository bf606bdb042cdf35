"""Muon of all runs of a program at once.

Shape suffixes: K runs, P numbers in the parameters of one run; N matrices of a parameter, M of all,
R rows, C columns.
"""

import math
from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from qkablate.training.optim.muon import RMS, Blocks, Muon, orthogonalize
from qkablate.training.vmapped.row_adamw import ParameterSlice, RowAdamW


class RowMuon(RowAdamW):
    """Muon with the momentum of all matrices in rows, and AdamW by rows for other parameters."""

    def __init__(
        self,
        optimizers: Sequence[Muon],
        places: Sequence[dict[nn.Parameter, ParameterSlice]],
        weights_KP: Tensor,
        grads_KP: Tensor,
        rows: int,
    ) -> None:
        """Take over the state of optimizers.

        Matrices of `rows` runs are orthogonalized: their number may decide which kernels run.
        """
        self._momentum_KP, self._rows = torch.zeros_like(weights_KP), rows
        blocks = optimizers[0].blocks
        self._matrices: dict[ParameterSlice, Blocks] = {
            part: blocks[parameter] for parameter, part in places[0].items() if parameter in blocks
        }
        super().__init__(optimizers, places, weights_KP, grads_KP)
        self._counted = next(
            n for n, part in enumerate(places[0].values()) if part not in self._matrices
        )
        self._beta = next(g["momentum"] for g in optimizers[0].param_groups if "momentum" in g)

    def _bind(self, row: int, n: int, state: dict[str, Tensor], part: ParameterSlice) -> None:
        if part not in self._matrices:
            super()._bind(row, n, state, part)
            return
        place = part.of(self._momentum_KP[row])
        if "momentum_buffer" in state:
            place.copy_(state["momentum_buffer"])
        state["momentum_buffer"] = place

    def _compute_updates(self) -> Tensor:
        matrices = self._orthogonalize()  # before the gradients are overwritten
        updates_KP = super()._compute_updates()
        for part, update_K in matrices.items():
            part.of(updates_KP).copy_(update_K)
        return updates_KP

    def _orthogonalize(self) -> dict[ParameterSlice, Tensor]:
        """Return the updates of the matrices, those of one shape orthogonalized together."""
        count = len(self._grads_KP)
        self._momentum_KP.lerp_(self._grads_KP, 1 - self._beta)
        ahead_KP = self._grads_KP.lerp(self._momentum_KP, self._beta)  # Nesterov's
        if missing := self._rows - count:
            ahead_KP = torch.cat([ahead_KP, ahead_KP[:1].expand(missing, -1)])
        alike = defaultdict[torch.Size, dict[ParameterSlice, Tensor]](dict)
        for part, blocks in self._matrices.items():
            x_KNRC = torch.vmap(blocks.split)(part.of(ahead_KP))
            alike[x_KNRC.shape[2:]][part] = x_KNRC
        updates = {}
        for shape, parts in alike.items():
            scale = RMS * math.sqrt(max(shape))
            y_MRC = orthogonalize(torch.cat([x_KNRC.flatten(0, 1) for x_KNRC in parts.values()]))
            sizes = [len(x_KNRC) * x_KNRC.shape[1] for x_KNRC in parts.values()]
            for part, y_NRC in zip(parts, y_MRC.split(sizes), strict=True):
                y_KNRC = y_NRC.unflatten(0, (self._rows, -1))[:count]
                updates[part] = torch.vmap(self._matrices[part].join)(y_KNRC).float() * scale
        return updates

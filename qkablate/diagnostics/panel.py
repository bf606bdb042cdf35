"""All diagnostics of a model at one step, as a row of metrics."""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qkablate.attention import Attention
from qkablate.diagnostics import circuits, patterns
from qkablate.models.base import AttentionLayer, Model
from qkablate.randomness import named_generator

TOKENS = 512  # per measurement, split into sequences, two at least
LENGTH = 512  # of a sequence; of longer contexts the first positions
DIGITS = 5
ATTENTION_MEASURES = (*patterns.MEASURES, *patterns.ROUNDING_MEASURES)
_MAX_NUMEL = 2**24  # of the matrices that are measured together


class DiagnosticPanel:
    """Measures one model repeatedly without changing it."""

    def __init__(
        self,
        model: Model,
        *inputs: Tensor,
        starts: Iterable[Attention],
        autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        """Prepare the measurements on these inputs of the model: tokens_BT, or a source before it.

        Positions of PAD are not measured. `starts` are the attention layers at initialization,
        where known; the streams are computed under `autocast`, that of training.
        """
        self.model, self.inputs, self.autocast = model, inputs, autocast
        self.device = inputs[-1].device
        # Induction is a matter of decoders.
        is_decoder = model.config.form == "decoder"
        self.repeats_BT = repeat_blocks(inputs[-1]) if is_decoder else None
        # The initial matrices stay on the CPU: they are a copy of the attention weights.
        self.starts: dict[str, list[Any]] = {side: [] for side in ("qk", "ov")}
        for layer in starts:
            for side, matrices in self.starts.items():
                matrix = _matrix(side, layer.to(self.device))
                matrices.append(matrix and circuits.move(matrix, "cpu"))

    @torch.no_grad()
    def row(self) -> dict[str, dict[str, list[Any]]]:
        """Return {"qk": {measure: [[value per head] per layer]}, "ov": …, "attention": …}.

        None replaces layers without the measure and values that are not finite.
        """
        kind, training = self.device.type, self.model.training
        self.model.eval()
        try:
            with torch.autocast(kind, enabled=False):
                row = {side: self._circuits(side) for side in self.starts}
                row["attention"] = self._attention()
        finally:
            self.model.train(training)
        return row

    def _circuits(self, side: str) -> dict[str, list[Any]]:
        layers = [layer.module for layer in self.model.attention_layers()]
        row: dict[str, list[Any]] = {name: [None] * len(layers) for name in circuits.MEASURES}
        # The layers of some sites may have other circuits than the rest.
        by_form: dict[tuple[object, ...], dict[int, Attention]] = {}
        for number, layer in enumerate(layers):
            spec = layer.qk.spec
            form = type(layer.qk), type(layer.ov), spec.d_model, spec.d_keys
            by_form.setdefault(form, {})[number] = layer
        for alike in by_form.values():
            self._measure_circuits(side, alike, row)
        # Narrow layers have fewer singular values than the rest.
        most = max((len(values_H[0]) for values_H in row["singular"] if values_H), default=0)
        for values_H in filter(None, row["singular"]):
            values_H[:] = [values + [None] * (most - len(values)) for values in values_H]
        return row

    def _measure_circuits(
        self, side: str, layers: dict[int, Attention], row: dict[str, list[Any]]
    ) -> None:
        """Fill in the measures of some layers, all of one form."""
        starts, numbers = self.starts[side], [*layers]
        first_layer = layers[numbers[0]]
        if (first_matrix := _matrix(side, first_layer)) is None:
            return
        # On the device of the model, except where it does not support fp64.
        device = "cpu" if self.device.type == "mps" else self.device
        spec, factors = first_layer.qk.spec, getattr(first_layer, side).factors
        size = max(1, _MAX_NUMEL // sum(t.numel() for t in vars(first_matrix).values()))
        for first in range(0, len(numbers), size):
            found = {n: _matrix(side, layers[n]) for n in numbers[first : first + size]}
            matrices = {number: matrix for number, matrix in found.items() if _is_finite(matrix)}
            if not matrices:
                continue
            matrix = circuits.stack([*matrices.values()], device)
            start = circuits.stack([starts[n] for n in matrices], device) if starts else None
            try:
                values = circuits.compute_measures(
                    matrix, start, rank=spec.d_head, two_factors=factors == 2
                )
            except torch.linalg.LinAlgError:  # type: ignore[attr-defined]  # not converged
                continue
            for name, value in values.items():
                heads = () if value is None else value.cpu().split(spec.heads)
                for number, value_H in zip(matrices, heads, strict=False):
                    row[name][number] = round_digits(value_H.tolist())

    def _attention(self) -> dict[str, list[Any]]:
        row: dict[str, list[Any]] = {name: [] for name in ATTENTION_MEASURES}
        layers: list[dict[str, Tensor | None]] = []
        for layer, streams in self._run(*self.inputs):
            mask_BT, key_mask_BS = self.model.padding_masks(layer, *self.inputs)
            s_BHTS = patterns.attention_scores(layer, streams, key_mask_BS)
            values = patterns.compute_patterns(s_BHTS, is_self=layer.is_self, query_mask_BT=mask_BT)
            if layer.is_self:
                values |= patterns.compute_rounding(
                    layer.module, streams[0], self.autocast, mask_BT
                )
            layers.append(values)
        if self.repeats_BT is not None:
            for values, (layer, streams) in zip(layers, self._run(self.repeats_BT), strict=True):
                values |= patterns.compute_repeat_patterns(
                    patterns.attention_scores(layer, streams)
                )
        for name in ATTENTION_MEASURES:
            for values in layers:
                value_H = values.get(name)
                row[name].append(None if value_H is None else round_digits(value_H.tolist()))
        return row

    def _run(self, *inputs: Tensor) -> Iterator[tuple[AttentionLayer, tuple[Tensor, ...]]]:
        """Yield each attention layer and its streams, which are computed as training does."""
        steps = self.model.attention_inputs(*inputs)
        while True:
            with self.autocast():
                item = next(steps, None)
            if item is None:
                return
            yield item


def repeat_blocks(tokens_BT: Tensor) -> Tensor:
    """Return sequences of a random block of tokens and its repetition, always the same.

    The tokens of a block are drawn from the given ones, without replacement where there are enough.
    """
    rows, length = tokens_BT.shape
    block = max(1, length // 2)
    known = np.unique(tokens_BT.cpu().numpy())
    rng = named_generator(0, "mechanism", "repeats")
    replace = len(known) < block
    blocks_BT = np.stack([rng.choice(known, block, replace=replace) for _ in range(rows)])
    return torch.from_numpy(np.tile(blocks_BT, 2)).to(tokens_BT)


def round_digits(value: Any) -> Any:
    """Round to the digits that are stored; None for values that are not finite."""
    if isinstance(value, list):
        return [round_digits(item) for item in value]
    return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None


def _is_finite(matrix: Any) -> bool:
    return all(bool(part.isfinite().all()) for part in vars(matrix).values())


def _matrix(side: str, layer: Attention) -> circuits.Matrix | None:
    qk, ov = layer.qk, layer.ov
    return circuits.qk_matrix(qk) if side == "qk" else circuits.ov_matrix(ov, qk)

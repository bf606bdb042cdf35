"""Share of a model's circuits that each form of the catalogue can hold, without training.

Shape suffixes: L layers, H heads, B batch, T tokens, V vocabulary.
"""

import copy
import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from qkablate.attention import Attention
from qkablate.attention.linalg import expect_rank
from qkablate.attention.projection.holding import HeldPart, LayerMeasure
from qkablate.attention.projection.project import (
    compute_moments,
    find_obstacle,
    set_output_,
    set_scores_,
)
from qkablate.config import ModelConfig, VariantConfig, resolve_variant, variants
from qkablate.errors import UserError
from qkablate.models.base import AttentionLayer, Model
from qkablate.models.catalogue import make_attention

EXACT = 1e-6  # relative errors below it are those of rounding
TOKENS_PER_DIMENSION = 8  # of the stream, so that its second moments are known
Progress = Callable[[str, int, int], None]  # of a stage: its name, steps done, all steps
_RESIDUAL_TOKENS = 64  # of the sequence whose logits are compared


@dataclass(frozen=True)
class Form:
    """A form of the catalogue and what it loses of a model; errors are relative."""

    variant: str
    params: int  # of all attention layers
    share: float  # of those of the model
    layers: list[HeldPart]
    logits: float | None = None  # max |Δ| / max |logit| of the model in this form, if it is exact

    @property
    def scores(self) -> float:
        """Root mean square of the layers' errors of the scores."""
        return _rms([layer.scores for layer in self.layers])

    @property
    def output(self) -> float:
        """The same of the outputs."""
        return _rms([layer.output for layer in self.layers])

    @property
    def is_exact(self) -> bool:
        """True if every layer is held but for rounding."""
        return all(max(layer.scores, layer.output) < EXACT for layer in self.layers)

    def content(self) -> dict[str, Any]:
        """Return the form for JSON."""
        row: dict[str, Any] = {"variant": self.variant, "params": self.params, "share": self.share}
        row |= {"scores": self.scores, "output": self.output, "logits": self.logits}
        row["layers"] = [vars(layer) for layer in self.layers]
        rounded: dict[str, Any] = _round(row)
        return rounded


@dataclass(frozen=True)
class Forms:
    """The forms that can hold a part of a model, the best first, and why the others cannot."""

    forms: list[Form]
    obstacles: dict[str, str]  # by variant
    precision: str  # of the comparison of the logits

    def content(self) -> dict[str, Any]:
        """Return the errors of the forms for JSON."""
        return {
            "forms": [form.content() for form in self.forms],
            "obstacles": self.obstacles,
            "precision": self.precision,
            "exact_below": EXACT,
        }


@torch.no_grad()
def measure_forms(
    model: Model,
    config: ModelConfig,
    variant: VariantConfig,
    inputs: tuple[Tensor, ...],
    precision: str = "fp64",
    progress: Progress = lambda stage, done, total: None,
) -> Forms:
    """Measure every form of the catalogue, on what the layers read in one pass over the inputs.

    Of forms that hold everything, the logits are compared with the model's in `precision`, fp64 or
    fp32. One layer at a time is in memory in fp64.
    """
    layers = model.attention_layers()
    targets, obstacles = _find_targets(layers, config, variant)
    held: dict[str, list[HeldPart]] = {name: [] for name in targets}
    steps, training = itertools.count(1), model.training
    total = len(layers) * (1 + len(targets))
    model.eval()
    progress("forms", 0, total)
    for layer, streams in model.attention_inputs(*inputs):
        masks = model.padding_masks(layer, *inputs)
        moments = compute_moments(layer.module, streams, *masks, causal=layer.causal)
        measure = LayerMeasure(layer.module, moments)
        progress("forms", next(steps), total)
        for name, sites in targets.items():
            held[name].append(measure.measure(sites[layer.site]))
            progress("forms", next(steps), total)
    model.train(training)
    own = sum(_count(layer.module) for layer in layers)
    forms = []
    for name, sites in targets.items():
        params = sum(_count(sites[layer.site]) for layer in layers)
        forms.append(Form(name, params, params / own, held[name]))
    exact = [form.variant for form in forms if form.is_exact]
    make = functools.partial(_make, config=config, variant=variant)
    residuals = _compare_logits(model, make, exact, inputs, precision, progress)
    forms = [replace(form, logits=residuals.get(form.variant)) for form in forms]
    forms.sort(key=lambda form: (0.0 if form.is_exact else _worst(form), form.params))
    return Forms(forms, obstacles, precision)


def _worst(form: Form) -> float:
    return max(form.scores, form.output)


def _find_targets(
    layers: list[AttentionLayer], config: ModelConfig, variant: VariantConfig
) -> tuple[dict[str, dict[str, Attention]], dict[str, str]]:
    """Return an empty layer of each form for every site, and why other forms cannot be used."""
    sources = {layer.site: layer.module for layer in layers}
    targets: dict[str, dict[str, Attention]] = {}
    obstacles: dict[str, str] = {}
    for name in variants():
        try:
            with torch.device("meta"):
                sites = {site: _make(name, site, config, variant) for site in sources}
        except UserError as error:
            obstacles[name] = str(error).rpartition(" is not supported: ")[2]
            continue
        reasons = [find_obstacle(sources[site], target) for site, target in sites.items()]
        if reason := next(filter(None, reasons), ""):
            obstacles[name] = reason
        else:
            targets[name] = sites
    return targets, obstacles


def _make(name: str, site: str, config: ModelConfig, variant: VariantConfig) -> Attention:
    """Return a layer of a form of the catalogue, with what the model's variant keeps."""
    kept = {"init": variant.init, "rope_dims": variant.rope_dims, "sites": variant.sites}
    form = VariantConfig(**{**variants()[name], **kept})
    return make_attention(config, resolve_variant(form, config), site)


def _compare_logits(
    model: Model,
    make: Callable[[str, str], Attention],
    names: list[str],
    inputs: tuple[Tensor, ...],
    precision: str,
    progress: Progress,
) -> dict[str, float]:
    """Return max |Δ| / max |logit| of one sequence for each form.

    A layer is converted when the model computes it, and dropped after that.
    """
    if not names:
        return {}
    dtype = torch.float64 if precision == "fp64" else torch.float32
    firsts = (tokens_BT[0] for tokens_BT in inputs)
    tokens = tuple(row_T[row_T >= 0][None, :_RESIDUAL_TOKENS] for row_T in firsts)  # no padding
    copied = copy.deepcopy(model).to(dtype).eval()
    expected_BTV, residuals = copied(*tokens), {}
    layers = copied.attention_layers()

    def compute_converted(
        name: str, site: str, module: Attention, args: Any, kwargs: Any, output: Tensor
    ) -> Any:
        return _convert(module, make(name, site)).to(dtype).eval()(*args, **kwargs)

    for number, name in enumerate(names):
        progress("exact forms", number, len(names))
        hooks = [
            layer.module.register_forward_hook(
                functools.partial(compute_converted, name, layer.site), with_kwargs=True
            )
            for layer in layers
        ]
        difference_BTV = copied(*tokens) - expected_BTV
        for hook in hooks:
            hook.remove()
        largest = expected_BTV.abs().max().clamp(min=torch.finfo(dtype).tiny)
        residuals[name] = float(difference_BTV.abs().max() / largest)
    return residuals


def _convert(source: Attention, target: Attention) -> Attention:
    """Return the target with the circuits of the source, which it holds."""
    source, target = copy.deepcopy(source).double(), target.double()
    heads = [*range(source.qk.spec.heads)]
    factors = None if source.no_circuit_reason else source.qk.low_rank_factors()
    with expect_rank(None if factors is None else factors[0].shape[-1]):
        set_scores_(source, target, heads)
        set_output_(source, target, heads)
    return target


def _count(layer: Attention) -> int:
    return sum(parameter.numel() for parameter in layer.parameters())


def _rms(values: list[float]) -> float:
    return math.sqrt(sum(value**2 for value in values) / len(values))


def _round(value: Any) -> Any:
    """Return nested values with four digits; None for numbers that are not finite."""
    if isinstance(value, dict):
        return {key: _round(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_round(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.4g}") if math.isfinite(value) else None
    return value

"""The catalogue of variants as records."""

from dataclasses import dataclass
from typing import Any

from qkablate import config
from qkablate.config import ModelConfig, VariantConfig, resolve_variant


@dataclass(frozen=True)
class Variant:
    """A variant of the catalogue, described at the default size."""

    name: str
    qk: str
    ov: str
    norm: str
    mask_self: bool
    parameters: str  # per layer, as a formula
    without: str  # matrices of standard that it lacks
    equation: str  # of B_h and M_h where they are not those of standard
    match: str  # of the initial scores with standard's: exact, spread or none
    source: str  # where it comes from


def variants() -> list[Variant]:
    """Return the variants: standard, then those that change scores, values, both."""
    entries = sorted(config.variants().items(), key=_order)
    return [_describe(name, entry) for name, entry in entries]


def _order(item: tuple[str, dict[str, Any]]) -> tuple[bool, bool, bool, str]:
    name, entry = item
    changes_ov, changes_qk = entry["ov"] != "separate", entry["qk"] != "separate"
    return name != "standard", changes_ov, changes_ov and changes_qk, name


def _describe(name: str, entry: dict[str, Any]) -> Variant:
    from qkablate.attention.ov.factored import SeparateOV
    from qkablate.attention.qk.factored import SeparateQK
    from qkablate.models.catalogue import make_attention

    model = ModelConfig()
    variant = resolve_variant(VariantConfig(**entry), model)
    layer = make_attention(model, variant)
    removes = [part for part in (layer.qk.removes, layer.ov.removes) if part]
    # Parts that are those of standard are not mentioned.
    changed = [p for p in layer.parts if type(p) not in (SeparateQK, SeparateOV)] or [layer.qk]
    equations = [part.equation for part in changed] if name != "standard" else [layer.equation]
    equations += ["no token attends to itself"] if layer.mask_self else []
    groups = entry.get("groups")
    count = "" if groups == 1 else f"{groups} "
    return Variant(
        name=name,
        qk=variant.qk,
        ov=variant.ov,
        norm=variant.norm,
        mask_self=variant.mask_self,
        parameters=layer.params if groups is None else layer.params.replace(" g ", f" {count}"),
        without=", ".join(dict.fromkeys(removes)),
        equation="; ".join(equations),
        match=layer.match,
        source="; ".join(dict.fromkeys(part.source for part in changed if part.source)),
    )

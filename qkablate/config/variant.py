"""The catalogue of variants, and the resolved rank, groups, rope_dims and name of one."""

import dataclasses
import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from qkablate.config.schema import ModelConfig, VariantConfig
from qkablate.errors import ImpossibleConfig, UserError, nearest_hint

# Circuits with a rank, and what `auto` resolves to, given d_model and heads.
RANKS: dict[str, Callable[[int, int], int]] = {
    "low_rank": lambda width, heads: max(1, width // heads // 2),
    "collaborative": lambda width, heads: max(1, width // 4),
    "latent": lambda width, heads: max(1, width // 4),
}
GROUPED = ("grouped",)
_USED_BY = {"rank": RANKS, "groups": GROUPED}
# Sizes of a variant beside the model's, and what they are called in its name.
SIZES = {"rank": "r", "groups": "g", "rope_dims": "rope"}
# Where a model of each form has attention layers, in the order of computation.
SITES = {
    "decoder": ("decoder",),
    "encoder": ("encoder",),
    "encoder_decoder": ("encoder", "decoder", "cross"),
}


def layer_names(model: ModelConfig) -> list[str]:
    """Return a name of each attention layer, in the order of computation.

    It is L0, or encoder_L0 where the model has several sites.
    """
    if model.form != "encoder_decoder":
        return [f"L{i}" for i in range(model.layers)]
    encoder = [f"encoder_L{i}" for i in range(model.encoder_layers or model.layers)]
    return encoder + [f"{site}_L{i}" for i in range(model.layers) for site in ("decoder", "cross")]


def variant_sites(variant: VariantConfig, model: ModelConfig) -> tuple[str, ...]:
    """Return the sites whose attention layers carry the variant."""
    known = SITES[model.form]
    if variant.sites == "all":
        return known
    chosen = variant.sites.split("+")
    if "all" in chosen or len({*chosen}) < len(chosen):
        problem = "all stands alone" if "all" in chosen else "a site is named twice"
        raise UserError(f"variant.sites: '{variant.sites}': {problem}")
    for site in chosen:
        if site not in known:
            joined = ", or some joined by +" if len(known) > 1 else ""
            raise UserError(
                f"variant.sites: '{site}' is not a site of model.form={model.form}"
                f" (allowed: all, {', '.join(known)}{joined}){nearest_hint(site, known)}"
            )
    return tuple(site for site in known if site in chosen)


def stream_width(model: ModelConfig, site: str) -> int:
    """Return the width of the stream that a site writes to."""
    return (site == "encoder" and model.encoder_d_model) or model.d_model


def mlp_share(model: ModelConfig) -> float:
    """Return the share of `mlp_ratio` that the units have, for as many parameters in all."""
    return 2 / 3 if model.mlp == "swiglu" else 1.0


def mlp_units(model: ModelConfig, d_model: int | None = None) -> int:
    """Return the width of the MLP beside a stream."""
    return round(model.mlp_ratio * mlp_share(model) * (d_model or model.d_model))


def _narrowest(variant: VariantConfig, model: ModelConfig) -> int:
    """Return the width of the narrowest stream that a site of the variant reads."""
    sites = variant_sites(variant, model)
    read = {*sites, "encoder"} if "cross" in sites else sites
    return min(stream_width(model, site) for site in read)


def check_variant(variant: VariantConfig, model: ModelConfig) -> None:
    """Check rank, groups and rope_dims against the model, and that the circuits use them."""
    if variant.mask_self and variant_sites(variant, model) == ("cross",):
        raise ImpossibleConfig(
            "variant.sites: cross-attention has no self to mask; choose encoder or decoder"
        )
    width = _narrowest(variant, model)
    if isinstance(variant.rank, int) and variant.rank > width:
        key = "d_model" if width == model.d_model else "encoder_d_model"
        raise ImpossibleConfig(
            f"variant.rank: {variant.rank} is above model.{key}={width},"
            " and no matrix of that width has a higher rank"
        )
    if isinstance(variant.groups, int) and model.heads % variant.groups:
        raise ImpossibleConfig(
            f"variant.groups: {variant.groups} does not divide model.heads={model.heads}"
            f" (allowed: {list_divisors(model.heads)})"
        )
    if variant.rope_dims is not None and variant_sites(variant, model) == ("cross",):
        raise ImpossibleConfig(
            "variant.rope_dims: the two streams of cross-attention have no distance to rotate by;"
            " choose other variant.sites"
        )
    if variant.rope_dims is not None and model.position != "rope":
        raise ImpossibleConfig(
            f"variant.rope_dims: {variant.rope_dims} dimensions to rotate need model.position=rope,"
            f" not {model.position}"
        )
    if variant.rope_dims is not None and variant.rope_dims % 2:
        raise ImpossibleConfig(
            f"variant.rope_dims: {variant.rope_dims} is odd, but rope rotates pairs of dimensions"
            f" (nearest: {variant.rope_dims - 1}, {variant.rope_dims + 1})"
        )
    known = {entry[side] for entry in variants().values() for side in ("qk", "ov")}
    if variant.file is not None or not {variant.qk, variant.ov} <= known:
        return  # a circuit from a file checks its own keys
    for key, circuits in _USED_BY.items():
        value = getattr(variant, key)
        if value not in ("auto", None) and not {variant.qk, variant.ov} & {*circuits}:
            raise ImpossibleConfig(describe_unused(variant, key))


def describe_unused(variant: VariantConfig, key: str) -> str:
    """Return the message that the circuits of a variant have no rank or no groups."""
    return (
        f"variant.{key}: qk={variant.qk} and ov={variant.ov} have no {key}"
        f" (used by: {', '.join(_USED_BY[key])})"
    )


def resolve_variant(variant: VariantConfig, model: ModelConfig) -> VariantConfig:
    """Resolve rank, groups, rope_dims where they are used (else null), lr=2 to 2.0; and name it.

    Sites that are all of the model's, and those of standard, are `all`.
    """
    rank = None if variant.rank == "auto" else variant.rank
    groups = None if variant.groups == "auto" else variant.groups
    if rank is None and variant.qk in RANKS:
        rank = RANKS[variant.qk](_narrowest(variant, model), model.heads)
    if groups is None and {variant.qk, variant.ov} & {*GROUPED}:
        divisors = [g for g in range(1, model.heads // 2 + 1) if model.heads % g == 0]
        groups = max(divisors, default=1)
    rope_dims = variant.rope_dims
    if rope_dims is None and variant.qk == "latent" and model.position == "rope":
        widths = [
            stream_width(model, site) for site in variant_sites(variant, model) if site != "cross"
        ]
        rope_dims = max(1, min(widths) // model.heads // 4) * 2 if widths else None
    lr = variant.lr if isinstance(variant.lr, str) else float(variant.lr)
    sites, is_standard = variant_sites(variant, model), is_standard_attention(variant)
    words = "all" if is_standard or sites == SITES[model.form] else "+".join(sites)
    variant = dataclasses.replace(variant, rank=rank, groups=groups, lr=lr, sites=words)
    variant = dataclasses.replace(variant, rope_dims=rope_dims)
    return dataclasses.replace(variant, name=variant_name(variant))


def is_standard_attention(variant: VariantConfig) -> bool:
    """Return whether a layer of this variant is one of the standard variant."""
    circuits = {variant.qk, variant.ov, variant.norm}
    changed = variant.mask_self or variant.file is not None or variant.init == "symmetric"
    changed = changed or variant.rope_dims is not None
    return circuits == {"separate", "none"} and not changed


def variant_name(variant: VariantConfig) -> str:
    """Return the user's own name, the catalogue's for these circuits, or 'qk+ov'.

    Rank or groups are appended where the catalogue leaves them open, and sites that are not all.
    """
    values = dataclasses.asdict(variant)
    known = {
        name: entry
        for name, entry in variants().items()
        if all(values[key] == value for key, value in entry.items() if key != "name")
    }
    # mqa is gqa with one group: take the most specific entry.
    name = max(known, key=lambda name: (len(known[name]), name == variant.name), default="")
    entry = known.get(name, {})
    numbers = "".join(
        f"_{short}{values[key]}"
        for key, short in SIZES.items()
        if values[key] is not None and key not in entry
    )
    numbers += sites_suffix(variant.sites)
    if variant.name.removesuffix(numbers) not in variants():
        name = variant.name.removesuffix(numbers)
    elif not name:
        sides = [variant.qk] if variant.ov == "separate" else [variant.qk, variant.ov]
        if variant.file is not None and sides[0] == "separate":  # the file brings the other side
            del sides[0]
        norm = {"none": "", "qk": "qk_norm"}.get(variant.norm, variant.norm)
        parts = (*sides, norm, "mask_self" if variant.mask_self else "")
        name = "+".join(part for part in parts if part)
    return name + numbers


def sites_suffix(sites: str) -> str:
    """Return what resolved sites add to a variant's name: _encoder_cross; '' for all."""
    return "" if sites == "all" else "_" + sites.replace("+", "_")


def without_sizes(name: str) -> str:
    """Return the name of a variant without the numbers that it leaves open."""
    return re.sub(rf"(_({'|'.join(SIZES.values())})\d+)+$", "", name)


@functools.cache
def variants() -> dict[str, dict[str, Any]]:
    """Return the catalogue in conf/variant: {name: the values of its file}; standard first."""
    from omegaconf import OmegaConf

    defaults = {"ov": "separate", "norm": "none", "mask_self": False}
    files = sorted(
        (conf_dir() / "variant").glob("*.yaml"), key=lambda file: (file.stem != "standard", file)
    )
    entries: list[Any] = [OmegaConf.to_container(OmegaConf.load(file)) for file in files]
    fixed = [{key: value for key, value in entry.items() if value != "auto"} for entry in entries]
    return {entry["name"]: defaults | entry for entry in fixed}


def conf_dir() -> Path:
    """Return conf/ inside an installed package, or beside it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    return next(path for path in (package / "conf", package.parent / "conf") if path.is_dir())


def config_names(group: str) -> list[str]:
    """Return the names of the files in conf/<group>, the choices of a key such as `data`."""
    return sorted(path.stem for path in (conf_dir() / group).glob("*.yaml"))


def list_divisors(number: int) -> str:
    """List the divisors of a number: those up to 64, and itself."""
    divisors = [str(n) for n in range(1, min(number, 64) + 1) if number % n == 0]
    return ", ".join([*divisors, *(["…", str(number)] if number > 64 else [])])

"""The variants by name, and what is settled about one before a run: rank, groups, its true name."""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from qkablate.config.schema import ModelConfig, VariantConfig
from qkablate.errors import Impossible

# Circuits that leave a number open, and what `auto` makes of it: the least that is not standard's.
RANKS: dict[str, Callable[[ModelConfig], int]] = {
    "low_rank": lambda model: max(1, model.d_model // model.heads // 2),
    "collaborative": lambda model: max(1, model.d_model // 4),
}
GROUPED = ("grouped",)


def check_variant(variant: VariantConfig, model: ModelConfig) -> None:
    if isinstance(variant.rank, int) and variant.rank > model.d_model:
        raise Impossible(
            f"variant.rank: {variant.rank} is above model.d_model={model.d_model},"
            " and no matrix of that width has a higher rank"
        )
    if isinstance(variant.groups, int) and model.heads % variant.groups:
        some = [g for g in range(1, model.heads + 1) if model.heads % g == 0 and g <= 64]
        raise Impossible(
            f"variant.groups: {variant.groups} does not divide model.heads={model.heads}"
            f" (allowed: {', '.join(map(str, some))})"
        )
    own = {entry[side] for entry in variants().values() for side in ("qk", "ov")}
    if variant.file is not None or not {variant.qk, variant.ov} <= own:
        return  # a circuit from outside says itself what it uses
    for key, holders, used in (
        ("rank", RANKS, variant.qk in RANKS),
        ("groups", GROUPED, bool({variant.qk, variant.ov} & {*GROUPED})),
    ):
        given = getattr(variant, key)
        if given not in ("auto", None) and not used:
            raise Impossible(
                f"variant.{key}: {given} given, but qk={variant.qk}, ov={variant.ov} have none"
                f" ({', '.join(holders)} would)"
            )


def resolve_variant(variant: VariantConfig, model: ModelConfig) -> VariantConfig:
    """With numbers for rank and groups where the circuits have them, and a name that is true."""
    # Nothing is no number, either: null is what a resolved config says where none is used.
    rank = None if variant.rank == "auto" else variant.rank
    groups = None if variant.groups == "auto" else variant.groups
    if rank is None and variant.qk in RANKS:
        rank = RANKS[variant.qk](model)
    if groups is None and {variant.qk, variant.ov} & {*GROUPED}:
        divisors = [g for g in range(1, model.heads // 2 + 1) if model.heads % g == 0]
        groups = max(divisors, default=1)
    variant = dataclasses.replace(variant, rank=rank, groups=groups)
    return dataclasses.replace(variant, name=variant_name(variant))


def variant_name(variant: VariantConfig) -> str:
    """The name that tells the truth: the user's own, the catalogue's for these circuits, or
    'qk+ov'; with the rank or the number of groups, where those were open.
    """
    ours = dataclasses.asdict(variant)
    known = {
        name: entry
        for name, entry in variants().items()
        if all(ours[key] == value for key, value in entry.items() if key != "name")
    }
    # mqa is gqa with one group: the entry that says most.
    name = max(known, key=lambda name: (len(known[name]), name == variant.name), default="")
    entry = known.get(name, {})
    numbers = "".join(
        f"_{key[0]}{ours[key]}"
        for key in ("rank", "groups")
        if ours[key] is not None and key not in entry
    )
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


@functools.cache
def variants() -> dict[str, dict[str, Any]]:
    """The catalogue: variant name → what its file says, read from conf/variant; standard first."""
    from omegaconf import OmegaConf

    plain = {"ov": "separate", "norm": "none", "mask_self": False}
    files = sorted(
        (conf_dir() / "variant").glob("*.yaml"), key=lambda file: (file.stem != "standard", file)
    )
    entries: list[Any] = [OmegaConf.to_container(OmegaConf.load(file)) for file in files]
    said = [{key: value for key, value in entry.items() if value != "auto"} for entry in entries]
    return {entry["name"]: plain | entry for entry in said}


def conf_dir() -> Path:
    """conf/ inside an installed package, or beside it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    return next(path for path in (package / "conf", package.parent / "conf") if path.is_dir())

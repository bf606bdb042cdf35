"""Floors: uniform attention, which a baseline has to beat before arms can be called equal.

It is uniform where the compared arms differ from standard attention: at the sites of a translator
whose attention is not compared, a floor would show what that attention is worth.
"""

from collections import defaultdict
from collections.abc import Iterable

from qkablate.config.sweep import as_quoted
from qkablate.config.variant import is_standard_attention, sites_suffix
from qkablate.sweeps.planning.manifest import FLOOR, POSITION, Arm, without_variant

_Model = tuple[tuple[str, str], ...]  # its overrides


def is_floor(arm: Arm) -> bool:
    """Return whether an arm has uniform attention, at all sites or at some."""
    variant = arm.config.variant
    return variant.name == FLOOR + sites_suffix(variant.sites)


def is_position_only(arm: Arm) -> bool:
    """Return whether an arm has attention weights by position alone, at all sites or at some."""
    variant = arm.config.variant
    return variant.name == POSITION + sites_suffix(variant.sites)


def floor_sites(arm: Arm, baseline: Arm) -> str | None:
    """Return the sites at which the floor of a comparison is uniform; None if both are standard.

    They are the arm's, or the baseline's where the arm is standard.
    """
    variants = arm.config.variant, baseline.config.variant
    return next((v.sites for v in variants if not is_standard_attention(v)), None)


def plan_floors(arms: Iterable[Arm], *, one_at_a_time: bool) -> list[dict[str, str]]:
    """Return the overrides of uniform attention in each model whose attention is compared."""
    by_name = {arm.name: arm for arm in arms}
    kinds = {_attention_of(arm) for arm in by_name.values()}
    if len(kinds) < 2:
        return []
    differ_in_start = len({kind[:2] for kind in kinds}) == 1  # and in nothing else
    compared = defaultdict(set)  # by model
    sites = defaultdict[_Model, dict[str, None]](dict)  # as an ordered set
    for arm in by_name.values():
        baseline = by_name.get(arm.baseline or "", arm)
        home = baseline if one_at_a_time or differ_in_start else arm
        if "none" in home.controls:
            compared[_model_of(home)].add(_attention_of(arm))
        if (changed := floor_sites(arm, baseline)) is not None:
            for side in (arm, baseline):
                sites[_model_of(side)][changed] = None
    floors = []
    for model, attention in compared.items():
        if one_at_a_time and len(attention) < 2:
            continue  # another factor than attention
        for place in sites[model] or ["all"]:
            floor = {**dict(model), "variant": FLOOR}
            floors.append(floor if place == "all" else {**floor, "variant.sites": as_quoted(place)})
    return floors


def _attention_of(arm: Arm) -> tuple[str, str | None, str]:
    variant = arm.config.variant
    return variant.name, variant.file, variant.init


def _model_of(arm: Arm) -> _Model:
    return tuple(without_variant(arm.overrides).items())

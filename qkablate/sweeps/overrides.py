"""The arguments of `qkablate train` that make a frozen config."""

import dataclasses
from typing import Any

import yaml

from qkablate.config import Config, Role, conf_dir, flatten, keys_with, resolve_variant, variants
from qkablate.config.sweep import as_quoted
from qkablate.config.variant import SIZES, without_sizes


def config_overrides(config: Config) -> dict[str, str]:
    """Return the arguments that make the arm: both config groups and all non-default values."""
    # The nearest entry of the catalogue: low_rank_w for low_rank_w_r4, or for low_rank_w_r4_cross.
    everywhere = config.variant.name.removesuffix("_" + config.variant.sites.replace("+", "_"))
    names = (config.variant.name, everywhere, without_sizes(everywhere))
    name = next((name for name in names if name in variants()), "standard")
    variant = resolve_variant(dataclasses.replace(config.variant, name=name), config.model)
    defaults = flatten(Config()) | _load_group("variant", name)
    defaults |= _load_group("data", config.data.source) | {"variant.name": variant.name}
    overrides = {"variant": name, "data": config.data.source}
    used = {*keys_with(Role.ARM | Role.PAIR_FREE)} - {"data.source"}
    if config.optim.schedule != "wsd":
        used.remove("optim.cooldown")  # only wsd has one
    for key, value in flatten(config).items():
        unset = value is None and key.removeprefix("variant.") in SIZES
        if key in used and value != defaults.get(key) and not unset:
            overrides[key] = as_quoted(value)
    return overrides


def _load_group(group: str, name: str) -> dict[str, Any]:
    """Return the values of a file of a config group; {} if there is none."""
    path = conf_dir() / group / f"{name}.yaml"
    if not name.isidentifier() or not path.is_file():
        return {}
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    return {f"{group}.{key}": value for key, value in content.items() if key != "defaults"}

"""Runs outside any sweep as a study: an arm's runs differ in seed and learning rate alone."""

import dataclasses
import itertools
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from qkablate.analysis.study.study import Study, group_runs
from qkablate.config import (
    KEYS,
    Config,
    InitFromConfig,
    Role,
    check,
    explain,
    has_role,
    keys_with,
)
from qkablate.config.data import DATA_KEYS
from qkablate.config.variant import without_sizes
from qkablate.errors import UserError
from qkablate.runs.lease import LeaseObserver
from qkablate.runs.records import is_number, read_config, read_result
from qkablate.runs.run import IMPORTED, check_identity, label
from qkablate.sweeps.overrides import config_overrides
from qkablate.sweeps.planning.manifest import Arm, Changes, SweepRun
from qkablate.sweeps.running.state import RunState, read_run


def read_standalone_runs(folders: Iterable[Path]) -> Study:
    """Read runs from their folders; unreadable ones are listed in `unread`."""
    arms: dict[str, Arm] = {}  # by the settings that its runs share
    states: dict[str, tuple[RunState, str]] = {}
    unread = []
    ids: dict[tuple[Any, ...], str] = {}
    observer = LeaseObserver(by_file_times=True)
    folders = [*folders]
    for folder in folders:
        try:
            run, key = _read_run(folder, arms)
        except ValueError as error:
            unread.append(f"{folder.resolve().name}: its config.yaml cannot be read: {error}")
            continue
        if run.id in states:
            unread.append(f"{folder}: the same run as {states[run.id][0].folder}, which is shown")
            continue
        # Runs that differ in device or kernel have the same arm and seed: an arm has one run of a
        # seed, so that the later run begins another arm of the same settings.
        if ids.setdefault((key, *run.changes.items()), run.id) != run.id:
            arms[f"{key} {run.id}"] = arms[key]
            key = f"{key} {run.id}"
        state = RunState(run, folder)
        read_run(state, observer)
        if state.status == "interrupted" and arms[key].facts["data_fingerprint"] == IMPORTED:
            state.status, state.reason = "imported", ""
        states[run.id] = state, key
        if arms[key].params == 0:
            arms[key] = _with_sizes(arms[key], read_result(folder))
    named = _with_unique_names(arms)
    for state, key in states.values():
        state.run = dataclasses.replace(state.run, arm=named[key].name)
    arms_by_name = {arm.name: arm for arm in _with_baselines(list(named.values()))}
    entries, tuning = group_runs(arms_by_name, (state for state, _ in states.values()))
    out = str(folders[0].parent.parent) if folders else "outputs"
    expected = sum(state.status != "imported" for state, _ in states.values())
    return Study("runs", out, arms_by_name, entries, tuning, expected, unread=tuple(unread))


def _read_run(folder: Path, arms: dict[str, Arm]) -> tuple[SweepRun, str]:
    """Read a run and its arm's key, adding the arm to `arms`; ValueError if there is no run."""
    try:
        content = read_config(folder)
        # Missing in older runs.
        content.setdefault("init_from", dict(vars(InitFromConfig())))
        content["train"].setdefault("test_tokens", content["data"]["test_tokens"])
        content["train"].setdefault("vmap", 1)
        is_commands = content["data"]["source"] == "commands"
        content["data"].setdefault("extra_phrases", 0 if is_commands else None)
        identity = content["identity"]
        settings = {key: value for key, value in content.items() if key not in ("id", "identity")}
        key = json.dumps(_arm_settings(settings, identity), sort_keys=True, default=str)
        arm = arms.get(key) or _make_arm(settings, identity)
        run = _make_run(content, arm)
        frozen = arm.config_of(run.changes)
        if identity["data_fingerprint"] == IMPORTED:  # the rest is nobody's choice
            frozen = Config(variant=frozen.variant, model=frozen.model)
        _check(frozen)
        check_identity(content)
    except UserError as error:
        raise ValueError(str(error)) from None
    except (LookupError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(f"it was not written by a run ({type(error).__name__})") from None
    arms[key] = arm
    return run, key


def _check(config: Config) -> None:
    """Check a frozen config, in which a schedule without cool-down has cooldown 0.

    An archive may have a cache of data that is generated.
    """
    optim, data = config.optim, config.data
    if "cache" not in DATA_KEYS.get(data.source, ("cache",)):
        config = dataclasses.replace(config, data=dataclasses.replace(data, cache=None))
    if optim.schedule != "wsd" and optim.cooldown == 0:
        optim = dataclasses.replace(optim, cooldown="auto")
    check(dataclasses.replace(config, optim=optim))


def _arm_settings(settings: dict[str, Any], identity: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that the runs of one arm share."""
    shared = {k: dict(v) if isinstance(v, dict) else v for k, v in settings.items()}
    for name in KEYS.keys() - keys_with(Role.ARM):
        section, _, leaf = name.rpartition(".")
        (shared[section] if section else shared).pop(leaf, None)
    # The config does not determine the content of a file, or the numerics.
    outside = ("circuits_from_outside", "data_fingerprint", "numerics")
    parts = [identity[key] for key in outside]
    if "cuda_numerics" in identity:
        parts.append(identity["cuda_numerics"])
    return shared | {"identity": parts}


def _make_arm(settings: dict[str, Any], identity: dict[str, Any]) -> Arm:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Config), settings))
    except OmegaConfBaseException as error:
        raise ValueError(explain(error)) from None
    assert isinstance(config, Config)
    if not isinstance(steps := config.train.steps, int):
        raise ValueError(f"train.steps: '{steps}' is not a number: the config is not frozen")
    return Arm(
        name=label(config).removesuffix(f"-s{config.seed}"),
        variant=config.variant.name,
        controls=["none"],
        baseline=None,
        overrides=config_overrides(config),
        config=config,
        facts={key: identity[key] for key in ("vocabulary", "data_fingerprint")},
        # 0: unknown. Sizes follow from the first result of a run (_with_sizes); the test tokens
        # only serve to plan sweeps.
        test_tokens=0,
        params=0,
        total_params=0,
        flops=0.0,
    )


def _make_run(content: dict[str, Any], arm: Arm) -> SweepRun:
    changes: Changes = {"seed": int(content["seed"]), "optim.lr": float(content["optim"]["lr"])}
    for key, value in content["seeds"].items():
        if value != content["seed"]:
            changes[f"seeds.{key}"] = int(value)
    tuning = content["train"]["evaluate_test"] is False
    return SweepRun(str(content["id"]), f"{arm.name}-s{changes['seed']}", arm.name, tuning, changes)


def _with_sizes(arm: Arm, result: Mapping[str, Any] | None) -> Arm:
    """Return the arm with the sizes that a run recorded."""
    params, flops = ((result or {}).get(key) for key in ("params", "flops_per_token"))
    if not isinstance(params, dict) or not is_number(flops) or flops <= 0:
        return arm
    total, embedding = params.get("total"), params.get("embedding")
    if type(total) is not int or type(embedding) is not int or not 0 <= embedding < total < 2**60:
        return arm
    return dataclasses.replace(
        arm, params=total - embedding, total_params=total, flops=float(flops)
    )


def _with_unique_names(arms: dict[str, Arm]) -> dict[str, Arm]:
    """Return the arms with unique names: arms of one name get the settings in which they differ.

    Settings of the data are left out where the data set's name tells them apart.
    """
    by_name: dict[str, list[str]] = {}
    for key, arm in arms.items():
        by_name.setdefault(arm.name, []).append(key)
    named: dict[str, Arm] = {}
    for name, keys in by_name.items():
        words = {key: arms[key].overrides for key in keys}
        every = dict.fromkeys(itertools.chain(*words.values()))
        differ = [w for w in every if len({overrides.get(w) for overrides in words.values()}) > 1]
        if len({o["data"] for o in words.values()}) == len(
            {_data_words(o) for o in words.values()}
        ):
            differ = [word for word in differ if not word.startswith("data.")]
        for number, key in enumerate(keys):
            parts = [f"{w.rpartition('.')[2]}={words[key][w]}" for w in differ if w in words[key]]
            full = "-".join([name, *parts])
            if any(arm.name == full for arm in named.values()):
                full = f"{full}-{number}"
            named[key] = dataclasses.replace(arms[key], name=full)
    return {key: named[key] for key in arms}


def _data_words(overrides: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(f"{k}={v}" for k, v in overrides.items() if k == "data" or k.startswith("data."))


def _with_baselines(arms: list[Arm]) -> list[Arm]:
    """Set each arm's baseline: standard attention with equal settings and the nearest MLP width.

    It has the arm's rotated dimensions, if there is one.
    """

    def settings(arm: Arm) -> dict[str, str]:
        ignored = ("variant", "model.mlp_ratio")
        return {
            key: value
            for key, value in arm.overrides.items()
            if not key.startswith(ignored) and not has_role(key, Role.PAIR_FREE)
        } | {"data": str(arm.facts["data_fingerprint"])}

    def rotates_as(arm: Arm, other: Arm) -> bool:
        return arm.config.variant.rope_dims == other.config.variant.rope_dims

    standard = [arm for arm in arms if without_sizes(arm.variant) == "standard"]
    for i, arm in enumerate(arms):
        others = [other for other in standard if settings(other) == settings(arm)]
        alike = [other for other in others if rotates_as(arm, other) and other is not arm]
        others = alike or [other for other in others if other.variant == "standard"]
        if arm.variant != "standard" and others:
            ratio = arm.config.model.mlp_ratio
            distances = [abs(other.config.model.mlp_ratio - ratio) for other in others]
            nearest = others[distances.index(min(distances))]
            arms[i] = dataclasses.replace(arm, baseline=nearest.name)
    return sorted(arms, key=lambda arm: arm.variant != "standard")

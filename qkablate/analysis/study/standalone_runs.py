"""Runs that are in no sweep, or are asked for by themselves, read as if one held them: an arm is
what shares its config but for seed and learning rate, and stands against standard attention in the
same surroundings.
"""

import dataclasses
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from qkablate.analysis.study.study import Study, gather
from qkablate.config import (
    Config,
    StartConfig,
    check,
    conf_dir,
    explain,
    flatten,
    resolve_variant,
    variants,
)
from qkablate.config.sweep import as_quoted
from qkablate.errors import UserError
from qkablate.runs.lease import Observer
from qkablate.runs.records import is_number, read_config, read_result
from qkablate.runs.run import check_identity, label
from qkablate.sweeps.planning.manifest import Arm, Changes, Manifest, SweepRun
from qkablate.sweeps.running.state import State, read_run

# What differs from run to run of one arm, or changes no number.
_OF_THE_RUN = (
    *("seed", "seeds", "track", "out", "threads", "device", "attention", "diagnose"),
    *("id", "identity"),
)
_NO_NUMBER = ("threads", "attention.kernel", "train.eval_every")  # of a pair the two may differ
_APART = {("optim", "lr"), ("train", "checkpoint_every"), ("train", "read_test"), ("data", "cache")}
_APART |= {("train", "checkpoint_activations"), ("train", "shard")}
# Runs of one arm that were begun from trained ones have a parent each.
_APART |= {("start", "run"), ("start", "id"), ("start", "weights")}


def study_of(folders: Iterable[Path]) -> Study:
    """What cannot be read is named in `unread`."""
    arms: dict[str, Arm] = {}  # by what its runs share
    states: dict[str, tuple[State, str]] = {}
    unread = []
    taken: dict[tuple[Any, ...], str] = {}
    observer = Observer()
    folders = [*folders]
    for folder in folders:
        try:
            run, key = _read(folder, arms)
        except ValueError as error:
            unread.append(f"{folder.resolve().name}: its config.yaml cannot be read: {error}")
            continue
        if run.id in states:
            unread.append(f"{folder}: the same run as {states[run.id][0].folder}, which is shown")
            continue
        # Another device or kernel makes another run of the same arm and seed.
        place = (key, *run.changes.items())
        if taken.setdefault(place, run.id) != run.id:
            arms[f"{key} {run.id}"] = arms[key]
            key = f"{key} {run.id}"
        state = State(run, folder)
        read_run(state, observer)
        states[run.id] = state, key
        if arms[key].params == 0:
            arms[key] = _measured(arms[key], read_result(folder))
    named = _named(arms)
    for state, key in states.values():
        state.run = dataclasses.replace(state.run, arm=named[key].name)
    found = Manifest(
        name="runs",
        out=str(folders[0].parent.parent) if folders else "outputs",
        arms={arm.name: arm for arm in _with_baselines(list(named.values()))},
        runs=[state.run for state, _ in states.values()],
        finals=[],
        left_out=[],
        excluded=0,
    )
    known = [state for state, _ in states.values()]
    return gather(found, known, {}, len(known), [], tuple(unread))


def _read(folder: Path, arms: dict[str, Arm]) -> tuple[SweepRun, str]:
    """The run in a folder, and the key of its arm, which joins the others; ValueError for what no
    run writes.
    """
    try:
        content = read_config(folder)
        content.setdefault("start", dict(vars(StartConfig())))  # older runs have none
        key = json.dumps(_shared(content), sort_keys=True, default=str)
        arm = arms.get(key) or _arm(content)
        run = _run(content, arm)
        _check(arm.config_of(run.changes))
        check_identity(content)
    except UserError as error:
        raise ValueError(str(error)) from None
    except (LookupError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(f"it is not what a run writes ({type(error).__name__})") from None
    arms[key] = arm
    return run, key


def _check(config: Config) -> None:
    """Of a frozen config: where there is no cool-down, zero stands for it."""
    optim = config.optim
    if optim.schedule != "wsd" and optim.cooldown == 0:
        optim = dataclasses.replace(optim, cooldown="auto")
    check(dataclasses.replace(config, optim=optim))


def _shared(content: dict[str, Any]) -> dict[str, Any]:
    """What the runs of one arm have in common."""
    shared = {key: value for key, value in content.items() if key not in _OF_THE_RUN}
    for part, key in _APART:
        shared[part] = {k: v for k, v in shared[part].items() if k != key}
    identity = content["identity"]
    # Another text under the same path, or other numerics, makes another run of the same config.
    own = ("circuits_from_outside", "data_fingerprint", "numerics")
    return shared | {"identity": [identity[key] for key in own]}


def _arm(content: dict[str, Any]) -> Arm:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    plain = {key: value for key, value in content.items() if key not in ("id", "identity")}
    try:
        config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Config), plain))
    except OmegaConfBaseException as error:
        raise ValueError(explain(error)) from None
    assert isinstance(config, Config)
    if not isinstance(config.train.steps, int):
        raise ValueError(f"train.steps: '{config.train.steps}' is not what a frozen config holds")
    identity = content["identity"]
    return Arm(
        name=label(config).removesuffix(f"-s{config.seed}"),
        variant=config.variant.name,
        controls=["none"],
        baseline=None,
        words=_words(config),
        config=config,
        facts={key: identity[key] for key in ("vocabulary", "data_fingerprint")},
        held_out=0,
        params=0,
        total_params=0,
        flops=0.0,
    )


def _run(content: dict[str, Any], arm: Arm) -> SweepRun:
    changes: Changes = {"seed": int(content["seed"]), "optim.lr": float(content["optim"]["lr"])}
    for key, value in content["seeds"].items():
        if value != content["seed"]:
            changes[f"seeds.{key}"] = int(value)
    tuning = content["train"]["read_test"] is False
    return SweepRun(str(content["id"]), f"{arm.name}-s{changes['seed']}", arm.name, tuning, changes)


def _measured(arm: Arm, result: Mapping[str, Any] | None) -> Arm:
    """With the sizes that a run recorded."""
    params = (result or {}).get("params")
    flops = (result or {}).get("flops_per_token")
    if not isinstance(params, dict) or not is_number(flops) or flops <= 0:
        return arm
    total, embedding = params.get("total"), params.get("embedding")
    if type(total) is not int or type(embedding) is not int or not 0 <= embedding < total < 2**60:
        return arm
    own = total - embedding
    return dataclasses.replace(arm, params=own, total_params=total, flops=float(flops))


def _named(arms: dict[str, Arm]) -> dict[str, Arm]:
    """With names that tell them apart: what the arms of one name differ in is added."""
    by_name: dict[str, list[str]] = {}
    for key, arm in arms.items():
        by_name.setdefault(arm.name, []).append(key)
    named: dict[str, Arm] = {}
    for name, keys in by_name.items():
        words = {key: arms[key].words for key in keys}
        every = dict.fromkeys(word for own in words.values() for word in own)
        differ = [w for w in every if len({own.get(w) for own in words.values()}) > 1]
        for place, key in enumerate(keys):
            own = [f"{w.rpartition('.')[2]}={words[key][w]}" for w in differ if w in words[key]]
            full = "-".join([name, *own])
            several = full in {arm.name for arm in named.values()}
            named[key] = dataclasses.replace(arms[key], name=f"{full}-{place}" if several else full)
    return {key: named[key] for key in arms}


def _with_baselines(arms: list[Arm]) -> list[Arm]:
    """Standard attention in the same surroundings, with the MLP that is nearest in width."""

    def around(arm: Arm) -> dict[str, str]:
        apart = ("variant", "model.mlp_ratio", *_NO_NUMBER)
        own = {k: v for k, v in arm.words.items() if not k.startswith(apart)}
        return own | {"data": str(arm.facts["data_fingerprint"])}

    standard = [arm for arm in arms if arm.variant == "standard"]
    found = []
    for arm in arms:
        ratio = arm.config.model.mlp_ratio
        beside = [one for one in standard if arm not in standard and around(one) == around(arm)]
        beside.sort(key=lambda one: abs(one.config.model.mlp_ratio - ratio))
        found.append(dataclasses.replace(arm, baseline=beside[0].name if beside else None))
    return sorted(found, key=lambda arm: arm.variant != "standard")


def _words(config: Config) -> dict[str, str]:
    """What makes the arm on the command line: the two groups, and every value that is not the
    default.
    """
    own = _variant_word(config)
    defaults = flatten(Config()) | _group("variant", own) | _group("data", config.data.source)
    defaults["variant.name"] = resolve_variant(
        dataclasses.replace(config.variant, name=own), config.model
    ).name
    words = {"variant": own, "data": config.data.source}
    skipped = {f"{part}.{key}" for part, key in _APART} | {"data.source", "optim.lr"}
    if config.optim.schedule != "wsd":
        skipped.add("optim.cooldown")  # there is none to set
    for key, value in flatten(config).items():
        own_of_run = ("seed", "seeds", "track", "out", "device", "diagnose")
        if key.partition(".")[0] in own_of_run or key in skipped:
            continue
        unused = value is None and key in ("variant.rank", "variant.groups")
        if value != defaults.get(key) and not unused:
            words[key] = as_quoted(value)
    return words


def _variant_word(config: Config) -> str:
    """The entry of the catalogue that the variant is nearest to: low_rank_w for low_rank_w_r4."""
    name = config.variant.name
    begins = re.sub(r"_[rg]\d+$", "", name)
    return next((word for word in (name, begins) if word in variants()), "standard")


def _group(group: str, name: str) -> dict[str, Any]:
    """The values of one of the config groups' files; {} where there is no such file."""
    path = conf_dir() / group / f"{name}.yaml"
    if not name.isidentifier() or not path.is_file():
        return {}
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    own = {key: value for key, value in content.items() if key != "defaults"}
    return {f"{group}.{key}": value for key, value in own.items()}

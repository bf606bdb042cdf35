"""Expansion of a grid into frozen runs: each arm resolved, matched and paired with its baseline."""

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qkablate.config import (
    KEYS,
    Config,
    ControlConfig,
    GridConfig,
    config_names,
    flatten,
    no_such_key,
    variants,
)
from qkablate.config.sweep import as_quoted, fixes_length, list_also
from qkablate.config.variant import SIZES
from qkablate.errors import ImpossibleConfig, UserError, not_one_of
from qkablate.runs.run import LABEL_KEYS
from qkablate.sweeps.planning.arms import (
    ArmResolver,
    Overrides,
    share_compile,
    share_length_settings,
    share_test_tokens,
    share_vmap,
)
from qkablate.sweeps.planning.control import ControlOutOfReach, match_baseline
from qkablate.sweeps.planning.floors import plan_floors
from qkablate.sweeps.planning.manifest import (
    RUN_KEYS,
    VARIANT_KEYS,
    Arm,
    Changes,
    LeftOutArm,
    Manifest,
)
from qkablate.sweeps.planning.predicates import holds
from qkablate.sweeps.planning.tuning import tuning_runs
from qkablate.sweeps.planning.tuning_losses import RULES

# Keys whose values an arm's name shows without the key.
_IN_NAME = VARIANT_KEYS | {*LABEL_KEYS, *RUN_KEYS}
_OF_RUNS = re.compile(rf"(?<![\w.])({'|'.join(map(re.escape, RUN_KEYS))})(?![\w.])")


@dataclass(frozen=True)
class Grid:
    """The values to vary, and the controls to hold equal."""

    settings: GridConfig
    controls: dict[str, ControlConfig]
    choices: dict[str, list[str]]  # key → its values, as typed
    remote: bool = False  # other machines than this one train the runs


def expand_grid(
    grid: Grid,
    compose: Callable[[Overrides], Config],
    command: list[str],
    note: Callable[[int, int], None] = lambda done, total: None,
) -> Manifest:
    """Expand a grid; raise UserError for a mistake, or if no arm is left.

    `compose` makes a checked config of overrides; `note` receives the progress.
    """
    return _Expansion(grid, ArmResolver(compose, grid.remote)).expand(command, note)


@dataclass
class _Expansion:
    """The arms of a grid, as they are collected."""

    grid: Grid
    resolver: ArmResolver
    arms: dict[str, Arm] = field(default_factory=dict)  # by the id of their first run
    left_out: list[LeftOutArm] = field(default_factory=list)
    named_keys: list[str] = field(default_factory=list)  # shown with their values in names
    changes: list[Changes] = field(default_factory=list)  # seeds and rates of an arm's runs
    center: Overrides | None = None  # of design=one_at_a_time: the first value of every axis

    def expand(self, command: list[str], note: Callable[[int, int], None]) -> Manifest:
        settings = self.grid.settings
        for predicate in settings.filter:
            keys = _OF_RUNS.findall(predicate)[:1]
            _refuse_run_keys(f"filter: '{predicate}'", keys, "; a filter selects arms")
        self.changes = self._run_changes()
        axes = {key: values for key, values in self.grid.choices.items() if key not in RUN_KEYS}
        combinations = [*map(_name_variant_file, _combine(axes, settings.design))]
        if settings.design == "one_at_a_time":
            self.center = combinations[0]
        combinations = self._with_also(combinations)
        copies = 1 + len(list_also(settings))
        whole = copies * math.prod(len(values) for values in axes.values())
        cells = [*itertools.product(self.grid.controls, combinations)]
        included = []
        for number, cell in enumerate(cells):
            if self._is_included(*cell):
                included.append(cell)
            note(number + 1, len(cells))
        excluded = len(cells) - len(included)
        self.named_keys = _find_named_keys([overrides for _, overrides in included])
        added = 0
        for control, overrides in included:
            try:
                self._add(control, overrides)
                added += 1
            except (ImpossibleConfig, ControlOutOfReach) as reason:
                self._leave_out(control, overrides, reason)
        if not added and self.left_out:  # also where the user named one arm alone
            others = len(self.left_out) - 1
            more = f" (and {others} more, none of which is possible)" if others else ""
            first = self.left_out[0]
            raise UserError(f"{first.arm} is left out ({first.kind}): {first.reason}{more}")
        if not added:
            raise UserError(f"sweep.filter: excludes all arms, {excluded} of them")
        if settings.floor:
            self._add_floors()
        shared = share_length_settings(share_test_tokens(self.arms.values()))
        arms = {
            arm.name: dataclasses.replace(arm, baseline=None) if arm.baseline == arm.name else arm
            for arm in self._merge(share_compile(share_vmap(shared)))
        }
        if settings.tune:
            typed = self.grid.choices.get("optim.lr", [])
            rates = [self.resolver.compose({"optim.lr": text}).optim.lr for text in typed]
            by_arm = [tuning_runs(arm, rates, settings.tuning_seeds) for arm in arms.values()]
        else:
            by_arm = [[arm.run(change) for change in self.changes] for arm in arms.values()]
        return Manifest(
            name=settings.name,
            out=next(iter(arms.values())).config.out,
            arms=arms,
            runs=list({run.id: run for run in itertools.chain(*by_arm)}.values()),
            finals=self.changes if settings.tune else [],
            left_out=self.left_out,
            excluded=excluded,
            command=command,
            combinations=None if settings.design == "grid" else (len(combinations), whole),
            fixes_length=fixes_length(settings),
            tuning_seeds=settings.tuning_seeds if settings.tune else [],
            tuning_rules=RULES,
        )

    def _with_also(self, arms: list[Overrides]) -> list[Overrides]:
        """Return the arms, and each of them with the settings of `sweep.also`."""
        others = []
        for settings in list_also(self.grid.settings):
            _refuse_run_keys("also", settings, "; give it as an axis")
            also = {key: as_quoted(value) for key, value in settings.items()}
            for arm in arms:
                own = {key: value for key, value in arm.items() if not key.startswith("data.")}
                others.append(own | also)
        return [*arms, *(dict(arm) for arm in dict.fromkeys(tuple(o.items()) for o in others))]

    def _run_changes(self) -> list[Changes]:
        """Return the seeds and learning rates of an arm's runs, as numbers."""
        settings = self.grid.settings
        axes = {key: self.grid.choices[key] for key in RUN_KEYS if key in self.grid.choices}
        if settings.tune:
            axes.pop("optim.lr", None)
        runs = []
        for values in itertools.product(*axes.values()):
            flat = flatten(self.resolver.compose(dict(zip(axes, values, strict=True))))
            seeds = {key: flat[key] for key in RUN_KEYS if key.startswith("seeds.")}
            changes: Changes = {"seed": flat["seed"]}
            changes |= {key: seed for key, seed in seeds.items() if seed != flat["seed"]}
            if "optim.lr" in axes:  # otherwise the arm's own
                changes["optim.lr"] = flat["optim.lr"]
            runs.append(changes)
        shared = {changes["seed"] for changes in runs} & {*settings.tuning_seeds}
        if settings.tune and shared:
            raise UserError(
                f"sweep.tuning_seeds: {min(shared)} is a seed of the final runs, too; a rate chosen"
                " on a seed would favor it there"
            )
        return runs

    def _is_included(self, control: str, overrides: Overrides) -> bool:
        """Return whether no predicate excludes an arm; an impossible one is reported later."""
        try:
            config = self.resolver.resolve(overrides).config
        except ImpossibleConfig:
            return True
        values = flatten(config) | {"variant": config.variant.name, "control": control}
        return all(holds(predicate, values) for predicate in self.grid.settings.filter)

    def _add(self, control: str, overrides: Overrides) -> None:
        """Add one arm and its baseline."""
        baseline, baseline_name, target = self._baseline(overrides, control), None, None
        if baseline is not None:
            try:
                target = self.resolver.resolve(baseline)
            except ImpossibleConfig as error:
                raise ImpossibleConfig(f"its baseline: {error}") from None
        mismatch = None
        adjusted: dict[str, int | float] = {}
        settings = self.grid.controls[control]
        if settings.match != "none":
            if target is None:
                raise UserError(f"control={control} needs a baseline, and sweep.baseline is null")
            resolve = functools.partial(self.resolver.resolve, overrides)
            matched = match_baseline(settings, target, resolve({}).config.model, resolve)
            adjusted, mismatch = matched.changes, matched.mismatch
        self.resolver.resolve(overrides, adjusted)  # raises before the baseline is added
        if baseline is not None:
            baseline_name = self._add_arm("none", baseline).name
        arm = self._add_arm(control, overrides, adjusted, baseline_name, mismatch)
        typed = overrides.get("variant")
        if typed not in (None, arm.overrides.get("variant")):  # as gqa with one group is mqa
            name = arm.name.replace(arm.variant, str(typed), 1)
            reason = f"is {arm.name}, which is in the grid"
            self.left_out.append(LeftOutArm(name, control, reason, "duplicate"))

    def _add_arm(
        self,
        control: str,
        overrides: Overrides,
        adjusted: Mapping[str, int | float] | None = None,
        baseline: str | None = None,
        mismatch: float | None = None,
    ) -> Arm:
        """Add an arm, or extend the same arm under another control or name."""
        arm = dataclasses.replace(
            self.resolver.resolve(overrides, adjusted),
            name=self._name(overrides, control if adjusted else "none"),
            controls=[control],
            baseline=baseline,
            mismatch=mismatch,
        )
        key = arm.run(self.changes[0]).id
        if (first := self.arms.get(key)) is not None:
            # The baseline of one arm may be an arm of the grid, under one control or several.
            arm = dataclasses.replace(
                first,
                controls=list(dict.fromkeys([*first.controls, control])),
                baseline=first.baseline or baseline,
                mismatch=first.mismatch if mismatch is None else mismatch,
            )
        elif any(other.name == arm.name for other in self.arms.values()):
            arm = dataclasses.replace(arm, name=f"{arm.name}-{key}")
        self.arms[key] = arm
        return arm

    def _leave_out(self, control: str, overrides: Overrides, reason: Exception) -> None:
        kind = "unmatched" if isinstance(reason, ControlOutOfReach) else "unsupported"
        name = self._name(overrides, control)
        self.left_out.append(LeftOutArm(name, control, str(reason), kind))

    def _merge(self, arms: Iterable[Arm]) -> list[Arm]:
        """Return the arms without those that have become another one, as by shared test tokens."""
        kept: dict[str, Arm] = {}  # by the id of the first run
        names: dict[str, str] = {}
        for arm in arms:
            one = kept.setdefault(arm.run(self.changes[0]).id, arm)
            names[arm.name] = one.name
            if one is not arm:
                reason = f"is {one.name}, which is in the grid"
                self.left_out.append(LeftOutArm(arm.name, arm.controls[0], reason, "duplicate"))
        return [
            dataclasses.replace(
                arm, baseline=arm.baseline and names.get(arm.baseline, arm.baseline)
            )
            for arm in kept.values()
        ]

    def _add_floors(self) -> None:
        """Add uniform attention, which has no baseline, where attention is compared."""
        is_one_at_a_time = self.center is not None
        for overrides in plan_floors(self.arms.values(), one_at_a_time=is_one_at_a_time):
            try:
                self._add_arm("none", overrides)
            except ImpossibleConfig as reason:
                self._leave_out("none", overrides, reason)

    def _baseline(self, overrides: Overrides, control: str) -> Overrides | None:
        """Return the overrides of the arm that this one is compared with."""
        baseline, center = self._named_baseline(overrides), self.center
        is_variant = isinstance(self.grid.settings.baseline, str)
        if baseline is None or center is None or control != "none" or not is_variant:
            return baseline
        changed = [key for key in overrides if overrides[key] != center.get(key)]
        # An arm that would be its own baseline differs from the center in its one factor; losses on
        # other data tell nothing of it.
        if len(changed) == 1 and not changed[0].startswith("data"):
            with suppress(ImpossibleConfig):
                own = self.resolver.resolve(overrides)
                if own.config == self.resolver.resolve(baseline).config:
                    return center
        return baseline

    def _named_baseline(self, overrides: Overrides) -> Overrides | None:
        setting = self.grid.settings.baseline
        if setting is None:
            return None
        values: dict[str, Any] = {"variant": setting} if isinstance(setting, str) else setting
        if isinstance(setting, str) and not setting.endswith(".py") and setting not in variants():
            names = not_one_of(setting, variants(), "qkablate variants")
            raise UserError(f"sweep.baseline: {names}")
        for key in (str(key).lstrip("+") for key in values):
            if key not in KEYS and not config_names(key):
                raise UserError(f"sweep.baseline: {no_such_key(key)}")
        _refuse_run_keys("baseline", map(str, values), ", and the two runs of a pair share it")
        if "variant" in values:
            rotated = self._rotated_dims(overrides, values)
            own = VARIANT_KEYS - {"variant.sites"} if rotated else VARIANT_KEYS
            values = rotated | values
            overrides = {k: value for k, value in overrides.items() if k not in own}
            if overrides.get("variant.lr") not in KEYS["variant.lr"].choices:
                overrides.pop("variant.lr", None)  # a number belongs to the arm's own circuit
        return {**overrides, **{str(key): as_quoted(value) for key, value in values.items()}}

    def _rotated_dims(self, overrides: Overrides, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the setting of an arm's rotated dimensions, which its baseline with RoPE has, too.

        The arm has those of its overrides, or, as `mla`, some by default.
        """
        try:
            config = self.resolver.resolve(overrides).config
        except ImpossibleConfig:  # of which the caller says more
            return {}
        dims = config.variant.rope_dims
        has_rope = values.get("model.position", config.model.position) == "rope"
        return {"variant.rope_dims": dims} if dims is not None and has_rope else {}

    def _name(self, overrides: Overrides, control: str) -> str:
        """Return an arm's name: variant and size, then what else the grid varies."""
        try:
            config = self.resolver.resolve(overrides).config
            parts = [config.variant.name, f"d{config.model.d_model}", f"h{config.model.heads}"]
        except ImpossibleConfig:  # there is no config: by what was typed
            circuits = [overrides.get(f"variant.{key}", "") for key in ("file", "qk", "ov")]
            circuits[0] = Path(circuits[0]).stem
            parts = ["+".join(filter(None, circuits)) or overrides.get("variant", "standard")]
            for key, short in SIZES.items():
                number = overrides.get(f"variant.{key}")
                if number not in (None, "", "null", "auto"):
                    parts[0] += f"_{short}{number}"
            sizes = {"d": overrides.get("model.d_model"), "h": overrides.get("model.heads")}
            parts += [f"{letter}{value}" for letter, value in sizes.items() if value]
        parts += [
            f"{key.rpartition('.')[2]}={overrides[key]}"
            for key in self.named_keys
            if key in overrides
        ]
        parts += [control] if control != "none" else []
        return "-".join(parts)


def _refuse_run_keys(setting: str, keys: Iterable[str], reason: str) -> None:
    if shared := {*keys} & {*RUN_KEYS}:
        raise UserError(f"sweep.{setting}: {min(shared)} distinguishes the runs of an arm{reason}")


def _combine(axes: Mapping[str, list[str]], design: str) -> list[Overrides]:
    """Return every combination of the values, or those that change the first one in one key."""
    if design == "grid":
        return [
            dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())
        ]
    center = {key: values[0] for key, values in axes.items()}
    alone = [{**center, key: value} for key, values in axes.items() for value in values[1:]]
    return [center, *alone]


def _name_variant_file(overrides: Overrides) -> Overrides:
    """Return the overrides with `variant=FILE.py`, which stands among names, as variant.file."""
    file = overrides.get("variant", "")
    if not file.strip("'\"").endswith(".py"):
        return overrides
    if "variant.file" in overrides:
        raise UserError(f"variant: {file} is a file, and so is variant.file; give one of the two")
    return {**{k: v for k, v in overrides.items() if k != "variant"}, "variant.file": file}


def _find_named_keys(arms: list[Overrides]) -> list[str]:
    """Return the keys that names have to show, because no earlier ones determine their values."""
    named: list[str] = []
    keys = dict.fromkeys(itertools.chain(*arms))
    for key in sorted(keys, key=lambda key: "." in key):  # a group, as data, sets keys of its own
        if key not in _IN_NAME:
            shown = [tuple(arm.get(other) for other in named) for arm in arms]
            if len({*zip(shown, (arm.get(key) for arm in arms), strict=True)}) > len({*shown}):
                named.append(key)
    return named

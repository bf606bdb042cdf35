"""From a grid of values to frozen runs: what is possible, what a control makes of it, and against
what it is compared. Everything is looked at before anything is trained.
"""

import dataclasses
import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qkablate.config import Config, ControlConfig, GridConfig, flatten
from qkablate.config.sweep import as_quoted
from qkablate.data import Data, open_data
from qkablate.data.corpus import look
from qkablate.errors import Impossible, UserError
from qkablate.models.catalogue import settle
from qkablate.models.cost import training_flops_per_token
from qkablate.runs.run import run_id
from qkablate.sweeps.planning.control import OutOfReach, Size, match
from qkablate.sweeps.planning.manifest import RUN_KEYS, Arm, Changes, LeftOut, Manifest
from qkablate.sweeps.planning.predicates import holds
from qkablate.sweeps.planning.tuning import ladder
from qkablate.training import hardware
from qkablate.training.resolve import empty_model

Words = dict[str, str]
# What a variant is made of, and does not pass on to the baseline that stands beside it.
_OF_A_VARIANT = {
    f"variant.{key}" for key in ("name", "qk", "ov", "norm", "mask_self", "rank", "groups", "file")
}
# What an arm's name tells without its key.
_IN_NAME = _OF_A_VARIANT | {"variant", "model.d_model", "model.heads", *RUN_KEYS}
_OF_RUNS = re.compile(rf"(?<![\w.])({'|'.join(map(re.escape, RUN_KEYS))})(?![\w.])")


@dataclass(frozen=True)
class Grid:
    """What is varied and what is held equal."""

    settings: GridConfig
    controls: dict[str, ControlConfig]
    choices: dict[str, list[str]]  # key → its values, as they are typed
    elsewhere: bool = False  # whether other machines than this train the runs


@dataclass(frozen=True)
class _Known:
    """An arm's config with what the machine and the data add to it."""

    config: Config
    facts: dict[str, Any]
    size: Size
    held_out: int
    cached: int


@dataclass
class Expansion:
    """Collects the arms of a grid. `compose` makes a checked config of words."""

    grid: Grid
    compose: Callable[[Words], Config]
    note: Callable[[int, int], None] = lambda done, total: None
    _data: dict[str, Data] = field(default_factory=dict)
    _seen: dict[tuple[tuple[str, str], ...], _Known] = field(default_factory=dict)
    _arms: dict[str, Arm] = field(default_factory=dict)  # by the id of the first run
    _left_out: list[LeftOut] = field(default_factory=list)
    _excluded: int = 0

    def manifest(self, command: list[str]) -> Manifest:
        """Expand the grid; UserError for a mistake, or if nothing is left of it."""
        for predicate in self.grid.settings.where:
            if found := _OF_RUNS.search(predicate):
                raise UserError(
                    f"sweep.where: '{predicate}': {found[0]} tells the runs of an arm apart, and a"
                    " predicate is about arms"
                )
        changes = self._run_changes()
        cells = list(self._cells())
        kept = 0
        for number, (control, words) in enumerate(cells):
            kept += self._add(control, words, changes)
            self.note(number + 1, len(cells))
        if not kept and self._left_out:  # also where the user named one arm alone
            rest = len(self._left_out) - 1
            more = f" (and {rest} more, none of which can be)" if rest else ""
            first = self._left_out[0]
            raise UserError(f"{first.arm} is {first.kind}: {first.reason}{more}")
        if not kept:
            raise UserError(f"sweep.where: excludes all arms, {self._excluded} of them")
        arms = {arm.name: arm for arm in self._arms.values()}
        for arm in list(arms.values()):
            if arm.baseline == arm.name:
                arms[arm.name] = dataclasses.replace(arm, baseline=None)
        settings = self.grid.settings
        if settings.tune:
            asked = self.grid.choices.get("optim.lr", [])
            given = [self.compose({"optim.lr": text}).optim.lr for text in asked]
            runs = [
                arm.run({"seed": seed, "optim.lr": rate}, tuning=True)
                for arm in arms.values()
                for rate in ladder(given, arm.config)
                for seed in settings.tuning_seeds
            ]
        else:
            runs = [arm.run(one) for arm in arms.values() for one in changes]
        return Manifest(
            name=settings.name,
            out=next(iter(arms.values())).config.out,
            arms=arms,
            runs=list({run.id: run for run in runs}.values()),
            finals=changes if settings.tune else [],
            left_out=self._left_out,
            excluded=self._excluded,
            command=command,
        )

    def _cells(self) -> Iterator[tuple[str, Words]]:
        """Every arm of the grid, as words."""
        own = {key: values for key, values in self.grid.choices.items() if key not in RUN_KEYS}
        for control in self.grid.controls:
            for values in itertools.product(*own.values()):
                yield control, dict(zip(own, values, strict=True))

    def _run_changes(self) -> list[Changes]:
        """What tells the runs of an arm apart: seeds and learning rates, as numbers."""
        tune = self.grid.settings.tune
        own = {key: self.grid.choices[key] for key in RUN_KEYS if key in self.grid.choices}
        if tune:
            own.pop("optim.lr", None)
        found = []
        for values in itertools.product(*own.values()):
            flat = flatten(self.compose(dict(zip(own, values, strict=True))))
            changes: Changes = {"seed": flat["seed"]}
            for key in ("seeds.init", "seeds.data", "seeds.dropout"):
                if flat[key] != flat["seed"]:
                    changes[key] = flat[key]
            if "optim.lr" in own:  # else it is the arm's own
                changes["optim.lr"] = flat["optim.lr"]
            found.append(changes)
        shared = {one["seed"] for one in found} & {*self.grid.settings.tuning_seeds}
        if tune and shared:
            raise UserError(
                f"sweep.tuning_seeds: {min(shared)} is a seed of the final runs, too; a rate chosen"
                " on a seed says nothing about it"
            )
        return found

    def _add(self, control: str, words: Words, changes: list[Changes]) -> int:
        """Add one arm, and its baseline; 0 if it cannot be."""
        try:
            known = self._known(words)
        except Impossible as refused:
            self._leave_out(control, words, str(refused), "impossible")
            return 0
        values = flatten(known.config) | {"variant": known.config.variant.name, "control": control}
        if not all(holds(predicate, values) for predicate in self.grid.settings.where):
            self._excluded += 1
            return 0
        baseline = self._baseline(words)
        mismatch = None
        pays: dict[str, int | float] = {}
        settings = self.grid.controls[control]
        if settings.match != "none":
            if baseline is None:
                raise UserError(f"control={control} needs a baseline, and sweep.baseline is null")
            try:
                target = self._known(baseline).size
                found = match(
                    settings, target, known.config.model, lambda more: self._size(words, more)
                )
            except OutOfReach as reason:
                self._leave_out(control, words, str(reason), "out of reach")
                return 0
            except Impossible as refused:
                self._leave_out(control, words, f"its baseline: {refused}", "impossible")
                return 0
            pays, mismatch = found.changes, found.mismatch
        beside = None
        if baseline is not None:
            try:
                beside = self._arm("none", baseline, {}, None, None, changes).name
            except Impossible as refused:
                self._leave_out(control, words, f"its baseline: {refused}", "impossible")
                return 0
        arm = self._arm(control, words, pays, beside, mismatch, changes)
        typed, other = words.get("variant"), arm.words.get("variant")
        if typed != other and typed is not None:  # as gqa with one group is mqa
            name = arm.name.replace(arm.variant, typed, 1)
            same = LeftOut(name, control, f"is {arm.name}, which is in the grid", "the same")
            self._left_out.append(same)
        return 1

    def _arm(
        self,
        control: str,
        words: Words,
        pays: Mapping[str, int | float],
        baseline: str | None,
        mismatch: float | None,
        changes: list[Changes],
    ) -> Arm:
        """The arm that the words make, new or known already under another control or name."""
        own = {**words, **{key: repr(value) for key, value in pays.items()}}
        known = self._known(own)
        config = known.config
        arm = Arm(
            name=self._name(words, control if pays else "none"),
            variant=config.variant.name,
            controls=[control],
            baseline=baseline,
            words=own,
            config=config,
            facts=known.facts,
            held_out=known.held_out,
            params=known.size.params,
            total_params=known.size.total,
            flops=known.size.flops,
            mismatch=mismatch,
            cached=known.cached,
        )
        key = arm.run(changes[0]).id
        first = self._arms.get(key)
        if first is None:
            if any(other.name == arm.name for other in self._arms.values()):
                arm = dataclasses.replace(arm, name=f"{arm.name}-{key}")
            self._arms[key] = arm
            return arm
        # The baseline of one arm may be an arm of the grid, under one control or several.
        controls = list(dict.fromkeys([*first.controls, control]))
        joined = dataclasses.replace(
            first,
            controls=controls,
            baseline=first.baseline or baseline,
            mismatch=first.mismatch if mismatch is None else mismatch,
        )
        self._arms[key] = joined
        return joined

    def _known(self, words: Words) -> _Known:
        """The config that words make, resolved, with its data and its size."""
        key = tuple(words.items())
        if key not in self._seen:
            self._seen[key] = self._look(words)
        return self._seen[key]

    def _look(self, words: Words) -> _Known:
        asked = self.compose(words)
        if asked.start.run is not None:
            raise UserError(
                "start.run: the runs of a sweep begin from fresh weights; one run from another is"
                " qkablate project, or qkablate train start.run=RUN"
            )
        config, hashes = settle(hardware.resolve(asked, elsewhere=self.grid.elsewhere))
        data = self._opened(config)
        model = empty_model(config, data.vocabulary)
        facts = {
            "data_fingerprint": data.fingerprint,
            "vocabulary": data.vocabulary,
            "device": config.device.partition(":")[0],
            "kernel": model.attentions()[0].kernel,
            "circuits_from_outside": hashes,
        }
        ledger = model.ledger()
        flops = training_flops_per_token(
            model, config.train.batch_size * config.model.context, data.answers
        )
        size = Size(ledger["total"] - ledger["embedding"], ledger["total"], flops)
        cached = sum(layer.cached_per_token for layer in model.attentions())
        return _Known(config, facts, size, data.tokens["val"], cached)

    def _size(self, words: Words, more: Mapping[str, int | float]) -> Size:
        return self._known({**words, **{key: repr(value) for key, value in more.items()}}).size

    def _opened(self, config: Config) -> Data:
        key = run_id({"data": vars(config.data), "context": config.model.context})
        if key not in self._data:
            look(config.data)
            data = open_data(config.data, config.model.context)
            data.check_context(config.model.context)
            self._data[key] = data
        return self._data[key]

    def _baseline(self, words: Words) -> Words | None:
        """The words of the arm that this one is compared with."""
        said = self.grid.settings.baseline
        if said is None:
            return None
        own: dict[str, Any] = {"variant": said} if isinstance(said, str) else said
        if shared := {*map(str, own)} & {*RUN_KEYS}:
            raise UserError(
                f"sweep.baseline: {min(shared)} tells the runs of an arm apart, and a pair of runs"
                " shares it"
            )
        if "variant" in own:
            words = {key: value for key, value in words.items() if key not in _OF_A_VARIANT}
        return {**words, **{str(key): as_quoted(value) for key, value in own.items()}}

    def _leave_out(self, control: str, words: Words, reason: str, kind: str) -> None:
        self._left_out.append(LeftOut(self._name(words, control), control, reason, kind))

    def _name(self, words: Words, control: str) -> str:
        """What a person reads: variant and size, then what else the grid varies."""
        try:
            config = self._known(words).config
            size = {"d": config.model.d_model, "h": config.model.heads}
            parts = [config.variant.name, *(f"{key}{value}" for key, value in size.items())]
        except Impossible:  # as it was asked for
            asked = {"d": words.get("model.d_model"), "h": words.get("model.heads")}
            circuits = [words.get(f"variant.{key}", "") for key in ("file", "qk", "ov")]
            circuits[0] = Path(circuits[0]).stem
            parts = ["+".join(filter(None, circuits)) or words.get("variant", "standard")]
            for key in ("rank", "groups"):
                parts[0] += f"_{key[0]}{number}" if (number := words.get(f"variant.{key}")) else ""
            parts += [f"{key}{value}" for key, value in asked.items() if value]
        varied = [key for key, values in self.grid.choices.items() if len(values) > 1]
        parts += [
            f"{key.rpartition('.')[2]}={words[key]}"
            for key in varied
            if key in words and key not in _IN_NAME
        ]
        return "-".join([*parts, *([control] if control != "none" else [])])

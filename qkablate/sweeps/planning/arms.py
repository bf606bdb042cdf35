"""The resolved arms of a grid: config, data and size of the model that some overrides make."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from qkablate.config import Config, flatten
from qkablate.data import Data, open_data
from qkablate.data.corpus import check_available
from qkablate.errors import UserError
from qkablate.models.catalogue import resolve_circuits
from qkablate.models.cost import cached_by_site, training_flops_per_token
from qkablate.runs.prefix import LENGTH_KEYS
from qkablate.runs.run import run_id
from qkablate.sweeps.planning.manifest import Arm
from qkablate.training import hardware
from qkablate.training.optim import check_optimizer
from qkablate.training.resolve import build_empty_model, count_loss_blocks, resolve_lr
from qkablate.training.vmapped.support import find_obstacle, resolve_vmap

Overrides = dict[str, str]  # key → its value, as typed on the command line


@dataclass
class ArmResolver:
    """Resolves each set of overrides once, and opens each data set once."""

    compose: Callable[[Overrides], Config]  # makes a checked config
    remote: bool = False  # other machines than this one train the runs
    _data: dict[str, Data] = field(default_factory=dict)
    _arms: dict[tuple[tuple[str, str], ...], Arm] = field(default_factory=dict)

    def resolve(
        self, overrides: Overrides, changes: Mapping[str, int | float] | None = None
    ) -> Arm:
        """Return the nameless arm of these settings; ImpossibleConfig if there is none."""
        overrides = {**overrides, **{key: repr(value) for key, value in (changes or {}).items()}}
        key = tuple(overrides.items())
        if key not in self._arms:
            self._arms[key] = self._resolve(overrides)
        return self._arms[key]

    def _resolve(self, overrides: Overrides) -> Arm:
        requested = self.compose(overrides)
        if requested.init_from.run is not None:
            raise UserError(
                "init_from.run: the runs of a sweep begin from fresh weights; one run from another"
                " is qkablate project, or qkablate train init_from.run=RUN"
            )
        config, hashes = resolve_circuits(hardware.resolve(requested, remote=self.remote))
        data = self._open_data(config)
        model = build_empty_model(config, data.vocabulary)
        check_optimizer(model, config)
        attention = model.variant_layer().module
        config = resolve_lr(config, attention)
        counts = model.parameter_counts()
        obstacle = ""
        if config.train.vmap != 1:
            obstacle = find_obstacle(config, model, count_loss_blocks(config, data))
            config = resolve_vmap(config, obstacle, counts["total"])
        facts = {
            "data_fingerprint": data.fingerprint,
            "vocabulary": data.vocabulary,
            "device": config.device.partition(":")[0],
            "kernel": model.kernel,
            "circuits_from_outside": hashes,
        }
        batch_tokens = config.train.batch_size * config.model.context
        return Arm(
            name="",
            variant=config.variant.name,
            controls=[],
            baseline=None,
            overrides=overrides,
            config=config,
            facts=facts,
            test_tokens=data.tokens["test"],
            params=counts["total"] - counts["embedding"],
            total_params=counts["total"],
            flops=training_flops_per_token(model, batch_tokens, data.answer_fraction),
            matched_lr=attention.matched_lr,
            has_circuit_lr=attention.has_circuit_lr,
            kv_cache_numbers=sum(cached_by_site(model).values()),
            not_vmapped=obstacle,
        )

    def _open_data(self, config: Config) -> Data:
        model = config.model
        lengths = {"context": model.context, "form": model.form, "source": model.source}
        key = run_id({"data": vars(config.data), **lengths})
        if key not in self._data:
            check_available(config.data)
            data = open_data(config.data, model)
            data.check_context(model.context)
            self._data[key] = data
        return self._data[key]


def share_test_tokens(arms: Iterable[Arm]) -> list[Arm]:
    """Return the arms; on the same data, all read as much of the test split as the longest.

    By default a short run reads less, but losses of different documents could not be compared.
    """
    arms = list(arms)
    budgets: dict[str, set[int]] = defaultdict(set)
    for arm in arms:
        budgets[arm.facts["data_fingerprint"]].add(int(arm.config.train.test_tokens))
    return [_with_test_tokens(arm, budgets[arm.facts["data_fingerprint"]]) for arm in arms]


def share_vmap(arms: Iterable[Arm]) -> list[Arm]:
    """Return the arms; those that are compared with each other are vmapped, or none of them is.

    Other sizes are not affected.
    """
    arms = list(arms)
    reasons: dict[str, str] = {}  # by baseline; '' where it would not pay
    for arm in arms:
        if arm.config.train.vmap == 1:
            own = f"{arm.name}: {arm.not_vmapped}" if arm.not_vmapped else ""
            baseline = arm.baseline or arm.name
            reasons[baseline] = reasons.get(baseline) or own
    return [_with_vmap(arm, reasons.get(arm.baseline or arm.name)) for arm in arms]


def _with_vmap(arm: Arm, reason: str | None) -> Arm:
    """Return an arm with the number of its runs in a program, which its overrides name, too.

    It is 1 if there is a reason.
    """
    if "train.vmap" not in arm.overrides:
        return arm
    train = arm.config.train if reason is None else replace(arm.config.train, vmap=1)
    overrides = {**arm.overrides, "train.vmap": str(train.vmap)}
    config = replace(arm.config, train=train)
    return replace(arm, config=config, overrides=overrides, not_vmapped=reason or "")


def share_compile(arms: Iterable[Arm]) -> list[Arm]:
    """Return the arms; where compile is auto, each does as its baseline.

    A control changes how large a step is, on which `auto` depends, and compiled steps round
    differently.
    """
    arms = list(arms)
    by_name = {arm.name: arm.config.compile for arm in arms}
    return [_with_compile(arm, by_name.get(arm.baseline or arm.name)) for arm in arms]


def _with_compile(arm: Arm, compiled: bool | str | None) -> Arm:
    """Return an arm compiled like its baseline, if it has one and the user has not said how."""
    if compiled in (None, arm.config.compile) or not _is_auto(arm, "compile"):
        return arm
    overrides = {**arm.overrides, "compile": str(compiled).lower()}
    return replace(arm, config=replace(arm.config, compile=compiled), overrides=overrides)


def share_length_settings(arms: Iterable[Arm]) -> list[Arm]:
    """Return the arms; those with wsd take the settings of the shortest on the same data.

    These are the ones whose `auto` depends on the length. So runs of several lengths differ in
    nothing before the cooldown, and all arms in nothing but what is compared.
    """
    arms = list(arms)
    groups: dict[tuple[object, ...], list[Arm]] = defaultdict(list)
    for arm in arms:
        if arm.config.optim.schedule == "wsd":
            groups[_batches(arm)].append(arm)
    shared: dict[str, Arm] = {}
    for group in groups.values():
        if len({arm.config.train.steps for arm in group}) > 1:
            shortest = min(group, key=lambda arm: int(arm.config.train.steps))
            shared |= {arm.name: _with_length_settings(arm, shortest) for arm in group}
    return [shared.get(arm.name, arm) for arm in arms]


def _batches(arm: Arm) -> tuple[object, ...]:
    train = arm.config.train
    batch = train.batch_size, train.grad_accum, arm.config.model.context
    return arm.facts["data_fingerprint"], *batch


def _with_length_settings(arm: Arm, shortest: Arm) -> Arm:
    """Return an arm with the settings of the shortest one, but for those that the user has given.

    Its own part of the test split is written down, too: it would depend on what is given now.
    """
    config, values = arm.config, flatten(shortest.config)
    if _is_auto(arm, "diagnostics.every") and config.diagnostics.every == config.train.eval_every:
        every = values["train.eval_every"]
        config = replace(config, diagnostics=replace(config.diagnostics, every=every))
    values["train.test_tokens"] = config.train.test_tokens
    given = {key: values[key] for key in LENGTH_KEYS if _is_auto(arm, key)}
    for key, value in given.items():
        section, _, leaf = key.partition(".")
        part = replace(getattr(config, section), **{leaf: value})
        config = replace(config, **{section: part})
    overrides = arm.overrides | {key: str(value) for key, value in given.items()}
    return replace(arm, config=config, overrides=overrides)


def _is_auto(arm: Arm, key: str) -> bool:
    return arm.overrides.get(key, "auto") == "auto"


def _with_test_tokens(arm: Arm, budgets: set[int]) -> Arm:
    """Return an arm with the largest of several budgets, unless the user has given its own."""
    if len(budgets) == 1 or arm.overrides.get("train.test_tokens", "auto") != "auto":
        return arm
    most = max(budgets)
    train = replace(arm.config.train, test_tokens=most)
    overrides = {**arm.overrides, "train.test_tokens": str(most)}
    return replace(arm, config=replace(arm.config, train=train), overrides=overrides)

"""Conversion of trained runs to many variants at once, as a sweep of short runs.

Each arm is a variant that the runs are projected to and fine-tuned in; its baseline is the variant
of the runs themselves, trained further for as many steps.
"""

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from qkablate.config import Config, InitFromConfig
from qkablate.config.variant import SIZES
from qkablate.data import Data
from qkablate.errors import ImpossibleConfig, UserError
from qkablate.models.cost import cached_by_site
from qkablate.sweeps.overrides import config_overrides
from qkablate.sweeps.planning.manifest import Arm, Changes, LeftOutArm, Manifest, SweepRun
from qkablate.training.resolve import RunPlan, plan_run
from qkablate.training.warm_start.finetuning import (
    Compose,
    compose_finetuning,
    finetune_config,
    keys_of,
    open_parent_data,
    restore_parents,
)
from qkablate.training.warm_start.restore import RestoredRun
from qkablate.training.warm_start.start import CannotProject

NAME = "project"  # the first part of the sweep's name
_FREE_KEYS = ("variant", "seed")  # the only ones that may have several values


def plan_conversions(
    runs: list[str],
    jobs: list[list[str]],
    steps: int,
    out: str,
    compose: Compose,
    command: list[str],
    *,
    remote: bool = False,
    note: Callable[[int, int], None] = lambda done, total: None,
) -> Manifest:
    """Plan the fine-tuning of each run in the variant of each job, which is a list of overrides.

    Variants that the runs cannot be projected to are left out; UserError if all of them are.
    """
    parents = restore_parents(runs, jobs[0], out)
    planned = _Conversions(steps, out, compose, remote, _find_varied(jobs))
    total = len(parents) * len(jobs)
    for number, (parent, words) in enumerate((p, words) for p in parents for words in jobs):
        planned.add(parent, words)
        note(number + 1, total)
    if len(planned.arms) < 2:
        for left in planned.left_out.values():
            raise UserError(f"no variant is left: {left.arm}: {left.reason}")
        (arm,) = planned.arms.values()
        raise UserError(f"variant: the runs are {arm.variant} already; give another one")
    return Manifest(
        name=NAME,
        out=out,
        arms=planned.arms,
        runs=list(planned.runs.values()),
        finals=[],
        left_out=list(planned.left_out.values()),
        excluded=0,
        command=command,
    )


@dataclass
class _Conversions:
    """The arms and runs, as they are planned."""

    steps: int
    out: str
    compose: Compose
    remote: bool
    varied: list[str]  # keys beside variant that have several values
    arms: dict[str, Arm] = field(default_factory=dict)  # by name
    runs: dict[str, SweepRun] = field(default_factory=dict)  # by id
    left_out: dict[str, LeftOutArm] = field(default_factory=dict)
    _baselines: dict[tuple[str, ...], str] = field(default_factory=dict)  # names of arms
    _data: Data | None = None  # of all runs, which differ in seeds alone

    def add(self, parent: RestoredRun, words: list[str]) -> None:
        """Add the run trained further in its own variant, and the one in the words' variant."""
        rest = [word for word in words if not _is_variant(word)]
        key = str(parent.folder), *rest
        if key not in self._baselines:
            self._baselines[key] = self._add_run(parent, rest, own=True)
        chosen = dict(word.split("=", 1) for word in words if _is_variant(word))
        others = [f"{key}={chosen[key]}" for key in self.varied if key in chosen]
        name = " ".join([chosen.get("variant", "standard"), *others])
        try:
            self._add_run(parent, words, own=False, baseline=self._baselines[key])
        except ImpossibleConfig as error:
            reason = error.reason if isinstance(error, CannotProject) else str(error)
            self.left_out[name] = LeftOutArm(name, "none", reason, "unsupported")

    def _add_run(
        self, parent: RestoredRun, words: list[str], *, own: bool, baseline: str | None = None
    ) -> str:
        """Add a run and, if it is the first of its arm, the arm; return the arm's name."""
        requested = compose_finetuning(parent, words, self.steps, self.out, self.compose)
        keys = keys_of(words)
        config = finetune_config(parent, requested, keys, use_variant=not own)
        if self._data is None:
            self._data = open_parent_data(parent, config, keys)
        plan = plan_run(config, data=self._data, remote=self.remote)
        if plan.run.id in self.runs:  # as standard of standard, or mqa of gqa with one group
            return self.runs[plan.run.id].arm
        model = plan.config.model
        name = f"{plan.config.variant.name}-d{model.d_model}-h{model.heads}"
        given = dict(word.split("=", 1) for word in words)
        for key in self.varied:
            leaf = key.rpartition(".")[2]
            if not own and leaf not in SIZES and key in given:  # sizes are in the variant's name
                name += f"-{leaf}={given[key]}"
        if name == baseline:  # their variant, with other settings of it
            name += "-projected"
        arm = self.arms.get(name) or _make_arm(name, plan, baseline, has_threads="threads" in keys)
        by_seed = {**arm.parents, str(plan.config.seed): plan.config.init_from}
        self.arms[name] = arm = dataclasses.replace(arm, parents=by_seed)
        run = arm.run(_changes(plan.config))
        assert run.id == plan.run.id, name  # an arm is one config but for its seeds
        self.runs[run.id] = run
        return name


def _find_varied(jobs: list[list[str]]) -> list[str]:
    """Return the keys of the variant, beside its name, that have several values."""
    values: dict[str, set[str]] = {}
    for word in (word for words in jobs for word in words if _is_variant(word)):
        key, _, value = word.partition("=")
        values.setdefault(key, set()).add(value)
    return [key for key, own in values.items() if len(own) > 1 and key != "variant"]


def check_axes(words: Iterable[tuple[str, list[str]]]) -> None:
    """Raise UserError for a key with several values that must have one."""
    for key, values in words:
        if len(values) > 1 and key.partition(".")[0] not in _FREE_KEYS:
            raise UserError(f"{key}: give one value; several are for variant alone")


def _is_variant(word: str) -> bool:
    return word.lstrip("+").partition("=")[0].partition(".")[0] == "variant"


def _changes(config: Config) -> Changes:
    """Return the seeds and the rate of a run."""
    own = {f"seeds.{k}": v for k, v in vars(config.seeds).items() if v != config.seed}
    return {"seed": config.seed, **own, "optim.lr": config.optim.lr}


def _make_arm(name: str, plan: RunPlan, baseline: str | None, *, has_threads: bool) -> Arm:
    """Return the arm of a planned run, which its overrides make anew but for its parent."""
    model = plan.build()
    overrides = config_overrides(dataclasses.replace(plan.config, init_from=InitFromConfig()))
    if not has_threads:
        overrides.pop("threads", None)  # chosen by how many runs there are
    facts = ("data_fingerprint", "vocabulary", "device", "kernel", "circuits_from_outside")
    return Arm(
        name=name,
        variant=plan.config.variant.name,
        controls=["none"],
        baseline=baseline,
        overrides=overrides,
        config=plan.config,
        facts={key: plan.identity[key] for key in facts},
        test_tokens=plan.data.tokens["test"],
        params=plan.params["total"] - plan.params["embedding"],
        total_params=plan.params["total"],
        flops=plan.flops_per_token,
        matched_lr=model.variant_layer().module.matched_lr,
        kv_cache_numbers=sum(cached_by_site(model).values()),
    )

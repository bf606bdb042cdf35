"""Plans of the runs that decompose the gap of a variant: continued, projected, from scratch."""

import dataclasses
from collections.abc import Callable, Collection

from qkablate.attention.projection.project import ProjectionLoss
from qkablate.config import Config, InitFromConfig, flatten
from qkablate.config.sweep import as_quoted
from qkablate.runs.run import find_run
from qkablate.training import hardware
from qkablate.training.environment import restore_environment
from qkablate.training.resolve import RunPlan, plan_run
from qkablate.training.warm_start import finetune
from qkablate.training.warm_start.restore import RestoredRun
from qkablate.training.warm_start.start import load_projection_losses, restore_parent

Compose = Callable[[list[str]], Config]  # from overrides to a config


@dataclasses.dataclass(frozen=True)
class Decomposition:
    """A trained run, and the runs that it is compared with."""

    parent: RestoredRun
    continued: RunPlan
    projected: RunPlan
    scratch: RunPlan | None  # None if the parent itself was not trained from scratch

    def projection_losses(self) -> list[ProjectionLoss]:
        """Return the loss of the projection, layer by layer."""
        plan, _ = restore_environment(self.projected, processes=1)
        return load_projection_losses(
            plan.run, plan.config, plan.data, plan.build(), self.parent.model
        )


def plan_decompositions(
    runs: list[str], overrides: list[str], steps: int, out: str, compose: Compose
) -> list[Decomposition]:
    """Plan and check the runs for every trained run, before anything is trained."""
    keys = [override.partition("=")[0].lstrip("+") for override in overrides]
    finetune.check_overrides(keys)
    folders = [find_run(run, out) for run in runs]
    parents = [restore_parent(InitFromConfig(run=str(folder)), out) for folder in folders]
    finetune.check_same_arm(parents)
    return [_plan_decomposition(parent, overrides, keys, steps, out, compose) for parent in parents]


def _plan_decomposition(
    parent: RestoredRun,
    overrides: list[str],
    keys: Collection[str],
    steps: int,
    out: str,
    compose: Compose,
) -> Decomposition:
    own = finetune.make_overrides(parent.config, keys, steps)
    requested = compose([*overrides, *own, f"out={out}"])
    continued, projected = (
        finetune.make_finetune_config(parent, requested, keys, use_variant)
        for use_variant in (False, True)
    )
    data = finetune.open_parent_data(parent, continued, keys)
    plan_continued, plan_projected = (
        plan_run(config, data=data) for config in (continued, projected)
    )
    scratch = None
    if parent.config.init_from.run is None:
        config = finetune.make_scratch_config(parent, requested, keys)
        scratch = plan_run(config, is_writer=False, data=data)
    return Decomposition(parent, plan_continued, plan_projected, scratch)


def scratch_overrides(plan: RunPlan, overrides: list[str], compose: Compose) -> list[str]:
    """Return the overrides of `qkablate train` that train a planned run from scratch.

    They name every key that this machine would resolve differently. A run that diverged is
    proposed at a lower learning rate.
    """
    config = plan.config
    if (plan.run.result or {}).get("status") == "diverged":
        lower = dataclasses.replace(config.optim, lr=finetune.finetune_lr(config))
        config = dataclasses.replace(config, optim=lower)
    words = [word for word in overrides if word.partition("=")[0].partition(".")[0] == "variant"]
    words += [f"data={config.data.source}", f"seed={config.seed}"]
    sources = {"data.path": config.data.path, "data.name": config.data.name}
    words += [f"{key}={as_quoted(value)}" for key, value in sources.items() if value is not None]
    sizes = [f"model.{key}={value}".lower() for key, value in vars(config.model).items()]
    resolved = flatten(
        hardware.resolve(compose([*words, *sizes, f"train.steps={config.train.steps}"]))
    )
    defaults = flatten(Config())
    for key, value in flatten(config).items():
        section = key.partition(".")[0]
        if key == "train.steps":
            is_needed = value != 1000  # the meaning of auto
        elif section == "model":
            is_needed = value != defaults[key]
        else:
            is_needed = value != resolved[key]
        is_ignored = section in ("tracking", "variant", "init_from", "threads", "diagnostics")
        is_ignored |= key == "optim.cooldown" and config.optim.schedule != "wsd"
        if is_needed and not is_ignored:
            words.append(f"{key}={as_quoted(value)}")
    return words

"""Runs that decompose the gap of a variant: their configs, data and plans; nothing here trains.

The runs are a trained model projected to another variant and fine-tuned, the same model trained on
unchanged, and the other variant from scratch.
"""

import dataclasses

from qkablate.attention.projection.project import ProjectionErrors
from qkablate.config import Config, DataConfig, flatten
from qkablate.config.data import source_words
from qkablate.config.sweep import as_quoted, as_word
from qkablate.training import hardware
from qkablate.training.environment import restore_environment
from qkablate.training.resolve import RunPlan, plan_run
from qkablate.training.warm_start.finetuning import (
    USER_KEYS,
    Compose,
    compose_finetuning,
    finetune_config,
    finetune_lr,
    keys_of,
    open_parent_data,
    replace_keys,
    restore_parents,
)
from qkablate.training.warm_start.restore import RestoredRun
from qkablate.training.warm_start.start import load_projection_errors


@dataclasses.dataclass(frozen=True)
class Decomposition:
    """A trained run, and the runs that it is compared with."""

    parent: RestoredRun
    continued: RunPlan
    projected: RunPlan
    scratch: RunPlan | None  # None if the parent itself was not trained from scratch

    def projection_errors(self) -> list[tuple[int | str, ProjectionErrors]]:
        """Return the projection errors of each layer, by its number or its site and number."""
        plan, _ = restore_environment(self.projected, processes=1)
        model = plan.build()
        layers = model.attention_layers()
        errors = load_projection_errors(plan.run, plan.config, plan.data, model, self.parent.model)
        names: list[int | str] = [layer.place for layer in layers]
        if plan.config.model.form == "decoder":
            names = [*range(len(layers))]
        return [*zip(names, errors, strict=True)]


def plan_decompositions(
    runs: list[str], overrides: list[str], steps: int, out: str, compose: Compose
) -> list[Decomposition]:
    """Plan and check the runs for every trained run, before anything is trained."""
    keys = keys_of(overrides)
    decompositions = []
    for parent in restore_parents(runs, overrides, out):
        requested = compose_finetuning(parent, overrides, steps, out, compose)
        configs = [
            finetune_config(parent, requested, keys, use_variant=use) for use in (False, True)
        ]
        data = open_parent_data(parent, configs[0], keys)
        continued, projected = (plan_run(config, data=data) for config in configs)
        scratch = None
        if parent.config.init_from.run is None and not parent.is_imported:
            config = _make_scratch_config(parent, requested, configs[0].data)
            scratch = plan_run(config, is_writer=False, data=data)
        decompositions.append(Decomposition(parent, continued, projected, scratch))
    return decompositions


def scratch_overrides(plan: RunPlan, overrides: list[str], compose: Compose) -> list[str]:
    """Return the overrides of `qkablate train` that train a planned run from scratch.

    They name every key that this machine would resolve differently. A run that diverged is
    proposed at a lower learning rate.
    """
    config = plan.config
    if (plan.run.result or {}).get("status") == "diverged":
        lower = dataclasses.replace(config.optim, lr=finetune_lr(config))
        config = dataclasses.replace(config, optim=lower)
    words = [word for word in overrides if word.partition("=")[0].partition(".")[0] == "variant"]
    words += [f"{key}={value}" for key, value in source_words(config.data).items()]
    words.append(f"seed={config.seed}")
    sources = {"data.path": config.data.path, "data.name": config.data.name}
    words += [f"{key}={as_quoted(value)}" for key, value in sources.items() if value is not None]
    sizes = [f"model.{key}={as_word(value)}" for key, value in vars(config.model).items()]
    resolved = flatten(
        hardware.resolve(compose([*words, *sizes, f"train.steps={config.train.steps}"]))
    )
    defaults = {key: value for key, value in flatten(Config()).items() if key.startswith("model.")}
    expected = {**resolved, **defaults, "train.steps": 1000}  # the meaning of auto
    ignored = {"tracking", "variant", "init_from", "threads", "diagnostics"}
    if config.optim.schedule != "wsd":
        ignored.add("optim.cooldown")
    for key, value in flatten(config).items():
        if value != expected[key] and not {key, key.partition(".")[0]} & ignored:
            words.append(f"{key}={as_quoted(value)}")
    return words


def _make_scratch_config(parent: RestoredRun, requested: Config, data: DataConfig) -> Config:
    """Return the config that trains the requested variant from scratch, as the parent was."""
    config = replace_keys(parent.config, requested, USER_KEYS | {"variant"})
    return dataclasses.replace(
        config,
        data=data,
        tracking=dataclasses.replace(config.tracking, group=None, job_type=None, tags=[]),
        device=config.device.partition(":")[0],
    )

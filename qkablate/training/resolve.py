"""The plan of a run: everything resolved and checked, nothing computed yet."""

import math
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from qkablate.attention import Attention
from qkablate.attention.spec import CircuitLr
from qkablate.config import Config
from qkablate.config.data import PADDED_SOURCES
from qkablate.config.schedule import stable_steps
from qkablate.data import Data, open_data
from qkablate.disk import make_folder
from qkablate.errors import ImpossibleConfig, UserError
from qkablate.models import blocked_loss
from qkablate.models.base import Model
from qkablate.models.build import build_model
from qkablate.models.catalogue import has_external, resolve_circuits
from qkablate.models.cost import training_flops_per_token
from qkablate.runs import predictions
from qkablate.runs.run import Run, free_bytes, identity, label, run_id
from qkablate.tracking.wandb.mode import resolve_mode
from qkablate.training import checkpoint, hardware
from qkablate.training.optim import check_optimizer
from qkablate.training.vmapped.support import find_obstacle, resolve_vmap
from qkablate.training.warm_start.start import check_parent, resolve_parent


@dataclass(frozen=True)
class RunPlan:
    """A frozen run."""

    config: Config  # without any `auto` that affects the result
    data: Data
    identity: dict[str, Any]
    run: Run
    sites: dict[str, Attention]  # with the variant: the first layer of each, on the meta device
    matched_lr: float  # the number that variant.lr=matched stands for
    circuit_lr: CircuitLr  # what variant.lr makes of the multipliers, the same at all sites
    kernels: dict[str, str]  # by site
    params: dict[str, int]
    flops_per_token: float  # of training: forward and backward
    notes: tuple[str, ...] = ()  # on what was asked for and is not done

    @property
    def lr_multipliers(self) -> dict[str, dict[str, float]]:
        """Learning-rate multipliers of the circuits of each site with the variant."""
        return {site: layer.lr_multipliers(self.circuit_lr) for site, layer in self.sites.items()}

    @property
    def tokens_per_step(self) -> int:
        train = self.config.train
        return train.batch_size * train.grad_accum * self.config.model.context

    @property
    def loss_blocks(self) -> int:
        """Return the number of blocks in which the logits of a batch are computed."""
        return count_loss_blocks(self.config, self.data)

    def build(self) -> Model:
        """Build the model on the meta device."""
        return build_empty_model(self.config, self.data.vocabulary)


def plan_run(
    config: Config, *, remote: bool = False, is_writer: bool = True, data: Data | None = None
) -> RunPlan:
    """Resolve what depends on machine and data; raise UserError for anything impossible.

    A `remote` run is trained on another machine. Disk and W&B are checked only if this process
    `is_writer`. `data` is given if it is open already.
    """
    config, parent = resolve_parent(config)
    config, hashes = resolve_circuits(hardware.resolve(config, remote=remote))
    if is_writer:
        resolve_mode(config.tracking)
        # The cheap checks first: data may have to be prepared.
        total = build_empty_model(config, 1).parameter_counts()["total"]
        check_out(
            Path(config.out).expanduser(),
            checkpoint.bytes_needed(total, branches=min(1, stable_steps(config)))
            + predictions.bytes_needed(config),
        )
    if data is None:
        data = open_data(config.data, config.model)
    data.check_context(config.model.context)
    model = build_empty_model(config, data.vocabulary)
    check_optimizer(model, config)
    if parent is not None:
        check_parent(parent, config, model, data.fingerprint)
    attention = model.variant_layer().module
    config, notes = _resolve_vmap(resolve_lr(config, attention), model, data)
    frozen = identity(
        config,
        data_fingerprint=data.fingerprint,
        vocabulary=data.vocabulary,
        device=config.device.partition(":")[0],
        kernel=model.kernel,
        circuits_from_outside=hashes,
    )
    return RunPlan(
        config=config,
        data=data,
        identity=frozen,
        run=Run(config.out, label(config), run_id(frozen)),
        sites={site: layer.module for site, layer in model.variant_layers().items()},
        matched_lr=attention.matched_lr,
        circuit_lr=attention.circuit_lr(config.variant.lr),
        kernels={layer.site: layer.module.kernel for layer in model.attention_layers()},
        params=model.parameter_counts(),
        flops_per_token=training_flops_per_token(
            model, config.train.batch_size * config.model.context, data.answer_fraction
        ),
        notes=notes,
    )


def _resolve_vmap(config: Config, model: Model, data: Data) -> tuple[Config, tuple[str, ...]]:
    """Return the config with train.vmap as a number, and a note if the run cannot be vmapped.

    On a CPU the runs of programs of all sizes are the same, so that one number stands for all.
    """
    requested = config.train.vmap
    if requested == 1:
        return config, ()
    obstacle = find_obstacle(config, model, count_loss_blocks(config, data))
    config = resolve_vmap(config, obstacle)
    if config.train.vmap != 1 and config.device == "cpu":
        config = replace(config, train=replace(config.train, vmap=2))
    return config, (f"{label(config)} is not vmapped: {obstacle}",) if obstacle else ()


def count_loss_blocks(config: Config, data: Data) -> int:
    """Return the number of blocks in which the logits of a batch are computed."""
    answers = config.train.batch_size * config.model.context * data.answer_fraction
    return math.ceil(round(answers) / blocked_loss.rows_per_block(data.vocabulary))


def resolve_lr(config: Config, attention: Attention) -> Config:
    """Return the config with `variant.lr` as a number."""
    variant, factor = config.variant, attention.resolve_lr(config.variant.lr)
    if factor != 1 and not attention.has_circuit_lr:
        raise ImpossibleConfig(
            f"variant.lr: {variant.lr} given, but no circuit of {variant.name} has a learning rate"
            " of its own (allowed: between, matched, same, 1)"
        )
    return replace(config, variant=replace(variant, lr=factor))


def build_empty_model(config: Config, vocabulary: int) -> Model:
    """Build the model of a resolved config on the meta device."""
    with torch.device("meta"):
        model = build_model(
            config.model,
            config.variant,
            vocabulary,
            device=config.device.partition(":")[0],
            precision=config.precision,
            gpu=hardware.find_gpu(config),
            kernel=config.attention.kernel,
            padding=config.data.source in PADDED_SOURCES,
        )
    model.checkpoint_activations = config.train.checkpoint_activations
    if config.train.checkpoint_activations:
        model.has_external_circuits = has_external(config.variant)
    return model


def check_out(out: Path, required: int) -> None:
    """Raise UserError if a folder cannot be written to, or its disk has too little room."""
    try:
        make_folder(out / "runs")
        with tempfile.TemporaryFile(dir=out / "runs") as probe:  # leaves no name after a crash
            probe.write(b"x" * 4096)
            probe.flush()
        free = free_bytes(out)
    except OSError as error:
        raise UserError(f"out: cannot write in '{out}': {error.strerror or error}") from None
    if free < required:
        raise UserError(
            f"out: '{out}' has {free / 2**20:,.0f} MB free; this run needs"
            f" {required / 2**20:,.0f} MB"
        )

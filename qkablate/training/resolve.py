"""A run before its first step: everything resolved and checked, nothing computed yet."""

import math
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from qkablate.config import Config
from qkablate.data import Data, open_data
from qkablate.disk import make_folder
from qkablate.errors import UserError
from qkablate.models import blocked_loss
from qkablate.models.catalogue import settle
from qkablate.models.cost import training_flops_per_token
from qkablate.models.gpt import GPT
from qkablate.runs import predictions
from qkablate.runs.run import Run, free_bytes, identity, label, run_id
from qkablate.tracking.wandb.mode import resolve_mode
from qkablate.training import checkpoint, hardware
from qkablate.training.warm_start import start


@dataclass(frozen=True)
class Plan:
    """A frozen run."""

    config: Config  # without a single `auto` that bears on the result
    data: Data
    identity: dict[str, Any]
    run: Run
    kernel: str
    equation: str
    match: str  # how well the start meets standard's
    lr_multiplier: dict[str, float]  # of the QK and the OV circuit
    params: dict[str, int]
    flops_per_token: float  # of training: forward and backward

    @property
    def tokens_per_step(self) -> int:
        train = self.config.train
        return train.batch_size * train.accumulate * self.config.model.context

    @property
    def loss_blocks(self) -> int:
        """In how many blocks the logits of a batch are computed."""
        answers = self.config.train.batch_size * self.config.model.context * self.data.answers
        return math.ceil(round(answers) / blocked_loss.rows(self.data.vocabulary))

    def build(self) -> GPT:
        """The model, without values yet."""
        return empty_model(self.config, self.data.vocabulary)


def plan(
    config: Config, *, elsewhere: bool = False, writes: bool = True, data: Data | None = None
) -> Plan:
    """Resolve what depends on machine and data; UserError for whatever can't be. `elsewhere`: this
    machine does not train it. Of a process that `writes` nothing no room is asked. `data`: what is
    open already.
    """
    config, parent = start.settled(config)
    config, hashes = settle(hardware.resolve(config, elsewhere=elsewhere))
    if writes:
        resolve_mode(config.track)
        # The cheap looks first: data may have to be prepared.
        total = empty_model(config, 1).ledger()["total"]
        need = checkpoint.bytes_needed(total) + predictions.bytes_needed(config)
        _check_out(Path(config.out).expanduser(), need)
    if data is None:
        data = open_data(config.data, config.model.context)
    data.check_context(config.model.context)
    model = empty_model(config, data.vocabulary)
    if parent is not None:
        start.check(parent, config, model, data.fingerprint)
    attention = model.attentions()[0]
    frozen = identity(
        config,
        data_fingerprint=data.fingerprint,
        vocabulary=data.vocabulary,
        device=config.device.partition(":")[0],
        kernel=attention.kernel,
        circuits_from_outside=hashes,
    )
    return Plan(
        config=config,
        data=data,
        identity=frozen,
        run=Run(config.out, label(config), run_id(frozen)),
        kernel=attention.kernel,
        equation=attention.equation,
        match=attention.match,
        lr_multiplier=attention.lr_multipliers()
        if config.variant.lr == "matched"
        else {"qk": 1.0, "ov": 1.0},
        params=model.ledger(),
        flops_per_token=training_flops_per_token(
            model, config.train.batch_size * config.model.context, data.answers
        ),
    )


def empty_model(config: Config, vocabulary: int) -> GPT:
    """The model without values."""
    with torch.device("meta"):
        model = GPT(
            config.model,
            config.variant,
            vocabulary,
            device=config.device.partition(":")[0],
            half=hardware.flash_in_half(config),
            kernel=config.attention.kernel,
        )
    model.checkpoint_activations = config.train.checkpoint_activations
    return model


def _check_out(out: Path, need: int) -> None:
    try:
        make_folder(out / "runs")
        with tempfile.TemporaryFile(dir=out / "runs") as probe:  # a power cut leaves no name
            probe.write(b"x" * 4096)
            probe.flush()
        free = free_bytes(out)
    except OSError as error:
        raise UserError(f"out: cannot write in '{out}': {error.strerror or error}") from None
    if free < need:
        raise UserError(
            f"out: '{out}' has {free / 2**20:,.0f} MB free; this run needs {need / 2**20:,.0f} MB"
        )

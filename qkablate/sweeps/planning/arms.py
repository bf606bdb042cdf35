"""The resolved arms of a grid: config, data and size of the model that some overrides make."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from qkablate.config import Config
from qkablate.data import Data, open_data
from qkablate.data.corpus import check_available
from qkablate.errors import UserError
from qkablate.models.catalogue import resolve_circuits
from qkablate.models.cost import training_flops_per_token
from qkablate.runs.run import run_id
from qkablate.sweeps.planning.control import ModelSize
from qkablate.training import hardware
from qkablate.training.resolve import build_empty_model

Overrides = dict[str, str]  # key → its value, as typed on the command line


@dataclass(frozen=True)
class ResolvedArm:
    """An arm's config with every auto filled in, and what machine and data add to it."""

    config: Config
    facts: dict[str, Any]  # the rest of a run's identity
    size: ModelSize
    val_tokens: int
    kv_cache_numbers: int


@dataclass
class ArmResolver:
    """Resolves each set of overrides once, and opens each data set once."""

    compose: Callable[[Overrides], Config]  # makes a checked config
    remote: bool = False  # other machines than this one train the runs
    _data: dict[str, Data] = field(default_factory=dict)
    _arms: dict[tuple[tuple[str, str], ...], ResolvedArm] = field(default_factory=dict)

    def resolve(
        self, overrides: Overrides, changes: Mapping[str, int | float] | None = None
    ) -> ResolvedArm:
        """Return the arm of some overrides, with changes by a control; raise ImpossibleConfig."""
        overrides = with_changes(overrides, changes or {})
        key = tuple(overrides.items())
        if key not in self._arms:
            self._arms[key] = self._resolve(overrides)
        return self._arms[key]

    def _resolve(self, overrides: Overrides) -> ResolvedArm:
        requested = self.compose(overrides)
        if requested.init_from.run is not None:
            raise UserError(
                "init_from.run: the runs of a sweep begin from fresh weights; one run from another"
                " is qkablate project, or qkablate train init_from.run=RUN"
            )
        config, hashes = resolve_circuits(hardware.resolve(requested, remote=self.remote))
        data = self._open_data(config)
        model = build_empty_model(config, data.vocabulary)
        layers = [layer.module for layer in model.attention_layers()]
        facts = {
            "data_fingerprint": data.fingerprint,
            "vocabulary": data.vocabulary,
            "device": config.device.partition(":")[0],
            "kernel": layers[0].kernel,
            "circuits_from_outside": hashes,
        }
        counts = model.parameter_counts()
        flops = training_flops_per_token(
            model, config.train.batch_size * config.model.context, data.answer_fraction
        )
        size = ModelSize(counts["total"] - counts["embedding"], counts["total"], flops)
        kv_cache_numbers = sum(layer.cached_per_token for layer in layers)
        return ResolvedArm(config, facts, size, data.tokens["val"], kv_cache_numbers)

    def _open_data(self, config: Config) -> Data:
        key = run_id({"data": vars(config.data), "context": config.model.context})
        if key not in self._data:
            check_available(config.data)
            data = open_data(config.data, config.model.context)
            data.check_context(config.model.context)
            self._data[key] = data
        return self._data[key]


def with_changes(overrides: Overrides, changes: Mapping[str, int | float]) -> Overrides:
    """Return the overrides with those of a control."""
    return {**overrides, **{key: repr(value) for key, value in changes.items()}}

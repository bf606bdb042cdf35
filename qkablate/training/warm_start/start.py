"""Runs that begin from a trained one: the parent's weights, projected to the run's variant.

They are kept in the run's folder, as start/step-00000000/, written and verified like a checkpoint:
a parent that is trained further or deleted changes nothing.
"""

import dataclasses
import itertools

import torch

from qkablate.attention import Attention
from qkablate.attention.projection.moments import Moments
from qkablate.attention.projection.project import (
    MomentSums,
    ProjectionErrors,
    find_obstacle,
    is_same_form,
    needs_averages,
    project_layer,
)
from qkablate.config import (
    Config,
    InitFromConfig,
    VariantConfig,
    flatten,
    resolve_variant,
    variants,
)
from qkablate.data import Data
from qkablate.errors import ImpossibleConfig, UserError, print_stderr
from qkablate.models.base import Model
from qkablate.models.catalogue import make_attention
from qkablate.runs.records import is_number, read_json, write_json
from qkablate.runs.run import PROJECTION_ERRORS, Run, find_run, run_id
from qkablate.training import checkpoint, hardware
from qkablate.training.prefetcher import batch_reader
from qkablate.training.warm_start.restore import RestoredRun, check_shapes, restore

TOKENS = 64  # read per dimension of each stream, many more than its second moment has directions
_MAY_DIFFER = ("model.dropout",)  # has no weights


class CannotProject(ImpossibleConfig):
    """A trained model has a circuit that a variant cannot be set to."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


def resolve_parent(config: Config) -> tuple[Config, RestoredRun | None]:
    """Fill in the parent's id, weights and step; return the parent unless all were given."""
    init_from = config.init_from
    if init_from.run is None or None not in (init_from.id, init_from.weights, init_from.step):
        return config, None
    parent = restore_parent(init_from, config.out, load=False)
    resolved = InitFromConfig(
        run=init_from.run,
        id=run_id(parent.identity),
        weights=checkpoint.weights_sha256(parent.checkpoint),
        step=(parent.config.init_from.step or 0) + parent.step,
    )
    for key, value in vars(init_from).items():
        if value not in (None, actual := getattr(resolved, key)):
            raise UserError(
                f"init_from.{key}: {value} given, but that of '{init_from.run}' is {actual}"
            )
    return dataclasses.replace(config, init_from=resolved), parent


def restore_parent(init_from: InitFromConfig, out: str, load: bool = True) -> RestoredRun:
    """Restore the trained run that `init_from` names."""
    run = init_from.run
    assert run is not None
    try:
        return restore(find_run(run, out), weights=init_from.weights, load=load)
    except UserError as error:
        reason = str(error)
    if reason.startswith("variant."):  # no key of this run can name the parent's file
        reason = f"'{run}' has an external circuit, so that no other run can begin from it"
    raise UserError(f"init_from.run: {reason}")


def check_parent(parent: RestoredRun, config: Config, model: Model, data_fingerprint: str) -> None:
    """Raise UserError if a run cannot begin from this parent."""
    name = parent.folder.resolve().name
    parent_config = flatten(parent.config)
    for key, value in flatten(config).items():
        if key.startswith("model.") and key not in _MAY_DIFFER and value != parent_config[key]:
            raise UserError(
                f"{key}: {value} given, but '{name}' has {parent_config[key]}: the sizes of both"
                " runs must be equal"
            )
    if parent.is_imported:  # from data that is not known: those of a run are its own choice
        if parent.model.vocabulary != model.vocabulary:
            tokens = f"{parent.model.vocabulary:,} tokens, and the data {model.vocabulary:,}"
            hint = "; give data.tokenizer=gpt2" if parent.config.data.tokenizer == "gpt2" else ""
            raise UserError(f"init_from.run: '{name}' has {tokens}{hint}")
    elif parent.identity["data_fingerprint"] != data_fingerprint:
        raise UserError(f"init_from.run: '{name}' was trained on other data; give its data keys")
    # The layers of a site are alike.
    sources, targets = (
        {layer.site: layer.module for layer in side.attention_layers()}
        for side in (parent.model, model)
    )
    for site, source in sources.items():
        if reason := find_obstacle(source, targets[site]):
            possible = ", ".join(word for word in variants() if _can_hold(sources, config, word))
            choice = f"possible: {possible}" if possible else "only its own variant is possible"
            raise CannotProject(
                f"init_from.run: '{name}' cannot be projected to {config.variant.name}: {reason}"
                f" ({choice})",
                reason,
            )


def _can_hold(sources: dict[str, Attention], config: Config, name: str) -> bool:
    """Return whether the layers of all sites can be projected to a variant of the catalogue."""
    asked = config.variant
    kept = {"init": asked.init, "rope_dims": asked.rope_dims, "sites": asked.sites}
    try:
        variant = resolve_variant(VariantConfig(**{**variants()[name], **kept}), config.model)
        with torch.device("meta"):
            targets = [make_attention(config.model, variant, site) for site in sources]
    except UserError:
        return False
    return not any(map(find_obstacle, sources.values(), targets))


def project_parent(
    parent: Model, model: Model, config: Config, data: Data
) -> list[ProjectionErrors]:
    """Set all weights of `model` and return the errors of each layer on the run's coming batches.

    Weights outside the circuits are copied. Computed with the run's threads and matmul backend, so
    that the same run always begins with the same weights.
    """
    prefixes = tuple(f"{layer.name}." for layer in model.attention_layers())
    weights = parent.state_dict()
    rest = {name: value for name, value in weights.items() if not name.startswith(prefixes)}
    differences = model.load_state_dict(rest, strict=False)
    assert all(name.startswith(prefixes) for name in differences.missing_keys)
    assert not differences.unexpected_keys
    sources, targets = (
        [layer.module for layer in side.attention_layers()] for side in (parent, model)
    )
    pairs = [*zip(sources, targets, strict=True)]
    with hardware.preserve_process_state():
        hardware.configure_process(config)
        if all(is_same_form(*pair) for pair in pairs):
            return [project_layer(*pair, None) for pair in pairs]
        averages = any(needs_averages(*pair) for pair in pairs)
        moments = _collect_moments(parent, config, data, averages)
        return [project_layer(*pair, m) for pair, m in zip(pairs, moments, strict=True)]


@torch.no_grad()
def _collect_moments(model: Model, config: Config, data: Data, averages: bool) -> list[Moments]:
    """Return the moments of what each layer reads in the first batches of the run."""
    sums = [
        MomentSums(layer.module, causal=layer.causal, averages=averages)
        for layer in model.attention_layers()
    ]
    batches = batch_reader(config, data)
    for step in itertools.count():
        for batch in batches(step):
            inputs = batch.marked_inputs
            read = zip(sums, model.attention_inputs(*inputs), strict=True)
            for layer_sums, (layer, streams) in read:
                layer_sums.add(streams, *model.padding_masks(layer, *inputs))
        if min(layer_sums.tokens_per_dimension for layer_sums in sums) >= TOKENS:
            break
    return [layer_sums.mean() for layer_sums in sums]


def load_or_project(run: Run, config: Config, data: Data, model: Model) -> checkpoint.Checkpoint:
    """Load the initial weights from the run's folder, or project them to `model` and write them."""
    for path in checkpoint.find_checkpoints(run.start):
        try:
            weights = checkpoint.load_weights(path)
        except (OSError, ValueError, TypeError) as error:
            print_stderr(f"qkablate: {path} is damaged ({error}): not used")
            continue
        check_shapes(model, weights, run.folder)
        # Only the weights: nothing has been trained yet.
        return checkpoint.Checkpoint(checkpoint.TrainProgress(), weights.weights)
    parent = restore_parent(config.init_from, config.out)
    check_parent(parent, config, model, data.fingerprint)
    model = model.to_empty(device="cpu")
    errors = project_parent(parent.model, model, config, data)
    start = checkpoint.Checkpoint(checkpoint.TrainProgress(), model.state_dict())
    checkpoint.save(run.start, start)
    write_json(run.start / PROJECTION_ERRORS, [dataclasses.asdict(layer) for layer in errors])
    return start


def load_projection_errors(
    run: Run, config: Config, data: Data, model: Model, parent: Model
) -> list[ProjectionErrors]:
    """Load the errors of each layer, or compute them again with the run's empty `model`."""
    try:
        content = read_json(run.start / PROJECTION_ERRORS)
        errors = [ProjectionErrors(**{**one, "heads": tuple(one["heads"])}) for one in content]
        valid = all(sorted(one.heads) == [*range(config.model.heads)] for one in errors)
        numbers = [n for one in errors for n in (one.qk, one.qk_scores, one.ov, one.ov_output)]
        if len(errors) == len(model.attention_layers()) and valid and all(map(is_number, numbers)):
            return errors
    except (TypeError, ValueError, KeyError):
        pass
    return project_parent(parent, model.to_empty(device="cpu"), config, data)

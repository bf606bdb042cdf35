"""A run that begins from a trained one: the parent's weights, put into the form of its own variant.

They are kept in the run's folder, as start/step-00000000/, written and checked like a checkpoint:
a parent that is trained further or deleted changes nothing.
"""

import dataclasses
from typing import TYPE_CHECKING

import torch

from qkablate.attention import Attention
from qkablate.attention.projection.project import Lost, look, project_layer, same_form, why_not
from qkablate.config import Config, StartConfig, VariantConfig, flatten, resolve_variant, variants
from qkablate.errors import UserError, tell
from qkablate.models.catalogue import attention
from qkablate.models.gpt import GPT
from qkablate.runs.records import is_number, read_json, write_json
from qkablate.runs.run import run_id
from qkablate.training import checkpoint, hardware
from qkablate.training.state import Progress
from qkablate.training.warm_start.restore import Restored, check_shapes, find_run, restore

if TYPE_CHECKING:
    from qkablate.training.resolve import Plan

TOKENS = 64  # to look at per dimension of the stream: many more than a moment has directions
_MAY_DIFFER = ("model.dropout",)  # it has no weights


def settled(config: Config) -> tuple[Config, Restored | None]:
    """With what is known of the run to begin from (its id, its weights, how far it has come), and
    that run, if it had to be looked at.
    """
    start = config.start
    if start.run is None or None not in (start.id, start.weights, start.step):
        return config, None
    parent = parent_of(start, config.out)
    known = StartConfig(
        run=start.run,
        id=run_id(parent.identity),
        weights=checkpoint.weights_sha256(parent.checkpoint),
        step=(parent.config.start.step or 0) + parent.step,
    )
    for key, value in vars(start).items():
        if value not in (None, right := getattr(known, key)):
            raise UserError(f"start.{key}: {value} given, and of '{start.run}' it is {right}")
    return dataclasses.replace(config, start=known), parent


def parent_of(start: StartConfig, out: str) -> Restored:
    """The trained run that `start` names."""
    assert start.run is not None
    try:
        folder = find_run(start.run, out)
        return restore(folder, weights=start.weights)
    except UserError as mistake:
        told = str(mistake)
        if told.startswith("variant."):  # no key of this run can name the parent's file
            told = f"'{start.run}' has a circuit from outside, and no other run can begin from it"
        raise UserError(f"start.run: {told}") from None


def check(parent: Restored, config: Config, model: GPT, data_fingerprint: str) -> None:
    """UserError where this run cannot begin from that one."""
    name = parent.folder.resolve().name
    theirs = flatten(parent.config)
    for key, own in flatten(config).items():
        if key.startswith("model.") and key not in _MAY_DIFFER and own != theirs[key]:
            raise UserError(
                f"{key}: {own} given, and '{name}' has {theirs[key]}: a run begins from one of its"
                " own size"
            )
    if parent.identity["data_fingerprint"] != data_fingerprint:
        raise UserError(f"start.run: '{name}' was trained on other data; give its data keys")
    source = parent.model.attentions()[0]  # of all layers the same can be said
    if reason := why_not(source, model.attentions()[0]):
        can = [own for own in variants() if _holds(source, config, own)]
        raise UserError(
            f"start.run: '{name}' cannot be put into the form of {config.variant.name}: {reason}"
            f" (possible: {', '.join(can) or 'none but its own'})"
        )


def _holds(source: Attention, config: Config, name: str) -> bool:
    """Whether one of the catalogue's variants can hold something of this layer."""
    named = VariantConfig(**{**variants()[name], "init": config.variant.init})
    try:
        with torch.device("meta"):
            target = attention(config.model, resolve_variant(named, config.model))
    except UserError:
        return False
    return not why_not(source, target)


def project(parent: GPT, model: GPT, plan: "Plan") -> list[Lost]:
    """Set all of `model`; what is outside the circuits is the parent's. What each layer lost, of
    what it sees of the batches to come. Computed as the run computes, whatever else this process
    does: the same run begins with the same weights.
    """
    inside = {name for name, _ in model.named_parameters() if ".attention." in name}
    weights = parent.state_dict()
    rest = {name: value for name, value in weights.items() if ".attention." not in name}
    missing = model.load_state_dict(rest, strict=False)
    assert {*missing.missing_keys} == inside
    assert not missing.unexpected_keys
    layers = parent.attentions()
    pairs = [*zip(layers, model.attentions(), strict=True)]
    with hardware.process_state():
        hardware.prepare(plan.config)
        if all(same_form(*pair) for pair in pairs):
            return [project_layer(*pair, None) for pair in pairs]
        seen = look(layers, lambda: _read(parent, plan))
        return [project_layer(*pair, own) for pair, own in zip(pairs, seen, strict=True)]


def _read(model: GPT, plan: "Plan") -> None:
    """Pass some batches of the run that is to begin."""
    config = plan.config
    steps = plan.data.batches(
        seed=config.seeds.data,
        batch_size=config.train.batch_size,
        accumulate=config.train.accumulate,
        context=config.model.context,
    )
    least, read, step = TOKENS * config.model.d_model, 0, config.start.step or 0
    while read < least:
        for batch in steps.step(step):
            model.hidden(batch.tokens_NT)
            read += batch.tokens_NT.numel()
        step += 1


def keep(plan: "Plan") -> checkpoint.Checkpoint | None:
    """What the run begins with, from its folder; put there first, where it is not. None for a run
    from fresh weights.
    """
    config, folder = plan.config, plan.run.start
    if config.start.run is None:
        return None
    for path in checkpoint.newest_first(folder):
        try:
            found = checkpoint.load_weights(path, "cpu")
        except (OSError, ValueError, TypeError) as error:
            tell(f"qkablate: {path} is damaged ({error}): not used")
            continue
        check_shapes(plan.build(), found, plan.run.folder)
        # Of what stands there the weights alone: nothing has been trained yet.
        return checkpoint.Checkpoint(Progress(), found.weights)
    parent = parent_of(config.start, config.out)
    model = plan.build()
    check(parent, config, model, plan.data.fingerprint)
    model = model.to_empty(device="cpu")
    lost = project(parent.model, model, plan)
    found = checkpoint.Checkpoint(Progress(), model.state_dict())
    checkpoint.save(folder, found)
    write_json(folder / "lost.json", [dataclasses.asdict(own) for own in lost])
    return found


def lost_of(plan: "Plan", parent: GPT) -> list[Lost]:
    """What the projection that the run began with has lost, as its folder says; where that says
    nothing, as it is found again.
    """
    layers, heads = plan.config.model.layers, plan.config.model.heads
    try:
        content = read_json(plan.run.start / "lost.json")
        found = [Lost(**{**own, "heads": tuple(own["heads"])}) for own in content]
        orders = all(sorted(own.heads) == [*range(heads)] for own in found)
        parts = [part for own in found for part in (own.qk, own.qk_seen, own.ov, own.ov_seen)]
        if len(found) == layers and orders and all(map(is_number, parts)):
            return found
    except (TypeError, ValueError, KeyError):
        pass
    return project(parent, plan.build().to_empty(device="cpu"), plan)

"""Diagnostics and attention map of a run; their inputs are the same for the same data and context.

Shape suffixes: N windows, L layers, H heads, T tokens.
"""

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from qkablate.attention import Attention
from qkablate.config import Config, DataConfig, check
from qkablate.config.sweep import unquoted
from qkablate.data import TASKS, Data, corpus, find_data, open_task
from qkablate.data.batches import PAD
from qkablate.diagnostics import DiagnosticPanel, attention_weights
from qkablate.diagnostics.panel import LENGTH, TOKENS
from qkablate.errors import UserError, print_stderr
from qkablate.models.base import AttentionLayer, Model
from qkablate.randomness import named_generator
from qkablate.runs import attention_map
from qkablate.runs.attention_map import AttentionMapHeader
from qkablate.training import checkpoint, hardware
from qkablate.training.resolve import RunPlan
from qkablate.training.warm_start.restore import RestoredRun

RANDOM_TOKENS = "random tokens"  # where the data of a run is not known
_MAX_TASK_TOKENS, _MAX_TASK_VOCABULARY = 2**20, 2**14  # of a task generated for diagnostics


def make_panel(plan: RunPlan, model: Model) -> DiagnosticPanel:
    """Return the panel that measures the model of a run while it trains."""
    config = plan.config
    return DiagnosticPanel(
        model,
        *(t.to(config.device) for t in validation_inputs(plan.data, config.model.context)),
        starts=initial_layers(model, config, plan.run.start),
        autocast=lambda: hardware.autocast(config),
    )


def record_attention(plan: RunPlan, write: Callable[..., None], model: Model, step: int) -> None:
    """Write the attention of a model on one text after `step` steps; draws no random numbers."""
    tokens_T = validation_inputs(plan.data, plan.config.model.context)[0][0]
    training = model.training
    model.eval()
    try:
        found = compute_attention_map(model, tokens_T, plan.config.device)
    finally:
        model.train(training)
    if found is not None:  # otherwise the loop will report divergence
        header = AttentionMapHeader(plan.run.id, step, plan.data.fingerprint)
        write(attention_map.write_attention_map, header, *found)


def compute_attention_map(
    model: Model, tokens_T: Tensor, device: str
) -> tuple[np.ndarray, np.ndarray] | None:
    """Return the first tokens and a_LHTT in 255ths; None without a map or finite weights."""
    shape = model.config
    length = attention_map.token_count(shape.layers, shape.heads, shape.context)
    if not length or shape.form != "decoder":  # a map is read as causal
        return None
    tokens_T = tokens_T[:length]
    tokens_T = tokens_T[tokens_T != PAD]
    # In full precision, as `qkablate inspect` computes it.
    with torch.autocast(device.partition(":")[0], enabled=False):
        a_LHTT = torch.stack(attention_weights(model, tokens_T.to(device))).cpu().numpy()
    if not np.isfinite(a_LHTT).all():
        return None
    return tokens_T.numpy(), attention_map.quantize(a_LHTT)


def validation_inputs(data: Data, context: int, tokens: int = TOKENS) -> tuple[Tensor, ...]:
    """Return the first inputs of the validation split: tokens_NT, or a source before them.

    The padding of both is PAD.
    """
    # Complete windows only: an evaluation batch would be padded.
    count = max(2, tokens // min(context, LENGTH))
    count = max(1, min(count, (data.tokens["val"] - 1) // context))
    batch = next(iter(data.split_batches("val", batch_size=count, context=context)))
    return tuple(tokens_NT[:, :LENGTH] for tokens_NT in batch.marked_inputs)


def initial_layers(model: Model, config: Config, folder: Path) -> Iterator[Attention]:
    """Yield each attention layer as the run began, on the CPU, one at a time.

    The weights are drawn again from the seed or, if the run began from another, loaded from
    `folder`. Nothing is yielded if they are lost.
    """
    if config.init_from.run is None:
        yield from model.initial_attention_layers(config.seeds.init)
        return
    for path in checkpoint.find_checkpoints(folder):
        try:
            weights = checkpoint.load_weights(path).weights
            layers = [_with_weights(layer, weights) for layer in model.attention_layers()]
        except (OSError, ValueError, TypeError, KeyError, RuntimeError):
            continue
        yield from layers
        return
    print_stderr(
        f"qkablate: '{folder}' does not hold the initial weights of the run: `moved` is omitted"
    )


def _with_weights(layer: AttentionLayer, weights: dict[str, Tensor]) -> Attention:
    """Return a copy of a layer on the CPU, with its part of the weights of a model."""
    module = copy.deepcopy(layer.module).to_empty(device="cpu")
    module.load_state_dict({key: weights[f"{layer.name}.{key}"] for key in module.state_dict()})
    return module


def choose_inputs(
    restored: RestoredRun, cache: str, tokens: int = TOKENS, data: Data | None = None
) -> tuple[tuple[Tensor, ...], str]:
    """Return the inputs for the diagnostics of a run on disk, and their description.

    Without `data` they are the run's own. No path in its folder is read and nothing is prepared:
    its data is found by its fingerprint in the cache; otherwise the tokens are random.
    """
    context, vocabulary = restored.config.model.context, restored.model.vocabulary
    if data is not None and data.tokens["val"] <= context:
        raise UserError(
            f"data: the validation split of {data.name} has {data.tokens['val']:,} tokens, and a"
            f" window of this run {context:,}"
        )
    data = data or find_run_data(restored, cache)
    folder = corpus.cache_dir(DataConfig(cache=cache))
    if data is not None and data.vocabulary == vocabulary and data.tokens["val"] >= context:
        return validation_inputs(data, context, tokens), f"the validation split of {data.name}"
    reason = f"the run's data is not prepared in '{folder}'"
    hint = " (data.cache=FOLDER names another cache)"
    if restored.is_imported:
        reason = "an imported run has no data of its own"
        hint = "; data=NAME measures it on text"
    print_stderr(f"qkablate: {reason}: the attention is computed on random tokens{hint}")
    rng, rows = named_generator(0, "mechanism", "tokens"), max(1, tokens // min(context, LENGTH))
    lengths = restored.model.input_lengths()
    inputs = [rng.integers(vocabulary, size=(rows, min(length, LENGTH))) for length in lengths]
    return tuple(map(torch.from_numpy, inputs)), RANDOM_TOKENS


def find_run_data(restored: RestoredRun, cache: str) -> Data | None:
    """Return the data of a run, from a cache or generated again; None if it is not here."""
    fingerprint, config = str(restored.identity.get("data_fingerprint")), restored.config
    found = find_data(replace(config.data, cache=unquoted(cache)), config.model, fingerprint)
    return found or _find_task(config, fingerprint)


def _find_task(config: Config, fingerprint: str) -> Data | None:
    """Return the task of the run, if it generates the data of this fingerprint."""
    data = config.data
    tokens, vocabulary = max(data.val_tokens, data.test_tokens), data.vocab_size or 0
    if data.source not in TASKS or tokens > _MAX_TASK_TOKENS or vocabulary > _MAX_TASK_VOCABULARY:
        return None
    try:
        check(Config(data=data))
        task = open_task(data, config.model)
        return task if task.fingerprint == fingerprint else None
    except UserError:
        return None

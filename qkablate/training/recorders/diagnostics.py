"""What the diagnostics of a run look at: the same of every run on the same data and context."""

import copy
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from qkablate.attention import Attention
from qkablate.config import Config, DataConfig, check
from qkablate.data import TASKS, Data, corpus
from qkablate.diagnostics.panel import LENGTH, TOKENS
from qkablate.errors import UserError, tell
from qkablate.models.gpt import GPT
from qkablate.randomness import stream
from qkablate.runs.records import read_config
from qkablate.training import checkpoint
from qkablate.training.warm_start.restore import Restored

_MOST, _LARGEST = 2**20, 2**14  # tokens of a task that are drawn for a look, and of its vocabulary


def validation_tokens(data: Data, context: int) -> Tensor:
    """The first windows of the validation split, tokens_NT."""
    # Whole ones alone: where there are fewer, a reading is filled up.
    count = max(1, min(TOKENS // min(context, LENGTH), (data.tokens["val"] - 1) // context))
    batch = next(iter(data.reading("val", batch_size=count, context=context)))
    return batch.tokens_NT[:, :LENGTH]


def starts_of(model: GPT, config: Config, folder: Path) -> Iterator[Attention]:
    """Each attention layer as the run began, on the CPU, one at a time: drawn again from the seed,
    or, of a run that began from another, what its `folder` of starts keeps; none where that is
    lost.
    """
    if config.start.run is None:
        yield from model.starts(config.seeds.init)
        return
    for path in checkpoint.newest_first(folder):
        try:
            weights = checkpoint.load_weights(path, "cpu").weights
            layers = [_with_weights(model, name, weights) for name in _attentions(model)]
        except (OSError, ValueError, TypeError, KeyError, RuntimeError):
            continue
        yield from layers
        return
    tell(f"qkablate: '{folder}' does not hold what the run began with: `moved` is left out")


def _attentions(model: GPT) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, Attention)]


def _with_weights(model: GPT, name: str, weights: dict[str, Tensor]) -> Attention:
    """A layer like the one of that name, on the CPU."""
    layer = copy.deepcopy(model.get_submodule(name)).to_empty(device="cpu")
    layer.load_state_dict({key: weights[f"{name}.{key}"] for key in layer.state_dict()})
    assert isinstance(layer, Attention)
    return layer


def tokens_for(restored: Restored, cache: str) -> tuple[Tensor, str]:
    """The same for a run on disk, and what a person calls it. No path that its folder names is
    read, and nothing is prepared: the data is known by its fingerprint; without it, random tokens
    have to do.
    """
    context = restored.config.model.context
    fingerprint = str(read_config(restored.folder)["identity"].get("data_fingerprint"))
    where = corpus.cache_dir(DataConfig(cache=cache))
    found: Data | None = corpus.find(fingerprint, where) or _task(restored.config, fingerprint)
    vocabulary = restored.model.token_embedding.num_embeddings
    if found is not None and found.vocabulary == vocabulary and found.tokens["val"] >= context:
        return validation_tokens(found, context), f"the validation split of {found.name}"
    tell(
        f"qkablate: the run's data is not prepared in '{where}': the attention is looked at with"
        " random tokens (data.cache=FOLDER says where else it may be)"
    )
    length = min(context, LENGTH)
    drawn = stream(0, "mechanism", "tokens").integers(
        vocabulary, size=(max(1, TOKENS // length), length)
    )
    return torch.from_numpy(drawn), "random tokens"


def _task(config: Config, fingerprint: str) -> Data | None:
    """The task of the run, if it draws what the run has learned."""
    data = config.data
    if data.source not in TASKS or max(data.val_tokens, data.test_tokens) > _MOST:
        return None
    if (data.vocab_size or 0) > _LARGEST:
        return None
    try:
        check(Config(data=data))
        task = TASKS[data.source](data, config.model.context)
        return task if task.fingerprint == fingerprint else None
    except UserError:
        return None

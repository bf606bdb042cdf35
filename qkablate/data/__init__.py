"""Text and generated tasks → tokens → batches. Imports no model."""

import itertools
from collections.abc import Iterator
from functools import partial

from qkablate.config import DATA_KEYS, DataConfig, ModelConfig
from qkablate.config.data import PAIR_SOURCES, has_masks
from qkablate.data.batches import IGNORE, Batch, RandomWindows
from qkablate.data.corpus import Corpus, cache_dir, find_corpus, open_corpus
from qkablate.data.eval_metrics import EvalMetrics
from qkablate.data.pairs.pairs import Pairs, RandomPairs
from qkablate.data.pairs.tagged import TaggedSentences
from qkablate.data.tasks import PAIR_TASKS, TASKS, Task
from qkablate.data.tasks.base import TaskBatches
from qkablate.data.text.masked import MaskedText, RandomMaskedWindows, masked_fingerprint
from qkablate.data.tokenizers import Tokenizer
from qkablate.errors import ImpossibleConfig

__all__ = [
    "IGNORE",
    "TASKS",
    "Batch",
    "Corpus",
    "Data",
    "EvalMetrics",
    "MaskedText",
    "Pairs",
    "TaggedSentences",
    "Task",
    "TrainingBatches",
    "find_data",
    "iterate_windows",
    "open_data",
    "open_task",
    "task_words",
]


# Data of a run, as training uses it, and its training batches by step.
Data = Corpus | MaskedText | Pairs | Task
TrainingBatches = RandomWindows | RandomMaskedWindows | RandomPairs | TaskBatches


def open_data(config: DataConfig, model: ModelConfig, tokenizer: Tokenizer | None = None) -> Data:
    """Return the data of a run, preparing it if needed; UserError where that is impossible.

    With a `tokenizer` that another text has made, a text is prepared for a run on that one.
    """
    if config.source in TASKS:
        return open_task(config, model)
    check_form(config, model)
    return _read_corpus(open_corpus(config, tokenizer), config, model)


def find_data(config: DataConfig, model: ModelConfig, fingerprint: str) -> Data | None:
    """Return prepared data with this fingerprint, if the cache of a config has any."""
    derive = partial(masked_fingerprint, context=model.context) if has_masks(config) else None
    corpus = find_corpus(fingerprint, cache_dir(config), derive)
    return None if corpus is None else _read_corpus(corpus, config, model)


def _read_corpus(corpus: Corpus, config: DataConfig, model: ModelConfig) -> Data:
    """Return a prepared text as a model reads it."""
    if config.source == "stdlib_tags":
        return TaggedSentences(corpus, model)
    if config.source in PAIR_SOURCES:
        return Pairs(corpus, model)
    return MaskedText(corpus, model.context) if has_masks(config) else corpus


def check_form(config: DataConfig, model: ModelConfig) -> None:
    """Raise ImpossibleConfig if a prepared text is not for this form of the model."""
    source, form = config.source, model.form
    if source == "stdlib_tags":
        if form != "encoder":
            raise ImpossibleConfig(
                f"data: {source} has tags of words for model.form=encoder, as in"
                f" model=nano_encoder; it is {form}"
            )
    elif source in PAIR_SOURCES:
        if form != "encoder_decoder":
            raise ImpossibleConfig(
                f"data: {source} has pairs of source and target for model.form=encoder_decoder, as"
                f" in model=nano_translator; it is {form}"
            )
    elif form == "encoder_decoder":
        pairs = ", ".join((*PAIR_TASKS, *(name for name in PAIR_SOURCES if name != "stdlib_tags")))
        raise ImpossibleConfig(
            f"data: {source} is a text for model.form=decoder or encoder; model.form={form} needs"
            f" pairs of source and target: {pairs}"
        )
    elif form == "encoder" and not has_masks(config):
        raise ImpossibleConfig(
            f"data.objective: causal predicts the next token, which model.form={form} reads; use"
            " data.objective=mlm, data=stdlib_tags, or a task as data=reverse"
        )
    elif form == "decoder" and has_masks(config):
        raise ImpossibleConfig(
            "data.objective: mlm predicts masked tokens from both sides, and model.form=decoder"
            " reads one; use model.form=encoder, as in model=nano_encoder"
        )


def open_task(config: DataConfig, model: ModelConfig) -> Task:
    """Return a generated task; with another form than decoder, its pairs of source and target."""
    kind = TASKS[config.source]
    if model.form == "decoder":
        return kind(config, model.context)
    if config.source not in PAIR_TASKS:
        raise ImpossibleConfig(
            f"data: {config.source} has no pairs of source and target, which"
            f" model.form={model.form} needs (allowed: {', '.join(PAIR_TASKS)})"
        )
    source = model.context if model.source is None else model.source
    return kind(config, model.context, form=model.form, source=source)


def task_words(config: DataConfig, model: ModelConfig) -> list[str]:
    """Return the words that make a task in `qkablate data`, as a model of this form reads it."""
    values = {key: getattr(config, key) for key in DATA_KEYS[config.source]}
    keys = [f"data.{key}={value}" for key, value in values.items() if value is not None]
    form = [] if model.form == "decoder" else [f"model.form={model.form}"]
    source = [] if model.source is None else [f"model.source={model.source}"]
    return [f"data={config.source}", *keys, f"model.context={model.context}", *form, *source]


def iterate_windows(
    data: Data, split: str, *, seed: int, batch_size: int, grad_accum: int, context: int
) -> Iterator[tuple[Batch, int]]:
    """Yield the windows of a split in order, as batch and row; of `train`, those of a run."""
    if split == "train":
        steps = data.batches(
            seed=seed, batch_size=batch_size, grad_accum=grad_accum, context=context
        )
        batches: Iterator[Batch] = itertools.chain.from_iterable(map(steps.step, itertools.count()))
    else:
        batches = data.split_batches(split, batch_size=16, context=context)
    for batch in batches:
        for row, targets_A in enumerate(batch.targets_NA):
            if (targets_A != IGNORE).any():  # the others pad the last batch
                yield batch, row

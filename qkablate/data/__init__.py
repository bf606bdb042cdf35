"""Text and generated tasks → tokens → batches. Imports no model."""

import itertools
from collections.abc import Iterator

from qkablate.config import DATA_KEYS, DataConfig, ModelConfig
from qkablate.config.data import PAIR_SOURCES
from qkablate.data.batches import IGNORE, Batch, RandomWindows
from qkablate.data.corpus import Corpus, cache_dir, find_corpus, open_corpus
from qkablate.data.eval_metrics import EvalMetrics
from qkablate.data.pairs.pairs import Pairs, RandomPairs
from qkablate.data.tasks import PAIR_TASKS, TASKS, Task
from qkablate.data.tasks.base import TaskBatches
from qkablate.errors import ImpossibleConfig

__all__ = [
    "IGNORE",
    "TASKS",
    "Batch",
    "Corpus",
    "Data",
    "EvalMetrics",
    "Pairs",
    "Task",
    "TrainingBatches",
    "find_data",
    "iterate_windows",
    "open_data",
    "open_task",
    "task_words",
]


# Data of a run, as training uses it, and its training batches by step.
Data = Corpus | Pairs | Task
TrainingBatches = RandomWindows | RandomPairs | TaskBatches


def open_data(config: DataConfig, model: ModelConfig) -> Data:
    """Return the data of a run, preparing it if needed; UserError where that is impossible."""
    if config.source in TASKS:
        return open_task(config, model)
    if config.source in PAIR_SOURCES:
        if model.form != "encoder_decoder":
            raise ImpossibleConfig(
                f"data: {config.source} has pairs of source and target for"
                f" model.form=encoder_decoder, as in model=nano_translator; it is {model.form}"
            )
        return Pairs(open_corpus(config), model)
    if model.form != "decoder":
        raise ImpossibleConfig(
            f"data: {config.source} is a text for model.form=decoder; model.form={model.form} needs"
            f" pairs of source and target: {', '.join((*PAIR_TASKS, *PAIR_SOURCES))}"
        )
    return open_corpus(config)


def find_data(config: DataConfig, model: ModelConfig, fingerprint: str) -> Data | None:
    """Return prepared data with this fingerprint, if the cache of a config has any."""
    corpus = find_corpus(fingerprint, cache_dir(config))
    if corpus is None or config.source not in PAIR_SOURCES:
        return corpus
    return Pairs(corpus, model)


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
    keys = [f"data.{key}={getattr(config, key)}" for key in DATA_KEYS[config.source]]
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

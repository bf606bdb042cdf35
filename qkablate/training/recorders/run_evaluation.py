"""Evaluation of a trained run outside of training, on its own data or on any other.

Batches are read, and losses summed, as in training: on the run's own data the loss is the one that
training has recorded. Draws no random numbers and writes nothing.
"""

import contextlib
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from qkablate.config import Config, DataConfig, read_limit
from qkablate.config.data import VOCABULARY_SIZES
from qkablate.data import TASKS, Batch, Corpus, Data, EvalMetrics, open_data, task_words
from qkablate.data.batches import DOCUMENT
from qkablate.data.progress import Progress
from qkablate.errors import UserError, print_stderr
from qkablate.models.base import Model
from qkablate.runs.records import read_json
from qkablate.runs.run import count_cores
from qkablate.table import format_count
from qkablate.training import hardware
from qkablate.training.recorders.diagnostics import find_run_data
from qkablate.training.recorders.evaluation import ModelLosses, choose_batch_size, sum_losses
from qkablate.training.resolve import build_empty_model
from qkablate.training.warm_start.restore import RestoredRun

TRAINED_TOKENIZERS = (*VOCABULARY_SIZES, "chars")  # each made from its own text
MAX_TOKENS = 2**18  # of a forward pass on a GPU, however large its memory


@dataclass(frozen=True)
class Machine:
    """Device, precision and threads; None: as the run was trained, if this machine can."""

    device: str | None = None
    precision: str | None = None
    threads: int | None = None


@dataclass(frozen=True)
class DocumentSums:
    """Sums over the answers of each document: of a text, of pairs, or a sequence of a task."""

    losses: np.ndarray
    hits: np.ndarray
    counts: np.ndarray


@dataclass(frozen=True)
class EvaluatedRun:
    """The sums over a split or a part of it, and the metrics that training makes of them."""

    config: Config  # as it was evaluated
    answers: int
    accuracy: float
    metrics: dict[str, float]
    documents: DocumentSums


def open_run_data(restored: RestoredRun, requested: DataConfig | None, cache: str) -> Data:
    """Return the requested data, or the run's own; UserError unless the run can read it.

    No path in the run's folder is read: its own data is found in the cache.
    """
    config = restored.config
    name = restored.folder.resolve().name
    # Its tokens are not known: data of as many is taken at the user's word.
    is_unknown = restored.is_imported and config.data.tokenizer is None
    if requested is None:
        data = find_run_data(restored, cache)
        if data is None and restored.is_imported:
            raise UserError(f"data: '{name}' was imported and has no data; give data=NAME")
        if data is None and config.data.source in TASKS:
            words = [w for w in task_words(config.data, config.model) if w.startswith("data")]
            raise UserError(
                f"data: the task of '{name}' is large, or of another version, and is generated only"
                f" where it is named: {shlex.join(words)}"
            )
        if data is None:
            raise UserError(
                f"data: the data of '{name}' is not prepared on this machine; data.cache=FOLDER"
                " names another cache, data=NAME other data"
            )
    else:
        if not is_unknown:
            _check_kind(restored, requested)
        is_made = requested.tokenizer in TRAINED_TOKENIZERS and not is_unknown
        data = open_data(requested, config.model, restored.tokenizer() if is_made else None)
    if not isinstance(data, Corpus):  # a text may be shorter than the context
        data.check_context(config.model.context)
    own = read_json(restored.folder / "tokenizer.json")
    other = data.tokenizer
    # That of an imported run is known by its name alone, which says nothing of its version.
    is_same = (
        own is None or other is None or (isinstance(own, dict) and own.items() <= other.items())
    )
    if data.vocabulary != restored.model.vocabulary or not is_same:
        hint = "; its own tokenizer was not imported" if is_unknown else ""
        raise UserError(
            f"data: {data.name} has {data.vocabulary:,} tokens, and this run was trained on"
            f" {restored.model.vocabulary:,} others{hint}"
        )
    return data


def _check_kind(restored: RestoredRun, requested: DataConfig) -> None:
    """Raise UserError, before anything is prepared, if the tokens are not those of the run."""
    own, other = restored.config.data, requested
    if (own.tokenizer is None) != (other.tokenizer is None):
        kinds = ("a task", "text") if own.tokenizer is None else ("text", "a task")
        raise UserError(
            f"data: {other.source} given, but this run was trained on {kinds[0]}"
            f" (data={own.source}), whose tokens are not those of {kinds[1]}"
        )
    if own.tokenizer != other.tokenizer:
        raise UserError(
            f"data.tokenizer: {other.tokenizer} given, but this run reads {own.tokenizer}; leave"
            " out data.tokenizer"
        )


def training_limit(restored: RestoredRun, data: Data, split: str) -> int | None:
    """Return how many tokens are read: of the run's own data, as many as in training."""
    return read_limit(restored.config, split) if _is_own(restored, data) else None


def _is_own(restored: RestoredRun, data: Data) -> bool:
    return data.fingerprint == restored.identity.get("data_fingerprint")


def evaluate_run(
    restored: RestoredRun,
    data: Data,
    source: str,
    split: str,
    limit: int | None,
    machine: Machine,
) -> EvaluatedRun:
    """Evaluate a run on a split of data from a source, or on `limit` tokens of it.

    Where memory runs out, batches are halved.
    """
    config = _choose_machine(restored, machine)
    config = replace(config, data=replace(config.data, source=source))  # whether it is padded
    with hardware.preserve_process_state():
        hardware.configure_process(config)
        model = build_empty_model(config, data.vocabulary).to_empty(device=config.device)
        model.load_state_dict(restored.model.state_dict())
        size = choose_batch_size(config, data, split, limit)
        if config.device.startswith("cuda") and not _is_own(restored, data):
            size = max(size, _fitting_windows(config, data))
        while True:
            try:
                totals = read_split(
                    config, model, data, split, limit, size, as_trained=_is_own(restored, data)
                )
                break
            except Exception as error:
                if not hardware.is_out_of_memory(error):
                    raise
            if size == 1:
                raise UserError("out of memory, even with one window at a time")
            size //= 2
            print_stderr(f"out of memory: again with {format_count(size, 'window')} at a time")
            hardware.reset_peak_memory(config.device)
    by_document = totals.slices.pop(DOCUMENT, {})
    sums = [by_document[index] for index in sorted(by_document)]
    return EvaluatedRun(
        config,
        totals.all.count,
        totals.all.accuracy,
        data.metrics(split, totals),
        DocumentSums(*(np.array([getattr(s, k) for s in sums]) for k in ("loss", "hits", "count"))),
    )


def read_split(
    config: Config,
    model: Model,
    data: Data,
    split: str,
    limit: int | None,
    size: int,
    as_trained: bool = True,
) -> EvalMetrics:
    """Return the sums over a split, by document, too; `as_trained`: rounded as in training."""
    context = config.model.context
    batches = partial(data.split_batches, split, batch_size=size, context=context, limit=limit)
    losses = ModelLosses(model)
    with contextlib.closing(Progress("evaluation")) as progress:
        total = min(data.tokens[split], limit or data.tokens[split])
        progress.stage(split, total, "tokens")
        totals = sum_losses(config, losses, _count_tokens(batches(by_document=True), progress))
        if as_trained and isinstance(data, Corpus) and next(iter(batches())).slices is None:
            # In training the loss of each batch is one sum, which is rounded in another way.
            progress.stage(f"{split}, as in training", total, "tokens")
            totals.all.loss = sum_losses(
                config, losses, _count_tokens(batches(), progress)
            ).all.loss
    return totals


def _count_tokens(batches: Iterable[Batch], progress: Progress) -> Iterator[Batch]:
    done = 0
    for batch in batches:
        yield batch
        done += batch.tokens_NT.numel()
        progress.update(done)


def _choose_machine(restored: RestoredRun, machine: Machine) -> Config:
    """Return the config for this machine, by default with device and precision of the training.

    An imported model was trained on another machine: it is evaluated in the precision that holds
    its weights, on the device and the threads that there are.
    """
    trained = restored.config
    if restored.is_imported:
        cores = machine.threads or count_cores()
        machine = Machine(machine.device or "auto", machine.precision or "fp32", cores)
    threads = machine.threads or min(int(trained.threads), count_cores())
    trained = replace(trained, compile=False, threads=threads)
    if machine.device is None and machine.precision is None:
        with contextlib.suppress(UserError):
            return hardware.resolve(trained)
    return hardware.resolve(
        replace(
            trained,
            device=machine.device or "auto",
            precision=machine.precision or "auto",
            matmul="auto",
            attention=replace(trained.attention, kernel="auto"),
        )
    )


def _fitting_windows(config: Config, data: Data) -> int:
    """Return how many windows half of the free memory of a GPU should hold."""
    model = config.model
    free, _ = torch.cuda.mem_get_info(config.device)
    # Logits in several copies; the stream, what an MLP and wide keys make of it.
    logits = 16 * data.vocabulary * data.answer_fraction
    token = logits + 64 * model.d_model + 8 * model.heads * max(model.d_model, model.context)
    return max(1, min(int(free / 2 / token), MAX_TOKENS) // model.context)

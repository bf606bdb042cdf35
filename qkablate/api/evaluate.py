"""Evaluate trained runs: for `qkablate.evaluate` and `qkablate eval`."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qkablate.api.words import format_words
from qkablate.compose.configs import compose_jobs
from qkablate.config import DATA_KEYS, KEYS, Config, DataConfig, Role, check, has_role
from qkablate.config.data import (
    HELD_OUT_SPLITS,
    HUB_KEYS,
    PREPARED_SOURCES,
    TEXT_SOURCES,
    fill_vocab_size,
    source_words,
)
from qkablate.config.sweep import unquoted
from qkablate.errors import UserError, nearest_hint, not_one_of, print_stderr
from qkablate.runs.records import read_result
from qkablate.runs.run import find_run

if TYPE_CHECKING:
    import numpy as np

    from qkablate.analysis.study.study import Record
    from qkablate.training.recorders.run_evaluation import DocumentSums, EvaluatedRun
    from qkablate.training.warm_start.restore import RestoredRun

LEVEL = 0.95  # of the interval of a gap
# Keys of an evaluation, beside those of data.
_OWN_KEYS = ("tokens", "step", "device", "precision", "threads", "out")
CIRCUIT_KEYS = ("variant.file", "variant.qk", "variant.ov")
DATA_WORDS = ("data", *(key for key in KEYS if key.startswith("data.")))
EVAL_KEYS = (*DATA_WORDS, *_OWN_KEYS, *CIRCUIT_KEYS)
_MOST_DIGITS = 17


@dataclass(frozen=True)
class Evaluation:
    """Losses of a run on a split, with standard errors over documents.

    A document is a text, a sequence of a task or, for pairs, a file (the pair itself where files
    are unknown). With a single document the standard errors are None.
    """

    run: str
    step: int
    data: str
    split: str
    answers: int  # tokens that were predicted
    documents: int
    loss: float  # in nats per answer
    loss_se: float | None
    perplexity: float | None  # None if it overflows
    bits_per_byte: float | None  # None where the bytes are not known, and for tasks and pairs
    accuracy: float
    accuracy_se: float | None
    exact: float | None  # of sequences, as a whole; None for texts
    measures: dict[str, float]  # all that training measures, by slice, too
    data_fingerprint: str
    device: str
    precision: str
    sums: "DocumentSums" = dataclasses.field(repr=False, compare=False)


@dataclass(frozen=True)
class EvaluationGap:
    """Difference of the losses of two runs on the same documents, in nats per answer."""

    run: str
    baseline: str
    gap: float
    se: float | None
    interval: tuple[float, float] | None
    documents: int


def evaluate(run: "str | Path | Record", *, split: str = "val", **keys: Any) -> Evaluation:
    """Evaluate a trained run without training, as `qkablate eval` does.

    The run is a name, a folder, or what `train` and `load_runs` return. Without keys of data, the
    run's own data is used, and as much of it as in training.

    >>> evaluate("merged_w", data="wikitext2").loss
    """
    words = format_words(keys)
    values = {key: value for key, _, value in (word.partition("=") for word in words)}
    for key in values:
        if key not in EVAL_KEYS:
            raise UserError(f"{key}: there is no such key{nearest_hint(key, EVAL_KEYS)}")
    for key in values.keys() & {*_OWN_KEYS, *CIRCUIT_KEYS}:
        values[key] = unquoted(values[key])  # Hydra reads the others
    if split not in HELD_OUT_SPLITS:
        raise UserError(f"split: {not_one_of(split, HELD_OUT_SPLITS)}")
    folder = run if isinstance(run, str | Path) else run.folder
    return evaluate_runs([str(folder)], values, split)[0]


def evaluate_runs(
    runs: Sequence[str], values: Mapping[str, str], split: str = "val"
) -> list[Evaluation]:
    """Evaluate runs on the data that {key: value} names; all are checked before the first."""
    step = _whole_number(values, "step", 0)
    threads = None if values.get("threads") == "auto" else _whole_number(values, "threads", 1)
    tokens = None if values.get("tokens") == "all" else _whole_number(values, "tokens", 2)
    device, precision = values.get("device"), values.get("precision")
    check(Config(device=device or "auto", precision=precision or "auto", threads=threads or "auto"))
    if "data" in values:
        _compose_data(values)
    folders = [find_run(run, values.get("out", "outputs")) for run in runs]
    for folder in folders:
        _check_trained(folder, step)
    from qkablate.training.recorders.run_evaluation import (
        Machine,
        evaluate_run,
        open_run_data,
        training_limit,
    )
    from qkablate.training.warm_start.restore import restore

    file, qk, ov = map(values.get, CIRCUIT_KEYS)
    machine = Machine(device, precision, threads)
    planned = []
    for folder in folders:
        restored = restore(folder, variant_file=file, qk=qk, ov=ov, step=step)
        requested = request_data(restored.config.data, values)
        data = open_run_data(restored, requested, values.get("data.cache", "auto"))
        limit = tokens if "tokens" in values else training_limit(restored, data, split)
        planned.append((restored, requested or restored.config.data, data, limit))
    found = []
    for restored, config, data, limit in planned:
        if read_result(restored.folder) is None and not restored.is_imported:
            name = restored.folder.resolve().name
            print_stderr(
                f"{name} has no result yet: its checkpoint of step {restored.step} is evaluated"
            )
        evaluated = evaluate_run(restored, data, config.source, split, limit, machine)
        found.append(_describe(restored, data.name, data.fingerprint, split, evaluated))
    return found


def compare_evaluations(run: Evaluation, baseline: Evaluation) -> EvaluationGap | None:
    """Return the gap of two runs; None unless they have predicted the same documents."""
    import numpy as np
    from scipy import stats

    from qkablate.analysis.study.document_error import ratio_error

    counts, documents = run.sums.counts, run.documents
    if run.data_fingerprint != baseline.data_fingerprint or run.split != baseline.split:
        return None
    if not documents or not np.array_equal(counts, baseline.sums.counts):
        return None
    differences = run.sums.losses - baseline.sums.losses
    gap, se, interval = float(differences.sum() / counts.sum()), None, None
    if documents > 1:
        se = ratio_error(differences, counts)
        half = float(stats.t.ppf((1 + LEVEL) / 2, documents - 1)) * se
        interval = gap - half, gap + half
    return EvaluationGap(run.run, baseline.run, gap, se, interval, documents)


def _whole_number(values: Mapping[str, str], key: str, least: int) -> int | None:
    """Return the number of a key, if it is given."""
    text = values.get(key)
    if text is None:
        return None
    is_number = text.isascii() and text.isdecimal() and len(text) <= _MOST_DIGITS
    if not is_number or int(text) < least:
        words = " or all" if key == "tokens" else ""
        raise UserError(f"{key}: '{text[:40]}' is not a whole number from {least}{words}")
    return int(text)


def _check_trained(folder: Path, step: int | None) -> None:
    """Raise UserError for a run that failed or diverged, unless the user names a checkpoint."""
    status = (read_result(folder) or {}).get("status")
    if status in ("failed", "diverged") and step is None:
        raise UserError(
            f"'{folder.resolve().name}' {'has ' * (status == 'diverged')}{status}: give step=N for"
            " a checkpoint of it, or train it again with --rerun"
        )


def _compose_data(values: Mapping[str, str]) -> DataConfig:
    """Return the data that the keys name, with the defaults of their source."""
    words = [f"{k}={v}" for k, v in values.items() if k.partition(".")[0] == "data"]
    jobs = compose_jobs(words)
    if len(jobs) > 1:
        raise UserError("data: these are several; evaluate one data set at a time")
    return jobs[0].config.data


def request_data(own: DataConfig, values: Mapping[str, str]) -> DataConfig | None:
    """Return the data that the keys name; None for the run's own.

    Keys that are not given are the run's if the source is, too; of another text the tokenizer and
    the objective are. Paths are never the run's.
    """
    given = {key for key in values if key.startswith("data.") and key != "data.cache"}
    if "data" not in values and not given:
        return None
    data = _compose_data({**({} if "data" in values else source_words(own)), **values})
    inherited = {"tokenizer", "vocab_size"} if data.source in PREPARED_SOURCES else set()
    inherited |= {"objective"} if data.source in TEXT_SOURCES else set()
    if "data" not in values:
        inherited = {k for k in DATA_KEYS[own.source] if not has_role(f"data.{k}", Role.FINETUNE)}
        inherited -= {*HUB_KEYS} if "data.path" in given else set()
    if own.tokenizer is None:
        inherited -= {"tokenizer", "vocab_size"}
    changes = {key: getattr(own, key) for key in inherited if f"data.{key}" not in given}
    data = fill_vocab_size(dataclasses.replace(data, **changes))
    check(Config(data=data))
    return data


def _describe(
    restored: "RestoredRun", data: str, fingerprint: str, split: str, found: "EvaluatedRun"
) -> Evaluation:
    from qkablate.analysis.study.document_error import ratio_error

    sums, loss = found.documents, found.metrics["loss"]

    def error(values: "np.ndarray") -> float | None:
        return ratio_error(values, sums.counts) if len(sums.counts) > 1 else None

    accuracy = found.metrics.get("accuracy", found.accuracy)  # as training records it
    return Evaluation(
        run=restored.folder.resolve().name,
        step=restored.step,
        data=data,
        split=split,
        answers=found.answers,
        documents=len(sums.counts),
        loss=loss,
        loss_se=error(sums.losses),
        perplexity=math.exp(loss) if loss < math.log(1e18) else None,
        bits_per_byte=found.metrics.get("bits_per_byte"),
        accuracy=accuracy,
        accuracy_se=error(sums.hits) if accuracy == found.accuracy else None,
        exact=found.metrics.get("exact"),
        measures=found.metrics,
        data_fingerprint=fingerprint,
        device=found.config.device,
        precision=found.config.precision,
        sums=sums,
    )

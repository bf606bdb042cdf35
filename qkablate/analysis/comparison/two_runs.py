"""Two runs compared at a glance: one pair is a single number, not a verdict."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qkablate.analysis.comparison.gaps import explain_unequal_tests, perplexity_percent
from qkablate.analysis.study.loss_curves import VAL, read_loss_curves
from qkablate.analysis.study.standalone_runs import read_standalone_runs
from qkablate.analysis.study.study import Record, Study, as_dict, read_facts
from qkablate.config import KEYS, Config, Role, flatten, from_plain, has_role, resolve
from qkablate.config.sweep import as_quoted
from qkablate.errors import UserError
from qkablate.runs.records import is_number, read_config, read_result
from qkablate.runs.run import find_run, find_runs

# Circumstances that are equal in a fair comparison.
_LIKE = ["data_fingerprint", "precision", "matmul", "device", "kernel", "threads", "code"]
_LIKE += ["torch", "cpu", "gpu"]
Both = tuple[Any, Any]  # a value of each run
_RATES = ("between", "matched", "same")  # names of variant.lr, the default first
EVAL_TOKENS = "train.eval_tokens"  # where it differs, there is no gap in validation


@dataclass(frozen=True)
class GapReading:
    """Validation gap at one moment of training."""

    tokens: int
    gap: float


@dataclass(frozen=True)
class RunComparison:
    """Losses, sizes and differing settings of two runs; a gap is the first minus the second."""

    runs: tuple[str, str]
    status: tuple[str, str]
    loss: dict[str, tuple[float | None, float | None]]  # by split
    gap: dict[str, float]
    test: dict[str, tuple[float | None, float | None]]  # accuracy and exact match, if it has them
    perplexity_percent: dict[str, float]
    params: Both  # without embeddings
    total_params: Both
    flops_per_token: Both
    seconds: Both
    packed: Both
    differ: dict[str, Both]  # config keys
    unlike: dict[str, Both]  # circumstances
    paired: bool
    val_gap: list[GapReading]
    unequal_tests: str  # why there is no test gap; '' if there is one, or no loss


def find_pair(word: str, other: str, out: str) -> tuple[Path, Path]:
    """Return the runs that two words name: of several, the newest two that were trained alike."""
    runs, others = find_runs(word, out), find_runs(other, out)
    if len(runs) > 1 or len(others) > 1:
        read = functools.cache(_read_training)  # of thousands of runs, as few as possible
        for first, second in itertools.product(runs, others):
            if first != second and read(first) == read(second) is not None:
                return first, second
    return find_run(word, out), find_run(other, out)


def _read_training(folder: Path) -> dict[str, object] | None:
    """Return what decides a run's result besides its variant and learning rate."""
    with suppress(ValueError, KeyError, TypeError, AttributeError):
        identity = read_config(folder)["identity"]
        optim = {key: value for key, value in identity["optim"].items() if key != "lr"}
        own = ("variant", "kernel", "circuits_from_outside")
        return {key: identity[key] for key in identity if key not in own} | {"optim": optim}
    return None


def compare_runs(first: Path, second: Path) -> RunComparison:
    """Compare two runs; UserError if one cannot be read."""
    config, other_config = _read_config(first), _read_config(second)
    result, other_result = results = [read_result(run) or {} for run in (first, second)]
    facts, other_facts = _read_facts(first, result), _read_facts(second, other_result)
    differ = _differences(config, other_config, [*config, *other_config])
    known = [key for key in _LIKE if all(results) or None not in (facts[key], other_facts[key])]
    unlike = _differences(facts, other_facts, known)
    losses = {
        s: (_value(result, "loss", s), _value(other_result, "loss", s))
        for s in ("train", "val", "test")
    }
    gaps = {s: a - b for s, (a, b) in losses.items() if a is not None and b is not None}
    curve, other_curve = read_loss_curves(first)[VAL], read_loss_curves(second)[VAL]
    if EVAL_TOKENS in differ:
        gaps.pop("val", None)
        curve = {}
    unequal_tests = ""
    if facts["data_fingerprint"] != other_facts["data_fingerprint"]:  # or one is not known
        gaps, curve = {}, {}
    elif "test" in gaps:
        unequal_tests = explain_unequal_tests(result, other_result)
    if unequal_tests:
        del gaps["test"]
    status, other_status = (str(one.get("status", "no result")) for one in results)
    params, total_params = zip(*map(_sizes, results), strict=True)
    keys = ("flops_per_token", "seconds", "packed")
    return RunComparison(
        runs=(first.resolve().name, second.resolve().name),
        status=(status, other_status),
        loss=losses,
        gap=gaps,
        test={
            name: (_value(result, name, "test"), _value(other_result, name, "test"))
            for name in ("accuracy", "exact")
            if any(_value(one, name, "test") is not None for one in results)
        },
        perplexity_percent={split: perplexity_percent(value) for split, value in gaps.items()},
        params=params,
        total_params=total_params,
        **{key: (result.get(key), other_result.get(key)) for key in keys},
        differ=differ,
        unlike=unlike,
        paired="data_fingerprint" not in unlike
        and not any(key.startswith("seed") for key in differ),
        val_gap=[GapReading(t, curve[t] - other_curve[t]) for t in curve if t in other_curve],
        unequal_tests=unequal_tests,
    )


def _read_facts(folder: Path, result: Mapping[str, Any]) -> dict[str, Any]:
    """Return the circumstances of a run, those before its result from its config."""
    facts = read_facts(folder, result)
    identity = as_dict(read_config(folder).get("identity"))
    return {key: identity.get(key) if facts[key] is None else facts[key] for key in _LIKE}


def propose_sweep(first: Path, second: Path) -> list[str] | None:
    """Return the arguments of a sweep that repeats two runs with several seeds.

    None where they differ in more than a grid of two axes has, or a grid cannot repeat them.
    """
    study = read_standalone_runs([first, second])
    by_folder = {record.folder: record for record in study.all_records}
    if study.unread or len(by_folder) < 2:
        return None
    records = [by_folder[folder] for folder in (first, second)]
    settings, others = (_settings(study, record) for record in records)
    # A rate of the circuit that has a name is another number in each variant.
    named = [name for name in _RATES if all(name in _rate_names(record) for record in records)]
    for values in (settings, others) if named else ():
        values["variant.lr"] = named[0]
    _fill_in(settings, others, flatten(study.arms[records[0].run.arm].config))
    _fill_in(others, settings, flatten(study.arms[records[1].run.arm].config))
    differ = _differences(settings, others, {**settings, **others})
    if len(differ) > 2 or any(None in values for values in differ.values()):
        return None
    if any(key.startswith(("init_from.", "variant.file")) for key in settings):
        return None
    words = [f"{key}={','.join(values)}" for key, values in differ.items()]
    words += [f"{key}={value}" for key, value in settings.items() if key not in differ]
    if "variant" not in differ and differ:
        # Runs of one arm may have several rates: they have no baseline among them.
        own = {key: other for key, (_, other) in differ.items() if not has_role(key, Role.RUN)}
        baseline = ", ".join(f"{key}: {other}" for key, other in own.items())
        words.append(f"sweep.baseline={{{baseline}}}" if own else "sweep.baseline=null")
    elif differ and others["variant"] != "standard":
        words.append(f"sweep.baseline={others['variant']}")
    return [*words, "seed=range(6)"]


def _settings(study: Study, record: Record) -> dict[str, str]:
    """Return the settings that repeat a run, without its seeds and what follows from others."""
    automatic = _automatic_keys(study.arms[record.run.arm].config)
    pairs = (word.partition("=") for word in study.overrides_of(record.run))
    return {key: value for key, _, value in pairs if _is_repeated(key) and key not in automatic}


def _fill_in(settings: dict[str, str], others: dict[str, str], values: dict[str, Any]) -> None:
    """Add the settings that only the other run has, where this one has a value of them, too."""
    for key in others.keys() - settings.keys():
        belongs = not has_role(key, Role.VARIANT) or settings["variant"] == others["variant"]
        if belongs and values[key] is not None:
            settings[key] = as_quoted(values[key])


def _automatic_keys(config: Config) -> set[str]:
    """Return the keys of a frozen config that have the value which `auto` stands for."""
    # The steps decide the others; keys without a section depend on the machine.
    keys = {k for k in KEYS if "auto" in KEYS[k].choices and "." in k and k != "train.steps"}
    content = dataclasses.asdict(config)
    for key in keys:
        section, _, leaf = key.partition(".")
        content[section][leaf] = "auto"
    values, resolved = flatten(config), flatten(resolve(from_plain(content)))
    return {key for key in keys if values[key] == resolved[key]}


def _rate_names(record: Record) -> list[str]:
    """Return the names that the learning rate of a run's circuit has in its variant."""
    factor, matched = (record.facts["lr"].get(key) for key in ("factor", "matched"))
    if not (is_number(factor) and is_number(matched) and matched > 0):
        return []
    rates = zip(_RATES, (math.sqrt(matched), matched, 1.0), strict=True)
    return [name for name, rate in rates if math.isclose(factor, rate)]


def _is_repeated(key: str) -> bool:
    """Return whether a sweep has to be given a run's key: not its seeds, nor threads and such."""
    if key.startswith("seed") or key == "train.evaluate_test":
        return False
    return key in ("variant", "data") or has_role(key, Role.IDENTITY | Role.CONTENT)


def _sizes(result: Mapping[str, object]) -> Both:
    """Return the number of parameters without and with embeddings."""
    counts = as_dict(result.get("params"))
    total, embedding = counts.get("total"), counts.get("embedding")
    if is_number(total) and is_number(embedding):
        return total - embedding, total
    return None, total


def _differences(
    values: Mapping[str, object], others: Mapping[str, object], keys: Iterable[str]
) -> dict[str, Both]:
    pairs = {key: (values.get(key), others.get(key)) for key in keys}
    return {key: (value, other) for key, (value, other) in pairs.items() if value != other}


def _value(result: Mapping[str, object], metric: str, split: str) -> float | None:
    value = as_dict(result.get(metric)).get(split)
    return value if is_number(value) else None


def _read_config(folder: Path) -> dict[str, object]:
    """Return the leaves of a run's config as JSON values."""
    try:
        content = read_config(folder)
    except ValueError as error:
        raise UserError(f"'{folder / 'config.yaml'}' cannot be read: {error}") from None
    leaves = {
        f"{key}.{inner}" if inner != "" else str(key): value
        for key, part in content.items()
        if key not in ("id", "identity")
        for inner, value in (part.items() if isinstance(part, dict) else [("", part)])
    }
    return {
        key: value if isinstance(value, str | bool | None) or is_number(value) else str(value)
        for key, value in leaves.items()
        if not has_role(key, Role.LOCAL)
    }

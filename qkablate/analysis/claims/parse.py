"""Claims as files: conf/claim/NAME.yaml or a user's own, at one of the sizes of conf/scale."""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from qkablate.analysis.claims.claim import (
    HORIZONS,
    NON_CLAIM_KEYS,
    OVER_LENGTHS,
    TEXT,
    Claim,
    PartSpec,
)
from qkablate.analysis.claims.measures import MEASURES, Unit
from qkablate.analysis.claims.samples import MIN_OF_MEDIAN, Median
from qkablate.analysis.claims.verdict import KINDS
from qkablate.analysis.comparison.ranking import AXES
from qkablate.analysis.stats import MIN_PAIRS
from qkablate.config import KEYS, check_digits, conf_dir, has_role, no_such_key, variants
from qkablate.config.sweep import SWEEP_KEYS, as_word
from qkablate.errors import UserError, not_one_of
from qkablate.runs.records import is_number

MOST_SEEDS = 1000
MOST_NATS = 3.0  # a margin; the loss of guessing one byte is ln 256 = 5.5


def claim_names() -> list[str]:
    """Return the names of the shipped claims."""
    return sorted(path.stem for path in (conf_dir() / "claim").glob("*.yaml"))


def scales() -> list[str]:
    """Return the scales that a claim can be run at, the smallest first."""
    return sorted((path.stem for path in (conf_dir() / "scale").glob("*.yaml")), reverse=True)


def load_claim(word: str, scale: str = "small", words: Mapping[str, str] | None = None) -> Claim:
    """Load a claim by name or path; `words` override keys of its grid."""
    path = Path(word)
    if path.suffix not in (".yaml", ".yml"):
        path = conf_dir() / "claim" / f"{word}.yaml"
        if word not in claim_names():
            problem = not_one_of(word, claim_names(), "qkablate claim list")
            raise UserError(f"claim {problem}; a file of your own is given as PATH.yaml")
    if not re.fullmatch(r"\w[\w+-]*", path.stem):
        allowed = "letters, digits, _, + and -"
        raise UserError(f"'{path.name}': the name of a claim consists of {allowed}")
    try:
        text = path.read_text(encoding="utf-8")
        content = yaml.safe_load(text)
        _check_repetition(yaml.compose(text, yaml.SafeLoader))
    except OSError as error:
        raise UserError(f"'{path}': {error.strerror}") from None
    except UserError as error:
        raise UserError(f"{path.name}: {error}") from None
    except RecursionError:
        text = "it is nested too deep, or contains itself by an alias"
        raise UserError(f"{path.name}: {text}") from None
    except (yaml.YAMLError, ValueError) as error:
        raise UserError(f"'{path}' is not YAML: {' '.join(str(error).split())}") from None
    try:
        return parse_claim(path.stem, content, scale, words or {})
    except UserError as error:
        raise UserError(f"{path.name}: {error}") from None


def _check_repetition(node: Any) -> None:
    """Raise UserError for a key that is given twice: YAML silently keeps the last one."""
    pairs = node.value if isinstance(node, yaml.MappingNode) else []
    keys = [key.value for key, _ in pairs]
    for key in keys:
        if keys.count(key) > 1:
            raise UserError(f"{key}: is given twice")
    for _, value in pairs:
        _check_repetition(value)


_KEYS = ["says", "source", "untestable", "seeds", "tuning_seeds", "grid", "filter", "baseline"]
_KEYS += ["parts", "scale", "minutes"]
_DATA_AND_LENGTH = ("data", "model.context", "train.steps", "train.tokens")
_PART_DEFAULTS: dict[str, Any] = {"kind": None, "margin": None, "arm": None, "against": "standard"}
_PART_DEFAULTS |= {"of": "gap", "axis": "tokens", "adjust": "mlp", "horizon": "longest"}
_PART_DEFAULTS |= {"data": TEXT, "than": None}
_PART_CHOICES = {"kind": KINDS, "of": MEASURES, "axis": AXES, "horizon": HORIZONS}
_PART_CHOICES |= {"adjust": SWEEP_KEYS["control.adjust"].choices}


def parse_claim(name: str, content: Any, scale: str, words: Mapping[str, str]) -> Claim:
    """Parse the content of a claim file; UserError if anything is wrong with it."""
    content = _map("", content, _KEYS)
    for key in ("says", "source"):
        if not isinstance(content.get(key), str) or not content[key].strip():
            raise UserError(f"{key}: a text is required")
    says, source = (" ".join(content[key].split()) for key in ("says", "source"))
    if untestable := content.get("untestable"):
        return Claim(name, says, source, " ".join(str(untestable).split()))
    _check_choice("scale", scale, scales())
    by_scale = _map("scale", content.get("scale") or {}, scales())
    if by_scale and scale not in by_scale and not content.get("parts"):
        raise UserError(f"scale: this claim has {', '.join(by_scale)}, not {scale}")
    changes = dict(_map(f"scale.{scale}", by_scale.get(scale) or {}))
    baseline = changes.pop("baseline", content.get("baseline", "standard"))
    parts = _map("parts", changes.pop("parts", content.get("parts")))
    scale_text = (conf_dir() / "scale" / f"{scale}.yaml").read_text(encoding="utf-8")
    scale_values = yaml.safe_load(scale_text)
    tasks: dict[str, dict[str, Any]] = scale_values.pop("tasks")
    own = _map("grid", content.get("grid")) | changes | dict(words)
    # A file with its keys in another order is the same claim.
    grid = {key: _values(key, value) for key, value in sorted((scale_values | own).items())}
    check_settings("grid", grid)
    tuning = content.get("tuning_seeds", 3)
    if type(tuning) is not int or not 0 <= tuning <= MOST_SEEDS:
        raise UserError(
            f"tuning_seeds: {tuning} is not a whole number from 0 (no tuning) to {MOST_SEEDS:,}"
        )
    lr = grid.get("optim.lr", "")
    if not tuning and ("," in lr or "(" in lr):
        raise UserError(f"grid: optim.lr={lr}: give one rate, or tuning_seeds to choose among them")
    if not parts:
        raise UserError("parts: a claim needs at least one")
    specs = {key: _part(key, value, grid, [TEXT, *tasks]) for key, value in parts.items()}
    # With other data or another length on the command line, it is a claim about those alone.
    if any(key in _DATA_AND_LENGTH or key.startswith("data.") for key in words):
        on_text = {
            key: replace(spec, data=(TEXT,)) for key, spec in specs.items() if TEXT in spec.data
        }
        given = [key for key in words if key == "data" or key.startswith("data.")]
        if given and not on_text:
            about = " and ".join(_find_datasets(specs))
            raise UserError(f"{given[0]}: this claim is about {about} alone")
        specs = on_text or specs
    if not any(spec.measure.is_of_runs for spec in specs.values()):
        raise UserError(
            "parts: no part measures the runs (as of: gap does); `qkablate cost` shows such costs"
        )
    filters = [] if content.get("filter") is None else content["filter"]
    if not isinstance(filters, list) or not all(isinstance(text, str) for text in filters):
        raise UserError("filter: must be a list of predicates")
    datasets = _find_datasets(specs)
    used = {name: tasks[name] for name in datasets if name != TEXT}
    if TEXT not in datasets:  # the first task takes the place of the text
        used = {
            name: {key: value for key, value in settings.items() if key not in own}
            for name, settings in used.items()
        }
        first = used[datasets[0]]
        grid = {k: text for k, text in grid.items() if k in own or not k.startswith("data.")}
        grid |= {key: as_word(value) for key, value in first.items()}
        changed = {key: scale_values[key] for key in first if key in scale_values}
        used = {name: changed | used[name] for name in datasets} if len(datasets) > 1 else {}
    seeds = _seeds(content.get("seeds"))
    for key, spec in specs.items():
        if spec.measure.sample is Median and seeds[0] < MIN_OF_MEDIAN:
            raise UserError(
                f"parts.{key}.of: {spec.of} is compared by a median, which needs {MIN_OF_MEDIAN}"
                f" seeds or more; this claim has {seeds[0]}"
            )
    minutes = _number(content.get("minutes"))
    if content.get("minutes") is not None and not 0 < (minutes or 0) < 1e6:
        raise UserError(f"minutes: {content['minutes']} is not a number of minutes")
    return Claim(
        name=name,
        says=says,
        source=source,
        scale=scale,
        seeds=seeds,
        tuning_seeds=tuning,
        grid=grid,
        words=dict(words),
        filter=tuple(filters),
        baseline=_baseline(baseline),
        tasks=used,
        parts=specs,
        minutes=minutes,
    )


def check_settings(where: str, settings: Mapping[str, Any]) -> None:
    """Raise UserError for a key that no claim may set in its grid or for a task."""
    for key, value in settings.items():
        if key.partition(".")[0] in ("seed", "seeds", "sweep", "control"):
            raise UserError(f"{where}: {key} is set by the claim itself, not by its grid")
        if has_role(key, NON_CLAIM_KEYS):
            raise UserError(
                f"{where}: {key} is not part of a claim; it is chosen where the claim is run"
            )
        check_digits(key, str(value))


def _find_datasets(specs: Mapping[str, PartSpec]) -> list[str]:
    return [*dict.fromkeys(dataset for spec in specs.values() for dataset in spec.data)]


def _seeds(value: Any) -> tuple[int, ...]:
    looks = value if isinstance(value, list) else [value]
    valid = all(type(n) is int and MIN_PAIRS <= n <= MOST_SEEDS for n in looks)
    if not looks or not valid or sorted({*looks}) != looks:
        allowed = f"a number from {MIN_PAIRS} to {MOST_SEEDS:,}, or an increasing list of interim"
        allowed += " analyses, as [6, 12, 20]"
        raise UserError(f"seeds: {value} is not {allowed}")
    return tuple(looks)


def _baseline(value: Any) -> Any:
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, dict):
        raise UserError(f"baseline: '{value}' is not a variant, a map of keys to values, or null")
    for key, leaf in _map("baseline", value).items():
        if not (isinstance(leaf, str | bool) or is_number(leaf)):
            raise UserError(f"baseline: {key} must be a single value")
    return value


def _part(name: str, value: Any, grid: Mapping[str, str], datasets: Sequence[str]) -> PartSpec:
    where = f"parts.{name}"
    given = _map(where, value, _PART_DEFAULTS)
    value = _PART_DEFAULTS | given
    for key, choices in _PART_CHOICES.items():
        _check_choice(f"{where}.{key}", value[key], choices)
    if "adjust" in given and value["axis"] == "tokens":
        raise UserError(
            f"{where}.adjust: {value['adjust']} has no effect at axis: tokens; set axis: params or"
            " axis: flops"
        )
    _check_margin(where, value)
    _check_question(where, value)
    data = value["data"] if isinstance(value["data"], list) else [value["data"]]
    for dataset in data:
        _check_choice(f"{where}.data", dataset, datasets)
    if not data or len({*data}) < len(data):
        raise UserError(f"{where}.data: name each of {', '.join(datasets)} once")
    if "arm" not in given:
        raise UserError(f"{where}.arm: is required")
    sides = {key: _selector(f"{where}.{key}", value[key], grid) for key in ("arm", "against")}
    if sides["arm"] == sides["against"] and value["than"] is None:
        raise UserError(f"{where}.against: is the same as arm; name another one")
    than = None if value["than"] is None else _selector(f"{where}.than", value["than"], grid)
    if than is not None and "variant" in than:
        raise UserError(
            f"{where}.than: takes settings of both arms, as {{model.heads: 1}}, and no variant"
        )
    changes = {"margin": _number(value["margin"]), "data": tuple(data), "than": than}
    return PartSpec(**(value | sides | changes))


def _check_margin(where: str, part: Mapping[str, Any]) -> None:
    """Raise UserError for a margin that the kind and the measure of a part do not allow."""
    margin, kind = _number(part["margin"]), part["kind"]
    if margin is None or not 0 <= margin < 100:
        raise UserError(f"{where}.margin: '{part['margin']}' is not a number, 0 or more")
    unit = MEASURES[part["of"]].unit
    if unit is Unit.NATS and margin > MOST_NATS:
        raise UserError(
            f"{where}.margin: {margin:g} nats is too large (allowed: up to {MOST_NATS:g})"
        )
    if unit is Unit.SHARE and margin >= 1:
        raise UserError(f"{where}.margin: {margin:g} is not a share below 1; write 5 % as 0.05")
    if margin == 0 and kind in ("noninferior", "equivalent"):
        raise UserError(f"{where}.margin: {kind} needs a margin above 0")
    if margin == 0 and not MEASURES[part["of"]].sample.is_signed:
        raise UserError(f"{where}.margin: a {part['of']} needs a margin above 0")


def _check_question(where: str, part: Mapping[str, Any]) -> None:
    """Raise UserError for a question that a measure has no answer to."""
    of, measure = part["of"], MEASURES[part["of"]]
    if part["kind"] not in measure.kinds:
        allowed = ", ".join(measure.kinds)
        raise UserError(f"{where}.kind: {part['kind']} does not suit of: {of} (allowed: {allowed})")
    horizon = part["horizon"]
    if horizon in OVER_LENGTHS and of != "gap":
        raise UserError(f"{where}.horizon: {horizon} is defined for of: gap alone, not for {of}")
    if horizon != "longest" and not measure.is_of_runs:
        raise UserError(f"{where}.horizon: {of} does not depend on the length of training")
    if part["than"] is not None and measure.is_censored:
        raise UserError(
            f"{where}.than: does not suit of: {of}; runs that never reach the loss have no value to"
            " subtract"
        )
    if of == "params" and part["axis"] == "params":
        raise UserError(
            f"{where}.axis: of: params cannot be compared at equal params; set axis: tokens or"
            " axis: flops"
        )
    if part["than"] is not None and (measure.pair_cost is None or horizon in OVER_LENGTHS):
        what = horizon if horizon in OVER_LENGTHS else of
        raise UserError(
            f"{where}.than: {what} has no value per pair of runs that could be subtracted; leave"
            " out than"
        )


def _check_choice(where: str, word: Any, choices: Iterable[str]) -> None:
    if not isinstance(word, str) or word not in choices:
        raise UserError(f"{where}: {not_one_of(str(word), choices, 'docs/claims.md')}")


def _number(value: Any) -> float | None:
    """Return the number; YAML reads 1e-2 as a string."""
    try:
        return None if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        return None


def _selector(where: str, value: Any, grid: Mapping[str, str]) -> dict[str, Any]:
    """Parse a variant, or a map of keys to values."""
    selector = {"variant": value} if isinstance(value, str) else _map(where, value)
    if not selector:
        raise UserError(f"{where}: selects no arm")
    for key, leaf in selector.items():
        if key != "variant" and key not in KEYS:
            raise UserError(f"{where}: {no_such_key(key)}")
        if isinstance(leaf, list | dict):
            raise UserError(f"{where}: {key}: must be a single value; a part compares two arms")
    variant = selector.get("variant", "standard")
    if variant not in variants() and "variant.file" not in grid:
        problem = not_one_of(str(variant), variants(), "qkablate variants")
        raise UserError(f"{where}: {problem}")
    return {key: as_word(leaf) for key, leaf in selector.items()}


def _values(key: str, value: Any) -> str:
    """Format the values of a grid as on the command line."""
    if isinstance(value, list):
        return ",".join(map(as_word, value))
    if isinstance(value, dict):
        raise UserError(f"grid: write the values of {key} as 32,64 or range(3)")
    return as_word(value)


def _map(where: str, value: Any, known: Collection[str] = ()) -> dict[str, Any]:
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise UserError(f"{where}: must be a map of keys to values".removeprefix(": "))
    for key in value:
        if known and key not in known:
            raise UserError(f"{where}: {not_one_of(key, known, '')}".removeprefix(": "))
    return value

"""Claims as files: conf/claim/NAME.yaml or a user's own, at one of the sizes of conf/scale."""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from qkablate.analysis.claims.claim import HORIZONS, MEASURES, NON_CLAIM_KEYS, Claim, PartSpec
from qkablate.analysis.claims.verdict import KINDS
from qkablate.analysis.comparison.ranking import AXES
from qkablate.analysis.stats import MIN_PAIRS
from qkablate.config import KEYS, check_digits, conf_dir, has_role, no_such_key, variants
from qkablate.config.sweep import as_word
from qkablate.errors import UserError, nearest_hint
from qkablate.runs.records import is_number

MOST_SEEDS = 1000


def claim_names() -> list[str]:
    """Return the names of the shipped claims."""
    return sorted(path.stem for path in (conf_dir() / "claim").glob("*.yaml"))


def scales() -> list[str]:
    """Return the scales that a claim can be run at, the smallest first."""
    return sorted((path.stem for path in (conf_dir() / "scale").glob("*.yaml")), reverse=True)


def load_claim(word: str, scale: str = "small", words: Mapping[str, str] | None = None) -> Claim:
    """Load a claim by name or path; `words` override keys of its grid."""
    path = Path(word)
    if path.suffix in (".yaml", ".yml"):
        if not re.fullmatch(r"\w[\w+-]*", path.stem):
            allowed = "letters, digits, _, + and -"
            raise UserError(f"'{path.name}': the name of a claim consists of {allowed}")
    else:
        path = conf_dir() / "claim" / f"{word}.yaml"
        if not path.is_file() or word not in claim_names():
            raise UserError(
                f"there is no claim '{word}'{nearest_hint(word, claim_names())};"
                " `qkablate claim list` shows them, and a file of your own is given as PATH.yaml"
            )
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"'{path}': {error.strerror}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(f"'{path}' is not YAML: {' '.join(str(error).split())}") from None
    try:
        return parse_claim(path.stem, content, scale, words or {})
    except UserError as error:
        raise UserError(f"{path.name}: {error}") from None


_KEYS = ["says", "source", "untestable", "seeds", "tuning_seeds", "grid", "filter", "baseline"]
_KEYS += ["parts", "scale"]
_DATA_AND_LENGTH = ("data", "model.context", "train.steps", "train.tokens")
_PART_KEYS = ("kind", "margin", "arm", "against", "of", "axis", "horizon", "task")


def parse_claim(name: str, content: Any, scale: str, words: Mapping[str, str]) -> Claim:
    """Parse the content of a claim file; UserError if anything is wrong with it."""
    content = _map("", content, _KEYS)
    for key in ("says", "source"):
        if not isinstance(content.get(key), str) or not content[key].strip():
            raise UserError(f"{key}: a text is required")
    says, source, untestable = (
        " ".join(str(content.get(key) or "").split()) for key in ("says", "source", "untestable")
    )
    if content.get("untestable"):
        return Claim(name, says, source, untestable)
    _check_choice("scale", scale, scales())
    by_scale = _map("scale", content.get("scale") or {}, scales())
    changes = dict(_map(f"scale.{scale}", by_scale.get(scale) or {}))
    baseline = changes.pop("baseline", content.get("baseline", "standard"))
    parts = _map("parts", changes.pop("parts", content.get("parts")))
    scale_text = (conf_dir() / "scale" / f"{scale}.yaml").read_text(encoding="utf-8")
    scale_values = yaml.safe_load(scale_text)
    task = scale_values.pop("task")
    values = scale_values | _map("grid", content.get("grid")) | changes
    grid = {key: _values(key, value) for key, value in values.items()} | dict(words)
    grid = dict(sorted(grid.items()))  # a file with its keys in another order is the same claim
    for key, text in grid.items():
        if key == "control" or key.partition(".")[0] in ("seed", "seeds", "sweep", "control"):
            raise UserError(f"grid: {key} is set by the claim itself, not by its grid")
        if has_role(key, NON_CLAIM_KEYS):
            raise UserError(f"grid: {key} changes no result and is not part of a claim")
        check_digits(key, text)
    tuning = content.get("tuning_seeds", 3)
    if type(tuning) is not int or not 0 <= tuning <= MOST_SEEDS:
        raise UserError(f"tuning_seeds: {tuning} is not a number of seeds; 0 turns tuning off")
    lr = grid.get("optim.lr", "")
    if not tuning and ("," in lr or "(" in lr):
        raise UserError(f"grid: optim.lr={lr}: give one rate, or tuning_seeds to choose among them")
    if not parts:
        raise UserError("parts: a claim needs at least one")
    specs = {key: _part(key, value, grid) for key, value in parts.items()}
    # With other data or another length on the command line, it is a claim about those alone.
    if any(key in _DATA_AND_LENGTH or key.startswith("data.") for key in words):
        specs = {key: spec for key, spec in specs.items() if not spec.task} or specs
    filters = [] if content.get("filter") is None else content["filter"]
    if not isinstance(filters, list) or not all(isinstance(text, str) for text in filters):
        raise UserError("filter: must be a list of predicates")
    are_on_task = [spec.task for spec in specs.values()]
    if not any(are_on_task):
        task = {}
    elif all(are_on_task):
        grid = {key: text for key, text in grid.items() if not key.startswith("data.")}
        grid |= {key: as_word(value) for key, value in task.items()} | dict(words)
        task = {}
    return Claim(
        name=name,
        says=says,
        source=source,
        scale=scale,
        seeds=_seeds(content.get("seeds")),
        tuning_seeds=tuning,
        grid=grid,
        words=dict(words),
        filter=tuple(filters),
        baseline=_baseline(baseline),
        task=task,
        parts=specs,
    )


def _seeds(value: Any) -> tuple[int, ...]:
    looks = value if isinstance(value, list) else [value]
    valid = all(type(n) is int and MIN_PAIRS <= n <= MOST_SEEDS for n in looks)
    if not looks or not valid or sorted({*looks}) != looks:
        allowed = f"a number from {MIN_PAIRS} on, or a rising list of looks as [6, 12, 20]"
        raise UserError(f"seeds: {value} is not {allowed}")
    return tuple(looks)


def _baseline(value: Any) -> Any:
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, dict):
        raise UserError(f"baseline: '{value}' is not a variant, a map of keys to values, or null")
    for key, leaf in _map("baseline", value).items():
        if not isinstance(leaf, str | bool) and not is_number(leaf):
            raise UserError(f"baseline: {key} must be a single value")
    return {key: as_word(leaf) for key, leaf in value.items()}


def _part(name: str, value: Any, grid: Mapping[str, str]) -> PartSpec:
    where = f"parts.{name}"
    value = _map(where, value, _PART_KEYS)
    defaults = {"kind": None, "of": "gap", "axis": "tokens", "horizon": "longest", "task": False}
    value = defaults | {"margin": None, "against": "standard"} | value
    choices_of = {"kind": KINDS, "of": MEASURES, "axis": AXES, "horizon": HORIZONS}
    for key, choices in choices_of.items():
        _check_choice(f"{where}.{key}", value[key], choices)
    kind, is_spread, margin = value["kind"], value["of"] == "spread", _number(value["margin"])
    if margin is None or not 0 <= margin < 100:
        raise UserError(f"{where}.margin: '{value['margin']}' is not a number of nats, 0 or more")
    if margin == 0 and kind in ("noninferior", "equivalent"):
        raise UserError(f"{where}.margin: {kind} needs a margin above 0")
    if is_spread and (kind not in ("noninferior", "worse") or value["horizon"] == "growth"):
        raise UserError(f"{where}.of: a spread is noninferior or worse, without horizon=growth")
    if is_spread and margin == 0:
        raise UserError(f"{where}.margin: a spread needs a margin above 0")
    if "arm" not in value:
        raise UserError(f"{where}.arm: is required")
    if not isinstance(value["task"], bool):
        raise UserError(f"{where}.task: '{value['task']}' is not true or false")
    sides = {key: _selector(f"{where}.{key}", value[key], grid) for key in ("arm", "against")}
    return PartSpec(**(value | sides | {"margin": margin}))


def _check_choice(where: str, word: Any, choices: Iterable[str]) -> None:
    if not isinstance(word, str) or word not in choices:
        hint = nearest_hint(str(word), choices)
        raise UserError(f"{where}: '{word}' is not one of {', '.join(choices)}{hint}")


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
    for key in selector:
        if key != "variant" and key not in KEYS:
            raise UserError(f"{where}: {no_such_key(key)}")
    variant = selector.get("variant", "standard")
    if variant not in variants() and "variant.file" not in grid:
        raise UserError(
            f"{where}: there is no variant '{variant}'{nearest_hint(str(variant), variants())}"
        )
    return {key: as_word(leaf) for key, leaf in selector.items()}


def _values(key: str, value: Any) -> str:
    """Format the values of a grid as on the command line."""
    if isinstance(value, list):
        return ",".join(map(as_word, value))
    if isinstance(value, dict):
        raise UserError(f"grid: write the values of {key} as 32,64 or range(3)")
    return as_word(value)


def _map(where: str, value: Any, known: Sequence[str] = ()) -> dict[str, Any]:
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise UserError(f"{where}: must be a map of keys to values".removeprefix(": "))
    for key in value:
        if known and key not in known:
            allowed = f"{', '.join(known)}{nearest_hint(key, known)}"
            path = f"{where}.{key}".removeprefix(".")
            raise UserError(f"{path}: there is no such key; there is {allowed}")
    return value

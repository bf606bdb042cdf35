"""A claim: a hypothesis in parts, written down before its runs. Its hash is what its seeds are made
of: a claim that is changed has other seeds, so that no run of before can count for it."""

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from qkablate.analysis.ranking import AXES
from qkablate.analysis.scaling import LEAST
from qkablate.analysis.verdict import KINDS
from qkablate.config import conf_dir, flatten
from qkablate.config.sweep import as_word
from qkablate.errors import UserError, nearest
from qkablate.sweeps.manifest import Arm

HORIZONS = ("longest", "each", "growth")
_MOST_SEEDS = 1000
# What changes no number: not part of a claim.
FREE = ("out", "device", "threads", "workers", "per_gpu", "on_failure", "data.cache", "track")
Selector = Mapping[str, Any]


@dataclass(frozen=True)
class PartSpec:
    """What one part says: where the gap of an arm lies."""

    kind: str
    margin: float  # nats; with horizon=growth, nats per doubling of tokens
    arm: Selector
    against: Selector
    axis: str  # what is equal: tokens, params, flops
    horizon: str  # longest, each: of the lengths of training; growth: the gap's change with them


@dataclass(frozen=True)
class Claim:
    name: str
    says: str
    source: str
    untestable: str | None = None  # why there is nothing to run yet
    scale: str = ""
    seeds: tuple[int, ...] = ()  # n; several are looks, at which α is spent bit by bit
    tuning_seeds: int = 0  # 0: every arm at the rate it is given
    grid: Mapping[str, str] = field(default_factory=dict)
    words: Mapping[str, str] = field(default_factory=dict)  # of the grid, on the command line
    where: tuple[str, ...] = ()
    baseline: Any = "standard"
    parts: Mapping[str, PartSpec] = field(default_factory=dict)

    @property
    def content(self) -> dict[str, Any]:
        """All that decides a verdict."""
        own = dataclasses.asdict(self)
        return {key: own[key] for key in own if key not in ("says", "source", "untestable")}

    @property
    def hash(self) -> str:
        text = json.dumps(self.content, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def title(self) -> str:
        return f"{self.name} ({self.scale})"

    @property
    def folder_name(self) -> str:
        return f"{self.name}-{self.scale}-{self.hash[:12]}"

    def seeds_of(self, purpose: str, count: int) -> list[int]:
        """`final` or `tuning` ones: whoever wrote the claim could not know them before."""
        texts = (f"{self.hash}/{purpose}/{number}" for number in range(count))
        return [int.from_bytes(hashlib.sha256(t.encode()).digest()[:4]) >> 1 for t in texts]


@dataclass(frozen=True)
class Comparison:
    """What one part asks of the arms of a sweep."""

    part: str
    spec: PartSpec
    name: str
    pairs: list[tuple[str, str]]  # arm and the one it stands against; several for growth


def claims_dir() -> Path:
    return conf_dir() / "claim"


def known_claims() -> list[str]:
    return sorted(path.stem for path in claims_dir().glob("*.yaml"))


def scales() -> list[str]:
    """The sizes a claim can be run at, the smallest first."""
    return sorted((path.stem for path in (conf_dir() / "scale").glob("*.yaml")), reverse=True)


def scale_keys(scale: str) -> dict[str, Any]:
    text = (conf_dir() / "scale" / f"{scale}.yaml").read_text(encoding="utf-8")
    return _map(f"conf/scale/{scale}.yaml", yaml.safe_load(text))


def load_claim(word: str, scale: str = "small", words: Mapping[str, str] | None = None) -> Claim:
    """A claim by its name, or by the path of a file; `words` are keys its grid is changed in."""
    path = Path(word).expanduser()
    if path.suffix not in (".yaml", ".yml"):
        path = claims_dir() / f"{word}.yaml"
        if not path.is_file() or word not in known_claims():
            raise UserError(
                f"there is no claim '{word}'{nearest(word, known_claims())}; `qkablate claim list`"
                " shows them, and a file of your own is given as PATH.yaml"
            )
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"'{path}': {error.strerror}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(f"'{path}' is no YAML: {' '.join(str(error).split())}") from None
    try:
        return parse(path.stem, content, scale, words or {})
    except UserError as error:
        raise UserError(f"{path.name}: {error}") from None


_KEYS = (
    *("says", "source", "untestable", "seeds", "tuning_seeds"),
    *("grid", "where", "baseline", "parts", "scale"),
)
_PART_KEYS = ("kind", "margin", "arm", "against", "axis", "horizon")


def parse(name: str, content: Any, scale: str, words: Mapping[str, str]) -> Claim:
    """The claim in a file's content; UserError for whatever is wrong with it."""
    content = _map("it", content, _KEYS)
    texts = {key: content.get(key) for key in ("says", "source")}
    for key, text in texts.items():
        if not isinstance(text, str) or not text.strip():
            raise UserError(f"{key}: a text is missing")
    says, source = (" ".join(str(text).split()) for text in texts.values())
    if content.get("untestable"):
        return Claim(name, says, source, " ".join(str(content["untestable"]).split()))
    if scale not in scales():
        raise UserError(f"scale: '{scale}' is not one of {', '.join(scales())}")
    by_scale = _map("scale", content.get("scale") or {}, scales())
    own = dict(_map(f"scale.{scale}", by_scale.get(scale) or {}))
    baseline = own.pop("baseline", content.get("baseline", "standard"))
    given = scale_keys(scale) | _map("grid", content.get("grid")) | own
    grid = {key: _values(key, value) for key, value in given.items()} | dict(words)
    for key in grid:
        if key == "control" or key.partition(".")[0] in ("seed", "seeds", "sweep", "control"):
            raise UserError(f"grid: {key} is the claim's own business, not its grid's")
        if key in FREE or key.partition(".")[0] in FREE:
            raise UserError(f"grid: {key} changes no number, and is no part of a claim")
    tuning_seeds = content.get("tuning_seeds", 2)
    if type(tuning_seeds) is not int or not 0 <= tuning_seeds <= _MOST_SEEDS:
        raise UserError(f"tuning_seeds: {tuning_seeds} is not a number of seeds; 0: no tuning")
    parts = _map("parts", content.get("parts"))
    if not parts:
        raise UserError("parts: a claim has one at least")
    where = content.get("where") or []
    if not isinstance(where, list) or not all(isinstance(one, str) for one in where):
        raise UserError("where: is a list of predicates")
    return Claim(
        name=name,
        says=says,
        source=source,
        scale=scale,
        seeds=_seeds(content.get("seeds")),
        tuning_seeds=tuning_seeds,
        grid=grid,
        words=dict(words),
        where=tuple(where),
        baseline=baseline,
        parts={str(key): _part(str(key), value) for key, value in parts.items()},
    )


def _seeds(value: Any) -> tuple[int, ...]:
    looks = value if isinstance(value, list) else [value]
    whole = all(type(n) is int and 2 <= n <= _MOST_SEEDS for n in looks)
    if not looks or not whole or sorted({*looks}) != looks:
        raise UserError(
            f"seeds: {value} is not a number from 2 on, or a rising list of looks, as [6, 12, 20]"
        )
    return tuple(looks)


def _part(name: str, value: Any) -> PartSpec:
    value = _map(f"parts.{name}", value, _PART_KEYS)
    kind, margin = value.get("kind"), value.get("margin")
    axis, horizon = value.get("axis", "tokens"), value.get("horizon", "longest")
    for key, word, choices in (
        ("kind", kind, KINDS),
        ("axis", axis, AXES),
        ("horizon", horizon, HORIZONS),
    ):
        if word not in choices:
            hint = nearest(str(word), choices)
            raise UserError(
                f"parts.{name}.{key}: '{word}' is not one of {', '.join(choices)}{hint}"
            )
    if type(margin) not in (int, float) or not 0 <= margin < 100:
        raise UserError(f"parts.{name}.margin: '{margin}' is not a number of nats, 0 or more")
    if margin == 0 and kind in ("noninferior", "equivalent"):
        raise UserError(f"parts.{name}.margin: nothing is shown to be {kind} within 0")
    if "arm" not in value:
        raise UserError(f"parts.{name}.arm: is missing")
    return PartSpec(
        kind=kind,
        margin=float(margin),
        arm=_selector(f"parts.{name}.arm", value["arm"]),
        against=_selector(f"parts.{name}.against", value.get("against", "standard")),
        axis=axis,
        horizon=horizon,
    )


def _selector(where: str, value: Any) -> dict[str, Any]:
    if isinstance(value, str):
        return {"variant": value}
    return {key: as_word(one) for key, one in _map(where, value).items()}


def _values(key: str, value: Any) -> str:
    """A grid's values, as they are typed."""
    if isinstance(value, list):
        return ",".join(map(as_word, value))
    if isinstance(value, dict):
        raise UserError(f"grid: the values of {key} are written 32,64 or range(3)")
    return as_word(value)


def _map(where: str, value: Any, keys: Sequence[str] = ()) -> dict[str, Any]:
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise UserError(f"{where}: is not a map of keys to values")
    for key in value:
        if keys and key not in keys:
            place = "" if where == "it" else f"{where}."
            there_is = f"{', '.join(keys)}{nearest(key, keys)}"
            raise UserError(f"{place}{key}: there is no such key; there is {there_is}")
    return value


def comparisons(claim: Claim, arms: Iterable[Arm]) -> list[Comparison]:
    """What the parts ask of these arms; UserError where an arm that is asked for is not there."""
    arms = list(arms)
    found = []
    for name, spec in claim.parts.items():
        pairs = _pairs(claim, spec, arms)
        if not pairs:
            sides = " against ".join(
                ", ".join(f"{k}={v}" for k, v in side.items()) for side in (spec.arm, spec.against)
            )
            raise UserError(f"parts.{name}: the grid has no {sides} at equal {spec.axis}")
        longest = max(one.tokens for one, _ in pairs)
        if spec.horizon == "growth":
            groups: dict[tuple[Any, ...], list[tuple[Arm, Arm]]] = {}
            for one, other in pairs:
                groups.setdefault(_place(claim, one, other), []).append((one, other))
            for place, group in groups.items():
                group.sort(key=lambda pair: pair[0].tokens)
                if len({one.tokens for one, _ in group}) < LEAST:
                    raise UserError(
                        f"parts.{name}: growth is measured over {LEAST} lengths of training or more"
                    )
                names = [(one.name, other.name) for one, other in group]
                found.append(Comparison(name, spec, _called(name, place), names))
        else:
            kept = [p for p in pairs if spec.horizon == "each" or p[0].tokens == longest]
            for one, other in kept:
                lengths = len({pair[0].tokens for pair in kept}) > 1
                place = _place(claim, one, other)
                at = (*place, f"{one.tokens:,} tokens") if lengths else place
                found.append(Comparison(name, spec, _called(name, at), [(one.name, other.name)]))
    return found


def _called(name: str, place: tuple[Any, ...]) -> str:
    return " ".join([name, *map(str, place)])


def _place(claim: Claim, one: Arm, other: Arm) -> tuple[str, ...]:
    """Where in the grid a pair stands, besides its length."""
    keys = [key for key in claim.grid if "," in claim.grid[key] or "(" in claim.grid[key]]
    flat, beside = _flat(one), _flat(other)
    shared = [k for k in keys if k in flat and flat[k] == beside[k]]
    return tuple(
        f"{key.rpartition('.')[2]}={flat[key]}"
        for key in shared
        if key != "variant" and not key.startswith("train.")
    )


def _pairs(claim: Claim, spec: PartSpec, arms: list[Arm]) -> list[tuple[Arm, Arm]]:
    ones = [arm for arm in arms if _is(arm, spec.arm) and _is_under(arm, spec.axis)]
    others = [arm for arm in arms if _is(arm, spec.against) and _is_under(arm, spec.axis)]
    if len(ones) == len(others) == 1:
        return [(ones[0], others[0])]
    # They agree in all that the claim varies and neither side was asked for by.
    free = {"variant", *spec.arm, *spec.against}
    keys = [key for key in claim.grid if key not in free and "." in key]
    return [
        (one, other)
        for one in ones
        for other in others
        if one.name != other.name and all(_flat(one).get(k) == _flat(other).get(k) for k in keys)
    ]


def _is(arm: Arm, selector: Selector) -> bool:
    flat = _flat(arm)
    typed = arm.words.get("variant", "standard")
    return all(
        value in (arm.variant, typed) if key == "variant" else _is_same(flat.get(key), value)
        for key, value in selector.items()
    )


def _is_same(one: str | None, other: str) -> bool:
    """4 and 4.0 are."""
    try:
        return one == other or float(one or "") == float(other)
    except ValueError:
        return False


def _is_under(arm: Arm, axis: str) -> bool:
    """Whether the arm stands in the grid under what holds this equal. A baseline needs nothing
    solved for it, and stands under all."""
    return AXES[axis] in arm.controls or (arm.baseline is None and arm.mismatch is None)


def _flat(arm: Arm) -> dict[str, str]:
    return {key: as_word(value) for key, value in flatten(arm.config).items()}

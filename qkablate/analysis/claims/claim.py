"""Claims: hypotheses in parts; their seeds follow from their hash, so no earlier run counts."""

import dataclasses
import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from qkablate.analysis.claims.measures import MEASURES, Measure, Unit
from qkablate.analysis.comparison.audit import is_annealed
from qkablate.analysis.comparison.ranking import AXES
from qkablate.analysis.scaling.series import MIN_POINTS
from qkablate.config import Role, flatten
from qkablate.config.sweep import LENGTH_KEYS, as_word, control_name
from qkablate.config.variant import is_standard_attention
from qkablate.errors import UserError
from qkablate.sweeps.planning.floors import is_floor
from qkablate.sweeps.planning.manifest import Arm

HORIZONS = ("longest", "each", "growth", "asymptote")
OVER_LENGTHS = ("growth", "asymptote")  # measured over several lengths at once
TEXT = "text"  # the data of the grid; other names of `data` are tasks of the scale
# Keys of where and how a claim is run: not part of it.
NON_CLAIM_KEYS = Role.LOCAL | Role.ONE_PER_SWEEP | Role.LAUNCH
_ADJUSTED = ("model.d_model", "model.layers", "model.mlp_ratio")  # by controls
Selector = Mapping[str, Any]


@dataclass(frozen=True)
class PartSpec:
    """Specification of one part: a bound on a measure of two arms."""

    kind: str
    margin: float  # nats (with horizon=growth, per doubling of tokens), a share, or part of a ratio
    arm: Selector
    against: Selector
    of: str  # one of MEASURES
    axis: str  # what is equal: tokens, params, flops
    horizon: str  # longest, each; over the lengths of training: growth, asymptote of the gap
    adjust: str = "mlp"  # the size that is adjusted for equal parameters or FLOPs
    data: tuple[str, ...] = (TEXT,)  # the data of the grid, tasks of the scale
    than: Selector | None = None  # settings of both arms in a comparison that is subtracted

    @property
    def measure(self) -> Measure:
        return MEASURES[self.of]

    @property
    def margin_of_loss(self) -> float | None:
        """The margin if it is one of the loss after training; else None."""
        # Growth is in nats per doubling, and an asymptote at no length that was trained.
        is_of_loss = self.measure.unit is Unit.NATS and self.horizon not in OVER_LENGTHS
        return self.margin if is_of_loss else None

    @property
    def control(self) -> str:
        """Name of the control under which the arms are compared."""
        return control_name(AXES[self.axis], self.adjust)


_UNJUDGED = ("source", "untestable", "minutes")  # fields that decide no verdict


@dataclass(frozen=True)
class Claim:
    """A registered hypothesis with everything that decides its verdict."""

    name: str
    says: str
    source: str
    untestable: str | None = None  # the reason, if it cannot be run yet
    scale: str = ""
    seeds: tuple[int, ...] = ()  # n; several are interim looks, which share α
    tuning_seeds: int = 0  # 0: no tuning
    grid: Mapping[str, str] = field(default_factory=dict)
    words: Mapping[str, str] = field(default_factory=dict)  # grid's keys set on the command line
    filter: tuple[str, ...] = ()
    baseline: Any = "standard"
    # Settings of the arms on each task that some parts are about.
    tasks: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    parts: Mapping[str, PartSpec] = field(default_factory=dict)
    # On two cores, at scale=small; it is not registered.
    minutes: float | None = field(default=None, compare=False)

    @property
    def content(self) -> dict[str, Any]:
        """Fields that decide the verdict."""
        fields = dataclasses.asdict(self)
        return {key: fields[key] for key in fields if key not in _UNJUDGED}

    @cached_property
    def hash(self) -> str:
        text = json.dumps(self.content, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def title(self) -> str:
        return f"{self.name} ({self.scale})"

    @property
    def arguments(self) -> list[str]:
        """Arguments of `qkablate claim` that name it, if it is a shipped one."""
        scale = [] if self.scale == "small" else [f"scale={self.scale}"]
        return [self.name, *scale, *(f"{key}={value}" for key, value in self.words.items())]

    @property
    def folder_name(self) -> str:
        return f"{self.name}-{self.scale}-{self.hash[:12]}"

    def seeds_of(self, purpose: str, count: int) -> list[int]:
        """Derive the `final` or `tuning` seeds, unknown to the author of the claim."""
        texts = (f"{self.hash}/{purpose}/{number}" for number in range(count))
        return [int.from_bytes(hashlib.sha256(t.encode()).digest()[:4]) >> 1 for t in texts]


@dataclass(frozen=True)
class Comparison:
    """The arm and its baseline that a part compares; over lengths, a pair for each of them."""

    part: str
    spec: PartSpec
    name: str
    dataset: str  # the data or the task
    pairs: list[tuple[str, str]]  # arm and its baseline; several over lengths
    than: tuple[str, str] | None = None  # the pair whose cost is subtracted


def find_comparisons(claim: Claim, arms: Iterable[Arm]) -> list[Comparison]:
    """Return the comparisons that the parts call for; UserError if an arm is missing."""
    try:
        return [*_find_comparisons(claim, list(arms))]
    except UserError as error:
        raise UserError(f"{claim.name}: {error}") from None


def _find_comparisons(claim: Claim, arms: list[Arm]) -> Iterator[Comparison]:
    for name, spec in claim.parts.items():
        for dataset in spec.data:
            comparisons = [*_find_comparisons_in(claim, name, spec, dataset, arms)]
            if not comparisons:
                raise UserError(
                    f"parts.{name}.than: every arm of the grid has {_format_settings(spec.than)};"
                    " add the value to compare it with to the grid"
                )
            yield from comparisons


def _format_settings(settings: Selector | None) -> str:
    return ", ".join(f"{key}={value}" for key, value in (settings or {}).items())


def _find_comparisons_in(
    claim: Claim, part: str, spec: PartSpec, dataset: str, arms: list[Arm]
) -> Iterator[Comparison]:
    known = [arm for arm in arms if not claim.tasks or _dataset_of(arm, claim.tasks) == dataset]
    pairs = _find_pairs(claim, spec, known)
    if not pairs:
        raise _no_pair(part, spec)
    spec.measure.check_arms(f"parts.{part}.of", [arm for pair in pairs for arm in pair])
    groups: dict[str, list[tuple[Arm, Arm]]] = {}
    for arm, other in sorted(pairs, key=lambda pair: pair[0].tokens):
        words = shared_values(claim, dataset, *(_typed_values(side, arms) for side in (arm, other)))
        title = " ".join([part, *([f"on {dataset}"] if len(spec.data) > 1 else []), *words])
        groups.setdefault(title, []).append((arm, other))
    for title, group in groups.items():
        if spec.horizon in OVER_LENGTHS:
            _check_lengths(part, spec.horizon, group)
            names = [(arm.name, other.name) for arm, other in group]
            yield Comparison(part, spec, title, dataset, names)
            continue
        lengths = {arm.tokens for arm, _ in group}
        shown = lengths if spec.horizon == "each" else {max(lengths)}
        for arm, other in [(a, b) for a, b in group if a.tokens in shown]:
            at = f" {arm.tokens:,} tokens" if len(shown) > 1 else ""
            pair = arm.name, other.name
            than = _find_subtracted(claim, part, spec, arm, known, arms)
            if than != pair:  # that is what the others are compared with
                yield Comparison(part, spec, f"{title}{at}", dataset, [pair], than)


def _find_subtracted(
    claim: Claim, part: str, spec: PartSpec, arm: Arm, arms: list[Arm], every: list[Arm]
) -> tuple[str, str] | None:
    """Return the pair that `than` asks for: like the arm's in all settings but those it names."""
    if spec.than is None:
        return None
    wanted = dataclasses.replace(
        spec, arm={**spec.arm, **spec.than}, against={**spec.against, **spec.than}
    )
    fixed = claim.grid.keys() - {"variant", *spec.arm, *spec.against, *spec.than}
    own = _typed_values(arm, every)
    for first, other in _find_pairs(claim, wanted, arms):
        values = _typed_values(first, every)
        if all(values.get(key) == own.get(key) for key in fixed):
            return first.name, other.name
    raise _no_pair(f"{part}.than", wanted)


def _no_pair(part: str, spec: PartSpec) -> UserError:
    sides = " against ".join(map(_format_settings, (spec.arm, spec.against)))
    return UserError(f"parts.{part}: the grid has no {sides} at equal {spec.axis}")


def _check_lengths(part: str, horizon: str, group: list[tuple[Arm, Arm]]) -> None:
    least = 2 if horizon == "growth" else MIN_POINTS
    if len({arm.tokens for arm, _ in group}) < least:
        raise UserError(
            f"parts.{part}.horizon: {horizon} needs {least} lengths of training or more in"
            " the grid, such as train.steps: 1000,2000,4000"
        )
    for arm in itertools.chain(*group):
        if not is_annealed(arm.config.optim):
            raise UserError(
                f"parts.{part}.horizon: {horizon} needs schedules that end at a small rate, and"
                f" that of {arm.name} does not: set optim.schedule: cosine and leave out"
                " optim.lr_final"
            )


def _typed_values(arm: Arm, arms: list[Arm]) -> dict[str, Any]:
    """Return an arm's values, with the sizes that it was given before a control changed them."""
    values = arm.overrides | _flatten(arm)
    if arm.mismatch is not None and arm.baseline is not None:
        given = _flatten(next(one for one in arms if one.name == arm.baseline))
        values |= {key: given[key] for key in _ADJUSTED}
    return values


# The length of a run, over which pairs are compared, and settings that follow it.
_OF_LENGTH = {*LENGTH_KEYS, "train.eval_every", "train.eval_tokens", "train.test_tokens"}


def shared_values(
    claim: Claim, dataset: str, values: Mapping[str, Any], other_values: Mapping[str, Any]
) -> list[str]:
    """Return the varied settings that a pair shares, besides its length."""
    return [
        f"{key.rpartition('.')[2]}={values[key]}"
        for key, text in claim.grid.items()
        if re.search(r"[,(]", re.sub(r"\[[^]]*\]", "", text))  # [0.9,0.95] is one value
        if key in values and values[key] == other_values.get(key)
        if key != "variant" and key not in claim.tasks.get(dataset, {})
        if key not in _OF_LENGTH
    ]


def _find_pairs(claim: Claim, spec: PartSpec, arms: list[Arm]) -> list[tuple[Arm, Arm]]:
    selecting = {*spec.arm, *spec.against}
    are_same_variant = "variant" not in selecting  # settings of one variant are compared
    comparable = [
        arm
        for arm in arms
        # Baselines are under the control of every axis.
        if spec.control in arm.controls or (arm.baseline is None and arm.mismatch is None)
        if not (are_same_variant and is_floor(arm))
    ]
    firsts = [arm for arm in comparable if _matches(arm, spec.arm)]
    others = [arm for arm in comparable if _matches(arm, spec.against)]
    keys = claim.grid.keys() - selecting  # in which the two agree
    is_matched = spec.control != "none"
    if is_matched:  # the control has changed them
        keys -= {"model.mlp_ratio", f"model.{spec.adjust}"}

    def agree(a: Arm, b: Arm) -> bool:
        if is_matched and (a.baseline or a.name) != (b.baseline or b.name):
            return False  # of another size
        shared = keys & a.overrides.keys() & b.overrides.keys()
        return all(a.overrides[key] == b.overrides[key] for key in shared)

    pairs = itertools.product(firsts, others)
    return [(a, b) for a, b in pairs if a.name != b.name and agree(a, b)]


def _dataset_of(arm: Arm, tasks: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the name of the task that an arm is trained on, or `text`."""
    for name, settings in tasks.items():
        if all(_is_same(arm.overrides.get(key), as_word(v)) for key, v in settings.items()):
            return name
    return TEXT


def _matches(arm: Arm, selector: Selector) -> bool:
    flat = _flatten(arm)
    typed = arm.overrides.get("variant", "standard")
    if is_standard_attention(arm.config.variant):  # one arm, whatever the sites
        selector = {key: value for key, value in selector.items() if key != "variant.sites"}
    return all(
        value in (arm.variant, typed) if key == "variant" else _is_same(flat.get(key), value)
        for key, value in selector.items()
    )


def _is_same(value: str | None, other: str) -> bool:
    """Compare two values as numbers if they are numbers: 4 equals 4.0."""
    try:
        return value == other or float(value or "") == float(other)
    except ValueError:
        return False


def _flatten(arm: Arm) -> dict[str, str]:
    return {key: as_word(value) for key, value in flatten(arm.config).items()}

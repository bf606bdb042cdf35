"""Gap over whole trainings of several lengths, and over model sizes, not by mid-run readings."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from qkablate.analysis.comparison.audit import is_annealed
from qkablate.analysis.comparison.curves import fit_slopes
from qkablate.analysis.comparison.gaps import Family, Gap
from qkablate.analysis.scaling.power_curve import find_exponent, make_design
from qkablate.analysis.stats import Estimate, Interval, Sample, describe_sample, exp
from qkablate.analysis.study.study import Entry, Seeds

MIN_POINTS = 3  # for a curve
# The keys in which the arms of a series may differ.
_KEYS = (
    (
        "tokens",
        ("train.steps", "train.tokens", "train.eval_every", "train.eval_tokens", "optim.warmup"),
    ),
    ("parameters", ("model.d_model",)),
    ("parameters", ("model.layers",)),
)
_GRID_KEYS = (*_KEYS[0][1], "model.d_model", "model.layers")
_FOLLOWING = ("train.eval_every", "train.eval_tokens", "optim.warmup")  # what follows the length


@dataclass(frozen=True)
class Series:
    """Gaps of one arm to its baseline by tokens or by parameters."""

    along: str  # tokens or parameters
    name: str
    x: list[float]  # tokens or parameters of the baseline
    gaps: list[Gap]


def find_series(families: Sequence[Family]) -> list[Series]:
    """Group the arms that differ in their length alone, or in a single size key."""
    series = []
    for along, keys in _KEYS:
        groups: dict[tuple[object, ...], list[Gap]] = {}
        for family in families:
            for gap in family.gaps:
                annealed = all(is_annealed(entry.arm.config.optim) for entry in gap.sides)
                if annealed and _x(along, gap.baseline):
                    groups.setdefault(_group_key(gap, keys), []).append(gap)
        for gaps in groups.values():
            parts = _split(gaps, [_x(along, gap.baseline) for gap in gaps], keys)
            for part, settings in zip(parts, _differing_settings(parts, keys), strict=True):
                by_x = {_x(along, gap.baseline): gap for gap in part}
                if len(by_x) > 1:
                    x, ordered = zip(*sorted(by_x.items()), strict=True)
                    name = "-".join([_name(ordered[0], keys), *settings])
                    series.append(Series(along, name, [*x], [*ordered]))
    return series


def _split(gaps: list[Gap], places: Sequence[object], keys: tuple[str, ...]) -> list[list[Gap]]:
    """Divide gaps by the settings that mostly follow the length, if several have one place."""
    if len({*places}) == len(gaps):
        return [gaps]
    return _group(gaps, tuple(key for key in keys if key not in _FOLLOWING))


def _differing_settings(parts: list[list[Gap]], keys: tuple[str, ...]) -> list[list[str]]:
    """Return the settings that tell the parts of a group apart."""
    own = [gaps[0].arm.arm.overrides for gaps in parts]
    named = sorted({key for settings in own for key in settings} - {*keys} | {*_FOLLOWING})
    told = [key for key in named if len({settings.get(key) for settings in own}) > 1]
    return [[f"{key.rpartition('.')[2]}={settings.get(key)}" for key in told] for settings in own]


def find_grids(families: Sequence[Family]) -> list[tuple[tuple[str, str], list[Gap]]]:
    """Group the arms that differ in their length and size alone, where they differ in both.

    Each grid has a name of the arm and one of the baseline.
    """
    gaps = [
        gap
        for family in families
        for gap in family.gaps
        if all(is_annealed(entry.arm.config.optim) for entry in gap.sides)
        and gap.compares_attention
        and gap.baseline.arm.params
    ]
    groups = _group(gaps, (*_GRID_KEYS, "model.heads"))
    grids = []
    for group in groups:  # the number of heads may grow with the size, or be an axis of its own
        places = {_place(gap) for gap in group}
        if len(places) == len(group):
            grids.append(group)
            continue
        for part in _group(group, _GRID_KEYS):
            grids += _split(part, [_place(gap) for gap in part], _GRID_KEYS)
    grids = [
        gaps
        for gaps in grids
        if len({gap.baseline.tokens for gap in gaps}) > 1
        and len({gap.baseline.arm.params for gap in gaps}) > 1
    ]
    return [*zip(_name_grids(grids), grids, strict=True)]


def _place(gap: Gap) -> tuple[int, int, int]:
    model = gap.baseline.arm.config.model
    return model.d_model, model.layers, gap.baseline.tokens


def _name_grids(grids: Sequence[Sequence[Gap]]) -> list[tuple[str, str]]:
    """Return a name for the arm and for the baseline of each grid, with what tells them apart."""
    names = []
    for side in ("arm", "baseline"):
        settings = [_find_settings(getattr(gaps[0], side)) for gaps in grids]
        keys = {key for own in settings for key in own} - {"variant", *_GRID_KEYS, "model.heads"}
        keys |= {*_FOLLOWING}
        first = [_grid_name(gaps, side) for gaps in grids]
        for number, name in enumerate(first):
            alike = [settings[i] for i, other in enumerate(first) if other == name]
            told = sorted(key for key in keys if len({own.get(key) for own in alike}) > 1)
            parts = (f"{key.rpartition('.')[2]}={settings[number].get(key)}" for key in told)
            names.append("-".join([name, *parts]))
    return [*zip(names[: len(grids)], names[len(grids) :], strict=True)]


def _find_settings(entry: Entry) -> dict[str, str]:
    """Return the settings that tell an entry from others, with its rate where that does."""
    rate = {"optim.lr": f"{entry.rate}"} if entry.has_rate_in_name else {}
    return {**entry.arm.overrides, **rate}


def _group(gaps: Sequence[Gap], keys: tuple[str, ...]) -> list[list[Gap]]:
    groups: dict[tuple[object, ...], list[Gap]] = {}
    for gap in gaps:
        groups.setdefault(_group_key(gap, keys), []).append(gap)
    return [*groups.values()]


def _grid_name(gaps: Sequence[Gap], side: str) -> str:
    entries: list[Entry] = [getattr(gap, side) for gap in gaps]
    arm, heads = entries[0].arm, {entry.arm.config.model.heads for entry in entries}
    control = [] if "none" in arm.controls else arm.controls
    return "-".join([arm.variant, *(f"h{n}" for n in heads if len(heads) == 1), *control])


def _x(along: str, entry: Entry) -> float:
    return float(entry.tokens if along == "tokens" else entry.arm.params)


def _group_key(gap: Gap, keys: tuple[str, ...]) -> tuple[object, ...]:
    """Return the settings that gaps of one series share.

    A control's solution varies with size; the baseline has none.
    """
    solved = ["model.mlp_ratio"] if gap.arm.arm.controls != ["none"] else []
    ignored = (*keys, "threads", "optim.lr")
    shared = [
        gap.arm.settings_without(*ignored, *solved),
        gap.baseline.settings_without(*ignored),
    ]
    rate = gap.arm.rate if gap.arm.has_rate_in_name else None
    return str(shared), tuple(gap.arm.arm.controls), rate


def _name(gap: Gap, keys: tuple[str, ...]) -> str:
    arm, model = gap.arm.arm, gap.arm.arm.config.model
    width = [] if "model.d_model" in keys else [f"d{model.d_model}"]
    control = [] if "none" in arm.controls else arm.controls
    return "-".join([arm.variant, *width, f"h{model.heads}", *control])


def measure_growth(series: Series) -> Sample:
    """Return each seed's change of the gap per doubling of tokens, over three lengths or more."""
    if series.along != "tokens" or len(series.gaps) < MIN_POINTS or has_diverged(series.gaps):
        return Sample(())
    return fit_growth([int(x) for x in series.x], series.gaps)


def fit_growth(tokens: list[int], gaps: Sequence[Gap]) -> Sample:
    """Return each seed's slope of the gap on log2 of the tokens of several trainings."""
    if not (keys := common_seeds(gaps)):
        return Sample(())
    gaps_ST = np.array([[gap.pairs[key] for gap in gaps] for key in keys])
    extra = [gap.sample.extra_variance for gap in gaps]
    return fit_slopes(tokens, gaps_ST, extra)


def common_seeds(gaps: Sequence[Gap]) -> list[Seeds]:
    """Return the seeds of which every gap has a pair, in order."""
    return [key for key in gaps[0].pairs if all(key in gap.pairs for gap in gaps)]


def has_diverged(gaps: Sequence[Gap]) -> bool:
    """Return whether a run of any of the arms diverged: those that remain are not all."""
    return any(gap.arm_diverged or gap.baseline_diverged for gap in gaps)


def equivalent_log_factor(series: Series) -> Sample:
    """Return the log of how many times its tokens (parameters) the baseline needs.

    It is read from the baseline's mean losses, fitted by L∞ + B·x^−β: from its loss at the longest
    (largest) point to the arm's. The values are the jackknife's pseudo-values, one per seed.
    """
    gaps, seeds = series.gaps, common_seeds(series.gaps)
    if len(gaps) < MIN_POINTS or not seeds or has_diverged(gaps):
        return Sample(())
    log_x = np.log(series.x)
    baseline_ST = np.array([[gap.baseline.losses[key] for gap in gaps] for key in seeds])
    arm_S = np.array([gaps[-1].arm.losses[key] for key in seeds])

    def measure(keep_S: np.ndarray) -> tuple[float, float] | None:
        return _read_curve(log_x, baseline_ST[keep_S].mean(axis=0), float(arm_S[keep_S].mean()))

    n = len(seeds)
    whole = measure(np.ones(n, dtype=bool))
    parts = [measure(np.arange(n) != out) for out in range(n)] if n > 1 else [whole]
    if whole is None or any(part is None for part in parts):
        return Sample(())
    factor, slope = whole
    values = tuple(n * factor - (n - 1) * part[0] for part in parts if part is not None)
    return Sample(values, gaps[-1].sample.extra_variance / slope**2)


def _read_curve(log_x: np.ndarray, losses_T: np.ndarray, loss: float) -> tuple[float, float] | None:
    """Return how far from its end a falling curve has a loss, and its slope there, by ln x.

    It is extrapolated by one interval at most.
    """
    if (np.diff(losses_T) >= 0).any() or loss > losses_T[0]:  # more does not help the baseline
        return None
    log_x = log_x - log_x.mean()
    exponent = find_exponent(log_x, losses_T[None])
    limit, _ = np.linalg.pinv(make_design(log_x, exponent)) @ losses_T
    if min(loss, losses_T[-1]) <= limit:
        return None
    factor = math.log((losses_T[-1] - limit) / (loss - limit)) / exponent
    is_near = factor <= (log_x[-1] - log_x[-2]) * 1.01
    return (factor, exponent * (loss - float(limit))) if is_near else None


@dataclass(frozen=True, kw_only=True)
class SeriesPoint(Estimate):
    """Gap of one arm of a series."""

    at: float  # tokens or parameters
    arm: str


@dataclass(frozen=True)
class Equivalent:
    """Factor by which the baseline's tokens or parameters must grow to reach the arm's loss."""

    times: float
    interval: Interval | None
    n: int


@dataclass(frozen=True)
class SeriesSummary:
    """Gap of one arm by tokens or by parameters."""

    arm: str
    along: str
    points: list[SeriesPoint]
    growth_per_doubling: Estimate | None
    equivalent: Equivalent | None  # None: not measured
    asymptote: Estimate | None  # gap after infinitely many tokens: an extrapolation


def describe_series(series: Series, limit: Sample | None = None) -> SeriesSummary:
    """Summarize one series; `limit` is its extrapolated gap."""
    factor, growth, equivalent = equivalent_log_factor(series), None, None
    if factor.n:
        ends = factor.interval()
        interval = ends and (exp(ends[0]), exp(ends[1]))
        equivalent = Equivalent(exp(factor.mean), interval, factor.n)
    if series.along == "tokens":
        growth = describe_sample(measure_growth(series))
    points = [
        SeriesPoint(at=x, arm=gap.arm.name, **vars(describe_sample(gap.sample)))
        for x, gap in zip(series.x, series.gaps, strict=True)
    ]
    asymptote = None if limit is None else describe_sample(limit)
    return SeriesSummary(series.name, series.along, points, growth, equivalent, asymptote)

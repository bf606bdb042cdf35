"""Agreement of published runs with others: part by part of a claim, and run by run."""

import hashlib
import math
import os
import re
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import yaml
from scipy import stats

from qkablate.analysis.claims.claim import Claim
from qkablate.analysis.claims.judgement import Judgement, PartJudgement
from qkablate.analysis.claims.parse import check_settings
from qkablate.analysis.publication.archive import Archive
from qkablate.analysis.publication.encoding import Fields
from qkablate.analysis.publication.publish import document_group
from qkablate.analysis.stats import ALPHA, Interval, Sample
from qkablate.config import KEYS, Config, conf_dir, config_names, no_such_key
from qkablate.config.data import DataConfig
from qkablate.data.hub import FILE_FORMATS
from qkablate.errors import UserError, sanitize
from qkablate.runs.records import environment_value, is_number
from qkablate.sweeps.planning.manifest import Arm

# Standard deviations of the difference of two runs with other rounding, within which they agree.
_TOLERANCE = 3 * math.sqrt(2)
_SAME = ("cpu", "torch", "threads")
_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
_HUB_FILES = re.compile(r"[\w*?\[\]{},-][\w*?./\[\]{},-]*")  # below a data set, no address
_PATH = re.compile(r"[/\\]|\.\.")  # in the name of a choice of a group


@dataclass(frozen=True)
class PartAgreement:
    """One part of a claim, as published and as reproduced."""

    name: str
    published: PartJudgement
    reproduced: PartJudgement | None
    difference: float  # of the costs; nan if it is not known
    interval: Interval | None

    @property
    def agrees(self) -> bool:
        """True if the interval of the difference is known, and contains zero."""
        return self.interval is not None and self.interval[0] <= 0 <= self.interval[1]


def compare_parts(published: Judgement, reproduced: Judgement) -> list[PartAgreement]:
    """Compare the parts of a claim; the levels are adjusted for their number by Bonferroni."""
    others = {judged.part.name: judged for judged in reproduced.parts}
    level = 1 - ALPHA / max(1, len(published.parts))
    compared = []
    for judged in published.parts:
        other = others.get(judged.part.name)
        difference, interval = math.nan, None
        if other is not None and judged.part.sample.n and other.part.sample.n:
            difference = other.part.sample.mean - judged.part.sample.mean
            interval = _difference_interval(judged.part.sample, other.part.sample, level)
            diverged = any(j.part.open_above or j.part.open_below for j in (judged, other))
            interval = None if diverged else interval
        compared.append(PartAgreement(judged.part.name, judged, other, difference, interval))
    return compared


def _difference_interval(first: Sample, second: Sample, level: float) -> Interval | None:
    """Return the interval of the second mean less the first: Welch's, or from the two intervals."""
    if type(first) is type(second) is Sample:
        errors = first.standard_error, second.standard_error
        if not all(map(math.isfinite, errors)):
            return None
        variance = sum(error**2 for error in errors)
        difference = second.mean - first.mean
        if not variance:
            return difference, difference
        pairs = zip(errors, (first.n, second.n), strict=True)
        freedom = variance**2 / sum(error**4 / (n - 1) for error, n in pairs)
        reach = float(stats.t.ppf((1 + level) / 2, freedom)) * math.sqrt(variance)
        return difference - reach, difference + reach
    ends = first.interval(level), second.interval(level)
    if ends[0] is None or ends[1] is None or (-math.inf, math.inf) in ends:
        return None  # what is not known agrees with nothing
    low, high = ends[1][0] - ends[0][1], ends[1][1] - ends[0][0]
    # Of two infinite ends the difference may be any number.
    return -math.inf if math.isnan(low) else low, math.inf if math.isnan(high) else high


def sample_runs(archive: Archive, count: int) -> list[str]:
    """Return the ids of some runs that are done, by a hash: their author has not chosen them."""
    done = [id for id, run in archive.runs.items() if run["result"]["status"] == "done"]
    return sorted(done, key=lambda id: hashlib.sha256(id.encode()).hexdigest())[:count]


def check_trainable(arm: Arm) -> None:
    """Raise UserError for an arm that would run code of somebody else, or needs another run."""
    if arm.facts.get("circuits_from_outside"):
        raise UserError(f"{arm.name} is of a variant file, which is not published with its runs")
    if any(parent.run is not None for parent in arm.parents.values()):
        raise UserError(_begins(arm.name))
    check_config(arm.config, arm.name)


def _begins(name: str) -> str:
    return f"{name} begins from another run, which is not published"


def check_config(config: Config, name: str = "an arm of the claim") -> None:
    """Raise UserError for the config of such an arm, before anything that it names is read."""
    if config.variant.file is not None:
        raise UserError(f"{name} is of a variant file, which is not published with its runs")
    if config.init_from.run is not None:
        raise UserError(_begins(name))


def check_places(config: Config, given: Mapping[str, str], name: str) -> None:
    """Raise UserError if an arm reads a file or an address of its author's, unless it is given."""
    for key, value in places(config.data).items():
        if given.get(key) != value:
            raise UserError(
                f"{name} reads {key}={sanitize(value)}, which its author chose and did not publish;"
                f" give your own copy: {key}=FILE (quoted as Hydra wants it: '{key}=\"my file\"')"
            )


def places(data: DataConfig) -> dict[str, str]:
    """Return the keys that name files, folders or addresses, with their values.

    A data set of the Hub is none, nor is what qkablate's own configurations name.
    """
    if data.path is None and (data.name, data.files) in _shipped_data():
        return {}
    found = {"data.path": data.path}
    name, files = data.name or "", data.files or ""
    is_hub = _HUB_NAME.fullmatch(name) and ".." not in name and not os.path.isdir(name)
    if name and not is_hub:
        found["data.name"] = name
    below = _HUB_FILES.fullmatch(files) and ".." not in files
    if files and (name in FILE_FORMATS or not below):
        found["data.files"] = files
    return {key: value for key, value in found.items() if value is not None}


@cache
def _shipped_data() -> frozenset[tuple[str | None, str | None]]:
    """Return the name and the files of each data set in conf/data that has a name."""
    paths = (conf_dir() / "data" / f"{name}.yaml" for name in config_names("data"))
    contents = (yaml.safe_load(path.read_text(encoding="utf-8")) for path in paths)
    return frozenset((own["name"], own.get("files")) for own in contents if own.get("name"))


def check_claim(claim: Claim) -> None:
    """Raise UserError for a published claim with keys that no claim of the user's own may set.

    They would be followed where its runs are planned: its author may have written any.
    """
    baseline = claim.baseline if isinstance(claim.baseline, Mapping) else {}
    if isinstance(claim.baseline, str):
        baseline = {"variant": claim.baseline}
    for name, spec in claim.parts.items():
        for key in ("adjust", "axis"):
            if re.search(r"[^\w.]", str(getattr(spec, key) or "")):
                raise UserError(f"{claim.title}: parts.{name}.{key}: it is not a plain word")
    tasks = {f"tasks.{name}": settings for name, settings in claim.tasks.items()}
    for place, settings in {"grid": claim.grid, "baseline": baseline, **tasks}.items():
        where = f"{claim.title}: {place}"
        for key in settings:
            if key not in KEYS and not config_names(key):
                raise UserError(f"{where}: {no_such_key(key)}")
            if key == "variant.file" or key.startswith("init_from."):
                raise UserError(f"{where}: {key} names a file that is not published with the runs")
            if "$" in str(settings[key]):  # it could read the environment
                raise UserError(f"{where}: {key} has an interpolation; a published claim has none")
            if config_names(key) and _PATH.search(str(settings[key])):
                choices = ", ".join(config_names(key))
                raise UserError(f"{where}: {key} names a file (allowed: {choices})")
        check_settings(where, settings)


@dataclass(frozen=True)
class RunAgreement:
    """One run, as published and as trained again."""

    id: str
    name: str
    difference: float | None  # the largest of its losses; None: it was not trained, or has failed
    tolerance: float | None  # 0: bit for bit; None: not known
    reasons: tuple[str, ...]  # why they need not be equal bit for bit

    @property
    def agrees(self) -> bool | None:
        """True if they are equal within the tolerance; None if it is not known."""
        if self.difference is None:
            return False
        if self.tolerance is None:
            return True if self.difference == 0 else None
        return self.difference <= self.tolerance


def compare_run(
    archive: Archive,
    id: str,
    name: str,
    result: Mapping[str, object] | None,
    torch: str,
    cpu: str,
    device: str = "cpu",
) -> RunAgreement:
    """Compare a published run with one that was trained again here, on the device."""
    run = archive.runs[id]
    environment = archive.environments.get(run["environment"] or "", {})
    there = {
        "cpu": environment_value(environment, "machine", "cpu"),
        "torch": environment_value(environment, "versions", "torch"),
        "threads": run["result"].get("threads"),
    }
    here = {"cpu": cpu, "torch": torch, "threads": (result or {}).get("threads")}
    reasons = tuple(
        f"{key} {there[key]} there, {here[key]} here" for key in _SAME if there[key] != here[key]
    )
    if device != "cpu":
        reasons += (f"the order of sums on {device} is not fixed",)
    difference = None
    if result is not None and result.get("status") == "done":
        difference = _largest_difference(run["result"]["loss"], result["loss"])
    spread = _seed_spread(archive, run) if reasons else 0.0
    tolerance = None if spread is None else _TOLERANCE * spread
    return RunAgreement(id, name, difference, tolerance, reasons)


def _largest_difference(published: Fields, own: object) -> float:
    assert isinstance(own, dict)
    if not all(value is None or is_number(value) for value in published.values()):
        return math.inf  # an archive of a stranger
    pairs = [(published[split], own.get(split)) for split in published]
    if any((a is None) != (b is None) for a, b in pairs):
        return math.inf
    return max((abs(a - b) for a, b in pairs if a is not None and b is not None), default=math.inf)


def _seed_spread(archive: Archive, run: Fields) -> float | None:
    """Return the deviation between seeds of the run's arm, or the median of all; None: unknown."""
    losses: dict[str, list[float]] = {}
    for other in archive.runs.values():
        if not other["tuning"] and other["result"]["status"] == "done":
            losses.setdefault(document_group(other), []).append(other["result"]["loss"]["val"])
    spreads = {group: statistics.stdev(own) for group, own in losses.items() if len(own) > 1}
    if own := spreads.get(document_group(run)):
        return own
    return statistics.median(spreads.values()) if spreads else None

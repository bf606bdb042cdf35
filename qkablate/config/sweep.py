"""The schema of a sweep: what is compared, what is held equal, and how the runs are executed."""

import re
from dataclasses import asdict, dataclass
from typing import Any

from qkablate.config.keys import (
    BIG,
    flatten,
    grid_key,
    key_table,
    keys_by_user,
    launch_key,
    section,
)
from qkablate.errors import UserError, reject_secrets

_CLUSTERS = ("slurm", "ray")
_SLURM = ("slurm",)


@dataclass
class ControlConfig:
    """Quantity that every arm shares with its baseline, and the key that is adjusted for it."""

    match: str = grid_key("none", "what is held equal:", choices=("none", "params", "flops"))
    adjust: str = grid_key(
        "mlp",
        "what is resized to match: mlp (its width), or d_model or layers (in whole steps; the"
        " MLP width absorbs the remainder)",
        choices=("mlp", "d_model", "layers"),
    )
    tolerance: float = grid_key(
        0.01,
        "largest mismatch, relative to the baseline; an arm that cannot be matched this closely"
        " is left out",
        bounds=(0, 1),
    )


def control_name(match: str, adjust: str) -> str:
    """Return the name of a control: params, or params-d_model if not the MLP is adjusted."""
    return match if match == "none" or adjust == "mlp" else f"{match}-{adjust}"


def split_control(name: str) -> tuple[str, str]:
    """Return the quantity that a control holds equal, and the key that is adjusted for it."""
    match, _, adjust = name.partition("-")
    return match, adjust or "mlp"


@dataclass
class GridConfig:
    """The runs of a sweep. Values are written as on the command line: `32,64`, `range(3)`."""

    name: str = grid_key("grid", "name of the sweep's folder")
    axes: dict[str, Any] = grid_key(
        {}, "key: its values, as on the command line: 32,64 or range(3) or glob(*)"
    )
    fixed: dict[str, Any] = grid_key({}, "key: its one value")
    also: Any = grid_key(
        None,
        "settings, or a list of them, with which every arm is trained a second time, such as"
        " {data: enwik8}; they replace the arm's values, and all its data.* keys",
    )
    baseline: Any = grid_key(
        "standard", "a variant, at each arm's own size; or a map of keys to values; or null"
    )
    filter: list[str] = grid_key(
        [], "keep only arms that satisfy all of these, such as `model.d_model // model.heads >= 16`"
    )
    design: str = grid_key(
        "grid",
        "grid: every combination of the axes; one_at_a_time: the first value of each axis, and"
        " each other value alone",
        choices=("grid", "one_at_a_time"),
    )
    floor: bool = grid_key(
        True,
        "where variants are compared, also train uniform attention, which a baseline has to beat",
    )
    tune: bool = grid_key(
        False,
        "choose optim.lr and variant.lr for every arm on validation, then run the seeds there",
    )
    tuning_seeds: list[int] = grid_key(
        [1000, 1001, 1002], "seeds of the tuning runs, with tune=true", bounds=(0, BIG)
    )
    share_prefix: bool = launch_key(
        True,
        "train the steps that wsd runs of several lengths share only once, in the longest;"
        " results are unchanged",
    )


@dataclass
class EngineConfig:
    """Engine that trains the runs. A key that the engine does not have stays empty."""

    name: str = launch_key("local", "where runs are trained; choose it with engine=…")
    partition: str | None = launch_key(None, "null: the cluster's default", used_by=_SLURM)
    account: str | None = launch_key(None, "null: the cluster's default", used_by=_SLURM)
    hours: float | None = launch_key(
        None,
        "time limit of a job; a longer run writes a checkpoint, is queued again and resumes",
        bounds=(0.02, 24 * 365),
        used_by=_SLURM,
    )
    grace: int | None = launch_key(
        None,
        "seconds before the time limit at which a job is signaled",
        bounds=(1, 24 * 3600),
        used_by=_SLURM,
    )
    address: str | None = launch_key(
        None,
        "null: a cluster on this machine, for this sweep; auto, HOST:PORT or ray://HOST:PORT: a"
        " running one",
        used_by=("ray",),
    )
    cpus: int | None = launch_key(None, "CPU cores of a run", bounds=(1, 4096), used_by=_CLUSTERS)
    gpus: int | float | str | None = launch_key(  # at most one: docs/clusters.md has torchrun
        None,
        "GPUs per run; auto: 1 with device=cuda; Ray also accepts a fraction, such as 0.5",
        bounds=(0, 1),
        choices=("auto",),
        used_by=_CLUSTERS,
    )
    memory_gb: int | float | str | None = launch_key(
        None,
        "memory of a run; auto: by the size of its model",
        bounds=(0.1, 2**20),
        choices=("auto",),
        used_by=_SLURM,
    )
    sbatch: dict[str, Any] = launch_key(
        {}, "other options of sbatch, as {constraint: a100, qos: long}", used_by=_SLURM
    )


@dataclass
class SweepConfig:
    """One sweep."""

    sweep: GridConfig = section(GridConfig)
    control: ControlConfig = section(ControlConfig)
    engine: EngineConfig = section(EngineConfig)
    workers: int | str = launch_key(
        "auto",
        "concurrent runs; auto: one per GPU or CPU core; on a cluster, as many as fit",
        bounds=(1, 4096),
    )
    runs_per_gpu: int = launch_key(
        1, "runs that share a GPU, with workers=auto and engine=local", bounds=(1, 64)
    )
    on_failure: str = launch_key(
        "continue",
        "stop: after a failed run nothing more starts, and running ones are interrupted",
        choices=("continue", "stop"),
    )


SWEEP_KEYS = key_table(SweepConfig)
ENGINE_KEYS = keys_by_user(EngineConfig, ("local", *_CLUSTERS))


def check_sweep(config: SweepConfig) -> None:
    """Check every rule that needs no run."""
    reject_secrets(asdict(config))
    values = flatten(config)
    for name, info in SWEEP_KEYS.items():
        info.check(name, values[name])
    if config.control.tolerance == 1:
        raise UserError("control.tolerance: 1.0 is not below 1")
    _check_engine(config.engine)
    if config.runs_per_gpu != 1 and config.engine.name != "local":
        instead = "leave it out: its runs do not share GPUs"
        if config.engine.name == "ray":
            instead = "set engine.gpus to a fraction, as 0.5"
        raise UserError(f"runs_per_gpu: not with engine={config.engine.name}; {instead}")
    grid = config.sweep
    if not re.fullmatch(r"\w[\w+-]*", grid.name):
        raise UserError(f"sweep.name: '{grid.name}' is not made of letters, digits, _, + and -")
    seeds = grid.tuning_seeds
    if not seeds or not all(isinstance(seed, int) and 0 <= seed <= BIG for seed in seeds):
        raise UserError(f"sweep.tuning_seeds: {seeds} are not one or more seeds")
    if len({*seeds}) < len(seeds):
        raise UserError(f"sweep.tuning_seeds: {seeds} has a seed twice")
    _check_also(grid)
    if grid.baseline == "none":
        raise UserError("sweep.baseline: 'none' is not a variant; for no baseline write null")
    if not isinstance(grid.baseline, str | dict | None):
        raise UserError(
            f"sweep.baseline: '{grid.baseline}' is not a variant, a map of keys to values, or null"
        )


def _check_also(grid: GridConfig) -> None:
    """Check the settings with which every arm is trained, too."""
    for settings in grid.also if isinstance(grid.also, list) else [grid.also]:
        if not isinstance(settings, dict | None):
            raise UserError(
                f"sweep.also: '{settings}' is not a map of keys to values, a list of maps, or null"
            )
        for name, value in (settings or {}).items():
            if not isinstance(name, str):
                raise UserError(f"sweep.also: {name} is not a key, as data or model.context")
            if name in SWEEP_KEYS or name == "control":
                raise UserError(f"sweep.also: {name} is a key of the sweep, not of its arms")
            if isinstance(value, list | dict):
                raise UserError(f"sweep.also: {name} has several values; give one")


LENGTH_KEYS = ("train.tokens", "train.steps")


def fixes_length(grid: GridConfig) -> bool:
    """Return whether `also` or a predicate names a length of runs, which no axis would change."""
    texts = [*grid.filter, *(key for settings in list_also(grid) for key in settings)]
    return any(key in text for key in LENGTH_KEYS for text in texts)


def list_also(grid: GridConfig) -> list[dict[str, Any]]:
    """Return the maps of settings with which every arm is trained, too."""
    return [s for s in (grid.also if isinstance(grid.also, list) else [grid.also]) if s]


def _check_engine(engine: EngineConfig) -> None:
    """Check that every key given belongs to the engine, and that no number is missing."""
    own = ENGINE_KEYS[engine.name]
    for name, value in vars(engine).items():
        if name != "name" and name not in own and value not in (None, {}):
            has = f"; it has {', '.join(own)}" if own else ""
            raise UserError(f"engine.{name}: engine={engine.name} has no such key{has}")
        info = SWEEP_KEYS[f"engine.{name}"]
        if name in own and value is None and info.bounds:
            raise UserError(f"engine.{name}: null is not {info.allowed()}")
    if engine.name == "slurm" and engine.gpus != "auto" and int(engine.gpus or 0) != engine.gpus:
        raise UserError(
            f"engine.gpus: {engine.gpus} is not a whole number; only Ray shares a GPU among runs"
        )
    if engine.grace is not None and engine.grace >= 3600 * (engine.hours or 0):
        raise UserError(
            f"engine.grace: {engine.grace} s is not less than engine.hours, {engine.hours:g} h"
        )


def as_word(value: Any) -> str:
    """Format a value of a file as it is typed on the command line."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)


def as_quoted(value: Any) -> str:
    """Format a value as on the command line, quoted where Hydra would interpret it."""
    if not isinstance(value, str) or (re.fullmatch(r"[\w./+-]+", value) and not _is_typed(value)):
        return as_word(value)
    # Hydra unescapes a backslash only before a quote.
    inner = re.sub(r'(\\*)"', r'\1\1\\"', value)
    inner = re.sub(r"(\\+)$", r"\1\1", inner)
    return f'"{inner}"'


def unquoted(value: str) -> str:
    """Return a word's value without the quotes around it, which Hydra needs for some characters."""
    if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"":
        return re.sub(rf"(\\+)({value[0]}|$)", _unescape, value[1:-1])
    return value


def _unescape(found: re.Match[str]) -> str:
    backslashes, quote = found.groups()
    return "\\" * (len(backslashes) // 2) + quote


def _is_typed(word: str) -> bool:
    """Return whether Hydra reads the word as a number, a boolean or null."""
    try:
        float(word.replace("_", ""))
    except ValueError:
        return word.lower() in ("null", "true", "false")
    return True

"""The manifest of a sweep: every arm with its frozen config, and every run with its id.

It is written before the first run starts, and never changed.

<out>/sweeps/<name>-<id>/
    manifest.json     the manifest
    plan.txt          the same for a reader: arms, sizes, what is left out and why
    runs/             links to the runs, which sweeps share by id
    lr_search.json    with sweep.tune=true: loss by learning rate, and the choice
    results.csv, results.parquet   one row per run, rebuilt from the runs
"""

import dataclasses
import functools
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from qkablate import __version__
from qkablate.config import (
    Config,
    InitFromConfig,
    Role,
    TrackingConfig,
    from_plain,
    keys_with,
    read_limit,
)
from qkablate.config.sweep import as_quoted
from qkablate.disk import make_folder, read_file, write_atomic
from qkablate.errors import UserError
from qkablate.runs.records import sha256
from qkablate.runs.run import (
    CUDA_NUMERICS,
    NUMERICS,
    identity,
    label,
    match_name,
    no_match,
    refuse_links,
    run_id,
)
from qkablate.strict_json import from_json, parse_json

FORMAT = 1
MANIFEST_FILE = "manifest.json"
# The keys that distinguish the runs of one arm.
RUN_KEYS = sorted(keys_with(Role.RUN), key=lambda name: not name.startswith("seed"))
Changes = dict[str, int | float]
# Keys that define a variant; its baseline does not inherit them.
VARIANT_KEYS = {*keys_with(Role.VARIANT)}
FLOOR = "uniform"  # attention without scores: an experiment that it passes can tell nothing
POSITION = "static_scores"  # weights by position alone: where it passes, content is not tested


class Rates(NamedTuple):
    """Learning rates of an arm: `optim.lr`, and `variant.lr` as a number."""

    lr: float
    circuit: float

    def __str__(self) -> str:
        return f"{self.lr:.3g}" + f" (circuit × {self.circuit:.3g})" * (self.circuit != 1)


def without_variant(overrides: Mapping[str, str]) -> dict[str, str]:
    """Return the overrides that make the model around an arm's attention."""
    own = {*VARIANT_KEYS, "variant", "variant.lr"}
    return {key: value for key, value in sorted(overrides.items()) if key not in own}


@dataclass(frozen=True)
class Arm:
    """A variant at one size under one control."""

    name: str
    variant: str
    controls: list[str]  # under which the grid has it
    baseline: str | None  # the arm it is compared with
    overrides: dict[str, str]  # that make it on the command line, without seed and learning rate
    # Frozen; its seed and rate are those of the first run.
    config: Config = field(metadata={"from_json": from_plain})
    facts: dict[str, Any]  # the rest of a run's identity
    test_tokens: int
    params: int  # without embeddings
    total_params: int
    flops: float  # of training, per token
    matched_lr: float = 1.0  # the number that variant.lr=matched stands for
    has_circuit_lr: bool = False  # a circuit has a rate of its own; older sweeps do not say so
    mismatch: float | None = None  # relative to the control's target
    kv_cache_numbers: int | None = None  # that a decoder keeps per token, in all layers
    not_vmapped: str = ""  # why train.vmap is not followed
    parents: dict[str, InitFromConfig] = field(default_factory=dict)  # of fine-tuning, by seed

    @property
    def is_finetuned(self) -> bool:
        """True if its runs begin from trained ones."""
        return self.config.init_from.run is not None

    @property
    def parent_data(self) -> str:
        """Fingerprint of the data of the trained runs that its runs begin from; '' if none."""
        return str(self.facts["data_fingerprint"]) if self.is_finetuned else ""

    @property
    def train_flops(self) -> float:
        return self.flops * self.tokens

    @property
    def tokens(self) -> int:
        train, context = self.config.train, self.config.model.context
        return int(train.steps) * train.batch_size * train.grad_accum * context

    @property
    def default_rates(self) -> Rates:
        """Learning rates of the arm's own config."""
        lr = self.config.variant.lr
        return Rates(self.config.optim.lr, 1.0 if isinstance(lr, str) else lr)  # a word: an old run

    def rates_of(self, run: "SweepRun") -> Rates:
        """Return the learning rates of a run of this arm."""
        default, changes = self.default_rates, run.changes
        return Rates(float(changes["optim.lr"]), float(changes.get("variant.lr", default.circuit)))

    def overrides_of(self, run: "SweepRun") -> list[str]:
        """Return the arguments that repeat a run of this arm with `qkablate train`."""
        overrides = self.overrides | {key: str(value) for key, value in run.changes.items()}
        if parent := self.parents.get(str(run.changes["seed"])):
            known = {key: value for key, value in vars(parent).items() if value is not None}
            overrides |= {f"init_from.{key}": as_quoted(value) for key, value in known.items()}
        if run.tuning:
            overrides["train.evaluate_test"] = "false"
        return [f"{key}={value}" for key, value in overrides.items()]

    def config_of(self, changes: Mapping[str, Any], *, tuning: bool = False) -> Config:
        """Return the frozen config of one run."""
        config, seed = self.config, int(changes["seed"])
        seeds = {key: int(changes.get(f"seeds.{key}", seed)) for key in vars(config.seeds)}
        evaluate_test = config.train.evaluate_test and not tuning
        circuit = changes.get("variant.lr", config.variant.lr)
        return dataclasses.replace(
            config,
            seed=seed,
            init_from=self.parents.get(str(seed), config.init_from),
            seeds=dataclasses.replace(config.seeds, **seeds),
            optim=dataclasses.replace(config.optim, lr=float(changes["optim.lr"])),
            variant=dataclasses.replace(config.variant, lr=circuit),
            train=dataclasses.replace(config.train, evaluate_test=evaluate_test),
        )

    def run(self, changes: Changes, *, tuning: bool = False) -> "SweepRun":
        """Return the run with these seeds and learning rate."""
        changes = {"optim.lr": self.config.optim.lr, **changes}
        config = self.config_of(changes, tuning=tuning)
        id = run_id(identity(config, **self.facts))
        return SweepRun(id, label(config), self.name, tuning, changes)

    def with_threads(self, threads: int | str) -> "Arm":
        config = dataclasses.replace(self.config, threads=threads)
        overrides = {**self.overrides, "threads": str(threads)}
        return dataclasses.replace(self, config=config, overrides=overrides)


@dataclass(frozen=True)
class SweepRun:
    """One run of a sweep."""

    id: str
    label: str
    arm: str
    tuning: bool  # chooses a learning rate, and never evaluates the test split
    # Its seed (and `seeds.…` that differ from it), its learning rate, and that of the circuit if it
    # was searched.
    changes: Changes

    @property
    def name(self) -> str:
        return f"{self.label}-{self.id}"


@dataclass(frozen=True)
class LeftOutArm:
    """An arm of the grid that is not trained, and why."""

    arm: str
    control: str
    reason: str
    kind: str  # unsupported, unmatched (by a control), or duplicate (of another arm)


@dataclass(frozen=True)
class Manifest:
    """A frozen sweep."""

    name: str
    out: str
    arms: dict[str, Arm]
    runs: list[SweepRun]  # known before the first one starts
    finals: list[Changes]  # with tuning: the runs of each arm, whose rate is not known yet
    left_out: list[LeftOutArm]
    excluded: int  # number of arms excluded by a predicate
    command: list[str] = field(default_factory=list)
    # Combinations of the axes that are compared, and those of the whole grid.
    combinations: tuple[int, int] | None = None  # None: the whole grid is
    fixes_length: bool = False  # a length of runs is given by sweep.also or a predicate
    tuning_seeds: list[int] = field(default_factory=list)  # that no other run may have
    tuning_rules: int = 1  # of tuning_losses.py; earlier sweeps do not say

    @functools.cached_property
    def id(self) -> str:
        """Hash of what is compared and how: the same command finds its sweep again."""
        arms: list[list[Any]] = []
        for arm in self.arms.values():
            arms.append([arm.name, arm.controls, arm.baseline])
            # Tuning runs read nothing of the test split: their ids do not tell what finals read.
            if self.finals and (limit := read_limit(arm.config, "test")) is not None:
                arms[-1].append(limit)
        runs = [[run.arm, run.id] for run in self.runs]
        return run_id({"sweep": [arms, runs, self.finals, NUMERICS]})

    @property
    def tracking(self) -> TrackingConfig:
        """Settings of W&B, for the runs and for the sweep's own table."""
        return next(iter(self.arms.values())).config.tracking

    @property
    def group(self) -> str:
        return self.tracking.group or f"{self.name}-{self.id}"

    @property
    def folder(self) -> Path:
        return Path(self.out).expanduser() / "sweeps" / f"{self.name}-{self.id}"

    def run_title(self, run: SweepRun) -> str:
        """Return a run's arm and seed, and its rate where the sweep has several."""
        others = [f" {k}={seed}" for k, seed in run.changes.items() if k.startswith("seeds.")]
        return f"{run.arm}-s{run.changes['seed']}{''.join(others)}{self._rate_suffix(run)}"

    def run_group(self, run: SweepRun) -> str:
        """Return the title of a run without its seed: that of the runs averaged with it."""
        return f"{run.arm}{self._rate_suffix(run)}"

    def _rate_suffix(self, run: SweepRun) -> str:
        rate = f" lr {run.changes['optim.lr']:.3g}" if self._has_several_rates else ""
        if "variant.lr" in run.changes:
            rate += f" × {run.changes['variant.lr']:.3g}"
        return f"{rate}{' (tuning)' * run.tuning}"

    @functools.cached_property
    def _has_several_rates(self) -> bool:
        return len({run.changes["optim.lr"] for run in self.runs}) > 1

    def config_of(self, run: SweepRun) -> Config:
        """Return the config as it is trained, with the run's group and tags in W&B."""
        arm = self.arms[run.arm]
        config = arm.config_of(run.changes, tuning=run.tuning)
        tracking = config.tracking
        tags = [f"d_model={config.model.d_model}", f"heads={config.model.heads}"]
        tags += [f"control={name}" for name in arm.controls] + ["tuning"] * run.tuning
        return dataclasses.replace(
            config,
            out=self.out,
            tracking=dataclasses.replace(
                tracking,
                group=self.group,
                job_type=tracking.job_type or self.run_group(run),
                tags=[*tracking.tags, *tags],
            ),
        )

    @property
    def config_words(self) -> list[str]:
        """Return the words that name the user's folder of config files, if the sweep has one."""
        words = self.command[2:4]  # qkablate sweep --config-dir DIR …
        return words if words[:1] == ["--config-dir"] else []

    def write(self) -> None:
        """Write the manifest with its checksum."""
        make_folder(self.folder)
        content = {
            "format": FORMAT,
            "version": __version__,
            "numerics": NUMERICS,
            "cuda_numerics": CUDA_NUMERICS,
            "id": self.id,
            **dataclasses.asdict(self),
        }
        content["sha256"] = _sha256(content)
        write_atomic(self.folder / MANIFEST_FILE, json.dumps(content, ensure_ascii=False) + "\n")


def freeze(manifest: Manifest, plan: list[str], *, keep_threads: bool = True) -> Manifest:
    """Write the manifest, or return it with the command of the first time it was frozen.

    Keys that change no result are those typed today; threads only without `keep_threads`.
    """
    refuse_links(manifest.folder)
    if (manifest.folder / MANIFEST_FILE).exists():
        frozen = read_manifest(manifest.folder)
        if frozen.id != manifest.id:
            raise UserError(f"'{manifest.folder / MANIFEST_FILE}' is another sweep's; move it away")
        # The equal ids show that what is typed today is what was frozen. It is what is trained: a
        # file must not name what to import or where to write.
        arms = {
            name: arm.with_threads(frozen.arms[name].config.threads) if keep_threads else arm
            for name, arm in manifest.arms.items()
        }
        return dataclasses.replace(
            manifest, command=frozen.command, arms=arms, tuning_rules=frozen.tuning_rules
        )
    make_folder(manifest.folder)
    write_atomic(manifest.folder / "plan.txt", "\n".join(plan) + "\n")
    manifest.write()
    return manifest


def frozen_rules(manifest: Manifest) -> int | None:
    """Return the `tuning_rules` of the sweep in the manifest's folder; None if there is none."""
    if not (manifest.folder / MANIFEST_FILE).exists():
        return None
    return read_manifest(manifest.folder).tuning_rules


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest in a sweep's folder; raise UserError unless it is as it was written."""
    path = folder / MANIFEST_FILE
    try:
        content = parse_json(read_file(path))
        if not isinstance(content, dict):
            raise ValueError("it is not a map")
        if content.get("format") != FORMAT:
            raise UserError(
                f"'{path}' was written by qkablate {content.get('version')} (format"
                f" {content.get('format')}); this is {__version__} and reads format {FORMAT}"
            )
        if content.pop("sha256") != _sha256(content):
            raise ValueError("its checksum does not match")
        for key in ("format", "version", "numerics", "cuda_numerics", "id"):
            content.pop(key, None)
        # Where the folder is now, in case it was moved; relative where `folder` is.
        out = Path(os.path.abspath(folder)).parent.parent
        if out.is_relative_to(Path.cwd()) and not folder.is_absolute():
            out = out.relative_to(Path.cwd())
        content |= {"out": str(out), "command": content["command"]}
        manifest = from_json(Manifest, content)
        for name in (manifest.name, *(run.name for run in manifest.runs)):  # of folders
            if not re.fullmatch(r"\w[\w+-]*", name):
                raise ValueError(f"{name!r} is not a valid name")
        return manifest
    except FileNotFoundError:
        raise UserError(f"'{folder}' is not a sweep: it has no {MANIFEST_FILE}") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(
            f"'{path}' is damaged ({reason}); move it away, and the same command writes a new one:"
            " no run is lost"
        ) from None


def find_sweep(word: str | None, out: str) -> Path:
    """Find a sweep by its folder or the beginning of its name or id; without a word, the newest."""
    folder = os.path.expanduser(word or "")  # os.path accepts any word, however odd
    if word and os.path.isfile(os.path.join(folder, MANIFEST_FILE)):
        return Path(folder)
    sweeps = Path(out).expanduser() / "sweeps"
    paths = sorted(sweeps.glob(f"*/{MANIFEST_FILE}"), key=lambda path: (path.stat().st_mtime, path))
    names = [path.parent.name for path in paths]
    if not names:
        raise no_match("sweep", word, sweeps.parent, ())
    if word is None:
        return sweeps / names[-1]
    if match := match_name(word, [path.parent for path in paths[::-1]], "sweeps"):
        return match
    known = {*names, *(name.rpartition("-")[0] for name in names)}
    raise no_match("sweep", word, sweeps.parent, known)


def _sha256(content: dict[str, Any]) -> str:
    return sha256(json.dumps(content, sort_keys=True).encode())

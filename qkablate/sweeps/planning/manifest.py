"""The manifest of a sweep: every arm with its frozen config, every run with its id, written before
the first run starts and never changed.

<out>/sweeps/<name>-<id>/
    manifest.json     this
    plan.txt          the same for a person: arms, sizes, what is left out and why
    runs/             links to the runs, which sweeps share by id
    bowls.json        with sweep.tune=true: loss by learning rate, and what was chosen
    results.csv, results.parquet   a row a run, rebuilt from the runs
"""

import dataclasses
import functools
import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qkablate import __version__
from qkablate.config import Config, TrackConfig, from_plain
from qkablate.disk import make_folder, read_file
from qkablate.errors import UserError, nearest
from qkablate.runs.records import write_atomic
from qkablate.runs.run import NUMERICS, identity, label, meant, refuse_strangers, run_id
from qkablate.table import some

FORMAT = 1
FILE = "manifest.json"
# What tells the runs of one arm apart.
RUN_KEYS = ("seed", "seeds.init", "seeds.data", "seeds.dropout", "optim.lr")
Changes = dict[str, int | float]


@dataclass(frozen=True)
class Arm:
    """A variant at one size under one control."""

    name: str
    variant: str
    controls: list[str]  # under which it stands in the grid
    baseline: str | None  # the arm it is compared with
    words: dict[str, str]  # what makes it on the command line, but for seed and learning rate
    config: Config  # frozen; its seed and rate are those of the first run
    facts: dict[str, Any]  # what else a run's id is made of
    held_out: int  # tokens of validation
    params: int  # embeddings apart
    total_params: int
    flops: float  # of training, per token
    mismatch: float | None = None  # to what the control asked for, as a part of it
    cached: int | None = None  # numbers that a decoder keeps per token, all layers

    @property
    def work(self) -> float:
        """FLOPs of training one run."""
        return self.flops * self.tokens

    @property
    def tokens(self) -> int:
        train = self.config.train
        steps = int(train.steps)
        return steps * train.batch_size * train.accumulate * self.config.model.context

    def config_of(self, changes: Mapping[str, Any], *, tuning: bool = False) -> Config:
        """The frozen config of one run."""
        config, seed = self.config, int(changes["seed"])
        seeds = {key: int(changes.get(f"seeds.{key}", seed)) for key in vars(config.seeds)}
        return dataclasses.replace(
            config,
            seed=seed,
            seeds=dataclasses.replace(config.seeds, **seeds),
            optim=dataclasses.replace(config.optim, lr=float(changes["optim.lr"])),
            train=dataclasses.replace(
                config.train, read_test=config.train.read_test and not tuning
            ),
        )

    def run(self, changes: Changes, *, tuning: bool = False) -> "SweepRun":
        changes = {"optim.lr": self.config.optim.lr, **changes}
        config = self.config_of(changes, tuning=tuning)
        id = run_id(identity(config, **self.facts))
        return SweepRun(id, label(config), self.name, tuning, changes)


@dataclass(frozen=True)
class SweepRun:
    """One run of a sweep."""

    id: str
    label: str
    arm: str
    tuning: bool  # it serves to choose a learning rate, and reads no test split
    changes: Changes  # its seed (and `seeds.…` that differ from it) and its learning rate

    @property
    def name(self) -> str:
        return f"{self.label}-{self.id}"


@dataclass(frozen=True)
class LeftOut:
    """An arm of the grid that is not trained, and why."""

    arm: str
    control: str
    reason: str
    kind: str  # impossible, out of reach (of a control), or the same (as another arm)


@dataclass(frozen=True)
class Manifest:
    name: str
    out: str
    arms: dict[str, Arm]
    runs: list[SweepRun]  # known before the first one starts
    finals: list[Changes]  # with tuning: the runs of each arm, whose rate is not known yet
    left_out: list[LeftOut]
    excluded: int  # arms of which a predicate is not true
    command: list[str] = field(default_factory=list)

    @functools.cached_property
    def id(self) -> str:
        """A hash of what is compared and how: the same command finds its sweep again."""
        arms = [[a.name, a.controls, a.baseline] for a in self.arms.values()]
        said = [arms, [[r.arm, r.id] for r in self.runs], self.finals, NUMERICS]
        return run_id({"sweep": said})

    @property
    def track(self) -> TrackConfig:
        """Where the runs are mirrored, and the sweep's own table beside them."""
        return next(iter(self.arms.values())).config.track

    @property
    def group(self) -> str:
        """Of the runs in W&B."""
        return self.track.group or f"{self.name}-{self.id}"

    @property
    def folder(self) -> Path:
        return Path(self.out).expanduser() / "sweeps" / f"{self.name}-{self.id}"

    def called(self, run: SweepRun) -> str:
        """What a person reads: the arm and the seed, and the rate where the sweep has several."""
        own = {key: value for key, value in run.changes.items() if key.startswith("seeds.")}
        said = "".join(f" {key}={value}" for key, value in own.items())
        return f"{run.arm}-s{run.changes['seed']}{said}{self._beyond_seed(run)}"

    def alike(self, run: SweepRun) -> str:
        """What is told of a run but for its seed: those of one mean."""
        return f"{run.arm}{self._beyond_seed(run)}"

    def _beyond_seed(self, run: SweepRun) -> str:
        rate = f" lr {run.changes['optim.lr']:.3g}" if self._several_rates else ""
        return f"{rate}{' (tuning)' * run.tuning}"

    @functools.cached_property
    def _several_rates(self) -> bool:
        return len({run.changes["optim.lr"] for run in self.runs}) > 1

    def config_of(self, run: SweepRun) -> Config:
        """As it is trained: how the run is called in W&B, too."""
        arm = self.arms[run.arm]
        config = arm.config_of(run.changes, tuning=run.tuning)
        model, track = arm.config.model, config.track
        tags = [f"d_model={model.d_model}", f"heads={model.heads}"]
        tags += [f"control={name}" for name in arm.controls] + ["tuning"] * run.tuning
        return dataclasses.replace(
            config,
            out=self.out,
            track=dataclasses.replace(
                track,
                group=self.group,
                job_type=track.job_type or self.alike(run),
                tags=[*track.tags, *tags],
            ),
        )

    def words_of(self, run: SweepRun) -> list[str]:
        """What repeats the run as `qkablate train …`."""
        words = {**self.arms[run.arm].words, **{k: str(v) for k, v in run.changes.items()}}
        if run.tuning:
            words["train.read_test"] = "false"
        return [f"{key}={value}" for key, value in words.items()]

    def told_left_out(self) -> list[str]:
        """The arms that are not there, by kind."""
        by_kind: dict[str, list[str]] = {}
        for left in self.left_out:
            by_kind.setdefault(left.kind, []).append(left.arm)
        said = [f"left out, {kind}: {some(names, 6)}" for kind, names in by_kind.items()]
        return [*said, f"  why: {self.folder / 'plan.txt'}"] if said else []

    def write(self) -> None:
        """Freeze it."""
        make_folder(self.folder)
        content = {
            "format": FORMAT,
            "version": __version__,
            "numerics": NUMERICS,
            "id": self.id,
            **dataclasses.asdict(self),
        }
        content["sha256"] = _sha256(content)
        write_atomic(self.folder / FILE, json.dumps(content, ensure_ascii=False) + "\n")


def freeze(manifest: Manifest, plan: list[str], *, keep_threads: bool = True) -> Manifest:
    """The manifest as it was frozen, now or when this sweep was first begun. What changes no result
    is as it was typed today; the threads only if they were.
    """
    refuse_strangers(manifest.folder)
    if (manifest.folder / FILE).exists():
        frozen = read(manifest.folder)
        if frozen.id != manifest.id:
            raise UserError(f"'{manifest.folder / FILE}' is another sweep's; move it away")
        # The id says that what is typed today is what was frozen. What is trained comes from there:
        # a file must not name what to import or where to write.
        arms = {
            name: _as_frozen(arm, frozen.arms[name].config.threads) if keep_threads else arm
            for name, arm in manifest.arms.items()
        }
        return dataclasses.replace(manifest, command=frozen.command, arms=arms)
    make_folder(manifest.folder)
    write_atomic(manifest.folder / "plan.txt", "\n".join(plan) + "\n")
    manifest.write()
    return manifest


def read(folder: Path) -> Manifest:
    """The manifest in a sweep's folder, if it is what was written there."""
    path = folder / FILE
    try:
        content = json.loads(read_file(path))
        if not isinstance(content, dict):
            raise ValueError("no map")
        if content.get("format") != FORMAT:
            raise UserError(
                f"'{path}' was written by qkablate {content.get('version')} (format"
                f" {content.get('format')}); this is {__version__} and reads format {FORMAT}"
            )
        if content.pop("sha256") != _sha256(content):
            raise ValueError("it does not have its checksum")
        arms = {name: _arm(arm) for name, arm in content["arms"].items()}
        runs = [SweepRun(**run) for run in content["runs"]]
        for name in (content["name"], *(run.name for run in runs)):  # of folders
            if not re.fullmatch(r"\w[\w+-]*", name):
                raise ValueError(f"{name!r} is no name")
        return Manifest(
            name=content["name"],
            out=_out(folder),
            arms=arms,
            runs=runs,
            finals=content["finals"],
            left_out=[LeftOut(**left) for left in content["left_out"]],
            excluded=content["excluded"],
            command=content["command"],
        )
    except FileNotFoundError:
        raise UserError(f"'{folder}' is no sweep: it has no {FILE}") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(
            f"'{path}' is damaged ({reason}); move it away, and the same command writes it anew:"
            " no run is lost"
        ) from None


def find(word: str | None, out: str) -> Path:
    """The sweep that a user means: its folder, or how its name or id begins; unsaid, the newest."""
    folder = os.path.expanduser(word or "")  # these functions take any word, however odd
    if word and os.path.isfile(os.path.join(folder, FILE)):
        return Path(folder)
    sweeps = Path(out).expanduser() / "sweeps"
    found = sorted(sweeps.glob(f"*/{FILE}"), key=lambda path: path.stat().st_mtime)
    names = [path.parent.name for path in found]
    if not names:
        raise UserError(f"there is no sweep in '{sweeps}'")
    if word is None:
        return sweeps / names[-1]
    if name := meant(word, names[::-1], "sweeps"):
        return sweeps / name
    known = {*names, *(name.rpartition("-")[0] for name in names)}
    raise UserError(f"there is no sweep '{word}' in '{sweeps}'{nearest(word, known)}")


def _as_frozen(arm: Arm, threads: int | str) -> Arm:
    config = dataclasses.replace(arm.config, threads=threads)
    return dataclasses.replace(arm, config=config, words={**arm.words, "threads": str(threads)})


def _out(folder: Path) -> str:
    """Where the folder is now, in case it was moved with its runs; seen from here, if it is below
    and was given so.
    """
    out = Path(os.path.abspath(folder)).parent.parent
    below = out.is_relative_to(Path.cwd()) and not folder.is_absolute()
    return str(out.relative_to(Path.cwd()) if below else out)


def _arm(content: dict[str, Any]) -> Arm:
    return Arm(**{**content, "config": from_plain(content["config"])})


def _sha256(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

"""A study: the runs of a sweep, read from their folders, or why they cannot be read."""

import dataclasses
import os
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from qkablate.analysis.stats import Sample
from qkablate.analysis.study.loss_curves import LossCurve, read_final_train_loss, read_loss_curves
from qkablate.config import KEYS
from qkablate.config.data import loss_unit
from qkablate.runs.document_losses import FILE_NAME as DOCUMENT_LOSSES
from qkablate.runs.document_losses import DocumentLosses, read_document_losses
from qkablate.runs.lease import LeaseObserver
from qkablate.runs.records import (
    environment_value,
    is_number,
    join_in_turn,
    list_environments,
    read_config,
    read_json,
    read_result,
    sha256,
)
from qkablate.runs.text_references import KEY as TEXT_REFERENCES
from qkablate.runs.text_references import TextReferences, find_text_references
from qkablate.sweeps.planning.floors import floor_sites, is_floor, is_position_only
from qkablate.sweeps.planning.manifest import (
    Arm,
    LeftOutArm,
    Manifest,
    Rates,
    SweepRun,
    read_manifest,
    without_variant,
)
from qkablate.sweeps.planning.surface import excess_moment
from qkablate.sweeps.planning.tuning import LrSearch
from qkablate.sweeps.running.results import describe_missing_runs, resume_commands
from qkablate.sweeps.running.state import RunState, SweepState
from qkablate.table import format_count

Seeds = tuple[tuple[str, int], ...]  # equal for the two runs of a pair
# Fields of result.json.
_FACTS = ["precision", "matmul", "device", "kernel", "compile", "threads", "data_fingerprint"]
_FACTS += ["test_tokens", "steps", "seconds", "packed", "attempt", "version", "chance", "ended"]
_FACTS += ["vmap", "program_runs"]
_FACTS += [TEXT_REFERENCES]


@dataclass(frozen=True, repr=False)
class Record:
    """One run, read from its folder."""

    folder: Path
    run: SweepRun
    seeds: Seeds
    status: str
    reason: str  # why it is not done
    val: float | None
    test: float | None
    facts: Mapping[str, Any]  # circumstances, equal in a fair comparison
    problems: list[str] = field(default_factory=list)  # damage of its files that have been read

    def __repr__(self) -> str:
        losses = {"val": self.val, "test": self.test}
        known = [f"{split} {loss:.4f}" for split, loss in losses.items() if loss is not None]
        return f"<Record {self.folder.name}: {', '.join([self.status, *known])}>"

    @property
    def loss(self) -> float | None:
        """Test loss of a run that is done."""
        return self.test if self.status == "done" else None

    @property
    def training_seconds(self) -> float | None:
        """Seconds of training; of a vmapped run its share, by the size of its last program."""
        seconds, runs = self.facts.get("seconds"), self.facts.get("program_runs")
        return float(seconds) / max(1, runs or 1) if is_number(seconds) else None

    @cached_property
    def loss_curves(self) -> dict[str, LossCurve]:
        """Curves of `val/loss` and `train/loss`, by tokens, and the validation loss at step 0."""
        return read_loss_curves(self.folder, self.problems.append)

    @cached_property
    def final_train_loss(self) -> float | None:
        """Mean training loss over the last tenth of a run that is done."""
        return read_final_train_loss(self.folder) if self.status == "done" else None

    @cached_property
    def document_losses(self) -> DocumentLosses | None:
        """Test loss by document, if it was recorded."""
        if not os.path.lexists(self.folder / DOCUMENT_LOSSES):
            return None
        try:
            found = read_document_losses(self.folder)
            self.check_origin(found.header.run, found.header.data_fingerprint)
        except ValueError as error:
            self.problems.append(f"{DOCUMENT_LOSSES}: {error}")
            return None
        return found

    @cached_property
    def config(self) -> dict[str, Any]:
        """Frozen config by key, as {"train.steps": 300}; {} if the run has none."""
        if not os.path.lexists(self.folder / "config.yaml"):
            return {}
        try:
            content = read_config(self.folder)
        except ValueError as error:
            self.problems.append(f"config.yaml: {error}")
            return {}
        values: dict[str, Any] = {}
        for name, value in content.items():
            is_section = isinstance(value, dict)
            values |= {f"{name}.{k}": v for k, v in value.items()} if is_section else {name: value}
        return {key: values[key] for key in KEYS if key in values}

    def check_origin(self, run: str, data_fingerprint: str) -> None:
        """Raise ValueError where a file of the run was written by another one, or on other data."""
        if run != self.run.id:
            raise ValueError("it belongs to another run")
        if data_fingerprint != self.facts["data_fingerprint"]:
            raise ValueError("its data differ from the run's")

    @property
    def accuracy(self) -> float | None:
        """Test accuracy of a run on a task that is done."""
        accuracy = self.facts["accuracy"].get("test")
        return accuracy if self.status == "done" and is_number(accuracy) else None

    @property
    def exact(self) -> float | None:
        """Fraction of the test sequences of a task whose answers are all right."""
        exact = self.facts["exact"].get("test")
        return exact if self.status == "done" and is_number(exact) else None

    @property
    def seed(self) -> int:
        """Main seed."""
        return dict(self.seeds)["seed"]

    @property
    def seed_label(self) -> str:
        """Seeds as text: `s3`, and those that differ from the main one."""
        others = dict(self.seeds)
        main = others.pop("seed")
        return " ".join([f"s{main}", *(f"{key}={value}" for key, value in others.items())])


@dataclass(frozen=True)
class Entry:
    """The runs of one arm at one learning rate."""

    arm: Arm
    name: str
    rate: float | None  # None: tuned, but no rate is chosen
    records: Mapping[Seeds, Record]
    tuning_variance: float = 0.0  # expected squared loss, in nats², by imperfect learning rates

    @cached_property
    def rates(self) -> Rates | None:
        """Learning rates of the runs: that of the model, and the circuit's multiplier."""
        first = next(iter(self.records.values()), None)
        return None if first is None else self.arm.rates_of(first.run)

    @cached_property
    def losses(self) -> dict[Seeds, float]:
        return {key: r.loss for key, r in self.records.items() if r.loss is not None}

    @cached_property
    def sample(self) -> Sample:
        """Test losses of the runs that are done."""
        return Sample(tuple(self.losses.values()))

    @property
    def has_rate_in_name(self) -> bool:
        """Return whether its study compares several learning rates of one arm."""
        return self.name != self.arm.name

    @property
    def tokens(self) -> int:
        return self.arm.tokens

    @property
    def accuracy(self) -> float | None:
        """Mean test accuracy on a task."""
        return _mean(record.accuracy for record in self.records.values())

    @property
    def exact(self) -> float | None:
        """Mean fraction of the test sequences whose answers are all right."""
        return _mean(record.exact for record in self.records.values())

    @cached_property
    def lead_over_ngrams(self) -> float | None:
        """Nats by which the mean test loss is below the best n-gram's; None if unknown."""
        found = find_text_references(self.references_by_run)
        return found[0].best_ngram - self.sample.mean if len(found) == 1 else None

    @property
    def references_by_run(self) -> list[tuple[str, dict[str, Any]]]:
        """Facts and test loss of each run, for `find_text_references`."""
        return [(self.name, {**r.facts, "loss": {"test": r.loss}}) for r in self.records.values()]

    @property
    def chance(self) -> float | None:
        """Accuracy of guessing on that task."""
        values = (record.facts["chance"] for record in self.records.values())
        return next((value for value in values if is_number(value)), None)

    def with_status(self, status: str) -> list[Record]:
        return [record for record in self.records.values() if record.status == status]

    def settings_without(self, *keys: str) -> str:
        """Return the arm's settings but these: equal for arms that differ in nothing else."""
        return str(sorted(item for item in self.arm.overrides.items() if item[0] not in keys))


@dataclass(frozen=True, repr=False)
class Study:
    """The runs of a sweep, or of some folders, by arm and learning rate."""

    name: str
    out: str
    arms: Mapping[str, Arm]
    entries: list[Entry]
    tuning: Mapping[tuple[str, Rates], Mapping[Seeds, Record]]  # by arm and rates
    expected: int  # runs, including those that have not begun
    lr_searches: Mapping[str, LrSearch] = field(default_factory=dict)
    resume_commands: list[list[str]] = field(default_factory=list)
    manifest: Manifest | None = None  # None: runs without a sweep
    unread: tuple[str, ...] = ()  # runs that are missing or cannot be read, with reasons

    def __repr__(self) -> str:
        arms, runs = format_count(len(self.arms), "arm"), format_count(self.expected, "run")
        return f"<Study {self.name}: {arms}, {self.ended} of {runs} ended>"

    @property
    def records(self) -> list[Record]:
        return [record for entry in self.entries for record in entry.records.values()]

    @property
    def all_records(self) -> list[Record]:
        """All runs, those of tuning last."""
        return [*self.records, *(r for by_seed in self.tuning.values() for r in by_seed.values())]

    @property
    def left_out(self) -> list[LeftOutArm]:
        return self.manifest.left_out if self.manifest else []

    @cached_property
    def is_complete(self) -> bool:
        """True if every run has a result."""
        return self.ended == self.expected

    @property
    def ended(self) -> int:
        """Number of runs with a result: done or diverged."""
        return sum(record.status in ("done", "diverged") for record in self.all_records)

    @cached_property
    def diverged_arms(self) -> list[str]:
        """Names of the tuned arms of which every run diverged, so that no rate is chosen."""
        tuned: dict[str, set[str]] = {}
        for (arm, _), records in self.tuning.items():
            tuned.setdefault(arm, set()).update(record.status for record in records.values())
        return [entry.name for entry in self.entries if tuned.get(entry.name) == {"diverged"}]

    @cached_property
    def loss_unit(self) -> str:
        """Return the unit of its losses: nats per token, or only nats if its arms differ."""
        data = [arm.config.data for arm in self.arms.values()]
        units = {loss_unit(one.source, one.objective) for one in data}
        return units.pop() if len(units) == 1 else "nats"

    @property
    def cli_arguments(self) -> list[str]:
        """Arguments by which a command finds the sweep."""
        return [self.name, *([] if self.out == "outputs" else [f"out={self.out}"])]

    @cached_property
    def text_references(self) -> list[TextReferences]:
        """Losses of n-grams and a compressor on each text, and the arms that are behind them."""
        return find_text_references(run for e in self.entries for run in e.references_by_run)

    def overrides_of(self, run: SweepRun) -> list[str]:
        """Return the arguments that repeat the run with `qkablate train`."""
        own = self.manifest.config_words if self.manifest else []
        return [*own, *self.arms[run.arm].overrides_of(run)]

    def baseline_of(self, entry: Entry) -> Entry | None:
        """Return the entry of the arm's baseline, at the same rate if it has several."""
        baselines = [other for other in self.entries if other.arm.name == entry.arm.baseline]
        return _at_rate(baselines, entry.rate)

    def floor_of(self, arm: Entry, baseline: Entry) -> Entry | None:
        """Return `uniform`, attention that averages all tokens, in the baseline's model.

        It is uniform at the arm's sites, or at the baseline's where the arm is standard attention.
        Where the baseline does not beat it clearly, arms look alike because attention made no
        difference there: an experiment in which nothing could have shown says nothing.
        """
        return self._find_reference(is_floor, arm, baseline)

    def content_reference_of(self, arm: Entry, baseline: Entry) -> Entry | None:
        """Return `static_scores`, whose weights never look at a token, in the baseline's model.

        Where the baseline does not beat it, the runs say nothing about attention to content.
        """
        return self._find_reference(is_position_only, arm, baseline)

    def own_size_of(self, entry: Entry) -> Arm:
        """Return the entry's arm, or that at its own size if a control has changed the size."""
        arm = entry.arm
        return arm if arm.mismatch is None else self.arms.get(arm.baseline or "", arm)

    def _find_reference(
        self, is_reference: Callable[[Arm], bool], arm: Entry, baseline: Entry
    ) -> Entry | None:
        """Return the reference in the baseline's model, at the sites that differ."""
        sites = floor_sites(arm.arm, baseline.arm) or "all"
        model = without_variant(self.own_size_of(baseline).overrides)
        found = [
            entry
            for entry in self.entries
            if is_reference(entry.arm) and entry.arm.mismatch is None  # at the model's own size
            if entry.arm.config.variant.sites == sites
            if without_variant(entry.arm.overrides) == model
        ]
        return _at_rate(found, baseline.rate)


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def _at_rate(entries: list[Entry], rate: float | None) -> Entry | None:
    """Return the only entry, or that of several at the rate."""
    if len(entries) > 1:
        entries = [entry for entry in entries if entry.rate == rate]
    return entries[0] if entries else None


def read_study(folder: Path) -> Study:
    """Read a sweep; UserError if the folder holds none."""
    sweep_state = SweepState(read_manifest(folder), LeaseObserver(by_file_times=True))
    sweep_state.refresh()
    manifest = sweep_state.manifest
    lr_searches = {search.arm: search for search in sweep_state.lr_searches}
    entries, tuning = group_runs(manifest.arms, sweep_state.states.values(), lr_searches)
    return Study(
        name=f"{manifest.name}-{manifest.id}",
        out=manifest.out,
        arms=manifest.arms,
        entries=entries,
        tuning=tuning,
        expected=sweep_state.expected_runs(),
        lr_searches=lr_searches,
        resume_commands=resume_commands(sweep_state),
        manifest=manifest,
        unread=(missing,) if (missing := describe_missing_runs(sweep_state)) else (),
    )


def group_runs(
    arms: Mapping[str, Arm], states: Iterable[RunState], tuned: Iterable[str] = ()
) -> tuple[list[Entry], dict[tuple[str, Rates], dict[Seeds, Record]]]:
    """Group runs, and tuning runs, by arm and rate; tuned arms are included without any run."""
    groups: dict[str, dict[float | None, dict[Seeds, Record]]] = {arm: {} for arm in arms}
    tuning: dict[tuple[str, Rates], dict[Seeds, Record]] = {}
    for state in states:
        run, record = state.run, make_record(state)
        rates = arms[run.arm].rates_of(run)
        if run.tuning:
            tuning.setdefault((run.arm, rates), {})[record.seeds] = record
        else:
            groups[run.arm].setdefault(rates.lr, {})[record.seeds] = record
    for arm in tuned:
        groups[arm] = groups[arm] or {None: {}}  # no rate was chosen (yet)
    several = any(len(by_rate) > 1 for by_rate in groups.values())
    known = {lr for by_rate in groups.values() for lr in by_rate if lr is not None}
    form = ".3g" if len({f"{lr:.3g}" for lr in known}) == len(known) else ""
    entries = []
    for arm, by_rate in groups.items():
        for lr, records in sorted(by_rate.items(), key=lambda item: item[0] or 0.0):
            name = f"{arm} lr {lr:{form}}" if several and lr is not None else arm
            entry = Entry(arms[arm], name, lr, records)
            if entry.rates is not None and (losses := tuning_losses(tuning, arm)):
                variance = excess_moment(losses, entry.rates)
                entry = dataclasses.replace(entry, tuning_variance=variance)
            entries.append(entry)
    return entries, tuning


def tuning_losses(
    tuning: Mapping[tuple[str, Rates], Mapping[Seeds, Record]], arm: str
) -> dict[Rates, dict[Seeds, float | None]]:
    """Return the validation losses of an arm's tuning runs that have a result.

    Only those with the seeds of the search: others confirm its choice, at a few of the rates.
    """
    losses = {rates: known_losses(own) for (name, rates), own in tuning.items() if name == arm}
    counts = Counter(seed for own in losses.values() for seed in own)
    searched = {seed for seed, count in counts.items() if count > max(counts.values()) / 2}
    losses = {
        rates: {seed: loss for seed, loss in own.items() if seed in searched}
        for rates, own in losses.items()
    }
    return {rates: by_seed for rates, by_seed in losses.items() if by_seed}


def known_losses(records: Mapping[Seeds, Record]) -> dict[Seeds, float | None]:
    """Return the validation losses of the runs that have a result; None: diverged."""
    return {
        key: record.val if record.status == "done" else None
        for key, record in records.items()
        if record.status in ("done", "diverged")
    }


def make_record(state: RunState) -> Record:
    """Read a run's result and the circumstances of its training."""
    folder, run, status, reason = state.folder, state.run, state.status, state.reason
    result = read_result(folder)
    if result is None and os.path.exists(folder / "result.json"):
        status, reason = "damaged", "its result.json cannot be read"
    elif result is not None and result.get("id") != run.id:
        status, reason, result = "damaged", "its result.json is another run's", None
    losses = result["loss"] if result and result["status"] == "done" else {}
    seeds = tuple((k, int(seed)) for k, seed in sorted(run.changes.items()) if k.startswith("seed"))
    facts = read_facts(folder, result or {})
    return Record(folder, run, seeds, status, reason, losses.get("val"), losses.get("test"), facts)


def read_facts(folder: Path, result: Mapping[str, Any]) -> dict[str, Any]:
    """Return the circumstances of a run: data, software and hardware."""
    facts: dict[str, Any] = {key: result.get(key) for key in _FACTS}
    facts |= {key: as_dict(result.get(key)) for key in ("init", "lr", "accuracy", "exact")}
    environment = read_json(folder / "environment.json")
    codes = map(_read_code, list_environments(environment))
    facts["code"] = join_in_turn(codes) or facts["version"]
    data = as_dict(result.get("data"))
    facts |= {key: data.get(key) for key in ("source", "objective")}
    facts["torch"] = environment_value(environment, "versions", "torch")
    facts["cpu"] = environment_value(environment, "machine", "cpu")
    is_gpu = str(result.get("device")).startswith("cuda")
    facts["gpu"] = environment_value(environment, "machine", "device") if is_gpu else None
    return facts


def _read_code(environment: Mapping[str, Any]) -> str | None:
    """Return the commit, with a short checksum of edits to it; None without a commit."""
    code = as_dict(environment.get("code"))
    edits = edits_checksum(code)
    commit = str(code["commit"])[:10] if code.get("commit") else None
    return f"{commit}+{edits}" if commit and edits else commit


def edits_checksum(code: Mapping[str, Any]) -> str:
    """Return the short checksum of uncommitted edits; empty without any."""
    diff = str(code.get("diff") or "")
    return str(code.get("edits") or "") or (sha256(diff.encode())[:6] if diff else "")


def as_dict(value: object) -> dict[str, Any]:
    """Return the value if it is a dictionary, else an empty one."""
    return value if isinstance(value, dict) else {}

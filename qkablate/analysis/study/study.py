"""The runs of a sweep as numbers with their circumstances, read from the folders. What cannot be
read is there too, and says so: nothing is left out in silence.
"""

import hashlib
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from qkablate.analysis.stats import Sample
from qkablate.disk import read_file
from qkablate.errors import tell
from qkablate.runs.records import is_number, read_json, read_result, read_row, sha256
from qkablate.sweeps.planning import manifest as manifests
from qkablate.sweeps.planning.manifest import Arm, Manifest, SweepRun
from qkablate.sweeps.planning.tuning import Bowl
from qkablate.sweeps.running.state import Standing, State
from qkablate.sweeps.running.summary import next_words

Seeds = tuple[tuple[str, int], ...]  # what two runs share that are a pair
Course = dict[int, float]  # loss by tokens
VAL, TRAIN = "val/loss", "train/loss"


@dataclass(frozen=True)
class Record:
    """One run, as its folder tells it."""

    folder: Path
    run: SweepRun
    seeds: Seeds
    status: str
    reason: str  # why it is not done
    val: float | None
    test: float | None
    facts: Mapping[str, Any]  # in which the runs of a fair comparison are alike

    @property
    def loss(self) -> float | None:
        """Of the test split, where the run is done and may be compared."""
        return self.test if self.status == "done" else None

    @cached_property
    def courses(self) -> dict[str, Course]:
        """How it went: `val/loss` and `train/loss` by tokens."""
        return courses(self.folder, self.lacks.append)

    @cached_property
    def lacks(self) -> list[str]:
        """What of its course is damaged; known once that was read."""
        return []

    @property
    def seed(self) -> str:
        """`s3`, and the seeds that were given apart."""
        own = dict(self.seeds)
        return "".join([f"s{own.pop('seed')}", *(f" {key}={value}" for key, value in own.items())])


@dataclass(frozen=True)
class Entry:
    """The runs of one arm at one learning rate."""

    arm: Arm
    name: str
    rate: float | None  # None: tuned, and none was chosen
    records: Mapping[Seeds, Record]

    @cached_property
    def losses(self) -> dict[Seeds, float]:
        return {key: r.loss for key, r in self.records.items() if r.loss is not None}

    @cached_property
    def sample(self) -> Sample:
        """The test losses of the runs that are done."""
        return Sample(tuple(self.losses.values()))

    @property
    def tokens(self) -> int:
        return self.arm.tokens

    def having(self, status: str) -> list[Record]:
        return [record for record in self.records.values() if record.status == status]


@dataclass(frozen=True)
class Study:
    """A sweep, read."""

    manifest: Manifest
    entries: list[Entry]
    tuning: Mapping[tuple[str, float], Mapping[Seeds, Record]]  # by arm and rate
    bowls: Mapping[str, Bowl]
    expected: int  # runs, those included that are not begun
    next_words: list[list[str]]  # the command that goes on with it, where there is something to do
    unread: tuple[str, ...] = ()  # folders of runs that no run can be made of, and why

    @property
    def name(self) -> str:
        return f"{self.manifest.name}-{self.manifest.id}"

    @property
    def records(self) -> list[Record]:
        return [record for entry in self.entries for record in entry.records.values()]

    @cached_property
    def is_complete(self) -> bool:
        """Whether every run has come to an end that is a result."""
        return self.ended == self.expected

    @property
    def ended(self) -> int:
        """Runs that have come to a result which is no accident."""
        tuning = [record for by_seed in self.tuning.values() for record in by_seed.values()]
        return sum(record.status in ("done", "diverged") for record in self.records + tuning)

    @property
    def where(self) -> list[str]:
        """What finds the sweep by its name, from here."""
        out = self.manifest.out
        return [self.name, *([] if out == "outputs" else [f"out={out}"])]

    def baseline_of(self, entry: Entry) -> Entry | None:
        """What the entry is compared with: its arm's baseline, at the rate chosen for that one, or
        at the same rate where several were run.
        """
        beside = [other for other in self.entries if other.arm.name == entry.arm.baseline]
        if len(beside) > 1:
            beside = [other for other in beside if other.rate == entry.rate]
        return beside[0] if beside else None


def read_study(folder: Path) -> Study:
    """UserError if it is no sweep."""
    standing = Standing(manifests.read(folder))
    standing.look()
    bowls = {bowl.arm: bowl for bowl in standing.bowls}
    states = standing.states.values()
    return gather(standing.manifest, states, bowls, standing.expected(), next_words(standing))


def gather(
    found: Manifest,
    states: Iterable[State],
    bowls: Mapping[str, Bowl],
    expected: int,
    next_words: list[list[str]],
    unread: tuple[str, ...] = (),
) -> Study:
    """The runs by their arms and rates."""
    groups: dict[tuple[str, float | None], dict[Seeds, Record]] = {}
    tuning: dict[tuple[str, float], dict[Seeds, Record]] = {}
    for state in states:
        run, rate = state.run, float(state.run.changes["optim.lr"])
        record = _record(run, state.folder, state.status, state.reason, found.arms[run.arm])
        if run.tuning:
            tuning.setdefault((run.arm, rate), {})[record.seeds] = record
        else:
            groups.setdefault((run.arm, rate), {})[record.seeds] = record
    for arm in {*bowls} - {arm for arm, _ in groups}:  # its rate is not chosen, or never will be
        groups[arm, None] = {}
    several = len(groups) > len({arm for arm, _ in groups})
    rates = {rate for _, rate in groups if rate is not None}
    form = ".3g" if len({f"{rate:.3g}" for rate in rates}) == len(rates) else ""
    order = {name: place for place, name in enumerate(found.arms)}
    entries = [
        Entry(
            found.arms[arm],
            f"{arm} lr {rate:{form}}" if several and rate is not None else arm,
            rate,
            records,
        )
        for (arm, rate), records in sorted(
            groups.items(), key=lambda item: (order[item[0][0]], item[0][1] or 0.0)
        )
    ]
    return Study(found, entries, tuning, bowls, expected, next_words, unread)


def _record(run: SweepRun, folder: Path, status: str, reason: str, arm: Arm) -> Record:
    result = read_result(folder)
    if result is None and os.path.exists(folder / "result.json"):
        status, reason = "damaged", "its result.json cannot be read"
    elif result is not None and result.get("id") != run.id:
        status, reason, result = "damaged", "its result.json is another run's", None
    losses = result["loss"] if result and result["status"] == "done" else {}
    seeds = tuple(
        (key, int(value)) for key, value in sorted(run.changes.items()) if key != "optim.lr"
    )
    return Record(
        folder=folder,
        run=run,
        seeds=seeds,
        status=status,
        reason=reason,
        val=losses.get("val"),
        test=losses.get("test"),
        facts=facts_of(folder, result or {}) | {"steps_planned": int(arm.config.train.steps)},
    )


def facts_of(folder: Path, result: Mapping[str, Any]) -> dict[str, Any]:
    """The circumstances of a run: what it was computed from, with and on."""
    own = ("precision", "products", "device", "kernel", "compile", "threads", "data_fingerprint")
    facts: dict[str, Any] = {
        key: result.get(key) for key in (*own, "steps", "packed", "attempt", "version")
    }
    for key in ("init", "lr"):
        facts[key] = value if isinstance(value := result.get(key), dict) else {}
    environment = read_json(folder / "environment.json")
    environment = environment if isinstance(environment, dict) else {}
    versions, machine, code = (
        value if isinstance(value := environment.get(key), dict) else {}
        for key in ("versions", "machine", "code")
    )
    diff = str(code.get("diff") or "")
    commit = str(code["commit"])[:10] if code.get("commit") else None
    edits = f"+{hashlib.sha256(diff.encode()).hexdigest()[:6]}" if diff else ""
    facts["code"] = f"{commit}{edits}" if commit else facts["version"]
    facts["torch"], facts["cpu"] = versions.get("torch"), machine.get("cpu")
    return facts


def courses(folder: Path, note: Callable[[str], None] | None = None) -> dict[str, Course]:
    """How a run went, by metrics.jsonl. Lines that are none are passed over, and that is told and
    noted; of very many readings some are taken that stand evenly on a logarithmic scale.
    """
    found, damage = _courses(folder)
    if damage:
        tell(f"qkablate: '{folder / 'metrics.jsonl'}' is damaged: {damage}")
        if note is not None:
            note(f"metrics.jsonl is damaged: {damage}")
    return found


def _courses(folder: Path) -> tuple[dict[str, Course], str]:
    content = metrics_of(folder)
    found: dict[str, Course] = {VAL: {}, TRAIN: {}}
    if content is None:
        return found, "its course is not shown"
    lines = content.splitlines()
    unfinished = b"" if content.endswith(b"\n") else lines[-1] if lines else b""
    damaged = set()
    for metric in (VAL, TRAIN):
        sign = f'"{metric}"'.encode()
        own = [line for line in lines if sign in line]
        picked = own if len(own) <= _ALL else _spread(own)
        for line in picked:
            try:
                row = read_row(line)
                tokens, loss = row["tokens"], row[metric]
            except ValueError:
                damaged |= {line} - {unfinished}  # which is just being written
                continue
            except KeyError:
                continue
            if type(tokens) is int and 0 < tokens < 2**60 and is_number(loss):
                found[metric][tokens] = float(loss)
        found[metric] = dict(sorted(found[metric].items()))
    return found, f"of its rows, {len(damaged)} are not shown" if damaged else ""


def metrics_of(folder: Path) -> bytes | None:
    """metrics.jsonl; None where it is not what the result was made with."""
    try:
        content = read_file(folder / "metrics.jsonl")
    except OSError:
        return b""
    known = (read_result(folder) or {}).get("metrics_sha256")
    return content if not content or known in (None, sha256(content)) else None


_ALL = 64  # readings that are all taken
_TOKENS = re.compile(rb'"tokens": ?(\d{1,18})')


def _spread(lines: list[bytes]) -> list[bytes]:
    """The first of every sixteenth of a doubling of tokens, and the last: the same ones of every
    run that has them, whatever lines it has lost.
    """
    found: dict[int, bytes] = {}
    for line in lines:
        if (tokens := _TOKENS.search(line)) is not None:
            found.setdefault(int(16 * math.log2(int(tokens[1]) or 1)), line)
    return [*found.values(), lines[-1]]

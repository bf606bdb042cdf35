"""The tables of a report that are its own: verdicts, audit, runs, surroundings."""

import shlex
from collections import Counter
from dataclasses import dataclass
from typing import Any

from qkablate.analysis.comparison.audit import BROKEN, MARKS, OK, STATES, WARNING
from qkablate.analysis.study.study import Entry, Record
from qkablate.report.charts import MOST_RUNS
from qkablate.report.section import Chapter
from qkablate.report.text.numbers import told_loss, told_open
from qkablate.report.text.tables import percent_more, says
from qkablate.table import counted, short, some

COLUMNS = [
    *("arm", "gap, nats [95 %]", "verdict", "parameters", "FLOPs per token", "pairs n", "p (Holm)"),
    *("could have found, nats", "test loss, nats [95 %]", "runs done", "KV bytes per token"),
    *("variant", "d_model", "heads"),
]


@dataclass(frozen=True)
class Cell:
    text: str
    key: float | str | None = None  # what it is sorted by; None comes last


def verdicts(chapter: Chapter) -> list[list[Cell]]:
    """A row an arm, the baselines too."""
    gaps = {one["arm"]: one for one in chapter.found["gaps"]}
    baselines = {one["baseline"] for one in chapter.found["gaps"]}
    return [_row(entry, gaps.get(entry.name), baselines) for entry in chapter.study.entries]


def _row(entry: Entry, one: dict[str, Any] | None, baselines: set[str]) -> list[Cell]:
    arm, model = entry.arm, entry.arm.config.model
    more = one or {}
    params = _more(f"{arm.params:,}", more.get("params_percent")) if arm.params else "–"
    flops = _more(short(arm.flops), more.get("flops_percent")) if arm.flops else "–"
    cached = 2 * arm.cached if arm.cached is not None else None
    sample = entry.sample
    gap, verdict, n, p, detectable = _judged(one, entry.name in baselines)
    return [
        Cell(entry.name, entry.name),
        gap,
        verdict,
        Cell(params, arm.params or None),
        Cell(flops, arm.flops or None),
        n,
        p,
        detectable,
        Cell(told_loss(sample), sample.mean) if sample.n else Cell("–"),
        Cell(_ended(entry), len(entry.losses)),
        Cell("–" if cached is None else f"{cached:,}", cached),
        Cell(arm.variant, arm.variant),
        Cell(str(model.d_model), model.d_model),
        Cell(str(model.heads), model.heads),
    ]


def _more(text: str, percent: float | None) -> str:
    return text if percent is None else f"{text} ({percent_more(percent)})"


def _ended(entry: Entry) -> str:
    """6/6, or 4/6 (1 diverged, 1 failed)."""
    statuses = Counter(record.status for record in entry.records.values())
    rest = [f"{n} {status}" for status, n in statuses.items() if status != "done"]
    said = f"{statuses['done']}/{len(entry.records)}"
    return f"{said} ({', '.join(rest)})" if rest else said


def _judged(one: dict[str, Any] | None, is_baseline: bool) -> list[Cell]:
    """Gap, verdict, pairs, p, and what could have been found."""
    if one is None:
        word = "baseline" if is_baseline else "compared with none"
        return [Cell("–"), Cell(word, word), Cell("–"), Cell("–"), Cell("–")]
    gap = told_open(one) if one["n"] else "–"
    p, least, word = one["p_holm"], one["detectable"], says(one)
    doubt = max((check["state"] for check in one["audit"]), key=STATES.index, default=OK)
    mark = f" {MARKS[doubt]}" if doubt in (WARNING, BROKEN) else ""
    return [
        Cell(gap, one["mean"]),
        Cell(f"{word}{mark}", word),
        Cell(str(one["n"]), one["n"]),
        Cell("–" if p is None else "< 0.0001" if p < 1e-4 else f"{p:.2g}", p),
        Cell("–" if least is None else f"{least:.2g}", least),
    ]


def trouble(chapter: Chapter) -> list[str]:
    """What could not be read, and what failed, by name."""
    said = [f"could not be read: {line}" for line in chapter.study.unread]
    apart = [line for one in chapter.found["function_distance"] for line in one["faults"]]
    said += [f"function distance: {line}" for line in apart]
    for status in ("damaged", "failed", "waiting"):
        # One that waits has a reason where its folder is there and cannot be read.
        records = [r for r in _every(chapter) if r.status == status]
        records = [r for r in records if r.reason or status != "waiting"]
        said += [f"{r.folder.name}: {_told(r)}" for r in records[:_MOST_TROUBLE]]
        if (more := len(records) - _MOST_TROUBLE) > 0:
            said.append(f"{more:,} more {status}: see every run, below")
    _ = chapter.heads, chapter.examples  # what they lack is known once they are read
    for record in chapter.study.records:
        _ = record.courses
        if record.lacks:
            said += [f"{record.folder.name}: {line}" for line in record.lacks]
    return said


def _every(chapter: Chapter) -> list[Record]:
    """The runs, and those that serve to tune."""
    tuning = [r for by_seed in chapter.study.tuning.values() for r in by_seed.values()]
    return [*chapter.study.records, *tuning]


_MOST_TROUBLE = 10  # of a kind, told one by one


def audit(chapter: Chapter) -> list[list[str]]:
    """Every answer of the audit once, the worst first, with the arms it is given for."""
    said: dict[tuple[str, str, str], list[str]] = {}
    for one in chapter.found["gaps"]:
        for check in one["audit"]:
            text = check["says"].replace(one["arm"], "the arm")
            text = text.replace(one["baseline"], "the baseline")
            said.setdefault((check["state"], check["name"], text), []).append(one["arm"])
    every = len(chapter.found["gaps"])
    rows: dict[tuple[str, str], list[list[str]]] = {}
    for (state, name, text), arms in sorted(said.items(), key=lambda item: -len(item[1])):
        own = "all" if len(arms) == every else some(arms)
        rows.setdefault((state, name), []).append(
            [f"{MARKS[state] or '✓'} {state}", name, text, own]
        )
    found = []
    for (state, name), answers in sorted(rows.items(), key=lambda one: -STATES.index(one[0][0])):
        most = _MOST_DOUBTS if state in (WARNING, BROKEN) else _MOST_ANSWERS
        found += answers[:most]
        if more := answers[most:]:
            told = f"{len(more)} answers more: qkablate results --format json"
            found.append([answers[0][0], name, told, ""])
    return found


_MOST_ANSWERS, _MOST_DOUBTS = 4, 40  # that are told one by one


RUNS = ["run", "status", "seed", "lr", "validation loss", "test loss", "command"]
ARMS = ["arm", "lr", "done", "test loss of every seed", "command"]


def runs(chapter: Chapter) -> tuple[list[str], list[list[str]]]:
    """Every run; a row an arm where these are many. The last column is a command."""
    every = _every(chapter)
    if len(every) <= MOST_RUNS:
        return RUNS, [_run(chapter, record) for record in every]
    rows = [
        _arm(chapter, entry.name, entry.rate, [*entry.records.values()])
        for entry in chapter.study.entries
        if entry.records
    ]
    rows += [
        _arm(chapter, f"{arm} (tuning)", rate, [*by_seed.values()])
        for (arm, rate), by_seed in chapter.study.tuning.items()
    ]
    return ARMS, rows


def _run(chapter: Chapter, record: Record) -> list[str]:
    status = _told(record)
    return [
        record.folder.name + " (tuning)" * record.run.tuning,
        status,
        record.seed.removeprefix("s"),
        f"{record.run.changes['optim.lr']:.3g}",
        "–" if record.val is None else f"{record.val:.4f}",
        "–" if record.test is None else f"{record.test:.4f}",
        shlex.join(["qkablate", "train", *chapter.study.manifest.words_of(record.run)]),
    ]


def _arm(chapter: Chapter, name: str, rate: float | None, records: list[Record]) -> list[str]:
    """The command is that of its first run."""
    done = sum(record.status == "done" for record in records)
    losses = [record.val if record.run.tuning else record.test for record in records]
    every = [
        f"{record.seed} {f'{loss:.4f}' if loss is not None else f'({_told(record)})'}"
        for record, loss in zip(records, losses, strict=True)
    ]
    words = chapter.study.manifest.words_of(records[0].run)
    command = shlex.join(["qkablate", "train", *words])
    return [
        name,
        "–" if rate is None else f"{rate:.3g}",
        f"{done}/{len(records)}",
        " · ".join(every),
        command,
    ]


def _told(record: Record) -> str:
    """Why it has no loss, in a few words."""
    return f"{record.status}: {record.reason[:200]}" if record.reason else record.status


def surroundings(chapter: Chapter) -> list[list[str]]:
    """What the runs were computed with and from, and how many of them."""
    began = [record for record in _every(chapter) if record.facts.get("device")]
    rows = []
    for key, what in _FACTS.items():
        found = Counter(str(record.facts.get(key)) for record in began)
        values = [
            f"{value} ({counted(n, 'run')})" if len(found) > 1 else value
            for value, n in found.most_common()
        ]
        rows.append([what, some(values, 6) if values else "not known: no run has a result"])
    return rows


_FACTS = {
    "code": "code of qkablate",
    "torch": "torch",
    "cpu": "CPU",
    "device": "device",
    "precision": "precision",
    "products": "products by",
    "kernel": "attention kernel",
    "threads": "threads",
    "packed": "runs side by side",
    "data_fingerprint": "data fingerprint",
}

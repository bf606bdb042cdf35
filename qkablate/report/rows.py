"""Rows of the report's tables: verdicts, audit, runs, environment."""

import shlex
from collections import Counter
from dataclasses import dataclass

from qkablate.analysis.comparison.audit import BROKEN, MARKS, STATES, WARNING, worst_state
from qkablate.analysis.comparison.summary import GapSummary
from qkablate.analysis.study.study import Entry, Record
from qkablate.report.charts import MAX_RUNS
from qkablate.report.section import Section
from qkablate.report.text.numbers import format_gap_summary, format_loss
from qkablate.report.text.tables import format_percent_more
from qkablate.table import format_count, format_list, format_short

COLUMNS = [
    *("arm", "gap, nats [95 %]", "verdict", "parameters", "FLOPs per token", "pairs n", "p (Holm)"),
    *(
        "smallest detectable effect, nats",
        "test loss, nats [95 %]",
        "runs done",
        "KV bytes per token",
    ),
    *("variant", "d_model", "heads"),
]


@dataclass(frozen=True)
class Cell:
    """A cell's text and the key it is sorted by."""

    text: str
    key: float | str | None = None  # None sorts last


def make_verdict_rows(section: Section) -> list[list[Cell]]:
    """Return one row per arm, baselines included."""
    gaps = {one.arm: one for one in section.summary.gaps}
    baselines = {one.baseline for one in section.summary.gaps}
    return [_verdict_row(entry, gaps.get(entry.name), baselines) for entry in section.study.entries]


def _verdict_row(entry: Entry, one: GapSummary | None, baselines: set[str]) -> list[Cell]:
    arm, model = entry.arm, entry.arm.config.model
    params = (
        _with_percent(f"{arm.params:,}", one.params_percent if one else None) if arm.params else "–"
    )
    flops = (
        _with_percent(format_short(arm.flops), one.flops_percent if one else None)
        if arm.flops
        else "–"
    )
    cached = 2 * arm.kv_cache_numbers if arm.kv_cache_numbers is not None else None
    sample = entry.sample
    gap, verdict, n, p, detectable = _gap_cells(one, entry.name in baselines)
    return [
        Cell(entry.name, entry.name),
        gap,
        verdict,
        Cell(params, arm.params or None),
        Cell(flops, arm.flops or None),
        n,
        p,
        detectable,
        Cell(format_loss(sample), sample.mean) if sample.n else Cell("–"),
        Cell(_format_done(entry), len(entry.losses)),
        Cell("–" if cached is None else f"{cached:,}", cached),
        Cell(arm.variant, arm.variant),
        Cell(str(model.d_model), model.d_model),
        Cell(str(model.heads), model.heads),
    ]


def _with_percent(text: str, percent: float | None) -> str:
    return text if percent is None else f"{text} ({format_percent_more(percent)})"


def _format_done(entry: Entry) -> str:
    """Format the runs that are done: 6/6, or 4/6 (1 diverged, 1 failed)."""
    statuses = Counter(record.status for record in entry.records.values())
    rest = [f"{n} {status}" for status, n in statuses.items() if status != "done"]
    said = f"{statuses['done']}/{len(entry.records)}"
    return f"{said} ({', '.join(rest)})" if rest else said


def _gap_cells(one: GapSummary | None, is_baseline: bool) -> list[Cell]:
    """Return gap, verdict, pairs, p and smallest detectable effect."""
    if one is None:
        word = "baseline" if is_baseline else "compared with none"
        return [Cell("–"), Cell(word, word), Cell("–"), Cell("–"), Cell("–")]
    gap = format_gap_summary(one) if one.n else "–"
    p, least, word = one.p_holm, one.detectable, one.decision
    doubt = worst_state(one.audit)
    mark = f" {MARKS[doubt]}" if doubt in (WARNING, BROKEN) else ""
    return [
        Cell(gap, one.mean),
        Cell(f"{word}{mark}", word),
        Cell(str(one.n), one.n),
        Cell("–" if p is None else "< 0.0001" if p < 1e-4 else f"{p:.2g}", p),
        Cell("–" if least is None else f"{least:.2g}", least),
    ]


def find_problems(section: Section) -> list[str]:
    """Return a line per run or file that failed or could not be read."""
    said = [f"could not be read: {line}" for line in section.study.unread]
    apart = [line for one in section.summary.function_distance for line in one.faults]
    said += [f"function distance: {line}" for line in apart]
    for status in ("damaged", "failed", "waiting"):
        # A waiting run has a reason if its folder exists and cannot be read.
        records = [r for r in section.all_records if r.status == status]
        records = [r for r in records if r.reason or status != "waiting"]
        said += [f"{r.folder.name}: {_format_status(r)}" for r in records[:_MAX_PROBLEMS]]
        if (more := len(records) - _MAX_PROBLEMS) > 0:
            said.append(f"{more:,} more {status}: see the table of runs below")
    _ = section.heads, section.examples  # reading them records their problems
    for record in section.study.records:
        _ = record.loss_curves
        if record.problems:
            said += [f"{record.folder.name}: {line}" for line in record.problems]
    return said


_MAX_PROBLEMS = 10  # listed per status


def make_audit_rows(section: Section) -> list[list[str]]:
    """Return each result of the audit once with its arms, the worst first."""
    said: dict[tuple[str, str, str], list[str]] = {}
    for one in section.summary.gaps:
        for check in one.audit:
            text = check.message.replace(one.arm, "the arm")
            text = text.replace(one.baseline, "the baseline")
            said.setdefault((check.state, check.name, text), []).append(one.arm)
    every = len(section.summary.gaps)
    rows: dict[tuple[str, str], list[list[str]]] = {}
    for (state, name, text), arms in sorted(said.items(), key=lambda item: -len(item[1])):
        own = "all" if len(arms) == every else format_list(arms)
        rows.setdefault((state, name), []).append(
            [f"{MARKS[state] or '✓'} {state}", name, text, own]
        )
    found = []
    for (state, name), answers in sorted(rows.items(), key=lambda one: -STATES.index(one[0][0])):
        most = _MAX_WARNINGS if state in (WARNING, BROKEN) else _MAX_ANSWERS
        found += answers[:most]
        if more := answers[most:]:
            told = f"{len(more)} more: qkablate results --format json"
            found.append([answers[0][0], name, told, ""])
    return found


_MAX_ANSWERS, _MAX_WARNINGS = 4, 40  # listed per check


RUN_COLUMNS = ["run", "status", "seed", "lr", "validation loss", "test loss", "command"]
ARM_COLUMNS = ["arm", "lr", "done", "test loss of every seed", "command"]


def make_run_rows(section: Section) -> tuple[list[str], list[list[str]]]:
    """Return header and one row per run, or per arm if there are many; the command comes last."""
    every = section.all_records
    if len(every) <= MAX_RUNS:
        return RUN_COLUMNS, [_run_row(section, record) for record in every]
    rows = [
        _arm_row(section, entry.name, entry.rate, [*entry.records.values()])
        for entry in section.study.entries
        if entry.records
    ]
    rows += [
        _arm_row(section, f"{arm} (tuning)", rate, [*by_seed.values()])
        for (arm, rate), by_seed in section.study.tuning.items()
    ]
    return ARM_COLUMNS, rows


def _run_row(section: Section, record: Record) -> list[str]:
    status = _format_status(record)
    return [
        record.folder.name + " (tuning)" * record.run.tuning,
        status,
        record.seed.removeprefix("s"),
        f"{record.run.changes['optim.lr']:.3g}",
        "–" if record.val is None else f"{record.val:.4f}",
        "–" if record.test is None else f"{record.test:.4f}",
        shlex.join(["qkablate", "train", *section.study.overrides_of(record.run)]),
    ]


def _arm_row(section: Section, name: str, rate: float | None, records: list[Record]) -> list[str]:
    """Return the row of an arm, with the command of its first run."""
    done = sum(record.status == "done" for record in records)
    losses = [record.val if record.run.tuning else record.test for record in records]
    every = [
        f"{record.seed} {f'{loss:.4f}' if loss is not None else f'({_format_status(record)})'}"
        for record, loss in zip(records, losses, strict=True)
    ]
    words = section.study.overrides_of(records[0].run)
    command = shlex.join(["qkablate", "train", *words])
    return [
        name,
        "–" if rate is None else f"{rate:.3g}",
        f"{done}/{len(records)}",
        " · ".join(every),
        command,
    ]


def _format_status(record: Record) -> str:
    """Format the status of a run, with the reason of a failure."""
    return f"{record.status}: {record.reason[:200]}" if record.reason else record.status


def make_environment_rows(section: Section) -> list[list[str]]:
    """Return the software, hardware and data of the runs."""
    began = [record for record in section.all_records if record.facts.get("device")]
    rows = []
    for key, what in _FACTS.items():
        found = Counter(str(record.facts.get(key)) for record in began)
        values = [
            f"{value} ({format_count(n, 'run')})" if len(found) > 1 else value
            for value, n in found.most_common()
        ]
        rows.append([what, format_list(values, 6) if values else "unknown: no run has a result"])
    return rows


_FACTS = {
    "code": "qkablate source hash",
    "torch": "torch",
    "cpu": "CPU",
    "device": "device",
    "precision": "precision",
    "matmul": "matmul by",
    "kernel": "attention kernel",
    "threads": "threads",
    "packed": "runs side by side",
    "data_fingerprint": "data fingerprint",
}

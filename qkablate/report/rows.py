"""Rows of the report's tables: verdicts, audit, runs, environment."""

import shlex
from collections import Counter
from dataclasses import dataclass

from qkablate.analysis.comparison.audit import INVALID, MARKS, STATES, WARNING, worst_state
from qkablate.analysis.comparison.summary import GapSummary
from qkablate.analysis.study.study import Entry, Record
from qkablate.report.charts.curves import MAX_RUNS
from qkablate.report.section import Section
from qkablate.report.text.forms import format_inspect_command
from qkablate.report.text.numbers import format_gap_summary, format_loss
from qkablate.report.text.table import format_known
from qkablate.report.text.tables import (
    format_accuracy,
    format_p,
    format_percent_more,
    replace_name,
)
from qkablate.table import format_count, format_list, format_short

COLUMNS = [
    *("arm", "gap, nats [95 %]", "verdict", "parameters", "FLOPs per token", "pairs n", "p (Holm)"),
    *("detectable, nats", "test loss, nats [95 %]", "runs done"),
    *("KV bytes per token", "variant", "d_model", "heads"),
]
RUN_COLUMNS = ["run", "status", "seed", "lr", "validation loss", "test loss", "command"]
ARM_COLUMNS = ["arm", "lr", "done", "test loss of every seed", "command"]
_MAX_PROBLEMS = 10  # listed per status
_MAX_PASSED, _MAX_WARNINGS = 4, 40  # audit results listed per check


@dataclass(frozen=True)
class Cell:
    """A cell's text and the key it is sorted by."""

    text: str
    key: float | str | None = None  # None sorts last


def verdict_columns(section: Section) -> list[str]:
    """Return the columns of the verdicts; those of tasks have the accuracy, too."""
    has_accuracy = any(entry.accuracy is not None for entry in section.study.entries)
    return [*COLUMNS, *(["accuracy (chance)"] if has_accuracy else [])]


def make_verdict_rows(section: Section) -> list[list[Cell]]:
    """Return one row per arm, baselines included."""
    gaps = {gap.arm: gap for gap in section.summary.gaps}
    baselines = {gap.baseline for gap in section.summary.gaps}
    rows = (_verdict_row(e, gaps.get(e.name), baselines) for e in section.study.entries)
    return [row[: len(verdict_columns(section))] for row in rows]


def _verdict_row(entry: Entry, gap: GapSummary | None, baselines: set[str]) -> list[Cell]:
    arm, model, sample = entry.arm, entry.arm.config.model, entry.sample
    kv_bytes = None if arm.kv_cache_numbers is None else 2 * arm.kv_cache_numbers
    params = _format_size(arm.params, f"{arm.params:,}", gap.params_percent if gap else None)
    flops = _format_size(arm.flops, format_short(arm.flops), gap.flops_percent if gap else None)
    mean = n = p = detectable = Cell("–")
    word = "baseline" if entry.name in baselines else "compared with none"
    verdict = Cell(word, word)
    if gap is not None:
        state = worst_state(gap.audit)
        mark = f" {MARKS[state]}" if state in (WARNING, INVALID) else ""
        mean = Cell(format_gap_summary(gap) if gap.n else "–", gap.mean)
        verdict = Cell(f"{gap.verdict}{mark}", gap.verdict)
        n = Cell(str(gap.n), gap.n)
        p = Cell(format_p(gap.p_holm, ".2g"), gap.p_holm)
        detectable = Cell(format_known(gap.detectable, ".2g"), gap.detectable)
    accuracy = f"{format_accuracy(entry.accuracy)} ({format_accuracy(entry.chance)})"
    return [
        *(Cell(entry.name, entry.name), mean, verdict),
        *(Cell(params, arm.params or None), Cell(flops, arm.flops or None), n, p, detectable),
        Cell(format_loss(sample), sample.mean) if sample.n else Cell("–"),
        Cell(_format_done(entry), len(entry.losses)),
        Cell(format_known(kv_bytes, ","), kv_bytes),
        *(Cell(str(value), value) for value in (arm.variant, model.d_model, model.heads)),
        Cell(accuracy, entry.accuracy),
    ]


def _format_size(number: float, text: str, percent: float | None) -> str:
    """Format a size with its difference to the baseline; zero is unknown."""
    if not number:
        return "–"
    return text if percent is None else f"{text} ({format_percent_more(percent)})"


def _format_done(entry: Entry) -> str:
    """Format the runs that are done: 6/6, or 4/6 (1 diverged, 1 failed)."""
    statuses = Counter(record.status for record in entry.records.values())
    rest = [f"{n} {status}" for status, n in statuses.items() if status != "done"]
    text = f"{statuses['done']}/{len(entry.records)}"
    return f"{text} ({', '.join(rest)})" if rest else text


def find_problems(section: Section) -> list[str]:
    """Return a line per run or file that failed or could not be read."""
    lines = [f"could not be read: {line}" for line in section.study.unread]
    for distance in section.summary.function_distance:
        lines += [f"function distance: {fault}" for fault in distance.faults]
    for status in ("damaged", "failed", "waiting"):
        records = [r for r in section.study.all_records if r.status == status]
        if status == "waiting":  # it has a reason if its folder exists and cannot be read
            records = [r for r in records if r.reason]
        lines += [f"{r.folder.name}: {_format_status(r)}" for r in records[:_MAX_PROBLEMS]]
        if (more := len(records) - _MAX_PROBLEMS) > 0:
            lines.append(f"{more:,} more {status}: see the table of runs below")
    _ = section.heads, section.examples, section.inspections  # reading them records their problems
    for record in section.study.records:
        _ = record.loss_curves
        lines += [f"{record.folder.name}: {problem}" for problem in record.problems]
    return lines


def make_audit_rows(section: Section) -> list[list[str]]:
    """Return each result of the audit once with its arms, the worst first."""
    gaps = section.summary.gaps
    arms_of: dict[tuple[str, str, str], list[str]] = {}
    for gap in gaps:
        for check in gap.audit:
            text = replace_name(check.message, gap.arm, "the arm")
            text = replace_name(text, gap.baseline, "the baseline")
            arms_of.setdefault((check.state, check.name, text), []).append(gap.arm)
    by_check: dict[tuple[str, str], list[list[str]]] = {}
    for (state, name, text), arms in sorted(arms_of.items(), key=lambda item: -len(item[1])):
        names = "all" if len(arms) == len(gaps) else format_list(arms)
        row = [f"{MARKS[state] or '✓'} {state}", name, text, names]
        by_check.setdefault((state, name), []).append(row)
    audit = []
    for (state, name), rows in sorted(by_check.items(), key=lambda item: -STATES.index(item[0][0])):
        most = _MAX_WARNINGS if state in (WARNING, INVALID) else _MAX_PASSED
        audit += rows[:most]
        if more := len(rows) - len(rows[:most]):
            audit.append([rows[0][0], name, f"{more} more: qkablate results --json", ""])
    return audit


def make_run_rows(section: Section) -> tuple[list[str], list[list[str]]]:
    """Return header and one row per run, or per arm if there are many; the command comes last."""
    study, records = section.study, section.study.all_records
    if len(records) <= MAX_RUNS:
        return RUN_COLUMNS, [
            [
                record.folder.name + " (tuning)" * record.run.tuning,
                _format_status(record),
                record.seed_label.removeprefix("s"),
                str(study.arms[record.run.arm].rates_of(record.run)),
                *map(format_known, (record.val, record.test)),
                _format_command(section, record),
            ]
            for record in records
        ]
    arms = [(entry.name, entry.rates, entry.records) for entry in study.entries if entry.records]
    arms += [(f"{arm} (tuning)", rates, by_seed) for (arm, rates), by_seed in study.tuning.items()]
    return ARM_COLUMNS, [
        _arm_row(section, name, str(rates), [*runs.values()]) for name, rates, runs in arms
    ]


def _arm_row(section: Section, name: str, rates: str, records: list[Record]) -> list[str]:
    """Return the row of an arm, with the command of its first run."""
    done = sum(record.status == "done" for record in records)
    outcomes = []
    for record in records:
        loss = record.val if record.run.tuning else record.test
        outcome = f"({_format_status(record)})" if loss is None else f"{loss:.4f}"
        outcomes.append(f"{record.seed_label} {outcome}")
    command = _format_command(section, records[0])
    return [name, rates, f"{done}/{len(records)}", " · ".join(outcomes), command]


def _format_command(section: Section, record: Record) -> str:
    if record.status == "imported":
        return format_inspect_command(section)
    return shlex.join(["qkablate", "train", *section.study.overrides_of(record.run)])


def _format_status(record: Record) -> str:
    """Format the status of a run, with the reason of a failure."""
    return f"{record.status}: {record.reason[:200]}" if record.reason else record.status


def make_environment_rows(section: Section) -> list[list[str]]:
    """Return the software, hardware and data of the runs."""
    started = [record for record in section.study.all_records if record.facts.get("device")]
    rows = []
    for key, label in _FACTS.items():
        counts = Counter(str(record.facts.get(key)) for record in started)
        values = [
            f"{value} ({format_count(n, 'run')})" if len(counts) > 1 else value
            for value, n in counts.most_common()
        ]
        rows.append([label, format_list(values, 6) or "unknown: no run has a result"])
    return rows


_FACTS = {
    "code": "qkablate source hash",
    "torch": "torch",
    "cpu": "CPU",
    "gpu": "GPU",
    "device": "device",
    "precision": "precision",
    "matmul": "matmul by",
    "kernel": "attention kernel",
    "threads": "threads",
    "packed": "runs side by side",
    "data_fingerprint": "data fingerprint",
}

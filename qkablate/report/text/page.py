"""The report as Markdown, without charts."""

from collections.abc import Sequence

from qkablate.report import rows
from qkablate.report.page import format_status, make_notes
from qkablate.report.section import Section
from qkablate.report.text.claims import (
    format_claim,
    format_details,
    format_seeds_needed,
    make_part_table,
)
from qkablate.report.text.distance import make_distance_table
from qkablate.report.text.summary import summarize
from qkablate.report.text.table import Code, Table, escape_markdown, format_markdown


def render_markdown(sections: Sequence[Section]) -> str:
    """Return the report as Markdown."""
    return "\n\n".join(map(_render_section, sections)) + "\n"


def _render_section(section: Section) -> str:
    judgement = section.judgement
    parts = [f"# {escape_markdown(section.title)}", escape_markdown(format_status(section))]
    if judgement is not None:
        parts.append(f"**{judgement.word}** {escape_markdown(judgement.claim.says)}")
    parts += map(escape_markdown, summarize(section))
    parts += [f"- {escape_markdown(line)}" for line in rows.find_problems(section)]
    if judgement is not None:
        said = [escape_markdown(line) for line in format_claim(judgement.claim)]
        columns, found = make_part_table(judgement)
        more = [*judgement.exploratory, *format_details(judgement), *format_seeds_needed(judgement)]
        if found:
            parts.append(format_markdown(Table("parts of the claim", columns, found, more)))
        parts.append("\n".join(f"- {line}" for line in said))
    verdicts = [[cell.text for cell in row] for row in rows.make_verdict_rows(section)]
    every = [Table("verdicts", rows.COLUMNS, verdicts, make_notes(section))]
    every.append(Table("audit", ["", "check", "result", "arms"], rows.make_audit_rows(section)))
    columns, runs = rows.make_run_rows(section)
    every += map(make_distance_table, section.summary.function_distance)
    every.append(Table("runs", columns, [[*run[:-1], Code(run[-1])] for run in runs]))
    left_out = [[one.arm, one.control, one.reason] for one in section.study.left_out]
    every.append(Table("left out", ["arm", "control", "reason"], left_out))
    every.append(Table("environment", ["setting", "value"], rows.make_environment_rows(section)))
    parts += [format_markdown(table) for table in every if table.rows]
    return "\n\n".join(parts)

"""The report as Markdown, without charts."""

from collections.abc import Sequence

from qkablate.report import rows
from qkablate.report.page import format_status, make_notes
from qkablate.report.section import Section
from qkablate.report.text.claims import format_claim, format_conditions, make_claim_table
from qkablate.report.text.forms import make_form_tables
from qkablate.report.text.setting import format_question, format_setting
from qkablate.report.text.summary import list_gaps, summarize
from qkablate.report.text.table import Code, Table, escape_markdown, format_markdown
from qkablate.report.text.tables import make_distance_table


def render_markdown(sections: Sequence[Section]) -> str:
    """Return the report as Markdown."""
    return "\n\n".join(map(_render_section, sections)) + "\n"


def _render_section(section: Section) -> str:
    judgement = section.judgement
    parts = [f"# {escape_markdown(section.title)}"]
    lines = [format_question(section) if judgement is None else "", format_setting(section)]
    parts += map(escape_markdown, filter(None, [*lines, format_status(section)]))
    if judgement is not None:
        unless = f"unless {format_conditions(judgement)}: " if judgement.unless else ""
        parts.append(f"**{judgement.headline}** {escape_markdown(unless + judgement.claim.says)}")
    if gaps := list_gaps(section):
        parts.append("\n".join(f"- {escape_markdown(line)}" for line in gaps))
    parts += map(escape_markdown, summarize(section))
    parts += [f"- {escape_markdown(line)}" for line in rows.find_problems(section)]
    if judgement is not None:
        if (table := make_claim_table(judgement)).rows:
            parts.append(format_markdown(table))
        lines = format_claim(judgement.claim)
        parts.append("\n".join(f"- {escape_markdown(line)}" for line in lines))
    verdicts = [[cell.text for cell in row] for row in rows.make_verdict_rows(section)]
    columns, runs = rows.make_run_rows(section)
    left_out = [[arm.arm, arm.control, arm.reason] for arm in section.study.left_out]
    tables = [
        Table("verdicts", rows.verdict_columns(section), verdicts, make_notes(section)),
        Table("audit", ["", "check", "result", "arms"], rows.make_audit_rows(section)),
        *map(make_distance_table, section.summary.function_distance),
        *make_form_tables(section),
        Table("runs", columns, [[*run[:-1], Code(run[-1])] for run in runs]),
        Table("left out", ["arm", "control", "reason"], left_out),
        Table("environment", ["setting", "value"], rows.make_environment_rows(section)),
    ]
    parts += [format_markdown(table) for table in tables if table.rows]
    return "\n\n".join(parts)

"""The report as text, for a README or a paper: the same numbers, without pictures."""

from collections.abc import Sequence

from qkablate.report import rows
from qkablate.report.page import notes, status
from qkablate.report.section import Chapter
from qkablate.report.text.claims import beside, claim_lines, part_table, settling
from qkablate.report.text.distance import apart_table
from qkablate.report.text.summary import answer
from qkablate.report.text.table import Code, Table, as_markdown, markdown


def text(chapters: Sequence[Chapter]) -> str:
    return "\n\n".join(map(_chapter, chapters)) + "\n"


def _chapter(chapter: Chapter) -> str:
    judgement = chapter.judgement
    parts = [f"# {as_markdown(chapter.title)}", as_markdown(status(chapter))]
    if judgement is not None:
        parts.append(f"**{judgement.word}** {as_markdown(judgement.claim.says)}")
    parts += map(as_markdown, answer(chapter))
    parts += [f"- {as_markdown(line)}" for line in rows.trouble(chapter)]
    if judgement is not None:
        said = [as_markdown(line) for line in claim_lines(judgement.claim)]
        columns, found = part_table(judgement)
        more = [*judgement.exploratory, *beside(judgement), *settling(judgement)]
        if found:
            parts.append(markdown(Table("parts of the claim", columns, found, more)))
        parts.append("\n".join(f"- {line}" for line in said))
    verdicts = [[cell.text for cell in row] for row in rows.verdicts(chapter)]
    every = [Table("verdicts", rows.COLUMNS, verdicts, notes(chapter))]
    every.append(Table("audit", ["", "check", "answer", "arms"], rows.audit(chapter)))
    columns, runs = rows.runs(chapter)
    every += map(apart_table, chapter.found["function_distance"])
    every.append(Table("runs", columns, [[*run[:-1], Code(run[-1])] for run in runs]))
    left_out = [[one.arm, one.control, one.reason] for one in chapter.study.manifest.left_out]
    every.append(Table("left out", ["arm", "control", "why"], left_out))
    every.append(Table("environment", ["what", "of the runs"], rows.surroundings(chapter)))
    parts += [markdown(table) for table in every if table.rows]
    return "\n\n".join(parts)

"""The table of the answers: verdicts, marks of what limits them, and notes on the marks."""

import re
from pathlib import Path

from qkablate.analysis.claims.parse import claim_names
from qkablate.analysis.comparison.audit import LIMITS
from qkablate.analysis.comparison.decision import BEFORE_NGRAMS, WITHOUT_CONTENT
from qkablate.report.study.answers import NOTES
from qkablate.report.study.page import PAGE, SNIPPET
from qkablate.report.study.questions import load_doubts
from qkablate.report.text.table import escape_markdown

ROOT = Path(__file__).parents[3]
STUDY = ROOT / "docs" / "study"
RATES, DOCUMENTS, CONTENT, NGRAMS = "¹²³⁴"  # what limits an answer
DOUBT, ALONE = "†‡"


def test_answers_are_those_of_the_verdicts():
    rows = (STUDY / SNIPPET).read_text(encoding="utf-8").splitlines()
    for name, answer in (
        ("directed", f"yes (SUPPORTED) {RATES} {ALONE}"),
        ("cross_needs_both", f"no (REFUTED in 1 part of 2) {RATES} {ALONE}"),
        ("one_projection_as_published", f"partly no (REFUTED in 1 part of 5) {RATES} {DOUBT}"),
        ("one_matrix", f"partly no (REFUTED in 5 parts of 6) {RATES} {CONTENT} {NGRAMS} {DOUBT}"),
        ("w_q_by_heads", f"partly no (EQUIVALENT) {RATES} {ALONE}"),
        ("w_q_necessary", f"no (EQUIVALENT) {CONTENT} {NGRAMS} {ALONE}"),
        ("qq_in_encoder", "undecided (UNDERPOWERED)"),
    ):
        (row,) = [row for row in rows if f" `{name}`, on " in row]
        assert f"| {answer} |" in row
    for mark, limit in zip((CONTENT, NGRAMS), (WITHOUT_CONTENT, BEFORE_NGRAMS), strict=True):
        assert sum(row.startswith(f"- {mark} {limit}: ") for row in rows) == 1


def test_doubts_stand_in_the_table_and_in_their_sections():
    table, *notes = (STUDY / SNIPPET).read_text(encoding="utf-8").split("\n\n")
    names = {slug.partition("-")[0] for slug in load_doubts()}
    assert {*re.findall(r"`(\w+)`, on [^\n]*†(?: ‡)? \|", table)} == names
    assert "† in doubt" in "".join(notes)
    page = (STUDY / PAGE).read_text(encoding="utf-8")
    for text in load_doubts().values():
        assert f"**In doubt:** {escape_markdown(text)}" in page


def test_questions_without_an_answer_are_named():
    text = (STUDY / SNIPPET).read_text(encoding="utf-8")
    answered = {*re.findall(r"`(\w+)`, on ", text)}
    (missing,) = re.findall(r"^Not answered yet: (.*)$", text, re.MULTILINE)
    assert {*re.findall(r"\? \(`(\w+)`\)", missing)} == {*claim_names()} - answered


def test_every_limit_of_a_verdict_is_explained():
    assert NOTES.keys() == LIMITS.keys()


def test_readme_has_the_table_of_the_answers():
    answers = (STUDY / SNIPPET).read_text(encoding="utf-8")
    assert answers in (ROOT / "README.md").read_text(encoding="utf-8")

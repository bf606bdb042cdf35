"""The report as text: the numbers of the page, in Markdown that no name can break."""

import html
import json
import re
import shlex

import pytest

from qkablate.analysis.study.standalone_runs import read_standalone_runs
from qkablate.report.rows import COLUMNS, RUN_COLUMNS, make_audit_rows, make_verdict_rows
from qkablate.report.section import Section
from qkablate.report.text.page import render_markdown
from qkablate.report.text.setting import format_question, format_setting
from qkablate.report.text.summary import summarize
from qkablate.report.text.table import Table, format_markdown

ONE = ("variant=standard,no_q", "seed=range(2)")
WORDS = ("<script>alert(1)</script>", '"><img src=x onerror=alert(1)>', "</script>", "${x}")
WORDS += ("{{7*7}}", "a | b", "two\nlines\n# and a title", "a\x1b[31mred", "a\u202eb", "a\u2028b")
HOSTILE = " ".join(WORDS)


def cells(line):
    assert line.startswith("| ")
    assert line.endswith(" |")
    return line.removeprefix("| ").removesuffix(" |").split(" | ")


def tables(page_text):
    """By the title above: the head, and the rows."""
    found = {}
    title = ""
    for line in page_text.splitlines():
        if line.startswith("### "):
            title = line.removeprefix("### ")
        elif line.startswith("|"):
            found.setdefault(title, []).append(cells(line))
    return {title: (head, rows) for title, (head, _, *rows) in found.items()}


def assert_sound(page_text):
    """Tables are whole, and nothing steers."""
    for title, (head, rows) in tables(page_text).items():
        for row in rows:
            assert len(row) == len(head), (title, row)
    assert all(line.isprintable() for line in page_text.split("\n"))
    assert not re.search(r"<[a-zA-Z/!]", page_text)
    return page_text


@pytest.fixture(scope="module")
def page_text(section):
    return render_markdown([section])


def test_text_begins_with_title_status_and_summary(section, page_text):
    assert_sound(page_text)
    title, question, setting, status, *_ = page_text.split("\n\n")
    assert title == f"# {section.title}"
    assert question == format_question(section)
    assert setting == format_setting(section)
    assert status.startswith("36 runs: 36 done")
    for sentence in summarize(section):
        assert sentence in page_text
        assert page_text.index(sentence) < page_text.index("### verdicts")


def test_verdicts_equal_those_of_the_page(section, page_text):
    head, rows = tables(page_text)["verdicts"]
    assert head == COLUMNS
    shown = [[html.unescape(cell) for cell in row] for row in rows]
    assert shown == [[cell.text for cell in row] for row in make_verdict_rows(section)]


def test_audit_equals_that_of_the_page(section, page_text):
    _, rows = tables(page_text)["audit"]
    assert rows == make_audit_rows(section)


def test_every_run_is_listed_with_its_command(section, page_text):
    head, rows = tables(page_text)["runs"]
    assert head == RUN_COLUMNS
    commands = [shlex.split(row[-1].strip("`")) for row in rows]
    assert commands == [
        ["qkablate", "train", *section.study.overrides_of(record.run)]
        for record in section.study.records
    ]


def test_environment_is_listed(page_text):
    _, rows = tables(page_text)["environment"]
    assert ["CPU", "a CPU"] in rows


def test_sections_are_consecutive(section, claimed, page_text):
    both = render_markdown([section, claimed(0.0)])
    assert both.startswith(page_text.rstrip("\n"))
    assert re.findall(r"(?m)^# .*", both) == [f"# {section.title}", "# claim mine (small)"]


def test_claim_is_shown_with_its_verdict(claimed):
    section = claimed(0.0)
    found = assert_sound(render_markdown([section]))
    unless = "unless one run in 14 of no_q-d16-h2 is an outlier by 0.12 nats"
    assert f"**SUPPORTED at these rates** {unless}: Keys alone are enough." in found
    (row,) = tables(found)["parts of the claim"][1]
    assert row[0] == "within"
    assert row[-1] == "SUPPORTED"
    assert "no_q is not worse than standard by 0.01" in found
    waiting = assert_sound(render_markdown([claimed(0.0, ended=3)]))
    assert "**INCOMPLETE**" in waiting


def test_sweep_without_results_has_a_text(cached_world, section_of):
    found = assert_sound(render_markdown([section_of(cached_world(*ONE))]))
    assert "4 runs: 4 waiting" in found
    assert "There is no completed pair of runs" in found


def test_study_without_runs_has_a_text(tmp_path):
    (tmp_path / "nothing-here").mkdir()
    study = read_standalone_runs([tmp_path / "nothing-here"])
    found = assert_sound(render_markdown([Section("nothing", "read from nowhere", study)]))
    assert "nothing-here: its config.yaml cannot be read" in found


# Hostile names


def test_hostile_text_in_folders_stays_in_its_cell(cached_world, loss_of, section_of):
    world = cached_world(*ONE).finish(loss_of)
    for number, run in enumerate(world.runs()):
        words = dict.fromkeys(("kernel", "precision", "device", "data_fingerprint"), HOSTILE)
        words |= {"init": {"mode": HOSTILE, "match": HOSTILE}}
        if run.changes["seed"] == 1:
            words |= {"status": "failed", "error": HOSTILE}
        else:
            words |= {"loss": {"train": 2.0, "val": 2.0, "test": loss_of(run)}}
        world.write(run, words)
        environment = {"versions": {"torch": HOSTILE}, "machine": {"cpu": HOSTILE}}
        (world.run_folder(run) / "environment.json").write_text(json.dumps(environment))
        name = HOSTILE.replace("/", "∕")
        world.run_folder(run).rename(world.run_folder(run).with_name(f"{name}{number}-{run.id}"))
    section = section_of(world)
    found = assert_sound(render_markdown([Section(HOSTILE, HOSTILE, section.study)]))
    assert len(re.findall(r"(?m)^# ", found)) == 1
    assert len(tables(found)["runs"][1]) == 4
    assert "alert(1)" in found  # told, as words


def test_hostile_text_in_a_claim_is_escaped_in_markdown(claimed):
    found = assert_sound(render_markdown([claimed(0.0, says=HOSTILE)]))
    assert len(re.findall(r"(?m)^# ", found)) == 1
    assert "alert(1)" in found


@pytest.mark.parametrize("path", ["a  b.txt", "a<b>.txt", "a`b.txt", "a ``b`` c.txt"])
def test_command_is_verbatim_code(cached_world, section_of, path):
    section = section_of(cached_world(*ONE))
    for arm in section.study.arms.values():
        arm.overrides["data.path"] = path
    (row, *_) = tables(render_markdown([section]))["runs"][1]
    ticks, code = re.fullmatch(r"(`+)(.*)\1", row[-1]).groups()
    assert ticks not in re.findall("`+", code)
    first, *_ = section.study.records
    words = section.study.overrides_of(first.run)
    assert shlex.split(code) == ["qkablate", "train", *words]


def test_names_cannot_become_images_or_links(cached_world, loss_of, section_of):
    """A viewer of the text would load them over the network."""
    world = cached_world(*ONE).finish(loss_of)
    first, *_ = world.runs()
    world.write(first, {"status": "failed", "error": "![a](//x.invalid/a.png) [b](//x.invalid)"})
    assert not re.search(r"(?<!\\)\]\(", render_markdown([section_of(world)]))


def test_only_columns_of_numbers_are_aligned_right():
    rows = [["a", "3 done", "[1, 2]", "–"], ["b", "none", "× 0.3", "-1.0"]]
    table = Table("t", ["arm", "state", "interval", "gap"], rows)
    assert "\n| --- | --- | ---: | ---: |\n" in format_markdown(table)

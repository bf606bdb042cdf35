"""Heat maps of forms, and the other parts of the report of an imported run."""

import json

import pytest

from qkablate.analysis.study.standalone_runs import read_standalone_runs
from qkablate.report.charts import make_charts
from qkablate.report.page import render_page
from qkablate.report.render import render_chart
from qkablate.report.rows import find_problems
from qkablate.report.section import Section
from qkablate.report.text.page import render_markdown
from qkablate.runs.inspection import FILE_NAME


@pytest.fixture(scope="module")
def imported(tmp_path_factory):
    """Return an imported run whose forms were measured."""
    from qkablate.cli.inspected_forms import keep_measures, measure_all_forms
    from qkablate.diagnostics import DiagnosticPanel
    from qkablate.pretrained.import_run import import_run
    from qkablate.pretrained.repository import find_repository
    from qkablate.training.recorders.diagnostics import choose_inputs, compute_attention_map
    from qkablate.training.warm_start.restore import restore
    from tests.pretrained.test_import_run import write_published

    folder = tmp_path_factory.mktemp("imported")
    write_published(folder / "published", vocabulary=256)
    run = import_run(find_repository(str(folder / "published")), str(folder / "out")).folder
    restored = restore(run)
    inputs, source = choose_inputs(restored, "auto")
    row = DiagnosticPanel(restored.model, *inputs, starts=iter(())).row()
    tokens_T, a_LHTT = compute_attention_map(restored.model, inputs[0][0], "cpu")
    text = {"tokens": [f"<{token}>" for token in tokens_T], "attention": a_LHTT.tolist()}
    keep_measures(restored, source, row, measure_all_forms(restored, inputs), text)
    return run


@pytest.fixture
def content(imported):
    """Return the file, and write it back after the test."""
    path = imported / FILE_NAME
    kept = path.read_text()
    yield json.loads(kept)
    path.write_text(kept)


def section_of(run):
    return Section(run.name, "read from here", read_standalone_runs([run]))


def test_maps_have_a_cell_for_each_form_and_layer(imported, content):
    charts = {chart.name: chart for chart in make_charts(section_of(imported))}
    assert {*charts} == {"forms", "spectra", "output-spectra", "head-maps", "attention"}
    forms, chart = content["forms"]["forms"], charts["forms"]
    assert [panel.title for panel in chart.panels] == ["scores of B_h", "output of M_h"]
    for panel, side in zip(chart.panels, ("scores", "output"), strict=True):
        shown = {(r["variant"], r["layer"]): r["error"] for r in panel.spec["data"]["values"]}
        assert shown == {
            (form["variant"], i): pytest.approx(layer[side], rel=0.01)
            for form in forms
            for i, layer in enumerate(form["layers"])
        }
    assert "random tokens" in chart.caption
    assert [row[0] for row in chart.table.rows] == [form["variant"] for form in forms]
    assert render_chart(chart, "small", "svg", "").startswith(b"<svg")


def test_page_says_that_the_run_was_imported(imported):
    section = section_of(imported)
    assert find_problems(section) == []
    for page in (render_page([section], "small"), render_markdown([section])):
        assert "Imported weights" in page
        assert "imported · 2 layers" in page
        assert "merged_w" in page
        assert "1 run: 1 imported" in page
        assert "No run is done" not in page
        assert "qkablate train" not in page


def test_missing_measures_name_the_command(imported, content):
    (imported / FILE_NAME).unlink()
    page = render_markdown([section_of(imported)])
    assert f"qkablate inspect {imported.name} --variants" in page
    del content["forms"]
    (imported / FILE_NAME).write_text(json.dumps(content))
    section = section_of(imported)
    assert f"qkablate inspect {imported.name} --variants" in render_markdown([section])
    assert "forms" not in {chart.name for chart in make_charts(section)}


def test_heads_are_in_the_order_of_the_model(imported, content):
    charts = {chart.name: chart for chart in make_charts(section_of(imported))}
    panels = {panel.title: panel.spec["data"]["values"] for panel in charts["head-maps"].panels}
    for title, (part, measure) in {
        "effective rank of B": ("qk", "effective_rank"),
        "symmetry of M": ("ov", "symmetry"),
        "directionality of M": ("ov", "directionality"),
        "balance of the factors of B": ("qk", "balance"),
    }.items():
        shown = {(cell["layer"], cell["head"]): cell["value"] for cell in panels[title]}
        rows = content["diagnostics"][part][measure]
        known = {(i, j): value for i, row in enumerate(rows) for j, value in enumerate(row)}
        assert shown == {key: pytest.approx(value, rel=0.01) for key, value in known.items()}
    titles = [panel.title for panel in charts["output-spectra"].panels]
    assert titles == ["layer 0", "layer 1"]


def test_attention_is_that_of_the_text(imported, content):
    charts = {chart.name: chart for chart in make_charts(section_of(imported))}
    assert "As imported, on" in charts["attention"].caption
    content["text"] = None
    (imported / FILE_NAME).write_text(json.dumps(content))
    assert "attention" not in {chart.name for chart in make_charts(section_of(imported))}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"weights": "0" * 64}, "it was measured of other weights"),
        ({"forms": {"forms": []}}, "its forms are not what"),
        ({"diagnostics": 7}, "it is not what `qkablate inspect` writes"),
        ({"tokens": 7}, "it is not what `qkablate inspect` writes"),
        ({"text": 7}, "its attention is not what"),
        ({"text": {"tokens": ["a", "b"], "attention": [[[[255, 0], [0]]]]}}, "its attention is"),
        ({"text": {"tokens": ["a"], "attention": [[[[2.5]]]]}}, "its attention is not what"),
    ],
)
def test_damaged_or_foreign_measures_are_one_line(imported, content, change, reason):
    (imported / FILE_NAME).write_text(json.dumps(content | change))
    section = section_of(imported)
    (problem,) = find_problems(section)
    assert problem.startswith(f"{imported.name}: {FILE_NAME}: {reason}")
    assert make_charts(section) == []
    assert f"qkablate inspect {imported.name} --variants" in render_page([section], "small")

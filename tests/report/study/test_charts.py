"""Charts of several claims."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from qkablate.analysis.claims.claim import Comparison, PartSpec
from qkablate.analysis.claims.judgement import PartJudgement
from qkablate.analysis.claims.samples import Median
from qkablate.analysis.claims.verdict import Part
from qkablate.analysis.comparison.decision import Verdict
from qkablate.analysis.stats import Sample
from qkablate.report.study.charts import answers_chart, costs_chart


def answer(*values, kind="worse", arm="no_q", against="standard", word="SUPPORTED"):
    """Return a claim that has ended, of one part with a margin of 0.01."""
    sides = {"variant": arm}, {"variant": against}
    spec = PartSpec(kind, 0.01, *sides, "gap", "tokens", "longest")
    comparison = Comparison("part", spec, "part", "text", [])
    judged = PartJudgement(
        Part("part", kind, 0.01, Sample(values)), Verdict(word), comparison, [], []
    )
    judgement = SimpleNamespace(has_ended=True, parts=[judged], alpha=0.05)
    return SimpleNamespace(claim=SimpleNamespace(name="claim"), judgement=judgement)


def draw(claim):
    chart = answers_chart([claim])
    (row,) = chart.panels[0].spec["data"]["values"]
    return chart, row


@pytest.mark.parametrize(
    ("values", "ends", "estimate"),
    [
        ((0.019, 0.02, 0.021), (False, False), 2.0),
        ((-0.05, 0.02, 0.15), (True, True), 4.0),
        ((0.19, 0.2, 0.21), (False, True), None),  # a point would stand at another number
    ],
)
def test_intervals_beyond_the_edge_of_the_answers_are_pale(values, ends, estimate):
    chart, row = draw(answer(*values))
    assert (row["open_below"], row["open_above"]) == ends
    assert row["estimate"] == (None if estimate is None else pytest.approx(estimate))
    assert -6 <= row["low"] <= row["high"] <= 6
    points = next(x for x in chart.panels[0].spec["layer"] if x["mark"]["type"] == "point")
    assert points["encoding"]["x"]["field"] == "estimate"
    assert ("Pale: beyond 6 margins" in chart.caption) is any(ends)


@pytest.mark.parametrize(
    ("kind", "claimed"),
    [
        ("worse", (1, 7)),
        ("noninferior", (-7, 1)),
        ("better", (-7, -1)),
        ("equivalent", (-1, 1)),
    ],
)
def test_claimed_range_is_shaded(kind, claimed):
    _, row = draw(answer(0.019, 0.02, 0.021, kind=kind))
    assert (row["from"], row["to"]) == claimed


def test_costs_are_those_of_the_variant_whatever_a_part_compares():
    """A part that standard is not worse than no_q claims that no_q does not gain a margin."""
    (_, direct), (_, turned) = (
        draw(answer(0.019, 0.02, 0.022)),
        draw(answer(-0.019, -0.02, -0.022, kind="noninferior", arm="standard", against="no_q")),
    )
    for key in ("gap", "low", "high", "estimate", "arm"):
        assert direct[key] == turned[key]
    assert (turned["from"], turned["to"]) == (-1, 7)
    assert direct["arm"] == "no_q (claim)"


def test_parts_are_below_their_question():
    first, second = answer(0.02, 0.03, 0.04), answer(0.02, 0.03, 0.04, word="UNDERPOWERED")
    first.claim.name = "directed"
    spec = answers_chart([first, second]).panels[0].spec
    y = next(layer["encoding"]["y"] for layer in spec["layer"] if "y" in layer["encoding"])
    rows = ["Is Q = K enough?", "no_q (directed)", "  ", "Other claims", "no_q (claim)"]
    assert y["scale"]["domain"] == rows
    assert [row["is_decided"] for row in spec["data"]["values"]] == [True, False]


def test_claims_without_a_verdict_have_no_picture():
    claim = answer(0.02, 0.03, 0.04)
    claim.judgement.has_ended = False
    assert answers_chart([claim]) is None


def test_costs_on_text_are_those_of_the_claims(studied):
    chart, setting = costs_chart(studied)
    assert setting == "stdlib in bytes · 2 layers · d_model 64 · 2,000 steps"
    panel = chart.panels[0].spec
    rows = {row["arm"]: row for row in panel["data"]["values"]}
    assert not any("content_with_rope" in name for name in rows)  # of another standard
    row = rows["no_q, 4 heads, -8% parameters (w_q_necessary)"]
    assert row["estimate"] == "-0.0108 [-0.0175, -0.0039]"
    equal = rows["no_o at equal params, 4 heads (break_even)"]  # the claim is about standard
    assert equal["estimate"] == "-0.0184 [-0.0278, -0.0090]"
    assert "(n = 16)" in chart.caption
    limits = "at these rates, on these documents, where content is not shown to matter"
    assert chart.caption.endswith(f"This holds {limits}, before the model beats an n-gram.")
    # What is far beyond is written, and not drawn.
    floor = "uniform, the floor (w_q_necessary)"
    tied = "tied_qkv, 4 heads, -17% parameters (one_matrix)"
    neither = "no_qk, 4 heads, -17% parameters (without_both)"
    assert not {floor, tied, neither} & rows.keys()
    y = next(layer["encoding"]["y"] for layer in panel["layer"] if "y" in layer["encoding"])
    assert y["scale"]["domain"][-1] == floor
    assert tied in y["scale"]["domain"]
    arrows = [layer for layer in panel["layer"] if "→" in str(layer["encoding"].get("text"))]
    (beyond,) = ({row["arm"] for row in arrow["data"]["values"]} for arrow in arrows)
    assert beyond == {floor, tied, neither}
    x = next(layer["encoding"]["x"] for layer in panel["layer"] if layer["mark"]["type"] == "point")
    assert x["scale"]["domain"][1] >= 0.03  # there is something beside the margin


@pytest.mark.parametrize(
    ("name", "arm", "estimate"),
    [
        ("w_q_necessary", "no_q, 4 heads, -8% parameters (w_q_necessary)", "-0.0108 [-0.0175, ∞)"),
        ("break_even", "no_o at equal params, 4 heads (break_even)", "-0.0184 (−∞, -0.0090]"),
    ],
)
def test_cost_is_unbounded_where_runs_diverged(studied, name, arm, estimate):
    """The second claim is about standard: what is above is below in the cost."""
    (claim,) = (s for s in studied if s.claim.name == name)
    parts = [
        replace(judged, part=replace(judged.part, open_above=True))
        for judged in claim.judgement.parts
    ]
    chart, _ = costs_chart([replace(claim, judgement=replace(claim.judgement, parts=parts))])
    rows = {row["arm"]: row for row in chart.panels[0].spec["data"]["values"]}
    assert rows[arm]["estimate"] == estimate
    assert "runs diverged, so the interval is unbounded" in chart.caption


def test_two_claims_with_one_arm_have_two_costs(studied):
    (claim,) = (s for s in studied if s.claim.name == "w_q_necessary")
    once, twice = costs_chart([claim]), costs_chart([claim, claim])
    domains = [chart.panels[0].spec["layer"][1]["encoding"] for chart, _ in (once, twice)]
    assert domains[0] == domains[1]  # the floor does not compress the others
    counts = [len(chart.panels[0].spec["data"]["values"]) for chart, _ in (once, twice)]
    assert counts == [2, 4]


def test_claims_about_tasks_and_translation_have_no_cost_on_text(studied):
    others = [s for s in studied if s.claim.name in ("directed", "encoder_translation")]
    assert len(others) == 2
    assert costs_chart(others) is None


def test_parts_with_other_measures_have_rows_of_their_own():
    claim = answer(0.02, 0.03, 0.04)
    spec = PartSpec(
        "better", 0.01, {"variant": "no_q"}, {"variant": "standard"}, "seconds", "tokens", "longest"
    )
    comparison = Comparison("time", spec, "time", "text", [])
    part = Part("time", "better", 0.01, Median((-0.2, -0.1, -0.1, -0.1, -0.05)))
    claim.judgement.parts.append(PartJudgement(part, Verdict("SUPPORTED"), comparison, [], []))
    rows = answers_chart([claim]).panels[0].spec["data"]["values"]
    assert [row["arm"] for row in rows] == ["no_q (claim: part)", "no_q (claim: time)"]


def test_a_margin_of_zero_is_drawn_in_units_of_the_interval():
    claim = answer(-0.02, -0.03, -0.04, kind="better")
    claim.judgement.parts[0] = replace(
        claim.judgement.parts[0], part=Part("part", "better", 0, Sample((-0.02, -0.03, -0.04)))
    )
    _, row = draw(claim)
    assert row["low"] == -1
    assert (row["from"], row["to"]) == (-7, 0)

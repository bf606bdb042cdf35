"""The picture of one text's attention: the numbers of the files, where runs have them."""

import json
import os
from dataclasses import replace
from xml.etree import ElementTree

import numpy as np
import pytest
import vl_convert

from qkablate.analysis.study.attention_maps import decode_tokens
from qkablate.compose.configs import make_config, open_hydra
from qkablate.report.charts import make_charts
from qkablate.report.charts.attention import make_attention_chart
from qkablate.report.page import render_page
from qkablate.report.render import render_chart
from qkablate.report.rows import find_problems
from qkablate.runs import attention_map
from qkablate.runs.attention_map import AttentionMapHeader

WORDS = ("variant=standard,no_q", "seed=range(3)", "model.layers=2")
TEXT = "the cat\n"
BYTES = tuple(TEXT.encode())


def previous(run, layers=2, heads=2, tokens=8):
    """All look at the token before; no_q's head 1 of layer 0 at the first, by 60 of 100."""
    a_LHTT = np.zeros((layers, heads, tokens, tokens))
    queries = np.arange(1, tokens)
    a_LHTT[..., 0, 0] = 1
    a_LHTT[..., queries, queries - 1] = 1
    if run.arm.startswith("no_q"):
        a_LHTT[0, 1] *= 0.4
        a_LHTT[0, 1, :, 0] += 0.6
    return a_LHTT


def exemplify(world, of=previous, tokens=BYTES):
    for run in world.runs():
        arm = world.manifest.arms[run.arm]
        about = AttentionMapHeader(
            run.id, int(arm.config.train.steps), arm.facts["data_fingerprint"]
        )
        a_LHTT = attention_map.quantize(of(run))
        attention_map.write_attention_map(
            world.run_folder(run), about, np.array(tokens)[: a_LHTT.shape[-1]], a_LHTT
        )
        (world.run_folder(run) / "tokenizer.json").write_text('{"name": "bytes"}')
    return world


@pytest.fixture(scope="module")
def make_recorded_world(make_world, loss_of):
    def make(of=previous, words=WORDS, **more):
        return exemplify(make_world(*words).finish(loss_of), of, **more)

    return make


@pytest.fixture(scope="module")
def section(make_recorded_world, section_of):
    return section_of(make_recorded_world())


def chart_of(section):
    return next((own for own in make_charts(section) if own.name == "attention"), None)


def cells(panel, head="head 0", layer="layer 0"):
    rows = panel.spec["data"]["values"]
    own = [row for row in rows if (row["layer"], row["head"]) == (layer, head)]
    return {(row["q"], row["k"]): row["share"] for row in own}


def test_chart_compiles_and_is_rendered(section):
    chart = chart_of(section)
    for panel in chart.panels:
        assert vl_convert.vegalite_to_vega(panel.spec)["marks"]
        json.dumps(panel.spec, allow_nan=False)
    text = render_chart(chart, section.title, "svg").decode()
    assert ElementTree.fromstring(text).tag.endswith("svg")
    assert "var(" not in text
    assert render_chart(chart, section.title, "png").startswith(b"\x89PNG")


def test_each_arm_shows_the_maps_of_its_first_run(section):
    chart = chart_of(section)
    assert [panel.title for panel in chart.panels] == ["standard, s0", "no_q, s0"]
    expected = {(0, 0): 100} | {(i, i - 1): 100 for i in range(1, 8)}
    assert cells(chart.panels[0]) == cells(chart.panels[1], layer="layer 1") == expected
    own = cells(chart.panels[1], head="head 1")
    assert (own[7, 0], own[7, 6], own[1, 0]) == (60, 40, 100)


def test_caption_contains_the_text_and_a_table_the_mean_weights(section):
    chart = chart_of(section)
    assert "“the cat\\n”" in chart.caption
    standard, no_q = chart.table.rows
    assert chart.table.columns[2:4] == ["on the previous token", "largest head"]
    assert standard[:4] == ["standard", "20%", "100%", "100% (layer 0 head 0)"]
    assert no_q[2] == "85%"
    assert no_q[4:6] == ["15%", "60% (layer 0 head 1)"]
    assert chart.table.title in render_page([section], "a page")


def test_uniform_attention_has_one_shade(make_recorded_world, section_of):
    def uniform(run):
        a_TT = np.tril(np.ones((8, 8)))
        return np.tile(a_TT / a_TT.sum(-1, keepdims=True), (2, 2, 1, 1))

    chart = chart_of(section_of(make_recorded_world(uniform)))
    first, second = chart.panels
    rows = first.spec["data"]["values"]
    assert len(rows) == 4 * 36
    color = first.spec["spec"]["layer"][1]["encoding"]["color"]
    low = color["scale"]["domain"][0]
    assert all(0.9 < row["times"] < 1.1 < low for row in rows)
    assert color["legend"]["title"] == "weight ÷ equal share"
    assert second.spec["spec"]["layer"][1]["encoding"]["color"]["legend"] is None


def test_space_is_visible_in_labels(section):
    chart = make_attention_chart(section.examples[:1], "At step 3", (0, 0))
    beside = chart.panels[0].spec["spec"]["layer"][2]["data"]["values"]
    assert [row["token"] for row in beside] == [*"the␣cat", "\\n"]


@pytest.mark.parametrize("tokens", [8, 100])
def test_map_of_one_head_has_readable_labels(section, tokens):
    """However long its text is, a label of 9 pixels has room."""
    a_LHTS = attention_map.quantize(np.tile(np.eye(tokens), (2, 2, 1, 1)))
    arm = replace(section.examples[0], tokens=("a",) * tokens, a_LHTS=a_LHTS)
    spec = make_attention_chart([arm], "At step 3", (0, 0)).panels[0].spec["spec"]
    assert 12 * tokens <= spec["width"] == spec["height"] <= 24 * tokens
    assert len(spec["layer"][2]["data"]["values"]) == tokens
    of_all = make_attention_chart([arm], "At step 3").panels[0].spec["spec"]
    assert of_all["width"] <= 9 * tokens


def test_tokens_of_a_task_read_as_data_show_has_them(tmp_path):
    with open_hydra():
        config = make_config({"data": "induction_short"})
    assert decode_tokens([0, 3, 31], config, tmp_path) == (("t0", "t3", "t31"), " ")


def test_tooltips_show_tokens(section):
    rows = chart_of(section).panels[0].spec["data"]["values"]
    found = {(row["from"], row["to"]) for row in rows}
    assert {("0 “t”", "0 “t”"), ("4 “c”", "3 “ ”"), ("7 “\\n”", "6 “t”")} <= found


@pytest.mark.parametrize(
    "content",
    [
        '{"name": "gpt2"}',  # would ask a network
        '{"name": "chars", "characters": "ab"}',
        '{"name": "bpe", "merged": 3}',
        '{"name": ["bytes"]}',
        "[" * 100_000,
        None,
    ],
)
def test_token_ids_are_shown_without_text(make_recorded_world, section_of, content):
    world = make_recorded_world()
    for run in world.runs():
        path = world.run_folder(run) / "tokenizer.json"
        path.unlink()
        if content is None:
            os.mkfifo(path)
        else:
            path.write_text(content)
    caption = chart_of(section_of(world)).caption
    assert f"“{' '.join(map(str, BYTES))}”" in caption


def test_runs_without_recordings_have_no_chart(make_world, loss_of, section_of, section):
    old = section_of(make_world(*WORDS).finish(loss_of))
    assert chart_of(old) is None
    assert find_problems(old) == []
    assert 'id="c1-attention"' not in render_page([old], "old")
    assert 'id="c1-attention"' in render_page([section], "new")


def damage(world, run, kind):
    path = world.run_folder(run) / attention_map.FILE_NAME
    other = next(one for one in world.runs() if one.id != run.id)
    about, tokens_T, a_LHTT = attention_map.read_attention_map(path)
    if kind == "no file":
        path.write_bytes(b"<script>")
    elif kind == "another run's":
        path.write_bytes((world.run_folder(other) / attention_map.FILE_NAME).read_bytes())
    elif kind == "a link":
        path.rename(path.with_suffix(".kept"))
        path.symlink_to(path.with_suffix(".kept"))
    elif kind == "another model's":
        attention_map.write_attention_map(path.parent, about, tokens_T, a_LHTT[:1])
    elif kind == "other data":
        attention_map.write_attention_map(
            path.parent, AttentionMapHeader(about.run, about.step, "0"), tokens_T, a_LHTT
        )
    else:
        attention_map.write_attention_map(
            path.parent, AttentionMapHeader(about.run, 3, about.data_fingerprint), tokens_T, a_LHTT
        )


KINDS = ["no file", "another run's", "a link", "another model's", "other data", "another step"]


@pytest.mark.parametrize("kind", KINDS)
def test_damaged_map_is_named_and_the_next_run_is_used(make_recorded_world, section_of, kind):
    world = make_recorded_world()
    run = next(r for r in world.runs() if r.arm.startswith("no_q") and r.changes["seed"] == 0)
    damage(world, run, kind)
    own = section_of(world)
    (line,) = find_problems(own)
    assert line.startswith(f"{run.name}: attention_map.safetensors: ")
    assert [panel.title for panel in chart_of(own).panels] == ["standard, s0", "no_q, s1"]


def test_incomplete_runs_are_skipped(make_recorded_world, section_of):
    world = make_recorded_world()
    run = next(r for r in world.runs() if r.arm.startswith("standard") and r.changes["seed"] == 0)
    world.write(run, "diverged")
    assert chart_of(section_of(world)).panels[0].title == "standard, s1"


@pytest.mark.slow
def test_page_stays_small_with_many_heads_and_arms(make_recorded_world, section_of):
    rng = np.random.default_rng(0)

    def wild(run):
        raw = np.tril(rng.exponential(size=(12, 12, 32, 32)) ** 3)
        return raw / raw.sum(-1, keepdims=True)

    names = "standard,no_q,no_k,shared_qk,merged_w,no_v,no_o,qk_norm"
    words = (f"variant={names}", "seed=0", "model.layers=12", "model.heads=12")
    words += ("model.d_model=24", "model.context=32")
    own = section_of(make_recorded_world(wild, words, tokens=tuple(range(40, 72))))
    chart = chart_of(own)
    assert len(chart.panels) == 6
    assert "Not drawn: " in chart.caption
    assert "Of 144 heads of an arm, 16 drawn." in chart.caption
    assert {row["layer"] for row in chart.panels[0].spec["data"]["values"]} == {
        "layer 0",
        "layer 11",
    }
    facet = chart.panels[0].spec["facet"]
    assert facet["row"]["sort"] == ["layer 0", "layer 11"]  # a layer 2 would stand between them
    assert facet["column"]["sort"] == [f"head {head}" for head in range(8)]
    assert sum(len(panel.spec["data"]["values"]) for panel in chart.panels) <= 16_000
    assert len(render_chart(chart, own.title, "svg")) < 4_000_000


def test_map_length_follows_the_context_of_the_arm(make_recorded_world, section_of):
    def own(run):
        return previous(run, tokens=2 if run.arm.endswith("=2") else 8)

    words = ("variant=standard", "seed=0", "model.layers=2", "model.context=2,16")
    chart = chart_of(section_of(make_recorded_world(own, words)))
    assert [max(row["q"] for row in p.spec["data"]["values"]) for p in chart.panels] == [1, 7]
    assert "another text, or a shorter part of it" in chart.caption

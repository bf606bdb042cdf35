"""The page is one file: it needs nothing else, runs only its own script, and escapes all names."""

import base64
import gzip
import hashlib
import json
import re
from html.parser import HTMLParser

import pytest

from qkablate.analysis.study.standalone_runs import read_standalone_runs
from qkablate.report.charts import make_charts
from qkablate.report.page import render_page
from qkablate.report.section import Section, share_styles

ONE = ("variant=standard,no_q", "seed=range(2)")
FULL = ("variant=standard,no_q", "model.d_model=16,32", "seed=range(2)", "sweep.tune=true")
RUNS = 137  # 8 final runs, and those of tuning
SIGNS = ("\x1b", "\x07", "\u202e", "\u2028", "\u2029", "\u200b")  # that steer, or hide
WORDS = ("<script>alert(1)</script>", '"><img src=x onerror=alert(1)>', "</script>", "<!--")
WORDS += ("${x}", "{{7*7}}", "{% raw %}", "&lt;b&gt;", "'onfocus='alert(1)")
HOSTILE = " ".join([*WORDS, "a\x1b[31mred\x07", *SIGNS])
VOID = {"meta", "input", "link", "br", "img", "hr", "base", "embed", "source"}


class Page(HTMLParser):
    """Elements, texts and scripts as a browser parses them; an unclosed element is an error."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.elements = []
        self.scripts = []
        self.styles = []
        self.words = []
        self.rows = []
        self._open = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag not in VOID:
            self._open.append(tag)
        if tag == "script":
            self.scripts.append((dict(attributes), ""))
        if tag == "table":
            self.rows.append([])
        if tag == "tr":
            self.rows[-1].append([])
        if tag in ("td", "th"):
            self.rows[-1][-1].append("")

    def handle_startendtag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        inside = self._open[-1] if self._open else ""
        if inside == "script":
            attributes, text = self.scripts[-1]
            self.scripts[-1] = attributes, text + data
        elif inside == "style":
            self.styles.append(data)
        else:
            self.words.append(data)
            if {"td", "th"} & {*self._open}:
                self.rows[-1][-1][-1] += data

    def all(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]

    @property
    def ids(self):
        return [attributes["id"] for _, attributes in self.elements if "id" in attributes]

    @property
    def text(self):
        return "\n".join(self.words)

    @property
    def specs(self):
        (packed,) = [text for own, text in self.scripts if own.get("id") == "specs"]
        assert re.fullmatch(r"[A-Za-z0-9+/=]+", packed)
        return json.loads(gzip.decompress(base64.b64decode(packed)))

    @property
    def panels(self):
        return [int(own["data-spec"]) for _, own in self.elements if "data-spec" in own]


@pytest.fixture(scope="module")
def full(make_world, loss_of, with_curves, section_of):
    """Return a sweep that uses every feature of the page."""
    return section_of(with_curves(make_world(*FULL).finish(loss_of)))


@pytest.fixture(scope="module")
def written(full):
    return render_page([full], "a sweep")


@pytest.fixture(scope="module")
def parsed(written):
    return Page(written)


def assert_sound(text, sections=1):
    """Check what every page promises."""
    found = Page(text)
    assert len({*found.ids}) == len(found.ids)
    assert len(found.all("article")) == len(found.all("h1")) == sections
    assert len(found.scripts) == 3
    for _, attributes in found.elements:
        for key, value in attributes.items():
            assert not key.startswith("on")
            if key in ("src", "href", "srcset", "action", "data", "poster", "formaction"):
                assert value.startswith("#")
                assert value[1:] in found.ids
            if key in ("aria-labelledby", "data-filter", "data-verdict", "data-count"):
                assert value in found.ids
    for rows in found.rows:
        assert rows
        assert {len(row) for row in rows} == {len(rows[0])}
    for attributes in found.all("th"):
        assert attributes.get("scope") in ("col", "row")
    specs = found.specs
    assert found.panels == [*range(len(specs["panels"]))]
    shown = found.text + json.dumps(specs, ensure_ascii=False)
    shown += json.dumps(found.elements, ensure_ascii=False)
    for sign in SIGNS:
        assert sign not in shown
    return found


# One file


@pytest.mark.slow
def test_page_is_one_file_without_network_requests(written, parsed):
    assert_sound(written)
    assert not parsed.all("link")
    assert not parsed.all("img")
    assert not parsed.all("iframe")
    style = "".join(parsed.styles)
    assert "url(" not in style
    assert "@import" not in style
    assert written.startswith("<!doctype html>")
    assert parsed.all("html") == [{"lang": "en"}]
    assert {"charset": "utf-8"} in parsed.all("meta")


def policy_of(found):
    (content,) = [
        own["content"]
        for own in found.all("meta")
        if own.get("http-equiv") == "Content-Security-Policy"
    ]
    return {words[0]: words[1:] for words in (part.split() for part in content.split(";")) if words}


def test_policy_allows_only_the_scripts_of_the_page(parsed):
    policy = policy_of(parsed)
    assert policy["default-src"] == ["'none'"]
    run = [text for own, text in parsed.scripts if own.get("type") != "text/plain"]
    assert len(run) == 2
    hashes = [base64.b64encode(hashlib.sha256(s.encode()).digest()).decode() for s in run]
    assert sorted(policy["script-src"]) == sorted(f"'sha256-{digest}'" for digest in hashes)
    assert not {"connect-src", "frame-src", "object-src"} & {*policy}
    said = " ".join(word for words in policy.values() for word in words)
    assert "unsafe-eval" not in said
    assert "http" not in said
    assert "*" not in said


def test_hashed_scripts_are_unchanged_by_parsing(written, parsed):
    """Line ends would be made alike, and a comment or an end tag would end it."""
    assert "\r" not in written
    assert "\0" not in written
    for _, text in parsed.scripts:
        assert not re.search(r"</script|<!--|<script", text, re.IGNORECASE)


# What stands on it


def test_parts_are_in_order(parsed):
    sections = [own for tag, own in parsed.elements if tag == "section"]
    assert sections[0]["class"] == "answer"
    named = [own["id"] for own in sections if "id" in own]
    assert named == [
        f"c1-{name}"
        for name in (
            *("verdicts", "gaps", "losses", "gap-curves", "heat", "costs", "rates"),
            *("audit", "runs", "environment"),
        )
    ]


def test_every_chart_has_its_caption(full, parsed):
    drawn = make_charts(full)
    panels = [panel for chart in drawn for panel in chart.panels]
    packed = parsed.specs["panels"]
    assert len(packed) == len(panels) == len(parsed.panels)
    for own, panel in zip(packed, panels, strict=True):
        assert {key: own[key] for key in panel.spec} == panel.spec
        assert own.get("width")
    for chart in drawn:
        assert chart.title in parsed.text
        assert chart.caption in parsed.text
    labels = [own["aria-label"] for _, own in parsed.elements if own.get("class") == "vega"]
    assert all(label.endswith(".") and "n = " in label for label in labels)
    entries = {name for chart in drawn for name in chart.variants}
    assert entries <= {word.strip() for word in parsed.words}


def test_every_run_is_listed_with_its_command(full, parsed):
    commands = [word for word in parsed.words if word.startswith("qkablate train ")]
    tuning = sum(len(records) for records in full.study.tuning.values())
    assert len(commands) == len(full.study.records) + tuning == RUNS


def test_status_counts_the_runs(full, written, cached_world, loss_of, section_of):
    assert f"{RUNS} runs: {RUNS} done" in written
    world = cached_world("variant=standard,no_q", "seed=range(4)")
    world.finish(lambda run: (loss_of(run), "diverged", "failed", None)[run.changes["seed"]])
    text = render_page([section_of(world)], "half")
    assert "8 runs: 2 done, 2 diverged, 2 failed, 2 waiting" in text
    assert "ValueError: no" in text


def test_sweep_without_results_has_a_page(cached_world, section_of):
    found = assert_sound(render_page([section_of(cached_world(*ONE))], "nothing yet"))
    assert found.panels == []
    assert "4 runs: 4 waiting" in found.text
    assert "There is no completed pair of runs" in found.text
    assert "unknown: no run has a result" in found.text


def test_study_without_runs_has_a_page(tmp_path):
    (tmp_path / "nothing-here").mkdir()
    study = read_standalone_runs([tmp_path / "nothing-here"])
    found = assert_sound(render_page([Section("nothing", "read from nowhere", study)], "nothing"))
    assert "nothing-here: its config.yaml cannot be read" in found.text
    assert_sound(
        render_page(
            [Section("nothing", "read from nowhere", read_standalone_runs([]))],
            "nothing",
        )
    )


def test_several_sections_share_one_page(full, section, claimed, cached_world, section_of):
    sections = [full, claimed(0.0), section, section_of(cached_world(*ONE))]
    found = assert_sound(render_page(sections, "all of it"), sections=4)
    links = [own["href"] for own in found.all("a") if re.fullmatch(r"#c\d", own["href"])]
    assert links == ["#c1", "#c2", "#c3", "#c4"]
    assert len(found.panels) == sum(
        len(chart.panels) for one in sections for chart in make_charts(one)
    )
    for one in sections:
        assert one.title in found.text


@pytest.mark.slow
def test_variant_has_the_same_style_in_all_sections(cached_world, section_of):
    """Also one that has no look of its own: another rank than that of its entry."""
    words = ("model.d_model=16", "model.heads=2", "variant.rank=2,3,4")
    many = section_of(cached_world("variant=standard,low_rank_w", "seed=0", *words))
    few = section_of(cached_world("variant=standard,low_rank_w", "seed=0", "variant.rank=4"))
    name = "low_rank_w_r4"
    assert many.styles[name] != few.styles[name]
    one, other = share_styles([many, few])
    assert one.styles[name] == other.styles[name]


def test_section_has_a_list_of_its_contents(full, parsed):
    links = [own["href"] for own in parsed.all("a")]
    charts = [chart.name for chart in make_charts(full)]
    names = ["verdicts", *charts, "audit", "runs", "environment"]
    assert links == ["#main", *(f"#c1-{name}" for name in names)]


def test_arms_are_listed_without_what_all_share(full, parsed):
    names = [row[0] for rows in parsed.rows for row in rows if row[0].startswith("no_q")]
    assert names[:2] == ["no_q-d16", "no_q-d32"]


def test_cells_of_verdicts_have_labels_for_cards(parsed):
    cells = [own for own in parsed.all("td") if "data-label" in own]
    assert {own["data-label"] for own in cells} >= {
        "verdict",
        "parameters",
        "gap, nats [95\u00a0%]",
    }


def test_percentages_of_verdicts_are_not_broken(parsed):
    (arms,) = (rows for rows in parsed.rows if rows[0][0] == "arm" and "verdict" in rows[0])
    shown = " ".join(cell for row in arms for cell in row)
    assert "(-8.3\u00a0%)" in shown
    assert " %" not in shown


def test_headers_are_aligned_as_their_columns(written):
    shown, kinds = set(), ('class="n"', 'class="word"')
    for table in re.findall("<table.*?</table>", written, re.DOTALL):
        rows = re.findall("<tr.*?</tr>", table, re.DOTALL)
        head, *others = [re.findall("<t[hd][^>]*>", row) for row in rows]
        is_number = [kinds[0] in cell for cell in head]
        for cells in others:
            is_right = [kinds[0] in cell for cell in cells]
            if "sortable" in table:  # its cells are right unless they are words
                is_right = ["<td" in cell and kinds[1] not in cell for cell in cells]
            assert is_right == is_number
        shown |= {*is_number}
    assert shown == {True, False}


def test_filter_suggests_an_arm_of_the_page(parsed):
    (search,) = [own for own in parsed.all("input") if own.get("type") == "search"]
    assert search["placeholder"] == "no_q d32"


def test_filter_suggests_nothing_without_arms():
    found = Page(render_page([Section("none", "", read_standalone_runs([]))], "none"))
    assert [own["placeholder"] for own in found.all("input") if "placeholder" in own] == [""]


def test_claim_is_shown_with_its_verdict(claimed):
    section = claimed(0.0)
    found = assert_sound(render_page([section], "a claim"))
    assert "SUPPORTED" in found.words
    assert "Keys alone are enough." in found.text
    assert "The claim" in found.words
    assert "Arm by arm" in found.words
    assert "within" in {cell for rows in found.rows for row in rows for cell in row}
    waiting = assert_sound(render_page([claimed(0.0, ended=3)], "a claim"))
    assert "INCOMPLETE" in waiting.words
    assert "7 of 12 runs have ended" in waiting.text


# Hostile names


@pytest.fixture
def spoilt(cached_world, loss_of, with_curves):
    """Return a sweep in whose files every string is hostile."""
    world = cached_world("variant=standard,no_q", "seed=range(3)")
    world.finish(loss_of)
    for run in world.runs():
        words = dict.fromkeys(("kernel", "precision", "device", "data_fingerprint"), HOSTILE)
        words |= {"version": HOSTILE, "compile": HOSTILE, "threads": HOSTILE, "packed": 1}
        words |= {"init": {"mode": HOSTILE, "match": HOSTILE}, "label": HOSTILE}
        words |= {"loss": {"train": 2.0, "val": loss_of(run), "test": loss_of(run)}}
        if run.changes["seed"] == 2:
            words |= {"status": "failed", "error": HOSTILE}
        world.write(run, words)
        environment = {
            "versions": {"torch": HOSTILE},
            "machine": {"cpu": HOSTILE},
            "code": {"commit": HOSTILE, "diff": HOSTILE},
        }
        (world.run_folder(run) / "environment.json").write_text(json.dumps(environment))
    with_curves(world)
    for number, run in enumerate(world.runs()):
        name = HOSTILE.replace("/", "∕")
        world.run_folder(run).rename(world.run_folder(run).with_name(f"{name}{number}-{run.id}"))
    return world


def test_hostile_text_in_folders_is_escaped(spoilt, section_of):
    section = section_of(spoilt)
    section = Section(HOSTILE, HOSTILE, section.study)
    found = assert_sound(render_page([section], HOSTILE))
    assert not found.all("img")
    assert policy_of(found)["default-src"] == ["'none'"]
    for word in WORDS:
        assert word in found.text  # shown, and as it was written
    assert found.panels


def test_hostile_text_in_a_claim_is_escaped(claimed):
    section = claimed(0.0, says=HOSTILE)
    found = assert_sound(render_page([section], "a claim"))
    assert not found.all("img")
    for word in WORDS:
        assert word in found.text


def test_hostile_run_names_are_escaped(tmp_path, train):
    folder = train(tmp_path, "train.steps=2", "train.batch_size=2")
    name = HOSTILE.replace("/", "∕")
    run = folder.rename(folder.with_name(name))
    broken = tmp_path / f"broken {name}"
    broken.mkdir()
    (broken / "config.yaml").write_text(f"a: [{json.dumps(HOSTILE)}")
    study = read_standalone_runs([run, broken])
    assert len(study.records) == len(study.unread) == 1
    found = assert_sound(render_page([Section("runs", "read from here", study)], "runs"))
    assert not found.all("img")
    assert '"><img src=x onerror=alert(1)>' in found.text

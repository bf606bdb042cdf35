"""The page of the study: every figure comes from the published runs in the repository."""

import math
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from qkablate.analysis.claims.claim import Comparison, PartSpec
from qkablate.analysis.claims.judgement import PartJudgement
from qkablate.analysis.claims.samples import Median
from qkablate.analysis.claims.verdict import Part
from qkablate.analysis.comparison.decision import Verdict
from qkablate.report.study.claims import StudiedClaim, read_claims
from qkablate.report.study.page import PAGE, SNIPPET, make_page
from qkablate.report.study.pictures import draw_pictures, hash_chart, read_hash
from tests.cli.helpers import assert_refused

ROOT = Path(__file__).parents[3]
STUDY = ROOT / "docs" / "study"


def test_page_in_the_docs_is_that_of_the_published_runs():
    """`qkablate report --study docs/study` writes it anew."""
    for name, content in make_page(STUDY).items():
        assert (STUDY / name).read_bytes() == content, f"docs/study/{name} is not up to date"


def test_pictures_in_the_docs_are_those_of_the_published_runs():
    expected = {
        f"{name}{end}": hash_chart(chart, subject, setting)
        for name, chart, subject, setting in draw_pictures(read_claims(STUDY))
        for end in (".svg", "-dark.svg")
    }
    assert {path.name: read_hash(path.read_bytes()) for path in STUDY.glob("*.svg")} == expected


def test_readme_has_the_table_of_the_answers():
    answers = (STUDY / SNIPPET).read_text(encoding="utf-8")
    assert answers in (ROOT / "README.md").read_text(encoding="utf-8")


def test_parts_that_decide_a_claim_come_first():
    ended = [studied for studied in read_claims(STUDY) if studied.deciding]
    assert ended
    for studied in ended:
        decides = [part.word == studied.judgement.word for part in studied.deciding]
        assert decides == sorted(decides, reverse=True)


def test_costs_are_those_of_the_variant_whatever_a_part_compares():
    """A loss of standard less that of a variant, and an accuracy, change their sign."""
    costs = {studied.claim.name: studied.format_costs() for studied in read_claims(STUDY)}
    w_o = "no_o at equal params: +0.008 [+0.004, +0.012] of 0.032 nats"
    assert w_o in costs["encoder_translation"]
    assert "shared_qk: +0.014 [+0.007, +0.021] of 0.032 nats" in costs["encoder_translation"]
    assert "shared_qk: +0.236 [+0.197, +0.274] of 0.325 accuracy" in costs["directed"]
    assert "tied_qkv: +0.000, as all runs answer everything" in costs["one_projection"]
    assert "no_q sites=cross less that at sites=decoder: -0.004" in costs["cross_needs_both"]
    assert "no_q: +0.004 [-0.002, +0.009] of 0.7" in costs["encoder_decoder"]
    assert costs["encoder_decoder"].endswith(" nats (UNDERPOWERED)")


def test_a_ratio_is_that_of_the_variant_whatever_a_part_compares():
    """If a step of standard takes half the time, one of the variant takes twice as long."""
    values = tuple(math.log(0.5) + shift for shift in (-0.02, -0.01, 0.0, 0.01, 0.02))
    sides = {"variant": "standard"}, {"variant": "no_q"}
    spec = PartSpec("better", 0.1, *sides, "seconds", "tokens", "longest")
    comparison = Comparison("fast", spec, "fast", "text", [])
    part = Part("fast", "better", 0.1, Median(values))
    judged = PartJudgement(part, Verdict.SUPPORTED, comparison, [], [])
    judgement = SimpleNamespace(parts=[judged], has_ended=True, word=Verdict.SUPPORTED)
    costs = StudiedClaim(None, judgement).format_costs()
    assert costs.startswith("no_q: ")
    assert "× 2 [1.96, 2.04]" in costs


@pytest.fixture
def study(qkablate, outputs, tmp_path):
    """Make the page of a study of one small claim."""
    (tmp_path / "study").mkdir()
    assert qkablate("publish", "mine", "-o", "study/results").code == 0
    text = "# Earlier registrations\n\n## mine\n\nIt was run before.\n"
    (tmp_path / "study" / "registrations.md").write_text(text, encoding="utf-8")
    done = qkablate("report", "--study", "study")
    assert (done.code, done.err) == (0, "")
    return tmp_path / "study"


def test_page_has_answer_evidence_and_limits(study):
    page = (study / PAGE).read_text(encoding="utf-8")
    answer = "no_q: +0.049 [+0.047, +0.051] of 0.001 nats, n = 3"
    assert f"- **INSENSITIVE**: Keys alone are enough. Measured: {answer}" in page
    for text in (
        "From a comment.",
        "no_q is not worse than standard by 3, at equal tokens",
        "! floor",
        "Nothing about models of more than",
        "qkablate claim run mine ",
        "9 runs, 0 min of training in all",
        "(registrations.md#mine)",
        "under statistics 2",
        "`qkablate claim run one_head`",
    ):
        assert text in page
    assert "exploratory" not in page
    for link in re.findall(r"\]\(([^)#]+)", page):
        assert link.startswith("https://") or (study / link).exists(), link


def test_table_for_a_readme_has_the_same_figures(study):
    (head, _, row) = (study / SNIPPET).read_text(encoding="utf-8").splitlines()
    assert head.startswith("| claim | says | verdict | what the variant costs (positive: worse),")
    cells = "Keys alone are enough. | INSENSITIVE | no_q: +0.049 [+0.047, +0.051] of 0.001 nats | 3"
    assert row == f"| `mine` | {cells} |"


def test_page_and_pictures_are_the_same_when_made_again(study, qkablate):
    before = {path.name: path.read_bytes() for path in study.iterdir() if path.is_file()}
    assert {"answers.svg", "answers-dark.svg", PAGE, SNIPPET} <= before.keys()
    assert any(name.endswith("-gap-curves-dark.svg") for name in before)
    shutil.copy(study / "answers.svg", study / "old-claim-parts.svg")  # of no claim any more
    assert qkablate("report", "--study", "study").code == 0
    assert {path.name: path.read_bytes() for path in study.iterdir() if path.is_file()} == before


def test_dark_pictures_have_the_colors_of_the_dark_theme(study):
    light, dark = ((study / f"answers{end}.svg").read_text() for end in ("", "-dark"))
    assert light != dark
    assert read_hash(light.encode()) == read_hash(dark.encode()) is not None


def test_missing_runs_and_other_statistics_are_visible(study, qkablate, outputs):
    """A claim registered under other rules than those that judge it confirms nothing."""
    (registration,) = outputs.glob("claims/*/claim.json")
    text = registration.read_text().replace('"statistics": 2', '"statistics": 1')
    registration.write_text(text)
    for path in (study / "results").iterdir():
        path.unlink()
    assert qkablate("publish", "mine", "-o", "study/results").code == 0
    assert qkablate("report", "--study", "study").code == 0
    page = (study / PAGE).read_text(encoding="utf-8")
    assert "- **INSENSITIVE (exploratory)**: Keys alone" in page
    assert "registered under statistics 1, and judged by 2" in page
    for path in (study / "results").iterdir():
        path.unlink()
    next(outputs.glob("runs/no_q-*/result.json")).unlink()
    for path in [*outputs.glob("runs/standard-d16-h2-s*/result.json")]:
        path.unlink()
    assert qkablate("publish", "mine", "-o", "study/results").code == 0
    assert qkablate("report", "--study", "study").code == 0
    page = (study / PAGE).read_text(encoding="utf-8")
    assert "**No claim has been run to its verdict yet.**" in page
    assert re.search(r"\*\*INCOMPLETE \(\d of 9 runs\)\*\*", page)
    assert (study / SNIPPET).read_text() == ""


def test_mistakes_are_one_line(qkablate, tmp_path):
    assert_refused(qkablate("report", "--study", "none"), "--study: 'none' is not a folder")
    (tmp_path / "study").mkdir()
    assert_refused(qkablate("report", "quick", "--study", "study"), "takes nothing beside it")


def test_files_of_others_are_not_touched(study, qkablate, tmp_path):
    own = study / "drawn-by-hand.svg"
    own.write_text("<svg/>")
    assert qkablate("report", "--study", "study").code == 0
    assert own.read_text() == "<svg/>"
    other = tmp_path / "docs"
    other.mkdir()
    (other / PAGE).write_text("mine")
    assert_refused(qkablate("report", "--study", "docs"), "'docs' is not the folder of a study")
    assert [path.name for path in other.iterdir()] == [PAGE]
    assert (other / PAGE).read_text() == "mine"

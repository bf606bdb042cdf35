"""The page of the study: every figure comes from the published runs in the repository."""

import math
import re
import shutil
from pathlib import Path

import pytest

from qkablate.analysis.stats import Sample
from qkablate.report.study.costs import LEVEL
from qkablate.report.study.page import PAGE, SNIPPET, find_histories, make_page
from qkablate.report.study.pictures import draw_pictures, read_hash
from qkablate.report.text.claims import format_details, format_judgement
from qkablate.report.text.summary import summarize
from tests.cli.helpers import assert_refused

ROOT = Path(__file__).parents[3]
STUDY = ROOT / "docs" / "study"
COST = "no_q: +0.049 [+0.047, +0.051] nats, margin 3, attention 0.001"


@pytest.fixture(scope="module")
def pictures(studied):
    return [*draw_pictures(studied)]


def test_page_in_the_docs_is_that_of_the_published_runs(studied, pictures):
    """`qkablate report --study docs/study` writes it anew."""
    names = {picture.name for picture in pictures}
    for name, content in make_page(studied, names, find_histories(STUDY)).items():
        assert (STUDY / name).read_bytes() == content, f"docs/study/{name} is not up to date"


def test_pictures_in_the_docs_are_those_of_the_published_runs(pictures):
    expected = {
        f"{picture.name}{end}": picture.hash
        for picture in pictures
        for end in (".svg", "-dark.svg")
    }
    assert {path.name: read_hash(path.read_bytes()) for path in STUDY.glob("*.svg")} == expected


def test_figures_of_the_readme_are_those_of_the_claims(studied):
    """The findings above the table are written by hand."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8").replace("−", "-")
    found = {
        (one.claim.name, name): (
            judged.part.sample.mean,
            *judged.part.sample.interval(LEVEL),
        )
        for one in studied
        for judged in one.deciding
        for name in (judged.comparison.part, judged.part.name)
    }
    (blocks,) = (one for one in studied if one.claim.name == "block_matters")
    gap = blocks.deciding[0].gaps[1]  # what is subtracted: one W with four heads, in GPT-2's block
    assert (gap.arm.arm.variant, gap.arm.arm.config.model.mlp) == ("merged_w", "gelu")
    found["four_heads"] = (gap.sample.mean, *gap.sample.interval(LEVEL))
    (early,) = (one for one in studied if one.claim.name == "early_only")
    for gap in early.deciding[0].gaps:
        steps = int(gap.arm.arm.config.train.steps)
        found["rope", steps] = (gap.sample.mean, *gap.sample.interval(LEVEL))
    (amounts,) = (one for one in studied if one.claim.name == "data_amount")
    all_text, little = (gap.sample for gap in amounts.deciding[0].gaps)
    found["all_text"] = (all_text.mean, *all_text.interval(LEVEL))
    assert f"read ten times, {little.mean:+.3f}" in readme
    (recall,) = (one for one in studied if one.claim.name == "where_content_matters")
    arms = {entry.arm.variant: entry for entry in recall.judgement.study.entries}
    table, uniform = (f"{100 * arms[arm].accuracy:.1f} %" for arm in ("static_scores", "uniform"))
    assert f"that table has an accuracy of {table} (uniform averaging {uniform})" in readme
    solved = [sum(r.accuracy > 0.9995 for r in e.records.values()) for e in arms.values()]
    counts = {"standard": 16, "no_q": 16, "merged_w": 16, "shared_qk": 15}
    others = {"static_scores": 0, "uniform": 0}
    assert dict(zip(arms, solved, strict=True)) == counts | others
    for claim, part in (
        ("break_even", "w_o"),
        ("break_even", "w_v"),
        ("qq_never_better", "never d_model=64"),
        ("merged_costs", "not_lower"),
        ("wide_qk", "no_better"),
        ("wide_qk", "at_equal_parameters"),
    ):
        mean, low, high = found[claim, part]  # the claim is about standard
        found[claim, part] = -mean, -high, -low
    for text, name in {
        "No W_q": ("w_q_necessary", "without_w_q"),
        "No W_k": ("w_q_necessary", "without_w_k"),
        "One W in place of W_q W_kᵀ": ("merged_performance", "loss"),
        "Q = K": ("qq_worse", "worse"),
        "Q = K = V": ("one_matrix", "and_values"),
        "No W_o": ("break_even", "w_o"),
        "No W_v": ("break_even", "w_v"),
        "in each of four heads": ("wide_qk", "no_better"),
        "Four matrices in place of W_q and W_k": ("four_or_one", "four"),
        "in place of four of width 64 with four heads": ("deep_head", "deeper"),
        "which looks at no token": ("without_both", "by_position"),
    }.items():
        assert "{}: {:+.3f} [{:+.3f}, {:+.3f}]".format(text, *found[name]) in readme
    for text, name in {
        "17 % more parameters, it is": "four_heads",
        "as many parameters as Q = K saves": ("qq_never_better", "never d_model=64"),
        "with other seeds it is": ("one_head", "in_the_end 1,024,000 tokens"),
        "after 1,000 steps and": ("one_head", "in_the_end 4,096,000 tokens"),
        "With rotary positions": ("rope", 1000),
        "after 1,000 steps and, in two sets of seeds,": ("rope", 4000),
        "[+0.069, +0.087] and": "all_text",
        "as in Reformer,": ("reformer", "not_worse"),
        "no W_o": ("w_v_and_w_o", "no_o"),
        "no W_v": ("w_v_and_w_o", "no_v"),
        "neither": ("w_v_and_w_o", "no_vo"),
        "at equal parameters its loss is higher by": ("merged_costs", "not_lower"),
        "narrowed to equal parameters": ("wide_qk", "at_equal_parameters"),
        "With rotary positions it costs": ("content_with_rope", "content"),
    }.items():
        assert "{} {:+.3f} [{:+.3f}, {:+.3f}]".format(text, *found[name]) in readme
    (costs,) = (one for one in studied if one.claim.name == "merged_costs")
    ratios = [math.exp(judged.part.sample.mean) for judged in costs.judgement.parts[:3]]
    text = "{:.2f} times the memory, {:.2f} times the time and {:.2f} times the parameters"
    assert text.format(*ratios) in readme
    replicated = found["four_or_one", "one"][0], found["one_matrix", "queries_and_keys"][0]
    assert "and {:+.3f} and {:+.3f} in two replications".format(*replicated) in readme
    without = sorted(-found["without_skip", part][0] for part in ("no_v", "no_o", "no_vo"))
    assert f"all three are {without[0]:.2f} to {without[-1]:.2f} better than standard" in readme
    assert found["data_amount", "more_with_more"][1] > 0
    assert "on a tenth as much text" in readme


@pytest.fixture
def study(qkablate, outputs, tmp_path):
    """Make the page of a study of one small claim."""
    (tmp_path / "study").mkdir()
    assert qkablate("publish", "mine", "-o", "study/results").code == 0
    text = "# Registrations\n\n## mine\n\nIt was run before.\n"
    (tmp_path / "study" / "registrations.md").write_text(text, encoding="utf-8")
    done = qkablate("report", "--study", "study")
    assert (done.code, done.err) == (0, "")
    return tmp_path / "study"


def test_page_has_answer_evidence_and_limits(study):
    page = (study / PAGE).read_text(encoding="utf-8")
    assert "| **Other claims** |" in page
    (row,) = [line for line in page.splitlines() if line.startswith("| Keys alone")]
    name, verdict, *answer = row.strip("| ").split(" | ")
    assert re.fullmatch(r"Keys alone are enough\. \[mine\]\(#([\w-]+)\), on text", name)
    anchor = name.partition("(#")[2].partition(")")[0]
    assert f'<a id="{anchor}"></a>\n\n### mine (small)\n' in page  # the section it leads to
    assert (verdict, *answer) == ("could not tell (INSENSITIVE)", COST, "3")
    for text in (
        "From a comment.",
        "no_q is not worse than standard by 3, at equal tokens",
        "! floor",
        "Nothing about models of more than",
        "qkablate claim run mine ",
        "9 runs, 0 min of training in all",
        "(registrations.md#mine)",
        "under version 2 of the statistics",
        "`qkablate claim run one_head`",
    ):
        assert text in page
    assert "exploratory" not in page
    for link in re.findall(r"(?:\]\(|src=\"|srcset=\")([^)#\"]+)", page):
        assert link.startswith("https://") or (study / link).exists(), link


def test_table_for_a_readme_has_the_same_figures(study):
    (head, _, question, row) = (study / SNIPPET).read_text(encoding="utf-8").splitlines()
    cost = "cost of the variant (+: worse) or what is named, 90 % interval"
    assert head == f"| question | answer | {cost} | n |"
    assert question == "| **Other claims** |  |  |  |"
    answer = "could not tell (INSENSITIVE)"
    assert row == f"| Keys alone are enough. `mine`, on text | {answer} | {COST} | 3 |"


def test_page_and_pictures_are_the_same_when_made_again(study, qkablate):
    before = {path.name: path.read_bytes() for path in study.iterdir() if path.is_file()}
    assert {"answers.svg", "answers-dark.svg", PAGE, SNIPPET} <= before.keys()
    assert any(name.endswith("-gap-curves-dark.svg") for name in before)
    shutil.copy(study / "answers.svg", study / "old-claim-parts.svg")  # of no claim any more
    assert qkablate("report", "--study", "study").code == 0
    assert {path.name: path.read_bytes() for path in study.iterdir() if path.is_file()} == before
    # They are drawn once, as fonts and the last digits depend on the machine, and if one is lost.
    changed = before["answers.svg"].replace(b"<svg", b"<!-- other fonts --><svg", 1)
    (study / "answers.svg").write_bytes(changed)
    (study / "costs.svg").unlink()
    assert qkablate("report", "--study", "study").code == 0
    assert (study / "answers.svg").read_bytes() == changed
    assert (study / "costs.svg").read_bytes() == before["costs.svg"]


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
    assert "| could not tell (INSENSITIVE, exploratory) |" in page
    assert "registered under version 1 of the statistics, and judged by version 2" in page
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
    assert re.search(
        r"Not decided yet, with some of their runs: \[mine\]\(#mine-small-\w+\)\.", page
    )
    assert re.search(r"```bash\nqkablate claim run .*--from docs/study/results\n```", page)
    assert "#### The audit" not in page
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


def test_error_over_documents_that_changes_a_verdict_limits_it(studied):
    """With it, the cost of Q = K in an encoder is no longer surely more than the margin."""
    (judged,) = (one.judgement for one in studied if one.claim.name == "encoder_translation")
    first, second = judged.parts
    assert (first.word, second.word) == ("SUPPORTED", "SUPPORTED")
    changed = "; with this error the verdict would be UNDERPOWERED"
    messages = [
        check.message for part in judged.parts for check in part.checks if check.name == "documents"
    ]
    assert [message.endswith(changed) for message in messages] == [True, False]
    (error,) = (gap.document_error.se for gap in first.gaps)
    sample = first.part.sample
    wider = Sample(sample.values, sample.extra_variance + error**2)
    assert sample.p_above(first.part.margin) < 0.05 < wider.p_above(first.part.margin)
    assert judged.headline == "SUPPORTED at these rates, on these documents"


def test_parts_of_a_refuted_claim_keep_their_conditions(studied):
    name = "one_projection_as_published"
    (one,) = (one for one in studied if one.claim.name == name)
    assert one.judgement.unless == []  # one part is refuted whatever fails
    text = "\n".join(format_judgement(one.judgement))
    assert re.search(r"alike [^\n]*SUPPORTED unless\s+one\s+run in 45 of tied_qkv", text)


def test_failures_that_would_overturn_an_answer_are_named_by_part(studied):
    sections = {one.claim.name: one.section for one in studied}
    verdict, *_ = summarize(sections["w_q_necessary"])
    assert re.search(
        r"unless in without_w_q one run in \d+ of no_q-d64-h4 .* or one run in \d+ of"
        r" standard-d64-h4 .*, or in without_w_k one run in \d+ of no_k-d64-h4 ",
        verdict,
    )
    several, *_ = summarize(sections["break_even"])
    assert "unless" not in several  # undecided
    alone, *_ = summarize(sections["low_rank"])  # of its only part
    assert re.search(r"unless one run in \d+ of ", alone)


def test_parts_of_another_sign_than_the_answers_say_so(studied):
    page = make_page(studied, set(), set())[PAGE].decode()
    sections = {text.partition(" ")[0]: text for text in page.split("\n### ")[1:]}
    for name, text in {
        "break_even": "- the estimates: the first arm minus the second",  # of standard
        "directed": "- the estimates: ",  # of accuracy
        "encoder_translation": "- the estimate of w_o: ",
    }.items():
        assert text in sections[name], name
    for name in ("w_q_necessary", "qq_worse", "early_only"):
        assert "the sign is the opposite" not in sections[name]


@pytest.mark.parametrize("name", ["early_only", "cross_needs_both"])
def test_gaps_that_a_part_combines_are_shown(studied, name):
    """Growth between two lengths, two doublings apart, and differences of two gaps."""
    (judgement,) = (one.judgement for one in studied if one.claim.name == name)
    for judged, details in zip(judgement.parts, format_details(judgement), strict=True):
        first, second = map(float, re.findall(r"gap of \S+ ([+-][\d.]+) \[", details))
        expected = (second - first) / 2 if name == "early_only" else first - second
        assert judged.part.sample.mean == pytest.approx(expected, abs=1e-4)

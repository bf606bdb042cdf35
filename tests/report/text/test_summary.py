"""Summary sentences: the finding for every variant and the evidence behind it."""

import re

import pytest

from qkablate.dashboard.sweep_run import make_gap_row
from qkablate.report.text.numbers import format_gap_summary
from qkablate.report.text.summary import list_gaps, summarize

THREE = ("variant=standard,no_q,shared_qk", "seed=range(6)")
SIZES = ("variant=standard,no_q,shared_qk", "model.d_model=16,32", "seed=range(6)")
TWO = ("variant=standard,no_q", "seed=range(2)")


@pytest.fixture
def summary_lines(cached_world, section_of, loss_of):
    """Return the summary of a sweep with these gaps by variant; `end` makes runs end otherwise."""

    def answered(words, truth=None, end=lambda run: False, margin=None):
        world = cached_world(*words).finish(
            lambda run: own if (own := end(run)) is not False else loss_of(run, truth or {})
        )
        return summarize(section_of(world, margin))

    return answered


def is_seed(arm, *seeds):
    return lambda run: run.arm.startswith(arm) and run.changes["seed"] in seeds


def clauses(sentence):
    return re.split(r"; |, (?=[a-z]+ did|no difference)", sentence.rstrip("."))


def clause_of(sentence, word):
    (found,) = [clause for clause in clauses(sentence) if word in clause]
    return found


# Arms beside their baseline


def test_one_variant_is_worse(summary_lines):
    first, second = summary_lines(THREE, {"no_q": 0.05})
    assert first.startswith("Compared with standard on the same data and seeds, ")
    worse = clause_of(first, "no_q")
    assert "did worse (higher test loss)" in worse
    size = float(re.search(r"by ([\d.]+) nats", worse)[1])
    assert size == pytest.approx(0.05, abs=0.01)
    assert "no difference was found for shared_qk" in first
    assert "n = 6 pairs" in second
    assert "“no difference found” does not mean equal" in second


def test_arms_of_one_variant_are_named_by_what_differs(summary_lines):
    words = (
        "variant.init=matched,symmetric",
        "seed=range(6)",
        "sweep.baseline={variant.init: matched}",
    )
    first, _ = summary_lines(words)
    assert "with standard-d16-h2-init=matched on the same data" in first
    assert "no difference was found for standard-d16-h2-init=symmetric" in first


def test_one_variant_is_better(summary_lines):
    first, second = summary_lines(THREE, {"shared_qk": -0.05, "no_q": -0.06})
    better = clause_of(first, "shared_qk")
    assert "did better (lower test loss)" in better
    assert "-" not in re.sub(r"\w+-\w+", "", better)  # by so much, and no sign
    assert better == clause_of(first, "no_q")
    assert "worse" not in first
    assert "not found" not in second


def test_no_difference_found_is_not_equality(summary_lines):
    first, second = summary_lines(THREE)
    assert "no difference was found for no_q and shared_qk" in first
    assert "better" not in first
    assert "worse" not in first
    assert "“no difference found” does not mean equal" in second
    assert re.search(r"detect a true gap of [\d.]+( to [\d.]+)? nats", second)


def test_difference_at_one_size_is_reported(summary_lines):
    first, _ = summary_lines(SIZES, end=lambda run: False, truth={"no_q": 0.05})
    assert "no_q (in 2 of 2 comparisons, by 0.0" in first
    first, _ = summary_lines(
        SIZES,
        end=lambda run: run.changes["seed"] / 7 + 2 + (run.arm == "no_q-d16-h2") * 0.05,
    )
    assert "no_q (in 1 of 2 comparisons, by 0.0500 nats) did worse" in first
    assert "no difference was found for shared_qk" in first


def test_mixed_results_are_reported_as_both(summary_lines, loss_of):
    gaps = {"no_q-d16-h2": 0.05, "no_q-d32-h2": -0.05}
    first, _ = summary_lines(SIZES, end=lambda run: loss_of(run, {}) + gaps.get(run.arm, 0.0))
    assert "better in some comparisons and worse in others: no_q" in first
    assert "did better" not in first
    assert "did worse" not in first


def test_report_results_and_wandb_adjust_over_all_sizes(make_world, section_of):
    world = make_world("variant=standard,no_q", "model.d_model=16,32,64,128", "seed=range(3)")
    noise = {0: -0.001, 1: 0.0, 2: 0.001}

    def loss(run):
        if "no_q" not in run.arm:
            return 2.0
        # p = 0.02 at one size: found where it stands alone, and by chance among four.
        return 2.0 + (0.004 if "d16" in run.arm else 0.0) + noise[run.changes["seed"]]

    section = section_of(world.finish(loss))
    gap = next(one for one in section.summary.gaps if "d16" in one.arm)
    assert gap.p < 0.05 < gap.p_holm == pytest.approx(4 * gap.p)
    assert {one.decision for one in section.summary.gaps} == {"no difference found"}
    assert "no difference was found for no_q" in summarize(section)[0]
    assert make_gap_row(gap)["p_holm"] == gap.p_holm


def test_margin_reports_equivalence(summary_lines, loss_of):
    first, _ = summary_lines((*THREE, "sweep.floor=true"), margin=0.1)
    assert re.search(r"(equivalent within ± 0.1 nats|not worse by 0.1 nats): no_q", first)
    assert "no difference was found" not in first


def test_single_seed_gives_no_conclusion(summary_lines, loss_of):
    words = ("variant=standard,no_q,shared_qk", "seed=3")
    first, second = summary_lines(words, {"no_q": 0.05})
    assert first.startswith("With one seed, ")
    assert re.search(r"no_q-d16-h2 is \+0\.0\d{3} nats from standard-d16-h2", first)
    assert "cannot separate a difference from chance" in second
    for word in ("better", "worse", "difference"):
        assert word not in first
    first, _ = summary_lines(words, end=lambda run: 2.0 - 1e-6 * run.arm.startswith("no_q"))
    assert "-0.0000" not in first


def test_no_pair_gives_no_comparison(summary_lines):
    (only,) = summary_lines(THREE, end=lambda run: None)
    assert only == (
        "So far (0 of 18 runs have ended): There is no completed pair of runs to compare yet."
    )
    (only,) = summary_lines(THREE, end=lambda run: None if run.changes["seed"] else False)[:1]
    assert only.startswith("So far (3 of 18 runs have ended): With one seed, ")


def test_incomplete_sweep_begins_with_its_progress(summary_lines):
    first, second = summary_lines(
        THREE, {"no_q": 0.05}, end=lambda run: None if run.changes["seed"] > 3 else False
    )
    assert first.startswith("So far (12 of 18 runs have ended): Compared with standard")
    assert "n = 4 pairs" in second


def test_failures_are_counted(summary_lines):
    bad = {("no_q", 0): "diverged", ("no_q", 1): "failed", ("shared_qk", 2): "failed"}
    first, second = summary_lines(
        THREE, end=lambda run: bad.get((run.arm.split("-")[0], run.changes["seed"]), False)
    )
    assert first.startswith("So far (16 of 18 runs have ended, 1 diverged, 2 failed): ")
    assert "runs diverged for no_q" in first
    assert "n = 4 to 5 pairs" in second
    first, _ = summary_lines(
        THREE, end=lambda run: "diverged" if is_seed("no_q", 0)(run) else False
    )
    assert first.startswith("Of 18 runs, 1 diverged. Compared with standard")


def test_fully_diverged_arm_is_reported(summary_lines):
    first, *_ = summary_lines(
        THREE, end=lambda run: "diverged" if run.arm.startswith("no_q") else False
    )
    assert "6 diverged" in first


def test_single_remaining_pair_gives_no_verdict(summary_lines):
    first, second = summary_lines(
        THREE, {"no_q": 5.0}, end=lambda run: None if is_seed("no_q", *range(5))(run) else False
    )
    assert "there are fewer than three pairs for no_q" in first
    assert "n = 1 to 6 pairs" in second


@pytest.mark.parametrize("truth", [{}, {"no_q": 0.05}, {"no_q": 0.05, "shared_qk": -0.05}])
@pytest.mark.parametrize("words", [THREE, SIZES], ids=["one size", "two sizes"])
def test_each_variant_is_named_once(summary_lines, words, truth):
    first, _ = summary_lines(words, truth)
    for name in ("standard", "no_q", "shared_qk"):
        assert len(re.findall(rf"\b{name}\b", first)) == 1, name


def test_long_lists_of_variants_are_abbreviated(summary_lines):
    names = "no_q,shared_qk,merged_w,tied_kv,no_k"
    first, _ = summary_lines((f"variant=standard,{names}", "seed=range(2)"))
    named = [name for name in names.split(",") if re.search(rf"\b{name}\b", first)]
    assert len(named) >= 3
    assert len(named) == 5 or "and 2 more" in first


def test_loss_beside_the_floor_names_it(make_world, loss_of, section_of):
    world = make_world(*THREE, "sweep.floor=true", "sweep.name=floor").finish(
        lambda run: loss_of(run, {"no_q": 0.1, "uniform": -10.1})  # 10 is added to the floor
    )
    first, second = summarize(section_of(world))
    assert "no_q (by 0.10 nats) did worse" in re.sub(r"0\.10\d*", "0.10", first)
    assert (
        "the experiment is insensitive for shared_qk, as the baseline is not known to clearly beat"
        in first
    )
    reason = "before attention mattered: standard does not clearly beat `uniform`."
    assert first.endswith(reason)
    assert "floor" not in second


def test_audit_warnings_are_named(summary_lines):
    _, second = summary_lines(THREE)
    assert "the audit warns of other possible causes: learning rate" in second


def test_sentences_are_complete_and_numbers_keep_their_sign(summary_lines):
    for words, truth in ((THREE, {"no_q": -0.05}), (SIZES, {}), (TWO, {})):
        for sentence in summary_lines(words, truth):
            assert sentence.endswith(".")
            assert not re.search(r"-0\.?0*(?![\d.])", sentence)
            assert "nan" not in sentence
            assert "None" not in sentence


def test_arm_that_diverged_at_every_rate_is_named(cached_world, section_of, loss_of):
    """It has no pairs, and would otherwise be missing from what the runs show."""
    world = cached_world("variant=standard,no_q,no_k", "seed=range(2)", "sweep.tune=true")
    world.finish(lambda run: "diverged" if run.arm.startswith("no_q") else loss_of(run))
    first, *_ = summarize(section_of(world))
    assert " diverged. At every learning rate no_q-d16-h2 diverged. " in first
    assert section_of(world).study.diverged_arms == ["no_q-d16-h2"]
    trained = world.finish(loss_of)
    assert "At every" not in summarize(section_of(trained))[0]


# Runs beside nothing


NO_BASELINE = ("variant=no_q,shared_qk", "seed=range(2)", "sweep.baseline=null")


def test_runs_without_baseline_are_reported_without_comparison(summary_lines):
    first, second = summary_lines(NO_BASELINE, end=lambda run: 2.5 + run.changes["seed"])
    assert first.startswith("Test loss in nats per token: ")
    assert "no_q-d16-h2 reached 3.0 [" in first
    assert "(n = 2)" in first
    assert "no baseline to compare" in second
    assert "variant=standard" in second


@pytest.mark.parametrize(
    ("data", "unit"),
    [
        (["data=copy"], "nats per answer"),
        (["data.objective=mlm", "model.form=encoder"], "nats per masked token"),
        (["data=copy,reverse"], "nats per answer"),
        (["data=copy,stdlib"], "nats"),
    ],
)
def test_losses_are_given_in_the_unit_of_their_data(summary_lines, data, unit):
    first, _ = summary_lines(("variant=no_q", "seed=0", "sweep.baseline=null", *data))
    assert first.startswith(f"Test loss in {unit}: ")


def test_single_run_is_reported_with_its_tokens(summary_lines):
    first, _ = summary_lines(("variant=no_q", "seed=0", "sweep.baseline=null"), end=lambda run: 2.5)
    assert first == "Test loss in nats per token: no_q-d16-h2 reached 2.5000 after 384 tokens."


def test_incomplete_runs_without_baseline_are_reported(summary_lines):
    (only,) = summary_lines(NO_BASELINE, end=lambda run: None)
    assert only == "So far (0 of 4 runs have ended): No run is done yet."


# Claims


@pytest.mark.parametrize(
    ("gap", "word", "sentence"),
    [
        (0.0, "SUPPORTED", "The runs support it."),
        (0.05, "REFUTED", "The runs refute it."),
        (
            *(0.01, "UNDERPOWERED"),
            "The runs are inconclusive: their intervals hold more than one answer.",
        ),
    ],
)
def test_verdict_is_stated_in_words(claimed, gap, word, sentence):
    section = claimed(gap)
    assert section.judgement.word == word
    first, second = summarize(section)
    assert first.startswith(sentence.removesuffix("."))
    assert first.endswith("; the audit warns of other possible causes: learning rate.")
    assert second.startswith("Measured, in nats per token with 90 % interval: within: gap ")
    assert "(n = 4)" in second
    found = float(re.search(r"gap ([+-][\d.]+)", second)[1])
    assert found == pytest.approx(gap, abs=1e-4)


def test_equivalence_is_stated(claimed):
    section = claimed(0.0, kind="better")
    assert section.judgement.word == "EQUIVALENT"
    first, _ = summarize(section)
    assert first.startswith("The runs find no difference of this size")


def test_verdict_needs_all_runs(claimed):
    (only,) = summarize(claimed(0.0, ended=5))
    assert only == (
        "There is no verdict yet: 9 of 12 runs have ended; the verdict needs all of them."
    )


def test_exploratory_result_confirms_nothing(claimed):
    first, _ = summarize(claimed(0.0, reasons=("edited after the runs",)))
    assert first.startswith("The runs support it at these rates, unless one run in ")
    assert "an outlier by 0.12 nats, but this is exploratory and confirms nothing;" in first
    first, _ = summarize(claimed(0.0, margin=0.02))  # worded anew after the runs
    assert first.startswith("The runs support it at these rates, unless one run in ")
    assert "an outlier by 0.12 nats, but this is exploratory and confirms nothing;" in first


def test_diverged_runs_make_the_interval_unbounded(claimed):
    section = claimed(0.0, end=lambda number: "diverged" if number == 1 else None)
    first, second = summarize(section)
    assert first.startswith("The runs are inconclusive: some runs diverged")
    assert "∞)" in second
    assert "(n = 3)" in second


def test_spread_has_no_sign(claimed):
    _, second = summarize(claimed(0.0, of="spread", margin=0.05))
    assert re.search(r"within: spread 0\.\d+ \[0\.\d+, 0\.\d+\]", second)


def test_spread_is_unbounded_above_where_runs_diverged(claimed):
    end = {"end": lambda number: "diverged" if number == 1 else None}
    _, second = summarize(claimed(0.0, of="spread", margin=0.05, **end))
    assert re.search(r"within: spread 0\.\d+ \[0\.\d+, ∞\) \(n = 3\)", second)


def test_nothing_is_measured_if_all_runs_diverged(claimed):
    sentences = summarize(claimed(0.0, end=lambda number: "diverged"))
    assert sentences[0].startswith("The runs are inconclusive")
    assert not any(": ." in sentence for sentence in sentences)


# Line by line


def test_each_arm_has_a_line_with_its_signed_gap_first(section):
    lines = list_gaps(section)
    assert len(lines) == len(section.summary.gaps) == 4
    for line, gap in zip(lines, section.summary.gaps, strict=True):
        label = section.labels[gap.arm]
        assert line == f"{format_gap_summary(gap)}  {label}: {gap.verdict}"
        assert line[0] in "+-"


def test_many_arms_have_a_line_per_variant(make_world, loss_of, section_of):
    widths = ",".join(str(8 * k) for k in range(1, 10))
    world = make_world("variant=standard,no_q", f"model.d_model={widths}", "seed=range(3)")
    section = section_of(world.finish(lambda run: loss_of(run, {"no_q": 0.05})))
    (line,) = list_gaps(section)
    assert re.match(r"\+0\.0\d+ to \+0\.0\d+  no_q: worse", line)
    assert "(in 9 of 9)" in line


def test_claim_has_no_lines(claimed):
    assert list_gaps(claimed(0.0)) == []

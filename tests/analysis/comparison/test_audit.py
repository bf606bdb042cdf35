"""The audit: every state that every check can take, and the words that matter."""

import json
import math
import random
import re

import pytest

from qkablate.analysis.comparison.audit import (
    INVALID,
    NOTE,
    OK,
    WARNING,
    AuditCheck,
    audit,
    worst_state,
)
from qkablate.analysis.comparison.gaps import find_families
from qkablate.analysis.comparison.lr_curves import find_lr_curves
from qkablate.analysis.comparison.summary import audit_gap, describe_study
from qkablate.report.section import Section
from qkablate.report.text.summary import summarize
from tests.analysis.references import to_json

PAIR = ("variant=standard,no_q", "seed=range(3)")
TUNED = (*PAIR, "sweep.tune=true")
TWIN = ("variant=standard,no_q,standard_reassociated", "seed=range(4)")
MATCH = "match of initial scores and outputs to standard's:"
HOW = {"spread": "in standard deviation alone", "none": "not matched", None: "unknown"}
NAMES = ["runs", "pairs", "learning rate", "annealed", "optimizer", "matched", "initialization"]
NAMES += ["floor", "content", "n-grams", "precision", "data"]
NAMES += ["documents", "code", "machine", "kernel"]


def loss_of(run):
    return 2.0 + run.changes["seed"] / 7 + (0.3 if run.arm.startswith("no_q") else 0.0)


def is_arm(run):
    return run.arm.startswith("no_q")


def checks(world, number=0):
    study = world.study()
    family = find_families(study)[0]
    found = audit_gap(family, number, find_lr_curves(study))
    assert [check.name for check in found] == NAMES
    to_json(found)
    return {check.name: check for check in found}


def change(world, which, **more):
    """Change the results of some runs."""
    for run in world.runs():
        if which(run) and not run.tuning:
            path = world.run_folder(run) / "result.json"
            path.write_text(json.dumps(json.loads(path.read_text()) | more))


def surroundings(world, which, **more):
    """Change the environments of some runs."""
    for run in world.runs():
        if which(run):
            path = world.run_folder(run) / "environment.json"
            path.write_text(json.dumps(json.loads(path.read_text()) | more))


@pytest.fixture
def pair(cached_world):
    return cached_world(*PAIR, "variant.lr=matched").finish(loss_of)


def test_fair_untuned_comparison_has_a_single_remark(pair):
    found = checks(pair)
    assert {name for name, check in found.items() if check.state not in (OK, NOTE)} == {
        "learning rate"
    }
    assert found["runs"].message == "all 6 are done"
    assert found["pairs"].message.startswith("3 by seed, correlation +1.00")
    assert found["initialization"] == AuditCheck("initialization", OK, f"{MATCH} exact")
    assert found["precision"] == AuditCheck("precision", OK, "fp32")
    assert found["kernel"] == AuditCheck("kernel", OK, "flash")
    assert found["annealed"] == AuditCheck("annealed", OK, "whole schedules of 384 tokens")


def test_worst_state_is_that_of_all():
    assert worst_state([]) == OK
    states = [OK, NOTE, WARNING, INVALID]
    for end in range(1, 5):
        assert (
            worst_state([AuditCheck("a", state, "") for state in states[:end]][::-1])
            == states[end - 1]
        )


@pytest.mark.parametrize("outcome", ["diverged", "failed", None])
def test_missing_runs_are_counted_and_named(cached_world, outcome):
    world = cached_world(*PAIR).finish(
        lambda run: outcome if is_arm(run) and run.changes["seed"] != 1 else loss_of(run)
    )
    found = checks(world)
    word = outcome or "waiting"
    assert found["runs"] == AuditCheck("runs", WARNING, f"no_q-d16-h2: 2 {word} (s0, s2)")
    assert found["pairs"].state == WARNING
    assert found["pairs"].message.startswith("1; runs without a partner: ")
    assert f"no_q-d16-h2 {word}" in found["pairs"].message


def test_interrupted_run_is_named(pair):
    run = next(run for run in pair.runs() if is_arm(run))
    (pair.run_folder(run) / "result.json").unlink()
    assert checks(pair)["runs"] == AuditCheck("runs", WARNING, "no_q-d16-h2: 1 interrupted (s0)")


def test_damaged_run_breaks_the_comparison(pair):
    run = next(run for run in pair.runs() if not is_arm(run))
    (pair.run_folder(run) / "result.json").write_text("{")
    found = checks(pair)["runs"]
    assert (found.state, found.message) == (INVALID, "standard-d16-h2: 1 damaged (s0)")


def test_single_pair_is_not_a_comparison(cached_world):
    found = checks(cached_world("variant=standard,no_q", "seed=0").finish(loss_of))["pairs"]
    assert found == AuditCheck("pairs", WARNING, "1, but 3 are needed; more seeds: 'seed=range(6)'")


def test_where_nothing_is_done_every_check_still_answers(cached_world):
    found = checks(cached_world(*PAIR))
    assert found["runs"].state == found["pairs"].state == WARNING
    for name in ("precision", "data", "code", "machine", "kernel"):
        assert found[name].message == "unknown: no pairs"


def test_untuned_rates_are_a_warning(pair):
    found = checks(pair)["learning rate"]
    assert found.state == WARNING
    assert "neither was tuned" in found.message
    assert "0.001" in found.message


def bowl(least):
    return lambda run: (
        2
        + 0.3 * is_arm(run)
        + math.log(run.changes["optim.lr"] / least(run)) ** 2 / 10
        + math.log(run.changes.get("variant.lr", 1.4) / 1.4) ** 2 / 50
        if run.tuning
        else loss_of(run)
    )


def test_rates_that_were_tuned_and_bracketed_are_fair(cached_world):
    least = {True: 2e-3, False: 1e-3}
    found = checks(cached_world(*TUNED).finish(bowl(lambda run: least[is_arm(run)])))
    assert found["learning rate"].state == OK
    assert found["learning rate"].message == (
        "tuned and bracketed: no_q-d16-h2 0.002 (circuit × 1.4), standard-d16-h2 0.001 (circuit"
        " × 1.4), by 21 and 21 runs; a finer search would gain 0.0000 at most (95 % bound)"
    )


def test_bound_of_a_finer_search_covers_the_error_in_the_interval(cached_world):
    """The circuit's rate counts, too, where only the minimum in `optim.lr` is certain."""

    def loss(run):
        if not run.tuning:
            return loss_of(run)
        noise = random.Random(f"{run.arm} {run.changes}").gauss(0, 0.002)
        flat = 0.001 * math.log(run.changes.get("variant.lr", 1.4) / 1.4) ** 2
        steep = 0.1 * math.log(run.changes["optim.lr"] / 1e-3) ** 2
        return 2 + 0.3 * is_arm(run) + steep + flat + noise

    world = cached_world(*TUNED).finish(loss)
    study = world.study()
    curves = find_lr_curves(study)
    errors = [
        math.sqrt(entry.tuning_variance)
        for entry in study.entries
        if curves[entry.arm.name].surface.size == 1 and "uniform" not in entry.name
    ]
    assert len(errors) == 2
    (bound,) = re.findall(r"would gain ([\d.]+) at most", checks(world)["learning rate"].message)
    assert float(bound) > max(errors)


@pytest.mark.parametrize("is_solved", [True, False])
def test_task_that_is_solved_in_tuning_alone_is_a_warning(cached_world, is_solved):
    def loss(run):
        if run.tuning:
            return zero if run.changes["optim.lr"] < 3e-3 else 0.9
        return 0.9 if is_arm(run) and run.changes["seed"] and not is_solved else zero

    zero = 1e-6 - 0.1  # validation losses are 0.1 higher

    found = checks(cached_world(*TUNED).finish(loss))["learning rate"]
    assert found.state == (OK if is_solved else WARNING)
    message = (
        "solved in tuning, but not by 2 of 3 runs of no_q-d16-h2: give more sweep.tuning_seeds"
    )
    assert found.message.endswith(message) == (not is_solved)


@pytest.mark.parametrize(("failed", "is_warned"), [(1, False), (2, True), (3, True)])
@pytest.mark.parametrize("side", ["no_q", "standard"])
def test_rates_at_which_other_seeds_fail_are_a_warning(cached_world, side, failed, is_warned):
    """The seeds of tuning were lucky; a failure in one run of four is no rare one."""
    usual = bowl(lambda run: 1e-3)

    def loss(run):
        fails = run.arm.startswith(side) and run.changes["seed"] < failed and not run.tuning
        return usual(run) + (0.5 if fails else 0.0)

    world = cached_world("variant=standard,no_q", "seed=range(4)", "sweep.tune=true").finish(loss)
    found = checks(world)["learning rate"]
    assert found.state == (WARNING if is_warned else OK)
    text = f"{side}-d16-h2 ends 0.05 or more above what tuning led to expect in {failed} of 4 pairs"
    assert (text in found.message) == is_warned


def test_best_rate_on_the_edge_is_reported_with_its_arm(cached_world):
    """However far the ladder was extended, a higher rate was better still."""
    least = {True: 1e6, False: 1e-3}
    found = checks(cached_world(*TUNED).finish(bowl(lambda run: least[is_arm(run)])))
    assert found["learning rate"] == AuditCheck(
        "learning rate",
        WARNING,
        "the best rate of no_q-d16-h2 is on the edge of those tried, or beside one that diverged:"
        " a better one may lie outside; optim.lr=RATE gives others",
    )


@pytest.mark.parametrize("limit", [0.0, 1e-3])
def test_search_that_has_not_ended_has_chosen_no_rate(cached_world, limit):
    whole = bowl(lambda run: 1e-3)
    world = cached_world(*TUNED).finish(
        lambda run: None if is_arm(run) and run.changes["optim.lr"] > limit else whole(run)
    )
    found = checks(world)["learning rate"]
    assert found == AuditCheck("learning rate", WARNING, "not chosen yet: that of no_q-d16-h2")


def test_seeds_without_a_partner_are_grouped_by_reason(cached_world):
    world = cached_world("variant=standard,no_q", "seed=range(8)").finish(
        lambda run: None if is_arm(run) and run.changes["seed"] else loss_of(run)
    )
    found = checks(world)
    assert found["runs"].message == "no_q-d16-h2: 7 waiting (s1, s2, s3, s4 and 3 more)"
    assert found["pairs"].message == (
        "1; runs without a partner: s1, s2, s3, s4 and 3 more: no_q-d16-h2 waiting"
    )


def test_divergence_at_every_rate_is_a_warning(cached_world):
    whole = bowl(lambda run: 1e-3)
    world = cached_world(*TUNED).finish(lambda run: "diverged" if is_arm(run) else whole(run))
    found = checks(world)
    assert "no_q-d16-h2: no learning rate was chosen" in found["runs"].message
    assert found["learning rate"].state == WARNING


def test_rate_other_than_the_best_is_a_warning(cached_world):
    world = cached_world("variant=standard,no_q", "seed=0,1", "optim.lr=5e-4,1e-3,2e-3").finish(
        lambda run: 2 + math.log(run.changes["optim.lr"] / 1e-3) ** 2 + run.changes["seed"] / 10
    )
    study = world.study()
    states = {}
    for family in find_families(study):
        (check,) = [
            c for c in audit_gap(family, 0, find_lr_curves(study)) if c.name == "learning rate"
        ]
        states[family.baseline.rate] = check
    assert states[1e-3].state == WARNING
    assert "but not the rate of the circuit of no_q-d16-h2 lr 0.001" in states[1e-3].message
    for rate in (5e-4, 2e-3):
        assert states[rate].state == WARNING
        assert (
            f"no_q-d16-h2 lr {rate:.3g} runs at {rate:.3g} (circuit × 1.41), best is 0.001 (circuit"
            in states[rate].message
        )


@pytest.mark.parametrize(
    "words", [("optim.lr_final=1.0",), ("optim.schedule=wsd", "optim.cooldown=0.0")]
)
def test_schedules_without_annealing_are_a_warning(cached_world, words):
    found = checks(cached_world(*PAIR, *words).finish(loss_of))["annealed"]
    assert found.state == WARNING
    assert (
        "no_q-d16-h2 and standard-d16-h2 is not annealed; optim.schedule=cosine with"
        in found.message
    )


def test_schedules_of_different_lengths_are_noted(cached_world):
    world = cached_world(
        "variant=standard", "train.steps=12,24", "seed=0,1", "sweep.baseline={train.steps:12}"
    )
    found = checks(world.finish(loss_of))["annealed"]
    assert found.state == NOTE
    assert "768 against 384" in found.message


def test_mismatch_at_equal_tokens_is_noted(pair):
    found = checks(pair)["matched"]
    assert found.state == NOTE
    assert found.message.startswith("at equal tokens: params -8.2%")
    assert "training FLOPs -3.4%" in found.message


def test_equal_sizes_are_called_equal(cached_world):
    found = checks(cached_world(*TWIN[:1], "seed=0").finish(loss_of), 1)["matched"]
    assert "equal params" in found.message


@pytest.mark.parametrize(("control", "name"), [("params", "params"), ("flops", "training FLOPs")])
def test_controlled_quantity_is_checked(cached_world, control, name):
    world = cached_world(*PAIR, f"control={control}").finish(loss_of)
    study = world.study()
    (found,) = find_families(study)[0].gaps
    by_axis = {
        axis: next(
            check
            for check in audit(found, {}, axis=axis, margin=None, rounding_gap=None)
            if check.name == "matched"
        )
        for axis in ("params", "flops", "tokens")
    }
    assert by_axis[control].state == OK
    assert name in by_axis[control].message
    assert checks(world)["matched"] == by_axis[control]
    assert by_axis["tokens"].message.startswith("at equal tokens: ")


def test_violated_control_is_a_warning(pair):
    (found,) = find_families(pair.study())[0].gaps
    for axis in ("params", "flops"):
        state = {
            check.name: check.state
            for check in audit(found, {}, axis=axis, margin=None, rounding_gap=None)
        }
        assert state["matched"] == WARNING


def test_arms_of_two_optimizers_are_a_warning(cached_world):
    """A claim or a sweep may compare them, but then the gap is not of attention alone."""
    baseline = "sweep.baseline={variant: standard, optim.optimizer: adamw}"
    world = cached_world(*PAIR, "optim.optimizer=adamw,muon", baseline).finish(loss_of)
    found = [checks(world, number)["optimizer"] for number in range(3)]
    assert sorted((check.state, check.message) for check in found) == [
        (OK, "adamw"),
        (OK, "muon against adamw"),  # standard under both: nothing else differs
        (WARNING, "muon against adamw: another optimizer may be what moved the gap"),
    ]


@pytest.mark.parametrize(
    ("words", "state"),
    [
        ((*PAIR, "variant.lr=matched"), NOTE),
        (PAIR, NOTE),  # between the matched and the same rate
        ((*PAIR, "variant.lr=same"), OK),
        ((*PAIR, "variant.lr=1.5"), OK),
        ((*PAIR, "optim.lr=1e-3,2e-3"), NOTE),  # tuned, but not the circuit's
        (TUNED, OK),
    ],
    ids=str,
)
def test_untuned_rates_matched_for_adamw_are_noted_under_muon(cached_world, words, state):
    found = checks(cached_world(*words, "optim=muon").finish(loss_of))["optimizer"]
    assert found.state == state
    assert found.message.startswith("muon; the circuit's rate of no_q-d16-h2") == (state == NOTE)


@pytest.mark.parametrize(
    ("match", "state"), [("exact", OK), ("spread", NOTE), ("none", WARNING), (None, WARNING)]
)
def test_initialization_match_is_reported(pair, match, state):
    change(pair, is_arm, init={"mode": "matched", "match": match})
    found = checks(pair)["initialization"]
    assert found.state == state
    assert found.message == (
        f"{MATCH} exact" if state == OK else f"{MATCH} no_q-d16-h2 {HOW[match]}"
    )


@pytest.mark.parametrize(
    ("arm", "text"),
    [
        (
            "mla",
            "RoPE rotates 4 separate dimensions of a head in the arm and whole heads in the"
            " baseline",
        ),
        ("no_q", ""),
    ],
)
def test_other_rotated_dimensions_are_named(cached_world, arm, text):
    words = f"variant=standard,{arm}", "seed=range(2)", "model.position=rope"
    baseline = "sweep.baseline={variant: standard, variant.rope_dims: null}"
    found = checks(cached_world(*words, baseline).finish(loss_of))["matched"]
    assert text in found.message
    assert ("rotates" in found.message) == bool(text)
    assert found.state == NOTE


@pytest.mark.parametrize("lr", [{"matched": 1.0}, {"factor": "x"}, {"factor": [2.0]}])
def test_malformed_rate_of_a_circuit_is_not_reported(pair, lr):
    change(pair, is_arm, lr=lr)
    assert "circuit's rate" not in checks(pair)["initialization"].message


def test_unknown_initialization_is_a_warning(pair):
    change(pair, is_arm, init=None)
    assert checks(pair)["initialization"].state == WARNING


def test_naive_start_is_a_warning(cached_world):
    found = checks(cached_world(*PAIR, "variant.init=naive").finish(loss_of))["initialization"]
    assert found.state == WARNING
    assert f"{MATCH} no_q-d16-h2 not matched (variant.init=naive)" in found.message


def test_side_without_matched_rate_is_named(cached_world):
    world = cached_world(
        "variant=merged_w", "variant.lr=matched,same", "seed=0", "sweep.baseline={variant.lr:same}"
    )
    assert (
        "circuit's rate of merged_w-d16-h2-lr=same × 1"
        in checks(world.finish(lambda run: 2.0))["initialization"].message
    )


@pytest.mark.parametrize(
    ("key", "name", "state"),
    [("precision", "precision", WARNING), ("data_fingerprint", "data", INVALID)],
)
def test_mixed_circumstances_are_a_warning(pair, key, name, state):
    change(pair, lambda run: run.changes["seed"] == 1, **{key: "another"})
    found = checks(pair)[name]
    assert found.state == state
    assert re.match("mixed: |different in 1 of 2 pairs: ", found.message)
    assert "another" in found.message


@pytest.mark.parametrize("key", ["precision", "data_fingerprint"])
def test_unknown_circumstance_is_a_warning(pair, key):
    change(pair, lambda run: True, **{key: None})
    found = checks(pair)[key.removesuffix("_fingerprint")]
    assert (found.state, found.message) == (WARNING, "unknown")


def test_other_data_in_one_arm_leaves_no_pair(pair):
    change(pair, is_arm, data_fingerprint="another")
    found = checks(pair)
    assert found["pairs"].state == WARNING
    assert found["pairs"].message.startswith("0; runs without a partner: ")
    assert "different data" in found["pairs"].message


MIXED = {
    "commit": ("code", {"code": {"commit": "f" * 40, "diff": ""}}, "ffffffffff"),
    "edits": ("code", {"code": {"commit": "0123456789abcdef", "diff": "+ a"}}, "0123456789+"),
    "torch": ("code", {"versions": {"torch": "2.14.1"}}, "2.14.1"),
    "cpu": ("machine", {"machine": {"cpu": "another CPU"}}, "another CPU"),
}


@pytest.mark.parametrize(("name", "more", "word"), MIXED.values(), ids=MIXED.keys())
def test_pair_of_two_code_versions_or_machines_is_a_warning(pair, name, more, word):
    surroundings(pair, lambda run: is_arm(run) and run.changes["seed"] == 2, **more)
    found = checks(pair)[name]
    assert found.state == WARNING
    assert "1 of 3 pairs" in found.message
    assert word in found.message


@pytest.mark.parametrize(("name", "more", "word"), MIXED.values(), ids=MIXED.keys())
def test_code_or_machine_varying_between_pairs_is_a_warning(pair, name, more, word):
    surroundings(pair, lambda run: run.changes["seed"] == 2, **more)
    found = checks(pair)[name]
    assert found.state in (NOTE, WARNING)
    assert "each pair" in found.message
    assert word in found.message


def test_another_device_is_another_machine(pair):
    change(pair, is_arm, device="cuda")
    found = checks(pair)["machine"]
    assert found.state == WARNING
    assert "3 of 3 pairs" in found.message


def test_another_gpu_is_another_machine(pair):
    change(pair, lambda run: True, device="cuda")
    assert checks(pair)["machine"].state == OK
    surroundings(pair, is_arm, machine={"cpu": "a CPU", "device": "another GPU"})
    found = checks(pair)["machine"]
    assert found.state == WARNING
    assert "cuda (another GPU)" in found.message


def test_one_kernel_is_fair(pair):
    assert checks(pair)["kernel"].state == OK


def test_two_kernels_without_a_rounding_arm_are_a_warning(pair):
    change(pair, is_arm, kernel="math")
    found = checks(pair)["kernel"]
    assert found.state == WARNING
    assert "flash and math" in found.message
    assert "variant=standard_reassociated would measure the effect of rounding" in found.message


def twins(cached_world, rounding):
    """Return a sweep in which standard_reassociated lies ± rounding beside standard."""

    def loss(run):
        sign = 1 if run.changes["seed"] % 2 else -1
        own = sign * rounding if "reassociated" in run.arm else 0.0
        return loss_of(run) + own + sign * 0.01 * is_arm(run)

    world = cached_world(*TWIN).finish(loss)
    change(world, is_arm, kernel="math")
    return world


@pytest.mark.parametrize("part", [0.5, 0.99, 1.01, 4.0])
def test_two_kernels_are_held_against_a_third_of_the_margin(cached_world, part):
    (family,) = find_families(twins(cached_world, 1e-3).study())
    most = max(map(abs, family.rounding_gap.bounds(0.90)))
    margin = 3 * most / part
    found = audit(
        family.gaps[0], {}, axis="tokens", margin=margin, rounding_gap=family.rounding_gap
    )[-1]
    assert found.state == (OK if part < 1 else WARNING)
    assert f"rounding moves the gap by at most {most:.4f}" in found.message
    than = "less" if part < 1 else "not less"
    assert f", {than} than a third of the margin, {margin:g}" in found.message


def test_two_kernels_without_a_margin_are_noted(cached_world):
    (family,) = find_families(twins(cached_world, 1e-3).study())
    found = audit(family.gaps[0], {}, axis="tokens", margin=None, rounding_gap=family.rounding_gap)[
        -1
    ]
    assert found.state == NOTE
    assert "rounding moves the gap" in found.message


def test_rounding_gap_of_one_pair_bounds_nothing(cached_world):
    world = twins(cached_world, 1e-3)
    for run in world.runs():
        if "reassociated" in run.arm and run.changes["seed"]:
            world.write(run, "failed")
    assert "would measure the effect of rounding" in checks(world)["kernel"].message
    assert checks(world)["kernel"].state == WARNING


def test_diverged_rounding_arm_is_a_warning(cached_world):
    world = twins(cached_world, 1e-9)
    run = next(run for run in world.runs() if "reassociated" in run.arm)
    world.write(run, "diverged")
    (family,) = find_families(world.study())
    found = audit(family.gaps[0], {}, axis="tokens", margin=0.1, rounding_gap=family.rounding_gap)[
        -1
    ]
    assert found.state == WARNING  # nothing bounds what rounding is worth: not a third of 0.1


def test_kernels_of_the_rounding_pair_are_fine(cached_world):
    world = twins(cached_world, 1e-3)
    change(world, lambda run: "reassociated" in run.arm, kernel="math")
    found = checks(world, 1)["kernel"]
    assert found.state == OK
    assert "this gap measures the effect of rounding" in found.message


@pytest.mark.parametrize(
    ("best", "state", "message"),
    [
        (3.0, OK, "standard-d16-h2 beats the best n-gram by 0.8571"),
        (
            1.5,
            WARNING,
            "standard-d16-h2 does not beat the best n-gram (0.6429 above it): raise train.steps",
        ),
    ],
)
def test_baseline_is_compared_with_the_best_ngram(pair, best, state, message):
    references = {"tokens": 5, "ngram": [4.0, best], "lzma": 1.0}
    change(pair, lambda run: not is_arm(run), text_references=references)
    found = checks(pair)["n-grams"]
    assert (found.state, found.message) == (state, message)


def test_masked_tokens_are_not_compared_with_ngrams(pair):
    change(pair, lambda run: True, data={"source": "text", "objective": "mlm"})
    found = checks(pair)["n-grams"]
    assert (found.state, found.message) == (OK, "n-grams do not predict masked tokens")


BY_POSITION = ("variant=standard,no_q,static_scores", "seed=range(4)")


@pytest.mark.parametrize(
    ("lead", "margin", "state", "words"),
    [
        (0.5, None, OK, ""),
        (0.5, 0.01, OK, ""),
        (0.5, 0.2, NOTE, "less than 3 margins of 0.2"),
        (0.0, None, WARNING, "raise train.steps, or take a task that needs content"),
        (-0.1, None, WARNING, "raise train.steps, or take a task that needs content"),
    ],
)
def test_baseline_has_to_beat_weights_by_position(cached_world, lead, margin, state, words):
    """Without a clear lead of the baseline the content of tokens is not shown to matter."""

    def loss(run):
        noise = random.Random(run.id).gauss(0, 1e-3)
        return 2.0 + run.changes["seed"] / 7 + noise + lead * run.arm.startswith("static")

    section = Section("a sweep", "", cached_world(*BY_POSITION).finish(loss).study(), margin)
    gaps = {gap.arm.partition("-")[0]: gap for gap in section.summary.gaps}
    check = next(check for check in gaps["no_q"].audit if check.name == "content")
    assert check.state == state
    size = re.search(
        r"static_scores-d16-h2, weights by position alone, is ([-+.\d]+) ", check.message
    )
    assert float(size[1]) == pytest.approx(lead, abs=3e-3)
    assert check.message.endswith(words)
    limit = "where content is not shown to matter"
    assert (limit in gaps["no_q"].scopes) == (state == WARNING)
    itself = next(check for check in gaps["static_scores"].audit if check.name == "content")
    assert (itself.state, itself.message) == (
        OK,
        "not needed: this is a comparison with weights by position",
    )
    explained = f"{limit}: standard does not clearly beat `static_scores`"
    assert (explained in " ".join(summarize(section))) == (state == WARNING)


def test_unknown_content_says_what_would_tell(cached_world):
    check = checks(cached_world(*PAIR).finish(loss_of))["content"]
    assert check.state == NOTE
    assert "no variant=static_scores, weights by position alone" in check.message


def test_weights_by_position_at_other_sites_do_not_count(cached_world):
    model = ("model=nano_translator", "data=reverse", "model.context=8")
    words = ("variant=standard,no_q,static_scores", "variant.sites=all,cross", "seed=range(3)")
    only = "sweep.filter=[\"variant != 'static_scores'\"]"
    study = cached_world(*model, only, *words).finish(loss_of).study()
    checks = {
        gap.arm.partition("-")[0]: next(c for c in gap.audit if c.name == "content")
        for gap in describe_study(study).gaps
    }
    assert "no variant=static_scores, weights" in checks["no_q"].message
    assert "static_scores_cross-d16-h2, weights" in checks["no_q_cross"].message

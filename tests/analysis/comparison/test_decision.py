"""Decisions hold for the learning rates at which the arms were compared, and say so."""

import dataclasses
import math
import random

import pytest

from qkablate.analysis.comparison.audit import WARNING, AuditCheck
from qkablate.analysis.comparison.gaps import find_families
from qkablate.analysis.comparison.summary import describe_study
from tests.analysis.worlds import FLOOR_LEAD

PAIR = ("variant=standard,no_q", "seed=range(5)")
BOTH = ("variant=standard,merged_w", "variant.lr=matched,same", "seed=range(4)")


def by_rate(matched, same):
    """Return losses of merged_w that are so far from standard's at its two rates."""

    def loss(run):
        gap = 0.0
        if run.arm.startswith("merged_w"):
            gap = matched if "lr=matched" in run.arm else same
        return 2 + gap + run.changes["seed"] / 7 + random.Random(run.id).gauss(0, 1e-3)

    return loss


def verdicts(world, loss):
    return [gap.verdict for gap in describe_study(world.finish(loss).study()).gaps]


def test_variants_at_one_rate_are_judged_at_this_rate(cached_world):
    world = cached_world("variant=standard,merged_w", "seed=range(4)")
    loss = by_rate(0.1, 0.1)
    assert verdicts(world, loss) == ["worse at this rate (not tuned)"]


@pytest.mark.parametrize(
    ("matched", "same", "says"),
    [
        (0.2, 0.1, "worse at both rates (not tuned)"),
        (-0.2, -0.1, "better at both rates (not tuned)"),
        (0.2, -0.1, "no verdict: the sign depends on the rate"),
    ],
)
def test_circuit_rates_that_disagree_leave_no_verdict(cached_world, matched, same, says):
    world = cached_world(*BOTH)
    assert len(world.manifest.arms) == 3  # standard has one rate only
    assert verdicts(world, by_rate(matched, same)) == [says, says]


def test_difference_shown_at_one_of_two_rates_holds_there(cached_world):
    def loss(run):
        noise = 0.3 * (-1) ** run.changes["seed"] if "lr=same" in run.arm else 0.0
        return by_rate(0.2, 0.1)(run) + noise

    first, second = verdicts(cached_world(*BOTH), loss)
    assert first == "worse at this rate (not tuned)"
    assert second == "no difference found at this rate (not tuned)"


def test_tuned_variants_get_a_bare_decision(cached_world):
    def loss(run):
        distance = math.log(run.changes["optim.lr"] / 1e-3) ** 2 / 10
        distance += math.log(run.changes.get("variant.lr", 0.2) / 0.2) ** 2 / 20
        return by_rate(0.1, 0.1)(run) + distance

    world = cached_world("variant=standard,merged_w", "seed=range(4)", "sweep.tune=true")
    assert verdicts(world, loss) == ["worse"]
    assert describe_study(world.study()).tuning is None


def test_best_of_several_rates_is_limited_to_the_rate_of_its_circuit(cached_world):
    def loss(run):
        return by_rate(0.1, 0.1)(run) + math.log(run.changes["optim.lr"] / 1e-3) ** 2

    world = cached_world("variant=standard,merged_w", "seed=range(4)", "optim.lr=5e-4,1e-3,2e-3")
    other = "worse at this rate (not tuned)"
    assert verdicts(world, loss) == [other, "worse at these rates", other]
    plan = describe_study(world.study()).tuning
    assert plan.command[-3] == "optim.lr=0.001"  # three are too few
    assert plan.command[-2:] == ["sweep.name=grid-tuned", "sweep.tune=true"]


def test_best_of_several_rates_without_a_multiplier_gets_a_bare_decision(cached_world):
    def loss(run):
        gap = 0.1 if run.arm.startswith("qk_norm") else 0.0
        distance = math.log(run.changes["optim.lr"] / 1e-3) ** 2
        return 2 + gap + distance + random.Random(run.id).gauss(0, 1e-3)

    world = cached_world("variant=standard,qk_norm", "seed=range(4)", "optim.lr=5e-4,1e-3,2e-3")
    other = "worse at this rate (not tuned)"
    assert verdicts(world, loss) == [other, "worse", other]


def test_tuned_circuit_rates_that_disagree_leave_no_verdict(cached_world):
    def loss(run):
        distance = math.log(run.changes["optim.lr"] / 1e-3) ** 2
        return by_rate(0.1, -0.1)(run) + distance

    world = cached_world(*BOTH, "sweep.tune=true")
    says = "no verdict: the sign depends on the rate"
    assert verdicts(world, loss) == [says, says]


def test_sizes_of_one_variant_get_a_bare_decision(cached_world):
    words = ("variant=standard", "model.heads=1,2", "seed=range(4)")
    world = cached_world(*words, "sweep.baseline={model.heads:2}")
    (says,) = verdicts(world, lambda run: 2 + 0.1 * ("h1" in run.arm) + random.random() / 1e3)
    assert says == "worse"


def test_cost_of_tuning_counts_the_arms_without_their_circuit_rates(cached_world):
    world = cached_world(*BOTH).finish(by_rate(0.2, -0.1))
    plan = describe_study(world.study()).tuning
    assert plan.runs == 2 * (23 + 4)
    assert plan.seconds == plan.runs * 1.0  # each result says 1.0 s
    for run in world.runs():
        world.write(run, {"program_runs": 4})
    assert describe_study(world.study()).tuning.seconds == plan.runs * 0.25
    assert plan.command[0] == "sweep"
    assert plan.command[-1] == "sweep.tune=true"
    assert not any(word.startswith("variant.lr") for word in plan.command)


@pytest.mark.parametrize("side", ["standard", "no_q"])
def test_divergence_opens_its_side_of_the_gap(cached_world, side):
    """Survivors show no gap in the direction in which the gap has no bound."""

    def loss(run):
        if run.arm.startswith(side) and run.changes["seed"] == 0:
            return "diverged"
        gap = 0.1 if run.arm.startswith("no_q") else 0.0
        return 2 + gap + random.Random(run.id).gauss(0, 1e-3)

    (gap,) = describe_study(cached_world(*PAIR).finish(loss).study()).gaps
    low, high = gap.bounds
    assert gap.bca is gap.sign_flip is gap.perplexity_percent_interval is None
    if side == "no_q":  # may be even worse
        assert (high, gap.decision) == (None, "arm diverged")
        assert 0.09 < low < 0.1
        assert gap.p < 1e-3
    else:
        assert (low, gap.decision) == (None, "baseline diverged")
        assert gap.p == 1.0


def test_two_equal_pairs_decide_nothing(cached_world):
    world = cached_world("variant=standard,no_q", "seed=range(2)")
    (gap,) = describe_study(world.finish(lambda run: 2 + 0.1 * ("no_q" in run.arm)).study()).gaps
    assert (gap.n, gap.verdict) == (2, "too few pairs (under 3)")


def test_difference_within_the_margin_is_equivalent(cached_world):
    def loss(run):
        gap = 0.001 if run.arm.startswith("no_q") else 0.0
        return 2 + gap + random.Random(run.id).gauss(0, 1e-4)

    study = cached_world(*PAIR, "sweep.floor=true").finish(loss).study()
    (gap,) = describe_study(study, margin=0.01).gaps
    assert gap.p_holm < 0.05
    assert gap.verdict.startswith("equivalent (worse by 0.00")
    assert gap.decision == "equivalent"
    (gap,) = describe_study(study).gaps
    assert gap.decision == "worse"


def test_warning_about_documents_limits_the_verdict(cached_world):
    loss = by_rate(0.1, 0.1)
    world = cached_world("variant=standard,merged_w", "seed=range(4)")
    (gap,) = describe_study(world.finish(loss).study()).gaps
    warning = AuditCheck("documents", WARNING, "the standard error over documents is large")
    limited = dataclasses.replace(gap, audit=[*gap.audit, warning])
    assert limited.verdict == "worse at this rate (not tuned), on these documents"


def test_uncertain_minimum_limits_the_verdict_to_these_rates(cached_world):
    """Validation losses without a minimum: a flat curve, and noise."""

    def loss(run):
        gap = 0.1 if run.arm.startswith("merged_w") else 0.0
        noise = random.Random(str(run.changes)).gauss(0, 0.02 if run.tuning else 1e-4)
        return 2 + gap + noise

    world = cached_world("variant=standard,merged_w", "seed=range(4)", "sweep.tune=true")
    assert verdicts(world, loss) == ["worse at these rates"]


# Assay sensitivity: `uniform` has to be beaten

WORDS = (*PAIR, "sweep.floor=true")


def losses(gap=0.0, lead=1.0):
    """Return losses of no_q, so far above standard, and of the floor."""

    def loss(run):
        shift = {"no_q": gap, "uniform": lead - FLOOR_LEAD, "standard": 0.0}[
            run.arm.partition("-")[0]
        ]
        noise = random.Random(run.id).gauss(0, 1e-4)
        return 2 + shift + run.changes["seed"] / 7 + noise

    return loss


def only_gap(world, loss, margin=None):
    (gap,) = describe_study(world.finish(loss).study(), margin=margin).gaps
    return gap


def test_floor_is_no_arm_of_the_comparison(cached_world):
    world = cached_world(*WORDS)
    assert [*world.manifest.arms] == ["standard-d16-h2", "no_q-d16-h2", "uniform-d16-h2"]
    (family,) = find_families(world.finish(losses()).study())
    assert [gap.arm.name for gap in family.gaps] == ["no_q-d16-h2"]
    assert family.gaps[0].lead == pytest.approx(1, abs=1e-3)


def test_equivalence_needs_a_baseline_above_the_floor(cached_world):
    """The lead has to be several margins: with all arms at the floor every arm is equivalent."""
    world = cached_world(*WORDS)
    assert only_gap(world, losses(), margin=0.01).decision == "equivalent"
    for lead in (0.0, 0.02):
        gap = only_gap(world, losses(lead=lead), margin=0.01)
        assert gap.verdict == "insensitive"
        (check,) = [check for check in gap.audit if check.name == "floor"]
        assert check.state == "warning"
        assert ("does not clearly beat" in check.message) == (lead == 0)


TRANSLATOR = ("model=nano_translator", "data=reverse", "model.context=8", "sweep.floor=true")


def losses_by_site(leads):
    """Return losses of arms that are alike, and of the floors, so far above standard."""

    def loss(run):
        name = run.arm.partition("-")[0]
        lead = leads[name.removeprefix("uniform_")] - FLOOR_LEAD if "uniform" in name else 0.0
        noise = random.Random(run.id).gauss(0, 1e-4)
        return 2 + lead + run.changes["seed"] / 7 + noise

    return loss


def test_site_that_hardly_matters_hides_no_variant(cached_world):
    """Attention of the encoder is worth less than three margins, that to the source much more."""
    words = ("variant=standard,no_q", "variant.sites=encoder,cross", "seed=range(4)")
    world = cached_world(*TRANSLATOR, *words)
    study = world.finish(losses_by_site({"encoder": 0.02, "cross": 2.0})).study()
    gaps = describe_study(study, margin=0.01).gaps
    assert {gap.arm: gap.decision for gap in gaps} == {
        "no_q_encoder-d16-h2": "insensitive",
        "no_q_cross-d16-h2": "equivalent",
    }
    floors = [next(check for check in gap.audit if check.name == "floor") for gap in gaps]
    assert [check.state for check in floors] == ["warning", "ok"]
    assert "beats uniform_encoder-d16-h2 by 0.0" in floors[0].message
    assert "beats uniform_cross-d16-h2 by 1.9" in floors[1].message


def test_floor_at_other_sites_does_not_count(cached_world):
    words = ("variant=standard,no_q,uniform", "variant.sites=all,cross", "seed=range(4)")
    no_cross = "sweep.filter=[\"variant != 'uniform_cross'\"]"
    world = cached_world(*TRANSLATOR[:3], "sweep.floor=false", no_cross, *words)
    leads = {"uniform": 2.0 + FLOOR_LEAD}
    gaps = describe_study(world.finish(losses_by_site(leads)).study(), margin=0.01).gaps
    found = {gap.arm.partition("-")[0]: gap for gap in gaps}
    assert found["no_q"].decision == "equivalent"
    assert found["no_q_cross"].decision == "insensitive"
    (check,) = (check for check in found["no_q_cross"].audit if check.name == "floor")
    assert (
        "no arm with variant=uniform variant.sites=cross in the baseline's setting" in check.message
    )


@pytest.mark.parametrize("lead", [1.0, 0.0])
def test_start_that_is_equivalent_needs_a_floor(cached_world, lead):
    baseline = "sweep.baseline={variant.init: matched}"
    world = cached_world("variant.init=matched,naive", baseline, "sweep.floor=true", PAIR[-1])
    found = only_gap(world, losses(lead=lead), margin=0.01).decision
    assert found == ("equivalent" if lead else "insensitive")


def test_without_a_floor_nothing_is_equivalent(cached_world):
    world = cached_world(*PAIR)
    assert len(world.manifest.arms) == 2
    gap = only_gap(world, losses(), margin=0.01)
    assert gap.decision == "insensitive"
    assert "sweep.floor=true" in next(c.message for c in gap.audit if c.name == "floor")
    assert only_gap(world, losses()).decision == "no difference found"


def test_not_worse_needs_a_baseline_above_the_floor(cached_world):
    """Noise almost as large as the margin, and an arm that may be better by more than it."""

    def loss(lead):
        inner = losses(-0.006, lead)
        return lambda run: (
            inner(run) + run.arm.startswith("no_q") * 0.008 * (-1) ** run.changes["seed"]
        )

    world = cached_world(*WORDS)
    assert only_gap(world, loss(1.0), margin=0.01).decision == "not worse"
    assert only_gap(world, loss(0.0), margin=0.01).decision == "insensitive"


def test_difference_that_showed_needs_no_floor(cached_world):
    assert only_gap(cached_world(*WORDS), losses(0.1, 0.0), margin=0.01).decision == "worse"


def test_small_difference_that_showed_is_no_blindness(cached_world):
    """Within the margin, and found without a floor: with one it would be equivalent."""
    world = cached_world(*WORDS)

    def loss(run):
        spread = run.arm.startswith("no_q") * 1e-4 * (-1) ** run.changes["seed"]
        return losses(0.004, 0.0)(run) + spread

    assert only_gap(world, loss).decision == "worse"
    assert only_gap(world, loss, margin=0.01).decision == "worse"


def test_baseline_below_the_floor_finds_no_difference_either(cached_world):
    gap = only_gap(cached_world(*WORDS), losses(lead=-0.1))
    assert gap.decision == "insensitive"


def test_loss_beside_the_floor_is_one_before_attention_mattered(cached_world):
    world = cached_world(*WORDS)
    gap = only_gap(world, losses(0.1, -0.1))
    assert gap.verdict == "worse at this rate (not tuned), before attention mattered"
    assert gap.short_verdict == "worse"
    (check,) = [check for check in gap.audit if check.name == "floor"]
    assert check.is_warning
    assert "finding no difference would mean nothing; raise train.steps" in check.message
    assert "attention" not in only_gap(world, losses(0.1, 1.0)).verdict
    # An arm that gained shows that attention can matter.
    assert only_gap(world, losses(-0.1, -0.1)).verdict == "better at this rate (not tuned)"


@pytest.mark.parametrize(
    ("lead", "words"),
    [(1.0, "before the model beats an n-gram"), (-0.1, "before attention mattered")],
)
@pytest.mark.parametrize(("gap", "decision"), [(0.1, "worse"), (-0.1, "better")])
def test_verdict_names_the_floor_or_else_the_ngrams(cached_world, lead, words, gap, decision):
    loss = losses(gap, lead)
    references = {"tokens": 1000, "ngram": [3.1, 0.5], "lzma": 1.5}

    def outcome(run):
        floor = FLOOR_LEAD * run.arm.startswith("uniform")
        splits = dict.fromkeys(("train", "val", "test"), loss(run) + floor)
        return {"loss": splits, "text_references": references}

    summary = only_gap(cached_world(*WORDS), outcome)
    assert summary.verdict == f"{decision} at this rate (not tuned), {words}"


@pytest.mark.parametrize(
    ("loss", "margin", "short"),
    [
        (losses(lead=-0.1), None, "no verdict"),
        (losses(), None, "no difference found"),
        (losses(0.005), 0.01, "equivalent"),
        (lambda run: "diverged" if run.arm.startswith("no_q") else 2.0, None, "arm diverged"),
        (lambda run: 2.0 if run.changes["seed"] < 2 else "failed", None, "too few pairs"),
    ],
)
def test_short_verdict_has_no_conditions(cached_world, loss, margin, short):
    assert only_gap(cached_world(*WORDS), loss, margin).short_verdict == short


def test_listed_uniform_is_the_floor_too(cached_world):
    world = cached_world("variant=standard,no_q,uniform", "seed=range(5)", "sweep.floor=true")
    assert len(world.manifest.arms) == 3
    gaps = describe_study(world.finish(losses(lead=FLOOR_LEAD + 1)).study(), margin=0.01).gaps
    assert {gap.arm.partition("-")[0]: str(gap.decision) for gap in gaps} == {
        "no_q": "equivalent",
        "uniform": "worse",
    }


def test_one_variant_at_several_sizes_has_no_floor(cached_world):
    world = cached_world("model.heads=1,2", "seed=range(5)", "sweep.floor=true")
    assert {arm.variant for arm in world.manifest.arms.values()} == {"standard"}


def test_every_model_has_its_floor(cached_world):
    words = ("variant=standard,no_v", "model.attention_skip=true,false", "control=none,params")
    world = cached_world(*words, "sweep.floor=true")
    floors = [arm for arm in world.manifest.arms.values() if arm.variant == "uniform"]
    assert {arm.config.model.attention_skip for arm in floors} == {True, False}
    assert len(floors) == 2  # not one more for the control
    families = find_families(world.finish(lambda run: 2.0).study())
    for gap in (gap for family in families for gap in family.gaps):
        assert gap.floor.arm.arm.config.model == gap.baseline.arm.config.model


def test_same_parametrization_needs_no_floor(cached_world):
    words = ("model.heads=1,2", "sweep.baseline={model.heads: 2}", "seed=range(3)")
    study = cached_world(*words).finish(lambda run: 2 + run.changes["seed"] / 7).study()
    (family,) = find_families(study)
    assert family.gaps[0].lead == math.inf

"""Claims and their runs: whether a truth that is known gives the verdict it should."""

import dataclasses
import json
import math

import numpy as np
import pytest

from qkablate.analysis.claims.judgement import (
    counting_judgement,
    counting_sweep,
    judge_claim,
    judge_looks,
)
from qkablate.analysis.claims.parse import load_claim, parse_claim
from qkablate.analysis.claims.registry import claim_grid, register_claim
from qkablate.analysis.claims.verdict import spend_alpha
from qkablate.analysis.comparison.decision import Verdict
from qkablate.errors import UserError
from qkablate.report.section import Section
from qkablate.report.text.claims import (
    format_claim,
    format_judgement,
    format_seeds_needed,
    judgement_to_json,
)
from qkablate.report.text.summary import summarize

PART = {"arm": "no_q", "kind": "noninferior", "margin": 0.01}
GRID = {"variant": "standard,no_q"}
LENGTHS = GRID | {"train.steps": "12,24,48"}


def claim(seeds=6, grid=None, tuning_seeds=0, says="Keys alone are enough.", **parts):
    parts = {name: PART | changes for name, changes in (parts or {"within": {}}).items()}
    content = {"says": says, "source": "a comment", "seeds": seeds, "parts": parts}
    content |= {"tuning_seeds": tuning_seeds, "grid": grid or GRID}
    # The sizes of this module's sweeps, not those of the scale.
    return dataclasses.replace(parse_claim("mine", content, "small", {}), grid=dict(grid or GRID))


def frozen(world, own, seeds=None):
    grid, words = claim_grid(own, seeds or own.seeds[-1])
    return world(*words, grid=grid)


def gaps(n, mean, sd):
    """N numbers with exactly this mean and this standard deviation."""
    z = np.random.default_rng(n).normal(size=n)
    z = (z - z.mean()) / z.std(ddof=1)
    return [float(v) for v in mean + sd * z]


def losing(own, n, mean, sd=0.001, arm="no_q"):
    """Losses with that gap; between seeds they differ by more."""
    seeds = own.seeds_of("final", n)
    gap = dict(zip(seeds, gaps(n, mean, sd), strict=True))
    level = dict(zip(seeds, np.random.default_rng(1).normal(2, 0.1, n), strict=True))

    def loss(run):
        seed = run.changes["seed"]
        own_gap = gap[seed] if run.arm.split("-")[0] == arm else 0.0
        return float(level[seed]) + own_gap

    return loss


def judged(made, own, reasons=()):
    """Return the judgement after checking that it can be written and printed."""
    found = judge_claim(own, made.study(), list(reasons))
    assert_text_matches(found)
    return found


def assert_text_matches(found):
    text = json.dumps(judgement_to_json(found), allow_nan=False)
    assert json.loads(text)["verdict"] == found.word
    assert json.loads(text)["exploratory"] == found.exploratory
    said = "\n".join(format_judgement(found))
    assert said.isprintable() or "\n" in said
    assert ("(exploratory)" in said) == bool(found.exploratory)
    assert f"\n{found.word}" in said


# gap → kind, margin → verdict; the spread is 0.001 over 8 seeds, so a bound is 0.0007 away.
TRUTHS = {
    0.0: {
        ("noninferior", 0.01): "SUPPORTED",
        ("equivalent", 0.01): "SUPPORTED",
        ("better", 0.01): "EQUIVALENT",
        ("worse", 0.01): "EQUIVALENT",
        ("better", 0.0): "UNDERPOWERED",
        ("worse", 0.0): "UNDERPOWERED",
        ("noninferior", 0.0005): "UNDERPOWERED",
        ("equivalent", 0.0005): "UNDERPOWERED",
        ("better", 0.0005): "UNDERPOWERED",
    },
    0.02: {
        ("noninferior", 0.01): "REFUTED",
        ("equivalent", 0.01): "REFUTED",
        ("better", 0.01): "REFUTED",
        ("better", 0.0): "REFUTED",
        ("worse", 0.01): "SUPPORTED",
        ("worse", 0.0): "SUPPORTED",
        ("worse", 0.03): "EQUIVALENT",
        ("noninferior", 0.03): "SUPPORTED",
        ("noninferior", 0.02): "UNDERPOWERED",
        ("worse", 0.02): "UNDERPOWERED",
    },
    -0.02: {
        ("noninferior", 0.01): "SUPPORTED",
        ("equivalent", 0.01): "REFUTED",
        ("better", 0.01): "SUPPORTED",
        ("better", 0.0): "SUPPORTED",
        ("better", 0.03): "EQUIVALENT",
        ("worse", 0.01): "REFUTED",
        ("worse", 0.0): "REFUTED",
        ("better", 0.02): "UNDERPOWERED",
    },
}


@pytest.mark.parametrize("gap", TRUTHS)
def test_known_truth_gives_its_verdict(world, gap):
    own = claim(8)
    made = frozen(world, own).finish(losing(own, 8, gap))
    study = made.study()
    for (kind, margin), word in TRUTHS[gap].items():
        # What is judged are the runs that are there: the seeds are not made anew here.
        found = judge_claim(claim(8, within={"kind": kind, "margin": margin}), study, [])
        assert found.word == word, (kind, margin)
        assert [one.word for one in found.parts] == [word]
        assert found.is_conclusive == (word != "UNDERPOWERED")
        assert found.n == 8
        same = found.claim.hash == own.hash
        assert found.exploratory == [
            "the seeds of these runs were not derived from the claim's hash"
        ] * (not same)
        assert found.alpha == pytest.approx(0.05)
    assert_text_matches(found)
    assert judged(made, own).exploratory == []
    (part,) = judgement_to_json(found)["parts"]
    assert part["n"] == 8
    assert part["mean"] == pytest.approx(gap, abs=1e-9)
    assert part["sd"] == pytest.approx(0.001)
    low, high = part["interval"]
    half = 1.894579 * 0.001 / math.sqrt(8)  # t of 7 degrees of freedom, 95 % one-sided
    assert low == pytest.approx(gap - half, abs=1e-8)
    assert gap + half - 1e-8 < high < gap + 1.3 * half  # these gaps have a long tail above


def test_spread_is_independent_of_the_mean(world):
    own = claim(8)
    made = frozen(world, own).finish(losing(own, 8, 5.0, sd=0.02))
    for kind, margin, word in (
        ("noninferior", 0.1, "SUPPORTED"),
        ("noninferior", 0.001, "REFUTED"),
        ("worse", 0.001, "SUPPORTED"),
        ("worse", 0.1, "REFUTED"),
        ("worse", 0.019, "UNDERPOWERED"),
    ):
        found = judge_claim(
            claim(8, within={"kind": kind, "margin": margin, "of": "spread"}), made.study(), []
        )
        assert found.word == word, (kind, margin)
        assert found.parts[0].part.sample.mean == pytest.approx(0.02)
        assert judgement_to_json(found)["parts"][0]["of"] == "spread"
        assert_text_matches(found)


def test_all_parts_must_hold(world):
    own = claim(8)
    made = frozen(world, own).finish(losing(own, 8, 0.02))
    true, false = {"margin": 0.03}, {"margin": 0.01}
    open_ = {"margin": 0.02}
    for parts, word in (
        ({"a": true, "b": true | {"margin": 0.04}}, "SUPPORTED"),
        ({"a": true, "b": false}, "REFUTED"),
        ({"a": open_, "b": true}, "UNDERPOWERED"),
        ({"a": open_, "b": false}, "REFUTED"),
        ({"a": true, "b": {"kind": "worse", "margin": 0.03}}, "EQUIVALENT"),
        ({"a": {"kind": "worse"} | false, "b": {"kind": "worse", "margin": 0.03}}, "MIXED"),
    ):
        found = judge_claim(claim(8, **parts), made.study(), [])
        assert found.word == word
        assert [one.comparison.part for one in found.parts] == ["a", "b"]


def test_seeds_needed_are_reported_for_open_parts(world):
    own = claim(8)
    made = frozen(world, own).finish(losing(own, 8, 0.009, sd=0.01))
    found = judged(made, claim(8, near={"margin": 0.01}, far={"margin": 1}))
    assert found.word == "UNDERPOWERED"
    needed = found.seeds_needed()
    assert list(needed) == ["near"]
    low, high = needed["near"]
    assert high is None  # the pilot does not tell on which side of the margin the gap lies
    text = f"near: more seeds needed: {low - 8} or more, without an upper end"
    assert text in "\n".join(format_judgement(found))
    by_name = {part["part"]: part for part in judgement_to_json(found)["parts"]}
    assert by_name["near"]["seeds_needed"] == (low, None)
    assert by_name["far"]["seeds_needed"] is None


def test_more_seeds_needed_are_an_interval_without_a_predicted_verdict(world):
    own = claim(8)
    made = frozen(world, own).finish(losing(own, 8, 0.0, sd=0.02))
    found = judged(made, claim(8, near={"margin": 0.0125}))
    assert found.word == "UNDERPOWERED"
    low, high = found.seeds_needed()["near"]
    assert high > 8
    (line,) = format_seeds_needed(found)
    assert f"more seeds needed: between {max(1, low - 8):,} and {high - 8:,} " in line
    assert not any(word in line for word in Verdict)


@pytest.mark.parametrize("state", ["nothing", "some", "all but one", "a failure"])
def test_there_is_no_verdict_before_all_runs_have_ended(world, state):
    own = claim(3)
    made = frozen(world, own)
    runs = made.runs()
    ended = {"nothing": 0, "some": 3}.get(state, 8)
    loss = losing(own, 3, 0.0)
    for run in runs[:ended]:
        made.write(run, loss(run))
    if state == "a failure":
        made.write(runs[-1], "failed")
    found = judged(made, own)
    assert found.word == Verdict.INCOMPLETE == "INCOMPLETE"
    assert not found.has_ended
    assert not found.is_conclusive
    assert found.seeds_needed() == {}
    assert f"{ended} of 9 runs have ended" in "\n".join(format_judgement(found))
    assert all(part["verdict"] == Verdict.INCOMPLETE for part in judgement_to_json(found)["parts"])
    made.write(runs[-1], loss(runs[-1]))
    for run in runs:
        made.write(run, loss(run))
    assert judged(made, own).word == "SUPPORTED"


def test_seeds_that_only_confirm_a_choice_are_derived_from_the_claim(world):
    """Without a floor, no arm's search uses all tuning seeds at first."""
    grid = {"variant": "standard", "model.heads": "2,4"}
    part = {"arm": {"model.heads": 4}, "against": {"model.heads": 2}}
    own = claim(3, grid, 3, within=part)
    made = frozen(world, own).finish(lambda run: 2.0)
    seeds = {run.changes["seed"] for run in made.manifest.runs if run.tuning}
    assert len(seeds) == 1
    assert judged(made, own).exploratory == []


def test_pairs_of_several_batch_sizes_are_compared_separately(world):
    own = claim(3, GRID | {"train.batch_size": "1,2"})
    found = judged(frozen(world, own).finish(lambda run: 2.0), own)
    assert [part.part.name for part in found.parts] == [
        "within batch_size=1",
        "within batch_size=2",
    ]


def test_with_tuning_the_runs_that_follow_are_waited_for(world):
    own = claim(3, tuning_seeds=1)
    made = frozen(world, own)
    best = made.manifest.arms["no_q-d16-h2"].config.optim.lr

    def loss(run):
        gap = 0.3 * (run.changes["seed"] % 5) * 1e-4 if "no_q" in run.arm else 0.0
        lr, circuit = run.changes["optim.lr"], run.changes.get("variant.lr", 1.4)
        return 2.0 + gap + math.log(lr / best) ** 2 + math.log(circuit / 1.4) ** 2 / 10

    tuning = [run for run in made.runs() if run.tuning]
    for run in tuning:
        made.write(run, loss(run))
    assert len(tuning) == 15 + 15 + 5  # of standard, no_q and the floor, with one tuning seed
    more = [run for run in made.runs() if run.tuning and run not in tuning]
    assert len(more) == 6 + 6 + 2
    for run in more:
        made.write(run, loss(run))
    assert len([run for run in made.runs() if not run.tuning]) == 3 * 3
    found = judged(made, own)
    assert found.word == Verdict.INCOMPLETE
    assert found.n == 3
    found = judged(made.finish(loss), own)
    assert found.word == "SUPPORTED"
    assert (found.n, found.exploratory) == (3, [])
    rates = [check for check in found.parts[0].checks if check.name == "learning rate"]
    assert [check.state for check in rates] == ["ok"]


@pytest.mark.parametrize("how", ["cut", "not ours", "no numbers"])
def test_damaged_run_leaves_the_study_incomplete(world, how):
    own = claim(3)
    made = frozen(world, own).finish(losing(own, 3, 0.0, 1e-6))
    assert judged(made, own).word == "SUPPORTED"
    run = made.runs()[0]
    path = made.run_folder(run) / "result.json"
    text = {
        "cut": path.read_text()[:40],
        "not ours": path.read_text().replace(run.id, "0" * len(run.id)),
        "no numbers": path.read_text().replace('"val": ', '"val": null, "was": '),
    }[how]
    path.write_text(text)
    found = judged(made, own)
    assert found.word == Verdict.INCOMPLETE
    assert any("damaged" in reason for reason in found.exploratory)
    assert "8 of 9 runs have ended" in "\n".join(format_judgement(found))


@pytest.mark.parametrize("side", ["no_q", "standard"])
@pytest.mark.parametrize("diverged", [1, 6])
def test_divergence_opens_the_bound_on_its_side(world, side, diverged):
    own = claim(6)
    loss = losing(own, 6, -0.5 if side == "no_q" else 0.5)
    out = {*own.seeds_of("final", 6)[:diverged]}

    def diverging(run):
        hit = run.arm.startswith(side) and run.changes["seed"] in out
        return "diverged" if hit else loss(run)

    made = frozen(world, own).finish(diverging)
    kinds = ("noninferior", "equivalent", "better", "worse")
    found = {kind: judged(made, claim(6, within={"kind": kind})) for kind in kinds}
    # Not to be had of runs that are left, whatever these say.
    shut = ("noninferior", "better", "equivalent") if side == "no_q" else ("worse", "equivalent")
    for kind in shut:
        assert found[kind].word != "SUPPORTED", kind
    assert not any(one.word == "EQUIVALENT" for one in found.values())
    for one in found.values():
        (part,) = judgement_to_json(one)["parts"]
        assert part["arm_diverged"] == (diverged if side == "no_q" else 0)
        assert part["baseline_diverged"] == (diverged if side == "standard" else 0)
        assert part["n"] == 6 - diverged
        assert len(part["unpaired"]) == diverged
        assert one.has_ended
        assert ("∞]" if side == "no_q" else "[−∞") in "\n".join(format_judgement(one))
    # What the side that is open leaves to be said is said.
    sure = "worse" if side == "no_q" else "noninferior"
    if diverged == 6:
        assert {one.word for one in found.values()} == {"UNDERPOWERED"}
    else:
        assert found[sure].word != "SUPPORTED"  # they are half a nat on the other side


def test_no_number_of_seeds_decides_a_diverged_part(world):
    own = claim(6)
    out = own.seeds_of("final", 6)[0]
    loss = losing(own, 6, 0.0)
    made = frozen(world, own).finish(
        lambda run: "diverged" if "no_q" in run.arm and run.changes["seed"] == out else loss(run)
    )
    found = judged(made, own)
    assert found.word == "UNDERPOWERED"
    assert found.seeds_needed() == {"within": (None, None)}
    assert format_seeds_needed(found) == ["within: more seeds needed: unknown, as runs diverged"]


def test_unmeasured_part_is_not_called_on_the_margin(world):
    own = claim(3)
    made = frozen(world, own).finish(lambda run: "diverged" if "no_q" in run.arm else 2.0)
    assert "it lies on the margin" not in "\n".join(format_judgement(judged(made, own)))


# Over lengths of training.


def at_lengths(own, n, gap_at):
    """Losses whose gap is `gap_at(log2 of tokens, number of the seed)`."""
    numbers = {seed: number for number, seed in enumerate(own.seeds_of("final", n))}

    def make(made):
        def loss(run):
            number = numbers[run.changes["seed"]]
            x = math.log2(made.manifest.arms[run.arm].tokens)
            own_gap = gap_at(x, number) if run.arm.startswith("no_q") else 0.0
            return 9.0 + number / 7 - x / 4 + own_gap

        return made.finish(loss)

    return make


def test_growth_is_the_slope_of_each_seed_per_doubling(world):
    own = claim(5, LENGTHS, grows={"horizon": "growth", "kind": "worse"})
    slopes = gaps(5, 0.05, 0.002)
    finish = at_lengths(own, 5, lambda x, number: 0.3 + slopes[number] * x)
    made = finish(frozen(world, own))
    found = judged(made, own)
    (one,) = found.parts
    assert sorted(one.part.sample.values) == pytest.approx(sorted(slopes))
    assert len(one.gaps) == 3
    assert found.word == "SUPPORTED"
    for kind, margin, word in (
        ("worse", 0.05, "UNDERPOWERED"),
        ("noninferior", 0.01, "REFUTED"),
        ("noninferior", 0.1, "SUPPORTED"),
        ("better", 0.0, "REFUTED"),
    ):
        part = {"horizon": "growth", "kind": kind, "margin": margin}
        assert judge_claim(claim(5, LENGTHS, grows=part), made.study(), []).word == word
    # The gap itself is another thing.
    within = judged(made, claim(5, LENGTHS, within={"margin": 0.2, "horizon": "each"}))
    assert within.word == "REFUTED"
    assert len(within.parts) == 3
    means = [one.part.sample.mean for one in within.parts]
    assert np.diff(sorted(means)) == pytest.approx([0.05, 0.05])


def test_growth_between_two_lengths_is_their_difference_per_doubling(world):
    own = claim(5, LENGTHS | {"train.steps": "12,48"}, grows={"horizon": "growth"})
    slopes = gaps(5, 0.05, 0.002)
    made = at_lengths(own, 5, lambda x, number: slopes[number] * x)(frozen(world, own))
    (one,) = judged(made, own).parts
    assert sorted(one.part.sample.values) == pytest.approx(sorted(slopes))


def test_failures_at_the_shortest_training_tilt_the_growth_too(world):
    """There the arm's lower the slope, and the baseline's raise it."""
    own = claim(5, LENGTHS, grows={"horizon": "growth", "margin": 0.2})
    made = at_lengths(own, 5, lambda x, number: 0.05 * x)(frozen(world, own))
    (one,) = judged(made, own).parts
    arms = [[risk.arm for risk in risks] for risks in (one.part.raising, one.part.lowering)]
    short, long = "steps=12", "steps=48"
    assert [[(name.split("-")[0], name.split("-")[-1]) for name in names] for names in arms] == [
        [("standard", short), ("no_q", long)],
        [("no_q", short), ("standard", long)],
    ]
    weights = {risk.weight for risk in (*one.part.raising, *one.part.lowering)}
    assert weights == {0.5}  # of lengths two doublings apart


def test_asymptote_is_the_gap_after_infinitely_many_tokens(world):
    own = claim(5, LENGTHS, ends={"horizon": "asymptote", "kind": "worse", "margin": 0.02})
    made, limits = frozen(world, own), gaps(5, 0.04, 0.002)
    lengths = sorted({arm.tokens for arm in made.manifest.arms.values()})

    def loss(run):
        arm = made.manifest.arms[run.arm]
        falls = 2 * (arm.tokens / lengths[0]) ** -0.5
        number = own.seeds_of("final", 5).index(run.changes["seed"])
        return (
            1
            + falls * (1.02 if arm.variant == "no_q" else 1)
            + (limits[number] if arm.variant == "no_q" else 0)
            + (1 if arm.variant == "uniform" else 0)
        )

    found = judged(made.finish(loss), own)
    (one,) = found.parts
    assert one.part.sample.mean == pytest.approx(0.04, abs=2e-3)
    assert (len(one.gaps), found.word) == (3, "SUPPORTED")
    assert "if both arms level off with one exponent" in found.headline
    text = "\n".join(format_judgement(found))
    assert "an extrapolation, from 3 lengths of training" in text
    assert "extrapolated to infinitely many tokens" in text


def test_losses_that_do_not_level_off_decide_nothing(world):
    own = claim(5, LENGTHS, ends={"horizon": "asymptote", "kind": "worse"})
    made = frozen(world, own)

    def loss(run):
        arm = made.manifest.arms[run.arm]
        return 5 - 0.1 * math.log(arm.tokens) + (arm.variant != "standard")

    found = judged(made.finish(loss), own)
    assert found.word == "UNDERPOWERED"
    assert "the losses do not level off as a power of D" in "\n".join(format_judgement(found))
    made.write(next(run for run in made.runs() if run.arm.startswith("no_q")), "diverged")
    text = "\n".join(format_judgement(judged(made, own)))
    assert "not extrapolated, since runs diverged" in text
    assert "level off" not in text


@pytest.mark.slow
def test_diverged_run_leaves_growth_open_both_ways(world):
    own = claim(4, LENGTHS, grows={"horizon": "growth"})
    made = at_lengths(own, 4, lambda x, number: -0.5 * x)(frozen(world, own))
    assert judged(made, own).word == "SUPPORTED"
    for arm in ("no_q", "standard"):
        made = at_lengths(own, 4, lambda x, number: -0.5 * x)(frozen(world, own))
        run = next(r for r in made.runs() if r.arm.startswith(arm))
        before = (made.run_folder(run) / "result.json").read_text()
        made.write(run, "diverged")
        for kind in ("noninferior", "worse", "better", "equivalent"):
            part = {"horizon": "growth", "kind": kind}
            found = judge_claim(claim(4, LENGTHS, grows=part), made.study(), [])
            assert found.word == "UNDERPOWERED", kind
            assert found.parts[0].part.sample.n == 3
        (made.run_folder(run) / "result.json").write_text(before)


def test_cause_of_no_verdict_is_an_arm_that_diverged_at_every_rate(world):
    own = claim(3, tuning_seeds=1)
    made = frozen(world, own)
    made.finish(lambda run: "diverged" if run.arm.startswith("no_q") else 2.0)
    found = judged(made, own)
    assert found.word == "UNDERPOWERED"
    section = Section("mine", "", found.study, judgement=found)
    assert "inconclusive: at every learning rate no_q-d16-h2 diverged" in summarize(section)[0]


# Looks, and seeds that were not declared.


def test_alpha_of_the_looks_adds_up(world):
    for looks in ([6], [6, 12], [6, 12, 20], [2, 3, 4, 5]):
        own = spend_alpha(looks)
        assert sum(own) == pytest.approx(0.05)
        assert own == sorted(own)
        assert all(alpha > 0 for alpha in own)
    assert spend_alpha([10, 20])[0] == pytest.approx(0.0056, abs=1e-4)  # O'Brien and Fleming


@pytest.mark.slow
def test_look_spends_its_own_alpha(world):
    own = claim([4, 8])
    first, second = spend_alpha([4, 8])
    # One-sided p of about 0.02 at either look: below 0.05, above what the first may spend.
    made = frozen(world, own, 4).finish(losing(own, 4, 0.0, sd=0.0055))
    found = judged(made, own)
    p = found.parts[0].part.p_supported
    assert first < p < second
    assert found.n == 4
    assert found.alpha == first
    assert found.word == "UNDERPOWERED"
    assert not found.is_conclusive
    assert found.exploratory == []
    # Were it the only one that was declared, it would do.
    assert judged(made, claim(4)).word == "SUPPORTED"
    made = frozen(world, own, 8).finish(losing(own, 8, 0.0, sd=0.011))
    found = judged(made, own)
    assert first < found.parts[0].part.p_supported < second
    assert (found.n, found.alpha, found.word) == (8, second, "SUPPORTED")
    level = judgement_to_json(found)["parts"][0]["interval_level"]
    assert level == pytest.approx(1 - 2 * second)


def test_seeds_beyond_those_declared_are_exploratory(world):
    own = claim(4)
    made = frozen(world, own, 5).finish(losing(own, 5, 0.0))
    found = judged(made, own)
    assert found.word == "SUPPORTED"
    assert found.n == 5
    assert found.exploratory == ["5 seeds were run, but 4 were declared"]
    lines = format_judgement(found)
    assert "SUPPORTED at these rates (exploratory)" in lines
    assert "  exploratory: 5 seeds were run, but 4 were declared" in lines
    looks = judged(made, claim([3, 4, 6]))
    assert looks.exploratory[-1] == "5 seeds were run, but 3 or 4 or 6 were declared"
    assert looks.alpha == 0.05


TRANSLATOR = {"model.form": "encoder_decoder", "data": "reverse", "model.context": "8"}


@pytest.mark.parametrize(
    ("encoder", "cross", "word"),
    [(1.0, 1.0, "SUPPORTED"), (0.02, 1.0, "INSENSITIVE"), (1.0, 0.02, "INSENSITIVE")],
)
def test_interaction_of_sites_needs_both_floors(world, encoder, cross, word):
    grid = {**GRID, **TRANSLATOR, "variant.sites": "encoder,cross"}
    part = {"arm": {"variant": "no_q", "variant.sites": "cross"}}
    own = claim(4, grid, less={**part, "than": {"variant.sites": "encoder"}})
    made = frozen(world, own)
    same = losing(own, 4, 0.0, 1e-4)
    leads = {"uniform_encoder": encoder, "uniform_cross": cross}

    def loss(run):
        name = run.arm.split("-")[0]
        return same(run) + (leads[name] - 10.0 if name in leads else 0.0)  # 10 is added to floors

    assert judged(made.finish(loss), own).word == word


def test_failures_of_a_baseline_that_cancels_overturn_nothing(world):
    """A loss of standard, which has no sites, is in both gaps."""
    grid = {**GRID, **TRANSLATOR, "variant.sites": "encoder,cross"}
    part = {"arm": {"variant": "no_q", "variant.sites": "cross"}}
    own = claim(6, grid, less={**part, "than": {"variant.sites": "encoder"}})
    made, loss = frozen(world, own), losing(own, 6, 0.0, 1e-4)
    conditions = judged(made.finish(loss), own).unless
    assert conditions
    assert not any("standard" in text for text in conditions)
    out = own.seeds_of("final", 6)[0]
    made.finish(
        lambda run: (
            "diverged"
            if run.arm.startswith("standard") and run.changes["seed"] == out
            else loss(run)
        )
    )
    (found,) = judged(made, own).parts
    assert found.part.sample.n == 5
    assert not found.part.open_above
    assert not found.part.open_below


@pytest.mark.parametrize(("lead", "word"), [(1.0, "SUPPORTED"), (0.0, "INSENSITIVE")])
def test_baseline_of_another_size_has_the_floor_of_its_size_before(world, lead, word):
    part = {"arm": "standard", "against": "no_q", "axis": "params", "margin": 0.01}
    own = claim(4, within=part)
    same = losing(own, 4, 0.0, 1e-4)
    made = frozen(world, own).finish(
        lambda run: same(run) + (lead - 10.0) * run.arm.startswith("uniform")
    )
    assert judged(made, own).word == word


def test_fewer_seeds_than_were_declared_are_exploratory_too(world):
    own = claim(4)
    made = frozen(world, own, 3).finish(losing(own, 3, 0.0))
    assert judged(made, own).exploratory == ["3 seeds were run, but 4 were declared"]


def test_given_reasons_are_kept(world):
    own = claim(3)
    made = frozen(world, own, 4).finish(losing(own, 4, 0.0))
    found = judged(made, own, ["edited after the runs"])
    assert found.exploratory == ["edited after the runs", "4 seeds were run, but 3 were declared"]


def test_runs_on_different_data_are_exploratory_and_no_pair(world):
    own = claim(3)
    made = frozen(world, own).finish(losing(own, 3, 0.0))
    run = next(run for run in made.runs() if run.arm.startswith("no_q"))
    made.write(run, {"data_fingerprint": "another", "loss": {"train": 2, "val": 2, "test": 2}})
    found = judged(made, own)
    assert found.parts[0].part.sample.n == 2
    assert any(
        "different data" in line for line in judgement_to_json(found)["parts"][0]["unpaired"]
    )


def test_several_rates_are_there_to_choose_among_alone():
    with pytest.raises(UserError, match="one rate, or tuning_seeds"):
        claim(3, GRID | {"optim.lr": "1e-3,2e-3"})


# What is printed.


def test_sites_of_a_claim_are_named():
    lines = format_claim(load_claim("encoder_decoder"))
    assert "sites     a variant is at cross, and standard attention at the others" in lines
    for name in ("cross_needs_both", "one_head"):  # the parts name them, or it is at all
        assert not any(line.startswith("sites") for line in format_claim(load_claim(name)))


def test_claim_is_described_in_words():
    own = claim(
        [6, 12],
        LENGTHS,
        2,
        within={"horizon": "each"},
        same={"kind": "equivalent", "margin": 0.002},
        ahead={"kind": "better", "margin": 0, "against": "no_q", "arm": "standard"},
        behind={"kind": "worse", "axis": "params", "arm": {"variant": "no_q", "model.heads": 2}},
        grows={"horizon": "growth"},
        near={"of": "spread"},
    )
    said = format_claim(own)
    assert said[0] == "mine (small): Keys alone are enough."
    assert said[1] == "source    a comment"
    parts = dict(line.removeprefix("part").strip().split(": ", 1) for line in said[2:-1])
    assert parts == {
        "within": "no_q is not worse than standard by 0.01, at equal tokens, at each length",
        "same": "no_q is within ± 0.002 of standard, at equal tokens",
        "ahead": "standard is better than no_q by more than 0, at equal tokens",
        "behind": "no_q model.heads=2 is worse than standard by more than 0.01, at equal params",
        "grows": "no_q is not worse than standard by 0.01, at equal tokens, per doubling of tokens",
        "near": "no_q and standard spread by less than 0.01 from pair to pair, at equal tokens",
    }
    assert said[-1] == (
        f"seeds     6 then 12, from its hash {own.hash[:12]}; rates tuned on 2 other seeds"
    )


def test_control_characters_of_a_file_are_stripped(world):
    own = claim(3, says="a\x1b[31m\x07 red one")
    assert all(line.isprintable() for line in format_claim(own))
    made = frozen(world, own)
    assert all(line.isprintable() for line in format_judgement(judged(made, own)))


def test_every_check_of_the_audit_is_in_the_text_and_in_the_json(world):
    own = claim(3)
    made = frozen(world, own).finish(losing(own, 3, 0.0))
    found = judged(made, own)
    said = format_judgement(found)
    told = said[said.index("audit") + 1 :]
    checks = judgement_to_json(found)["parts"][0]["audit"]
    assert len(checks) == 16
    for check, line in zip(checks, told, strict=False):
        assert check["name"] in line
        assert check["message"] in line
        assert {"ok": "✓", "note": "·", "warning": "!"}[check["state"]] in line
    assert said[-1] == f"runs  {made.folder}"


def ngrams(loss):
    return {"tokens": 1000, "ngram": [3.1, loss], "lzma": 1.5}


@pytest.mark.parametrize(("gap", "word"), [(0.0, "SUPPORTED"), (0.02, "REFUTED")])
@pytest.mark.parametrize(("best", "is_before"), [(1.5, True), (2.5, False)])
def test_verdict_says_that_the_baseline_is_behind_the_ngrams(world, gap, word, best, is_before):
    own = claim(8)
    loss = losing(own, 8, gap)

    def outcome(run):
        losses = dict.fromkeys(("train", "val", "test"), loss(run) + 10 * ("uniform" in run.arm))
        return {"loss": losses, "text_references": ngrams(best)}

    found = judged(frozen(world, own).finish(outcome), own)
    assert found.word == word
    assert ("before the model beats an n-gram" in found.scope) == is_before
    text = "\n".join(format_judgement(found))
    assert (f"{word} at these rates, before the model beats an n-gram" in text) == is_before
    assert ("does not beat the best n-gram" in text) == is_before
    assert ("beats the best n-gram by" in text) != is_before


@pytest.mark.parametrize(
    ("seeds", "ended", "counting"),
    [((4,), (4,), 4), ((4, 6), (4,), 6), ((4,), (4, 6), 6), ((4, 6), (4, 6), 6)],
)
def test_added_seeds_count_once_all_have_ended(world, seeds, ended, counting):
    own = dataclasses.replace(claim(4), seeds=seeds)
    made = [frozen(world, own, n) for n in (4, 6)]
    registration = register_claim(own, made[0].manifest.out)
    for n, sweep in zip((4, 6), made, strict=True):
        loss = losing(own, n, 0.0)
        sweep.finish(lambda run, n=n, loss=loss: loss(run) if n in ended else None)
        registration.add(n, sweep.folder)
    if ended == (4,):  # the runs of four seeds are also those of six
        assert judged(made[0], own).has_ended
    assert counting_sweep(registration) == registration.sweeps[counting]
    looks = judge_looks(own, made[0].manifest.out)
    assert counting_judgement(looks).n == counting

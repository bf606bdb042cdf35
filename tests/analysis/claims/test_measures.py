"""Measures of claims, from runs whose truth is known."""

import dataclasses
import json
import math
import re

import pytest

from qkablate.analysis.claims.judgement import judge_claim
from qkablate.analysis.claims.parse import load_claim, parse_claim
from qkablate.analysis.claims.registry import claim_grid
from qkablate.errors import UserError
from qkablate.report.text.claims import (
    format_claim,
    format_details,
    format_judgement,
    judgement_to_json,
)
from qkablate.sweeps.running.solo_results import SoloFile, SoloRow

PART = {"arm": "no_q", "kind": "noninferior", "margin": 0.01}
GRID = {"variant": "standard,no_q"}
MASKED = {**GRID, "model.form": "encoder", "data.objective": "mlm"}
TASK = {"data": "recall", "data.vocab_size": 16, "data.pairs": 2, "model.context": 8}


def claim(grid=None, seeds=6, tasks=None, **parts):
    parts = {name: PART | changes for name, changes in parts.items()}
    content = {"says": "A statement.", "source": "a comment", "seeds": seeds, "parts": parts}
    content |= {"tuning_seeds": 0, "grid": grid or GRID}
    own = parse_claim("mine", content, "small", {})
    return dataclasses.replace(own, grid=dict(grid or GRID), tasks=tasks or {})


def on_task(part):
    """Return a claim of one part that is about a task."""
    return claim(tasks={"recall": TASK}, it=part | {"data": "recall"})


def frozen(world, own):
    grid, words = claim_grid(own, own.seeds[-1])
    return world(*words, grid=grid)


def judged(made, own):
    found = judge_claim(own, made.study(), [])
    json.dumps(judgement_to_json(found), allow_nan=False)
    return found


def noise(run, size=0.001):
    """Return a small number that depends on the seed alone."""
    return size * math.sin(run.changes["seed"])


def only_part(found):
    (part,) = judgement_to_json(found)["parts"]
    return part


# Accuracy


@pytest.mark.parametrize(("of", "key"), [("accuracy", "accuracy"), ("exact", "exact")])
@pytest.mark.parametrize(
    ("kind", "share", "word"),
    [
        ("noninferior", 0.99, "SUPPORTED"),
        ("noninferior", 0.9, "REFUTED"),
        ("worse", 0.9, "SUPPORTED"),
        ("worse", 0.99, "EQUIVALENT"),
        ("better", 0.99, "EQUIVALENT"),
    ],
)
def test_share_of_right_answers_is_better_the_higher(world, of, key, kind, share, word):
    own = on_task({"of": of, "kind": kind, "margin": 0.05})
    shares = {"standard": 0.99, "no_q": share, "uniform": 0.3}

    def outcome(run):
        value = shares[run.arm.split("-")[0]] + noise(run)
        return {key: {"val": value, "test": value}, "accuracy": {"test": value}, "chance": 0.1}

    made = frozen(world, own).finish(outcome)
    found = judged(made, own)
    assert found.word == word
    part = only_part(found)
    assert part["unit"] == "share"
    assert part["mean"] == pytest.approx(share - 0.99, abs=1e-3)  # as one says it: the arm has less
    assert part["interval"][0] <= part["mean"] <= part["interval"][1]
    noun = "exact match" if of == "exact" else "accuracy"
    assert re.search(
        rf"{noun} [\d.]+% against (98.9|99.0|99.1)%", "\n".join(format_judgement(found))
    )
    # The rates were tuned for the loss.
    assert "at these rates" in found.headline


def test_audit_of_a_claim_names_the_keys_of_claims(world):
    own = dataclasses.replace(claim(it={"margin": 0.01}), tuning_seeds=0)
    text = "\n".join(format_judgement(judged(frozen(world, own).finish(lambda run: 2.0), own)))
    assert "neither was tuned" in text
    assert "tuning_seeds: 3 tunes both" in text
    assert "sweep.tun" not in text


def test_equal_chance_of_all_arms_tells_nothing(world):
    own = on_task({"of": "accuracy", "margin": 0.05})
    made = frozen(world, own).finish(
        lambda run: {"accuracy": {"test": 0.1 + noise(run)}, "chance": 0.1}
    )
    found = judged(made, own)
    assert found.word == "INSENSITIVE"
    (floor,) = (check for check in found.parts[0].checks if check.name == "floor")
    assert floor.is_warning
    assert "in accuracy the baseline beats `uniform` by" in floor.message
    assert floor.message.endswith("less than 3 margins of 0.05; raise train.steps")


def test_failure_of_a_run_is_measured_in_the_share_it_loses(world):
    own = on_task({"of": "accuracy", "kind": "noninferior", "margin": 0.05})
    shares = {"standard": 0.99, "no_q": 0.99, "uniform": 0.3}
    made = frozen(world, own).finish(
        lambda run: {"accuracy": {"test": shares[run.arm.split("-")[0]]}, "chance": 0.1}
    )
    (condition, *_) = judged(made, own).unless
    assert condition.endswith("is an outlier by 0.89 of accuracy")


def test_a_failure_of_exact_match_loses_no_more_than_there_is(world):
    own = on_task({"of": "exact", "kind": "noninferior", "margin": 0.05})
    made = frozen(world, own).finish(
        lambda run: {
            "accuracy": {"test": 0.95},
            "exact": {"test": 0.5 * (not run.arm.startswith("uniform"))},
            "chance": 0.1,
        }
    )
    (condition, *_) = judged(made, own).unless
    assert condition.endswith("is an outlier by 0.5 of exact match")


def test_a_diverged_baseline_leaves_its_lead_in_accuracy_unknown(world):
    own = on_task({"of": "accuracy", "kind": "noninferior", "margin": 0.02})
    shares = {"standard": 0.99, "no_q": 0.99, "uniform": 0.3}
    half = {*own.seeds_of("final", 6)[:2]}

    def outcome(run):
        arm = run.arm.split("-")[0]
        if arm == "standard" and run.changes["seed"] in half:
            return "diverged"
        return {"accuracy": {"test": shares[arm] + noise(run)}, "chance": 0.1}

    found = judged(frozen(world, own).finish(outcome), own)
    assert found.word == "INSENSITIVE"
    (floor,) = (check for check in found.parts[0].checks if check.name == "floor")
    assert floor.message.startswith("unknown: 2 runs of standard")
    (details,) = format_details(found)
    assert "BCa" not in details  # of the runs that are left


def test_run_without_the_measure_is_told(world):
    own = on_task({"of": "accuracy", "margin": 0.05})
    made = frozen(world, own)
    lost = next(run for run in made.runs() if run.arm == "no_q-d16-h2-data=recall")

    def outcome(run):
        return {"chance": 0.1} | ({} if run == lost else {"accuracy": {"test": 0.9 + noise(run)}})

    found = judged(made.finish(outcome), own)
    assert only_part(found)["n"] == 5
    text = f"it: pairs: the accuracy of 1 of 6 pairs is not known: s{lost.changes['seed']}"
    assert found.exploratory == [text]


# Loss curves

STEPS = {"train.steps": "40", "train.eval_every": "4"}


def with_curves(world, own, loss):
    """Finish the runs, each with the curve loss(arm, seed, part of the training)."""
    made = frozen(world, own).finish(lambda run: 2.0 + noise(run) + 0.1 * run.arm.startswith("no"))
    for run in made.runs():
        steps = int(made.manifest.arms[run.arm].config.train.steps)
        arm = run.arm.split("-")[0]
        curve = {s: loss(arm, s / steps) + noise(run) for s in range(4, steps + 1, 4)}
        made.curve(run, curve)
    return made


@pytest.mark.parametrize(
    ("peak", "kind", "word"),
    [
        (0.01, "noninferior", "SUPPORTED"),
        (0.01, "worse", "REFUTED"),
        (0.05, "noninferior", "REFUTED"),
        (-0.05, "noninferior", "REFUTED"),
        (0.05, "worse", "SUPPORTED"),
    ],
)
def test_course_is_the_largest_gap_at_any_time_after_the_warm_up(world, peak, kind, word):
    own = claim(GRID | STEPS, it={"of": "course", "kind": kind, "margin": 0.02})

    def loss(arm, part):
        early = 0.5 if part <= 0.2 else 0.0  # a difference in the warm-up does not count
        return 3 - part + (arm == "no_q") * (peak * (abs(part - 0.5) < 0.01) + early)

    found = judged(with_curves(world, own, loss), own)
    assert found.word == word
    assert only_part(found)["mean"] == pytest.approx(abs(peak), abs=1e-6)


def test_failures_of_either_arm_make_a_course_larger(world):
    own = claim(GRID | STEPS, it={"of": "course", "kind": "noninferior", "margin": 0.05})
    found = judged(with_curves(world, own, lambda arm, part: 3 - part), own)
    conditions = " ".join(found.unless)
    assert "no_q" in conditions
    assert "standard" in conditions


def test_every_reading_bounds_a_course_from_above(world):
    """A peak between those readings that a band of 16 uses is not missed."""
    steps = {"train.steps": "240", "train.eval_every": "4"}
    for step in (120, 124, 128, 132):
        own = claim(GRID | steps, it={"of": "course", "kind": "noninferior", "margin": 0.02})

        def loss(arm, part, step=step):
            return 3 - part + 0.05 * (arm == "no_q" and round(240 * part) == step)

        found = judged(with_curves(world, own, loss), own)
        assert found.word in ("REFUTED", "UNDERPOWERED")
        assert only_part(found)["mean"] == pytest.approx(0.05, abs=1e-6)


def test_a_lucky_reading_of_the_baseline_does_not_set_what_an_arm_has_to_reach(world):
    """The loss to be reached is that of the baseline's other runs."""
    own = claim(GRID | STEPS, it={"of": "tokens_to_loss", "kind": "better", "margin": 0})

    def loss(arm, part):
        lucky = arm == "standard" and abs(part - 0.3) < 0.01
        return 5 - math.log(part) - 0.3 * lucky

    part = only_part(judged(with_curves(world, own, loss), own))
    assert part["mean"] == pytest.approx(1.0, rel=0.05)


@pytest.mark.parametrize(("speed", "ratio"), [(1.0, 1.0), (2.0, 0.5), (0.8, 1.25)])
def test_tokens_to_loss_are_those_after_which_the_loss_of_half_time_is_reached(world, speed, ratio):
    own = claim(GRID | STEPS, it={"of": "tokens_to_loss", "kind": "better", "margin": 0})

    def loss(arm, part):
        return 5 - math.log(part * (speed if arm == "no_q" else 1)) + (arm == "uniform")

    part = only_part(judged(with_curves(world, own, loss), own))
    assert part["mean"] == pytest.approx(ratio, rel=0.02)
    assert part["verdict"] == (
        "SUPPORTED" if ratio < 1 else "REFUTED" if ratio > 1 else (part["verdict"])
    )


def test_loss_that_is_never_reached_takes_more_than_twice_the_tokens(world):
    own = claim(
        GRID | STEPS,
        slow={"of": "tokens_to_loss", "kind": "worse", "margin": 0.5},
        too={"of": "steps_to_loss", "kind": "noninferior", "margin": 0.5},
    )
    found = judged(with_curves(world, own, lambda arm, part: 3 - part + (arm != "standard")), own)
    assert [str(part.word) for part in found.parts] == ["SUPPORTED", "REFUTED"]
    parts = judgement_to_json(found)["parts"]
    assert parts[0]["mean"] is None  # no number: more than can be seen
    assert "∞" in "\n".join(format_judgement(found))


def test_a_late_baseline_does_not_make_a_miss_a_large_ratio(world):
    """The arm ends 1.1 times too early; half of the baselines reach the loss late themselves."""
    own = claim(GRID | STEPS, 16, slow={"of": "tokens_to_loss", "kind": "worse", "margin": 0.5})
    made = with_curves(world, own, lambda arm, part: 3.0)
    early = {*sorted({run.changes["seed"] for run in made.runs()})[::2]}
    for run in made.runs():
        drop = 0.2 if run.changes["seed"] in early else 0.9
        drop = {"standard": drop, "no_q": 9.0}.get(run.arm.split("-")[0], 9.0)
        made.curve(run, {s: 3.0 - (s / 40 >= drop) for s in range(4, 41, 4)})
    found = judged(made, own)
    assert found.parts[0].part.sample.mean == math.inf
    # Only of the early half it is known that the arm needs more than 1.5 times the tokens.
    assert found.parts[0].part.p_supported == pytest.approx(0.598, abs=1e-3)
    assert found.word == "UNDERPOWERED"


def test_training_loss_is_the_mean_of_the_last_tenth(world):
    own = claim(it={"of": "train_loss", "kind": "worse", "margin": 0.01})
    made = frozen(world, own).finish(lambda run: 2.0)
    for run in made.runs():
        gap = 0.04 * run.arm.startswith("no_q")
        rows = [
            {"step": s, "tokens": s * 32, "train/loss": (9 if s < 11 else 2 + gap) + noise(run)}
            for s in range(1, 13)
        ]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (made.run_folder(run) / "metrics.jsonl").write_text(text)
    part = only_part(judged(made, own))
    assert part["mean"] == pytest.approx(0.04, abs=1e-6)
    assert part["verdict"] == "SUPPORTED"


# What no run is needed for, and what is measured alone


def test_sizes_are_counted(world):
    own = claim(
        cache={"of": "kv_bytes", "kind": "equivalent", "margin": 0.01},
        weights={"of": "params", "kind": "better", "margin": 0.01},
        loss={"kind": "noninferior", "margin": 1},
    )
    made = frozen(world, own).finish(lambda run: 2.0 + noise(run))
    found = judged(made, own)
    cache, weights, _ = judgement_to_json(found)["parts"]
    arms = made.manifest.arms
    sizes = [next(a.params for a in arms.values() if a.variant == v) for v in ("no_q", "standard")]
    assert (cache["mean"], cache["n"], cache["verdict"]) == (1.0, 1, "SUPPORTED")
    assert weights["mean"] == pytest.approx(sizes[0] / sizes[1])
    assert weights["verdict"] == "SUPPORTED"
    assert {check["name"] for check in weights["audit"]} == {"matched", "machine", "kernel"}


def measured(made, seconds, load=0.0, repetitions=6):
    """Write measurements of the arms, alone."""
    rows = [
        SoloRow(arm.name, number, seconds[arm.variant] * (1 + 0.01 * number), 1e6, load)
        for number in range(repetitions)
        for arm in made.manifest.arms.values()
        if arm.variant in seconds
    ]
    SoloFile(made.folder.name, {"cpu": "a CPU"}, rows).write(made.folder)


def test_seconds_are_compared_repetition_by_repetition(world):
    own = claim(
        it={"of": "seconds", "kind": "worse", "margin": 0.1},
        room={"of": "memory", "kind": "equivalent", "margin": 0.1},
        loss={"margin": 1},
    )
    made = frozen(world, own).finish(lambda run: 2.0 + noise(run))
    assert judged(made, own).word == "INCOMPLETE"  # nothing is measured yet
    measured(made, {"standard": 0.010, "no_q": 0.015}, repetitions=5)
    assert judged(made, own).word == "INCOMPLETE"
    measured(made, {"standard": 0.010, "no_q": 0.015})
    found = judged(made, own)
    seconds, memory, _ = judgement_to_json(found)["parts"]
    assert seconds["mean"] == pytest.approx(1.5)
    assert [seconds["verdict"], memory["verdict"]] == ["SUPPORTED", "SUPPORTED"]
    assert {check["name"]: check["state"] for check in seconds["audit"]}["alone"] == "ok"
    measured(made, {"standard": 0.010, "no_q": 0.015}, load=1.5)
    audit = judgement_to_json(judged(made, own))["parts"][0]["audit"]
    assert {check["name"]: check["state"] for check in audit}["alone"] == "warning"


@pytest.mark.parametrize("damage", ["{", "[]", '{"format": 1}', '{"format": 2, "rows": []}'])
def test_damaged_measurements_are_one_line(world, damage):
    own = claim(it={"of": "seconds", "kind": "worse", "margin": 0.1}, loss={"margin": 1})
    made = frozen(world, own).finish(lambda run: 2.0 + noise(run))
    (made.folder / "solo.json").write_text(damage)
    with pytest.raises(UserError, match=r"solo.json' is damaged"):
        judge_claim(own, made.study(), [])


# Interactions


def losses_by_skip(gaps):
    """Return losses with a gap of no_q that depends on the attention's skip."""

    def loss(run):
        skip = "attention_skip=False" not in run.arm
        return 2.0 + noise(run, 0.1) + gaps[skip] * run.arm.startswith("no_q") + 0.5 * (not skip)

    return loss


SKIP = GRID | {"model.attention_skip": "true,false"}
WITHOUT = {
    "arm": {"variant": "no_q", "model.attention_skip": False},
    "against": {"variant": "standard", "model.attention_skip": False},
    "than": {"model.attention_skip": True},
}


@pytest.mark.parametrize(
    ("gaps", "kind", "word"),
    [
        ({True: 0.01, False: 0.05}, "worse", "SUPPORTED"),
        ({True: 0.05, False: 0.01}, "better", "SUPPORTED"),
        ({True: 0.05, False: 0.05}, "equivalent", "SUPPORTED"),
        ({True: 0.01, False: 0.05}, "equivalent", "REFUTED"),
        ({True: 0.01, False: 0.05}, "better", "REFUTED"),
    ],
)
def test_interaction_is_the_difference_of_two_gaps(world, gaps, kind, word):
    own = claim(SKIP, it=WITHOUT | {"kind": kind})
    found = judged(frozen(world, own).finish(losses_by_skip(gaps)), own)
    part = only_part(found)
    assert found.word == word
    assert part["mean"] == pytest.approx(gaps[False] - gaps[True])
    assert part["than"] is True
    assert len(part["arms"]) == 2
    (line,) = (text for text in format_claim(own) if text.startswith("part"))
    assert "compared with the same at model.attention_skip=true" in line


def test_every_setting_but_that_of_than_is_compared_with_it(world):
    own = claim(SKIP, it={"than": {"model.attention_skip": True}, "kind": "worse"})
    part = only_part(judged(frozen(world, own).finish(losses_by_skip({True: 0, False: 0.1})), own))
    assert part["mean"] == pytest.approx(0.1)
    assert "attention_skip=False" in part["arms"][0][0]


def test_interaction_without_its_counterpart_is_rejected(world):
    own = claim(GRID, it={"than": {"model.heads": 4}, "kind": "worse"})
    made = frozen(world, own)
    with pytest.raises(UserError, match=r"parts\.it\.than: the grid has no variant=no_q, model"):
        judged(made, own)


def test_setting_that_all_arms_have_is_no_interaction(world):
    own = claim(
        GRID | {"model.attention_skip": "true"}, it={"than": {"model.attention_skip": True}}
    )
    with pytest.raises(UserError, match=r"every arm of the grid has model\.attention_skip=true"):
        judged(frozen(world, own), own)


def test_interaction_is_found_where_both_gaps_need_other_widths(world):
    grid = {"variant": "standard,merged_w", "model.heads": "1,2", "model.d_model": "64,96"}
    part = {"arm": {"variant": "merged_w", "model.heads": 2}, "than": {"model.heads": 1}}
    part |= {"against": {"variant": "standard", "model.heads": 2}, "axis": "params", "margin": 1}
    own = claim(grid, it=part | {"adjust": "d_model"})
    found = judged(frozen(world, own).finish(lambda run: 2.0 + noise(run)), own)
    pairs = [part["arms"] for part in judgement_to_json(found)["parts"]]
    assert len(pairs) == 2
    assert all("h2" in first[1] and "h1" in second[1] for first, second in pairs)
    assert all(first[1].split("-")[1] == second[1].split("-")[1] for first, second in pairs)


def test_settings_are_compared_within_each_variant(world):
    own = claim(GRID | {"model.heads": "1,2"}, it={"arm": HEADS[0], "against": HEADS[1]})
    found = judged(frozen(world, own).finish(lambda run: 2.0 + noise(run)), own)
    pairs = [part["arms"][0] for part in judgement_to_json(found)["parts"]]
    assert sorted(pair[0].split("-")[0] for pair in pairs) == ["no_q", "standard"]
    assert all(arm.split("-")[0] == other.split("-")[0] for arm, other in pairs)


HEADS = [{"model.heads": 1}, {"model.heads": 2}]


def test_failures_of_all_four_arms_count_on_the_side_that_they_move(world):
    own = claim(SKIP, it=WITHOUT | {"kind": "noninferior", "margin": 0.05})
    made = frozen(world, own).finish(losses_by_skip({True: 0.0, False: 0.0}))
    conditions = judged(made, own).unless
    assert len(conditions) == 2
    assert "no_q" in conditions[0]
    assert "attention_skip=False" in conditions[0]
    assert "standard" in conditions[1]
    assert "attention_skip=True" in conditions[1]


# Sizes that are adjusted


def test_adjusted_mlp_may_have_a_ratio_of_its_own(world):
    grid = {"variant": "standard,merged_w", "model.mlp_ratio": "3"}
    own = claim(grid, it={"arm": "merged_w", "axis": "params", "margin": 1})
    found = judged(frozen(world, own).finish(lambda run: 2.0 + noise(run)), own)
    assert found.word == "SUPPORTED"


def test_adjusted_size_is_that_of_the_part(world):
    grid = {"variant": "standard,no_qk", "model.layers": "8", "model.d_model": "64"}
    both = {"arm": "no_qk", "axis": "params", "margin": 1}
    own = claim(grid | {"model.heads": "1"}, layers=both | {"adjust": "layers"}, mlp=both)
    made = frozen(world, own).finish(lambda run: 2.0 + noise(run))
    parts = {p["part"]: p["arms"][0][0] for p in judgement_to_json(judged(made, own))["parts"]}
    arms = {name: made.manifest.arms[arm] for name, arm in parts.items()}
    assert arms["layers"].config.model.layers != 8 == arms["mlp"].config.model.layers
    assert arms["layers"].controls == ["params-layers"]


# Several data sets


def test_verdict_names_the_data_on_which_it_holds(world):
    own = claim(
        tasks={"recall": TASK},
        it={"kind": "noninferior", "margin": 0.05, "data": ["text", "recall"]},
    )
    made = frozen(world, own)

    def loss(run):
        is_task = made.manifest.arms[run.arm].config.data.source == "recall"
        return 2.0 + noise(run) + 0.2 * (is_task and run.arm.startswith("no_q"))

    found = judged(made.finish(loss), own)
    assert found.word == "REFUTED"
    assert found.datasets == {"text": "SUPPORTED", "recall": "REFUTED"}
    text = format_judgement(found)
    assert "  on text: SUPPORTED" in text
    assert "  on recall: REFUTED" in text
    assert judgement_to_json(found)["data"] == {"text": "SUPPORTED", "recall": "REFUTED"}
    assert [p["part"] for p in judgement_to_json(found)["parts"]] == ["it on text", "it on recall"]


# Mistakes, found before any run


@pytest.mark.parametrize(
    ("grid", "part", "line"),
    [
        (GRID, {"of": "accuracy"}, "accuracy needs a task, and text is a text"),
        (GRID, {"of": "exact"}, "exact needs a task, and text is a text"),
        (MASKED, {"of": "exact"}, "exact needs a task, and text is a text"),
        (GRID, {"of": "course"}, "course needs 8 evaluations or more, and train.eval_every"),
        (GRID, {"of": "tokens_to_loss"}, "tokens_to_loss needs 8 evaluations"),
        (
            {**GRID, "train.steps": "640", "train.eval_every": "10"},
            {"of": "course"},
            "course tests every evaluation, of 63 at most, .* set train.eval_every=20",
        ),
        (  # the last is beside the others
            {**GRID, "train.steps": "633", "train.eval_every": "10"},
            {"of": "course"},
            "and train.eval_every=10 gives 64 on text",
        ),
    ],
)
def test_measure_that_a_grid_cannot_give_is_rejected(world, grid, part, line):
    own = claim(grid, it=part, loss={})
    with pytest.raises(UserError, match=line):
        judge_claim(own, frozen(world, own).study(), [])


@pytest.mark.parametrize(
    ("part", "line"),
    [
        (
            {"of": "accuracy", "margin": 5},
            "parts.it.margin: 5 is not a share below 1; write 5 % as",
        ),
        (
            {"of": "steps_to_loss", "than": {"model.heads": 4}},
            "parts.it.than: does not suit of: steps_to_loss",
        ),
        (
            {"of": "params", "axis": "params"},
            "parts.it.axis: of: params cannot be compared at equal params",
        ),
        ({"of": "seconds", "than": {"model.heads": 4}}, "parts.it.than: seconds has no value"),
    ],
)
def test_question_without_an_answer_is_rejected(part, line):
    with pytest.raises(UserError, match=line):
        claim(it=part, loss={})


def test_median_takes_five_seeds():
    with pytest.raises(
        UserError, match=r"parts\.it\.of: seconds is compared by a median, which needs 5"
    ):
        claim(seeds=4, it={"of": "seconds"}, loss={})


def on_tasks(grid, words, data):
    part = PART | {"data": data}
    content = {"says": "A statement.", "source": "me", "seeds": 6, "parts": {"it": part}}
    return parse_claim("mine", content | {"grid": GRID | grid}, "small", words)


def test_own_settings_of_a_claim_on_tasks_take_the_place_of_the_scales():
    own = on_tasks({"train.steps": 777, "data.pairs": 6}, {}, "recall")
    assert (own.grid["train.steps"], own.grid["data.pairs"]) == ("777", "6")
    assert own.grid["data"] == "recall"
    assert own.grid["model.context"] == "16"  # the scale's
    both = on_tasks({"train.steps": 777}, {"train.eval_every": "9"}, ["induction", "recall"])
    assert (both.grid["train.steps"], both.grid["train.eval_every"]) == ("777", "9")
    assert not any("train.steps" in settings for settings in both.tasks.values())


def test_claim_on_a_task_has_no_other_data():
    with pytest.raises(UserError, match="data: this claim is about induction and recall alone"):
        on_tasks({}, {"data": "stdlib"}, ["induction", "recall"])
    assert on_tasks({}, {"train.steps": "50"}, "recall").grid["train.steps"] == "50"


def test_blind_experiment_refutes_no_difference(world):
    """To refute that an arm is worse is to find no difference, and no arm beat the floor."""
    own = on_task({"of": "accuracy", "kind": "worse", "margin": 0.2})
    made = frozen(world, own).finish(
        lambda run: {"accuracy": {"test": 0.1 + noise(run)}, "chance": 0.1}
    )
    assert judged(made, own).word == "INSENSITIVE"


def test_tokens_to_a_loss_that_the_floor_reaches_as_early_tell_nothing(world):
    own = claim(GRID | STEPS, it={"of": "tokens_to_loss", "kind": "noninferior", "margin": 0.1})
    found = judged(with_curves(world, own, lambda arm, part: 5 - math.log(part)), own)
    assert found.word == "INSENSITIVE"
    slow = with_curves(world, own, lambda arm, part: 5 - math.log(part) + (arm == "uniform"))
    assert judged(slow, own).word == "SUPPORTED"


@pytest.mark.parametrize(
    ("part", "line"),
    [
        ({"margin": 5}, "parts.it.margin: 5 nats is too large (allowed: up to 3)"),
        ({"adjust": "mlp"}, "parts.it.adjust: mlp has no effect at axis: tokens; set axis: params"),
        ({"against": "no_q"}, "parts.it.against: is the same as arm"),
    ],
)
def test_part_that_asks_nothing_is_rejected(part, line):
    with pytest.raises(UserError, match=re.escape(line)):
        claim(it=part)


def test_part_that_is_given_twice_is_rejected(tmp_path):
    part = "{arm: no_q, kind: noninferior, margin: 0.01}"
    text = f"says: a\nsource: b\nseeds: 6\ngrid: {{}}\nparts:\n  p: {part}\n  p: {part}\n"
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(UserError, match=r"mine\.yaml: p: is given twice"):
        load_claim(str(tmp_path / "mine.yaml"))


def test_file_that_contains_itself_is_rejected(tmp_path):
    (tmp_path / "mine.yaml").write_text("says: a\nparts: &p\n  q: *p\n")
    with pytest.raises(UserError, match=r"mine\.yaml: it is nested too deep, or contains itself"):
        load_claim(str(tmp_path / "mine.yaml"))

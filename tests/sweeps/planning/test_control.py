"""Sizes of equal cost, against real models and against trying everything."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qkablate.config import Config, ModelConfig, VariantConfig, check, resolve, variants
from qkablate.config.sweep import ControlConfig
from qkablate.errors import UserError
from qkablate.models.cost import training_flops_per_token
from qkablate.sweeps.planning.control import REACH, Matched, OutOfReach, Size, match
from qkablate.training.resolve import empty_model

Measure = Callable[[Mapping[str, int | float]], Size]
MATCHES = ("params", "flops")
KNOBS = ("mlp", "d_model", "layers")
# Heads of 8 and of 16, of 9 and of 5, of 4; one head; ratios that are no whole number.
SHAPES = [
    ModelConfig(layers=1, d_model=16, heads=2),
    ModelConfig(layers=3, d_model=64, heads=4, bias=True),
    ModelConfig(layers=2, d_model=27, heads=3, mlp_ratio=8 / 3),
    ModelConfig(layers=2, d_model=40, heads=8, bias=True, position="none"),
    ModelConfig(layers=3, d_model=20, heads=5, mlp_ratio=2.7, position="rope"),
    ModelConfig(layers=2, d_model=17, heads=1, mlp_ratio=1.5, norm="none"),
    ModelConfig(layers=1, d_model=80, heads=10, mlp_ratio=4.0, context=256),
]


def arm(variant: str, model: ModelConfig) -> Config:
    said = VariantConfig(**variants()[variant])
    return Config(variant=said, model=model, device="cpu", precision="fp32")


def in_model(changes: Mapping[str, int | float]) -> dict:
    return {key.removeprefix("model."): value for key, value in changes.items()}


def measure_of(config: Config) -> Measure:
    """The sizes of real models, each built once."""
    known: dict[tuple, Size | UserError] = {}

    def build(changes: Mapping[str, int | float]) -> Size:
        model = dataclasses.replace(config.model, **in_model(changes))
        whole = dataclasses.replace(config, model=model)
        check(whole)
        gpt = empty_model(resolve(whole), 97)
        parts = gpt.ledger()
        flops = training_flops_per_token(gpt, tokens_per_pass=1024)
        return Size(parts["total"] - parts["embedding"], parts["total"], flops)

    def measure(changes: Mapping[str, int | float]) -> Size:
        key = tuple(sorted(changes.items()))
        if key not in known:
            try:
                known[key] = build(changes)
            except UserError as error:
                known[key] = error
        size = known[key]
        if isinstance(size, UserError):
            raise size
        return size

    return measure


def size_of(variant: str, model: ModelConfig) -> Size:
    return measure_of(arm(variant, model))({})


def cost_of(control: ControlConfig, size: Size) -> float:
    return getattr(size, control.match)


def shape_of(start: ModelConfig, changes: Mapping[str, int | float]) -> tuple[int, int, int]:
    """Layers, d_model and the width of the MLP, as the model reads them."""
    model = dataclasses.replace(start, **in_model(changes))
    return model.layers, model.d_model, round(model.mlp_ratio * model.d_model)


def by_force(
    control: ControlConfig,
    target: Size,
    start: ModelConfig,
    measure: Measure,
    reach: float = math.inf,
) -> tuple[int, int, int] | None:
    """Layers, d_model and MLP by the rule, from all there are, or from as many steps on either
    side of where the target is met at the ratio of the start; None where none fits.
    """
    goal = cost_of(control, target)
    step = {"mlp": start.d_model, "layers": 1}.get(
        control.knob, start.heads * math.gcd(8, start.d_model // start.heads)
    )
    key = "layers" if control.knob == "layers" else "d_model"
    found, crossing = [], 0
    for value in [start.d_model] if control.knob == "mlp" else itertools.count(step, step):
        d_model = start.d_model if key == "layers" else value
        nominal = max(1, round(start.mlp_ratio * d_model))
        try:
            one, two = (
                cost_of(control, measure({f"model.{key}": value, "model.mlp_ratio": m / d_model}))
                for m in (1, 2)
            )
        except UserError:
            if not crossing and value > 50 * step:
                break
            continue
        if one + (nominal - 1) * (two - one) <= goal:
            crossing = value
        if 2 * one - two > goal and control.knob != "mlp":
            break  # without an MLP it costs more than the baseline, and only grows
        # No MLP at all is the nearest, or every width up to the first that costs too much.
        widths = [0]
        while one + (widths[-1] - 1) * (two - one) < goal:
            widths.append(len(widths))
        missed = [
            (abs(one + (m - 1) * (two - one) - goal) / goal, abs(m - nominal)) for m in widths
        ]
        units = min(widths, key=lambda m: missed[m])
        if units >= 1 and missed[units][0] <= control.tolerance:
            ratio = abs(Fraction(units, d_model) - Fraction(start.mlp_ratio))
            moved = abs(value - getattr(start, key))
            layers = value if key == "layers" else start.layers
            found.append((ratio, moved, value, (layers, d_model, units)))
    if control.knob != "mlp":
        found = [f for f in found if -reach * step < f[2] - crossing <= reach * step]
    return min(found)[-1] if found else None


def try_both(
    control: ControlConfig,
    target: Size,
    start: ModelConfig,
    measure: Measure,
    reach: float = math.inf,
) -> Matched | OutOfReach:
    """What `match` says, held against trying everything."""
    expected = by_force(control, target, start, measure, reach)
    calls = []

    def counted(changes: Mapping[str, int | float]) -> Size:
        calls.append(changes)
        return measure(changes)

    found: Matched | OutOfReach
    try:
        found = match(control, target, start, counted)
    except OutOfReach as reason:
        found = reason
    assert len(calls) == len({tuple(changes.items()) for changes in calls})
    # The start, two widths that give the slope, and the one that is met.
    assert len(calls) <= (4 if control.knob == "mlp" else 4 * REACH + 20)
    if isinstance(found, OutOfReach):
        assert expected is None, f"{expected} would do: {found}"
        assert str(found)
        assert "\n" not in str(found)
        return found
    assert shape_of(start, found.changes) == expected
    assert found.size == measure(found.changes)
    goal = cost_of(control, target)
    assert found.mismatch == (cost_of(control, found.size) - goal) / goal
    assert abs(found.mismatch) <= control.tolerance
    coarse = set() if control.knob == "mlp" else {f"model.{control.knob}"}
    assert set(found.changes) <= {"model.mlp_ratio"} | coarse
    for key, value in found.changes.items():
        assert value != getattr(start, key.removeprefix("model."))
    return found


@pytest.mark.parametrize("variant", variants())
def test_a_cost_is_affine_in_the_width_of_the_mlp(variant):
    """What the solver builds on, and the tests below."""
    for model in (SHAPES[0], SHAPES[1]):
        measure = measure_of(arm(variant, model))
        widths = (1, 2, 3, 7, 50, 333)
        sizes = {m: measure({"model.mlp_ratio": m / model.d_model}) for m in widths}
        for m, size in sizes.items():
            for what in MATCHES:
                one, two = getattr(sizes[1], what), getattr(sizes[2], what)
                assert getattr(size, what) == one + (m - 1) * (two - one)


@pytest.mark.parametrize("what", MATCHES)
@pytest.mark.parametrize("variant", ["merged_w", "no_q", "static_scores"])
def test_against_a_model_of_every_width(variant, what):
    model = ModelConfig(layers=2, d_model=16, heads=4, context=8, bias=True)
    measure, target = measure_of(arm(variant, model)), size_of("standard", model)
    control = ControlConfig(match=what)
    goal = cost_of(control, target)
    best = min(
        range(1, 100),
        key=lambda m: abs(cost_of(control, measure({"model.mlp_ratio": m / 16})) - goal),
    )
    found = match(control, target, model, measure)
    assert shape_of(model, found.changes) == (2, 16, best)


@pytest.mark.parametrize("variant", variants())
def test_against_everything(variant):
    """Every variant at two of the shapes, with all that may pay, beside a usual baseline and one
    with much more attention.
    """
    number = list(variants()).index(variant)
    for model in (SHAPES[number % len(SHAPES)], SHAPES[(number + 3) % len(SHAPES)]):
        measure = measure_of(arm(variant, model))
        anywhere = dataclasses.replace(model, position="none")
        for target in (size_of("standard", model), size_of("merged_w", anywhere)):
            for what, knob in itertools.product(MATCHES, KNOBS):
                try_both(ControlConfig(match=what, knob=knob), target, model, measure)


@st.composite
def arms(draw) -> tuple[ControlConfig, Size, ModelConfig, Measure]:
    """A made-up arm: L layers of a d² + b d + 2 d M, and c; some head widths are refused."""
    heads = draw(st.integers(1, 4))
    start = ModelConfig(
        layers=draw(st.integers(1, 30)),
        d_model=heads * draw(st.integers(1, 40)),
        heads=heads,
        mlp_ratio=draw(st.sampled_from([0.5, 1.0, 8 / 3, 4.0, 6.1])),
    )
    a, b = draw(st.integers(0, 12)), draw(st.integers(1, 20))
    c = draw(st.sampled_from([0, 0, 1000]))
    meant = draw(st.sampled_from([1, 1, 2, 4]))

    def measure(changes: Mapping[str, int | float]) -> Size:
        layers, d_model, units = shape_of(start, changes)
        if d_model // heads % meant or units < 1:
            raise UserError("model.d_model: has no meaning")
        cost = layers * (a * d_model**2 + b * d_model + 2 * d_model * units) + c
        return Size(cost, cost, 6.0 * cost)

    control = ControlConfig(
        match=draw(st.sampled_from(MATCHES)),
        knob=draw(st.sampled_from(KNOBS)),
        tolerance=draw(st.sampled_from([0.003, 0.01, 0.1])),
    )
    own = start.layers * start.d_model**2
    cost = draw(st.integers(max(1, own // 4), 30 * own))
    return control, Size(cost, cost, 6.0 * cost), start, measure


@given(arms())
@settings(max_examples=300, deadline=None)
def test_made_up_arms_against_everything(drawn):
    try_both(*drawn, reach=REACH)


@pytest.mark.parametrize("knob", KNOBS)
@pytest.mark.parametrize("what", MATCHES)
def test_the_baseline_matched_to_itself_is_the_baseline(what, knob):
    for model in (*SHAPES, dataclasses.replace(SHAPES[0], mlp_ratio=0)):
        own = {(): size_of("standard", model)}  # nothing else is asked for
        found = match(
            ControlConfig(match=what, knob=knob), own[()], model, lambda c, own=own: own[tuple(c)]
        )
        assert found == Matched({}, own[()], 0.0)


@pytest.mark.parametrize("knob", KNOBS)
def test_what_is_best_as_it_is_stays_as_it_is(knob):
    """2.7 is not written as 54/20, which is the same MLP under another name."""
    model = SHAPES[4]
    own = size_of("standard", model)
    target = dataclasses.replace(own, params=own.params + 5)
    found = match(
        ControlConfig(match="params", knob=knob), target, model, measure_of(arm("standard", model))
    )
    assert found == Matched({}, own, -5 / target.params)


@pytest.mark.parametrize("units", [0, 1])
@pytest.mark.parametrize("own", [1, 4])
def test_of_two_widths_that_miss_by_as_much_the_nearer_one(own, units):
    """A target half way between two widths; no MLP at all is a width that may be nearer."""
    model = ModelConfig(layers=1, d_model=1, heads=1, mlp_ratio=own)

    def measure(changes):
        cost = 1000 + 2 * shape_of(model, changes)[2]
        return Size(cost, cost, cost)

    goal = 1000 + 2 * units + 1
    found = match(ControlConfig(match="params"), Size(goal, goal, goal), model, measure)
    assert shape_of(model, found.changes)[2] == units + (own > units)
    with pytest.raises(OutOfReach, match=r"needs an MLP of 0 units .* 1,000 parameters"):
        match(ControlConfig(match="params"), Size(1000, 1000, 1000), model, measure)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("d_head", [4, 8, 16])
def test_merged_w_at_ten_heads(d_head, bias):
    """(h + 2) d² of attention beside 4 d², and 8 d² of MLP: ten heads leave nothing for it."""
    ten = ModelConfig(layers=2, d_model=10 * d_head, heads=10, bias=bias)
    nine = dataclasses.replace(ten, d_model=9 * d_head, heads=9)
    mlp, coarse = (ControlConfig(match="params", knob=knob) for knob in ("mlp", "d_model"))
    found = try_both(mlp, size_of("standard", nine), nine, measure_of(arm("merged_w", nine)))
    assert isinstance(found, Matched)
    # 11 d² and 1 d² are 12 d²; of biases merged_w has d a head where standard has 2 d in all.
    assert shape_of(nine, found.changes)[2] == pytest.approx(nine.d_model / 2, abs=4)

    target, measure = size_of("standard", ten), measure_of(arm("merged_w", ten))
    with pytest.raises(OutOfReach, match=r"needs an MLP of (0|-\d+) units \(without one"):
        match(mlp, target, ten, measure)
    found = try_both(coarse, target, ten, measure)
    if d_head == 16:  # heads of 8 take over, and leave 3/4 of all parameters
        assert isinstance(found, Matched)
        assert found.changes["model.d_model"] == 80
    else:  # there is no step below
        assert f" at model.d_model={ten.d_model} " in str(found)


@pytest.mark.parametrize("what", MATCHES)
def test_the_reasons(what):
    model = SHAPES[0]
    baseline, arm_ = size_of("standard", model), measure_of(arm("no_q", model))

    def reason(target, start=model, measure=arm_, **control):
        with pytest.raises(OutOfReach) as why:
            match(ControlConfig(match=what, **control), target, start, measure)
        return str(why.value)

    unit = {"params": "parameters", "flops": "training FLOPs per token"}[what]
    bare = dataclasses.replace(model, mlp_ratio=0)
    for knob in KNOBS:
        assert reason(baseline, bare, measure_of(arm("no_q", bare)), knob=knob) == (
            "has no MLP that could pay (model.mlp_ratio is 0)"
        )
    small = Size(500, 600, 7_000.0)
    assert reason(small).startswith("needs an MLP of -")
    assert reason(small).endswith(f"{unit}, the baseline to {getattr(small, what):,.0f})")
    assert " at model.layers=1 (" in reason(small, knob="layers")
    odd = Size(baseline.params + 3, 0, baseline.flops + 6)
    assert " %" in reason(odd, tolerance=1e-6)
    assert reason(odd, tolerance=1e-6).endswith("(tolerance 0.0001 %)")
    assert " sizes, an MLP of " in reason(odd, tolerance=1e-6, knob="d_model")
    rope = dataclasses.replace(model, position="rope")
    for knob in KNOBS:  # of what has no meaning at any size: why it has none
        line = reason(baseline, rope, measure_of(arm("merged_w", rope)), knob=knob)
        assert line.startswith("variant: merged_w is refused: model.position=rope")


def test_sizes_without_a_meaning_are_passed_over():
    """Rope turns pairs: of heads 5, 6, 7 … wide, every other one is there."""
    model = ModelConfig(layers=2, d_model=20, heads=4, position="rope")
    target = size_of("standard", dataclasses.replace(model, position="learned"))
    measure = measure_of(arm("no_v", model))
    for what in MATCHES:
        found = try_both(ControlConfig(match=what, knob="d_model"), target, model, measure)
        assert isinstance(found, Matched)
        assert found.changes["model.d_model"] % 8 == 0


@pytest.mark.parametrize("d_model", [1, 3, 7, 17, 33, 63, 127, 769])
def test_every_width_survives_being_written_as_a_ratio(d_model):
    model = ModelConfig(layers=1, d_model=d_model, heads=1)

    def measure(changes):
        cost = 2 * d_model * shape_of(model, changes)[2]
        return Size(cost, cost, cost)

    for units in range(1, 500):
        cost = 2 * d_model * units
        found = match(ControlConfig(match="params"), Size(cost, cost, cost), model, measure)
        assert (shape_of(model, found.changes)[2], found.mismatch) == (units, 0)


def test_a_model_has_the_width_that_was_solved_for():
    model = ModelConfig(layers=2, d_model=33, heads=3)
    measure = measure_of(arm("no_v", model))
    found = match(ControlConfig(match="params"), size_of("standard", model), model, measure)
    own = resolve(arm("no_v", dataclasses.replace(model, **in_model(found.changes))))
    hidden = {block.mlp.up.out_features for block in empty_model(own, 97).blocks}
    # One d² less of attention, half of it for each of up and down; no_v's gain may cost a unit.
    assert hidden == {4 * 33 + 16}


@pytest.mark.parametrize("knob", ["d_model", "layers"])
@pytest.mark.parametrize("times", [0.12, 0.9, 1.0, 3.0, 40.0])
def test_few_sizes_are_measured(knob, times):
    """A model of GPT-2's shape takes its time to build, even without values."""
    model = ModelConfig(layers=12, d_model=768, heads=12)
    calls = []

    def measure(changes):
        calls.append(changes)
        layers, d_model, units = shape_of(model, changes)
        cost = layers * (14 * d_model**2 + 2 * d_model * units)
        return Size(cost, cost, 6.0 * cost)

    cost = int(times * 12 * 12 * 768**2)
    match(ControlConfig(match="params", knob=knob), Size(cost, cost, cost), model, measure)
    assert len(calls) <= 24

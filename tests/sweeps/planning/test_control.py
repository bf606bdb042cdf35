"""Sizes of equal cost, compared with real models and with exhaustive search."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qkablate.config import Config, ModelConfig, VariantConfig, check, resolve, variants
from qkablate.config.sweep import ControlConfig
from qkablate.errors import UserError
from qkablate.models.cost import training_flops_per_token
from qkablate.sweeps.planning.control import (
    REACH,
    ControlMatch,
    ControlOutOfReach,
    match_baseline,
)
from qkablate.training.resolve import build_empty_model


@dataclass(frozen=True)
class ModelSize:
    """The cost of a model."""

    params: int
    flops: float


Measure = Callable[[Mapping[str, int | float]], ModelSize]
MATCHES = ("params", "flops")
ADJUSTABLE = ("mlp", "d_model", "layers")
# Head widths of 8, 16, 9, 5 and 4; one head; fractional ratios.
SHAPES = [
    ModelConfig(layers=1, d_model=16, heads=2),
    ModelConfig(layers=3, d_model=64, heads=4, bias=True),
    ModelConfig(layers=2, d_model=27, heads=3, mlp_ratio=8 / 3),
    ModelConfig(layers=2, d_model=40, heads=8, bias=True, position="none"),
    ModelConfig(layers=3, d_model=20, heads=5, mlp_ratio=2.7, position="rope"),
    ModelConfig(layers=2, d_model=17, heads=1, mlp_ratio=1.5, norm="none"),
    ModelConfig(layers=2, d_model=24, heads=2, mlp="swiglu", norm_kind="rms"),
    ModelConfig(layers=1, d_model=80, heads=10, mlp_ratio=4.0, context=256),
]


def arm(variant: str, model: ModelConfig) -> Config:
    selected = VariantConfig(**variants()[variant])
    return Config(variant=selected, model=model, device="cpu", precision="fp32")


def in_model(changes: Mapping[str, int | float]) -> dict:
    return {key.removeprefix("model."): value for key, value in changes.items()}


def measure_of(config: Config) -> Measure:
    """Return a function that measures real models, each once."""
    known: dict[tuple, ModelSize | UserError] = {}

    def build(changes: Mapping[str, int | float]) -> ModelSize:
        model = dataclasses.replace(config.model, **in_model(changes))
        whole = dataclasses.replace(config, model=model)
        check(whole)
        gpt = build_empty_model(resolve(whole), 97)
        parts = gpt.parameter_counts()
        flops = training_flops_per_token(gpt, tokens_per_pass=1024)
        return ModelSize(parts["total"] - parts["embedding"], flops)

    def measure(changes: Mapping[str, int | float]) -> ModelSize:
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


def size_of(variant: str, model: ModelConfig) -> ModelSize:
    return measure_of(arm(variant, model))({})


def cost_of(control: ControlConfig, size: ModelSize) -> float:
    return getattr(size, control.match)


def shape_of(start: ModelConfig, changes: Mapping[str, int | float]) -> tuple[int, int, int]:
    """Return layers, d_model and MLP width, as the model reads them."""
    model = dataclasses.replace(start, **in_model(changes))
    return model.layers, model.d_model, round(share_of(start) * model.mlp_ratio * model.d_model)


def share_of(model: ModelConfig) -> float:
    """Return the units of the MLP relative to one of two matrices."""
    return 2 / 3 if model.mlp == "swiglu" else 1.0


def search_exhaustively(
    control: ControlConfig,
    target: ModelSize,
    start: ModelConfig,
    measure: Measure,
    reach: float = math.inf,
) -> tuple[int, int, int] | None:
    """Return layers, d_model and MLP width of the best match by exhaustive search, or None.

    It is limited to `reach` steps around where the target is met at the ratio of the start.
    """
    goal = cost_of(control, target)
    step = {"mlp": start.d_model, "layers": 1}.get(
        control.adjust, start.heads * (2 if start.position == "rope" else 1)
    )
    key = "layers" if control.adjust == "layers" else "d_model"
    candidates, crossing = [], 0
    for value in [start.d_model] if control.adjust == "mlp" else itertools.count(step, step):
        d_model = start.d_model if key == "layers" else value
        share = share_of(start)
        nominal = max(1, round(start.mlp_ratio * share * d_model))
        try:
            one, two = (
                cost_of(control, measure({f"model.{key}": value, "model.mlp_ratio": r}))
                for r in (1 / d_model / share, 2 / d_model / share)
            )
        except UserError:
            if not crossing and value > 50 * step:
                break
            continue
        if one + (nominal - 1) * (two - one) <= goal:
            crossing = value
        if 2 * one - two > goal and control.adjust != "mlp":
            break  # it costs more than the baseline even without an MLP, and only grows
        # Width 0, and every width up to the first that costs too much.
        widths = [0]
        while one + (widths[-1] - 1) * (two - one) < goal:
            widths.append(len(widths))
        missed = [
            (abs(one + (m - 1) * (two - one) - goal) / goal, abs(m - nominal)) for m in widths
        ]
        units = min(widths, key=lambda m: missed[m])
        if units >= 1 and missed[units][0] <= control.tolerance:
            ratio = abs(Fraction(units, d_model) - Fraction(start.mlp_ratio * share))
            moved = abs(value - getattr(start, key))
            layers = value if key == "layers" else start.layers
            candidates.append((ratio, moved, value, (layers, d_model, units)))
    if control.adjust != "mlp":
        candidates = [f for f in candidates if -reach * step < f[2] - crossing <= reach * step]
    return min(candidates)[-1] if candidates else None


def check_both(
    control: ControlConfig,
    target: ModelSize,
    start: ModelConfig,
    measure: Measure,
    reach: float = math.inf,
) -> ControlMatch | ControlOutOfReach:
    """Compare `match_baseline` with the exhaustive search."""
    expected = search_exhaustively(control, target, start, measure, reach)
    calls = []

    def counted(changes: Mapping[str, int | float]) -> ModelSize:
        calls.append(changes)
        return measure(changes)

    match: ControlMatch | ControlOutOfReach
    try:
        match = match_baseline(control, target, start, counted)
    except ControlOutOfReach as reason:
        match = reason
    assert len(calls) == len({tuple(changes.items()) for changes in calls})
    # The start, two widths for the slope, and the match.
    assert len(calls) <= (4 if control.adjust == "mlp" else 4 * REACH + 20)
    if isinstance(match, ControlOutOfReach):
        assert expected is None, f"{expected} would do: {match}"
        assert str(match)
        assert "\n" not in str(match)
        return match
    assert shape_of(start, match.changes) == expected
    goal = cost_of(control, target)
    assert match.mismatch == (cost_of(control, measure(match.changes)) - goal) / goal
    assert abs(match.mismatch) <= control.tolerance
    coarse = set() if control.adjust == "mlp" else {f"model.{control.adjust}"}
    assert set(match.changes) <= {"model.mlp_ratio"} | coarse
    for key, value in match.changes.items():
        assert value != getattr(start, key.removeprefix("model."))
    return match


@pytest.mark.parametrize("variant", variants())
def test_cost_is_affine_in_mlp_width(variant):
    """The solver relies on this, and so do the tests below."""
    for model in (SHAPES[0], SHAPES[1]):
        measure = measure_of(arm(variant, model))
        widths = (1, 2, 3, 7, 50, 333)
        sizes = {m: measure({"model.mlp_ratio": m / model.d_model}) for m in widths}
        for m, size in sizes.items():
            for what in MATCHES:
                one, two = getattr(sizes[1], what), getattr(sizes[2], what)
                assert getattr(size, what) == one + (m - 1) * (two - one)


@pytest.mark.slow
@pytest.mark.parametrize("what", MATCHES)
@pytest.mark.parametrize("variant", ["merged_w", "no_q", "static_scores"])
def test_match_is_the_best_of_all_widths(variant, what):
    model = ModelConfig(layers=2, d_model=16, heads=4, context=8, bias=True)
    measure, target = measure_of(arm(variant, model)), size_of("standard", model)
    control = ControlConfig(match=what)
    goal = cost_of(control, target)
    best = min(
        range(1, 100),
        key=lambda m: abs(cost_of(control, measure({"model.mlp_ratio": m / 16})) - goal),
    )
    match = match_baseline(control, target, model, measure)
    assert shape_of(model, match.changes) == (2, 16, best)


@pytest.mark.exhaustive
@pytest.mark.parametrize("variant", variants())
def test_match_equals_exhaustive_search(variant):
    """Try every variant at two shapes and every key, against a small and a large baseline."""
    number = list(variants()).index(variant)
    for model in (SHAPES[number % len(SHAPES)], SHAPES[(number + 3) % len(SHAPES)]):
        measure = measure_of(arm(variant, model))
        anywhere = dataclasses.replace(model, position="none")
        for target in (size_of("standard", model), size_of("merged_w", anywhere)):
            for what, adjust in itertools.product(MATCHES, ADJUSTABLE):
                check_both(ControlConfig(match=what, adjust=adjust), target, model, measure)


@st.composite
def arms(draw) -> tuple[ControlConfig, ModelSize, ModelConfig, Measure]:
    """Draw an arm of L layers with a d² + b d + 2 d M + c; some head widths are refused."""
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

    def measure(changes: Mapping[str, int | float]) -> ModelSize:
        layers, d_model, units = shape_of(start, changes)
        if d_model // heads % meant or units < 1:
            raise UserError("model.d_model: has no meaning")
        cost = layers * (a * d_model**2 + b * d_model + 2 * d_model * units) + c
        return ModelSize(cost, 6.0 * cost)

    control = ControlConfig(
        match=draw(st.sampled_from(MATCHES)),
        adjust=draw(st.sampled_from(ADJUSTABLE)),
        tolerance=draw(st.sampled_from([0.003, 0.01, 0.1])),
    )
    own = start.layers * start.d_model**2
    cost = draw(st.integers(max(1, own // 4), 30 * own))
    return control, ModelSize(cost, 6.0 * cost), start, measure


@pytest.mark.slow
@given(arms())
@settings(max_examples=300, deadline=None)
def test_match_equals_exhaustive_search_on_synthetic_arms(drawn):
    check_both(*drawn, reach=REACH)


@pytest.mark.parametrize("adjust", ADJUSTABLE)
@pytest.mark.parametrize("what", MATCHES)
def test_baseline_matched_to_itself_is_unchanged(what, adjust):
    for model in (*SHAPES, dataclasses.replace(SHAPES[0], mlp_ratio=0)):
        own = {(): size_of("standard", model)}  # nothing else is measured
        match = match_baseline(
            ControlConfig(match=what, adjust=adjust),
            own[()],
            model,
            lambda c, own=own: own[tuple(c)],
        )
        assert match == ControlMatch({}, 0.0)


@pytest.mark.parametrize("adjust", ADJUSTABLE)
def test_best_start_is_left_unchanged(adjust):
    """A ratio of 2.7 is not rewritten as 54/20, which is the same MLP."""
    model = SHAPES[4]
    own = size_of("standard", model)
    target = dataclasses.replace(own, params=own.params + 5)
    match = match_baseline(
        ControlConfig(match="params", adjust=adjust),
        target,
        model,
        measure_of(arm("standard", model)),
    )
    assert match == ControlMatch({}, -5 / target.params)


@pytest.mark.parametrize("units", [0, 1])
@pytest.mark.parametrize("own", [1, 4])
def test_tied_widths_are_broken_by_distance_to_the_start(own, units):
    """The target lies half way between two widths; a width of 0 may be the nearer one."""
    model = ModelConfig(layers=1, d_model=1, heads=1, mlp_ratio=own)

    def measure(changes):
        cost = 1000 + 2 * shape_of(model, changes)[2]
        return ModelSize(cost, cost)

    goal = 1000 + 2 * units + 1
    match = match_baseline(ControlConfig(match="params"), ModelSize(goal, goal), model, measure)
    assert shape_of(model, match.changes)[2] == units + (own > units)
    with pytest.raises(ControlOutOfReach, match=r"needs an MLP of 0 units .* 1,000 parameters"):
        match_baseline(ControlConfig(match="params"), ModelSize(1000, 1000), model, measure)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("d_head", [4, 8, 16])
def test_merged_w_at_ten_heads(d_head, bias):
    """(h + 2) d² of attention beside 4 d², and 8 d² of MLP: ten heads leave nothing for it."""
    ten = ModelConfig(layers=2, d_model=10 * d_head, heads=10, bias=bias)
    nine = dataclasses.replace(ten, d_model=9 * d_head, heads=9)
    mlp, coarse = (ControlConfig(match="params", adjust=adjust) for adjust in ("mlp", "d_model"))
    match = check_both(mlp, size_of("standard", nine), nine, measure_of(arm("merged_w", nine)))
    assert isinstance(match, ControlMatch)
    # 11 d² and 1 d² are 12 d²; of biases merged_w has d a head where standard has 2 d in all.
    assert shape_of(nine, match.changes)[2] == pytest.approx(nine.d_model / 2, abs=4)

    target, measure = size_of("standard", ten), measure_of(arm("merged_w", ten))
    with pytest.raises(ControlOutOfReach, match=r"needs an MLP of (0|-\d+) units \(without one"):
        match_baseline(mlp, target, ten, measure)
    match = check_both(coarse, target, ten, measure)
    assert isinstance(match, ControlMatch)
    assert match.changes["model.d_model"] == 3 * ten.d_model / 4


@pytest.mark.slow
@pytest.mark.parametrize("what", MATCHES)
def test_reason_names_the_nearest_size(what):
    model = SHAPES[0]
    baseline, arm_ = size_of("standard", model), measure_of(arm("no_q", model))

    def reason(target, start=model, measure=arm_, **control):
        with pytest.raises(ControlOutOfReach) as why:
            match_baseline(ControlConfig(match=what, **control), target, start, measure)
        return str(why.value)

    unit = {"params": "parameters", "flops": "training FLOPs per token"}[what]
    bare = dataclasses.replace(model, mlp_ratio=0)
    for adjust in ADJUSTABLE:
        assert reason(baseline, bare, measure_of(arm("no_q", bare)), adjust=adjust) == (
            "has no MLP whose width could be adjusted (model.mlp_ratio is 0)"
        )
    small = ModelSize(500, 7_000.0)
    assert reason(small).startswith("needs an MLP of -")
    assert reason(small).endswith(f"{unit}, the baseline {getattr(small, what):,.0f})")
    assert " at model.layers=1 (" in reason(small, adjust="layers")
    odd = ModelSize(baseline.params + 3, baseline.flops + 6)
    assert " %" in reason(odd, tolerance=1e-6)
    assert reason(odd, tolerance=1e-6).endswith("(tolerance 0.0001 %)")
    assert " sizes, an MLP of " in reason(odd, tolerance=1e-6, adjust="d_model")
    rope = dataclasses.replace(model, position="rope")
    for adjust in ADJUSTABLE:  # impossible at any size: the reason is that of the model
        line = reason(baseline, rope, measure_of(arm("merged_w", rope)), adjust=adjust)
        assert line.startswith("variant: merged_w is not supported: model.position=rope")


def test_refused_sizes_are_skipped():
    """Rope rotates pairs of dimensions: of the head widths 5, 6, 7, …, odd ones are refused."""
    model = ModelConfig(layers=2, d_model=20, heads=4, position="rope")
    target = size_of("standard", dataclasses.replace(model, position="learned"))
    measure = measure_of(arm("no_v", model))
    for what in MATCHES:
        match = check_both(ControlConfig(match=what, adjust="d_model"), target, model, measure)
        assert isinstance(match, ControlMatch)
        assert match.changes["model.d_model"] % 8 == 0


@pytest.mark.parametrize("d_model", [1, 3, 7, 17, 33, 63, 127, 769])
def test_every_width_round_trips_as_a_ratio(d_model):
    model = ModelConfig(layers=1, d_model=d_model, heads=1)

    def measure(changes):
        cost = 2 * d_model * shape_of(model, changes)[2]
        return ModelSize(cost, cost)

    for units in range(1, 500):
        cost = 2 * d_model * units
        match = match_baseline(ControlConfig(match="params"), ModelSize(cost, cost), model, measure)
        assert (shape_of(model, match.changes)[2], match.mismatch) == (units, 0)


def test_built_model_has_the_solved_width():
    model = ModelConfig(layers=2, d_model=33, heads=3)
    measure = measure_of(arm("no_v", model))
    match = match_baseline(
        ControlConfig(match="params"), size_of("standard", model), model, measure
    )
    own = resolve(arm("no_v", dataclasses.replace(model, **in_model(match.changes))))
    hidden = {block.mlp.up.out_features for block in build_empty_model(own, 97).blocks}
    # One d² less of attention, half of it for each of up and down; no_v's gain may cost a unit.
    assert hidden == {4 * 33 + 16}


@pytest.mark.parametrize("adjust", ["d_model", "layers"])
@pytest.mark.parametrize("times", [0.12, 0.9, 1.0, 3.0, 40.0])
def test_number_of_measured_sizes_is_bounded(adjust, times):
    """A model of GPT-2's shape takes time to build, even on the meta device."""
    model = ModelConfig(layers=12, d_model=768, heads=12)
    calls = []

    def measure(changes):
        calls.append(changes)
        layers, d_model, units = shape_of(model, changes)
        cost = layers * (14 * d_model**2 + 2 * d_model * units)
        return ModelSize(cost, 6.0 * cost)

    cost = int(times * 12 * 12 * 768**2)
    match_baseline(
        ControlConfig(match="params", adjust=adjust), ModelSize(cost, cost), model, measure
    )
    assert len(calls) <= 24


@pytest.mark.parametrize("adjust", ADJUSTABLE)
@pytest.mark.parametrize("match", MATCHES)
@pytest.mark.parametrize("width", [16, 24, 80])
def test_encoders_of_another_width_are_matched(match, adjust, width):
    """Both MLPs have one ratio, each rounded to whole units; the mismatch is that of the model."""
    shape = {"form": "encoder_decoder", "source": 48, "encoder_d_model": width}
    model = ModelConfig(layers=2, d_model=32, heads=4, **shape)
    control, measure = ControlConfig(match, adjust), measure_of(arm("no_k", model))
    target = size_of("standard", model)
    found = match_baseline(control, target, model, measure)
    real = cost_of(control, measure(found.changes)) / cost_of(control, target) - 1
    assert found.mismatch == pytest.approx(real, abs=1e-12)
    assert abs(real) <= control.tolerance
    assert found.changes

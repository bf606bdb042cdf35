"""Expansion of a grid into frozen runs, with real tiny models."""

import dataclasses
import itertools
import re
from collections import Counter

import pytest

from qkablate.compose.configs import compose_jobs, make_config, open_hydra
from qkablate.compose.grid import read_request
from qkablate.config import SweepConfig
from qkablate.errors import UserError
from qkablate.sweeps.planning.expand import Grid, expand_grid
from qkablate.sweeps.planning.packing import pack
from qkablate.sweeps.planning.text import format_plan, plan_to_json
from qkablate.training.resolve import build_empty_model, plan_run


@pytest.fixture
def base(text, tmp_path):
    shape = ["model.layers=1", "model.d_model=16", "model.heads=2", "model.context=16"]
    data = ["data=text", f"data.path={text}", f"data.cache={tmp_path / 'cache'}"]
    train = ["train.steps=12", "train.batch_size=2", "tracking.wandb=disabled", "threads=1"]
    return [*shape, *data, *train, f"out={tmp_path / 'outputs'}"]


@pytest.fixture
def expand(base):
    """Return the manifest of some arguments on top of a tiny model."""

    def run(*words):
        other = any(word.startswith("data=") for word in words)
        kept = [word for word in base if not (other and word.startswith("data"))]
        return expand_words(["sweep.floor=false", *kept, *words])

    return run


def expand_words(words):
    with open_hydra():
        asked = read_request(words)
        grid = Grid(asked.settings.sweep, asked.controls, asked.choices)
        return expand_grid(grid, make_config, ["qkablate", "sweep", *words])


def ids(manifest, variant=None):
    arms = manifest.arms
    return {run.id for run in manifest.runs if variant in (None, arms[run.arm].variant)}


# Arms that are left out, and errors.


def test_arm_that_shared_test_tokens_make_another_one_is_left_out(expand):
    """All arms of one data set read as many: `auto` becomes the other number."""
    manifest = expand("variant=standard,no_q", "train.test_tokens=auto,40000", "data=directed")
    assert {run.arm for run in manifest.runs} == {*manifest.arms}
    assert len(manifest.arms) == 2
    assert {arm.baseline for arm in manifest.arms.values()} <= {None, *manifest.arms}
    assert [left.kind for left in manifest.left_out] == ["duplicate"] * 2


IMPOSSIBLE = [
    (["model.heads=2,3"], {"standard-d16-h3"}, "model.heads: 3 does not divide model.d_model=16"),
    (["model.d_model=16,18", "model.heads=4,2"], {"standard-d18-h4"}, "does not divide"),
    (["variant=standard,merged_w", "model.position=rope"], {"merged_w-d16-h2"}, "is not supported"),
    (
        ["variant=low_rank_w", "variant.rank=4,17"],
        {"low_rank_w_r17-d16-h2"},
        "17 is above model.d_",
    ),
    (["variant=gqa", "variant.groups=1,3"], {"gqa_g3-d16-h2"}, "3 does not divide model.heads=2"),
    (["optim.warmup=1", "train.steps=1,5"], {"standard-d16-h2-steps=1"}, "not below the 1 steps"),
    (["model.mlp_ratio=4,0.01"], {"standard-d16-h2-mlp_ratio=0.01"}, "without a single unit"),
    (
        ["variant.qk=separate,uniform", "variant.ov=no_vo", "model.mlp_ratio=0", "optim=muon"],
        {"uniform+no_vo-d16-h2"},
        "optim.optimizer: muon, but the blocks have no matrices",
    ),
]


@pytest.mark.parametrize(("words", "named", "why"), IMPOSSIBLE, ids=str)
def test_impossible_arms_are_left_out_with_their_reason(expand, words, named, why):
    manifest = expand(*words, "sweep.baseline=null")
    assert {left.arm for left in manifest.left_out} == named
    assert all(left.kind == "unsupported" and why in left.reason for left in manifest.left_out)
    grid = [word.partition("=")[2].split(",") for word in words]
    assert len(manifest.arms) == len([*itertools.product(*grid)]) - len(named)
    assert {run.arm for run in manifest.runs} == {*manifest.arms}


@pytest.mark.parametrize(("words", "named", "why"), IMPOSSIBLE[:1] + IMPOSSIBLE[2:3], ids=str)
def test_only_impossible_arms_is_an_error(expand, words, named, why):
    last = [word.partition("=")[0] + "=" + word.rpartition(",")[2] for word in words]
    alone = [one if "," in word else word for word, one in zip(words, last, strict=True)]
    with pytest.raises(UserError, match=why):
        expand(*alone)


def test_left_out_arms_have_their_own_names(expand, circuit):
    manifest = expand("variant.qk=separate,merged", "model.position=rope")
    assert not {left.arm for left in manifest.left_out} & {*manifest.arms}
    manifest = expand(f"variant.file={circuit('raises')}", "model.heads=2,3")
    assert all("raises" in left.arm for left in manifest.left_out)


def test_baseline_of_an_impossible_arm_is_not_trained(expand):
    """Nothing is compared with it."""
    manifest = expand(
        *["variant=merged_w,no_q", "model.position=learned,rope", "variant.rope_dims=null"],
        """sweep.filter=["model.position == 'learned' or variant == 'merged_w'"]""",
    )
    assert {left.arm for left in manifest.left_out} == {"merged_w-d16-h2-position=rope"}
    assert {*manifest.arms} == {
        f"{variant}-d16-h2-position=learned" for variant in ("standard", "merged_w", "no_q")
    }


def test_shipped_sweep_of_blocks_and_optimizers(tmp_path):
    """Each arm is paired with standard of its own block, optimizer and rotated dimensions."""
    manifest = expand_words(["sweep=worlds", "sweep.floor=false", f"out={tmp_path}"])
    found = set()
    for arm in manifest.arms.values():
        config = arm.config
        block = config.model.norm_kind, config.model.mlp, config.model.position
        found.add((arm.variant, *block, config.optim.optimizer, config.train.steps))
        baseline = manifest.arms[arm.baseline or arm.name]
        assert baseline.config.model == config.model
        assert baseline.config.optim == config.optim
        rotated = "_rope8" if config.variant.rope_dims else ""
        assert baseline.variant == "standard" + rotated
    variants = {
        ("layer", "gelu", "learned"): ["standard", "merged_w", "mla_r16", "no_q", "shared_qk"],
        ("rms", "swiglu", "rope"): ["standard", "no_q", "shared_qk"]
        + [f"{name}_rope8" for name in ("standard", "merged_w", "mla_r16")],
    }
    steps = {"layer": 500, "rms": 1000}  # as long as standard takes
    assert found == {
        (name, *block, optimizer, steps[block[0]])
        for block, names in variants.items()
        for name in names
        for optimizer in ("adamw", "muon")
    }


def test_rotated_dimensions_that_mla_has_by_default_are_those_of_its_baseline(expand):
    manifest = expand("variant=standard,mla", "model.position=rope")
    baselines = {arm.variant: arm.baseline for arm in manifest.arms.values()}
    assert baselines == {
        "standard": None,
        "mla_r4_rope4": "standard_rope4-d16-h2",
        "standard_rope4": None,
    }


def test_baseline_has_rotated_dimensions_at_the_sites_of_the_arm(expand):
    words = ["variant=mla", "variant.sites=encoder", "model.position=rope"]
    manifest = expand(*TRANSLATOR, *words)
    (arm,) = (arm for arm in manifest.arms.values() if arm.baseline)
    baseline = manifest.arms[arm.baseline].config.variant
    assert (baseline.rope_dims, baseline.sites) == (4, "encoder")
    assert (arm.config.variant.rope_dims, arm.config.variant.sites) == (4, "encoder")


@pytest.mark.parametrize("rotated", [[], ["variant.rope_dims=4"]])
def test_baseline_with_other_positions_has_no_rotated_dimensions(expand, rotated):
    baseline = "sweep.baseline={variant: standard, model.position: learned}"
    manifest = expand("variant=mla", "model.position=rope", *rotated, baseline)
    (arm,) = (arm for arm in manifest.arms.values() if arm.baseline)
    assert manifest.arms[arm.baseline].config.variant.rope_dims is None


def test_arm_with_impossible_baseline_is_left_out(expand):
    words = ["model.d_model=16,12", "sweep.baseline={model.heads: 4, model.d_model: 18}"]
    with pytest.raises(UserError, match=r"its baseline: .* does not divide .* \(and 1 more"):
        expand(*words)
    merged = ["variant=standard", "model.position=rope,learned", "sweep.baseline=merged_w"]
    manifest = expand(*merged)
    assert [left.reason[:14] for left in manifest.left_out] == ["its baseline: "]
    assert {arm.variant for arm in manifest.arms.values()} == {"standard", "merged_w"}
    assert {arm.config.model.position for arm in manifest.arms.values()} == {"learned"}


MISSPELT = [  # more, without models, in tests/compose/test_grid.py
    (["variant=standard,no_qq"], r"variant: 'no_qq' \(nearest: no_q\) is not one of no_q, "),
    (["variant.qk=separate,mergd"], r"variant.qk: 'mergd' .*\(nearest: merged\)"),
    (["model.heads=2,3", "model.norm=pre,post"], r"model\.norm: 'post' is not one of pre, none"),
    (["seed=0,-1"], "seed: -1 is not"),
    (["optim.lr=1e-3,5000"], r"optim\.lr: 5000"),
    (["data.path=/nope"], r"data\.path: there is no file"),
    (["variant.file=/nope.py"], r"variant\.file: cannot read '/nope.py'"),
    (["sweep.baseline={model.heads: two}"], r"model\.heads: 'two' is not a whole number"),
    (["sweep.baseline={data.path: 'a(b'}"], r"data\.path"),
    (["sweep.baseline=no_qq"], r"sweep\.baseline: 'no_qq' \(nearest: no_q\) is not one of"),
    (["sweep.baseline=no_qq"], r"\(`qkablate variants` lists all \d+\)"),
    (
        ["sweep.baseline={model.d_modl: 16}"],
        r"sweep\.baseline: model\.d_modl: there is no such key \(nearest: model\.d_model\)",
    ),
    (["sweep.filter=['model.haeds > 1']"], r"sweep\.filter: .*\(nearest: model.heads\)"),
    (["sweep.filter=['model.heads > 1','no']"], r"sweep\.filter: 'no': there is no key 'no'"),
    (["sweep.baseline=null", "control=params"], "control=params needs a baseline"),
]


@pytest.mark.parametrize(("words", "why"), MISSPELT, ids=str)
def test_any_mistake_is_an_error(expand, tmp_path, words, why):
    with pytest.raises(UserError, match=why):
        expand("model.layers=1,2", *words)
    assert not (tmp_path / "outputs").exists()


@pytest.mark.parametrize("rate", ["abc", "0", "-1e-3", "nan", "null", "0,1,2,3,4"])
def test_invalid_tuning_rates_are_rejected(expand, rate):
    with pytest.raises(UserError, match=r"optim\.lr"):
        expand("sweep.tune=true", f"optim.lr={rate}")


def test_quoted_rates_are_accepted(expand):
    plain = expand("sweep.tune=true", "optim.lr=2e-3")
    assert ids(expand("sweep.tune=true", "optim.lr='2e-3'")) == ids(plain)


def test_tuning_seeds_must_differ_from_final_seeds(expand):
    with pytest.raises(UserError, match=r"sweep.tuning_seeds: 1001 is a seed of the final runs"):
        expand("sweep.tune=true", "seed=0,1001")
    with pytest.raises(UserError, match=r"sweep.tuning_seeds: 1 is a seed"):
        expand("sweep.tune=true", "sweep.tuning_seeds=[5,1]", "seed=range(3)")
    assert expand("seed=0,1001").runs  # nothing is tuned


def test_arms_excluded_by_a_predicate_are_counted(expand):
    words = ["variant=standard,no_q", "model.heads=1,2,4", "model.d_model=16,32"]
    where = 'sweep.filter=["model.d_model // model.heads >= 8","variant != \'no_q\'"]'
    manifest = expand(*words, where)
    shapes = {(arm.config.model.d_model, arm.config.model.heads) for arm in manifest.arms.values()}
    assert shapes == {(16, 1), (16, 2), (32, 1), (32, 2), (32, 4)}
    assert {arm.variant for arm in manifest.arms.values()} == {"standard"}
    assert manifest.excluded == 12 - 5
    assert not manifest.left_out


def test_predicate_that_excludes_all_arms_is_an_error(expand):
    with pytest.raises(UserError, match=r"sweep.filter: .* 4"):
        expand("variant=standard,no_q", "model.heads=1,2", "sweep.filter=['model.heads > 2']")


def attempt(expand, *words):
    try:
        return expand(*words), ""
    except UserError as refused:
        return None, str(refused)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("axis", "predicate"), [("seed=0,1", "seed > 0"), ("optim.lr=1e-3,2e-3", "optim.lr > 1e-3")]
)
def test_predicate_on_run_keys_is_rejected_or_applied(expand, axis, predicate):
    """Seeds and rates distinguish runs, not arms: the predicate selects runs or is rejected."""
    key = axis.partition("=")[0]
    manifest, message = attempt(expand, axis, f"sweep.filter=['{predicate}']")
    if manifest is None:
        assert key in message
    else:
        assert [run.changes[key] for run in manifest.runs] == [float(axis.rpartition(",")[2])]


# Baselines.


@pytest.mark.parametrize("variants", ["no_q,merged_w", "no_q,standard,merged_w", "standard"])
def test_baseline_is_added_once(expand, variants):
    manifest = expand(f"variant={variants}", "seed=0,1", "control=none,params")
    standard = [arm for arm in manifest.arms.values() if arm.variant == "standard"]
    assert [arm.name for arm in standard] == ["standard-d16-h2"]
    assert len(ids(manifest, "standard")) == 2
    assert len(manifest.runs) == len(ids(manifest)) == 2 * len(manifest.arms)
    others = {arm.baseline for arm in manifest.arms.values() if arm.variant != "standard"}
    assert others <= {"standard-d16-h2"}
    assert standard[0].baseline is None


def test_every_size_has_its_own_baseline(expand):
    manifest = expand("variant=no_q,no_k", "model.d_model=16,32", "model.bias=true,false")
    for arm in manifest.arms.values():
        if arm.variant != "standard":
            beside = manifest.arms[arm.baseline]
            assert beside.variant == "standard"
            assert beside.config.model == arm.config.model
    assert len(manifest.arms) == (2 + 1) * 2 * 2


TRANSLATOR = ["model=nano_translator", "data=reverse", "model.context=8", "sweep.floor=true"]


def test_sites_are_an_axis(expand):
    """Standard is the same at all sites; the floor is uniform at the sites of each variant."""
    manifest = expand(*TRANSLATOR, "variant=standard,merged_w", "variant.sites=all,cross")
    assert {*manifest.arms} == {
        *("standard-d16-h2", "merged_w-d16-h2", "merged_w_cross-d16-h2"),
        *("uniform-d16-h2", "uniform_cross-d16-h2"),
    }
    sites = {arm.variant: arm.config.variant.sites for arm in manifest.arms.values()}
    assert sites == {
        **{"standard": "all", "uniform": "all", "uniform_cross": "cross"},
        **{"merged_w": "all", "merged_w_cross": "cross"},
    }
    assert len({run.id for run in manifest.runs}) == 5
    for name in ("merged_w-d16-h2", "merged_w_cross-d16-h2"):
        assert manifest.arms[name].baseline == "standard-d16-h2"


def test_arms_that_need_one_width_are_left_out(expand):
    words = ("variant=standard,no_k,shared_qk", "variant.sites=encoder,cross")
    manifest = expand(*TRANSLATOR, *words, "model.encoder_d_model=8")
    assert {arm.variant for arm in manifest.arms.values()} == {
        *("standard", "no_k_encoder", "no_k_cross", "shared_qk_encoder"),
        *("uniform_encoder", "uniform_cross"),
    }
    (left_out,) = manifest.left_out
    assert left_out.kind == "unsupported"
    assert "cross-attention reads streams of widths 16 and 8" in left_out.reason


def test_equal_width_of_the_encoder_is_the_default(expand):
    arms = expand(*TRANSLATOR, "model.encoder_d_model=null,16,8").arms.values()
    assert sorted(str(arm.config.model.encoder_d_model) for arm in arms) == ["8", "None"]


def test_variants_without_a_symmetric_start_are_left_out(expand):
    words = ("variant=standard,low_rank_w,merged_w,no_q", "variant.init=symmetric")
    manifest = expand(*words, "sweep.floor=true")
    found = {arm.config.variant.qk for arm in manifest.arms.values()}
    assert found == {"separate", "low_rank", "uniform"}
    assert [(arm.arm.partition("-")[0], arm.kind) for arm in manifest.left_out] == [
        ("merged_w", "unsupported"),
        ("no_q", "unsupported"),
    ]
    assert all("needs both in one shape" in arm.reason for arm in manifest.left_out)


@pytest.mark.parametrize("axis", ["model.source=8,12", "model.form=encoder,encoder_decoder"])
def test_models_of_other_forms_and_lengths_have_data_of_their_own(expand, axis):
    arms = expand(*TRANSLATOR, axis).arms.values()
    assert len({arm.facts["data_fingerprint"] for arm in arms}) == len(arms) == 2


@pytest.mark.parametrize(
    ("words", "floors"),
    [
        (["variant=standard,no_q", "variant.sites=cross"], ["uniform_cross"]),
        (
            ["variant=standard,no_q,no_k", "variant.sites=encoder,cross"],
            ["uniform_encoder", "uniform_cross"],
        ),
        (["variant=no_q", "variant.sites=encoder+decoder"], ["uniform_encoder_decoder"]),
        (["variant=standard,no_q", "variant.sites=encoder+decoder+cross"], ["uniform"]),
        (["variant=standard,no_q"], ["uniform"]),
        (["variant=no_q", "variant.sites=cross", "control=params"], ["uniform_cross"]),
    ],
)
def test_floor_is_uniform_at_the_sites_of_the_variants(expand, words, floors):
    arms = expand(*TRANSLATOR, *words).arms.values()
    added = [arm for arm in arms if arm.config.variant.qk == "uniform"]
    assert [arm.variant for arm in added] == floors
    assert {arm.baseline for arm in added} == {None}


def test_uniform_in_the_grid_is_trained_once(expand):
    words = ["variant=standard,no_q,uniform", "variant.sites=encoder"]
    assert [arm.variant for arm in expand(*TRANSLATOR, *words).arms.values()] == [
        *("standard", "no_q_encoder", "uniform_encoder")
    ]


@pytest.mark.parametrize(
    ("words", "floors"),
    [
        (["variant.init=matched,symmetric", "model.bias=true,false"], 2),  # one a model
        (["variant.init=matched,naive", "sweep.design=one_at_a_time"], 1),
        (["model.bias=true,false"], 0),
        (["model.d_model=16,32", "optim.lr=1e-3,2e-3"], 0),
        (["variant.lr=same,matched"], 0),
    ],
)
def test_starts_of_one_variant_have_a_floor(expand, words, floors):
    manifest = expand(*words, "sweep.baseline={variant.init: matched}", "sweep.floor=true")
    added = [arm.config.variant for arm in manifest.arms.values() if arm.variant == "uniform"]
    assert [variant.init for variant in added] == ["matched"] * floors


def test_sites_alone_are_compared_with_standard(expand):
    manifest = expand(*TRANSLATOR, "variant=merged_w", "variant.sites=encoder,decoder,cross")
    assert {*manifest.arms} == {
        *(f"merged_w_{site}-d16-h2" for site in ("encoder", "decoder", "cross")),
        *(f"uniform_{site}-d16-h2" for site in ("encoder", "decoder", "cross")),
        "standard-d16-h2",
    }


def test_rotated_dimensions_are_those_of_the_baseline_too(expand):
    """Otherwise the positions would differ, too."""
    manifest = expand("variant=merged_w,mla", "model.position=rope", "variant.rope_dims=4,8")
    found = {arm.variant: arm.baseline for arm in manifest.arms.values()}
    for n in (4, 8):
        assert found[f"standard_rope{n}"] is None
        assert found[f"merged_w_rope{n}"] == f"standard_rope{n}-d16-h2"
        assert found[f"mla_r4_rope{n}"] == f"standard_rope{n}-d16-h2"


def test_baseline_can_be_another_variant(expand):
    manifest = expand("variant=low_rank_w", "variant.rank=4,8", "sweep.baseline=no_q")
    found = [(arm.variant, arm.baseline) for arm in manifest.arms.values()]
    assert sorted(found, key=str) == [
        ("low_rank_w_r4", "no_q-d16-h2"),
        ("low_rank_w_r8", "no_q-d16-h2"),
        ("no_q", None),
    ]


def test_baseline_can_be_a_map_of_keys(expand):
    values = "{variant: no_k, model.bias: true, optim.betas: [0.8, 0.9], variant.rank: null}"
    manifest = expand("variant=no_q", "model.heads=2,4", f"sweep.baseline={values}")
    beside = {arm.baseline for arm in manifest.arms.values() if arm.variant == "no_q"}
    assert len(beside) == 2
    for name in beside:
        arm = manifest.arms[name]
        assert (arm.variant, arm.config.model.bias, arm.baseline) == ("no_k", True, None)
        assert arm.config.optim.betas == [0.8, 0.9]
    one = expand("model.heads=1,2,4", "sweep.baseline={model.heads: 2}")
    found = {arm.config.model.heads: arm.baseline for arm in one.arms.values()}
    assert found == {1: "standard-d16-h2", 2: None, 4: "standard-d16-h2"}


@pytest.mark.parametrize(("key", "value"), [("optim.lr", 5e-3), ("seed", 7)])
def test_run_keys_in_a_baseline_map_are_rejected_or_applied(expand, key, value):
    """The baseline has that rate or seed, or the map is rejected."""
    words = ["variant=no_q", f"sweep.baseline={{variant: standard, {key}: {value}}}"]
    manifest, message = attempt(expand, *words)
    if manifest is None:
        assert key in message
    else:
        found = {manifest.arms[run.arm].variant: run.changes[key] for run in manifest.runs}
        assert found["standard"] == value
        assert found["no_q"] != value


def test_baseline_can_be_null(expand):
    manifest = expand("variant=no_q,no_k", "sweep.baseline=null")
    found = [(arm.variant, arm.baseline) for arm in manifest.arms.values()]
    assert found == [("no_q", None), ("no_k", None)]


# Controls.

MATCHED = [
    ["variant=merged_w,no_q,wide_qk,low_rank_w", "model.heads=2,4", "control=params"],
    ["variant=merged_w,no_q,no_qk", "model.heads=4", "control=flops", "model.context=32"],
    ["variant=no_q", "model.layers=8", "control=params", "control.adjust=layers"],
    ["variant=no_qk", "model.d_model=32", "control=params,flops", "control.adjust=d_model"],
    ["model.layers=1,4", "control=params", "sweep.baseline={model.layers: 4}"],
]


@pytest.mark.parametrize("words", MATCHED, ids=" ".join)
def test_matched_arms_cost_what_their_baseline_costs(expand, words):
    manifest = expand("model.d_model=32", *words)
    matched = [arm for arm in manifest.arms.values() if arm.baseline]
    assert matched
    for arm in matched:
        sizes = []
        for one in (arm, manifest.arms[arm.baseline]):
            planned = plan_run(one.config)
            built = build_empty_model(one.config, one.facts["vocabulary"]).parameter_counts()
            sizes.append((built["total"] - built["embedding"], planned.flops_per_token))
            assert (one.params, one.flops) == sizes[-1]
            assert one.total_params == built["total"]
        for kind, own, target in zip(("params", "flops"), *sizes, strict=True):
            if kind in arm.controls:
                assert abs(own / target - 1) <= 0.01
    assert not manifest.left_out


@pytest.mark.parametrize("adjust", ["d_model", "mlp"])
def test_plan_shows_a_width_that_a_control_has_moved(expand, adjust):
    words = ["variant=no_qk", "model.d_model=32", "control=params", f"control.adjust={adjust}"]
    manifest = expand(*words)
    head, _, moved, *_ = (re.split(r"  +", line) for line in format_plan(manifest, 1))
    assert ("d_model" in head) == (adjust == "d_model")
    if adjust == "d_model":
        (arm,) = (arm for arm in manifest.arms.values() if arm.baseline)
        assert arm.config.model.d_model != 32
        assert moved[head.index("d_model")] == str(arm.config.model.d_model)


def test_arms_out_of_reach_are_left_out_with_their_reason(expand):
    shape = ["model.d_model=40", "model.heads=10", "control=params"]
    manifest = expand("variant=merged_w,no_q", *shape)
    (left,) = manifest.left_out
    assert (left.arm, left.kind) == ("merged_w-d40-h10-params", "unmatched")
    assert "needs an MLP of 0 units" in left.reason
    assert {arm.variant for arm in manifest.arms.values()} == {"standard", "no_q"}
    with pytest.raises(UserError, match=r"merged_w-d40-h10-params .*needs an MLP of 0 units"):
        expand("variant=merged_w", *shape)


def test_arm_without_changes_is_listed_under_both_controls(expand):
    manifest = expand("variant=merged_w,no_q", "control=none,params", "model.heads=2")
    controls = {name: arm.controls for name, arm in manifest.arms.items()}
    assert controls["merged_w-d16-h2"] == ["none", "params"]  # d = heads · d_head²
    assert controls["no_q-d16-h2"] == ["none"]
    assert controls["no_q-d16-h2-params"] == ["params"]


# Names and ids.


def test_variant_file_stands_among_the_names_of_variants(expand, circuit):
    file = circuit("raises")
    mixed = expand(f"variant=no_q,{file}", "sweep.floor=false")
    alone = expand(f"variant.file={file}", "sweep.floor=false")
    assert len(mixed.arms) == 1 + len(alone.arms) == 3
    assert alone.arms.keys() < mixed.arms.keys()
    assert {*ids(alone)} < {*ids(mixed)}
    with pytest.raises(UserError, match=r"is a file, and so is variant\.file; give one"):
        expand(f"variant=no_q,{file}", f"variant.file={file}")


@pytest.mark.slow
def test_names_of_arms_are_unique(expand, tmp_path, circuit):
    mine = expand("variant=no_q,no_k,merged_w", "variant.name=mine", "sweep.baseline=null")
    assert len(mine.arms) == 3
    init = expand("variant.init=naive,matched", "model.init=gpt2,linear", "variant=no_q,no_k")
    assert len(init.arms) == 2 * 2 * (2 + 1)
    one = circuit("raises")
    other = tmp_path / "other" / one.name
    other.parent.mkdir()
    other.write_text(one.read_text(encoding="utf-8") + "\n# another\n", encoding="utf-8")
    files = expand(f"variant.file={one},{other}", "sweep.baseline=null")
    assert len(files.arms) == 2
    for manifest in (mine, init, files):
        assert [arm.name for arm in manifest.arms.values()] == [*manifest.arms]
        assert len(ids(manifest)) == len(manifest.arms) == len({run.arm for run in manifest.runs})


@pytest.mark.slow
def test_the_same_command_finds_its_sweep_again(expand):
    words = ["variant=no_q,merged_w", "control=none,params", "model.heads=2,3"]
    first = expand(*words, "seed=0,1")
    assert expand(*words, "seed=0,1") == first
    more = ["tracking.group=mine", "tracking.tags=[a]", "train.checkpoint_every=3", "threads=2"]
    more += ["diagnostics.every=7"]
    assert expand(*words, "seed=0,1", *more).id == first.id
    for workers in (1, 2, "auto"):
        assert pack(first, SweepConfig(workers=workers))[0].id == first.id
    others = [
        expand(*words, "seed=0,1,2"),
        expand(*words, "seed=0,1", "sweep.baseline=no_k"),
        expand(*words[:1], *words[2:], "seed=0,1"),
    ]
    assert len({first.id, *(other.id for other in others)}) == 4
    assert ids(first) < ids(others[0])


def test_sweeps_share_their_runs(expand):
    one = expand("variant=standard,no_q", "seed=0,1", "sweep.name=one")
    other = expand("variant=no_q,merged_w", "seed=1,2", "control=none,params", "workers=2")
    assert ids(one) & ids(other) == {run.id for run in one.runs if run.changes["seed"] == 1}


REPEATED = [
    ["variant=standard,merged_w", "seed=0,1"],
    ["variant=no_q", "control=none,params,flops"],
    ["variant=no_q", "sweep.tune=true", "sweep.tuning_seeds=[7]", "optim.lr=3e-4"],
    ["variant=low_rank_w,gqa", "model.mlp_ratio=2.7", "train.steps=auto"],
    ["variant=qk_norm", "seeds.init=5", "seed=0,5", "optim.lr=1e-3,3.7e-4"],
    ["variant=no_q", "sweep.baseline={variant: no_k, model.bias: true, optim.betas: [0.8, 0.9]}"],
    ["data=recall", "model.context=64", "variant=no_q", "optim.schedule=wsd", "optim.cooldown=0.5"],
    ["data=text", "data.path='a b, (c).txt'", "data.cache=cache", "out=out", "tracking.tags=[a,b]"],
]


@pytest.mark.slow
@pytest.mark.parametrize("words", REPEATED, ids=" ".join)
def test_overrides_of_a_run_repeat_it(expand, text, words):
    text.with_name("a b, (c).txt").write_bytes(text.read_bytes())
    assert_repeated(expand(*words))


def test_overrides_of_a_run_with_a_variant_file_repeat_it(expand, circuit):
    manifest = expand(f"variant.file={circuit('raises')}", "control=none,params", "model.heads=4")
    assert {arm.variant for arm in manifest.arms.values()} == {"raises", "standard"}
    assert_repeated(manifest)


@pytest.mark.slow
def test_evaluate_test_false_applies_to_all_runs(expand):
    manifest = expand("train.evaluate_test=false", "variant=no_q", "seed=0,1")
    assert not any(manifest.config_of(run).train.evaluate_test for run in manifest.runs)
    assert_repeated(manifest)


def assert_repeated(manifest):
    for run in manifest.runs:
        (job,) = compose_jobs(manifest.arms[run.arm].overrides_of(run))
        alone = plan_run(job.config)
        assert alone.run.id == run.id
        assert alone.run.folder.name == run.name
        config = manifest.config_of(run)
        # As it is trained, except for its names in W&B.
        assert dataclasses.replace(config, tracking=alone.config.tracking) == alone.config
        assert plan_run(config).run.id == run.id


@pytest.mark.slow
@pytest.mark.parametrize("adjust", ["layers", "d_model"])
def test_adjusted_key_differs_from_the_baseline(expand, adjust):
    """The repetition tests above thereby cover more than an MLP."""
    words = ["variant=no_qk", "model.layers=8", "model.d_model=64", "model.heads=1"]
    manifest = expand(*words, "control=params", f"control.adjust={adjust}")
    (own,) = (arm for arm in manifest.arms.values() if arm.variant == "no_qk")
    before = manifest.arms[own.baseline].config.model
    assert getattr(own.config.model, adjust) != getattr(before, adjust)
    assert_repeated(manifest)


def test_wandb_group_is_the_sweep_and_job_type_the_arm(expand):
    manifest = expand("variant=no_q", "control=params", "seed=0,1")
    for run in manifest.runs:
        arm, tracking = manifest.arms[run.arm], manifest.config_of(run).tracking
        assert tracking.group == f"grid-{manifest.id}"
        assert tracking.job_type == run.arm
        controls = {f"control={name}" for name in arm.controls}
        assert {*tracking.tags} == {"d_model=16", "heads=2", *controls}
    assert {"params"} == {*manifest.arms["no_q-d16-h2-params"].controls}


def test_tracking_settings_of_the_user_are_kept(expand):
    own = [
        "tracking.group=mine",
        "tracking.job_type=kind",
        "tracking.tags=[a,b]",
        "tracking.project=p",
    ]
    manifest = expand("sweep.tune=true", *own)
    for run in manifest.runs:
        tracking = manifest.config_of(run).tracking
        assert (tracking.group, tracking.job_type, tracking.project) == ("mine", "kind", "p")
        assert tracking.tags[:2] == ["a", "b"]
        assert "tuning" in tracking.tags


# A second data set.

TASK = "{data: induction_short, model.context: 32, train.steps: 7}"


def test_also_trains_every_arm_with_other_settings(expand):
    manifest = expand("variant=no_q", "train.steps=5,9", f"sweep.also={TASK}")
    sources = Counter(arm.config.data.source for arm in manifest.arms.values())
    assert sources == {"text": 4, "induction": 2}  # the task once, at its own length
    for name, arm in manifest.arms.items():
        config = arm.config
        is_task = config.data.source == "induction"
        assert (config.model.context, config.train.steps == 7) == (32 if is_task else 16, is_task)
        if arm.baseline:  # on the same data
            baseline = manifest.arms[arm.baseline].config
            assert (baseline.data, baseline.train) == (config.data, config.train)
        # Settings that the data determine are not in the name.
        assert ("data=induction_short" in name) == is_task
        assert "context=" not in name


@pytest.mark.parametrize(
    ("also", "line"),
    [
        ("{seed: 1}", "sweep.also: seed distinguishes the runs of an arm"),
        ("{model.context: [8, 16]}", "sweep.also: model.context has several values"),
        ("3", "sweep.also: '3' is not a map of keys to values, a list of maps, or null"),
        ("{model.width: 3}", "model.width: there is no such key"),
    ],
)
def test_mistake_in_also_is_an_error(expand, also, line):
    with pytest.raises(UserError, match=re.escape(line)):
        expand("variant=no_q", f"sweep.also={also}")


def test_also_may_be_several_maps(expand):
    other = "{data: recall, data.vocab_size: 16, data.pairs: 2, model.context: 8}"
    manifest = expand("variant=no_q", f"sweep.also=[{TASK},{other}]")
    sources = Counter(arm.config.data.source for arm in manifest.arms.values())
    assert sources == {"text": 2, "induction": 2, "recall": 2}


# One factor at a time.

AXES = ["variant=standard,no_q,no_k", "model.d_model=16,32,64", "model.layers=1,2"]


def test_one_at_a_time_changes_one_axis_of_the_center(expand):
    manifest = expand(*AXES, "sweep.design=one_at_a_time", "sweep.baseline=null")
    center = ("standard", 16, 1)
    found = {
        (arm.variant, arm.config.model.d_model, arm.config.model.layers)
        for arm in manifest.arms.values()
    }
    assert center in found
    assert len(found) == 1 + 2 + 2 + 1
    assert all(sum(a != b for a, b in zip(cell, center, strict=True)) <= 1 for cell in found)


def test_one_at_a_time_compares_every_arm_with_the_center(expand):
    """Each value of each axis has a gap; uniform is trained where variants are compared."""
    words = ["model.dropout=0,0.1", "sweep.design=one_at_a_time", "sweep.floor=true"]
    manifest = expand(*AXES, *words)
    center = "standard-d16-h2-layers=1-dropout=0"
    assert {arm.baseline for arm in manifest.arms.values() if arm.name != center} <= {center, None}
    alone = [arm.name for arm in manifest.arms.values() if arm.baseline is None]
    assert alone == [center, center.replace("standard", "uniform")]


def test_one_at_a_time_compares_no_losses_on_other_data(expand):
    manifest = expand("data=stdlib,induction_short", "sweep.design=one_at_a_time")
    assert {arm.baseline for arm in manifest.arms.values()} == {None}


def test_named_baseline_goes_before_the_center(expand):
    words = ["model.layers=1,2", "sweep.design=one_at_a_time"]
    manifest = expand("variant=no_q", *words, "sweep.baseline={model.layers: 2}")
    baselines = {arm.name: arm.baseline for arm in manifest.arms.values()}
    assert baselines == {"no_q-d16-h2-layers=1": "no_q-d16-h2-layers=2"} | {
        "no_q-d16-h2-layers=2": None
    }


def test_plan_of_a_design_says_what_it_saves(expand):
    manifest = expand(*AXES, "sweep.design=one_at_a_time")
    (line,) = (line for line in format_plan(manifest, 1) if line.startswith("design"))
    assert "6 of the 18 combinations of the grid; interactions are not estimated" in line
    assert plan_to_json(manifest, 1, None, {})["combinations"] == (6, 18)
    grid = expand(*AXES)
    assert not any(line.startswith("design") for line in format_plan(grid, 1))


def test_seeds_and_rates_stay_crossed_in_a_design(expand):
    words = ["seed=0,1", "optim.lr=1e-3,2e-3", "sweep.design=one_at_a_time"]
    manifest = expand("variant=no_q,no_k", *words)
    runs = Counter(run.arm for run in manifest.runs)
    assert {*runs.values()} == {4}


def test_grid_is_the_default_design(expand):
    assert {*expand(*AXES).arms} == {*expand(*AXES, "sweep.design=grid").arms}


# Controls by the size that pays.


def test_controls_are_named_by_the_adjusted_size(expand):
    words = ["variant=no_q", "model.layers=4"]
    manifest = expand(*words, "control=none,params,params-layers")
    controls = {arm.variant: set() for arm in manifest.arms.values()}
    for arm in manifest.arms.values():
        controls[arm.variant] |= {*arm.controls}
    assert controls["no_q"] == {"none", "params", "params-layers"}
    alone = expand(*words, "control=params", "control.adjust=layers")
    assert any(arm.controls == ["params-layers"] for arm in alone.arms.values())
    assert "params-layers" in "".join(alone.arms)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["control=params-heads"], "control.adjust: 'heads' is not one of mlp, d_model, layers"),
        (
            ["control=params-layers", "control.adjust=mlp"],
            "control=params-layers names the size to adjust; leave control.adjust out",
        ),
        (["sweep.design=one_at_time"], "(nearest: one_at_a_time)"),
    ],
)
def test_mistake_in_design_or_control_is_an_error(expand, words, line):
    with pytest.raises(UserError, match=re.escape(line)):
        expand("variant=no_q", *words)


# The test split.


def test_arms_of_several_lengths_read_as_much_of_the_test_split_as_the_longest(expand):
    """Otherwise their losses were of different text, and no gap could be told from that."""
    words = ["train.batch_size=64", "data.test_tokens=65536"]
    manifest = expand("train.steps=60,120", "variant=standard,no_q", *words)
    read = {arm.config.train.test_tokens for arm in manifest.arms.values()}
    longest = expand("train.steps=120", "variant=standard,no_q", *words)
    assert read == {arm.config.train.test_tokens for arm in longest.arms.values()}
    assert ids(longest) < ids(manifest)
    settings = [dict(arm.overrides) for arm in manifest.arms.values()]
    for own in settings:
        del own["train.steps"], own["variant"]
    assert all(own == settings[0] for own in settings)  # a series differs in its length alone
    short = expand("train.steps=60", "variant=standard", *words)
    assert not ids(short) & ids(manifest)
    assert min(arm.config.train.test_tokens for arm in short.arms.values()) < min(read)


def test_arms_repeat_their_share_of_the_test_split_on_the_command_line(expand, base):
    manifest = expand("train.steps=60,120", "train.batch_size=64")
    for run in manifest.runs:
        own = manifest.arms[run.arm].overrides_of(run)
        given = {word.partition("=")[0] for word in own}
        words = [*own, *(word for word in base if word.partition("=")[0] not in given)]
        assert plan_run(compose_jobs(words)[0].config).run.id == run.id


def test_a_given_part_of_the_test_split_is_kept(expand):
    manifest = expand("train.steps=60,120", "train.test_tokens=2000")
    assert {arm.config.train.test_tokens for arm in manifest.arms.values()} == {2000}


def test_tuned_sweeps_that_read_other_parts_of_the_test_split_are_other_sweeps(expand):
    words = ("variant=standard,no_q", "sweep.tune=true", "data.test_tokens=4096")
    part, other, whole, same = (
        expand(*words, f"train.test_tokens={tokens}") for tokens in (2000, 3000, 4096, "all")
    )
    assert ids(part) == ids(whole)  # tuning runs, which read none of it
    assert len({part.id, other.id, whole.id}) == 3
    assert whole.id == same.id

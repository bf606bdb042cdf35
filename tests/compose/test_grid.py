"""The words of `qkablate sweep`: the files of conf/sweep and the command line."""

import itertools

import hydra
import pytest
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from qkablate.compose.configs import compose_jobs, make_config, open_hydra, parse_value
from qkablate.compose.grid import read_request
from qkablate.compose.words import format_error
from qkablate.config import conf_dir, flatten, from_hydra, variants
from qkablate.config.sweep import as_quoted, unquoted
from qkablate.errors import UserError
from qkablate.sweeps.planning.predicates import holds
from qkablate.sweeps.planning.tuning import lr_ladder

SWEEPS = sorted(file.stem for file in (conf_dir() / "sweep").glob("*.yaml"))
FOUR = {"standard", "merged_w", "no_q", "shared_qk"}


@pytest.fixture
def opened_hydra():
    with open_hydra():
        yield


def configs(request):
    """Yield the config of every combination of values."""
    for values in itertools.product(*request.choices.values()):
        yield make_config(dict(zip(request.choices, values, strict=True)))


# The first line of each file.


@pytest.mark.slow
def test_quick_has_4_variants_2_widths_2_head_counts_3_seeds(opened_hydra):
    request = read_request(["sweep=quick"])
    axes = [key for key, values in request.choices.items() if len(values) > 1]
    assert axes == ["variant", "model.d_model", "model.heads", "seed"]
    assert set(request.choices["variant"]) == FOUR
    found = [
        (config.variant.name, config.model.d_model, config.model.heads, config.seed)
        for config in configs(request)
    ]
    assert [len({*column}) for column in zip(*found, strict=True)] == [4, 2, 2, 3]
    assert len({*found}) == request.count() == 4 * 2 * 2 * 3


def test_full_has_every_variant_at_every_size(opened_hydra):
    request = read_request(["sweep=full"])
    assert set(request.choices["variant"]) == {*variants()}
    assert [int(d) for d in request.choices["model.d_model"]] == [128, 256, 512, 1024, 2048]
    assert [int(h) for h in request.choices["model.heads"]] == [1, 2, 4, 8, 16]
    assert request.count() == len(variants()) * 5 * 5 * len(request.choices["seed"])
    shape = make_config({"model": request.choices["model"][0]}).model
    assert (shape.layers, shape.context) == (12, 1024)


@pytest.mark.slow
def test_heads_compares_shapes_with_equal_parameters(opened_hydra):
    request = read_request(["sweep=heads"])
    assert [control.match for control in request.controls.values()] == ["params"]
    shapes = set()
    for config in configs(request):
        if all(holds(predicate, flatten(config)) for predicate in request.settings.sweep.filter):
            model = config.model
            shapes.add((model.layers, model.d_model, model.heads))
    assert len({12 * layers * d_model**2 for layers, d_model, _ in shapes}) == 1
    assert len({layers for layers, _, _ in shapes}) >= 3
    deepest, shallowest = max(shapes)[0], min(shapes)[0]
    assert any(layers == deepest and heads == 1 for layers, _, heads in shapes)
    widest = max(width for layers, width, _ in shapes if layers == shallowest)
    assert (shallowest, widest, max(heads for _, _, heads in shapes)) in shapes
    said = request.settings.sweep.baseline
    baseline = make_config({key: str(value) for key, value in said.items()}).model
    assert (baseline.layers, baseline.d_model, baseline.heads) in shapes
    assert (baseline.layers, baseline.heads) == (shallowest, max(h for _, _, h in shapes))


@pytest.mark.slow
def test_horizons_has_several_lengths_each_with_its_own_schedule(opened_hydra):
    request = read_request(["sweep=horizons"])
    steps = [int(value) for value in request.choices["train.steps"]]
    assert len(steps) == 4
    assert steps == sorted(set(steps))
    assert set(request.choices["variant"]) == FOUR
    found = {config.train.steps: config.optim.warmup for config in configs(request)}
    assert found == {number: number // 5 for number in steps}


def test_lr_has_enough_rates_for_a_curve(opened_hydra):
    request = read_request(["sweep=lr"])
    rates = [float(value) for value in request.choices["optim.lr"]]
    assert lr_ladder(rates, make_config({})) == rates
    assert len(rates) >= 5
    assert make_config({}).optim.lr in rates
    assert set(request.choices["variant"]) == FOUR


@pytest.mark.slow
def test_ov_has_every_ov_circuit_with_and_without_the_skip(opened_hydra):
    request = read_request(["sweep=ov"])
    found = {(config.variant.ov, config.model.attention_skip) for config in configs(request)}
    # These two change the keys, too.
    circuits = {entry["ov"] for entry in variants().values()} - {"grouped", "latent"}
    assert found == {*itertools.product(circuits, (True, False))}
    assert [*request.controls] == ["none", "params"]


def test_qk_has_every_qk_circuit_at_equal_parameters_and_without(opened_hydra):
    request = read_request(["sweep=qk"])
    own = {name for name, entry in variants().items() if entry["ov"] == "separate"}
    assert set(request.choices["variant"]) == own
    assert [*request.controls] == ["none", "params"]


@pytest.mark.slow
def test_rank_spans_a_quarter_of_d_head_to_d_model(opened_hydra):
    request = read_request(["sweep=rank"])
    model = make_config({}).model
    ranks = [config.variant.rank for config in configs(request)]
    assert min(ranks) == model.d_model // model.heads // 4
    assert max(ranks) == model.d_model
    assert [*request.controls] == ["none", "params"]


def test_grid_has_no_axes_of_its_own(opened_hydra):
    with pytest.raises(UserError, match="the grid is empty: give sweep=quick, or axes such as"):
        read_request(["sweep=grid"])


def test_group_of_the_user_is_rejected(opened_hydra):
    with pytest.raises(UserError, match=r"'\+exp=my': a sweep accepts only qkablate"):
        read_request(["variant=standard,no_q", "+exp=my"])
    assert read_request(["variant=standard,no_q", "+seed=1"]).choices["seed"] == ["1"]


@pytest.mark.parametrize("name", SWEEPS)
def test_every_shipped_sweep_is_valid(opened_hydra, name):
    request = read_request([f"sweep={name}", *(["seed=range(2)"] if name == "grid" else [])])
    assert request.settings.sweep.name == name
    assert len(request.choices["seed"]) >= 2
    first = {key: values[0] for key, values in request.choices.items()}
    config = make_config(first)
    values = flatten(config) | {"variant": config.variant.name, "control": "none"}
    assert all(isinstance(holds(each, values), bool) for each in request.settings.sweep.filter)


# The command line on top of a file.


def test_words_replace_an_axis_of_the_file(opened_hydra):
    request = read_request(["sweep=quick", "variant=standard,wide_qk", "seed=range(2,5)"])
    assert request.choices["variant"] == ["standard", "wide_qk"]
    assert request.choices["seed"] == ["2", "3", "4"]
    assert request.choices["model.heads"] == ["2", "4"]
    axes = [key for key, values in request.choices.items() if len(values) > 1]
    assert axes == ["variant", "model.d_model", "model.heads", "seed"]


def test_words_replace_a_fixed_key_of_the_file(opened_hydra):
    assert read_request(["sweep=quick", "train.steps=7"]).choices["train.steps"] == ["7"]
    request = read_request(["sweep=horizons", "train.steps=7,9", "seed=0", "optim.lr=2e-3"])
    assert request.count() == 8
    found = [*configs(request)]
    assert {config.train.steps for config in found} == {7, 9}
    assert {config.optim.lr for config in found} == {2e-3}


def test_words_replace_the_control_of_the_file(opened_hydra):
    assert [*read_request(["sweep=heads", "control=flops"]).controls] == ["flops"]
    request = read_request(["sweep=ov", "control=params,flops", "control.tolerance=0.1"])
    assert [(c.match, c.tolerance) for c in request.controls.values()] == [
        ("params", 0.1),
        ("flops", 0.1),
    ]
    assert [*read_request(["sweep=quick"]).controls] == ["none"]


def test_words_replace_the_settings_of_the_file(opened_hydra):
    words = ["sweep=heads", "sweep.baseline=null", "sweep.tune=true", "sweep.name=mine"]
    settings = read_request([*words, "workers=3", "on_failure=stop"]).settings
    assert settings.sweep.baseline is None
    assert settings.sweep.tune
    assert settings.sweep.name == "mine"
    assert (settings.workers, settings.on_failure) == (3, "stop")
    where = read_request(["sweep=quick", "sweep.filter=['model.heads > 2','seed == 0']"])
    assert where.settings.sweep.filter == ["model.heads > 2", "seed == 0"]


@pytest.mark.slow
def test_syntax_of_values(opened_hydra):
    def values(word):
        ((_, found),) = read_request([word]).choices.items()
        return found

    assert values("seed=range(3)") == ["0", "1", "2"]
    assert values("seed=range(1,8,3)") == ["1", "4", "7"]
    assert values("seed=choice(3,1)") == ["3", "1"]
    assert values("+seed=1,2") == ["1", "2"]
    assert values("variant=glob(no_*)") == ["no_k", "no_o", "no_q", "no_qk", "no_v", "no_vo"]
    assert set(values("variant=glob(*)")) == {*variants()}
    assert values("variant=glob(*,exclude=no_*)") == sorted(
        name for name in variants() if not name.startswith("no_")
    )


def test_list_is_one_value(opened_hydra):
    request = read_request(["optim.betas=[0.9,0.95],[0.8,0.99]", "tracking.tags=[a,b]"])
    found = [(config.optim.betas, config.tracking.tags) for config in configs(request)]
    assert found == [([0.9, 0.95], ["a", "b"]), ([0.8, 0.99], ["a", "b"])]


def test_quoted_values_keep_special_characters(opened_hydra):
    request = read_request(["data=text", """data.path='/a b,c (1).txt',"/it's",plain.txt"""])
    found = [config.data.path for config in configs(request)]
    assert found == ["/a b,c (1).txt", "/it's", "plain.txt"]
    (config,) = configs(read_request(["tracking.group='a, b'", "seed='3'"]))
    assert config.tracking.group == "a, b"


@pytest.mark.parametrize(
    "value", ["/a b (1)", 'a"b', "it's", "a\\", 'a\\"b\\\\', "'a'", '"', "plain"]
)
def test_quotes_of_a_word_are_removed_as_by_hydra(opened_hydra, value):
    """Some verbs read a folder themselves, and others hand it to Hydra."""
    assert unquoted(as_quoted(value)) == parse_value(f"out={as_quoted(value)}") == value


# make_config makes what `train` would.
COMBINATIONS = [
    {},
    {"variant": "merged_w", "seed": "3"},
    {"seed": "3", "seeds.data": "7"},
    {"seeds.init": "5"},
    {"variant": "low_rank_w", "variant.rank": "8"},
    {"variant": "low_rank_w"},
    {"variant": "collaborative", "variant.rank": "auto", "variant.init": "naive"},
    {"variant": "gqa", "model.heads": "8"},
    {"variant": "mqa", "variant.name": "mine"},
    {"variant": "qk_norm", "variant.lr": "same", "variant.mask_self": "true"},
    {"variant.qk": "merged", "variant.ov": "no_o"},
    {"data": "recall", "data.pairs": "4"},
    {"data": "dyck", "model.context": "32"},
    {"data": "text", "data.path": "'/a b.txt'", "data.tokenizer": "bpe"},
    {"optim.schedule": "wsd", "optim.cooldown": "0.5"},
    {"optim.schedule": "wsd", "optim.warmup": "3", "optim.lr": "6e-4"},
    {"model.d_model": "128", "model": "baby", "model.heads": "4"},
    {"model": "gpt2", "train.tokens": "100000", "train.grad_accum": "2"},
    {"model.mlp_ratio": "4.517578125", "model.position": "rope", "model.bias": "True"},
    {"optim.betas": "[0.8,0.9]", "tracking.tags": "[a,b]", "tracking.group": "null"},
    {"threads": "1", "compile": "false", "precision": "bf16", "out": "else/where"},
    {"train.steps": "auto", "train.evaluate_test": "false", "optim.weight_decay": "0"},
    {"seed": "4", "seeds.dropout": "${seed}", "out": "runs_of_${variant.name}"},
]


def typed(words):
    return [f"{key}={value}" for key, value in words.items()]


def composed_by_hydra(words):
    """Compose the config as hydra.main does for `qkablate train`."""
    try:
        return from_hydra(hydra.compose("train", typed(words)))
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        raise UserError(format_error(error)) from None


@pytest.mark.parametrize("words", COMBINATIONS, ids=lambda words: " ".join(typed(words)) or "none")
def test_config_equals_that_of_train(opened_hydra, words):
    assert make_config(words) == composed_by_hydra(words)


def test_jobs_are_all_combinations():
    jobs = compose_jobs(["variant=standard,no_q", "+seed=range(2)", "train.steps=3"])
    assert [job.words for job in jobs] == [
        [f"variant={variant}", f"+seed={seed}", "train.steps=3"]
        for variant in ("standard", "no_q")
        for seed in (0, 1)
    ]
    assert [(job.config.variant.name, job.config.seed) for job in jobs] == [
        *(("standard", 0), ("standard", 1), ("no_q", 0), ("no_q", 1))
    ]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["seed=0,1", "model.heads=2,3"], " (in seed=0 model.heads=3)"),
        (["variant=standard", "variant=no_q"], "variant: chosen twice, 'standard' and 'no_q'"),
        (["seed=range(9)", "model.layers=range(1,2000)"], "these are more than 10,000 jobs"),
        (["~model=nano"], "'~model=nano': write key=value"),
    ],
)
def test_mistakes_in_jobs(words, line):
    with pytest.raises(UserError) as error:
        compose_jobs(words)
    assert str(error.value).endswith(line)


def test_configs_are_independent(opened_hydra):
    before = make_config({})
    tagged = {"tracking.tags": "[a]", "optim.betas": "[0.8,0.9]", "model.heads": "8", "seed": "3"}
    make_config(tagged).tracking.tags.append("b")
    assert make_config(tagged).tracking.tags == ["a"]
    assert make_config({}) == before


@pytest.mark.parametrize(
    "words",
    [
        {"model.d_model": "abc"},
        {"seed": "1.5"},
        {"train.stps": "5"},
        {"lr": "1e-3"},
        {"model": "nanoo"},
        {"variant": "mergedw"},
        {"model.heads": "3"},
        {"train.steps": "null"},
        {"optim.schedule": "cosin"},
        {"optim.betas": "[a,b]"},
        {"optim.cooldown": "0.5"},
        {"data": "recall", "data.path": "x"},
        {"seed": ""},
    ],
    ids=typed,
)
def test_error_equals_that_of_train(opened_hydra, words):
    with pytest.raises(UserError) as of_train:
        composed_by_hydra(words)
    with pytest.raises(UserError) as own:
        make_config(words)
    assert str(own.value) == str(of_train.value)


MISTAKES = [
    ([], "the grid is empty: give sweep=quick"),
    (["control=params"], "the grid is empty"),
    (["sweep=quik"], "'quik' (nearest: quick) is not one of quick, "),
    (["control=parms"], "control: 'parms' (nearest: params) is not one of flops, none, params"),
    (
        ["control.adjust=mlpp"],
        "control.adjust: 'mlpp' (nearest: mlp) is not one of mlp, d_model, layers",
    ),
    (["control=params", "control.match=param"], "(nearest: params)"),
    (["control=params", "control.knb=mlp"], "control.knb: there is no such key (nearest: control."),
    (["control=params", "control.tolerance=2"], "control.tolerance: 2"),
    (["control.tolerance=0.1"], "'control.tolerance=0.1' has no meaning with control=none"),
    (
        ["seed=0,1", "sweep.tuning_seeds=[7]"],
        "sweep.tuning_seeds: has no meaning without sweep.tune=true",
    ),
    (["seed=0,1", "diagnostics.every=0,5"], "a sweep has one value of diagnostics.every"),
    (["seed=0,1", "train.vmap=1,8"], "a sweep has one value of train.vmap"),
    (
        ["seed=0,1", "sweep.also=[{train.vmap: 8}]"],
        "train.vmap: a sweep has one value of it; give it under sweep.fixed",
    ),
    (["sweep.tun=true"], "sweep.tun: there is no such key (nearest: sweep.tune)"),
    (["sweep.name=../x"], "sweep.name: '../x' is not made of letters"),
    (["sweep.baseline=[a]"], "sweep.baseline: "),
    (["sweep.baseline=standrd"], "(nearest: standard)"),
    (
        ["sweep.baseline={model.haeds: 2}"],
        "model.haeds: there is no such key (nearest: model.heads",
    ),
    (["sweep.tuning_seeds=[]"], "sweep.tuning_seeds: [] are not one or more seeds"),
    (["sweep.tuning_seeds=[-1]"], "sweep.tuning_seeds: [-1] are not one or more seeds"),
    (["sweep=quick", "sweep.axes={seed: {a: 1}}"], "on the command line an axis is written"),
    (["workers=0"], "workers: 0 is not auto, or a number from 1"),
    (["workers=many"], "workers: 'many' is not auto, or a number from 1"),
    (["runs_per_gpu=0"], "runs_per_gpu: 0 is not a number from 1"),
    (["on_failure=stpo"], "on_failure: 'stpo' (nearest: stop) is not one of continue, stop"),
    (["worker=2"], "worker: there is no such key (nearest: workers)"),
    (["on_failur=stop"], "on_failur: there is no such key (nearest: on_failure)"),
    (["swep=quick"], "swep: there is no such key (nearest: sweep)"),
    (["contrl=params"], "contrl: there is no such key (nearest: control)"),
    (["variant=standard,no_qq"], "variant: 'no_qq' (nearest: no_q) is not one of "),
    (["varient=standard,no_q"], "varient: there is no such key (nearest: variant)"),
    (["model.haeds=2,4"], "model.haeds: there is no such key (nearest: model.heads)"),
    (["model.heads=2,four"], "model.heads: 'four' is not a whole number"),
    (["model=null"], "model"),
    (["control=null"], "control"),
    (["sweep=null"], "sweep"),
    (["seed=0,1.5"], "seed: '1.5' is not a whole number"),
    (["optim.lr=1e-3,fast"], "optim.lr: 'fast' is not a number"),
    (["seed=interval(0,9)"], "'seed=interval(0,9)': give single values, not an interval"),
    (["seed=range(3,1)"], "'seed=range(3,1)': there is no value in it"),
    (["seed=0,1,1"], "seed: 1 is given more than once"),
    (["variant=choice(no_q,no_q)"], "variant: no_q is given more than once"),
    (["variant=glob(nix*)"], "'variant=glob(nix*)': there is no value in it"),
    (["variant=[standard,no_q]"], "several values are written variant=standard,no_q"),
    (["~model"], "'~model' is not key=value"),
    (["~model=nano"], "'~model=nano': write key=value"),
    (["~sweep=quick"], "'~sweep=quick': write key=value"),
    (["model@here=nano"], "'model@here=nano': write key=value"),
    (["quick"], "'quick' is not key=value; write sweep=quick"),
    (["quik"], "'quik' is not key=value (nearest: sweep=quick)"),
    (["merged"], "'merged' is not key=value (nearest: variant=merged_w)"),
    (["=3"], "'=3' is not key=value"),
    (["seed=[1"], "'seed=[1' cannot be read"),
    (["--variant=no_q"], "a key is written without dashes: variant=VALUE"),
    (["--dry"], "(nearest: --dry-run)"),
    (["--retry", "all"], "--retry: 'all' is not one of failed"),
    (["seed=range(20000)"], "20,000 runs, before anything is left out; add --yes"),
]


@pytest.mark.parametrize(("words", "line"), MISTAKES, ids=lambda x: str(x)[:40])
def test_mistakes(qkablate, tmp_path, words, line):
    """One line on stderr, exit code 2, and nothing is written."""
    own = [] if line.startswith("the grid is empty") else ["seed=0"]
    done = qkablate("sweep", *own, *words, "--dry-run")
    assert done.code == 2
    assert line in done.err
    assert done.err.startswith("qkablate: ")
    assert done.err.count("\n") == 1
    assert done.out == ""
    assert {path.name for path in tmp_path.iterdir()} == {"home"}


def error_of(word):
    try:
        read_request(["seed=0", word])
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    "word",
    [
        "control.tolerance=wide",
        "sweep.tune=maybe",
        "sweep.filter=3",
        "sweep.filter='model.heads > 2'",
        "sweep.tuning_seeds=[x]",
        "sweep.tuning_seeds=3",
        "sweep.axes=3",
        "sweep.fixed=null",
        "sweep.axes={seed: 3}",
        "sweep.name=null",
        "runs_per_gpu=two",
    ],
)
def test_existing_key_is_not_called_unknown(opened_hydra, word):
    assert "no such key" not in error_of(word)


@pytest.mark.parametrize(
    "word", ["sweep=quick,lr", "workers=1,2", "sweep.name=a,b", "sweep.axes.seed=range(3)"]
)
def test_errors_do_not_suggest_multirun(opened_hydra, word):
    """A sweep has no -m."""
    assert "-m for a run each" not in error_of(word)
    assert "multirun" not in error_of(word)


def test_help_names_every_sweep_and_control(qkablate):
    done = qkablate("sweep", "--help")
    assert done.code == 0
    for name in SWEEPS:
        first = (conf_dir() / "sweep" / f"{name}.yaml").read_text(encoding="utf-8").splitlines()[0]
        assert first.removeprefix("# ") in " ".join(done.out.split())
    for file in (conf_dir() / "control").glob("*.yaml"):
        assert f"\n  {file.stem}" in done.out

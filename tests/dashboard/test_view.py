"""The W&B view of a sweep: its runs and no others, and no mean over different settings."""

import base64
import importlib.util
import os
import re
import socket
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest

import qkablate
from qkablate.compose.configs import make_config, open_hydra
from qkablate.compose.grid import read_request
from qkablate.config import Config, InitFromConfig
from qkablate.dashboard.panels import CIRCUITS, PanelFactory
from qkablate.dashboard.view import make_workspace, view_content
from qkablate.diagnostics import circuits, patterns
from qkablate.runs.run import Run
from qkablate.sweeps.planning.expand import Grid, expand_grid
from qkablate.sweeps.running.state import SweepState

TASK = ["data=recall", "model.context=64"]
MASKED = ["model.form=encoder", "data.objective=mlm"]
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("wandb_workspaces") is None
    and not os.environ.get("QKABLATE_NEEDS_DASHBOARD"),
    reason="wandb-workspaces is not installed",
)


@pytest.fixture
def manifest(tiny):
    """Return the manifest of these overrides, with nothing trained."""

    def make(*words):
        own = [word for word in tiny if not (set(words) & {"data=recall"} and word[:4] == "data")]
        with open_hydra():
            asked = read_request(
                [
                    *own,
                    "variant=standard,no_q",
                    "sweep.floor=false",
                    "sweep.floor=false",
                    "seed=0,1",
                    *words,
                ]
            )
            grid = Grid(asked.settings.sweep, asked.controls, asked.choices)
            return expand_grid(grid, make_config, ["qkablate", "sweep", *words])

    return make


@pytest.fixture
def spec(manifest):
    """Return what is sent for the view of a sweep."""

    def make(*words, entity="team"):
        return view_content(make_workspace(SweepState(manifest(*words)), entity, "ours"))

    return make


def section(spec):
    return spec["spec"]["section"]


def panels(spec, name=""):
    """Those of a section, or all."""
    every = section(spec)["panelBankConfig"]["sections"]
    return [panel for one in every if name in ("", one["name"]) for panel in one["panels"]]


def curves(spec, name=""):
    return [p["config"] for p in panels(spec, name) if p["viewType"] == "Run History Line Plot"]


def runset(spec):
    (runs,) = section(spec)["runSets"]
    return runs


def filters(spec):
    kept = runset(spec)["filters"]["filters"]
    assert not any(one["disabled"] for one in kept)
    return [
        (one.get("connector"), one["key"]["section"], one["key"]["name"], one["op"], one["value"])
        for one in kept
    ]


@pytest.mark.slow
def test_sections_are_in_reading_order(spec):
    names = [one["name"] for one in section(spec())["panelBankConfig"]["sections"]]
    assert names == [
        *("Summary", "Loss", "Gaps", "Sizes", "Learning rates", "QK circuit", "OV circuit"),
        *("Attention", "Speed and system", "Runs"),
    ]


@pytest.mark.parametrize(
    ("words", "names"),
    [
        ([], {"val/loss", "train/loss", "val/bits_per_byte"}),
        (TASK, {"val/loss", "train/loss", "val/accuracy", "val/exact"}),
        (MASKED, {"val/loss", "train/loss", "val/accuracy"}),
    ],
)
def test_losses_are_plotted_by_tokens_with_bands_over_seeds(spec, words, names):
    found = curves(spec(*words), "Loss")
    assert {name for one in found for name in one["metrics"]} == names
    assert {one["xAxis"] for one in found} == {"tokens"}
    assert {one["groupAgg"] for one in found} == {"mean"}
    assert {one["groupArea"] for one in found} == {"stddev", "minmax"}
    assert all(one["aggregate"] for one in found)


def test_tables_and_charts_come_from_the_sweep_run(spec):
    found = panels(spec())
    media = {
        key
        for panel in found
        if panel["viewType"] == "Media Browser"
        for key in panel["config"]["mediaKeys"]
    }
    charts = "".join(
        path.read_text() for path in Path(qkablate.__file__).parent.glob("report/charts/*.py")
    )
    drawn = {f"charts/{name}" for name in re.findall(r'return Chart\("([\w-]+)"', charts)}
    # Those are of claims, of imported runs, and of sweeps of fine-tuned runs.
    elsewhere = {"parts", "forms", "output-spectra", "conversions"}
    assert drawn - {f"charts/{name}" for name in elsewhere} <= media
    assert media - {"report"} <= drawn
    tables = [
        panel["config"]["panel2Config"]["exp"]["fromOp"]["inputs"]["key"]["val"]
        for panel in found
        if panel["viewType"] == "Weave"
    ]
    assert tables == ["gaps", "verdicts", "distances", "runs"]


@pytest.mark.parametrize("parent", [None, "standard-d128"])
def test_conversions_are_shown_of_finetuned_runs(parent):
    config = replace(Config(), init_from=InitFromConfig(run=parent))
    gaps = PanelFactory([config], False, 3).gaps()
    assert ("charts/conversions" in str(gaps)) == (parent is not None)


def test_examples_of_encoders_are_shown_with_the_runs(spec):
    shown = [panel["config"] for panel in panels(spec(*MASKED), "Runs")]
    assert sum("examples" in str(config) for config in shown) == 1
    assert not any("examples" in str(panel["config"]) for panel in panels(spec(), "Runs"))


@pytest.mark.parametrize(
    ("circuit", "measures"),
    [
        ("qk", circuits.MEASURES),
        ("ov", circuits.MEASURES),
        ("attention", patterns.MEASURES),
    ],
)
def test_each_metric_has_a_panel(circuit, measures):
    assert set(CIRCUITS[circuit]) == {*measures} - {"singular"}  # a spectrum is no scalar


def test_learning_rate_panels(spec):
    (bowl,) = [p["config"] for p in panels(spec(), "Learning rates") if "Scatter" in p["viewType"]]
    assert bowl["xAxis"] == "config:optim.value.lr"
    assert bowl["yAxis"] == "summary:final/val_loss"
    assert bowl["xAxisLogScale"] is True


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("QK circuit", ["qk/stable_rank/L0", "qk/moved/L11", "qk/balance/cross_L3"]),
        ("OV circuit", ["ov/effective_rank/L0", "ov/off_rank/L7"]),
        ("Attention", ["attention/entropy/L0", "attention/induction/L2", "attention/self/L10"]),
    ],
)
def test_circuit_panel_matches_every_layer(spec, name, keys):
    patterns = [one["metricRegex"] for one in curves(spec(), name) if one["useMetricRegex"]]
    assert len(patterns) == 9
    for key in keys:
        assert sum(bool(re.search(pattern, key)) for pattern in patterns) == 1
    assert not any(re.search(pattern, "train/loss") for pattern in patterns)


def test_speed_and_system_panels(spec):
    names = {name for one in curves(spec(), "Speed and system") for name in one["metrics"]}
    assert {"perf/tokens_per_second", "perf/mfu", "system/cpu"} <= names


@pytest.mark.slow
def test_filter_selects_only_the_runs_of_the_sweep(spec, manifest):
    own = manifest()
    assert filters(spec()) == [(None, "run", "group", "=", f"{own.name}-{own.id}")]
    assert filters(spec("tracking.group=august")) == [(None, "run", "group", "=", "august")]


@pytest.mark.parametrize("group", ["lr=1", "a<b>c", "it's", "a\\b", "é or 1", "x == y"])
def test_group_with_special_characters_is_quoted(spec, group):
    quoted = group.replace("'", "\\'")
    assert filters(spec(f"tracking.group='{quoted}'"))[0][-1] == group


def test_shared_runs_of_an_older_sweep_are_included(manifest):
    """A run belongs to no sweep: in W&B it stays in the group for which it was trained."""
    own = manifest()
    sweep_state = SweepState(own)
    groups = [own.group, "older", None]
    for state, group in zip(sweep_state.states.values(), groups, strict=False):
        state.folder.mkdir(parents=True)
        config = own.config_of(state.run)
        config.tracking.group = group
        Run(own.out, state.run.label, state.run.id).freeze(config, {})
    ids = sorted(f"{state.run.id}-1" for state in list(sweep_state.states.values())[1:3])
    (_, others) = filters(view_content(make_workspace(sweep_state, "team", "ours")))
    assert others == ("OR", "run", "name", "IN", ids)


def test_run_with_damaged_config_is_not_included(manifest):
    sweep_state = SweepState(manifest())
    state = next(iter(sweep_state.states.values()))
    state.folder.mkdir(parents=True)
    for text in ("tracking: [", "tracking: 3", "a: &a 1\nb: *a", ""):
        (state.folder / "config.yaml").write_text(text)
        assert len(filters(view_content(make_workspace(sweep_state, "team", "ours")))) == 1


ONE_A_VARIANT = [[], TASK]
SEVERAL = [
    ["model.d_model=16,32"],
    ["control=none,params"],
    ["optim.lr=1e-3,2e-3"],
    ["sweep.tune=true"],
]


@pytest.mark.slow
@pytest.mark.parametrize("words", ONE_A_VARIANT)
def test_runs_are_grouped_by_variant(spec, words):
    assert {one.get("groupBy") for one in curves(spec(*words), "Loss")} == {"variant.value.name"}
    assert runset(spec(*words))["grouping"] == [{"section": "config", "name": "variant.value.name"}]


@pytest.mark.slow
@pytest.mark.parametrize("words", SEVERAL, ids=lambda words: words[0])
def test_arms_of_the_same_variant_are_grouped_by_job_type(spec, manifest, words):
    own = spec(*words)
    assert {one.get("groupBy") for one in curves(own, "Loss")} == {"jobType"}
    assert [key["name"] for key in runset(own)["grouping"]] == ["variant.value.name", "jobType"]
    made = manifest(*words)
    alike = defaultdict(set)
    for run in made.runs:
        changes = {key: value for key, value in run.changes.items() if not key.startswith("seed")}
        told = (run.arm, run.tuning, tuple(changes.items()))
        alike[made.config_of(run).tracking.job_type].add(told)
    assert all(len(kinds) == 1 for kinds in alike.values())
    limit = {one["limit"] for one in curves(own, "Loss")}
    assert min(limit) >= len(alike)


def test_tuning_runs_are_separate(manifest):
    made = manifest("sweep.tune=true")
    kinds = {made.config_of(run).tracking.job_type for run in made.runs}
    assert kinds
    assert all(kind.endswith(" (tuning)") for kind in kinds)
    (arm,) = (arm for arm in made.arms.values() if arm.variant == "no_q")
    final = arm.run({"seed": 0, "optim.lr": 1e-3})
    assert made.config_of(final).tracking.job_type == f"{arm.name} lr 0.001"


@pytest.mark.slow
def test_too_many_lines_for_a_panel_are_noted(spec):
    rates = ",".join(f"{rate}e-5" for rate in range(1, 61))
    own = spec(f"optim.lr={rates}")
    assert {one["limit"] for one in curves(own, "Loss")} == {100}
    assert "A panel draws 100 of 120 means" in str(panels(own, "Summary"))
    assert "A panel draws" not in str(panels(spec(), "Summary"))


def test_user_job_type_mixes_arms(spec):
    own = spec("tracking.job_type=mine", "model.d_model=16,32")
    assert {one.get("groupBy") for one in curves(own, "Loss")} == {"variant.value.name"}
    assert "over seeds and more: all arms have one job type" in str(panels(own, "Summary"))


@pytest.mark.slow
def test_sweep_run_is_pinned(spec, manifest):
    (pinned,) = runset(spec())["pinnedRunIds"]
    assert base64.b64decode(pinned).decode() == f"Run:v1:sweep-{manifest().id}:ours:team"
    assert "pinnedRunIds" not in runset(spec(entity=""))  # whose it is is not known


@pytest.mark.slow
def test_plus_in_a_name_is_replaced(spec, manifest):
    id = manifest("sweep.name=a+b").id
    assert spec("sweep.name=a+b")["displayName"] == f"a_b-{id}"
    assert filters(spec("sweep.name=a+b"))[0][-1] == f"a+b-{id}"


def test_view_is_reproducible_without_network(spec, monkeypatch):
    def refuse(*_):
        raise AssertionError("a network was asked")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    assert spec() == spec()

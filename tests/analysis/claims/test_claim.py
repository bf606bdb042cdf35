"""Claims: what a file may say, what its hash and seeds are made of, and which arms it asks for."""

import dataclasses
import itertools
import json
import random
import statistics
from types import SimpleNamespace

import pytest
import yaml

from qkablate.analysis.claims.claim import find_comparisons, shared_values
from qkablate.analysis.claims.parse import claim_names, load_claim, parse_claim, scales
from qkablate.analysis.claims.registry import claim_grid
from qkablate.compose.configs import make_config, open_hydra
from qkablate.compose.grid import read_request
from qkablate.config import DataConfig, conf_dir
from qkablate.config.data import SPLITS
from qkablate.data.corpus import open_corpus
from qkablate.errors import UserError
from qkablate.strict_json import hash_json
from qkablate.sweeps.planning.expand import Grid, expand_grid

PART = {"arm": "no_q", "kind": "noninferior", "margin": 0.01}
CLAIM = {
    "says": "Keys alone are enough.",
    "source": "a comment",
    "seeds": 6,
    "tuning_seeds": 0,
    "grid": {"variant": "standard,no_q"},
    "parts": {"within": PART},
}


def written(path, **changes):
    """Write the claim of this module with changes to a file; None removes a key."""
    content = {key: value for key, value in (CLAIM | changes).items() if value is not None}
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    return str(path)


def part(**changes):
    own = {key: value for key, value in (PART | changes).items() if value is not None}
    return {"parts": {"within": own}}


def assert_one_line(error, line):
    text = str(error.value)
    assert line in text
    assert "\n" not in text
    assert "Traceback" not in text


SEEDS = "seeds: {} is not a number from 3 to 1,000, or an increasing list of interim analyses"
MISTAKES = {
    "a key that is not": ({"margn": 1}, "'margn' is not one of parts, "),
    "a key that is nearly one": ({"tuning_seed": 1}, "(nearest: tuning_seeds)"),
    "says missing": ({"says": None}, "says: a text is required"),
    "says empty": ({"says": " \n"}, "says: a text is required"),
    "says a number": ({"says": 3}, "says: a text is required"),
    "source missing": ({"source": None}, "source: a text is required"),
    "a key of a part": (
        part(margn=1),
        "parts.within: 'margn' (nearest: margin) is not one of margin, ",
    ),
    "a key of a part, nearly": (part(magin=1), "(nearest: margin)"),
    "a kind that is not": (part(kind="same"), "'same' is not one of noninferior, equivalent"),
    "a kind that is nearly one": (part(kind="noninferor"), "(nearest: noninferior)"),
    "a kind that is a list": (part(kind=["better"]), "parts.within.kind: "),
    "kind missing": (part(kind=None), "parts.within.kind: 'None' is not one of"),
    "an axis that is not": (
        part(axis="param"),
        "parts.within.axis: 'param' (nearest: params) is not one of tokens",
    ),
    "an axis that is nearly one": (part(axis="param"), "(nearest: params)"),
    "a horizon that is not": (part(horizon="every"), "'every' is not one of longest, each, growth"),
    "a measure that is not": (part(of="size"), "parts.within.of: 'size' is not one of "),
    "a spread that is better": (
        part(of="spread", kind="better"),
        "parts.within.kind: better does not suit of: spread",
    ),
    "a spread that is equivalent": (part(of="spread", kind="equivalent"), "parts.within.kind: "),
    "a spread that grows": (part(of="spread", kind="worse", horizon="growth"), "within.horizon: "),
    "a course that is better": (
        part(of="course", kind="better"),
        "kind: better does not suit of: course",
    ),
    "each length of a size": (part(of="params", horizon="each"), "params does not depend on the"),
    "sizes alone": (part(of="params"), "parts: no part measures the runs"),
    "an adjusted size of nothing": (
        part(adjust="d_model"),
        "d_model has no effect at axis: tokens",
    ),
    "an adjusted size that is not": (part(axis="params", adjust="heads"), "'heads' is not one of"),
    "data that are not": (
        part(data="recal"),
        "parts.within.data: 'recal' (nearest: recall) is not one of ",
    ),
    "data that are nearly some": (part(data="recal"), "(nearest: recall)"),
    "data twice": (part(data=["text", "text"]), "parts.within.data: name each of text, induction"),
    "no data": (part(data=[]), "parts.within.data: name each of"),
    "an interaction of variants": (
        part(than={"variant": "no_k"}),
        "parts.within.than: takes settings of both arms, as {model.heads: 1}, and no variant",
    ),
    "an interaction of nothing": (part(than={}), "parts.within.than: selects no arm"),
    "an interaction of spreads": (
        part(of="spread", kind="worse", than={"model.bias": True}),
        "parts.within.than: spread has no value per pair of runs",
    ),
    "an interaction of growth": (
        part(horizon="growth", than={"model.bias": True}),
        "parts.within.than: growth has no value per pair of runs",
    ),
    "an interaction of no key": (part(than={"model.skip": True}), "model.skip: there is no such"),
    "minutes that are none": ({"minutes": "long"}, "minutes: long is not a number of minutes"),
    "margin missing": (part(margin=None), "parts.within.margin: 'None' is not a number, 0 or more"),
    "margin negative": (
        part(margin=-0.01),
        "parts.within.margin: '-0.01' is not a number",
    ),
    "margin nan": (part(margin=float("nan")), "parts.within.margin: 'nan' is not a number"),
    "margin inf": (part(margin=float("inf")), "parts.within.margin: 'inf' is not a number"),
    "margin text": (part(margin="0.01 nats"), "parts.within.margin: '0.01 nats' is not a number"),
    "margin true": (part(margin=True), "parts.within.margin: 'True' is not a number"),
    "margin list": (part(margin=[0.01]), "parts.within.margin: "),
    "margin huge": (part(margin=1e9), "parts.within.margin: "),
    "margin 0, noninferior": (part(margin=0), "noninferior needs a margin above 0"),
    "margin 0, equivalent": (
        part(margin=0.0, kind="equivalent"),
        "equivalent needs a margin above 0",
    ),
    "arm missing": (part(arm=None), "parts.within.arm: is required"),
    "arm a list": (part(arm=["no_q"]), "parts.within.arm: must be a map of keys to values"),
    "two arms": (
        part(arm={"variant": ["no_q", "no_k"]}),
        "parts.within.arm: variant: must be a single value; a part compares two arms",
    ),
    "against a number": (part(against=3), "parts.within.against: must be a map"),
    "parts missing": ({"parts": None}, "parts: must be a map of keys to values"),
    "parts empty": ({"parts": {}}, "parts: a claim needs at least one"),
    "parts a list": ({"parts": [PART]}, "parts: must be a map of keys to values"),
    "a part that is none": ({"parts": {"within": 3}}, "parts.within: must be a map"),
    "seeds missing": ({"seeds": None}, SEEDS.format("None")),
    "one seed": ({"seeds": 1}, SEEDS.format("1")),
    "no seed": ({"seeds": 0}, SEEDS.format("0")),
    "negative seeds": ({"seeds": -6}, SEEDS.format("-6")),
    "no look": ({"seeds": []}, SEEDS.format("[]")),
    "falling looks": ({"seeds": [12, 6]}, SEEDS.format("[12, 6]")),
    "the same look twice": ({"seeds": [6, 6]}, SEEDS.format("[6, 6]")),
    "a look of one": ({"seeds": [1, 6]}, SEEDS.format("[1, 6]")),
    "looks in a look": ({"seeds": [[6]]}, SEEDS.format("[[6]]")),
    "seeds a text": ({"seeds": "8"}, SEEDS.format("8")),
    "seeds true": ({"seeds": True}, SEEDS.format("True")),
    "seeds a fraction": ({"seeds": 6.0}, SEEDS.format("6.0")),
    "seeds a map": ({"seeds": {6: 1}}, SEEDS.format("{6: 1}")),
    "too many seeds": ({"seeds": 10**9}, SEEDS.format(10**9)),
    "tuning seeds negative": (
        {"tuning_seeds": -1},
        "tuning_seeds: -1 is not a whole number from 0",
    ),
    "tuning seeds a text": ({"tuning_seeds": "2"}, "tuning_seeds: 2 is not a whole number from 0"),
    "tuning seeds true": (
        {"tuning_seeds": True},
        "tuning_seeds: True is not a whole number from 0",
    ),
    "tuning seeds a fraction": ({"tuning_seeds": 1.5}, "tuning_seeds: 1.5 is not a whole number"),
    "tuning seeds a list": ({"tuning_seeds": [1]}, "tuning_seeds: [1] is not a whole number"),
    "too many tuning seeds": ({"tuning_seeds": 10**9}, "tuning_seeds: 1000000000 is not"),
    "grid missing": ({"grid": None}, "grid: must be a map of keys to values"),
    "grid a list": ({"grid": ["variant"]}, "grid: must be a map of keys to values"),
    "grid of numbers": ({"grid": {1: 2}}, "grid: must be a map of keys to values"),
    "grid of maps": ({"grid": {"variant": {"a": 1}}}, "grid: write the values of variant as"),
    "filter a text": ({"filter": "model.d_model > 3"}, "filter: must be a list of predicates"),
    "filter of numbers": ({"filter": [3]}, "filter: must be a list of predicates"),
    "scale a list": ({"scale": ["small"]}, "scale: must be a map of keys to values"),
    "scale not known": (
        {"scale": {"smal": {}}},
        "scale: 'smal' (nearest: small) is not one of small",
    ),
    "scale nearly known": ({"scale": {"smal": {}}}, "(nearest: small)"),
    "scale a number": ({"scale": {"small": 3}}, "scale.small: must be a map of keys to values"),
}


@pytest.mark.parametrize(("changes", "line"), MISTAKES.values(), ids=MISTAKES)
def test_mistake_is_a_one_line_error_with_file_and_key(tmp_path, changes, line):
    with pytest.raises(UserError) as error:
        load_claim(written(tmp_path / "mine.yaml", **changes))
    assert_one_line(error, line)
    assert str(error.value).startswith("mine.yaml: ")


@pytest.mark.parametrize("axis", [["tokens"], {"tokens": 1}])
def test_axis_that_is_no_string_is_rejected(tmp_path, axis):
    with pytest.raises(UserError) as error:
        load_claim(written(tmp_path / "mine.yaml", **part(axis=axis)))
    assert_one_line(error, "parts.within.axis: ")


BASELINES = {
    "a date": "2020-01-01",
    "a date within": "{variant: 2020-01-01}",
    "a set": "!!set {a}",
    "keys of two kinds": "{1: 2, a: 3}",
    "itself": "&it [*it]",
}


@pytest.mark.parametrize("text", BASELINES.values(), ids=BASELINES)
def test_invalid_baseline_is_rejected(tmp_path, text):
    path = tmp_path / "mine.yaml"
    written(path)
    with path.open("a") as file:
        file.write(f"baseline: {text}\n")
    with pytest.raises(UserError, match="baseline"):
        _ = load_claim(str(path)).hash


OWN = ["seed", "seeds.init", "control", "control.adjust", "sweep.tune", "sweep.filter"]
FREE = ["out", "device", "threads", "workers", "data.cache", "tracking.wandb", "tracking"]


@pytest.mark.parametrize("key", [*OWN, *FREE])
def test_keys_outside_the_grid_are_rejected_in_file_and_command(tmp_path, key):
    path = tmp_path / "mine.yaml"
    with pytest.raises(UserError) as error:
        load_claim(written(path, grid=CLAIM["grid"] | {key: 3}))
    assert_one_line(error, f"grid: {key} ")
    with pytest.raises(UserError) as error:
        load_claim(written(path, scale={"small": {key: 3}}))
    assert_one_line(error, f"grid: {key} ")
    with pytest.raises(UserError) as error:
        load_claim(written(path), words={key: "3"})
    assert_one_line(error, f"grid: {key} ")


FILES = {
    "not YAML": ("says: [", "is not YAML: "),
    "a list": ("- says", "must be a map of keys to values"),
    "a text": ("says", "must be a map of keys to values"),
    "nothing": ("", "must be a map of keys to values"),
    "two documents": ("a: 1\n---\nb: 1\n", "is not YAML: "),
    "deep lists": ("[" * 20_000, "nested too deep"),
    "deep maps": ("{a: " * 20_000, "nested too deep"),
    "a tab": ("says:\n\ta: 1", "is not YAML: "),
    "an alias of nothing": ("says: *x", "is not YAML: "),
}


@pytest.mark.slow
@pytest.mark.parametrize(("text", "line"), FILES.values(), ids=FILES)
def test_invalid_claim_is_rejected_in_one_line(tmp_path, text, line):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(UserError) as error:
        load_claim(str(path))
    assert_one_line(error, line)
    assert "mine.yaml" in str(error.value)


@pytest.mark.parametrize(
    "tag",
    [
        "!!python/object/apply:os.mkdir ['{}']",
        "!!python/object/apply:os.system ['mkdir {}']",
        "!!python/object/new:pathlib.Path ['{}']",
        "!!python/name:os.mkdir",
        "!!python/module:os",
    ],
)
@pytest.mark.parametrize("key", ["", "says: ", "baseline: "])
def test_file_runs_nothing(tmp_path, tag, key):
    path, made = tmp_path / "mine.yaml", tmp_path / "made"
    path.write_text(key + tag.format(made) + "\n")
    with pytest.raises(UserError) as error:
        load_claim(str(path))
    assert_one_line(error, "is not YAML: could not determine a constructor")
    assert not made.exists()


def test_file_that_is_not_text_is_rejected(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_bytes(b"says: \xff\xfe\n")
    with pytest.raises(UserError) as error:
        load_claim(str(path))
    assert_one_line(error, "is not YAML: ")


def test_missing_file_is_rejected(tmp_path):
    folder = tmp_path / "folder.yaml"
    folder.mkdir()
    for path, line in ((tmp_path / "none.yaml", "No such file"), (folder, "Is a directory")):
        with pytest.raises(UserError) as error:
            load_claim(str(path))
        assert_one_line(error, line)
        assert str(path) in str(error.value)


@pytest.mark.parametrize("name", ["one_hed", "", "../claim/one_head", "*", "one_head/", "."])
def test_unknown_name_is_rejected_with_the_nearest(name):
    with pytest.raises(UserError) as error:
        load_claim(name)
    assert_one_line(error, f"claim '{name}'")
    assert "qkablate claim list" in str(error.value)
    if name == "one_hed":
        assert "(nearest: one_head)" in str(error.value)


def test_unknown_scale_is_rejected(tmp_path):
    with pytest.raises(UserError) as error:
        load_claim("one_head", "smal")
    assert_one_line(error, "scale: 'smal' (nearest: small) is not one of small, gpu")


def test_untestable_claim_needs_only_a_reason(tmp_path):
    found = load_claim(written(tmp_path / "mine.yaml", untestable="no\n encoder", parts=None))
    assert found.untestable == "no encoder"
    assert (found.seeds, found.parts) == ((), {})
    written(tmp_path / "mine.yaml", untestable="no encoder", source=None)
    with pytest.raises(UserError, match="source: a text is required"):
        load_claim(str(tmp_path / "mine.yaml"))


def test_missing_keys_have_defaults(tmp_path):
    content = {key: value for key, value in CLAIM.items() if key != "tuning_seeds"}
    found = parse_claim("mine", content, "small", {})
    assert found.tuning_seeds == 3
    assert found.seeds == (6,)
    assert found.baseline == "standard"
    (one,) = found.parts.values()
    assert (one.arm, one.against) == ({"variant": "no_q"}, {"variant": "standard"})
    assert (one.kind, one.margin) == ("noninferior", 0.01)
    assert (one.of, one.axis, one.horizon) == ("gap", "tokens", "longest")


def test_zero_margin_is_allowed_for_better_and_worse():
    for kind in ("better", "worse"):
        found = parse_claim("mine", CLAIM | part(kind=kind, margin=0), "small", {})
        assert found.parts["within"].margin == 0


def test_grid_is_the_scales_then_the_files_then_the_files_at_the_scale_then_the_lines():
    at = {"small": {"model.layers": 5, "model.d_model": [32, 64]}, "gpu": {"model.layers": 7}}
    content = CLAIM | {"grid": CLAIM["grid"] | {"model.layers": 4, "model.heads": 2}, "scale": at}
    small = parse_claim("mine", content, "small", {"model.heads": "8"}).grid
    assert small["model.layers"] == "5"
    assert small["model.d_model"] == "32,64"
    assert small["model.heads"] == "8"
    assert small["precision"] == "fp32"
    gpu = parse_claim("mine", content, "gpu", {}).grid
    assert gpu["model.layers"] == "7"
    assert gpu["data"] == "openwebtext"


def test_scale_can_have_its_own_baseline():
    content = CLAIM | {"baseline": "no_q", "scale": {"small": {"baseline": {"model.layers": 4}}}}
    assert parse_claim("mine", content, "small", {}).baseline == {"model.layers": 4}
    assert parse_claim("mine", content, "gpu", {}).baseline == "no_q"
    assert "baseline" not in parse_claim("mine", content, "small", {}).grid


# What a verdict hangs on: the hash, and the seeds made of it.


def claim(**changes):
    """Return the claim of this module with changes, parsed."""
    words = changes.pop("words", {})
    scale = changes.pop("at", "small")
    name = changes.pop("name", "mine")
    return parse_claim(name, CLAIM | changes, scale, words)


DECIDING = {
    "margin": part(margin=0.02),
    "kind": part(kind="better"),
    "axis": part(axis="params"),
    "horizon": part(horizon="each"),
    "what is measured": part(of="spread"),
    "what is said": {"says": "Otherwise said."},
    "arm": part(arm="merged_w"),
    "arm by more": part(arm={"variant": "no_q", "model.heads": 2}),
    "against": part(against="shared_qk"),
    "the part's name": {"parts": {"without": PART}},
    "a second part": {"parts": {"within": PART, "again": PART}},
    "seeds": {"seeds": 7},
    "looks": {"seeds": [3, 6]},
    "tuning seeds": {"tuning_seeds": 2},
    "grid": {"grid": {"variant": "standard,no_q,merged_w"}},
    "a key more": {"grid": CLAIM["grid"] | {"model.heads": 2}},
    "filter": {"filter": ["model.d_model > 1"]},
    "baseline": {"baseline": "no_q"},
    "no baseline": {"baseline": {"model.heads": 2}},
    "at the scale": {"scale": {"small": {"model.layers": 3}}},
    "the scale": {"at": "gpu"},
    "the line": {"words": {"train.steps": "30"}},
    "the line, as the file has it": {"words": {"variant": "standard,no_q"}},
    "the name": {"name": "yours"},
}


def test_deciding_fields_change_the_hash_and_every_seed():
    found = {what: claim(**changes) for what, changes in DECIDING.items()} | {"": claim()}
    assert len({one.hash for one in found.values()}) == len(found)
    assert len({one.folder_name for one in found.values()}) == len(found)
    seeds = [{*one.seeds_of("final", 20), *one.seeds_of("tuning", 20)} for one in found.values()]
    assert all(len(own) == 40 for own in seeds)
    assert len(set.union(*seeds)) == 40 * len(found)


NOT_DECIDING = {
    "source": {"source": "https://example.org"},
    "nothing untestable": {"untestable": ""},
    "one look": {"seeds": [6]},
    "the default measure": part(of="gap"),
    "the default axis": part(axis="tokens"),
    "the default horizon": part(horizon="longest"),
    "the default against": part(against={"variant": "standard"}),
    "another scale's": {"scale": {"gpu": {"model.layers": 3}}},
    "no predicate": {"filter": []},
    "the default baseline": {"baseline": "standard"},
    "a list of values": {"grid": {"variant": ["standard", "no_q"]}},
}


@pytest.mark.parametrize("changes", NOT_DECIDING.values(), ids=NOT_DECIDING)
def test_irrelevant_fields_keep_the_hash(changes):
    assert claim(**changes).hash == claim().hash


def test_order_of_keys_does_not_change_the_hash():
    mixed = dict(reversed(CLAIM.items())) | part(**dict(reversed(PART.items())))
    assert parse_claim("mine", mixed, "small", {}).hash == claim().hash
    several = {"variant": "standard,no_q", "model.heads": "1,2"}
    other = dict(reversed(several.items()))
    assert claim(grid=several).hash == claim(grid=other).hash


def test_random_claims_have_the_same_hash_only_with_the_same_content():
    rng = random.Random(0)
    found: dict[str, str] = {}
    for _ in range(400):
        own = part(
            kind=rng.choice(["noninferior", "better"]),
            margin=rng.choice([0.01, 0.02]),
            axis=rng.choice(["tokens", "params"]),
        )
        one = claim(
            **own,
            seeds=rng.choice([6, 8, [6, 8]]),
            tuning_seeds=rng.choice([0, 2]),
            says=rng.choice(["this", "that"]),
        )
        content = json.dumps(one.content, sort_keys=True)
        assert found.setdefault(one.hash, content) == content
    assert len(found) == len({*found.values()})
    assert len(found) > 40


def test_seeds_derive_from_the_claim_independently_of_their_number():
    one, same = claim(), claim()
    for purpose in ("final", "tuning"):
        many = one.seeds_of(purpose, 100)
        assert many == same.seeds_of(purpose, 100)
        assert many[:7] == one.seeds_of(purpose, 7)
        assert all(type(seed) is int and 0 <= seed < 2**31 for seed in many)
        assert statistics.fmean(many) == pytest.approx(2**30, rel=0.3)
    assert one.seeds_of("final", 0) == []
    assert not {*one.seeds_of("final", 1000)} & {*one.seeds_of("tuning", 1000)}


# Which arms the parts ask for.


def requested_comparisons(world, grid=None, **parts):
    """Return the comparisons of a claim with these parts over this grid, and the arms by name."""
    content = {"grid": grid or CLAIM["grid"], "seeds": 3}
    content["parts"] = {name: PART | changes for name, changes in parts.items()}
    own = claim(**content)
    # The sizes of this module's sweeps, not those of the scale.
    own = dataclasses.replace(own, grid=dict(grid or CLAIM["grid"]))
    given, words = claim_grid(own, 2)
    manifest = world(*words, grid=given).manifest
    return find_comparisons(own, manifest.arms.values()), manifest.arms


def test_single_arms_are_compared(world):
    found, _ = requested_comparisons(world, within={})
    assert [(one.name, one.part) for one in found] == [("within", "within")]
    assert found[0].pairs == [("no_q-d16-h2", "standard-d16-h2")]


LENGTHS = {"variant": "standard,no_q", "train.steps": "12,24,48"}


@pytest.mark.slow
def test_longest_is_one_comparison_and_each_is_one_for_every_length(world):
    found, arms = requested_comparisons(world, LENGTHS, long={}, every={"horizon": "each"})
    (long,) = [one for one in found if one.part == "long"]
    every = [one for one in found if one.part == "every"]
    assert long.name == "long"
    assert [arms[name].config.train.steps for name in long.pairs[0]] == [48, 48]
    assert sorted(arms[one.pairs[0][0]].config.train.steps for one in every) == [12, 24, 48]
    assert {one.name for one in every} == {f"every {n} tokens" for n in ("384", "768", "1,536")}
    for one in every:
        assert len(one.pairs) == 1
        assert len({arms[name].tokens for name in one.pairs[0]}) == 1


def test_growth_is_one_comparison_over_all_lengths_from_short_to_long(world):
    grid = LENGTHS | {"train.steps": "48,12,24"}
    found, arms = requested_comparisons(world, grid, grows={"horizon": "growth"})
    (one,) = found
    assert one.name == "grows"
    assert [arms[name].tokens for name, _ in one.pairs] == [384, 768, 1536]
    assert [arms[name].tokens for _, name in one.pairs] == [384, 768, 1536]
    assert {arms[name].variant for name, _ in one.pairs} == {"no_q"}
    assert {arms[name].variant for _, name in one.pairs} == {"standard"}


@pytest.mark.parametrize(
    ("horizon", "steps", "least"),
    [("growth", "12", 2), ("asymptote", "12", 3), ("asymptote", "12,24", 3)],
)
def test_too_few_lengths_are_refused(world, horizon, steps, least):
    with pytest.raises(UserError) as error:
        requested_comparisons(world, LENGTHS | {"train.steps": steps}, part={"horizon": horizon})
    needs = f"{horizon} needs {least} lengths of training or more"
    assert_one_line(error, f"parts.part.horizon: {needs}")


def test_sizes_are_compared_one_by_one_and_named(world):
    grid = {"variant": "standard,no_q", "model.d_model": "16,32", "model.heads": "1,2"}
    found, arms = requested_comparisons(world, grid, within={})
    assert {one.name for one in found} == {
        f"within d_model={d} heads={h}" for d in (16, 32) for h in (1, 2)
    }
    for one in found:
        ((arm, other),) = one.pairs
        models = [arms[name].config.model for name in (arm, other)]
        assert models[0] == models[1]
        assert (arms[arm].variant, arms[other].variant) == ("no_q", "standard")


def test_growth_is_measured_at_every_size_by_itself(world):
    found, arms = requested_comparisons(
        world, LENGTHS | {"model.heads": "1,2"}, grows={"horizon": "growth"}
    )
    assert {one.name for one in found} == {"grows heads=1", "grows heads=2"}
    for one in found:
        assert len(one.pairs) == 3
        assert len({arms[name].config.model.heads for pair in one.pairs for name in pair}) == 1


@pytest.mark.slow
def test_scale_can_be_chosen(world):
    grid = {"variant": "standard,no_q", "model.heads": "1,2"}
    side = {"arm": {"variant": "no_q", "model.heads": "2"}}
    found, arms = requested_comparisons(
        world, grid, within=side | {"against": {"variant": "standard"}}
    )
    heads = [[arms[name].config.model.heads for name in one.pairs[0]] for one in found]
    # Of the other side nothing was said but its variant: it may have any number of heads.
    assert sorted(heads) == [[2, 1], [2, 2]]
    both = side | {"against": {"variant": "standard", "model.heads": "2.0"}}
    (one,), arms = requested_comparisons(world, grid, within=both)
    assert {arms[name].config.model.heads for name in one.pairs[0]} == {2}


def test_sizes_can_be_compared(world):
    sides = {"arm": {"model.heads": "1"}, "against": {"model.heads": "2"}}
    found, arms = requested_comparisons(
        world, {"variant": "standard", "model.heads": "1,2"}, heads=sides
    )
    (one,) = found
    assert [arms[name].config.model.heads for name in one.pairs[0]] == [1, 2]


def test_at_equal_params_and_flops_the_arms_are_those_of_that_control(world):
    axes = {axis: {"axis": axis} for axis in ("tokens", "params", "flops")}
    found, arms = requested_comparisons(
        world, {"variant": "standard,no_q", "model.d_model": "64"}, **axes
    )
    assert [one.part for one in found] == ["tokens", "params", "flops"]
    by_axis = {one.part: [arms[name] for name in one.pairs[0]] for one in found}
    assert {other.name for _, other in by_axis.values()} == {"standard-d64-h2"}
    arm, other = by_axis["params"]
    assert abs(arm.params / other.params - 1) <= 0.01
    arm, other = by_axis["flops"]
    assert abs(arm.flops / other.flops - 1) <= 0.01
    arm, other = by_axis["tokens"]
    assert arm.params < other.params
    assert arm.config.model == other.config.model


def test_arms_can_be_had_at_equal_params_alone(world):
    found, arms = requested_comparisons(
        world, {"variant": "standard,no_q"}, equal={"axis": "params"}
    )
    assert arms[found[0].pairs[0][0]].controls == ["params"]
    assert not [arm for arm in arms.values() if arm.variant == "no_q" and "none" in arm.controls]


def test_arm_outside_the_grid_is_rejected(world):
    _, arms = requested_comparisons(world, within={})
    for changes, text in (
        ({"arm": "merged_w"}, "no variant=merged_w against variant=standard"),
        ({"against": "tied_qkv"}, "no variant=no_q against variant=tied_qkv"),
        ({"arm": {"variant": "no_q", "model.heads": 9}}, "no variant=no_q, model.heads=9"),
        ({"arm": {"data.max_tokens": 1}}, "no data.max_tokens=1"),
        ({"axis": "params"}, "no variant=no_q against variant=standard at equal params"),
    ):
        with pytest.raises(UserError) as error:
            find_comparisons(claim(parts={"within": PART | changes}), arms.values())
        assert_one_line(error, f"mine: parts.within: the grid has {text}")


@pytest.mark.slow
def test_arm_is_found_by_requested_and_resolved_name(world):
    """One group of gqa is mqa."""
    grid = {"variant": "standard,gqa", "model.heads": "2"}
    for name in ("gqa", "mqa"):
        found, _ = requested_comparisons(world, grid, within={"arm": {"variant": name}})
        assert found[0].pairs == [("mqa-d16-h2", "standard-d16-h2")]


@pytest.mark.parametrize("key", ["precision=fp32,bf16", "deterministic=true,false"])
def test_arms_with_other_differences_are_not_paired(world, key):
    key, _, values = key.partition("=")
    found, arms = requested_comparisons(world, {"variant": "standard,no_q", key: values}, within={})
    for one in found:
        assert len({getattr(arms[name].config, key) for name in one.pairs[0]}) == 1
    assert len(found) == 2


@pytest.mark.parametrize(
    ("arm", "text"),
    [
        (
            {"model.hedas": 2},
            "parts.within.arm: model.hedas: there is no such key (nearest: ",
        ),
        ("no_qq", "parts.within.arm: 'no_qq' (nearest: no_q"),
        ({}, "parts.within.arm: selects no arm"),
    ],
)
def test_unknown_arm_is_rejected_with_the_nearest(arm, text):
    part = CLAIM["parts"]["within"] | {"arm": arm}
    with pytest.raises(UserError) as error:
        parse_claim("mine", CLAIM | {"parts": {"within": part}}, "small", {})
    assert text in str(error.value)


def test_arm_against_itself_is_rejected(world):
    """Reject a part without `against` whose arm is the baseline."""
    with pytest.raises(UserError):
        requested_comparisons(world, within={"arm": {"variant": "standard"}})


def test_longest_is_that_of_each_place(world):
    """A context, or a width, with fewer tokens than another is judged all the same."""
    found, _ = requested_comparisons(
        world, {"variant": "standard,no_q", "model.context": "8,16"}, long={}
    )
    assert len(found) == 2


def test_arms_with_unrequested_differences_are_not_paired(world):
    grid = {"variant": "standard,no_q", "model.d_model": "16,32"}
    found, arms = requested_comparisons(world, grid, within={})
    assert [one.pairs for one in found] == [
        [("no_q-d16-h2", "standard-d16-h2")],
        [("no_q-d32-h2", "standard-d32-h2")],
    ]
    own = dataclasses.replace(claim(), grid=grid)
    with pytest.raises(UserError, match="the grid has no"):
        find_comparisons(own, [arms["no_q-d32-h2"], arms["standard-d16-h2"]])


def test_growth_needs_annealed_runs(world):
    with pytest.raises(UserError, match="growth needs schedules that end at a small rate"):
        requested_comparisons(
            world, LENGTHS | {"optim.lr_final": "1.0"}, within={"horizon": "growth"}
        )


# The claims that come with the program.

SHIPPED = claim_names()
TESTABLE = [name for name in SHIPPED if not load_claim(name).untestable]


def read_yaml(name):
    return yaml.safe_load((conf_dir() / "claim" / f"{name}.yaml").read_text())


def has_scale(name, scale):
    """Return whether a claim has a size at the scale: some name the sizes that they need."""
    content = read_yaml(name)
    return bool(content.get("untestable") or content.get("parts") or scale in content["scale"])


def sets_scale(name, scale):
    """Return whether a claim has settings of its own for the scale."""
    return bool((read_yaml(name).get("scale") or {}).get(scale))


AT_SCALE = [(name, s) for name, s in itertools.product(TESTABLE, scales()) if has_scale(name, s)]
# Claims without settings of their own for the book have the same arms there.
LARGER = [at for at in AT_SCALE if at[1] == "gpu" or (at[1] == "book" and sets_scale(*at))]


@pytest.mark.parametrize("scale", scales())
@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_claim_can_be_read_at_every_scale(name, scale):
    if not has_scale(name, scale):
        with pytest.raises(UserError, match=r"scale: this claim has .*, not "):
            load_claim(name, scale)
        return
    found = load_claim(name, scale)
    assert len(found.says) > 20
    assert len(found.source) > 10
    if found.untestable:
        assert len(found.untestable) > 20
        return
    assert found.scale == scale
    assert min(found.seeds) >= 6
    assert found.parts
    others = [load_claim(name, s) for s in scales() if s != scale and has_scale(name, s)]
    assert found.hash not in {one.hash for one in others}


def test_shipped_claims_differ():
    assert len(TESTABLE) > 10
    hashes = [load_claim(name, scale).hash for name, scale in AT_SCALE]
    assert len({*hashes}) == len(hashes)


@pytest.fixture(scope="module")
def tiny_text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    for name, count in (("text.txt", 400), ("much.txt", 200_000)):
        (folder / name).write_text("the cat sat on the mat\n" * count, encoding="utf-8")
    return folder


def source_of(own, dataset):
    """Return the source of the data that a part of a claim is about."""
    name = own.tasks.get(dataset, own.grid)["data"]
    return yaml.safe_load((conf_dir() / "data" / f"{name}.yaml").read_text())["source"]


@pytest.mark.slow
@pytest.mark.parametrize("name", TESTABLE)
def test_every_shipped_claim_finds_its_arms(name, tiny_text, shared_cache, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(shared_cache))
    own = load_claim(name, "small")
    text = {"data": "text", "data.path": str(tiny_text / "text.txt")}
    if "data.max_tokens" in own.grid:
        text = {**text, "data.path": str(tiny_text / "much.txt"), "data.tokenizer": "chars"}
    if "data" not in own.grid:
        own = dataclasses.replace(own, grid=own.grid | text)
    has_data = "data" in load_claim(name).grid
    assert_finds_its_arms(own, *([] if has_data else [f"data.cache={tiny_text / 'cache'}"]))


@pytest.fixture
def stand_ins(tiny_text, monkeypatch):
    """Let a few lines stand for each data set of the Hub, with the size that its config names."""
    pairs = "".join(f"source {i}\ttarget {i}\n" for i in range(60))
    (tiny_text / "pairs.tsv").write_text(f"en\tde\n{pairs}")
    files = {
        "hub": {"source": "text", "path": str(tiny_text / "text.txt")},
        "pairs": {"source": "pairs", "path": str(tiny_text / "pairs.tsv")}
        | {"source_field": "en", "target_field": "de"},
    }

    def open_stand_in(config, tokenizer=None):
        if config.source not in files:
            return open_corpus(config, tokenizer)
        found = open_corpus(DataConfig(**files[config.source], cache=str(tiny_text / "cache")))
        settings = {key: value for key, value in vars(config).items() if key != "cache"}
        found.fingerprint = hash_json(settings)
        found.vocabulary = config.vocab_size or {"gpt2": 50257, "bytes": 256}[config.tokenizer]
        sizes = (config.max_tokens or 10**8, config.val_tokens, config.test_tokens)
        found.tokens = dict(zip(SPLITS, sizes, strict=True))
        return found

    monkeypatch.setattr("qkablate.data.open_corpus", open_stand_in)
    monkeypatch.setattr("qkablate.sweeps.planning.arms.check_available", lambda config: None)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "scale"), LARGER)
def test_every_shipped_claim_finds_its_arms_at_larger_scales(
    name, scale, stand_ins, shared_cache, monkeypatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(shared_cache))
    assert_finds_its_arms(load_claim(name, scale))


def assert_finds_its_arms(own, *free):
    """Assert that every part of a claim compares arms that differ in what it is about alone."""
    grid, words = claim_grid(own, own.seeds[-1])
    free = [*free, "threads=1", "tracking.wandb=disabled"]
    with open_hydra():
        found = read_request([*words, *free], grid)
        manifest = expand_grid(
            Grid(found.settings.sweep, found.controls, found.choices), make_config, ["qkablate"]
        )
    assert manifest.left_out == []
    assert [changes["seed"] for changes in manifest.finals or _changes(manifest)] == (
        own.seeds_of("final", own.seeds[-1])
    )
    asks = find_comparisons(own, manifest.arms.values())
    assert {one.part for one in asks} == {*own.parts}
    assert {(one.part, one.dataset) for one in asks} == {
        (part, dataset) for part, spec in own.parts.items() for dataset in spec.data
    }
    assert len({one.name for one in asks}) == len(asks)
    # The settings that the task brings along are not in the names.
    assert not any("context=" in arm or "batch_size=" in arm for arm in manifest.arms)
    for one in asks:
        pairs = [[manifest.arms[side] for side in pair] for pair in one.pairs]
        for arm, other in pairs:
            assert arm.name != other.name
            assert arm.tokens == other.tokens
            assert arm.facts["data_fingerprint"] == other.facts["data_fingerprint"]
            assert arm.config.data.source == source_of(own, one.dataset)
            if one.spec.axis in ("params", "flops"):
                sizes = [getattr(side, one.spec.axis) for side in (arm, other)]
                assert sizes[0] == pytest.approx(sizes[1], rel=0.01)
        lengths = [arm.tokens for arm, _ in pairs]
        assert (len({*lengths}) >= 2) == (one.spec.horizon in ("growth", "asymptote"))
        assert lengths == sorted(lengths)
    for part_name, one in own.parts.items():
        for dataset in one.data:
            own_asks = [a for a in asks if (a.part, a.dataset) == (part_name, dataset)]
            lengths = {manifest.arms[a.pairs[0][0]].tokens for a in own_asks}
            source = source_of(own, dataset)
            arms = [arm for arm in manifest.arms.values() if arm.config.data.source == source]
            every = {arm.tokens for arm in arms}
            if one.horizon == "each":
                assert lengths == every
            elif one.horizon == "longest":
                assert lengths == {max(every)}


def _changes(manifest):
    first = manifest.runs[0].arm
    return [run.changes for run in manifest.runs if run.arm == first]


def test_no_shipped_claim_shares_a_seed_with_another():
    used = [
        seed
        for name, scale in AT_SCALE
        for purpose in ("final", "tuning")
        for seed in load_claim(name, scale).seeds_of(purpose, 8)
    ]
    assert len({*used}) == len(used)


# Parts on the task of the scale.

TASK_PARTS = {"within": PART, "on_task": PART | {"margin": 0.1, "data": "induction"}}


@pytest.mark.parametrize("scale", scales())
def test_task_of_a_scale_is_trained_beside_the_grid(scale):
    content = CLAIM | {"parts": TASK_PARTS}
    own = parse_claim("mine", content, scale, {})
    grid, _ = claim_grid(own, 6)
    assert grid.also == [own.tasks["induction"]]
    assert "data" in own.tasks["induction"]
    assert grid.fixed == claim_grid(parse_claim("mine", CLAIM, scale, {}), 6)[0].fixed


def test_grid_of_a_claim_without_a_part_on_the_task_has_no_task():
    own = claim()
    assert not own.tasks
    assert "data" not in own.grid


@pytest.mark.parametrize("words", [{"data": "wikitext2"}, {"train.steps": "90"}])
def test_claim_with_other_data_or_length_has_no_part_on_the_task(words):
    own = claim(parts=TASK_PARTS, words=words)
    assert [*own.parts] == ["within"]
    assert own.grid.items() >= words.items()
    assert not own.tasks


def test_claim_about_the_task_alone_trains_on_nothing_else():
    own = claim(parts={"on_task": TASK_PARTS["on_task"]})
    assert own.grid["data"] == "induction_short"
    assert not any(key.startswith("data.") and key != "data.test_tokens" for key in own.grid)
    assert not own.tasks


def test_parts_compare_arms_of_their_own_data(world):
    own = claim(parts=TASK_PARTS, seeds=3)
    given, words = claim_grid(dataclasses.replace(own, grid={"variant": "standard,no_q"}), 2)
    arms = world(*words, grid=given).manifest.arms
    found = find_comparisons(own, arms.values())
    assert [one.name for one in found] == ["within", "on_task"]
    for one, source in zip(found, ("text", "induction"), strict=True):
        (pair,) = one.pairs
        assert {arms[name].config.data.source for name in pair} == {source}


def test_pairs_are_named_by_the_settings_that_have_several_values():
    """A list is one value."""
    grid = {"optim.betas": "[0.9,0.999]", "model.heads": "2,4", "model.d_model": "range(8,24,8)"}
    values = {"optim.betas": "[0.9, 0.999]", "model.heads": 2, "model.d_model": 8}
    claim = SimpleNamespace(grid=grid, tasks={})
    assert shared_values(claim, "text", values, values) == ["heads=2", "d_model=8"]
    assert shared_values(claim, "text", values, values | {"model.heads": 4}) == ["d_model=8"]

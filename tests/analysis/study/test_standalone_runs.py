"""Runs without a sweep, read as one: their arms, pairs, and the commands that repeat them."""

import dataclasses
import functools
import json
import math
import shutil
from pathlib import Path

import pytest
import yaml

from qkablate.analysis.comparison.gaps import find_families
from qkablate.analysis.comparison.summary import describe_study
from qkablate.analysis.publication.unpack import unpack_archives
from qkablate.analysis.study.standalone_runs import read_standalone_runs
from qkablate.compose.configs import compose_jobs
from qkablate.config.schema import SeedsConfig
from qkablate.runs.lease import hold_lease
from qkablate.runs.run import Run, label, run_id
from qkablate.training.resolve import plan_run
from qkablate.training.result import make_base_result
from tests.analysis.worlds import describe_checked

PUBLISHED = Path(__file__).parents[3] / "docs" / "study" / "results"
LOSS = {"train": 2.0, "val": 2.1, "test": 2.0}


def typed(corpus, words):
    """Return the arguments of a small run, some of them replaced."""
    given = {word.partition("=")[0] for word in words}
    away = {"data.path", "data.cache"} if given & {"data"} else set()
    return [w for w in corpus if w.partition("=")[0] not in given | away] + [*words]


@pytest.fixture(scope="session")
def planned(corpus):
    """Plan a run as `qkablate train` does, each once."""
    return functools.cache(lambda *words: plan_run(compose_jobs(typed(corpus, words))[0].config))


def of_seed(own, seed):
    """Return the same plan with another seed."""
    seeds = dict.fromkeys(own.identity["seeds"], seed)
    config = dataclasses.replace(own.config, seed=seed, seeds=SeedsConfig(**seeds))
    known = own.identity | {"seed": seed, "seeds": seeds}
    run = Run(config.out, label(config), run_id(known))
    return dataclasses.replace(own, config=config, identity=known, run=run)


@pytest.fixture
def begin(planned):
    """Return a function that writes the files a run has before its first step."""

    def write(*words, out="outputs"):
        first, *others = words or ("",)
        if first.startswith("seed=") and "seeds." not in str(words):
            own = of_seed(planned(*others), int(first.removeprefix("seed=")))
        else:
            own = planned(*words)
        own = dataclasses.replace(own, run=Run(out, own.run.label, own.run.id))
        own.run.folder.mkdir(parents=True)
        own.run.freeze(own.config, own.identity)
        return own

    return write


@pytest.fixture
def run(begin):
    """Return a function that writes the folder of a finished run with a given loss."""

    def write(*words, test=2.0, out="outputs", **more):
        own = begin(*words, out=out)
        read = own.config.train.evaluate_test
        loss = {"train": test, "val": test + 0.1, "test": test if read else None}
        finish(own.run.folder, make_base_result(own, 1) | {"status": "done", "loss": loss} | more)
        return own.run.folder

    return write


def finish(folder, result):
    (folder / "result.json").write_text(json.dumps(result))


def of_seeds(run, seeds, *words, gap=0.0):
    return [run(f"seed={s}", *words, test=2 + s / 10 + gap) for s in seeds]


def change(folder, key, value):
    """Put another value into a frozen config."""
    path = folder / "config.yaml"
    content = yaml.safe_load(path.read_text())
    *parts, last = key.split(".")
    place = content
    for part in parts:
        place = place[part]
    place[last] = value
    path.write_text(yaml.safe_dump(content))


def by_name(study):
    return {entry.name: entry for entry in study.entries}


# What is one arm, and what is a pair.


@pytest.mark.parametrize(
    ("words", "section", "key"),
    [
        (["train.test_tokens=all"], "train", "test_tokens"),
        ([], "data", "extra_phrases"),
        (["data=commands", "data.phrases=1", "model.context=32"], "data", "extra_phrases"),
    ],
)
def test_run_of_a_time_without_a_key_has_its_default(run, words, section, key):
    """It shares an arm with a later run, and is a pair of a third."""
    folders = of_seeds(run, (0, 1), "variant=no_q", *words) + of_seeds(run, (0, 1), *words)
    path = folders[0] / "config.yaml"
    content = yaml.safe_load(path.read_text())
    del content[section][key]
    path.write_text(yaml.safe_dump(content))
    (family,) = find_families(read_standalone_runs(folders))
    (gap,) = family.gaps
    assert len(gap.pairs) == 2


def test_runs_of_an_arm_differ_in_their_seed_and_learning_rate_alone(run):
    folders = of_seeds(run, (0, 1), "variant=no_q", gap=0.3) + of_seeds(run, (0, 1))
    study = read_standalone_runs(folders)
    assert [*by_name(study)] == ["standard-d16-h2", "no_q-d16-h2"]
    assert study.is_complete
    assert study.expected == 4
    (family,) = find_families(study)
    (found,) = family.gaps
    assert [*found.pairs.values()] == pytest.approx([0.3, 0.3])
    describe_checked(study)
    study = read_standalone_runs(
        [*folders, run("variant=no_q", "seed=0", "optim.lr=2e-3", test=9.0)]
    )
    entries = by_name(study)
    assert [*entries] == [
        *("standard-d16-h2 lr 0.001", "no_q-d16-h2 lr 0.001", "no_q-d16-h2 lr 0.002")
    ]
    assert len({entry.arm.name for entry in study.entries}) == 2
    assert entries["no_q-d16-h2 lr 0.002"].sample.values == (9.0,)


def test_finetuned_runs_form_their_own_arm(run):
    """They share an arm whatever their parents are, without runs from fresh weights."""

    def begun(seed):
        known = {"run": f"parent{seed}", "id": f"{seed}" * 12, "weights": f"{seed}" * 64}
        return [f"init_from.{key}={value}" for key, value in (known | {"step": 12}).items()]

    folders = [
        run(f"seed={seed}", *variant, *start, test=2 + seed + gap)
        for seed in (0, 1)
        for variant, gap in ((["variant=no_q"], 0.25), ([], 0.0))
        for start in (begun(seed), [])
    ]
    study = read_standalone_runs(folders)
    names = ["standard-d16-h2", "no_q-d16-h2"]
    assert {*by_name(study)} == {*names, *(f"finetuned-{name}" for name in names)}
    assert study.unread == ()
    baselines = {entry.arm.name: entry.arm.baseline for entry in study.entries}
    assert baselines["finetuned-no_q-d16-h2"] == "finetuned-standard-d16-h2"
    assert baselines["no_q-d16-h2"] == "standard-d16-h2"
    gaps = [gap for family in find_families(study) for gap in family.gaps]
    assert [[*gap.pairs.values()] for gap in gaps] == [pytest.approx([0.25, 0.25])] * 2
    describe_checked(study)


def test_order_in_which_runs_are_named_changes_no_number(run):
    folders = of_seeds(run, range(3)) + of_seeds(run, range(3), "variant=no_q", gap=0.3)
    one, other = (
        describe_checked(read_standalone_runs(order)) for order in (folders, folders[::-1])
    )
    assert {arm.arm: arm.mean for arm in one.arms} == pytest.approx(
        {arm.arm: arm.mean for arm in other.arms}
    )
    assert one.gaps[0].interval == pytest.approx(other.gaps[0].interval)


@pytest.mark.parametrize(
    "other",
    [
        ("model.d_model=32",),
        ("train.steps=24",),
        ("optim.weight_decay=0",),
        ("data.tokenizer=chars",),
    ],
    ids=" ".join,
)
def test_baseline_has_equal_settings(run, other):
    study = read_standalone_runs([run("seed=0"), run("seed=0", "variant=no_q", *other)])
    assert len(study.entries) == 2
    assert find_families(study) == []
    study = read_standalone_runs(
        [run("seed=1"), run("seed=1", *other), run("seed=1", "variant=no_q", *other)]
    )
    (family,) = find_families(study)
    same = {entry.name: entry.arm.config for entry in study.entries}
    (found,) = family.gaps
    assert found.sample.n == 1
    for part in ("model", "train", "data"):
        own = getattr(same[found.arm.name], part)
        assert own == getattr(same[family.baseline.name], part)


@pytest.mark.parametrize(
    "words",
    [
        ("threads=2",),
        ("attention.kernel=math",),
        ("train.checkpoint_every=5",),
        ("data.cache=elsewhere",),
        ("tracking.tags=[mine]", "tracking.group=ours"),
    ],
    ids=" ".join,
)
def test_irrelevant_keys_separate_neither_arms_nor_pairs(run, words):
    standard = of_seeds(run, (0,)) + of_seeds(run, (1,), *words)
    (entry,) = read_standalone_runs(standard).entries
    assert entry.sample.n == 2
    (family,) = find_families(
        read_standalone_runs([*of_seeds(run, (5,)), *of_seeds(run, (5,), "variant=no_q", *words)])
    )
    assert family.gaps[0].sample.n == 1


def test_baseline_has_the_nearest_mlp_width(run):
    ratios = {f"standard {ratio}": run(f"model.mlp_ratio={ratio}") for ratio in (2.0, 4.0)}
    wide = run("variant=no_q", "model.mlp_ratio=4.3")
    study = read_standalone_runs([*ratios.values(), wide])
    (family,) = find_families(study)
    assert family.baseline.arm.config.model.mlp_ratio == 4.0
    assert len(study.entries) == 3


def test_seeds_that_are_given_apart_make_a_pair(run):
    folders = [
        run(f"variant={name}", "seed=0", f"seeds.init={init}", test=2 + init)
        for name in ("standard", "no_q")
        for init in (1, 2)
    ]
    study = read_standalone_runs(folders)
    (family,) = find_families(study)
    assert len(family.gaps[0].pairs) == 2
    assert {record.seed_label for record in study.records} == {"s0 seeds.init=1", "s0 seeds.init=2"}


def test_without_standard_there_is_no_gap(run):
    study = read_standalone_runs([run("variant=no_q"), run("variant=shared_qk")])
    assert len(study.entries) == 2
    assert describe_checked(study).gaps == []


def test_similar_arms_are_named_by_their_differences(run):
    folders = [run(), run("model.dropout=0.1"), run("optim.weight_decay=0", "train.steps=24")]
    folders += [run("model.d_model=32")]
    names = [*by_name(read_standalone_runs(folders))]
    assert len({*names}) == 4
    assert names[3] == "standard-d32-h2"  # alone with its name
    assert all(name.startswith("standard-d16-h2-") for name in names[:3])
    (dropped,) = [name for name in names if "dropout=0.1" in name]
    (decayed,) = [name for name in names if "weight_decay=0" in name]
    assert "steps=24" in decayed
    assert "steps=12" in dropped


TASK = ("data.path=null", "data.cache=null", "data.tokenizer=null", "data.vocab_size=16")


def test_data_that_their_name_tells_apart_are_named_by_it(run):
    short = ("data=induction", *TASK, "data.segment=4")
    folders = [run("data=recall", *TASK, "data.pairs=2"), run(*short)]
    names = ["standard-d16-h2-data=recall", "standard-d16-h2-data=induction"]
    assert [*by_name(read_standalone_runs(folders))] == names
    folders += [run(*short[:-1], "data.segment=5")]
    names = [*by_name(read_standalone_runs(folders))]
    assert all("segment=" in name for name in names[1:])


def test_arms_of_other_forms_and_sites_have_names_of_their_own(run):
    pairs = ("data=reverse", "data.val_tokens=256", "data.test_tokens=256", "model.context=8")
    translator = (*pairs, "model.form=encoder_decoder")
    folders = [
        run(*pairs, "model.form=encoder"),
        run(*translator),
        run(*translator, "variant=merged_w"),
        run(*translator, "variant=merged_w", "variant.sites=encoder+cross"),
    ]
    entries = by_name(read_standalone_runs(folders))
    assert {*entries} >= {"merged_w-d16-h2", "merged_w_encoder_cross-d16-h2"}
    assert len(entries) == 4
    assert sum("form=encoder_decoder" in name for name in entries) == 1  # the other standard
    limited = entries["merged_w_encoder_cross-d16-h2"].arm
    assert limited.overrides["variant"] == "merged_w"
    assert limited.overrides["variant.sites"] == "encoder+cross"
    assert limited.baseline == entries["merged_w-d16-h2"].arm.baseline is not None


def test_different_runs_of_one_seed_are_all_listed(run, tmp_path):
    """Another text under the same path makes another run with the same config."""
    path = tmp_path / "text.txt"
    folders = []
    for number, text in enumerate(("a cat sat\n", "the dogs ran\n")):
        path.write_text(text * 500)
        folders.append(run(f"data.path={path}", f"data.cache={tmp_path / str(number)}"))
    assert folders[0] != folders[1]
    study = read_standalone_runs(folders)
    assert {record.folder for record in study.records} == {*folders}
    assert study.is_complete


def test_run_that_is_named_twice_counts_once(run, tmp_path):
    folder = run()
    shutil.copytree(folder, tmp_path / "elsewhere" / folder.name)
    study = read_standalone_runs([folder, folder, tmp_path / "elsewhere" / folder.name])
    assert len(study.records) == study.expected == 1
    assert study.is_complete


# What the folders say.


def test_sizes_are_those_that_runs_recorded(begin, run):
    own = begin("variant=no_q", "seed=3")
    (entry,) = read_standalone_runs([own.run.folder]).entries
    assert (entry.arm.params, entry.arm.flops) == (0, 0.0)
    folder = run("variant=no_q", "seed=4")
    for order in ([own.run.folder, folder], [folder, own.run.folder]):
        (entry,) = read_standalone_runs(order).entries
        assert entry.arm.total_params == own.params["total"]
        assert 0 < entry.arm.params < entry.arm.total_params
        assert entry.arm.flops == own.flops_per_token
        assert entry.arm.tokens == 12 * 2 * 16


def test_statuses_are_those_of_a_sweep(begin, run):
    folders = of_seeds(run, range(5))
    none = {"train": None, "val": None, "test": None}
    result = json.loads((folders[0] / "result.json").read_text())
    failed = {"status": "failed", "error": "ValueError: no queries today", "loss": none}
    finish(folders[1], json.loads((folders[1] / "result.json").read_text()) | failed)
    own = json.loads((folders[2] / "result.json").read_text())
    finish(folders[2], own | {"status": "diverged", "diverged_at": 7, "loss": none})
    (folders[3] / "result.json").unlink()
    (folders[4] / "result.json").write_text(json.dumps(result)[:40])
    running = begin("seed=9").run.folder
    with hold_lease(running):
        study = read_standalone_runs([*folders, running])
    found = {record.seed_label: record for record in study.records}
    assert [found[f"s{s}"].status for s in (0, 1, 2, 3, 4, 9)] == [
        *("done", "failed", "diverged", "interrupted", "damaged", "running")
    ]
    assert found["s1"].reason == "ValueError: no queries today"
    assert "step 7" in found["s2"].reason
    assert (study.ended, study.expected, study.is_complete) == (2, 6, False)
    assert study.entries[0].sample.values == (2.0,)
    describe_checked(study)


def test_result_of_another_run_gives_no_loss(run):
    one, other, last = of_seeds(run, range(3))
    shutil.copy(one / "result.json", other / "result.json")
    study = read_standalone_runs([one, other, last])
    (spoilt,) = [record for record in study.records if record.folder == other]
    assert spoilt.status in ("damaged", "interrupted")
    assert spoilt.loss is spoilt.val is None
    assert study.entries[0].sample.values == pytest.approx((2.0, 2.2))
    assert not study.is_complete


@pytest.mark.slow
def test_tuning_runs_are_listed_separately(run):
    rates = (5e-4, 1e-3, 2e-3)
    tuning = [
        run(f"variant={name}", f"optim.lr={r}", "train.evaluate_test=false", test=2 + abs(r - 1e-3))
        for name in ("standard", "no_q")
        for r in rates
    ]
    final = [run(f"variant={name}", "seed=7", test=2.5) for name in ("standard", "no_q")]
    study = read_standalone_runs([*tuning, *final])
    assert {(arm, rates.lr) for arm, rates in study.tuning} == {
        (f"{name}-d16-h2", rate) for name in ("standard", "no_q") for rate in rates
    }
    assert [entry.sample.values for entry in study.entries] == [(2.5,), (2.5,)]
    assert study.expected == 8
    assert study.is_complete
    rates_found = describe_checked(study).learning_rates
    assert [one.best.lr for one in rates_found] == [1e-3, 1e-3]
    alone = read_standalone_runs(tuning)
    assert alone.records == []
    assert alone.is_complete
    describe_checked(alone)


# What cannot be read.

BOMB = "a: &a [x, x]\nb: &b [*a, *a]\nc: &c [*b, *b]\nd: [*c, *c]\n"
NO_CONFIGS = {
    "empty": b"",
    "a list": b"[1, 2]",
    "a number": b"3",
    "half": b"a: [",
    "an object": b"!!python/object/apply:os.system ['true']",
    "deep": b"a: " + b"[" * 20_000,
    "binary": bytes(range(256)),
    "zero": b"\0",
    "another map": b"seed: 0\n",
    "a bomb of aliases": BOMB.encode(),
}


@pytest.mark.parametrize("content", NO_CONFIGS.values(), ids=NO_CONFIGS.keys())
def test_invalid_config_is_named_and_other_runs_are_kept(run, content):
    good, bad = of_seeds(run, (0, 1))
    (bad / "config.yaml").write_bytes(content)
    for order in ([good, bad], [bad, good]):
        study = read_standalone_runs(order)
        assert [record.folder for record in study.records] == [good]
        (said,) = study.unread
        assert said.startswith(f"{bad.name}: its config.yaml cannot be read")
        assert said.count("\n") == 0
        describe_checked(study)


def test_missing_config_is_named(run, tmp_path):
    folder = run()
    (tmp_path / "nothing").mkdir()
    study = read_standalone_runs([folder, tmp_path / "nothing", tmp_path / "nowhere"])
    assert len(study.records) == 1
    assert [line.partition(":")[0] for line in study.unread] == ["nothing", "nowhere"]


def test_interpolations_are_rejected(run, monkeypatch):
    monkeypatch.setenv("SECRET", "a key of somebody's")
    good, *bad = of_seeds(run, range(4))
    change(bad[0], "data.path", "${oc.env:SECRET}")
    change(bad[1], "variant.name", "${seed}")
    change(bad[2], "tracking.tags", ["${oc.env:SECRET}"])
    study = read_standalone_runs([*bad, good])
    assert len(study.unread) == 3
    assert [record.folder for record in study.records] == [good]
    assert "a key of somebody's" not in json.dumps(
        [dataclasses.asdict(describe_study(study)), study.unread]
    )


ODD = (None, math.nan, math.inf, -1, 10**30, "x", [[1]], {}, "\u202e<script>")
KEYS = [
    *("seed", "seeds", "seeds.init", "optim.lr", "id", "identity", "identity.vocabulary"),
    *(
        "identity.circuits_from_outside",
        "variant",
        "variant.name",
        "train.steps",
        "train.evaluate_test",
    ),
]


@pytest.mark.exhaustive
@pytest.mark.parametrize("key", KEYS)
def test_any_value_in_a_config_is_read_or_named(run, key):
    good, bad = of_seeds(run, (0, 1))
    whole = (bad / "config.yaml").read_text()
    for value in ODD:
        change(bad, key, value)
        study = read_standalone_runs([good, bad])
        tuning = [record for by_seed in study.tuning.values() for record in by_seed.values()]
        assert good in {record.folder for record in study.records}, value
        assert len(study.records) + len(tuning) + len(study.unread) == 2, value
        describe_checked(study)
        (bad / "config.yaml").write_text(whole)


def test_no_runs_give_an_empty_study(tmp_path):
    (tmp_path / "nothing").mkdir()
    for folders in ([], [tmp_path / "nothing"]):
        study = read_standalone_runs(folders)
        assert study.entries == study.records == []
        assert (study.expected, study.ended) == (0, 0)
        assert len(study.unread) == len(folders)
        found = describe_checked(study)
        assert found.arms == found.gaps == []


# The command that repeats a run.

WORDS = [
    (),
    ("variant=no_q", "seed=5", "seeds.init=7"),
    ("variant=merged_w", "variant.init=naive", "variant.lr=same"),
    ("variant=low_rank_w", "variant.rank=2"),
    ("variant=merged_w", "variant.rope_dims=4", "model.position=rope"),
    ("variant=mla", "model.position=rope"),
    ("variant=gqa", "model.heads=4"),
    ("variant=collaborative",),
    ("variant.qk=no_q", "variant.ov=no_o"),
    ("variant=no_q", "variant.norm=qk", "variant.mask_self=true"),
    ("variant=no_q", "variant.name=mine"),
    ("model.mlp_ratio=2.5", "model.dropout=0.1", "model.bias=true", "model.position=rope"),
    ("model.init=linear", "model.norm=none", "model.attention_skip=false", "model.mlp_ratio=0"),
    ("optim.betas=[0.8,0.99]", "optim.clip=0", "optim.lr=3e-7", "optim.warmup=3"),
    ("optim.schedule=wsd",),
    ("optim.schedule=wsd", "optim.cooldown=0.5", "optim.lr_final=0"),
    ("train.grad_accum=2", "train.eval_every=3", "train.checkpoint_every=2"),
    ("train.evaluate_test=false",),
    ("attention.kernel=math", "precision=bf16", "deterministic=true", "compile=false"),
    ("data.tokenizer=bpe", "data.vocab_size=300", "data.max_tokens=5000"),
    ("data=copy", "data.copy_length=4", "data.val_tokens=1024", "data.test_tokens=1024"),
]


def repeated(corpus, study):
    """Return the plan of the command that repeats the only run of a study."""
    tuning = [record for by_seed in study.tuning.values() for record in by_seed.values()]
    (record,) = [*study.records, *tuning]
    words = study.overrides_of(record.run)
    cached = [word for word in corpus if word.startswith("data.cache=")]
    is_text = any(word == "data=text" for word in words)
    return plan_run(compose_jobs([*words, *cached * is_text])[0].config)


@pytest.mark.slow
@pytest.mark.parametrize("words", WORDS, ids=lambda words: " ".join(words) or "as it is")
def test_command_repeats_the_run(begin, corpus, words):
    given = begin(*words)
    study = read_standalone_runs([given.run.folder])
    assert study.unread == ()
    found = repeated(corpus, study)
    assert found.identity == given.identity
    assert found.run.id == given.run.id
    assert found.config.variant.name == given.config.variant.name


@pytest.mark.slow
def test_command_repeats_a_run_with_a_circuit_from_outside(begin, corpus, tmp_path):
    path = tmp_path / "own_circuit.py"
    path.write_text(
        "from qkablate.attention import QK, apply_matrix, empty_matrix, split_heads\n\n\n"
        "class Own(QK):\n"
        '    """Queries and keys."""\n\n'
        '    equation, params, match = "B_h = W_q W_kᵀ", "2 d²", "none"\n\n'
        "    def __init__(self, spec):\n"
        "        super().__init__(spec)\n"
        "        self.w_q = empty_matrix(spec.d_model, spec.d_model)\n"
        "        self.w_k = empty_matrix(spec.d_model, spec.d_model)\n\n"
        "    def queries(self, x_BTD):\n"
        "        return split_heads(apply_matrix(x_BTD, self.w_q), self.spec.heads)\n\n"
        "    def keys(self, y_BSD):\n"
        "        return split_heads(apply_matrix(y_BSD, self.w_k), self.spec.heads)\n"
    )
    given = begin(f"variant.file='{path}'")
    found = repeated(corpus, read_standalone_runs([given.run.folder]))
    assert found.run.id == given.run.id


@pytest.mark.parametrize(
    "name",
    [
        *("a b.txt", "a'b.txt", 'a"b.txt', "a\\b.txt", "a=b,c.txt", "ä∑.txt", "[a]{b}.txt"),
        *("null", "true", "1e-3", "a\tb.txt"),
    ],
)
def test_command_names_the_file_however_it_is_called(begin, corpus, name):
    Path(name).write_text("the cat sat on the mat\n" * 400)
    given = begin()
    path = given.run.folder
    change(path, "data.path", name)
    study = read_standalone_runs([path])
    words = study.overrides_of(study.records[0].run)
    assert compose_jobs(words)[0].config.data.path == name


def test_command_includes_data_settings(begin, corpus):
    """Repeat a data set of the Hub with a regular expression for document starts."""
    given = begin()
    path = given.run.folder
    content = yaml.safe_load((path / "config.yaml").read_text())
    (hub,) = compose_jobs(["data=wikitext2", "data.document_start='^ = [^=]\\S+ = $'"])
    content["data"] = dataclasses.asdict(hub.config.data)
    (path / "config.yaml").write_text(yaml.safe_dump(content))
    study = read_standalone_runs([path])
    (job,) = compose_jobs(study.overrides_of(study.records[0].run))
    own, told = dataclasses.asdict(hub.config.data), dataclasses.asdict(job.config.data)
    assert {**told, "cache": None} == {**own, "cache": None}


# As `qkablate train` leaves them.


@pytest.mark.slow
def test_trained_runs_are_a_pair(train, tmp_path):
    folders = []
    for name in ("standard", "no_q"):
        (tmp_path / name).mkdir()
        words = [f"variant={name}", "train.steps=4", "train.batch_size=2", "train.eval_every=2"]
        folders.append(train(tmp_path / name, *words))
    # The two lie in folders of their own, as the text does: it is the same.
    change(
        folders[1],
        "data.path",
        yaml.safe_load((folders[0] / "config.yaml").read_text())["data"]["path"],
    )
    study = read_standalone_runs(folders)
    assert study.unread == ()
    (family,) = find_families(study)
    results = [json.loads((folder / "result.json").read_text()) for folder in folders]
    gap = results[1]["loss"]["test"] - results[0]["loss"]["test"]
    assert family.gaps[0].sample.values == pytest.approx((gap,))
    standard, no_q = study.entries
    assert standard.arm.params > no_q.arm.params > 0
    assert standard.arm.flops > no_q.arm.flops > 0
    assert all(record.loss_curves["val/loss"] for record in study.records)
    states = {check.name: check.state for check in describe_checked(study).gaps[0].audit}
    assert states["pairs"] == "warning"  # one pair
    assert all(states[name] == "ok" for name in ("runs", "data", "code", "machine", "precision"))


def test_published_runs_of_a_task_are_read():
    """An archive has no folders of its machine, and so a cache, also of data that are generated."""
    archive = next(PUBLISHED.glob("directed-*.json.gz"))
    folders = sorted((unpack_archives([archive]) / "runs").iterdir())[:2]
    study = read_standalone_runs(folders)
    assert not study.unread
    assert len(study.records) == 2

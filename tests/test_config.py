"""The config: options compose, `auto` is resolved, and the table of keys is complete."""

import dataclasses
import itertools
import re

import pytest
from hydra import compose, initialize_config_dir

from qkablate.compose.configs import make_config, open_hydra
from qkablate.compose.register import register
from qkablate.compose.words import split_words
from qkablate.config import (
    KEYS,
    Config,
    DataConfig,
    Role,
    SweepConfig,
    conf_dir,
    flatten,
    from_hydra,
    from_plain,
    has_role,
    is_key,
    names_of,
    variants,
)
from qkablate.config import keys as config_keys
from qkablate.config.data import source_words
from qkablate.config.sweep import SWEEP_KEYS
from qkablate.config.table import RENAMED
from qkablate.errors import UserError
from tests.cli.helpers import assert_refused

# Groups of sweeps (tests/compose/test_grid.py), engines (tests/sweeps) and claims
# (tests/analysis/claims).
OTHERS = ("control", "engine", "sweep", "claim", "scale")
OPTIONS = [
    f"{group.name}={option.stem}"
    for group in sorted(conf_dir().iterdir())
    if group.is_dir() and group.name not in OTHERS
    for option in sorted(group.glob("*.yaml"))
]


def composed(*overrides: str):
    register()
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        return compose("train", list(overrides))


def loaded(*overrides: str) -> Config:
    return from_hydra(composed(*overrides))


def checked(*overrides: str) -> Config:
    """Return the same config as `loaded`, without a composition by Hydra for each."""
    with open_hydra():
        return make_config(split_words([*overrides]))


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_composes(option):
    more = {"data=text": ["data.path=x"], "data=hub": ["data.name=x"]}
    more["data=pairs"] = ["data.path=x", "data.source_field=a", "data.target_field=b"]
    words = [option, *more.get(option, [])]
    config = loaded(*words)
    assert isinstance(config.train.steps, int)
    assert config == checked(*words)


def test_all_groups_exist():
    assert {option.split("=")[0] for option in OPTIONS} == {"variant", "model", "data", "optim"}
    assert {path.name for path in conf_dir().iterdir() if path.is_dir()} == {
        *("variant", "model", "data", "optim", *OTHERS)
    }
    assert set(variants()) >= {"standard", "merged_w", "shared_qk", "no_q"}


def test_defaults_in_yaml_equal_those_of_the_schema():
    """conf/ and Config() have the same values."""
    from omegaconf import OmegaConf

    yaml = OmegaConf.to_container(composed(), resolve=True)
    yaml.pop("hydra", None)
    plain = flatten(Config())
    assert set(KEYS) == set(plain)
    for key, value in plain.items():
        assert OmegaConf.select(OmegaConf.create(yaml), key) == value, key


# The table of keys.


@pytest.mark.parametrize(("name", "info"), [*KEYS.items(), *SWEEP_KEYS.items()])
def test_every_key_has_help_and_a_role(name, info):
    assert info.help
    assert not info.help.endswith(".")
    assert info.role


def test_every_key_that_is_not_in_the_identity_is_accounted_for():
    """The id hashes what the key leads to, or the key changes no number; two are explained here."""
    others = {
        key for key in KEYS if not KEYS[key].role & (Role.IDENTITY | Role.CONTENT | Role.LOCAL)
    }
    assert others == {
        "variant.name",  # a label
        "train.fsdp",  # distributes the same computation
    }


def test_roles_do_not_contradict_each_other():
    for name, info in KEYS.items():
        assert not (info.role & Role.RUN and info.role & Role.ARM), name
        assert not (info.role & Role.LOCAL and info.role & (Role.IDENTITY | Role.ARM)), name
        assert not info.role & (Role.GRID | Role.LAUNCH), name
    assert all(info.role in (Role.GRID, Role.LAUNCH) for info in SWEEP_KEYS.values())


def test_the_keys_of_each_role():
    assert {*names_of(Role.RUN)} == {"seed", "seeds", "optim.lr"}
    assert {*names_of(Role.VARIANT)} == {
        f"variant.{key}"
        for key in (
            *(
                "name",
                "qk",
                "ov",
                "norm",
                "mask_self",
                "rank",
                "groups",
                "rope_dims",
                "sites",
                "file",
            ),
        )
    }
    assert {*names_of(Role.ONE_PER_SWEEP)} == {
        *("out", "device", "threads", "tracking", "diagnostics", "train.vmap")
    }
    assert {*names_of(Role.PAIR_FREE)} == {"threads", "attention", "train.eval_every"}
    assert {*names_of(Role.LOCAL)} == {
        *("out", "threads", "tracking", "diagnostics", "data.cache"),
        *("train.checkpoint_every", "train.checkpoint_activations"),
    }
    assert {*names_of(Role.FINETUNE)} == {
        *("variant", "train", "optim", "attention", "diagnostics", "tracking", "device"),
        *("precision", "matmul", "compile", "threads", "deterministic", "out", "seeds.data"),
        *("seeds.dropout", "data.cache", "data.path", "data.name", "data.files"),
        *("data.source_field", "data.target_field"),
    }
    assert has_role("tracking", Role.LOCAL)
    assert not has_role("train", Role.LOCAL)
    assert has_role("engine.sbatch.qos", Role.LAUNCH)
    assert not has_role("nope", Role.LOCAL)


def test_a_key_without_a_role_is_rejected():
    with pytest.raises(TypeError, match="role"):
        config_keys.key(3, "a help without a role")

    @dataclasses.dataclass
    class Forgotten:
        known: int = config_keys.key(1, "declared", Role.LOCAL)
        plain: int = 3

    with pytest.raises(TypeError, match=r"plain of Forgotten is not declared with key\(\)"):
        config_keys.key_table(Forgotten)


@pytest.mark.parametrize("name", [name for name, info in KEYS.items() if info.choices])
def test_help_names_every_choice(name):
    if name != "data.source":  # a group: --help lists its options
        for choice in KEYS[name].choices:
            assert choice in KEYS[name].help or choice == "auto", choice


def test_every_number_has_bounds():
    table = {**KEYS, **SWEEP_KEYS}
    for config in (Config, SweepConfig):
        for name, kind in leaf_types(config):
            if re.search(r"\b(int|float)\b", str(kind)):
                assert table[name].bounds is not None, name
            else:
                assert table[name].bounds is None, name


def leaf_types(config, prefix=""):
    for item in dataclasses.fields(config):
        if dataclasses.is_dataclass(item.type):
            yield from leaf_types(item.type, f"{prefix}{item.name}.")
        else:
            yield prefix + item.name, item.type


COMMENTED = {
    "train.yaml": (KEYS, ""),
    "optim/adamw.yaml": (KEYS, "optim."),
    "sweep.yaml": (SWEEP_KEYS, ""),
    "sweep/grid.yaml": (SWEEP_KEYS, "sweep."),
    "control/params.yaml": (SWEEP_KEYS, "control."),
    "control/flops.yaml": (SWEEP_KEYS, "control."),
    "engine/slurm.yaml": (SWEEP_KEYS, "engine."),
    "engine/ray.yaml": (SWEEP_KEYS, "engine."),
}


@pytest.mark.parametrize("file", COMMENTED)
def test_comments_are_the_help_of_the_keys(file):
    table, prefix = COMMENTED[file]
    text, seen, section = (conf_dir() / file).read_text(), set(), ""
    for line in text.partition("\nhydra:")[0].splitlines():
        if match := re.fullmatch(r"( *)(\w+):(?: (.*?))?(?: ?# (.*))?", line):
            indent, name, value, comment = match.groups()
            section = section if indent else name
            full = prefix + (f"{section}.{name}" if indent else name)
            if full in table and full != "engine.name":
                assert comment == table[full].help, full
                assert value
                seen.add(full)
    if file == "train.yaml":
        elsewhere = ("variant.", "model.", "data.", "optim.")
        assert seen == {name for name in KEYS if not name.startswith(elsewhere)}
    elif file == "optim/adamw.yaml":
        assert seen == {name for name in KEYS if name.startswith("optim.")}
    assert seen


RENAMED_WORDS = [
    ("products=torch", "matmul"),
    ("start.run=x", "init_from.run"),
    ("train.shard=true", "train.fsdp"),
    ("shard=true", "train.fsdp"),
    ("train.accumulate=2", "train.grad_accum"),
    ("train.read_test=false", "train.evaluate_test"),
    ("diagnose.every=3", "diagnostics.every"),
    ("track.wandb=disabled", "tracking.wandb"),
    ("data.payload=3", "data.copy_length"),
]
OF_OTHER_VERBS = [
    ("train", "control.knob=mlp", "is now control.adjust, a key of qkablate sweep"),
    ("train", "per_gpu=2", "is now runs_per_gpu, a key of qkablate sweep"),
    ("train", "heal.steps=3", "is now finetune.steps, a key of qkablate project"),
    ("cost", "heal.steps=3", "is now finetune.steps, a key of qkablate project"),
    ("train", "sweep.where=[a]", "is now sweep.filter, a key of qkablate sweep"),
    ("train", "finetune.steps=3", "is a key of qkablate project"),
    ("train", "control=params", "is a key of qkablate sweep"),
    ("train", "engine.cpus=2", "is a key of qkablate sweep"),
    ("train", "scale=gpu", "is a key of qkablate claim run"),
    ("train", "nothing=1", "there is no such key"),
]


@pytest.mark.parametrize(
    ("verb", "word", "name"),
    [
        *(("cost", *renamed) for renamed in RENAMED_WORDS),
        *itertools.product(["train", "sweep"], ["start.run=x"], ["init_from.run"]),
        *itertools.product(["train", "sweep"], ["shard=true"], ["train.fsdp"]),
        ("sweep", "control.knob=mlp", "control.adjust"),
        ("sweep", "per_gpu=2", "runs_per_gpu"),
        ("sweep", "sweep.where=[a]", "sweep.filter"),
    ],
)
def test_an_old_key_is_rejected_with_its_new_name(qkablate, verb, word, name):
    done = qkablate(verb, *["seed=0"] * (verb == "sweep"), word)
    assert done.code == 2
    old = word.partition("=")[0]
    assert done.err == f"qkablate: {old}: there is no such key (nearest: {name})\n"


@pytest.mark.parametrize(("verb", "word", "text"), OF_OTHER_VERBS)
def test_a_key_of_another_verb_is_rejected_with_the_verb(qkablate, verb, word, text):
    done = qkablate(verb, word)
    assert done.code == 2
    assert done.err == f"qkablate: {word.partition('=')[0]}: {text}\n"


@pytest.mark.parametrize("word", ["seed=1e400", "seed=1,1_0.5E+400", "optim.lr=1e400"])
def test_an_infinite_number_is_quoted_as_typed(qkablate, word):
    done = qkablate("train", *["-m"] * ("," in word), word)
    assert done.code == 2
    key, _, value = word.partition("=")
    assert done.err.startswith(f"qkablate: {key}: {value.rpartition(',')[2]} is not ")


def test_renamed_keys_exist():
    assert {"finetune"} == {new for new in RENAMED.values() if not is_key(new) and new not in KEYS}
    assert not any(is_key(old) for old in RENAMED)


def test_auto_is_resolved():
    config = checked("train.tokens=100_000")
    assert (config.train.steps, config.train.tokens) == (98, None)  # 16 windows of 64 a step
    assert config.optim.warmup == 19
    assert checked().train.steps == 1000
    assert checked("train.steps=1").optim.warmup == 0
    assert checked("seed=7", "seeds.data=1").seeds.data == 1
    assert checked("seed=7").seeds.init == 7
    assert checked("train.eval_every=40").diagnostics.every == 40
    assert checked("train.steps=700").diagnostics.every == 350
    assert checked("train.eval_every=40", "diagnostics.every=0").diagnostics.every == 0


_TRANSLATOR = ["model=nano_translator", "data=reverse"]


@pytest.mark.parametrize(
    ("words", "every", "val", "test"),
    [
        ([], 250, 29_696, 65_536),  # the whole test split
        (["train.steps=100"], 100, 3072, 5120),
        (["train.steps=300"], 300, 16_384, 31_744),
        (["train.steps=700"], 350, 31_744, 65_536),
        (["train.steps=10000", "train.batch_size=32"], 250, 65_536, 65_536),  # both
        (["train.steps=10000", "data.val_tokens=655360"], 250, 43_008, 65_536),
        (["train.steps=2"], 2, 512, 1024),
        (["train.steps=2", "data.val_tokens=100", "data.test_tokens=200"], 2, 100, 200),
        (["train.steps=100", "train.eval_every=10"], 10, 3072, 5120),  # a pair of eval_every=100
        (["train.steps=100", "train.eval_tokens=all"], 100, 65_536, 65_536),
        (["train.steps=100", "train.test_tokens=all"], 100, 3072, 65_536),
        (["train.steps=100", "train.test_tokens=3000"], 100, 3072, 3000),
        (["train.eval_tokens=2048"], 250, 2048, 65_536),
        (["train.eval_tokens=70000", "train.test_tokens=70000"], 250, 65_536, 65_536),
        ([*_TRANSLATOR, "train.steps=100"], 100, 512, 1024),
        ([*_TRANSLATOR, "train.steps=2000"], 250, 4096, 65_536),
    ],
)
def test_evaluations_are_evenly_spaced_and_take_a_tenth(words, every, val, test):
    train = checked(*words).train
    assert (train.eval_every, train.eval_tokens, train.test_tokens) == (every, val, test)


def test_longer_runs_read_as_much_of_the_test_split_or_more():
    steps = [*range(1, 100), *range(100, 1001, 9)]
    budgets = [checked(f"train.steps={n}").train.test_tokens for n in steps]
    falls = [n for n, (a, b) in zip(steps[1:], itertools.pairwise(budgets), strict=True) if b < a]
    assert not falls


@pytest.mark.parametrize("load_words", [checked, loaded])
def test_a_number_or_a_word_may_be_a_whole_number(load_words):
    words = ["variant=merged_w", "variant.lr=2", "optim.schedule=wsd", "optim.cooldown=1"]
    config = load_words(*words)
    values = (config.variant.lr, config.optim.cooldown)
    assert values == (2.0, 1.0)
    assert set(map(type, values)) == {float}  # `2` and `2.0` have one id


@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        (["variant=merged_w"], "merged_w"),
        (["variant=standard", "variant.qk=merged"], "merged_w"),
        (["variant=merged_w", "variant.ov=no_o"], "merged+no_o"),
        (["variant=merged_w", "variant.name=mine"], "mine"),
    ],
)
def test_variant_name_describes_its_circuits(overrides, name):
    assert checked(*overrides).variant.name == name


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("+zzz=3", "zzz: there is no such key"),
        ("+model.d_modl=3", "model.d_modl: there is no such key (nearest: model.d_model)"),
        ("model.heads=3", "model.heads: 3 does not divide model.d_model=128 (allowed: 1, 2, 4, 8"),
        ("model.heads=0", "model.heads: 0 is not a number from 1 to"),
        ("train.steps=0", "train.steps: 0 is not auto, or 1 or more"),
        ("train.steps=soon", "train.steps: 'soon' is not auto, or 1 or more"),
        ("train.batch_size=0", "train.batch_size: 0 is not a number from 1 to"),
        ("optim.lr=nan", "optim.lr: nan is not a number from 1e-12 to 1000"),
        ("optim.lr=inf", "optim.lr: inf is not"),
        ("optim.lr=-1", "optim.lr: -1.0 is not"),
        ("optim.lr=0", "optim.lr: 0.0 is not"),
        ("optim.warmup=1000", "optim.warmup: 1000 is not below the 1000 steps"),
        ("variant.lr=true", "variant.lr: 'True' is not a number or between or matched or same"),
        ("optim.cooldown=[1]", "optim.cooldown: '[1]' is not a number or auto"),
        ("optim.momentum=1", "optim.momentum: "),
        (
            "optim.momentum=0.9",
            "optim.momentum: has no effect with optim.optimizer=adamw, only with muon",
        ),
        (
            "optim.optimizer=moun",
            "optim.optimizer: 'moun' (nearest: muon) is not one of adamw, muon",
        ),
        ("model.embedding_std=-1", "model.embedding_std: -1.0 is not a number from 0 to 1000"),
        (
            "optim.cooldown=0.3",
            "optim.cooldown: has no effect with optim.schedule=cosine, only with wsd",
        ),
        (
            "optim={schedule: wsd, cooldown: 0, lr_final: 0.2}",
            "optim.lr_final: with optim.cooldown=0 the run ends at its peak",
        ),
        ("optim.betas=[0.9]", "optim.betas: [0.9] are not two numbers"),
        ("optim.betas=[[0.9],0.9]", "optim.betas: [[0.9], 0.9] are not two numbers"),
        ("optim.betas=[0.9,1.0]", "optim.betas: [0.9, 1.0] are not two numbers"),
        ("optim.schedule=cosin", "'cosin' (nearest: cosine) is not one of cosine, wsd, constant"),
        ("variant.init=matchd", "'matchd' (nearest: matched) is not one of matched, naive, symm"),
        ("precision=fp8", "precision: 'fp8' is not one of auto, fp32, bf16, fp16"),
        ("device=gpu", "device: 'gpu' (nearest: cuda) is not one of auto, cpu, cuda, cuda:N, mps"),
        ("device=cuda:x", "device: 'cuda:x' (nearest: cuda:N) is not one of"),
        ("compile=2", "compile: '2' is not true, false, graphs or auto"),
        ("compile=maybe", "compile: 'maybe' is not one of auto, true, false"),
        ("threads=0", "threads: 0 is not auto, or a number from 1"),
        ("seed=-1", "seed: -1 is not 0 or more"),
        ("diagnostics.every=-1", "diagnostics.every: -1 is not auto, or 0 or more"),
        ("data.path=x", "data.path: data=stdlib has no such key (write data=text data.path=…)"),
        ("data=text", "data.path: data=text needs data.path=FILE_OR_FOLDER"),
        ("data=pairs", "data.path: data=pairs needs either data.path=FILE_OR_FOLDER or data.name="),
        ("data=hub", "data.name: data=hub needs data.name=NAME_ON_THE_HUB"),
        (
            "data.tokenizer=byte",
            "'byte' (nearest: bytes) is not one of bytes, chars, bpe, gpt2, cl100k_base, o2",
        ),
        ("data.tokenizer=null", "data.tokenizer: data=stdlib needs a value"),
        ("data.tokenizer=words", "data.tokenizer: words given, but data=stdlib has no tags of wo"),
        ("data.objective=mml", "data.objective: 'mml' (nearest: mlm) is not one of causal, mlm"),
        ("data.vocab_size=512", "data.vocab_size: only data.tokenizer=bpe and words have this key"),
        ("data.pairs=4", "data.pairs: data=stdlib has no such key; it has tokenizer, vocab_size"),
        ("data.max_tokens=0", "data.max_tokens: 0 is not 1 or more"),
        ("data.cycle=2", "data.cycle: 2 is not"),
        ("model.mlp=swish", "is not one of gelu, gelu_tanh, relu2, swiglu"),
        ("model.mlp_ratio=0.001", "leaves the MLP without a single unit (0 removes the MLP)"),
        (
            "tracking.wandb=of",
            "tracking.wandb: 'of' (nearest: disabled) is not one of auto, online, offline,",
        ),
        ("out=''", "out: give a folder"),
        ("variant.file=''", "variant.file: give a path"),
    ],
)
def test_mistakes_are_reported_in_one_line(override, line):
    with pytest.raises(UserError) as error:
        checked(override)
    assert line in str(error.value)
    assert "\n" not in str(error.value)


TRANSLATOR = ["model=nano_translator", "data=reverse"]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["variant.sites=crss"], "cross, or some joined by +) (nearest: cross)"),
        (["variant.sites=encoder+decodr"], "variant.sites: 'decodr' is not a site of"),
        (["variant.sites=all+cross"], "variant.sites: 'all+cross': all stands alone"),
        (["variant.sites=cross+cross"], "'cross+cross': a site is named twice"),
        (["variant.sites=''"], "variant.sites: '' is not a site of model.form=encoder_decoder"),
        (["model=nano", "variant.sites=cross"], "(allowed: all, decoder)"),
        (["model=nano", "model.encoder_layers=2"], "model.encoder_layers: model.form=decoder has"),
        (["model=nano", "model.encoder_d_model=8"], "model.encoder_d_model: model.form=decoder"),
        (
            ["model.encoder_d_model=50"],
            "model.encoder_d_model: 50 is not a multiple of model.heads=4 (nearest: 48)",
        ),
        (["model.encoder_d_model=1"], "1 is not a multiple of model.heads=4 (nearest: 4)"),
        (["model.encoder_d_model=4", "model.mlp_ratio=0.1"], "leaves the encoder's MLP without"),
        (
            ["model.encoder_d_model=32", "variant=shared_qk"],
            "cross-attention reads streams of widths 64 and 32; choose other variant.sites",
        ),
        (
            ["model.encoder_d_model=32", "variant.init=symmetric"],
            "needs both in one shape; here cross-attention reads streams of widths 64 and 32",
        ),
        (["model=nano", "model.source=8"], "model.source: model.form=decoder has none; only enc"),
        (["model=nano_encoder", "model.source=8"], "model.source: model.form=encoder has none"),
        (["model=nano_encoder", "model.position=alibi"], "which model.form=encoder needs; use lea"),
        (["model.position=alibi"], "model.position: alibi does not tell what comes before from"),
        (["variant=shared_qk_reformer", "variant.sites=cross"], "cross-attention has no self to"),
        (
            ["variant=no_q", "variant.init=symmetric"],
            "variant: no_q is not supported: variant.init",
        ),
        (
            ["model.position=none", "model.position_std=1"],
            "model.position_std: 1.0, but only model.position=learned has it",
        ),
        (["model.attention_skip=false"], "model.attention_skip: model.form=encoder_decoder needs"),
        (["model.context=9"], "an answer of data=reverse has data.copy_length=8 tokens"),
        (["model.source=7"], "model.source: 7 is shorter than the data.copy_length=8 tokens"),
        (
            ["model.form=encodr"],
            "'encodr' (nearest: encoder) is not one of decoder, encoder, encoder_decoder",
        ),
        (["data=recall"], "recall has no pairs of source and target"),
        (["data=stdlib"], "stdlib is a text for model.form=decoder"),
    ],
    ids=str,
)
def test_mistakes_in_the_form_of_the_model_are_refused(qkablate, words, line):
    assert_refused(qkablate("train", *TRANSLATOR, "tracking.wandb=disabled", *words), line)


@pytest.mark.parametrize("override", ["+zzz=3", "+model.d_modl=3", "model.heads=3", "optim.lr=nan"])
def test_mistakes_in_a_composed_config_are_the_same(override):
    errors = []
    for read in (loaded, checked):
        with pytest.raises(UserError) as error:
            read(override)
        errors.append(str(error.value))
    assert errors[0] == errors[1]


@pytest.mark.parametrize("column", ["translation.en", "two words", "a,b", 'a"b', "null", "1e3"])
def test_columns_of_pairs_are_words(column):
    data = DataConfig(source="pairs", name="x", source_field=column, target_field="de")
    words = source_words(data) | {"data.name": "x"}
    with open_hydra():
        composed = make_config(words).data
    assert (composed.source_field, composed.target_field) == (column, "de")
    assert source_words(DataConfig(source="recall", tokenizer=None)) == {"data": "recall"}


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        ("data=stdlib_tags data.tokenizer=bpe", "bpe given, but data=stdlib_tags needs words"),
        ("data=stdlib_tags data.vocab_size=9", "data.vocab_size: words needs at least 257: that"),
        ("data=stdlib_tags data.objective=mlm", "data.objective: data=stdlib_tags has no such key"),
        ("data=recall data.tokenizer=chars", "data.tokenizer: data=recall has no such key; it has"),
        ("data=recall data.segment=4", "data.segment: data=recall has no such key"),
        ("data=recall data.pairs=null", "data.pairs: data=recall needs a number"),
        ("data.tokenizer=bpe data.vocab_size=256", "data.vocab_size: bpe needs at least 257"),
        ("data=wmt14 data.path=x", "data.path: data=pairs needs either"),
        (
            "data=pairs data.name=x data.source_field=a data.target_field=a",
            "data.target_field: 'a' is the column of the sources",
        ),
        ("data=pairs data.name=x", "data.source_field: data=pairs needs data.source_field=COLUMN"),
        (
            "data=pairs data.path=x data.split=y",
            "data.split: data.path is given, and only data.name",
        ),
        ("data=stdlib_pairs data.field=x", "data.field: data=stdlib_pairs has no such key"),
        ("data=hub data.name=x data.document_start='\"(\"'", "not a regular expression"),
    ],
)
def test_keys_of_other_sources_are_rejected(overrides, line):
    with pytest.raises(UserError) as error:
        checked(*overrides.split())
    assert line in str(error.value)


def test_learned_tokenizers_have_a_default_vocabulary_size():
    assert checked("data.tokenizer=bpe").data.vocab_size == 8192
    assert checked("data.tokenizer=bpe", "data.vocab_size=512").data.vocab_size == 512
    assert checked("data=stdlib_tags", "data.vocab_size=null").data.vocab_size == 2048
    assert checked().data.vocab_size is None


def test_steps_and_tokens_exclude_each_other():
    with pytest.raises(UserError, match="not both"):
        checked("train.tokens=100", "train.steps=4")


@pytest.mark.parametrize(
    ("variant", "key", "least"), [("low_rank_w", "rank", 16), ("collaborative", "rank", 32)]
)
def test_null_resolves_like_auto(variant, key, least):
    """A circuit that got null would use standard's number under another label."""
    config = checked(f"variant={variant}", f"variant.{key}=null")
    assert getattr(config.variant, key) == least
    assert config.variant.name == f"{variant}_r{least}"
    assert checked("variant=gqa", "variant.groups=null").variant.groups == 2


def test_config_round_trips_through_plain_data():
    config = checked("diagnostics.every=5", "train.steps=10")
    plain = dataclasses.asdict(config)
    assert from_plain(plain) == config
    # One that was frozen before there were diagnostics has none.
    del plain["diagnostics"]
    assert from_plain(plain).diagnostics.every == 0
    del plain["train"]
    with pytest.raises(KeyError):
        from_plain(plain)

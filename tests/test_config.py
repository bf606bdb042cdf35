"""The schema: every option composes, `auto` is resolved, names tell the truth."""

import dataclasses

import pytest
from hydra import compose, initialize_config_dir

from qkablate.cli.hydra.app import register
from qkablate.config import (
    CHOICES,
    RANGES,
    Config,
    conf_dir,
    flatten,
    from_plain,
    keys,
    load,
    variants,
)
from qkablate.errors import UserError

# Of the sweep (tests/cli/test_grid.py), its engines (tests/sweeps) and of claims
# (tests/analysis/test_claim.py).
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
    return load(composed(*overrides))


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_composes(option):
    more = {"data=text": "data.path=x", "data=hub": "data.name=x"}.get(option)
    config = loaded(option, *[more] * bool(more))
    assert isinstance(config.train.steps, int)


def test_the_groups_are_all_there():
    assert {option.split("=")[0] for option in OPTIONS} == {"variant", "model", "data", "optim"}
    assert {path.name for path in conf_dir().iterdir() if path.is_dir()} == {
        *("variant", "model", "data", "optim", *OTHERS)
    }
    assert set(variants()) >= {"standard", "merged_w", "shared_qk", "no_q"}


def test_the_defaults_of_yaml_and_schema_are_the_same():
    """What a user reads in conf/ is what a test gets from Config()."""
    from omegaconf import OmegaConf

    yaml = OmegaConf.to_container(composed(), resolve=True)
    yaml.pop("hydra", None)
    plain = flatten(Config())
    assert set(keys()) == set(plain)
    for key, value in plain.items():
        assert OmegaConf.select(OmegaConf.create(yaml), key) == value, key


def test_rules_name_keys_that_exist():
    assert set(CHOICES) | set(RANGES) <= set(keys())


def test_auto_is_resolved():
    config = loaded("train.tokens=100_000")
    assert (config.train.steps, config.train.tokens) == (98, None)  # 16 windows of 64 a step
    assert config.optim.warmup == 4
    assert loaded().train.steps == 1000
    assert loaded("train.steps=1").optim.warmup == 0
    assert loaded("seed=7", "seeds.data=1").seeds.data == 1
    assert loaded("seed=7").seeds.init == 7
    assert loaded("train.eval_every=40").diagnose.every == 40
    assert loaded("train.eval_every=40", "diagnose.every=0").diagnose.every == 0


@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        (["variant=merged_w"], "merged_w"),
        (["variant=standard", "variant.qk=merged"], "merged_w"),
        (["variant=merged_w", "variant.ov=no_o"], "merged+no_o"),
        (["variant=merged_w", "variant.name=mine"], "mine"),
    ],
)
def test_the_variants_name_tells_the_truth(overrides, name):
    assert loaded(*overrides).variant.name == name


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
        ("optim.cooldown=0.3", "optim.cooldown: schedule=cosine has none; only wsd has"),
        ("optim.betas=[0.9]", "optim.betas: [0.9] are not two numbers"),
        ("optim.betas=[0.9,1.0]", "optim.betas: [0.9, 1.0] are not two numbers"),
        ("optim.schedule=cosin", "'cosin' is not one of cosine, wsd (nearest: cosine)"),
        ("variant.init=matchd", "'matchd' is not one of matched, naive (nearest: matched)"),
        ("precision=fp8", "precision: 'fp8' is not one of auto, fp32, bf16, fp16"),
        ("device=gpu", "device: 'gpu' is not one of auto, cpu, cuda, cuda:N, mps"),
        ("device=cuda:x", "device: 'cuda:x' is not one of"),
        ("compile=maybe", "compile: 'maybe' is not one of auto, true, false"),
        ("threads=0", "threads: 0 is not auto, or a number from 1"),
        ("seed=-1", "seed: -1 is not 0 or more"),
        ("diagnose.every=-1", "diagnose.every: -1 is not auto, or 0 or more"),
        ("data.path=x", "data.path: data=stdlib has no such key (write data=text data.path=…)"),
        ("data=text", "data.path: data=text needs data.path=FILE_OR_FOLDER"),
        ("data=hub", "data.name: data=hub needs data.name=NAME_ON_THE_HUB"),
        ("data.tokenizer=byte", "'byte' is not one of bytes, chars, bpe, gpt2, cl100k_base, o2"),
        ("data.tokenizer=null", "data.tokenizer: data=stdlib needs one"),
        ("data.vocab_size=512", "data.vocab_size: is that of data.tokenizer=bpe"),
        ("data.pairs=4", "data.pairs: data=stdlib has no such key; it has tokenizer, vocab_size"),
        ("data.max_tokens=0", "data.max_tokens: 0 is not 1 or more"),
        ("data.cycle=2", "data.cycle: 2 is not"),
        ("model.mlp_ratio=0.001", "leaves the MLP without a single unit (0 takes it out)"),
        ("track.wandb=of", "track.wandb: 'of' is not one of auto, online, offline, disabled"),
        ("out=''", "out: give a folder"),
        ("variant.file=''", "variant.file: give a path"),
    ],
)
def test_mistakes_are_one_clear_line(override, line):
    with pytest.raises(UserError) as error:
        loaded(override)
    assert line in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        ("data=recall data.tokenizer=chars", "data.tokenizer: data=recall has no such key; it has"),
        ("data=recall data.segment=4", "data.segment: data=recall has no such key"),
        ("data=recall data.pairs=null", "data.pairs: data=recall needs a number"),
        ("data.tokenizer=bpe data.vocab_size=256", "data.vocab_size: 257 at least for bpe"),
        ("data=hub data.name=x data.document_start='\"(\"'", "is no regular expression"),
    ],
)
def test_keys_of_other_data_are_refused(overrides, line):
    with pytest.raises(UserError) as error:
        loaded(*overrides.split())
    assert line in str(error.value)


def test_a_bpe_has_a_size():
    assert loaded("data.tokenizer=bpe").data.vocab_size == 8192
    assert loaded("data.tokenizer=bpe", "data.vocab_size=512").data.vocab_size == 512
    assert loaded().data.vocab_size is None


def test_steps_and_tokens_exclude_each_other():
    with pytest.raises(UserError, match="not both"):
        loaded("train.tokens=100", "train.steps=4")


@pytest.mark.parametrize(
    ("variant", "key", "least"), [("low_rank_w", "rank", 16), ("collaborative", "rank", 32)]
)
def test_null_is_no_number(variant, key, least):
    """A null that reached the circuit would be standard's number, under another label."""
    config = loaded(f"variant={variant}", f"variant.{key}=null")
    assert getattr(config.variant, key) == least
    assert config.variant.name == f"{variant}_r{least}"
    assert loaded("variant=gqa", "variant.groups=null").variant.groups == 2


def test_a_config_comes_back_from_plain_data():
    config = loaded("diagnose.every=5", "train.steps=10")
    plain = dataclasses.asdict(config)
    assert from_plain(plain) == config
    # One that was frozen before there were diagnostics has none.
    del plain["diagnose"]
    assert from_plain(plain).diagnose.every == 0
    del plain["train"]
    with pytest.raises(KeyError):
        from_plain(plain)

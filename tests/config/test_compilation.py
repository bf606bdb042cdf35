"""Short runs are not compiled, because compiling takes longer than it saves."""

from dataclasses import replace

import pytest

from qkablate.config import Config, ModelConfig, OptimConfig, TrainConfig
from qkablate.config.compilation import compiling_pays

TINY = {"layers": 4, "d_model": 128, "heads": 4, "context": 64}
GPT2 = {"layers": 12, "d_model": 768, "heads": 12, "context": 1024}


def config(steps, model, precision="bf16", **train):
    return Config(
        model=ModelConfig(**model),
        train=TrainConfig(steps=steps, **{"batch_size": 16} | train),
        precision=precision,
    )


@pytest.mark.parametrize(
    ("steps", "model", "pays"),
    [
        (1_000, TINY, False),
        (100_000, TINY, True),
        (100, GPT2, False),
        (10_000, GPT2, True),
        (1, GPT2, False),
    ],
    ids=str,
)
def test_only_long_runs_gain(steps, model, pays):
    assert compiling_pays(config(steps, model)) == pays


def first_gain(**other):
    return next(n for n in range(100, 10**6, 100) if compiling_pays(config(n, **other)))


def test_larger_steps_pay_sooner():
    assert first_gain(model=GPT2) < first_gain(model=GPT2, batch_size=8)
    assert first_gain(model=GPT2, precision="fp32") < first_gain(model=GPT2)
    assert first_gain(model=TINY, grad_accum=4) < first_gain(model=TINY)
    translator = GPT2 | {"form": "encoder_decoder", "encoder_layers": 2}
    assert first_gain(model=translator, batch_size=1) > 1000


def test_runs_that_share_steps_with_longer_ones_do_as_those():
    short = config(10, TINY)
    assert not compiling_pays(short)
    assert compiling_pays(replace(short, optim=OptimConfig(schedule="wsd")))

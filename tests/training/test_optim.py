"""Learning rates of several lengths."""

import dataclasses
import itertools

import pytest

from qkablate.analysis.comparison.audit import is_annealed
from qkablate.config import Config, OptimConfig, TrainConfig
from qkablate.config.schedule import stable_steps
from qkablate.training.optim import learning_rate


def test_constant_schedule_stays_at_its_peak_after_the_warm_up():
    optim = OptimConfig(lr=0.5, schedule="constant", warmup=4, cooldown=0.0)
    rates = [learning_rate(optim, step, 20) for step in range(20)]
    assert rates[:4] == [0.125, 0.25, 0.375, 0.5]
    assert rates[4:] == [0.5] * 16
    assert not is_annealed(optim)


@pytest.mark.parametrize("cooldown", [0.0, 0.2, 0.5, 1.0])
@pytest.mark.parametrize("warmup", [0, 2, 7])
def test_lengths_of_wsd_have_equal_rates_until_the_shorter_cools_down(warmup, cooldown):
    optim = OptimConfig(lr=0.5, schedule="wsd", warmup=warmup, cooldown=cooldown, lr_final=0.3)
    base = dataclasses.replace(Config(), optim=optim)
    lengths = [8, 9, 10, 30, 100]
    for shorter, longer in itertools.combinations(lengths, 2):
        config = dataclasses.replace(base, train=TrainConfig(shorter))
        rates = [[learning_rate(optim, s, n) for s in range(shorter)] for n in (shorter, longer)]
        common = stable_steps(config)
        assert 1 <= common < shorter
        assert rates[0][:common] == rates[1][:common]
        if common < shorter - 1 and warmup < shorter - 1:  # no later step could be shared
            assert rates[0][common] < rates[0][common - 1]

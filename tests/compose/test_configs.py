"""Choices of config files: what Hydra would compose, without composing all of it again."""

import hydra
import pytest

from qkablate.compose import configs
from qkablate.compose.configs import compose, compose_jobs, open_hydra
from qkablate.config import Config, config_names, variants


@pytest.mark.slow
@pytest.mark.parametrize("group", ["variant", "model", "data"])
def test_a_choice_is_that_of_hydra(group):
    with open_hydra():
        for name in config_names(group):
            expected = compose("train", Config, [f"{group}={name}"])
            assert configs._compose_groups("train", {group: name}) == expected


def test_hydra_composes_once_for_all_variants(monkeypatch):
    """A composition takes a quarter of a second."""
    calls = []
    real = hydra.compose
    monkeypatch.setattr(hydra, "compose", lambda *args: calls.append(args) or real(*args))
    configs._compose.cache_clear()
    assert len(compose_jobs(["model=baby"], of_all_variants=True)) == len(variants())
    assert len(calls) == 1

"""Settings that arms of several lengths share."""

from dataclasses import replace

import pytest

from qkablate.compose.configs import make_config, open_hydra
from qkablate.config import Config, flatten
from qkablate.runs.prefix import LENGTH_KEYS
from qkablate.sweeps.planning.arms import share_compile
from qkablate.training.resolve import plan_run

WSD = ("optim.schedule=wsd", "train.eval_every=auto", "model.context=64", "train.batch_size=16")


def settings(manifest, key):
    """Return the values of a key in the arms, the shortest first."""
    arms = sorted(manifest.arms.values(), key=lambda arm: arm.config.train.steps)
    return [flatten(arm.config)[key] for arm in arms]


def test_lengths_of_wsd_have_the_settings_of_the_shortest(plan_grid):
    words = [*WSD, "train.eval_tokens=auto", "data.val_tokens=20000", "data.test_tokens=20000"]
    shortest = plan_grid(*words, "train.steps=60")
    manifest = plan_grid(*words, "train.steps=60,700", "variant=standard,no_q")
    alone = plan_grid(*words, "train.steps=700")
    for key in ("optim.warmup", "train.eval_every", "train.eval_tokens", "diagnostics.every"):
        (expected,) = settings(shortest, key)
        assert settings(alone, key) != [expected]
        assert settings(manifest, key) == [expected] * 4
    assert settings(manifest, "train.test_tokens") == settings(alone, "train.test_tokens") * 4


def test_sweep_run_has_the_id_of_its_words(plan_grid):
    """The settings are among the words that repeat a run with `qkablate train`."""
    manifest = plan_grid(*WSD, "train.steps=60,700")
    for run in manifest.runs:
        words = manifest.arms[run.arm].overrides_of(run)
        with open_hydra():
            config = make_config(dict(word.split("=", 1) for word in words))
        assert plan_run(config).run.id == run.id


def test_other_schedules_keep_the_settings_of_their_length(plan_grid):
    manifest = plan_grid("train.steps=60,700", "train.eval_every=auto")
    assert settings(manifest, "optim.warmup") == [12, 140]
    assert not any("optim.warmup" in arm.overrides for arm in manifest.arms.values())


def test_given_settings_are_kept(plan_grid):
    words = ["train.eval_every=20", "diagnostics.every=20", "train.eval_tokens=64"]
    manifest = plan_grid(*WSD, "train.steps=60,700", "optim.warmup=3,9", *words)
    assert sorted(settings(manifest, "optim.warmup")) == [3, 3, 9, 9]
    assert settings(manifest, "train.eval_every") == settings(manifest, "diagnostics.every")
    assert settings(manifest, "train.eval_every") == [20] * 4


def test_every_setting_that_depends_on_the_length_is_known():
    """A new `auto` that depends on train.steps has to be shared, too."""
    with open_hydra():
        configs = [make_config({"train.steps": str(n), "optim.schedule": "wsd"}) for n in (60, 700)]
    short, long = map(flatten, configs)
    differ = {key for key in flatten(Config()) if short[key] != long[key]}
    assert differ == {"train.steps", "diagnostics.every", *LENGTH_KEYS}


def vmapped(manifest):
    return {arm.name: int(arm.config.train.vmap) for arm in manifest.arms.values()}


def test_arms_that_are_compared_are_vmapped_together_or_not_at_all(plan_grid):
    """At 128 tokens one of them has a kernel that cannot be; other lengths are not affected."""
    words = ["variant=standard,merged_w", "train.vmap=4", "model.context=16,128"]
    manifest = plan_grid(*words)
    assert vmapped(manifest) == {
        "standard-d16-h2-context=16": 4,
        "standard-d16-h2-context=128": 1,
        "merged_w-d16-h2-context=16": 4,
        "merged_w-d16-h2-context=128": 1,
    }
    reasons = {arm.not_vmapped for arm in manifest.arms.values()}
    assert any("blocked" in reason for reason in reasons)
    for run in manifest.runs:
        words = manifest.arms[run.arm].overrides_of(run)
        with open_hydra():
            config = make_config(dict(word.split("=", 1) for word in words))
        assert plan_run(config).run.id == run.id


@pytest.mark.parametrize("given", [(), ("compile=auto",)])
def test_arms_are_compiled_like_their_baseline(plan_grid, monkeypatch, given):
    """On a GPU `auto` depends on the size of a step, which a control changes."""

    def resolve(config):
        pays = config.model.mlp_ratio == 4 and config.model.context == 16
        return pays if config.compile == "auto" else config.compile

    monkeypatch.setattr("qkablate.training.hardware._resolve_compile", resolve)
    words = ["variant=standard,no_q", "control=params", "model.context=16,32", *given]
    manifest = plan_grid(*words)
    assert len({arm.config.model.mlp_ratio for arm in manifest.arms.values()}) > 1
    for arm in manifest.arms.values():
        assert arm.config.compile is (arm.config.model.context == 16)
    for run in manifest.runs:
        words = manifest.arms[run.arm].overrides_of(run)
        with open_hydra():
            config = make_config(dict(word.split("=", 1) for word in words))
        assert plan_run(config).run.id == run.id


def test_given_compile_is_kept(plan_grid):
    *others, arm = plan_grid("variant=standard,no_q").arms.values()
    assert arm.baseline is not None
    compiled = replace(arm, config=replace(arm.config, compile=True))
    given = replace(compiled, overrides={**arm.overrides, "compile": "true"})
    assert share_compile([*others, given])[-1] == given
    assert share_compile([*others, compiled])[-1].config.compile is False


def test_auto_is_resolved_for_each_size(plan_grid):
    manifest = plan_grid("train.vmap=auto", "model.d_model=16,4096", "sweep.baseline=null")
    assert sorted(vmapped(manifest).values()) == [1, 16]
    assert {arm.overrides["train.vmap"] for arm in manifest.arms.values()} == {"1", "16"}
    assert not any(arm.not_vmapped for arm in manifest.arms.values())

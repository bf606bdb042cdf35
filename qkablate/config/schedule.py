"""The steps of a schedule before it depends on the length of the run."""

from qkablate.config.schema import Config, OptimConfig


def cooldown_begin(optim: OptimConfig, steps: int) -> int:
    """Return the last step at the full rate of a wsd run of so many steps."""
    assert isinstance(optim.warmup, int)
    assert isinstance(optim.cooldown, float)
    last = max(steps - 1, optim.warmup + 1)
    return max(optim.warmup, last - round(optim.cooldown * steps))


def stable_steps(config: Config) -> int:
    """Return the first steps of a run that a longer one takes, too: of wsd those before cooldown.

    At least the last step is the run's own, because it is logged as such. Other schedules: 0.
    """
    steps = int(config.train.steps)
    if config.optim.schedule != "wsd":
        return 0
    return min(cooldown_begin(config.optim, steps) + 1, steps - 1)

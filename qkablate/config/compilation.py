"""The gain of compiling a run on a GPU, against the time that compiling takes.

Every run compiles in a process of its own, so that a short one is slower for it. The estimate uses
the config alone: it is the same on every GPU and for the variants of a size, but not for arms whose
size a control has changed. In a sweep each arm does as its baseline (`share_compile`).
"""

from qkablate.config.schema import Config

# Seconds until the first step: 15 with 4 layers, 44 with 12 (measured, on one core).
_SECONDS, _SECONDS_PER_LAYER = 1.0, 3.5
# What compiling takes off a step, whichever is more (not measured): launches, 66 of a layer at 8 µs
# that become 46 at 4 µs; or passes over memory, as a part of the time of the FLOPs.
_SAVED_PER_LAYER, _SAVED_PART = 3.4e-4, 0.25
_FLOPS_PER_SECOND = {"fp32": 15e12, "bf16": 100e12, "fp16": 50e12}  # that an eager step reaches


def compiling_pays(config: Config) -> bool:
    """Return whether a run on a GPU of this config, with a resolved precision, gains by compiling.

    The steps of a `wsd` run are shared with longer ones, which must be computed in the same way.
    """
    steps = config.train.steps
    if config.optim.schedule == "wsd" or not isinstance(steps, int):
        return True
    layers = _count_layers(config)
    return steps * _saved_seconds(config, layers) > _SECONDS + _SECONDS_PER_LAYER * layers


def _count_layers(config: Config) -> int:
    model = config.model
    if model.form != "encoder_decoder":
        return model.layers
    return model.layers + (model.encoder_layers or model.layers)


def _saved_seconds(config: Config, layers: int) -> float:
    """Return what compiling saves in a step."""
    model, train = config.model, config.train
    tokens = train.batch_size * train.grad_accum * model.context
    weights = layers * model.d_model**2 * (4 + 2 * model.mlp_ratio)
    scores = layers * model.d_model * model.context
    seconds = 6 * tokens * (weights + scores) / _FLOPS_PER_SECOND[config.precision]
    return max(_SAVED_PER_LAYER * layers * train.grad_accum, _SAVED_PART * seconds)

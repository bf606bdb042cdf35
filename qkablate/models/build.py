"""The one place that chooses the class of a model."""

from typing import Unpack

from qkablate.attention.kernels.choice import KernelOptions
from qkablate.config import ModelConfig, VariantConfig
from qkablate.models.base import Model
from qkablate.models.encoder_decoder import EncoderDecoder
from qkablate.models.gpt import GPT


def build_model(
    config: ModelConfig,
    variant: VariantConfig,
    vocabulary: int,
    **options: Unpack[KernelOptions],
) -> Model:
    """Return the model of a config with uninitialized parameters."""
    kind = EncoderDecoder if config.form == "encoder_decoder" else GPT
    return kind(config, variant, vocabulary, **options)

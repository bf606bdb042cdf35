"""The one place that chooses the class of a model."""

from qkablate.config import ModelConfig, VariantConfig
from qkablate.models.base import Model
from qkablate.models.gpt import GPT


def build_model(
    config: ModelConfig,
    variant: VariantConfig,
    vocabulary: int,
    *,
    device: str = "cpu",
    half: bool = False,
    kernel: str = "auto",
) -> Model:
    """Return the model of a config with uninitialized parameters."""
    return GPT(config, variant, vocabulary, device=device, half=half, kernel=kernel)

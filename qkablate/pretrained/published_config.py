"""The config.json of published decoders as a model and a variant of ours, and the other way round.

A setting that is not listed changes no output of these architectures.
"""

import json
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from qkablate.config import Config, ModelConfig, VariantConfig, check, resolve_variant
from qkablate.config.variant import mlp_units
from qkablate.errors import UserError, nearest_hint, sanitize
from qkablate.pretrained.layouts import TensorMap, list_tensor_maps

# Names of activations in config.json, and ours.
_ACTIVATIONS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}
_ACTIVATIONS |= {"relu2": "relu2"}
_HEADS = {
    "gpt2": ("GPT2LMHeadModel", "GPT2Model"),
    "llama": ("LlamaForCausalLM", "LlamaModel"),
    "mistral": ("MistralForCausalLM", "MistralModel"),
}
_LLAMAS = ("llama", "mistral")


@dataclass(frozen=True)
class Architecture:
    """A published model in our words."""

    family: str  # of the names of its tensors: gpt2 or llama
    model: ModelConfig
    variant: VariantConfig
    vocabulary: int
    context: int  # that it was published with; the model's may be shorter
    attention_bias: bool = (
        True  # of a llama with biases: in the attention, or else in the MLP alone
    )
    mlp_bias: bool = True

    @property
    def key_heads(self) -> int:
        groups = self.variant.groups
        return groups if isinstance(groups, int) else self.model.heads

    def tensor_maps(self) -> dict[str, TensorMap]:
        """Return the tensors of the published file by name, without their prefix."""
        sizes = (self.model, self.vocabulary, self.key_heads)
        return {entry.name: entry for entry in list_tensor_maps(self.family, *sizes)}

    def may_lack(self, entry: TensorMap) -> bool:
        """Return whether the published model has no such tensor, and ours is zero."""
        is_mlp = ".mlp." in entry.name
        return entry.is_zero_without and not (self.mlp_bias if is_mlp else self.attention_bias)


class _Settings:
    """The values of a config.json, each read with its type and its allowed values."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values

    def size(self, name: str, default: int | None) -> int:
        """Return a size; None and a missing one are the default."""
        value = self.values.get(name)
        value = default if value is None else value
        if type(value) is not int or not 1 <= value < 2**31:
            raise _refuse(name, value, "a whole number from 1")
        return value

    def number(self, name: str, default: float) -> float:
        value = self.values.get(name, default)
        if type(value) not in (int, float) or not 0 <= value <= 1e12:
            raise _refuse(name, value, "a number from 0")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self.values.get(name, default)
        if type(value) is not bool:
            raise _refuse(name, value, "true or false")
        return value

    def require(self, name: str, *allowed: Any) -> Any:
        """Return a value that must be one of these, of which the first is the default."""
        value = self.values.get(name, allowed[0])
        if not any(type(value) is type(known) and value == known for known in allowed):
            raise _refuse(name, value, " or ".join(json.dumps(known) for known in allowed))
        return value


def _refuse(name: str, value: Any, allowed: str) -> UserError:
    return UserError(f"config.json: {name}: {_quote(value)} is not supported (allowed: {allowed})")


def _quote(value: Any) -> str:
    if isinstance(value, list | dict):  # which may be deep, and long
        return sanitize(reprlib.repr(value))
    text = sanitize(json.dumps(value, ensure_ascii=False, default=str))
    return text if len(text) <= 60 else f"{text[:60]}…"


def parse_config(values: Any, context: int | None = None) -> Architecture:
    """Return the architecture of a config.json; UserError names a setting that ours lacks.

    A `context` shorter than the published one keeps the first positions.
    """
    if not isinstance(values, dict):
        raise UserError("config.json: it is not a map of settings")
    kind = values.get("model_type")
    if not isinstance(kind, str) or kind not in _HEADS:
        hint = nearest_hint(kind, _HEADS) if isinstance(kind, str) else ""
        raise UserError(
            f"config.json: model_type: {_quote(kind)}{hint} is not supported"
            f" (allowed: {', '.join(_HEADS)})"
        )
    settings = _Settings(values)
    heads = values.get("architectures") or [_HEADS[kind][0]]
    if not isinstance(heads, list) or not {*map(str, heads)} <= {*_HEADS[kind]}:
        raise _refuse("architectures", heads, ", ".join(_HEADS[kind]))
    settings.require("quantization_config", None)
    settings.require("is_encoder_decoder", False)
    settings.require("add_cross_attention", False)
    architecture = (_parse_llama if kind in _LLAMAS else _parse_gpt2)(settings, context)
    model = architecture.model
    try:
        check(Config(model=model))  # before anything is computed from sizes that do not fit
        variant = resolve_variant(architecture.variant, model)
        check(Config(variant=variant, model=model))
    except UserError as error:
        raise UserError(f"config.json: {error}") from None
    return Architecture(**{**vars(architecture), "variant": variant})


def _parse_gpt2(settings: _Settings, context: int | None) -> Architecture:
    settings.require("scale_attn_weights", True)
    settings.require("scale_attn_by_inverse_layer_idx", False)
    d, published = settings.size("n_embd", 768), settings.size("n_positions", 1024)
    model = ModelConfig(
        layers=settings.size("n_layer", 12),
        d_model=d,
        heads=settings.size("n_head", 12),
        context=_choose_context(context, published),
        mlp_ratio=settings.size("n_inner", 4 * d) / d,
        mlp=_ACTIVATIONS[settings.require("activation_function", *_ACTIVATIONS)],
        bias=True,
        tied=settings.flag("tie_word_embeddings", True),
        norm_eps=settings.number("layer_norm_epsilon", 1e-5),
    )
    vocabulary = settings.size("vocab_size", 50257)
    return Architecture("gpt2", model, VariantConfig(lr=1.0), vocabulary, published)


def _parse_llama(settings: _Settings, context: int | None) -> Architecture:
    settings.require("hidden_act", "silu")
    d, heads = settings.size("hidden_size", 4096), settings.size("num_attention_heads", 32)
    if d % heads:
        raise _refuse("num_attention_heads", heads, f"a divisor of hidden_size={d}")
    settings.require("head_dim", None, d // heads)
    groups = settings.size("num_key_value_heads", heads)
    if heads % groups:
        raise _refuse("num_key_value_heads", groups, f"a divisor of num_attention_heads={heads}")
    published = settings.size("max_position_embeddings", 2048)
    length = _choose_context(context, published)
    # Older versions of transformers write no setting that is its default.
    default = 4096 if settings.values["model_type"] == "mistral" else None
    window = settings.values.get("sliding_window", default)
    if window is not None and settings.size("sliding_window", window) < length:
        raise _refuse(
            "sliding_window", window, f"null, or as long as the context; give context={window}"
        )
    units, has_bias = (
        settings.size("intermediate_size", 11008),
        [settings.flag(name, False) for name in ("attention_bias", "mlp_bias")],
    )
    model = ModelConfig(
        layers=settings.size("num_hidden_layers", 32),
        d_model=d,
        heads=heads,
        context=length,
        mlp="swiglu",
        mlp_ratio=1.5 * units / d,
        bias=any(has_bias),
        tied=settings.flag("tie_word_embeddings", False),
        position="rope",
        rope_theta=_read_theta(settings),
        norm_kind="rms",
        norm_eps=settings.number("rms_norm_eps", 1e-6),
    )
    if model.mlp_ratio <= 1000 and mlp_units(model) != units:
        raise _refuse("intermediate_size", units, "a multiple of 1/1000 of hidden_size")
    variant = VariantConfig(lr=1.0)
    if groups < heads:
        variant = VariantConfig("gqa", qk="grouped", ov="grouped", groups=groups, lr=1.0)
    vocabulary = settings.size("vocab_size", 32000)
    return Architecture("llama", model, variant, vocabulary, published, *has_bias)


def _choose_context(context: int | None, published: int) -> int:
    if context is not None and context > published:
        raise UserError(f"context: {context} is more than the {published} positions of the model")
    return published if context is None else context


def _read_theta(settings: _Settings) -> float:
    """Return the base of the wavelengths, from the newer or the older place."""
    scaling, nested = (settings.values.get(name) for name in ("rope_scaling", "rope_parameters"))
    for name, value in {"rope_scaling": scaling, "rope_parameters": nested}.items():
        if value is None:
            continue
        if not isinstance(value, dict):
            raise _refuse(name, value, "null or a map")
        inner = _Settings(value)
        kind = "rope_type" if "rope_type" in value else "type"
        if value.get(kind, "default") != "default":
            raise _refuse(f"{name}.{kind}", value[kind], '"default": positions that are not scaled')
        inner.require("partial_rotary_factor", 1.0, 1, None)
    settings.require("partial_rotary_factor", 1.0, 1, None)
    theta = settings.number("rope_theta", 10000.0)
    if isinstance(nested, dict):
        theta = _Settings(nested).number("rope_theta", theta)
    return theta


def make_config(architecture: Architecture, end: int | None) -> dict[str, Any]:
    """Return the config.json of a model; `end` is the token that ends a document."""
    model = architecture.model
    common = {
        "vocab_size": architecture.vocabulary,
        "tie_word_embeddings": model.tied,
        "bos_token_id": end,
        "eos_token_id": end,
        "torch_dtype": "float32",
    }
    if architecture.family == "gpt2":
        names = {ours: theirs for theirs, ours in reversed(_ACTIVATIONS.items())}
        return {
            "architectures": ["GPT2LMHeadModel"],
            "model_type": "gpt2",
            "n_layer": model.layers,
            "n_embd": model.d_model,
            "n_head": model.heads,
            "n_positions": model.context,
            "n_inner": mlp_units(model),
            "activation_function": names[model.mlp],
            "layer_norm_epsilon": model.norm_eps,
            **{f"{part}_pdrop": model.dropout for part in ("resid", "embd", "attn")},
            **common,
        }
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": model.layers,
        "hidden_size": model.d_model,
        "num_attention_heads": model.heads,
        "num_key_value_heads": architecture.key_heads,
        "max_position_embeddings": model.context,
        "intermediate_size": mlp_units(model),
        "hidden_act": "silu",
        "rms_norm_eps": model.norm_eps,
        "rope_theta": model.rope_theta,  # of older readers
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rope_theta},
        "attention_bias": model.bias,
        "mlp_bias": model.bias,
        "attention_dropout": model.dropout,
        **common,
    }

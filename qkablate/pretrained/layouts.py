"""Names, shapes and order of the tensors of published decoders, beside ours.

Our linear maps of the circuits are (in, out), as GPT-2's Conv1D; all others are (out, in), as
nn.Linear. Llama rotates the planes (a, a + E/2) of queries and keys, as we do, and orders heads as
we do, so that no rows are permuted.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from qkablate.config import ModelConfig
from qkablate.config.variant import mlp_units


@dataclass(frozen=True)
class TensorMap:
    """A published tensor, and ours that it holds side by side along the last dimension."""

    name: str
    shape: tuple[int, ...]
    parts: tuple[str, ...]
    transposed: bool = False  # the published one
    is_zero_without: bool = False  # where the published model may lack it, ours is zero


# Tensors that hold no weights: masks and tables of positions.
_CONSTANTS = {
    "gpt2": re.compile(r"h\.\d+\.attn\.(bias|masked_bias)"),
    "llama": re.compile(r"layers\.\d+\.self_attn\.rotary_emb\.inv_freq"),
}
PREFIXES = {"gpt2": "transformer.", "llama": "model."}


def is_constant(family: str, name: str) -> bool:
    """Return whether a tensor, named without its prefix, holds no weights."""
    return bool(_CONSTANTS[family].fullmatch(name))


def list_tensor_maps(
    family: str, model: ModelConfig, vocabulary: int, key_heads: int
) -> Iterator[TensorMap]:
    """Yield the tensors of a model, named without the prefix of their family."""
    yield from (_gpt2 if family == "gpt2" else _llama)(model, vocabulary, key_heads)
    if not model.tied:
        yield TensorMap("lm_head.weight", (vocabulary, model.d_model), ("output_embedding.weight",))


def _gpt2(model: ModelConfig, vocabulary: int, key_heads: int) -> Iterator[TensorMap]:
    d, units = model.d_model, mlp_units(model)
    yield TensorMap("wte.weight", (vocabulary, d), ("token_embedding.weight",))
    yield TensorMap("wpe.weight", (model.context, d), ("position_embedding.weight",))
    for i in range(model.layers):
        theirs, ours = f"h.{i}", f"blocks.{i}"
        qk, ov, mlp = f"{ours}.attention.qk", f"{ours}.attention.ov", f"{ours}.mlp"
        for kind, names in {
            "weight": (f"{qk}.w_q", f"{qk}.w_k", f"{ov}.w_v"),
            "bias": (f"{qk}.b_q", f"{qk}.b_k", f"{ov}.b_v"),
        }.items():
            square = (d,) if kind == "weight" else ()
            yield TensorMap(f"{theirs}.ln_1.{kind}", (d,), (f"{ours}.norm_1.{kind}",))
            yield TensorMap(f"{theirs}.ln_2.{kind}", (d,), (f"{ours}.norm_2.{kind}",))
            yield TensorMap(f"{theirs}.attn.c_attn.{kind}", (*square, 3 * d), names)
            yield TensorMap(f"{theirs}.attn.c_proj.{kind}", (*square, d), (f"{ov}.{kind[0]}_o",))
        yield TensorMap(f"{theirs}.mlp.c_fc.weight", (d, units), (f"{mlp}.up.weight",), True)
        yield TensorMap(f"{theirs}.mlp.c_fc.bias", (units,), (f"{mlp}.up.bias",))
        yield TensorMap(f"{theirs}.mlp.c_proj.weight", (units, d), (f"{mlp}.down.weight",), True)
        yield TensorMap(f"{theirs}.mlp.c_proj.bias", (d,), (f"{mlp}.down.bias",))
    for kind in ("weight", "bias"):
        yield TensorMap(f"ln_f.{kind}", (d,), (f"norm.{kind}",))


def _llama(model: ModelConfig, vocabulary: int, key_heads: int) -> Iterator[TensorMap]:
    d, units = model.d_model, mlp_units(model)
    keys = key_heads * d // model.heads
    yield TensorMap("embed_tokens.weight", (vocabulary, d), ("token_embedding.weight",))
    for i in range(model.layers):
        theirs, ours = f"layers.{i}", f"blocks.{i}"
        yield TensorMap(f"{theirs}.input_layernorm.weight", (d,), (f"{ours}.norm_1.weight",))
        yield TensorMap(
            f"{theirs}.post_attention_layernorm.weight", (d,), (f"{ours}.norm_2.weight",)
        )
        for letter, circuit, width in (
            *(("q", "qk", d), ("k", "qk", keys)),
            *(("v", "ov", keys), ("o", "ov", d)),
        ):
            name, own = f"{theirs}.self_attn.{letter}_proj", f"{ours}.attention.{circuit}"
            yield TensorMap(f"{name}.weight", (width, d), (f"{own}.w_{letter}",), True)
            if model.bias:
                bias = (f"{own}.b_{letter}",)
                yield TensorMap(f"{name}.bias", (width,), bias, is_zero_without=True)
        for part, shape in {"gate": (units, d), "up": (units, d), "down": (d, units)}.items():
            name, own = f"{theirs}.mlp.{part}_proj", f"{ours}.mlp.{part}"
            yield TensorMap(f"{name}.weight", shape, (f"{own}.weight",))
            if model.bias:
                yield TensorMap(f"{name}.bias", shape[:1], (f"{own}.bias",), is_zero_without=True)
    yield TensorMap("norm.weight", (d,), ("norm.weight",))

"""Small random models of transformers, and their logits in the precision of their weights."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from qkablate.config import ModelConfig, VariantConfig, resolve_variant
from qkablate.models.build import build_model
from qkablate.pretrained.layouts import PREFIXES
from qkablate.pretrained.published_config import Architecture, make_config
from qkablate.pretrained.weights import join_tensors

GPT2 = {"vocab_size": 61, "n_embd": 24, "n_layer": 2, "n_head": 3, "n_positions": 16}
LLAMA = {
    **{"vocab_size": 61, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2},
    **{"num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 16},
}
TOKENS = torch.randint(61, (2, 16), generator=torch.Generator().manual_seed(0))


def transformers() -> Any:
    """Return the library, or skip the test."""
    return pytest.importorskip("transformers", reason="needs transformers, of the extra 'dev'")


def publish(folder: Path, family: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """Write a random model as transformers does, and return it; no parameter is 0 or 1."""
    library = transformers()
    torch.manual_seed(1)
    if family == "gpt2":
        config = library.GPT2Config(**GPT2 | {"bos_token_id": 0, "eos_token_id": 0} | changes)
        model = library.GPT2LMHeadModel(config)
    elif family == "mistral":
        model = library.MistralForCausalLM(library.MistralConfig(**LLAMA | changes))
    else:
        model = library.LlamaForCausalLM(library.LlamaConfig(**LLAMA | changes))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape))
    model = model.to(dtype).eval()
    model.save_pretrained(folder)
    return model


def change_config(folder: Path, **changes: Any) -> None:
    """Set values of a config.json; None stands for null."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def logits_of(model: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """Return the logits of a model of transformers, all computed in one precision.

    Its Llama takes norms and angles in fp32 whatever the weights are; here the same formulas are
    computed in `dtype`.
    """
    from transformers.models.llama import modeling_llama as llama
    from transformers.models.mistral import modeling_mistral as mistral

    def norm(self: Any, x: Tensor) -> Tensor:
        mean: Tensor = x.pow(2).mean(-1, keepdim=True)
        scaled: Tensor = self.weight * (x * torch.rsqrt(mean + self.variance_epsilon))
        return scaled

    def rotate(self: Any, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        config = self.config
        theta, width = config.rope_parameters["rope_theta"], config.head_dim
        plane = torch.arange(0, width, 2, dtype=torch.float64) / width
        angles = position_ids[..., None].double() / theta**plane
        angles = torch.cat([angles, angles], -1)
        return angles.cos().to(dtype), angles.sin().to(dtype)

    norms = llama.LlamaRMSNorm, mistral.MistralRMSNorm
    rotations = llama.LlamaRotaryEmbedding, mistral.MistralRotaryEmbedding
    for norm_class in norms:
        monkeypatch.setattr(norm_class, "forward", norm)
    for rotation_class in rotations:
        monkeypatch.setattr(rotation_class, "forward", rotate)
    with torch.no_grad():
        found: Tensor = model.to(dtype)(TOKENS).logits
    return found


SIZES: dict[str, Any] = {"layers": 2, "d_model": 16, "heads": 4, "context": 16}


def write_published(
    folder: Path, family: str = "gpt2", vocabulary: int = 61, context: int = 16
) -> Any:
    """Write a random model without transformers; return it."""
    sizes = SIZES | {"context": context}
    model, variant = ModelConfig(**sizes, bias=True, mlp="gelu_tanh"), VariantConfig()
    if family == "llama":
        block: dict[str, Any] = {
            "position": "rope",
            "norm_kind": "rms",
            "mlp": "swiglu",
            "tied": False,
        }
        model = ModelConfig(**sizes, **block)
        variant = VariantConfig("gqa", qk="grouped", ov="grouped", groups=2)
    variant = resolve_variant(variant, model)
    architecture = Architecture(family, model, variant, vocabulary, model.context)
    built = build_model(model, variant, vocabulary, device="cpu").init_(0).eval()
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(make_config(architecture, None)))
    weights, prefix = built.state_dict(), PREFIXES[family]
    tensors = {
        (entry.name if entry.name == "lm_head.weight" else prefix + entry.name): join_tensors(
            entry, weights
        )
        for entry in architecture.tensor_maps().values()
    }
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return built


def split_weights(folder: Path, parts: int = 2) -> None:
    """Divide the weights into several files with their index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    places = {name: f"part-{i % parts}.safetensors" for i, name in enumerate(sorted(tensors))}
    for part in {*places.values()}:
        chosen = {name: tensors[name] for name in places if places[name] == part}
        save_file(chosen, folder / part, {"format": "pt"})
    index = {"weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")

"""Small random models of transformers, and their logits in the precision of their weights."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

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

    monkeypatch.setattr(llama.LlamaRMSNorm, "forward", norm)
    monkeypatch.setattr(llama.LlamaRotaryEmbedding, "forward", rotate)
    with torch.no_grad():
        found: Tensor = model.to(dtype)(TOKENS).logits
    return found

"""A run as a folder that transformers loads: config.json and model.safetensors."""

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch

from qkablate.attention.spec import UnsupportedCombination
from qkablate.config import ModelConfig, VariantConfig, resolve_variant
from qkablate.disk import (
    describe_os_error,
    exclusive_folder,
    make_folder,
    sync_file,
    sync_folder,
    write_synced,
)
from qkablate.errors import UserError, sanitize
from qkablate.models.base import Model
from qkablate.models.build import build_model
from qkablate.pretrained.layouts import PREFIXES
from qkablate.pretrained.published_config import Architecture, make_config
from qkablate.pretrained.repository import CONFIG, WEIGHTS, write_json_text
from qkablate.pretrained.standardize import standardize
from qkablate.pretrained.weights import join_tensors
from qkablate.randomness import named_generator
from qkablate.runs.records import read_json
from qkablate.table import format_bytes
from qkablate.training import hardware
from qkablate.training.warm_start.restore import RestoredRun

_GPT2_MLPS = ("gelu", "gelu_tanh", "relu2")
_TOKENS = 32  # of a sequence that both models read
_TOLERANCE = 1e-6  # difference of logits, in fp64


@dataclass(frozen=True)
class Exported:
    """An exported model: its kind, and how much its logits differ in fp64."""

    family: str
    variant: str
    largest_difference: float
    params: int


def check_target(folder: Path) -> None:
    """Raise UserError unless a folder is free, and its parent is one."""
    if os.path.lexists(folder) and not (folder.is_dir() and not any(folder.iterdir())):
        raise UserError(
            f"'{sanitize(str(folder))}' exists and is not an empty folder; give another"
        )
    if folder.is_symlink():
        raise UserError(f"'{sanitize(str(folder))}' is a link; give another folder")


def export_run(restored: RestoredRun, folder: Path) -> Exported:
    """Write a run for transformers, or raise UserError with the reason why it cannot be one."""
    check_target(folder)
    family = _find_family(restored.config.model)
    _check_memory(restored.model)
    model, architecture = _convert(restored, family)
    difference = _compare(restored.model, model)
    if not difference <= _TOLERANCE:
        raise UserError(
            f"variant: {restored.config.variant.name} cannot be written as standard attention:"
            f" the logits differ by {difference:.1e}"
        )
    weights = {name: value.float() for name, value in model.state_dict().items()}
    prefix, tensors = PREFIXES[family], {}
    for entry in architecture.tensor_maps().values():
        full = entry.name if entry.name == "lm_head.weight" else prefix + entry.name
        tensors[full] = join_tensors(entry, weights)
    end = 50256 if _has_gpt2_tokens(restored) else None
    _write(folder, make_config(architecture, end), tensors)
    params = sum(value.numel() for value in tensors.values())
    return Exported(family, architecture.variant.name, difference, params)


def _check_memory(model: Model) -> None:
    """Raise UserError unless two copies in fp64, and two in fp32, fit beside the model."""
    required = (2 * 8 + 2 * 4 - 4) * sum(p.numel() for p in model.parameters())
    if (free := hardware.free_memory()) < required:
        raise UserError(
            f"the comparison in fp64 needs {format_bytes(required)} of memory, and"
            f" {format_bytes(free)} are free"
        )


def _has_gpt2_tokens(restored: RestoredRun) -> bool:
    description = read_json(restored.folder / "tokenizer.json")
    is_gpt2 = isinstance(description, dict) and description.get("name") == "gpt2"
    return is_gpt2 and restored.model.vocabulary == 50257


def _find_family(model: ModelConfig) -> str:
    """Return the family whose blocks are the model's; UserError where there is none."""
    for key, allowed in {
        "form": ("decoder",),
        "norm": ("pre",),
        "attention_skip": (True,),
        "embedding_width": (None,),
        "position": ("learned", "none", "rope"),
    }.items():
        if (value := getattr(model, key)) not in allowed:
            raise UserError(f"model.{key}: {value} is supported by neither GPT-2 nor Llama")
    if not model.mlp_ratio:
        raise UserError(
            "model.mlp_ratio: 0 is supported by neither GPT-2 nor Llama, which have MLPs"
        )
    block = (model.position == "rope", model.norm_kind == "rms", model.mlp == "swiglu")
    if all(block):
        return "llama"
    if any(block):
        raise UserError(
            f"model: position={model.position}, norm_kind={model.norm_kind}, mlp={model.mlp} is"
            " neither GPT-2's block (learned or none, layer,"
            f" {'|'.join(_GPT2_MLPS)}) nor Llama's (rope, rms, swiglu)"
        )
    return "gpt2"


@torch.no_grad()
def _convert(restored: RestoredRun, family: str) -> tuple[Model, Architecture]:
    """Return the run's function as a standard model in fp64."""
    source, config = restored.model, restored.config
    shape, variant = config.model, VariantConfig(lr=1.0)
    if family == "gpt2":  # it has all biases, and a table of positions
        shape = replace(shape, bias=True, position="learned")
    elif (config.variant.qk, config.variant.ov) == ("grouped", "grouped"):
        name, groups = config.variant.name, config.variant.groups
        variant = VariantConfig(name, qk="grouped", ov="grouped", groups=groups, lr=1.0)
    variant = resolve_variant(variant, shape)
    target = build_model(shape, variant, source.vocabulary, device="cpu").double().eval()
    given = source.state_dict()
    for name, value in target.state_dict().items():
        if ".attention." not in name:
            value.copy_(given[name]) if name in given else value.zero_()
    layers = zip(source.attention_layers(), target.attention_layers(), strict=True)
    for number, (ours, theirs) in enumerate(layers):
        try:
            standardize(ours.module, theirs.module)
        except UnsupportedCombination as reason:
            raise UserError(
                f"variant: {config.variant.name} cannot be written as standard attention"
                f" (layer {number}): {reason}"
            ) from None
    context = shape.context
    return target, Architecture(family, shape, variant, source.vocabulary, context)


@torch.no_grad()
def _compare(source: Model, target: Model) -> float:
    """Return the largest difference of the logits of random tokens."""
    length = min(_TOKENS, source.config.context)
    rng = named_generator(0, "export", "tokens")
    tokens_BT = torch.from_numpy(rng.integers(source.vocabulary, size=(1, length)))
    return float((source.double()(tokens_BT) - target(tokens_BT)).abs().max())


def _write(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    """Write the folder whole, or not at all."""
    folder = Path(os.path.abspath(folder))
    temporary = folder.with_name(f".{folder.name[:100]}.exporting.tmp")
    try:
        make_folder(folder.parent)
        with exclusive_folder(temporary) as content:
            safetensors.torch.save_file(tensors, content / WEIGHTS, {"format": "pt"})
            sync_file(content / WEIGHTS)
            write_synced(content / CONFIG, write_json_text(config))
            sync_folder(content)
            content.rename(folder)  # an empty folder is replaced, another is not
            sync_folder(folder.parent)
    except BlockingIOError:
        raise UserError(
            f"another process is exporting to '{sanitize(str(folder))}'; wait for it"
        ) from None
    except (OSError, safetensors.SafetensorError) as error:
        raise UserError(
            f"cannot write '{sanitize(str(folder))}': {describe_os_error(error)}"
        ) from None

"""Weights between the published layouts and ours."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import safetensors
import torch
from torch import Tensor

from qkablate.disk import describe_os_error
from qkablate.errors import UserError, sanitize
from qkablate.pretrained.layouts import PREFIXES, TensorMap, is_constant
from qkablate.pretrained.published_config import Architecture
from qkablate.pretrained.tensor_header import TensorInfo, read_header

_FLOATS = ("F32", "F16", "BF16")
_POSITIONS = "wpe.weight"


def find_tensors(architecture: Architecture, files: list[Path]) -> dict[str, TensorInfo]:
    """Return the tensors of a model by their names without prefix, all checked but their values.

    UserError for a missing or an unexpected one, or another shape or type.
    """
    found: dict[str, tuple[str, TensorInfo]] = {}
    prefix, family = PREFIXES[architecture.family], architecture.family
    for file in files:
        for full, info in read_header(file).items():
            name = full.removeprefix(prefix)
            if name in found:
                raise UserError(f"{file.name}: {sanitize(full[:80])} is there twice")
            if not is_constant(family, name):
                found[name] = (full, info)
    entries = architecture.tensor_maps()
    if architecture.model.tied and "lm_head.weight" in found:
        entries["lm_head.weight"] = _tied_head(architecture)
    tensors, names = {}, [*found]
    for name, entry in entries.items():
        if name not in found:
            if architecture.may_lack(entry):
                continue
            raise UserError(
                f"{files[0].name}: {name} is missing, which config.json implies{_hint(name, names)}"
            )
        full, info = found.pop(name)
        shape = _published_shape(architecture, entry)
        if info.shape != shape:
            raise UserError(
                f"{info.file.name}: {sanitize(full)} has the shape {[*info.shape]}, and config.json"
                f" implies {[*shape]}"
            )
        if info.dtype not in _FLOATS:
            raise UserError(
                f"{info.file.name}: {sanitize(full)} has type {info.dtype}"
                f" (allowed: {', '.join(_FLOATS)})"
            )
        tensors[full] = info
    if found:
        full, info = next(iter(found.values()))
        raise UserError(
            f"{info.file.name}: {sanitize(full[:80])} is not a tensor of the model in config.json"
        )
    return tensors


def _tied_head(architecture: Architecture) -> TensorMap:
    """Return the map of an output head that is the embedding."""
    shape = (architecture.vocabulary, architecture.model.d_model)
    return TensorMap("lm_head.weight", shape, ("token_embedding.weight",))


def _hint(name: str, found: Iterable[str]) -> str:
    """Return how many blocks there are, where one that is missing may be the reason."""
    blocks = {int(m[1]) for other in found if (m := re.match(r"(?:h|layers)\.(\d{1,6})\.", other))}
    return f" (it has {len(blocks)} blocks)" if re.match(r"(h|layers)\.\d", name) else ""


def _published_shape(architecture: Architecture, entry: TensorMap) -> tuple[int, ...]:
    """Return the shape of a published tensor: a table of positions may be longer than ours."""
    if entry.name == _POSITIONS:
        return (architecture.context, architecture.model.d_model)
    return entry.shape


def load_tensors(
    architecture: Architecture,
    tensors: Mapping[str, TensorInfo],
    progress: Callable[[int], None],
) -> dict[str, Tensor]:
    """Return our weights in fp32 from the published ones; UserError for one that is not finite."""
    entries, prefix = architecture.tensor_maps(), PREFIXES[architecture.family]
    weights: dict[str, Tensor] = {}
    rows = {prefix + _POSITIONS: architecture.model.context, _POSITIONS: architecture.model.context}
    done, head = 0, None
    for file in dict.fromkeys(info.file for info in tensors.values()):
        for full, value in _read_values(
            file, [n for n in tensors if tensors[n].file == file], rows
        ):
            name = full.removeprefix(prefix)
            if name in entries:
                weights |= split_tensor(entries[name], value)
            else:
                head = value
            done += value.numel()
            progress(done)
    if head is not None and not torch.equal(head, weights["token_embedding.weight"]):
        raise UserError(
            "lm_head.weight is not the embedding, which config.json says"
            " (tie_word_embeddings: true)"
        )
    for entry in entries.values():  # those that the published model may lack
        for part in entry.parts:
            if part not in weights:
                weights[part] = torch.zeros(entry.shape)
    return weights


def _read_values(
    file: Path, names: Iterable[str], rows: Mapping[str, int]
) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors of a file in fp32, of some the first rows; UserError for one not finite."""
    try:
        with safetensors.safe_open(file, framework="pt") as content:
            for name in names:
                value = content.get_slice(name)[: rows.get(name)].float()
                if not value.isfinite().all():
                    raise UserError(f"{file.name}: {sanitize(name)} has values that are not finite")
                yield name, value
    except (OSError, safetensors.SafetensorError) as error:
        reason = sanitize(describe_os_error(error)[:200])
        raise UserError(f"{file.name}: it cannot be read: {reason}") from None


def split_tensor(entry: TensorMap, value: Tensor) -> dict[str, Tensor]:
    """Return our tensors of a published one."""
    value = value.T if entry.transposed else value
    parts = value.chunk(len(entry.parts), -1)
    return {
        name: part.clone(memory_format=torch.contiguous_format)
        for name, part in zip(entry.parts, parts, strict=True)
    }


def join_tensors(entry: TensorMap, weights: Mapping[str, Tensor]) -> Tensor:
    """Return a published tensor of ours."""
    value = torch.cat([weights[part] for part in entry.parts], -1)
    return (value.T if entry.transposed else value).contiguous()

"""Small safetensors files under a header that says which run, step and data they belong to."""

import dataclasses
import hashlib
import json
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import safetensors.numpy
from safetensors import SafetensorError

from qkablate.disk import make_folder, read_file, write_atomic
from qkablate.strict_json import from_json, parse_json

H = TypeVar("H")

_HEADER_BYTES = 4096  # at most; ours is far smaller
_KEY = "header"  # in the metadata of safetensors


@dataclass(frozen=True)
class TensorFile(Generic[H]):
    """File format: a header dataclass, and tensors with their types and numbers of dimensions."""

    header: type[H]
    tensors: dict[str, tuple[type[np.generic], int]]
    max_bytes: int  # of the tensors

    def write(self, path: Path, header: H, *tensors: np.ndarray) -> None:
        """Write all of it or nothing; the same content gives the same bytes."""
        make_folder(path.parent)
        for unfinished in path.parent.glob(f".*{path.suffix}.*.tmp"):
            unfinished.unlink(missing_ok=True)
        content = {
            name: np.ascontiguousarray(tensor, dtype)
            for (name, (dtype, _)), tensor in zip(self.tensors.items(), tensors, strict=True)
        }
        # A single key: the order of several would change from process to process.
        fields = {**vars(header), "sha256": _checksum(header, content)}
        write_atomic(path, safetensors.numpy.save(content, {_KEY: json.dumps(fields)}))

    def read(self, path: Path) -> tuple[H, list[np.ndarray]]:
        """Return the header and the tensors; ValueError for what `write` does not write."""
        try:
            fields, content = self._load(path)
        except OSError as error:
            raise ValueError(error.strerror or "it cannot be read") from None
        except (SafetensorError, LookupError, TypeError, AttributeError):
            raise ValueError("it is not what a run writes") from None
        digest = fields.pop("sha256", None)
        header = from_json(self.header, fields, "its header")
        if content.keys() != self.tensors.keys():
            raise ValueError(f"it does not hold {' and '.join(self.tensors)}")
        tensors = [content[name] for name in self.tensors]
        for (name, (dtype, dimensions)), tensor in zip(self.tensors.items(), tensors, strict=True):
            if tensor.dtype != dtype or tensor.ndim != dimensions or not tensor.size:
                raise ValueError(f"its {name} has type {tensor.dtype} and shape {tensor.shape}")
        if _checksum(header, content) != digest:
            raise ValueError("its checksum is wrong")
        return header, tensors

    def _load(self, path: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        status = path.lstat()
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("it is not a regular file")
        if status.st_size > self.max_bytes + _HEADER_BYTES:
            raise ValueError("it is too large")
        content = read_file(path)
        size = int.from_bytes(content[:8], "little")
        if size > _HEADER_BYTES:
            raise ValueError("its header is too long")
        fields = parse_json(parse_json(content[8 : 8 + size])["__metadata__"][_KEY])
        return dict(fields), safetensors.numpy.load(content)


def _checksum(header: Any, tensors: dict[str, np.ndarray]) -> str:
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    digest = hashlib.sha256(
        json.dumps([dataclasses.asdict(header), shapes], sort_keys=True).encode()
    )
    for name in sorted(tensors):
        digest.update(tensors[name].tobytes())
    return digest.hexdigest()

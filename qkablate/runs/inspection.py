"""Measures of `qkablate inspect` of an imported run: inspection.json in its folder.

It belongs to the weights whose sha256 it names, so that a report can show it without them.
"""

from pathlib import Path
from typing import Any

from qkablate.disk import read_file
from qkablate.runs.records import is_number, write_json
from qkablate.strict_json import parse_json

FILE_NAME = "inspection.json"
_WEIGHTS = "weights.safetensors"
_MAX_BYTES = 2**26


def recorded_weights(folder: Path) -> str:
    """Return the sha256 of the newest weights of a run as its checkpoint states it; '' if none."""
    for sums in sorted(folder.glob("checkpoints/step-*/SHA256SUMS"), reverse=True):
        try:
            lines = read_file(sums, last=2**16).decode("utf-8", "replace").splitlines()
        except OSError:
            continue
        pairs = (line.split("  ", 1) for line in lines)
        return next((pair[0] for pair in pairs if pair[1:] == [_WEIGHTS]), "")
    return ""


def write_inspection(folder: Path, parts: dict[str, Any]) -> None:
    """Write what was measured; parts that were measured before of the same weights are kept."""
    weights = recorded_weights(folder)
    try:
        known = read_inspection(folder) or {}
    except ValueError:
        known = {}
    write_json(folder / FILE_NAME, {**known, **parts, "weights": weights})


def read_inspection(folder: Path) -> dict[str, Any] | None:
    """Return what was measured of the run's weights, or None; ValueError for any other file."""
    path = folder / FILE_NAME
    try:
        size = path.lstat().st_size
    except OSError:
        return None
    try:
        if size > _MAX_BYTES:
            raise ValueError("it is too large")
        content = parse_json(read_file(path))
    except (OSError, RecursionError) as error:
        raise ValueError(str(error)) from None
    if not isinstance(content, dict):
        raise ValueError("it is not what `qkablate inspect` writes")
    if not content.get("weights") or content["weights"] != recorded_weights(folder):
        raise ValueError("it was measured of other weights")
    return content


def check_forms(value: Any) -> dict[str, Any]:
    """Return the forms of a file; ValueError if they are not what `inspect --variants` writes."""
    try:
        numbers = [value["exact_below"]]
        words = [value["precision"], *value["obstacles"], *value["obstacles"].values()]
        shapes = set()
        for form in value["forms"]:
            words.append(form["variant"])
            numbers += [form["share"], *(form[key] or 0 for key in ("scores", "output", "logits"))]
            heads = []
            for layer in form["layers"]:
                heads += [len(layer["scores_H"]), len(layer["output_H"])]
                values = [layer["scores"], layer["output"], *layer["scores_H"], *layer["output_H"]]
                numbers += [number or 0 for number in values]
            shapes.add((len(form["layers"]), *heads))
        valid = all(map(is_number, numbers)) and all(isinstance(word, str) for word in words)
        if valid and len(shapes) == 1 and min(shapes.pop()) > 0:
            assert isinstance(value, dict)
            return value
    except (LookupError, TypeError, AttributeError):
        pass
    raise ValueError("its forms are not what `qkablate inspect --variants` writes")

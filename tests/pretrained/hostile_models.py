"""Hostile and damaged folders of published models, and the reasons why they are refused."""

import json
import math
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.pretrained.published import split_weights

Header = dict[str, Any]
BIAS = "transformer.ln_f.bias"
_EMPTY = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}


def _set(**values: Any) -> Callable[[Header], Header]:
    """Return a function that changes the entry of one tensor."""
    return lambda header: header | {BIAS: header[BIAS] | values}


def _repeat(header: Header) -> bytes:
    """Return a header that names a tensor twice, at different places."""
    entry = json.dumps({BIAS: header[BIAS] | {"data_offsets": [0, 64]}})
    return (json.dumps(header)[:-1] + "," + entry[1:]).encode()


# Changes of a header, and the message.
HEADERS: dict[str, tuple[Callable[[Header], Header | bytes], str]] = {
    "negative offsets": (_set(data_offsets=[-64, 0]), "its entry is damaged"),
    "offsets in reverse": (_set(data_offsets=[64, 0]), "its entry is damaged"),
    "offsets beyond the file": (_set(data_offsets=[10**12, 10**12 + 64]), "overlap, or leave gaps"),
    "overlapping offsets": (_set(data_offsets=[0, 64]), "overlap, or leave gaps"),
    "three offsets": (_set(data_offsets=[0, 0, 64]), "its entry is damaged"),
    "another product": (_set(shape=[17]), "its entry is damaged"),
    "a product that overflows": (_set(shape=[2**32, 2**32]), "its entry is damaged"),
    "a huge shape": (_set(shape=[2**49], data_offsets=[0, 2**51]), "damaged"),
    "a hundred dimensions": (_set(shape=[1] * 99 + [16]), "its entry is damaged"),
    "a fraction": (_set(shape=[16.0]), "its entry is damaged"),
    "a wrong type": (_set(dtype="F64"), "its entry is damaged"),
    "an unknown type": (_set(dtype="\x1b[31mF8"), "has type .\\[31mF8 "),
    "a list as type": (_set(dtype=[]), "its entry is damaged"),
    "a name twice": (_repeat, "has a name twice"),
    "no entries": (lambda header: {**header, BIAS: 7}, "its entry is damaged"),
    "not a number": (
        lambda header: json.dumps(header).replace("[16]", "[NaN]").encode(),
        "its entry is damaged",
    ),
    "a list": (lambda header: b"[]", "not a map"),
    "deep maps": (lambda header: b'{"a":' * 100_000, "not JSON"),
    "long numbers": (lambda header: b'{"a":' + b"9" * 5000 + b"}", "not JSON"),
    "another encoding": (lambda header: json.dumps(header).encode("utf-16"), "not JSON"),
}


def lie_in_header(change: Callable[[Header], Header | bytes]) -> Callable[[Path], None]:
    """Return a function that changes the header of the weights in a folder."""

    def plant(folder: Path) -> None:
        path = folder / "model.safetensors"
        content = path.read_bytes()
        end = 8 + struct.unpack("<Q", content[:8])[0]
        header = change(json.loads(content[8:end]))
        text = header if isinstance(header, bytes) else json.dumps(header).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + content[end:])

    return plant


def set_config(**values: Any) -> Callable[[Path], None]:
    """Return a function that sets values of a config.json."""

    def plant(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return plant


def _write(name: str, content: bytes) -> Callable[[Path], None]:
    def plant(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).write_bytes(content)

    return plant


def _put(name: str, make: Callable[[Path], object]) -> Callable[[Path], None]:
    """Return a function that makes something else of a file."""

    def plant(folder: Path) -> None:
        (folder / name).unlink()
        make(folder / name)

    return plant


def _name_shard(name: Any) -> Callable[[Path], None]:
    """Return a function that lets the index name a file for one tensor."""

    def plant(folder: Path) -> None:
        split_weights(folder)
        path = folder / "model.safetensors.index.json"
        places = json.loads(path.read_text())["weight_map"]
        path.write_text(json.dumps({"weight_map": places | {"transformer.wte.weight": name}}))

    return plant


def _replace_shard(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def plant(folder: Path) -> None:
        split_weights(folder)
        _put("part-1.safetensors", make)(folder)

    return plant


def _promise_weights(folder: Path) -> None:
    """Write a sparse file of 4 TB that has all the bytes of its header, and the config of it."""
    d, vocabulary = 1024, 2**30
    set_config(vocab_size=vocabulary, n_embd=d, n_layer=1, n_head=4, n_inner=4 * d)(folder)
    shapes: dict[str, tuple[int, ...]] = {"wte.weight": (vocabulary, d), "wpe.weight": (16, d)}
    block: dict[str, tuple[int, ...]] = {
        **{"ln_1.weight": (d,), "ln_1.bias": (d,), "ln_2.weight": (d,), "ln_2.bias": (d,)},
        **{"attn.c_attn.weight": (d, 3 * d), "attn.c_attn.bias": (3 * d,)},
        **{"attn.c_proj.weight": (d, d), "attn.c_proj.bias": (d,)},
        **{"mlp.c_fc.weight": (d, 4 * d), "mlp.c_fc.bias": (4 * d,)},
        **{"mlp.c_proj.weight": (4 * d, d), "mlp.c_proj.bias": (d,)},
    }
    shapes |= {f"h.0.{name}": shape for name, shape in block.items()}
    shapes |= {"ln_f.weight": (d,), "ln_f.bias": (d,)}
    header, end = {}, 0
    for name, shape in shapes.items():
        size = 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)


_NAMES = ["../../outside/x.safetensors", "/etc/passwd", "a/b.safetensors", "\x1b[31m.safetensors"]
_NAMES += ["..safetensors/", "x" * 5000 + ".safetensors", ".safetensors", "pytorch_model.bin"]
_SIZES: list[Any] = [2**31 - 1, 10**400, -1, 0, True, 1e300, float("nan"), [], "\x1b[31m"]
# Functions that make a good folder hostile, and the message.
FOLDERS: dict[str, tuple[Callable[[Path], None], str]] = {
    **{
        f"a header with {name}": (lie_in_header(c), reason) for name, (c, reason) in HEADERS.items()
    },
    **{
        f"a config with {name}={value}": (set_config(**{name: value}), "config.json|implies")
        for name in ("n_layer", "n_embd", "n_head", "n_positions", "n_inner", "vocab_size")
        for value in _SIZES
    },
    "a config of many layers": (set_config(n_layer=10_000), "is missing"),
    "a config of a list as type": (set_config(model_type=[[]]), "model_type"),
    "a config with deep lists": (_write("config.json", b'{"n_embd":' + b"[" * 10**6), "not JSON"),
    "a config with lists of some depth": (
        _write("config.json", b'{"model_type":' + b"[" * 900 + b"]" * 900 + b"}"),
        "model_type",
    ),
    "a config with many lists": (_write("config.json", b"[" + b"[]," * 10**7 + b"0]"), "larger"),
    "a config that is empty": (_write("config.json", b""), "not JSON"),
    "a config that is no text": (_write("config.json", bytes(range(256))), "not JSON"),
    "a config that is a pipe": (_put("config.json", os.mkfifo), "no config.json"),
    "a config that is a device": (
        _put("config.json", lambda path: path.symlink_to("/dev/zero")),
        "no config.json",
    ),
    "weights that are a folder": (_put("model.safetensors", Path.mkdir), "no model.safetensors"),
    "weights that are a pipe": (_put("model.safetensors", os.mkfifo), "no model.safetensors"),
    "weights that are a device": (
        _put("model.safetensors", lambda path: path.symlink_to("/dev/zero")),
        "no model.safetensors",
    ),
    "weights that are a link to another file": (
        _put("model.safetensors", lambda path: path.symlink_to("/etc/passwd")),
        "not a safetensors file",
    ),
    "weights that are a link to themselves": (
        _put("model.safetensors", lambda path: path.symlink_to(path)),
        "no model.safetensors",
    ),
    "weights larger than the disk": (_promise_weights, "free"),
    "metadata that are no texts": (
        lie_in_header(lambda header: header | {"__metadata__": {"a": {"b": 1}}}),
        "cannot be read",
    ),
    "a tensor with a hostile name": (
        lie_in_header(lambda header: header | {"\x1b]0;stolen\x07\n../../x": _EMPTY}),
        "is not a tensor of the model",
    ),
    **{
        f"a shard called {name[:30]}": (_name_shard(name), "is not the name of a safetensors file")
        for name in _NAMES
    },
    **{
        f"a shard that is {name!r}": (_name_shard(name), "is not the name of a safetensors file")
        for name in (5, None, ["a"], {"a": 1})
    },
    "a shard that is missing": (_replace_shard(lambda path: None), "part-1.safetensors"),
    "a shard that is a pipe": (_replace_shard(os.mkfifo), "part-1.safetensors"),
    "a shard that is a folder": (_replace_shard(Path.mkdir), "part-1.safetensors"),
}

"""Hostile content in place of every file that a command reads.

No file of a run, a sweep, a claim or a data set may run code, use the network, write outside the
command's folders, exhaust the memory, or send control sequences to the terminal; and training that
starts from it ends with the same loss as without the attack.
"""

import functools
import gzip
import hashlib
import io
import json
import os
import pickle
import random
import re
import shutil
import struct
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from qkablate.runs import attention_map, lease
from qkablate.sweeps.engines.base import LOG_FILE
from tests.torture import sandbox
from tests.torture.sandbox import CLAIM, SECRET, SWEEP, TINY, CommandResult
from tests.torture.tally import Tally

RESUME = ["train", "variant=merged_w", *TINY]  # an interrupted run
RERUN = [*RESUME, "seed=3"]  # a finished run
CLAIM_WORDS = ["mine.yaml", *TINY]
MEMORY = 2**29  # bytes that a command may allocate beyond its imports
_CONTROL_CHARACTERS = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\x9b\u202e]")
_CONTROL_TEXT = (
    '\x1b]0;stolen\x07\x1b[31m\u202e<script>alert(1)</script><img src=x onerror="alert(2)">'
)


class World:
    """Target of an attack: a sandbox of outputs, and a folder outside it that must not change."""

    def __init__(self, folder: Path) -> None:
        self.box, self.saved, self.outside = (folder / n for n in ("box", "kept", "outside"))
        self.marker = folder / "marker"
        sandbox.make_box(self.box)
        (self.box / "mine.yaml").write_text(CLAIM, encoding="utf-8")
        for variant in ("standard", "no_q"):
            for seed in (0, 1):
                sandbox.run_successfully(
                    ["train", f"variant={variant}", f"seed={seed}", *TINY], self.box
                )
        sandbox.run_successfully(SWEEP, self.box)  # which has nothing to train
        sandbox.run_command(["claim", "run", *CLAIM_WORDS], self.box, before=_train_nothing)
        sandbox.run_command(RESUME, self.box, before=sandbox.interrupt_at(10))
        self.interrupted = self.run("merged_w-d16-h2-s0-*").name
        sandbox.run_command(RERUN, self.box)
        self.finished = self.run("merged_w-d16-h2-s3-*").name
        self.swept = self.run("no_q-d16-h2-s1-*").name
        self.sweep = next((self.box / "outputs" / "sweeps").glob("small-*")).name
        shutil.copytree(self.box, self.saved, symlinks=True)
        sandbox.run_command(RESUME, self.box)
        self.losses = {
            name: _read_loss(self.box, name) for name in (self.interrupted, self.finished)
        }
        shutil.copytree(self.run(self.interrupted), self.outside / "run")
        (self.outside / "precious.txt").write_text("precious\n" * 99, encoding="utf-8")
        shutil.copytree(self.outside, folder / "safe")
        self.before = _read_tree(folder)

    def run(self, pattern: str) -> Path:
        return next((self.box / "outputs" / "runs").glob(pattern))


def _train_nothing() -> None:
    """Replace the launcher, so that a claim writes its files and trains nothing."""
    from qkablate.sweeps.running.launcher import Launcher

    sandbox.replace(Launcher, "run", lambda launcher: 1)


def _read_loss(box: Path, name: str) -> object:
    path = box / "outputs" / "runs" / name / "result.json"
    return json.loads(path.read_bytes())["loss"]


def _read_tree(folder: Path) -> dict[str, object]:
    """Return everything outside the sandbox, which must not change."""
    tree: dict[str, object] = {}
    for path in [*folder.iterdir(), *(folder / "outside").rglob("*")]:
        if not path.name.startswith("box"):
            tree[str(path)] = path.read_bytes() if path.is_file() else path.lstat().st_mode
    return tree


# Contents that replace a file.

Payload = Callable[[World, bytes], bytes]


class _Harm:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> object:
        return os.system, (f"touch {self.marker}",)


def _torch_file(world: World, _: bytes) -> bytes:
    import torch

    buffer = io.BytesIO()
    torch.save({"optimizer": _Harm(world.marker)}, buffer)
    return buffer.getvalue()


def _numpy_file(world: World, _: bytes) -> bytes:
    import numpy as np

    buffer = io.BytesIO()
    np.save(buffer, np.array([_Harm(world.marker)], dtype=object), allow_pickle=True)
    return buffer.getvalue()


def _zip_bomb(_: World, before: bytes) -> bytes:
    """Return the file itself if it is a zip, with inflated entries."""
    buffer = io.BytesIO()
    names, content = ["a"], {}
    if zipfile.is_zipfile(io.BytesIO(before)):
        with zipfile.ZipFile(io.BytesIO(before)) as archive:
            names = archive.namelist()
            content = {name: archive.read(name) for name in names if "/data/" not in name}
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in names:
            archive.writestr(name, content.get(name, bytes(2**28)))
    return buffer.getvalue()


def _huge_shape(_: World, __: bytes) -> bytes:
    header = {"a": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}}
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text


def _hydra_target(world: World, before: bytes) -> bytes:
    """Add Hydra's call of a function to every mapping of the file."""
    call = {"_target_": "os.system", "_args_": [f"touch {world.marker}"]}

    def transform(value: object) -> object:
        if isinstance(value, dict):
            return {key: transform(item) for key, item in value.items()} | call
        return [transform(item) for item in value] if isinstance(value, list) else value

    try:
        return json.dumps(transform(json.loads(before))).encode()
    except ValueError:
        lines = "".join(f"{key}: {json.dumps(value)}\n" for key, value in call.items())
        return before + b"\n" + lines.encode()


def _add_control_text(_: World, before: bytes) -> bytes:
    """Put control sequences into every string (YAML: into one)."""

    def transform(value: object) -> object:
        if isinstance(value, dict):
            return {key: transform(item) for key, item in value.items()}
        if isinstance(value, list):
            return [transform(item) for item in value]
        return value + _CONTROL_TEXT if isinstance(value, str) else value

    try:
        return json.dumps(transform(json.loads(before))).encode()
    except ValueError:
        return re.sub(
            rb"name: .*", lambda _: b"name: " + json.dumps(_CONTROL_TEXT).encode(), before
        )


PAYLOADS: dict[str, Payload] = {
    "a pickle": lambda world, _: pickle.dumps(_Harm(world.marker)),
    "an old pickle": lambda world, _: pickle.dumps(_Harm(world.marker), 0),
    "a torch file": _torch_file,
    "a numpy file": _numpy_file,
    "a zip bomb": _zip_bomb,
    "a gzip bomb": lambda *_: gzip.compress(bytes(2**28), 1),
    "deep lists": lambda *_: b"[" * 200_000,
    "deep maps": lambda *_: b'{"a":' * 200_000,
    "a huge header": lambda *_: struct.pack("<Q", 2**62) + b"{}",
    "a long header": lambda *_: struct.pack("<Q", 2**34) + b'{"a":' + b" " * 999,
    "a huge shape": _huge_shape,
    "a YAML tag": lambda world, _: (
        f'a: !!python/object/apply:os.system ["touch {world.marker}"]\n'.encode()
    ),
    "aliases": lambda *_: b"".join(
        b"a%d: &a%d [%s]\n" % (i, i, b",".join([b"*a%d" % (i - 1)] * 9) or b"x")
        for i in range(1, 12)
    ).replace(b"[*a0,*a0,*a0,*a0,*a0,*a0,*a0,*a0,*a0]", b"[x]"),
    "a variable": lambda _, before: (
        before.replace(b"out: outputs", b"out: ${oc.env:PLANTED}") + b"\nname: ${oc.env:PLANTED}\n"
    ),
    "a call": _hydra_target,
    "control sequences": _add_control_text,
    "long numbers": lambda _, before: re.sub(rb"\b\d+\b", b"9" * 5000, before) or b"9" * 5000,
    "no numbers": lambda _, before: re.sub(rb"\b\d+(\.\d+)?\b", b"NaN", before) or b"NaN",
    "null": lambda *_: b"null",
    "a list": lambda *_: b"[1]",
    "nothing": lambda *_: b"",
    "noise": lambda _, before: random.Random(len(before)).randbytes(5000),
}

# Files to replace, and the commands that read them. `{interrupted}` is a run, `{sweep}` a sweep.


@dataclass(frozen=True)
class Place:
    path: str
    commands: list[list[str]]
    checksums: bool = False  # update its checksum, as an attacker would
    is_new: bool = False  # the outputs contain no such file


_RUN = "outputs/runs/{interrupted}"
_STEP = f"{_RUN}/checkpoints/step-00000008"
_SWEPT = "outputs/runs/{swept}"
_SAMPLE = ["sample", "{interrupted}", "prompt=the", "tokens=3"]
_INSPECT = ["inspect", "{interrupted}", "data.cache=cache"]
_PAIR = [
    ["compare", "{finished}", "{swept}"],
    ["report", "{finished}", "{interrupted}", "-o", "page.html"],
]
_TABLES = [
    ["status", "{sweep}"],
    ["results", "{sweep}"],
    ["results", "{sweep}", "--format", "json"],
]
_PAGE = [["report", "{sweep}", "-o", "page.html"]]
_CLAIM = [["claim", "show", *CLAIM_WORDS], ["claim", "list"], ["report", "mine", "-o", "page.html"]]
_SYNC = [["sync", "--dry-run"], ["sync", "{interrupted}", "--dry-run"], ["sync"]]
_DATA = ["data=text", "data.path=corpus.txt", "data.cache=cache"]

PLACES = {
    "weights": Place(f"{_STEP}/weights.safetensors", [RESUME, _SAMPLE, _INSPECT], checksums=True),
    "state": Place(f"{_STEP}/state.pt", [RESUME], checksums=True),
    "progress": Place(f"{_STEP}/progress.json", [_SAMPLE, RESUME], checksums=True),
    "sums": Place(f"{_STEP}/SHA256SUMS", [_SAMPLE, RESUME]),
    "config": Place(
        f"{_RUN}/config.yaml", [_SAMPLE, ["verify", "{interrupted}"], _INSPECT, *_PAIR, RESUME]
    ),
    "tokenizer": Place(
        f"{_RUN}/tokenizer.json", [_SAMPLE, [*_INSPECT, "--json", "--text", "the cat"], RESUME]
    ),
    "environment": Place(f"{_RUN}/environment.json", [_PAIR[1], RESUME]),
    "metrics": Place(f"{_RUN}/metrics.jsonl", [_PAIR[1], RESUME]),
    "lease": Place(f"{_RUN}/{lease.FOLDER}/00000099", [_PAIR[1], RESUME], is_new=True),
    "result": Place("outputs/runs/{finished}/result.json", [*_PAIR, RERUN]),
    "swept result": Place(f"{_SWEPT}/result.json", [*_TABLES, *_PAGE]),
    "swept config": Place(f"{_SWEPT}/config.yaml", [["compare", "{finished}", "{swept}"], *_PAGE]),
    "swept environment": Place(f"{_SWEPT}/environment.json", [*_TABLES, *_PAGE]),
    "swept metrics": Place(f"{_SWEPT}/metrics.jsonl", [*_TABLES, *_PAGE]),
    "log": Place(f"{_SWEPT}/{LOG_FILE}", _TABLES, is_new=True),
    "W&B's log": Place(
        f"{_RUN}/wandb/offline-run-20260101_000000-x/run-x.wandb", _SYNC, is_new=True
    ),
    "manifest": Place("outputs/sweeps/{sweep}/manifest.json", [*_TABLES, *_PAGE, SWEEP]),
    "table": Place("outputs/sweeps/{sweep}/results.parquet", [*_TABLES, *_PAGE]),
    "claim": Place("outputs/claims/{claim}/claim.json", _CLAIM),
    "claim's file": Place("mine.yaml", _CLAIM[:1]),
    "tokens": Place("cache/{data}/train.bin", [["data", "show", *_DATA], RESUME]),
    "data's manifest": Place(
        "cache/{data}/manifest.json", [["data", "info", *_DATA], _INSPECT, RESUME]
    ),
    "data's tokenizer": Place(
        "cache/{data}/tokenizer.json", [["data", "list", "data.cache=cache"], RESUME]
    ),
}

# Other traps: links, pipes, manifests and texts.


@dataclass(frozen=True)
class Trap:
    """A planted object, the commands that meet it, and the message of the first of them."""

    plant: Callable[[World], object]
    commands: list[list[str]]
    message: str = ""


def _make_link(path: str, to: str) -> Callable[[World], object]:
    """Return a function that replaces a file by a link to `to` in the outside folder."""

    def plant(world: World) -> None:
        target = world.box / _fill_names(world, path)
        if target.is_dir() and not target.is_symlink():
            shutil.rmtree(target)
        target.unlink(missing_ok=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.symlink_to(world.outside / to)

    return plant


def _rewrite_manifest(change: Callable[[World, dict], object]) -> Callable[[World], object]:
    """Return a function that rewrites a manifest with a valid checksum, as an attacker would."""

    def plant(world: World) -> None:
        path = world.box / "outputs" / "sweeps" / world.sweep / "manifest.json"
        content = json.loads(path.read_bytes())
        change(world, content)
        content.pop("sha256")
        text = json.dumps(content, sort_keys=True).encode()
        content["sha256"] = hashlib.sha256(text).hexdigest()
        path.write_text(json.dumps(content), encoding="utf-8")
        for run in (world.box / "outputs" / "runs").glob(
            "*-s1-*"
        ):  # which leaves something to train
            shutil.rmtree(run)

    return plant


def _edit_arms(
    section: str, key: str, value: Callable[[World], object]
) -> Callable[[World], object]:
    def change(world: World, content: dict) -> None:
        for arm in content["arms"].values():
            holder = arm["config"][section] if section else arm["config"]
            holder[key] = value(world)

    return _rewrite_manifest(change)


def _edit_runs(key: str, value: str) -> Callable[[World], object]:
    def change(world: World, content: dict) -> None:
        for run in content["runs"]:
            run[key] = value.format(outside=world.outside)

    return _rewrite_manifest(change)


def _harmful_file(world: World) -> str:
    """Write a circuit that does harm when imported, although no user requested it."""
    path = world.outside.with_name("box") / "evil.py"
    path.write_text(f"import os\nos.system('touch {world.marker}')\n", encoding="utf-8")
    return str(path)


def _write_text(name: str, content: Callable[[World], bytes]) -> Callable[[World], object]:
    return lambda world: (world.box / name).write_bytes(content(world))


def _data_commands(name: str, *words: str) -> list[list[str]]:
    keys = ["data=text", f"data.path={name}", "data.cache=cache", *words]
    return [["data", "prepare", *keys], ["train", "variant=standard", *TINY, *keys]]


def _compress_zst(content: bytes) -> bytes:
    import pyarrow

    sink = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(sink, "zstd") as packed:
        packed.write(content)
    return sink.getvalue().to_pybytes()


def _make_parquet_bomb(world: World) -> bytes:
    """Return 64 GB of text in a few kilobytes: one repeated word."""
    import pyarrow
    from pyarrow import parquet

    sink = pyarrow.BufferOutputStream()
    words = pyarrow.DictionaryArray.from_arrays(
        pyarrow.array([0] * 2**16, pyarrow.int32()), pyarrow.array(["x" * 2**20])
    )
    parquet.write_table(
        pyarrow.table({"text": words}), sink, compression="zstd", store_schema=False
    )
    return sink.getvalue().to_pybytes()


def _make_loop(world: World) -> None:
    (world.box / "texts").mkdir()
    (world.box / "texts" / "a.txt").write_text(sandbox.CORPUS, encoding="utf-8")
    (world.box / "texts" / "again").symlink_to(world.box / "texts")


def _link_attempt(world: World) -> None:
    (world.run(world.interrupted) / "attempt-1.tmp").symlink_to(world.outside / "run")


def _link_lock(world: World) -> None:
    """Replace the lock of the next preparation by a link."""
    data = next(path for path in (world.box / "cache").glob("text-*") if path.is_dir())
    shutil.rmtree(data)
    lock = data.with_suffix(".lock")
    lock.unlink(missing_ok=True)
    lock.symlink_to(world.outside / "precious.txt")


def _link_preparation(world: World) -> None:
    """Replace the folder of the next preparation by a link."""
    data = next(path for path in (world.box / "cache").glob("text-*") if path.is_dir())
    shutil.rmtree(data)
    data.with_suffix(".tmp").symlink_to(world.outside / "run")


_OUTSIDE_PATHS = ["../../../outside/run", "/etc", "..", ".", "a/../../../outside"]
_LINKS = {
    "metrics": (f"{_RUN}/metrics.jsonl", "precious.txt"),
    "new metrics": (f"{_RUN}/metrics.jsonl", "nothing"),
    "checkpoints": (f"{_RUN}/checkpoints", "run/checkpoints"),
    "predictions": (f"{_RUN}/predictions", "run/predictions"),
    "attention map": (f"{_RUN}/{attention_map.FILE_NAME}", "precious.txt"),
    "config": (f"{_RUN}/config.yaml", "precious.txt"),
    "environment": (f"{_RUN}/environment.json", "precious.txt"),
    "result": (f"{_RUN}/result.json", "precious.txt"),
    "error": (f"{_RUN}/error.txt", "precious.txt"),
    "lease": (f"{_RUN}/{lease.FOLDER}", f"run/{lease.FOLDER}"),
    "attempts": (f"{_RUN}/attempts", "run"),
    "W&B's folder": (f"{_RUN}/wandb", "run"),
    "itself": (f"{_RUN}/metrics.jsonl", "../box/outputs/runs"),
}
TRAPS: dict[str, Trap] = {
    **{
        f"a link for {name}": Trap(_make_link(*link), [RESUME, [*RESUME, "--rerun"]], "is a link")
        for name, link in _LINKS.items()
    },
    "a link for an attempt": Trap(_link_attempt, [RESUME], "is a link"),
    "a link for a step": Trap(
        _make_link(_STEP, "run/checkpoints/step-00000012"), [RESUME, _SAMPLE]
    ),
    "a link for the next step": Trap(
        _make_link(f"{_RUN}/checkpoints/.step-00000012.tmp", "run"), [RESUME]
    ),
    "a link for a log": Trap(_make_link(f"{_SWEPT}/{LOG_FILE}", "precious.txt"), _TABLES),
    "a link for a sweep's runs": Trap(
        _make_link("outputs/sweeps/{sweep}/runs", "run"), [SWEEP], "is a link"
    ),
    "a link for a table": Trap(
        _make_link("outputs/sweeps/{sweep}/results.csv", "precious.txt"), [SWEEP, *_TABLES]
    ),
    "a link for a page": Trap(
        _make_link("outputs/sweeps/{sweep}/report.html", "precious.txt"), [["report", "{sweep}"]]
    ),
    "a link for an evaluation of a claim": Trap(
        _make_link("outputs/claims/{claim}/n9", "run"), _CLAIM
    ),
    "a link for tokens": Trap(
        _make_link("cache/{data}/train.bin", "precious.txt"), [RESUME], "is damaged"
    ),
    "a link for a lock": Trap(_link_lock, [RESUME], "data.cache"),
    "a link for a preparation": Trap(_link_preparation, [RESUME], "data.cache"),
    "a manifest that names a file to import": Trap(
        _edit_arms("variant", "file", _harmful_file), [SWEEP, *_TABLES]
    ),
    "a manifest with a cache elsewhere": Trap(
        _edit_arms("data", "cache", lambda world: str(world.outside / "cache")), [SWEEP, *_TABLES]
    ),
    "a manifest with a folder elsewhere": Trap(
        _edit_arms("", "out", lambda world: str(world.outside)), [SWEEP, *_TABLES]
    ),
    "a manifest with control sequences": Trap(
        _rewrite_manifest(lambda _, content: content.update(command=[_CONTROL_TEXT, "sweep"])),
        _TABLES,
    ),
    **{
        f"a manifest called {name}": Trap(
            _rewrite_manifest(lambda _, content, name=name: content.update(name=name)),
            [SWEEP, *_TABLES],
            "is damaged",
        )
        for name in (*_OUTSIDE_PATHS, _CONTROL_TEXT)
    },
    **{
        f"runs whose {key} is {name}": Trap(_edit_runs(key, name), [SWEEP, *_TABLES], "is damaged")
        for key in ("label", "id")
        for name in (*_OUTSIDE_PATHS, _CONTROL_TEXT)
    },
    **{
        f"{key}={name}": Trap(lambda _: None, [[*words, f"{key}={name}"]], key)
        for key, words in (("sweep.name", SWEEP), ("variant.name", RESUME))
        for name in ("'../../../outside/x'", "/elsewhere/x", "..", "'.'")
    },
    "a loop of folders": Trap(_make_loop, _data_commands("texts")),
    "a gzip bomb of text": Trap(
        _write_text("bomb.txt.gz", lambda _: gzip.compress(b"x" * 2**28, 1)),
        _data_commands("bomb.txt.gz")[:1],
    ),
    "a bomb of zeros": Trap(
        _write_text("bomb.txt.zst", lambda _: _compress_zst(bytes(2**30))),
        _data_commands("bomb.txt.zst"),
        "byte 0 is 0",
    ),
    "a bomb in one line": Trap(
        _write_text("bomb.jsonl.gz", lambda _: gzip.compress(b'{"text": "' + b"x" * 2**31, 1)),
        _data_commands("bomb.jsonl.gz"),
        "cannot read",
    ),
    "a bomb of rows": Trap(
        _write_text("bomb.parquet", _make_parquet_bomb),
        _data_commands("bomb.parquet")[:1],
        "cannot read",
    ),
    "a packed bomb of rows": Trap(
        _write_text("bomb.parquet.gz", lambda _: gzip.compress(bytes(2**31), 1)),
        _data_commands("bomb.parquet.gz"),
        "cannot read",
    ),
    "a deep line": Trap(
        _write_text("deep.jsonl", lambda _: b"[" * 10**6),
        _data_commands("deep.jsonl"),
        "line 1 .* is not JSON",
    ),
    "a field with a call": Trap(
        _write_text("call.jsonl", lambda w: json.dumps({"_target_": f"touch {w.marker}"}).encode()),
        _data_commands("call.jsonl"),
        "has no text",
    ),
    **{
        f"{' '.join(words)} of a torch file": Trap(
            _write_text("evil.pt", lambda world: _torch_file(world, b"")),
            [words],
            "evil.pt|variant.file",
        )
        for words in (
            *(["sample", "evil.pt"], ["verify", "evil.pt"], ["report", "evil.pt"]),
            *(["status", "evil.pt"], ["results", "evil.pt"], ["compare", "evil.pt", "{finished}"]),
            *(["claim", "show", "evil.pt"], [*RESUME, "variant.file=evil.pt"]),
            *(["data", "info", *_DATA, "data.path=evil.pt"], [*RESUME, "data.path=evil.pt"]),
            ["verify", "{interrupted}", "variant.file=evil.pt"],
        )
    },
}


def _fill_names(world: World, text: str) -> str:
    claims = world.saved / "outputs" / "claims"
    return text.format(
        interrupted=world.interrupted,
        finished=world.finished,
        swept=world.swept,
        sweep=world.sweep,
        claim=next(claims.iterdir()).name,
        data=next(path for path in (world.saved / "cache").iterdir() if path.is_dir()).name,
    )


def _replace_file(world: World, place: Place, payload: Payload) -> None:
    path = world.box / _fill_names(world, place.path)
    before = path.read_bytes() if path.is_file() else b"{}"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(payload(world, before))
    if place.checksums:
        checksums = path.with_name("SHA256SUMS")
        old, new = (hashlib.sha256(item).hexdigest() for item in (before, path.read_bytes()))
        checksums.write_text(checksums.read_text().replace(old, new))


def _make_pipe(world: World, place: Place) -> None:
    """Replace a file by a pipe without a writer, which blocks readers forever."""
    path = world.box / _fill_names(world, place.path)
    path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    os.mkfifo(path)


def _shorten_lease_timeout() -> None:
    """Shorten the timeout of a lease from a minute to a second."""
    sandbox.replace(lease, "TIMEOUT", 1.0)


def _judge(world: World, words: list[str], result: CommandResult) -> list[str]:
    """Return the problems of a command's reaction."""
    problems = [f"did harm: {item}" for item in result.harm]
    lines = result.err.splitlines()
    if world.marker.exists():
        problems.append("ran code")
        world.marker.unlink()
    if result.code not in (0, 1, 2, 3):
        problems.append(f"ended with {result.code}: {lines[-1:]}")
    if "Traceback" in result.all:
        problems.append(f"a traceback: {lines[-1:]}")
    if result.code == 2 and not (len(lines) >= 1 and lines[-1].startswith("qkablate: ")):
        problems.append(f"ended with 2, with the message {result.err[-300:]!r}")
    if result.code != 0 and not result.all.strip():
        problems.append(f"ended with {result.code} without a message")
    visible = result.err if words[0] == "sample" else result.all  # a model may print any bytes
    if raw := _CONTROL_CHARACTERS.search(visible):
        problems.append(f"sent {raw[0]!r} to the terminal")
    if SECRET in result.all:
        problems.append("revealed an environment variable")
    page = world.box / "page.html"
    if page.exists() and ("<script>alert(1)" in (text := page.read_text()) or "<img src=x" in text):
        problems.append("wrote unescaped HTML into the page")
    if words[0] == "train" and result.code not in (0, 2):
        problems.append(f"training ended with {result.code}: {result.all.strip()[-300:]!r}")
    if words in (RESUME, RERUN) and result.code == 0:
        name = world.interrupted if words == RESUME else world.finished
        if (loss := _read_loss(world.box, name)) != world.losses[name]:
            problems.append(f"another loss: {loss}, not {world.losses[name]}")
    return problems


def _check_places(world: World) -> None:
    """Raise an error if a file to replace does not exist, as after a rename in the package."""
    paths = [place.path for place in PLACES.values() if not place.is_new]
    for path in [world.saved / _fill_names(world, path) for path in paths]:
        if not path.exists():
            raise RuntimeError(f"fault_hostile: no command has written '{path}'")


def torture(cases: int, seed: int, folder: Path) -> Tally:
    sandbox.import_everything()
    world = World(folder)
    _check_places(world)
    placed = {
        f"{payload} for {place}": Trap(
            functools.partial(_replace_file, place=PLACES[place], payload=PAYLOADS[payload]),
            PLACES[place].commands,
        )
        for place in PLACES
        for payload in PAYLOADS
    } | {
        f"a pipe for {place}": Trap(
            functools.partial(_make_pipe, place=PLACES[place]), PLACES[place].commands
        )
        for place in PLACES
        if place != "claim's file"  # which may be a pipe
    }
    all_traps = [*placed.items(), *TRAPS.items()]
    tally = Tally()
    for name, trap in random.Random(seed).sample(all_traps, cases):
        tally.cases += 1
        sandbox.restore_box(world.saved, world.box)
        trap.plant(world)
        for number, words in enumerate(trap.commands):
            words = [_fill_names(world, word) for word in words]
            result = sandbox.run_command(
                words, world.box, memory=MEMORY, before=_shorten_lease_timeout
            )
            problems = _judge(world, words, result)
            if number == 0 and not re.search(trap.message, result.all):
                problems.append(
                    f"the message is not {trap.message!r} but {result.all.strip()[-300:]!r}"
                )
            tally.wrong += [f"{name}: {' '.join(words[:2])}: {item}" for item in problems]
        if _read_tree(folder) != world.before:
            tally.wrong.append(f"{name}: a file outside the sandbox changed")
            shutil.rmtree(world.outside)
            shutil.copytree(world.outside.with_name("safe"), world.outside)
    return tally


SHORT, FULL = 8, 300

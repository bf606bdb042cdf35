"""Hostile files in the place of everything a command reads.

Nothing of a run, a sweep, a claim or a data set may run code, reach out, write outside the folders
that are the command's, take the memory of the machine, or steer the terminal; and what was trained
from it ends with the loss it would have had.
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

from tests.torture import watched
from tests.torture.tally import Tally
from tests.torture.watched import CLAIM, SECRET, TINY, Said

RESUME = ["train", "variant=merged_w", *TINY]  # a run that was interrupted
AGAIN = [*RESUME, "seed=3"]  # one that is done
SWEEP = ["sweep", "sweep.name=small", "variant=standard,no_q", "seed=0,1", *TINY]
CLAIMED = ["mine.yaml", *TINY]
ROOM = 2**29  # bytes that a command may take, beyond what it takes anyhow
_RAW = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\x9b\u202e]")
_STEERS = '\x1b]0;stolen\x07\x1b[31m\u202e<script>alert(1)</script><img src=x onerror="alert(2)">'


class World:
    """Target of an attack: a box of outputs, and a folder beside it that must not change."""

    def __init__(self, folder: Path) -> None:
        self.box, self.kept, self.outside = (folder / n for n in ("box", "kept", "outside"))
        self.marker = folder / "marker"
        watched.begin(self.box)
        (self.box / "mine.yaml").write_text(CLAIM, encoding="utf-8")
        for variant in ("standard", "no_q"):
            for seed in (0, 1):
                watched.done(["train", f"variant={variant}", f"seed={seed}", *TINY], self.box)
        watched.done(SWEEP, self.box)  # which has nothing to train
        watched.command(["claim", "run", *CLAIMED], self.box, before=_train_nothing)
        watched.command(RESUME, self.box, before=watched.interrupt_at(10))
        self.rough = self.run("merged_w-d16-h2-s0-*").name
        watched.command(AGAIN, self.box)
        self.done = self.run("merged_w-d16-h2-s3-*").name
        self.swept = self.run("no_q-d16-h2-s1-*").name
        self.sweep = next((self.box / "outputs" / "sweeps").glob("small-*")).name
        shutil.copytree(self.box, self.kept, symlinks=True)
        watched.command(RESUME, self.box)
        self.losses = {name: _loss(self.box, name) for name in (self.rough, self.done)}
        shutil.copytree(self.run(self.rough), self.outside / "run")
        (self.outside / "precious.txt").write_text("precious\n" * 99, encoding="utf-8")
        shutil.copytree(self.outside, folder / "safe")
        self.before = _tree(folder)

    def run(self, pattern: str) -> Path:
        return next((self.box / "outputs" / "runs").glob(pattern))


def _train_nothing() -> None:
    """Write what a claim writes before its first run."""
    from qkablate.sweeps.running.launcher import Launcher

    Launcher.run = lambda launcher: 1


def _loss(box: Path, name: str) -> object:
    path = box / "outputs" / "runs" / name / "result.json"
    return json.loads(path.read_bytes())["loss"]


def _tree(folder: Path) -> dict[str, object]:
    """Everything but the box: nothing of it may change, and nothing be added."""
    found: dict[str, object] = {}
    for path in [*folder.iterdir(), *(folder / "outside").rglob("*")]:
        if not path.name.startswith("box"):
            found[str(path)] = path.read_bytes() if path.is_file() else path.lstat().st_mode
    return found


# What is put in the place of a file.

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


def _target(world: World, before: bytes) -> bytes:
    """Hydra's words for a function to call, in every map of what is there."""
    call = {"_target_": "os.system", "_args_": [f"touch {world.marker}"]}

    def spoilt(value: object) -> object:
        if isinstance(value, dict):
            return {key: spoilt(one) for key, one in value.items()} | call
        return [spoilt(one) for one in value] if isinstance(value, list) else value

    try:
        return json.dumps(spoilt(json.loads(before))).encode()
    except ValueError:
        lines = "".join(f"{key}: {json.dumps(value)}\n" for key, value in call.items())
        return before + b"\n" + lines.encode()


def _steering(_: World, before: bytes) -> bytes:
    """Put control sequences into every string (YAML: into one)."""

    def spoilt(value: object) -> object:
        if isinstance(value, dict):
            return {key: spoilt(one) for key, one in value.items()}
        if isinstance(value, list):
            return [spoilt(one) for one in value]
        return value + _STEERS if isinstance(value, str) else value

    try:
        return json.dumps(spoilt(json.loads(before))).encode()
    except ValueError:
        return re.sub(rb"name: .*", lambda _: b"name: " + json.dumps(_STEERS).encode(), before)


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
    "a call": _target,
    "a steered terminal": _steering,
    "long numbers": lambda _, before: re.sub(rb"\b\d+\b", b"9" * 5000, before) or b"9" * 5000,
    "no numbers": lambda _, before: re.sub(rb"\b\d+(\.\d+)?\b", b"NaN", before) or b"NaN",
    "null": lambda *_: b"null",
    "a list": lambda *_: b"[1]",
    "nothing": lambda *_: b"",
    "noise": lambda _, before: random.Random(len(before)).randbytes(5000),
}

# Where it is put, and which commands then read it. `{rough}` is a run, `{sweep}` a sweep.


@dataclass(frozen=True)
class Place:
    path: str
    commands: list[list[str]]
    sums: bool = False  # with its checksum, as someone would who means harm


_RUN = "outputs/runs/{rough}"
_STEP = f"{_RUN}/checkpoints/step-00000008"
_SWEPT = "outputs/runs/{swept}"
_SAMPLE = ["sample", "{rough}", "prompt=the", "tokens=3"]
_INSPECT = ["inspect", "{rough}", "data.cache=cache"]
_PAIR = [["compare", "{done}", "{swept}"], ["report", "{done}", "{rough}", "-o", "page.html"]]
_TABLES = [
    ["status", "{sweep}"],
    ["results", "{sweep}"],
    ["results", "{sweep}", "--format", "json"],
]
_PAGE = [["report", "{sweep}", "-o", "page.html"]]
_CLAIM = [["claim", "show", *CLAIMED], ["claim", "list"], ["report", "mine", "-o", "page.html"]]
_SYNC = [["sync", "--dry-run"], ["sync", "{rough}", "--dry-run"], ["sync"]]
_DATA = ["data=text", "data.path=corpus.txt", "data.cache=cache"]

PLACES = {
    "weights": Place(f"{_STEP}/weights.safetensors", [RESUME, _SAMPLE, _INSPECT], sums=True),
    "state": Place(f"{_STEP}/state.pt", [RESUME], sums=True),
    "progress": Place(f"{_STEP}/progress.json", [_SAMPLE, RESUME], sums=True),
    "sums": Place(f"{_STEP}/SHA256SUMS", [_SAMPLE, RESUME]),
    "config": Place(
        f"{_RUN}/config.yaml", [_SAMPLE, ["verify", "{rough}"], _INSPECT, *_PAIR, RESUME]
    ),
    "tokenizer": Place(
        f"{_RUN}/tokenizer.json", [_SAMPLE, [*_INSPECT, "--json", "--text", "the cat"], RESUME]
    ),
    "environment": Place(f"{_RUN}/environment.json", [_PAIR[1], RESUME]),
    "metrics": Place(f"{_RUN}/metrics.jsonl", [_PAIR[1], RESUME]),
    "claim on a run": Place(f"{_RUN}/lease/00000099", [_PAIR[1], RESUME]),
    "result": Place("outputs/runs/{done}/result.json", [*_PAIR, AGAIN]),
    "swept result": Place(f"{_SWEPT}/result.json", [*_TABLES, *_PAGE]),
    "swept config": Place(f"{_SWEPT}/config.yaml", [["compare", "{done}", "{swept}"], *_PAGE]),
    "swept environment": Place(f"{_SWEPT}/environment.json", [*_TABLES, *_PAGE]),
    "swept metrics": Place(f"{_SWEPT}/metrics.jsonl", [*_TABLES, *_PAGE]),
    "log": Place(f"{_SWEPT}/output.log", _TABLES),
    "W&B's log": Place(f"{_RUN}/wandb/offline-run-20260101_000000-x/run-x.wandb", _SYNC),
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

# What is no file in another's place.


@dataclass(frozen=True)
class Trap:
    """Something planted, the commands that come upon it, and what the first of them must say."""

    plant: Callable[[World], object]
    commands: list[list[str]]
    says: str = ""


def _link(path: str, to: str) -> Callable[[World], object]:
    """Link to something outside; `to` is its name there."""

    def plant(world: World) -> None:
        place = world.box / _named(world, path)
        if place.is_dir() and not place.is_symlink():
            shutil.rmtree(place)
        place.unlink(missing_ok=True)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(world.outside / to)

    return plant


def _rewrite_manifest(change: Callable[[World, dict], object]) -> Callable[[World], object]:
    """Rewrite a manifest with a valid checksum, as an attacker would."""

    def plant(world: World) -> None:
        path = world.box / "outputs" / "sweeps" / world.sweep / "manifest.json"
        content = json.loads(path.read_bytes())
        change(world, content)
        content.pop("sha256")
        text = json.dumps(content, sort_keys=True).encode()
        content["sha256"] = hashlib.sha256(text).hexdigest()
        path.write_text(json.dumps(content), encoding="utf-8")
        for run in (world.box / "outputs" / "runs").glob("*-s1-*"):  # there is something to train
            shutil.rmtree(run)

    return plant


def _of_arms(section: str, key: str, value: Callable[[World], object]) -> Callable[[World], object]:
    def change(world: World, content: dict) -> None:
        for arm in content["arms"].values():
            place = arm["config"][section] if section else arm["config"]
            place[key] = value(world)

    return _rewrite_manifest(change)


def _of_runs(key: str, value: str) -> Callable[[World], object]:
    def change(world: World, content: dict) -> None:
        for run in content["runs"]:
            run[key] = value.format(outside=world.outside)

    return _rewrite_manifest(change)


def _harmful_file(world: World) -> str:
    """Write a circuit that does harm when imported, and that no user named."""
    path = world.outside.with_name("box") / "evil.py"
    path.write_text(f"import os\nos.system('touch {world.marker}')\n", encoding="utf-8")
    return str(path)


def _text(name: str, content: Callable[[World], bytes]) -> Callable[[World], object]:
    return lambda world: (world.box / name).write_bytes(content(world))


def _data(name: str, *words: str) -> list[list[str]]:
    keys = ["data=text", f"data.path={name}", "data.cache=cache", *words]
    return [["data", "prepare", *keys], ["train", "variant=standard", *TINY, *keys]]


def _zst(content: bytes) -> bytes:
    import pyarrow

    sink = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(sink, "zstd") as packed:
        packed.write(content)
    return sink.getvalue().to_pybytes()


def _parquet(world: World) -> bytes:
    """64 GB of text in a few kilobytes: one word, repeated."""
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


def _loop(world: World) -> None:
    (world.box / "texts").mkdir()
    (world.box / "texts" / "a.txt").write_text(watched.CORPUS, encoding="utf-8")
    (world.box / "texts" / "again").symlink_to(world.box / "texts")


def _attempt(world: World) -> None:
    (world.run(world.rough) / "attempt-1.tmp").symlink_to(world.outside / "run")


def _lock(world: World) -> None:
    """Make the lock of the next preparation a link."""
    data = next(path for path in (world.box / "cache").glob("text-*") if path.is_dir())
    shutil.rmtree(data)
    lock = data.with_suffix(".lock")
    lock.unlink(missing_ok=True)
    lock.symlink_to(world.outside / "precious.txt")


def _unfinished(world: World) -> None:
    """Make the folder of the next preparation a link."""
    data = next(path for path in (world.box / "cache").glob("text-*") if path.is_dir())
    shutil.rmtree(data)
    data.with_suffix(".tmp").symlink_to(world.outside / "run")


_STRANGER = ["../../../outside/run", "/etc", "..", ".", "a/../../../outside"]
_LINKS = {
    "metrics": (f"{_RUN}/metrics.jsonl", "precious.txt"),
    "new metrics": (f"{_RUN}/metrics.jsonl", "nothing"),
    "checkpoints": (f"{_RUN}/checkpoints", "run/checkpoints"),
    "predictions": (f"{_RUN}/predictions", "run/predictions"),
    "example": (f"{_RUN}/attention_map.safetensors", "precious.txt"),
    "config": (f"{_RUN}/config.yaml", "precious.txt"),
    "environment": (f"{_RUN}/environment.json", "precious.txt"),
    "result": (f"{_RUN}/result.json", "precious.txt"),
    "error": (f"{_RUN}/error.txt", "precious.txt"),
    "lease": (f"{_RUN}/lease", "run/lease"),
    "attempts": (f"{_RUN}/attempts", "run"),
    "W&B's folder": (f"{_RUN}/wandb", "run"),
    "itself": (f"{_RUN}/metrics.jsonl", "../box/outputs/runs"),
}
TRAPS: dict[str, Trap] = {
    **{
        f"a link for {name}": Trap(_link(*link), [RESUME, [*RESUME, "--rerun"]], "is a link")
        for name, link in _LINKS.items()
    },
    "a link for an attempt": Trap(_attempt, [RESUME], "is a link"),
    "a link for a step": Trap(_link(_STEP, "run/checkpoints/step-00000012"), [RESUME, _SAMPLE]),
    "a link for the next step": Trap(
        _link(f"{_RUN}/checkpoints/.step-00000012.tmp", "run"), [RESUME]
    ),
    "a link for a log": Trap(_link(f"{_SWEPT}/output.log", "precious.txt"), _TABLES),
    "a link for a sweep's runs": Trap(
        _link("outputs/sweeps/{sweep}/runs", "run"), [SWEEP], "is a link"
    ),
    "a link for a table": Trap(
        _link("outputs/sweeps/{sweep}/results.csv", "precious.txt"), [SWEEP, *_TABLES]
    ),
    "a link for a page": Trap(
        _link("outputs/sweeps/{sweep}/report.html", "precious.txt"), [["report", "{sweep}"]]
    ),
    "a link for a look": Trap(_link("outputs/claims/{claim}/n9", "run"), _CLAIM),
    "a link for tokens": Trap(
        _link("cache/{data}/train.bin", "precious.txt"), [RESUME], "is damaged"
    ),
    "a link for a lock": Trap(_lock, [RESUME], "data.cache"),
    "a link for a preparation": Trap(_unfinished, [RESUME], "data.cache"),
    "a manifest that names a file to import": Trap(
        _of_arms("variant", "file", _harmful_file), [SWEEP, *_TABLES]
    ),
    "a manifest with a cache elsewhere": Trap(
        _of_arms("data", "cache", lambda world: str(world.outside / "cache")), [SWEEP, *_TABLES]
    ),
    "a manifest with a folder elsewhere": Trap(
        _of_arms("", "out", lambda world: str(world.outside)), [SWEEP, *_TABLES]
    ),
    "a manifest with words that steer": Trap(
        _rewrite_manifest(lambda _, content: content.update(command=[_STEERS, "sweep"])), _TABLES
    ),
    **{
        f"a manifest called {name}": Trap(
            _rewrite_manifest(lambda _, content, name=name: content.update(name=name)),
            [SWEEP, *_TABLES],
            "is damaged",
        )
        for name in (*_STRANGER, _STEERS)
    },
    **{
        f"runs whose {key} is {name}": Trap(_of_runs(key, name), [SWEEP, *_TABLES], "is damaged")
        for key in ("label", "id")
        for name in (*_STRANGER, _STEERS)
    },
    **{
        f"{key}={name}": Trap(lambda _: None, [[*words, f"{key}={name}"]], key)
        for key, words in (("sweep.name", SWEEP), ("variant.name", RESUME))
        for name in ("'../../../outside/x'", "/elsewhere/x", "..", "'.'")
    },
    "texts in a circle": Trap(_loop, _data("texts")),
    "a bomb of text": Trap(
        _text("bomb.txt.gz", lambda _: gzip.compress(b"x" * 2**28, 1)), _data("bomb.txt.gz")[:1]
    ),
    "a bomb of nothing": Trap(
        _text("bomb.txt.zst", lambda _: _zst(bytes(2**30))), _data("bomb.txt.zst"), "byte 0 is 0"
    ),
    "a bomb in a line": Trap(
        _text("bomb.jsonl.gz", lambda _: gzip.compress(b'{"text": "' + b"x" * 2**31, 1)),
        _data("bomb.jsonl.gz"),
        "cannot read",
    ),
    "a bomb of rows": Trap(
        _text("bomb.parquet", _parquet), _data("bomb.parquet")[:1], "cannot read"
    ),
    "a packed bomb of rows": Trap(
        _text("bomb.parquet.gz", lambda _: gzip.compress(bytes(2**31), 1)),
        _data("bomb.parquet.gz"),
        "cannot read",
    ),
    "a deep line": Trap(
        _text("deep.jsonl", lambda _: b"[" * 10**6), _data("deep.jsonl"), "line 1 .* is not JSON"
    ),
    "a field that calls": Trap(
        _text("call.jsonl", lambda w: json.dumps({"_target_": f"touch {w.marker}"}).encode()),
        _data("call.jsonl"),
        "has no text",
    ),
    **{
        f"{' '.join(words)} of a torch file": Trap(
            _text("evil.pt", lambda world: _torch_file(world, b"")), [words], "evil.pt|variant.file"
        )
        for words in (
            *(["sample", "evil.pt"], ["verify", "evil.pt"], ["report", "evil.pt"]),
            *(["status", "evil.pt"], ["results", "evil.pt"], ["compare", "evil.pt", "{done}"]),
            *(["claim", "show", "evil.pt"], [*RESUME, "variant.file=evil.pt"]),
            *(["data", "info", *_DATA, "data.path=evil.pt"], [*RESUME, "data.path=evil.pt"]),
            ["verify", "{rough}", "variant.file=evil.pt"],
        )
    },
}


def _named(world: World, text: str) -> str:
    claims = world.kept / "outputs" / "claims"
    return text.format(
        rough=world.rough,
        done=world.done,
        swept=world.swept,
        sweep=world.sweep,
        claim=next(claims.iterdir()).name,
        data=next(path for path in (world.kept / "cache").iterdir() if path.is_dir()).name,
    )


def _replace(world: World, place: Place, payload: Payload) -> None:
    path = world.box / _named(world, place.path)
    before = path.read_bytes() if path.is_file() else b"{}"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(payload(world, before))
    if place.sums:
        sums = path.with_name("SHA256SUMS")
        old, new = (hashlib.sha256(one).hexdigest() for one in (before, path.read_bytes()))
        sums.write_text(sums.read_text().replace(old, new))


def _pipe(world: World, place: Place) -> None:
    """Nobody writes into it: who waits for it waits for ever."""
    path = world.box / _named(world, place.path)
    path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    os.mkfifo(path)


def _be_patient() -> None:
    """For a second, not for a minute: a claim that nobody renews."""
    from qkablate.runs import lease

    lease.TIMEOUT = 1.0


def _judge(world: World, words: list[str], said: Said) -> list[str]:
    """Return what is wrong with how a command reacted."""
    wrong = [f"did harm: {one}" for one in said.harm]
    lines = said.err.splitlines()
    if world.marker.exists():
        wrong.append("ran code")
        world.marker.unlink()
    if said.code not in (0, 1, 2, 3):
        wrong.append(f"ended with {said.code}: {lines[-1:]}")
    if "Traceback" in said.all:
        wrong.append(f"a traceback: {lines[-1:]}")
    if said.code == 2 and not (len(lines) >= 1 and lines[-1].startswith("qkablate: ")):
        wrong.append(f"ended with 2, and said {said.err[-300:]!r}")
    if said.code != 0 and not said.all.strip():
        wrong.append(f"ended with {said.code} in silence")
    told = said.err if words[0] == "sample" else said.all  # the bytes of a model are its own
    if raw := _RAW.search(told):
        wrong.append(f"told the terminal {raw[0]!r}")
    if SECRET in said.all:
        wrong.append("told what stands in the environment")
    page = world.box / "page.html"
    if page.exists() and ("<script>alert(1)" in (text := page.read_text()) or "<img src=x" in text):
        wrong.append("wrote words into the page as HTML")
    if words[0] == "train" and said.code not in (0, 2):
        wrong.append(f"training ended with {said.code}: {said.all.strip()[-300:]!r}")
    if words in (RESUME, AGAIN) and said.code == 0:
        name = world.rough if words == RESUME else world.done
        if (found := _loss(world.box, name)) != world.losses[name]:
            wrong.append(f"another loss: {found}, not {world.losses[name]}")
    return wrong


def torture(cases: int, seed: int, folder: Path) -> Tally:
    watched.warm()
    world = World(folder)
    placed = {
        f"{payload} for {place}": Trap(
            functools.partial(_replace, place=PLACES[place], payload=PAYLOADS[payload]),
            PLACES[place].commands,
        )
        for place in PLACES
        for payload in PAYLOADS
    } | {
        f"a pipe for {place}": Trap(
            functools.partial(_pipe, place=PLACES[place]), PLACES[place].commands
        )
        for place in PLACES
        if place != "claim's file"  # which a user names, and may be a pipe
    }
    known = [*placed.items(), *TRAPS.items()]
    tally = Tally()
    for name, trap in random.Random(seed).sample(known, cases):
        tally.cases += 1
        watched.fresh(world.kept, world.box)
        trap.plant(world)
        for place, words in enumerate(trap.commands):
            words = [_named(world, word) for word in words]
            said = watched.command(words, world.box, room=ROOM, before=_be_patient)
            wrong = _judge(world, words, said)
            if place == 0 and not re.search(trap.says, said.all):
                wrong.append(f"did not say {trap.says!r} but {said.all.strip()[-300:]!r}")
            tally.wrong += [f"{name}: {' '.join(words[:2])}: {one}" for one in wrong]
        if _tree(folder) != world.before:
            tally.wrong.append(f"{name}: something changed outside")
            shutil.rmtree(world.outside)
            shutil.copytree(world.outside.with_name("safe"), world.outside)
    return tally


SHORT, FULL = 8, 300

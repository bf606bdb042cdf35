"""A small sweep on disk, and what reads each of its files: for those who write nonsense into them.

A reader is given any bytes in the place of its file. It may make something of them or refuse them,
with the exceptions it is known for; everything else is a bug.
"""

import gzip
import hashlib
import io
import json
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from qkablate.analysis.claims.parse import load_claim
from qkablate.analysis.comparison.head_metrics import MEASURES, read_head_rows
from qkablate.analysis.study.study import read_facts, read_loss_curves
from qkablate.cli import main
from qkablate.config import DataConfig
from qkablate.data import corpus
from qkablate.errors import UserError
from qkablate.runs import attention_map, lease, predictions
from qkablate.runs.records import read_config, read_result
from qkablate.sweeps.planning import manifest
from qkablate.sweeps.running.state import latest_metrics
from qkablate.training import checkpoint
from qkablate.training.warm_start.restore import restore

TEXT = "the cat sat on the mat, ähnlich ∑\n" * 100
SMALL = [
    *("model.layers=1", "model.d_model=8", "model.heads=2", "model.context=8"),
    *("train.steps=6", "train.batch_size=2", "train.eval_every=3", "train.checkpoint_every=3"),
    *("tracking.wandb=disabled", "tracking.log_every=2", "threads=1", "data=text", "device=cpu"),
]
CLAIM = """says: Queries need no weights.
source: here
seeds: 4
tuning_seeds: 0
grid: {variant: "standard,no_q", train.steps: 10}
scale: {small: {model.d_model: 16}}
parts: {same: {arm: no_q, kind: noninferior, margin: 0.01}}
"""


@dataclass(frozen=True)
class Reader:
    """Reader of a file, and how it rejects one."""

    path: Path
    read: Callable[[], Any]
    refusals: tuple[type[Exception], ...]
    seal: Callable[[bytes], None] | None = None  # gives the content a checksum that is right
    good: bytes = b""

    def try_(self, content: bytes) -> None:
        """Check that a reader raises only what it may."""
        try:
            self.path.write_bytes(content)
            if self.seal is not None:
                self.seal(content)
            with suppress(*self.refusals):
                self.read()
        finally:
            self.path.write_bytes(self.good)


@dataclass(frozen=True)
class Said:
    """Outcome of a command."""

    code: int
    out: str
    err: str


def command(*words: str) -> Said:
    """Run the command in this process; its errors are one line."""
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", newline="") for _ in range(2))
    code: object = 0
    with redirect_stdout(out), redirect_stderr(err):
        try:
            main(list(words))
        except SystemExit as ended:
            code = ended.code
    for stream in (out, err):
        stream.seek(0)
    return Said(int(str(code or 0)), out.read(), err.read())


def wrong(said: Said, codes: tuple[int, ...]) -> str:
    """Return what is wrong with how a command ended; an error must be one line on stderr."""
    if "Traceback" in said.err:
        return said.err.strip().splitlines()[-1]
    if said.code not in codes:
        return f"exit code {said.code}: {said.err[:200]!r}"
    one = said.err.startswith("qkablate: ") and said.err.count("\n") == 1
    if said.code == 2 and not (one and not said.out):
        return f"not one line on stderr: {said.err[:300]!r}{said.out[:100]!r}"
    return ""


class Ended(Exception):
    """Forbidden outcome of a command."""


def told(*words: str, codes: tuple[int, ...]) -> Said:
    """Return the outcome of a command; raise Ended where no command may end so."""
    said = command(*words)
    if found := wrong(said, codes):
        raise Ended(found)
    return said


def text(folder: Path) -> list[str]:
    """Return the overrides of a text that is prepared in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "corpus.txt"
    path.write_text(TEXT, encoding="utf-8")
    return [f"data.path={path}", f"data.cache={folder / 'cache'}"]


def readers(folder: Path) -> dict[str, Reader]:
    """All of them, in a folder with a finished sweep."""
    words = [*SMALL, *text(folder / "data"), f"out={folder / 'outputs'}"]
    grid = ["variant=standard,no_q", "seed=0,1"]
    for verb in (["train", "-m"], ["sweep"]):
        said = command(*verb, *words, *grid)
        assert said.code == 0, said.err
    run = min((folder / "outputs" / "runs").iterdir())
    (sweep,) = (folder / "outputs" / "sweeps").iterdir()
    (cut,) = folder.glob("outputs/runs/standard-*-s1-*")
    (cut / "result.json").unlink()  # as if it were interrupted
    newest = checkpoint.find_checkpoints(run / "checkpoints")[0]
    predicted, kept = predictions.find_predictions(run)[6], run / attention_map.FILE_NAME
    (prepared,) = folder.glob("data/cache/*/")
    claim = folder / "mine.yaml"
    claim.write_text(CLAIM, encoding="utf-8")
    where = f"out={folder / 'outputs'}"

    def sums(content: bytes) -> None:
        checkpoint_sums(newest)

    def status() -> None:
        told("status", str(sweep), where, codes=(0, 1, 2))

    def results() -> None:
        told("results", str(sweep), where, "--format", "json", codes=(0, 1, 2))

    def compare() -> None:
        told("compare", str(run), str(cut), "--json", codes=(0, 1, 2))

    def sample() -> None:
        told("sample", str(run), "prompt=the", "tokens=2", codes=(0, 2))

    refused = (UserError,)
    found = {
        "config.yaml": Reader(run / "config.yaml", lambda: read_config(run), (ValueError,)),
        "config.yaml, restored": Reader(run / "config.yaml", lambda: restore(run), refused),
        "config.yaml, sample": Reader(run / "config.yaml", sample, ()),
        "result.json": Reader(
            run / "result.json", lambda: read_facts(run, read_result(run) or {}), ()
        ),
        "result.json, status": Reader(run / "result.json", status, ()),
        "result.json, results": Reader(run / "result.json", results, ()),
        "result.json, compare": Reader(run / "result.json", compare, ()),
        "environment.json": Reader(run / "environment.json", lambda: read_facts(run, {}), ()),
        "metrics.jsonl": Reader(
            run / "metrics.jsonl", lambda: [read_loss_curves(run), latest_metrics(run)], ()
        ),
        "metrics.jsonl, heads": Reader(
            cut / "metrics.jsonl", lambda: read_head_rows(cut, MEASURES, 9), ()
        ),
        "predictions": Reader(
            predicted, lambda: predictions.read_predictions(predicted), (ValueError,)
        ),
        "example": Reader(kept, lambda: attention_map.read_attention_map(kept), (ValueError,)),
        "predictions, results": Reader(predicted, results, ()),
        "metrics.jsonl, status": Reader(cut / "metrics.jsonl", status, ()),
        "metrics.jsonl, compare": Reader(run / "metrics.jsonl", compare, ()),
        "manifest.json": Reader(
            sweep / manifest.MANIFEST_FILE, lambda: manifest.read_manifest(sweep), refused
        ),
        "manifest.json, sealed": Reader(
            *(sweep / manifest.MANIFEST_FILE, lambda: manifest.read_manifest(sweep), refused),
            lambda content: seal_manifest(sweep / manifest.MANIFEST_FILE, content),
        ),
        "manifest.json, status": Reader(sweep / manifest.MANIFEST_FILE, status, ()),
        "progress.json": Reader(newest / "progress.json", lambda: restore(run), refused, sums),
        "progress.json, resumed": Reader(
            newest / "progress.json",
            lambda: checkpoint.load(newest, "cpu"),
            (OSError, ValueError, TypeError),
            sums,
        ),
        "weights.safetensors": Reader(
            newest / "weights.safetensors", lambda: restore(run), refused, sums
        ),
        "SHA256SUMS": Reader(newest / "SHA256SUMS", lambda: restore(run), refused),
        "state.pt": Reader(
            newest / "state.pt",
            lambda: checkpoint.load(newest, "cpu"),
            (OSError, ValueError, TypeError),
        ),
        "tokenizer.json": Reader(run / "tokenizer.json", lambda: restore(run).tokenizer(), refused),
        "tokenizer.json, sample": Reader(run / "tokenizer.json", sample, ()),
        "lease": Reader(max(run.glob("lease/0*")), lambda: lease.LeaseObserver().observe(run), ()),
        "claim": Reader(claim, lambda: load_claim(str(claim)), refused),
        **{
            f"prepared {name}": Reader(
                prepared / name, lambda: corpus.load_corpus(prepared), refused
            )
            for name in ("manifest.json", "tokenizer.json", "train.bin")
        },
        **_texts(folder / "texts"),
    }
    return {
        name: Reader(r.path, r.read, r.refusals, r.seal, r.path.read_bytes())
        for name, r in found.items()
    }


def _texts(folder: Path) -> dict[str, Reader]:
    """Return, for every kind of text file, the overrides that prepare it."""
    folder.mkdir()
    rows = [f"row {n}: {TEXT[: 7 * n]}" for n in range(80)]
    jsonl = "".join(json.dumps({"text": row, "n": 1}) + "\n" for row in rows).encode()
    parquet = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"text": rows}), parquet)
    contents = {
        "a.txt": TEXT.encode(),
        "a.csv": "".join(f'{n},"{row}"\n' for n, row in enumerate(rows)).encode(),
        "a.jsonl": jsonl,
        "a.parquet": parquet.getvalue(),
        "a.txt.gz": gzip.compress(TEXT.encode(), mtime=0),
        "a.jsonl.gz": gzip.compress(jsonl, mtime=0),
        "a.txt.zst": pyarrow.compress(TEXT.encode(), "zstd", asbytes=True),
        "a.parquet.zst": pyarrow.compress(parquet.getvalue(), "zstd", asbytes=True),
    }
    found = {}
    for name, content in contents.items():
        (folder / name).write_bytes(content)
        for tokenizer in ("bytes", "chars"):
            found[f"{name}, {tokenizer}"] = Reader(
                folder / name, _preparing(folder / name, tokenizer), (UserError,)
            )
    return found


def _preparing(path: Path, tokenizer: str) -> Callable[[], None]:
    cache = path.parent / "cache"
    config = DataConfig(*("text", str(path)), tokenizer=tokenizer, cache=str(cache))

    def prepare() -> None:
        try:
            corpus.open_corpus(config)
        finally:
            half = [one.name for one in cache.glob("*") if one.suffix == ".tmp"]
            assert not half, f"{half} is left"

    return prepare


def checkpoint_sums(path: Path) -> None:
    names = ("weights.safetensors", "state.pt", "progress.json")
    lines = [f"{hashlib.sha256((path / n).read_bytes()).hexdigest()}  {n}\n" for n in names]
    (path / "SHA256SUMS").write_text("".join(lines), encoding="utf-8")


def seal_manifest(path: Path, content: bytes) -> None:
    with suppress(ValueError, TypeError, AttributeError, RecursionError):
        plain = json.loads(content)
        plain.pop("sha256", None)
        text = json.dumps(plain, sort_keys=True)
        plain["sha256"] = hashlib.sha256(text.encode()).hexdigest()
        path.write_text(json.dumps(plain), encoding="utf-8")

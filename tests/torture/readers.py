"""A small sweep on disk and the readers of its files, for tests with malformed content.

A reader is given arbitrary bytes in place of its file. It may accept or reject them, with the
exceptions that it documents; everything else is a bug.
"""

import gzip
import hashlib
import io
import json
import zlib
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from qkablate.analysis.claims.parse import load_claim
from qkablate.analysis.comparison.head_metrics import MEASURES, read_head_rows
from qkablate.analysis.publication.archive import read_archive
from qkablate.analysis.study.loss_curves import read_loss_curves
from qkablate.analysis.study.study import read_facts
from qkablate.cli import main
from qkablate.config import DataConfig
from qkablate.data import corpus
from qkablate.errors import UserError
from qkablate.runs import attention_map, lease, predictions, prefix
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


ORIGIN = (
    '{"run": "0123", "step": 3, "prefix": "4567", "computed": {"torch": "2.0", "threads": 1},'
    ' "settings": {"optim.warmup": 1, "train.eval_every": 3, "train.eval_tokens": 512,'
    ' "train.test_tokens": 512}}'
)


@dataclass(frozen=True)
class Reader:
    """Reader of a file, and how it rejects one."""

    path: Path
    read: Callable[[], Any]
    refusals: tuple[type[Exception], ...]
    seal: Callable[[bytes], None] | None = None  # updates the checksum of the content
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
class CommandResult:
    """Outcome of a command."""

    code: int
    out: str
    err: str


def run_command(*words: str) -> CommandResult:
    """Run the command in this process; capture its output."""
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", newline="") for _ in range(2))
    code: object = 0
    with redirect_stdout(out), redirect_stderr(err):
        try:
            main(list(words))
        except SystemExit as ended:
            code = ended.code
    for stream in (out, err):
        stream.seek(0)
    return CommandResult(int(str(code or 0)), out.read(), err.read())


def find_problem(result: CommandResult, codes: tuple[int, ...]) -> str:
    """Return why an outcome is not allowed, or ''; an error must be one line on stderr."""
    if "Traceback" in result.err:
        return result.err.strip().splitlines()[-1]
    if result.code not in codes:
        return f"exit code {result.code}: {result.err[:200]!r}"
    is_one_line = result.err.startswith("qkablate: ") and result.err.count("\n") == 1
    if result.code == 2 and not (is_one_line and not result.out):
        return f"not one line on stderr: {result.err[:300]!r}{result.out[:100]!r}"
    return ""


class ForbiddenOutcome(Exception):
    """Forbidden outcome of a command."""


def check_command(*words: str, codes: tuple[int, ...]) -> CommandResult:
    """Return the outcome of a command; raise ForbiddenOutcome if it is not allowed."""
    result = run_command(*words)
    if problem := find_problem(result, codes):
        raise ForbiddenOutcome(problem)
    return result


def prepare_text(folder: Path) -> list[str]:
    """Write a text into a folder, and return the overrides that use it."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "corpus.txt"
    path.write_text(TEXT, encoding="utf-8")
    return [f"data.path={path}", f"data.cache={folder / 'cache'}"]


def make_readers(folder: Path) -> dict[str, Reader]:
    """Return all readers by name, on a finished sweep in this folder."""
    words = [*SMALL, *prepare_text(folder / "data"), f"out={folder / 'outputs'}"]
    grid = ["variant=standard,no_q", "seed=0,1"]
    for verb in (["train", "-m"], ["sweep", "sweep.floor=false"]):
        result = run_command(*verb, *words, *grid)
        assert result.code == 0, result.err
    run = min((folder / "outputs" / "runs").iterdir())
    (sweep,) = (folder / "outputs" / "sweeps").iterdir()
    (interrupted,) = folder.glob("outputs/runs/standard-*-s1-*")
    (interrupted / "result.json").unlink()  # as if it were interrupted
    newest = checkpoint.find_checkpoints(run / "checkpoints")[0]
    predictions_path, map_path = predictions.find_predictions(run)[6], run / attention_map.FILE_NAME
    (data_folder,) = folder.glob("data/cache/*/")
    origin = prefix.branch_path(run, 3) / prefix.ORIGIN_FILE
    origin.parent.mkdir(parents=True)
    origin.write_text(ORIGIN, encoding="utf-8")
    claim = folder / "mine.yaml"
    claim.write_text(CLAIM, encoding="utf-8")
    out_key = f"out={folder / 'outputs'}"

    archive = make_archive(folder / "claim")

    def read_published() -> None:
        check_command("results", str(archive.parent), "--json", codes=(0, 1, 2))

    def update_checksums(content: bytes) -> None:
        write_checksums(newest)

    def status() -> None:
        check_command("status", str(sweep), out_key, codes=(0, 1, 2))

    def results() -> None:
        check_command("results", str(sweep), out_key, "--format", "json", codes=(0, 1, 2))

    def compare() -> None:
        check_command("compare", str(run), str(interrupted), "--json", codes=(0, 1, 2))

    def sample() -> None:
        check_command("sample", str(run), "prompt=the", "tokens=2", codes=(0, 2))

    def extend() -> None:
        words_of_run = [*words, "optim.schedule=wsd", "train.steps=9"]
        check_command("train", *words_of_run, "--extend", codes=(2,))

    refusal = (UserError,)
    all_readers = {
        "config.yaml": Reader(run / "config.yaml", lambda: read_config(run), (ValueError,)),
        "config.yaml, restored": Reader(run / "config.yaml", lambda: restore(run), refusal),
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
            interrupted / "metrics.jsonl", lambda: read_head_rows(interrupted, MEASURES, 9), ()
        ),
        "predictions": Reader(
            predictions_path, lambda: predictions.read_predictions(predictions_path), (ValueError,)
        ),
        "attention map": Reader(
            map_path, lambda: attention_map.read_attention_map(map_path), (ValueError,)
        ),
        "predictions, results": Reader(predictions_path, results, ()),
        "metrics.jsonl, status": Reader(interrupted / "metrics.jsonl", status, ()),
        "metrics.jsonl, compare": Reader(run / "metrics.jsonl", compare, ()),
        "manifest.json": Reader(
            sweep / manifest.MANIFEST_FILE, lambda: manifest.read_manifest(sweep), refusal
        ),
        "manifest.json, sealed": Reader(
            *(sweep / manifest.MANIFEST_FILE, lambda: manifest.read_manifest(sweep), refusal),
            lambda content: write_sealed_manifest(sweep / manifest.MANIFEST_FILE, content),
        ),
        "manifest.json, status": Reader(sweep / manifest.MANIFEST_FILE, status, ()),
        "progress.json": Reader(
            newest / "progress.json", lambda: restore(run), refusal, update_checksums
        ),
        "progress.json, resumed": Reader(
            newest / "progress.json",
            lambda: checkpoint.load(newest, "cpu"),
            (OSError, ValueError, TypeError),
            update_checksums,
        ),
        "weights.safetensors": Reader(
            newest / "weights.safetensors", lambda: restore(run), refusal, update_checksums
        ),
        "SHA256SUMS": Reader(newest / "SHA256SUMS", lambda: restore(run), refusal),
        "state.pt": Reader(
            newest / "state.pt",
            lambda: checkpoint.load(newest, "cpu"),
            (OSError, ValueError, TypeError),
        ),
        "origin.json": Reader(origin, lambda: prefix.read_origin(origin.parent), ()),
        "origin.json, extended": Reader(origin, extend, ()),
        "tokenizer.json": Reader(run / "tokenizer.json", lambda: restore(run).tokenizer(), refusal),
        "tokenizer.json, sample": Reader(run / "tokenizer.json", sample, ()),
        "lease": Reader(max(run.glob("lease/0*")), lambda: lease.LeaseObserver().observe(run), ()),
        "archive": Reader(archive, lambda: read_archive(archive), refusal),
        "archive, sealed": Reader(
            archive, read_published, (), lambda content: write_sealed_archive(archive, content)
        ),
        "claim": Reader(claim, lambda: load_claim(str(claim)), refusal),
        **{
            f"prepared {name}": Reader(
                data_folder / name, lambda: corpus.load_corpus(data_folder), refusal
            )
            for name in ("manifest.json", "tokenizer.json", "train.bin")
        },
        **_text_readers(folder / "texts"),
    }
    return {
        name: Reader(r.path, r.read, r.refusals, r.seal, r.path.read_bytes())
        for name, r in all_readers.items()
    }


def _text_readers(folder: Path) -> dict[str, Reader]:
    """Return a reader for every kind of text file and two tokenizers."""
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
    all_readers = {}
    for name, content in contents.items():
        (folder / name).write_bytes(content)
        for tokenizer in ("bytes", "chars"):
            all_readers[f"{name}, {tokenizer}"] = Reader(
                folder / name, _make_preparation(folder / name, tokenizer), (UserError,)
            )
    return all_readers


def _make_preparation(path: Path, tokenizer: str) -> Callable[[], None]:
    cache = path.parent / "cache"
    config = DataConfig(*("text", str(path)), tokenizer=tokenizer, cache=str(cache))

    def prepare() -> None:
        try:
            corpus.open_corpus(config)
        finally:
            leftovers = [entry.name for entry in cache.glob("*") if entry.suffix == ".tmp"]
            assert not leftovers, f"{leftovers} is left"

    return prepare


def make_archive(folder: Path) -> Path:
    """Run a small claim, publish it, and return the archive without its file of checksums."""
    claim = folder / "mine.yaml"
    words = [*SMALL, *prepare_text(folder), f"out={folder / 'outputs'}"]
    claim.write_text(CLAIM.replace("seeds: 4", "seeds: 3"), encoding="utf-8")
    for command in (
        ["claim", "run", str(claim), *words],
        ["publish", "mine", "-o", str(folder / "published"), words[-1]],
    ):
        result = run_command(*command)
        assert result.code == 0, result.err
    (folder / "published" / "SHA256SUMS").unlink()
    (path,) = (folder / "published").glob("*.json.gz")
    return path


def write_sealed_archive(path: Path, content: bytes) -> None:
    """Write content with the checksum that it would have, compressed."""
    with suppress(OSError, EOFError, zlib.error):
        content = gzip.decompress(content)
    with suppress(ValueError, TypeError, AttributeError, RecursionError):
        archive = json.loads(content)
        archive.pop("sha256", None)
        archive["sha256"] = hashlib.sha256(json.dumps(archive, sort_keys=True).encode()).hexdigest()
        content = json.dumps(archive).encode()
    path.write_bytes(gzip.compress(content, mtime=0))


def write_checksums(path: Path) -> None:
    names = ("weights.safetensors", "state.pt", "progress.json")
    lines = [f"{hashlib.sha256((path / n).read_bytes()).hexdigest()}  {n}\n" for n in names]
    (path / "SHA256SUMS").write_text("".join(lines), encoding="utf-8")


def write_sealed_manifest(path: Path, content: bytes) -> None:
    with suppress(ValueError, TypeError, AttributeError, RecursionError):
        manifest = json.loads(content)
        manifest.pop("sha256", None)
        text = json.dumps(manifest, sort_keys=True)
        manifest["sha256"] = hashlib.sha256(text.encode()).hexdigest()
        path.write_text(json.dumps(manifest), encoding="utf-8")

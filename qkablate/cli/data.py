"""`qkablate data`: what there is to train on, made ready and looked at."""

import itertools
import json
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qkablate.cli.hydra.configs import Job, jobs, next_commands, take_flags
from qkablate.config import TEXT_SOURCES, Config, conf_dir
from qkablate.errors import UserError, nearest
from qkablate.table import counted, print_json, print_table, short_bytes

if TYPE_CHECKING:
    from qkablate.data import Corpus, Data, Task
    from qkablate.data.batches import Batch

HELP = """qkablate data: what there is to train on, made ready and looked at.

Usage: qkablate data list [--json]
       qkablate data prepare [key=value …]
       qkablate data info [key=value …] [--json]
       qkablate data show [key=value …] [--split SPLIT] [--count N]

  list     every text and task there is, and what is prepared on this machine
  prepare  turn text into tokens on disk, once; train does it by itself where it is missing
  info     where it came from, how it is split, counts, tokenizer, fingerprint
  show     windows as a model sees them: text, or a task's sequences with their answers

Keys are those of `qkablate train`: data=NAME and all of data.*, model.context, seed.

Flags
  --split SPLIT  train (default), val, test; of train, the first windows that a run sees
  --count N      how many windows (default 3)
  --json         as JSON

Examples
  qkablate data list
  qkablate data prepare data=stdlib data.tokenizer=bpe
  qkablate data prepare data=wikitext2
  qkablate data prepare data=hub data.name=roneneldan/TinyStories data.max_tokens=10_000_000
  qkablate data info data=text data.path=book.txt data.tokenizer=chars
  qkablate data show data=recall data.pairs=4 model.context=32
"""

SPLITS = ("train", "val", "test")


def main(argv: list[str]) -> int:
    flags, words = take_flags(argv, ("--help", "-h", "--json"), ("--split", "--count"))
    if {"--help", "-h"} & {*flags} or not argv:
        print(HELP, end="")
        return 0
    verb, words = (words[0], words[1:]) if words else ("", [])
    verbs = {"list": _list, "prepare": _prepare, "info": _info, "show": _show}
    if verb not in verbs:
        raise UserError(f"'{verb}' is not one of {', '.join(verbs)}{nearest(verb, verbs)}")
    takes = {"list": {"--json"}, "info": {"--json"}, "show": {"--split", "--count"}}
    if wrong := sorted({*flags} - takes.get(verb, set())):
        raise UserError(f"'{wrong[0]}' is not a flag of data {verb}")
    # Ends as an exception does, so that nothing half-made is left.
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        verbs[verb](words, flags)
    except KeyboardInterrupt:
        print("qkablate: interrupted; what was not whole is not kept", file=sys.stderr)
        return 130
    except OSError as error:
        if isinstance(error, BrokenPipeError):
            raise
        place = f"'{error.filename}': " if error.filename else ""
        raise UserError(f"data: {place}{error.strerror}") from None
    finally:
        signal.signal(signal.SIGTERM, before)
    return 0


def words() -> Iterator[str]:
    """What completion offers."""
    yield from ("list", "prepare", "info", "show", "--split", "--count", "--json")
    yield from (f"data={path.stem}" for path in _files())


def _files() -> list[Path]:
    return sorted((conf_dir() / "data").glob("*.yaml"))


def _list(words: list[str], flags: dict[str, str]) -> None:
    if words:
        raise UserError(f"data list takes no '{words[0]}'")
    from qkablate.config import DataConfig
    from qkablate.data.corpus import cache_dir, called

    kinds = []
    for path in _files():
        lines = path.read_text(encoding="utf-8").splitlines()
        source = next(x.removeprefix("source: ") for x in lines if x.startswith("source: "))
        tokenizer = next((x.split()[1] for x in lines if x.startswith("tokenizer: ")), "")
        tokenizer = tokenizer.replace("null", "")
        kinds.append((path.stem, source, tokenizer, lines[0].removeprefix("# ")))
    cache = cache_dir(DataConfig())
    prepared = []
    for manifest in sorted(cache.glob("*/manifest.json")):
        try:
            prepared.append(_row(manifest, called))
        except (OSError, ValueError, KeyError, TypeError):
            prepared.append({"folder": manifest.parent.name, "damaged": True})
    if "--json" in flags:
        keys = ("data", "source", "tokenizer", "what")
        names = [dict(zip(keys, kind, strict=True)) for kind in kinds]
        print_json({"data": names, "cache": str(cache), "prepared": prepared})
        return
    order = sorted(kinds, key=lambda kind: kind[1] not in TEXT_SOURCES)
    table = [[name, tokenizer, what] for name, _, tokenizer, what in order]
    print_table(["data=", "tokens", "what"], table, 3, ("what",))
    print(f"\nPrepared in {cache}" if prepared else f"\nNothing is prepared in {cache} yet.")
    if prepared:
        print_table(
            ["folder", "text", "tokenizer", "train tokens", "val", "test", "size"],
            [
                [row["folder"], *("damaged", *[""] * 5)]
                if "damaged" in row
                else [
                    row["folder"],
                    row["text"],
                    row["tokenizer"],
                    *(f"{row['tokens'][split]:,}" for split in SPLITS),
                    short_bytes(row["size"]),
                ]
                for row in prepared
            ],
            3,
        )
    verb = "info" if prepared else "prepare"
    next_commands(["data", "show", "data=recall"], ["data", verb, "data=stdlib"])


def _row(path: Path, called: Callable[[dict[str, Any]], str]) -> dict[str, Any]:
    manifest = json.loads(path.read_text(encoding="utf-8"))
    return {
        "folder": path.parent.name,
        "text": called(manifest["sources"]),
        "tokenizer": str(manifest["tokenizer"]),
        "tokens": {split: int(manifest["tokens"][split]) for split in SPLITS},
        "size": sum(file.stat().st_size for file in path.parent.iterdir()),
    }


def _prepare(words: list[str], flags: dict[str, str]) -> None:
    from qkablate.data import TASKS, open_data
    from qkablate.data.corpus import Corpus, is_prepared

    planned = jobs(words)
    for job in planned:
        config = job.config
        if config.data.source in TASKS:
            data = open_data(config.data, config.model.context)
            print(f"{data.told}; its sequences are drawn while training: nothing to prepare")
            continue
        before = is_prepared(config.data)
        began = time.perf_counter()
        corpus = open_data(config.data, config.model.context)
        seconds = time.perf_counter() - began
        assert isinstance(corpus, Corpus)
        print(corpus.told)
        if before:
            print("  prepared before")
        else:
            size = sum(corpus.bytes.values())
            print(
                f"  {short_bytes(size)} in {seconds:.1f} s, {size / 1e6 / seconds:.1f} MB/s,"
                f" {size / max(1, sum(corpus.tokens.values())):.2f} bytes a token"
            )
        if twice := corpus.manifest["duplicates"]:
            print(f"  {counted(twice, 'duplicate')} left out")
        try:
            corpus.check_context(config.model.context)
        except UserError as short:
            print(f"  note: {short}")
        print(f"  {corpus.folder}")
    own = planned[0].words
    next_commands(["data", "show", *own], ["train", *own])


def _opened(job: Job) -> "Data":
    """The data of a job; text must be prepared."""
    from qkablate.data import open_data
    from qkablate.data.corpus import is_prepared

    config = job.config.data
    if config.source in TEXT_SOURCES and not is_prepared(config):
        command = shlex.join(["qkablate", "data", "prepare", *job.words])
        raise UserError(f"it is not prepared yet; write {command}")
    return open_data(config, job.config.model.context)


def _info(words: list[str], flags: dict[str, str]) -> None:
    from qkablate.data import Task

    planned = jobs(words)
    found = []
    for job in planned:
        data = _opened(job)
        found.append(_task_info(data) if isinstance(data, Task) else _corpus_info(data))
    if "--json" in flags:
        print_json(found[0] if len(found) == 1 else found)
        return
    for number, told in enumerate(found):
        if number:
            print()
        width = max(map(len, told))
        for key, value in told.items():
            print(f"{key:<{width}}  {_readable(value)}")
    next_commands(["data", "show", *planned[0].words], ["train", *planned[0].words])


def _corpus_info(data: Any) -> dict[str, Any]:
    corpus: Corpus = data
    manifest = corpus.manifest
    told = dict(manifest["sources"])
    told["tokenizer"] = f"{manifest['tokenizer']}, {corpus.vocabulary:,} tokens, {corpus.dtype}"
    told["tokenizer_sha256"] = manifest["tokenizer_sha256"]
    told["divided"] = manifest["split"]
    told["duplicates"] = f"{manifest['duplicates']:,} left out"
    for key in ("documents", "tokens", "bytes"):
        told[key] = manifest[key]
    told["bytes_per_token"] = {s: corpus.bytes[s] / max(1, corpus.tokens[s]) for s in SPLITS}
    return {**told, "fingerprint": corpus.fingerprint, "folder": str(corpus.folder)}


def _task_info(task: "Task") -> dict[str, Any]:
    return {
        "task": task.name,
        "what": task.what,
        "setting": task.told,
        "harder": task.harder,
        "vocabulary": task.vocabulary,
        "length": task.length,
        "tokens": {split: task.tokens[split] for split in ("val", "test")},
        "fingerprint": task.fingerprint,
    }


def _readable(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_readable(v)}" for key, v in value.items())
    if isinstance(value, float):
        return f"{value:.3f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _show(words: list[str], flags: dict[str, str]) -> None:
    from qkablate.data import IGNORE, Task, tokenizers

    split, count = flags.get("--split", "train"), flags.get("--count", "3")
    if split not in SPLITS:
        raise UserError(f"--split: '{split}' is not one of {', '.join(SPLITS)}")
    if not (count.isascii() and count.isdecimal() and 1 <= int(count) <= 10_000):
        raise UserError(f"--count: '{count}' is not a whole number from 1 to 10000")
    planned = jobs(words)
    if len(planned) > 1:
        raise UserError("data show takes one kind of data")
    config = planned[0].config
    data = _opened(planned[0])
    data.check_context(config.model.context)
    print(data.told)
    tokenizer = None if isinstance(data, Task) else tokenizers.load(data.tokenizer)
    sparse = False
    for number, (batch, row) in enumerate(itertools.islice(_rows(data, config, split), int(count))):
        print(f"\n{split} {number + 1}")
        if tokenizer is None:
            assert isinstance(data, Task)
            print("  " + _sequence(data, batch, row))
            sparse = batch.where_NA is not None
        else:
            length = int((batch.targets_NA[row] != IGNORE).sum())
            tokens = batch.tokens_NT[row, :length].tolist()
            text = tokenizer.decode(tokens).decode("utf-8", "replace")
            print("\n".join(f"  {_harmless(line)}" for line in text.split("\n")))
    if sparse:
        print("\na→b: after a, the answer is b")
    next_commands(["data", "info", *planned[0].words], ["train", *planned[0].words])


def _rows(data: "Data", config: Config, split: str) -> Iterator[tuple["Batch", int]]:
    """The windows of a split in their order; of the training split, as a run sees them."""
    from qkablate.data import IGNORE

    context, train = config.model.context, config.train
    if split == "train":
        steps = data.batches(
            seed=config.seeds.data,
            batch_size=train.batch_size,
            accumulate=train.accumulate,
            context=context,
        )
        found: Iterator[Batch] = itertools.chain.from_iterable(map(steps.step, itertools.count()))
    else:
        found = data.reading(split, batch_size=16, context=context)
    for batch in found:
        for row, targets in enumerate(batch.targets_NA):
            if (targets != IGNORE).any():  # the others fill up the last batch
                yield batch, row


def _sequence(task: "Task", batch: "Batch", number: int) -> str:
    said = [task.word(token) for token in batch.tokens_NT[number].tolist()]
    if batch.where_NA is not None:
        places, targets = batch.where_NA[number].tolist(), batch.targets_NA[number].tolist()
        for place, target in zip(places, targets, strict=True):
            if target >= 0:
                said[place] += f"→{task.word(target)}"
    return " ".join(said)


def _harmless(line: str) -> str:
    return "".join(c if c.isprintable() or c == "\t" else "�" for c in line)

"""`qkablate data`: list, prepare, describe and show data sets."""

import itertools
import shlex
import signal
import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qkablate.cli.arguments import Parser, choose_action, one_of, whole_number
from qkablate.compose.configs import Job, compose_jobs
from qkablate.config import conf_dir, config_names
from qkablate.config.data import HELD_OUT_SPLITS, PREPARED_SOURCES, SPLITS
from qkablate.errors import UserError
from qkablate.table import format_bytes, format_count, print_json, print_next_commands, print_table

if TYPE_CHECKING:
    from qkablate.data import Data
    from qkablate.data.prepare import CorpusManifest

HELP = """qkablate data: list, prepare, describe and show data sets.

Usage: qkablate data list [--json]
       qkablate data prepare [key=value …]
       qkablate data info [key=value …] [--json]
       qkablate data show [key=value …] [--split SPLIT] [--count N]

  list     all texts and tasks, and what is prepared on this machine
  prepare  convert text to tokens on disk, once; train does so itself if needed
  info     source, splits, counts, tokenizer, fingerprint
  show     windows as the model receives them: text (▒: masked token), sequences
           of a task with their answers, source and target of pairs, or words
           with their tags

Keys are those of `qkablate train`: data=NAME and all of data.*, model.*, seed.

Flags
{flags}

Examples
  qkablate data list
  qkablate data prepare data=stdlib data.tokenizer=bpe
  qkablate data prepare data=wikitext2
  qkablate data prepare data=hub data.name=roneneldan/TinyStories
  qkablate data info data=text data.path=book.txt data.tokenizer=chars
  qkablate data show data=recall data.pairs=4 model.context=32

Exit codes: 0 done · 2 a mistake in the command, or text that cannot be read or
is not prepared
"""

# The flags that each action takes.
ACTIONS = {"list": ("json",), "prepare": (), "info": ("json",), "show": ("split", "count")}


PARSER = Parser(HELP, words=(*ACTIONS, *(f"data={name}" for name in config_names("data"))))
_SPLIT_HELP = "train (default), val, test; of train, the first windows of a run"
PARSER.option("--split", "SPLIT", _SPLIT_HELP, one_of(SPLITS))
PARSER.option("--count", "N", "number of windows (default 3)", whole_number(1, 10_000))
PARSER.switch("--json", "print JSON")


def main(argv: list[str]) -> int:
    """List, prepare, describe or show data."""
    args = PARSER.parse(argv)
    if not argv:
        PARSER.print_help()
        return 0
    action, words = choose_action(args.words, ACTIONS)
    for flag in ("count", "json", "split"):
        if getattr(args, flag) and flag not in ACTIONS[action]:
            raise UserError(f"'--{flag}' is not a flag of data {action}")
    act = {"list": _list, "prepare": _prepare, "info": _info, "show": _show}[action]
    # SIGTERM raises an exception, so that nothing half-written is left.
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        act(words, args)
    except KeyboardInterrupt:
        print("qkablate: interrupted; incomplete data was removed", file=sys.stderr)
        return 130
    except OSError as error:
        if isinstance(error, BrokenPipeError):
            raise
        file = f"'{error.filename}': " if error.filename else ""
        raise UserError(f"data: {file}{error.strerror}") from None
    finally:
        signal.signal(signal.SIGTERM, before)
    return 0


def _list(words: list[str], args: Namespace) -> None:
    if words:
        raise UserError(f"data list takes no '{words[0]}'")
    from qkablate.config import DataConfig
    from qkablate.data.corpus import cache_dir
    from qkablate.data.prepare import read_manifest

    kinds = []
    for name in config_names("data"):
        lines = (conf_dir() / "data" / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
        values = dict(line.split()[:2] for line in lines if line.count(": ") and line[0] != "#")
        kind = {"data": name, "source": values["source:"]}
        kind["tokenizer"] = values.get("tokenizer:", "").replace("null", "")
        kinds.append(kind | {"summary": lines[0].removeprefix("# ")})
    cache = cache_dir(DataConfig())
    prepared = []
    for path in sorted(cache.glob("*/manifest.json")):
        try:
            prepared.append(_row(path.parent, read_manifest(path.parent)))
        except (OSError, ValueError, KeyError):
            prepared.append({"folder": path.parent.name, "damaged": True})
    if args.json:
        print_json({"data": kinds, "cache": str(cache), "prepared": prepared})
        return
    order = sorted(kinds, key=lambda kind: kind["source"] not in PREPARED_SOURCES)
    table = [[kind[key] for key in ("data", "tokenizer", "summary")] for kind in order]
    print_table(["data=", "tokenizer", "summary"], table, 3, ("summary",))
    print(f"\nPrepared in {cache}" if prepared else f"\nNothing is prepared in {cache} yet.")
    if prepared:
        columns = ["folder", "text", "tokenizer", "train tokens", "val", "test", "size"]
        print_table(columns, [*map(_format_row, prepared)], 3)
    if damaged := [str(cache / row["folder"]) for row in prepared if "damaged" in row]:
        print("\ndamaged, or of another version: remove it, and it is prepared again when needed")
        print(f"  {shlex.join(['rm', '-r', *damaged])}")
    action = "info" if prepared else "prepare"
    print_next_commands(["data", "show", "data=recall"], ["data", action, "data=stdlib"])


def _row(folder: Path, manifest: "CorpusManifest") -> dict[str, Any]:
    return {
        "folder": folder.name,
        "text": manifest.source_name,
        "tokenizer": manifest.tokenizer,
        "tokens": {split: manifest.tokens[split] for split in SPLITS},
        "size": sum(file.stat().st_size for file in folder.iterdir()),
    }


def _format_row(row: dict[str, Any]) -> list[str]:
    if "damaged" in row:
        return [row["folder"], "damaged", *[""] * 5]
    counts = [f"{row['tokens'][split]:,}" for split in SPLITS]
    return [row["folder"], row["text"], row["tokenizer"], *counts, format_bytes(row["size"])]


def _prepare(words: list[str], args: Namespace) -> None:
    from qkablate.data import TASKS, Corpus, Pairs, Task, check_form, open_data, open_task
    from qkablate.data.corpus import is_prepared

    planned = compose_jobs(words)
    for job in planned:  # before any is prepared
        check = open_task if job.config.data.source in TASKS else check_form
        check(job.config.data, job.config.model)
    fitting: dict[str, int] = {}  # the lengths that pairs need
    for job in planned:
        config = job.config
        if config.data.source in TASKS:
            data = open_data(config.data, config.model)
            print(f"{data.description}; its sequences are drawn while training: nothing to prepare")
            continue
        was_prepared = is_prepared(config.data)
        start = time.perf_counter()
        data = open_data(config.data, config.model)
        seconds = time.perf_counter() - start
        assert not isinstance(data, Task)
        corpus = data if isinstance(data, Corpus) else data.corpus
        print(data.description)
        if was_prepared:
            print("  prepared before")
        else:
            size = sum(corpus.manifest.bytes.values())
            print(
                f"  {format_bytes(size)} in {seconds:.1f} s, {size / 1e6 / seconds:.1f} MB/s,"
                f" {size / max(1, sum(corpus.tokens.values())):.2f} bytes per token"
            )
        if duplicates := corpus.manifest.duplicates:
            print(f"  {format_count(duplicates, 'duplicate')} left out")
        try:
            data.check_context(config.model.context)
        except UserError as error:
            print(f"  note: {error}")
            if isinstance(data, Pairs) and config.model.form == "encoder_decoder":
                fitting |= dict(zip(("model.source", "model.context"), data.longest(), strict=True))
        print(f"  {corpus.folder}")
    words = [word for word in planned[0].words if word.partition("=")[0] not in fitting]
    words += [f"{key}={length}" for key, length in fitting.items()]
    print_next_commands(["data", "show", *words], ["train", *words])


def _print_next(action: str, job: Job) -> None:
    print_next_commands(["data", action, *job.words], ["train", *job.words])


def _open(job: Job) -> "Data":
    """Return the data of a job; text must be prepared."""
    from qkablate.data import open_data
    from qkablate.data.corpus import is_prepared

    config = job.config.data
    if config.source in PREPARED_SOURCES and not is_prepared(config):
        command = shlex.join(["qkablate", "data", "prepare", *job.words])
        raise UserError(f"the data is not prepared yet; type {command}")
    return open_data(config, job.config.model)


def _info(words: list[str], args: Namespace) -> None:
    planned = compose_jobs(words)
    infos = [_describe(_open(job)) for job in planned]
    if args.json:
        print_json(infos[0] if len(infos) == 1 else infos)
        return
    for number, info in enumerate(infos):
        if number:
            print()
        width = max(map(len, info))
        for key, value in info.items():
            print(f"{key:<{width}}  {_format(value)}")
    _print_next("show", planned[0])


def _describe(data: "Data") -> dict[str, Any]:
    from qkablate.data import MaskedText, Pairs, TaggedSentences, Task

    if isinstance(data, Task):
        return {
            "task": data.name,
            "summary": data.summary,
            "setting": data.description,
            "harder": data.difficulty,
            "vocabulary": data.vocabulary,
            "length": data.length,
            **({"source": data.source} if data.form == "encoder_decoder" else {}),
            "tokens": {split: data.tokens[split] for split in HELD_OUT_SPLITS},
            "fingerprint": data.fingerprint,
        }
    if isinstance(data, MaskedText):
        masked = f"{data.answers} of {data.length} tokens; the mask is token {data.mask}"
        return {**_describe(data.corpus), "masked": masked, "fingerprint": data.fingerprint}
    if isinstance(data, TaggedSentences):
        found = {"tags": ", ".join(data.tags.values()), "longest": data.longest()[0]}
        return {**_describe(data.corpus), **found, "accuracy": data.measure_baselines()._asdict()}
    if isinstance(data, Pairs):
        longest = dict(zip(("source", "target"), data.longest(), strict=True))
        return {**_describe(data.corpus), "longest": longest}
    manifest = data.manifest
    return {
        **manifest.sources,
        "tokenizer": f"{manifest.tokenizer}, {data.vocabulary:,} tokens, {manifest.dtype}",
        "tokenizer_sha256": manifest.tokenizer_sha256,
        "split": manifest.split,
        "duplicates": f"{manifest.duplicates:,} left out",
        **{key: getattr(manifest, key) for key in ("documents", "tokens", "bytes")},
        **({"files": data.count_files()} if manifest.files_sha256 else {}),
        "bytes_per_token": {s: manifest.bytes[s] / max(1, data.tokens[s]) for s in SPLITS},
        "fingerprint": data.fingerprint,
        "folder": str(data.folder),
    }


def _format(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_format(v)}" for key, v in value.items())
    if isinstance(value, float):
        return f"{value:.3f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _show(words: list[str], args: Namespace) -> None:
    from qkablate.cli.windows import window_formatter
    from qkablate.data import Task, iterate_windows

    split, count = args.split or "train", args.count or 3
    planned = compose_jobs(words)
    if len(planned) > 1:
        raise UserError("data show takes one data set")
    config = planned[0].config
    data = _open(planned[0])
    data.check_context(config.model.context)
    print(data.description)
    format_window, has_answers = window_formatter(data), False
    windows = iterate_windows(
        data,
        split,
        seed=config.seeds.data,
        batch_size=config.train.batch_size,
        grad_accum=config.train.grad_accum,
        context=config.model.context,
    )
    for number, (batch, row) in enumerate(itertools.islice(windows, count)):
        print(f"\n{split} {number + 1}")
        print("\n".join(format_window(batch, row)))
        has_answers |= isinstance(data, Task) and batch.positions_NA is not None
    if has_answers:
        print("\na→b: the answer after a is b")
    _print_next("info", planned[0])

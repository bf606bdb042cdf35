"""Pairs of source and target: of the standard library, of files, of the Hub.

A pair is one document: its source, the byte 0, its target.
"""

import csv
import hashlib
import itertools
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from qkablate.config import DataConfig
from qkablate.config.data import COLUMNS, SPLITS
from qkablate.data import hub, sources
from qkablate.data.document_store import held_out_split
from qkablate.data.pairs import postfix, roles
from qkablate.data.sources import Source
from qkablate.errors import UserError
from qkablate.table import format_count

SPLIT_RULES = {
    "stdlib_pairs": "by the sha256 of a file: 10 % each are held out for val and test",
    "stdlib_tags": "by the sha256 of a file: 10 % each are held out for val and test",
    "pairs": "as published; without held-out splits, by the sha256 of a source",
}
_STDLIB_HELD_OUT_FRACTION = 0.1
_FEW = 300  # sources: fewer are not sure to fill splits of 3 %, and are split by rank
_STDLIB_READERS = {"stdlib_pairs": postfix.read_expressions, "stdlib_tags": roles.read_statements}

_HALF_PAIR = re.compile("[\ud800-\udfff]")

Pair = tuple[str, str]


def open_pairs(config: DataConfig) -> Source:
    """Return the pairs, not read yet; UserError where they are not available."""
    if config.source in _STDLIB_READERS:
        return _stdlib_pairs(sources.find_files(config), _STDLIB_READERS[config.source])
    if config.path is None:
        splits = hub.open_splits(config)
        return _documents((split, _hub_pairs(rows, config)) for split, rows in splits)
    return _documents(_file_pairs(sources.find_files(config), config))


def _documents(splits: Iterable[tuple[str, Iterator[Pair]]]) -> Source:
    """Yield pairs as documents; those of no split are held out by their sources."""
    for split, pairs in splits:
        if split:
            yield from ((split, [[_join(pair)]]) for pair in pairs)
        else:
            yield from _hold_out([*pairs])


def _hold_out(pairs: list[Pair]) -> Source:
    """Divide pairs by the hash of their source, so that no source is in two splits."""
    ranked = sorted({_fraction(source.encode()) for source, _ in pairs})
    few = len(ranked) < _FEW
    each = max(1, len(ranked) // 20)
    ranks = {fraction: rank / (2 * each) for rank, fraction in enumerate(ranked)} if few else {}
    for source, target in pairs:
        fraction = _fraction(source.encode())
        # Of few, the first twentieths of the ranking.
        split = held_out_split(ranks[fraction], 0.5) if few else held_out_split(fraction)
        yield split or "train", [[_join((source, target))]]


def _fraction(content: bytes) -> float:
    """Return the hash of some bytes, as a number from 0 to 1."""
    return int.from_bytes(hashlib.sha256(content).digest()[:8]) / 2.0**64


def _join(pair: Pair) -> bytes:
    return b"\0".join(text.encode("utf-8", "replace") for text in pair)


def _stdlib_pairs(files: list[Path], read: Callable[[bytes], Iterator[Pair]]) -> Source:
    for file in files:
        content = file.read_bytes()
        split = held_out_split(_fraction(content), _STDLIB_HELD_OUT_FRACTION) or "train"
        yield split, ([_join(pair)] for pair in read(content))


def _hub_pairs(rows: object, config: DataConfig) -> Iterator[Pair]:
    """Yield the pairs of a published split; those with an empty sentence are left out."""
    fields = {key: str(getattr(config, key)) for key in COLUMNS}
    for source, target in hub.read_columns(rows, config, fields):
        source, target = source.replace("\0", " ").strip(), target.replace("\0", " ").strip()
        if source and target:
            yield source, target


def _file_pairs(files: list[Path], config: DataConfig) -> Iterator[tuple[str, Iterator[Pair]]]:
    """Yield the pairs of each file; a file whose name begins with a split's is of that split."""
    if files == sources.parallel_files(config):
        yield "", _checked(_parallel_pairs(files), f"'{files[0]}' and '{files[1]}'")
        return
    splits = [hub.split_of(re.split(r"[^A-Za-z]", file.name)[0]) for file in files]
    pairs = [_checked(_row_pairs(file, config), f"'{file}'") for file in files]
    if not {"val", "test"} & {*splits}:
        yield "", itertools.chain.from_iterable(pairs)
    elif missing := [split for split in SPLITS if split not in splits]:
        raise UserError(f"data.path: '{config.path}' has no file for {' and '.join(missing)}")
    elif "" in splits:
        raise UserError(
            f"data.path: '{files[splits.index('')]}' is of no split: its name begins with neither"
            f" {', '.join(SPLITS[:-1])} nor {SPLITS[-1]}, as those of other files do"
        )
    else:
        yield from zip(splits, pairs, strict=True)


def _checked(pairs: Iterator[tuple[int, str, str]], place: str) -> Iterator[Pair]:
    """Yield pairs of a file; UserError, in the end, if a sentence is empty."""
    empty = []
    for line, source, target in pairs:
        if not (source.strip() and target.strip()):
            empty.append(line)
        elif "\0" in source + target:
            raise UserError(f"data.path: line {line} of {place} is not text: it has the byte 0")
        elif _HALF_PAIR.search(source + target):  # which JSON may have
            raise UserError(
                f"data.path: line {line} of {place} is not text: it has half of a surrogate pair"
            )
        else:
            yield source.strip(), target.strip()
    if empty:
        lines = ", ".join(map(str, empty[:3])) + (", …" if len(empty) > 3 else "")
        raise UserError(
            f"data.path: {format_count(len(empty), 'pair')} of {place} with an empty sentence"
            f" (line {lines}); remove {'it' if len(empty) == 1 else 'them'}"
        )


def _parallel_pairs(files: list[Path]) -> Iterator[tuple[int, str, str]]:
    """Yield the lines of two files side by side."""
    texts = [[*sources.read_lines(file)] for file in files]
    if len(texts[0]) != len(texts[1]):
        raise UserError(
            f"data.path: '{files[0]}' has {len(texts[0])} lines, and '{files[1]}' has"
            f" {len(texts[1])}: a source and its target are the same line of both"
        )
    for number, (source, target) in enumerate(zip(*texts, strict=True), 1):
        yield number, source, target


def _row_pairs(file: Path, config: DataConfig) -> Iterator[tuple[int, str, str]]:
    """Yield the line, the source and the target of each row of a file."""
    fields = {key: str(getattr(config, key)) for key in COLUMNS}
    for number, row in _rows(file):
        texts = []
        for key, field in fields.items():
            try:
                text = hub.find_value(row, field)
            except KeyError:
                text = None
            if not isinstance(text, str):
                raise sources.field_error(key, field, f"line {number} of '{file}'", row)
            texts.append(text)
        yield number, texts[0], texts[1]


def _rows(file: Path) -> Iterator[tuple[int, dict[str, object]]]:
    """Yield the rows of a .jsonl, .tsv or .csv file with the numbers of their lines."""
    kind = sources.kind_of(file)
    if kind == ".jsonl":
        for number, line in enumerate(sources.read_lines(file), 1):
            if line.strip():
                yield number, sources.parse_row(line, number, file)
        return
    lines = (f"{line}\n" for line in sources.read_lines(file))
    if kind == ".tsv":  # its cells are verbatim: a quotation mark is part of a sentence
        reader = csv.reader(lines, delimiter="\t", quoting=csv.QUOTE_NONE)
    elif kind == ".csv":
        reader = csv.reader(lines)
    else:
        raise UserError(f"data.path: '{file}' is not a .jsonl, .tsv or .csv file")
    try:
        columns = next(reader, [])
        for cells in reader:
            if len(cells) != len(columns):
                raise UserError(
                    f"data.path: line {reader.line_num} of '{file}' has {len(cells)} cells, and"
                    f" the first line names {len(columns)} columns: {', '.join(columns)}"
                )
            yield reader.line_num, dict(zip(columns, cells, strict=True))
    except csv.Error as error:
        place = f"line {reader.line_num} of '{file}'"
        raise UserError(f"data.path: {place} is not a row: {error}") from None

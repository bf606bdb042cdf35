"""Documents of a split → its files of tokens."""

import re

import numpy as np
import pytest

from qkablate.config import DataConfig
from qkablate.data.document_store import DocumentStore, TokenBudget
from qkablate.data.progress import Progress
from qkablate.data.tokenizers import ByteTokenizer
from qkablate.data.writer import SplitWriter

SIZES = [3, 0, 1, 7, 2, 0]  # pairs of each file


@pytest.fixture
def write(tmp_path):
    """Write the pairs of files, `file:number → yy…`; return tokens, ends and files."""

    def pairs(file, size):
        return ([f"{file}:{i}\0{'y' * (i % 4)}".encode()] for i in range(size))

    def write(limit=None, **options):
        progress, store = Progress("test"), DocumentStore(tmp_path / "documents")
        progress.stage("test")
        source = (("test", pairs(file, size)) for file, size in enumerate(SIZES))
        store.fill(source, TokenBudget(DataConfig()), progress)
        spans, _ = store.arrange()["test"]
        writer = SplitWriter(
            *(tmp_path, store, ByteTokenizer(), True, progress),
            is_pairs=True,
            has_files=True,
            **options,
        )
        entries = writer.write("test", spans, limit)
        tokens = (tmp_path / "test.bin").read_bytes()
        ends, files = (
            np.fromfile(tmp_path / f"test.{name}.bin", np.uint64).tolist()
            for name in ("ends", "files")
        )
        assert entries["documents"] == len(ends) == len(files)
        assert entries["tokens"] == len(tokens) == ends[-1]
        return tokens, ends, files

    return write


def read_files(tokens, ends):
    """Return the file that each pair names, numbered by appearance."""
    starts = [0, *ends[:-1]]
    names = [int(re.match(rb"(\d+):", tokens[start:])[1]) for start in starts]
    return [[*dict.fromkeys(names)].index(name) for name in names]


def test_file_of_each_pair_is_written(write):
    tokens, ends, files = write()
    assert len(files) == sum(SIZES)
    assert files == read_files(tokens, ends)
    assert sorted(np.bincount(files)) == sorted(size for size in SIZES if size)
    assert files != sorted(files)  # pairs are in the order of their hashes


def test_files_of_pairs_left_out_are_not_written(write):
    whole, part = write(), write(max_length=3)
    assert len(part[1]) == sum(i % 4 < 3 for size in SIZES for i in range(size)) < len(whole[1])
    assert part[2] == read_files(*part[:2])


def test_limit_cuts_the_last_pair(write):
    whole, part = write(), write(limit=29)
    assert part[0] == whole[0][:29]
    assert part[1][:-1] == [end for end in whole[1] if end < 29]
    assert part[1][-1] == 29
    assert part[2] == whole[2][: len(part[1])]

"""metrics.jsonl: one row per line, written out at once."""

import math
import os
from pathlib import Path
from typing import Any

from qkablate.disk import sync_folder
from qkablate.runs.records import encode_row


class MetricsFile:
    """Append-only rows, which can be truncated to the state of a checkpoint."""

    def __init__(self, path: Path, end: int = 0) -> None:
        """Open the file and drop everything after byte `end`."""
        self._file = path.open("ab")
        sync_folder(path.parent)  # synced rows are lost if the file's name is not
        if self._file.tell() < end:
            raise ValueError(f"{path} is shorter than its checkpoint says")
        self._file.truncate(end)
        self._file.seek(0, os.SEEK_END)  # `sync` returns the position, also before the first row

    def log(self, row: dict[str, Any]) -> None:
        finite = {  # JSON has no NaN and no infinities: they become strings
            key: value if not isinstance(value, float) or math.isfinite(value) else str(value)
            for key, value in row.items()
        }
        self._file.write(encode_row(finite) + b"\n")
        self._file.flush()

    def sync(self) -> int:
        """Force the rows to disk and return the file's length."""
        os.fsync(self._file.fileno())
        return self._file.tell()

    def close(self) -> None:
        self.sync()
        self._file.close()

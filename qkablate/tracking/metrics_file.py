"""metrics.jsonl: one row a line, on disk as soon as it is written."""

import math
import os
from pathlib import Path
from typing import Any

from qkablate.disk import sync_folder
from qkablate.runs.records import row_line


class Journal:
    """Appends rows; can be cut back to where a checkpoint was taken."""

    def __init__(self, path: Path, cut: int = 0) -> None:
        """Open the journal and drop what stands after byte `cut`."""
        self._file = path.open("ab")
        sync_folder(path.parent)  # rows that are forced to disk need a file of that name
        if self._file.tell() < cut:
            raise ValueError(f"{path} is shorter than its checkpoint says")
        self._file.truncate(cut)

    def log(self, row: dict[str, Any]) -> None:
        finite = {k: _plain(value) for k, value in row.items()}
        self._file.write(row_line(finite) + b"\n")
        self._file.flush()

    def sync(self) -> int:
        """Force the rows to disk; where they end."""
        os.fsync(self._file.fileno())
        return self._file.tell()

    def close(self) -> None:
        self.sync()
        self._file.close()


def _plain(value: Any) -> Any:
    """JSON knows no NaN: such a number is written as its name."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value

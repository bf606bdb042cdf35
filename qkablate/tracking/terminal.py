"""Progress of a run: a bar on a terminal, plain lines elsewhere."""

import sys
import time
from contextlib import suppress
from typing import Any

from tqdm import tqdm

from qkablate.errors import sanitize
from qkablate.redaction import redact

_BAR = "{desc} {percentage:3.0f}%|{bar}| {n}/{total} [{elapsed}, {remaining} left]"


class Terminal:
    """Progress on stderr."""

    def __init__(self, label: str, steps: int, start: int) -> None:
        self._steps, self._start, self._began = steps, start, time.monotonic()
        self._last_line = start
        self._latest: dict[str, float] = {}
        self._bar: tqdm[Any] | None = None
        if sys.stderr.isatty():
            self._bar = tqdm(
                total=steps, initial=start, desc=label, bar_format=_BAR, dynamic_ncols=True
            )

    def log(self, row: dict[str, Any]) -> None:
        if "diagnostics" in row:  # diagnostics show no progress
            return
        step = int(row["step"])
        if self._bar is not None:
            self._latest |= row
            with suppress(OSError):  # a closed terminal must not stop the run
                self._bar.bar_format = f"{_BAR}  {_summary(self._latest)}"
                self._bar.update(step - self._bar.n)
            return
        # Plain lines: one per evaluation, and at least twenty per run.
        if "val/loss" in row or step - self._last_line >= max(1, self._steps // 20):
            self._last_line = step
            text = f"step {step}/{self._steps}  {_summary(row)}"
            if self._start < step < self._steps:
                seconds = (time.monotonic() - self._began) / (step - self._start)
                text += f"  {seconds * (self._steps - step):.0f} s left"
            self.note(text)

    def note(self, text: str) -> None:
        """Print a line above the bar."""
        with suppress(OSError), tqdm.external_write_mode(file=sys.stderr):
            print(sanitize(redact(text)), file=sys.stderr, flush=True)

    def close(self) -> None:
        if self._bar is not None:
            with suppress(OSError):
                self._bar.close()


def _summary(row: dict[str, Any]) -> str:
    formats = {
        "train/loss": "loss {:.4f}",
        "val/loss": "val {:.4f}",
        "val/accuracy": "accuracy {:.1%}",
        "train/lr": "lr {:.2e}",
        "perf/tokens_per_second": "{:,.0f} tokens/s",
    }
    return "  ".join(form.format(row[key]) for key, form in formats.items() if key in row)

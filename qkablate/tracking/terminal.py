"""Progress of a run: a bar on a terminal, plain lines elsewhere."""

import shutil
import sys
import time
from contextlib import suppress
from typing import Any

from tqdm import tqdm

from qkablate.errors import sanitize
from qkablate.redaction import redact

_MIN_BAR = 12  # columns


class Terminal:
    """Progress on stderr."""

    def __init__(self, label: str, steps: int, start: int) -> None:
        self._label, self._steps, self._start = label, steps, start
        self._began = time.monotonic()
        self._last_line = start
        self._latest: dict[str, float] = {}
        self._bar: tqdm[Any] | None = None
        if sys.stderr.isatty():
            width, height = shutil.get_terminal_size()  # tqdm shows no bar where they are unknown
            form = _bar_format(label, steps, [], width)
            self._bar = tqdm(total=steps, initial=start, bar_format=form, ncols=width, nrows=height)

    def log(self, row: dict[str, Any]) -> None:
        if "diagnostics" in row:  # diagnostics show no progress
            return
        step = int(row["step"])
        if self._bar is not None:
            self._latest |= row
            with suppress(OSError):  # a closed terminal must not stop the run
                width = shutil.get_terminal_size().columns
                metrics = _format_metrics(self._latest)
                self._bar.ncols = width
                self._bar.bar_format = _bar_format(self._label, self._steps, metrics, width)
                self._bar.update(step - self._bar.n)
            return
        # Plain lines: one per evaluation, and at least twenty per run.
        if "val/loss" in row or step - self._last_line >= max(1, self._steps // 20):
            self._last_line = step
            text = f"step {step}/{self._steps}  {'  '.join(_format_metrics(row))}"
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


def _bar_format(label: str, steps: int, metrics: list[str], width: int) -> str:
    """Return tqdm's format of a line: losses and the time left before all that may not fit."""
    name = label if len(label) <= width // 4 else f"{label[: width // 4 - 1]}…"
    room = width - len(f"{name} 100%  59:59:59 left")
    shown = [name.replace("{", "{{").replace("}", "}}") + " {percentage:3.0f}%"]
    for part in [*metrics[:2], "left", f"{{n}}/{steps}", *metrics[2:]]:
        length = 0 if part == "left" else len(part.replace("{n}", str(steps))) + 2
        if length > room:
            break
        shown.append("{remaining} left" if part == "left" else part)
        room -= length
    return "  ".join(shown) + ("  |{bar}|" if room >= _MIN_BAR else "")


def _format_metrics(row: dict[str, Any]) -> list[str]:
    formats = {
        "train/loss": "loss {:.4f}",
        "val/loss": "val {:.4f}",
        "val/accuracy": "accuracy {:.1%}",
        "val/exact": "exact {:.1%}",
        "train/lr": "lr {:.2e}",
        "perf/tokens_per_second": "{:,.0f} tokens/s",
    }
    return [form.format(row[key]) for key, form in formats.items() if key in row]

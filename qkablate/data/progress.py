"""Progress of a preparation: a bar on a terminal, plain lines elsewhere."""

import sys
import time
from contextlib import suppress
from typing import Any

_INTERVAL = 10.0  # seconds between plain lines


class Progress:
    """Progress of one stage after the other; short stages print nothing."""

    def __init__(self, title: str) -> None:
        self.title = title
        self._bar: Any = None

    def stage(self, name: str, total: float | None = None, unit: str = "B") -> None:
        self.close()
        self._stage, self._unit, self._total, self._done = name, unit, total, 0.0
        self._started = self._printed = time.monotonic()
        if sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(
                total=total,
                desc=f"{self.title}: {name}",
                unit=unit,
                unit_scale=True,
                unit_divisor=1000,
                leave=False,
                dynamic_ncols=True,
                delay=0.3,
            )

    def update(self, done: float, note: str = "") -> None:
        """Show that `done` of the total is done."""
        if self._bar is not None:
            with suppress(OSError):
                if note:
                    self._bar.set_postfix_str(note, refresh=False)
                self._bar.update(done - self._done)
        elif (now := time.monotonic()) - self._printed > _INTERVAL:
            self._printed = now
            scale, unit = (1e6, "MB") if self._unit == "B" else (1, self._unit)
            total = f" of {self._total / scale:,.0f}" if self._total else ""
            rate = done / scale / (now - self._started)
            print(
                f"{self.title}: {self._stage}, {done / scale:,.0f}{total} {unit},"
                f" {rate:,.1f} {unit}/s{', ' + note if note else ''}",
                file=sys.stderr,
                flush=True,
            )
        self._done = done

    def close(self) -> None:
        if self._bar is not None:
            with suppress(OSError):
                self._bar.close()
            self._bar = None

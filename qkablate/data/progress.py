"""How far a preparation is: a bar on a terminal, plain lines elsewhere."""

import sys
import time
from contextlib import suppress
from typing import Any

_EVERY = 10.0  # seconds between plain lines


class Progress:
    """Of one stage after the other; says nothing of what takes no time."""

    def __init__(self, what: str) -> None:
        self.what, self._stage = what, ""
        self._bar: Any = None
        self._began = self._told = time.monotonic()

    def stage(self, name: str, total: float | None = None, unit: str = "B") -> None:
        self.close()
        self._stage, self._unit, self._total, self._done = name, unit, total, 0.0
        self._began = self._told = time.monotonic()
        if sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(
                total=total,
                desc=f"{self.what}: {name}",
                unit=unit,
                unit_scale=True,
                unit_divisor=1000,
                leave=False,
                dynamic_ncols=True,
                delay=0.3,
            )

    def at(self, done: float, note: str = "") -> None:
        """`done` of the total is done."""
        if self._bar is not None:
            with suppress(OSError):
                if note:
                    self._bar.set_postfix_str(note, refresh=False)
                self._bar.update(done - self._done)
        elif (now := time.monotonic()) - self._told > _EVERY:
            self._told = now
            scale, unit = (1e6, "MB") if self._unit == "B" else (1, self._unit)
            of = f" of {self._total / scale:,.0f}" if self._total else ""
            pace = done / scale / (now - self._began)
            print(
                f"{self.what}: {self._stage}, {done / scale:,.0f}{of} {unit}, {pace:,.1f} {unit}/s"
                f"{', ' + note if note else ''}",
                file=sys.stderr,
                flush=True,
            )
        self._done = done

    def close(self) -> None:
        if self._bar is not None:
            with suppress(OSError):
                self._bar.close()
            self._bar = None

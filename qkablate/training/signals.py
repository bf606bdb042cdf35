"""SIGINT and SIGTERM: how someone asks for a sitting's end."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Stopped(Exception):
    """A signal ended the sitting; a checkpoint is written."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(signal.Signals(signal_number).name)
        self.exit_code = 128 + signal_number


class Signals:
    """SIGINT and SIGTERM ask for an end at the next step; a second SIGINT takes it."""

    def __init__(self) -> None:
        self.received = 0  # here, or by another process of this run
        self._here = 0

    def __bool__(self) -> bool:
        return bool(self.received)

    def _handle(self, number: int, frame: Any) -> None:
        if self._here and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = self._here = number

    @contextmanager
    def listening(self) -> Iterator[None]:
        try:
            before = {n: signal.signal(n, self._handle) for n in (signal.SIGINT, signal.SIGTERM)}
        except ValueError:  # not the main thread: signals are someone else's
            before = {}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

"""How someone asks for a sitting's end: Ctrl-C, `kill`, a terminal that is closed, a cluster that
needs the machine.
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_ASK = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2)


class Stopped(Exception):
    """A signal ended the sitting; a checkpoint is written."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(signal.Signals(signal_number).name)
        self.exit_code = 128 + signal_number


class Signals:
    """Each asks for an end at the next step; a second SIGINT takes it."""

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
        asks = set(_ASK)
        if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:  # nohup: it goes on without terminal
            asks.remove(signal.SIGHUP)
        try:
            before = {number: signal.signal(number, self._handle) for number in asks}
        except ValueError:  # not the main thread: signals are someone else's
            before = {}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

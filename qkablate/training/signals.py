"""Signals that ask a session to stop: Ctrl-C, `kill`, a closed terminal, a preempting cluster."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2)


class Stopped(Exception):
    """A signal ended the session; a checkpoint is written."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(signal.Signals(signal_number).name)
        self.exit_code = 128 + signal_number


class Signals:
    """Stop requests: each takes effect at the next step, a second SIGINT at once."""

    def __init__(self) -> None:
        self.received = 0  # by this process or by another rank
        self._received_here = 0

    def __bool__(self) -> bool:
        return bool(self.received)

    def _handle(self, number: int, frame: Any) -> None:
        if self._received_here and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = self._received_here = number

    @contextmanager
    def listen(self) -> Iterator[None]:
        """Handle the stop signals until the context ends."""
        # nohup ignores SIGHUP, and where a job handles SIGUSR2 its processes ignore it.
        ignored = {
            number
            for number in (signal.SIGHUP, signal.SIGUSR2)
            if signal.getsignal(number) == signal.SIG_IGN
        }
        numbers = {*_STOP_SIGNALS} - ignored
        try:
            before = {number: signal.signal(number, self._handle) for number in numbers}
        except ValueError:  # only the main thread can handle signals
            before = {}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

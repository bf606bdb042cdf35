"""Signals that ask a session to stop."""

import os
import signal

import pytest

from qkablate.training.signals import Signals


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGUSR2])
def test_signals_that_the_process_ignores_stay_ignored(number):
    """Jobs handle SIGUSR2 themselves, and then send SIGTERM."""
    before = signal.signal(number, signal.SIG_IGN)
    try:
        signals = Signals()
        with signals.listen():
            os.kill(os.getpid(), number)
            assert not signals
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), number)
            assert signals.received == signal.SIGTERM
        assert signal.getsignal(number) == signal.SIG_IGN
    finally:
        signal.signal(number, before)

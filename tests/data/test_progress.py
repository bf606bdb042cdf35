"""Progress bar and lines of a preparation."""

import io
import sys

from qkablate.data import progress
from qkablate.data.progress import Progress


def test_lines_are_printed_without_a_terminal(monkeypatch, capsys):
    """One line every ten seconds, none for short stages."""
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    bar = Progress("data=text")
    bar.stage("writing", 40e6)
    for second in range(1, 22):
        now[0] = float(second)
        bar.update(second * 1e6, f"{second} M tokens")
    bar.close()
    assert capsys.readouterr().err.splitlines() == [
        "data=text: writing, 11 of 40 MB, 1.0 MB/s, 11 M tokens",
    ]


def test_terminal_shows_a_bar(monkeypatch):
    class Screen(io.StringIO):
        def isatty(self):
            return True

    screen = Screen()
    monkeypatch.setattr(sys, "stderr", screen)
    bar = Progress("data=text")
    bar.stage("writing", 4e6)
    bar._bar.delay = 0
    bar._bar.mininterval = 0
    for megabyte in range(4):
        bar.update(megabyte * 1e6, f"{megabyte} M tokens")
    bar.close()
    assert "data=text: writing" in screen.getvalue()
    assert "B/s" in screen.getvalue()
    assert "2 M tokens" in screen.getvalue()

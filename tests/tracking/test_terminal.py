import contextlib
import os
import pty
import re
import sys
import termios

import pytest

from qkablate.tracking import Terminal


def train(terminal: Terminal, steps: int, start: int = 0) -> None:
    for step in range(start + 1, steps + 1):
        row = {"step": step, "train/loss": 3.0, "train/lr": 1e-3, "perf/tokens_per_second": 12345.0}
        terminal.log(row)
    terminal.log({"step": steps, "val/loss": 2.5})


def test_plain_lines_without_a_terminal(capsys):
    terminal = Terminal("a run", 12, 0)
    train(terminal, 12)
    terminal.note("a note")
    terminal.close()
    out, err = capsys.readouterr()
    assert out == ""  # stdout is for results
    assert "\r" not in err
    assert "\x1b" not in err
    lines = err.splitlines()
    assert lines[0].startswith("step 1/12  loss 3.0000  lr 1.00e-03  12,345 tokens/s")
    assert lines[-2:] == ["step 12/12  val 2.5000", "a note"]


def test_a_note_is_sanitized_and_redacted(capsys):
    terminal = Terminal("a run", 12, 0)
    terminal.note("a server says \x1b[2J\x07 of https://me:secret@there.org")
    assert capsys.readouterr().err == "a server says �[2J� of https://***@there.org\n"


def test_a_long_run_prints_few_lines(capsys):
    terminal = Terminal("a run", 2000, 0)
    train(terminal, 2000)
    terminal.close()
    lines = capsys.readouterr().err.splitlines()
    assert 20 <= len(lines) <= 22
    assert "val 2.5000" in lines[-1]


class Screen:
    """A pseudo-terminal in place of stderr."""

    def __init__(self, columns: int = 100, lines: int = 24) -> None:
        self._master, slave = pty.openpty()
        termios.tcsetwinsize(slave, (lines, columns))
        self.stderr = os.fdopen(slave, "w", buffering=1)

    def read(self) -> str:
        """Close the terminal, and return its output."""
        self.stderr.close()
        content = b""
        with os.fdopen(self._master, "rb", buffering=0) as master, contextlib.suppress(OSError):
            while part := master.read(65536):  # Linux raises EIO at the end
                content += part
        return content.decode()


def test_terminal_of_unknown_size_has_a_progress_bar(monkeypatch):
    screen = Screen(columns=0, lines=0)
    monkeypatch.setattr(sys, "stderr", screen.stderr)
    terminal = Terminal("a run", 12, 0)
    train(terminal, 12)
    terminal.close()
    assert "a run 100%  loss 3.0000" in screen.read()


def test_a_terminal_has_a_progress_bar(monkeypatch):
    screen = Screen()
    monkeypatch.setattr(sys, "stderr", screen.stderr)
    terminal = Terminal("a run", 12, 6)
    train(terminal, 12, start=6)
    terminal.note("a note")
    terminal.close()
    output = screen.read()
    assert "a run  50%" in output  # starts at the checkpoint
    assert "a run 100%" in output
    assert "12/12" in output
    assert "loss 3.0000" in output
    assert "step 12/12" not in output
    # The bar is cleared before a note, which then has its own line.
    before, _, after = output.partition("a note\r\n")
    assert before.endswith("\r")
    assert after


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_losses_and_time_left_are_never_cut(monkeypatch, columns):
    screen = Screen(columns)
    monkeypatch.setattr(sys, "stderr", screen.stderr)
    monkeypatch.setenv("COLUMNS", str(columns))
    terminal = Terminal("merged_w-d128-h4-s0", 1000, 0)
    terminal.log({"step": 500, "train/loss": 3.0, "val/loss": 2.5, "train/lr": 1e-3})
    terminal.log({"step": 1000, "train/loss": 3.0, "perf/tokens_per_second": 12345.0})
    terminal.close()
    line = re.split(r"\r", screen.read())[-2]
    assert "loss 3.0000  val 2.5000" in line
    assert " left" in line
    assert len(re.sub(r"\x1b\[\w", "", line)) <= columns


def test_diagnostics_are_not_printed(capsys):
    terminal = Terminal("a run", 12, 0)
    terminal.log({"step": 12, "diagnostics": {"qk": {}, "ov": {}, "attention": {}}})
    terminal.close()
    assert capsys.readouterr().err == ""

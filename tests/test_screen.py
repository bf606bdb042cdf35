import io

import pytest

from qkablate.screen import Screen, cell_style, find_screen


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")


def test_pipe_has_neither_width_nor_color():
    assert find_screen(io.StringIO()) == Screen(None, False)


def test_terminal_has_width_and_color():
    assert find_screen(Terminal()) == Screen(80, True)


@pytest.mark.parametrize(
    ("name", "value", "stream", "has_color"),
    [
        ("NO_COLOR", "1", Terminal(), False),
        ("NO_COLOR", "", Terminal(), True),
        ("TERM", "dumb", Terminal(), False),
        ("FORCE_COLOR", "1", io.StringIO(), True),
        ("FORCE_COLOR", "0", Terminal(), False),
    ],
)
def test_environment_decides_on_color(monkeypatch, name, value, stream, has_color):
    monkeypatch.setenv(name, value)
    assert find_screen(stream).has_color == has_color


@pytest.mark.parametrize(
    ("cell", "style"),
    [
        ("better", "green"),
        ("worse at this rate (not tuned)", "red"),
        ("not worse", "cyan"),
        ("equivalent", "cyan"),
        ("(failed)", "red"),
        ("arm diverged", "red"),
        ("no difference found", "yellow"),
        ("not significantly dominated", None),
        ("standard-d16-h2", None),
        ("unworse", None),
    ],
)
def test_outcomes_have_colors(cell, style):
    assert cell_style(cell) == style


def test_words_of_a_line_are_painted():
    screen = Screen(80, has_color=True)
    painted = screen.paint_words("2 done · 1 failed")
    assert painted == "2 \x1b[32mdone\x1b[0m · 1 \x1b[31mfailed\x1b[0m"
    assert Screen(80).paint_words("2 done") == "2 done"


def test_lines_are_broken_at_spaces_and_long_words_stay_whole():
    lines = Screen(20).wrap("  a note of several words outputs/sweeps/a-long-name", "  ")
    assert lines == ["  a note of several", "    words", "    outputs/sweeps/a-long-name"]
    assert Screen().wrap("a " * 100) == ["a " * 100]

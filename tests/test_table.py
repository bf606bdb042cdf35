import re
import shlex

import pytest

from qkablate.screen import Screen
from qkablate.table import format_table, print_next_commands

COLUMNS = ["arm", "gap", "95 % interval", "decision", "seeds for ± 0.01", "every run"]
ROWS = [
    ["no_q-d128-h4", "+0.0123", "[+0.0081, +0.0160]", "no difference found", "12", "2.1 2.1 2.1 2"],
    ["standard-d128-h4", "-0.0010", "[-0.0100, +0.0080]", "worse", "4", "2.2"],
]


def words_of(lines):
    return set(" ".join(lines).split())


@pytest.mark.parametrize("width", [50, 60, 80, 120])
@pytest.mark.parametrize("wrap", [(), ("decision",)])
def test_table_fits_the_terminal_without_a_broken_word(width, wrap):
    lines = format_table(COLUMNS, ROWS, wrap=wrap, screen=Screen(width))
    assert max(map(len, lines)) <= width
    assert words_of(lines) == words_of([" ".join(cells) for cells in (COLUMNS, *ROWS)])


def test_columns_that_do_not_fit_follow_in_a_block_with_the_arms():
    lines = format_table(COLUMNS[:4], [row[:4] for row in ROWS], screen=Screen(50))
    first, second = "\n".join(lines).split("\n\n")
    assert "gap" in first
    assert "decision" in second
    for block in (first, second):
        assert [line.split()[0] for line in block.splitlines()][:1] == ["arm"]
        assert all(f"\n{row[0]}" in block for row in ROWS)


def test_all_key_columns_are_repeated():
    columns, rows = ["layer", "head", "a" * 20, "b" * 20], [["0", "1", "2", "3"]]
    lines = format_table(columns, rows, 0, keys=2, screen=Screen(40))
    assert [line.split() for line in lines if line and line.split()[0] == "0"] == [
        ["0", "1", "2"],
        ["0", "1", "3"],
    ]


def test_pipe_has_one_line_per_row_whatever_the_width(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    assert len(format_table(COLUMNS, ROWS, wrap=("every run",))) == 3


def test_word_longer_than_the_terminal_is_broken():
    lines = format_table(["arm", "loss"], [["merged_w-" * 8, "2.1"]], screen=Screen(30))
    assert max(map(len, lines)) <= 30


def test_colors_do_not_move_the_columns():
    screen = Screen(60, has_color=True)
    plain = format_table(COLUMNS, ROWS, screen=Screen(60))
    colored = format_table(COLUMNS, ROWS, screen=screen)
    assert [re.sub(r"\x1b\[\d+m", "", line).rstrip() for line in colored] == plain
    assert any("\x1b[31mworse\x1b[0m" in line for line in colored)


def test_long_command_is_continued_as_a_shell_reads_it(monkeypatch, capsys):
    words = ["sweep", "variant=standard,no_q", "seed=range(6)", "model.d_model=64,128"] * 2
    monkeypatch.setattr("qkablate.table.find_screen", lambda stream: Screen(50))
    print_next_commands(words)
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 50
    command = out.partition("Next\n")[2].replace("\\\n", " ")
    assert shlex.split(command) == ["qkablate", *words]

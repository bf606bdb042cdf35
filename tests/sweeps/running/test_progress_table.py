"""What a person sees of a sweep while it runs, drawn from made-up states."""

import io
import itertools
import re
import sys
from collections.abc import Callable, Iterator

import pytest

from qkablate.config import Config, TrainConfig
from qkablate.sweeps.planning.manifest import Arm, Manifest, SweepRun
from qkablate.sweeps.running.progress_table import Board, headline, picture
from qkablate.sweeps.running.state import STATUSES, Standing, State, duration

STEPS, TOKENS = 100, 16 * 64  # steps of a run, tokens of a step


def standing_of(*statuses: str, name: str = "grid", label: str = "standard-d128-h4") -> Standing:
    """A sweep of one arm, with a run in each of these states."""
    config = Config(train=TrainConfig(steps=STEPS), threads=1)
    arm = Arm(label, "standard", ["none"], None, {}, config, {}, 5, 1000, 2000, 6000.0)
    runs = [
        SweepRun(f"{seed:012x}", f"{label}-s{seed}", label, False, {"seed": seed, "optim.lr": 1e-3})
        for seed in range(len(statuses))
    ]
    standing = Standing(Manifest(name, "outputs", {label: arm}, runs, [], [], 0, []))
    for state, status in zip(standing.states.values(), statuses, strict=True):
        become(state, status)
    return standing


def become(state: State, status: str, step: int = 0, speed: float = 0.0, reason: str = "") -> None:
    """Put a state into the state it would be in."""
    state.status, state.result, state.row, state.reason = status, None, None, reason
    if status in ("done", "diverged", "failed"):
        losses = {"train": 2.0, "val": 2.25, "test": 2.5}
        tokens, seconds = STEPS * TOKENS, 10.0
        state.result = {"status": status, "loss": losses, "tokens": tokens, "seconds": seconds}
        if status == "failed":
            state.reason = reason or "ValueError: no"
    elif step:
        row = {"step": step, "train/loss": 2.7182818, "perf/tokens_per_second": speed}
        state.row = row if speed else {"step": step}


def states_of(standing: Standing) -> list[State]:
    return list(standing.states.values())


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (0, "0 s"),
        (0.4, "0 s"),
        (59.4, "59 s"),
        (59.6, "1 min 00 s"),
        (200, "3 min 20 s"),
        (3599.6, "1 h 00 min"),
        (7500, "2 h 05 min"),
        (47 * 3600, "47 h 00 min"),
        (48 * 3600, "2.0 days"),
        (400_000_000, "4,629.6 days"),
    ],
)
def test_durations_are_said_in_units_of_their_size(seconds, said):
    assert duration(seconds) == said


def test_the_headline_counts_every_run_once():
    some = ["done"] * 3 + ["running", "waiting", "waiting", "interrupted", "diverged", "failed"]
    standing = standing_of(*some)
    said = headline(standing)
    assert said.startswith("9 runs: ")
    numbers = re.findall(rf"(\d+) ({'|'.join(STATUSES)})", said)
    assert {status: int(number) for number, status in numbers} == standing.counts()
    assert sum(standing.counts().values()) == standing.expected() == 9
    assert headline(standing_of("done")) == "1 run: 1 done"
    assert "left" not in headline(standing_of("waiting", "waiting"))


def test_a_running_run_has_a_bar_its_loss_and_its_speed():
    standing = standing_of("done", "running", "waiting")
    become(states_of(standing)[1], "running", step=25, speed=1234.5)
    head, line = picture(standing, 200)
    assert head.startswith(f"grid-{standing.manifest.id}  3 runs: ")
    assert "1,234 tokens/s" in head
    assert line == (
        "  standard-d128-h4-s1  ████············  25%  step 25/100  loss 2.7183  1,234 tokens/s"
    )


@pytest.mark.parametrize("step", [0, 1, 50, 99, 100, 120])
def test_bars_are_of_one_length_and_never_fuller_than_full(step):
    standing = standing_of("running")
    become(states_of(standing)[0], "running", step=step)
    (bar,) = re.findall("[█·]{2,}", picture(standing, 200)[1])
    assert len(bar) == 16
    assert bar.count("█") == round(16 * min(1, step / STEPS))


def test_speeds_add_up():
    standing = standing_of("running", "running", "done")
    for state in states_of(standing)[:2]:
        become(state, "running", step=10, speed=500.0)
    assert "1,000 tokens/s" in headline(standing)


def test_what_is_not_done_stands_there_with_its_reason():
    standing = standing_of("done", "failed", "interrupted", "waiting")
    become(states_of(standing)[2], "interrupted", reason="its process was ended by SIGKILL")
    assert picture(standing, 200)[1:] == [
        "  failed: standard-d128-h4-s1: ValueError: no",
        "  interrupted: standard-d128-h4-s2: its process was ended by SIGKILL",
    ]


@pytest.mark.parametrize("width", [20, 40, 79, 80, 81, 200])
def test_lines_fit_the_terminal(width):
    standing = standing_of(*["running"] * 3, *["failed"] * 3, name="a-name-of-some-length" * 3)
    for state in states_of(standing)[:3]:
        become(state, "running", step=10, speed=1e6)
    for state in states_of(standing)[3:]:
        become(state, "failed", reason="ValueError: " + "no " * 50)
    lines = picture(standing, width)
    assert len(lines) == 7
    assert all(len(line) < width and "\n" not in line for line in lines)


def test_of_many_that_run_it_says_how_many_more():
    shown = picture(standing_of(*["running"] * 16), 200)
    assert len(shown) == 17
    many = picture(standing_of(*["running"] * 300), 200)
    assert len(many) < 24
    listed = sum("step" in line for line in many)
    assert many[-1].strip() == f"… and {300 - listed} more"


def test_the_time_left_shrinks_to_nothing():
    standing = standing_of("done", "running", "waiting")
    _, running, waiting = states_of(standing)
    left = []
    for state in (running, waiting):
        for step in (1, 30, 60, 90):
            become(state, "running", step=step, speed=100.0)
            left.append(standing.seconds_left())
        become(state, "done")
    left.append(standing.seconds_left())
    assert all(one > other for one, other in itertools.pairwise(left))
    assert left[0] == pytest.approx(19.9)  # ten seconds a run, one after the other
    assert left[-1] == 0
    assert "left" not in headline(standing)


def test_with_two_at_once_it_takes_half_as_long():
    one, two = standing_of("done", *["running"] * 1), standing_of("done", *["running"] * 2)
    assert one.seconds_left() == two.seconds_left() == 10


def test_nobody_at_work_means_no_end_in_sight():
    assert standing_of("done", "waiting").seconds_left() is None
    assert standing_of("done", "interrupted").seconds_left() is None
    assert standing_of("done", "failed", "diverged").seconds_left() == 0


class Terminal(io.StringIO):
    """A screen of so many rows, with lines that fit, and what has left it at the top."""

    def __init__(self, columns: int = 100, rows: int = 24, *, tty: bool = True) -> None:
        super().__init__()
        self.columns, self.rows, self.tty = columns, rows, tty
        self.lines, self.row = [""], 0

    def isatty(self) -> bool:
        return self.tty

    def write(self, text: str) -> int:
        for part in re.findall(r"\x1b\[\d*[FJ]|\n|[^\n\x1b]+|\x1b", text):
            if part == "\n":
                self.row += 1
                self.lines += [""] * (self.row == len(self.lines))
            elif found := re.fullmatch(r"\x1b\[(\d+)F", part):  # up, but not above the screen
                top = max(0, len(self.lines) - self.rows)
                self.row = max(top, self.row - int(found[1]))
            elif part == "\x1b[J":
                self.lines[self.row :] = [""]
            else:
                self.lines[self.row] += part
        return super().write(text)


@pytest.fixture
def terminal(monkeypatch) -> Iterator[Callable[..., Terminal]]:
    def make(**more) -> Terminal:
        made = Terminal(**more)
        monkeypatch.setenv("COLUMNS", str(made.columns))
        monkeypatch.setenv("LINES", str(made.rows))
        monkeypatch.setattr(sys, "stderr", made)
        return made

    return make


def test_on_a_terminal_the_table_is_drawn_over_itself(terminal):
    screen = terminal()
    board, standing = Board(), standing_of("waiting", "waiting", "waiting")
    board.note("sweep    outputs/sweeps/grid")
    board.show(standing)
    first, second, third = states_of(standing)
    become(first, "running", step=1)
    become(second, "running", step=1)
    board.show(standing)
    become(first, "failed")
    board.show(standing)
    board.note("stopping: for a reason")
    become(second, "done")
    become(third, "done")
    board.show(standing)
    board.show(standing)
    table = picture(standing, 100)
    assert screen.lines == ["sweep    outputs/sweeps/grid", "stopping: for a reason", *table, ""]
    ups = [int(up) for up in re.findall(r"\x1b\[(\d+)F", screen.getvalue())]
    assert ups == [1, 3, 3, 2]  # each time as many lines as stood there


def test_a_long_table_is_drawn_over_itself_on_a_small_screen(terminal):
    """What has left the screen at the top can't be drawn over."""
    screen = terminal(rows=24)
    board, standing = Board(), standing_of(*["failed"] * 60, "running")
    for step in (1, 2, 3):
        become(states_of(standing)[-1], "running", step=step)
        board.show(standing)
    assert sum(line.startswith("grid-") for line in screen.lines) == 1
    assert sum("step" in line for line in screen.lines) == 1


def test_beside_a_terminal_there_are_only_lines(terminal):
    log = terminal(tty=False)
    board, standing = Board(), standing_of("waiting", "waiting", "done")
    first, second, _ = states_of(standing)
    for step in (0, 10, 20):
        become(first, "running", step=step)
        become(second, "running", step=step)
        board.show(standing)
    become(first, "done")
    board.show(standing)
    become(second, "failed", reason="ValueError: no queries today")
    board.show(standing)
    board.show(standing)
    assert "\x1b" not in log.getvalue()
    said = [re.sub(r"^\d\d:\d\d:\d\d  ", "", line) for line in log.lines[:-1]]
    assert [line.split()[:2] for line in said] == [
        ["done", "standard-d128-h4-s0"],
        ["failed", "standard-d128-h4-s1"],
    ]
    assert "val 2.2500  test 2.5000  10.0 s" in said[0]
    assert "no queries today" in said[1]
    assert said[1].endswith("[3 runs: 2 done · 1 failed]")


@pytest.mark.parametrize("tty", [True, False])
def test_no_reason_and_no_name_steers_the_terminal(terminal, tty):
    screen = terminal(tty=tty, rows=50)
    standing = standing_of("running", "running", label="a\x1b[31mred\x07-d8-h1")
    board = Board()
    board.show(standing)
    evil = "ValueError: \x1b[2J\x1b]0;owned\x07\r\x9b31m no"
    become(states_of(standing)[0], "failed", reason=evil)
    become(states_of(standing)[1], "interrupted", reason=evil)
    board.show(standing)
    board.note(f"W&B: {evil}")
    written = re.sub(r"\x1b\[\d*[FJ]|\n", "", screen.getvalue()) if tty else screen.getvalue()
    assert "".join(c for c in written if not c.isprintable() and c != "\n") == ""


def test_status_does_not_let_a_reason_steer_the_terminal():
    standing = standing_of("failed")
    become(states_of(standing)[0], "failed", reason="ValueError: \x1b[2J\x07 no")
    assert all(line.isprintable() for line in picture(standing, 10_000))

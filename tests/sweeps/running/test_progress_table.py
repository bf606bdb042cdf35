"""The progress table, rendered from synthetic states."""

import io
import itertools
import re
import sys
from collections.abc import Callable, Iterator

import pytest

from qkablate.config import Config, TrainConfig
from qkablate.sweeps.planning.manifest import Arm, Manifest, SweepRun
from qkablate.sweeps.running.progress_table import ProgressTable, headline, render_table
from qkablate.sweeps.running.state import STATUSES, RunState, SweepState
from qkablate.table import format_duration

STEPS, TOKENS = 100, 16 * 64  # steps of a run, tokens of a step


def sweep_state_of(
    *statuses: str, name: str = "grid", label: str = "standard-d128-h4"
) -> SweepState:
    """Return a sweep of one arm, with a run of each status."""
    config = Config(train=TrainConfig(steps=STEPS), threads=1)
    arm = Arm(label, "standard", ["none"], None, {}, config, {}, 5, 1000, 2000, 6000.0)
    runs = [
        SweepRun(f"{seed:012x}", f"{label}-s{seed}", label, False, {"seed": seed, "optim.lr": 1e-3})
        for seed in range(len(statuses))
    ]
    sweep_state = SweepState(Manifest(name, "outputs", {label: arm}, runs, [], [], 0, []))
    for state, status in zip(sweep_state.states.values(), statuses, strict=True):
        set_status(state, status)
    return sweep_state


def set_status(
    state: RunState, status: str, step: int = 0, speed: float = 0.0, reason: str = ""
) -> None:
    """Set the fields of a state for a status."""
    state.status, state.result, state.metrics, state.reason = status, None, None, reason
    if status in ("done", "diverged", "failed"):
        losses = {"train": 2.0, "val": 2.25, "test": 2.5}
        tokens, seconds = STEPS * TOKENS, 10.0
        state.result = {"status": status, "loss": losses, "tokens": tokens, "seconds": seconds}
        if status == "failed":
            state.reason = reason or "ValueError: no"
    elif step:
        row = {"step": step, "train/loss": 2.7182818, "perf/tokens_per_second": speed}
        state.metrics = row if speed else {"step": step}


def states_of(sweep_state: SweepState) -> list[RunState]:
    return list(sweep_state.states.values())


@pytest.mark.parametrize(
    ("seconds", "output"),
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
def test_duration_uses_the_largest_units(seconds, output):
    assert format_duration(seconds) == output


def test_headline_counts_every_run_once():
    some = ["done"] * 3 + ["running", "waiting", "waiting", "interrupted", "diverged", "failed"]
    sweep_state = sweep_state_of(*some)
    output = headline(sweep_state)
    assert output.startswith("9 runs: ")
    numbers = re.findall(rf"(\d+) ({'|'.join(STATUSES)})", output)
    assert {status: int(number) for number, status in numbers} == sweep_state.status_counts()
    assert sum(sweep_state.status_counts().values()) == sweep_state.expected_runs() == 9
    assert headline(sweep_state_of("done")) == "1 run: 1 done"
    assert "left" not in headline(sweep_state_of("waiting", "waiting"))


def test_running_run_shows_bar_loss_and_speed():
    sweep_state = sweep_state_of("done", "running", "waiting")
    set_status(states_of(sweep_state)[1], "running", step=25, speed=1234.5)
    head, line = render_table(sweep_state, 200)
    assert head.startswith(f"grid-{sweep_state.manifest.id}  3 runs: ")
    assert "1,234 tokens/s" in head
    assert line == (
        "  standard-d128-h4-s1  ████············  25%  step 25/100  loss 2.7183  1,234 tokens/s"
    )


@pytest.mark.parametrize("step", [0, 1, 50, 99, 100, 120])
def test_bar_has_fixed_length_and_is_never_overfull(step):
    sweep_state = sweep_state_of("running")
    set_status(states_of(sweep_state)[0], "running", step=step)
    (bar,) = re.findall("[█·]{2,}", render_table(sweep_state, 200)[1])
    assert len(bar) == 16
    assert bar.count("█") == round(16 * min(1, step / STEPS))


def test_headline_sums_the_speeds():
    sweep_state = sweep_state_of("running", "running", "done")
    for state in states_of(sweep_state)[:2]:
        set_status(state, "running", step=10, speed=500.0)
    assert "1,000 tokens/s" in headline(sweep_state)


def test_unfinished_runs_show_their_reason():
    sweep_state = sweep_state_of("done", "failed", "interrupted", "waiting")
    set_status(states_of(sweep_state)[2], "interrupted", reason="its process was ended by SIGKILL")
    assert render_table(sweep_state, 200)[1:] == [
        "  failed: standard-d128-h4-s1: ValueError: no",
        "  interrupted: standard-d128-h4-s2: its process was ended by SIGKILL",
    ]


@pytest.mark.parametrize("width", [60, 80])
def test_losses_and_time_left_stay_on_a_narrow_terminal(width):
    sweep_state = sweep_state_of("done", "running", "waiting", name="a-name-of-some-length")
    set_status(states_of(sweep_state)[1], "running", step=25, speed=1e6)
    head, line = render_table(sweep_state, width)
    assert head.endswith(" left")
    assert "loss 2.7183" in line
    assert "…" not in head + line


@pytest.mark.parametrize("width", [20, 40, 79, 80, 81, 200])
def test_lines_fit_the_terminal(width):
    sweep_state = sweep_state_of(
        *["running"] * 3, *["failed"] * 3, name="a-name-of-some-length" * 3
    )
    for state in states_of(sweep_state)[:3]:
        set_status(state, "running", step=10, speed=1e6)
    for state in states_of(sweep_state)[3:]:
        set_status(state, "failed", reason="ValueError: " + "no " * 50)
    lines = render_table(sweep_state, width)
    assert len(lines) == 7
    assert all(len(line) < width and "\n" not in line for line in lines)


def test_long_table_counts_the_hidden_runs():
    shown = render_table(sweep_state_of(*["running"] * 16), 200)
    assert len(shown) == 17
    many = render_table(sweep_state_of(*["running"] * 300), 200)
    assert len(many) < 24
    listed = sum("step" in line for line in many)
    assert many[-1].strip() == f"… and {300 - listed} more"


def test_time_left_decreases_to_zero():
    sweep_state = sweep_state_of("done", "running", "waiting")
    _, running, waiting = states_of(sweep_state)
    left = []
    for state in (running, waiting):
        for step in (1, 30, 60, 90):
            set_status(state, "running", step=step, speed=100.0)
            left.append(sweep_state.seconds_left())
        set_status(state, "done")
    left.append(sweep_state.seconds_left())
    assert all(one > other for one, other in itertools.pairwise(left))
    assert left[0] == pytest.approx(19.9)  # ten seconds a run, one after the other
    assert left[-1] == 0
    assert "left" not in headline(sweep_state)


def test_two_parallel_runs_halve_the_time_left():
    one, two = sweep_state_of("done", *["running"] * 1), sweep_state_of("done", *["running"] * 2)
    assert one.seconds_left() == two.seconds_left() == 10


def test_time_left_is_unknown_if_nothing_runs():
    assert sweep_state_of("done", "waiting").seconds_left() is None
    assert sweep_state_of("done", "interrupted").seconds_left() is None
    assert sweep_state_of("done", "failed", "diverged").seconds_left() == 0


class Terminal(io.StringIO):
    """A terminal that interprets cursor movements, with the lines that have scrolled off."""

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
            elif found := re.fullmatch(
                r"\x1b\[(\d+)F", part
            ):  # up, at most to the top of the screen
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
        monkeypatch.setenv("NO_COLOR", "1")
        monkeypatch.setattr(sys, "stderr", made)
        return made

    return make


def test_table_is_redrawn_in_place_on_a_terminal(terminal):
    screen = terminal()
    board, sweep_state = ProgressTable(), sweep_state_of("waiting", "waiting", "waiting")
    board.note("sweep    outputs/sweeps/grid")
    board.show(sweep_state)
    first, second, third = states_of(sweep_state)
    set_status(first, "running", step=1)
    set_status(second, "running", step=1)
    board.show(sweep_state)
    set_status(first, "failed")
    board.show(sweep_state)
    board.note("stopping: for a reason")
    set_status(second, "done")
    set_status(third, "done")
    board.show(sweep_state)
    board.show(sweep_state)
    table = render_table(sweep_state, 100)
    assert screen.lines == ["sweep    outputs/sweeps/grid", "stopping: for a reason", *table, ""]
    ups = [int(up) for up in re.findall(r"\x1b\[(\d+)F", screen.getvalue())]
    assert ups == [1, 3, 3, 2]  # the number of lines drawn before


def test_table_higher_than_the_screen_is_cut(terminal):
    """Lines that have scrolled off the screen cannot be redrawn."""
    screen = terminal(rows=24)
    board, sweep_state = ProgressTable(), sweep_state_of(*["failed"] * 60, "running")
    for step in (1, 2, 3):
        set_status(states_of(sweep_state)[-1], "running", step=step)
        board.show(sweep_state)
    assert sum(line.startswith("grid-") for line in screen.lines) == 1
    assert sum("step" in line for line in screen.lines) == 1


def test_only_changes_are_printed_without_a_terminal(terminal):
    log = terminal(tty=False)
    board, sweep_state = ProgressTable(), sweep_state_of("waiting", "waiting", "done")
    first, second, _ = states_of(sweep_state)
    for step in (0, 10, 20):
        set_status(first, "running", step=step)
        set_status(second, "running", step=step)
        board.show(sweep_state)
    set_status(first, "done")
    board.show(sweep_state)
    set_status(second, "failed", reason="ValueError: no queries today")
    board.show(sweep_state)
    board.show(sweep_state)
    assert "\x1b" not in log.getvalue()
    lines = [re.sub(r"^\d\d:\d\d:\d\d  ", "", line) for line in log.lines[:-1]]
    assert [line.split()[:2] for line in lines] == [
        ["done", "standard-d128-h4-s0"],
        ["failed", "standard-d128-h4-s1"],
    ]
    assert "val 2.2500  test 2.5000  10.0 s" in lines[0]
    assert "no queries today" in lines[1]
    assert lines[1].endswith("[3 runs: 2 done · 1 failed]")


@pytest.mark.parametrize("tty", [True, False])
def test_control_characters_never_reach_the_terminal(terminal, tty):
    screen = terminal(tty=tty, rows=50)
    sweep_state = sweep_state_of("running", "running", label="a\x1b[31mred\x07-d8-h1")
    board = ProgressTable()
    board.show(sweep_state)
    evil = "ValueError: \x1b[2J\x1b]0;owned\x07\r\x9b31m no"
    set_status(states_of(sweep_state)[0], "failed", reason=evil)
    set_status(states_of(sweep_state)[1], "interrupted", reason=evil)
    board.show(sweep_state)
    board.note(f"W&B: {evil}")
    written = re.sub(r"\x1b\[\d*[FJ]|\n", "", screen.getvalue()) if tty else screen.getvalue()
    assert "".join(c for c in written if not c.isprintable() and c != "\n") == ""


def test_rendered_table_has_no_control_characters():
    sweep_state = sweep_state_of("failed")
    set_status(states_of(sweep_state)[0], "failed", reason="ValueError: \x1b[2J\x07 no")
    assert all(line.isprintable() for line in render_table(sweep_state, 10_000))

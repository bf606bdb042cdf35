"""Progress of a sweep: on a terminal a table that is redrawn in place, otherwise lines."""

import shutil
import sys
import time
from contextlib import suppress

from qkablate.errors import sanitize
from qkablate.redaction import redact
from qkablate.screen import find_screen
from qkablate.sweeps.running.state import STATUSES, RunState, SweepState
from qkablate.table import format_count, format_duration

UNLIMITED = 10_000  # columns or lines
_BAR = 16
_MAX_RUNS = 16  # running runs that are shown individually
_METRICS = {
    "train/loss": ("loss {:.4f}", 0),
    "val/loss": ("val {:.4f}", 0),
    "perf/tokens_per_second": ("{:,.0f} tokens/s", 5),
}
Part = tuple[str, int]  # of a line, and its rank: what has the highest is left out first


class ProgressTable:
    """Progress on stderr."""

    def __init__(self) -> None:
        self._is_terminal = sys.stderr.isatty()
        self._drawn = 0  # lines of the table on the screen
        self._statuses: dict[str, str] = {}  # as last printed

    def show(self, sweep_state: SweepState) -> None:
        """Draw the table, or print the runs whose status has changed."""
        if self._is_terminal:
            size = shutil.get_terminal_size()
            # A table higher than the screen could not be redrawn in place.
            lines = render_table(sweep_state, size.columns, size.lines - 1)
            paint = find_screen(sys.stderr).paint_words
            self._write(self._erase() + "".join(f"{paint(line)}\n" for line in lines))
            self._drawn = len(lines)
            return
        for id, state in sweep_state.states.items():
            before = self._statuses.get(id)
            if state.status != before:
                self._statuses[id] = state.status
                if before is not None and state.status != "waiting":
                    self.note(_format_change(state, sweep_state))

    def note(self, text: str) -> None:
        """Print a line that stays above the table."""
        text = sanitize(redact(text))
        if self._is_terminal:
            self._write(f"{self._erase()}{text}\n")
        else:
            self._write(f"{time.strftime('%H:%M:%S')}  {text}\n")
        self._drawn = 0

    def _erase(self) -> str:
        """Return the control sequence that erases the table."""
        return f"\x1b[{self._drawn}F\x1b[J" if self._drawn else ""

    @staticmethod
    def _write(text: str) -> None:
        with suppress(OSError):  # losing the terminal is no reason to stop
            sys.stderr.write(text)
            sys.stderr.flush()


def render_table(
    sweep_state: SweepState, width: int = UNLIMITED, height: int = UNLIMITED
) -> list[str]:
    """Return the lines of the table, narrower than `width`: losses and the time left come first."""
    manifest = sweep_state.manifest
    name = (f"{manifest.name}-{manifest.id}  ", 2)
    lines = [_join([name, *_headline_parts(sweep_state)], width)]
    running = [state for state in sweep_state.states.values() if state.status == "running"]
    longest = max((len(manifest.run_title(state.run)) for state in running), default=0)
    for state in running[:_MAX_RUNS]:
        title = (f"  {manifest.run_title(state.run):<{longest}}", 1)
        lines.append(_join([title, *_progress_parts(state, sweep_state)], width))
    if len(running) > _MAX_RUNS:
        lines.append(f"  … and {len(running) - _MAX_RUNS} more")
    for state in sweep_state.states.values():
        if state.status in ("failed", "interrupted", "waiting") and state.reason:
            lines.append(f"  {state.status}: {manifest.run_title(state.run)}: {state.reason}")
    if len(lines) > height:
        lines[height - 1 :] = [f"  … and {len(lines) - height + 1} more"]
    lines = [sanitize(line) for line in lines]
    return [line if len(line) < width else line[: width - 2] + "…" for line in lines]


def headline(sweep_state: SweepState) -> str:
    """Return `32 runs: 12 done · 2 running · 18 waiting   24,000 tokens/s   about 3 min left`."""
    return _join(_headline_parts(sweep_state))


def _headline_parts(sweep_state: SweepState) -> list[Part]:
    counts = sweep_state.status_counts()
    by_status = " · ".join(f"{counts[status]} {status}" for status in STATUSES if counts[status])
    parts = [(f"{format_count(sweep_state.expected_runs(), 'run')}: {by_status}", 1)]
    if speed := sweep_state.tokens_per_second():
        parts.append((f"   {speed:,.0f} tokens/s", 3))
    if counts["running"] and (left := sweep_state.seconds_left()):
        parts.append((f"   about {format_duration(left)} left", 0))
    return parts


def _progress_parts(state: RunState, sweep_state: SweepState) -> list[Part]:
    steps = int(sweep_state.manifest.arms[state.run.arm].config.train.steps)
    part = min(1.0, state.step / steps)
    bar = "█" * round(part * _BAR)
    parts = [(f"  {bar:·<{_BAR}}", 4), (f" {part:4.0%}", 2), (f"  step {state.step}/{steps}", 3)]
    for key, (form, rank) in _METRICS.items():
        if isinstance(value := (state.metrics or {}).get(key), float):
            parts.append((f"  {form.format(value)}", rank))
    return parts


def _join(parts: list[Part], width: int = UNLIMITED) -> str:
    """Join parts; those of the highest rank are left out until the line fits."""
    shown = [*parts]
    while len(shown) > 1 and sum(len(text) for text, _ in shown) >= width:
        shown.remove(max(shown, key=lambda part: part[1]))
    return "".join(text for text, _ in shown)


def _format_change(state: RunState, sweep_state: SweepState) -> str:
    line = f"{state.status:<11}  {sweep_state.manifest.run_title(state.run)}"
    if state.status == "done" and state.result is not None:
        losses = {split: state.result["loss"].get(split) for split in ("val", "test")}
        texts = [f"{split} {loss:.4f}" for split, loss in losses.items() if loss is not None]
        line += f"  {'  '.join(texts)}  {state.result['seconds']:.1f} s"
    elif state.reason:
        line += f"  {state.reason}"
    return f"{line}   [{headline(sweep_state)}]"

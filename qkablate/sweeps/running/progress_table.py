"""Progress of a sweep: on a terminal a table that is redrawn in place, otherwise lines."""

import shutil
import sys
import time
from contextlib import suppress

from qkablate.errors import sanitize
from qkablate.redaction import redact
from qkablate.sweeps.running.state import STATUSES, RunState, SweepState
from qkablate.table import format_count, format_duration

_BAR = 16
_MAX_RUNS = 16  # running runs that are shown individually
_METRICS = {
    "train/loss": "loss {:.4f}",
    "val/loss": "val {:.4f}",
    "perf/tokens_per_second": "{:,.0f} tokens/s",
}


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
            self._write(self._erase() + "".join(f"{line}\n" for line in lines))
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


def render_table(sweep_state: SweepState, width: int = 10_000, height: int = 10_000) -> list[str]:
    """Return the lines of the table, cut to the terminal's size."""
    manifest = sweep_state.manifest
    lines = [f"{manifest.name}-{manifest.id}  {headline(sweep_state)}"]
    running = [state for state in sweep_state.states.values() if state.status == "running"]
    longest = max((len(manifest.run_title(state.run)) for state in running), default=0)
    for state in running[:_MAX_RUNS]:
        progress = _format_progress(state, sweep_state)
        lines.append(f"  {manifest.run_title(state.run):<{longest}}  {progress}")
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
    counts = sweep_state.status_counts()
    by_status = " · ".join(f"{counts[status]} {status}" for status in STATUSES if counts[status])
    line = f"{format_count(sweep_state.expected_runs(), 'run')}: {by_status}"
    if speed := sweep_state.tokens_per_second():
        line += f"   {speed:,.0f} tokens/s"
    if counts["running"] and (left := sweep_state.seconds_left()):
        line += f"   about {format_duration(left)} left"
    return line


def _format_progress(state: RunState, sweep_state: SweepState) -> str:
    steps = int(sweep_state.manifest.arms[state.run.arm].config.train.steps)
    part = min(1.0, state.step / steps)
    bar = "█" * round(part * _BAR)
    values = {key: (state.metrics or {}).get(key) for key in _METRICS}
    metrics = [_METRICS[key].format(v) for key, v in values.items() if isinstance(v, float)]
    return f"{bar:·<{_BAR}} {part:4.0%}  step {state.step}/{steps}  {'  '.join(metrics)}"


def _format_change(state: RunState, sweep_state: SweepState) -> str:
    line = f"{state.status:<11}  {sweep_state.manifest.run_title(state.run)}"
    if state.status == "done" and state.result is not None:
        losses = {split: state.result["loss"].get(split) for split in ("val", "test")}
        texts = [f"{split} {loss:.4f}" for split, loss in losses.items() if loss is not None]
        line += f"  {'  '.join(texts)}  {state.result['seconds']:.1f} s"
    elif state.reason:
        line += f"  {state.reason}"
    return f"{line}   [{headline(sweep_state)}]"

"""What a person sees of a sweep: on a terminal a table that is drawn over itself, else lines."""

import shutil
import sys
from contextlib import suppress

from qkablate.errors import printable
from qkablate.redaction import redacted
from qkablate.sweeps.running.state import STATUSES, Standing, State, duration, now
from qkablate.table import counted

_BAR = 16
_MOST = 16  # running runs shown one by one


class Board:
    """Progress on stderr."""

    def __init__(self) -> None:
        self._live = sys.stderr.isatty()
        self._drawn = 0  # lines of the table on the screen
        self._said: dict[str, str] = {}

    def show(self, standing: Standing) -> None:
        """Draw the table, or say what has changed."""
        if self._live:
            size = shutil.get_terminal_size()
            # Higher than the screen, it could not be drawn over.
            lines = picture(standing, size.columns, size.lines - 1)
            self._write(self._erased() + "".join(f"{line}\n" for line in lines))
            self._drawn = len(lines)
            return
        for id, state in standing.states.items():
            before = self._said.get(id)
            if state.status != before:
                self._said[id] = state.status
                if before is not None and state.status != "waiting":
                    self.note(_told(state, standing))

    def note(self, text: str) -> None:
        """A line that stays."""
        erased, text = self._erased(), printable(redacted(text))
        self._drawn = 0
        self._write(f"{erased}{text}\n" if self._live else f"{now()}  {text}\n")

    def _erased(self) -> str:
        return f"\x1b[{self._drawn}F\x1b[J" if self._drawn else ""

    @staticmethod
    def _write(text: str) -> None:
        with suppress(OSError):  # a terminal that is gone is no reason to stop
            sys.stderr.write(text)
            sys.stderr.flush()


def picture(standing: Standing, width: int = 10_000, height: int = 10_000) -> list[str]:
    """The table, in lines that fit."""
    manifest = standing.manifest
    lines = [f"{manifest.name}-{manifest.id}  {headline(standing)}"]
    running = [state for state in standing.states.values() if state.status == "running"]
    longest = max((len(manifest.called(state.run)) for state in running), default=0)
    for state in running[:_MOST]:
        lines.append(f"  {manifest.called(state.run):<{longest}}  {_progress(state, standing)}")
    if len(running) > _MOST:
        lines.append(f"  … and {len(running) - _MOST} more")
    for state in standing.states.values():
        if state.status in ("failed", "interrupted", "waiting") and state.reason:
            lines.append(f"  {state.status}: {manifest.called(state.run)}: {state.reason}")
    if len(lines) > height:
        lines[height - 1 :] = [f"  … and {len(lines) - height + 1} more"]
    lines = [printable(line) for line in lines]
    return [line if len(line) < width else line[: width - 2] + "…" for line in lines]


def headline(standing: Standing) -> str:
    """`32 runs: 12 done · 2 running · 18 waiting   24,000 tokens/s   about 3 min left`."""
    counts = standing.counts()
    said = [f"{counts[status]} {status}" for status in STATUSES if counts[status]]
    line = f"{counted(standing.expected(), 'run')}: {' · '.join(said)}"
    if speed := standing.tokens_per_second():
        line += f"   {speed:,.0f} tokens/s"
    if counts["running"] and (left := standing.seconds_left()):
        line += f"   about {duration(left)} left"
    return line


def _progress(state: State, standing: Standing) -> str:
    steps = int(standing.manifest.arms[state.run.arm].config.train.steps)
    row = state.row or {}
    part = min(1.0, state.step / steps)
    bar = "█" * round(part * _BAR)
    shown = {
        "train/loss": "loss {:.4f}",
        "val/loss": "val {:.4f}",
        "perf/tokens_per_second": "{:,.0f} tokens/s",
    }
    said = [form.format(row[key]) for key, form in shown.items() if isinstance(row.get(key), float)]
    return f"{bar:·<{_BAR}} {part:4.0%}  step {state.step}/{steps}  {'  '.join(said)}"


def _told(state: State, standing: Standing) -> str:
    """One line for what became of a run."""
    line = f"{state.status:<11}  {standing.manifest.called(state.run)}"
    if state.status == "done" and state.result is not None:
        read = {key: value for key, value in state.result["loss"].items() if value is not None}
        losses = "  ".join(f"{key} {read[key]:.4f}" for key in ("val", "test") if key in read)
        line += f"  {losses}  {state.result['seconds']:.1f} s"
    elif state.reason:
        line += f"  {state.reason}"
    return f"{line}   [{headline(standing)}]"

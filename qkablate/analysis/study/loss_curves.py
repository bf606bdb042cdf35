"""Loss curves of a run, read from its metrics.jsonl."""

import math
import re
import statistics
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from qkablate.disk import read_file
from qkablate.errors import print_stderr
from qkablate.runs.records import decode_row, is_number, read_result, sha256

LossCurve = dict[int, float]  # loss by tokens
VAL, TRAIN = "val/loss", "train/loss"
START = "start"  # validation loss at step 0, which has no place on a logarithmic axis of tokens
MAX_READINGS = 64  # of an unthinned curve
_TOKENS = re.compile(rb'"tokens": ?(\d{1,18})')


def read_loss_curves(
    folder: Path, note: Callable[[str], None] | None = None
) -> dict[str, LossCurve]:
    """Read the loss curves of a run, thinned evenly on a log scale; malformed lines are skipped."""
    content = read_metrics(folder)
    curves: dict[str, LossCurve] = {VAL: {}, TRAIN: {}, START: {}}
    if content is None:
        report_damage(folder, "its loss curves are skipped", note)
        return curves
    lines = content.splitlines()
    unfinished = content.rpartition(b"\n")[2]
    damaged = set()
    for metric in (VAL, TRAIN):
        sign = f'"{metric}"'.encode()
        rows = [line for line in lines if sign in line]
        for line in rows if len(rows) <= MAX_READINGS else _thin_lines(rows):
            try:
                curves[metric] |= _read_loss(line, metric)
            except ValueError:
                damaged |= {line} - {unfinished}  # the last line may be just being written
        curves[metric] = dict(sorted(curves[metric].items()))
    if 0 in curves[VAL]:
        curves[START][0] = curves[VAL].pop(0)
    if damaged:
        report_damage(folder, f"rows skipped: {len(damaged)}", note)
    return curves


def read_rows(folder: Path) -> list[dict[str, Any]]:
    """Read all rows of the metrics of a run but diagnostics; malformed lines are skipped."""
    content = read_metrics(folder)
    if content is None:
        report_damage(folder, "its metrics are skipped", None)
    rows = []
    for line in (content or b"").splitlines():
        if b'"diagnostics"' not in line:
            with suppress(ValueError):
                rows.append(decode_row(line))
    return rows


def read_final_train_loss(folder: Path) -> float | None:
    """Return the mean training loss of the last tenth of a run; None if it is not known."""
    known = (read_result(folder) or {}).get("final_train_loss")  # of a published run
    if is_number(known):
        return float(known)
    losses: LossCurve = {}
    sign = f'"{TRAIN}"'.encode()
    for line in (read_metrics(folder) or b"").splitlines():
        if sign in line:
            with suppress(ValueError):
                losses |= _read_loss(line, TRAIN)
    last = [loss for tokens, loss in losses.items() if tokens > 0.9 * max(losses)]
    return statistics.fmean(last) if last else None


def _read_loss(line: bytes, metric: str) -> LossCurve:
    """Return the loss of a row by its tokens, {} if it has none; ValueError if it is damaged."""
    row = decode_row(line)
    tokens, loss = row.get("tokens"), row.get(metric)
    if type(tokens) is int and 0 <= tokens < 2**60 and is_number(loss):
        return {tokens: float(loss)}
    return {}


def report_damage(folder: Path, damage: str, note: Callable[[str], None] | None) -> None:
    """Report that the metrics of a run are damaged."""
    print_stderr(f"qkablate: '{folder / 'metrics.jsonl'}' is damaged: {damage}")
    if note is not None:
        note(f"metrics.jsonl is damaged: {damage}")


def read_metrics(folder: Path) -> bytes | None:
    """Read metrics.jsonl; None if it differs from the file that the result was made with."""
    try:
        content = read_file(folder / "metrics.jsonl")
    except OSError:
        return b""
    known = (read_result(folder) or {}).get("metrics_sha256")
    return content if not content or known in (None, sha256(content)) else None


def _thin_lines(lines: list[bytes]) -> list[bytes]:
    """Pick the first line of every sixteenth of a doubling of tokens, and the last."""
    picked: dict[int, bytes] = {}
    for line in lines:
        if (tokens := _TOKENS.search(line)) is not None:
            picked.setdefault(int(16 * math.log2(int(tokens[1]) or 1)), line)
    return [*picked.values(), lines[-1]]

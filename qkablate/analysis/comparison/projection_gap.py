"""Decomposition of a gap into what a form cannot represent and what training does not find.

A trained model is projected onto the form and fine-tuned; its parent is trained for as many more
steps. The gap that remains bounds what the form cannot represent from above: more fine-tuning can
only lower it. The rest of the gap of a run from scratch is what its training does not find.
"""

import glob
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qkablate.analysis.stats import Estimate, Sample, describe_sample
from qkablate.config.data import HELD_OUT_SPLITS
from qkablate.disk import read_file
from qkablate.errors import UserError
from qkablate.runs.records import decode_row, is_number, read_config, read_result, sha256
from qkablate.runs.run import check_identity

PARTS = ("before_finetuning", "finetuned", "scratch", "training")
Losses = dict[str, float | None]  # by split


@dataclass(frozen=True)
class ProjectionGap:
    """Losses of four runs and the gaps between them, in nats; None where one is missing."""

    before_finetuning: Losses  # validation loss before the first step, of parent and projected
    loss: dict[str, Losses]
    gap: dict[str, Losses]


def decompose_gap(
    parent: Path, continued: Path, projected: Path, scratch: Path | None
) -> ProjectionGap:
    """Return the losses of the four runs and the parts of the gap."""
    before_finetuning = {"parent": _initial_loss(continued), "projected": _initial_loss(projected)}
    runs = {"parent": parent, "continued": continued, "projected": projected, "scratch": scratch}
    losses = {name: _losses(folder) for name, folder in runs.items()}
    gaps = {
        "before_finetuning": {
            "val": _difference(before_finetuning["projected"], before_finetuning["parent"]),
            "test": None,
        },
        "finetuned": _gap(losses["projected"], losses["continued"]),
        "scratch": _gap(losses["scratch"], losses["parent"]),
    }
    gaps["training"] = _gap(gaps["scratch"], gaps["finetuned"])
    return ProjectionGap(before_finetuning, losses, gaps)


def runs_at_rates(folder: Path, identity: Mapping[str, Any]) -> dict[float, Path]:
    """Return the finished runs beside `folder` that differ from it in their rate, best first."""
    runs = []
    arm = folder.name.rpartition("-")[0]
    for path in sorted(folder.parent.glob(f"{glob.escape(arm)}-*/config.yaml")):
        try:
            config = read_config(path.parent)
            check_identity(config)
            rate = config["identity"]["optim"]["lr"]
        except (ValueError, LookupError, TypeError, AttributeError):
            continue  # not a run of this program
        loss = _losses(path.parent)["val"]
        is_alike = _without_rate(config["identity"]) == _without_rate(identity)
        if is_alike and loss is not None and is_number(rate):
            runs.append((loss, rate, path.parent))
    return {rate: path for _, rate, path in sorted(runs)}


@dataclass(frozen=True)
class ScratchRun:
    """A finished run from scratch, the best of those at several learning rates."""

    folder: Path
    lr: float
    lrs: list[float]  # it was chosen among these
    is_equally_tuned: bool  # chosen among as many rates as the parent


def find_scratch_run(
    folder: Path, identity: Mapping[str, Any], parent: Path, parent_identity: Mapping[str, Any]
) -> ScratchRun | None:
    """Return the best finished run like `folder`'s, tuned as much as the parent if possible."""
    if not (rates := runs_at_rates(folder, identity)):
        return None
    parent_rates = runs_at_rates(parent, parent_identity)
    equal = equally_tuned(rates, parent_rates, parent_identity["optim"]["lr"])
    rates = equal or rates
    best = next(iter(rates))
    return ScratchRun(rates[best], best, sorted(rates), bool(equal))


def equally_tuned(
    rates: Mapping[float, Path], parent_rates: Mapping[float, Path], parent_lr: float
) -> dict[float, Path]:
    """Return the runs from scratch that were chosen among as many rates as the parent.

    These are the runs at rates at which the parent was trained, too, if it is the best of them;
    otherwise that at its own rate. Both mappings have the best run first.
    """
    common = {rate: path for rate, path in rates.items() if rate in parent_rates}
    best = next((rate for rate in parent_rates if rate in common), None)
    return {rate: path for rate, path in common.items() if parent_lr in (best, rate)}


def _without_rate(identity: Mapping[str, Any]) -> dict[str, Any]:
    return {**identity, "optim": {**identity["optim"], "lr": None}}


def mean_gaps(gaps: Sequence[ProjectionGap]) -> dict[str, dict[str, Estimate]]:
    """Return the mean of every part over seeds, by split."""

    def mean(part: str, split: str) -> Estimate:
        values = (gap.gap[part][split] for gap in gaps)
        return describe_sample(Sample(tuple(value for value in values if value is not None)))

    return {part: {split: mean(part, split) for split in HELD_OUT_SPLITS} for part in PARTS}


def _losses(folder: Path | None) -> Losses:
    """Return the losses of a run that is done."""
    result = None if folder is None else read_result(folder)
    if result is None or result["status"] != "done":
        return dict.fromkeys(HELD_OUT_SPLITS)
    return {name: result["loss"].get(name) for name in HELD_OUT_SPLITS}


def _gap(losses: Losses, others: Losses) -> Losses:
    return {split: _difference(losses[split], others[split]) for split in HELD_OUT_SPLITS}


def _difference(value: float | None, other: float | None) -> float | None:
    return None if value is None or other is None else value - other


def _initial_loss(folder: Path) -> float | None:
    """Return the validation loss before the first step."""
    result, path = read_result(folder) or {}, folder / "metrics.jsonl"
    try:
        content = read_file(path)
    except OSError as error:
        raise UserError(f"'{path}' cannot be read: {error.strerror}") from None
    if sha256(content) != result.get("metrics_sha256", sha256(content)):
        raise UserError(f"'{path}' is damaged: it was changed after the run wrote it")
    for line in content.splitlines():
        with suppress(ValueError):
            row = decode_row(line)
            if row.get("step") == 0 and is_number(row.get("val/loss")):
                return float(row["val/loss"])
    return None

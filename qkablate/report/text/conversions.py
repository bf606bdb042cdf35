"""The table of variants that trained runs were converted to, and the same as plain data."""

from typing import Any

from qkablate.analysis.comparison.conversions import (
    Conversion,
    baseline_losses,
    find_conversions,
)
from qkablate.analysis.stats import Sample
from qkablate.analysis.study.study import Study
from qkablate.report.text.numbers import format_gap
from qkablate.report.text.projection import format_share
from qkablate.report.text.table import Table
from qkablate.table import format_count, print_table, print_text

_COLUMNS = [
    *("variant", "parameters", "QK scores", "OV output", "val at once", "gap"),
    *("val after", "gap in test loss [95 %]", "runs"),
]


def print_conversions(study: Study) -> None:
    """Print the table with its notes."""
    table = conversion_table(study)
    print(table.title)
    print_table(table.columns, table.rows)
    print()
    for note in table.notes:
        print_text(note)


def conversion_table(study: Study) -> Table:
    """Return a row for each variant, and one for the trained model itself."""
    rows = [_baseline_row(study), *map(_row, find_conversions(study))]
    config = next(iter(study.arms.values())).config
    steps, lr = format_count(int(config.train.steps), "step"), config.optim.lr
    notes = [
        "QK scores, OV output: relative error of the projection, root mean square over layers and"
        " runs, weighted by what each layer reads; 0 is exact",
        f"at once: before the first step; after: {steps} of fine-tuning at learning rate {lr:g}."
        " Gaps are to the trained model, which was trained on for as many steps",
    ]
    if any(
        arm.mismatch is None and len(study.entries[0].records) == 1 for arm in study.arms.values()
    ):
        notes.append("n = 1: no interval; give several RUNs, or seed=range(3) to an imported model")
    for reason, names in _group_left_out(study).items():
        notes.append(f"left out: {', '.join(names)}: {reason}")
    return Table("Conversions of the trained model", _COLUMNS, rows, notes)


def _group_left_out(study: Study) -> dict[str, list[str]]:
    reasons: dict[str, list[str]] = {}
    for left in study.left_out:
        reasons.setdefault(left.reason, []).append(left.arm)
    return reasons


def to_json(study: Study) -> dict[str, Any]:
    """Return the table as plain data."""
    config = next(iter(study.arms.values())).config
    at_once, val = baseline_losses(study)
    return {
        "sweep": study.name,
        "steps": int(config.train.steps),
        "lr": config.optim.lr,
        "trained": {"val_at_once": _plain(at_once), "val": _plain(val)},
        "variants": [
            {
                "arm": own.arm,
                "variant": own.variant,
                "params": own.params,
                "params_percent": own.params_percent,
                "errors": own.errors,
                "val_at_once": _plain(own.at_once),
                "gap_at_once": _plain(own.at_once_gap),
                "val": _plain(own.val),
                "val_gap": _plain(own.val_gap),
                "test_gap": _plain(own.test_gap),
                "runs": own.runs,
                "diverged": own.diverged,
            }
            for own in find_conversions(study)
        ],
        "left_out": [{"variant": left.arm, "reason": left.reason} for left in study.left_out],
    }


def _plain(sample: Sample) -> dict[str, Any]:
    mean = sample.mean if sample.n else None
    return {"n": sample.n, "mean": mean, "interval": sample.interval()}


def _baseline_row(study: Study) -> list[str]:
    at_once, val = baseline_losses(study)
    arm = next(arm for arm in study.arms.values() if arm.baseline is None)
    params = f"{arm.params:,}"
    return [
        f"{arm.variant} (trained)",
        params,
        "",
        "",
        _loss(at_once),
        "",
        _loss(val),
        "",
        str(val.n),
    ]


def _row(own: Conversion) -> list[str]:
    errors = own.errors or {}
    shares = (format_share(errors[k]) if k in errors else "–" for k in ("qk_scores", "ov_output"))
    diverged = f" ({own.diverged} diverged)" if own.diverged else ""
    return [
        own.variant,
        f"{own.params:,} ({own.params_percent:.0f} %)",
        *shares,
        _loss(own.at_once),
        _gap(own.at_once_gap, with_interval=False),
        _loss(own.val),
        _gap(own.test_gap),
        f"{own.val.n}/{own.runs}{diverged}",
    ]


def _loss(sample: Sample) -> str:
    return f"{sample.mean:.4f}" if sample.n else "–"


def _gap(sample: Sample, *, with_interval: bool = True) -> str:
    if not sample.n:
        return "–"
    interval = sample.interval() if with_interval else None
    return format_gap(sample.mean, interval) if interval else f"{sample.mean:+.4f}"

"""Results of `qkablate project`: a decomposed gap, or a table of several variants."""

from typing import Any

from qkablate.analysis.comparison.conversions import Conversion, Conversions, find_conversions
from qkablate.analysis.stats import Sample
from qkablate.analysis.study.study import Study
from qkablate.errors import sanitize
from qkablate.report.text.numbers import format_gap
from qkablate.report.text.table import Table, format_interval, format_known
from qkablate.table import format_count, format_nats, print_next_commands, print_table, print_text


def print_projection(result: dict[str, Any], out: str) -> None:
    """Print all tables of a projection."""
    runs, name = result["runs"], result["variant"]
    for run in runs:
        print(f"{name} from {run['folders']['parent']}: relative projection error per layer")
        rows = []
        for layer in run["layers"]:
            shares = [format_share(layer[key]) for key in ("qk", "qk_scores", "ov", "ov_output")]
            rows.append([str(layer["layer"]), *shares, " ".join(map(str, layer["heads"]))])
        columns = ["layer", "QK weights", "QK scores", "OV weights", "OV output", "heads"]
        print_table(columns, rows)
        print()
        _print_losses(run, result)
    _print_split(result)
    for run in runs:
        _print_scratch_note(run, name)
    if commands := [run["scratch_command"] for run in runs if run["scratch_command"]]:
        print("\nNext: the training part needs the run from scratch")
        print("\n".join(f"  {sanitize(command)}" for command in commands))
    else:
        pair = [runs[0]["folders"][key] for key in ("projected", "continued")]
        print_next_commands(["compare", *pair, *([] if out == "outputs" else [f"out={out}"])])


def _print_scratch_note(run: dict[str, Any], name: str) -> None:
    status, lr, lrs = (run[f"scratch_{key}"] for key in ("status", "lr", "lrs"))
    if status is None:
        return
    which = f"{name} from scratch, seed {run['seed']}"
    if status == "diverged":
        print(f"{which}: diverged at learning rate {lr:g}; try a lower one")
    elif status == "failed":
        print(f"{which}: failed, see {run['folders']['scratch']}/error.txt")
    elif len(lrs) > 1:
        text = f"{which}: learning rate {lr:g}, the best of {len(lrs)} by validation loss"
        print(text if run["scratch_is_equally_tuned"] else f"{text}; its parent had other rates")
    else:
        print(f"{which}: only learning rate {lr:g}; a better one would lower the training part")


def _print_losses(run: dict[str, Any], result: dict[str, Any]) -> None:
    initial, loss, gap = run["before_finetuning"], run["loss"], run["gap"]
    losses = [
        [
            "before fine-tuning",
            "val",
            initial["parent"],
            initial["projected"],
            gap["before_finetuning"]["val"],
        ]
    ]
    for when, baseline, arm, part in (
        (f"after {format_count(result['steps'], 'step')}", "continued", "projected", "finetuned"),
        ("from scratch", "parent", "scratch", "scratch"),
    ):
        losses += [
            [when, split, loss[baseline][split], loss[arm][split], gap[part][split]]
            for split in ("val", "test")
            if loss[baseline][split] is not None
        ]
    rows = [
        [when, split, *map(format_known, pair), format_known(gap, format_nats)]
        for when, split, *pair, gap in losses
    ]
    print_table(["loss", "", result["of"], result["variant"], "gap"], rows, left=2)
    print()


def _print_split(result: dict[str, Any]) -> None:
    mean, n = result["mean"], result["n"]
    split = "test" if mean["finetuned"]["test"]["n"] else "val"
    labels = {
        "finetuned": "fine-tuned: representation part, upper bound",
        "training": "scratch − fine-tuned: training part, lower bound",
        "scratch": "from scratch: total gap",
    }
    rows = []
    for part, text in labels.items():
        value = mean[part][split]
        cells = format_known(value["mean"], format_nats), format_interval(value["interval"])
        rows.append([text, *cells, str(value["n"])])
    print_table([f"nats of {split} loss", "mean", "95 % interval", "n"], rows)
    print(
        f"\nupper bound: after {format_count(result['steps'], 'step')} of fine-tuning at learning"
        f" rate {result['lr']:g}; more steps or a better projection may lower it"
    )
    if (mean["training"][split]["mean"] or 0) < 0:
        print(
            "scratch − fine-tuned is negative: training from scratch beats fine-tuning. The"
            " representation\npart is at most the gap from scratch; nothing is shown about training"
        )
    if n == 1:
        print("n = 1 seed: no interval; pass several RUNs, one per seed, for an interval")


def format_share(value: float) -> str:
    """Format a relative error; tiny ones as a power of ten."""
    return "0" if value == 0 else f"{value:.3f}" if value >= 5e-4 else f"{value:.0e}"


_COLUMNS = [
    *("variant", "parameters", "QK scores", "OV output", "val before", "gap"),
    *("val after", "gap in test loss [95 %]", "runs"),
]


def print_conversions(study: Study) -> None:
    """Print the table of each trained model, with its notes."""
    for table in conversion_tables(study):
        print(table.title)
        print_table(table.columns, table.rows)
        print()
        for note in table.notes:
            print_text(note)
    for reason, names in _group_left_out(study).items():
        print_text(f"left out: {', '.join(names)}: {reason}")


def conversion_tables(study: Study) -> list[Table]:
    """Return a table of each trained model: a row for itself, and one for each variant."""
    tables = []
    for found in find_conversions(study):
        config = found.baseline.arm.config
        steps, lr = format_count(int(config.train.steps), "step"), config.optim.lr
        notes = [
            "QK scores, OV output: relative error of the projection, root mean square over layers"
            " and runs, weighted by what each layer reads; 0 is exact",
            f"before, after: {steps} of fine-tuning at learning rate {lr:g}. Gaps are to the"
            " trained model, which was trained further for as many steps",
        ]
        if max((own.runs for own in found.variants), default=0) == 1:
            notes.append(
                "n = 1: no interval; give several RUNs, or of an imported model several seeds"
            )
        rows = [_baseline_row(found), *map(_row, found.variants)]
        title = f"Conversions of {found.baseline.name}, trained"
        tables.append(Table(title, _COLUMNS, rows, notes))
    return tables


def _group_left_out(study: Study) -> dict[str, list[str]]:
    reasons: dict[str, list[str]] = {}
    for left in study.left_out:
        reasons.setdefault(left.reason, []).append(left.arm)
    return reasons


def conversions_to_json(study: Study) -> dict[str, Any]:
    """Return the tables of a sweep, which has one trained model, as plain data."""
    (found,) = find_conversions(study)
    config = found.baseline.arm.config
    return {
        "sweep": study.name,
        "steps": int(config.train.steps),
        "lr": config.optim.lr,
        "trained": {
            "arm": found.baseline.name,
            "val_before_finetuning": _plain(found.before_finetuning),
            "val": _plain(found.val),
        },
        "variants": [
            {
                "arm": own.arm,
                "variant": own.variant,
                "params": own.params,
                "params_percent": own.params_percent,
                "errors": own.errors,
                "val_before_finetuning": _plain(own.before_finetuning),
                "gap_before_finetuning": _plain(own.gap_before_finetuning),
                "val": _plain(own.val),
                "val_gap": _plain(own.val_gap, below=own.open_below, above=own.open_above),
                "test_gap": _plain(own.test_gap, below=own.open_below, above=own.open_above),
                "runs": own.runs,
                "diverged": own.diverged,
            }
            for own in found.variants
        ],
        "left_out": [{"variant": left.arm, "reason": left.reason} for left in study.left_out],
    }


def _plain(sample: Sample, *, below: bool = False, above: bool = False) -> dict[str, Any]:
    """Return a sample with its interval, whose end is null where it has no bound."""
    mean = sample.mean if sample.n else None
    interval = sample.interval()
    ends = interval and (None if below else interval[0], None if above else interval[1])
    return {"n": sample.n, "mean": mean, "interval": ends}


def _baseline_row(found: Conversions) -> list[str]:
    arm = found.baseline.arm
    losses = [_loss(found.before_finetuning), "", _loss(found.val), ""]
    return [f"{arm.variant} (trained)", f"{arm.params:,}", "", "", *losses, str(found.val.n)]


def _row(own: Conversion) -> list[str]:
    errors = own.errors or {}
    shares = (format_share(errors[k]) if k in errors else "–" for k in ("qk_scores", "ov_output"))
    diverged = f" ({own.diverged} diverged)" if own.diverged else ""
    return [
        own.variant,
        f"{own.params:,} ({format_known(own.params_percent, '.0f')} %)",
        *shares,
        _loss(own.before_finetuning),
        f"{own.gap_before_finetuning.mean:+.4f}" if own.gap_before_finetuning.n else "–",
        _loss(own.val),
        _final_gap(own),
        f"{own.val.n}/{own.runs}{diverged}",
    ]


def _loss(sample: Sample) -> str:
    return f"{sample.mean:.4f}" if sample.n else "–"


def _final_gap(own: Conversion) -> str:
    sample = own.test_gap
    if not sample.n:
        return "–"
    if (interval := sample.interval()) is None:
        return f"{sample.mean:+.4f}"
    return format_gap(sample.mean, interval, below=own.open_below, above=own.open_above)

"""Print the results of `qkablate project`: projection loss, test losses, decomposed gap."""

from typing import Any

from qkablate.errors import sanitize
from qkablate.report.text.table import format_interval, format_known
from qkablate.table import format_count, format_nats, print_next_commands, print_table


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
    initial, loss, gap = run["at_once"], run["loss"], run["gap"]
    losses = [["at once", "val", initial["parent"], initial["projected"], gap["at_once"]["val"]]]
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

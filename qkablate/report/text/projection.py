"""Print the results of `qkablate project`: projection loss, test losses, decomposed gap."""

from typing import Any

from qkablate.errors import sanitize
from qkablate.table import format_count, format_nats, print_next_commands, print_table


def print_projection(found: dict[str, Any], out: str) -> None:
    """Print all tables of a projection."""
    runs, name = found["runs"], found["variant"]
    for one in runs:
        print(f"{name} from {one['folders']['parent']}: relative projection error per layer")
        rows = [
            [
                str(layer["layer"]),
                *(_format_loss_share(layer[key]) for key in ("qk", "qk_scores", "ov", "ov_output")),
                " ".join(map(str, layer["heads"])),
            ]
            for layer in one["layers"]
        ]
        columns = ["layer", "QK weights", "QK scores", "OV weights", "OV output", "heads"]
        print_table(columns, rows)
        print()
        _print_losses(one, found)
    _print_split(found)
    for one in runs:
        _print_scratch_note(one, name)
    commands = [one["scratch_command"] for one in runs if one["scratch_command"]]
    if commands:
        print("\nNext: the training part needs the run from scratch")
        print("\n".join(f"  {sanitize(command)}" for command in commands))
    else:
        pair = [runs[0]["folders"][key] for key in ("projected", "continued")]
        print_next_commands(["compare", *pair, *([] if out == "outputs" else [f"out={out}"])])


def _print_scratch_note(one: dict[str, Any], name: str) -> None:
    """Print the state of the run from scratch."""
    status, lr, lrs = (one[f"scratch_{key}"] for key in ("status", "lr", "lrs"))
    if status is None:
        return
    which = f"{name} from scratch, seed {one['seed']}"
    if status == "diverged":
        print(f"{which}: diverged at learning rate {lr:g}; try a lower one")
    elif status == "failed":
        print(
            f"{which}: failed, as {one['folders']['scratch']}/error.txt says; it can be tried anew"
        )
    elif len(lrs) > 1:
        print(f"{which}: learning rate {lr:g}, the best of {len(lrs)} by validation loss")
    else:
        print(f"{which}: only learning rate {lr:g}; a better one would lower the training part")


def _print_losses(one: dict[str, Any], found: dict[str, Any]) -> None:
    begun, loss, gap = one["at_once"], one["loss"], one["gap"]
    healed = f"after {format_count(found['steps'], 'step')}"
    rows = [["at once", "val", begun["parent"], begun["projected"], gap["at_once"]["val"]]]
    for told, this, other, part in (
        (healed, "continued", "projected", "finetuned"),
        ("from scratch", "parent", "scratch", "scratch"),
    ):
        for split in ("val", "test"):
            if loss[this][split] is not None:
                rows.append([told, split, loss[this][split], loss[other][split], gap[part][split]])
    told_rows = [
        [
            told,
            split,
            *(_format_loss(v) for v in (base, own)),
            "–" if apart is None else format_nats(apart),
        ]
        for told, split, base, own, apart in rows
    ]
    print_table(["loss", "", found["of"], found["variant"], "gap"], told_rows, left=2)
    print()


def _print_split(found: dict[str, Any]) -> None:
    mean, n = found["mean"], found["n"]
    split = "test" if mean["finetuned"]["test"]["n"] else "val"
    told = {
        "finetuned": "fine-tuned: representation part, upper bound",
        "training": "scratch − fine-tuned: training part, lower bound",
        "scratch": "from scratch: total gap",
    }
    rows = []
    for part, text in told.items():
        value = mean[part][split]
        known = value["interval"]
        rows.append(
            [
                text,
                "–" if value["mean"] is None else format_nats(value["mean"]),
                "–" if known is None else f"[{format_nats(known[0])}, {format_nats(known[1])}]",
                str(value["n"]),
            ]
        )
    print_table([f"nats of {split} loss", "mean", "95 % interval", "n"], rows)
    print(
        f"\nupper bound: after {format_count(found['steps'], 'step')} of fine-tuning at learning"
        f" rate {found['lr']:g}; more steps or a better projection may lower it"
    )
    if (mean["training"][split]["mean"] or 0) < 0:
        print(
            "scratch − fine-tuned is negative: training from scratch beats fine-tuning. The"
            " representation\npart is at most the gap from scratch; nothing is shown about training"
        )
    if n == 1:
        print("n = 1 seed: no interval; pass several RUNs, one per seed, for an interval")


def _format_loss_share(value: float) -> str:
    return "0" if value == 0 else f"{value:.3f}" if value >= 5e-4 else f"{value:.0e}"


def _format_loss(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"

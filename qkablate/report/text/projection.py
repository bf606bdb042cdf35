"""What `qkablate project` says: what was lost, the losses, the split."""

from typing import Any

from qkablate.cli.hydra.configs import next_commands
from qkablate.errors import printable
from qkablate.table import counted, nats, print_table


def tell_split(found: dict[str, Any], out: str) -> None:
    runs, name = found["runs"], found["variant"]
    for one in runs:
        print(f"{name} from {one['folders']['parent']}: what of each layer's circuits is lost")
        rows = [
            [
                str(layer["layer"]),
                *(_part(layer[key]) for key in ("qk", "qk_seen", "ov", "ov_seen")),
                " ".join(map(str, layer["heads"])),
            ]
            for layer in one["layers"]
        ]
        columns = ["layer", "QK by entries", "as seen", "OV by entries", "as seen", "heads"]
        print_table(columns, rows)
        print()
        _print_losses(one, found)
    _print_split(found)
    for one in runs:
        _print_scratch(one, name)
    commands = [one["scratch_command"] for one in runs if one["scratch_command"]]
    if commands:
        print("\nNext: what training does not find needs the run from scratch")
        print("\n".join(f"  {printable(command)}" for command in commands))
    else:
        pair = [runs[0]["folders"][key] for key in ("projected", "continued")]
        next_commands(["compare", *pair, *([] if out == "outputs" else [f"out={out}"])])


def _print_scratch(one: dict[str, Any], name: str) -> None:
    """What must be known of the run from scratch."""
    status, lr, lrs = (one[f"scratch_{key}"] for key in ("status", "lr", "lrs"))
    if status is None:
        return
    which = f"{name} from scratch, seed {one['seed']}"
    if status == "diverged":
        print(f"{which}: diverged at rate {lr:g}; at a lower one it may not")
    elif status == "failed":
        print(
            f"{which}: failed, as {one['folders']['scratch']}/error.txt says; it can be tried anew"
        )
    elif len(lrs) > 1:
        print(f"{which}: at rate {lr:g}, whose validation loss is the lowest of {len(lrs)} rates")
    else:
        print(
            f"{which}: at rate {lr:g} alone; another may suit it, and training is blamed for less"
        )


def _print_losses(one: dict[str, Any], found: dict[str, Any]) -> None:
    begun, loss, gap = one["at_once"], one["loss"], one["gap"]
    healed = f"after {counted(found['steps'], 'step')}"
    rows = [["at once", "val", begun["parent"], begun["projected"], gap["at_once"]["val"]]]
    for told, this, other, part in (
        (healed, "continued", "projected", "healed"),
        ("from scratch", "parent", "scratch", "scratch"),
    ):
        for split in ("val", "test"):
            if loss[this][split] is not None:
                rows.append([told, split, loss[this][split], loss[other][split], gap[part][split]])
    told_rows = [
        [told, split, *(_loss(v) for v in (base, own)), "–" if apart is None else nats(apart)]
        for told, split, base, own, apart in rows
    ]
    print_table(["loss", "", found["of"], found["variant"], "gap"], told_rows, left=2)
    print()


def _print_split(found: dict[str, Any]) -> None:
    mean, n = found["mean"], found["n"]
    split = "test" if mean["healed"]["test"]["n"] else "val"
    told = {
        "healed": "healed: the form cannot represent this, at most",
        "training": "scratch − healed: training does not find this, at least",
        "scratch": "from scratch: the whole gap",
    }
    rows = []
    for part, text in told.items():
        value = mean[part][split]
        known = value["interval"]
        rows.append(
            [
                text,
                "–" if value["mean"] is None else nats(value["mean"]),
                "–" if known is None else f"[{nats(known[0])}, {nats(known[1])}]",
                str(value["n"]),
            ]
        )
    print_table([f"nats of {split} loss", "mean", "95 % interval", "n"], rows)
    print(
        f"\n“at most”: given {counted(found['steps'], 'step')} of healing at rate"
        f" {found['lr']:g}; more may lower it, and so may a better projection"
    )
    if (mean["training"][split]["mean"] or 0) < 0:
        print(
            "scratch − healed is negative: from scratch more is found than healing mends. What"
            " the form\ncannot represent is no more than the gap from scratch; of training"
            " nothing is shown"
        )
    if n == 1:
        print("n = 1 seed: a number, and no verdict; several RUNs, one a seed, give an interval")


def _part(value: float) -> str:
    return "0" if value == 0 else f"{value:.3f}" if value >= 5e-4 else f"{value:.0e}"


def _loss(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"

"""A gap split in two: what a form cannot represent, and what training does not find.

A trained model is put into the form and healed; its parent goes on for as many steps. The gap that
is left bounds what the form cannot represent, from above: more healing can only lower it. What a
run from scratch lacks beyond that, its training has not found.
"""

import glob
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from qkablate.analysis.stats import Sample
from qkablate.disk import read_file
from qkablate.errors import UserError
from qkablate.runs.records import is_number, read_config, read_result, read_row, sha256
from qkablate.runs.run import check_identity

SPLITS = ("val", "test")
PARTS = ("at_once", "healed", "scratch", "training")
Losses = dict[str, float | None]


def split(parent: Path, continued: Path, projected: Path, scratch: Path | None) -> dict[str, Any]:
    """The losses of four runs, and the gaps between them, in nats; None where one is missing."""
    begun = {"parent": _at_once(continued), "projected": _at_once(projected)}
    losses = {
        "parent": _losses(parent),
        "continued": _losses(continued),
        "projected": _losses(projected),
        "scratch": _losses(scratch),
    }
    gaps = {
        "at_once": {"val": _minus(begun["projected"], begun["parent"]), "test": None},
        "healed": _gap(losses["projected"], losses["continued"]),
        "scratch": _gap(losses["scratch"], losses["parent"]),
    }
    gaps["training"] = _gap(gaps["scratch"], gaps["healed"])
    return {"at_once": begun, "loss": losses, "gap": gaps}


def at_rates(folder: Path, identity: Mapping[str, Any]) -> dict[float, Path]:
    """The finished runs beside a run's `folder` that differ from it in their learning rate alone,
    by rate; the one with the lowest validation loss first.
    """
    found = []
    arm = folder.name.rpartition("-")[0]
    for path in sorted(folder.parent.glob(f"{glob.escape(arm)}-*/config.yaml")):
        try:
            config = read_config(path.parent)
            check_identity(config)
            rate = config["identity"]["optim"]["lr"]
        except (ValueError, LookupError, TypeError, AttributeError):
            continue  # no run of ours
        loss = _losses(path.parent)["val"]
        if loss is None or not is_number(rate):
            continue
        if _but_rate(config["identity"]) == _but_rate(identity):
            found.append((loss, rate, path.parent))
    return {rate: path for _, rate, path in sorted(found)}


def _but_rate(identity: Mapping[str, Any]) -> dict[str, Any]:
    return {**identity, "optim": {**identity["optim"], "lr": None}}


def means(splits: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of every gap over the seeds, with Student's interval of 95 % from two seeds on."""
    found: dict[str, Any] = {}
    for part in PARTS:
        found[part] = {}
        for name in SPLITS:
            own = [one["gap"][part][name] for one in splits]
            sample = Sample(tuple(value for value in own if value is not None))
            known = sample.interval()
            found[part][name] = {
                "n": sample.n,
                "mean": sample.mean if sample.n else None,
                "interval": None if known is None else list(known),
            }
    return found


def _losses(folder: Path | None) -> Losses:
    """Of a run that is done; of no other there is a loss."""
    result = None if folder is None else read_result(folder)
    if result is None or result["status"] != "done":
        return dict.fromkeys(SPLITS)
    return {name: result["loss"].get(name) for name in SPLITS}


def _gap(one: Losses, other: Losses) -> Losses:
    return {name: _minus(one[name], other[name]) for name in SPLITS}


def _minus(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else one - other


def _at_once(folder: Path) -> float | None:
    """The validation loss before the first step."""
    result, path = read_result(folder) or {}, folder / "metrics.jsonl"
    try:
        content = read_file(path)
    except OSError as error:
        raise UserError(f"'{path}' cannot be read: {error.strerror}") from None
    if sha256(content) != result.get("metrics_sha256", sha256(content)):
        raise UserError(f"'{path}' is damaged: it is not what the run has written")
    for line in content.splitlines():
        try:
            row = read_row(line)
        except ValueError:
            continue
        if row.get("step") == 0 and is_number(row.get("val/loss")):
            return float(row["val/loss"])
    return None

"""The table of a sweep: a row for every run, whatever became of it, rebuilt from the runs."""

import csv
import io
import json
import os
from typing import Any

from qkablate.runs.records import write_atomic
from qkablate.sweeps.planning.manifest import Manifest
from qkablate.sweeps.running.state import Standing, State


def columns(manifest: Manifest) -> dict[str, type]:
    """What a row has, and of what kind; at the end what else the arms differ in, as it is typed."""
    arms = [arm.words for arm in manifest.arms.values()]
    keys = dict.fromkeys(key for words in arms for key in words)
    known = {"variant", "model.d_model", "model.heads", "model.layers", "model.mlp_ratio", "data"}
    known |= {key for key in keys if key.startswith("variant.")} - {"variant.init", "variant.lr"}
    own = [key for key in keys if key not in known and len({w.get(key) for w in arms}) > 1]
    return COLUMNS | dict.fromkeys(own, str)


def rows(standing: Standing) -> list[dict[str, Any]]:
    """Of all runs, in the order of the manifest."""
    blank = dict.fromkeys(columns(standing.manifest))
    return [_row(standing, state, blank) for state in standing.states.values()]


def write(standing: Standing) -> None:
    """results.csv, results.parquet and, where rates were tuned, bowls.json."""
    folder = standing.manifest.folder
    found = rows(standing)
    text = io.StringIO()
    writer = csv.DictWriter(text, list(found[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(found)
    write_atomic(folder / "results.csv", text.getvalue())
    _write_parquet(standing, found)
    if standing.manifest.finals:
        bowls = [
            {
                "arm": bowl.arm,
                "state": bowl.state,
                "chosen": bowl.rate,
                "val_loss": [
                    {"lr": rate, "by_seed": bowl.losses[rate]} for rate in sorted(bowl.losses)
                ],
            }
            for bowl in standing.bowls
        ]
        write_atomic(folder / "bowls.json", json.dumps(bowls, indent=1) + "\n")


def _write_parquet(standing: Standing, found: list[dict[str, Any]]) -> None:
    import pyarrow
    from pyarrow import parquet

    path = standing.manifest.folder / "results.parquet"
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    kinds = {str: pyarrow.string(), int: pyarrow.int64(), float: pyarrow.float64()}
    kinds[bool] = pyarrow.bool_()
    schema = pyarrow.schema(
        [(name, kinds[kind]) for name, kind in columns(standing.manifest).items()]
    )
    parquet.write_table(pyarrow.Table.from_pylist(found, schema), temporary)
    temporary.replace(path)


def _row(standing: Standing, state: State, blank: dict[str, Any]) -> dict[str, Any]:
    run, arm = state.run, standing.manifest.arms[state.run.arm]
    config = arm.config_of(run.changes)
    model, result = config.model, state.result or {}
    row = blank | {key: arm.words.get(key) for key in blank.keys() - COLUMNS.keys()}
    row |= {
        "id": run.id,
        "label": run.label,
        "arm": arm.name,
        "baseline": arm.baseline,
        "variant": arm.variant,
        "control": ",".join(arm.controls),
        "tuning": run.tuning,
        "d_model": model.d_model,
        "heads": model.heads,
        "layers": model.layers,
        "context": model.context,
        "mlp_width": round(model.mlp_ratio * model.d_model),
        "data": config.data.source,
        "seed": config.seed,
        "lr": config.optim.lr,
        "planned_steps": int(config.train.steps),
        "status": state.status,
        "params": arm.params,
        "params_with_embeddings": arm.total_params,
        "mismatch": arm.mismatch,
        "flops_per_token": arm.flops,
        "folder": str(state.folder),
        "error": state.reason or None,
    }
    for key in ("steps", "tokens", "seconds", "tokens_per_second", "packed", "threads"):
        row[key] = result.get(key)
    for key in ("peak_memory_bytes", "precision", "products", "device", "kernel"):
        row[key] = result.get(key)
    for key in ("attempt", "diverged_at"):
        row[key] = result.get(key)
    for name in ("loss", "bits_per_byte", "accuracy"):
        row |= {f"{split}_{name}": value for split, value in (result.get(name) or {}).items()}
    return row


# What every row has.
COLUMNS: dict[str, type] = {
    **dict.fromkeys(("id", "label", "arm", "baseline", "variant", "control"), str),
    "tuning": bool,
    **dict.fromkeys(("d_model", "heads", "layers", "context", "mlp_width"), int),
    "data": str,
    "seed": int,
    "lr": float,
    "planned_steps": int,
    "status": str,
    **dict.fromkeys(("train_loss", "val_loss", "test_loss"), float),
    **dict.fromkeys(("val_bits_per_byte", "test_bits_per_byte"), float),
    **dict.fromkeys(("val_accuracy", "test_accuracy"), float),
    **dict.fromkeys(("params", "params_with_embeddings"), int),
    **dict.fromkeys(("mismatch", "flops_per_token"), float),
    **dict.fromkeys(("steps", "tokens"), int),
    **dict.fromkeys(("seconds", "tokens_per_second"), float),
    **dict.fromkeys(("packed", "threads", "peak_memory_bytes", "attempt", "diverged_at"), int),
    **dict.fromkeys(("precision", "products", "device", "kernel", "folder", "error"), str),
}

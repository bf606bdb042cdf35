"""The results of a sweep, rebuilt from its runs: a row per run, and a summary per arm."""

import csv
import io
import json
import os
import statistics
from dataclasses import dataclass
from typing import Any

from qkablate.runs.records import write_atomic
from qkablate.sweeps.planning.manifest import Manifest
from qkablate.sweeps.running.state import RunState, SweepState

# The columns of every row.
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
    **dict.fromkeys(("precision", "matmul", "device", "kernel", "folder", "error"), str),
}
# Those that are copied from the result under the same name.
_FROM_RESULT = (
    *("steps", "tokens", "seconds", "tokens_per_second", "packed", "threads", "attempt"),
    *("peak_memory_bytes", "precision", "matmul", "device", "kernel", "diverged_at"),
)


@dataclass(frozen=True)
class LossSummary:
    """Mean and standard deviation of a loss over runs, where there are enough."""

    mean: float | None
    sd: float | None


@dataclass(frozen=True)
class ArmSummary:
    """The runs of one arm at one learning rate, tuning runs excluded."""

    arm: str
    rate: float | None  # None: not chosen
    tuning: str  # the state of its search for a rate; chosen, where there is none
    runs: int  # expected
    done: int
    diverged: int
    val: LossSummary
    test: LossSummary


def result_columns(manifest: Manifest) -> dict[str, type]:
    """Return the columns and their types; last the other keys in which the arms differ."""
    arms = [arm.overrides for arm in manifest.arms.values()]
    keys = dict.fromkeys(key for overrides in arms for key in overrides)
    known = {"variant", "model.d_model", "model.heads", "model.layers", "model.mlp_ratio", "data"}
    known |= {key for key in keys if key.startswith("variant.")} - {"variant.init", "variant.lr"}
    varied = [key for key in keys if key not in known and len({w.get(key) for w in arms}) > 1]
    return COLUMNS | dict.fromkeys(varied, str)


def result_rows(sweep_state: SweepState) -> list[dict[str, Any]]:
    """Return the rows of all runs, in the order of the manifest."""
    blank = dict.fromkeys(result_columns(sweep_state.manifest))
    return [_row(sweep_state, state, blank) for state in sweep_state.states.values()]


def summarize_arms(sweep_state: SweepState) -> list[ArmSummary]:
    """Summarize the runs of every arm and learning rate, in the order of the plan."""
    groups: dict[tuple[str, float | None], list[RunState]] = {}
    for state in sweep_state.states.values():
        if not state.run.tuning:
            key = state.run.arm, float(state.run.changes["optim.lr"])
            groups.setdefault(key, []).append(state)
    searches = {search.arm: search.state for search in sweep_state.lr_searches}
    groups |= {(search.arm, None): [] for search in sweep_state.lr_searches if search.rate is None}
    order = {name: number for number, name in enumerate(sweep_state.manifest.arms)}
    summaries = []
    for arm, rate in sorted(groups, key=lambda group: (order[group[0]], group[1] or 0.0)):
        states = groups[arm, rate]
        losses = [s.result["loss"] for s in states if s.status == "done" and s.result]
        summaries.append(
            ArmSummary(
                arm=arm,
                rate=rate,
                tuning=searches.get(arm, "chosen"),
                runs=len(states) or len(sweep_state.manifest.finals),
                done=len(losses),
                diverged=sum(state.status == "diverged" for state in states),
                val=_summarize([loss["val"] for loss in losses if loss["val"] is not None]),
                test=_summarize([loss["test"] for loss in losses if loss["test"] is not None]),
            )
        )
    return summaries


def _summarize(losses: list[float]) -> LossSummary:
    return LossSummary(
        statistics.fmean(losses) if losses else None,
        statistics.stdev(losses) if len(losses) > 1 else None,
    )


def write_results(sweep_state: SweepState) -> None:
    """Write results.csv, results.parquet and, where rates were tuned, lr_search.json."""
    folder = sweep_state.manifest.folder
    rows = result_rows(sweep_state)
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_atomic(folder / "results.csv", text.getvalue())
    _write_parquet(sweep_state.manifest, rows)
    if sweep_state.manifest.finals:
        searches = [search.to_json() for search in sweep_state.lr_searches]
        write_atomic(folder / "lr_search.json", json.dumps(searches, indent=1) + "\n")


def _write_parquet(manifest: Manifest, rows: list[dict[str, Any]]) -> None:
    import pyarrow
    from pyarrow import parquet

    path = manifest.folder / "results.parquet"
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    types = {str: pyarrow.string(), int: pyarrow.int64(), float: pyarrow.float64()}
    types[bool] = pyarrow.bool_()
    columns = result_columns(manifest).items()
    schema = pyarrow.schema([(name, types[kind]) for name, kind in columns])
    parquet.write_table(pyarrow.Table.from_pylist(rows, schema), temporary)
    temporary.replace(path)


def _row(sweep_state: SweepState, state: RunState, blank: dict[str, Any]) -> dict[str, Any]:
    run, arm = state.run, sweep_state.manifest.arms[state.run.arm]
    config = arm.config_of(run.changes)
    model, result = config.model, state.result or {}
    row = blank | {key: arm.overrides.get(key) for key in blank.keys() - COLUMNS.keys()}
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
    row |= {key: result.get(key) for key in _FROM_RESULT}
    for name in ("loss", "bits_per_byte", "accuracy"):
        row |= {f"{split}_{name}": value for split, value in (result.get(name) or {}).items()}
    return row

"""The results of a sweep, rebuilt from its runs: rows, tables, and one run in W&B."""

import csv
import dataclasses
import io
import json
import shlex
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from qkablate.config.variant import mlp_units
from qkablate.disk import read_file, replace_file, write_atomic
from qkablate.errors import sanitize, typed_folder
from qkablate.runs.records import is_number
from qkablate.runs.text_references import find_text_references
from qkablate.sweeps.planning.manifest import Manifest
from qkablate.sweeps.running.state import RunState, SweepState
from qkablate.table import (
    format_count,
    format_list,
    print_csv,
    print_heading,
    print_table,
    print_text,
)
from qkablate.tracking.wandb.run import LoggedTables, RunIdentity, WandbRun

_MOST_LISTED = 5  # interrupted runs
# The columns of every row.
COLUMNS: dict[str, type] = {
    **dict.fromkeys(("id", "label", "arm", "baseline", "variant", "control"), str),
    "tuning": bool,
    **dict.fromkeys(("d_model", "heads", "layers", "context", "mlp_width"), int),
    "data": str,
    "seed": int,
    **dict.fromkeys(("lr", "circuit_lr"), float),
    "planned_steps": int,
    "status": str,
    **dict.fromkeys(("train_loss", "val_loss", "test_loss"), float),
    **dict.fromkeys(("val_bits_per_byte", "test_bits_per_byte"), float),
    **dict.fromkeys(("val_accuracy", "test_accuracy", "chance"), float),
    **dict.fromkeys(("val_exact", "test_exact"), float),
    "best_ngram_loss": float,
    "lzma_loss": float,
    "beats_ngrams": bool,
    **dict.fromkeys(("params", "params_with_embeddings"), int),
    **dict.fromkeys(("mismatch", "flops_per_token"), float),
    **dict.fromkeys(("steps", "tokens"), int),
    **dict.fromkeys(("seconds", "tokens_per_second"), float),
    **dict.fromkeys(
        ("packed", "program_runs", "threads", "peak_memory_bytes", "attempt", "diverged_at"), int
    ),
    **dict.fromkeys(("precision", "matmul", "device", "kernel", "folder", "error"), str),
}


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
    return [_row(sweep_state.manifest, state, blank) for state in sweep_state.states.values()]


def write_results(sweep_state: SweepState) -> None:
    """Write results.csv, results.parquet and, where rates were tuned, lr_search.json."""
    manifest, rows, text = sweep_state.manifest, result_rows(sweep_state), io.StringIO()
    folder = manifest.folder
    print_csv(rows, text)
    write_atomic(folder / "results.csv", text.getvalue())
    _write_parquet(folder / "results.parquet", result_columns(manifest), rows)
    if manifest.finals:
        searches = [search.to_json() for search in sweep_state.lr_searches]
        write_atomic(folder / "lr_search.json", json.dumps(searches, indent=1) + "\n")


def _write_parquet(path: Path, columns: dict[str, type], rows: list[dict[str, Any]]) -> None:
    import pyarrow
    from pyarrow import parquet

    types = {str: "string", int: "int64", float: "float64", bool: "bool"}
    schema = pyarrow.schema([(name, types[kind]) for name, kind in columns.items()])
    content = io.BytesIO()
    parquet.write_table(pyarrow.Table.from_pylist(rows, schema), content)
    replace_file(path, content.getvalue())


def _row(manifest: Manifest, state: RunState, blank: dict[str, Any]) -> dict[str, Any]:
    run, arm = state.run, manifest.arms[state.run.arm]
    config = arm.config_of(run.changes)
    model, result = config.model, state.result or {}
    row = blank | {key: arm.overrides.get(key) for key in blank.keys() - COLUMNS.keys()}
    row |= {key: result[key] for key in COLUMNS.keys() & result.keys()}
    row |= {key: getattr(model, key) for key in ("d_model", "heads", "layers", "context")}
    row |= {key: getattr(arm, key) for key in ("baseline", "variant", "params", "mismatch")}
    row |= {
        "id": run.id,
        "label": run.label,
        "arm": arm.name,
        "control": ",".join(arm.controls),
        "tuning": run.tuning,
        "mlp_width": mlp_units(model),
        "data": config.data.source,
        "seed": config.seed,
        "lr": config.optim.lr,
        "circuit_lr": arm.rates_of(run).circuit,
        "planned_steps": int(config.train.steps),
        "status": state.status,
        "params_with_embeddings": arm.total_params,
        "flops_per_token": arm.flops,
        "folder": str(state.folder),
        "error": state.reason or None,
    }
    for name in ("loss", "bits_per_byte", "accuracy", "exact"):
        row |= {f"{split}_{name}": value for split, value in (result.get(name) or {}).items()}
    for references in find_text_references([("", result)]):
        row |= {"best_ngram_loss": references.best_ngram, "lzma_loss": references.lzma}
        row["beats_ngrams"] = not references.behind
    return row


def print_arms(sweep_state: SweepState) -> None:
    """Print a row for every arm and learning rate: runs done, losses, and their spread."""
    manifest = sweep_state.manifest
    groups = defaultdict[tuple[str, float | None], list[RunState]](list)  # the final runs
    for state in sweep_state.states.values():
        if not state.run.tuning:
            groups[state.run.arm, float(state.run.changes["optim.lr"])].append(state)
    searches = {search.arm: search.state for search in sweep_state.lr_searches}
    groups |= {(search.arm, None): [] for search in sweep_state.lr_searches if search.rates is None}
    show_rates = bool(searches) or len(groups) > len({arm for arm, _ in groups})
    order = {name: number for number, name in enumerate(manifest.arms)}
    final_results = [state.result or {} for states in groups.values() for state in states]
    show_accuracy = any(_test_accuracy(result) is not None for result in final_results)
    rows = []
    for arm, rate in sorted(groups, key=lambda group: (order[group[0]], group[1] or 0.0)):
        states = groups[arm, rate]
        results = [s.result for s in states if s.status == "done" and s.result]
        losses = [result["loss"] for result in results]
        diverged = sum(state.status == "diverged" for state in states)
        tuning = searches.get(arm, "chosen")
        rate_cell = str(manifest.arms[arm].rates_of(states[0].run)) if states else "–"
        rows.append(
            [
                *(arm, f"{manifest.arms[arm].params:,}"),
                *([rate_cell + f" ({tuning})" * (tuning != "chosen")] if show_rates else []),
                f"{len(losses)}/{len(states) or len(manifest.finals)}",
                *_mean_and_sd([loss["val"] for loss in losses]),
                *_mean_and_sd([loss["test"] for loss in losses if loss["test"] is not None]),
                *(_mean_accuracy(results) if show_accuracy else []),
                f"{diverged}" if diverged else "",
            ]
        )
    rates, accuracy = ["lr"] * show_rates, ["accuracy", "chance"] * show_accuracy
    columns = ["arm", "params", *rates, "done", "val", "± sd", "test", "± sd", *accuracy]
    print_table([*columns, "diverged"], rows)
    print()
    print_text(
        "means over runs, and the standard deviation between them; params without embeddings"
    )
    done = [(s.run.arm, s.result) for s in sweep_state.states.values() if s.result]
    for references in find_text_references(done):
        print_text(sanitize(f"without attention: {references}"))
    for kind in dict.fromkeys(left.kind for left in manifest.left_out):
        names = [left.arm for left in manifest.left_out if left.kind == kind]
        print_text(f"left out, {kind}: {format_list(names, 6)}")
    if manifest.left_out:
        print(f"  why: {manifest.folder / 'plan.txt'}")


def _test_accuracy(result: Mapping[str, Any]) -> Any:
    return (result.get("accuracy") or {}).get("test")


def _mean_accuracy(results: list[Mapping[str, Any]]) -> list[str]:
    """Return the cells of the mean test accuracy on a task, and of chance."""
    found, chance = map(_test_accuracy, results), (result.get("chance") for result in results)
    known = [[value for value in values if is_number(value)] for values in (found, chance)]
    return [f"{statistics.fmean(values):.1%}" if values else "–" for values in known]


def _mean_and_sd(losses: list[float]) -> list[str]:
    mean = f"{statistics.fmean(losses):.4f}" if losses else "–"
    return [mean, f"{statistics.stdev(losses):.4f}" if len(losses) > 1 else "–"]


def print_failures(sweep_state: SweepState) -> None:
    """Print the runs that failed, and some of those that were interrupted: why, and how to repeat.

    The command of the sweep resumes the interrupted ones; a vmapped sweep may have hundreds.
    """
    manifest = sweep_state.manifest
    for status in ("failed", "interrupted", "waiting"):
        states = [state for state in sweep_state.states.values() if state.status == status]
        states = [state for state in states if state.reason or status != "waiting"]
        if states:
            print()
            print_heading(status)
        shown = states if status == "failed" else states[:_MOST_LISTED]
        for state in shown:
            overrides = manifest.arms[state.run.arm].overrides_of(state.run)
            overrides += [] if manifest.out == "outputs" else [f"out={manifest.out}"]
            reason = state.reason or "its process gave no reason"
            print_text(sanitize(f"  {state.run.name}: {reason}"))
            print(f"    {shlex.join(['qkablate', 'train', *manifest.config_words, *overrides])}")
        if more := len(states) - len(shown):
            print(f"  and {more:,} more")
    for search in sweep_state.lr_searches:
        if search.state in ("stuck", "diverged"):
            reason = "one of its tuning runs failed" if search.state == "stuck" else "it diverges"
            print(f"\n{search.arm}: no learning rate was chosen: {reason}")


def log_summary(
    sweep_state: SweepState, note: Callable[[str], None], tables: LoggedTables
) -> str | None:
    """Log the table of runs and the given tables as one run in W&B; return its address."""
    manifest = sweep_state.manifest
    name, tags = manifest.folder.name, ("sweep", *manifest.tracking.tags)
    identity = RunIdentity(f"sweep-{manifest.id}", name, manifest.group, "sweep", tags)
    config = {"sweep": name, "command": shlex.join(manifest.command), "arms": [*manifest.arms]}
    run = WandbRun(manifest.tracking, identity, manifest.folder, config, note)
    rows = [list(row.values()) for row in result_rows(sweep_state)]
    runs = list(result_columns(manifest)), rows
    run.log_tables(dataclasses.replace(tables, tables={"runs": runs, **tables.tables}))
    counts = {f"runs/{status}": n for status, n in sweep_state.status_counts().items()}
    run.close(counts, exit_code=0 if sweep_state.is_finished() else 1)
    return run.address


def describe_missing_runs(sweep_state: SweepState) -> str:
    """Return that runs of results.csv are gone, and what to do; '' if none is."""
    manifest = sweep_state.manifest
    try:
        text = read_file(manifest.folder / "results.csv").decode()
        done = {row["id"] for row in csv.DictReader(io.StringIO(text)) if row["status"] == "done"}
    except (OSError, ValueError, KeyError, csv.Error):
        return ""
    states = sweep_state.states.items()
    lost = [id for id, state in states if id in done and state.status == "waiting"]
    if not lost:
        return ""
    verb = "is" if len(lost) == 1 else "are"
    return (
        f"{format_count(len(lost), 'run')} that results.csv lists as done {verb} not in"
        f" '{manifest.out}/runs': move them there, too; otherwise the sweep trains them again"
    )


def resume_commands(sweep_state: SweepState) -> list[list[str]]:
    """Return the command that continues the sweep where it is now, if anything is left to do."""
    counts = sweep_state.status_counts()
    command = resume_command(sweep_state.manifest)
    does_retry = command[:1] == ["project"]  # whose next session tries failed runs again
    if counts["interrupted"] + counts["waiting"] + does_retry * counts["failed"]:
        return [command]
    return [[*command, "--retry", "failed"]] if counts["failed"] else []


def resume_command(manifest: Manifest) -> list[str]:
    """Return the command that continues a sweep; that of published runs trains the missing ones."""
    command = manifest.command[1:]
    if (archives := typed_folder(manifest.out)) is None:
        return _with_out(command, manifest.out)
    if "--from" in command:
        place = command.index("--from")
        command = command[:place] + command[place + 2 :]
    words = [word for word in command if not word.startswith(("out=", "--from="))]
    return [*words, "--from", archives]


def _with_out(command: list[str], out: str) -> list[str]:
    """Return a command with the folder `out`; a moved sweep's own names the former one."""
    given = [word.removeprefix("out=") for word in command if word.startswith("out=")]
    if Path((given or ["outputs"])[-1]).expanduser().resolve() == Path(out).expanduser().resolve():
        return command
    words = [word for word in command if not word.startswith("out=")]
    return words if out == "outputs" else [*words, f"out={out}"]

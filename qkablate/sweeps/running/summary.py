"""The summary of a sweep: on the terminal at its end, and as one run in W&B."""

import dataclasses
import shlex
from collections.abc import Callable

from qkablate.errors import sanitize
from qkablate.sweeps.planning.manifest import Manifest
from qkablate.sweeps.running.results_table import (
    LossSummary,
    result_columns,
    result_rows,
    summarize_arms,
)
from qkablate.sweeps.running.state import SweepState
from qkablate.table import format_list, print_table
from qkablate.tracking.wandb.run import RunIdentity, SweepTables, WandbRun


def print_arms(sweep_state: SweepState) -> None:
    """Print a row for every arm and learning rate: runs done, losses, and their spread.

    What a difference of two means is worth, it does not tell.
    """
    manifest, summaries = sweep_state.manifest, summarize_arms(sweep_state)
    arms = {summary.arm for summary in summaries}
    show_rates = bool(sweep_state.lr_searches) or len(summaries) > len(arms)
    rows = []
    for summary in summaries:
        rate = "–" if summary.rate is None else f"{summary.rate:.3g}"
        rate += f" ({summary.tuning})" * (summary.tuning != "chosen")
        rows.append(
            [
                *(summary.arm, f"{manifest.arms[summary.arm].params:,}"),
                *([rate] if show_rates else []),
                f"{summary.done}/{summary.runs}",
                *_cells(summary.val),
                *_cells(summary.test),
                f"{summary.diverged}" if summary.diverged else "",
            ]
        )
    rates = ["lr"] if show_rates else []
    columns = ["arm", "params", *rates, "done", "val", "± sd", "test", "± sd", "diverged"]
    print_table(columns, rows)
    print("\nmeans over runs, and the standard deviation between them; params without embeddings")
    _print_left_out(manifest)


def _cells(loss: LossSummary) -> list[str]:
    return ["–" if value is None else f"{value:.4f}" for value in (loss.mean, loss.sd)]


def _print_left_out(manifest: Manifest) -> None:
    """Print the arms that were not trained, by kind of reason."""
    by_kind: dict[str, list[str]] = {}
    for left in manifest.left_out:
        by_kind.setdefault(left.kind, []).append(left.arm)
    for kind, names in by_kind.items():
        print(f"left out, {kind}: {format_list(names, 6)}")
    if by_kind:
        print(f"  why: {manifest.folder / 'plan.txt'}")


def print_failures(sweep_state: SweepState) -> None:
    """Print the runs that failed or were interrupted, why, and how to repeat each."""
    for status in ("failed", "interrupted", "waiting"):
        states = [
            state
            for state in sweep_state.states.values()
            if state.status == status and (state.reason or status != "waiting")
        ]
        if states:
            print(f"\n{status}")
        for state in states:
            overrides = sweep_state.manifest.overrides_of(state.run)
            print(sanitize(f"  {state.run.name}: {state.reason or 'its process gave no reason'}"))
            print(f"    {shlex.join(['qkablate', 'train', *overrides])}")
    for search in sweep_state.lr_searches:
        if search.state in ("stuck", "diverged"):
            reason = "one of its tuning runs failed" if search.state == "stuck" else "it diverges"
            print(f"\n{search.arm}: no learning rate was chosen: {reason}")


def log_summary(
    sweep_state: SweepState, note: Callable[[str], None], tables: SweepTables | None = None
) -> str | None:
    """Log the table of runs and the given tables as one run in W&B; return its address."""
    manifest = sweep_state.manifest
    name = f"{manifest.name}-{manifest.id}"
    tracking = manifest.tracking
    tags = ("sweep", *tracking.tags)
    identity = RunIdentity(f"sweep-{manifest.id}", name, manifest.group, "sweep", tags)
    config = {"sweep": name, "command": shlex.join(manifest.command), "arms": [*manifest.arms]}
    run = WandbRun(tracking, identity, manifest.folder, config, note)
    tables = tables or SweepTables()
    rows = [list(row.values()) for row in result_rows(sweep_state)]
    runs = list(result_columns(manifest)), rows
    run.log_tables(dataclasses.replace(tables, tables={"runs": runs, **tables.tables}))
    counts = sweep_state.status_counts()
    finished = counts["done"] + counts["diverged"] == sweep_state.expected_runs()
    run.close({f"runs/{status}": count for status, count in counts.items()}, int(not finished))
    return run.address


def resume_commands(sweep_state: SweepState) -> list[list[str]]:
    """Return the command that continues the sweep, if anything is left to do."""
    counts, command = sweep_state.status_counts(), sweep_state.manifest.command[1:]
    if counts["interrupted"] + counts["waiting"]:
        return [command]
    return [[*command, "--retry", "failed"]] if counts["failed"] else []

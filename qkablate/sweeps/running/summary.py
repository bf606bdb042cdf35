"""What a sweep has come to: for a person at its end, and as one run in W&B."""

import dataclasses
import shlex
import statistics
from typing import Any

from qkablate.errors import printable
from qkablate.sweeps.running.results_table import columns, rows
from qkablate.sweeps.running.state import Standing, State
from qkablate.table import print_table
from qkablate.tracking.wandb.run import Identity, Mirror, Shown


def print_arms(standing: Standing) -> None:
    """A row for every arm (and learning rate): how many of its runs are done, and their losses with
    the spread between them. What a difference of two means is worth, these do not say.
    """
    groups: dict[tuple[str, float | None], list[State]] = {}
    for state in standing.states.values():
        if not state.run.tuning:
            groups.setdefault((state.run.arm, float(state.run.changes["optim.lr"])), []).append(
                state
            )
    bowls = {bowl.arm: bowl for bowl in standing.bowls}
    for bowl in standing.bowls:
        if bowl.rate is None:
            groups[bowl.arm, None] = []
    several = bool(bowls) or len(groups) > len({arm for arm, _ in groups})
    table = []
    for (name, rate), states in sorted(groups.items(), key=_in_order(standing)):
        done = [state.result for state in states if state.status == "done" and state.result]
        diverged = sum(state.status == "diverged" for state in states)
        cells = [name, f"{standing.manifest.arms[name].params:,}"]
        if several:
            told = bowls[name].state if name in bowls else "chosen"
            cells.append(
                ("–" if rate is None else f"{rate:.3g}") + f" ({told})" * (told != "chosen")
            )
        cells.append(f"{len(done)}/{len(states) or len(standing.manifest.finals)}")
        for split in ("val", "test"):
            losses = [r["loss"][split] for r in done if r["loss"][split] is not None]
            cells.append(f"{statistics.fmean(losses):.4f}" if losses else "–")
            cells.append(f"{statistics.stdev(losses):.4f}" if len(losses) > 1 else "–")
        table.append([*cells, f"{diverged}" if diverged else ""])
    head = ["arm", "params", *(["lr"] if several else []), "done", "val", "± sd", "test", "± sd"]
    print_table([*head, "diverged"], table)
    print("\nmeans over runs, and the standard deviation between them; params without embeddings")
    for line in standing.manifest.told_left_out():
        print(line)


def _in_order(standing: Standing) -> Any:
    """Of the plan, then by rate."""
    place = {name: number for number, name in enumerate(standing.manifest.arms)}
    return lambda item: (place[item[0][0]], item[0][1] or 0.0)


def print_failures(standing: Standing) -> None:
    """What failed or was cut short, why, and how to repeat that one run."""
    for status in ("failed", "interrupted", "waiting"):
        states = [
            state
            for state in standing.states.values()
            if state.status == status and (state.reason or status != "waiting")
        ]
        if not states:
            continue
        print(f"\n{status}")
        for state in states:
            words = standing.manifest.words_of(state.run)
            print(printable(f"  {state.run.name}: {state.reason or 'no word of its process'}"))
            print(f"    {shlex.join(['qkablate', 'train', *words])}")
    for bowl in standing.bowls:
        if bowl.state in ("stuck", "diverged"):
            why = "a run that serves to tune it failed" if bowl.state == "stuck" else "it diverges"
            print(f"\n{bowl.arm}: no learning rate was chosen: {why}")


def mirror(standing: Standing, note: Any, more: Shown | None = None) -> str | None:
    """One run in W&B that holds the table, and what more there is to show; where to find it."""
    manifest = standing.manifest
    name = f"{manifest.name}-{manifest.id}"
    track = manifest.track
    identity = Identity(
        f"sweep-{manifest.id}", name, manifest.group, "sweep", ("sweep", *track.tags)
    )
    config = {"sweep": name, "command": shlex.join(manifest.command), "arms": [*manifest.arms]}
    own = Mirror(track, identity, manifest.folder, config, note)
    shown = more or Shown()
    table = list(columns(manifest)), [list(row.values()) for row in rows(standing)]
    own.show(dataclasses.replace(shown, tables={"runs": table, **shown.tables}))
    counts = standing.counts()
    finished = counts["done"] + counts["diverged"] == standing.expected()
    own.close({f"runs/{status}": count for status, count in counts.items()}, int(not finished))
    return own.address


def next_words(standing: Standing) -> list[list[str]]:
    """The command that goes on with the sweep, where there is something to go on with."""
    counts, command = standing.counts(), standing.manifest.command[1:]
    if counts["interrupted"] + counts["waiting"]:
        return [command]
    return [[*command, "--retry", "failed"]] if counts["failed"] else []

"""What a sweep has come to: for a person at its end, and as one run in W&B."""

import shlex
import statistics
from collections import defaultdict
from typing import Any

from qkablate.sweeps.results import COLUMNS, rows
from qkablate.sweeps.state import Standing, State
from qkablate.table import print_table
from qkablate.tracking.mirror import Identity, Mirror


def print_arms(standing: Standing) -> None:
    """A row for every arm: how many of its runs are done, and their losses with the spread between
    them. What the difference between two arms is worth, a table of means cannot say."""
    by_arm: dict[str, list[State]] = defaultdict(list)
    for state in standing.states.values():
        if not state.run.tuning:
            by_arm[state.run.arm].append(state)
    chosen = {bowl.arm: bowl for bowl in standing.bowls}
    table = []
    for name, arm in standing.manifest.arms.items():
        states = by_arm[name]
        done = [state.result for state in states if state.status == "done" and state.result]
        diverged = sum(state.status == "diverged" for state in states)
        cells = [name, f"{arm.params:,}"]
        if chosen:
            bowl = chosen[name]
            note = "" if bowl.state == "chosen" else f" ({bowl.state})"
            cells.append((f"{bowl.rate:.3g}" if bowl.rate else "–") + note)
        cells.append(f"{len(done)}/{len(states) or len(standing.manifest.finals)}")
        for split in ("val", "test"):
            losses = [r["loss"][split] for r in done if r["loss"][split] is not None]
            cells.append(f"{statistics.fmean(losses):.4f}" if losses else "–")
            cells.append(f"{statistics.stdev(losses):.4f}" if len(losses) > 1 else "–")
        table.append([*cells, f"{diverged}" if diverged else ""])
    head = ["arm", "params", *(["lr"] if chosen else []), "done", "val", "± sd", "test", "± sd"]
    print_table([*head, "diverged"], table)
    print("\nmeans over runs, and the standard deviation between them; params without embeddings")


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
            print(f"  {state.run.name}: {state.reason or 'no word of its process'}")
            print(f"    {shlex.join(['qkablate', 'train', *words])}")
    for bowl in standing.bowls:
        if bowl.state in ("stuck", "diverged"):
            why = "a run that serves to tune it failed" if bowl.state == "stuck" else "it diverges"
            print(f"\n{bowl.arm}: no learning rate was chosen: {why}")


def mirror(standing: Standing, note: Any) -> str | None:
    """One run in W&B that holds the table; where to find it."""
    manifest = standing.manifest
    first = next(iter(manifest.arms.values())).config
    name = f"{manifest.name}-{manifest.id}"
    track = first.track
    group = track.group or name
    identity = Identity(f"sweep-{manifest.id}", name, group, "sweep", ("sweep", *track.tags))
    config = {"sweep": name, "command": shlex.join(manifest.command), "arms": [*manifest.arms]}
    own = Mirror(track, identity, manifest.folder, config, note)
    own.table("runs", list(COLUMNS), [list(row.values()) for row in rows(standing)])
    counts = standing.counts()
    finished = counts["done"] + counts["diverged"] == standing.expected()
    own.close({f"runs/{status}": count for status, count in counts.items()}, int(not finished))
    return own.address

"""Measure time, memory and size of a report over thousands of runs.

    python scripts/time_report.py [--seeds 8] [--points 1000] [sweep=full variant=… …]

The sweep is planned as usual; its results are synthetic, in a temporary folder.
"""

import argparse
import dataclasses
import json
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from qkablate.compose.configs import make_config, open_hydra
from qkablate.compose.grid import read_request
from qkablate.errors import UserError
from qkablate.sweeps.planning.expand import Grid, expand_grid
from qkablate.sweeps.planning.manifest import Manifest, SweepRun, freeze


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--points", type=int, default=1000)
    parser.add_argument("--keep", action="store_true", help="keep the folder and print its path")
    parser.add_argument("words", nargs="*", default=["sweep=full"])
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="time-report-"))
    try:
        began = time.monotonic()
        manifest = freeze_sweep([*args.words, f"seed=range({args.seeds})"], folder)
        generator = random.Random(0)
        for run in manifest.runs:
            write_run(manifest, run, args.points, generator)
        print(f"{len(manifest.runs):,} runs of {len(manifest.arms):,} arms,", end=" ")
        print(f"{args.points:,} points each; written in {time.monotonic() - began:.1f} s")
        for form in ("html", "md"):
            began = time.monotonic()
            target = folder / f"report.{form}"
            command = ["-m", "qkablate", "report", str(manifest.folder), "-o", str(target)]
            subprocess.run([sys.executable, *command], check=True, stdout=subprocess.DEVNULL)
            seconds = time.monotonic() - began
            peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20
            size = target.stat().st_size / 1e6
            print(f"{form:5} {seconds:6.1f} s   {peak:5.2f} GiB peak   {size:5.2f} MB")
    finally:
        if args.keep:
            print(folder)
        else:
            shutil.rmtree(folder)


def freeze_sweep(words: list[str], folder: Path) -> Manifest:
    with open_hydra():
        request = read_request([*words, "precision=fp32", "threads=1", "device=cpu"])
        grid = Grid(request.settings.sweep, request.controls, request.choices)
        manifest = expand_grid(grid, make_config, ["qkablate", "sweep", *words])
    return freeze(dataclasses.replace(manifest, out=str(folder)), [])


def write_run(manifest: Manifest, run: SweepRun, points: int, generator: random.Random) -> None:
    """Write a result and a loss curve, with a gap that depends on the arm's name."""
    arm = manifest.arms[run.arm]
    folder = Path(manifest.out) / "runs" / run.name
    folder.mkdir(parents=True)
    base = 2 + run.changes["seed"] / 50 + (hash(run.arm) % 100) / 1000 + generator.gauss(0, 0.005)
    tokens = [1 + arm.tokens * (i + 1) // points for i in range(points)]
    rows = [
        {"step": i, "tokens": at, "flops": arm.flops * at, "seconds": i / 10}
        | {"val/loss": base + 3 / (1 + i) + generator.gauss(0, 0.01), "val/bits_per_byte": 3.0}
        for i, at in enumerate(tokens)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    environment = {"versions": {"torch": "2.13.0"}, "machine": {"cpu": "a CPU"}, "code": None}
    (folder / "environment.json").write_text(json.dumps(environment))
    result = {
        **{"id": run.id, "label": run.label, "status": "done", "packed": 1, "attempt": 1},
        **{"loss": {"train": base, "val": base, "test": base}, "steps": arm.config.train.steps},
        **{"init": {"match": "exact"}, "lr": {}, "precision": "fp32", "device": "cpu"},
        **{"kernel": "flash", "compile": False, "threads": 1, "version": "0.1.0"},
        **{"data_fingerprint": arm.facts["data_fingerprint"], "seconds": 1.0},
        **{"tokens": arm.tokens, "params": {}, "flops_per_token": arm.flops},
    }
    (folder / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        print(f"time_report: {error}", file=sys.stderr)
        sys.exit(2)

"""Inject faults of all kinds and check that no run is lost and no number is wrong.

    make torture                                # under half an hour on 2 cores
    python -m tests.torture --only kills --seed 7
    python -m tests.torture --short                # the cases of the tests

Exit code 1 if anything was lost or wrong.
"""

import argparse
import importlib
import sys
import tempfile
import time
from pathlib import Path

from qkablate.errors import nearest_hint
from qkablate.table import print_table
from tests.torture.tally import FAULTS, Tally


def parse_names(text: str) -> list[str]:
    names = text.split(",")
    if unknown := next((name for name in names if name not in FAULTS), None):
        known = f"{', '.join(FAULTS)}{nearest_hint(unknown, FAULTS)}"
        raise argparse.ArgumentTypeError(f"'{unknown}' is not one of {known}")
    return names


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.torture",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--only",
        type=parse_names,
        default=FAULTS,
        help=f"kinds of faults, from {', '.join(FAULTS)}",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of all random choices (default: 0)"
    )
    parser.add_argument("--short", action="store_true", help="a few cases of each kind")
    args = parser.parse_args()
    rows, total = [], Tally()
    for name in args.only:
        module = importlib.import_module(f"tests.torture.fault_{name}")
        cases = module.SHORT if args.short else module.FULL
        print(
            f"{name}: {(module.__doc__ or '').strip().splitlines()[0]} ({cases} cases)", flush=True
        )
        start = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            tally = module.torture(cases, args.seed, Path(folder))
        seconds = time.perf_counter() - start
        for kind, failures in (("lost", tally.lost), ("wrong", tally.wrong)):
            for case in failures:
                print(f"  {kind}: {case}", flush=True)
        total.add(tally)
        rows.append(
            [
                *(name, str(tally.cases), str(len(tally.lost)), str(len(tally.wrong))),
                f"{seconds:.0f} s",
            ]
        )
    print()
    print_table(["fault", "cases", "lost", "wrong", "time"], rows)
    return 1 if total.lost or total.wrong else 0


if __name__ == "__main__":
    sys.exit(main())

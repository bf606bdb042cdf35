"""Faults of all kinds, many of each, and whether qkablate loses a run or tells a wrong number.

    make torture                                # under half an hour on 2 cores
    python -m tests.torture --only kills --seed 7
    python -m tests.torture --short                # what `make test` tries

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


def names(text: str) -> list[str]:
    chosen = text.split(",")
    if wrong := next((name for name in chosen if name not in FAULTS), None):
        known = f"{', '.join(FAULTS)}{nearest_hint(wrong, FAULTS)}"
        raise argparse.ArgumentTypeError(f"'{wrong}' is not one of {known}")
    return chosen


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.torture",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", type=names, default=FAULTS, help=f"of {', '.join(FAULTS)}")
    parser.add_argument("--seed", type=int, default=0, help="of all choices (default: 0)")
    parser.add_argument("--short", action="store_true", help="a few cases of each")
    args = parser.parse_args()
    rows, bad = [], Tally()
    for name in args.only:
        module = importlib.import_module(f"tests.torture.fault_{name}")
        cases = module.SHORT if args.short else module.FULL
        print(
            f"{name}: {(module.__doc__ or '').strip().splitlines()[0]} ({cases} cases)", flush=True
        )
        began = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            found = module.torture(cases, args.seed, Path(folder))
        seconds = time.perf_counter() - began
        for what, cases_ in (("lost", found.lost), ("wrong", found.wrong)):
            for case in cases_:
                print(f"  {what}: {case}", flush=True)
        bad.add(found)
        rows.append(
            [
                *(name, str(found.cases), str(len(found.lost)), str(len(found.wrong))),
                f"{seconds:.0f} s",
            ]
        )
    print()
    print_table(["fault", "cases", "lost", "wrong", "time"], rows)
    return 1 if bad.lost or bad.wrong else 0


if __name__ == "__main__":
    sys.exit(main())

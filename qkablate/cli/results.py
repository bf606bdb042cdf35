"""`qkablate results`: what a sweep says, with its uncertainty."""

import csv
import sys
from contextlib import suppress
from typing import Any

from qkablate.cli.hydra.configs import need_extra, next_commands, take_flags
from qkablate.cli.status import sweep_names, sweep_words
from qkablate.errors import UserError, nearest, printable
from qkablate.table import print_json, print_table

FORMATS = ("table", "csv", "json", "md")

HELP = """qkablate results: what a sweep says, and how sure one can be.

Usage: qkablate results [SWEEP] [--margin NATS] [--format table|csv|json|md] [--times FILE]
                        [out=FOLDER]

SWEEP is a sweep's folder, or how its name or id begins; unsaid, the newest one.

Examples
  qkablate results                       the newest sweep
  qkablate results quick --margin 0.01   and which arms are not worse by 0.01
  qkablate results quick --format md     tables to paste
  qkablate results quick --format json   everything: every run, every check of the audit
  qkablate results quick --format csv    a row a gap
  qkablate cost variant=standard,merged_w --measure --json > times.json
  qkablate results --times times.json    with the arms that none beats at less time

A gap is an arm's test loss minus that of its baseline with the same seed, in nats. What decides
is the paired t interval; `p` is adjusted by Holm over the arms of one size. `detectable` is the
smallest gap these seeds would have found four times of five. The BCa bootstrap and the exact
sign-flip test stand beside it. The audit says what else than the arm may have moved the number.
The function distance says how far apart what arm and baseline predict is, beside what another seed
and what rounding alone (variant=standard_reassociated) come to.

Flags
  --margin NATS   test every arm for being not worse by it, and for lying within ± of it; a gap that
                  was not found is no sign that there is none
  --format table|csv|json|md
  --times FILE    from `qkablate cost --measure --json`: no time is taken from runs that shared a
                  machine

Exit codes: 0 every run is done or has diverged · 1 some are not · 2 a mistake in the command
"""


def main(argv: list[str]) -> int:
    flags, words = take_flags(argv, ("--help", "-h"), ("--format", "--times", "--margin"))
    if {"--help", "-h"} & {*flags}:
        print(HELP, end="")
        return 0
    form = flags.get("--format", "table")
    if form not in FORMATS:
        one_of = f"{', '.join(FORMATS)}{nearest(form, FORMATS)}"
        raise UserError(f"--format: '{form}' is not one of {one_of}")
    margin = margin_of(flags.get("--margin"))
    word, out = sweep_words(words)
    need_analysis()

    from qkablate.analysis.comparison.ranking import read_times
    from qkablate.analysis.comparison.summary import describe
    from qkablate.analysis.study.study import read_study
    from qkablate.report.text.table import markdown
    from qkablate.report.text.tables import tables
    from qkablate.sweeps.planning import manifest

    study = read_study(manifest.find(word, out))
    times = read_times(flags["--times"], study) if "--times" in flags else {}
    found = describe(study, times, margin)
    with suppress(BrokenPipeError):
        if form == "json":
            print_json(found)
        elif form == "csv":
            _print_csv(found["gaps"])
        elif form == "md":
            print(f"# {study.name}\n\n" + "\n\n".join(map(markdown, tables(found))))
        else:
            print_tables(tables(found))
            own = ["results", *study.where]
            more = [*study.next_words]
            more += [[*own, "--margin", "0.01"]] if margin is None else []
            next_commands(*more, ["report", *study.where], [*own, "--format", "json"])
        sys.stdout.flush()
    return 0 if study.is_complete else 1


def margin_of(word: str | None) -> float | None:
    if word is None:
        return None
    try:
        margin = float(word)
    except ValueError:
        margin = 0.0
    if not 0 < margin < 100:
        raise UserError(f"--margin: '{word}' is not a number of nats above 0, as 0.01 is")
    return margin


def need_analysis(*more: str) -> None:
    """UserError where what analysis (and a report) is done with is not installed."""
    need_extra("report", "scipy", "statsmodels", *more)


def print_tables(tables: list[Any]) -> None:
    for number, table in enumerate(tables):
        print(("\n" if number else "") + printable(table.title) + "\n")
        print_table(table.columns, [[*map(printable, row)] for row in table.rows], 1, table.wrap)
        for note in table.notes:
            print(printable(f"  {note}"))


def _print_csv(gaps: list[dict[str, Any]]) -> None:
    columns = ["arm", "baseline", "n", "mean", "sd", "low", "high", "p", "p_holm", "bca_low"]
    columns += ["bca_high", "sign_flip", "detectable", "perplexity_percent", "correlation"]
    columns += ["arm_diverged", "baseline_diverged", "unpaired", "audit"]
    writer = csv.DictWriter(sys.stdout, columns, lineterminator="\n", extrasaction="ignore")
    writer.writeheader()
    for one in gaps:
        low, high = one["interval"] or (None, None)
        bca_low, bca_high = one["bca"] or (None, None)
        bad = [f"{c['state']}: {c['name']}" for c in one["audit"] if c["state"] != "ok"]
        writer.writerow(
            one
            | {"low": low, "high": high, "bca_low": bca_low, "bca_high": bca_high}
            | {"unpaired": "; ".join(one["unpaired"]), "audit": "; ".join(bad)}
        )


def words() -> list[str]:
    """What can be typed after `qkablate results`."""
    return [*sweep_names(), "--margin", "--format", *FORMATS, "--times", "out="]

"""`qkablate results`: the comparisons of a sweep or of some runs, with their uncertainty."""

import csv
import dataclasses
import math
import shlex
import sys
from argparse import Namespace
from contextlib import suppress
from typing import TYPE_CHECKING

from qkablate.cli.arguments import Parser, margin, one_of, out_words, take_out
from qkablate.cli.names import Source, find_sources
from qkablate.errors import UserError, sanitize
from qkablate.table import (
    print_heading,
    print_json,
    print_next_commands,
    print_table,
    print_text,
)

if TYPE_CHECKING:
    from qkablate.analysis.claims.claim import Claim
    from qkablate.analysis.comparison.summary import GapSummary
    from qkablate.report.section import Section
    from qkablate.report.text.table import Table

FORMATS = ("table", "csv", "json", "md")

HELP = """qkablate results: the comparisons of runs, with their uncertainty.

Usage: qkablate results [SWEEP | RUN …] [--margin NATS] [--all | --scaling]
                        [--format table|csv|json|md | --json]
                        [--times FILE] [out=FOLDER]

Each argument is a folder, or the beginning of a name or id; the default is the
newest sweep or, where there is none, every run. Runs are paired by seed where
possible.

Examples
  qkablate results                       the newest sweep
  qkablate results outputs/runs/*        runs without a sweep
  qkablate results docs/study/results    published runs, of each claim
  qkablate results quick --all           and all details: ranks, rates, curves,
                                         distances, fronts
  qkablate results quick --margin 0.01   and which arms are not worse by 0.01
  qkablate results quick --format md     tables to paste
  qkablate results scaling --scaling     what an arm is worth in compute
  qkablate results quick --json          everything: every run, every check of
                                         the audit
  qkablate results quick --format csv    one row per gap
  qkablate cost variant=standard,merged_w --measure --json > times.json
  qkablate results --times times.json    with the Pareto front of loss and time

Without --all, only the verdicts and the warnings of the audit are shown.
--scaling fits a scaling law to each arm, L = E + A·N^−α + B·D^−β (from three
sizes and three lengths of training on), and shows how many times the arm's
compute, parameters and tokens its baseline needs for the same loss.

An arm is a variant with one setting of all other keys; its runs differ in the
seed and the rates that are tuned. A gap is the test loss of an arm minus that
of its baseline with the same seed, in nats. The test over pairs decides:
Student's t, corrected where the gaps are skewed. `p` is adjusted by Holm's
method over all gaps shown, the interval is that of one gap alone. `detectable`
is the smallest gap that these seeds detect with 80 % power. The BCa bootstrap
and the exact sign-flip test are shown for comparison. `SE over documents` is
the gap's standard error over the documents of the test split (files for
stdlib_pairs and stdlib_tags, pairs for others), which the interval over seeds
leaves out. The audit lists what else may explain the gap: · worth knowing, !
may have caused it, ✗ runs that cannot be compared.
The function distance measures how much the predictions of arm and baseline
differ, next to the distance between two seeds and the distance that rounding
alone causes (variant=standard_reassociated).

Flags
{flags}

Exit codes: 0 every run is done or has diverged · 1 some are not · 2 a mistake
in the command
"""


PARSER = Parser(HELP, ("sweep", "run"), (*FORMATS, "out="))
PARSER.option(
    "--margin",
    "NATS",
    "test every arm for non-inferiority and equivalence within this margin; a gap that was not"
    " detected does not show equality",
    margin,
)
PARSER.switch("--all", "show all tables instead of the verdicts alone")
PARSER.switch("--scaling", "show the scaling laws, and what each arm is worth by them")
PARSER.option("--format", "|".join(FORMATS), "output format", one_of(FORMATS))
PARSER.switch("--json", "the same as --format json")
PARSER.option(
    "--times",
    "FILE",
    "step times from `qkablate cost --measure --json`; times of runs that shared a machine are"
    " not used",
)


def main(argv: list[str]) -> int:
    """Print the comparisons of a sweep or of some runs."""
    args = PARSER.parse(argv)
    if args.json and args.format not in (None, "json"):
        raise UserError(f"--json and --format {args.format}: give one of the two")
    form = "json" if args.json else args.format or "table"
    if args.all and form != "table":
        raise UserError(f"--all: --format {form} shows everything already")
    if args.scaling and (args.all or args.times or form != "table"):
        raise UserError("--scaling: --all, --times and the other formats show it already")
    if args.scaling and args.margin is not None:
        raise UserError("--margin: the scaling laws have none; leave out --scaling or --margin")
    if args.times and form == "csv":
        raise UserError("--times: --format csv has no front of loss and time; json and md have it")
    words, out = take_out(args.words)
    sources = find_sources(words, out, ("sweep", "run"))
    is_one_word = len(words) == 1  # a folder of archives, which has a sweep of each claim
    if len(sources) > 1 and not (is_one_word and form in ("table", "md")):
        raise UserError(
            "results shows one sweep, or some runs, at a time:"
            f" {shlex.join(['qkablate', 'report', *words, *out_words(out)])}"
        )
    return max(_show(args, form, source, words, out, len(sources) > 1) for source in sources)


def _show(
    args: Namespace, form: str, source: Source, words: list[str], out: str, is_one_of_several: bool
) -> int:
    """Print the comparisons of one sweep, or of some runs."""
    kind, folders = source
    from qkablate.analysis.claims.judgement import judge_sweep
    from qkablate.analysis.comparison.ranking import read_times
    from qkablate.analysis.next_sweep import propose_next_sweep
    from qkablate.analysis.publication.archive import find_archives
    from qkablate.analysis.study.standalone_runs import read_standalone_runs
    from qkablate.analysis.study.study import read_study
    from qkablate.report.section import Section
    from qkablate.report.text.summary import summarize
    from qkablate.report.text.table import format_markdown
    from qkablate.report.text.tables import make_tables
    from qkablate.report.text.verdicts import make_verdict_tables

    study = read_standalone_runs(folders) if kind == "runs" else read_study(folders[0])
    is_archive = len(words) == 1 and bool(find_archives(words[0]))
    is_named = study.manifest and not is_archive
    named = study.cli_arguments if is_named else [*words, *out_words(out)]
    times = read_times(args.times, study) if args.times else {}
    where = out if kind == "runs" else str(folders[0])
    judgement, problem = None, ""
    if kind == "sweep" and form == "table" and not args.scaling:
        try:
            judgement = judge_sweep(folders[0], study)
        except UserError as error:
            problem = f"not judged as a claim: {error}"
    judged = judgement if args.margin is None else None  # at a margin, the gaps are described
    section = Section(study.name, where, study, args.margin, judged, milliseconds=times)
    summary = section.summary
    with suppress(BrokenPipeError):
        if form == "json":
            gaps = [
                dataclasses.asdict(gap) | {"interval": gap.bounds, "verdict": gap.verdict}
                for gap in summary.gaps
            ]
            print_json(dataclasses.asdict(summary) | {"gaps": gaps})
        elif form == "csv":
            _print_csv(summary.gaps)
        elif form == "md":
            print(f"# {study.name}\n\n" + "\n\n".join(map(format_markdown, make_tables(summary))))
        elif args.scaling:
            _print_scaling(section)
            for line in study.unread:
                print_text(sanitize(f"\nnot read: {line}"))
            more = [["results", *named, "--all"], ["report", *named]]
            print_next_commands(*study.resume_commands, *more)
        else:
            if is_one_of_several:
                print_heading(sanitize(f"\n{study.name}\n"))
            show_all = args.all or bool(args.times)  # times are asked for their front
            print_tables(make_tables(summary) if show_all else make_verdict_tables(summary))
            for line in study.unread:
                print_text(sanitize(f"\nnot read: {line}"))
            print()
            if problem:
                print_text(sanitize(problem), "")
            if judgement is not None:
                title = f"{judgement.claim.title} with {judgement.n} seeds"
                print_text(sanitize(f"Judged as the claim {title}: {judgement.headline}."), "")
            for sentence in summarize(section):
                print_text(sanitize(sentence), "")
            margin = [] if args.margin is None else ["--margin", f"{args.margin:g}"]
            times_file = ["--times", args.times] if args.times else []
            command = ["results", *named, *margin, *times_file]
            more = [*(study if judgement is None else judgement).resume_commands]
            if is_named and study.is_complete and (sweep := propose_next_sweep(study, summary)):
                more.append([*sweep, *study.cli_arguments[1:], "--dry-run"])
            if args.margin is None and (nats := _propose_margin(summary.gaps)):
                more.append([*command, "--margin", nats])
            more += [] if show_all else [[*command, "--all"]]
            if judgement is not None and is_named:
                more += [[*_show_claim(judgement.claim), *study.cli_arguments[1:]]]
            more += [["report", *named, *margin]]
            more += [] if is_one_of_several else [[*command, "--json"]]
            print_next_commands(*more)
        sys.stdout.flush()
    return 0 if study.is_complete and (study.entries or not study.unread) else 1


def _show_claim(claim: "Claim") -> list[str]:
    """Return the command that shows a claim: by its name only if that is a shipped one."""
    from qkablate.analysis.claims.parse import claim_names, load_claim

    with suppress(UserError):
        shipped = claim.name in claim_names() and load_claim(claim.name, claim.scale, claim.words)
        if shipped and shipped.hash == claim.hash:
            return ["claim", "show", *claim.arguments]
    return ["report", claim.folder_name]


def _print_scaling(section: "Section") -> None:
    """Print what each arm is worth, or raise UserError where nothing can be said."""
    from qkablate.report.text.scaling import make_scaling_tables

    if not section.summary.scaling:
        raise UserError(
            f"{section.study.name} has no arm that was trained, with its baseline, at several sizes"
            " and lengths of training: qkablate sweep sweep=scaling trains such a grid"
        )
    print_tables(make_scaling_tables(section.summary.scaling, section.summary.gaps))


def print_tables(tables: "list[Table]") -> None:
    """Print tables with their titles and notes."""
    for number, table in enumerate(tables):
        print("\n" * bool(number), end="")
        print_heading(sanitize(table.title))
        print()
        print_table(table.columns, [[*map(sanitize, row)] for row in table.rows])
        for note in table.notes:
            print_text(sanitize(f"  {note}"))


def _propose_margin(gaps: "list[GapSummary]") -> str:
    """Return the largest gap that the runs detect, rounded up to one digit; '' if none is known."""
    detectable = max((gap.detectable or 0.0 for gap in gaps), default=0.0)
    if not 0 < detectable < 50:
        return ""
    digit = 10.0 ** math.floor(math.log10(detectable))
    return f"{math.ceil(detectable / digit) * digit:.1g}"


def _print_csv(gaps: "list[GapSummary]") -> None:
    columns = ["arm", "baseline", "n", "mean", "sd", "low", "high", "p", "p_holm", "bca_low"]
    columns += ["bca_high", "sign_flip", "detectable", "perplexity_percent", "correlation"]
    columns += ["document_se", "verdict", "arm_diverged", "baseline_diverged", "unpaired", "audit"]
    writer = csv.DictWriter(sys.stdout, columns, lineterminator="\n", extrasaction="ignore")
    writer.writeheader()
    for gap in gaps:
        low, high = gap.bounds or (None, None)
        bca_low, bca_high = gap.bca or (None, None)
        doubts = [f"{check.state}: {check.name}" for check in gap.audit if check.state != "ok"]
        writer.writerow(
            vars(gap)
            | {"verdict": gap.verdict}
            | {"low": low, "high": high, "bca_low": bca_low, "bca_high": bca_high}
            | {"document_se": gap.document_error and gap.document_error.se}
            | {"unpaired": "; ".join(gap.unpaired), "audit": "; ".join(doubts)}
        )

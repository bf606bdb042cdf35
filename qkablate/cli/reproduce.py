"""`qkablate reproduce`: published claims, trained again on this machine."""

import math
from argparse import Namespace
from typing import TYPE_CHECKING

from qkablate.cli.arguments import (
    Parser,
    check_utf8,
    claim_name,
    convert_value,
    one_of,
    whole_number,
)
from qkablate.compose.configs import open_hydra, parse_value
from qkablate.compose.words import parse_values
from qkablate.config import KEYS, Config, has_role, no_such_key
from qkablate.errors import UserError, nearest_hint, print_stderr, sanitize
from qkablate.table import format_count, format_list, print_table, print_text

if TYPE_CHECKING:
    from qkablate.analysis.claims.judgement import Judgement, PartJudgement
    from qkablate.analysis.claims.registry import Registration
    from qkablate.analysis.publication.archive import Archive
    from qkablate.analysis.publication.replication import PartAgreement
    from qkablate.sweeps.planning.manifest import Manifest

FOLDER = "docs/study/results"
_PLACES = ("data.path", "data.files", "data.name")  # where a file of the claim is on this machine
CHECKED = 3  # runs of a claim, unless a number is given
_AGREEMENT = {True: "agrees", False: "DISAGREES", None: "not known"}

HELP = """qkablate reproduce: train published claims again: do the numbers agree?

Usage: qkablate reproduce CLAIM|all [--seeds N] [--retry failed] [--from FOLDER]
                          [--dry-run] [key=value …]
       qkablate reproduce CLAIM|all --check [N] [--from FOLDER] [data.path=FILE]

Trains the claim's runs on this machine, with seeds that no published run has
(they follow from the claim's hash), tunes the learning rates anew, and says of
each part whether the two estimates agree: whether the 95 % interval of their
difference (adjusted for the number of parts) contains zero. A part whose
difference is not known does not agree. The same command resumes.

With --check, a few of the published runs themselves are trained again, chosen
by a hash. Where CPU, torch and threads are the same, every loss must be equal
bit for bit; elsewhere it may differ by 3 √2 times the standard deviation
between the seeds of its arm.

Examples
  qkablate reproduce directed --dry-run      its runs, and how long they take
  qkablate reproduce directed
  qkablate reproduce directed --seeds 6      fewer runs, wider intervals
  qkablate reproduce directed --check        three of its runs, bit for bit
  qkablate reproduce all --check 1

Keys are those that change no number (out, workers, threads, data.cache,
tracking.wandb), and device and train.vmap, which change rounding; with --check
those of the data alone. For a claim about a file,
only the file that you name is read: data.path=FILE (or data.files, data.name,
whichever the claim uses).

Flags
{flags}

Exit codes: 0 everything agrees · 1 something does not, or is missing · 2 a
mistake in the command · 128 + signal interrupted, as 130 by Ctrl-C
"""
PARSER = Parser(HELP, ("claim",), ("all", "out=", "workers="))
PARSER.add_argument(
    "--check",
    nargs="?",
    const="",
    metavar="N",
    help=f"train N published runs of each claim again; the default is {CHECKED}",
)
PARSER.option("--from", "FOLDER", f"the published runs; the default is {FOLDER}")
PARSER.option(
    "--seeds", "N", "number of seeds; the default is the claim's own", whole_number(3, 1000)
)
PARSER.switch("--dry-run", "show the runs, and how long they take here; train nothing")
PARSER.option("--retry", "failed", "train failed runs again, too", one_of(["failed"]))


def main(argv: list[str]) -> int:
    """Reproduce some published claims, or check some of their runs."""
    args = PARSER.parse(argv)
    given, count = list(args.words), None
    if args.check is not None:
        is_number = args.check.isdecimal()
        given += [] if is_number or not args.check else [args.check]  # a word after --check
        text = args.check if is_number else str(CHECKED)
        count = convert_value("--check", text, whole_number(1))
    names = [word for word in given if "=" not in word]
    words = [word for word in given if "=" in word]
    if len(names) != 1:
        if args.check and count == CHECKED and args.check in names:
            raise UserError(f"--check: '{args.check}' is not a whole number from 1")
        raise UserError("give one claim, or all: qkablate reproduce NAME")
    name = claim_name(names[0])
    if count is not None and args.seeds is not None:
        raise UserError("--seeds has no meaning with --check: the runs have the published seeds")
    if count is not None and args.retry is not None:
        raise UserError("--retry has no meaning with --check: it begins every run anew")
    if count is not None and args.dry_run:
        raise UserError(
            f"--dry-run has no meaning with --check: {format_count(count, 'run')} would be trained"
        )
    _check_keys(words)

    from qkablate.analysis.publication.archive import find_archives, read_archive
    from qkablate.analysis.publication.unpack import unpack_archives, unpacked_claims

    folder = getattr(args, "from") or FOLDER
    paths = find_archives(folder)
    if not paths:
        raise UserError(f"'{folder}' holds no archive of runs; --from FOLDER names another")
    root = unpack_archives(paths)
    archives = {archive.name: archive for archive in map(read_archive, paths)}
    claims = [
        (registration, archives[registration.claim.folder_name])
        for registration in unpacked_claims(root)
        if name in ("all", registration.claim.name, registration.claim.folder_name)
    ]
    if not claims:
        known = sorted({archive.rsplit("-", 2)[0] for archive in archives})
        hint = nearest_hint(name, known) or f"; it has {', '.join(known)}"
        raise UserError(f"'{folder}' has no runs of '{sanitize(name)}'{hint}")
    codes = []
    for registration, archive in claims:
        try:
            if count is not None:
                codes.append(_check(registration, archive, count, words))
            else:
                codes.append(_reproduce(registration, archive, str(root), args, words))
            if codes[-1] >= 128:  # stopped by a signal
                break
        except UserError as mistake:
            if len(claims) == 1:
                raise
            print_stderr(f"qkablate: {mistake}")  # the others go on
            codes.append(2)
    return max(codes)


def _check_keys(words: list[str]) -> None:
    from qkablate.analysis.claims.claim import NON_CLAIM_KEYS

    for word in words:
        key = word.partition("=")[0]
        check_utf8(key, word)
        if key not in KEYS and key != "workers":
            raise UserError(no_such_key(key, [*KEYS, "workers"]))
        if key not in ("workers", *_PLACES) and not has_role(key, NON_CLAIM_KEYS):
            raise UserError(f"{key}: another value would be another claim; leave it out")


def _check(registration: "Registration", archive: "Archive", count: int, words: list[str]) -> int:
    """Train some published runs again, print how they differ, and return the exit code."""
    from qkablate.api.reproduce import check_runs

    given = _parse(words)
    if others := [key for key in given if key not in ("data.cache", *_PLACES)]:
        raise UserError(
            f"{others[0]}: --check takes keys of the data alone; leave it out: the rest is as"
            " published"
        )
    agreements = check_runs(archive, registration, count, given)
    print(f"\n{registration.claim.title}: published runs, trained again")
    rows = []
    for run in agreements:
        differs = "not trained" if run.difference is None else f"{run.difference:.3g}"
        allowed = "not known" if run.tolerance is None else f"{run.tolerance:.3g}"
        allowed = allowed if run.reasons else "0, bit for bit"
        rows.append([run.name, differs, allowed, _AGREEMENT[run.agrees]])
    print_table(["run", "largest difference, nats", "allowed", ""], rows)
    for reason in dict.fromkeys(reason for run in agreements for reason in run.reasons):
        print_text(f"  not bit for bit: {reason}")
    if any(run.tolerance is None for run in agreements):
        print_text(
            "  not known: no arm has two published seeds; the same CPU, torch and threads give"
            " every bit"
        )
    return int(not agreements or not all(run.agrees for run in agreements))


def _reproduce(
    registration: "Registration", archive: "Archive", root: str, args: Namespace, words: list[str]
) -> int:
    """Train the claim again with other seeds, compare its parts, and return the exit code."""
    from qkablate.analysis.claims.claim import find_comparisons
    from qkablate.analysis.claims.judgement import (
        counting_judgement,
        judge_claim,
        judge_looks,
        solo_arms,
    )
    from qkablate.analysis.publication.replication import (
        check_claim,
        check_config,
        check_places,
        check_trainable,
        compare_parts,
    )
    from qkablate.analysis.publication.reuse import note_tuning
    from qkablate.analysis.study.study import read_study
    from qkablate.api.reproduce import reproduction_request
    from qkablate.api.sweep import plan_sweep
    from qkablate.cli.launch import run_and_print, show_plan

    claim = registration.claim
    check_claim(claim)
    published = counting_judgement(judge_looks(claim, root))
    if published is None or not published.has_ended:
        print_stderr(f"{claim.title}: there is no published verdict: its runs are not complete")
        return 1
    for arm in published.study.arms.values():
        check_trainable(arm)
    given = _parse(words)
    with open_hydra():
        request = reproduction_request(claim, args.seeds or published.n, words)
        options = ["--seeds", str(args.seeds)] if args.seeds else []
        options += ["--from", getattr(args, "from")] if getattr(args, "from") else []
        command = ["reproduce", claim.folder_name, *words, *options]

        def check(config: Config) -> None:
            check_config(config)
            check_places(config, given, "the claim")

        manifest, slots = plan_sweep(request, command, check)
    _note_other_data(published, manifest)
    note_tuning(archive, manifest)
    if args.dry_run:
        return show_plan(manifest, slots, request, as_json=False)
    code = run_and_print(manifest, slots, request, retry=args.retry is not None)
    if code:
        return code
    if alone := solo_arms(find_comparisons(claim, manifest.arms.values())):
        from qkablate.sweeps.running.solo import measure_arms

        measure_arms(manifest, alone, args.seeds or published.n)
    reproduced = judge_claim(claim, read_study(manifest.folder), ["other seeds"])
    agreements = compare_parts(published, reproduced)
    _print_agreement(published, agreements)
    return int(not agreements or not all(part.agrees for part in agreements))


def _parse(words: list[str]) -> dict[str, str]:
    """Return the values of the user's keys as configs have them, but for those that are null."""
    with open_hydra():
        for key, values in map(parse_values, words):
            if len(values) > 1:
                raise UserError(f"{key}: give one value")
    pairs = ((word.partition("=")[0], parse_value(word)) for word in words)
    return {key: str(value) for key, value in pairs if value is not None}


def _note_other_data(published: "Judgement", manifest: "Manifest") -> None:
    """Say which arms are trained on other data than the published ones."""
    arms = published.study.arms
    key = "data_fingerprint"
    pairs = [(name, arm, arms[name]) for name, arm in manifest.arms.items() if name in arms]
    names = [name for name, own, other in pairs if own.facts.get(key) != other.facts.get(key)]
    if names:
        print_stderr(
            "qkablate: the data differ from the published ones (another file, or another version of"
            " what they are made of), so that agreement is not to be expected of"
            f" {format_list(names)}"
        )


def _print_agreement(published: "Judgement", agreements: "list[PartAgreement]") -> None:
    print(f"\n{published.claim.title}: published, and reproduced with other seeds")
    rows = []
    for part in agreements:
        ends = part.interval or (math.nan, math.nan)
        shown = "not known" if part.interval is None else f"{part.difference:+.4f}"
        interval = "–" if part.interval is None else f"[{ends[0]:+.4f}, {ends[1]:+.4f}]"
        rows.append(
            [
                *(part.name, _format_part(part.published), _format_part(part.reproduced)),
                *(f"{shown} {interval}", "agrees" if part.agrees else "DISAGREES"),
            ]
        )
    print_table(["part", "published", "reproduced", "difference", ""], rows)
    print_text(
        "estimates with 95 % intervals; the interval of the difference, as a cost, is adjusted for"
        " the number of parts"
    )


def _format_part(judged: "PartJudgement | None") -> str:
    if judged is None or not judged.part.sample.n:
        return "–"
    low, high = judged.interval(0.95)
    mean = judged.unit.natural(judged.part.sample.mean)
    return f"{mean:+.4f} [{low:+.4f}, {high:+.4f}] n = {judged.part.sample.n}"

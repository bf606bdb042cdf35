"""`qkablate publish`: the runs of claims as small files that anyone can read and add to."""

import os
from pathlib import Path

from qkablate.cli.arguments import Parser, claim_name, take_out
from qkablate.errors import UserError, print_stderr
from qkablate.table import format_bytes, format_count, print_next_commands, print_text

FOLDER = "docs/study/results"

HELP = """qkablate publish: the runs of claims as files that anyone can read and add to.

Usage: qkablate publish CLAIM … [-o FOLDER] [out=FOLDER]

Writes one archive for each claim, <name>-<scale>-<hash>.json.gz, with
SHA256SUMS: the claim as it was registered, and of every run that has ended,
those of tuning too, its id, settings, result, and the CPU, versions and commit.
Of the final runs it keeps the curves of the loss, 64 points at most, and the
losses by document, summed over the runs of an arm. Checkpoints, predictions,
diagnostics and attention maps are left out.

An archive that exists is added to: publish again as runs end, also from other
machines. A run whose figures differ from its published ones is refused. The
same runs, published again, give identical files.

Examples
  qkablate publish directed              into docs/study/results
  qkablate publish directed -o shared
  qkablate results shared                archives are read like sweeps
  qkablate report shared -o shared.html
  qkablate claim show directed out=shared
  qkablate claim run directed --from shared    train only what is missing there

Flags
{flags}

Exit codes: 0 published · 2 a claim was not published: none of its runs has
ended, or one has other figures than the published one; or a mistake in the
command
"""
PARSER = Parser(HELP, ("claim",), ("out=",))
PARSER.option("-o", "FOLDER", f"where the archives are; the default is {FOLDER}")


def main(argv: list[str]) -> int:
    """Publish the runs of some claims."""
    args = PARSER.parse(argv)
    words, out = take_out(args.words, unpack=False)
    if not words:
        raise UserError("give a claim that has been run: qkablate publish NAME …")
    folder = Path(os.path.expanduser(args.o or FOLDER))
    if folder.exists() and not folder.is_dir():
        raise UserError(f"-o: '{folder}' is not a folder")

    from qkablate.analysis.claims.registry import (
        find_registrations,
        read_registration,
        registered_names,
    )
    from qkablate.analysis.publication.publish import has_ended_runs, publish
    from qkablate.cli.names import find_by_name

    named = list(dict.fromkeys(map(claim_name, words)))
    known = registered_names(out)
    folders = {w: find_by_name(w, out, ("claim",))[1] for w in named if w not in known}
    code = 0
    for word in named:
        try:
            if word in folders:
                registered = [read_registration(folders[word])]
            else:  # an earlier wording may have been registered and never run
                registered = find_registrations(out, word)
                registered = [one for one in registered if has_ended_runs(one)] or registered
            for registration in registered:
                path, runs, new = publish(registration, folder)
                size = format_bytes(path.stat().st_size)
                print_text(f"{path}  {size}, {format_count(runs, 'run')}, {new:,} of them new")
        except UserError as error:  # the other claims are published all the same
            print_stderr(f"qkablate: {error}")
            code = 2
        except OSError as error:
            raise UserError(f"-o: '{folder}' cannot be written: {error.strerror}") from None
    if not code:
        print_next_commands(["report", str(folder)])
    return code

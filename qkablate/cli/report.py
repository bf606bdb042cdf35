"""`qkablate report`: the results of runs as one HTML page, as charts, or as text."""

import os
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from qkablate.cli.arguments import Parser, margin, one_of, out_words, take_out
from qkablate.cli.names import KINDS, Source, find_sources
from qkablate.disk import replace_file
from qkablate.errors import UserError, not_one_of, sanitize
from qkablate.table import format_bytes, format_count, format_list, print_next_commands

FORMATS = ("html", "md", "png", "svg")

HELP = """qkablate report: the results of runs, as a page to read and to send.

Usage: qkablate report [SWEEP | RUN | CLAIM …] [-o FILE]
                       [--format html|md|png|svg] [--margin NATS] [out=FOLDER]
       qkablate report --study FOLDER

Each argument is a folder, or the beginning of a name or id; the default is the
newest sweep or, where there is none, every run. Each sweep and each claim is a
section of the page; runs that are named one by one share a section.

Examples
  qkablate report                        the newest: report.html in its folder
  qkablate report quick -o quick.html
  qkablate report quick --format svg     its charts, one file each, for a paper
  qkablate report quick -o quick.md      its text and tables
  qkablate report directed               a claim, with its verdict
  qkablate report outputs/runs/standard-*   these runs, paired where possible
  qkablate report docs/study/results     published runs, a section each claim
  qkablate report quick --margin 0.01    and which arms are not worse by 0.01

With --study, the page and the pictures of a study are written into its folder,
from the archives in FOLDER/results (qkablate publish) and from nothing else:
index.md, answers.txt (a table for a README) and SVGs, light and dark.

The page is self-contained, its charts included: it opens from disk and needs no
network. It states how much is missing where runs are not done.

Flags
{flags}

Exit codes: 0 the report is written · 2 it cannot be written, or a mistake in
the command
"""
_MAX_WORDS = 4  # runs or sweeps that the command printed at the end repeats


def _convert_format(text: str) -> str:
    if text in ("text", "txt", "table"):
        raise UserError(f"'{text}' is what `qkablate results` prints")
    return one_of(FORMATS)(text)


PARSER = Parser(HELP, KINDS, (*FORMATS, "out="))
PARSER.option("-o", "FILE", "the file to write; its extension may name the format")
PARSER.option("--format", "|".join(FORMATS), "output format", _convert_format)
PARSER.option("--study", "FOLDER", "write the page of a study from its published runs: docs/study")
PARSER.option("--margin", "NATS", "as in `qkablate results`", margin)


def main(argv: list[str]) -> int:
    """Write a report."""
    args = PARSER.parse(argv)
    if args.study is not None:
        return _write_study(args)
    form = _choose_format(args.format, args.o)
    words, out = take_out(args.words)
    sources = find_sources(words, out)
    target = _choose_target(args.o, form, sources)

    from qkablate.report.section import share_styles

    sections = share_styles([_make_section(*source, args.margin) for source in sources])
    try:
        written = []
        for path, content in _render(sections, target, form):
            replace_file(path, content)
            written.append(f"{path}  {format_bytes(len(content))}")
    except OSError as error:
        flag = "-o: " if args.o else ""
        raise UserError(f"{flag}'{target}' cannot be written: {error.strerror}") from None
    print(sanitize("\n".join(written)))
    studies = [section.study for section in sections]
    commands = [["results", *study.cli_arguments] for study in studies if study.manifest]
    if len(studies) == 1 and not commands and len(words) <= _MAX_WORDS:
        commands = [["results", *words, *out_words(out)]]
    if form == "html" and len(words) <= _MAX_WORDS:
        options = [] if args.margin is None else ["--margin", f"{args.margin:g}"]
        commands.insert(0, ["report", *words, *out_words(out), *options, "--format", "svg"])
    if commands:
        print_next_commands(*commands[:2])
    return 0


def _write_study(args: Namespace) -> int:
    if args.words or any(value is not None for value in (args.o, args.format, args.margin)):
        raise UserError("--study takes nothing beside it: it writes what is in its folder")
    if not os.path.isdir(args.study):
        raise UserError(f"--study: '{args.study}' is not a folder")
    from qkablate.report.study.claims import RESULTS
    from qkablate.report.study.page import PAGE, REGISTRATIONS, SNIPPET, write_study

    study = Path(args.study)
    if not (study / RESULTS).is_dir() and not (study / REGISTRATIONS).is_file():
        raise UserError(f"--study: '{study}' is not the folder of a study: it has no {RESULTS}/")
    try:
        written = write_study(study)
    except OSError as error:
        raise UserError(f"--study: '{args.study}' cannot be written: {error.strerror}") from None
    texts = [path for path in written if path.name in (PAGE, SNIPPET)]
    print(sanitize("\n".join(map(str, texts))))
    print(f"and {format_count(len(written) - len(texts), 'picture')}")
    return 0


def _choose_format(form: str | None, target: str | None) -> str:
    extension = Path(target or "").suffix.removeprefix(".").lower()
    if form is None:
        form = extension if target else "html"
        if form not in FORMATS:
            raise UserError(f"-o {target}: the extension {not_one_of(form, FORMATS)}")
    elif extension in FORMATS and extension != form:
        raise UserError(f"-o: '{target}' ends in .{extension}, and --format is {form}")
    return form


def _choose_target(option: str | None, form: str, sources: list[Source]) -> Path:
    """Return the file to write: by default in the folder of the source, or above several."""
    if option is not None:
        target = os.path.expanduser(option)
        if not os.path.isdir(os.path.dirname(target) or "."):
            raise UserError(f"-o: there is no folder '{os.path.dirname(target)}'")
        if os.path.isdir(target):
            raise UserError(f"-o: '{target}' is a folder; give a file")
        return Path(target)
    first, *others = [folder for _, folders in sources for folder in folders]
    from qkablate.analysis.publication.unpack import archive_cache

    if first.absolute().is_relative_to(archive_cache().absolute()):
        return Path(f"report.{form}")  # of published runs: here, not in the user's cache
    return (first.absolute().parent.parent if others else first) / f"report.{form}"


def _make_section(kind: str, folders: list[Path], margin: float | None) -> Any:
    from qkablate.analysis.claims.judgement import counting_judgement, judge_looks
    from qkablate.analysis.claims.registry import read_registration
    from qkablate.analysis.study.standalone_runs import read_standalone_runs
    from qkablate.analysis.study.study import read_study
    from qkablate.report.section import Section

    where = f"read from {format_list([*map(str, folders)], 3)}"
    if kind == "runs":
        name, count = folders[0].resolve().name, format_count(len(folders), "run")
        title = name if len(folders) == 1 else count
        return Section(title, where, read_standalone_runs(folders), margin)
    if kind == "sweep":
        study = read_study(folders[0])
        return Section(study.name, where, study, margin)
    registration = read_registration(folders[0])
    claim = registration.claim
    judgement = counting_judgement(judge_looks(claim, str(folders[0].resolve().parent.parent)))
    if judgement is None and registration.lost:
        raise UserError(f"claim {claim.name}: its sweep '{registration.lost[0]}' is gone")
    if judgement is None:
        raise UserError(f"claim {claim.name} has not been run yet: qkablate claim run {claim.name}")
    return Section(f"claim {claim.title}", where, judgement.study, margin, judgement)


def _render(sections: list[Any], target: Path, form: str) -> Iterator[tuple[Path, bytes]]:
    """Yield the files to write: one, or one per chart next to each other."""
    from qkablate.report import page
    from qkablate.report.charts import make_charts
    from qkablate.report.render import render_chart
    from qkablate.report.text import page as markdown
    from qkablate.report.text.setting import format_setting

    if form == "html":
        title = ", ".join(section.title for section in sections)
        yield target, page.render_page(sections, title).encode()
    elif form == "md":
        yield target, markdown.render_markdown(sections).encode()
    else:
        base = target.stem if target.suffix.lower() == f".{form}" else target.name
        drawn = [
            (i, section, chart)
            for i, section in enumerate(sections, 1)
            for chart in make_charts(section)
            if chart.panels
        ]
        if not drawn:
            raise UserError("there is nothing to draw yet: no run has been evaluated")
        for number, section, chart in drawn:
            part = f"-{number}" if len(sections) > 1 else ""
            name = f"{base}{part}-{chart.name}.{form}"
            yield (
                target.with_name(name),
                render_chart(chart, section.title, form, format_setting(section)),
            )

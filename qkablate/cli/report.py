"""`qkablate report`: one page to read and to send, or its pictures, or its text."""

import os
from pathlib import Path
from typing import Any

from qkablate.cli.compose import next_commands, take_flags
from qkablate.cli.results import margin_of, need_analysis
from qkablate.cli.status import sweep_names
from qkablate.errors import UserError, nearest
from qkablate.table import counted, short_bytes, some

FORMATS = ("html", "md", "png", "svg")

HELP = """qkablate report: what runs say, as one page to read and to send to a colleague.

Usage: qkablate report [SWEEP | RUN | CLAIM …] [-o FILE] [--format html|md|png|svg]
                       [--margin NATS] [out=FOLDER]

Each is a folder, or how its name or id begins; unsaid, the newest sweep. Several sweeps and claims
are chapters of one page; runs that are named one by one are a chapter together.

Examples
  qkablate report                          the newest sweep: report.html in its folder
  qkablate report quick -o quick.html
  qkablate report quick --format svg       its pictures, a file each, for a paper
  qkablate report quick -o quick.md        its text and tables
  qkablate report one_head                 a claim, with its verdict
  qkablate report outputs/runs/standard-*  these runs, paired by seed where they can be
  qkablate report quick --margin 0.01      and which arms are not worse by 0.01

The page holds everything it shows, the program that draws included: it opens from disk, and asks
nothing of any network. It says how much is missing where runs are not done.

Flags
  -o FILE         where to write; its ending may name the format
  --format html|md|png|svg
  --margin NATS   as in `qkablate results`

Exit codes: 0 it is written · 1 it cannot be written · 2 a mistake in the command
"""


def main(argv: list[str]) -> int:
    flags, words = take_flags(argv, ("--help", "-h"), ("-o", "--format", "--margin"))
    if {"--help", "-h"} & {*flags}:
        print(HELP, end="")
        return 0
    form = _format(flags.get("--format"), flags.get("-o"))
    margin = margin_of(flags.get("--margin"))
    out = "outputs"
    for word in [word for word in words if word.startswith("out=")]:
        out = word.removeprefix("out=")
        words.remove(word)
    need_analysis("jinja2", "vl_convert")
    sources = _sources(words, out)
    target = _target(flags.get("-o"), form, sources, out)

    from qkablate.report import markdown, page

    chapters = [_chapter(kind, folders, margin) for kind, folders in sources]
    try:
        if form == "html":
            title = ", ".join(chapter.title for chapter in chapters)
            _write(target, page.page(chapters, title).encode())
        elif form == "md":
            _write(target, markdown.text(chapters).encode())
        else:
            _write_pictures(chapters, target, form)
    except OSError as error:
        raise UserError(f"-o: '{target}' cannot be written: {error.strerror}") from None
    names = [
        chapter.study.name
        for (kind, _), chapter in zip(sources, chapters, strict=True)
        if kind != "runs"
    ]
    more = [["report", *words, "--format", "svg"]] if form == "html" else []
    next_commands(*more, *([["results", *names[:1]]] if names else []))
    return 0


def _format(flag: str | None, target: str | None) -> str:
    ending = Path(target or "").suffix.removeprefix(".").lower()
    form = flag or (ending if target else "html")
    if form not in FORMATS:
        one_of = f"{', '.join(FORMATS)}{nearest(form, FORMATS)}"
        what = "--format" if flag else f"-o {target}: the ending"
        raise UserError(f"{what}: '{form}' is not one of {one_of}")
    if flag and ending in FORMATS and ending != form:
        raise UserError(f"-o: '{target}' ends in .{ending}, and --format is {form}")
    return form


Source = tuple[str, list[Path]]  # sweep, claim or runs, and the folders


def _sources(words: list[str], out: str) -> list[Source]:
    from qkablate.sweeps import manifest

    if not words:
        return [("sweep", [manifest.find(None, out)])]
    found: list[Source] = []
    runs: list[Path] = []
    for word in dict.fromkeys(words):
        kind, folder = _meant(word, out)
        if kind == "run":
            if not runs:
                found.append(("runs", runs))
            runs.append(folder)
        else:
            found.append((kind, [folder]))
    return found


_FILES = {"manifest.json": "sweep", "claim.json": "claim", "config.yaml": "run"}
_OF_A_RUN = ("result.json", "metrics.jsonl", "checkpoints", "output.log", "environment.json")


def _meant(word: str, out: str) -> tuple[str, Path]:
    """What a word names: a folder, or a name in `out`."""
    from qkablate.runs import meant

    folder = os.path.expanduser(word)  # these functions take any word, however odd
    for name, kind in _FILES.items():
        if os.path.isfile(os.path.join(folder, name)):
            return kind, Path(folder)
    if any(os.path.exists(os.path.join(folder, name)) for name in _OF_A_RUN):
        return "run", Path(folder)  # a damaged one, which the report will name
    root = Path(out).expanduser()
    matches: list[tuple[str, Path]] = []
    known: set[str] = set()
    for place, name in (("sweeps", "manifest.json"), ("claims", "claim.json"), ("runs", "")):
        names = sorted(path.parent.name for path in root.glob(f"{place}/*/{name or 'config.yaml'}"))
        known |= {part for own in names for part in (own, own.rpartition("-")[0])}
        if word and (match := meant(word, names, place)):
            matches.append((_FILES[name or "config.yaml"], root / place / match))
    if len(matches) > 1:
        kinds = " and ".join(f"a {kind} ({folder.name})" for kind, folder in matches)
        raise UserError(f"'{word}' is {kinds}; give the folder")
    if not matches:
        hint = nearest(word, known)
        raise UserError(f"there is no sweep, claim or run '{word}' in '{root}'{hint}")
    return matches[0]


def _target(given: str | None, form: str, sources: list[Source], out: str) -> Path:
    if given is not None:
        target = Path(given).expanduser()
        if not target.parent.is_dir():
            raise UserError(f"-o: there is no folder '{target.parent}'")
        if target.is_dir():
            raise UserError(f"-o: '{target}' is a folder; give a file")
        return target
    first = [folder for _, folders in sources for folder in folders]
    parent = first[0] if len(first) == 1 else Path(out).expanduser()
    return parent / f"report.{form}"


def _chapter(kind: str, folders: list[Path], margin: float | None) -> Any:
    from qkablate.analysis.docket import judged, judgements
    from qkablate.analysis.loose import study_of
    from qkablate.analysis.registry import read_registration
    from qkablate.analysis.study import read_study
    from qkablate.report.chapter import Chapter

    where = f"read from {some([*map(str, folders)], 3)}"
    if kind == "runs":
        one = folders[0].resolve().name if len(folders) == 1 else counted(len(folders), "run")
        return Chapter.of(one, where, study_of(folders), margin)
    if kind == "sweep":
        study = read_study(folders[0])
        return Chapter.of(study.name, where, study, margin)
    claim = read_registration(folders[0]).claim
    found = judged(judgements(claim, str(folders[0].resolve().parent.parent)))
    if found is None:
        raise UserError(f"claim {claim.name} has not been run yet: qkablate claim run {claim.name}")
    return Chapter.of(f"claim {claim.title}", where, found.study, margin, found)


def _write_pictures(chapters: list[Any], target: Path, form: str) -> None:
    """A file for each chart, beside one another."""
    from qkablate.report.charts import charts
    from qkablate.report.pictures import picture

    written = 0
    for number, chapter in enumerate(chapters, 1):
        for chart in charts(chapter):
            part = f"-{number}" if len(chapters) > 1 else ""
            path = target.with_name(f"{target.stem}{part}-{chart.name}.{form}")
            _write(path, picture(chart, chapter, form))
            written += 1
    if not written:
        raise UserError("there is nothing to draw yet: no run has a reading")


def _write(path: Path, content: bytes) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(content)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    print(f"{path}  {short_bytes(len(content))}")


def words() -> list[str]:
    """What can be typed after `qkablate report`."""
    claims = [path.parent.name for path in Path("outputs/claims").glob("*/claim.json")]
    runs = [path.parent.name for path in Path("outputs/runs").glob("*/config.yaml")]
    return [*sweep_names(), *claims, *runs, "-o", "--format", *FORMATS, "--margin", "out="]

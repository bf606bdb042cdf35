"""`qkablate report`: one page to read and to send, or its pictures, or its text."""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from qkablate.cli.hydra.configs import next_commands, take_flags, take_out
from qkablate.cli.results import margin_of, need_analysis
from qkablate.cli.status import sweep_names
from qkablate.errors import UserError, nearest, printable
from qkablate.runs.run import meant
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

Exit codes: 0 it is written · 2 it cannot be, or a mistake in the command
"""


def main(argv: list[str]) -> int:
    flags, words = take_flags(argv, ("--help", "-h"), ("-o", "--format", "--margin"))
    if {"--help", "-h"} & {*flags}:
        print(HELP, end="")
        return 0
    form = _format(flags.get("--format"), flags.get("-o"))
    margin = margin_of(flags.get("--margin"))
    words, out = take_out(words)
    need_analysis("jinja2", "vl_convert")
    sources = _sources(words, out)
    target = _target(flags.get("-o"), form, sources)

    from qkablate.report.section import together

    chapters = together([_chapter(kind, folders, margin) for kind, folders in sources])
    try:
        written = [write(path, content) for path, content in _files(chapters, target, form)]
    except OSError as error:
        given = "-o: " * ("-o" in flags)
        raise UserError(f"{given}'{target}' cannot be written: {error.strerror}") from None
    print(printable("\n".join(written)))
    commands = [["results", *chapter.study.where] for chapter in chapters if chapter.is_of_a_sweep]
    if form == "html" and len(words) <= _MOST_WORDS:
        again = [word for word in argv if word.startswith("out=")]
        again += ["--margin", flags["--margin"]] if margin is not None else []
        commands.insert(0, ["report", *words, *again, "--format", "svg"])
    if commands:
        next_commands(*commands[:2])
    return 0


_MOST_WORDS = 4  # that are worth typing again


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
    from qkablate.sweeps.planning import manifest

    if not words:
        return [("sweep", [manifest.find(None, out)])]
    found: list[Source] = []
    runs: list[Path] = []
    known: set[Path] = set()
    for word in words:
        kind, folder = _meant(word, out)
        if folder.resolve() in known:
            continue
        known.add(folder.resolve())
        if kind == "run":
            if not runs:
                found.append(("runs", runs))
            runs.append(folder)
        else:
            found.append((kind, [folder]))
    return found


_FILES = {"manifest.json": "sweep", "claim.json": "claim", "config.yaml": "run"}
_OF_A_RUN = (
    *("result.json", "metrics.jsonl", "checkpoints", "environment.json", "output.log"),
    *("owner", "attempts"),
)


def _meant(word: str, out: str) -> tuple[str, Path]:
    """What a word names: a folder, or a name in `out`."""
    folder = os.path.expanduser(word)  # these functions take any word, however odd
    for name, kind in _FILES.items():
        if os.path.isfile(os.path.join(folder, name)):
            return kind, Path(folder)
    named_so = re.search(r"-[0-9a-f]{12}$", os.path.basename(os.path.normpath(folder)))
    if any(os.path.exists(os.path.join(folder, name)) for name in _OF_A_RUN) or (
        named_so and os.path.isdir(folder)
    ):
        return "run", Path(folder)  # begun a moment ago, or damaged: the report will name it
    return _named(word, Path(out).expanduser())


def _named(word: str, root: Path) -> tuple[str, Path]:

    found: list[tuple[str, Path]] = []
    unclear = []
    known: set[str] = set()
    for file, kind in _FILES.items():
        place = f"{kind}s"
        names = sorted(path.parent.name for path in root.glob(f"{place}/*/{file}"))
        known |= {part for own in names for part in (own, own.rpartition("-")[0])}
        try:
            if word and (match := meant(word, names, place)):
                found.append((kind, root / place / match))
        except UserError as several:
            unclear.append(str(several))
    if len(found) + len(unclear) > 1:
        kinds = " and ".join(f"a {kind} ({folder.name})" for kind, folder in found)
        told = [f"'{word}' is {kinds}"] * bool(kinds)
        raise UserError(f"{'; '.join([*told, *unclear])}; give the folder")
    if unclear:
        raise UserError(unclear[0])
    from qkablate.analysis.claims.parse import known_claims

    if not found and word in known_claims():
        raise UserError(f"claim {word} has not been run in '{root}': qkablate claim run {word}")
    if not found:
        raise UserError(
            f"there is no sweep, claim or run '{word}' in '{root}'{nearest(word, known)}"
        )
    return found[0]


def _target(given: str | None, form: str, sources: list[Source]) -> Path:
    """Unsaid: in the folder of what is reported, or above those of several."""
    if given is not None:
        target = os.path.expanduser(given)
        if not os.path.isdir(os.path.dirname(target) or "."):
            raise UserError(f"-o: there is no folder '{os.path.dirname(target)}'")
        if os.path.isdir(target):
            raise UserError(f"-o: '{target}' is a folder; give a file")
        return Path(target)
    first, *others = [folder for _, folders in sources for folder in folders]
    return (first.absolute().parent.parent if others else first) / f"report.{form}"


def _chapter(kind: str, folders: list[Path], margin: float | None) -> Any:
    from qkablate.analysis.claims.docket import judged, judgements
    from qkablate.analysis.claims.registry import read_registration
    from qkablate.analysis.study.standalone_runs import study_of
    from qkablate.analysis.study.study import read_study
    from qkablate.report.section import Chapter

    where = f"read from {some([*map(str, folders)], 3)}"
    if kind == "runs":
        one = folders[0].resolve().name if len(folders) == 1 else counted(len(folders), "run")
        return Chapter.of(one, where, study_of(folders), margin)
    if kind == "sweep":
        study = read_study(folders[0])
        return Chapter.of(study.name, where, study, margin)
    registration = read_registration(folders[0])
    claim = registration.claim
    found = judged(judgements(claim, str(folders[0].resolve().parent.parent)))
    if found is None and registration.lost:
        raise UserError(f"claim {claim.name}: its sweep '{registration.lost[0]}' is gone")
    if found is None:
        raise UserError(f"claim {claim.name} has not been run yet: qkablate claim run {claim.name}")
    return Chapter.of(f"claim {claim.title}", where, found.study, margin, found)


def _files(chapters: list[Any], target: Path, form: str) -> Iterator[tuple[Path, bytes]]:
    """What is written: one file, or one for each chart, beside one another."""
    from qkablate.report import page
    from qkablate.report.charts import charts
    from qkablate.report.render import picture
    from qkablate.report.text import page as markdown

    if form == "html":
        title = ", ".join(chapter.title for chapter in chapters)
        yield target, page.page(chapters, title).encode()
    elif form == "md":
        yield target, markdown.text(chapters).encode()
    else:
        drawn = [(i, own, chart) for i, own in enumerate(chapters, 1) for chart in charts(own)]
        if not drawn:
            raise UserError("there is nothing to draw yet: no run has a reading")
        for number, chapter, chart in drawn:
            part = f"-{number}" if len(chapters) > 1 else ""
            name = f"{target.stem}{part}-{chart.name}.{form}"
            yield target.with_name(name), picture(chart, chapter, form)


def write(path: Path, content: bytes) -> str:
    """All of it or nothing; what is told of it."""
    temporary = path.with_name(f".{path.name[:200]}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(content)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return f"{path}  {short_bytes(len(content))}"


def words() -> list[str]:
    """What can be typed after `qkablate report`."""
    claims = [path.parent.name for path in Path("outputs/claims").glob("*/claim.json")]
    runs = [path.parent.name for path in Path("outputs/runs").glob("*/config.yaml")]
    return [*sweep_names(), *claims, *runs, "-o", "--format", *FORMATS, "--margin", "out="]

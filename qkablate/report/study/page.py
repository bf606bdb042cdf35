"""The page of the study: the answer, and a section for each claim, in Markdown.

Everything on it comes from the archives in the study's folder: `qkablate report --study` writes it,
and nobody by hand.
"""

import html
import itertools
import re
from collections.abc import Iterable
from pathlib import Path

from qkablate.analysis.claims.claim import Claim
from qkablate.analysis.claims.judgement import Judgement
from qkablate.analysis.claims.measures import Unit
from qkablate.analysis.publication.archive import CHECKSUMS
from qkablate.disk import make_folder, read_file, replace_file
from qkablate.report.section import Section, format_n
from qkablate.report.study.anchors import format_anchors
from qkablate.report.study.answers import format_answers
from qkablate.report.study.claims import RESULTS, StudiedClaim, find_open_claims, read_claims
from qkablate.report.study.costs import has_other_sign, is_at_ceiling
from qkablate.report.study.multiplicity import format_multiplicity
from qkablate.report.study.pictures import (
    ANSWERS,
    COSTS,
    draw_pictures,
    read_hash,
)
from qkablate.report.study.questions import ask_claim, find_question, rank_claim
from qkablate.report.text.claims import (
    format_audit,
    format_details,
    format_seeds_needed,
    format_spec,
    make_part_table,
)
from qkablate.report.text.setting import format_setting
from qkablate.report.text.summary import summarize
from qkablate.report.text.table import Code, Table, escape_markdown, format_markdown
from qkablate.table import format_list

PAGE, SNIPPET, REGISTRATIONS = "index.md", "answers.txt", "registrations.md"
_MOST_PARTS = 4  # of a claim in the table of the page; in that for a README one
_LEGEND = """
How to read the table:

- Cost: the loss of the variant minus that of standard attention, or of what else is named. Accuracy
  lost: standard's accuracy minus the variant's. A part whose verdict is not the claim's has it in
  parentheses.
- Margin: the smallest difference that the claim counts. Attention: by how much the loss of the
  model compared with is lower, or its accuracy higher, than with uniform averaging in the same
  setting.
- REFUTED: the interval excludes what the claim says. EQUIVALENT: it excludes that and lies within
  ± the margin. UNDERPOWERED: undecided. The marks other than † are shown for decided answers
  only.
- Most verdicts assume that failed runs are no more frequent than was observed; each section says
  how many would overturn its own.
- Intervals are of 90 %, so that their ends are one-sided bounds of 95 %. Tests that refute a claim
  are adjusted (Holm) for its parts, not for the number of claims.
""".strip()
_OTHER_SEEDS = "Other seeds would give other numbers; the intervals say by how much"
_HOW = """
```bash
qkablate results docs/study/results      # every comparison, of every claim
qkablate report docs/study/results       # one page with all charts
qkablate reproduce all                   # train again, with other seeds: do they agree?
qkablate reproduce all --check           # train some of the runs again: bit for bit?
```

In the audits, `circuit × 32` means that the matrices of a variant's circuit (of queries and keys,
or else of values and outputs) were trained at 32 times the model's learning rate.
"""


def make_page(
    claims: list[StudiedClaim], pictures: set[str], histories: set[str]
) -> dict[str, bytes]:
    """Return the texts of the study by the names of their files.

    It shows the named pictures, and links to the sections of the registrations in `histories`.
    """
    open_claims = find_open_claims(claims)
    parts = [_format_answer(claims, open_claims, pictures)]
    for question, own in itertools.groupby(claims, lambda one: find_question(one.claim.name)):
        parts.append(f"## {escape_markdown(question)}")
        parts += [_format_claim(studied, pictures, histories) for studied in own]
    parts += [format_anchors(claims, histories)]
    parts += [_format_open(open_claims)] if open_claims else []
    page = "\n\n".join(parts) + "\n"
    snippet = format_answers(claims) + _format_unanswered(claims, open_claims)
    return {PAGE: page.encode(), SNIPPET: snippet.encode()}


def write_study(study: Path) -> list[Path]:
    """Write the page, the table of the answers and the pictures; remove pictures of no claim."""
    claims = read_claims(study)
    pictures = [*draw_pictures(claims)]
    files = make_page(claims, {picture.name for picture in pictures}, find_histories(study))
    for picture in pictures:
        files |= {} if picture.is_drawn(study) else picture.render()
    make_folder(study)
    names = {*files}.union(*(picture.files for picture in pictures))
    for path in study.glob("*.svg"):
        if path.name not in names and read_hash(read_file(path)) is not None:
            path.unlink()
    for name, content in files.items():
        replace_file(study / name, content)
    return [study / name for name in sorted(names)]


def _format_answer(claims: list[StudiedClaim], open_claims: list[Claim], pictures: set[str]) -> str:
    answers = format_answers(claims, _MOST_PARTS, linked=True)
    results = f"[{RESULTS}]({RESULTS}/{CHECKSUMS})" if claims else RESULTS
    lines = ["# The study", ""]
    lines += [
        "Do transformers need this attention matrix? This page says what the published runs in"
        f" {results} answer, and is written by `qkablate report --study` from"
        f" them alone. [{REGISTRATIONS}]({REGISTRATIONS}) has what was tried before, what each"
        " answer does not say, and unpublished runs.",
        "",
    ]
    if COSTS in pictures:
        lines += [_format_picture(COSTS, "What variants cost on text"), ""]
    lines.append(answers.rstrip() if answers else "**No claim has been run to its verdict yet.**")
    if answers:
        lines += ["", _LEGEND]
    if text := format_multiplicity(claims):
        lines += ["", text]
    if ANSWERS in pictures:
        lines += [
            "",
            _format_picture(ANSWERS, "All parts of all claims, in units of their margins"),
        ]
    if open_claims:
        count = len(open_claims)
        total = count + len({studied.claim.name for studied in claims})
        lines += ["", f"{count} of {total} claims [have no published runs](#not-run)."]
    if begun := [studied for studied in claims if not studied.judgement.has_ended]:
        links = [f"[{studied.claim.name}](#{studied.anchor})" for studied in begun]
        lines += ["", f"Not decided yet, with some of their runs: {format_list(links)}."]
    lines += ["", _HOW.strip()]
    return "\n".join(lines)


def _format_unanswered(claims: list[StudiedClaim], open_claims: list[Claim]) -> str:
    """Return what else the table's questions ask, which no runs, or too few, answer; or ''."""
    ended = [studied.claim for studied in claims if studied.judgement.has_ended]
    others = {studied.claim.name: studied.claim for studied in claims} | {
        claim.name: claim for claim in open_claims
    }
    asking = {find_question(claim.name) for claim in ended}
    asked = [
        f"{escape_markdown(ask_claim(name, others[name].says))} (`{name}`)"
        for name in sorted(
            others.keys() - {claim.name for claim in ended},
            key=lambda name: (rank_claim(name), name),
        )
        if find_question(name) in asking
    ]
    return f"\nNot answered yet: {' '.join(asked)}\n" if asked else ""


def _format_claim(studied: StudiedClaim, pictures: set[str], histories: set[str]) -> str:
    claim, judgement, section = studied.claim, studied.judgement, studied.section
    registration = studied.registration
    lines = [f'<a id="{studied.anchor}"></a>', "", f"### {claim.title}", ""]
    lines += [f"> {escape_markdown(claim.says)}", "", f"From {escape_markdown(claim.source)}.", ""]
    verdict, *_ = summarize(section)  # what else it says is in the table of the parts
    lines += [f"**{escape_markdown(studied.verdict)}**", "", escape_markdown(verdict), ""]
    if studied.doubt:
        lines += [f"**In doubt:** {escape_markdown(studied.doubt)}", ""]
    if claim.name in histories:
        text = "Earlier registrations, and limitations"
        lines += [f"{text}: [{REGISTRATIONS}]({REGISTRATIONS}#{claim.name}).", ""]
    lines += [f"- exploratory: {escape_markdown(reason)}" for reason in judgement.exploratory]
    lines += [f"- on {dataset}: {word}" for dataset, word in judgement.datasets.items()]
    lines += ["", "Tested:", ""]
    lines += [
        f"- {name}: {escape_markdown(format_spec(spec))}" for name, spec in claim.parts.items()
    ]
    lines += ["", escape_markdown(format_setting(section)), ""]
    head, rows = make_part_table(judgement)
    if rows:
        notes = [*format_details(judgement), *format_seeds_needed(judgement)]
        notes += _explain_signs(judgement)
        lines += ["#" + format_markdown(Table("Parts", head, rows, notes)), ""]
    for end, text in (("parts", "Estimates"), ("losses", "Loss"), ("gap-curves", "Gap")):
        if (name := f"{studied.slug}-{end}") in pictures:
            lines += [_format_picture(name, f"{text} of {claim.title}"), ""]
    if judgement.has_ended:
        lines += ["#### The audit", ""]
        lines += [f"- {escape_markdown(line.strip())}" for line in format_audit(judgement.parts)]
    lines += ["", "#### What this does not say", "", _format_limits(section), ""]
    lines += ["#### Run it", "", "```bash", studied.command, "```", ""]
    lines += [_format_training(studied), ""]
    lines.append(
        f"Registered {registration.when[:19]} with hash `{claim.hash[:12]}` under version"
        f" {registration.statistics} of the statistics."
    )
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines))


def _explain_signs(judgement: Judgement) -> list[str]:
    """Say which parts have another sign here than in the table of the answers."""
    other = [
        judged.part.name
        for judged in judgement.parts
        if has_other_sign(judged) and judged.unit is not Unit.RATIO and not is_at_ceiling(judged)
    ]
    if not other:
        return []
    names = "" if len(other) == len(judgement.parts) else f" of {format_list(other)}"
    return [
        f"the estimate{'s' * (len(other) > 1)}{names}: the first arm minus the second, as tested;"
        " in the table of the answers + means that the variant is worse: the sign is the opposite"
    ]


def _format_limits(section: Section) -> str:
    """Return the sizes, data and optimizer beyond which the runs say nothing."""
    arms = [entry.arm for entry in section.study.entries]
    params = max((arm.total_params for arm in arms), default=0)
    tokens = max((arm.tokens for arm in arms), default=0)
    schedules = format_list(sorted({arm.config.optim.schedule for arm in arms}))
    names = {"adamw": "AdamW", "muon": "Muon"}
    optimizers = {arm.config.optim.optimizer for arm in arms}
    trained_by = format_list(sorted(names.get(name, name) for name in optimizers))
    data = format_list(sorted({arm.config.data.source for arm in arms}))
    precision = format_list(sorted({arm.config.precision for arm in arms}))
    counts = format_n([len(entry.losses) for entry in section.study.entries] or [0])
    return (
        f"Nothing about models of more than {params:,} parameters, or trained on more than"
        f" {tokens:,} tokens; about data other than {data}; about optimizers other than"
        f" {trained_by} with a {schedules} schedule, or precisions other than {precision}."
        f" {_OTHER_SEEDS} ({counts})."
    )


def _format_training(studied: StudiedClaim) -> str:
    records = studied.judgement.study.all_records
    done = [record for record in records if record.status in ("done", "diverged")]
    machines = _distinct(
        record.facts["gpu"] or record.facts["cpu"] or record.facts["device"] for record in done
    )
    torch = _distinct(record.facts["torch"] for record in done)
    code = _distinct(record.facts["code"] for record in done)
    threads = _distinct(record.facts["threads"] for record in done)
    minutes = studied.claim.minutes
    expected = "" if minutes is None else f" (expected on two cores: {minutes:g} min)"
    return (
        escape_markdown(
            f"{len(done)} runs, {studied.minutes:.0f} min of training in all{expected}, on"
            f" {machines}, {threads} thread{'' if threads == '1' else 's'} a run, with torch"
            f" {torch}, commit {code}. "
        )
        + f" [The runs]({studied.archive})."
    )


def _distinct(values: Iterable[object]) -> str:
    return format_list(sorted({str(value) for value in values}), 4)


def _format_open(claims: list[Claim]) -> str:
    rows = [
        [
            claim.name,
            claim.says,
            "not testable yet" if claim.untestable else Code(f"qkablate claim run {claim.name}"),
            "–" if claim.minutes is None else f"{claim.minutes:g}",
        ]
        for claim in claims
    ]
    table = format_markdown(Table("", ["claim", "says", "command", "minutes on two cores"], rows))
    return f"## Not run\n\n{table.partition(chr(10) * 2)[2].strip()}"


def _format_picture(name: str, text: str) -> str:
    dark = f'<source media="(prefers-color-scheme: dark)" srcset="{name}-dark.svg">'
    image = f'<img src="{name}.svg" alt="{html.escape(text)}">'
    return f"<picture>\n  {dark}\n  {image}\n</picture>"


def find_histories(study: Path) -> set[str]:
    """Return the claims that have a section in the page of registrations."""
    try:
        text = read_file(study / REGISTRATIONS).decode()
    except OSError:
        return set()
    return set(re.findall(r"^## (\w+)$", text, re.MULTILINE))

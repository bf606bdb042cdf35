"""Published results of others beside those of the study, with their sizes and directions."""

import math
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import yaml

from qkablate.analysis.claims.judgement import PartJudgement
from qkablate.analysis.claims.measures import Unit
from qkablate.report.study.claims import StudiedClaim
from qkablate.report.study.costs import format_ceiling, is_at_ceiling
from qkablate.report.text.table import Markdown, Table, escape_markdown, format_markdown

_FILE = Path(__file__).with_suffix(".yaml")
_COLUMNS = ["asked", "they report", "they found", "here, with 95 % interval", "found here"]
_UNITS = {Unit.NATS: "nats, ", Unit.SHARE: "of the answers, ", Unit.RATIO: ""}
FINDINGS = ("worse", "better", "equal", "mixed")


@dataclass(frozen=True)
class Anchor:
    """A published result, and the part of a claim or the command that asks the same here."""

    source: str
    asks: str
    setting: str
    reported: str
    link: str | None = None
    found: str | None = None  # one of FINDINGS; None: a number that compares nothing
    claim: str | None = None
    part: str | None = None
    data: str | None = None  # of a part that compares on several
    command: str | None = None
    section: str | None = None  # of the registrations, with runs of no claim
    note: str | None = None  # why the two differ; a section of the registrations tells more


@cache
def load_anchors() -> tuple[Anchor, ...]:
    """Return the published results, in the order of the page."""
    return tuple(Anchor(**entry) for entry in yaml.safe_load(_FILE.read_text(encoding="utf-8")))


def find_outcome(judged: PartJudgement) -> str:
    """Return what a part found: worse, better or, within the margin, equal; or undecided."""
    low, high = judged.part.sample.interval(0.95) or (-math.inf, math.inf)
    low, high = (
        -math.inf if judged.part.open_below else low,
        math.inf if judged.part.open_above else high,
    )
    margin = judged.unit.margin(judged.comparison.spec.margin)
    if -margin < low and high < margin:
        return "equal"
    return "worse" if low > 0 else "better" if high < 0 else "undecided"


def format_anchors(claims: list[StudiedClaim], histories: Collection[str]) -> str:
    """Return the section of the page with a row for each published result.

    Why one differs stands in the section of its claim among the registrations, if there is one;
    `histories` are the sections.
    """
    by_name = {studied.claim.name: studied for studied in sorted(claims, key=_rank_registration)}
    rows = []
    for anchor in load_anchors():
        has_section = anchor.section in histories
        rows.append(_make_row(anchor, by_name.get(anchor.claim or ""), has_section=has_section))
    table = format_markdown(Table("", _COLUMNS, rows)).partition("\n\n")[2].strip()
    sources = {anchor.source: anchor.link for anchor in load_anchors() if anchor.link}
    links = ", ".join(f"[{escape_markdown(name)}]({link})" for name, link in sources.items())
    parts = [
        "## Comparison with published results",
        "What others report, and what the same question gave here, at the size of this page's"
        " models. Equal: the 95 % interval lies within the margin of the claim's part. Worse or"
        " better: it does not, and excludes zero; the verdict of the claim may still be undecided,"
        " since it asks whether the difference exceeds the margin. None seen: every run has an"
        " accuracy of 100 %, so that only a run that fails could show a difference; with"
        " none in 16, up to 17 % may fail (one-sided 95 %).",
        table,
        f"Their numbers are from: {links}.",
        *(
            f"{escape_markdown(anchor.asks)}: {escape_markdown(anchor.note)}"
            f" ([registrations.md](registrations.md#{anchor.claim}))."
            for anchor in load_anchors()
            if anchor.note and anchor.claim in histories
        ),
        "Of those that no claim asks, these commands train the nearest setting:",
        "\n".join(
            f"- {escape_markdown(anchor.asks)}: `{anchor.command}`"
            for anchor in load_anchors()
            if anchor.command
        ),
    ]
    return "\n\n".join(parts)


def _rank_registration(studied: StudiedClaim) -> tuple[bool, bool, str]:
    """Return a key by which the registration of a claim that answers an anchor comes last."""
    is_plain = studied.claim.scale == "small" and not studied.claim.words
    return studied.judgement.has_ended, is_plain, studied.registration.when


def _make_row(anchor: Anchor, studied: StudiedClaim | None, *, has_section: bool) -> list[str]:
    reported = f"{anchor.source}: {anchor.setting}: {anchor.reported}"
    cells = [anchor.asks, reported, anchor.found or "–"]
    if has_section:
        return [*cells, Markdown(f"[unpublished runs](registrations.md#{anchor.section})"), "–"]
    if studied is None:
        return [*cells, "–", "not run"]
    if not studied.judgement.has_ended:
        return [*cells, "–", studied.progress]
    if (judged := find_part(studied, anchor)) is None:
        return [*cells, "–", "not run"]
    if judged.part.sample.interval(0.95) is None:
        return [*cells, "–", find_outcome(judged)]
    if is_at_ceiling(judged):
        return [
            *cells,
            f"every run at {format_ceiling(judged)}, {_format_size(judged)}",
            "none seen",
        ]
    mean = judged.unit.natural(judged.part.sample.mean)
    mean, low, high = (end + 0.0 for end in (mean, *judged.interval(0.95)))  # no -0.0
    size = f"{_UNITS[judged.unit]}{_format_size(judged)}"
    return [*cells, f"{mean:+.4f} [{low:+.4f}, {high:+.4f}] {size}", find_outcome(judged)]


def _format_size(judged: PartJudgement) -> str:
    params = [entry.arm.total_params for gap in judged.gaps for entry in gap.sides]
    return f"n = {judged.part.sample.n}, {max(params):,} parameters"


def find_part(studied: StudiedClaim, anchor: Anchor) -> PartJudgement | None:
    """Return the part of a claim that asks what a published result says; None if it has none."""
    for judged in studied.judgement.parts:
        is_asked = judged.comparison.part == anchor.part
        if is_asked and anchor.data in (None, judged.comparison.dataset):
            return judged
    return None

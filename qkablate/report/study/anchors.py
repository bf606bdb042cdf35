"""Published results of others beside those of the study, with their sizes and directions."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import yaml

from qkablate.analysis.claims.judgement import PartJudgement
from qkablate.analysis.claims.measures import Unit
from qkablate.report.study.claims import StudiedClaim
from qkablate.report.text.table import Code, Table, escape_markdown, format_markdown

_FILE = Path(__file__).with_suffix(".yaml")
_COLUMNS = ["asked", "they", "reported", "they found", "here, 95 % interval", "found here"]
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
    command: str | None = None


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


def format_anchors(claims: list[StudiedClaim]) -> str:
    """Return the section of the page with a row for each published result."""
    parts: dict[tuple[str, str], tuple[StudiedClaim, PartJudgement]] = {}
    for studied in claims:
        if studied.judgement.has_ended:
            for judged in studied.judgement.parts:
                parts.setdefault((studied.claim.name, judged.comparison.part), (studied, judged))
    rows = [_make_row(anchor, parts) for anchor in load_anchors()]
    table = format_markdown(Table("", _COLUMNS, rows)).partition("\n\n")[2].strip()
    sources = {anchor.source: anchor.link for anchor in load_anchors() if anchor.link}
    links = ", ".join(f"[{escape_markdown(name)}]({link})" for name, link in sources.items())
    return (
        "## Beside published results { #published }\n\nWhat others report, and what the same"
        f" question gave here, at the size of this page's models.\n\n{table}\n\nTheir numbers are"
        f" from: {links}."
    )


def _make_row(
    anchor: Anchor, parts: Mapping[tuple[str, str], tuple[StudiedClaim, PartJudgement]]
) -> list[str]:
    cells = [anchor.asks, f"{anchor.source}: {anchor.setting}", anchor.reported]
    cells.append(anchor.found or "–")
    if (found := parts.get((anchor.claim or "", anchor.part or ""))) is None:
        claim = f"qkablate claim run {anchor.claim}"
        return [*cells, Code(anchor.command or claim), "not run"]
    studied, judged = found
    low, high = judged.interval(0.95)
    mean = judged.unit.natural(judged.part.sample.mean)
    params = max(entry.arm.total_params for entry in studied.section.study.entries)
    estimate = (
        f"{mean:+.4f} [{low:+.4f}, {high:+.4f}] {_UNITS[judged.unit]}n = {judged.part.sample.n}"
    )
    return [*cells, f"{estimate}, {params:,} parameters", find_outcome(judged)]

"""The page: one file with everything in it, that asks nothing of any network and runs no script but
its own, whatever the names in it are.
"""

import base64
import gzip
import hashlib
import json
import time
from collections.abc import Sequence
from functools import lru_cache
from importlib import resources
from typing import Any

from qkablate import __version__
from qkablate.errors import printable
from qkablate.report import rows
from qkablate.report.charts import Chart, charts
from qkablate.report.palette import DARK, LIGHT, css
from qkablate.report.render import CONFIG, SHAPE_PATHS
from qkablate.report.section import Chapter
from qkablate.report.text.claims import beside, claim_lines, part_table, settling
from qkablate.report.text.numbers import cleaned
from qkablate.report.text.summary import answer
from qkablate.table import counted


def page(chapters: Sequence[Chapter], title: str) -> str:
    from jinja2 import Environment

    library = _library()
    script = _file("page.js")
    panels: list[Any] = []
    shown = [_chapter(chapter, number, panels) for number, chapter in enumerate(chapters)]
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    specs = {"config": CONFIG, "panels": cleaned(panels)}
    return environment.from_string(_file("page.html")).render(
        title=printable(title),
        version=__version__,
        written=time.strftime("%Y-%m-%d %H:%M %Z"),
        policy=_policy(library, script),
        style=_file("page.css").replace("LIGHT", css(LIGHT)).replace("DARK", css(DARK)),
        chapters=shown,
        specs=_packed(specs),
        library=library,
        script=script,
    )


def _chapter(chapter: Chapter, number: int, panels: list[Any]) -> dict[str, Any]:
    study, judgement = chapter.study, chapter.judgement
    run_columns, run_rows = rows.runs(chapter)
    verdicts = [[_shown(cell) for cell in row] for row in rows.verdicts(chapter)]
    claim = None
    if judgement is not None:
        columns, parts = part_table(judgement)
        said = claim_lines(judgement.claim)
        more = [*judgement.exploratory, *beside(judgement), *settling(judgement)]
        claim = {"columns": columns, "rows": parts, "said": said, "beside": more}
    return cleaned(
        {
            "id": f"c{number + 1}",
            "title": chapter.title,
            "status": status(chapter),
            "answer": answer(chapter),
            "verdict": judgement and judgement.word,
            "says": judgement and judgement.claim.says,
            "trouble": rows.trouble(chapter),
            "claim": claim,
            "heading": "Verdicts" if judgement is None else "Arm by arm",
            "columns": rows.COLUMNS,
            "arms": verdicts,
            "count": counted(len(verdicts), "arm"),
            "words": sorted({str(row[2].key) for row in verdicts}),
            "notes": notes(chapter),
            "charts": [_chart(chart, chapter, panels) for chart in charts(chapter)],
            "audit": rows.audit(chapter),
            "left_out": [[left.arm, left.control, left.reason] for left in study.manifest.left_out],
            "run_columns": run_columns,
            "runs": run_rows,
            "surroundings": rows.surroundings(chapter),
            "where": chapter.where,
        }
    )


def _shown(cell: rows.Cell) -> rows.Cell:
    return rows.Cell(cleaned(cell.text), cleaned(cell.key))


def status(chapter: Chapter) -> str:
    """64 runs: 60 done, 2 diverged, 2 waiting."""
    counts = chapter.counts
    told = ", ".join(f"{n:,} {word}" for word, n in counts.most_common())
    said = f"{counted(counts.total(), 'run')}: {told}" if told else "no run"
    missing = chapter.study.expected - chapter.study.ended
    return said if missing <= 0 else f"{said}. {missing:,} without a result yet, or failed."


def notes(chapter: Chapter) -> list[str]:
    beside = (
        "Here every arm stands by itself, and is asked whether there is any gap at all. What the"
        " claim says, with its margin, is decided above."
    )
    return [
        *([beside] if chapter.judgement is not None else []),
        *_margin(chapter),
        "gap: test loss of the arm minus that of its baseline with the same seed; below zero is"
        " better. The interval is Student's, of the pairs, for one arm by itself; p is adjusted by"
        " Holm over the arms of one size, and decides the verdict; the answer above takes all"
        " gaps together.",
        "could have found: the smallest gap that these seeds would have found four times of five."
        " “none found” is no sign that there is none.",
        "ranks, growth, equivalents and every test: qkablate results",
        "verdicts with ! or ✗: the audit below warns. Parameters without embeddings; KV cache with"
        " 16-bit numbers. 0.01 nats are 1 % of perplexity.",
    ]


def _margin(chapter: Chapter) -> list[str]:
    margins = [one["margin"]["nats"] for one in chapter.found["gaps"] if one["margin"]]
    return [
        f"margin: {nats:g} nats. “not worse”: the gap is below it; “equivalent”: within ± it; by"
        " one-sided t tests, adjusted by Holm. Their p stands under gaps, with every test."
        for nats in margins[:1]
    ]


def _chart(chart: Chart, chapter: Chapter, panels: list[Any]) -> dict[str, Any]:
    shown = []
    for panel in chart.panels:
        shown.append({"title": panel.title, "number": len(panels)})
        wide = {"width": "container", "autosize": {"type": "fit-x", "contains": "padding"}}
        panels.append(panel.spec if {"width", "facet"} & {*panel.spec} else panel.spec | wide)
    legend = [
        {
            "name": name,
            "colour": look.colour,
            "dash": " ".join(map(str, look.dash)) if look.dash != [1, 0] else "none",
            "shape": SHAPE_PATHS[look.shape],
        }
        for name in chart.variants
        for look in [chapter.looks[name]]
    ]
    own = {"name": chart.name, "title": chart.title, "caption": chart.caption}
    return own | {"panels": shown, "legend": legend}


def _packed(value: Any) -> str:
    """JSON, a tenth of its size, in signs that end no element."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()


@lru_cache
def _library() -> str:
    """Vega, Vega-Lite and what embeds them: two seconds' work."""
    import vl_convert

    return str(vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;"))


def _policy(*scripts: str) -> str:
    hashes = [base64.b64encode(hashlib.sha256(s.encode()).digest()).decode() for s in scripts]
    allowed = " ".join(f"'sha256-{digest}'" for digest in hashes)
    own = f"script-src {allowed}; style-src 'unsafe-inline'; img-src data:"
    return f"default-src 'none'; {own}; base-uri 'none'; form-action 'none'"


def _file(name: str) -> str:
    return (resources.files("qkablate.report") / name).read_text(encoding="utf-8")

"""The HTML page: one self-contained file that makes no network requests."""

import base64
import gzip
import hashlib
import json
import re
import time
from collections.abc import Sequence
from functools import lru_cache
from importlib import resources
from typing import Any

from qkablate import __version__
from qkablate.errors import sanitize
from qkablate.report import rows
from qkablate.report.charts import make_charts
from qkablate.report.charts.base import Chart
from qkablate.report.palette import DARK, LIGHT, to_css
from qkablate.report.render import CONFIG, SHAPE_PATHS
from qkablate.report.section import Section
from qkablate.report.text.claims import format_claim, make_claim_table
from qkablate.report.text.numbers import sanitize_all
from qkablate.report.text.setting import format_question, format_setting
from qkablate.report.text.summary import list_gaps, summarize
from qkablate.report.text.table import find_number_columns
from qkablate.table import format_count


def render_page(sections: Sequence[Section], title: str) -> str:
    """Return the page as HTML."""
    from jinja2 import Environment

    library = _load_library()
    script = _read_resource("page.js")
    panels: list[Any] = []
    shown = [_make_section(section, number, panels) for number, section in enumerate(sections)]
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    specs = {"config": CONFIG, "panels": sanitize_all(panels)}
    text = json.dumps(specs, separators=(",", ":"), allow_nan=False)
    return environment.from_string(_read_resource("page.html")).render(
        title=sanitize(title),
        version=__version__,
        written=time.strftime("%Y-%m-%d %H:%M %Z"),
        policy=_make_policy(library, script),
        style=_read_resource("page.css")
        .replace("LIGHT", to_css(LIGHT))
        .replace("DARK", to_css(DARK)),
        sections=shown,
        find_number_columns=find_number_columns,
        # Base64 cannot close an HTML element.
        specs=base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode(),
        library=library,
        script=script,
    )


def _make_section(section: Section, number: int, panels: list[Any]) -> dict[str, Any]:
    judgement = section.judgement
    run_columns, run_rows = rows.make_run_rows(section)
    verdicts = rows.make_verdict_rows(section)
    claim = None
    if judgement is not None:
        claim = vars(make_claim_table(judgement)) | {"lines": format_claim(judgement.claim)}
    content: dict[str, Any] = sanitize_all(
        {
            "id": f"c{number + 1}",
            "title": section.title,
            "status": format_status(section),
            "question": format_question(section) if judgement is None else "",
            "setting": format_setting(section),
            "gaps": list_gaps(section),
            "answer": summarize(section),
            "verdict": judgement and judgement.headline,
            "says": judgement and judgement.claim.says,
            "problems": rows.find_problems(section),
            "claim": claim,
            "heading": "Verdicts" if judgement is None else "Arm by arm",
            "columns": rows.verdict_columns(section),
            "are_words": [
                any(isinstance(cell.key, str) for cell in cells)
                for cells in zip(*verdicts, strict=True)
            ],
            "placeholder": _make_placeholder(section),
            "arms": [
                [{"text": section.labels[row[0].text]}, *(vars(cell) for cell in row[1:])]
                for row in verdicts
            ],
            "count": format_count(len(verdicts), "arm"),
            "verdict_words": sorted({str(row[2].key) for row in verdicts}),
            "notes": make_notes(section),
            "charts": [_make_chart(chart, section, panels) for chart in make_charts(section)],
            "audit": rows.make_audit_rows(section),
            "left_out": [[arm.arm, arm.control, arm.reason] for arm in section.study.left_out],
            "run_columns": run_columns,
            "runs": run_rows,
            "environment": rows.make_environment_rows(section),
            "source": section.source,
        }
    )
    return content


def _make_placeholder(section: Section) -> str:
    """Return words that find the last arm: no_q d64 of no_q-d64."""
    last = next(reversed(section.labels.values()), "")
    return re.sub(r"(?<!\de)-", " ", last)


def format_status(section: Section) -> str:
    """Format the status of the runs: 64 runs: 60 done, 2 diverged, 2 waiting."""
    counts = section.counts
    by_status = ", ".join(f"{n:,} {word}" for word, n in counts.most_common())
    text = f"{format_count(counts.total(), 'run')}: {by_status}" if by_status else "no run"
    missing = section.study.expected - section.study.ended
    return text if missing <= 0 else f"{text}. {missing:,} without a result yet, or failed."


def make_notes(section: Section) -> list[str]:
    """Return the notes below the table of verdicts."""
    margins = {gap.margin.nats for gap in section.summary.gaps if gap.margin}
    notes = []
    if section.judgement is not None:
        has_ended = section.judgement.has_ended
        notes.append(
            "This table tests each arm separately for any difference from its baseline. The claim,"
            f" with its margin, is judged {'above' if has_ended else 'when all runs have ended'}."
        )
    notes += [
        f"margin: {nats:g} nats. “not worse”: the gap is below the margin; “equivalent”: within"
        " ± the margin; one-sided tests, adjusted by Holm. qkablate results lists their p values."
        for nats in margins
    ]
    forms = dict.fromkeys(entry.arm.config.model.form for entry in section.study.entries)
    return [
        *notes,
        "gap: test loss of the arm minus test loss of its baseline with the same seed; negative is"
        " better. Intervals are over pairs, by Student's t, wider where the gaps are skewed, and"
        " unadjusted; verdicts use p adjusted by Holm over all gaps of the section.",
        "smallest detectable effect: the gap that these seeds detect with 80 % power."
        " “no difference found” does not mean that the arms are equal.",
        *(f"without attention: {references}" for references in section.summary.text_references),
        *(
            f"attention map: a run with model.form={form} records none; qkablate inspect RUN --text"
            f" TEXT{' --target TARGET' * (form == 'encoder_decoder')} -o FILE draws one"
            for form in forms
            if form != "decoder"
        ),
        "ranks, scaling laws, gains and all tests: qkablate results",
        "! or ✗: the audit below has a warning. Parameters exclude embeddings; KV cache in 16-bit"
        " numbers. 0.01 nats correspond to 1 % in perplexity.",
    ]


def _make_chart(chart: Chart, section: Section, panels: list[Any]) -> dict[str, Any]:
    shown, legend = [], []
    for panel in chart.panels:
        shown.append({"title": panel.title, "number": len(panels)})
        wide = {"width": "container", "autosize": {"type": "fit-x", "contains": "padding"}}
        panels.append(panel.spec if panel.has_own_width else panel.spec | wide)
    for name in chart.variants:
        style = section.styles[name]
        dash = " ".join(map(str, style.dash)) if style.dash != [1, 0] else "none"
        shape = SHAPE_PATHS[style.shape]
        legend.append({"name": name, "color": style.color, "dash": dash, "shape": shape})
    return vars(chart) | {"panels": shown, "legend": legend}


@lru_cache
def _load_library() -> str:
    """Return Vega, Vega-Lite and vega-embed as one script; takes two seconds."""
    import vl_convert

    return str(vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;"))


def _make_policy(*scripts: str) -> str:
    hashes = [base64.b64encode(hashlib.sha256(s.encode()).digest()).decode() for s in scripts]
    allowed = " ".join(f"'sha256-{digest}'" for digest in hashes)
    sources = f"script-src {allowed}; style-src 'unsafe-inline'; img-src data:"
    return f"default-src 'none'; {sources}; base-uri 'none'; form-action 'none'"


def _read_resource(name: str) -> str:
    return (resources.files("qkablate.report") / name).read_text(encoding="utf-8")

"""Loss and gap by tokens."""

import math

from qkablate.analysis.comparison.curves import Curve, arm_curve, curve, thinned
from qkablate.analysis.comparison.gaps import Family
from qkablate.analysis.study.study import VAL, Entry
from qkablate.report.charts.base import (
    Chart,
    Panel,
    Spec,
    colour,
    dash,
    tip,
    variants,
    where_known,
    zero,
)
from qkablate.report.section import Chapter, place_of, span
from qkablate.report.text.numbers import told_gap, told_loss

MOST_RUNS = 200  # whose curves are drawn one by one
_POINTS = 6_000  # of all curves of one chart


def losses(chapter: Chapter) -> Chart | None:
    """Loss by tokens."""
    entries = chapter.study.entries
    most = max(6, min(48, _POINTS // max(1, len(entries))))
    each = len(chapter.study.records) <= MOST_RUNS
    panels, counts = [], []
    for name, group in chapter.groups.items():
        means: list[Spec] = []
        single: list[Spec] = []
        for entry in group:
            own = arm_curve(entry, chapter.metric, most)
            if own is not None:
                means += mean_readings(own, entry)
                counts.append(own.samples[0].n)
            if each:
                single += _single(entry, chapter.metric, most)
        if means or single:
            y: Spec = {"field": "loss", "type": "quantitative", "title": "loss, nats per token"}
            rows = [*means, *single]
            lowest = min(row["loss"] if row["low"] is None else row["low"] for row in rows)
            # A band that all but reaches zero would take the whole of a logarithmic axis.
            logarithmic = lowest > 1e-3 * max(row["loss"] for row in rows)
            y |= {"scale": {"type": "log", "nice": False} if logarithmic else {"zero": False}}
            title = place_of(name, group[0].arm.variant)
            spec = lines_by_tokens(chapter, means, single, y)
            panels.append(Panel(title, spec, variants(means, single)))
    if not panels:
        return None
    what = "Validation" if chapter.metric == VAL else "Training"
    caption = (
        f"{what} loss. Thick: mean of an arm's runs that are done ({span(counts)}); band: 95 %"
    )
    caption += " t interval of that mean, at each reading by itself."
    caption += " Thin: every run, also one that is not done or diverged." if each else ""
    return Chart("losses", f"{what} loss", caption, panels)


def gap_curves(chapter: Chapter) -> Chart | None:
    """The gap by tokens, with a band that holds at all readings at once."""
    found = [(family, one) for family in chapter.families for one in family.gaps]
    most = max(6, min(48, _POINTS // max(1, len(found))))
    by_family: dict[str, tuple[Family, list[Spec]]] = {}
    counts = []
    for family, one in found:
        own = curve(one, chapter.metric, most)
        if own is not None:
            _, rows = by_family.setdefault(family.baseline.name, (family, []))
            rows += mean_readings(own, one.arm, band=True)
            counts.append(own.samples[0].n)
    y: Spec = {"field": "loss", "type": "quantitative", "title": "gap, nats per token"}
    y |= {"scale": {"zero": True}}
    panels = [
        Panel(
            place_of(name, family.baseline.arm.variant),
            lines_by_tokens(chapter, rows, [], y, gap=True),
            variants(rows),
        )
        for name, (family, rows) in by_family.items()
    ]
    if not panels:
        return None
    what = "validation" if chapter.metric == VAL else "training"
    caption = (
        f"Gap in {what} loss to the baseline, pair by pair ({span(counts)}). The bands hold at all"
        " readings at once in 95 of 100 studies. In the middle of a schedule this describes, and"
        " decides nothing."
    )
    caption += " One pair alone has no band." if min(counts) < 2 else ""
    return Chart("gap-curves", "Gap while training", caption, panels)


def lines_by_tokens(
    chapter: Chapter, rows: list[Spec], single: list[Spec], y: Spec, *, gap: bool = False
) -> Spec:
    """Lines by tokens, with their bands, and thin ones below."""
    x: Spec = {"field": "tokens", "type": "quantitative", "title": "tokens"}
    x |= {"scale": {"type": "log", "nice": False}, "axis": {"format": "~s", "tickCount": 5}}
    tooltip = [tip("arm"), {"field": "tokens", "type": "quantitative", "format": ","}]
    tooltip += [tip("told", "mean and interval"), tip("n")]
    lines = {"x": x, "y": y, "detail": {"field": "arm"}} | colour(chapter)
    layers: list[Spec] = []
    if gap:
        layers.append(zero("y"))
    if single:
        layers.append(
            {
                "data": {"values": single},
                "mark": {"type": "line", "strokeWidth": 0.8, "opacity": 0.35},
                "encoding": lines | {"detail": {"field": "run"}},
            }
        )
    if rows:
        seen = int(len({row["tokens"] for row in rows}) == 1)
        band = {**y, "field": "low"}
        layers += [
            *where_known(
                rows,
                {
                    "mark": {"type": "area", "opacity": 0.13},
                    "encoding": lines | {"y": band, "y2": {"field": "high"}},
                },
            ),
            {
                "mark": {"type": "line", "strokeWidth": 2},
                "encoding": lines | dash(chapter),
            },
            {
                # To be pointed at; to be seen where there is one reading, which makes no line.
                "mark": {"type": "point", "size": 90, "opacity": seen, "filled": True},
                "encoding": lines | {"tooltip": tooltip},
            },
        ]
    return {"height": 240, "data": {"values": rows}, "layer": layers}


def mean_readings(own: Curve, entry: Entry, *, band: bool = False) -> list[Spec]:
    intervals = own.band() if band else [sample.interval() for sample in own.samples]
    rows = []
    for tokens, sample, interval in zip(own.tokens, own.samples, intervals, strict=True):
        if not math.isfinite(sample.mean):
            continue
        low, high = map(_fine, interval) if interval else (None, None)
        row = {"arm": entry.name, "variant": entry.arm.variant, "tokens": tokens, "n": sample.n}
        row |= {"told": told_gap(sample.mean, interval) if band else told_loss(sample)}
        rows.append(row | {"loss": _fine(sample.mean), "low": low, "high": high})
    return rows


def _single(entry: Entry, metric: str, most: int) -> list[Spec]:
    rows = []
    for place, record in enumerate(entry.records.values()):
        course = record.courses[metric]
        shown = thinned([*course], most) if course else []
        own = {"run": f"{entry.name} {place}", "variant": entry.arm.variant, "low": None}
        rows += [own | {"tokens": tokens, "loss": _fine(course[tokens])} for tokens in shown]
    return rows


def _fine(value: float) -> float:
    """As finely as anybody sees."""
    return float(f"{value:.5g}")

"""What a sweep says, as tables for a person."""

import math
from collections.abc import Sequence
from typing import Any

from qkablate.analysis.comparison.audit import BROKEN, MARKS, NOTE, OK, WARNING, Check, worst
from qkablate.analysis.stats import ALPHA
from qkablate.report.text.distance import apart_table
from qkablate.report.text.table import Table
from qkablate.table import counted, nats, short, some


def tables(found: dict[str, Any]) -> list[Table]:
    """Of what `summary.describe` found."""
    shown = [_arms(found["arms"])]
    by_baseline: dict[str, list[dict[str, Any]]] = {}
    for one in found["gaps"]:
        by_baseline.setdefault(one["baseline"], []).append(one)
    floors = {floor["baseline"]: floor for floor in found["noise_floor"]}
    shown += [_gaps(name, gaps, floors[name]) for name, gaps in by_baseline.items()]
    shown += [_ranking(one) for one in found["rankings"] if len(one["ranks"]) > 1]
    if found["learning_rates"]:
        shown.append(_rates(found["learning_rates"]))
    if found["curves"]:
        shown.append(_curves(found["curves"]))
    shown += [apart_table(one) for one in found["function_distance"]]
    shown += [
        _series(along, rows)
        for along in ("tokens", "parameters")
        if (rows := [one for one in found["series"] if one["along"] == along])
    ]
    if found["fronts"]:
        shown.append(_fronts(found["fronts"]))
    return shown


def _arms(arms: list[dict[str, Any]]) -> Table:
    rows = []
    for arm in arms:
        every = [
            f"{run['test_loss']:.4f}" if run["test_loss"] is not None else f"({run['status']})"
            for run in arm["runs"]
        ]
        cells = [arm["arm"], f"{arm['params']:,}", _number(arm["lr"], ".3g")]
        cells += [f"{arm['n']}/{len(arm['runs'])}", _number(arm["mean"]), _number(arm["sd"])]
        rows.append([*cells, _interval(arm["interval"], ".4f"), " ".join(every) or "none yet"])
    return Table(
        "test loss, nats per token",
        ["arm", "params", "lr", "done", "mean", "sd", "95 % interval", "every run"],
        rows,
        ["params without embeddings; the interval is Student's, of the mean over seeds"],
        ("every run",),
    )


def _gaps(baseline: str, gaps: list[dict[str, Any]], floor: dict[str, Any]) -> Table:
    head = ["arm", "params", "n", "gap", "95 % interval", "perplexity", "p (Holm)"]
    head += ["detectable", "says"]
    head += ["BCa", "sign flip", "audit"]
    margin = gaps[0]["margin"]
    if margin is not None:
        size = f"{margin['nats']:g}"
        head[-3:-3] = [f"p of ≥ {size}", f"p of beyond ± {size}", f"seeds for ± {size}"]
    rows = []
    for one in gaps:
        percent = one["perplexity_percent"]
        cells = [
            one["arm"],
            percent_more(one["params_percent"]),
            str(one["n"]),
            _signed(one["mean"]),
            _interval(one["interval"]),
        ]
        cells += ["–" if percent is None else f"{percent:+.2f} %", _p(one["p_holm"])]
        cells += [_number(one["detectable"]), says(one)]
        if margin is not None:
            own = one["margin"]
            cells += [_p(own["p_noninferior"]), _p(own["p_equivalent"]), _seeds(own)]
        cells += [_interval(one["bca"]), _p(one["sign_flip"])]
        state = worst([Check(**check) for check in one["audit"]])
        rows.append([*cells, state if state == OK else f"{MARKS[state]} {state}"])
    notes = []
    spread, rounding = floor["seeds_sd"], floor["rounding"]
    if spread is not None:
        notes.append(f"between seeds {baseline} spreads by ± {spread:.4f}")
    if rounding and rounding["interval"]:
        notes.append(
            f"rounding alone (standard_reassociated): {_signed(rounding['mean'])}"
            f" {_interval(rounding['interval'])}, ± {rounding['sd']:.4f} a pair"
        )
    first = gaps[0]
    if any(one["n"] < one["sign_flip_speaks_from"] for one in gaps):
        notes.append(
            f"the sign-flip test can speak from n = {first['sign_flip_speaks_from']} on"
            f" ({counted(first['comparisons'], 'comparison')})"
        )
    correlations = [one["correlation"] for one in gaps if one["correlation"] is not None]
    if correlations:
        low, high = min(correlations), max(correlations)
        to = f" to {high:+.2f}" if len(correlations) > 1 else ""
        notes.append(f"correlation of the pairs: {low:+.2f}{to}")
    notes += _warnings(gaps)
    return Table(f"gaps to {baseline}, paired by seed", head, rows, notes)


_START = ("start", NOTE)  # the only note that no column shows


def _warnings(gaps: list[dict[str, Any]]) -> list[str]:
    """What the audits found, each said once, with the arms it is said of."""
    said: dict[tuple[str, str, str], list[str]] = {}
    for one in gaps:
        for check in one["audit"]:
            if check["state"] in (WARNING, BROKEN) or (check["name"], check["state"]) == _START:
                own = check["says"].replace(one["arm"], "the arm")
                said.setdefault((check["state"], check["name"], own), []).append(one["arm"])
    return [
        f"{MARKS[state]} {name}: {text}" + (f" ({some(arms)})" if len(gaps) > 1 else "")
        for (state, name, text), arms in said.items()
    ]


def _seeds(margin: dict[str, Any]) -> str:
    if margin["p_noninferior"] is None:
        return "–"
    return str(margin["seeds_needed"] or "too many")


def says(one: dict[str, Any]) -> str:
    if one["arm_diverged"]:
        return "diverges"
    if one["baseline_diverged"]:
        return "baseline diverges"
    if one["interval"] is None:
        return "a number" if one["n"] else "nothing"
    if one["p_holm"] is not None and one["p_holm"] < ALPHA:
        return "worse" if one["mean"] > 0 else "better"
    margin = one["margin"] or {}
    for key, word in (("p_equivalent", "equivalent"), ("p_noninferior", "not worse")):
        if margin.get(key) is not None and margin[key] < ALPHA:
            return word
    return "none found"


def _ranking(ranking: dict[str, Any]) -> Table:
    rows = []
    for row in ranking["ranks"]:
        first, last = row["best_rank"], row["worst_rank"]
        rank = f"{first}" if first == last else f"{first} to {last}"
        rows.append([row["arm"], rank, f"{row['mean']:.4f}", str(row["n"])])
    what = {"tokens": "tokens", "params": "parameters", "flops": "training FLOPs"}[ranking["equal"]]
    return Table(
        f"ranks at equal {what}, beside {ranking['size']}",
        ["arm", "rank", "mean", "n"],
        rows,
        ["ranks that every pair's t test leaves possible, by Holm over all pairs"]
        + [f"not ranked: {line}" for line in ranking["unranked"]],
    )


def _rates(found: list[dict[str, Any]]) -> Table:
    head = ["arm", "best lr", "least at", "95 % interval", "off by up to 4 ×"]
    head += ["gap at default", "95 % interval", "gap at best", "95 % interval", ""]
    rows = []
    for one in found:
        cells = [one["arm"], _number(one["best"], ".3g"), _number(one["optimum"], ".3g")]
        cells += [_interval(one["optimum_interval"], ".3g"), _number(one["sensitivity"])]
        for key in ("gap_at_default", "gap_at_best"):
            own = one[key] or {"mean": None, "interval": None}
            cells += [_signed(own["mean"]), _interval(own["interval"])]
        rows.append([*cells, "! on the edge" if one["on_the_edge"] else ""])
    return Table(
        "learning rates, by validation loss",
        head,
        rows,
        [
            f"default: {', '.join(sorted({_number(one['default'], '.3g') for one in found}))}",
            "least at: of a parabola in ln lr, the interval by Fieller; off by up to 4 ×: what"
            " missing the best costs on average",
            "the gaps are paired by the seeds that serve to tune, on validation",
        ],
    )


def _curves(found: list[dict[str, Any]]) -> Table:
    rows = []
    for one in found:
        readings = one["readings"]
        picked = [readings[0], readings[len(readings) // 2], readings[-1]]
        own = one["growth_per_doubling"]
        cells = [one["arm"]]
        cells += [
            f"{short(r['tokens'])}: {_signed(r['mean'])} {_interval(r['band'])}" for r in picked
        ]
        rows.append([*cells, _signed(own["mean"]), _interval(own["interval"])])
    return Table(
        "validation gap while training",
        ["arm", "first reading", "middle", "last", "growth", "95 % interval"],
        rows,
        [
            "bands hold at all readings at once; growth: change of the gap over the last doubling"
            " of tokens",
            "in the middle of a schedule these describe, and decide nothing",
        ],
    )


def _series(along: str, found: list[dict[str, Any]]) -> Table:
    what = "equivalent_tokens" if along == "tokens" else "equivalent_parameters"
    rows = []
    for one in found:
        points = " ".join(f"{short(p['at'])}: {_signed(p['mean'])}" for p in one["points"])
        own, worth = one["growth_per_doubling"] or {"mean": None, "interval": None}, one[what]
        cells = [one["arm"], points, _signed(own["mean"]), _interval(own["interval"])]
        if isinstance(worth, str):
            cells += [worth, ""]
        else:
            cells += [f"× {worth['times']:.3f}", _interval(worth["interval"], ".3f")]
        rows.append(cells)
    unit = "tokens" if along == "tokens" else "parameters"
    return Table(
        f"gap by {unit}, each run with a whole schedule",
        ["arm", f"gap at {unit}", "per doubling", "95 % interval", f"worth, in {unit}", "interval"],
        rows,
        [
            f"worth: how many times its {unit} the baseline needs for the same loss; measured from"
            " three points on"
        ],
    )


def _fronts(found: list[dict[str, Any]]) -> Table:
    rows = []
    longest = max(front["tokens"] for front in found)
    beaten = []
    for front in [front for front in found if front["tokens"] == longest]:
        beaten += [
            f"{arm['arm']} ({front['cost']})"
            for arm in front["arms"]
            if arm["surely"] and not arm["on_front"]
        ]
        for arm in front["arms"]:
            if arm["on_front"] or not arm["surely"]:
                mark = "front" if arm["on_front"] else "beaten by the mean alone"
                cost = f"{short(arm['cost'])} {front['cost']}"
                rows.append([arm["arm"], cost, f"{arm['mean']:.4f}", mark])
    return Table(
        f"what no other arm beats at less cost, at {short(longest)} tokens",
        ["arm", "cost", "mean test loss", ""],
        rows,
        [f"surely beaten: {some(beaten, 6)}"] * bool(beaten)
        + ["time is shown with --times FILE, from `qkablate cost --measure --json`"],
    )


def _number(value: float | None, form: str = ".4f") -> str:
    return "–" if value is None else format(value, form)


def percent_more(value: float | None) -> str:
    return "–" if value is None else f"{value:+z.1f} %"


def _signed(value: float | None) -> str:
    return "–" if value is None else nats(value)


def _interval(value: Sequence[float] | None, form: str = "") -> str:
    if value is None or not all(map(math.isfinite, value)):
        return "–"
    low, high = (format(end, form) if form else nats(end) for end in value)
    return f"[{low}, {high}]"


def _p(value: float | None) -> str:
    return "–" if value is None else "< 0.0001" if value < 1e-4 else f"{value:.4f}"

"""Tables of scaling laws, and of what an arm is worth by them."""

from collections.abc import Iterable, Sequence
from math import inf

from qkablate.analysis.comparison.summary import GapSummary
from qkablate.analysis.scaling.compute_gain import Gain, LawSummary, ScalingSummary
from qkablate.analysis.scaling.law import REACH
from qkablate.analysis.stats import Estimate
from qkablate.report.text.numbers import format_gap
from qkablate.report.text.table import Table, format_interval
from qkablate.table import format_short

_HEAD = ["arm", "baseline", "at N × D", "compute", "95 % interval", "parameters", "95 % interval"]
_HEAD += ["tokens", "95 % interval", "gap at ∞ tokens", "seeds"]
_LAW_HEAD = ["arm", "E", "A", "α", "B", "β", "residual", "SE of a loss", "held out", "largest miss"]
_BAD_FIT = 3  # standard errors of a loss, from which on the residual is pointed out


def make_scaling_tables(
    summaries: Sequence[ScalingSummary], gaps: Iterable[GapSummary]
) -> list[Table]:
    """Return what each arm is worth, and the laws that this is read from.

    What the audit of the gap at the largest size and length warns of holds for its worth, too.
    """
    if not summaries:
        return []
    warned = {gap.arm: [check for check in gap.audit if check.is_warning] for gap in gaps}
    rows, remarks = [], []
    for summary in summaries:
        at = f"{format_short(summary.params)} × {format_short(summary.tokens)}"
        cells = [summary.arm, summary.baseline, at]
        if summary.reason:
            remarks.append(f"{summary.arm}: no answer: {summary.reason}")
            cells += ["–"] * (len(_HEAD) - 4)
        else:
            for name, gain in summary.gains.items():
                at_less = name == "compute" and (summary.compute_flops or inf) < summary.flops
                cells += _format_gain(gain, "*" if at_less else "")
                if gain.times is None:
                    remarks.append(f"{summary.arm}, {name}: {gain.reason}")
                elif at_less:
                    remarks.append(
                        f"* {summary.arm}: for {format_short(summary.compute_flops or 0)}FLOP, the"
                        " largest budget tried for which the best sizes and lengths of both arms"
                        f" are, in every fit, within {REACH:g} times what was trained; for the"
                        f" {format_short(summary.flops)}FLOP of its largest run {gain.reason}"
                    )
            cells.append(_format_limit(summary.asymptote))
        rows.append([*cells, str(summary.seeds)])
    notes = [
        "how many times the arm's compute, parameters or tokens the baseline needs for the same"
        " loss; above 1 the arm saves. Compute: at equal FLOPs, each at its best size; the others:"
        " at N parameters and D tokens",
        "gap at ∞ tokens: an extrapolation that takes one exponent for both arms. Intervals:"
        " jackknife over seeds, and the error of tuning, but not that of a wrong form of the law",
    ]
    is_answered = any(gain.times is not None for s in summaries for gain in s.gains.values())
    notes = [*(notes if is_answered else []), *dict.fromkeys(remarks)]
    notes += [
        f"! {summary.arm}: {check.name}: {check.message}"
        for summary in summaries
        for check in warned.get(summary.largest, [])
        if summary.gains
    ]
    laws = [*dict.fromkeys(law for summary in summaries for law in summary.laws)]
    tables = [Table("what an arm is worth", _HEAD, rows, notes)]
    return [*tables, *([_law_table(laws)] if laws else [])]


def _format_limit(limit: Estimate | None) -> str:
    if limit is None or limit.mean is None:
        return "–"
    return format_gap(limit.mean, limit.interval)


def _format_gain(gain: Gain, mark: str) -> list[str]:
    if gain.times is None:
        return ["–", ""]
    return [f"× {gain.times:.3f}{mark}", format_interval(gain.interval, ".3f")]


def _law_table(laws: Sequence[LawSummary]) -> Table:
    rows = [
        [
            law.arm,
            f"{law.irreducible:.3f}",
            f"{law.size_term:.3g}",
            f"{law.size_exponent:.3f}",
            f"{law.token_term:.3g}",
            f"{law.token_exponent:.3f}",
            *(f"{x:.4f}" for x in (law.residual, law.error)),
            f"{law.held_out_miss:+.4f}",
            f"{law.held_out_largest:.4f}",
        ]
        for law in laws
    ]
    held_out = " or ".join(dict.fromkeys(law.held_out for law in laws))
    notes = [
        "L = E + A·N^−α + B·D^−β, by robust least squares; N: parameters without embeddings, D:"
        " tokens",
        f"held out: mean loss minus prediction, fitted without {held_out}",
    ]
    notes += [
        f"! {law.arm}: the law misses its losses by {law.residual / law.error:.0f} standard errors:"
        " it does not hold here, and no interval counts that"
        for law in laws
        if law.error and law.residual > _BAD_FIT * law.error
    ]
    return Table("scaling laws of the test loss", _LAW_HEAD, rows, notes)

"""Tables of scaling laws, and of what an arm is worth by them."""

from collections.abc import Sequence

from qkablate.analysis.scaling.compute_gain import Gain, LawSummary, ScalingSummary
from qkablate.report.text.numbers import format_gap
from qkablate.report.text.table import Table, format_interval
from qkablate.table import format_short

_HEAD = ["arm", "compute", "95 % interval", "parameters", "95 % interval", "tokens"]
_HEAD += ["95 % interval", "gap at ∞ tokens", "seeds"]
_LAW_HEAD = ["arm", "E", "A", "α", "B", "β", "residual", "SE of a loss", "held out", "largest miss"]


def make_scaling_tables(summaries: Sequence[ScalingSummary]) -> list[Table]:
    """Return what each arm is worth, and the laws that this is read from."""
    if not summaries:
        return []
    rows, unknown = [], []
    for summary in summaries:
        if summary.reason:
            rows.append([summary.arm, *["–"] * (len(_HEAD) - 2), str(summary.seeds)])
            unknown.append(f"{summary.arm}: no answer: {summary.reason}")
            continue
        cells = [summary.arm]
        for name, gain in summary.gains.items():
            cells += _format_gain(gain)
            if gain.times is None:
                unknown.append(f"{summary.arm}, {name}: {gain.reason}")
        ends = summary.asymptote
        gap = "–" if ends is None or ends.mean is None else format_gap(ends.mean, ends.interval)
        rows.append([*cells, gap, str(summary.seeds)])
    first = summaries[-1]
    at = f"{format_short(first.params)} parameters and {format_short(first.tokens)} tokens"
    notes = [
        f"how many times as much {first.baseline} needs for the same loss: above 1 the arm saves;"
        f" read at {at}, with the best size at equal compute",
        "gap at ∞ tokens: an extrapolation, with one exponent for both arms. Intervals: jackknife"
        " over seeds; that a law may be the wrong one is not in them",
        *dict.fromkeys(unknown),
    ]
    laws = {law.arm: law for summary in summaries for law in summary.laws}
    tables = [Table("what an arm is worth", _HEAD, rows, notes)]
    return [*tables, *([_law_table([*laws.values()])] if laws else [])]


def _format_gain(gain: Gain) -> list[str]:
    if gain.times is None:
        return ["–", ""]
    return [f"× {gain.times:.3f}", format_interval(gain.interval, ".3f")]


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
        f"held out: mean loss minus prediction, fitted without {held_out}; a residual far above"
        " the standard error means that the law does not hold here",
    ]
    return Table("scaling laws of the test loss", _LAW_HEAD, rows, notes)

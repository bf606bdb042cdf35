"""Audit of a comparison: checks of everything besides the arm that may have moved the gap."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from qkablate.analysis.comparison.gaps import Gap
from qkablate.analysis.comparison.lr_curves import LrCurve, is_bracketed
from qkablate.analysis.study.study import Entry, Record
from qkablate.config import OptimConfig
from qkablate.table import format_list

ANNEALED = 0.1  # of the peak: largest final learning rate of an annealed run
TOLERANCE = 0.01  # relative difference of parameters or FLOPs that counts as matched

# In order: fine; worth knowing; may have moved the gap; not comparable.
STATES = OK, NOTE, WARNING, BROKEN = "ok", "note", "warning", "broken"
MARKS = {OK: "", NOTE: "·", WARNING: "!", BROKEN: "✗"}


@dataclass(frozen=True)
class AuditCheck:
    """Answer to one question of the audit."""

    name: str
    state: str  # one of STATES
    message: str


def is_annealed(optim: OptimConfig) -> bool:
    """Return whether a whole run ends at a small learning rate."""
    ends = optim.schedule != "wsd" or optim.cooldown != 0
    return ends and optim.lr_final <= ANNEALED


def audit(
    gap: Gap,
    curves: dict[str, LrCurve],
    *,
    axis: str,
    margin: float | None,
    rounding_gap: Gap | None,
    detectable: float | None = None,
) -> list[AuditCheck]:
    """Audit one gap.

    `axis` is what was held equal. Effects are compared with the margin or, without one, with the
    smallest `detectable` gap.
    """
    sides = (gap.arm, gap.baseline)
    pairs = [(gap.arm.records[key], gap.baseline.records[key]) for key in gap.pairs]
    done = [record for pair in pairs for record in pair]
    return [
        _complete(sides),
        _paired(gap),
        _rates(sides, curves, margin or detectable),
        _annealed(sides),
        _matched(gap, axis),
        _start(gap),
        _alike("precision", done, WARNING),
        _alike("data_fingerprint", done, BROKEN, name="data"),
        _code(pairs),
        _machine(pairs),
        _kernel(gap, done, margin, detectable, rounding_gap),
    ]


def worst_state(checks: list[AuditCheck]) -> str:
    """Return the worst state of the checks."""
    return max((check.state for check in checks), key=STATES.index, default=OK)


def _complete(sides: tuple[Entry, ...]) -> AuditCheck:
    missing = []
    broken = False
    for entry in sides:
        if entry.rate is None:
            missing.append(f"{entry.name}: no learning rate was chosen")
        for status in ("diverged", "failed", "damaged", "interrupted", "running", "waiting"):
            if records := entry.with_status(status):
                seeds = ", ".join(record.seed for record in records)
                missing.append(f"{entry.name}: {len(records)} {status} ({seeds})")
                broken |= status == "damaged"
    if missing:
        return AuditCheck("runs", BROKEN if broken else WARNING, "; ".join(missing))
    return AuditCheck("runs", OK, f"all {sum(len(entry.records) for entry in sides)} are done")


def _paired(gap: Gap) -> AuditCheck:
    n = len(gap.pairs)
    if gap.unpaired:
        return AuditCheck("pairs", WARNING, f"{n}, and unpaired {'; '.join(gap.unpaired)}")
    if n < 2:
        return AuditCheck("pairs", WARNING, f"{n}: a single number, not a comparison")
    correlation = gap.correlation
    known = "" if correlation is None else f", correlation {correlation:+.2f}"
    return AuditCheck("pairs", OK, f"{n} by seed{known}")


def _rates(
    sides: tuple[Entry, ...], curves: dict[str, LrCurve], margin: float | None
) -> AuditCheck:
    states = {entry.name: is_bracketed(entry, curves) for entry in sides}
    untuned = [name for name, state in states.items() if state is None]
    nowhere = [e.name for e in sides if e.arm.name in curves and curves[e.arm.name].best is None]
    if nowhere:
        says = f"{' and '.join(nowhere)} diverged at every rate or has missing runs"
        return AuditCheck("learning rate", WARNING, says)
    edge = [name for name, state in states.items() if state is False]
    if edge:
        return AuditCheck(
            "learning rate", WARNING, f"the best of {' and '.join(edge)} is on the edge"
        )
    if untuned:
        rates = ", ".join(map(_rate, sides))
        which = "neither was" if len(untuned) == len(sides) else f"{untuned[0]} was not"
        return AuditCheck("learning rate", WARNING, f"{which} tuned ({rates})")
    off = []
    for entry in sides:
        curve = curves[entry.arm.name]
        if curve.best is not None and entry.rate is not None and curve.best != entry.rate:
            off.append(f"{entry.name} runs at {entry.rate:.3g}, best is {curve.best:.3g}")
    if off:
        return AuditCheck("learning rate", WARNING, "; ".join(off))
    if any(entry.rate is None for entry in sides):
        return AuditCheck(
            "learning rate", WARNING, f"not chosen yet: {', '.join(map(_rate, sides))}"
        )
    said = ", ".join(f"{entry.name} {_rate(entry)}" for entry in sides)
    said = f"tuned and bracketed: {said}"
    short = [curves[e.arm.name].excess_loss(e.rate) for e in sides if e.rate is not None]
    known = [cost for cost in short if cost is not None]
    if known:
        said += f"; a finer search would gain {max(known):.4f} at most"
    # An excess that shows as 0.0000 is rounding, also where seeds agree exactly.
    coarse = margin is not None and known and max(known) > max(margin / 3, 5e-5)
    return AuditCheck("learning rate", WARNING if coarse else OK, said)


def _rate(entry: Entry) -> str:
    return "–" if entry.rate is None else f"{entry.rate:.3g}"


def _annealed(sides: tuple[Entry, ...]) -> AuditCheck:
    high = [entry.name for entry in sides if not is_annealed(entry.arm.config.optim)]
    if high:
        return AuditCheck(
            "annealed", WARNING, f"the learning rate of {' and '.join(high)} is not annealed"
        )
    lengths = {entry.tokens for entry in sides}
    if len(lengths) > 1:
        lengths_text = " against ".join(f"{entry.tokens:,}" for entry in sides)
        return AuditCheck(
            "annealed", NOTE, f"whole schedules of different lengths: {lengths_text} tokens"
        )
    return AuditCheck("annealed", OK, f"whole schedules of {lengths.pop():,} tokens")


def _matched(gap: Gap, axis: str) -> AuditCheck:
    arm, baseline = gap.arm.arm, gap.baseline.arm
    if not arm.params or not baseline.params:
        return AuditCheck("matched", WARNING, "sizes are unknown: no run has a result")
    differ = {
        "params": arm.params / baseline.params - 1,
        "training FLOPs": arm.flops / baseline.flops - 1,
    }
    said = ", ".join(
        f"equal {what}" if value == 0 else f"{what} {value:+.1%}" for what, value in differ.items()
    )
    held = {"params": "params", "flops": "training FLOPs"}.get(axis)
    if held is None:
        return AuditCheck(
            "matched", NOTE if any(differ.values()) else OK, f"at equal tokens: {said}"
        )
    state = OK if abs(differ[held]) <= TOLERANCE else WARNING
    return AuditCheck("matched", state, said)


def _start(gap: Gap) -> AuditCheck:
    words = []
    state = OK
    for entry in (gap.arm, gap.baseline):
        config = entry.arm.config.variant
        matches = {str(record.facts["init"].get("match")) for record in entry.with_status("done")}
        match = "/".join(sorted(matches)) or "unknown"
        if config.init == "naive":
            state = WARNING
            words.append(f"{entry.name} naive")
        elif match != "exact":
            # An arm whose start cannot be matched is what it is; it is not the form alone.
            own = NOTE if match == "spread" else WARNING
            state = max(state, own, key=STATES.index)
            words.append(f"{entry.name} {match}")
        if config.lr == "same" and gap.arm.arm.config.variant.lr != "same":
            words.append(f"{entry.name} at the same rate")
    return AuditCheck(
        "start", state, "matched: " + ", ".join(words) if words else "matched exactly"
    )


def _alike(key: str, records: list[Record], state: str, name: str = "") -> AuditCheck:
    values = {str(record.facts.get(key)) for record in records}
    if len(values) > 1:
        return AuditCheck(name or key, state, f"mixed: {', '.join(sorted(values))}")
    if values == {"None"}:
        return AuditCheck(name or key, WARNING, "unknown")
    if not values:
        return AuditCheck(name or key, NOTE, "unknown: no pairs")
    return AuditCheck(name or key, OK, values.pop()[:16])


def _code(pairs: list[tuple[Record, Record]]) -> AuditCheck:
    return _same_in_pairs("code", pairs, lambda r: f"{r.facts['code']} (torch {r.facts['torch']})")


def _machine(pairs: list[tuple[Record, Record]]) -> AuditCheck:
    def machine(record: Record) -> str:
        by = ", by oneDNN" if record.facts["matmul"] == "onednn" else ""
        return f"{record.facts['device']} ({record.facts['cpu'] or 'unknown'}){by}"

    return _same_in_pairs("machine", pairs, machine)


def _same_in_pairs(
    name: str, pairs: list[tuple[Record, Record]], of: Callable[[Record], str]
) -> AuditCheck:
    """Check a circumstance that must be equal within each pair.

    If it varies from pair to pair, it only adds to the spread.
    """
    mixed = sum(of(run) != of(other) for run, other in pairs)
    values = sorted({of(record) for pair in pairs for record in pair})
    if mixed:
        return AuditCheck(
            name, WARNING, f"{mixed} of {len(pairs)} pairs are mixed: {format_list(values, 3)}"
        )
    if len(values) > 1:
        return AuditCheck(
            name, WARNING, f"{len(values)}, each pair of one: {format_list(values, 3)}"
        )
    return (
        AuditCheck(name, OK, values[0]) if values else AuditCheck(name, NOTE, "unknown: no pairs")
    )


def _kernel(
    gap: Gap,
    done: list[Record],
    margin: float | None,
    detectable: float | None,
    rounding_gap: Gap | None,
) -> AuditCheck:
    kernels = sorted({str(record.facts["kernel"]) for record in done})
    if len(kernels) < 2:
        known = AuditCheck("kernel", OK, kernels[0]) if kernels else None
        return known or AuditCheck("kernel", NOTE, "unknown: no pairs")
    names = " and ".join(kernels)
    variants = {gap.arm.arm.variant, gap.baseline.arm.variant}
    if variants == {"standard", "standard_reassociated"}:
        return AuditCheck("kernel", OK, f"{names}; this gap measures the effect of rounding")
    bounds = rounding_gap.bounds(0.90) if rounding_gap is not None else None
    if bounds is None:
        return AuditCheck("kernel", WARNING, f"{names}; no arm measures the effect of rounding")
    most = max(map(abs, bounds))
    if not math.isfinite(most):
        return AuditCheck("kernel", WARNING, f"{names}; the runs that measure rounding diverged")
    size = margin or detectable
    if size is None:
        return AuditCheck("kernel", NOTE, f"{names}; rounding moves the gap by at most {most:.4f}")
    state = OK if most < size / 3 else WARNING
    of = f"the margin is {margin:g}" if margin else f"{size:.4f} is detectable"
    return AuditCheck(
        "kernel", state, f"{names}; rounding moves the gap by at most {most:.4f}, {of}"
    )

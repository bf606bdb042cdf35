"""Whether a comparison was fair: a list of checks, for machines and for the eye, beside every
number that it could have moved.
"""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass

from qkablate.analysis.comparison.gaps import Gap
from qkablate.analysis.comparison.lr_curves import Bowl, bracketed
from qkablate.analysis.study.study import Entry, Record
from qkablate.config import OptimConfig
from qkablate.table import some

ANNEALED = 0.1  # of the peak: what a learning rate has to come down to
TOLERANCE = 0.01  # of parameters or FLOPs, to be called matched

# Fine; worth knowing; it may have moved the number; not to be compared.
STATES = OK, NOTE, WARNING, BROKEN = "ok", "note", "warning", "broken"
MARKS = {OK: "", NOTE: "·", WARNING: "!", BROKEN: "✗"}


@dataclass(frozen=True)
class Check:
    """One question of the audit, and what the runs answer."""

    name: str
    state: str  # one of STATES
    says: str

    def as_json(self) -> dict[str, str]:
        return asdict(self)


def is_annealed(optim: OptimConfig) -> bool:
    """Whether a run that is done has come down to a small learning rate."""
    ends = optim.schedule != "wsd" or optim.cooldown != 0
    return ends and optim.lr_final <= ANNEALED


def audit(
    found: Gap,
    bowls: dict[str, Bowl],
    *,
    axis: str,
    margin: float | None,
    twin: Gap | None,
    least: float | None = None,
) -> list[Check]:
    """Of one gap. `axis` is what was held equal; `twin` is that size's gap by rounding alone.
    Without a margin, what matters is measured by the `least` gap that could have been found.
    """
    sides = (found.arm, found.baseline)
    pairs = [(found.arm.records[key], found.baseline.records[key]) for key in found.pairs]
    done = [record for pair in pairs for record in pair]
    return [
        _complete(sides),
        _paired(found),
        _rates(sides, bowls, margin or least),
        _annealed(sides),
        _matched(found, axis),
        _start(found),
        _alike("precision", done, WARNING),
        _alike("data_fingerprint", done, BROKEN, name="data"),
        _code(pairs),
        _machine(pairs),
        _kernel(found, done, margin, least, twin),
    ]


def worst(checks: list[Check]) -> str:
    return max((check.state for check in checks), key=STATES.index, default=OK)


def _complete(sides: tuple[Entry, ...]) -> Check:
    missing = []
    broken = False
    for entry in sides:
        if entry.rate is None:
            missing.append(f"{entry.name}: no learning rate was chosen")
        for status in ("diverged", "failed", "damaged", "interrupted", "running", "waiting"):
            if records := entry.having(status):
                seeds = ", ".join(record.seed for record in records)
                missing.append(f"{entry.name}: {len(records)} {status} ({seeds})")
                broken |= status == "damaged"
    if missing:
        return Check("runs", BROKEN if broken else WARNING, "; ".join(missing))
    return Check("runs", OK, f"all {sum(len(entry.records) for entry in sides)} are done")


def _paired(found: Gap) -> Check:
    n = len(found.pairs)
    if found.unpaired:
        return Check("pairs", WARNING, f"{n}, and unpaired {'; '.join(found.unpaired)}")
    if n < 2:
        return Check("pairs", WARNING, f"{n}: a number, not a comparison")
    correlation = found.correlation
    known = "" if correlation is None else f", correlation {correlation:+.2f}"
    return Check("pairs", OK, f"{n} by seed{known}")


def _rates(sides: tuple[Entry, ...], bowls: dict[str, Bowl], margin: float | None) -> Check:
    states = {entry.name: bracketed(entry, bowls) for entry in sides}
    untuned = [name for name, state in states.items() if state is None]
    nowhere = [e.name for e in sides if e.arm.name in bowls and bowls[e.arm.name].best is None]
    if nowhere:
        says = f"{' and '.join(nowhere)} diverged at every rate, or its runs are missing"
        return Check("learning rate", WARNING, says)
    edge = [name for name, state in states.items() if state is False]
    if edge:
        return Check("learning rate", WARNING, f"the best of {' and '.join(edge)} is on the edge")
    if untuned:
        rates = ", ".join(map(_rate, sides))
        which = "neither was" if len(untuned) == len(sides) else f"{untuned[0]} was not"
        return Check("learning rate", WARNING, f"{which} tuned ({rates})")
    off = []
    for entry in sides:
        bowl = bowls[entry.arm.name]
        if bowl.best is not None and entry.rate is not None and bowl.best != entry.rate:
            off.append(f"{entry.name} runs at {entry.rate:.3g}, best is {bowl.best:.3g}")
    if off:
        return Check("learning rate", WARNING, "; ".join(off))
    if any(entry.rate is None for entry in sides):
        return Check("learning rate", WARNING, f"not chosen yet: {', '.join(map(_rate, sides))}")
    said = ", ".join(f"{entry.name} {_rate(entry)}" for entry in sides)
    said = f"tuned and bracketed: {said}"
    short = [bowls[e.arm.name].short_of(e.rate) for e in sides if e.rate is not None]
    known = [cost for cost in short if cost is not None]
    if known:
        said += f"; a finer search would gain {max(known):.4f} at most"
    coarse = margin is not None and known and max(known) > margin / 3
    return Check("learning rate", WARNING if coarse else OK, said)


def _rate(entry: Entry) -> str:
    return "–" if entry.rate is None else f"{entry.rate:.3g}"


def _annealed(sides: tuple[Entry, ...]) -> Check:
    high = [entry.name for entry in sides if not is_annealed(entry.arm.config.optim)]
    if high:
        return Check("annealed", WARNING, f"the rate of {' and '.join(high)} does not come down")
    lengths = {entry.tokens for entry in sides}
    if len(lengths) > 1:
        told = " against ".join(f"{entry.tokens:,}" for entry in sides)
        return Check("annealed", NOTE, f"whole schedules of different lengths: {told} tokens")
    return Check("annealed", OK, f"whole schedules of {lengths.pop():,} tokens")


def _matched(found: Gap, axis: str) -> Check:
    one, other = found.arm.arm, found.baseline.arm
    if not one.params or not other.params:
        return Check("matched", WARNING, "sizes not known: no run has a result")
    differ = {
        "params": one.params / other.params - 1,
        "training FLOPs": one.flops / other.flops - 1,
    }
    said = ", ".join(
        f"equal {what}" if value == 0 else f"{what} {value:+.1%}" for what, value in differ.items()
    )
    held = {"params": "params", "flops": "training FLOPs"}.get(axis)
    if held is None:
        return Check("matched", NOTE if any(differ.values()) else OK, f"at equal tokens: {said}")
    state = OK if abs(differ[held]) <= TOLERANCE else WARNING
    return Check("matched", state, said)


def _start(found: Gap) -> Check:
    words = []
    state = OK
    for entry in (found.arm, found.baseline):
        config = entry.arm.config.variant
        matches = {str(record.facts["init"].get("match")) for record in entry.having("done")}
        match = "/".join(sorted(matches)) or "not known"
        if config.init == "naive":
            state = WARNING
            words.append(f"{entry.name} naive")
        elif match != "exact":
            # An arm whose start cannot be matched is what it is; it is not the form alone.
            own = NOTE if match == "spread" else WARNING
            state = max(state, own, key=STATES.index)
            words.append(f"{entry.name} {match}")
        if config.lr == "same" and found.arm.arm.config.variant.lr != "same":
            words.append(f"{entry.name} at the same rate")
    return Check("start", state, "matched: " + ", ".join(words) if words else "matched exactly")


def _alike(key: str, records: list[Record], state: str, name: str = "") -> Check:
    values = {str(record.facts.get(key)) for record in records}
    if len(values) > 1:
        return Check(name or key, state, f"mixed: {', '.join(sorted(values))}")
    if values == {"None"}:
        return Check(name or key, WARNING, "not known")
    if not values:
        return Check(name or key, NOTE, "not known: no pairs")
    return Check(name or key, OK, values.pop()[:16])


def _code(pairs: list[tuple[Record, Record]]) -> Check:
    return _same_in_pairs("code", pairs, lambda r: f"{r.facts['code']} (torch {r.facts['torch']})")


def _machine(pairs: list[tuple[Record, Record]]) -> Check:
    def machine(record: Record) -> str:
        by = ", by oneDNN" if record.facts["products"] == "onednn" else ""
        return f"{record.facts['device']} ({record.facts['cpu'] or 'not known'}){by}"

    return _same_in_pairs("machine", pairs, machine)


def _same_in_pairs(
    name: str, pairs: list[tuple[Record, Record]], of: Callable[[Record], str]
) -> Check:
    """A pair computed by two versions differs in more than its arm; versions that change from pair
    to pair add to the spread alone.
    """
    torn = sum(of(one) != of(other) for one, other in pairs)
    values = sorted({of(record) for pair in pairs for record in pair})
    if torn:
        return Check(name, WARNING, f"{torn} of {len(pairs)} pairs are mixed: {some(values, 3)}")
    if len(values) > 1:
        return Check(name, WARNING, f"{len(values)}, each pair of one: {some(values, 3)}")
    return Check(name, OK, values[0]) if values else Check(name, NOTE, "not known: no pairs")


def _kernel(
    found: Gap, done: list[Record], margin: float | None, least: float | None, twin: Gap | None
) -> Check:
    kernels = sorted({str(record.facts["kernel"]) for record in done})
    if len(kernels) < 2:
        known = Check("kernel", OK, kernels[0]) if kernels else None
        return known or Check("kernel", NOTE, "not known: no pairs")
    told = " and ".join(kernels)
    variants = {found.arm.arm.variant, found.baseline.arm.variant}
    if variants == {"standard", "standard_reassociated"}:
        return Check("kernel", OK, f"{told}; what rounding is worth is what is measured here")
    bounds = twin.bounds(0.90) if twin is not None else None
    if bounds is None:
        return Check("kernel", WARNING, f"{told}; no arm here says what rounding is worth")
    most = max(map(abs, bounds))
    if not math.isfinite(most):
        return Check("kernel", WARNING, f"{told}; what rounding is worth diverged")
    size = margin or least
    if size is None:
        return Check("kernel", NOTE, f"{told}; rounding is worth {most:.4f} at most")
    state = OK if most < size / 3 else WARNING
    of = f"the margin is {margin:g}" if margin else f"{size:.4f} could have been found"
    return Check("kernel", state, f"{told}; rounding is worth {most:.4f} at most, {of}")

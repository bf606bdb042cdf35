"""Audit of a comparison: checks of everything besides the arm that may have moved the gap."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from qkablate.analysis.comparison.decision import BEFORE_NGRAMS, WITHOUT_CONTENT, RateScope
from qkablate.analysis.comparison.gaps import MARGINS, ROUNDING_PAIR, Gap, is_sensitive
from qkablate.analysis.comparison.lr_curves import LrCurve
from qkablate.analysis.stats import ALPHA, MIN_PAIRS
from qkablate.analysis.study.study import Entry, Record
from qkablate.config import TEXT_SOURCES, OptimConfig
from qkablate.config.data import PAIRS_OF_FILES, PREPARED_SOURCES
from qkablate.config.variant import SITES, variant_sites
from qkablate.runs.records import is_number
from qkablate.sweeps.planning.floors import floor_sites, is_position_only
from qkablate.sweeps.planning.manifest import FLOOR, POSITION
from qkablate.sweeps.planning.surface import excess_bound
from qkablate.sweeps.planning.tuning_losses import OUTLIER, SOLVED
from qkablate.table import format_count, format_list

ANNEALED = 0.1  # of the peak: largest final learning rate of an annealed run
_MANY = 0.25  # of an arm's runs: as many failures are no rare ones
_LEAST_ERROR = 5e-5  # of an error over documents: a smaller one shows as 0.0000
TOLERANCE = 0.01  # relative difference of parameters or FLOPs that counts as matched

# Names of what an error over documents is over, where it is no document of a text.
_DOCUMENTS = {**dict.fromkeys(PAIRS_OF_FILES, "files"), "pairs": "pairs"}

# In order: fine; worth knowing; may have moved the gap; not comparable.
STATES = OK, NOTE, WARNING, INVALID = "ok", "note", "warning", "invalid"
MARKS = {OK: "", NOTE: "·", WARNING: "!", INVALID: "✗"}
Sides = tuple[Entry, Entry]  # arm and baseline
Pairs = list[tuple[Record, Record]]
Answer = tuple[str, str]  # state and message
_NO_PAIRS = (NOTE, "unknown: no pairs")


@dataclass(frozen=True)
class AuditCheck:
    """Answer to one question of the audit."""

    name: str
    state: str  # one of STATES
    message: str

    @property
    def is_warning(self) -> bool:
        return self.state in (WARNING, INVALID)


def is_annealed(optim: OptimConfig) -> bool:
    """Return whether a whole run ends at a small learning rate."""
    ends = optim.schedule == "cosine" or (optim.schedule == "wsd" and optim.cooldown != 0)
    return ends and optim.lr_final <= ANNEALED


def audit(
    gap: Gap,
    curves: dict[str, LrCurve],
    axis: str,
    margin: float | None,
    rounding_gap: Gap | None,
    detectable: float | None = None,
    *,
    in_claim: bool = False,
) -> list[AuditCheck]:
    """Audit one gap at equal `axis`; the margin, or else `detectable`, is the size that matters.

    A claim's own keys are named in place of the sweep's.
    """
    sides, pairs = gap.sides, gap.runs
    done = [record for pair in pairs for record in pair]
    answers = {
        "runs": _check_completeness(sides),
        "pairs": _check_pairs(gap, in_claim),
        "learning rate": _check_rates(gap, curves, margin or detectable, in_claim),
        "annealed": _check_annealing(sides),
        "optimizer": _check_optimizer(gap, curves),
        "matched": _check_matching(sides, axis),
        "initialization": _check_initialization(sides),
        "floor": _check_floor(gap, margin),
        "content": _check_content(gap, margin),
        "n-grams": _check_ngrams(gap),
        "precision": _check_equality("precision", done, WARNING),
        "data": _check_equality("data_fingerprint", done, INVALID),
        "documents": _check_documents(gap, done, margin),
        "code": _check_equality_in_pairs(
            pairs, lambda r: f"{r.facts['code']} (torch {r.facts['torch']})"
        ),
        "machine": _check_equality_in_pairs(pairs, _format_machine),
        "kernel": _check_kernel(sides, done, margin, detectable, rounding_gap),
    }
    return [AuditCheck(name, *answer) for name, answer in answers.items()]


# What a warning limits a decision to.
LIMITS = {
    "learning rate": RateScope.THESE_RATES,
    "documents": "on these documents",
    "content": WITHOUT_CONTENT,
    "n-grams": BEFORE_NGRAMS,
    "extrapolation": "if both arms level off with one exponent",
}


def find_limits(checks: Iterable[AuditCheck]) -> list[str]:
    """Return what the audit limits a decision to."""
    warned = {check.name for check in checks if check.is_warning}
    return [words for name, words in LIMITS.items() if name in warned]


def group_checks(checks: Iterable[tuple[str, AuditCheck]]) -> dict[AuditCheck, list[str]]:
    """Return each distinct check with the names of the arms or parts that it is about."""
    groups: dict[AuditCheck, list[str]] = {}
    for name, check in checks:
        groups.setdefault(check, []).append(name)
    return groups


def worst_state(checks: Iterable[AuditCheck]) -> str:
    """Return the worst state of the checks."""
    return max((check.state for check in checks), key=STATES.index, default=OK)


def _check_completeness(sides: Sides) -> Answer:
    missing = []
    for entry in sides:
        if entry.rate is None:
            missing.append(f"{entry.name}: no learning rate was chosen")
        for status in ("diverged", "failed", "damaged", "interrupted", "running", "waiting"):
            if records := entry.with_status(status):
                seeds = format_list([record.seed_label for record in records])
                missing.append(f"{entry.name}: {len(records)} {status} ({seeds})")
    if missing:
        is_invalid = any(entry.with_status("damaged") for entry in sides)
        return INVALID if is_invalid else WARNING, "; ".join(missing)
    return OK, f"all {sum(len(entry.records) for entry in sides)} are done"


def _check_pairs(gap: Gap, in_claim: bool) -> Answer:
    n = len(gap.pairs)
    if gap.unpaired:
        return WARNING, f"{n}; runs without a partner: {_group_by_reason(gap.unpaired)}"
    if n < MIN_PAIRS and in_claim:  # whose seeds are declared
        missing = [f"{entry.name} has none" for entry in gap.sides if not entry.records]
        return WARNING, "; ".join([f"{n}, but {MIN_PAIRS} are needed", *missing])
    if n < MIN_PAIRS:
        more = "more seeds: 'seed=range(6)'"
        if gap.arm.arm.is_finetuned:
            more = "more trained runs, or more seeds of an imported one: 'seed=range(6)'"
        return WARNING, f"{n}, but {MIN_PAIRS} are needed; {more}"
    known = "" if (correlation := gap.correlation) is None else f", correlation {correlation:+z.2f}"
    return OK, f"{n} by seed{known}"


def _group_by_reason(unpaired: Iterable[str]) -> str:
    """Return the seeds without a partner by the reason, from lines `seed: reason`."""
    seeds: dict[str, list[str]] = {}
    for seed, _, reason in (line.partition(": ") for line in unpaired):
        seeds.setdefault(reason, []).append(seed)
    return "; ".join(f"{format_list(labels)}: {reason}" for reason, labels in seeds.items())


def _check_rates(
    gap: Gap, curves: dict[str, LrCurve], margin: float | None, in_claim: bool
) -> Answer:
    sides = gap.sides
    tune, more = "sweep.tune=true", "give more sweep.tuning_seeds"
    if in_claim:
        tune, more = "tuning_seeds: 3", "raise tuning_seeds"
    tuned = {entry.name: curves[entry.arm.name] for entry in sides if entry.arm.name in curves}
    if unknown := " and ".join(name for name, curve in tuned.items() if curve.best is None):
        return WARNING, f"{unknown} diverged at every rate or has missing runs"
    if missing := [entry.name for entry in sides if entry.rates is None]:
        return WARNING, f"not chosen yet: that of {' and '.join(missing)}"
    if edge := " and ".join(name for name, curve in tuned.items() if curve.is_on_edge):
        text = f"the best rate of {edge} is on the edge of those tried, or beside one that diverged"
        how = "" if in_claim else "; optim.lr=RATE gives others"
        return WARNING, f"{text}: a better one may lie outside{how}"
    rates = {entry.name: str(entry.rates) for entry in sides}
    if untuned := [name for name in rates if name not in tuned]:
        which = "neither was" if not tuned else f"{untuned[0]} was not"
        how = f"{tune} tunes both"
        if any(entry.arm.is_finetuned for entry in sides):
            how = "try others with optim.lr=RATE"
        return WARNING, f"{which} tuned ({', '.join(rates.values())}); {how}"
    off = [entry for entry in sides if not tuned[entry.name].is_tuned(entry.rates)]
    if off:
        words = (f"{e.name} runs at {e.rates}, best is {tuned[e.name].best}" for e in off)
        return WARNING, "; ".join(words)
    if fixed := " and ".join(name for name, curve in tuned.items() if curve.lacks_circuit_rates):
        text = f"optim.lr was tuned, but not the rate of the circuit of {fixed} (variant.lr)"
        return WARNING, f"{text}; {tune} without variant.lr tunes both"
    uncertain, unsolved, excess = list[str](), list[str](), [0.0]
    for entry in sides:
        curve, records = tuned[entry.name], entry.records.values()
        surface = curve.surface
        if entry.rates in curve.solved:
            missed = sum((record.val or 0.0) > SOLVED + OUTLIER for record in records)
            if missed:
                unsolved.append(f"{missed} of {len(records)} runs of {entry.name}")
        elif surface is None or not surface.is_certain or entry.rates is None:
            uncertain.append(entry.name)
        else:
            excess.append(excess_bound(curve.losses, entry.rates))
    runs = [sum(map(len, tuned[entry.name].losses.values())) for entry in sides]
    message = f"tuned and bracketed: {', '.join(f'{e.name} {rates[e.name]}' for e in sides)}"
    message += f", by {runs[0]:,} and {runs[1]:,} runs"
    if failed := [f"{name}: {len(c.outliers)}" for name, c in tuned.items() if c.outliers]:
        message += f"; rates left out, at which a run was an outlier: {', '.join(failed)}"
    if unsolved:
        message += f"; solved in tuning, but not by {' and '.join(unsolved)}"
    if uncertain:
        message += f"; no minimum is certain for {' and '.join(uncertain)}"
    if not unsolved and (failures := _describe_failures(gap.runs, sides, tuned)):
        unsolved.append(failures)
        message += f"; {failures}"
    if unsolved or uncertain:
        return WARNING, f"{message}: {more}"
    message += f"; a finer search would gain {max(excess):.4f} at most (95 % bound)"
    # An excess that shows as 0.0000 is rounding, also where seeds agree exactly.
    coarse = margin is not None and max(excess) > max(margin / 3, 5e-5)
    if coarse:
        return (
            WARNING,
            f"{message}, more than a third of {margin:.3g}, the least that counts: {more}",
        )
    return OK, message


def _describe_failures(pairs: Pairs, sides: Sides, tuned: dict[str, LrCurve]) -> str:
    """Return in how many pairs an arm ends far above what tuning led to expect, if in many.

    A search on few seeds may choose rates at which most others fail. What a pair's seed does to
    both of its runs cancels.
    """
    losses = [entry.rates and tuned[entry.name].loss_near(entry.rates) for entry in sides]
    if losses[0] is None or losses[1] is None:
        return ""
    expected = losses[0] - losses[1]
    vals = [(run.val, other.val) for run, other in pairs]
    excess = [a - b - expected for a, b in vals if a is not None and b is not None]
    for entry, sign in zip(sides, (1, -1), strict=True):
        failed = sum(sign * value > OUTLIER for value in excess)
        if failed > _MANY * len(excess):
            text = f"{entry.name} ends {OUTLIER:g} or more above what tuning led to expect"
            return f"{text} in {failed} of {len(excess)} pairs"
    return ""


def _check_annealing(sides: Sides) -> Answer:
    if high := [entry.name for entry in sides if not is_annealed(entry.arm.config.optim)]:
        text = f"the learning rate of {' and '.join(high)} is not annealed; optim.schedule=cosine"
        return WARNING, f"{text} with optim.lr_final={ANNEALED} or less anneals it"
    lengths = dict.fromkeys(f"{entry.tokens:,}" for entry in sides)
    if len(lengths) > 1:
        return NOTE, f"whole schedules of different lengths: {' against '.join(lengths)} tokens"
    return OK, f"whole schedules of {', '.join(lengths)} tokens"


def _check_optimizer(gap: Gap, curves: dict[str, LrCurve]) -> Answer:
    """Return whether both sides have one optimizer, and which rates are matched for another one."""
    names = [entry.arm.config.optim.optimizer for entry in gap.sides]
    if names[0] != names[1]:
        text = f"{names[0]} against {names[1]}"
        if not gap.compares_attention:
            return OK, text
        return WARNING, f"{text}: another optimizer may be what moved the gap"
    matched = " and ".join(e.name for e in gap.sides if _has_matched_rate(e, curves))
    if names[0] == "muon" and matched:
        text = f"the circuit's rate of {matched} was not tuned, and is matched for AdamW"
        return NOTE, f"muon; {text} (docs/matching.md)"
    return OK, names[0]


def _has_matched_rate(entry: Entry, curves: dict[str, LrCurve]) -> bool:
    """Return whether the rate of an arm's circuit follows from AdamW's first step alone."""
    curve = curves.get(entry.arm.name)
    is_untuned = curve is None or curve.lacks_circuit_rates
    asked = entry.arm.overrides.get("variant.lr", "between")
    return is_untuned and entry.arm.matched_lr != 1 and asked in ("matched", "between")


def _check_matching(sides: Sides, axis: str) -> Answer:
    arm, baseline = (entry.arm for entry in sides)
    if not arm.params or not baseline.params:
        return WARNING, "sizes are unknown: no run has a result"
    params, flops = arm.params / baseline.params - 1, arm.flops / baseline.flops - 1
    excess = {"params": params, "training FLOPs": flops}
    message = ", ".join(
        f"{k} {value:+.1%}" if value else f"equal {k}" for k, value in excess.items()
    )
    rotated = [_format_rotated(entry) for entry in sides]
    differs = rotated[0] != rotated[1]
    message += "; RoPE rotates {} in the arm and {} in the baseline".format(*rotated) * differs
    held = {"params": "params", "flops": "training FLOPs"}.get(axis)
    if held is None:
        return NOTE if any(excess.values()) or differs else OK, f"at equal tokens: {message}"
    if abs(excess[held]) > TOLERANCE:
        return WARNING, message
    return NOTE if differs else OK, message


def _format_rotated(entry: Entry) -> str:
    """Format which dimensions rope rotates: all of a head, or a few of the variant's own."""
    config = entry.arm.config
    if config.model.position != "rope":
        return "nothing"
    dims, sites = config.variant.rope_dims, variant_sites(config.variant, config.model)
    if dims is None:
        return "whole heads"
    at = "" if sites == SITES[config.model.form] else f" in the {' and '.join(sites)}"
    return f"{dims} separate dimensions of a head{at}"


def _check_initialization(sides: Sides) -> Answer:
    texts, rated = [], []
    state = OK
    for entry in sides:
        config = entry.arm.config.variant
        matches = {str(record.facts["init"].get("match")) for record in entry.with_status("done")}
        match = "/".join(sorted(matches)) or "unknown"
        if entry.arm.is_finetuned:
            pass  # its start is that of a trained run
        elif config.init == "naive":
            state = WARNING
            texts.append(f"{entry.name} not matched (variant.init=naive)")
        elif match != "exact":
            # An arm whose start cannot be matched is what it is; it is not the form alone.
            state = max(state, NOTE if match == "spread" else WARNING, key=STATES.index)
            how = {
                "spread": "in standard deviation alone",
                "none": "not matched",
                "None": "unknown",
            }.get(match, match)
            texts.append(f"{entry.name} {how}")
        rates = [record.facts["lr"] for record in entry.with_status("done")]
        known = [rate for rate in rates if is_number(rate.get("factor"))]
        unmatched = {rate["factor"] for rate in known if rate["factor"] != rate.get("matched")}
        if unmatched:
            factors = ", ".join(f"{factor:.3g}" for factor in sorted(unmatched))
            rated.append(f"circuit's rate of {entry.name} × {factors}")
    matched = f"match of initial scores and outputs to standard's: {', '.join(texts) or 'exact'}"
    if any(entry.arm.is_finetuned for entry in sides):
        matched = "projected from trained runs"
    return state, "; ".join([matched, *rated])


def _check_floor(gap: Gap, margin: float | None) -> Answer:
    """Compare the baseline with uniform attention, which it has to beat."""
    if not gap.compares_attention:
        return OK, "not needed: the same attention"
    if gap.floor is None:
        words = _reference_words(FLOOR, gap)
        text = f"no arm with {words} in the baseline's setting"
        text += " (in a sweep, sweep.floor=true trains one)"
        return NOTE if margin is None else WARNING, text
    name, baseline = gap.floor.arm.name, gap.baseline.name
    if gap.floor.baseline_diverged:
        return WARNING, f"unknown: {_format_diverged(gap.floor)}"
    if gap.lead is None:
        return WARNING, f"unknown: fewer than two pairs with {name}"
    if gap.is_at_floor:
        text = f"{baseline} does not clearly beat {name}: finding no difference would mean nothing"
        return WARNING, f"{text}; raise train.steps"
    text = f"{baseline} beats {name} by {gap.lead:.4f} or more"
    if is_sensitive(gap.lead, margin or 0.0):
        return OK, text
    return WARNING, f"{text}, less than {MARGINS} margins of {margin:g}"


def _format_diverged(reference: Gap) -> str:
    runs = format_count(reference.baseline_diverged, "run")
    return f"{runs} of {reference.baseline.name} diverged, so that its mean has no bound"


def _reference_words(variant: str, gap: Gap) -> str:
    """Return the arguments that make a variant the reference of a gap."""
    sites = floor_sites(gap.arm.arm, gap.baseline.arm)
    return f"variant={variant}" + f" variant.sites={sites}" * (sites not in (None, "all"))


def _check_content(gap: Gap, margin: float | None) -> Answer:
    """Compare the baseline with weights by position alone, which never look at a token."""
    if not gap.compares_attention:
        return OK, "not needed: the same attention"
    if any(is_position_only(entry.arm) for entry in gap.sides):
        return OK, "not needed: this is a comparison with weights by position"
    reference = gap.content
    if reference is not None and reference.baseline_diverged:
        return NOTE, f"unknown: {_format_diverged(reference)}"
    bounds = None if reference is None else reference.bounds(1 - 2 * ALPHA)
    if reference is None or bounds is None:
        if gap.arm.arm.is_finetuned:
            return NOTE, "unknown: trained runs cannot begin with weights by position"
        words = _reference_words(POSITION, gap)
        return NOTE, f"unknown: no {words}, weights by position alone, in the baseline's setting"
    text = f"{reference.arm.name}, weights by position alone, is {reference.sample.mean:+.4f}"
    text += f" [{bounds[0]:+.4f}, {bounds[1]:+.4f}] relative to {reference.baseline.name}"
    text += gap.content_source
    if bounds[0] <= 0:
        return WARNING, f"{text}: raise train.steps, or take a task that needs content"
    if is_sensitive(bounds[0], margin or 0.0):
        return OK, text
    return NOTE, f"{text}, less than {MARGINS} margins of {margin:g}"


def _check_ngrams(gap: Gap) -> Answer:
    """Compare the baseline with n-grams, which need no attention."""
    name, lead = gap.baseline.name, gap.baseline.lead_over_ngrams
    if lead is None:
        done = gap.baseline.with_status("done")
        if any(record.facts["objective"] == "mlm" for record in done):
            return OK, "n-grams do not predict masked tokens"
        if any(record.facts["source"] in TEXT_SOURCES for record in done):
            return NOTE, f"unknown: no n-grams were measured beside {name}"
        return (OK, "not a text") if done else _NO_PAIRS
    if lead > 0:
        return OK, f"{name} beats the best n-gram by {lead:.4f}"
    text = f"{name} does not beat the best n-gram ({-lead:.4f} above it)"
    return (WARNING, f"{text}: raise train.steps") if gap.is_before_attention else (NOTE, text)


def _check_equality(key: str, records: list[Record], state: str) -> Answer:
    values = {str(record.facts.get(key)) for record in records}
    if len(values) > 1:
        return state, f"mixed: {', '.join(sorted(values))}"
    if values == {"None"}:
        return WARNING, "unknown"
    return (OK, values.pop()[:16]) if values else _NO_PAIRS


def _check_documents(gap: Gap, done: list[Record], margin: float | None) -> Answer:
    """Compare the error over documents, which no interval over seeds includes."""
    source = next((record.facts["source"] for record in done), None)
    if source not in PREPARED_SOURCES:
        return (OK, "a task, without documents") if done else _NO_PAIRS
    error = gap.document_error
    if error is None:
        return NOTE, "unknown: one document, or runs that did not record their losses by document"
    documents = f"{error.documents} test {_DOCUMENTS.get(source, 'documents')}"
    message = f"the gap's standard error over {documents} is {error.se:.4f}"
    low, high = gap.bounds() or (0.0, math.inf)
    sizes = {"margin": margin, "interval's half width": (high - low) / 2}
    for name, size in sizes.items():
        if size is not None and error.se > max(size / 3, _LEAST_ERROR):
            message += f", more than a third of the {name} ({size:.4f})"
            is_part = any(record.facts["test_tokens"] is not None for record in done)
            remedy = "train.test_tokens=all reads more" if is_part else "raise data.test_tokens"
            return WARNING, f"{message}: {remedy}"
    return OK, message


def _format_machine(record: Record) -> str:
    by = ", by oneDNN" if record.facts["matmul"] == "onednn" else ""
    name = record.facts["gpu"] or record.facts["cpu"] or "unknown"
    return f"{record.facts['device']} ({name}){by}"


def _check_equality_in_pairs(pairs: Pairs, describe: Callable[[Record], str]) -> Answer:
    """Check what must be equal in each pair; from pair to pair it only adds to the spread."""
    mixed = sum(describe(run) != describe(other) for run, other in pairs)
    values = sorted({describe(record) for pair in pairs for record in pair})
    if mixed:
        return WARNING, f"different in {mixed} of {len(pairs)} pairs: {format_list(values, 3)}"
    if len(values) > 1:
        return WARNING, f"the same within each pair: {format_list(values, 3)}"
    return (OK, values[0]) if values else _NO_PAIRS


def _check_kernel(
    sides: Sides,
    done: list[Record],
    margin: float | None,
    detectable: float | None,
    rounding_gap: Gap | None,
) -> Answer:
    kernels = sorted({str(record.facts["kernel"]) for record in done})
    if len(kernels) < 2:
        return (OK, kernels[0]) if kernels else _NO_PAIRS
    names = " and ".join(kernels)
    if {entry.arm.variant for entry in sides} == ROUNDING_PAIR:
        return OK, f"{names}; this gap measures the effect of rounding"
    bounds = rounding_gap.bounds(0.90) if rounding_gap is not None else None
    if bounds is None:
        text = "variant=standard_reassociated would measure the effect of rounding"
        return WARNING, f"{names}; {text}"
    most = max(map(abs, bounds))
    if not math.isfinite(most):
        return WARNING, f"{names}; the runs that measure rounding diverged"
    message = f"{names}; rounding moves the gap by at most {most:.4f}"
    size = margin or detectable
    if size is None:
        return NOTE, message
    limit = f"the margin, {margin:g}" if margin else f"the detectable gap, {size:.4f}"
    is_less = most < size / 3
    than = "less" if is_less else "not less"
    return OK if is_less else WARNING, f"{message}, {than} than a third of {limit}"

"""Format what the variants of a claim cost: positive is worse, whatever a part compares."""

import math
from collections import Counter

from qkablate.analysis.claims.claim import PartSpec, Selector
from qkablate.analysis.claims.judgement import PartJudgement
from qkablate.analysis.claims.measures import Unit
from qkablate.report.study.claims import StudiedClaim

LEVEL = 0.9  # of the intervals, whatever a claim is judged at
_ALL = 0.9995  # of the answers, as shown to a tenth of a percent


def format_costs(studied: StudiedClaim, most: int) -> list[str]:
    """Return what the variants of the parts cost, with intervals; of `most` parts, or one more.

    The parts with the verdict of the claim come first; another has its verdict beside it. A margin
    and a gain of attention that all parts share are in a line of their own.
    """
    judged, parts = studied.judgement, studied.deciding
    # A line for one more says less than its cost.
    shown, hidden = (parts, []) if len(parts) <= most + 1 else (parts[:most], parts[most:])
    costs = [_format_cost(part, _name_in_row(studied, part)) for part in shown]
    facts = [_format_facts(part) for part in shown]
    are_shared = len(shown) > 1 and len({*facts}) == 1
    lines = []
    for part, cost, own in zip(shown, costs, facts, strict=True):
        line = cost if are_shared or not own else f"{cost}, {own}"
        lines.append(line + (f" ({part.word})" if part.word != judged.word else ""))
    if hidden:
        others = Counter(part.word for part in hidden)
        words = [word if len(others) == 1 else f"{count} {word}" for word, count in others.items()]
        is_told = [*others] == [judged.word]
        lines.append(f"{others.total()} more" + ("" if is_told else f": {', '.join(words)}"))
    return [*lines, facts[0]] if are_shared and facts[0] else lines


def _name_in_row(studied: StudiedClaim, judged: PartJudgement) -> str:
    """Return what a part compares, without the only data set of its claim."""
    name, dataset = name_part(studied, judged), judged.comparison.dataset
    are_several = len({part.comparison.dataset for part in studied.judgement.parts}) > 1
    return name if are_several else name.replace(f" on {dataset}", "", 1)


def name_part(studied: StudiedClaim, judged: PartJudgement) -> str:
    """Return what a part compares, with its settings if the claim compares it at several."""
    own, dataset = judged.comparison.part, judged.comparison.dataset
    if sum(part.comparison.part == own for part in studied.judgement.parts) == 1:
        return format_compared(judged)
    settings = judged.part.name.removeprefix(own).removeprefix(f" on {dataset}")
    return format_compared(judged) + settings


def _format_cost(judged: PartJudgement, text: str) -> str:
    part, spec = judged.part, judged.comparison.spec
    if part.sample.interval(LEVEL) is None:
        return f"{text}: unknown"
    if is_at_ceiling(judged):
        return f"{text}: 0.000 accuracy lost, every run at {format_ceiling(judged)}"
    low, high = judged.interval(LEVEL)
    mean = judged.unit.natural(part.sample.mean)
    if judged.unit is Unit.RATIO:
        if has_other_sign(judged):
            mean, low, high = (1 / end if end else math.inf for end in (mean, high, low))
        value = f"{spec.measure.noun} × {mean:.3g} [{low:.3g}, {high:.3g}]"
    else:
        if has_other_sign(judged) and part.sample.is_signed:
            mean, low, high = -mean, -high, -low
        sign = "+" if part.sample.is_signed else ""
        value = f"{mean:{sign}.3f} [{low:{sign}.3f}, {high:{sign}.3f}] {_unit(spec)}"
    return f"{text}: {value}"


def _format_facts(judged: PartJudgement) -> str:
    """Return the margin and what attention gains; '' where no cost is measured in them."""
    spec, sample = judged.comparison.spec, judged.part.sample
    if sample.interval(LEVEL) is None or is_at_ceiling(judged):
        return ""
    facts = f"margin {spec.margin:g}"
    if judged.unit is Unit.RATIO or (worth := _attention_worth(judged)) is None:
        return facts
    # With standard as the arm, the floor was compared with the variant.
    if is_about_standard(spec):
        worth -= sample.mean
    return f"{facts}, attention {worth:.3f}"


def is_at_ceiling(judged: PartJudgement) -> bool:
    """Return whether a part is about accuracy, and every run of it answers everything."""
    records = [r for gap in judged.gaps for entry in gap.sides for r in entry.records.values()]
    is_of_accuracy = judged.comparison.spec.of == "accuracy"
    return is_of_accuracy and min(record.accuracy or 0 for record in records) > _ALL


def has_other_sign(judged: PartJudgement) -> bool:
    """Return whether + is better in the estimate of a part: standard's loss, or an accuracy."""
    return is_about_standard(judged.comparison.spec) != (judged.unit is Unit.SHARE)


def format_ceiling(judged: PartJudgement) -> str:
    """Return the accuracy of a part at the ceiling: exact, or rounded to a tenth of a percent."""
    return "100.0 %" if judged.part.sample.sd else "100 %"


def is_about_standard(spec: PartSpec) -> bool:
    """Return whether a part compares standard with a variant, and not a variant with standard."""
    return spec.arm.get("variant") == "standard" != spec.against.get("variant")


def format_compared(judged: PartJudgement) -> str:
    """Return the variant of a part, with what it is compared to unless that is standard."""
    spec = judged.comparison.spec
    text = _format_arms(spec)
    text += f" on {dataset}" if (dataset := judged.comparison.dataset) != "text" else ""
    return text + (f" at equal {spec.axis}" if spec.axis != "tokens" else "")


def _unit(spec: PartSpec) -> str:
    if spec.measure.unit is not Unit.NATS:
        return f"{spec.measure.noun} lost"
    nats = "nats" if spec.of == "gap" else f"nats ({spec.measure.noun})"
    return nats + {"growth": " per doubling of tokens", "asymptote": " (extrapolated)"}.get(
        spec.horizon, ""
    )


def _attention_worth(judged: PartJudgement) -> float | None:
    """Return what the baseline gains by attention, in the part's unit; None if it is unknown."""
    gap, measure = judged.gaps[0], judged.comparison.spec.measure
    is_plain = len(judged.gaps) == 1 and measure.name in ("gap", "train_loss", "accuracy", "exact")
    costs = [*measure.costs(gap.floor).values()] if is_plain and gap.floor is not None else []
    return math.fsum(costs) / len(costs) if costs else None


def _format_arms(spec: PartSpec) -> str:
    arm, against = (spec.arm, spec.against)
    if is_about_standard(spec):
        arm, against = against, arm
    is_plain = against.get("variant") == "standard" and all(
        arm.get(key, value) == value for key, value in against.items() if key != "variant"
    )
    if spec.than and is_plain:
        return f"cost of {_format_side(arm)} minus that with {_format_side(spec.than)}"
    if is_plain:
        return _format_side(arm)
    than = f" minus {_format_side(spec.than)}" if spec.than else ""
    shared = {key: value for key, value in arm.items() if against.get(key) == value}
    if shared.keys() in (arm.keys(), against.keys()):
        shared = {}  # one side has nothing but these
    arm, against = ({k: v for k, v in s.items() if k not in shared} for s in (arm, against))
    with_it = f" with {_format_side(shared)}" if shared else ""
    return f"{_format_side(arm)} against {_format_side(against)}{with_it}{than}"


def _format_side(side: Selector) -> str:
    words = []
    for key, value in side.items():
        shown = "null" if value is None else value
        words.append(f"{shown}" if key == "variant" else f"{key.rpartition('.')[-1]}={shown}")
    return " ".join(words)

"""Weights by position alone as a reference across claims: one trains them, and all are read by it.

Whether a baseline attends to more than positions is a property of the setting, not of a claim. So a
claim without `static_scores` among its arms takes the answer from another in the same setting.
"""

import dataclasses
from collections.abc import Iterable, Sequence

from qkablate.analysis.claims.judgement import Judgement, PartJudgement
from qkablate.analysis.comparison.audit import NOTE, AuditCheck, check_position
from qkablate.analysis.comparison.gaps import Gap, measure_gap
from qkablate.sweeps.planning.floors import floor_sites, is_position_only
from qkablate.sweeps.planning.manifest import Arm


# The gap of weights by position, and the claim it is from, by setting and sites.
References = dict[tuple[str, str], tuple[str, Gap]]


def share_position_references(judgements: Sequence[Judgement]) -> list[Judgement]:
    """Return the judgements, whose audits compare with weights by position of all the claims."""
    references = _find_references(judgements)
    return [
        dataclasses.replace(
            judgement, parts=[_compare_with_position(part, references) for part in judgement.parts]
        )
        for judgement in judgements
    ]


def _find_references(judgements: Iterable[Judgement]) -> References:
    """Return the gap of weights by position alone in each setting, with the claim's name."""
    references: References = {}
    for judgement in judgements:
        for entry in judgement.study.entries:
            baseline = judgement.study.baseline_of(entry)
            if is_position_only(entry.arm) and entry.arm.mismatch is None and baseline is not None:
                gap = measure_gap(entry, baseline)
                key = _setting_of(baseline.arm), _sites_of(gap)
                references[key] = judgement.claim.name, gap
    return references


def _compare_with_position(judged: PartJudgement, references: References) -> PartJudgement:
    checks = [_answer(check, judged, references) for check in judged.checks]
    return dataclasses.replace(judged, checks=checks)


def _answer(check: AuditCheck, judged: PartJudgement, references: References) -> AuditCheck:
    """Return the check, answered by another claim if this one's runs do not."""
    if (check.name, check.state) != ("position", NOTE):
        return check
    margin = judged.comparison.spec.margin_of_loss
    for gap in judged.gaps:
        for entry in gap.sides:
            if known := references.get((_setting_of(entry.arm), _sites_of(gap))):
                name, reference = known
                answer = check_position(gap, reference, margin, f" in the claim {name}")
                return AuditCheck(check.name, *answer)
    return check


def _sites_of(gap: Gap) -> str:
    """Return the sites at which the two sides differ."""
    return floor_sites(gap.arm.arm, gap.baseline.arm) or "all"


def _setting_of(arm: Arm) -> str:
    """Return what model, data and training are, without attention, seeds, rates and device."""
    config = arm.config
    optim = dataclasses.replace(config.optim, lr=0.0)
    train = config.train
    return str((config.model, config.data, optim, train.steps, train.batch_size, train.grad_accum))

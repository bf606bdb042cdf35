"""Weights by position alone as references across claims: one trains them, others are read by them.

Whether a baseline attends to content, and not to positions alone, is a property of the setting. So
a claim without `static_scores` among its arms takes the answer from another of the same setting.
"""

import dataclasses

from qkablate.analysis.claims.registry import find_registrations, registered_names
from qkablate.analysis.comparison.gaps import Gap, measure_gap
from qkablate.analysis.study.study import Entry, Study, read_study
from qkablate.config.variant import is_standard_attention
from qkablate.errors import UserError
from qkablate.sweeps.planning.floors import floor_sites, is_position_only
from qkablate.sweeps.planning.manifest import POSITION, Arm

# Gaps of weights by position, and the claims that have measured them, by setting and sites.
References = dict[tuple[str, str], tuple[str, Gap]]


def find_references(out: str) -> References:
    """Return the references that finished claims in a folder have measured."""
    references: References = {}
    for name in registered_names(out):
        try:
            registered = find_registrations(out, name)
            for one in (one for one in registered if POSITION in str(one.claim.grid)):
                looks = map(read_study, reversed(one.sweeps.values()))  # the most seeds first
                if (study := next((look for look in looks if look.is_complete), None)) is not None:
                    _add_references(references, name, study)
        except UserError:
            continue  # its own command says what is wrong with it
    return references


def _add_references(references: References, name: str, study: Study) -> None:
    for entry in study.entries:
        baseline = study.baseline_of(entry)
        if baseline is None or not is_position_only(entry.arm) or entry.arm.mismatch is not None:
            continue
        if is_standard_attention(baseline.arm.config.variant):
            gap = measure_gap(entry, baseline)
            key = _setting_of(baseline.arm), _sites_of(entry, baseline)
            if key not in references or references[key][1].sample.n < gap.sample.n:
                references[key] = name, gap


def add_reference(gap: Gap, study: Study, references: References) -> Gap:
    """Return the gap, with the reference of another claim if its own sweep has none."""
    key = _setting_of(study.own_size_of(gap.baseline)), _sites_of(gap.arm, gap.baseline)
    if gap.content is not None or key not in references:
        return gap
    name, reference = references[key]
    source = f" in the same setting (claim {name}"
    data = {_data_of(entry.arm) for entry in (gap.baseline, reference.baseline)}
    source += ", on another version of the data)" if len(data) > 1 else ")"
    return dataclasses.replace(gap, content=reference, content_source=source)


def _sites_of(arm: Entry, baseline: Entry) -> str:
    """Return the sites at which the two differ."""
    return floor_sites(arm.arm, baseline.arm) or "all"


def _data_of(arm: Arm) -> str:
    return str(arm.facts["data_fingerprint"])


def _setting_of(arm: Arm) -> str:
    """Return what model, data and training are, without attention, seeds, rates and device."""
    config = arm.config
    train = (config.train.steps, config.train.batch_size, config.train.grad_accum)
    optim = dataclasses.replace(config.optim, lr=0.0)
    return str((config.model, config.data, config.init_from, optim, train))

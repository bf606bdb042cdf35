"""A claim and its runs: the verdict, with the audit of every number it rests on and what it would
take to settle it.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from qkablate.analysis.claims.claim import Claim, Comparison, comparisons
from qkablate.analysis.claims.verdict import UNDERPOWERED, Part, Verdict, judge, spent
from qkablate.analysis.comparison.audit import BROKEN, Check, audit, worst
from qkablate.analysis.comparison.curves import slopes
from qkablate.analysis.comparison.gaps import Gap, gap
from qkablate.analysis.comparison.lr_curves import bowls
from qkablate.analysis.stats import ALPHA, Sample, Spread, detectable
from qkablate.analysis.study.study import Entry, Study

INCOMPLETE = "INCOMPLETE"


@dataclass(frozen=True)
class Judged:
    """One comparison, as a part of the claim."""

    part: Part
    comparison: Comparison
    gaps: list[Gap]
    checks: list[Check]


@dataclass(frozen=True)
class Judgement:
    claim: Claim
    study: Study
    n: int  # seeds of each arm that were asked for
    alpha: float
    verdict: Verdict | None  # None before all runs have ended
    judged: list[Judged]
    exploratory: list[str]  # why it is no confirmation

    @property
    def word(self) -> str:
        return self.verdict.word if self.verdict else INCOMPLETE

    @property
    def is_settled(self) -> bool:
        return self.verdict is not None and self.verdict.word != UNDERPOWERED

    def needed(self) -> dict[str, int | None]:
        """Of the parts that are not settled: seeds, at the gaps and spreads that were measured."""
        words = self.verdict.parts if self.verdict else []
        # At the α of this look: for a later one fewer would do.
        return {
            one.part.name: one.part.needed(self.alpha, len(self.judged))
            for one, word in zip(self.judged, words, strict=False)
            if word == UNDERPOWERED
        }


def judge_claim(claim: Claim, study: Study, exploratory: list[str]) -> Judgement:
    """What the runs of this sweep say of the claim, as it is worded now."""
    entries = {entry.arm.name: entry for entry in study.entries}
    found_bowls = bowls(study)
    judged = []
    for comparison in comparisons(claim, study.manifest.arms.values()):
        gaps = [gap(entries[one], entries[other]) for one, other in comparison.pairs]
        part = _part(comparison, gaps)
        checks = [
            audit(
                one,
                found_bowls,
                axis=comparison.spec.axis,
                # A growth is in nats per doubling, and says nothing of one length.
                margin=None if comparison.spec.horizon == "growth" else comparison.spec.margin,
                twin=_twin(one, study, entries),
            )
            for one in gaps
        ]
        judged.append(Judged(part, comparison, gaps, _together(checks)))
    n = _count(study)
    alpha = dict(zip(claim.seeds, spent(claim.seeds), strict=True)).get(n, ALPHA)
    reasons = list(exploratory)
    if not exploratory and not _has_its_seeds(claim, study, n):
        reasons.append("these runs do not have the seeds of its hash")
    if n not in claim.seeds:
        declared = " or ".join(map(str, claim.seeds))
        reasons.append(f"{n} seeds, and {declared} were declared")
    reasons += [
        f"{one.part.name}: {check.name}: {check.says}"
        for one in judged
        for check in one.checks
        if check.state == BROKEN
    ]
    verdict = judge([one.part for one in judged], alpha) if study.is_complete else None
    return Judgement(claim, study, n, alpha, verdict, judged, reasons)


def _has_its_seeds(claim: Claim, study: Study, n: int) -> bool:
    runs = study.manifest.finals or [run.changes for run in study.manifest.runs]
    tuning = {run.changes["seed"] for run in study.manifest.runs if run.tuning}
    return {one["seed"] for one in runs} == {*claim.seeds_of("final", n)} and tuning == {
        *claim.seeds_of("tuning", claim.tuning_seeds)
    }


def _count(study: Study) -> int:
    """Seeds of an arm, as the manifest has them."""
    if study.manifest.finals:
        return len(study.manifest.finals)
    first = study.manifest.runs[0].arm
    return sum(run.arm == first for run in study.manifest.runs)


def _part(comparison: Comparison, gaps: list[Gap]) -> Part:
    spec = comparison.spec
    if spec.of == "spread":
        spread = Spread(gaps[0].sample.values)
        diverged = bool(gaps[0].arm_diverged or gaps[0].baseline_diverged)
        return Part(comparison.name, spec.kind, spec.margin, spread, open_above=diverged)
    if spec.horizon != "growth":
        return Part.of(comparison.name, spec.kind, spec.margin, gaps[0])
    common = [key for key in gaps[0].pairs if all(key in one.pairs for one in gaps)]
    gaps_ST = np.array([[one.pairs[key] for one in gaps] for key in common])
    sample = slopes([one.arm.tokens for one in gaps], gaps_ST) if common else Sample(())
    # A run that diverged bends the line up or down, by where in it that run stands.
    diverged = any(one.arm_diverged or one.baseline_diverged for one in gaps)
    return Part(comparison.name, spec.kind, spec.margin, sample, diverged, diverged)


def _twin(found: Gap, study: Study, entries: dict[str, Entry]) -> Gap | None:
    """Standard attention against itself multiplied in another order, at the size of this gap."""
    sides = [found.arm.arm, found.baseline.arm]
    for arm in study.manifest.arms.values():
        if arm.variant == "standard_reassociated" and arm.baseline in {s.name for s in sides}:
            return gap(entries[arm.name], entries[arm.baseline])
    return None


def _together(audits: list[list[Check]]) -> list[Check]:
    """The audits of several gaps as one: of each check the worst answers, said once."""
    together = []
    for checks in zip(*audits, strict=True):
        state = worst([*checks])
        says = dict.fromkeys(check.says for check in checks if check.state == state)
        together.append(Check(checks[0].name, state, "; ".join(says)))
    return together


def describe(judgement: Judgement) -> dict[str, Any]:
    """For machines."""
    claim, verdict = judgement.claim, judgement.verdict
    words = verdict.parts if verdict else [INCOMPLETE] * len(judgement.judged)
    needed = judgement.needed()
    return {
        "claim": claim.name,
        "scale": claim.scale,
        "says": claim.says,
        "source": claim.source,
        "hash": claim.hash,
        "verdict": judgement.word,
        "exploratory": judgement.exploratory,
        "sweep": judgement.study.name,
        "seeds": judgement.n,
        "declared_seeds": [*claim.seeds],
        "alpha": judgement.alpha,
        "parts": [_describe_part(one, word, needed, judgement.alpha) for one, word in
                  zip(judgement.judged, words, strict=True)],
    }  # fmt: skip


def _describe_part(
    one: Judged, word: str, needed: dict[str, int | None], alpha: float
) -> dict[str, Any]:
    part, sample = one.part, one.part.sample
    interval = sample.interval(1 - 2 * alpha)
    return {
        "part": part.name,
        "verdict": word,
        "kind": part.kind,
        "margin": part.margin,
        "of": one.comparison.spec.of,
        "arms": [[*pair] for pair in one.comparison.pairs],
        "axis": one.comparison.spec.axis,
        "horizon": one.comparison.spec.horizon,
        "n": sample.n,
        "mean": sample.mean if sample.n else None,
        "sd": sample.sd,
        "interval": interval and [*interval],
        "interval_level": 1 - 2 * alpha,
        "p_supported": part.p_supported,
        "p_refuted": part.p_refuted,
        "bca": sample.bca and [*sample.bca],
        "sign_flip": sample.sign_flip,
        "detectable": None if sample.sd is None else detectable(sample.sd, sample.n, 2 * alpha),
        "seeds_needed": needed.get(part.name),
        "arm_diverged": sum(found.arm_diverged for found in one.gaps),
        "baseline_diverged": sum(found.baseline_diverged for found in one.gaps),
        "unpaired": [line for found in one.gaps for line in found.unpaired],
        "values": [*sample.values],
        "audit": [check.as_json() for check in one.checks],
    }

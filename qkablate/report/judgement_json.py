"""A judged claim as JSON values."""

import dataclasses

from qkablate.analysis.claims.judgement import Judgement, PartJudgement
from qkablate.analysis.comparison.decision import Verdict
from qkablate.analysis.stats import describe_sample


def judgement_to_json(judgement: Judgement) -> dict[str, object]:
    """Return the judgement as JSON values."""
    claim, verdict = judgement.claim, judgement.verdict
    verdicts = verdict.parts if verdict else [Verdict.INCOMPLETE] * len(judgement.parts)
    needed = judgement.seeds_needed()
    return {
        "claim": claim.name,
        "scale": claim.scale,
        "says": claim.says,
        "source": claim.source,
        "hash": claim.hash,
        "verdict": judgement.word,
        "scope": judgement.scope,
        "unless": judgement.unless,
        "exploratory": judgement.exploratory,
        "sweep": judgement.study.name,
        "seeds": judgement.n,
        "declared_seeds": [*claim.seeds],
        "alpha": judgement.alpha,
        "parts": [
            _part_to_json(judged, judgement.alpha)
            | {"verdict": verdict, "seeds_needed": needed.get(judged.part.name)}
            for judged, verdict in zip(judgement.parts, verdicts, strict=True)
        ],
    }


def _part_to_json(judged: PartJudgement, alpha: float) -> dict[str, object]:
    part, sample, spec = judged.part, judged.part.sample, judged.comparison.spec
    return {
        "part": part.name,
        "kind": part.kind,
        "margin": part.margin,
        "of": spec.of,
        "arms": judged.comparison.pairs,
        "axis": spec.axis,
        "horizon": spec.horizon,
        **vars(describe_sample(sample)),
        "interval": sample.interval(1 - 2 * alpha),
        "interval_level": 1 - 2 * alpha,
        "p_supported": part.p_supported,
        "p_refuted": part.p_refuted,
        "bca": sample.bca,
        "sign_flip": sample.sign_flip,
        "detectable": sample.detectable(2 * alpha),
        "arm_diverged": sum(gap.arm_diverged for gap in judged.gaps),
        "baseline_diverged": sum(gap.baseline_diverged for gap in judged.gaps),
        "arm_left_behind": sum(gap.arm_left_behind for gap in judged.gaps),
        "baseline_left_behind": sum(gap.baseline_left_behind for gap in judged.gaps),
        "unpaired": [line for gap in judged.gaps for line in gap.unpaired],
        "values": sample.values,
        "audit": [dataclasses.asdict(check) for check in judged.checks],
    }

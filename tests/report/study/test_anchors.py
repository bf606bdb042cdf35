"""Published results beside the study's own: they ask what a part of a claim asks."""

import math
import shlex
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from qkablate.analysis.claims.measures import Unit
from qkablate.analysis.claims.parse import load_claim
from qkablate.analysis.comparison.decision import Verdict
from qkablate.analysis.stats import Sample
from qkablate.compose.configs import make_config, open_hydra
from qkablate.compose.words import expand_words, split_words
from qkablate.report.study.anchors import (
    FINDINGS,
    find_outcome,
    find_part,
    format_anchors,
    load_anchors,
)
from qkablate.report.study.costs import is_at_ceiling
from qkablate.report.study.page import find_histories

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("anchor", load_anchors(), ids=lambda anchor: anchor.source[:12])
def test_anchor_names_a_part_of_a_claim_or_a_valid_command(anchor):
    assert anchor.found in (*FINDINGS, None)
    assert (anchor.claim is None) != (anchor.command is None)
    if anchor.claim is not None:
        part = load_claim(anchor.claim).parts[anchor.part]
        assert anchor.data in part.data if len(part.data) > 1 else anchor.data is None
        return
    verb, *words = shlex.split(anchor.command)[1:]
    assert verb in ("train", "sweep")
    with open_hydra():
        jobs = expand_words([word for word in words if not word.startswith("sweep.")])
        configs = [make_config(split_words(job), resolved=False) for job in jobs]
    assert (len(configs) > 1) == (verb == "sweep")


def judge(*values, margin=0.05, unit=Unit.NATS, open_above=False):
    part = SimpleNamespace(sample=Sample(values), open_above=open_above, open_below=False)
    spec = SimpleNamespace(margin=margin)
    return SimpleNamespace(part=part, unit=unit, comparison=SimpleNamespace(spec=spec))


def test_outcome_is_that_of_the_95_percent_interval_of_the_cost():
    assert find_outcome(judge(0.2, 0.21, 0.19, 0.2)) == "worse"
    assert find_outcome(judge(-0.2, -0.21, -0.19, -0.2)) == "better"
    assert find_outcome(judge(0.01, 0.011, 0.009, 0.01)) == "equal"
    assert find_outcome(judge(0.2, -0.2, 0.1, -0.1)) == "undecided"
    assert find_outcome(judge(0.01, 0.011, 0.009, 0.01, open_above=True)) == "worse"
    assert find_outcome(judge(0.2)) == "undecided"  # one pair has no interval
    costs = [math.log(1.04), math.log(1.041), math.log(1.039)]
    assert find_outcome(judge(*costs, margin=0.05, unit=Unit.RATIO)) == "equal"


def test_decided_claim_is_shown_though_a_later_one_is_begun(studied):
    """So is the claim at its own size, and not with the user's settings."""
    page = format_anchors(studied, set())
    anchored = {anchor.claim for anchor in load_anchors()}
    first = next(one for one in studied if one.claim.name in anchored and one.judgement.has_ended)
    begun = replace(first.judgement, word=Verdict.INCOMPLETE)
    later = replace(first.registration, when="2999")
    others = [
        replace(first, judgement=begun, registration=later),
        replace(first, registration=replace(later, claim=replace(first.claim, scale="gpu"))),
        replace(first, registration=replace(later, claim=replace(first.claim, words={"a": "1"}))),
    ]
    assert format_anchors([*others, *studied], set()) == page
    assert format_anchors([one for one in studied if one is not first] + others[:1], set()) != page


def test_figures_of_the_study_are_those_of_its_runs(studied):
    page = format_anchors(studied, find_histories(ROOT / "docs" / "study"))
    rows = [line for line in page.splitlines() if line.startswith("| ")][2:]
    assert len(rows) == len(load_anchors())
    known = {one.claim.name: one for one in studied}
    for anchor, row in zip(load_anchors(), rows, strict=True):
        if anchor.claim in known:
            part = find_part(known[anchor.claim], anchor)
            assert f"n = {part.part.sample.n}," in row
            if is_at_ceiling(part):  # then an interval would be of no width
                assert "| every run at 100 %, " in row
                assert row.endswith("| none seen |")
                continue
            assert f"{part.unit.natural(part.part.sample.mean) + 0.0:+.4f} [" in row
            assert row.endswith(f"| {find_outcome(part)} |")
        elif anchor.section is None:
            assert row.endswith("| not run |")
        else:
            assert f"(registrations.md#{anchor.section})" in row
        assert anchor.command is None or f"`{anchor.command}`" in page


def test_a_study_of_others_does_not_refer_to_sections_that_it_lacks():
    page = format_anchors([], [])
    assert "registrations.md#" not in page
    assert page.count("| not run |") == len(load_anchors())

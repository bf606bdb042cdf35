"""Tests of the costs of variants."""

import math
import re
from types import SimpleNamespace

import pytest

from qkablate.analysis.claims.claim import Comparison, PartSpec
from qkablate.analysis.claims.judgement import PartJudgement
from qkablate.analysis.claims.samples import Median
from qkablate.analysis.claims.verdict import Part
from qkablate.analysis.comparison.decision import Verdict
from qkablate.report.study.claims import StudiedClaim
from qkablate.report.study.costs import format_costs

TASKS = ("induction", "recall")


def test_parts_that_decide_a_claim_come_first(studied):
    ended = [one for one in studied if one.deciding]
    assert ended
    for one in ended:
        decides = [part.word == one.judgement.word for part in one.deciding]
        assert decides == sorted(decides, reverse=True)


def test_costs_are_those_of_the_variant_whatever_a_part_compares(studied):
    """A loss of standard less that of a variant, and an accuracy, change their sign."""
    costs = {one.claim.name: "; ".join(format_costs(one, 9)) for one in studied}
    for cost in (
        "shared_qk: +0.014 [+0.006, +0.022] nats",
        "no_o at equal params: +0.008 [+0.004, +0.012] nats",
    ):
        assert cost in costs["encoder_translation"]
    assert costs["encoder_translation"].endswith("; margin 0.005, attention 0.032")  # of both
    assert "shared_qk: +0.236 [+0.197, +0.274] accuracy lost" in costs["directed"]
    assert "tied_qkv: 0.000 accuracy lost, every run at 100 %" in costs["one_projection"]
    rounded = "no_q: 0.000 accuracy lost, every run at 100.0 %"  # one run misses one answer
    assert rounded in costs["where_content_matters"]
    difference = "cost of no_q sites=cross minus that with sites=decoder: -0.004"
    assert difference in costs["cross_needs_both"]
    last = "no_k: -0.002 [-0.007, +0.004] nats"  # its verdict is the claim's, and is not repeated
    assert costs["encoder_decoder"].endswith(f"{last}; margin 0.005, attention 0.737")


def test_margins_that_differ_stand_beside_their_parts(studied):
    (cost,) = (format_costs(one, 9) for one in studied if one.claim.name == "optimizer_matters")
    assert [re.findall(r"margin ([\d.]+)", line) for line in cost] == [["0.05"]] * 4 + [["0.02"]]


def test_only_so_many_parts_are_shown(studied):
    (directed,) = (one for one in studied if one.claim.name == "directed")
    *costs, facts = format_costs(directed, 4)
    assert len(costs) == 4
    assert format_costs(directed, 1) == [f"{costs[0]}, {facts}", "3 more"]
    (both,) = (one for one in studied if one.claim.name == "cross_needs_both")
    assert format_costs(both, 1) == format_costs(both, 4)  # "1 more" would say less
    assert format_costs(both, 1)[1].endswith(" (UNDERPOWERED)")
    assert format_costs(both, 1)[2].startswith("margin ")
    (one,) = (one for one in studied if one.claim.name == "one_matrix")
    assert format_costs(one, 1)[1] == "5 more: 4 REFUTED, 1 SUPPORTED"


def test_a_part_on_several_data_sets_names_each_once(studied):
    (one,) = (one for one in studied if one.claim.name == "one_matrix")
    names = [cost.partition(":")[0] for cost in format_costs(one, 9) if ":" in cost]
    both = [f"{variant} on {task}" for variant in ("shared_qk", "tied_qkv") for task in TASKS]
    assert sorted(names) == sorted(["shared_qk", "tied_qkv", *both])


def test_settings_of_both_sides_are_named_once(studied):
    (one,) = (one for one in studied if one.claim.name == "book_start")
    start = "init=naive against init=matched with qk=merged ov=no_o"
    assert start in [cost.partition(":")[0] for cost in format_costs(one, 9)]


@pytest.mark.parametrize(
    ("lowest", "shown"), [(-0.02, "× 2 [1.96, 2.04]"), (-math.inf, "× 2 [1.96, inf]")]
)
def test_a_ratio_is_that_of_the_variant_whatever_a_part_compares(lowest, shown):
    """If a step of standard takes half the time, one of the variant takes twice as long."""
    values = tuple(math.log(0.5) + shift for shift in (lowest, -0.01, 0.0, 0.01, 0.02))
    sides = {"variant": "standard"}, {"variant": "no_q"}
    spec = PartSpec("better", 0.1, *sides, "seconds", "tokens", "longest")
    comparison = Comparison("fast", spec, "fast", "text", [])
    part = Part("fast", "better", 0.1, Median(values))
    judged = PartJudgement(part, Verdict.SUPPORTED, comparison, [], [])
    judgement = SimpleNamespace(parts=[judged], has_ended=True, word=Verdict.SUPPORTED)
    (cost,) = format_costs(StudiedClaim(None, judgement), 1)
    assert cost.startswith("no_q: ")
    assert shown in cost

"""That the checks can fail: each of them, on a layer in which what it claims is false.

A break changes one piece of the layer's code, or of what the check computes with; the layer before
it holds. Where a check claims two things, each is broken alone. Shape suffixes as in qk/base.py.
"""

from dataclasses import replace
from math import inf, isnan, nan

import pytest
import torch

from qkablate.attention import OV, OV_CIRCUITS, QK, QK_CIRCUITS, Attention, Cache, Spec
from qkablate.attention import layer as layer_
from qkablate.attention.kernels.dispatch import attend
from qkablate.attention.modifiers import QKNorm, UnitKeys
from qkablate.attention.ov.factored import GroupedOV, SeparateOV
from qkablate.attention.ov.merged import MergedOV
from qkablate.attention.ov.slices import NoO, NoVO
from qkablate.attention.qk.contentless import Uniform
from qkablate.attention.qk.factored import (
    CollaborativeQK,
    FourMatrixQK,
    GroupedQK,
    LowRankQK,
    ReassociatedQK,
    SeparateQK,
)
from qkablate.attention.qk.merged import MergedQK, SymmetricQK
from qkablate.attention.qk.shared import SharedQK, SymPairwise
from qkablate.attention.qk.slices import NoK, NoQ, NoQK
from qkablate.verify import Line, factors, fresh_layer, stream, symmetry, theorems, verify
from qkablate.verify.check import CHECKS, EXACT, Check, Found, apart, largest, worst

D, HEADS, LENGTH = 12, 3, 8
X_BTD = stream(D, LENGTH, seed=0)
FIRST, PLACE_H11 = torch.tensor(0), torch.arange(HEADS).view(-1, 1, 1)
NEGATIVE_E = torch.tensor([1, 1, 1, -1e-4])  # a diagonal between queries and keys


def built(qk="separate", ov="separate", bias=False, **options):
    spec = Spec(D, HEADS, bias=bias, sigma=0.2, rank=6, groups=1, context=LENGTH)
    layer = Attention(spec, QK_CIRCUITS[qk], OV_CIRCUITS[ov], **options)
    return fresh_layer(layer.double().eval(), seed=0)


def instead(*changes):
    """The break that puts another value in the place of each (owner, name)."""

    def break_(patch):
        for owner, name, value in changes:
            patch.setattr(owner, name, value)

    return break_


def then(*changes):
    """The break that changes what each (owner, name) returns."""

    def wrapped(owner, name, change):
        was = getattr(owner, name)
        return owner, name, lambda *given, **named: change(was(*given, **named))

    return instead(*(wrapped(*change) for change in changes))


def double(t):
    return 2 * t


def double_gradient(t):
    return 2 * t - t.detach()


def next_head(x_BHTE):
    return x_BHTE.roll(1, 1)


def quarter_turn(k_BHTE):
    a, b = k_BHTE.chunk(2, -1)
    return torch.cat([-b, a], -1)


def tugged(by):
    """The same keys, and on top of their gradient `by` of them."""

    def change(k_BHTE):
        k_BHTE.register_hook(lambda g_BHTE: g_BHTE + by(k_BHTE.detach()))
        return k_BHTE

    return change


def untouched(_, q_BHTE, k_BGSE):
    return q_BHTE, k_BGSE


def wider(both):
    return tuple(torch.cat([t, t.square()], -1) for t in both)


def one_wider(both):
    return tuple(torch.cat([t, t[..., :1] ** 2], -1) for t in both)


def wide_heads(both):
    return both if both[0].shape[1] == 1 else wider(both)


def triangle(made):
    return made[0].triu(), None


def half_a_row(*given, addend, **named):
    return attend(*given, addend=None if addend is None else addend.tril(-1), **named)


def numbers(change, draw=theorems.numbers):
    """The break that changes the theorems' random numbers, by their seed."""

    def changed(like, *shape, seed=0):
        return change(draw(like, *shape, seed=seed), seed)

    return instead((theorems, "numbers", changed))


def far_away(t, seed):
    """The descent on one matrix shrinks this by 0.74 a step, and has 2000 steps."""
    return 1e300 * t if seed == 2 else t


def identities(t, seed):
    return D**0.5 * torch.eye(D).to(t) if t.shape == (D, D) else t


def set_double_(qk, b_HDD, set_=SeparateQK.set_circuit_):
    set_(qk, 2 * b_HDD)


ROPE = {"position": "rope"}
SHARED = {"qk": "shared"}
BIAS = {"bias": True}
PAIRWISE = {"qk": "sym_pairwise"}
GROUPED = {"qk": "grouped", "ov": "grouped"}

CASES = [  # check, layer, break
    ("parameters", {}, instead((SeparateQK, "params", "d²"))),
    ("parameters", {"norm": "qk"}, instead((QKNorm, "params", "2 h"))),
    ("FLOPs", {}, then((SeparateQK, "flops_per_token", lambda n: n - 1))),
    ("FLOPs", {}, then((SeparateOV, "flops_per_token", lambda n: n + 1))),
    ("KV cache", {}, instead((Attention, "cached_per_token", 2 * D - 1))),
    ("KV cache", {}, instead((Attention, "cached_per_token", 2 * D + 1))),
    ("decoding", {}, then((Cache, "add", lambda kept: kept.index_fill(-2, FIRST, 0)))),
    # A token has the next one's key; or it sees itself alone, which is causal, but blind.
    ("causality", {}, then((SeparateQK, "keys", lambda k_BHSE: k_BHSE.roll(-1, 2)))),
    ("causality", {}, instead((layer_, "attend", lambda q, k, v_BHSV, **_: v_BHSV))),
    # Every key of the past comes from later: a shift of all of them alike would not be seen.
    ("causality", {}, then((SeparateQK, "keys", lambda k_BHSE: k_BHSE.flip(2)))),
    ("B_h", {}, then((QK, "circuit", lambda made: (2 * made[0], made[1])))),
    ("B_h", BIAS, then((QK, "circuit", lambda made: (made[0], 2 * made[1])))),
    ("M_h", {}, then((OV, "circuit", double))),
    ("M_h", {}, then((OV, "circuit", lambda m_HDD: m_HDD.flip(0)))),
    ("merged twin", {}, then((MergedQK, "queries", double))),
    ("merged twin", {}, then((MergedQK, "queries", double_gradient))),
    ("rank", {}, then((Attention, "modified", wider))),
    ("rank", BIAS, then((Attention, "modified", one_wider))),
    ("symmetric part", {"qk": "merged"}, then((MergedQK, "circuit", triangle))),
    (
        "no content",
        {"qk": "uniform"},
        instead(
            (Uniform, "queries", NoQK.queries),
            (Uniform, "keys", NoQK.keys),
            (layer_, "attend", lambda *qkv, **named: attend(*qkv, **named | {"kernel": "folded"})),
        ),
    ),
    ("averages", {"qk": "uniform"}, instead((Uniform, "addend", lambda *at: torch.eye(*at[2:])))),
    ("self mask", {"mask_self": True}, then((layer_, "self_mask", torch.zeros_like))),
    ("rank d_head", {"qk": "low_rank"}, then((LowRankQK, "queries", double))),
    ("one head", {"qk": "no_q"}, then((NoQ, "queries", double))),
    ("one head", {"qk": "no_k"}, then((NoK, "keys", double))),
    ("one-hot mixing", {"qk": "collaborative"}, then((CollaborativeQK, "queries", double))),
    # A lonely group is its own next; and many are not summed where there is one.
    ("g = h", GROUPED, then((GroupedQK, "keys", next_head))),
    ("g = h", GROUPED, then((GroupedOV, "values", next_head))),
    ("g = h", GROUPED, then((GroupedQK, "keys", lambda k: k if k.shape[1] > 1 else 2 * k))),
    ("g = h", GROUPED, then((GroupedOV, "values", lambda v: v if v.shape[1] > 1 else 2 * v))),
    ("U = 1", PAIRWISE, then((SymPairwise, "between", double))),
    # Where U is 1, so is U²; where it is skew, U² is symmetric.
    ("U = 1", PAIRWISE, instead((SymPairwise, "between", lambda qk, k: k @ qk.u @ qk.u))),
    ("folding", {"qk": "four_matrix"}, instead((FourMatrixQK, "keys", SeparateQK.keys))),
    ("folding", {"qk": "four_matrix"}, instead((FourMatrixQK, "queries", SeparateQK.queries))),
    ("precision twin", {"qk": "reassociated"}, then((ReassociatedQK, "queries", double))),
    ("one value head", {"ov": "no_o"}, then((NoO, "write", double))),
    ("one value head", {"ov": "merged"}, then((MergedOV, "write", double))),
    ("gradients", {}, then((SeparateQK, "queries", double_gradient))),
    ("gradients", {}, then((SeparateQK, "keys", double_gradient))),
    ("nuclear norm", {}, then((factors, "truncated_svd", lambda made: (2 * made[0], made[1] / 2)))),
    # The inequality alone: a norm nine times as large, and factors that agree with it.
    (
        "nuclear norm",
        {},
        then(
            (factors, "nuclear", lambda n_H: 9 * n_H),
            (factors, "truncated_svd", lambda made: (3 * made[0], 3 * made[1])),
        ),
    ),
    # An output that moves without a gradient, and a gradient of what does not move.
    ("key bias", BIAS, then((SeparateQK, "keys", lambda k: k + k.square().detach()))),
    ("key bias", BIAS, then((SeparateQK, "keys", lambda k: k + k.square() - k.square().detach()))),
    ("value bias", BIAS, then((layer_, "attend", double))),
    ("absorbed", {}, then((SeparateOV, "values", next_head))),
    ("gauge", {}, then((SeparateQK, "keys", torch.relu))),
    ("gauge", {}, then((SeparateOV, "values", torch.relu))),
    ("order of heads", {}, then((SeparateQK, "keys", lambda k: k * PLACE_H11))),
    ("gauge gradient", {}, then((SeparateQK, "keys", double_gradient))),
    # A pull along a key is seen by the trace alone, one across it by the rotation alone.
    ("rope gradient", ROPE, then((SeparateQK, "keys", tugged(double)))),
    ("rope gradient", ROPE, then((SeparateQK, "keys", tugged(quarter_turn)))),
    ("rope gauge", ROPE, then((SeparateQK, "keys", torch.relu))),
    ("norm gradient", {"norm": "qk"}, instead((QKNorm, "forward", untouched))),
    ("value gradient", {}, then((SeparateOV, "values", double_gradient))),
    ("one step", {}, then((SeparateQK, "keys", double_gradient))),
    ("shared norm", SHARED, then((symmetry, "nuclear", double))),
    ("symmetric", SHARED, then((SharedQK, "between", quarter_turn))),
    ("symmetric", {"qk": "symmetric"}, then((SymmetricQK, "_full", torch.triu))),
    # k (1 + 9J) kᵀ is positive with entries too large; a slightly negative D has none too large.
    ("positive", SHARED, then((SharedQK, "between", lambda k: k + 9 * quarter_turn(k)))),
    ("positive", SHARED, then((SharedQK, "between", lambda k: k * NEGATIVE_E))),
    ("own score", SHARED | {"norm": "unit_keys"}, instead((UnitKeys, "forward", untouched))),
    ("any weights", {}, instead((SeparateQK, "set_circuit_", set_double_))),
    ("any weights", {}, then((SeparateQK, "forward", wide_heads))),
    ("row shift", {}, instead((theorems, "attend", half_a_row))),
    # Two factors of zero stay where they are.
    ("decay", {}, numbers(lambda t, seed: 0 * t)),
    ("decay", {}, numbers(far_away)),
    ("bare block", {}, then((NoQ, "queries", double))),
    ("bare block", {}, then((NoVO, "write", double))),
    # What needs no folding is the same with skip and norm, too.
    ("bare block", {}, numbers(identities)),
]


def test_every_check_is_broken_once():
    assert {name for name, *_ in CASES} == {check.name for check in CHECKS}


@pytest.mark.parametrize(("name", "options", "break_"), CASES, ids=[case[0] for case in CASES])
def test_a_broken_layer_is_found_out(name, options, break_, monkeypatch):
    (check,) = (check for check in CHECKS if check.name == name)
    monkeypatch.setattr("qkablate.verify.CHECKS", [check])
    layer = built(**options)
    (line,) = verify("whole", [layer], [X_BTD], fresh=True)
    assert line.holds
    break_(monkeypatch)
    (line,) = verify("broken", [layer], [X_BTD], fresh=True)
    assert line.check == name
    assert not line.holds


def test_a_runs_weights_are_not_asked_for_theorems():
    def names(fresh):
        return {line.check for line in verify("standard", [built()], [X_BTD], fresh=fresh)}

    assert names(fresh=True) - names(fresh=False) == {"any weights", "decay", "bare block"}


@pytest.fixture
def check(monkeypatch):
    """One check alone, of a given residual: found(layer, x_BTD)."""

    def enter(found):
        alone = Check("alone", "", lambda layer: True, lambda layer, x: Found(found(layer, x)))
        monkeypatch.setattr("qkablate.verify.CHECKS", [alone])

    return enter


@pytest.mark.parametrize("residuals", [(0, 1), (1, 0), (0, nan), (nan, 0), (1, nan), (nan, inf)])
def test_the_worst_layer_counts(residuals, check):
    of = dict(zip((built(), built()), residuals, strict=True))
    check(lambda layer, x_BTD: of[layer])
    (line,) = verify("two layers", list(of), [X_BTD, X_BTD], fresh=True)
    assert not line.holds
    assert isnan(line.residual) or line.residual == max(residuals)
    assert isnan(line.residual_fp32) or line.residual_fp32 == max(residuals)


@pytest.mark.parametrize(("single", "double_", "holds"), [(1, 0, True), (0, 1, False)])
def test_double_precision_decides(single, double_, holds, check):
    check(lambda layer, x_BTD: single if x_BTD.dtype == torch.float32 else double_)
    (line,) = verify("standard", [built()], [X_BTD], fresh=True)
    assert (line.residual_fp32, line.residual, line.holds) == (single, double_, holds)


def test_what_cannot_be_decomposed_is_violated(check):
    check(lambda layer, x_BTD: torch.linalg.inv(0 * X_BTD[0, :, :LENGTH]))
    (line,) = verify("standard", [built()], [X_BTD], fresh=True)
    assert isnan(line.residual)
    assert not line.holds


@pytest.mark.parametrize("value", [nan, inf, -inf])
@pytest.mark.parametrize("where", ["weight", "bias", "stream"])
def test_what_is_no_number_is_one_violated_line(value, where):
    layers, streams = [built(bias=True), built(bias=True)], [X_BTD, X_BTD.clone()]
    places = {"weight": layers[1].ov.w_o, "bias": layers[1].qk.b_k, "stream": streams[1]}
    with torch.no_grad():
        places[where].view(-1)[-1] = value
    (line,) = verify("standard", layers, streams, fresh=True)
    assert line.check == "finite"
    assert not line.holds


def test_nan_is_no_proof():
    line = Line("standard", "gauge", "", EXACT, EXACT, 0.0, 0.0)
    assert line.holds
    assert not replace(line, residual=nan).holds
    assert not replace(line, residual=2 * EXACT).holds
    zeros, bad = torch.zeros(3), torch.tensor([0, nan, 0])
    for residuals in ((nan, 0.0), (0.0, nan), (inf, nan)):
        assert isnan(largest(*residuals))
    for found in (worst(bad), apart(bad, zeros), apart(zeros, bad), apart(zeros, zeros, bad.max())):
        assert isnan(found)


def test_residuals():
    assert largest(0.0, 2.0, 1.0) == 2
    assert worst(torch.tensor([-3.0, -1.0])) == 0
    assert worst(torch.tensor([-3.0, 1.0, 0.5])) == 1
    one, other = torch.tensor([1.0, 4.0]), torch.tensor([2.0, 2.0])
    assert apart(one, other) == apart(-one, -other) == 1
    assert apart(one, other, torch.tensor(8.0)) == 0.25
    assert apart(one, 0 * one) > 1  # nothing is not near anything
    assert apart(0 * one, 0 * one) == 0

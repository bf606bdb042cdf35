"""Every check fails on a layer that violates what it claims.

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
from qkablate.attention.ov.factored import FourOV, GroupedOV, MergedOV, SeparateOV
from qkablate.attention.ov.latent import LatentOV
from qkablate.attention.ov.unprojected import NoO, NoVO
from qkablate.attention.qk.factored import (
    CollaborativeQK,
    FourMatrixQK,
    GroupedQK,
    LowRankQK,
    ReassociatedQK,
    SeparateQK,
)
from qkablate.attention.qk.latent import LatentQK
from qkablate.attention.qk.merged import MergedQK, SymmetricQK
from qkablate.attention.qk.shared import SharedQK, SymPairwise
from qkablate.attention.qk.unprojected import NoK, NoQ, NoQK, Uniform
from qkablate.verify import (
    CheckResult,
    factors,
    gauge,
    random_stream,
    randomize_layer,
    theorems,
    verify,
)
from qkablate.verify.check import (
    CHECKS,
    EXACT,
    Check,
    Deviation,
    largest,
    max_violation,
    rel_diff,
)

D, HEADS, LENGTH = 12, 3, 8
X_BTD = random_stream(D, LENGTH, seed=0)
Y_BSD = random_stream(D, LENGTH - 3, seed=0, name="source")
LATENT = {"qk": "latent", "ov": "latent"}
FIRST, PLACE_H11 = torch.tensor(0), torch.arange(HEADS).view(-1, 1, 1)
NEGATIVE_E = torch.tensor([1, 1, 1, -1e-4])  # a diagonal between queries and keys


def make_layer(qk="separate", ov="separate", bias=False, **options):
    sizes = {"rank": 6, "groups": 1, "context": LENGTH, "rope_dims": options.pop("rope_dims", 0)}
    spec = Spec(D, HEADS, bias=bias, sigma=0.2, **sizes)
    layer = Attention(spec, QK_CIRCUITS[qk], OV_CIRCUITS[ov], **options)
    return randomize_layer(layer.double().eval(), seed=0)


def instead(*changes):
    """Return a break that replaces each attribute (owner, name)."""

    def break_(patch):
        for owner, name, value in changes:
            patch.setattr(owner, name, value)

    return break_


def then(*changes):
    """Return a break that changes the result of each method (owner, name)."""

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
    """Return a change that adds `by` of the keys to their gradient."""

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


def triangle(result):
    return result[0].triu(), None


def half_a_row(*given, bias, **named):
    return attend(*given, bias=None if bias is None else bias.tril(-1), **named)


def numbers(change, draw=theorems.random_numbers):
    """Return a break that changes the random numbers of the theorems by their seed."""

    def changed(like, *shape, seed=0):
        return change(draw(like, *shape, seed=seed), seed)

    return instead((theorems, "random_numbers", changed))


def far_away(t, seed):
    """Start so far away that 2000 steps, each shrinking by 0.74, do not converge."""
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
    ("decoding", {}, then((Cache, "append", lambda cached: cached.index_fill(-2, FIRST, 0)))),
    # A token has the key of the next one, or attends only to itself.
    ("causality", {}, then((SeparateQK, "keys", lambda k_BHSE: k_BHSE.roll(-1, 2)))),
    ("causality", {}, instead((layer_, "attend", lambda q, k, v_BHSV, **_: v_BHSV))),
    # Every earlier key comes from a later token; a common shift would not be detected.
    ("causality", {}, then((SeparateQK, "keys", lambda k_BHSE: k_BHSE.flip(2)))),
    ("B_h", {}, then((QK, "circuit", lambda result: (2 * result[0], result[1])))),
    ("B_h", BIAS, then((QK, "circuit", lambda result: (result[0], 2 * result[1])))),
    ("M_h", {}, then((OV, "circuit", double))),
    ("M_h", {}, then((OV, "circuit", lambda m_HDD: m_HDD.flip(0)))),
    ("merged twin", {}, then((MergedQK, "queries", double))),
    ("merged twin", {}, then((MergedQK, "queries", double_gradient))),
    ("latent", LATENT, then((LatentQK, "head_keys", double))),
    ("latent", LATENT, then((LatentOV, "head_values", double_gradient))),
    ("latent", LATENT | ROPE | {"rope_dims": 2}, then((LatentQK, "head_keys", double))),
    ("latent", LATENT | {"position": "alibi"}, then((LatentQK, "head_keys", double_gradient))),
    ("rank", {}, then((Attention, "apply_modifiers", wider))),
    ("rank", BIAS, then((Attention, "apply_modifiers", one_wider))),
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
    (
        "averages",
        {"qk": "uniform"},
        instead((Uniform, "score_bias", lambda *at: torch.eye(*at[2:]))),
    ),
    ("self mask", {"mask_self": True}, then((layer_, "self_mask", torch.zeros_like))),
    ("rank d_head", {"qk": "low_rank"}, then((LowRankQK, "queries", double))),
    ("one head", {"qk": "no_q"}, then((NoQ, "queries", double))),
    ("one head", {"qk": "no_k"}, then((NoK, "keys", double))),
    ("one-hot mixing", {"qk": "collaborative"}, then((CollaborativeQK, "queries", double))),
    # A single group equals its successor, so one group and several are tested.
    ("g = h", GROUPED, then((GroupedQK, "keys", next_head))),
    ("g = h", GROUPED, then((GroupedOV, "values", next_head))),
    ("g = h", GROUPED, then((GroupedQK, "keys", lambda k: k if k.shape[1] > 1 else 2 * k))),
    ("g = h", GROUPED, then((GroupedOV, "values", lambda v: v if v.shape[1] > 1 else 2 * v))),
    ("U = 1", PAIRWISE, then((SymPairwise, "between", double))),
    # For U = 1 also U² = 1; for a skew U the square is symmetric.
    ("U = 1", PAIRWISE, instead((SymPairwise, "between", lambda qk, k: k @ qk.u @ qk.u))),
    ("folding", {"qk": "four_matrix"}, instead((FourMatrixQK, "keys", SeparateQK.keys))),
    ("folding", {"qk": "four_matrix"}, instead((FourMatrixQK, "queries", SeparateQK.queries))),
    ("folding of values", {"ov": "four"}, instead((FourOV, "values", SeparateOV.values))),
    ("precision twin", {"qk": "reassociated"}, then((ReassociatedQK, "queries", double))),
    ("one value head", {"ov": "no_o"}, then((NoO, "write", double))),
    ("one value head", {"ov": "merged"}, then((MergedOV, "write", double))),
    ("gradients", {}, then((SeparateQK, "queries", double_gradient))),
    ("gradients", {}, then((SeparateQK, "keys", double_gradient))),
    (
        "nuclear norm",
        {},
        then((factors, "truncated_svd", lambda result: (2 * result[0], result[1] / 2))),
    ),
    # Only the inequality fails: a norm nine times as large with matching factors.
    (
        "nuclear norm",
        {},
        then(
            (factors, "nuclear_norm", lambda n_H: 9 * n_H),
            (factors, "truncated_svd", lambda result: (3 * result[0], 3 * result[1])),
        ),
    ),
    # An output that changes without a gradient, and a gradient without a change.
    ("key bias", BIAS, then((SeparateQK, "keys", lambda k: k + k.square().detach()))),
    ("key bias", BIAS, then((SeparateQK, "keys", lambda k: k + k.square() - k.square().detach()))),
    ("value bias", BIAS, then((layer_, "attend", double))),
    ("absorbed", {}, then((SeparateOV, "values", next_head))),
    ("gauge", {}, then((SeparateQK, "keys", torch.relu))),
    ("gauge", {}, then((SeparateOV, "values", torch.relu))),
    ("order of heads", {}, then((SeparateQK, "keys", lambda k: k * PLACE_H11))),
    ("gauge gradient", {}, then((SeparateQK, "keys", double_gradient))),
    # A gradient along a key affects only the trace, one across it only the rotation.
    ("rope gradient", ROPE, then((SeparateQK, "keys", tugged(double)))),
    ("rope gradient", ROPE, then((SeparateQK, "keys", tugged(quarter_turn)))),
    ("rope gauge", ROPE, then((SeparateQK, "keys", torch.relu))),
    ("norm gradient", {"norm": "qk"}, instead((QKNorm, "forward", untouched))),
    ("value gradient", {}, then((SeparateOV, "values", double_gradient))),
    ("one step", {}, then((SeparateQK, "keys", double_gradient))),
    ("shared norm", SHARED, then((gauge, "nuclear_norm", double))),
    ("symmetric", SHARED, then((SharedQK, "between", quarter_turn))),
    ("symmetric", {"qk": "symmetric"}, then((SymmetricQK, "_full", torch.triu))),
    # k (1 + 9J) kᵀ is positive with too large entries; a slightly negative D has none.
    ("positive", SHARED, then((SharedQK, "between", lambda k: k + 9 * quarter_turn(k)))),
    ("positive", SHARED, then((SharedQK, "between", lambda k: k * NEGATIVE_E))),
    ("own score", SHARED | {"norm": "unit_keys"}, instead((UnitKeys, "forward", untouched))),
    ("any weights", {}, instead((SeparateQK, "set_circuit_", set_double_))),
    ("any weights", {}, then((SeparateQK, "forward", wide_heads))),
    ("row shift", {}, instead((theorems, "attend", half_a_row))),
    # Two zero factors have zero gradients.
    ("decay", {}, numbers(lambda t, seed: 0 * t)),
    ("decay", {}, numbers(far_away)),
    ("bare block", {}, then((NoQ, "queries", double))),
    ("bare block", {}, then((NoVO, "write", double))),
    # Identities fold with skip and norm, too.
    ("bare block", {}, numbers(identities)),
    # An encoder with a causal mask sees nothing later; without keys of its first token, not all.
    (
        "sees all",
        {},
        instead((layer_, "attend", lambda *qkv, causal, **n: attend(*qkv, causal=True, **n))),
    ),
    (
        "sees all",
        {},
        instead((layer_, "attend", lambda q, k, v, **n: attend(q, k[:, :, 1:], v[:, :, 1:], **n))),
    ),
    # Queries that read the others, and a source whose last token is lost.
    ("both streams", {}, then((SeparateQK, "queries", lambda q: q + q.mean(2, keepdim=True)))),
    (
        "both streams",
        {},
        instead(
            (layer_, "attend", lambda q, k, v, **n: attend(q, k[:, :, :-1], v[:, :, :-1], **n))
        ),
    ),
    ("FLOPs of two streams", {}, then((SeparateQK, "flops_per_key", lambda n: n - 2))),
    ("FLOPs of two streams", SHARED, then((SharedQK, "flops_per_query", lambda n: n // 2))),
    ("source cache", {}, instead((Attention, "cached_per_token", 2 * D - 1))),
    ("B_h of two streams", {}, then((QK, "circuit", lambda result: (result[0].mT, result[1])))),
    ("B_h of two streams", BIAS, then((QK, "circuit", lambda result: (result[0], 2 * result[1])))),
    ("M_h of two streams", {}, then((OV, "circuit", lambda m_HDD: m_HDD.flip(0)))),
    ("merged twin of two streams", {}, then((MergedQK, "queries", double))),
    ("merged twin of two streams", {}, then((MergedQK, "keys", double_gradient))),
    ("gauge of two streams", {}, then((SeparateQK, "keys", torch.relu))),
    ("gauge of two streams", {}, then((SeparateOV, "values", torch.relu))),
]


def test_every_check_has_a_failing_case():
    assert {name for name, *_ in CASES} == {check.name for check in CHECKS}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "options", "break_"), CASES, ids=[case[0] for case in CASES])
def test_check_fails_on_a_broken_layer(name, options, break_, monkeypatch):
    (check,) = (check for check in CHECKS if check.name == name)
    monkeypatch.setattr("qkablate.verify.CHECKS", [check])
    layer, site = make_layer(**options), check.sites[0]
    streams = [(X_BTD, Y_BSD) if site == "cross" else (X_BTD,)]
    (line,) = verify("whole", [layer], streams, fresh=True, site=site)
    assert line.holds
    break_(monkeypatch)
    (line,) = verify("broken", [layer], streams, fresh=True, site=site)
    assert (line.check, line.site) == (name, site)
    assert not line.holds


def test_theorems_are_skipped_for_the_weights_of_a_run():
    def names(fresh):
        return {line.check for line in verify("standard", [make_layer()], [(X_BTD,)], fresh=fresh)}

    assert names(fresh=True) - names(fresh=False) == {"any weights", "decay", "bare block"}


@pytest.fixture
def check(monkeypatch):
    """Replace all checks by one with the residual found(layer, x_BTD)."""

    def enter(found):
        alone = Check("alone", "", lambda layer: True, lambda layer, x: Deviation(found(layer, x)))
        monkeypatch.setattr("qkablate.verify.CHECKS", [alone])

    return enter


@pytest.mark.parametrize("residuals", [(0, 1), (1, 0), (0, nan), (nan, 0), (1, nan), (nan, inf)])
def test_the_worst_layer_counts(residuals, check):
    of = dict(zip((make_layer(), make_layer()), residuals, strict=True))
    check(lambda layer, x_BTD: of[layer])
    (line,) = verify("two layers", list(of), [(X_BTD,), (X_BTD,)], fresh=True)
    assert not line.holds
    assert isnan(line.residual) or line.residual == max(residuals)
    assert isnan(line.residual_fp32) or line.residual_fp32 == max(residuals)


@pytest.mark.parametrize(("single", "double_", "holds"), [(1, 0, True), (0, 1, False)])
def test_double_precision_decides(single, double_, holds, check):
    check(lambda layer, x_BTD: single if x_BTD.dtype == torch.float32 else double_)
    (line,) = verify("standard", [make_layer()], [(X_BTD,)], fresh=True)
    assert (line.residual_fp32, line.residual, line.holds) == (single, double_, holds)


def test_failed_decomposition_is_a_violation(check):
    check(lambda layer, x_BTD: torch.linalg.inv(0 * X_BTD[0, :, :LENGTH]))
    (line,) = verify("standard", [make_layer()], [(X_BTD,)], fresh=True)
    assert isnan(line.residual)
    assert not line.holds


@pytest.mark.parametrize("value", [nan, inf, -inf])
@pytest.mark.parametrize("where", ["weight", "bias", "stream"])
def test_non_finite_values_are_one_violation(value, where):
    layers, streams = [make_layer(bias=True), make_layer(bias=True)], [(X_BTD,), (X_BTD.clone(),)]
    places = {"weight": layers[1].ov.w_o, "bias": layers[1].qk.b_k, "stream": streams[1][0]}
    with torch.no_grad():
        places[where].view(-1)[-1] = value
    (line,) = verify("standard", layers, streams, fresh=True)
    assert line.check == "finite"
    assert not line.holds


def test_nan_is_a_violation():
    line = CheckResult("standard", "decoder", "gauge", "", EXACT, EXACT, 0.0, 0.0)
    assert line.holds
    assert not replace(line, residual=nan).holds
    assert not replace(line, residual=2 * EXACT).holds
    zeros, bad = torch.zeros(3), torch.tensor([0, nan, 0])
    for residuals in ((nan, 0.0), (0.0, nan), (inf, nan)):
        assert isnan(largest(*residuals))
    for found in (
        max_violation(bad),
        rel_diff(bad, zeros),
        rel_diff(zeros, bad),
        rel_diff(zeros, zeros, bad.max()),
    ):
        assert isnan(found)


def test_relative_differences():
    assert largest(0.0, 2.0, 1.0) == 2
    assert max_violation(torch.tensor([-3.0, -1.0])) == 0
    assert max_violation(torch.tensor([-3.0, 1.0, 0.5])) == 1
    one, other = torch.tensor([1.0, 4.0]), torch.tensor([2.0, 2.0])
    assert rel_diff(one, other) == rel_diff(-one, -other) == 1
    assert rel_diff(one, other, torch.tensor(8.0)) == 0.25
    assert rel_diff(one, 0 * one) > 1  # 0 is not close to anything
    assert rel_diff(0 * one, 0 * one) == 0

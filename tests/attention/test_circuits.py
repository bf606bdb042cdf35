"""B_h and M_h as matrices, and standard attention put into the merged form."""

import pytest
import torch

from qkablate.attention import OV_CIRCUITS, QK_CIRCUITS, Attention, Spec
from qkablate.attention.circuits import merge
from qkablate.attention.qk import by_head


def circuit(name, *, bias=False, heads=3, init="matched"):
    torch.manual_seed(0)
    qk = QK_CIRCUITS[name](Spec(12, heads, bias=bias, sigma=0.3, init=init)).double()
    for parameter in qk.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return qk


@pytest.mark.parametrize("name", QK_CIRCUITS)
@pytest.mark.parametrize("heads", [1, 3])
def test_circuit_makes_the_scores(name, heads):
    qk = circuit(name, heads=heads)
    x, y = torch.randn(2, 5, 12).double(), torch.randn(2, 4, 12).double()
    q, k = qk(x, y)
    b_HDD, u_HD = qk.circuit()
    assert u_HD is None
    expected = torch.einsum("btd,hde,bse->bhts", x, b_HDD, y)
    torch.testing.assert_close(q @ k.mT, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", QK_CIRCUITS)
def test_circuit_with_biases_up_to_what_softmax_cannot_see(name):
    qk = circuit(name, bias=True)
    x = torch.randn(2, 5, 12).double()
    q, k = qk(x, x)
    b_HDD, u_HD = qk.circuit()
    expected = torch.einsum("btd,hde,bse->bhts", x, b_HDD, x)
    if u_HD is not None:
        expected = expected + torch.einsum("hd,bsd->bhs", u_HD, x).unsqueeze(2)
    torch.testing.assert_close((q @ k.mT).softmax(-1), expected.softmax(-1))


@pytest.mark.parametrize("name", QK_CIRCUITS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("init", ["matched", "naive"])
def test_merging_any_variant_changes_no_output(name, bias, init):
    """E1: merged_w with W = W_q W_kᵀ is standard: outputs and input gradients."""
    qk = circuit(name, bias=bias, init=init)
    ov = OV_CIRCUITS["separate"](qk.spec).double()
    for parameter in ov.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    x = torch.randn(2, 7, 12).double().requires_grad_()
    outputs = [Attention(form, ov)(x) for form in (qk, merge(qk))]
    gradients = [torch.autograd.grad(out.square().sum(), x)[0] for out in outputs]
    torch.testing.assert_close(*outputs, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-10)


def test_gradient_of_the_merged_matrix():
    """E1: dL/dW_q = (dL/dW) W_k and dL/dW_k = (dL/dW)ᵀ W_q, head by head."""
    standard = circuit("separate")
    merged = merge(standard)
    x = torch.randn(1, 6, 12).double()
    for qk in (standard, merged):
        q, k = qk(x, x)
        (q @ k.mT).softmax(-1).square().sum().backward()
    w_q, w_k = (by_head(w.detach(), 3) for w in (standard.w_q, standard.w_k))
    grad_HDD = by_head(merged.w_qk.grad, 3)
    for parameter, expected in ((standard.w_q, grad_HDD @ w_k), (standard.w_k, grad_HDD.mT @ w_q)):
        torch.testing.assert_close(by_head(parameter.grad, 3), expected, rtol=1e-10, atol=1e-12)


def test_rank_and_symmetry():
    """E5, E6: standard's B_h has rank d_head at most, shared_qk's is symmetric and positive."""
    assert int(torch.linalg.matrix_rank(circuit("separate").circuit()[0]).max()) == 4
    assert int(torch.linalg.matrix_rank(circuit("merged").circuit()[0]).max()) == 12
    b_HDD = circuit("shared").circuit()[0].detach()
    torch.testing.assert_close(b_HDD, b_HDD.mT)
    assert float(torch.linalg.eigvalsh(b_HDD).min()) > -1e-12


def test_one_head_without_w_q_is_merged():
    """E3: with one head, no_q is merged_w with W = W_kᵀ."""
    no_q = circuit("no_q", heads=1)
    torch.testing.assert_close(no_q.circuit()[0][0], no_q.w_k.T)


def test_ov_circuit():
    ov = OV_CIRCUITS["separate"](Spec(12, 3)).double()
    for parameter in ov.parameters():
        torch.nn.init.normal_(parameter)
    y = torch.randn(1, 5, 12).double()
    v = ov.values(y, y)
    for head in range(3):
        one_head = torch.zeros_like(v)
        one_head[:, head] = v[:, head]
        torch.testing.assert_close(ov.write(one_head), y @ ov.circuit()[head])

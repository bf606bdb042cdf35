"""Measures of matrices: against their definitions, and on matrices with known results."""

import math

import pytest
import torch

from qkablate.attention import OV_CIRCUITS, QK_CIRCUITS, Spec
from qkablate.diagnostics.circuits import (
    MEASURES,
    OUTLIER_STDS,
    Factored,
    Full,
    compute_measures,
    ov_matrix,
    qk_matrix,
    stack,
)
from tests.attention.random_layers import qk_for

D, K = 12, 3


def normal(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def slow(b, start, rank, factors=None):
    """Return the measures of one head by their definitions."""
    s = torch.linalg.svdvals(b).tolist()
    share = [x / sum(s) for x in s]
    size = math.sqrt(sum(x * x for x in b.flatten().tolist()))
    symmetric, skew = (b + b.T) / 2, (b - b.T) / 2

    def outlier_sum(vectors):
        norms = [v.norm().item() for v in vectors]
        mean = sum(norms) / len(norms)
        spread = math.sqrt(sum((x - mean) ** 2 for x in norms) / len(norms))
        return sum(x for x in norms if x > mean + OUTLIER_STDS * spread)

    rows, columns = outlier_sum(b), outlier_sum(b.T)
    found = {
        "singular": s[:rank],
        "stable_rank": (size / s[0]) ** 2,
        "effective_rank": math.exp(-sum(p * math.log(p) for p in share if p > 1e-12)),
        "nuclear": sum(s),
        "frobenius": size,
        "symmetry": ((symmetric.norm() ** 2 - skew.norm() ** 2) / size**2).item(),
        "directionality": (columns - rows) / (columns + rows) if columns + rows else 0.0,
        "moved": ((b - start).norm() / start.norm()).item(),
        "off_rank": math.sqrt(sum(x * x for x in s[rank:])) / size,
    }
    if factors is not None:
        left, right = (f.T @ f for f in factors)
        found["balance"] = ((left - right).norm() / (left.norm() + right.norm())).item()
    return found


@pytest.mark.parametrize("seed", range(4))
def test_factored_and_full_matrices_follow_the_definitions(seed):
    left, right, left_0, right_0 = (normal(5, D, K, seed=4 * seed + i) for i in range(4))
    left[0, 2] *= 9  # outlier rows and columns
    right[1, 5] *= 9
    right[2, :2] *= 9
    left[2, 7] *= 9
    b, start = left @ right.mT, left_0 @ right_0.mT
    factored = compute_measures(
        Factored(left, right), Factored(left_0, right_0), rank=2, two_factors=True
    )
    full = compute_measures(Full(b), Full(start), rank=2, two_factors=True)
    assert tuple(factored) == tuple(full) == MEASURES
    assert full.pop("balance") is None
    for head in range(5):
        expected = slow(b[head], start[head], 2, (left[head], right[head]))
        for found in (factored, full):
            for name, value in found.items():
                assert value[head].tolist() == pytest.approx(expected[name], rel=1e-6), name
    assert {round(x, 6) != 0 for x in factored["directionality"].tolist()} >= {True}


def one(b, rank=K):
    """Return the measures of a matrix in full and, by an exact decomposition, in factored form."""
    u, s, vh = torch.linalg.svd(b)
    start = torch.ones(1, *b.shape, dtype=b.dtype)
    as_thin = Factored((u * s)[None], vh.mT[None])
    found = [compute_measures(Full(b[None]), Full(start), rank=rank, two_factors=False)]
    eye = torch.eye(len(b), dtype=b.dtype)[None]
    found.append(compute_measures(as_thin, Factored(start, eye), rank=rank, two_factors=False))
    return found


def test_rank_one_matrices():
    x, y = normal(D), normal(D, seed=1)
    for found in one(torch.outer(x, y)):
        size = (x.norm() * y.norm()).item()
        for name in ("nuclear", "frobenius"):
            assert found[name].item() == pytest.approx(size)
        assert found["stable_rank"].item() == pytest.approx(1)
        assert found["effective_rank"].item() == pytest.approx(1, abs=1e-5)
        assert found["singular"][0, 0].item() == pytest.approx(size)
        assert found["singular"][0, 1:].max() < 1e-7 * size
        assert found["off_rank"].item() < 1e-7


def test_orthogonal_matrices():
    q, _ = torch.linalg.qr(normal(D, D))
    for found in one(3 * q):
        assert found["stable_rank"].item() == pytest.approx(D)
        assert found["effective_rank"].item() == pytest.approx(D)
        assert found["nuclear"].item() == pytest.approx(3 * D)
        assert found["off_rank"].item() == pytest.approx(math.sqrt(1 - K / D))
        assert found["directionality"].item() == 0  # all rows and columns have the same norm


def test_symmetric_and_antisymmetric_matrices():
    b = normal(D, D)
    b[3] *= 10
    for found in one(b + b.T):
        assert found["symmetry"].item() == pytest.approx(1)
        assert found["directionality"].item() == pytest.approx(0, abs=1e-9)
    for found in one(b - b.T):
        assert found["symmetry"].item() == pytest.approx(-1)
        assert found["directionality"].item() == pytest.approx(0, abs=1e-9)


def test_directionality_of_outlier_columns_and_rows():
    b = torch.ones(D, D, dtype=torch.float64)
    b[:, 4] = 50
    for found in one(b):
        assert found["directionality"].item() == 1
    for found in one(b.T.contiguous()):
        assert found["directionality"].item() == -1


def test_small_distances_are_exact():
    left, right = normal(2, D, K), normal(2, D, K, seed=1)
    same = compute_measures(Factored(left, right), Factored(left, right), rank=K, two_factors=True)
    assert same["moved"].tolist() == [0, 0]
    assert same["off_rank"] is None  # no other rank is possible
    by = normal(2, D, K, seed=2)
    for little in (1e-3, 1e-9):
        found = compute_measures(
            Factored(left + little * by, right), Factored(left, right), rank=K, two_factors=0
        )
        expected = little * (by @ right.mT).norm(dim=(1, 2)) / (left @ right.mT).norm(dim=(1, 2))
        assert found["moved"].tolist() == pytest.approx(expected.tolist(), rel=1e-5)


def test_balance():
    left = normal(1, D, K)
    turn, _ = torch.linalg.qr(normal(D, D, seed=1))
    even = compute_measures(
        Factored(left, turn @ left), Factored(left, left), rank=K, two_factors=True
    )
    assert even["balance"].item() == pytest.approx(0, abs=1e-12)
    uneven = compute_measures(
        Factored(left, 0 * left), Factored(left, left), rank=K, two_factors=True
    )
    assert uneven["balance"].item() == pytest.approx(1)
    assert (
        compute_measures(Factored(left, left), Factored(left, left), rank=K, two_factors=False)[
            "balance"
        ]
        is None
    )


def test_measures_of_a_zero_matrix_are_nan():
    zero = Full(torch.zeros(1, D, D, dtype=torch.float64))
    found = compute_measures(zero, zero, rank=K, two_factors=False)
    assert all(found[name].isnan().all() for name in ("stable_rank", "symmetry", "moved"))
    assert found["frobenius"].item() == found["nuclear"].item() == 0


def randomize(circuit, seed):
    with torch.no_grad():
        for number, parameter in enumerate(circuit.parameters()):
            parameter.copy_(normal(*parameter.shape, seed=1000 * seed + number))
    return circuit.double()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", QK_CIRCUITS)
def test_matrix_of_every_qk_circuit(name, bias):
    spec = Spec(d_model=12, heads=4, bias=bias, rank=8, groups=2, context=5)
    qk = randomize(QK_CIRCUITS[name](spec), 1)
    matrix = qk_matrix(qk)
    if qk.no_circuit_reason:
        assert matrix is None
        return
    b_HDD = qk.circuit()[0].detach()
    found = matrix.b_NDD if isinstance(matrix, Full) else matrix.left_NDE @ matrix.right_NDE.mT
    # In the scale of standard's scores, so that forms are comparable.
    torch.testing.assert_close(found / math.sqrt(spec.d_head), b_HDD * qk.scale)
    assert isinstance(matrix, Full) == (name in ("merged", "symmetric"))
    if name in ("separate", "shared", "no_q", "reassociated", "grouped"):
        assert matrix.left_NDE.shape == (4, 12, 3)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", OV_CIRCUITS)
def test_matrix_of_every_ov_circuit(name, bias):
    spec = Spec(d_model=12, heads=4, bias=bias, rank=8, groups=2)
    qk = randomize(QK_CIRCUITS["grouped" if name == "grouped" else qk_for(name)](spec), 1)
    ov = randomize(OV_CIRCUITS[name](spec, qk), 2)
    matrix = ov_matrix(ov, qk)
    found = matrix.b_NDD if isinstance(matrix, Full) else matrix.left_NDE @ matrix.right_NDE.mT
    # The output of one head at a time if every position attends only to itself.
    x_1TD = normal(1, 6, 12, seed=3)
    v_1HTV = ov.values(x_1TD, qk.keys(x_1TD)).repeat_interleave(4 // ov.value_heads, 1)
    zero_1TD = torch.zeros_like(x_1TD)
    nothing_1HTV = ov.values(zero_1TD, qk.keys(zero_1TD)).repeat_interleave(4 // ov.value_heads, 1)
    with torch.no_grad():
        for head in range(4):
            mask = (torch.arange(4) == head).double().view(1, 4, 1, 1)
            written = ov.write((v_1HTV - nothing_1HTV) * mask) - ov.write(0 * v_1HTV)
            torch.testing.assert_close(written, x_1TD @ found[head])
    torch.testing.assert_close(ov.circuit(qk).detach(), found)
    assert isinstance(matrix, Full) == (name == "merged")


def test_layers_are_stacked():
    factored = [Factored(normal(2, D, K, seed=i), normal(2, D, K, seed=9 + i)) for i in range(3)]
    together = stack(factored, "cpu")
    assert together.left_NDE.shape == (6, D, K)
    assert torch.equal(together.right_NDE[4:], factored[2].right_NDE)

"""The measures of a matrix: against slow ones in d × d, and on matrices whose answer is known."""

import math

import pytest
import torch

from qkablate.attention import OV_CIRCUITS, QK_CIRCUITS, Spec
from qkablate.diagnostics.circuits import (
    MEASURES,
    STANDS_OUT,
    Dense,
    Thin,
    measures,
    ov_matrix,
    qk_matrix,
    stacked,
)

D, K = 12, 3


def normal(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def slow(b, start, rank, factors=None):
    """Of one head, by the definitions."""
    s = torch.linalg.svdvals(b).tolist()
    share = [x / sum(s) for x in s]
    size = math.sqrt(sum(x * x for x in b.flatten().tolist()))
    symmetric, skew = (b + b.T) / 2, (b - b.T) / 2

    def outstanding(vectors):
        norms = [v.norm().item() for v in vectors]
        mean = sum(norms) / len(norms)
        spread = math.sqrt(sum((x - mean) ** 2 for x in norms) / len(norms))
        return sum(x for x in norms if x > mean + STANDS_OUT * spread)

    rows, columns = outstanding(b), outstanding(b.T)
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
def test_thin_and_dense_are_what_the_definitions_say(seed):
    left, right, left_0, right_0 = (normal(5, D, K, seed=4 * seed + i) for i in range(4))
    left[0, 2] *= 9  # rows and columns that stand out
    right[1, 5] *= 9
    right[2, :2] *= 9
    left[2, 7] *= 9
    b, start = left @ right.mT, left_0 @ right_0.mT
    thin = measures(Thin(left, right), Thin(left_0, right_0), rank=2, two_factors=True)
    dense = measures(Dense(b), Dense(start), rank=2, two_factors=True)
    assert tuple(thin) == tuple(dense) == MEASURES
    assert dense.pop("balance") is None
    for head in range(5):
        expected = slow(b[head], start[head], 2, (left[head], right[head]))
        for found in (thin, dense):
            for name, value in found.items():
                assert value[head].tolist() == pytest.approx(expected[name], rel=1e-6), name
    assert {round(x, 6) != 0 for x in thin["directionality"].tolist()} >= {True}


def one(b, rank=K):
    """The measures of a matrix, as a dense one and, by an exact decomposition, as a thin one."""
    u, s, vh = torch.linalg.svd(b)
    start = torch.ones(1, *b.shape, dtype=b.dtype)
    as_thin = Thin((u * s)[None], vh.mT[None])
    found = [measures(Dense(b[None]), Dense(start), rank=rank, two_factors=False)]
    eye = torch.eye(len(b), dtype=b.dtype)[None]
    found.append(measures(as_thin, Thin(start, eye), rank=rank, two_factors=False))
    return found


def test_rank_one():
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


def test_orthogonal():
    q, _ = torch.linalg.qr(normal(D, D))
    for found in one(3 * q):
        assert found["stable_rank"].item() == pytest.approx(D)
        assert found["effective_rank"].item() == pytest.approx(D)
        assert found["nuclear"].item() == pytest.approx(3 * D)
        assert found["off_rank"].item() == pytest.approx(math.sqrt(1 - K / D))
        assert found["directionality"].item() == 0  # all rows and columns are of one length


def test_symmetric_and_antisymmetric():
    b = normal(D, D)
    b[3] *= 10
    for found in one(b + b.T):
        assert found["symmetry"].item() == pytest.approx(1)
        assert found["directionality"].item() == pytest.approx(0, abs=1e-9)
    for found in one(b - b.T):
        assert found["symmetry"].item() == pytest.approx(-1)
        assert found["directionality"].item() == pytest.approx(0, abs=1e-9)


def test_a_strong_column_and_a_strong_row():
    b = torch.ones(D, D, dtype=torch.float64)
    b[:, 4] = 50
    for found in one(b):
        assert found["directionality"].item() == 1
    for found in one(b.T.contiguous()):
        assert found["directionality"].item() == -1


def test_nothing_has_moved_from_where_it_is_and_little_is_exact():
    left, right = normal(2, D, K), normal(2, D, K, seed=1)
    same = measures(Thin(left, right), Thin(left, right), rank=K, two_factors=True)
    assert same["moved"].tolist() == [0, 0]
    assert same["off_rank"] is None  # it cannot have another rank
    by = normal(2, D, K, seed=2)
    for little in (1e-3, 1e-9):
        found = measures(Thin(left + little * by, right), Thin(left, right), rank=K, two_factors=0)
        expected = little * (by @ right.mT).norm(dim=(1, 2)) / (left @ right.mT).norm(dim=(1, 2))
        assert found["moved"].tolist() == pytest.approx(expected.tolist(), rel=1e-5)


def test_balance():
    left = normal(1, D, K)
    turn, _ = torch.linalg.qr(normal(D, D, seed=1))
    even = measures(Thin(left, turn @ left), Thin(left, left), rank=K, two_factors=True)
    assert even["balance"].item() == pytest.approx(0, abs=1e-12)
    uneven = measures(Thin(left, 0 * left), Thin(left, left), rank=K, two_factors=True)
    assert uneven["balance"].item() == pytest.approx(1)
    assert (
        measures(Thin(left, left), Thin(left, left), rank=K, two_factors=False)["balance"] is None
    )


def test_a_matrix_of_zeros_has_no_measures_that_are_numbers():
    zero = Dense(torch.zeros(1, D, D, dtype=torch.float64))
    found = measures(zero, zero, rank=K, two_factors=False)
    assert all(found[name].isnan().all() for name in ("stable_rank", "symmetry", "moved"))
    assert found["frobenius"].item() == found["nuclear"].item() == 0


def drawn(circuit, seed):
    with torch.no_grad():
        for number, parameter in enumerate(circuit.parameters()):
            parameter.copy_(normal(*parameter.shape, seed=1000 * seed + number))
    return circuit.double()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", QK_CIRCUITS)
def test_every_qk_circuit_says_its_matrix(name, bias):
    spec = Spec(d_model=12, heads=4, bias=bias, rank=8, groups=2, context=5)
    qk = drawn(QK_CIRCUITS[name](spec), 1)
    matrix = qk_matrix(qk)
    if qk.no_circuit:
        assert matrix is None
        return
    b_HDD = qk.circuit()[0].detach()
    found = matrix.b_NDD if isinstance(matrix, Dense) else matrix.left_NDE @ matrix.right_NDE.mT
    # As if the scale of the scores were standard's, so that forms compare.
    torch.testing.assert_close(found / math.sqrt(spec.d_head), b_HDD * qk.scale)
    assert isinstance(matrix, Dense) == (name in ("merged", "symmetric"))
    if name in ("separate", "shared", "no_q", "reassociated", "grouped"):
        assert matrix.left_NDE.shape == (4, 12, 3)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", OV_CIRCUITS)
def test_every_ov_circuit_says_its_matrix(name, bias):
    spec = Spec(d_model=12, heads=4, bias=bias, groups=2)
    qk = drawn(QK_CIRCUITS["grouped" if name == "grouped" else "separate"](spec), 1)
    ov = drawn(OV_CIRCUITS[name](spec, qk), 2)
    matrix = ov_matrix(ov, qk)
    found = matrix.b_NDD if isinstance(matrix, Dense) else matrix.left_NDE @ matrix.right_NDE.mT
    # What is written where every position looks at itself alone, by one head at a time.
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
    assert isinstance(matrix, Dense) == (name == "merged")


def test_layers_are_stacked():
    thin = [Thin(normal(2, D, K, seed=i), normal(2, D, K, seed=9 + i)) for i in range(3)]
    together = stacked(thin)
    assert together.left_NDE.shape == (6, D, K)
    assert torch.equal(together.right_NDE[4:], thin[2].right_NDE)

"""The part of a layer that other forms can hold, measured without a layer of most forms.

A head of rank k reads k of the d directions of a stream, so that a form is fitted to matrices of
k × k where it treats heads or groups of them alone, and of d × k where it reads a slice of the
stream. The errors are those of `project_layer`; of symmetric forms, which mix both sides, they may
be a few hundredths more or less.

Shape suffixes as in project.py; E is the width of a product, P and R those of bases.
"""

import copy
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from qkablate.attention.layer import Attention
from qkablate.attention.linalg import expect_rank, find_basis
from qkablate.attention.ov import OV
from qkablate.attention.ov.unprojected import NoO, NoV
from qkablate.attention.projection.moments import Moments, with_bias
from qkablate.attention.projection.project import (
    assign_heads,
    assign_positions,
    has_same_outputs,
    has_same_scores,
    scaled_circuit,
    set_output_,
    set_scores_,
)
from qkablate.attention.qk import QK
from qkablate.attention.qk.factored import SeparateQK
from qkablate.attention.qk.latent import LatentQK
from qkablate.attention.qk.unprojected import NoK, NoQ
from qkablate.attention.spec import Circuit, Spec

# The side of their matrices that is no slice of the stream.
_FREE_SIDE: dict[type[Circuit], tuple[bool, bool]] = {
    **{NoQ: (False, True), NoK: (True, False)},
    **{NoV: (False, True), NoO: (True, False)},
}


@dataclass(frozen=True)
class HeldPart:
    """Root mean square errors of a layer in another form, relative to the layer's; 0 is exact."""

    scores: float  # as ProjectionErrors.qk_scores
    output: float  # as ProjectionErrors.ov_output
    scores_H: list[float]  # relative to those of the head
    output_H: list[float]


@dataclass(frozen=True)
class _HeadSpec(Spec):
    """Sizes of a layer whose heads read a few directions of the stream."""

    head_width: int = 0

    @property
    def d_head(self) -> int:
        return self.head_width


@dataclass(frozen=True)
class _Problem:
    """Matrices to be fitted, with the moments and the sizes of their bases."""

    goal_HLD: Tensor
    moments: Moments
    spec: Spec

    def in_order(self, order: list[int]) -> "_Problem":
        """Return the problem with the heads in another order."""
        moments = {
            name: value[order] if value is not None and value.dim() == 3 else value
            for name, value in vars(self.moments).items()
        }
        return replace(self, goal_HLD=self.goal_HLD[order], moments=Moments(**moments))


class LayerMeasure:
    """Measures how much of one layer forms can hold; each circuit is fitted once."""

    def __init__(self, source: Attention, moments: Moments) -> None:
        self.source, self.moments = copy.deepcopy(source).double(), moments
        scores, outputs = _Scores(self.source, moments), _Outputs(self.source, moments)
        self.sides: dict[str, _Side] = {"scores": scores, "output": outputs}

    @torch.no_grad()
    def measure(self, target: Attention) -> HeldPart:
        """Return the layer's error in the form of `target`, which may be on the meta device."""
        heads, source = self.source.qk.spec.heads, self.source
        if target.ov.reads_keys and not has_same_outputs(source, target):
            return self._measure_jointly(target)
        circuits: dict[str, Circuit] = {"scores": target.qk, "output": target.ov}
        same_output = has_same_outputs(source, target)
        same = {"scores": has_same_scores(source, target), "output": same_output}
        order = [*range(heads)]
        sliced = [s for s, circuit in circuits.items() if circuit.has_head_slices and not same[s]]
        is_fixed = source.position == "alibi" or bool(
            source.no_circuit_reason or target.no_circuit_reason
        )
        is_fixed |= any("groups" in circuit.uses for circuit in circuits.values())
        if sliced and not is_fixed:
            sides = [(self.sides[side], circuits[side]) for side in sliced]
            shares = [side.slice_shares(circuit) for side, circuit in sides]
            order = assign_positions(torch.stack(shares).sum(0))
        errors, by_head = list[float](), list[list[float]]()
        for name, circuit in circuits.items():
            error_H, power_H = torch.zeros(2, heads, dtype=torch.float64)
            if circuit.scores_are_zero and source.no_circuit_reason:  # of which nothing is left
                error_H = power_H = torch.ones(heads, dtype=torch.float64)
            elif not same[name]:
                side = self.sides[name]
                power_H = side.powers
                if name in sliced:
                    error_H[order] = side.slice_errors(circuit)[order, range(heads)]
                else:
                    error_H = side.errors(circuit)
            errors.append(float(_relative(error_H.sum(), power_H.sum())))
            by_head.append(_relative(error_H, power_H).tolist())
        return HeldPart(errors[0], errors[1], by_head[0], by_head[1])

    def _measure_jointly(self, target: Attention) -> HeldPart:
        """Return what a form loses whose values are its keys, by setting a layer of it."""
        target = copy.deepcopy(target).to_empty(device="cpu").double()
        heads = assign_heads(self.source, target, self.moments)
        errors, by_head = list[float](), list[list[float]]()
        for name, set_ in (("scores", set_scores_), ("output", set_output_)):
            share_H, error_H = torch.zeros(2, len(heads), dtype=torch.float64)
            error_H[heads] = set_(self.source, target, heads, self.moments)[1].double()
            if error_H.any():
                power_H = self.sides[name].powers
                share_H = _relative(error_H * power_H.sum(), power_H)
            errors.append(float(error_H.sum().clamp(min=0).sqrt()))
            by_head.append(share_H.tolist())
        return HeldPart(errors[0], errors[1], by_head[0], by_head[1])


def _relative(error: Tensor, power: Tensor) -> Tensor:
    """Return the root of a ratio of powers; 0 of 0 is 0."""
    return (error / power.clamp(min=torch.finfo(power.dtype).tiny)).clamp(min=0).sqrt()


class _Side:
    """Fits circuits to one side of a layer, the scores or the outputs."""

    shares_left = False  # the heads of a group share the left factor, otherwise the right one

    def __init__(self, spec: Spec, factors: tuple[Tensor, Tensor] | None) -> None:
        self.spec, self.factors = spec, factors
        self._fitted: dict[object, Tensor] = {}
        self._problems: dict[object, _Problem] = {}

    @property
    def powers(self) -> Tensor:
        """The mean square of each head's scores or outputs."""
        problem = self._reduce(True, True)
        return self._power(problem.goal_HLD, problem.moments)

    def errors(self, circuit: Circuit) -> Tensor:
        """Return the mean square of each head's error."""
        if circuit.scores_are_zero:
            return self.powers
        key = _key(circuit)
        if key not in self._fitted:
            groups = circuit.spec.groups if "groups" in circuit.uses else None
            shared = self.spec.heads // (groups or self.spec.heads)
            is_separable = not isinstance(circuit, LatentQK)
            is_one_basis = bool(circuit.one_width_reason)
            problem = self._reduce(is_separable, is_separable, shared, is_one_basis)
            self._fitted[key] = self._fit(circuit, problem)
        return self._fitted[key]

    def slice_shares(self, circuit: Circuit) -> Tensor:
        """Return the errors of each head at each position relative to all power, as cost_HP."""
        power = self.powers.sum().clamp(min=torch.finfo(torch.float64).tiny)
        return self.slice_errors(circuit) / power

    def slice_errors(self, circuit: Circuit) -> Tensor:
        """Return them of each head at each position, cost_HP."""
        key = _key(circuit)
        if key not in self._fitted:
            heads = [*range(self.spec.heads)]
            problem = self._reduce(*_FREE_SIDE.get(type(circuit), (False, False)))
            cost_HP = torch.zeros(len(heads), len(heads), dtype=torch.float64)
            for shift in heads:
                order = [(position - shift) % len(heads) for position in heads]
                cost_HP[order, heads] = self._fit(circuit, problem.in_order(order))
            self._fitted[key] = cost_HP
        return self._fitted[key]

    def _reduce(
        self, left: bool, right: bool, shared: int = 1, is_one_basis: bool = False
    ) -> _Problem:
        """Return the problem in bases of each head or group, on the sides where that is possible.

        With one basis for both sides, they are in the same directions.
        """
        key = left, right, shared, is_one_basis
        if key not in self._problems:
            bases: list[Tensor | None] = [None, None]
            if self.factors is not None and is_one_basis and not self.spec.is_cross:
                bases = [find_basis(torch.cat(self._linear_factors(), -1))] * 2
            elif self.factors is not None and not is_one_basis:
                wide = (shared if self.shares_left else 1), (1 if self.shares_left else shared)
                bases = [
                    find_basis(factor, size) if is_free else None
                    for factor, size, is_free in zip(
                        self._linear_factors(), wide, (left, right), strict=True
                    )
                ]
            self._problems[key] = self._transform(*bases)
        return self._problems[key]

    def _linear_factors(self) -> tuple[Tensor, Tensor]:
        """Return left and right without the row of the biases."""
        raise NotImplementedError

    def _transform(self, left_HDP: Tensor | None, right_HDR: Tensor | None) -> _Problem:
        """Return the problem in these bases; None: that of the stream."""
        raise NotImplementedError

    def _resize(self, width: int, width_keys: int, circuit: Spec) -> Spec:
        """Return the sizes of a circuit whose streams have these widths."""
        sizes = {"d_model": width, "d_source": width_keys, "head_width": circuit.d_head}
        return _HeadSpec(**vars(circuit) | sizes)

    def _fit(self, circuit: Circuit, problem: _Problem) -> Tensor:
        """Return the errors of the nearest circuit of the class."""
        raise NotImplementedError

    def _power(self, m_HLD: Tensor, moments: Moments) -> Tensor:
        raise NotImplementedError


def _key(circuit: Circuit) -> object:
    return type(circuit), *(getattr(circuit.spec, name) for name in circuit.uses)


class _Scores(_Side):
    """The scores: matrices with a row that multiplies a 1."""

    def __init__(self, source: Attention, moments: Moments) -> None:
        self.qk, self.moments, factors = source.qk, moments, None
        if not source.no_circuit_reason and self.qk.low_rank_factors() is not None:
            q_HDE, k_HDE, a_HE = self.qk.affine_maps()
            factors = torch.cat([q_HDE, a_HE.unsqueeze(1)], 1) * self.qk.scale, k_HDE
        super().__init__(self.qk.spec, factors)

    def _linear_factors(self) -> tuple[Tensor, Tensor]:
        assert self.factors is not None
        return self.factors[0][:, :-1], self.factors[1]

    def _transform(self, left_HDP: Tensor | None, right_HDR: Tensor | None) -> _Problem:
        moments, spec = self.moments, self.spec
        y_LL = moments.x_LL if moments.y_LL is None else moments.y_LL
        x_LL, left_HLP, right_HLR = moments.x_LL, _with_1(left_HDP), _with_1(right_HDR)
        if left_HLP is None and right_HDR is None:
            goal_HLD = with_bias(*scaled_circuit(self.qk))
        else:
            assert self.factors is not None
            left_HLE, right_HDE = self.factors
            left_HLE = left_HLE if left_HLP is None else left_HLP.mT @ left_HLE
            right_HDE = right_HDE if right_HDR is None else right_HDR.mT @ right_HDE
            goal_HLD = left_HLE @ right_HDE.mT
        if left_HLP is not None:
            x_LL = left_HLP.mT @ x_LL @ left_HLP
        if right_HLR is not None:
            y_LL = right_HLR.mT @ y_LL @ right_HLR
        spec = replace(spec, d_model=goal_HLD.shape[1] - 1, d_source=goal_HLD.shape[2])
        return _Problem(goal_HLD, Moments(x_LL, moments.z_HDD, y_LL), spec)

    def _fit(self, circuit: Circuit, problem: _Problem) -> Tensor:
        sizes = problem.spec.d_model, problem.spec.d_keys
        qk: QK = type(circuit)(self._resize(*sizes, circuit.spec)).double()  # type: ignore[assignment]
        b_HDD, u_HD = problem.goal_HLD[:, :-1], problem.goal_HLD[:, -1]
        with expect_rank(None if self.factors is None else self.factors[0].shape[-1]):
            bias_HD = u_HD / qk.scale if self.spec.bias else None
            qk.set_nearest_(b_HDD / qk.scale, bias_HD, problem.moments)
        error_HLD = with_bias(*scaled_circuit(qk)) - problem.goal_HLD
        return self._power(error_HLD, problem.moments)

    def _power(self, m_HLD: Tensor, moments: Moments) -> Tensor:
        return moments.score_power(m_HLD)


def _with_1(basis_HDP: Tensor | None) -> Tensor | None:
    """Return the basis of a stream with a 1 at its end."""
    if basis_HDP is None:
        return None
    heads, width, size = basis_HDP.shape
    extended_HLQ = basis_HDP.new_zeros(heads, width + 1, size + 1)
    extended_HLQ[:, :-1, :-1] = basis_HDP
    extended_HLQ[:, -1, -1] = 1
    return extended_HLQ


class _Outputs(_Side):
    """The outputs, without what biases write: every form can hold it."""

    shares_left = True

    def __init__(self, source: Attention, moments: Moments) -> None:
        self.qk, self.ov, self.moments = source.qk, source.ov, moments
        has_factors = not self.ov.no_circuit_reason
        super().__init__(self.ov.spec, self.ov.low_rank_factors(self.qk) if has_factors else None)

    def _linear_factors(self) -> tuple[Tensor, Tensor]:
        assert self.factors is not None
        return self.factors

    def _transform(self, left_HDP: Tensor | None, right_HDR: Tensor | None) -> _Problem:
        z_HDD = self.moments.z_HDD
        if left_HDP is None and right_HDR is None:
            goal_HDD = self.ov.circuit(self.qk)
        else:
            assert self.factors is not None
            left_HDV, right_HDV = self.factors
            left_HDV = left_HDV if left_HDP is None else left_HDP.mT @ left_HDV
            right_HDV = right_HDV if right_HDR is None else right_HDR.mT @ right_HDV
            goal_HDD = left_HDV @ right_HDV.mT
        if left_HDP is not None:
            assert z_HDD is not None
            z_HDD = left_HDP.mT @ z_HDD @ left_HDP
        # Values are of the keys' stream.
        spec = replace(self.spec, d_model=goal_HDD.shape[2], d_source=goal_HDD.shape[1])
        return _Problem(goal_HDD, replace(self.moments, z_HDD=z_HDD), spec)

    def _fit(self, circuit: Circuit, problem: _Problem) -> Tensor:
        spec = self._resize(problem.spec.d_model, problem.spec.d_keys, circuit.spec)
        qk = SeparateQK(spec).double()
        ov: OV = type(circuit)(spec, qk).double()  # type: ignore[call-arg, assignment]
        with expect_rank(None if self.factors is None else self.factors[0].shape[-1]):
            ov.set_nearest_(problem.goal_HLD, problem.moments)
        return self._power(ov.circuit(qk) - problem.goal_HLD, problem.moments)

    def _power(self, m_HLD: Tensor, moments: Moments) -> Tensor:
        return moments.output_power(m_HLD)

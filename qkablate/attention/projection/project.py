"""Project a trained attention layer onto another variant, exactly or with the least error.

The freedom of the target is used to lose less: the factors within a head are chosen freely
(`set_circuit_`), heads are permuted where they are tied to slices of the stream, and errors are
weighted by the second moments of what the layer reads (moments.py). The stream itself is not
rotated: norm gains and the tied output projection would make that another model.

Shape suffixes: T positions, H heads, P positions of heads, D d_model, L = D + 1.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from qkablate.attention.layer import Attention
from qkablate.attention.projection.moments import Moments, isotropic_moments, regularize, with_bias
from qkablate.attention.projection.shared_keys import find_keys, fit_queries
from qkablate.attention.qk import QK
from qkablate.attention.spec import Circuit, UnsupportedCombination

HeadErrors = tuple[Tensor, Tensor]  # squared relative errors per head: by entries, by moments


@dataclass(frozen=True)
class ProjectionErrors:
    """Relative errors of the projection of one layer; 0 is exact."""

    qk: float  # Frobenius norm of all B_h
    qk_scores: float  # root mean square of the scores, up to what softmax is invariant to
    ov: float  # Frobenius norm of all M_h
    ov_output: float  # root mean square of what the heads write
    heads: tuple[int, ...]  # the source head at each position


@torch.no_grad()
def convert(source: QK, target: QK) -> float:
    """Fit `target` to the scores of `source`, as closely as it can; return the relative error.

    Raises UnsupportedCombination where a circuit is not a matrix or cannot be set.
    """
    b_HDD, u_HD = scaled_circuit(source)
    if u_HD is not None:  # a form without biases loses it, which counts as error
        u_HD = u_HD / target.scale if target.spec.bias else None
    target.set_circuit_(b_HDD / target.scale, u_HD)
    norm = torch.linalg.vector_norm(b_HDD).clamp(min=torch.finfo(b_HDD.dtype).tiny)
    return float(distance(source, target) / norm)  # 0 of 0 is 0


def scaled_circuit(qk: QK) -> tuple[Tensor, Tensor | None]:
    """Return B_h and u_h multiplied by the scale of the scores."""
    b_HDD, u_HD = qk.circuit()
    return b_HDD.detach() * qk.scale, None if u_HD is None else u_HD.detach() * qk.scale


def distance(first: QK, second: QK) -> Tensor:
    """Return the Frobenius distance of the matrices of the scores, biases included."""
    difference_HLD = with_bias(*scaled_circuit(first)) - with_bias(*scaled_circuit(second))
    norm: Tensor = torch.linalg.vector_norm(difference_HLD)
    return norm


class MomentSums:
    """Sums of the products whose means are the moments of a layer, over any number of batches.

    The averages of the heads, by far the most expensive, can be left out.
    """

    def __init__(self, layer: Attention, *, causal: bool, averages: bool = True) -> None:
        self.layer, self.causal, self.averages = layer, causal, averages
        self._sums: list[Tensor] = []

    @torch.no_grad()
    def add(self, streams: tuple[Tensor, ...], *masks: Tensor | None) -> None:
        """Add the streams of a batch.

        The masks, of queries and of keys, are false where these are padding; None: nowhere.
        """
        masks = masks or (None, None)
        # One sequence at a time: the softmax of each head is T × S.
        for row in range(len(streams[0])):
            x_1TD, *source = (stream[row : row + 1] for stream in streams)
            (y_1SD,) = source or [x_1TD]
            is_query_1T, is_key_1S = (
                mask if mask is None else mask[row : row + 1] for mask in masks
            )
            new = _sum_products(x_1TD, is_query_1T)
            new += _sum_products(y_1SD, is_key_1S) if source else new
            if self.averages:
                read_1SD = source[0] if source else None
                a_1HTS = self.layer.weights(x_1TD, read_1SD, is_key_1S, causal=self.causal)
                z_HTD = (a_1HTS @ y_1SD.unsqueeze(1))[0].double()
                z_HTD = z_HTD if is_query_1T is None else z_HTD[:, is_query_1T[0]]
                new.append(z_HTD.mT @ z_HTD)
            old = self._sums or [torch.zeros_like(value) for value in new]
            self._sums = [a + b for a, b in zip(old, new, strict=True)]

    @property
    def tokens_per_dimension(self) -> float:
        """The positions read per dimension of their stream, the fewer of queries and keys."""
        if not self._sums:
            return 0.0
        _, queries, _, keys, *_ = self._sums
        spec = self.layer.qk.spec
        return min(float(queries) / spec.d_model, float(keys) / spec.d_keys)

    def mean(self) -> Moments:
        """Return the moments."""
        x_LL, queries, y_LL, keys, *averages = self._sums
        z_HDD = regularize(averages[0] / queries) if averages else None
        return Moments(regularize(x_LL / queries), z_HDD, regularize(y_LL / keys))


def _sum_products(x_1TD: Tensor, mask_1T: Tensor | None) -> list[Tensor]:
    """Return the sum of the outer products of the positions of a stream, and their number."""
    x_TD = x_1TD[0] if mask_1T is None else x_1TD[mask_1T]
    x_TL = pad(x_TD.double(), (0, 1), value=1.0)
    return [x_TL.mT @ x_TL, torch.tensor(len(x_TL))]


def compute_moments(
    layer: Attention, streams: tuple[Tensor, ...], *masks: Tensor | None, causal: bool
) -> Moments:
    """Return the moments of one layer, given its streams and the masks of their padding."""
    sums = MomentSums(layer, causal=causal)
    sums.add(streams, *masks)
    return sums.mean()


@torch.no_grad()
def project_layer(
    source: Attention, target: Attention, moments: Moments | None
) -> ProjectionErrors:
    """Set `target` to the part of `source` it can hold; the same form needs no moments.

    Raises UnsupportedCombination where a circuit is not a matrix or cannot be set.
    """
    if is_same_form(source, target):
        target.load_state_dict(source.state_dict())
        return ProjectionErrors(0.0, 0.0, 0.0, 0.0, tuple(range(source.qk.spec.heads)))
    assert moments is not None
    if reason := find_obstacle(source, target):
        raise UnsupportedCombination(reason)
    # In fp64, so that the error is due to the form alone.
    source_64, target_64 = (copy.deepcopy(layer).double() for layer in (source, target))
    heads = assign_heads(source_64, target_64, moments)
    qk = set_scores_(source_64, target_64, heads, moments)
    ov = set_output_(source_64, target_64, heads, moments)
    target.load_state_dict(target_64.state_dict())
    qk_error, qk_scores, ov_error, ov_output = (float(e.sum().sqrt()) for e in (*qk, *ov))
    return ProjectionErrors(qk_error, qk_scores, ov_error, ov_output, tuple(heads))


@torch.no_grad()
def find_obstacle(source: Attention, target: Attention) -> str:
    """Return why `source` cannot be projected onto `target`; empty if it can.

    Both may be on the meta device.
    """
    source, target = (copy.deepcopy(layer).to("meta") for layer in (source, target))
    identity = list(range(source.qk.spec.heads))
    try:
        set_scores_(source, target, identity)
        set_output_(source, target, identity)
    except UnsupportedCombination as reason:
        return str(reason)
    return ""


def is_same_form(source: Attention, target: Attention) -> bool:
    """Return whether the parameters of both layers mean the same."""
    return has_same_scores(source, target) and is_same_circuit(source.ov, target.ov)


def has_same_outputs(source: Attention, target: Attention) -> bool:
    """Return whether the parameters of the outputs mean the same in both layers."""
    # Values that are keys are the same only where the keys are.
    same_values = not target.ov.reads_keys or has_same_scores(source, target)
    return is_same_circuit(source.ov, target.ov) and same_values


def needs_averages(source: Attention, target: Attention) -> bool:
    """Return whether the projection weights errors by what the heads write."""
    return not has_same_outputs(source, target) or _has_slices(target)


def _chooses_keys(source: Attention, target: Attention) -> bool:
    """Return whether the keys are to be chosen for scores and outputs, as both read them."""
    is_shared = target.ov.reads_keys and target.qk.keys_are_free
    is_matrix = not (source.no_circuit_reason or target.no_circuit_reason)
    return is_shared and is_matrix and not has_same_outputs(source, target)


def _has_slices(layer: Attention) -> bool:
    return any(circuit.has_head_slices for circuit in (layer.qk, layer.ov))


def has_same_scores(source: Attention, target: Attention) -> bool:
    """Return whether the parameters of the scores mean the same in both layers."""
    widths = {layer.rope_dims.width if layer.rope_dims else 0 for layer in (source, target)}
    if len(widths) > 1:
        return False
    if source.norm is None or target.norm is None:
        return source.norm is target.norm and is_same_circuit(source.qk, target.qk)
    has_same_norm = is_same_circuit(source.norm, target.norm)  # keys of length 1 have two scales
    return has_same_norm and is_same_circuit(source.qk, target.qk)


def is_same_circuit(first: Circuit, second: Circuit) -> bool:
    """Return whether two circuits have the same class, constants and shapes."""

    def form(circuit: Circuit) -> tuple[object, ...]:
        numbers = {k: v for k, v in vars(circuit).items() if isinstance(v, int | float | str)}
        for name in ("training", "lr_multiplier", "bias_lr_multiplier", "lr_scale"):
            numbers.pop(name, None)
        shapes = {name: value.shape for name, value in circuit.state_dict().items()}
        return type(circuit), numbers, shapes

    return form(first) == form(second)


@torch.no_grad()
def assign_heads(source: Attention, target: Attention, moments: Moments) -> list[int]:
    """Return the source head for each position of the target with the least total error.

    Heads move only if they are tied to slices of the stream, and to nothing else.
    """
    heads = list(range(source.qk.spec.heads))
    circuits = (target.qk, target.ov)
    fixed = source.position == "alibi" or any("groups" in circuit.uses for circuit in circuits)
    if fixed or not _has_slices(target) or source.no_circuit_reason or target.no_circuit_reason:
        return heads
    cost_HP = torch.zeros(len(heads), len(heads), dtype=torch.float64)
    for shift in heads:
        order = [(position - shift) % len(heads) for position in heads]
        # A circuit without head slices loses the same in every order, unless its values are keys.
        if target.qk.has_head_slices:
            cost_HP[order, heads] += set_scores_(source, target, order, moments)[1]
        if target.ov.has_head_slices:
            cost_HP[order, heads] += set_output_(source, target, order, moments)[1]
    return assign_positions(cost_HP)


def assign_positions(cost_HP: Tensor) -> list[int]:
    """Return the head for each position with the least total cost."""
    from scipy.optimize import linear_sum_assignment

    heads = list(range(len(cost_HP)))
    _, positions = linear_sum_assignment(cost_HP.numpy())
    # Differences that are only rounding do not move a head.
    if cost_HP[heads, positions].sum() >= cost_HP.trace() * (1 - 1e-9):
        return heads
    return sorted(heads, key=positions.__getitem__)


def set_scores_(
    source: Attention, target: Attention, heads: list[int], moments: Moments | None = None
) -> HeadErrors:
    """Set the scores from the heads in this order, and return the errors.

    Without moments both errors are by entries.
    """
    chooses_keys = _chooses_keys(source, target)
    if has_same_scores(source, target) and heads == sorted(heads) and not chooses_keys:
        target.qk.load_state_dict(source.qk.state_dict())
        for ours, theirs in ((source.norm, target.norm), (source.rope_dims, target.rope_dims)):
            if ours is not None and theirs is not None:
                theirs.load_state_dict(ours.state_dict())
        return torch.zeros(1), torch.zeros(1)
    if target.qk.scores_are_zero and source.no_circuit_reason:  # nothing is left of any scores
        lost_H = torch.full((len(heads),), 1 / len(heads))
        return lost_H, lost_H
    for layer in (source, target):
        if layer.no_circuit_reason and not (layer is target and layer.qk.scores_are_zero):
            raise UnsupportedCombination(layer.no_circuit_reason)
    b_HDD, u_HD = scaled_circuit(source.qk)
    b_HDD, u_HD = b_HDD[heads], None if u_HD is None else u_HD[heads]
    power = None if moments is None else moments.score_power
    if target.qk.scores_are_zero:
        goal_HLD = with_bias(b_HDD, u_HD)
        return _relative_errors(-goal_HLD, goal_HLD, power)
    scale = target.qk.scale
    unscaled = b_HDD / scale, None if u_HD is None else u_HD / scale
    if chooses_keys:
        goal_HLD, m_HDD = with_bias(*unscaled), source.ov.circuit(source.qk)[heads]
        weights = _reorder(moments, heads) or isotropic_moments(len(heads), goal_HLD[0])
        sizes, reads_HDE = (target.qk.key_heads, target.qk.width), _find_reads(source)
        reads_HDE = None if reads_HDE is None else reads_HDE[heads]
        w_GDE = find_keys(goal_HLD, m_HDD, weights, *sizes, reads_HDE)
        left_HLE = fit_queries(goal_HLD, w_GDE, weights, target.qk.max_rank)
        target.qk.set_factors_(left_HLE, w_GDE)
    elif moments is None:
        target.qk.set_circuit_(*unscaled)
    else:
        target.qk.set_nearest_(*unscaled, moments)
    goal_HLD = with_bias(b_HDD, u_HD)
    error_HLD = with_bias(*scaled_circuit(target.qk)) - goal_HLD
    return _relative_errors(error_HLD, goal_HLD, power)


def _find_reads(layer: Attention) -> Tensor | None:
    """Return the directions of the keys' stream that each head reads, as HDE; None: all."""
    scores, outputs = layer.qk.low_rank_factors(), layer.ov.low_rank_factors(layer.qk)
    return None if scores is None or outputs is None else torch.cat([scores[1], outputs[0]], -1)


def set_output_(
    source: Attention, target: Attention, heads: list[int], moments: Moments | None = None
) -> HeadErrors:
    """Do the same for the outputs; biases hold what biases write."""
    if has_same_outputs(source, target) and heads == sorted(heads):
        target.ov.load_state_dict(source.ov.state_dict())
        return torch.zeros(1), torch.zeros(1)
    goal_HDD = source.ov.circuit(source.qk)[heads]
    moments = _reorder(moments, heads)
    target.ov.set_given_scores_(goal_HDD, target.qk, moments)
    bias_D = source.ov.output_bias(source.qk)
    target.ov.set_output_bias_(bias_D - target.ov.output_bias(target.qk))
    error_HDD = target.ov.circuit(target.qk) - goal_HDD
    return _relative_errors(error_HDD, goal_HDD, None if moments is None else moments.output_power)


def _reorder(moments: Moments | None, heads: list[int]) -> Moments | None:
    """Return the moments with the heads in this order."""
    if moments is None:
        return None
    assert moments.z_HDD is not None
    return replace(moments, z_HDD=moments.z_HDD[heads])


def _relative_errors(
    error_HLD: Tensor, goal_HLD: Tensor, power: Callable[[Tensor], Tensor] | None
) -> HeadErrors:
    """Return each head's squared error relative to that of all heads; 0 of a zero matrix is 0."""

    def relative(size: Callable[[Tensor], Tensor]) -> Tensor:
        return size(error_HLD) / size(goal_HLD).sum().clamp(min=torch.finfo(goal_HLD.dtype).tiny)

    by_entries = relative(lambda b_HLD: b_HLD.square().sum((1, 2)))
    return by_entries, relative(power) if power else by_entries

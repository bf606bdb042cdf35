"""A trained layer put into another form, or what of it that form can hold.

What a form leaves free is used to lose less. Within a head the factors are free: `set_circuit_`
sees to it. Heads may change places where a place is tied to a slice of the stream. And what is held
is what counts most for a stream as the layer sees it (seen.py). The stream itself is not rotated:
gains of norms and a tied output would make that another model.

Shape suffixes: T positions, H heads, P places of heads, D d_model, L = D + 1.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from qkablate.attention.layer import Attention
from qkablate.attention.projection.assignment import cheapest
from qkablate.attention.projection.convert import scaled_circuit
from qkablate.attention.projection.moments import Seen, firm, with_bias
from qkablate.attention.spec import Circuit, Meaningless

Parts = tuple[Tensor, Tensor]  # of each head: by entries, and as it is seen


@dataclass(frozen=True)
class Lost:
    """What the projection of one layer lost, as parts of the whole: 0 is exact."""

    qk: float  # Frobenius norm, of all B_h
    qk_seen: float  # root mean square of the scores, but for what softmax cannot see
    ov: float  # Frobenius norm, of all M_h
    ov_seen: float  # root mean square of what the heads write
    heads: tuple[int, ...]  # which head stands in each place


@torch.no_grad()
def look(layers: Sequence[Attention], read: Callable[[], object]) -> list[Seen]:
    """What these layers see while `read` passes a model."""
    sums: dict[Attention, list[Tensor]] = {}

    def add(layer: Attention, given: tuple[Tensor, ...]) -> None:
        for x_1TD in given[0].split(1):  # one sequence at a time: a softmax is T × T for every head
            z_HTD = (layer.weights(x_1TD) @ x_1TD.unsqueeze(1))[0].double()
            x_TL = pad(x_1TD[0].double(), (0, 1), value=1.0)
            own = [x_TL.mT @ x_TL, z_HTD.mT @ z_HTD, torch.tensor(len(x_TL))]
            before = sums.get(layer, [torch.zeros_like(one) for one in own])
            sums[layer] = [a + b for a, b in zip(before, own, strict=True)]

    hooks = [layer.register_forward_pre_hook(add) for layer in layers]
    try:
        read()
    finally:
        for hook in hooks:
            hook.remove()
    found = []
    for layer in layers:
        x_LL, z_HDD, count = sums[layer]
        found.append(Seen(firm(x_LL / count), firm(z_HDD / count)))
    return found


@torch.no_grad()
def project_layer(source: Attention, target: Attention, seen: Seen | None) -> Lost:
    """Set `target` to what it can hold of `source`; for the same form nothing has to be `seen`.
    Raises Meaningless where a circuit is no matrix or cannot be set.
    """
    if same_form(source, target):
        target.load_state_dict(source.state_dict())
        return Lost(0.0, 0.0, 0.0, 0.0, tuple(range(source.qk.spec.heads)))
    assert seen is not None
    if reason := why_not(source, target):
        raise Meaningless(reason)
    # In fp64: what is lost is to be the form's doing alone.
    one, other = (copy.deepcopy(layer).double() for layer in (source, target))
    heads = best_places(one, other, seen)
    qk = _set_scores_(one, other, heads, seen)
    ov = _set_writing_(one, other, heads, seen)
    target.load_state_dict(other.state_dict())
    qk_lost, qk_seen, ov_lost, ov_seen = (float(part.sum().sqrt()) for part in (*qk, *ov))
    return Lost(qk_lost, qk_seen, ov_lost, ov_seen, tuple(heads))


@torch.no_grad()
def why_not(source: Attention, target: Attention) -> str:
    """Why the one cannot be put into the form of the other; empty where it can. Needs no values."""
    one, other = (copy.deepcopy(layer).to("meta") for layer in (source, target))
    home = list(range(source.qk.spec.heads))
    try:
        _set_scores_(one, other, home)
        _set_writing_(one, other, home)
    except Meaningless as refused:
        return str(refused)
    return ""


def same_form(source: Attention, target: Attention) -> bool:
    return same_scores(source, target) and alike(source.ov, target.ov)


def same_scores(source: Attention, target: Attention) -> bool:
    """Whether the parameters that make the scores mean the same in both."""
    return type(source.norm) is type(target.norm) and alike(source.qk, target.qk)


def alike(one: Circuit, other: Circuit) -> bool:
    """Of one form: the same class, with the same constants and the same shapes."""
    constants, shapes = [], []
    for circuit in (one, other):
        own = {k: v for k, v in vars(circuit).items() if isinstance(v, int | float | str)}
        constants.append({k: v for k, v in own.items() if k != "training"})
        shapes.append({name: value.shape for name, value in circuit.state_dict().items()})
    return type(one) is type(other) and constants[0] == constants[1] and shapes[0] == shapes[1]


@torch.no_grad()
def best_places(source: Attention, target: Attention, seen: Seen) -> list[int]:
    """Which head of `source` to put in each place of `target`, so that all together lose least."""
    home = list(range(source.qk.spec.heads))
    if not may_move(source, target):
        return home
    cost_HP = torch.zeros(len(home), len(home), dtype=torch.float64)
    for shift in home:
        order = [(place - shift) % len(home) for place in home]
        # Of a circuit without places every order loses the same.
        if target.qk.has_places:
            cost_HP[order, home] += _set_scores_(source, target, order, seen)[1]
        if target.ov.has_places:
            cost_HP[order, home] += _set_writing_(source, target, order, seen)[1]
    place_of = cheapest(cost_HP.tolist())
    moved, stayed = (float(cost_HP[home, places].sum()) for places in (place_of, home))
    if moved >= stayed * (1 - 1e-9):  # what only rounding prefers stays at home
        return home
    return sorted(home, key=place_of.__getitem__)


def may_move(source: Attention, target: Attention) -> bool:
    """Whether there are places, and nothing else is tied to a head's number."""
    circuits = (target.qk, target.ov)
    tied = source.position == "alibi" or any("groups" in one.uses for one in circuits)
    matrices = not source.no_circuit and not target.no_circuit
    return any(one.has_places for one in circuits) and matrices and not tied


def _set_scores_(
    source: Attention, target: Attention, heads: list[int], seen: Seen | None = None
) -> Parts:
    """Set the scores with the heads in this order; the squares of the parts that are lost. With
    nothing `seen`, by entries.
    """
    if same_scores(source, target) and heads == sorted(heads):
        target.qk.load_state_dict(source.qk.state_dict())
        if source.norm is not None and target.norm is not None:
            target.norm.load_state_dict(source.norm.state_dict())
        return torch.zeros(1), torch.zeros(1)
    for layer in (source, target):
        if layer.no_circuit:
            raise Meaningless(layer.no_circuit)
    b_HDD, u_HD = scaled_circuit(source.qk)
    b_HDD, u_HD = b_HDD[heads], None if u_HD is None else u_HD[heads]
    scale = target.qk.scale
    given = b_HDD / scale, None if u_HD is None else u_HD / scale
    if seen is None:
        target.qk.set_circuit_(*given)
    else:
        target.qk.set_nearest_(*given, seen)
    wanted_HLD = with_bias(b_HDD, u_HD)
    apart_HLD = with_bias(*scaled_circuit(target.qk)) - wanted_HLD
    return _parts(apart_HLD, wanted_HLD, None if seen is None else seen.scores)


def _set_writing_(
    source: Attention, target: Attention, heads: list[int], seen: Seen | None = None
) -> Parts:
    """The same of what is written; what biases write is held by biases."""
    # Values that are the keys are the same only where the keys are.
    own_values = target.ov.cached != "k" or same_scores(source, target)
    if alike(source.ov, target.ov) and heads == sorted(heads) and own_values:
        target.ov.load_state_dict(source.ov.state_dict())
        return torch.zeros(1), torch.zeros(1)
    wanted_HDD = source.ov.circuit(source.qk)[heads]
    if seen is None:
        target.ov.set_circuit_(wanted_HDD)
    else:
        seen = replace(seen, z_HDD=seen.z_HDD[heads])
        target.ov.set_nearest_(wanted_HDD, seen)
    target.ov.set_offset_(source.ov.offset(source.qk))
    apart_HDD = target.ov.circuit(target.qk) - wanted_HDD
    return _parts(apart_HDD, wanted_HDD, None if seen is None else seen.writing)


def _parts(apart_HLD: Tensor, whole_HLD: Tensor, size: Callable[[Tensor], Tensor] | None) -> Parts:
    """Of each head, the square of what is lost as a part of the square of the whole: by entries,
    and by the `size` that is seen; 0 of nothing is 0.
    """

    def entries(b_HLD: Tensor) -> Tensor:
        return b_HLD.square().sum((1, 2))

    least = torch.finfo(whole_HLD.dtype).tiny
    by_entries, by_size = (
        own(apart_HLD) / own(whole_HLD).sum().clamp(min=least) for own in (entries, size or entries)
    )
    return by_entries, by_size

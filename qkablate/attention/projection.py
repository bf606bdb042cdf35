"""A trained layer put into another form, or what of it that form can hold.

What a form leaves free is used to lose less: within a head the factors are free (`set_circuit_`
sees to it), and heads may change places where the form ties a place to a slice of the stream. The
stream itself is not rotated: gains of norms and a tied output make that another model.

Shape suffixes: H heads, D d_model, L what is flattened.
"""

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qkablate.attention.circuits import scaled_circuit, with_bias
from qkablate.attention.layer import Attention
from qkablate.attention.spec import Circuit, Meaningless


@dataclass(frozen=True)
class Lost:
    """What the projection of one layer lost, as parts of the norms of B and M: 0 is exact."""

    qk: float
    ov: float
    heads: tuple[int, ...]  # which head stands in each place


@torch.no_grad()
def project_layer(source: Attention, target: Attention) -> Lost:
    """Set `target` to what it can hold of `source`. Raises Meaningless where a circuit is no matrix
    or cannot be set."""
    if same_scores(source, target) and alike(source.ov, target.ov):
        target.load_state_dict(source.state_dict())
        return Lost(0.0, 0.0, tuple(range(source.qk.spec.heads)))
    # In fp64: what is lost is to be the form's doing alone.
    one, other = (copy.deepcopy(layer).double() for layer in (source, target))
    heads = best_places(one, other)
    qk, ov = _set_scores_(one, other, heads), _set_writing_(one, other, heads)
    target.load_state_dict(other.state_dict())
    return Lost(float(qk), float(ov), tuple(heads))


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


def same_scores(source: Attention, target: Attention) -> bool:
    """Whether the parameters that make the scores mean the same in both."""
    norms = [type(layer.norm) for layer in (source, target)]
    return norms[0] is norms[1] and alike(source.qk, target.qk)


def alike(one: Circuit, other: Circuit) -> bool:
    """Of one form: the same class, with the same constants and the same shapes."""
    constants, shapes = [], []
    for circuit in (one, other):
        own = {k: v for k, v in vars(circuit).items() if isinstance(v, int | float | str)}
        constants.append({k: v for k, v in own.items() if k != "training"})
        shapes.append({name: value.shape for name, value in circuit.state_dict().items()})
    return type(one) is type(other) and constants[0] == constants[1] and shapes[0] == shapes[1]


def best_places(source: Attention, target: Attention) -> list[int]:
    """Which head of `source` loses least in each place of `target`, all of them together."""
    heads = source.qk.spec.heads
    home = list(range(heads))
    if not may_move(source, target):
        return home
    cost_HP = torch.zeros(heads, heads, dtype=torch.float64)  # of a head in a place
    for shift in range(heads):
        order = [(place - shift) % heads for place in home]
        # Of a circuit without places every order loses the same.
        if target.qk.has_places:
            cost_HP[order, home] += _lost_scores(source, target, order)
        if target.ov.has_places:
            cost_HP[order, home] += _lost_writing(source, target, order)
    places = cheapest(cost_HP.tolist())
    costs = [float(cost_HP[home, own].sum()) for own in (places, home)]
    if costs[0] >= costs[1] * (1 - 1e-9):  # what only rounding prefers stays at home
        return home
    return sorted(home, key=places.__getitem__)


def may_move(source: Attention, target: Attention) -> bool:
    """Whether there are places, and nothing else is tied to a head's number."""
    circuits = (target.qk, target.ov)
    tied = source.position == "alibi" or any("groups" in one.uses for one in circuits)
    matrices = not source.no_circuit and not target.no_circuit
    return any(one.has_places for one in circuits) and matrices and not tied


def _set_scores_(source: Attention, target: Attention, heads: list[int]) -> Tensor:
    if same_scores(source, target) and heads == sorted(heads):
        target.qk.load_state_dict(source.qk.state_dict())
        if source.norm is not None and target.norm is not None:
            target.norm.load_state_dict(source.norm.state_dict())
        return torch.zeros(())
    for layer in (source, target):
        if layer.no_circuit:
            raise Meaningless(layer.no_circuit)
    return _lost_scores(source, target, heads).sum().sqrt()


def _set_writing_(source: Attention, target: Attention, heads: list[int]) -> Tensor:
    # Values that are the keys are the same only where the keys are.
    own_values = target.ov.cached != "k" or same_scores(source, target)
    if alike(source.ov, target.ov) and heads == sorted(heads) and own_values:
        target.ov.load_state_dict(source.ov.state_dict())
        return torch.zeros(())
    return _lost_writing(source, target, heads).sum().sqrt()


def _lost_scores(source: Attention, target: Attention, heads: list[int]) -> Tensor:
    """Set the scores with the heads in this order; of each place the square of what is lost."""
    b_HDD, u_HD = scaled_circuit(source.qk)
    b_HDD, u_HD = b_HDD[heads], None if u_HD is None else u_HD[heads]
    wanted_HL = with_bias(b_HDD, u_HD).flatten(1)
    scale = target.qk.scale
    target.qk.set_circuit_(b_HDD / scale, None if u_HD is None else u_HD / scale)
    found_HL = with_bias(*scaled_circuit(target.qk)).flatten(1)
    return _parts(found_HL - wanted_HL, wanted_HL)


def _lost_writing(source: Attention, target: Attention, heads: list[int]) -> Tensor:
    """The same of what is written; what biases write is held by biases."""
    wanted_HDD = source.ov.circuit(source.qk)[heads]
    target.ov.set_circuit_(wanted_HDD)
    target.ov.set_offset_(source.ov.offset(source.qk))
    found_HDD = target.ov.circuit(target.qk)
    return _parts((found_HDD - wanted_HDD).flatten(1), wanted_HDD.flatten(1))


def _parts(apart_HL: Tensor, whole_HL: Tensor) -> Tensor:
    """Squares, as parts of the square of the whole; 0 of nothing is 0."""
    least = torch.finfo(whole_HL.dtype).tiny
    return apart_HL.square().sum(1) / whole_HL.square().sum().clamp(min=least)


def cheapest(cost: Sequence[Sequence[float]]) -> list[int]:
    """The place of every head that costs least in sum, exactly: shortest augmenting paths (Kuhn,
    1955; Jonker & Volgenant, 1987), in O(n³). Of equals the identity."""
    count = len(cost)
    of_head, of_place = [0.0] * count, [0.0] * (count + 1)  # prices; the last place is the door
    owner = [-1] * (count + 1)
    for head in range(count):
        owner[count], here = head, count
        least, came_from = [math.inf] * count, [count] * count
        seen = {count}
        while owner[here] >= 0:
            now = owner[here]
            for place in range(count):
                if place not in seen:
                    reduced = cost[now][place] - of_head[now] - of_place[place]
                    if reduced < least[place]:
                        least[place], came_from[place] = reduced, here
            there = min((p for p in range(count) if p not in seen), key=least.__getitem__)
            step = least[there]
            for place in seen:
                of_head[owner[place]] += step
                of_place[place] -= step
            for place in range(count):
                if place not in seen:
                    least[place] -= step
            here = there
            if owner[here] >= 0:
                seen.add(here)
        while here != count:  # everyone on the way moves on
            owner[here], here = owner[came_from[here]], came_from[here]
        owner[count] = -1
    places = [0] * count
    for place in range(count):
        places[owner[place]] = place
    return places

"""Reference implementation of attention: one query, one key, one head at a time.

Nothing here calls a circuit: parameters by their names, sizes from the spec, and a few lines for
each class. x and y are single tokens, h is a head; d, k, r as in the equations.
"""

import math
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor


def columns(a, name: str, n: int, width: int) -> Any:
    """Return the n-th `width` columns of a matrix or entries of a bias; 0 for a missing bias."""
    return a.p[name][..., n * width : (n + 1) * width] if name in a.p else 0.0


def affine(a, x: Tensor, w: str, b: str, n: int, width: int) -> Tensor:
    y: Tensor = x @ columns(a, w, n, width) + columns(a, b, n, width)
    return y


def head_slice(a, x: Tensor, h: int) -> Tensor:
    """Return x E_h, the head's slice of a token."""
    width = len(x) // a.heads
    return x[h * width : (h + 1) * width]


def symmetric(a, x: Tensor, h: int) -> Tensor:
    """Return x W + u with W_ij = W_ji; the parameters are the triangle i ≤ j, row by row."""
    at = {pair: n for n, pair in enumerate((i, j) for i in range(a.d) for j in range(i, a.d))}
    mirrored = [[at[min(i, j), max(i, j)] for j in range(a.d)] for i in range(a.d)]
    y: Tensor = x @ a.p["triangle"][h][torch.tensor(mirrored)] + columns(a, "u", h, a.d)
    return y


def group(a, h: int) -> int:
    return int(h // (a.heads // a.groups))


def w_q(a, x: Tensor, h: int, width: int) -> Tensor:
    return affine(a, x, "w_q", "b_q", h, width)


def w_k(a, y: Tensor, h: int, width: int) -> Tensor:
    return affine(a, y, "w_k", "b_k", h, width)


# The query and the key of a token in a head.
QUERY = {
    "SeparateQK": lambda a, x, h: w_q(a, x, h, a.k),
    "LowRankQK": lambda a, x, h: w_q(a, x, h, a.r),
    "WideQK": lambda a, x, h: w_q(a, x, h, a.d),
    "ReassociatedQK": lambda a, x, h: w_q(a, x, h, a.k) @ columns(a, "w_k", h, a.k).T,
    "GroupedQK": lambda a, x, h: w_q(a, x, h, a.k),
    "FourMatrixQK": lambda a, x, h: w_q(a, x @ a.p["a_q"], h, a.k),
    "CollaborativeQK": lambda a, x, h: w_q(a, x, 0, a.r) * a.p["mix"][h, 0],
    "MergedQK": lambda a, x, h: affine(a, x, "w_qk", "u", h, a.e),
    "SymmetricQK": symmetric,
    "SharedQK": lambda a, x, h: w_k(a, x, h, a.k),
    "SymDiag": lambda a, x, h: w_k(a, x, h, a.k) * columns(a, "diagonal", h, a.k),
    "SymPairwise": lambda a, x, h: w_k(a, x, h, a.k) @ a.p["u"][h],
    "NoQ": head_slice,
    "NoK": lambda a, x, h: w_q(a, x, h, a.e // a.heads),
    "NoQK": head_slice,
    "LatentQK": lambda a, x, h: w_q(a, x, h, a.k) @ columns(a, "w_k", h, a.k).T,
}
KEY = {
    "SeparateQK": lambda a, y, h: w_k(a, y, h, a.k),
    "LowRankQK": lambda a, y, h: w_k(a, y, h, a.r),
    "WideQK": lambda a, y, h: w_k(a, y, h, a.d),
    "ReassociatedQK": lambda a, y, h: y,
    "GroupedQK": lambda a, y, h: w_k(a, y, group(a, h), a.k),
    "FourMatrixQK": lambda a, y, h: w_k(a, y @ a.p["a_k"], h, a.k),
    "CollaborativeQK": lambda a, y, h: w_k(a, y, 0, a.r),
    "MergedQK": lambda a, y, h: y,
    "SymmetricQK": lambda a, y, h: y,
    "SharedQK": lambda a, y, h: w_k(a, y, h, a.k),
    "SymDiag": lambda a, y, h: w_k(a, y, h, a.k),
    "SymPairwise": lambda a, y, h: w_k(a, y, h, a.k),
    "NoQ": lambda a, y, h: w_k(a, y, h, a.k),
    "NoK": head_slice,
    "NoQK": head_slice,
    "LatentQK": lambda a, y, h: y @ a.p["w_c"],
}
VALUE = {
    "SeparateOV": lambda a, y, h, key: affine(a, y, "w_v", "b_v", h, a.k),
    "GroupedOV": lambda a, y, h, key: affine(a, y, "w_v", "b_v", group(a, h), a.k),
    "FourOV": lambda a, y, h, key: affine(a, y @ a.p["a_v"], "w_v", "b_v", h, a.k),
    "NoV": lambda a, y, h, key: head_slice(a, y, h) * (a.value_gain if a.matched else 1),
    "NoO": lambda a, y, h, key: (
        affine(a, y, "w_v", "b_v", h, a.k) * (a.length * a.residual if a.matched else 1)
    ),
    "NoVO": lambda a, y, h, key: head_slice(a, y, h) * a.p["gain"][h],
    "MergedOV": lambda a, y, h, key: y,
    "TiedOV": lambda a, y, h, key: key,
    "LatentOV": lambda a, y, h, key: affine(a, key, "w_v", "b_v", h, a.k),
}
OUT = {"MergedOV": "w_ov", "NoO": None, "NoVO": None}  # else w_o


def scale(name: str, a) -> float:
    """Return the scale of the scores, 1/√d_head by default."""
    slices = 1 / math.sqrt(a.e // a.heads)  # of the keys' stream
    if not a.matched:
        special = {"CollaborativeQK": math.sqrt(a.heads / (a.r or 1)), "NoK": slices}
        return special.get(name, 1 / math.sqrt(a.k))
    factors: dict[str, float] = {
        "LowRankQK": 1 / math.sqrt(a.r or 1),
        "WideQK": 1 / math.sqrt(a.d),
        "CollaborativeQK": math.sqrt(a.heads / (a.r or 1)),
        "NoQ": a.length / math.sqrt(a.k),
        "NoK": a.key_length * slices,
        "NoQK": a.length**2 / math.sqrt(a.k),
    }
    if a.cross:
        factors["SharedQK"] = 1 / math.sqrt(a.k * (1 + 1 / a.heads))
    return factors.get(name, 1 / math.sqrt(a.k))


def normed_query(layer, query: Tensor, h: int) -> Tensor:
    """Return the query after the norm, if there is one."""
    if type(layer.norm).__name__ != "QKNorm":
        return query
    normed: Tensor = layer.norm.gain[h] * query / query.norm()
    return normed


def normed_key(layer, key: Tensor) -> Tensor:
    """Return the key after the norm, if there is one."""
    return key if layer.norm is None else key / key.norm()


def factor(layer, name: str, a, width: int) -> float:
    """Return the scale of the scores of keys of this width, after the norm."""
    norm = type(layer.norm).__name__
    if norm == "NoneType":
        return scale(name, a)
    if norm == "QKNorm":
        return 1.0
    if layer.norm.spec.init == "naive":
        return 1 / math.sqrt(a.k)
    # Initially entries of y have size 1 and those of y W size σ√e.
    is_stream = name in ("MergedQK", "SymmetricQK", "ReassociatedQK", "NoK", "NoQK", "LatentQK")
    entry = 1 if is_stream else a.key_length
    return scale(name, a) * entry * math.sqrt(width)


def rotated(x: Tensor, position: int) -> Tensor:
    """Rotate the plane (a, a + E/2) by the angle position · 10000^(−2a/E)."""
    half = len(x) // 2
    out = [*x]
    for a in range(half):
        angle = position * 10000 ** (-2 * a / len(x))
        cos, sin = math.cos(angle), math.sin(angle)
        out[a] = cos * x[a] - sin * x[a + half]
        out[a + half] = sin * x[a] + cos * x[a + half]
    return torch.stack(out)


def rotated_score(rope_dims, x: Tensor, y: Tensor, h: int, i: int, j: int) -> Tensor:
    """Return the score of the dimensions that are rotated beside those of the circuit."""
    a, width = facts(rope_dims), rope_dims.width
    query, key = rotated(x @ columns(a, "w_q", h, width), i), rotated(y @ a.p["w_k"], j)
    score: Tensor = query @ key / math.sqrt(a.k + width)
    return score


def facts(circuit) -> Any:
    spec = circuit.spec
    e, key_sigma = spec.d_source or spec.d_model, spec.source_sigma or spec.sigma
    return SimpleNamespace(
        p=dict(circuit.named_parameters()),
        d=spec.d_model,
        e=e,
        key_length=key_sigma * math.sqrt(e),
        value_gain=key_sigma * math.sqrt(spec.d_model),
        k=spec.d_model // spec.heads,
        heads=spec.heads,
        r=spec.rank,
        groups=spec.groups,
        length=spec.sigma * math.sqrt(spec.d_model),
        residual=spec.residual,
        matched=spec.init == "matched",
        cross=spec.source is not None,
    )


def attention(layer, x_BTD: Tensor, y_BSD: Tensor | None, causal: bool) -> Tensor:
    """Return the output of a layer; y is None for self-attention."""
    return torch.stack(
        [
            one_sequence(layer, x_TD, x_TD if y_BSD is None else y_BSD[n], y_BSD is None, causal)
            for n, x_TD in enumerate(x_BTD)
        ]
    )


def one_sequence(layer, x_TD: Tensor, y_SD: Tensor, same: bool, causal: bool) -> Tensor:
    a, b = facts(layer.qk), facts(layer.ov)
    name, write = type(layer.qk).__name__, type(layer.ov).__name__
    written: list[Any] = [0.0] * len(x_TD)
    for h in range(a.heads):
        content = name in QUERY
        keys: list[Any] = [KEY[name](a, y, h) for y in y_SD] if content else [None] * len(y_SD)
        values = [VALUE[write](b, y, h, key) for y, key in zip(y_SD, keys, strict=True)]
        if content:
            by = factor(layer, name, a, len(keys[0]))
            queries = [normed_query(layer, QUERY[name](a, x, h), h) for x in x_TD]
            keys = [normed_key(layer, key) for key in keys]
            if layer.rope_dims is not None:
                by *= math.sqrt(a.k / (a.k + layer.rope_dims.width))
            elif layer.position == "rope":
                queries = [rotated(q, i) for i, q in enumerate(queries)]
                keys = [rotated(k, j) for j, k in enumerate(keys)]
        for i in range(len(x_TD)):
            visible = [j for j in range(len(y_SD)) if j <= i or not causal]
            if layer.mask_self and same and visible != [i]:
                visible.remove(i)
            row = []
            for j in visible:
                if name == "StaticScores":
                    score = a.p["table"][h, i, j]
                elif name == "Uniform":
                    score = torch.zeros((), dtype=x_TD.dtype)
                else:
                    score = by * (queries[i] @ keys[j])
                if layer.rope_dims is not None:
                    score = score + rotated_score(layer.rope_dims, x_TD[i], y_SD[j], h, i, j)
                if layer.position == "alibi":
                    score = score - 2 ** (-8 * (h + 1) / a.heads) * abs(i - j)
                row.append(score)
            weights = (torch.stack(row) - max(row).detach()).exp()
            weights = weights / weights.sum()
            average = sum(weight * values[j] for weight, j in zip(weights, visible, strict=True))
            matrix = OUT.get(write, "w_o")
            if matrix is None:  # into the head's slice
                rest = (a.heads - h - 1) * a.k
                written[i] = written[i] + torch.nn.functional.pad(average, (h * a.k, rest))
            else:
                rows = slice(h * len(average), (h + 1) * len(average))
                written[i] = written[i] + average @ b.p[matrix][rows]
    bias = b.p.get("b_ov" if write == "MergedOV" else "b_o", 0.0)
    return torch.stack([out + bias for out in written])

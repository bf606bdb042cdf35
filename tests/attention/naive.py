"""Attention written out: one query, one key, one head at a time, from the equations alone."""

import math

import torch
from torch import Tensor

from qkablate.attention import QK


def scores(qk: QK, x_TD: Tensor, y_SD: Tensor, head: int) -> Tensor:
    """score(i, j) of one head, unscaled, from the parameters by their names."""
    k, d = qk.spec.d_head, qk.spec.d_model
    own = slice(head * k, (head + 1) * k)
    p = dict(qk.named_parameters())
    name = type(qk).__name__
    rows = []
    for x in x_TD:
        row = []
        for y in y_SD:
            if name == "MergedQK":
                wide = slice(head * d, (head + 1) * d)
                query, key = x @ p["w_qk"][:, wide], y
                if "u" in p:
                    query = query + p["u"][wide]
            else:
                key = y @ p["w_k"][:, own]
                if "b_k" in p:
                    key = key + p["b_k"][own]
                if name == "NoQ":
                    query = x[own]
                else:
                    w, b = ("w_k", "b_k") if name == "SharedQK" else ("w_q", "b_q")
                    query = x @ p[w][:, own]
                    if b in p:
                        query = query + p[b][own]
            row.append((query * key).sum())
        rows.append(torch.stack(row))
    return torch.stack(rows)


def scale(qk: QK) -> float:
    """1/√d_head; for the matched start of no_q times σ√d."""
    spec = qk.spec
    matched_slice = type(qk).__name__ == "NoQ" and spec.init == "matched"
    return (spec.sigma * math.sqrt(spec.d_model) if matched_slice else 1) / math.sqrt(spec.d_head)


def attention(layer, x_BTD: Tensor, y_BSD: Tensor, causal: bool) -> Tensor:
    """The whole layer."""
    qk, ov = layer.qk, layer.ov
    k, p = qk.spec.d_head, dict(ov.named_parameters())
    batch = []
    for x_TD, y_SD in zip(x_BTD, y_BSD, strict=True):
        heads = []
        for head in range(qk.spec.heads):
            own = slice(head * k, (head + 1) * k)
            s_TS = scores(qk, x_TD, y_SD, head) * scale(qk)
            values = y_SD @ p["w_v"][:, own] + (p["b_v"][own] if "b_v" in p else 0)
            outputs = []
            for i, row in enumerate(s_TS):
                seen = row[: i + 1] if causal else row
                weights = (seen - seen.max()).exp()
                outputs.append((weights / weights.sum()) @ values[: len(seen)])
            heads.append(torch.stack(outputs))
        out = torch.cat(heads, dim=1) @ p["w_o"]
        batch.append(out + p["b_o"] if "b_o" in p else out)
    return torch.stack(batch)

"""Keys that are read from a latent stream. Shape suffixes as in base.py, and R for a rank."""

import math

import torch
from torch import Tensor

from qkablate.attention.linalg import solve_bias, truncated_svd
from qkablate.attention.qk.base import QK
from qkablate.attention.spec import Draw, Spec
from qkablate.attention.tensors import (
    by_head,
    concat_heads,
    empty_bias,
    empty_matrix,
    map_to_heads,
)


class LatentQK(QK):
    """Multi-head latent attention (DeepSeek-V2, 2024): keys from c = y W_c, of width r.

    Two orders of multiplication give the same scores. Where the queries absorb W_k, one merged
    matrix W_q W_kᵀ of d × r takes the place of the two, c is the key of all heads, and a decoder
    caches c alone. Where each head has keys c W_k of width d_head (`head_keys`), a token takes
    fewer FLOPs; layers do that unless they decode. The queries are not compressed and c is not
    normalized, unlike DeepSeek's, so that B_h is one matrix.

    Entries of c are initialized as large as those of y, so that keys c W_k are as long as
    standard's if W_k is initialized at √(e/r) of its scale. The default initialization (`naive`)
    of W_k is that of a matrix which reads the stream.
    """

    factors, key_factors = 3, 2
    keys_are_free = True
    equation = "B_h = W_q (W_c W_k)ᵀ"
    params = "d² + e r + d r"
    source = "DeepSeek-V2 2024"
    uses = ("rank",)
    cached = "c"
    match = "spread"
    naive_match = "none"
    no_rope_reason = "the queries could not absorb W_k with a rotation between W_q and W_k"

    def __init__(self, spec: Spec) -> None:
        super().__init__(spec)
        assert spec.rank is not None
        d, e, rank = spec.d_model, spec.d_keys, spec.rank
        self.width, self.key_heads = rank, 1
        self.w_q, self.w_c, self.w_k = (empty_matrix(*n) for n in ((d, d), (e, rank), (rank, d)))
        self.b_q = empty_bias(spec, d)
        # Initial standard deviation of the entries of c, and of W_k.
        is_matched = spec.init == "matched"
        self.latent_std = 1.0 if is_matched else spec.key_std
        self.up_std = spec.key_std / math.sqrt(rank if is_matched else e)
        self.key_length = self.latent_std * self.up_std * math.sqrt(rank) / spec.key_std
        # The gradient of W_c sums over the d columns of W_k.
        moved = rank / e * self.latent_std + self.latent_speed
        self.lr_multiplier = (1 + spec.key_speed) / (self.key_length + spec.key_speed * moved)
        self.bias_lr_multiplier = 1 / self.key_length

    @property
    def latent_speed(self) -> float:
        """Initial Σ|gradient| of W_c relative to standard's W_k; to its W_v, that of values."""
        return self.up_std * self.width / math.sqrt(self.spec.d_model)

    @property
    def max_rank(self) -> int:
        return min(self.width, self.spec.d_head)

    @property
    def key_norm(self) -> float:
        return math.sqrt(self.width) * self.latent_std

    @torch.no_grad()
    def init_(self, draw: Draw) -> None:
        e = self.spec.d_keys
        for name, parameter in self.named_parameters():
            parameter.copy_(draw(name, parameter.shape, fan_in=e if name == "w_k" else None))
        self.w_c.mul_(self.latent_std / self.spec.key_std)
        self.w_k.mul_(self.up_std / self.spec.key_std * math.sqrt(e))

    def queries(self, x_BTD: Tensor) -> Tensor:
        return self.head_queries(x_BTD) @ by_head(self.w_k, self.spec.heads).mT

    def keys(self, y_BSD: Tensor) -> Tensor:
        return map_to_heads(y_BSD, self.w_c, None, 1)

    def head_queries(self, x_BTD: Tensor) -> Tensor:
        """Return the queries x W_q of the heads, without W_k."""
        return map_to_heads(x_BTD, self.w_q, self.b_q, self.spec.heads)

    def head_keys(self, c_B1SR: Tensor) -> Tensor:
        """Return the keys c W_k of the heads."""
        return map_to_heads(c_B1SR.squeeze(1), self.w_k, None, self.spec.heads)

    def low_rank_factors(self) -> tuple[Tensor, Tensor]:
        heads = self.spec.heads
        if self.width <= self.spec.d_head:
            return self.affine_maps()[:2]
        return by_head(self.w_q, heads), self.w_c @ by_head(self.w_k, heads)

    def flops_per_key(self) -> int:
        """Return the FLOPs per key of W_c, and of W_k unless the queries absorb it."""
        return 2 * (self.w_c.numel() + self.w_k.numel() * self.is_by_head)

    def set_circuit_(self, b_HDD: Tensor, u_HD: Tensor | None = None) -> None:
        """Set the nearest product of rank d_head per head, and then the nearest latent stream."""
        w_q_HDK, w_HEK = truncated_svd(b_HDD, self.spec.d_head)
        w_c_1ER, w_k_1FR = truncated_svd(concat_heads(w_HEK)[None], self.width)
        self.w_q.copy_(concat_heads(w_q_HDK))
        self.w_c.copy_(w_c_1ER[0])
        self.w_k.copy_(w_k_1FR[0].T)
        if self.b_q is not None:
            keys_HEK = self.w_c @ by_head(self.w_k, self.spec.heads)
            self.b_q.copy_(solve_bias(keys_HEK, u_HD))

    def set_factors_(self, left_HLE: Tensor, w_GDE: Tensor) -> None:
        """Set W_c, and left_h to its nearest product of rank d_head."""
        w_q_HLK, w_k_HEK = truncated_svd(left_HLE, self.spec.d_head)
        self.w_q.copy_(concat_heads(w_q_HLK[:, :-1]))
        self.w_c.copy_(w_GDE[0])
        self.w_k.copy_(concat_heads(w_k_HEK))
        if self.b_q is not None:
            self.b_q.copy_(w_q_HLK[:, -1].flatten())

"""The QK circuit: parametrizations of the scores  score_h(i, j) = scale · x_iᵀ B_h x_j.

A class computes queries from one stream and keys from another; everything else (B_h, conversions,
costs, caches, checks) follows from these two maps.

Shape suffixes: B batch, T queries, S keys, D d_model or, of keys, d_source, H heads, G key heads
(H, or fewer, shared), K head size, E width of the score product.
"""

import copy
import math
from typing import ClassVar

from torch import Tensor
from torch.nn import Parameter

from qkablate.attention.linalg import affine_basis
from qkablate.attention.projection.moments import Moments, sqrt_and_inverse, with_bias
from qkablate.attention.spec import Circuit, Spec, UnsupportedCombination


class QK(Circuit):
    """Base of the QK circuits."""

    # What a decoder must cache for the keys: "k" the keys, "x" the stream itself (the keys are read
    # from it without a weight), "c" a latent stream, the key of all heads, "" nothing.
    cached: ClassVar[str] = "k"
    no_rope_reason: ClassVar[str] = ""  # why keys and queries cannot be rotated

    can_start_symmetric: ClassVar[bool] = False  # W_q and W_k, if it has any, are of one shape
    key_factors = 1  # number of the factors that belong to the keys
    keys_are_free: ClassVar[bool] = False  # True if `set_factors_` takes any w_GDE
    only_diagonal_differs = False  # initial scores match standard's except for i = j
    spread = 1.0  # what the scale divides by, so that initial scores spread as standard's

    def __init__(self, spec: Spec) -> None:
        super().__init__(spec)
        self.width, self.key_heads = spec.d_head, spec.heads  # E, G
        self.scale = 1 / math.sqrt(spec.d_head)

    def queries(self, x_BTD: Tensor) -> Tensor:
        """Return q_BHTE, an affine map of the query stream."""
        raise NotImplementedError(f"{type(self).__name__} does not define `queries`")

    def keys(self, y_BSD: Tensor) -> Tensor:
        """Return k_BGSE, an affine map of the key stream."""
        raise NotImplementedError(f"{type(self).__name__} does not define `keys`")

    def forward(self, x_BTD: Tensor, y_BSD: Tensor) -> tuple[Tensor, Tensor]:
        return self.queries(x_BTD), self.keys(y_BSD)

    def unused_parameters(self) -> list[Parameter]:
        """Return the parameters that the scores do not depend on."""
        return []

    def score_bias(self, first: int, queries: int, keys: int) -> Tensor | None:
        """Return what is added to the scores of the query positions from `first` on, as HTS."""
        return None

    def affine_maps(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return (Q_HDE, K_HDE, a_HE): queries are x Q_h + a_h and keys y K_h + c_h.

        So B_h = Q_h K_hᵀ and u_h = K_h a_h. The contribution of c_h is the same for every key, and
        softmax is invariant to it. Raises UnsupportedCombination where the scores are not bilinear.
        """
        if self.no_circuit_reason:
            raise UnsupportedCombination(self.no_circuit_reason)
        x_1ND, y_1ND = (affine_basis(self.like, d) for d in (self.spec.d_model, self.spec.d_keys))
        q_HNE, k_GNE = self.queries(x_1ND)[0], self.keys(y_1ND)[0]
        k_HNE = k_GNE.repeat_interleave(self.spec.heads // k_GNE.shape[0], 0)
        return q_HNE[:, 1:] - q_HNE[:, :1], k_HNE[:, 1:] - k_HNE[:, :1], q_HNE[:, 0]

    def low_rank_factors(self) -> tuple[Tensor, Tensor] | None:
        """Return (left_HDE, right_HDE) with B_h = left_h right_hᵀ; None for a full matrix."""
        return self.affine_maps()[:2]

    def circuit(self) -> tuple[Tensor, Tensor | None]:
        """Return B_HDD, and with biases u_HD: score = scale · (x_iᵀ B_h x_j + u_h·x_j).

        Up to what softmax over j is invariant to.
        """
        q_HDE, k_HDE, a_HE = self.affine_maps()
        u_HD = (k_HDE @ a_HE.unsqueeze(-1)).squeeze(-1) if self.spec.bias else None
        return q_HDE @ k_HDE.mT, u_HD

    def set_circuit_(self, b_HDD: Tensor, u_HD: Tensor | None = None) -> None:
        """Set B_h (and u_h), or the part of them that this form can hold.

        Like `set_nearest_`, it is called under `torch.no_grad`.
        """
        raise UnsupportedCombination("its scores cannot be set from a given B_h")

    def set_factors_(self, left_HLE: Tensor, w_GDE: Tensor) -> None:
        """Set B_h to left_h w_gᵀ, and u_h to its last row where the form has biases.

        The keys are a multiple of y w_g.
        """
        raise UnsupportedCombination("its keys cannot be chosen freely")

    def set_nearest_(self, b_HDD: Tensor, u_HD: Tensor | None, moments: Moments) -> None:
        """Set B_h so that the scores of a stream of these moments change little.

        Of the nearest matrices in several bases, the one with the smallest error is kept.
        """
        target_HLD = with_bias(b_HDD, u_HD)

        def error() -> float:
            return float(moments.score_power(with_bias(*self.circuit()) - target_HLD).sum())

        self.set_circuit_(b_HDD, u_HD)
        smallest, best = error(), copy.deepcopy(self.state_dict())
        if smallest <= 1e-18 * float(moments.score_power(target_HLD).sum()):
            return
        x_DD, keys_DD = moments.x_LL[..., :-1, :-1], moments.key_covariance()
        bases = [(x_DD, keys_DD)]
        if x_DD.shape == keys_DD.shape:  # some forms need the same basis on both sides
            bases += [(x_DD, x_DD), (keys_DD, keys_DD)]
        for left_DD, right_DD in bases:
            left, left_inverse = sqrt_and_inverse(left_DD)
            right, right_inverse = sqrt_and_inverse(right_DD)
            self.set_circuit_(left @ b_HDD @ right, u_HD)
            self.set_circuit_(left_inverse @ self.circuit()[0] @ right_inverse, u_HD)
            if (current := error()) < smallest:
                smallest, best = current, copy.deepcopy(self.state_dict())
        self.load_state_dict(best)

    @property
    def max_rank(self) -> int:
        """Largest rank of B_h."""
        return self.width

    @property
    def key_norm(self) -> float:
        """Expected length of a key at initialization, for a normalized stream."""
        return math.sqrt(self.width) * (1 if self.cached == "x" else self.spec.key_std)

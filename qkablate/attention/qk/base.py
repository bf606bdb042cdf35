"""The QK circuit: ways to parametrise the scores  score_h(i, j) = scale · x_iᵀ B_h x_j.

A class gives queries from one stream and keys from another; everything else (B_h, conversions,
costs, caches, checks) follows from these two maps.

Shape suffixes: B batch, T queries, S keys, D d_model, H heads, G key heads (H, or fewer, shared),
K head size, E width of the score product.
"""

import copy
import math
from typing import ClassVar

import torch
from torch import Tensor

from qkablate.attention.projection.moments import Seen, roots, with_bias
from qkablate.attention.spec import Circuit, Meaningless, Spec


class QK(Circuit):
    """Base of the QK circuits."""

    # What a decoder has to keep of the past to have the keys: "k" the keys, "x" the stream itself
    # (the keys are read off it without a weight), "" nothing.
    cached: ClassVar[str] = "k"
    no_rope: ClassVar[str] = ""  # why keys and queries cannot be rotated

    key_factors = 1  # of the factors, those that make the keys
    only_own_scores_differ = False  # from standard's at the start: what a self mask takes away

    def __init__(self, spec: Spec) -> None:
        super().__init__(spec)
        self.width = spec.d_head  # E
        self.key_heads = spec.heads  # G
        self.scale = 1 / math.sqrt(spec.d_head)

    def queries(self, x_BTD: Tensor) -> Tensor:
        """q_BHTE, an affine map of the query stream."""
        raise NotImplementedError(f"{type(self).__name__} has no `queries`")

    def keys(self, y_BSD: Tensor) -> Tensor:
        """k_BGSE, an affine map of the key stream."""
        raise NotImplementedError(f"{type(self).__name__} has no `keys`")

    def forward(self, x_BTD: Tensor, y_BSD: Tensor) -> tuple[Tensor, Tensor]:
        return self.queries(x_BTD), self.keys(y_BSD)

    def addend(self, first: int, queries: int, keys: int) -> Tensor | None:
        """What is added to the scores of the query positions from `first` on, as HTS."""
        return None

    def halves(self) -> tuple[Tensor, Tensor, Tensor]:
        """(Q_HDE, K_HDE, a_HE): queries are x Q_h + a_h and keys y K_h + c_h, so B_h = Q_h K_hᵀ
        and u_h = K_h a_h. (What c_h adds is the same for every key: softmax cannot see it.)
        """
        if self.no_circuit:
            raise Meaningless(self.no_circuit)
        d, heads = self.spec.d_model, self.spec.heads
        # Queries and keys are affine: the images of 0 and of the unit vectors say all.
        x_1ND = torch.cat([self.like.new_zeros(1, d), torch.eye(d).to(self.like)]).unsqueeze(0)
        q_HNE, k_GNE = self.queries(x_1ND)[0], self.keys(x_1ND)[0]
        k_HNE = k_GNE.repeat_interleave(heads // k_GNE.shape[0], 0)
        return q_HNE[:, 1:] - q_HNE[:, :1], k_HNE[:, 1:] - k_HNE[:, :1], q_HNE[:, 0]

    def thin(self) -> tuple[Tensor, Tensor] | None:
        """(left_HDE, right_HDE) with B_h = left_h right_hᵀ; None where the whole matrix is learned.
        Raises Meaningless where there is none.
        """
        q_HDE, k_HDE, _ = self.halves()
        return q_HDE, k_HDE

    def circuit(self) -> tuple[Tensor, Tensor | None]:
        """B_HDD, and with biases u_HD: score = scale · (x_iᵀ B_h x_j + u_h·x_j), up to what
        softmax over j cannot see. Raises Meaningless where there is no such matrix.
        """
        q_HDE, k_HDE, a_HE = self.halves()
        u_HD = (k_HDE @ a_HE.unsqueeze(-1)).squeeze(-1) if self.spec.bias else None
        return q_HDE @ k_HDE.mT, u_HD

    def set_circuit_(self, b_HDD: Tensor, u_HD: Tensor | None = None) -> None:
        """Take over B_h (and u_h), or what of it this form can hold."""
        raise Meaningless(f"{type(self).__name__} cannot be set from a given B_h")

    @torch.no_grad()
    def set_nearest_(self, b_HDD: Tensor, u_HD: Tensor | None, seen: Seen) -> None:
        """The same, such that the scores of what is `seen` lose little: of the nearest matrices
        after several changes of basis the one that loses least.
        """
        wanted_HLD = with_bias(b_HDD, u_HD)
        whole = float(seen.scores(wanted_HLD).sum())

        def lost() -> float:
            return float(seen.scores(with_bias(*self.circuit()) - wanted_HLD).sum())

        self.set_circuit_(b_HDD, u_HD)
        least, best = lost(), copy.deepcopy(self.state_dict())
        if least <= 1e-18 * whole:
            return
        x_DD, keys_DD = seen.stream(), seen.keys()
        # A form may be one basis for both sides alone.
        for left_DD, right_DD in ((x_DD, keys_DD), (x_DD, x_DD), (keys_DD, keys_DD)):
            (left, left_back), (right, right_back) = roots(left_DD), roots(right_DD)
            self.set_circuit_(left @ b_HDD @ right, u_HD)
            self.set_circuit_(left_back @ self.circuit()[0] @ right_back, u_HD)
            if (now := lost()) < least:
                least, best = now, copy.deepcopy(self.state_dict())
        self.load_state_dict(best)

    @property
    def key_length(self) -> float:
        """Expected length of a key at the start, for normed x."""
        return math.sqrt(self.width) * (1 if self.cached == "x" else self.spec.length)

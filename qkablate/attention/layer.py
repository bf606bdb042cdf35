"""Where heads, mask, norm, position and the two circuits meet. Shape suffixes as in qk/base.py."""

import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from qkablate.attention.kernels.dispatch import Shapes, attend, causal_mask, choose_kernel, why_not
from qkablate.attention.modifiers import (
    NORMS,
    POSITIONS,
    QKNorm,
    UnitKeys,
    alibi,
    check_rope,
    rotate,
)
from qkablate.attention.ov import OV
from qkablate.attention.qk import QK
from qkablate.attention.spec import Meaningless, Spec

MATCHES = ("none", "spread", "exact")


class Cache:
    """What a decoder keeps of the past: the stream, the keys or the values, as the circuits ask."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.length = capacity, 0
        self.kept: dict[str, Tensor] = {}

    def add(self, name: str, new: Tensor) -> Tensor:
        """Everything called `name` until now, new included; positions are the last but one axis."""
        if name not in self.kept:
            self.kept[name] = new.new_empty(*new.shape[:-2], self.capacity, new.shape[-1])
        end = self.length + new.shape[-2]
        if end > self.capacity:
            raise ValueError(f"the cache holds {self.capacity} positions, and no more")
        self.kept[name][..., self.length : end, :] = new
        return self.kept[name][..., :end, :]

    def bytes_per_token(self) -> int:
        """Of one sequence."""
        kept = self.kept.values()
        return sum(t[0].numel() // self.capacity * t.element_size() for t in kept)


class Attention(nn.Module):
    """Multi-head attention with any QK circuit and any OV circuit.

    Queries come from one stream, keys and values from another; self-attention gives one stream.
    """

    def __init__(
        self,
        spec: Spec,
        qk: type[QK],
        ov: type[OV],
        *,
        norm: str = "none",
        mask_self: bool = False,
        position: str = "none",
        device: str = "cpu",
        half: bool = False,
        dropout: float = 0.0,
        kernel: str = "auto",
    ) -> None:
        super().__init__()
        assert norm in NORMS
        assert position in POSITIONS
        # Under a norm the weights' own scale is nothing: they start as they would if matched.
        self.qk = qk(spec if norm == "none" else dataclasses.replace(spec, init="matched"))
        self.ov = ov(spec, self.qk)
        self.norm: QKNorm | UnitKeys | None = None
        if norm != "none":
            self.norm = (QKNorm if norm == "qk" else UnitKeys)(spec, self.qk)
        self.mask_self, self.position, self.dropout = mask_self, position, dropout
        self.scale = self.qk.scale if self.norm is None else self.norm.scale
        if position == "rope":
            check_rope(self.qk)
        learned = type(self.qk).addend is not QK.addend
        shapes = Shapes(
            heads=spec.heads,
            key_heads=self.qk.key_heads,
            value_heads=self.ov.value_heads,
            width=self.qk.width,
            value_width=self.ov.width,
            device=device,
            half=half,
            dropout=dropout,
            addend=mask_self or position == "alibi" or learned,
            learned=learned,
            context=spec.context or 0,
        )
        if reason := why_not(kernel, shapes):
            raise Meaningless(f"attention.kernel={kernel}: {reason}")
        self.kernel = choose_kernel(shapes) if kernel == "auto" else kernel

    def forward(
        self,
        x_BTD: Tensor,
        y_BSD: Tensor | None = None,
        causal: bool = True,
        cache: Cache | None = None,
    ) -> Tensor:
        """What the layer adds to the stream x. With a cache, x are the next positions after what is
        in it: keys and values of the past come from there.
        """
        own = y_BSD is None
        y_BSD = x_BTD if y_BSD is None else y_BSD
        q_BHTE, k_BGSE = self.qk(x_BTD, y_BSD)
        first, kernel = 0, self.kernel
        if cache is None:
            v_BGSV = self.ov.values(y_BSD, k_BGSE)
        else:
            first = cache.length
            k_BGSE, v_BGSV = self._remembered(y_BSD, k_BGSE, cache)
            cache.length += x_BTD.shape[1]
            # A few queries against many keys.
            kernel = {"static": "static", "folded": "folded", "blocked": "folded"}.get(
                kernel, "math"
            )
        q_BHTE, k_BGSE = self.modified(q_BHTE, k_BGSE, first)
        o_BHTV = attend(
            q_BHTE,
            k_BGSE,
            v_BGSV,
            scale=self.scale,
            causal=causal and first == 0,
            kernel=kernel,
            addend=self._addend(q_BHTE, first, v_BGSV.shape[2], causal, own),
            dropout=self.dropout if self.training else 0.0,
        )
        return self.ov.write(o_BHTV)

    def modified(self, q_BHTE: Tensor, k_BGSE: Tensor, first: int = 0) -> tuple[Tensor, Tensor]:
        """Queries and keys after norm and rotation; the queries stand from `first` on."""
        if self.norm is not None:
            q_BHTE, k_BGSE = self.norm(q_BHTE, k_BGSE)
        if self.position == "rope":
            q_BHTE, k_BGSE = rotate(q_BHTE, first), rotate(k_BGSE)
        return q_BHTE, k_BGSE

    def weights(self, x_BTD: Tensor, causal: bool = True) -> Tensor:
        """The softmax itself, A_BHTS: for looking at, not for training."""
        q_BHTE, k_BGSE = self.modified(*self.qk(x_BTD, x_BTD))
        batch, length, _ = x_BTD.shape
        return attend(
            q_BHTE,
            k_BGSE,
            torch.eye(length).to(x_BTD).expand(batch, 1, -1, -1),
            scale=self.scale,
            causal=causal,
            kernel="static" if self.kernel == "static" else "folded",
            addend=self._addend(q_BHTE, 0, length, causal, True),
        )

    def scores(self, x_BTD: Tensor, causal: bool = True) -> Tensor:
        """What softmax sees, S_BHTS, −∞ where a position is hidden: for looking at."""
        q_BHTE, k_BGSE = self.modified(*self.qk(x_BTD, x_BTD))
        heads, length = q_BHTE.shape[1:3]
        k_BHSE = k_BGSE.repeat_interleave(heads // k_BGSE.shape[1], 1)
        s_BHTS = self.scale * (q_BHTE @ k_BHSE.mT)
        addend = self._addend(q_BHTE, 0, length, causal, True)
        s_BHTS = s_BHTS if addend is None else s_BHTS + addend
        return s_BHTS + causal_mask(s_BHTS) if causal else s_BHTS

    def _addend(
        self, q_BHTE: Tensor, first: int, keys: int, causal: bool, own: bool
    ) -> Tensor | None:
        """What is added to the scores, as HTS or TS, if anything is."""
        heads, queries = q_BHTE.shape[1:3]
        parts = [self.qk.addend(first, queries, keys)]
        if self.position == "alibi":
            parts.append(alibi(heads, first, queries, keys, q_BHTE))
        if self.mask_self and own:
            alone = (first == 0 and causal) or keys == 1
            parts.append(self_mask(q_BHTE, first, queries, keys, alone))
        if causal and first:  # the queries stand at the end of a longer row
            parts.append(causal_mask(q_BHTE.new_empty(queries, keys), first))
        given = [part for part in parts if part is not None]
        return torch.stack(torch.broadcast_tensors(*given)).sum(0) if given else None

    def _remembered(self, y_BSD: Tensor, k_BGSE: Tensor, cache: Cache) -> tuple[Tensor, Tensor]:
        """Keys and values of all positions until now, from the least that gives them back."""
        v_BGSV = self.ov.values(y_BSD, k_BGSE) if self.ov.cached == "v" else None
        if "x" in (self.qk.cached, self.ov.cached):
            y_BSD = cache.add("x", y_BSD)
        if self.qk.cached == "k":
            k_BGSE = cache.add("k", k_BGSE)
        elif self.qk.cached == "x":
            k_BGSE = self.qk.keys(y_BSD)
        v_BGSV = self.ov.values(y_BSD, k_BGSE) if v_BGSV is None else cache.add("v", v_BGSV)
        if not self.qk.cached:  # no key is kept, for none has any width
            k_BGSE = k_BGSE.new_empty(*k_BGSE.shape[:2], v_BGSV.shape[2], 0)
        return k_BGSE, v_BGSV

    @property
    def cached_per_token(self) -> int:
        """Numbers that a decoder keeps per token."""
        size = {
            "x": self.qk.spec.d_model,
            "k": self.qk.key_heads * self.qk.width,
            "v": self.ov.value_heads * self.ov.width,
        }
        return sum(size[name] for name in {self.qk.cached, self.ov.cached} - {""})

    @property
    def no_circuit(self) -> str:
        """Why the scores are not scale · (x_iᵀ B_h x_j + u_h·x_j); empty where they are."""
        if self.norm is not None:
            return "a norm stands between the weights and the scores"
        if self.position == "rope":
            return "with rope there is another B_h at every distance"
        return self.qk.no_circuit

    @property
    def equation(self) -> str:
        """Of the whole layer, in one line."""
        parts = [self.qk.equation, self.norm.equation if self.norm else ""]
        parts += ["no token sees itself" if self.mask_self else "", self.ov.equation]
        return "; ".join(part for part in parts if part)

    @property
    def params(self) -> str:
        """How many without biases, as a formula; empty where a circuit does not say."""
        parts = [part.params for part in (self.qk, self.ov, self.norm) if part is not None]
        counted: dict[str, int] = {}
        for term in " + ".join(parts).split(" + "):
            number, _, letters = term.partition(" ") if term[:1].isdigit() else ("1", "", term)
            counted[letters] = counted.get(letters, 0) + int(number)
        terms = [
            f"{n if n > 1 else ''} {letters}".strip() for letters, n in counted.items() if letters
        ]
        return " + ".join(terms) if all(parts) else ""

    @property
    def match(self) -> str:
        """How well the start meets standard's: that of the part that meets it worst."""
        qk = self.qk.match
        if self.mask_self and self.qk.match == "none" and self.qk.only_own_scores_differ:
            qk = "spread"  # what differed is masked
        elif self.mask_self and qk == "exact":
            qk = "spread"
        if self.norm is not None:
            qk = min(qk, self.norm.match, key=MATCHES.index)
        return min(qk, self.ov.match, key=MATCHES.index)

    def lr_multipliers(self) -> dict[str, float]:
        """Of the matrices of the two circuits."""
        slow_down = self.norm.slow_down() if self.norm is not None else 1.0
        return {"qk": self.qk.lr_multiplier() * slow_down, "ov": self.ov.lr_multiplier()}

    def rates(self) -> Iterator[tuple[nn.Parameter, float, float]]:
        """(parameter, learning-rate multiplier, decay of the circuit) of everything in the layer.

        Vectors do not decay.
        """
        slow_down = self.norm.slow_down() if self.norm is not None else 1.0
        for circuit, share in ((self.qk, slow_down), (self.ov, 1.0)):
            for parameter in circuit.parameters():
                if parameter.dim() >= 2:
                    yield parameter, share * circuit.lr_multiplier(), circuit.decay
                else:
                    yield parameter, share * circuit.bias_lr_multiplier(), 0.0
        if self.norm is not None:
            yield from ((gain, 1.0, 0.0) for gain in self.norm.parameters())


def self_mask(like: Tensor, first: int, queries: int, keys: int, alone: bool) -> Tensor:
    """−∞ where a token would see itself, but for one that has nothing else to see, as TS."""
    mask_TS = like.new_zeros(queries, keys)
    own_T = torch.arange(int(alone), queries, device=like.device)
    mask_TS[own_T, own_T + first] = -torch.inf
    return mask_TS

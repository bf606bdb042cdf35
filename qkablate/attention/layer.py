"""The attention layer: heads, masks, norms, positions, circuits. Suffixes as in qk/base.py."""

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from qkablate.attention.cache import Cache, SourceCache
from qkablate.attention.kernels import choice
from qkablate.attention.kernels.dispatch import attend, causal_mask
from qkablate.attention.modifiers import (
    NORMS,
    ROPE_THETA,
    Alibi,
    QKNorm,
    Rope,
    RopeDims,
    UnitKeys,
    check_rope,
)
from qkablate.attention.ov import OV
from qkablate.attention.ov.latent import LatentOV
from qkablate.attention.qk import QK
from qkablate.attention.qk.latent import LatentQK
from qkablate.attention.spec import (
    MATCHED_LR,
    Circuit,
    CircuitLr,
    Spec,
    UnsupportedCombination,
    UnsupportedKernel,
)

MATCHES = ("none", "spread", "exact")


class Attention(nn.Module):
    """Multi-head attention with any QK circuit and any OV circuit.

    Queries come from one stream, keys and values from another; self-attention uses one stream.
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
        rope_theta: float = ROPE_THETA,
        device: str = "cpu",
        precision: str = "fp32",
        gpu: choice.Gpu | None = None,
        dropout: float = 0.0,
        kernel: str = "auto",
        padding: bool = False,
    ) -> None:
        super().__init__()
        assert norm in NORMS
        assert position in ("none", "alibi", "rope")
        is_square = spec.d_keys == spec.d_model
        widths = f"cross-attention reads streams of widths {spec.d_model} and {spec.d_keys}"
        if spec.symmetric and not (qk.can_start_symmetric and is_square):
            raise UnsupportedCombination(
                "variant.init=symmetric starts with W_q = W_k, and needs both in one shape; here"
                f" {f'it is {qk.equation}' if is_square else widths}"
            )
        for circuit in (qk, ov):
            if circuit.one_width_reason and not is_square:
                raise UnsupportedCombination(
                    f"{circuit.one_width_reason}, but {widths}; choose other variant.sites"
                )
        # A norm removes the scale of the weights, so they get the matched initialization.
        self.qk = qk(spec if norm == "none" else dataclasses.replace(spec, init="matched"))
        self.ov = ov(spec, self.qk)
        self.norm: QKNorm | UnitKeys | None = None
        if norm != "none":
            self.norm = (QKNorm if norm == "qk" else UnitKeys)(spec, self.qk)
            self.qk.is_by_head = self.ov.is_by_head = False
        self.mask_self, self.position, self.dropout = mask_self, position, dropout
        self.scale = (self.norm or self.qk).scale
        self.rope = self.rope_dims = self.alibi = None
        if position == "rope" and spec.rope_dims:
            self.rope_dims = RopeDims(spec, self.qk, self.scale)
            self.scale = self.rope_dims.scale
            self.rope = Rope(spec.rope_dims, spec.context or 0, rope_theta)
        elif position == "rope" and self.qk.width:  # without queries there is nothing to rotate
            check_rope(self.qk)
            self.rope = Rope(self.qk.width, spec.context or 0, rope_theta)
        elif position == "alibi":
            self.alibi = Alibi(spec.heads, spec.context or 0)
        learned_bias = type(self.qk).score_bias is not QK.score_bias
        shapes = choice.Shapes(
            heads=spec.heads,
            key_heads=spec.heads if self.latent_qk else self.qk.key_heads,
            value_heads=spec.heads if self.latent_ov else self.ov.value_heads,
            width=self.width,
            value_width=self.value_width,
            device=device,
            precision=precision,
            gpu=gpu,
            dropout=dropout,
            score_bias=mask_self or position == "alibi" or learned_bias or padding,
            learned_bias=learned_bias,
            context=spec.context or 0,
        )
        if reason := choice.unsupported_reason(kernel, shapes):
            raise UnsupportedKernel(f"attention.kernel: {reason}")
        if kernel in ("auto", "portable"):
            kernel = choice.choose_kernel(shapes, portable=kernel == "portable")
        self.kernel = kernel

    def forward(
        self,
        x_BTD: Tensor,
        y_BSD: Tensor | None = None,
        causal: bool = True,
        cache: Cache | None = None,
        key_mask_BS: Tensor | None = None,
    ) -> Tensor:
        """Return what the layer adds to the stream x.

        With a cache, x holds the positions that follow those in it, whose keys and values it gives;
        a `SourceCache` gives those of y, which is the same in every call. Where the mask is false,
        y (x, without a y) is padding, which changes no other position. With a cache of x, the mask
        is that of all positions so far.
        """
        is_self, first, kernel = y_BSD is None, 0, self.kernel
        write: Callable[[Tensor], Tensor] = self.ov.write
        x_BTD, y_BSD = _streams(x_BTD, y_BSD, key_mask_BS)
        rotated = None if self.rope_dims is None else self._rotated(x_BTD, y_BSD, cache)
        if isinstance(cache, SourceCache):
            q_BHTE = self.qk.queries(x_BTD)
            k_BGSE, v_BGSV = self._from_source(y_BSD, cache)
        elif cache is None and self.latent_qk is not None:
            q_BHTE, k_BGSE, v_BGSV = self._by_head(x_BTD, y_BSD)
            write = self.ov.write if self.latent_ov is None else self.latent_ov.write_heads
        else:
            q_BHTE, k_BGSE = self.qk(x_BTD, y_BSD)
            if cache is None:
                v_BGSV = self.ov.values(y_BSD, k_BGSE)
            else:
                k_BGSE, v_BGSV = self._from_cache(y_BSD, k_BGSE, cache)
        if cache is not None:
            first = cache.length
            cache.length += x_BTD.shape[1]
            # The others copy keys and values for every head that shares them.
            kernel = "static" if kernel == "static" else "folded"
        q_BHTE, k_BGSE = self.apply_modifiers(q_BHTE, k_BGSE, first, rotated)
        o_BHTV = attend(
            q_BHTE,
            k_BGSE,
            v_BGSV,
            scale=self.scale,
            causal=causal and first == 0,
            kernel=kernel,
            bias=self._score_bias(q_BHTE, first, v_BGSV.shape[2], causal, is_self, key_mask_BS),
            key_mask_BS=key_mask_BS,
            dropout=self.dropout if self.training else 0.0,
        )
        return write(o_BHTV)

    def apply_modifiers(
        self,
        q_BHTE: Tensor,
        k_BGSE: Tensor,
        first: int = 0,
        rotated: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return normalized and rotated queries and keys; the first query has position `first`.

        Queries and keys to be rotated beside those of the circuit are given as `rotated`.
        """
        if self.norm is not None:
            q_BHTE, k_BGSE = self.norm(q_BHTE, k_BGSE)
        if self.rope is not None and rotated is not None:
            q_BHTP, k_B1SP = self.rope(rotated[0], first), self.rope(rotated[1])
            q_BHTE = torch.cat([q_BHTE, q_BHTP], -1)
            k_BGSE = torch.cat([k_BGSE, k_B1SP.expand(-1, k_BGSE.shape[1], -1, -1)], -1)
        elif self.rope is not None:
            q_BHTE, k_BGSE = self.rope(q_BHTE, first), self.rope(k_BGSE)
        return q_BHTE, k_BGSE

    def queries_and_keys(self, x_BTD: Tensor, y_BSD: Tensor) -> tuple[Tensor, Tensor]:
        """Return the queries and keys whose product times `scale` is the scores, for inspection."""
        rotated = None if self.rope_dims is None else self._rotated(x_BTD, y_BSD)
        q_BHTE, k_BGSE = self.qk(x_BTD, y_BSD)
        return self.apply_modifiers(q_BHTE, k_BGSE, rotated=rotated)

    def _rotated(
        self, x_BTD: Tensor, y_BSD: Tensor, cache: Cache | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return queries and keys of the dimensions that are rotated beside the circuit's."""
        assert self.rope_dims is not None
        k_B1SP = self.rope_dims.keys(y_BSD)
        k_B1SP = k_B1SP if cache is None else cache.append("rope", k_B1SP)
        return self.rope_dims.queries(x_BTD), k_B1SP

    def _by_head(self, x_BTD: Tensor, y_BSD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values by head, where those of the circuits are latent."""
        assert self.latent_qk is not None
        q_BHTK, c_B1SR = self.latent_qk.head_queries(x_BTD), self.qk.keys(y_BSD)
        v_BGSV = self.ov.values(y_BSD, c_B1SR)
        v_BGSV = v_BGSV if self.latent_ov is None else self.latent_ov.head_values(v_BGSV)
        return q_BHTK, self.latent_qk.head_keys(c_B1SR), v_BGSV

    def weights(
        self,
        x_BTD: Tensor,
        y_BSD: Tensor | None = None,
        key_mask_BS: Tensor | None = None,
        *,
        causal: bool = True,
    ) -> Tensor:
        """Return the attention weights A_BHTS, for inspection."""
        q_BHTE, k_BGSE, bias = self._score_inputs(x_BTD, y_BSD, causal, key_mask_BS)
        v_B1SS = torch.eye(k_BGSE.shape[2]).to(x_BTD).expand(len(k_BGSE), 1, -1, -1)
        kernel, scale = "static" if self.kernel == "static" else "folded", self.scale
        return attend(
            q_BHTE,
            k_BGSE,
            v_B1SS,
            scale=scale,
            causal=causal,
            kernel=kernel,
            bias=bias,
            key_mask_BS=key_mask_BS,
        )

    def scores(
        self,
        x_BTD: Tensor,
        y_BSD: Tensor | None = None,
        key_mask_BS: Tensor | None = None,
        *,
        causal: bool = True,
    ) -> Tensor:
        """Return the input of the softmax, S_BHTS, −∞ where masked, for inspection."""
        q_BHTE, k_BGSE, bias = self._score_inputs(x_BTD, y_BSD, causal, key_mask_BS)
        k_BHSE = k_BGSE.repeat_interleave(q_BHTE.shape[1] // k_BGSE.shape[1], 1)
        s_BHTS = self.scale * (q_BHTE @ k_BHSE.mT)
        s_BHTS = s_BHTS if bias is None else s_BHTS + bias
        if key_mask_BS is not None:
            s_BHTS = s_BHTS.masked_fill(~key_mask_BS[:, None, None], -torch.inf)
        return s_BHTS + causal_mask(s_BHTS) if causal else s_BHTS

    def _score_inputs(
        self, x_BTD: Tensor, y_BSD: Tensor | None, causal: bool, key_mask_BS: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return queries, keys and the bias of their scores."""
        x_BTD, keys_BSD = _streams(x_BTD, y_BSD, key_mask_BS)
        q_BHTE, k_BGSE = self.queries_and_keys(x_BTD, keys_BSD)
        bias = self._score_bias(q_BHTE, 0, keys_BSD.shape[1], causal, y_BSD is None, key_mask_BS)
        return q_BHTE, k_BGSE, bias

    def _score_bias(
        self,
        q_BHTE: Tensor,
        first: int,
        keys: int,
        causal: bool,
        is_self: bool,
        key_mask_BS: Tensor | None,
    ) -> Tensor | None:
        """Return what is added to the scores except for padding, as BHTS, HTS or TS, or None."""
        queries = q_BHTE.shape[2]
        parts = [self.qk.score_bias(first, queries, keys)]
        if self.alibi is not None:
            parts.append(self.alibi(first, queries, keys, q_BHTE))
        if self.mask_self and is_self:
            # The first query sees no other token.
            keep_first = (first == 0 and causal) or keys == 1
            mask = self_mask(q_BHTE, first, queries, keys, keep_first)
            if key_mask_BS is not None:  # nor does a token that is alone with padding
                alone_B = key_mask_BS.sum(-1) == 1
                mask = mask.masked_fill(alone_B[:, None, None, None], 0)
            parts.append(mask)
        if causal and first:  # the queries are at the end of a longer sequence
            parts.append(causal_mask(q_BHTE.new_empty(queries, keys), first))
        biases = [part for part in parts if part is not None]
        return torch.stack(torch.broadcast_tensors(*biases)).sum(0) if biases else None

    def _from_cache(self, y_BSD: Tensor, k_BGSE: Tensor, cache: Cache) -> tuple[Tensor, Tensor]:
        """Return keys and values of all positions so far, and cache what they need."""
        v_BGSV = self.ov.values(y_BSD, k_BGSE) if self.ov.cached == "v" else None
        if "x" in (self.qk.cached, self.ov.cached):
            y_BSD = cache.append("x", y_BSD)
        if self.qk.cached in ("k", "c"):
            k_BGSE = cache.append("k", k_BGSE)
        elif self.qk.cached == "x":
            k_BGSE = self.qk.keys(y_BSD)
        v_BGSV = self.ov.values(y_BSD, k_BGSE) if v_BGSV is None else cache.append("v", v_BGSV)
        if not self.qk.cached:  # keys have width zero and are not cached
            k_BGSE = k_BGSE.new_empty(*k_BGSE.shape[:2], v_BGSV.shape[2], 0)
        return k_BGSE, v_BGSV

    def _from_source(self, y_BSD: Tensor, cache: SourceCache) -> tuple[Tensor, Tensor]:
        """Return keys and values of a source, and keep those that its stream does not give."""
        if not cache.length:
            cache.capacity, cache.tensors = y_BSD.shape[1], {}
        kept = cache.tensors
        k_BGSE = kept["k"] if "k" in kept else self.qk.keys(y_BSD)
        v_BGSV = kept["v"] if "v" in kept else self.ov.values(y_BSD, k_BGSE)
        if self.qk.cached in ("k", "c"):
            kept["k"] = k_BGSE
        if self.ov.cached == "v":
            kept["v"] = v_BGSV
        return k_BGSE, v_BGSV

    @property
    def latent_qk(self) -> LatentQK | None:
        """The QK circuit, if it has keys by head from a latent stream; a norm is of that stream."""
        return self.qk if isinstance(self.qk, LatentQK) and self.qk.is_by_head else None

    @property
    def latent_ov(self) -> LatentOV | None:
        """The OV circuit, if it has values by head from a latent stream."""
        return self.ov if isinstance(self.ov, LatentOV) and self.ov.is_by_head else None

    @property
    def width(self) -> int:
        """Width of the product of queries and keys, as computed where nothing is cached."""
        width = self.qk.width if self.latent_qk is None else self.qk.spec.d_head
        return width + (self.rope_dims.width if self.rope_dims else 0)

    @property
    def value_width(self) -> int:
        """Width of the values, as computed where nothing is cached."""
        return self.ov.width if self.latent_ov is None else self.ov.spec.d_head

    @property
    def parts(self) -> list[Circuit]:
        """The circuits and modifiers that have parameters or an equation."""
        parts = (self.qk, self.norm, self.rope_dims, self.ov)
        return [part for part in parts if part is not None]

    @property
    def cached_per_token(self) -> int:
        """Number of values that a decoder caches per token."""
        qk, ov = self.qk, self.ov
        keys, rotated = qk.key_heads * qk.width, self.rope_dims.width if self.rope_dims else 0
        sizes = {"x": qk.spec.d_keys, "k": keys, "c": keys, "": 0}
        sizes["v"] = ov.value_heads * ov.width
        return rotated + sum(sizes[name] for name in {qk.cached, ov.cached})

    @property
    def no_circuit_reason(self) -> str:
        """Reason why the layer has no B_h; empty if it has one."""
        if self.norm is not None:
            return "the queries or keys are normalized, so the scores are not bilinear in x"
        if self.position == "rope" and self.qk.width:
            return "with rope, B_h is different at every distance"
        return self.qk.no_circuit_reason

    @property
    def equation(self) -> str:
        """The equation of the layer, in one line."""
        parts = [part.equation for part in self.parts]
        parts.insert(-1, "no token attends to itself" if self.mask_self else "")
        return "; ".join(part for part in parts if part)

    @property
    def params(self) -> str:
        """Formula of the number of parameters without biases; empty if a circuit has none."""
        parts = [part.params for part in (self.qk, self.ov, self.norm, self.rope_dims) if part]
        counts: Counter[str] = Counter()
        spec = self.qk.spec
        same = {"e²": "d²", "d e": "d²", "e": "d"} if spec.d_keys == spec.d_model else {}
        same |= {} if spec.is_cross else {"T S": "T²"}
        for term in " + ".join(parts).split(" + "):
            number, _, letters = term.partition(" ") if term[:1].isdigit() else ("1", "", term)
            for two, one in same.items():
                letters = letters.replace(two, one)
            counts[letters] += int(number)
        terms = [f"{n} {sizes}" if n > 1 else sizes for sizes, n in counts.items() if sizes]
        return " + ".join(terms) if all(parts) else ""

    @property
    def reads_queries(self) -> bool:
        """True if the output depends on the stream of the queries."""
        return bool(self.qk.width) or self.rope_dims is not None

    @property
    def match(self) -> str:
        """Match of the initialization with standard's: the worst of its parts."""
        qk = "none" if self.qk.spec.symmetric else self.qk.match  # the scores are W_k W_kᵀ
        only_masked_differ = qk == "none" and self.qk.only_diagonal_differs
        if self.mask_self and (only_masked_differ or qk == "exact"):
            qk = "spread"
        for modifier in (self.norm, self.rope_dims):
            if modifier is not None:
                qk = min(qk, modifier.match, key=MATCHES.index)
        return min(qk, self.ov.match, key=MATCHES.index)

    @property
    def matched_lr(self) -> float:
        """Matched learning-rate multiplier of the circuit that differs from standard's.

        That of QK if both differ; 1 if no multiplier differs from 1: then it is QK's.
        """
        rates = sorted(self._circuit_rates(1.0), key=lambda rate: rate[0].dim() < 2)  # stable
        return next((multiplier for _, multiplier, _ in rates if multiplier != 1), 1.0)

    def resolve_lr(self, lr: float | str) -> float:
        """Return `variant.lr` as a number: the multiplier of the circuit that differs, or of QK."""
        matched = self.matched_lr
        words = {"matched": matched, "same": 1.0, "between": math.sqrt(matched)}
        return words[lr] if isinstance(lr, str) else float(lr)

    @property
    def has_circuit_lr(self) -> bool:
        """True if a circuit has a learning rate of its own: the changed one, or that of QK."""
        return self.matched_lr != 1 or any(True for _ in self.qk.parameters())

    def circuit_lr(self, lr: float | str) -> CircuitLr:
        """Return what `variant.lr` makes of the multipliers of the circuits."""
        if lr == "matched":
            return CircuitLr()
        factor = self.resolve_lr(lr)
        if self.matched_lr == 1:
            return CircuitLr(0.0, factor)
        return CircuitLr(math.log(factor) / math.log(self.matched_lr) if factor != 1 else 0.0)

    def lr_multipliers(self, given: CircuitLr = MATCHED_LR) -> dict[str, float]:
        """Return the multipliers of the matrices of each circuit."""
        norm_scale = self.norm.lr_scale if self.norm else 1.0
        own = {"qk": self.qk.lr_multiplier * norm_scale, "ov": self.ov.lr_multiplier}
        powers = {name: multiplier**given.power for name, multiplier in own.items()}
        return {**powers, "qk": powers["qk"] * given.qk * self._rotation_scale}

    def rates(self, given: CircuitLr = MATCHED_LR) -> Iterator[tuple[nn.Parameter, float, float]]:
        """Yield (parameter, learning-rate multiplier, weight-decay multiplier) for all parameters.

        The multipliers follow from `circuit_lr`; for the parameters of the scores the factor of
        rotated dimensions is the same for any. Vectors do not decay.
        """
        of_scores = {*self.qk.parameters()}
        for parameter, rate, decay in self._circuit_rates(given.power):
            scale = given.qk * self._rotation_scale if parameter in of_scores else 1.0
            yield parameter, scale * rate, decay
        if (rotated := self.rope_dims) is not None:
            yield from ((m, rotated.lr_scale, rotated.decay) for m in rotated.parameters())

    def _circuit_rates(self, power: float) -> Iterator[tuple[nn.Parameter, float, float]]:
        """Yield the same without rotated dimensions."""
        for circuit, scale in ((self.qk, self.norm.lr_scale if self.norm else 1.0), (self.ov, 1.0)):
            for parameter in circuit.parameters():
                if parameter.dim() >= 2:
                    yield parameter, (scale * circuit.lr_multiplier) ** power, circuit.decay
                else:
                    yield parameter, (scale * circuit.bias_lr_multiplier) ** power, 0.0
        if self.norm is not None:
            yield from ((gain, 1.0, 0.0) for gain in self.norm.parameters())

    @property
    def _rotation_scale(self) -> float:
        return self.rope_dims.lr_scale if self.rope_dims else 1.0


def _streams(
    x_BTD: Tensor, y_BSD: Tensor | None, key_mask_BS: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the streams of the queries and of the keys; padding is zero, as 0 · NaN is NaN."""
    keys_BSD = x_BTD if y_BSD is None else y_BSD
    if key_mask_BS is not None:
        new_BS = key_mask_BS[:, -keys_BSD.shape[1] :]  # the others are cached
        keys_BSD = keys_BSD.masked_fill(~new_BS[..., None], 0)
    return keys_BSD if y_BSD is None else x_BTD, keys_BSD


def self_mask(like: Tensor, first: int, queries: int, keys: int, keep_first: bool) -> Tensor:
    """Return −∞ where a token would attend to itself, as TS; `keep_first` exempts the first."""
    query_T1 = torch.arange(first, first + queries, device=like.device).unsqueeze(1)
    key_S = torch.arange(keys, device=like.device)
    is_self_TS = query_T1 == key_S
    if keep_first:
        is_self_TS = is_self_TS & (query_T1 > first)
    return like.new_zeros(queries, keys).masked_fill(is_self_TS, -torch.inf)

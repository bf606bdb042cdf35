"""The GPT: GPT-2's layout, with the attention's two circuits as its only moving part.

Shape suffixes: B batch, T context, A answers, D d_model, V vocabulary.
"""

import copy
import math
from collections import Counter
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from qkablate.attention import Attention, Cache, Draw
from qkablate.attention.kernels.matmul import Linear, linear
from qkablate.config import ModelConfig, VariantConfig
from qkablate.models import blocked_loss as output
from qkablate.models.catalogue import GPT2_SIGMA, attention
from qkablate.randomness import stream


class MLP(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden = round(config.mlp_ratio * config.d_model)
        self.up = Linear(config.d_model, hidden, bias=config.bias)
        self.down = Linear(hidden, config.d_model, bias=config.bias)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x_BTD)))


class Block(nn.Module):
    def __init__(self, config: ModelConfig, attention: Attention) -> None:
        super().__init__()
        self.norm_1 = _norm(config)
        self.attention = attention
        self.norm_2 = _norm(config) if config.mlp_ratio else None
        self.mlp = MLP(config) if config.mlp_ratio else None
        self.dropout = nn.Dropout(config.dropout)
        self.attention_skip = config.attention_skip

    def forward(self, x_BTD: Tensor, cache: Cache | None = None) -> Tensor:
        written_BTD = self.dropout(self.attention(self.norm_1(x_BTD), cache=cache))
        x_BTD = x_BTD + written_BTD if self.attention_skip else written_BTD
        if self.mlp is None or self.norm_2 is None:
            return x_BTD
        return x_BTD + self.dropout(self.mlp(self.norm_2(x_BTD)))


class GPT(nn.Module):
    """Pre-norm decoder with tied embedding. Parameters are empty until `init_`."""

    def __init__(
        self,
        config: ModelConfig,
        variant: VariantConfig,
        vocabulary: int,
        *,
        device: str = "cpu",
        half: bool = False,
        kernel: str = "auto",
    ) -> None:
        super().__init__()
        self.config = config
        self.token_embedding = _table(vocabulary, config.d_model)
        self.position_embedding = (
            _table(config.context, config.d_model) if config.position == "learned" else None
        )
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(
            Block(config, attention(config, variant, device=device, half=half, kernel=kernel))
            for _ in range(config.layers)
        )
        self.norm = _norm(config)
        # Keep of each block its input alone, and compute the rest again for the gradients.
        self.checkpoint_activations = False

    def forward(self, tokens_BT: Tensor, caches: list[Cache] | None = None) -> Tensor:
        """Logits over the next token, logits_BTV. With caches (a layer each), the tokens are those
        that come after what is in them.
        """
        return linear(self.hidden(tokens_BT, caches), self.token_embedding.weight)

    def hidden(self, tokens_BT: Tensor, caches: list[Cache] | None = None) -> Tensor:
        """What the output projection reads, x_BTD."""
        x_BTD = self._embedded(tokens_BT, caches[0].length if caches else 0)
        again = self.checkpoint_activations and self.training and torch.is_grad_enabled()
        for layer, block in enumerate(self.blocks):
            if again:
                drawn = bool(self.config.dropout)
                x_BTD = checkpoint(block, x_BTD, use_reentrant=False, preserve_rng_state=drawn)
            else:
                x_BTD = block(x_BTD, caches[layer] if caches else None)
        return self.norm(x_BTD)

    def _embedded(self, tokens_BT: Tensor, first: int = 0) -> Tensor:
        x_BTD = self.token_embedding(tokens_BT)
        if self.position_embedding is not None:
            x_BTD = x_BTD + self.position_embedding.weight[first : first + tokens_BT.shape[1]]
        return self.dropout(x_BTD)

    def streams(self, tokens_BT: Tensor) -> Iterator[tuple[Attention, Tensor]]:
        """Each attention layer, and what it reads, x_BTD: for looking at."""
        x_BTD = self._embedded(tokens_BT)
        blocks = [block for block in self.blocks if isinstance(block, Block)]
        for block in blocks:
            yield block.attention, block.norm_1(x_BTD)
            if block is not blocks[-1]:
                x_BTD = block(x_BTD)

    def loss(
        self,
        tokens_BT: Tensor,
        targets_BA: Tensor,
        where_BA: Tensor | None = None,
        reduction: str = "mean",
    ) -> Tensor:
        """Cross-entropy in nats; targets of -100 do not count. Where only some positions are to
        answer, `where` names them, and the others never reach the output projection.
        """
        weight_VD = self.token_embedding.weight
        many = targets_BA.numel() > output.rows(len(weight_VD))
        if many and reduction == "mean" and torch.is_grad_enabled():
            x_BAD = self._asked(tokens_BT, where_BA)
            return output.blocked_loss(x_BAD.flatten(0, 1), weight_VD, targets_BA.flatten())
        logits_BAV = self._answers(tokens_BT, where_BA)
        return F.cross_entropy(
            logits_BAV.flatten(0, 1).float(), targets_BA.flatten(), reduction=reduction
        )

    def graded(
        self, tokens_BT: Tensor, targets_BA: Tensor, where_BA: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The loss of each answer, and whether the likeliest token is the right one."""
        logits_BAV = self._answers(tokens_BT, where_BA).float()
        losses_BA = F.cross_entropy(logits_BAV.transpose(1, 2), targets_BA, reduction="none")
        return losses_BA, logits_BAV.argmax(-1) == targets_BA

    def log_probabilities(self, tokens_BT: Tensor, rows_P: Tensor, columns_P: Tensor) -> Tensor:
        """Of the next token, in fp32, at some positions: log_PV."""
        x_PD = self.hidden(tokens_BT)[rows_P, columns_P]
        return F.log_softmax(linear(x_PD, self.token_embedding.weight).float(), dim=-1)

    def _answers(self, tokens_BT: Tensor, where_BA: Tensor | None) -> Tensor:
        return linear(self._asked(tokens_BT, where_BA), self.token_embedding.weight)

    def _asked(self, tokens_BT: Tensor, where_BA: Tensor | None) -> Tensor:
        """What the output projection reads, of the positions that are to answer."""
        x_BTD = self.hidden(tokens_BT)
        if where_BA is None:
            return x_BTD
        return x_BTD.gather(1, where_BA[..., None].expand(-1, -1, x_BTD.shape[-1]))

    def to_empty(self, *, device: str | torch.device | int | None, recurse: bool = True) -> "GPT":
        """As torch's own, which imports half of its compiler to make a tensor like one of no
        device.
        """
        assert recurse

        def empty(like: Tensor) -> Tensor:
            return torch.empty(like.shape, dtype=like.dtype, device=device)

        return self._apply(empty)  # type: ignore[no-untyped-call]

    def caches(self) -> list[Cache]:
        """Empty ones, for a decoder."""
        return [Cache(self.config.context) for _ in self.blocks]

    def attentions(self) -> list[Attention]:
        return [module for module in self.modules() if isinstance(module, Attention)]

    @torch.no_grad()
    def init_(self, seed: int) -> "GPT":
        """Set every parameter from (seed, its name), drawn on the CPU."""
        draw = _Init(self.config, seed)
        inside = {id(part) for layer in self.attentions() for part in layer.modules()}
        for prefix, module in self.named_modules():
            if isinstance(module, Attention):
                draw.start_(module, prefix)
            elif id(module) in inside:
                continue  # what a circuit is made of, it starts itself
            elif isinstance(module, nn.Embedding):
                module.weight.copy_(draw.normal(f"{prefix}.weight", tuple(module.weight.shape)))
            elif isinstance(module, nn.LayerNorm):
                nn.init.ones_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, nn.Linear):
                # nn.Linear keeps (out, in); the draw speaks of (in, out), as the circuits do.
                residual = prefix.endswith("mlp.down")
                fan_out, fan_in = module.weight.shape
                weight = draw(f"{prefix}.weight", (fan_in, fan_out), residual=residual)
                module.weight.copy_(weight.T)
                if module.bias is not None:
                    module.bias.copy_(draw(f"{prefix}.bias", (fan_out,), fan_in=fan_in))
        return self

    @torch.no_grad()
    def starts(self, seed: int) -> Iterator[Attention]:
        """Each attention layer as `init_` sets it, made anew on the CPU, one at a time."""
        draw = _Init(self.config, seed)
        for prefix, module in self.named_modules():
            if isinstance(module, Attention):
                layer = copy.deepcopy(module).to_empty(device="cpu")
                draw.start_(layer, prefix)
                yield layer

    def ledger(self) -> dict[str, int]:
        """Parameters by part; the parts sum to the total."""
        parts: Counter[str] = Counter(embedding=0, attention=0, mlp=0, norm=0)
        for name, parameter in self.named_parameters():
            # In this order: a norm inside the attention is the attention's.
            part = next(p for p in ("embedding", "attention", "mlp", "norm") if p in name)
            parts[part] += parameter.numel()
        return {"total": parts.total(), **parts}


class _Init:
    """Draws starting values by name: GPT-2's (σ = 0.02, smaller where a matrix writes to the
    residual stream), or torch's default for a linear layer (uniform within ±1/√fan_in).
    """

    def __init__(self, config: ModelConfig, seed: int) -> None:
        self.config, self.seed = config, seed

    def __call__(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        residual: bool = False,
        fan_in: int | None = None,
    ) -> Tensor:
        if self.config.init == "linear":
            # A vector is the bias of a map from d_model, unless the caller knows better.
            fan_in = fan_in or (shape[0] if len(shape) == 2 else self.config.d_model)
            bound = 1 / math.sqrt(fan_in)
            uniform = stream(self.seed, "init", name).random(shape, dtype="float32")
            return torch.from_numpy(uniform).mul_(2 * bound).sub_(bound)
        if len(shape) == 1:
            return torch.zeros(shape)
        std = GPT2_SIGMA / (2 * self.config.layers) ** 0.5 if residual else GPT2_SIGMA
        return self.normal(name, shape, std)

    def start_(self, layer: Attention, prefix: str) -> None:
        """The attention layer that stands at `prefix`."""
        layer.qk.init_(self.within(f"{prefix}.qk"))
        layer.ov.init_(self.within(f"{prefix}.ov"))
        if layer.norm is not None:
            layer.norm.init_(self.within(f"{prefix}.norm"))

    def normal(self, name: str, shape: tuple[int, ...], std: float = GPT2_SIGMA) -> Tensor:
        normal = stream(self.seed, "init", name).standard_normal(shape, dtype="float32")
        return torch.from_numpy(normal).mul_(std)

    def within(self, prefix: str) -> Draw:
        def draw(
            name: str,
            shape: tuple[int, ...],
            *,
            residual: bool = False,
            fan_in: int | None = None,
        ) -> Tensor:
            return self(f"{prefix}.{name}", shape, residual=residual, fan_in=fan_in)

        return draw


def _table(rows: int, width: int) -> nn.Embedding:
    """Without torch's own start, which costs more than all the rest of an empty model."""
    return nn.Embedding.from_pretrained(torch.empty(rows, width), freeze=False)


def _norm(config: ModelConfig) -> nn.Module:
    if config.norm == "none":
        return nn.Identity()
    return nn.LayerNorm(config.d_model, bias=config.bias)

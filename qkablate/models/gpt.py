"""Transformer of one stack in the layout of GPT-2; only the circuits of the attention vary.

Shape suffixes: B batch, T context, S source, A answers, P positions, D d_model, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Unpack

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from qkablate.attention import Attention, Cache
from qkablate.attention.kernels.choice import KernelOptions
from qkablate.attention.kernels.matmul import Linear, linear
from qkablate.config import ModelConfig, VariantConfig
from qkablate.config.variant import variant_sites
from qkablate.models.base import AttentionLayer, Model
from qkablate.models.blocked_loss import blocked_loss, rows_per_block
from qkablate.models.catalogue import make_attention
from qkablate.models.mlp import make_mlp


class Block(nn.Module):
    """Attention and MLP, each with a norm (if any) before and a residual connection around it.

    A block of a decoder that reads a source has cross-attention between the two. Padding is in the
    source alone: the stream of a block that is not causal, or what the cross-attention reads.
    """

    def __init__(
        self,
        config: ModelConfig,
        attention: Attention,
        cross_attention: Attention | None = None,
        *,
        causal: bool = True,
    ) -> None:
        super().__init__()
        self.causal = causal
        self.norm_1 = make_norm(config)
        self.attention = attention
        self.norm_cross = make_norm(config) if cross_attention is not None else None
        self.cross_attention = cross_attention
        self.norm_2 = make_norm(config) if config.mlp_ratio else None
        self.mlp = make_mlp(config) if config.mlp_ratio else None
        self.dropout = nn.Dropout(config.dropout)
        self.attention_skip = config.attention_skip

    def forward(
        self,
        x_BTD: Tensor,
        caches: Sequence[Cache] = (),
        y_BSD: Tensor | None = None,
        key_mask_BS: Tensor | None = None,
    ) -> Tensor:
        """Return the stream after the block; the caches are those of its attention layers."""
        x_BTD = self.attend_to_self(x_BTD, caches[0] if caches else None, key_mask_BS)
        if self.cross_attention is not None and self.norm_cross is not None:
            normed_BTD, cache = self.norm_cross(x_BTD), caches[1] if caches else None
            read_BTD = self.cross_attention(
                normed_BTD, y_BSD, causal=False, cache=cache, key_mask_BS=key_mask_BS
            )
            x_BTD = x_BTD + self.dropout(read_BTD)
        if self.mlp is not None and self.norm_2 is not None:
            x_BTD = x_BTD + self.dropout(self.mlp(self.norm_2(x_BTD)))
        return x_BTD

    def attend_to_self(
        self, x_BTD: Tensor, cache: Cache | None = None, key_mask_BS: Tensor | None = None
    ) -> Tensor:
        """Return the stream after the self-attention."""
        key_mask_BS = None if self.causal else key_mask_BS
        attended_BTD = self.attention(
            self.norm_1(x_BTD), causal=self.causal, cache=cache, key_mask_BS=key_mask_BS
        )
        written_BTD: Tensor = self.dropout(attended_BTD)
        return x_BTD + written_BTD if self.attention_skip else written_BTD


class GPT(Model):
    """Decoder, or encoder, with a norm before each sublayer, unless `norm` is none.

    The output head is the token embedding, unless `tied` is false. With `embedding_width` the
    embedding is factorized (ALBERT, Lan et al. 2020): a map leads to d_model, and its transpose, or
    a map of its own if the head is not tied, leads back.
    """

    def __init__(
        self,
        config: ModelConfig,
        variant: VariantConfig,
        vocabulary: int,
        **options: Unpack[KernelOptions],
    ) -> None:
        super().__init__()
        self.config, self.sites = config, variant_sites(variant, config)
        self.padding = options.get("padding", False) and config.form != "decoder"
        width = config.embedding_width or config.d_model
        self.token_embedding = empty_embedding(vocabulary, width)
        self.output_embedding = None if config.tied else empty_embedding(vocabulary, width)
        self.embedding_up = self.embedding_down = None
        if config.embedding_width is not None:
            self.embedding_up = Linear(width, config.d_model, bias=False)
            if not config.tied:
                self.embedding_down = Linear(config.d_model, width, bias=False)
        self.position_embedding = None
        if config.position == "learned":
            self.position_embedding = empty_embedding(config.context, config.d_model)
        self.dropout = nn.Dropout(config.dropout)
        attention = partial(make_attention, config, variant, **options)
        self.blocks = nn.ModuleList(
            Block(
                config,
                attention("encoder" if config.form == "encoder" else "decoder"),
                attention("cross") if config.form == "encoder_decoder" else None,
                causal=config.form != "encoder",
            )
            for _ in range(config.layers)
        )
        self.norm = make_norm(config)

    def forward(self, tokens_BT: Tensor, caches: list[Cache] | None = None) -> Tensor:
        """Return the logits of the next token, logits_BTV.

        With the model's caches, the tokens continue the sequences stored in them.
        """
        return linear(self.hidden(tokens_BT, caches), self.output_weight)

    def hidden(self, tokens_BT: Tensor, caches: list[Cache] | None = None) -> Tensor:
        key_mask_BT = self.source_mask(tokens_BT)
        first = caches[0].length if caches else 0
        x_BTD = self._embed(tokens_BT, first, key_mask_BS=key_mask_BT)
        return self._to_output(self._run(self.blocks, x_BTD, caches, key_mask_BS=key_mask_BT))

    def _run(
        self,
        blocks: nn.ModuleList,
        x_BTD: Tensor,
        caches: list[Cache] | None = None,
        y_BSD: Tensor | None = None,
        key_mask_BS: Tensor | None = None,
    ) -> Tensor:
        """Return the stream after some blocks, which may attend to a source y."""
        recompute = self.checkpoint_activations and self.training and torch.is_grad_enabled()
        random = bool(self.config.dropout) or self.has_external_circuits
        per_block = len(caches or ()) // len(blocks)
        for i, block in enumerate(blocks):
            if recompute:
                x_BTD = checkpoint(
                    block,
                    *(x_BTD, (), y_BSD, key_mask_BS),
                    use_reentrant=False,
                    preserve_rng_state=random,
                )
            else:
                own = caches[i * per_block : (i + 1) * per_block] if caches else ()
                x_BTD = block(x_BTD, own, y_BSD, key_mask_BS)
        return x_BTD

    def _to_output(self, x_BTD: Tensor) -> Tensor:
        hidden_BTD: Tensor = self.norm(x_BTD)
        if self.embedding_down is not None:
            return linear(hidden_BTD, self.embedding_down.weight)
        if self.embedding_up is not None:
            return linear(hidden_BTD, self.embedding_up.weight.T)
        return hidden_BTD

    def _embed(
        self,
        tokens_BT: Tensor,
        first: int = 0,
        key_mask_BS: Tensor | None = None,
        *,
        table: nn.Embedding | None = None,
        up: Linear | None = None,
        positions: nn.Embedding | None = None,
    ) -> Tensor:
        """Return the stream before the first block, from tables of the decoder unless given."""
        if key_mask_BS is not None:
            tokens_BT = tokens_BT.clamp(min=0)  # the padding is no token
        x_BTD: Tensor = (table or self.token_embedding)(tokens_BT)
        if (up := up or self.embedding_up) is not None:
            x_BTD = up(x_BTD)
        if (positions := positions or self.position_embedding) is not None:
            x_BTD = x_BTD + positions.weight[first : first + tokens_BT.shape[1]]
        if key_mask_BS is not None:
            x_BTD = x_BTD.masked_fill(~key_mask_BS[..., None], 0)
        x_BTD = self.dropout(x_BTD)
        return x_BTD

    def embedding_maps(self) -> list[tuple[Linear, int]]:
        """Return the maps to d_model and back, and for how many tokens of a sequence each is used.

        The transpose of a single one is the other.
        """
        up, down, context = self.embedding_up, self.embedding_down, self.config.context
        return [] if up is None else [(up, context), (up if down is None else down, context)]

    @property
    def output_weight(self) -> Tensor:
        table = self.token_embedding if self.output_embedding is None else self.output_embedding
        return table.weight

    def attention_layers(self) -> list[AttentionLayer]:
        site = "encoder" if self.config.form == "encoder" else "decoder"
        layers = enumerate(block.attention for block in self.sharding_units())
        return [AttentionLayer(f"blocks.{i}.attention", site, layer) for i, layer in layers]

    def attention_inputs(
        self, *inputs: Tensor
    ) -> Iterator[tuple[AttentionLayer, tuple[Tensor, ...]]]:
        key_mask_BT, blocks = self.source_mask(inputs[0]), self.sharding_units()
        x_BTD = self._embed(inputs[0], key_mask_BS=key_mask_BT)
        for layer, block in zip(self.attention_layers(), blocks, strict=True):
            yield layer, (block.norm_1(x_BTD),)
            if block is not blocks[-1]:
                x_BTD = block(x_BTD, key_mask_BS=key_mask_BT)

    def sharding_units(self) -> list[Block]:
        return [block for block in self.blocks if isinstance(block, Block)]

    def loss(
        self,
        tokens_BT: Tensor,
        targets_BA: Tensor,
        positions_BA: Tensor | None = None,
        reduction: str = "mean",
    ) -> Tensor:
        return self._loss(self._hidden_at(positions_BA, tokens_BT), targets_BA, reduction)

    def _loss(self, x_BAD: Tensor, targets_BA: Tensor, reduction: str) -> Tensor:
        many = targets_BA.numel() > rows_per_block(self.vocabulary)
        if many and reduction == "mean" and torch.is_grad_enabled():
            return blocked_loss(x_BAD.flatten(0, 1), self.output_weight, targets_BA.flatten())
        logits_NV = linear(x_BAD, self.output_weight).flatten(0, 1).float()
        return F.cross_entropy(logits_NV, targets_BA.flatten(), reduction=reduction)

    def loss_and_hits(
        self, tokens_BT: Tensor, targets_BA: Tensor, positions_BA: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        return self._loss_and_hits(self._hidden_at(positions_BA, tokens_BT), targets_BA)

    def _loss_and_hits(self, x_BAD: Tensor, targets_BA: Tensor) -> tuple[Tensor, Tensor]:
        logits_BAV = linear(x_BAD, self.output_weight).float()
        losses_BA = F.cross_entropy(logits_BAV.transpose(1, 2), targets_BA, reduction="none")
        return losses_BA, logits_BAV.argmax(-1) == targets_BA

    def _hidden_at(self, positions_BA: Tensor | None, *inputs: Tensor) -> Tensor:
        """Return x_BAD at the given positions, or at all without any."""
        x_BTD: Tensor = self.hidden(*inputs)  # type: ignore[arg-type]  # of a subclass
        if positions_BA is None:
            return x_BTD
        return x_BTD.gather(1, positions_BA[..., None].expand(-1, -1, x_BTD.shape[-1]))

    def log_probabilities(self, tokens_BT: Tensor, rows_P: Tensor, columns_P: Tensor) -> Tensor:
        x_PD = self.hidden(tokens_BT)[rows_P, columns_P]
        return F.log_softmax(linear(x_PD, self.output_weight).float(), dim=-1)


def empty_embedding(rows: int, width: int) -> nn.Embedding:
    """Return an embedding without torch's slow initialization."""
    table: nn.Embedding = nn.Embedding.from_pretrained(torch.empty(rows, width), freeze=False)
    return table


def make_norm(config: ModelConfig) -> nn.Module:
    """Return the norm before a sublayer."""
    if config.norm == "none":
        return nn.Identity()
    if config.norm_kind == "rms":
        return nn.RMSNorm(config.d_model, eps=config.norm_eps)
    return nn.LayerNorm(config.d_model, eps=config.norm_eps, bias=config.bias)

"""Encoder and decoder, joined by cross-attention: a model that translates.

Shape suffixes: B batch, T context, S source, A answers, P positions, D width of a stream, V
vocabulary.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Unpack

from torch import Tensor, nn
from torch.nn import functional as F

from qkablate.attention import Cache
from qkablate.attention.kernels.choice import KernelOptions
from qkablate.attention.kernels.matmul import Linear, linear
from qkablate.config import ModelConfig, VariantConfig
from qkablate.config.variant import stream_width
from qkablate.models.base import AttentionLayer
from qkablate.models.catalogue import encoder_layers, make_attention
from qkablate.models.gpt import GPT, Block, empty_embedding, make_norm


class EncoderDecoder(GPT):
    """A GPT whose blocks also attend to the output of an encoder (Vaswani et al., 2017).

    Both stacks share the token embedding and have position tables of their own. The encoder's
    output is normalized once, so that all layers read the same source. An encoder of another width
    has a token embedding of its own, or shares a factorized one and has a map of its own.
    """

    def __init__(
        self,
        config: ModelConfig,
        variant: VariantConfig,
        vocabulary: int,
        **options: Unpack[KernelOptions],
    ) -> None:
        super().__init__(config, variant, vocabulary, **options)
        width = stream_width(config, "encoder")
        self.source_token_embedding = self.source_embedding_up = None
        if width != config.d_model and config.embedding_width is None:
            self.source_token_embedding = empty_embedding(vocabulary, width)
        elif width != config.d_model and config.embedding_width is not None:
            self.source_embedding_up = Linear(config.embedding_width, width, bias=False)
        self.source_position_embedding = None
        if config.position == "learned":
            source = config.source or config.context
            self.source_position_embedding = empty_embedding(source, width)
        stack = replace(config, d_model=width)
        attention = partial(make_attention, config, variant, "encoder", **options)
        self.encoder = nn.ModuleList(
            Block(stack, attention(), causal=False) for _ in range(encoder_layers(config))
        )
        self.encoder_norm = make_norm(stack)

    def input_lengths(self) -> tuple[int, ...]:
        return (self.config.source or self.config.context, self.config.context)

    def encode(self, source_BS: Tensor) -> Tensor:
        """Return the encoder's output, y_BSD."""
        x_BSD, mask_BS = self._embed_source(source_BS), self.source_mask(source_BS)
        y_BSD: Tensor = self.encoder_norm(self._run(self.encoder, x_BSD, key_mask_BS=mask_BS))
        return y_BSD

    def _embed_source(self, source_BS: Tensor) -> Tensor:
        return self._embed(
            source_BS,
            key_mask_BS=self.source_mask(source_BS),
            table=self.source_token_embedding,
            up=self.source_embedding_up,
            positions=self.source_position_embedding,
        )

    def embedding_maps(self) -> list[tuple[Linear, int]]:
        maps = super().embedding_maps()
        if not maps:
            return []
        up = self.source_embedding_up or maps[0][0]
        return [*maps, (up, self.input_lengths()[0])]

    def forward(self, source_BS: Tensor, tokens_BT: Tensor) -> Tensor:  # type: ignore[override]
        """Return the logits of the next token of the target, logits_BTV."""
        return linear(self.hidden(source_BS, tokens_BT), self.output_weight)

    def hidden(self, source_BS: Tensor, tokens_BT: Tensor) -> Tensor:  # type: ignore[override]
        mask_BS = self.source_mask(source_BS)
        return self.decode(self.encode(source_BS), tokens_BT, key_mask_BS=mask_BS)

    def decode(
        self,
        y_BSD: Tensor,
        tokens_BT: Tensor,
        caches: list[Cache] | None = None,
        *,
        key_mask_BS: Tensor | None = None,
    ) -> Tensor:
        """Return the input of the output projection for a source that is encoded already.

        The mask is that of the source, where it is padded. With the model's caches, the tokens
        continue the targets stored in them.
        """
        x_BTD = self._embed(tokens_BT, caches[0].length if caches else 0)
        return self._to_output(self._run(self.blocks, x_BTD, caches, y_BSD, key_mask_BS))

    def attention_layers(self) -> list[AttentionLayer]:
        layers = [
            AttentionLayer(f"encoder.{i}.attention", "encoder", block.attention)
            for i, block in enumerate(_blocks(self.encoder))
        ]
        for i, block in enumerate(_blocks(self.blocks)):
            assert block.cross_attention is not None
            layers.append(AttentionLayer(f"blocks.{i}.attention", "decoder", block.attention))
            name = f"blocks.{i}.cross_attention"
            layers.append(AttentionLayer(name, "cross", block.cross_attention))
        return layers

    def unused_parameters(self) -> list[nn.Parameter]:
        parameters = super().unused_parameters()
        for block in _blocks(self.blocks):
            assert block.norm_cross is not None
            if block.cross_attention is not None and not block.cross_attention.reads_queries:
                parameters += block.norm_cross.parameters()
        return parameters

    def attention_inputs(
        self, *inputs: Tensor
    ) -> Iterator[tuple[AttentionLayer, tuple[Tensor, ...]]]:
        source_BS, tokens_BT = inputs
        layers = iter(self.attention_layers())
        x_BSD, mask_BS = self._embed_source(source_BS), self.source_mask(source_BS)
        for block in _blocks(self.encoder):
            yield next(layers), (block.norm_1(x_BSD),)
            x_BSD = block(x_BSD, key_mask_BS=mask_BS)
        y_BSD = self.encoder_norm(x_BSD)
        x_BTD = self._embed(tokens_BT, key_mask_BS=self.source_mask(tokens_BT))
        blocks = _blocks(self.blocks)
        for block in blocks:
            assert block.norm_cross is not None
            yield next(layers), (block.norm_1(x_BTD),)
            yield next(layers), (block.norm_cross(block.attend_to_self(x_BTD)), y_BSD)
            if block is not blocks[-1]:
                x_BTD = block(x_BTD, (), y_BSD, mask_BS)

    def sharding_units(self) -> list[Block]:
        return [*_blocks(self.encoder), *_blocks(self.blocks)]

    def loss(  # type: ignore[override]
        self,
        source_BS: Tensor,
        tokens_BT: Tensor,
        targets_BA: Tensor,
        positions_BA: Tensor | None = None,
        reduction: str = "mean",
    ) -> Tensor:
        x_BAD = self._hidden_at(positions_BA, source_BS, tokens_BT)
        return self._loss(x_BAD, targets_BA, reduction)

    def loss_and_hits(  # type: ignore[override]
        self,
        source_BS: Tensor,
        tokens_BT: Tensor,
        targets_BA: Tensor,
        positions_BA: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        return self._loss_and_hits(self._hidden_at(positions_BA, source_BS, tokens_BT), targets_BA)

    def log_probabilities(  # type: ignore[override]
        self, source_BS: Tensor, tokens_BT: Tensor, rows_P: Tensor, columns_P: Tensor
    ) -> Tensor:
        x_PD = self.hidden(source_BS, tokens_BT)[rows_P, columns_P]
        return F.log_softmax(linear(x_PD, self.output_weight).float(), dim=-1)


def _blocks(stack: nn.ModuleList) -> list[Block]:
    return [block for block in stack if isinstance(block, Block)]

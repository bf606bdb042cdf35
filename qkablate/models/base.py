"""The interface between a model and the rest of the program: its attention layers, and its loss.

Shape suffixes: B batch, T context, A answers, P positions, D d_model, V vocabulary.
"""

import copy
import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from qkablate.attention import Attention, Cache, Draw, SourceCache
from qkablate.attention.spec import Spec
from qkablate.config import ModelConfig
from qkablate.data.batches import PAD
from qkablate.models.catalogue import GPT2_SIGMA, residual_writes
from qkablate.randomness import named_generator


class AttentionLayer(NamedTuple):
    """An attention layer and its place in the model."""

    name: str  # the prefix of its parameters in the state dict
    site: str  # decoder, encoder or cross
    module: Attention

    @property
    def is_self(self) -> bool:
        """True if queries, keys and values are of one stream."""
        return self.site != "cross"

    @property
    def place(self) -> str:
        """The site and the number of the block, for people."""
        return f"{self.site} {self.name.split('.')[1]}"

    @property
    def causal(self) -> bool:
        """True if no query attends to later positions."""
        return self.site == "decoder"


class Model(nn.Module, ABC):
    """Base of the models. Parameters are uninitialized until `init_`.

    `loss` and `loss_and_hits` take the inputs, the targets and the positions of a `Batch`, in this
    order; targets of -100 do not count. Where positions are given, only these are predicted, and
    the others never reach the output projection.
    """

    config: ModelConfig
    # Keep only the input of each block and recompute the rest for the gradients.
    checkpoint_activations = False
    has_external_circuits = False  # of the user or of an installed package: they may draw numbers

    sites: tuple[str, ...]  # that carry the variant
    padding = False  # sources may be padded

    @property
    @abstractmethod
    def output_weight(self) -> Tensor:
        """The weight of the output projection, weight_VD."""

    @abstractmethod
    def attention_layers(self) -> list[AttentionLayer]:
        """Return all attention layers in the order of computation."""

    @abstractmethod
    def attention_inputs(
        self, *inputs: Tensor
    ) -> Iterator[tuple[AttentionLayer, tuple[Tensor, ...]]]:
        """Yield each attention layer and the streams it reads, for inspection.

        The padding of targets may be PAD.
        """

    @abstractmethod
    def hidden(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the input of the output projection, x_BTD."""

    @abstractmethod
    def loss(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the cross-entropy in nats."""

    @abstractmethod
    def loss_and_hits(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Return the loss of each answer and whether the most likely token is correct."""

    @abstractmethod
    def log_probabilities(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return log_PV of the next token at some positions (rows and columns), in fp32."""

    @abstractmethod
    def sharding_units(self) -> Iterable[nn.Module]:
        """Return the modules whose parameters FSDP gathers together."""

    def input_lengths(self) -> tuple[int, ...]:
        """Return the longest sequence of each input."""
        return (self.config.context,)

    def source_mask(self, source_BS: Tensor) -> Tensor | None:
        """Return where a source is no padding; None where no source has any.

        These are the keys of the layers of an encoder and of cross-attention.
        """
        return source_BS != PAD if self.padding else None

    def padding_masks(
        self, layer: AttentionLayer, *inputs: Tensor
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return where the queries and the keys of a layer are no padding; None: everywhere."""
        if not self.padding:
            return None, None
        queries = inputs[0] if layer.site == "encoder" else inputs[-1]
        keys = inputs[-1] if layer.site == "decoder" else inputs[0]
        return queries != PAD, keys != PAD

    def variant_layers(self) -> dict[str, AttentionLayer]:
        """Return the first attention layer of each site that carries the variant."""
        first = {layer.site: layer for layer in reversed(self.attention_layers())}
        return {site: first[site] for site in self.sites}

    def variant_layer(self) -> AttentionLayer:
        """Return the attention layer whose rate `variant.lr` means.

        The first one that carries the variant and has a matched rate, or else the first one.
        """
        layers = [*self.variant_layers().values()]
        return next((layer for layer in layers if layer.module.matched_lr != 1), layers[0])

    def unused_parameters(self) -> list[nn.Parameter]:
        """Return the parameters that the loss does not depend on."""
        return [p for layer in self.attention_layers() for p in layer.module.qk.unused_parameters()]

    @property
    def kernel(self) -> str:
        """The kernels of the layers, by name."""
        return "+".join(dict.fromkeys(layer.module.kernel for layer in self.attention_layers()))

    @property
    def vocabulary(self) -> int:
        """The number of tokens."""
        return len(self.output_weight)

    def make_caches(self) -> list[Cache]:
        """Return an empty cache for each attention layer of the decoder, in their order."""
        return [
            (Cache if layer.is_self else SourceCache)(self.config.context)
            for layer in self.attention_layers()
            if layer.site != "encoder"
        ]

    def to_empty(self, *, device: str | torch.device | int | None, recurse: bool = True) -> Self:
        """Do as `nn.Module.to_empty`, which imports much of torch's compiler for meta tensors."""
        assert recurse

        def empty(like: Tensor) -> Tensor:
            return torch.empty(like.shape, dtype=like.dtype, device=device)

        return self._apply(empty)  # type: ignore[no-untyped-call,no-any-return]

    @torch.no_grad()
    def init_(self, seed: int) -> Self:
        """Set every parameter from (seed, its name), drawn on the CPU."""
        draw = _Initializer(self.config, seed)
        inside: set[nn.Module] = set()
        for layer in self.attention_layers():
            draw.init_attention_(layer.module, layer.name)
            inside.update(layer.module.modules())  # a circuit initializes its own submodules
        for prefix, module in self.named_modules():
            if module in inside:
                continue
            if isinstance(module, nn.Embedding):
                std = draw.embedding_std(prefix)
                module.weight.copy_(draw.normal(f"{prefix}.weight", module.weight.shape, std))
            elif isinstance(module, nn.LayerNorm | nn.RMSNorm):
                nn.init.ones_(module.weight)
                if isinstance(module, nn.LayerNorm) and module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, nn.Linear):
                # nn.Linear stores (out, in); draws are (in, out), as in the circuits.
                residual, (fan_out, fan_in) = prefix.endswith("mlp.down"), module.weight.shape
                weight = draw(f"{prefix}.weight", (fan_in, fan_out), residual=residual)
                if "embedding_" in prefix:  # stream and logits start as without it
                    std = (self.config.embedding_width or fan_in) ** -0.5
                    weight = draw.normal(f"{prefix}.weight", (fan_in, fan_out), std)
                module.weight.copy_(weight.T)
                if module.bias is not None:
                    module.bias.copy_(draw(f"{prefix}.bias", (fan_out,), fan_in=fan_in))
        return self

    @torch.no_grad()
    def initial_attention_layers(self, seed: int) -> Iterator[Attention]:
        """Yield a copy of each attention layer as `init_` sets it, on the CPU, one at a time."""
        draw = _Initializer(self.config, seed)
        for layer in self.attention_layers():
            module = copy.deepcopy(layer.module).to_empty(device="cpu")
            draw.init_attention_(module, layer.name)
            yield module

    def parameter_counts(self) -> dict[str, int]:
        """Return the number of parameters by part, and their total."""
        parts: Counter[str] = Counter(embedding=0, attention=0, mlp=0, norm=0)
        for name, parameter in self.named_parameters():
            # In this order: a norm inside the attention belongs to the attention.
            part = next(p for p in ("embedding", "attention", "mlp", "norm") if p in name)
            parts[part] += parameter.numel()
        return {"total": parts.total(), **parts}


class _Initializer:
    """Draws initial values by name.

    Either GPT-2's (σ = 0.02, smaller where a matrix writes to the residual stream) or torch's
    default for a linear layer (uniform within ±1/√fan_in).
    """

    def __init__(self, config: ModelConfig, seed: int) -> None:
        self.config, self.seed = config, seed

    def __call__(
        self, name: str, shape: Sequence[int], *, residual: bool = False, fan_in: int | None = None
    ) -> Tensor:
        if self.config.init == "linear":
            fan_in = fan_in or shape[0]
            bound = 1 / math.sqrt(fan_in)
            uniform = named_generator(self.seed, "init", name).random(shape, dtype="float32")
            return torch.from_numpy(uniform).mul_(2 * bound).sub_(bound)
        if len(shape) == 1:
            return torch.zeros(shape)
        writes = residual_writes(self.config, name.partition(".")[0]) if residual else 1
        return self.normal(name, shape, GPT2_SIGMA / writes**0.5)

    def init_attention_(self, layer: Attention, prefix: str) -> None:
        for name in ("qk", "ov", "norm", "rope_dims"):
            if (circuit := getattr(layer, name)) is not None:
                circuit.init_(self._for_circuit(f"{prefix}.{name}", circuit.spec))

    def normal(self, name: str, shape: Sequence[int], std: float = GPT2_SIGMA) -> Tensor:
        normal = named_generator(self.seed, "init", name).standard_normal(shape, dtype="float32")
        return torch.from_numpy(normal).mul_(std)

    def embedding_std(self, name: str) -> float:
        """Return σ of a table of embeddings; an output head of its own has GPT-2's."""
        if name.endswith("position_embedding"):
            return self.config.position_std
        return self.config.embedding_std if name.endswith("token_embedding") else GPT2_SIGMA

    def _for_circuit(self, prefix: str, spec: Spec) -> Draw:
        """Return the draws of a circuit; a tensor that is no matrix follows the stream it reads."""

        def draw(
            name: str, shape: Sequence[int], *, residual: bool = False, fan_in: int | None = None
        ) -> Tensor:
            if fan_in is None and len(shape) != 2:
                fan_in = spec.d_keys if name in ("b_k", "b_v") else spec.d_model
            return self(f"{prefix}.{name}", shape, residual=residual, fan_in=fan_in)

        return draw

"""Text generation from a trained model, token by token, with decoder caches."""

import codecs
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from qkablate.data.tokenizers import Tokenizer
from qkablate.errors import UserError
from qkablate.models.base import Model


def generate(
    model: Model,
    prompt: Sequence[int],
    *,
    count: int,
    temperature: float,
    top_k: int | None = None,
    seed: int = 0,
) -> Iterator[int]:
    """Yield `count` tokens that continue the prompt; temperature 0 takes the most likely ones.

    Where prompt and text exceed the context, generation continues from its last half with new
    caches, since the old ones were computed at other positions.
    """
    context, device = model.config.context, model.output_weight.device
    generator = torch.Generator().manual_seed(seed)
    tokens, new, caches = list(prompt), list(prompt), model.make_caches()
    for _ in range(count):
        if caches[0].length + len(new) > context:
            caches, new = model.make_caches(), tokens[-max(1, context // 2) :]
        with torch.inference_mode():
            logits_V = model(torch.tensor([new], device=device), caches)[0, -1]
        new = [_sample(logits_V.double().cpu(), temperature, top_k, generator)]
        tokens += new
        yield new[0]


def _sample(
    logits_V: Tensor, temperature: float, top_k: int | None, generator: torch.Generator
) -> int:
    if not logits_V.isfinite().all():
        raise UserError("the logits of the model are not finite: the run has diverged")
    if temperature == 0:
        return int(logits_V.argmax())
    top_logits, ids = logits_V.topk(min(top_k or len(logits_V), len(logits_V)))
    # The largest becomes 0 first, so that no temperature is too small to divide by.
    weights = ((top_logits - top_logits[0]) / temperature).softmax(0)
    return int(ids[torch.multinomial(weights, 1, generator=generator)])


def decode_text(tokenizer: Tokenizer, ids: Iterable[int]) -> Iterator[str]:
    """Yield the text in pieces of complete characters; invalid bytes become �."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    for token in ids:
        if piece := decoder.decode(tokenizer.decode([token])):
            yield piece
    if rest := decoder.decode(b"", final=True):
        yield rest

"""Text from a trained model, a token at a time, through a decoder's caches."""

import codecs
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from qkablate.data.tokenizers import Tokenizer
from qkablate.errors import UserError
from qkablate.models.gpt import GPT


def generate(
    model: GPT,
    prompt: Sequence[int],
    *,
    count: int,
    temperature: float,
    top_k: int | None = None,
    seed: int = 0,
) -> Iterator[int]:
    """`count` tokens that go on from the prompt; temperature 0 takes the likeliest.

    Where prompt and text outgrow the context, the model goes on from the last half of it; the
    caches begin anew there, for what they hold was computed at other positions.
    """
    context, device = model.config.context, model.token_embedding.weight.device
    generator = torch.Generator().manual_seed(seed)
    tokens, new, caches = list(prompt), list(prompt), model.caches()
    for _ in range(count):
        if caches[0].length + len(new) > context:
            caches, new = model.caches(), tokens[-max(1, context // 2) :]
        with torch.inference_mode():
            logits_V = model(torch.tensor([new], device=device), caches)[0, -1]
        new = [_draw(logits_V.double().cpu(), temperature, top_k, generator)]
        tokens += new
        yield new[0]


def _draw(
    logits_V: Tensor, temperature: float, top_k: int | None, generator: torch.Generator
) -> int:
    if not logits_V.isfinite().all():
        raise UserError("the model's scores are not finite: this run has diverged")
    if temperature == 0:
        return int(logits_V.argmax())
    likeliest, ids = logits_V.topk(min(top_k or len(logits_V), len(logits_V)))
    # The greatest first becomes 0, so that no temperature is too low to divide by.
    weights = ((likeliest - likeliest[0]) / temperature).softmax(0)
    return int(ids[torch.multinomial(weights, 1, generator=generator)])


def characters(tokenizer: Tokenizer, ids: Iterable[int]) -> Iterator[str]:
    """The text, a piece as soon as whole characters stand in it; bytes that make none become �."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    for token in ids:
        if piece := decoder.decode(tokenizer.decode([token])):
            yield piece
    if rest := decoder.decode(b"", final=True):
        yield rest

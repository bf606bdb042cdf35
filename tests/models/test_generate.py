"""Generation: decoding with caches equals full forward passes; sampling; text pieces."""

import pytest
import torch

from qkablate.config import ModelConfig, VariantConfig, resolve_variant
from qkablate.data.tokenizers import ByteTokenizer, CharTokenizer
from qkablate.errors import UserError
from qkablate.models.generate import decode_text, generate
from qkablate.models.gpt import GPT

CONTEXT = 12
PROMPT = [3, 1, 4]


def large_weights_model(position="learned", heads=4, **variant):
    """Return a model with large weights, whose predictions depend on the whole context."""
    config = ModelConfig(layers=2, d_model=16, heads=heads, context=CONTEXT, position=position)
    model = GPT(config, resolve_variant(VariantConfig(**variant), config), 50).init_(0).double()
    noise = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += torch.randn(parameter.shape, generator=noise, dtype=torch.float64)
        # Otherwise the tied embedding repeats the last token.
        model.norm.weight.copy_(torch.randn(16, generator=noise))
    return model.eval()


def greedy_reference(model, prompt, count):
    """Decode greedily without a cache, restarting from the last half of a full context."""
    tokens, first = list(prompt), 0
    for _ in range(count):
        if len(tokens) - first > CONTEXT:
            first = len(tokens) - CONTEXT // 2
        tokens.append(int(model(torch.tensor([tokens[first:]]))[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("position", ["learned", "none", "alibi", "rope"])
def test_one_head_decodes_as_full_forward_passes(position):
    model = large_weights_model(position, heads=1)
    assert list(generate(model, PROMPT, count=40, temperature=0)) == greedy_reference(
        model, PROMPT, 40
    )


@pytest.mark.parametrize("position", ["learned", "none", "alibi", "rope"])
@pytest.mark.parametrize("prompt", [PROMPT, list(range(CONTEXT)), list(range(40))], ids=len)
def test_greedy_decoding_equals_full_forward_passes(position, prompt):
    model = large_weights_model(position)
    text = list(generate(model, prompt, count=60, temperature=0))
    assert text == greedy_reference(model, prompt, 60)
    assert len(set(text)) > 6  # the text is not constant


@pytest.mark.parametrize(
    "variant",
    [
        {"qk": "merged"},
        {"qk": "no_q"},
        {"qk": "static"},
        {"ov": "no_v"},
        {"qk": "grouped", "ov": "grouped"},
        {"norm": "qk"},
        {"qk": "shared", "norm": "unit_keys", "mask_self": True},
    ],
    ids=str,
)
def test_greedy_decoding_with_every_kind_of_cache(variant):
    model = large_weights_model(**variant)
    text = list(generate(model, PROMPT, count=40, temperature=0))
    assert text == greedy_reference(model, PROMPT, 40)


def test_context_of_one_position():
    config = ModelConfig(layers=1, d_model=8, heads=2, context=1)
    model = GPT(config, resolve_variant(VariantConfig(), config), 5).init_(0).eval()
    assert len(list(generate(model, [1, 2], count=4, temperature=0))) == 4


def test_seed_determines_the_text():
    model = large_weights_model()

    def text(**changed):
        settings = {"count": 40, "temperature": 1.0, "seed": 0} | changed
        return list(generate(model, PROMPT, **settings))

    assert text() == text()
    assert text() != text(seed=1)
    assert text(top_k=50) == text()  # the whole vocabulary
    assert text(top_k=10**9) == text()
    assert text(top_k=3) != text()


def test_top_1_is_greedy():
    model = large_weights_model()
    greedy = list(generate(model, PROMPT, count=40, temperature=0))
    for settings in ({"top_k": 1, "temperature": 5.0}, {"temperature": 1e-300}):
        assert list(generate(model, PROMPT, count=40, seed=7, **settings)) == greedy


def test_samples_follow_temperature_and_top_k():
    """Frequencies of the first token follow softmax(logits / T) over the top k."""
    model = large_weights_model()
    logits = model(torch.tensor([PROMPT]))[0, -1] / 3
    likeliest, ids = logits.topk(4)
    draws = [
        next(generate(model, PROMPT, count=1, temperature=3.0, top_k=4, seed=seed))
        for seed in range(800)
    ]
    found = torch.tensor([draws.count(i) / len(draws) for i in ids])
    torch.testing.assert_close(found.double(), likeliest.softmax(0), atol=0.05, rtol=0)
    assert {*draws} <= {*ids.tolist()}


def test_diverged_model_is_rejected():
    model = large_weights_model()
    with torch.no_grad():
        model.norm.weight.fill_(float("nan"))
    with pytest.raises(UserError, match="not finite"):
        next(generate(model, PROMPT, count=1, temperature=1.0))


def test_pieces_are_complete_characters():
    """Multi-byte characters are complete, and invalid bytes are replaced."""
    pulled = []

    def ids(text):
        for byte in text:
            pulled.append(byte)
            yield byte

    seen = [(piece, len(pulled)) for piece in decode_text(ByteTokenizer(), ids("aé∑𝄞".encode()))]
    assert seen == [("a", 1), ("é", 3), ("∑", 6), ("𝄞", 10)]
    assert "".join(decode_text(ByteTokenizer(), b"a\xffb\xe2\x88")) == "a\ufffdb\ufffd"
    assert list(decode_text(CharTokenizer("aé∑"), [2, 0, 1])) == ["∑", "a", "é"]

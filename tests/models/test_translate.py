"""Translation: caches equal full passes; greedy and beam search."""

import math

import pytest
import torch

from qkablate.attention import SourceCache
from qkablate.config import ModelConfig, VariantConfig, resolve_variant, variants
from qkablate.data.pairs.sentences import TargetTokens
from qkablate.errors import UserError
from qkablate.models.build import build_model
from qkablate.models.translate import beam_search, translate

SOURCE, CONTEXT, VOCABULARY = 7, 10, 20
START, END = 18, 19


def large_weights_model(
    name="standard", sites="all", position="learned", padding=False, bias=True, tied=True
):
    """Return a model with large weights, whose predictions depend on all it reads."""
    config = ModelConfig(form="encoder_decoder", layers=2, d_model=16, heads=4, bias=bias)
    config.source, config.context, config.position = SOURCE, CONTEXT, position
    config.tied = tied
    entry = {key: value for key, value in variants()[name].items() if key != "name"}
    variant = resolve_variant(VariantConfig(name=name, sites=sites, **entry), config)
    model = build_model(config, variant, VOCABULARY, padding=padding).init_(0).double()
    noise = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += torch.randn(parameter.shape, generator=noise, dtype=torch.float64)
        model.norm.weight.copy_(torch.randn(16, generator=noise))
    return model.eval()


def random_tokens(rows, length):
    return torch.randint(VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("name", variants())
def test_cached_decoding_equals_the_full_pass(name):
    model, source, target = large_weights_model(name), random_tokens(3, SOURCE), random_tokens(3, 9)
    y, caches = model.encode(source), model.make_caches()
    pieces = torch.cat([model.decode(y, piece, caches) for piece in target.split((4, 1, 4), 1)], 1)
    torch.testing.assert_close(pieces, model.decode(y, target), rtol=1e-10, atol=1e-10)
    decoder = [layer for layer in model.attention_layers() if layer.site != "encoder"]
    for cache, layer in zip(caches, decoder, strict=True):
        assert cache.length == 9
        if layer.is_self:
            assert cache.bytes_per_token() == 8 * layer.module.cached_per_token
        else:  # what is read from the source itself needs no cache
            cached = {layer.module.qk.cached, layer.module.ov.cached}
            assert set(cache.tensors) == cached & {"k", "v"} | ({"k"} if "c" in cached else set())


@pytest.mark.parametrize("name", ["standard", "no_q", "tied_qkv"])
def test_keys_and_values_of_the_source_are_computed_once(name, monkeypatch):
    model, source = large_weights_model(name, sites="cross"), random_tokens(1, SOURCE)
    y, caches = model.encode(source), model.make_caches()
    model.decode(y, random_tokens(1, 2), caches)
    first = {i: dict(c.tensors) for i, c in enumerate(caches) if isinstance(c, SourceCache)}
    assert any(first.values())
    model.decode(y, random_tokens(1, 1), caches)
    for i, tensors in first.items():
        assert all(caches[i].tensors[key] is tensor for key, tensor in tensors.items())


def greedy_reference(model, source, tokens):
    """Decode greedily by full passes."""
    known = [tokens.start]
    while len(known) <= CONTEXT:
        logits = model(torch.tensor([source]), torch.tensor([known]))[0, -1]
        if (token := int(logits.argmax())) == tokens.end:
            break
        known.append(token)
    return known[1:]


SOURCES = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10], [11], [3, 2, 1], [5, 5, 5]]


@pytest.mark.parametrize("end", [END, None])
@pytest.mark.parametrize("position", ["learned", "rope"])
def test_one_hypothesis_is_greedy_decoding(end, position):
    """Sources of several lengths keep their order."""
    model, tokens = large_weights_model(position=position), TargetTokens(START, end)
    with torch.no_grad():
        expected = [greedy_reference(model, source, tokens) for source in SOURCES]
    assert translate(model, SOURCES, tokens, beam=1) == expected
    assert len({tuple(target) for target in expected}) > 2
    assert end is not None or {len(target) for target in expected} == {CONTEXT}


@pytest.mark.parametrize("name", variants())
def test_padded_sources_are_decoded_together_as_one_by_one(name):
    """Log-probabilities to 1e-10, and the targets themselves, for greedy and beam search."""
    model, tokens = large_weights_model(name, padding=True), TargetTokens(START, END)
    padded = torch.tensor([[*source, *[-1] * (SOURCE - len(source))] for source in SOURCES])
    target, mask = random_tokens(len(SOURCES), 9), model.source_mask(padded)
    y, caches = model.encode(padded), model.make_caches()
    pieces = [model.decode(y, t, caches, key_mask_BS=mask) for t in target.split((4, 1, 4), 1)]
    alone = [
        model.hidden(torch.tensor([source]), target[i : i + 1]) for i, source in enumerate(SOURCES)
    ]
    torch.testing.assert_close(torch.cat(pieces, 1), torch.cat(alone), rtol=1e-10, atol=1e-10)
    for beam in (1, 3):
        expected = [translate(model, [source], tokens, beam)[0] for source in SOURCES]
        assert translate(model, SOURCES, tokens, beam) == expected


def test_beam_search_finds_no_worse_targets_and_is_deterministic():
    model, tokens = large_weights_model("merged_w"), TargetTokens(START, END)

    def score(source, target):
        known = [START, *target, END][: CONTEXT + 1]
        log_p = model(torch.tensor([source]), torch.tensor([known[:-1]]))[0]
        chosen = torch.tensor(known[1:])
        return float(log_p.log_softmax(-1).gather(1, chosen[:, None]).mean())

    greedy = translate(model, SOURCES, tokens)
    found = translate(model, SOURCES, tokens, beam=6)
    assert found == translate(model, SOURCES, tokens, beam=6)
    assert found != greedy
    with torch.no_grad():
        gains = [score(s, b) - score(s, g) for s, b, g in zip(SOURCES, found, greedy, strict=True)]
    assert sum(gains) > 0


def naive_beam_search(model, source, tokens, beam):
    """Return the best target and its score, by a full pass for each hypothesis."""
    live, done = [(0.0, [tokens.start])], []
    for length in range(1, CONTEXT + 1):
        longer = []
        for total, known in live:
            log_V = model(torch.tensor([source]), torch.tensor([known]))[0, -1].log_softmax(-1)
            longer += [(total + p, [*known, token]) for token, p in enumerate(log_V.tolist())]
        longer.sort(reverse=True)
        ended = [(total, known) for total, known in longer[:beam] if known[-1] == tokens.end]
        done += [(total / length, known[1:-1]) for total, known in ended][: beam - len(done)]
        live = [(total, known) for total, known in longer if known[-1] != tokens.end][:beam]
        if len(done) == beam:
            return max(done)
    return max([*done, *((total / CONTEXT, known[1:]) for total, known in live)])


@pytest.mark.parametrize(
    ("name", "position", "end"),  # a token that ends some targets of the model
    [
        ("standard", "rope", 5),
        ("gqa", "learned", 14),
        ("mla", "learned", 10),
        ("merged_w", "alibi", 15),
    ],
)
@pytest.mark.parametrize("beam", [1, 2, 4])
def test_scores_equal_those_of_full_passes(name, position, end, beam, monkeypatch):
    """Sources of different lengths are translated together, with caches."""
    # Neither biases nor a shared embedding, which would repeat one token in every target.
    options = {"padding": True, "bias": False, "tied": False}
    model = large_weights_model(name, position=position, **options)
    tokens, found = TargetTokens(START, end), []

    def search(*args, **options):
        found.extend(beam_search(*args, **options))
        return found

    monkeypatch.setattr("qkablate.models.translate.beam_search", search)
    sources = sorted(SOURCES, key=len)
    with torch.no_grad():
        expected = [naive_beam_search(model, source, tokens, beam) for source in sources]
    assert translate(model, sources, tokens, beam) == [target for _, target in expected]
    scores, naive = ([score for score, _ in each] for each in (found, expected))
    assert scores == pytest.approx(naive, rel=0, abs=1e-10)
    assert len({len(target) for _, target in expected}) > 2


def step_of(table):
    """Return the step of a hand-made model: the next token depends on the last one alone."""
    log_VV = torch.tensor(table, dtype=torch.float64).log()
    return lambda tokens_R, rows_R: log_VV[tokens_R]


# Tokens: 0 start, 1 end, 2 a, 3 b, 4 c. Greedy begins with a (0.6), after which all is improbable;
# b (0.4) is followed by the end with certainty.
MISLEADING = [
    [0, 0, 0.6, 0.4, 0],
    [0, 1, 0, 0, 0],
    [0, 0.3, 0.3, 0, 0.4],
    [0, 1, 0, 0, 0],
    [0, 0.5, 0.5, 0, 0],
]


def test_beam_search_finds_what_greedy_misses():
    step, tokens = step_of(MISLEADING), TargetTokens(0, 1)
    ((_, greedy),) = beam_search(step, 1, tokens, longest=6, beam=1)
    assert greedy[0] == 2
    for score, target in beam_search(step, 2, tokens, longest=6, beam=2):
        assert target == [3]
        assert score == pytest.approx(math.log(0.4) / 2)


def test_scores_are_normalized_by_length():
    """0.5 for one token is worse than 0.5 · 0.9 · 0.9 for three."""
    table = [[0, 0.5, 0.5, 0], [0, 1, 0, 0], [0, 0, 0, 1], [0, 0.9, 0.1, 0]]
    ((score, target),) = beam_search(step_of(table), 1, TargetTokens(0, 1), longest=9, beam=2)
    assert target == [2, 3]
    assert score == pytest.approx(math.log(0.5 * 0.9) / 3)


def test_targets_without_an_end_are_as_long_as_possible():
    ((_, target),) = beam_search(step_of(MISLEADING), 1, TargetTokens(0), longest=4, beam=3)
    assert len(target) == 4


def test_diverged_model_is_rejected():
    model = large_weights_model()
    with torch.no_grad():
        model.norm.weight.fill_(float("nan"))
    with pytest.raises(UserError, match="not finite"):
        translate(model, [[1]], TargetTokens(START, END))

"""Cross-attention to a source of another width: reference, padding, kernels, starts and rates."""

import functools
import math
import re
from collections.abc import Iterator

import pytest
import torch

from qkablate.attention import OV_CIRCUITS, QK_CIRCUITS, Attention, Spec, UnsupportedCombination
from qkablate.attention.projection.moments import Moments
from qkablate.attention.projection.project import convert, project_layer
from tests.attention import naive
from tests.attention.random_layers import PAIRS, qk_for, random_layer, randomized, stream
from tests.attention.test_layer import BY_NAME, NORMABLE

REFUSED = {
    "symmetric": "a symmetric W is square",
    "shared": "one projection makes queries and keys",
    "sym_diag": "one projection makes queries and keys",
    "sym_pairwise": "one projection makes queries and keys",
    "no_qk": "a slice of one stream multiplies a slice of the other",
    "no_vo": "a slice of one stream is written to a slice of the other",
}
ALLOWED = [pair for pair in PAIRS if not {*pair} & {*REFUSED}]
QK = [name for name in QK_CIRCUITS if name not in REFUSED]
OV = [name for name in OV_CIRCUITS if name not in REFUSED]
QUERIES, SOURCE = 4, 6
CROSS = {"source": SOURCE, "causal": False}
D_SOURCE = (6, 18)  # of streams beside one of width 12, with three heads


def cross_layer(qk: str, ov: str = "separate", d_source: int = 18, **other) -> Attention:
    return random_layer(qk, ov, d_source=d_source, **CROSS | other)


def results(
    layer: Attention, out: torch.Tensor, streams: tuple[torch.Tensor, ...]
) -> tuple[torch.Tensor, ...]:
    """Return the output and the gradients of the streams and of all parameters."""
    weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    inputs = [*streams, *layer.parameters()]
    return out, *torch.autograd.grad((out * weight).sum(), inputs, materialize_grads=True)


def two_streams(d_source: int, batch: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    x_BTD, y_BSD = stream(QUERIES, batch), stream(SOURCE, batch, d_source)
    return x_BTD.requires_grad_(), y_BSD.requires_grad_()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("d_source", D_SOURCE)
@pytest.mark.parametrize("pair", ALLOWED, ids=BY_NAME)
def test_layers_match_the_reference(pair, d_source, bias):
    """Output and all gradients, in fp64, with every norm."""
    for norm in ("none", "qk", "unit_keys") if pair[0] in NORMABLE else ("none",):
        for init in ("matched", "naive"):
            layer = cross_layer(*pair, d_source, bias=bias, norm=norm, init=init)
            streams = two_streams(d_source)
            ours = results(layer, layer(*streams, causal=False), streams)
            theirs = results(layer, naive.attention(layer, *streams, causal=False), streams)
            torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("d_source", D_SOURCE)
@pytest.mark.parametrize("pair", ALLOWED, ids=BY_NAME)
def test_padding_reaches_nothing(pair, d_source):
    layer, (x_BTD, y_BSD) = cross_layer(*pair, d_source), two_streams(d_source)
    mask_BS = torch.arange(SOURCE) < torch.tensor([[SOURCE], [2]])
    padded_BSD = y_BSD.masked_fill(~mask_BS[..., None], torch.nan)
    found = layer(x_BTD, padded_BSD, causal=False, key_mask_BS=mask_BS)
    for n, length in enumerate((SOURCE, 2)):
        expected = layer(x_BTD[n : n + 1], y_BSD[n : n + 1, :length], causal=False)
        torch.testing.assert_close(found[n : n + 1], expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kernel", ["math", "folded", "blocked"])
@pytest.mark.parametrize("pair", ALLOWED, ids=BY_NAME)
def test_kernels_agree(pair, kernel):
    streams = two_streams(18)
    try:
        random_layer(*pair, kernel=kernel, **CROSS)
    except UnsupportedCombination as reason:  # at equal widths, too
        with pytest.raises(UnsupportedCombination, match=re.escape(str(reason))):
            cross_layer(*pair, kernel=kernel)
        return
    layer = cross_layer(*pair, kernel=kernel)
    ours = results(layer, layer(*streams, causal=False), streams)
    layer.kernel = "static" if layer.kernel == "static" else "folded"
    theirs = results(layer, layer(*streams, causal=False), streams)
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", REFUSED)
def test_forms_of_one_width_are_refused(name):
    pair = (name, "separate") if name in QK_CIRCUITS else ("separate", name)
    reason = f"^{REFUSED[name]}, but cross-attention reads streams of widths 12 and 18"
    with pytest.raises(UnsupportedCombination, match=reason):
        cross_layer(*pair)
    random_layer(*pair, d_source=12, **CROSS)
    random_layer(*pair)


@pytest.mark.parametrize("qk", ["separate", "wide"])
def test_symmetric_start_needs_one_shape(qk):
    with pytest.raises(UnsupportedCombination, match="reads streams of widths 12 and 18"):
        cross_layer(qk, symmetric=True)
    cross_layer(qk, d_source=12, symmetric=True)


@pytest.mark.parametrize("d_source", D_SOURCE)
@pytest.mark.parametrize("pair", ALLOWED, ids=BY_NAME)
def test_formulas_count_the_parameters(pair, d_source):
    layer = cross_layer(*pair, d_source)
    assert layer.qk.count_params() == sum(p.numel() for p in layer.qk.parameters())
    assert layer.ov.count_params() == sum(p.numel() for p in layer.ov.parameters())


def test_formulas_name_the_width_of_the_source():
    assert cross_layer("separate").params == "2 d² + 2 d e"
    assert cross_layer("merged").params == "h d e + d e + d²"
    assert cross_layer("separate", d_source=12).params == "4 d²"
    assert cross_layer("static", d_source=12).params == "h T S + 2 d²"
    assert random_layer("static").params == "h T² + 2 d²"


SHAPES = [(128, 64, 4), (64, 128, 4), (96, 192, 6), (256, 64, 8)]  # d_model, d_source, heads
RESIDUAL, T, S = 0.35, 96, 80


def initialized(
    shape, qk="separate", ov="separate", init="matched", norm="none", *, seed=1, **other
):
    """Return an initialized layer whose matrices are drawn as those of a model."""
    (d, e, heads), linear_draws = shape, other.pop("linear", False)
    generator = torch.Generator().manual_seed(seed)
    qk = qk if qk != "separate" else qk_for(ov)
    ranks = {"low_rank": d // heads // 2, "collaborative": min(d, e) // 2, "latent": e // 2}
    rank = ranks.get(qk)
    sigmas = {"sigma": 0.02, "residual": RESIDUAL}
    if linear_draws:
        sigmas = {"sigma": (3 * d) ** -0.5, "source_sigma": (3 * e) ** -0.5}

    def draw(name, shape, *, residual=False, fan_in=None):
        if linear_draws:
            bound = (fan_in or (shape[0] if len(shape) == 2 else d)) ** -0.5
            return (2 * torch.rand(shape, generator=generator) - 1) * bound
        std = 0.02 * (RESIDUAL if residual else 1) * (len(shape) > 1)
        return torch.randn(shape, generator=generator) * std

    sizes = {"rank": rank, "groups": heads // 2, "context": T, "source": S, "causal": False}
    spec = Spec(d, heads, d_source=e, init=init, **sizes | sigmas | other)
    layer = Attention(spec, QK_CIRCUITS[qk], OV_CIRCUITS[ov], norm=norm)
    for part in (layer.qk, layer.ov, layer.norm):
        if part is not None:
            part.init_(draw)
    return layer


def noise(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def normalized(shape) -> tuple[torch.Tensor, torch.Tensor]:
    d, e, _ = shape
    streams = noise(0, 1, T, d), noise(4, 1, S, e)
    return tuple(torch.nn.functional.layer_norm(x, x.shape[-1:]) for x in streams)


def descent(layer: Attention, loss: torch.Tensor, parameters) -> float:
    """Return how much Adam's first step lowers a loss, in units of η: Σ rate · |gradient|."""
    rates = {id(parameter): rate for parameter, rate, _ in layer.rates()}
    gradients = torch.autograd.grad(loss, parameters, materialize_grads=True)
    pairs = zip(parameters, gradients, strict=True)
    return sum(float(rates[id(p)] * g.abs().sum()) for p, g in pairs)


def layers_of(shape, *names, seeds=3, **other) -> Iterator[Attention]:
    return (initialized(shape, *names, seed=seed, **other) for seed in range(1, seeds + 1))


@functools.cache
def qk_descent(shape, qk="separate", init="matched", linear_draws=False) -> float:
    """Return the descent of random losses of the scores, over several seeds."""
    streams, weight = normalized(shape), noise(2, 1, shape[2], T, S)
    return sum(
        descent(
            layer, (layer.scores(*streams, causal=False) * weight).sum(), [*layer.qk.parameters()]
        )
        for layer in layers_of(shape, qk, init=init, linear=linear_draws)
    )


@functools.cache
def ov_descent(shape, ov="separate", init="matched", linear_draws=False) -> float:
    """Return the descent of random losses of the output."""
    streams, weight = normalized(shape), noise(3, 1, T, shape[0])
    total = 0.0
    for layer in layers_of(shape, ov=ov, init=init, linear=linear_draws):
        own = [*layer.ov.parameters(), *([layer.qk.w_c] if ov == "latent" else [])]
        total += descent(layer, (layer(*streams, causal=False) * weight).sum(), own)
    return total


def spread(layer: Attention, shape) -> float:
    return float(layer.scores(*normalized(shape), causal=False).detach().std())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("qk", [name for name in QK if name != "uniform"])
def test_matched_spread_of_scores(qk, shape):
    """The spread is σ²√(d e), with every norm."""
    d, e, _ = shape
    for norm in ("none", "qk", "unit_keys") if qk in NORMABLE else ("none",):
        layer = initialized(shape, qk, norm=norm)
        assert layer.match != "none"
        assert spread(layer, shape) == pytest.approx(0.02**2 * math.sqrt(d * e), rel=0.05)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("init", ["matched", "naive"])
@pytest.mark.parametrize("qk", [name for name in QK if name not in ("uniform", "separate")])
def test_first_step_of_the_scores_matches_standard(qk, init, shape):
    ratio = qk_descent(shape, qk, init) / qk_descent(shape)
    assert ratio == pytest.approx(1, rel=0.07)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("init", ["matched", "naive"])
@pytest.mark.parametrize("ov", [ov for ov in OV if ov not in ("separate", "tied")])
def test_first_step_of_the_output_matches_standard(ov, init, shape):
    ratio = ov_descent(shape, ov, init) / ov_descent(shape)
    assert ratio == pytest.approx(1, rel=0.08)


@pytest.mark.parametrize("shape", SHAPES[:2], ids=str)
@pytest.mark.parametrize("qk", [name for name in QK if name not in ("uniform", "separate")])
def test_scores_match_with_draws_that_depend_on_the_width(qk, shape):
    """Torch's draws make entries of x W equally large for streams of any width."""
    assert spread(initialized(shape, qk, linear=True), shape) == pytest.approx(1 / 3, rel=0.07)
    for init in ("matched", "naive"):
        ratio = qk_descent(shape, qk, init, True) / qk_descent(shape, linear_draws=True)
        assert ratio == pytest.approx(1, rel=0.07)


@pytest.mark.parametrize("shape", SHAPES[:2], ids=str)
@pytest.mark.parametrize("ov", [ov for ov in OV if ov not in ("separate", "tied")])
def test_outputs_match_with_draws_that_depend_on_the_width(ov, shape):
    # Larger scores select what is averaged, which is longer where keys and values have one source.
    tolerance = 0.15 if ov == "latent" else 0.08
    for init in ("matched", "naive"):
        ratio = ov_descent(shape, ov, init, True) / ov_descent(shape, linear_draws=True)
        assert ratio == pytest.approx(1, rel=tolerance)


def written(layer: Attention, shape) -> torch.Tensor:
    """Return the output if every query attends to one key only."""
    _, y_BSD = normalized(shape)
    v_BGSV = layer.ov.values(y_BSD, layer.qk.keys(y_BSD))
    per_group = layer.qk.spec.heads // v_BGSV.shape[1]
    return layer.ov.write(v_BGSV.repeat_interleave(per_group, 1)).detach()


@pytest.mark.parametrize("linear_draws", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("ov", OV)
def test_matched_scale_of_the_output(ov, shape, linear_draws):
    ours, standard = (
        float(written(initialized(shape, ov=name, linear=linear_draws), shape).std())
        for name in (ov, "separate")
    )
    assert ours == pytest.approx(standard, rel=0.06)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_merged_forms_start_as_standard(shape):
    streams = normalized(shape)
    standard = initialized(shape)
    for layer in (initialized(shape, "merged"), initialized(shape, ov="merged")):
        found, expected = (one.scores(*streams, causal=False) for one in (layer, standard))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(
            written(layer, shape), written(standard, shape), rtol=1e-4, atol=1e-6
        )


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rates_are_those_of_the_page_on_matching(shape):
    d, e, heads = shape
    k, sigma, sigma_o = d // heads, 0.02, 0.02 * RESIDUAL
    merged = k * sigma * (1 / math.sqrt(d) + 1 / math.sqrt(e))
    assert initialized(shape, "merged").matched_lr == pytest.approx(merged)
    for name in ("no_q", "no_k"):
        assert initialized(shape, name).matched_lr == pytest.approx(1 + math.sqrt(d / e))
    assert initialized(shape, "low_rank").matched_lr == pytest.approx(math.sqrt(2))
    rate = math.sqrt(d) * (sigma * math.sqrt(d / e) + sigma_o) / heads
    assert initialized(shape, ov="merged").matched_lr == pytest.approx(rate)


@functools.cache
def bias_descent(shape, qk="separate", init="matched") -> float:
    """Return the descent of the biases that add u_h · y_j to the scores, as b_q in standard."""
    streams, weight = normalized(shape), noise(2, 1, shape[2], T, S)
    weight = weight - weight.mean(-1, keepdim=True)  # softmax is invariant to row shifts
    total = 0.0
    for layer in layers_of(shape, qk, seeds=8, init=init, bias=True):
        biases = [p for name, p in layer.qk.named_parameters() if name in ("b_q", "b_k", "u")]
        loss = (layer.scores(*streams, causal=False) * weight).sum()
        total += descent(layer, loss, biases)
    return total


@pytest.mark.parametrize("shape", SHAPES[:2], ids=str)
@pytest.mark.parametrize("init", ["matched", "naive"])
@pytest.mark.parametrize("qk", [name for name in QK if name in NORMABLE and name != "no_q"])
def test_first_step_of_the_biases(qk, init, shape):
    assert bias_descent(shape, qk, init) / bias_descent(shape) == pytest.approx(1, rel=0.12)


@pytest.mark.parametrize("d_source", D_SOURCE)
@pytest.mark.parametrize("bias", [False, True])
def test_conversion_to_merged_is_exact(d_source, bias):
    for qk in QK:
        source = cross_layer(qk, d_source=d_source, bias=bias).qk
        if not source.no_circuit_reason:
            merged = randomized(cross_layer("merged", d_source=d_source, bias=bias)).qk
            assert convert(source, merged) < 1e-12, qk


def moments_of(d_source: int) -> Moments:
    def moment(d: int, seed: int) -> torch.Tensor:
        x_ND = noise(seed, 50, d).double()
        x_ND[:, -1] = 1.0
        return x_ND.T @ x_ND / 50

    z_HDD = torch.stack([moment(d_source, seed) for seed in (1, 2, 3)])
    return Moments(moment(13, 0), z_HDD, moment(d_source + 1, 4))


@pytest.mark.parametrize("d_source", D_SOURCE)
@pytest.mark.parametrize(
    ("pair", "is_exact"),
    [
        (("merged", "separate"), True),
        (("wide", "separate"), True),
        (("separate", "merged"), True),
        (("four_matrix", "four"), True),
        (("low_rank", "separate"), False),
        (("no_q", "separate"), False),
        (("no_k", "separate"), False),
        (("grouped", "grouped"), False),
        (("separate", "no_v"), False),
        (("separate", "no_o"), False),
    ],
    ids=str,
)
def test_projection(pair, is_exact, d_source):
    """The stated loss is that of the scores, and 0 only where the outputs are equal."""
    moments, source = moments_of(d_source), cross_layer("separate", d_source=d_source)
    target = cross_layer(*pair, d_source, rank=2)
    loss = project_layer(source, target, moments)
    assert (max(loss.qk, loss.ov) < 1e-9) == is_exact
    streams = two_streams(d_source)
    outputs = (layer(*streams, causal=False) for layer in (source, target))
    assert torch.allclose(*outputs, rtol=1e-8, atol=1e-8) == is_exact
    whole_HDD = source.scale * source.qk.circuit()[0].detach()[[*loss.heads]]
    error_HDD = whole_HDD - target.scale * target.qk.circuit()[0].detach()
    powers = [
        float(moments.score_power(torch.nn.functional.pad(b_HDD, (0, 0, 0, 1))).sum())
        for b_HDD in (error_HDD, whole_HDD)
    ]
    assert math.sqrt(powers[0] / powers[1]) == pytest.approx(loss.qk_scores, abs=1e-9)

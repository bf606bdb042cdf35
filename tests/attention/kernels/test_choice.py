"""The kernel is chosen from shapes, precision and hardware, and impossible ones are explained."""

from itertools import product

import pytest

from qkablate.attention.kernels.choice import (
    KERNELS,
    Gpu,
    Shapes,
    choose_kernel,
    unsupported_reason,
)

GPUS = {sm: Gpu((sm // 10, sm % 10), cudnn=True, triton=True) for sm in (75, 80, 86, 89, 90, 120)}
BASE = {"heads": 4, "key_heads": 4, "width": 32, "value_heads": 4, "value_width": 32}
BF16 = {"device": "cuda", "precision": "bf16"}
WIDE_KEY = {"heads": 12, "key_heads": 1, "width": 768, "value_heads": 12, "value_width": 64}


def choose(*, portable=False, **other):
    return choose_kernel(Shapes(**BASE | other), portable=portable)


def explain(kernel, **other):
    return unsupported_reason(kernel, Shapes(**BASE | other))


@pytest.mark.parametrize(
    ("shapes", "kernel"),
    [
        ({}, "flash"),
        ({"score_bias": True}, "flash"),
        ({"width": 16}, "flash"),  # padded with zeros
        ({"value_width": 16}, "folded"),
        ({"value_width": 16, "context": 255}, "folded"),
        ({"value_width": 16, "context": 256}, "blocked"),
        ({"dropout": 0.1, "context": 512}, "folded"),
        ({"dropout": 0.1}, "folded"),
        ({"key_heads": 1}, "flash"),
        ({"key_heads": 1, "width": 128}, "folded"),
        ({"key_heads": 1, "width": 128, "value_width": 128}, "flash"),
        ({"key_heads": 1, "width": 128, "context": 127}, "folded"),
        ({"key_heads": 1, "width": 128, "context": 128}, "blocked"),
        ({"key_heads": 1, "width": 128, "context": 512, "dropout": 0.1}, "folded"),
        ({"value_heads": 1, "value_width": 128, "context": 1024}, "blocked"),
        ({"context": 1024}, "flash"),
        ({"precision": "bf16"}, "flash"),
        ({"precision": "bf16", "context": 511}, "folded"),
        ({"precision": "bf16", "context": 512}, "blocked"),
        ({"precision": "bf16", "context": 512, "dropout": 0.1}, "folded"),
        ({"value_heads": 1, "value_width": 128}, "folded"),
        ({"key_heads": 1, "width": 128, "value_heads": 1, "value_width": 128}, "flash"),
        ({"heads": 1, "key_heads": 1, "value_heads": 1, "value_width": 128}, "flash"),
        ({"width": 0, "value_width": 128}, "static"),
        ({"device": "mps"}, "math"),
        ({"device": "mps", "key_heads": 1, "width": 128, "context": 4096}, "folded"),
    ],
    ids=str,
)
def test_chosen_kernel_without_a_gpu(shapes, kernel):
    assert choose(**shapes) == kernel
    assert choose(**shapes, portable=True) == kernel


FLASH_ON_AMPERE = ["efficient", "flash", "flash", "flash", "flash", "flash"]
EVERYWHERE_EFFICIENT = ["efficient"] * 6
FOLDED = ["folded"] * 6


@pytest.mark.parametrize(
    ("shapes", "kernels"),  # for sm75, 80, 86, 89, 90, 120
    [
        ({"precision": "fp16"}, ["efficient", "flash", "flash", "flash", "cudnn", "flash"]),
        ({"precision": "bf16"}, ["math", "flash", "flash", "flash", "cudnn", "flash"]),
        ({"precision": "fp32"}, EVERYWHERE_EFFICIENT),
        ({"precision": "fp16", "dropout": 0.1}, FLASH_ON_AMPERE),
        ({"precision": "fp16", "score_bias": True}, EVERYWHERE_EFFICIENT),
        ({"precision": "bf16", "score_bias": True}, ["math", *["efficient"] * 5]),
        ({"precision": "fp16", "width": 16}, ["efficient", *["flash"] * 3, "cudnn", "flash"]),
        ({"precision": "fp16", "value_width": 16}, EVERYWHERE_EFFICIENT),
        ({"precision": "fp16", "width": 12, "value_width": 12}, ["math"] * 6),
        ({"precision": "fp16", "width": 136, "value_width": 136}, FLASH_ON_AMPERE),
        ({"precision": "fp16", "width": 192, "value_width": 192}, FLASH_ON_AMPERE),
        *(
            (
                {"precision": "fp16", "width": width, "value_width": width, "dropout": dropout},
                ["efficient", "flash", "efficient", "efficient", "flash", "efficient"],
            )
            for width, dropout in product((200, 224, 256), (0.0, 0.1))
        ),
        ({"precision": "fp16", "width": 264, "value_width": 264}, EVERYWHERE_EFFICIENT),
        ({"precision": "bf16", "width": 0}, ["static"] * 6),
        ({"precision": "bf16", "learned_bias": True, "score_bias": True}, FOLDED),
        # A wide shared key: by what the weights take, compared with its gradient for every head.
        ({"precision": "fp16", **WIDE_KEY, "context": 255}, FOLDED),
        ({"precision": "fp16", **WIDE_KEY, "context": 256}, EVERYWHERE_EFFICIENT),
        ({"precision": "fp16", **WIDE_KEY, "context": 256, "dropout": 0.1}, EVERYWHERE_EFFICIENT),
        ({"precision": "bf16", **WIDE_KEY, "context": 256}, ["folded", *["efficient"] * 5]),
        ({"precision": "fp32", **WIDE_KEY, "context": 767}, FOLDED),
        ({"precision": "fp32", **WIDE_KEY, "context": 768}, EVERYWHERE_EFFICIENT),
        ({"precision": "fp32", **WIDE_KEY}, FOLDED),  # of an unknown length
        (
            {"precision": "fp16", "value_heads": 1, "value_width": 768, "context": 256},
            EVERYWHERE_EFFICIENT,
        ),
        # Where nothing else saves memory.
        ({"precision": "fp16", **WIDE_KEY, "width": 100, "context": 399}, FOLDED),
        (
            {"precision": "fp16", **WIDE_KEY, "width": 100, "context": 400},
            ["folded", *["wide"] * 5],
        ),
        ({"precision": "fp16", **WIDE_KEY, "width": 100, "context": 400, "dropout": 0.1}, FOLDED),
    ],
    ids=str,
)
def test_chosen_kernels_by_gpu(shapes, kernels):
    assert [choose(device="cuda", gpu=gpu, **shapes) for gpu in GPUS.values()] == kernels


ALL_SHAPES = [
    {"precision": precision, "width": width, "value_width": value_width} | sharing | other
    for precision, width, value_width, sharing, other in product(
        ("fp32", "bf16", "fp16"),
        (0, 20, 64, 192, 200, 256, 768),
        (20, 64, 200, 256, 768),
        ({}, {"key_heads": 1}, {"value_heads": 1}),
        ({}, {"dropout": 0.1}, {"score_bias": True}, {"context": 4096}),
    )
]


@pytest.mark.parametrize("gpu", [None, *GPUS.values()], ids=str)
def test_chosen_kernel_is_supported(gpu):
    for shapes in ALL_SHAPES:
        kernel = choose(device="cuda", gpu=gpu, **shapes)
        if kernel != "static":
            assert explain(kernel, device="cuda", gpu=gpu, **shapes) == ""


def test_portable_kernel_is_one_for_all_gpus_and_supported_by_all():
    """Those that compute in the precision: bf16 needs Ampere."""
    for shapes in ALL_SHAPES:
        gpus = [gpu for sm, gpu in GPUS.items() if sm >= 80 or shapes["precision"] != "bf16"]
        bare = [Gpu(gpu.capability) for gpu in gpus]
        (kernel,) = {
            choose(device="cuda", gpu=gpu, portable=True, **shapes) for gpu in (None, *gpus, *bare)
        }
        if kernel != "static":
            assert not any(explain(kernel, device="cuda", gpu=gpu, **shapes) for gpu in bare)


def test_kernels_that_are_missing_are_not_chosen():
    h100 = Gpu((9, 0))  # without cuDNN and triton
    assert choose(gpu=h100, **BF16) == "flash"
    wide = WIDE_KEY | {"width": 100, "context": 4096}
    assert choose(gpu=h100, **BF16, **wide) == "folded"


SMALL = {"gpu": GPUS[86], "device": "cuda", "precision": "fp16"}


@pytest.mark.parametrize(
    ("kernel", "shapes", "reason"),
    [
        ("blocked", {"dropout": 0.1}, "blocked does not support dropout"),
        ("blocked", {"learned_bias": True}, "blocked does not support learned score biases"),
        ("blocked", {"width": 0}, "blocked needs queries and keys, and this variant has none"),
        ("flash", {"width": 0}, "flash needs queries and keys, and this variant has none"),
        ("flash", {"dropout": 0.1}, "flash does not support dropout on a CPU"),
        ("flash", {"device": "mps"}, "flash is not available on mps"),
        ("efficient", {}, "efficient is a CUDA kernel"),
        ("cudnn", {}, "cudnn is a CUDA kernel"),
        ("wide", {}, "wide is a CUDA kernel"),
        ("flash", {"device": "cuda"}, "flash needs 16 bits, not fp32"),
        ("flash", BF16 | {"score_bias": True}, "flash does not support a bias of the scores, nor"),
        ("flash", BF16 | {"width": 12}, "flash needs widths divisible by 8, not 12 and 32"),
        ("flash", SMALL | {"width": 200}, "flash needs widths up to 192 on sm86, not 200"),
        (
            "flash",
            BF16 | {"gpu": GPUS[75]},
            "flash needs a GPU of capability 8.0 or newer, not sm75",
        ),
        ("efficient", BF16 | {"gpu": GPUS[75]}, "efficient has no bf16 on sm75"),
        ("cudnn", SMALL | {"gpu": Gpu((9, 0))}, "cudnn needs cuDNN, and deterministic=false"),
        ("cudnn", SMALL | {"width": 136}, "cudnn needs widths up to 128 on sm86, not 136"),
        ("wide", SMALL | {"gpu": Gpu((9, 0))}, "wide needs triton, which is not installed"),
        ("wide", SMALL | {"value_width": 264}, "wide needs values of width up to 256, not 264"),
        ("wide", SMALL | {"dropout": 0.1}, "wide does not support dropout"),
        ("wide", BF16 | {"gpu": GPUS[75]}, "wide needs a GPU of capability 8.0 or newer, not sm75"),
    ],
    ids=str,
)
def test_impossible_kernel_is_explained_in_a_line(kernel, shapes, reason):
    text = explain(kernel, **shapes)
    assert text.startswith(reason)
    assert "\n" not in text
    allowed = text.partition("(allowed: ")[2].removesuffix(")").split(", ")
    assert allowed[:3] == ["auto", "portable", "math"]
    assert kernel not in allowed
    assert {name for name in KERNELS if not explain(name, **shapes)} == set(allowed[2:])


def test_known_and_unknown_gpus_allow_what_they_support():
    assert explain("flash", **BF16, width=256, value_width=256) == ""
    assert explain("flash", **BF16, width=256, value_width=256, gpu=GPUS[90]) == ""
    assert explain("blocked", **BF16, **WIDE_KEY) == ""
    assert explain("wide", **BF16, **WIDE_KEY) == ""

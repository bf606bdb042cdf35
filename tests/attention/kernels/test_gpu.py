"""Padding in the kernels that only a GPU has; skipped where there is none."""

import importlib.util

import pytest
import torch

from tests.attention.kernels.test_padding import GROUPS, check

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("kernel", ["efficient", "wide"])
@pytest.mark.parametrize(("groups", "value_groups"), GROUPS)
@pytest.mark.parametrize("bias", [None, (2, 36, 70)], ids=str)
def test_padding_changes_neither_outputs_nor_gradients(kernel, groups, value_groups, bias):
    if kernel == "wide" and importlib.util.find_spec("triton") is None:
        pytest.skip("needs triton")
    with torch.device("cuda"):
        check(kernel, groups, value_groups, bias, torch.bfloat16, queries=36, keys=70)

"""Size of the attention map; its file is tested with that of predictions."""

import pytest

from qkablate.runs.attention_map import MAX_BYTES, MAX_TOKENS, token_count


@pytest.mark.parametrize("layers", [1, 2, 12, 48, 100])
@pytest.mark.parametrize("heads", [1, 12, 64, 2048])
def test_map_is_small_for_any_number_of_heads(layers, heads):
    tokens = token_count(layers, heads, 1024)
    assert layers * heads * tokens**2 <= MAX_BYTES
    assert tokens == MAX_TOKENS or layers * heads * (tokens + 1) ** 2 > MAX_BYTES
    assert token_count(layers, heads, 3) <= 3

"""Random windows by step, and complete evaluation."""

import numpy as np
import pytest
import torch

from qkablate.data.batches import IGNORE, RandomWindows, sequential_batches, spread_windows


def test_windows_depend_on_seed_and_step_alone():
    tokens = np.arange(1000, dtype=np.uint16)

    def windows(**other):
        base = {"seed": 0, "batch_size": 4, "grad_accum": 1, "context": 8}
        return RandomWindows(tokens, **(base | other))

    (batch,) = windows().step(7)
    x, y = batch.tokens_NT, batch.targets_NA
    assert (batch.positions_NA, batch.slices, batch.guessed_NA) == (None, None, None)
    assert x.shape == y.shape == (4, 8)
    assert x.dtype == y.dtype == torch.int64
    assert torch.equal(x + 1, y)  # the target is the next token
    again = windows()
    for step in (3, 9, 1):
        again.step(step)  # other draws shift nothing
    assert torch.equal(again.step(7)[0].tokens_NT, x)
    assert not torch.equal(windows(seed=1).step(7)[0].tokens_NT, x)
    assert not torch.equal(windows().step(8)[0].tokens_NT, x)
    parts = windows(batch_size=2, grad_accum=2).step(7)
    assert torch.equal(torch.cat([part.tokens_NT for part in parts]), x)


def test_windows_reach_both_ends():
    tokens = np.arange(10, dtype=np.uint8)
    windows = RandomWindows(tokens, seed=0, batch_size=8, grad_accum=1, context=8)
    seen = [windows.step(step)[0] for step in range(9)]
    assert min(int(batch.tokens_NT.min()) for batch in seen) == 0
    assert max(int(batch.targets_NA.max()) for batch in seen) == 9


def test_batch_reads_its_windows_only(tmp_path):
    """Also of a file larger than memory: here a sparse one."""
    path = tmp_path / "large.bin"
    with path.open("wb") as file:
        file.truncate(2**40)
    tokens = np.memmap(path, dtype=np.uint16, mode="r")
    windows = RandomWindows(tokens, seed=0, batch_size=4, grad_accum=1, context=64)
    assert all(int(windows.step(step)[0].tokens_NT.sum()) == 0 for step in range(20))


@pytest.mark.parametrize("length", [2, 9, 16, 17, 40, 41])
def test_evaluation_predicts_every_token_once(length):
    tokens = np.arange(length, dtype=np.uint8)
    parts = list(sequential_batches(tokens, batch_size=2, context=8))
    x = torch.cat([part.tokens_NT for part in parts]).flatten()
    y = torch.cat([part.targets_NA for part in parts]).flatten()
    assert all(part.tokens_NT.shape == (2, 8) for part in parts)
    counted = y[y != -100]
    assert counted.tolist() == list(range(1, length))
    assert torch.equal(x[y != -100] + 1, counted)


def test_a_limited_reading_spreads_whole_windows_over_the_split():
    tokens = np.arange(1001)
    batches = [*sequential_batches(tokens, batch_size=2, context=10, limit=30)]
    inputs_NT = torch.cat([batch.tokens_NT for batch in batches])
    targets_NA = torch.cat([batch.targets_NA for batch in batches])
    assert inputs_NT[:, 0].tolist() == [160, 500, 830, 0]
    assert torch.equal(targets_NA[:3], inputs_NT[:3] + 1)
    assert (targets_NA[3] == IGNORE).all()  # pads the last batch


@pytest.mark.parametrize("limit", [None, 96, 97, 10_000])
def test_a_reading_without_a_limit_predicts_every_token_once(limit):
    batches = sequential_batches(np.arange(97), batch_size=3, context=10, limit=limit)
    targets = torch.cat([batch.targets_NA.flatten() for batch in batches])
    assert targets[targets != IGNORE].tolist() == [*range(1, 97)]


def test_inputs_and_targets_are_views_of_their_windows():
    """One copy brings both to a GPU."""
    reader = RandomWindows(np.arange(100, dtype=np.uint16), 0, 3, 2, 8)
    for batch in (*reader.step(0), spread_windows(np.arange(100), count=3, context=8)):
        assert batch.windows_NW.shape == (3, 9)
        assert batch.windows_NW.is_contiguous()
        assert torch.equal(batch.tokens_NT, batch.windows_NW[:, :-1])
        assert torch.equal(batch.targets_NA, batch.tokens_NT + 1)
        storages = {t.untyped_storage().data_ptr() for t in (batch.tokens_NT, batch.targets_NA)}
        assert storages == {batch.windows_NW.untyped_storage().data_ptr()}

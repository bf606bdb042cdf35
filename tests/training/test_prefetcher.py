"""Batches on their way to the device."""

import pytest
import torch

from qkablate.data import Batch
from qkablate.training.prefetcher import Prefetcher, on_device


class Steps:
    """Record the requested steps."""

    def __init__(self):
        self.requested = []

    def step(self, step):
        self.requested.append(step)
        tokens = torch.full((2, 4), step)
        return [Batch((tokens,), tokens + 1), Batch((tokens,), tokens + 2, tokens * 0)]


def test_cpu_batches_are_made_when_taken():
    steps = Steps()
    prefetcher = Prefetcher(steps.step, "cpu")
    first, second = prefetcher.take(3)
    prefetcher.prefetch(4)
    assert steps.requested == [3]
    assert first.positions_NA is None
    assert torch.equal(second.targets_NA, torch.full((2, 4), 5))
    assert on_device(first, "cpu") is first


def test_next_step_is_fetched_once(monkeypatch):
    """The copy to a GPU is skipped here."""
    monkeypatch.setattr("qkablate.training.prefetcher.on_device", lambda batch, device: batch)
    steps = Steps()
    prefetcher = Prefetcher(steps.step, "cuda")
    for step in range(3):
        assert int(prefetcher.take(step)[0].tokens_NT[0, 0]) == step
        prefetcher.prefetch(step + 1)
    assert steps.requested == [0, 1, 2, 3]
    assert int(prefetcher.take(7)[0].tokens_NT[0, 0]) == 7  # another than was fetched


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_gpu_batches_are_fetched_ahead():
    prefetcher = Prefetcher(Steps().step, "cuda")
    prefetcher.prefetch(5)
    _, batch = prefetcher.take(5)
    assert batch.tokens_NT.is_cuda
    assert batch.positions_NA.is_cuda
    assert torch.equal(batch.targets_NA.cpu(), torch.full((2, 4), 7))

"""Write golden.json again: `python -m tests.training.write_golden`."""

import json
import tempfile
from pathlib import Path

import pytest
import torch

from tests.training.helpers import GOLDEN, GOLDEN_RUNS, golden_losses

if __name__ == "__main__":
    torch.set_num_threads(1)
    golden = {}
    for name in GOLDEN_RUNS:
        with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
            golden[name] = golden_losses(name, Path(folder), patch)
    GOLDEN.write_text(json.dumps(golden, indent=1) + "\n")

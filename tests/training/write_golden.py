"""Write golden.json anew: `python -m tests.training.write_golden`."""

import json
import tempfile
from pathlib import Path

import pytest
import torch

from qkablate.config import variants
from tests.training import test_loop

torch.set_num_threads(1)
golden = {}
for name in variants():
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        golden[name] = test_loop.golden_run(name, Path(folder), patch)
test_loop.GOLDEN.write_text(json.dumps(golden, indent=1) + "\n")

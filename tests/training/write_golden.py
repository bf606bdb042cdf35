"""Write golden.json anew: `python tests/training/write_golden.py`."""

import json
import tempfile
from pathlib import Path

import pytest
import test_loop
import torch

from qkablate.attention import QK_CIRCUITS

torch.set_num_threads(1)
golden = {}
for qk in QK_CIRCUITS:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        golden[qk] = test_loop.golden_run(qk, Path(folder), patch)
test_loop.GOLDEN.write_text(json.dumps(golden, indent=1) + "\n")

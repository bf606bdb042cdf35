"""A sweep of W&B, whose own agent starts `qkablate train`."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.tracking.wandb.fake_server import FakeServer

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "wandb.md").read_text(encoding="utf-8")


@pytest.fixture
def config():
    """Return the sweep's file that the documentation shows."""
    (block,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    assert len(block.splitlines()) <= 10
    return block


@pytest.mark.slow
def test_agent_trains_the_runs_of_a_sweep(config, tiny, tmp_path):
    (tmp_path / "sweep.yaml").write_text(config, encoding="utf-8")
    program = tmp_path / "bin" / "qkablate"  # the command of this checkout
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -m qkablate "$@"\n')
    program.chmod(0o755)
    fixed = dict(word.split("=", 1) for word in tiny)
    with FakeServer() as server:
        own = {"WANDB_BASE_URL": server.url, "WANDB_API_KEY": "k" * 40}
        path = f"{program.parent}:{os.environ['PATH']}"
        environment = {**os.environ, **own, "PATH": path}

        def wandb(*words: str) -> str:
            done = subprocess.run(
                [sys.executable, "-m", "wandb", *words],
                capture_output=True,
                text=True,
                cwd=tmp_path,
                env=environment,
                timeout=120,
            )
            assert done.returncode == 0, done.stdout + done.stderr
            return done.stdout + done.stderr

        assert "abcdefgh" in wandb("sweep", "--project", "qkablate", "sweep.yaml")
        sent = yaml.safe_load(server.sweep_config)
        assert sent["metric"] == {"name": "final/val_loss", "goal": "minimize"}
        for number, variant in enumerate(sent["parameters"]["variant"]["values"]):
            chosen = {**fixed, "variant": variant, "optim.lr": "0.002", "train.steps": "4"}
            chosen["tracking.wandb"] = "online"
            args = {key: {"value": value} for key, value in chosen.items()}
            command = {"type": "run", "run_id": f"run{number}", "program": sent["program"]}
            server.commands.append({**command, "args": args})
        wandb("agent", "--count", "2", "somebody/qkablate/abcdefgh")
        runs = server.runs
    assert sorted(runs) == ["run0", "run1"]
    assert {run.tags[0] for run in runs.values()} == {"standard", "merged_w"}
    assert all(run.exit_code == 0 for run in runs.values())
    assert all(type(run.summary["final/val_loss"]) is float for run in runs.values())

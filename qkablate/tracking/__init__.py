"""Outputs of a run: metrics.jsonl, which is authoritative, the terminal, and W&B, if wanted."""

from qkablate.tracking.metrics_file import MetricsFile
from qkablate.tracking.terminal import Terminal
from qkablate.tracking.wandb.run import WandbRun

__all__ = ["MetricsFile", "Terminal", "WandbRun"]

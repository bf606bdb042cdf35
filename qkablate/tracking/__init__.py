"""Where a run's events go: the journal on disk is the truth, the terminal and W&B mirror it."""

from qkablate.tracking.metrics_file import Journal
from qkablate.tracking.terminal import Terminal
from qkablate.tracking.wandb.run import Mirror

__all__ = ["Journal", "Mirror", "Terminal"]

"""Where a run's events go: the journal on disk is the truth, the terminal and W&B mirror it."""

from qkablate.tracking.journal import Journal
from qkablate.tracking.mirror import Mirror
from qkablate.tracking.terminal import Terminal

__all__ = ["Journal", "Mirror", "Terminal"]

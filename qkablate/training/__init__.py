"""One road from a frozen config to a result."""

from qkablate.training.plan import Plan, plan

__all__ = ["Plan", "plan"]

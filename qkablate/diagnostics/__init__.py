"""Why an arm wins: what its circuits' matrices and its attention are like."""

from qkablate.diagnostics.panel import Panel, repeated
from qkablate.diagnostics.patterns import attention_weights

__all__ = ["Panel", "attention_weights", "repeated"]

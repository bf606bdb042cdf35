"""Why an arm wins: what its circuits' matrices and its attention are like."""

from qkablate.mechanism.panel import Panel, repeated
from qkablate.mechanism.patterns import attention_weights

__all__ = ["Panel", "attention_weights", "repeated"]

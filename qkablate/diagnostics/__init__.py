"""Diagnostics that explain a gap: measures of circuit matrices and of attention."""

from qkablate.diagnostics.panel import DiagnosticPanel, repeat_blocks
from qkablate.diagnostics.patterns import attention_weights

__all__ = ["DiagnosticPanel", "attention_weights", "repeat_blocks"]

"""Recorders of predictions, attention maps and diagnostics during training."""

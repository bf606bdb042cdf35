"""Training: from a frozen config to a result."""

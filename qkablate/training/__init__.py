"""One road from a frozen config to a result."""

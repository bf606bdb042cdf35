"""Pairs of source and target: their sources, their batches, and how people write them."""

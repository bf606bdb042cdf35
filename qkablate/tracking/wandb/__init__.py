"""Weights & Biases: live logging, offline logs, and their upload."""

"""Tracking in Weights & Biases."""

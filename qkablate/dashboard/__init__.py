"""The view of a sweep in Weights & Biases."""

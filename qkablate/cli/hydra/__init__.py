"""Integration with Hydra."""

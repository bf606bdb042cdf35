"""Checked configs and grids from `key=value` words, by Hydra."""

"""A verb as a Hydra application."""

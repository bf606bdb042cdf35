"""Everything that knows Hydra's internals."""

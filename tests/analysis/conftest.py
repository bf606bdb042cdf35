"""Fixtures of synthetic sweeps."""

from tests.analysis.worlds import cached_manifest, cached_world, corpus, world

__all__ = ["cached_manifest", "cached_world", "corpus", "world"]

"""Algorithms for attention: dispatch, blocked scores, matrix products."""

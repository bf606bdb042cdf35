"""Comparisons of arms: gaps, curves, ranks, distances, audit."""

"""Conversion of circuits and projection of trained layers onto other variants."""

"""Gaps over lengths and sizes, and scaling laws."""

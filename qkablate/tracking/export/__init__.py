"""Runs as other tools read them, written by these tools' own libraries."""

"""Objectives on a text other than the next token, and losses on it without attention."""

"""Objectives on a text other than the next token, byte pairs, and losses without attention."""

"""Launcher, worker and state of a sweep."""

"""Run folders read into records."""

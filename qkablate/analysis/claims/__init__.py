"""Claims: hypotheses written down before their runs, and their verdicts."""

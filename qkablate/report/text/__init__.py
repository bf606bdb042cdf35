"""Results as text: numbers, tables, verdicts."""

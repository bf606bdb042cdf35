"""Analysis of run folders: comparisons, claims and their uncertainty, without torch."""

"""Sweeps: a grid becomes frozen runs, engines train them, and their results become one table."""

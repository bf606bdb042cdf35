"""Runs that differ in seed and learning rate, trained as one vmapped program."""

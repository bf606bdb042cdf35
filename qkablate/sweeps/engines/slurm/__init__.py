"""The SLURM engine."""

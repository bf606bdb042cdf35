"""The engine that trains on a SLURM cluster."""

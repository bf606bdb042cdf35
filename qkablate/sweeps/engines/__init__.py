"""Engines that train the runs of a sweep: this machine, SLURM, Ray."""

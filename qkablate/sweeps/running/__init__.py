"""Running of a sweep: launcher, worker, state and results."""

"""From a grid to frozen runs, and from these to results."""

"""From a grid to frozen runs."""

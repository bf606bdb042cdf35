"""Planning of a sweep: from a grid to frozen runs."""

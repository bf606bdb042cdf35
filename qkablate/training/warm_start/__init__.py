"""Training from the weights of another run."""

"""The engine that trains on a Ray cluster."""

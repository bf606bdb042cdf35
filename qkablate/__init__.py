"""qkablate: ablation training that settles arguments about attention."""

__version__ = "0.1.0"

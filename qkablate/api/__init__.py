"""The Python API: what `qkablate.train` and the other names of the package do."""

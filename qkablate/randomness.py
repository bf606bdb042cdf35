"""Randomness by name: every draw comes from (seed, name), never from the order of the calls.

So two variants share every tensor they both have, a batch depends on its step alone, and neither
evaluation nor a resume can shift anything.
"""

import hashlib

import numpy as np


def key(seed: int, *name: object) -> int:
    """A 128-bit key for one named draw."""
    text = "\0".join(str(part) for part in (seed, *name))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:16], "little")


def stream(seed: int, *name: object) -> np.random.Generator:
    """The generator of one named draw."""
    return np.random.Generator(np.random.Philox(key=key(seed, *name)))

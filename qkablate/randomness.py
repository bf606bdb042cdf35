"""Randomness by name: every draw depends on (seed, name), never on the order of calls.

So two variants share all tensors of the same name and shape, a batch depends on its step alone, and
neither evaluation nor a resume changes anything.
"""

import hashlib

import numpy as np


def derive_key(seed: int, *name: object) -> int:
    """Return the 128-bit key of a named draw."""
    text = "\0".join(str(part) for part in (seed, *name))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:16], "little")


def named_generator(seed: int, *name: object) -> np.random.Generator:
    """Return the generator of a named draw."""
    return np.random.Generator(np.random.Philox(key=derive_key(seed, *name)))

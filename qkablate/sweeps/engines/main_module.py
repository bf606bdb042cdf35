"""Processes that do not import the program that starts them."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType


@contextmanager
def hidden_main_module() -> Iterator[None]:
    """Start processes without `__main__`, which multiprocessing would import in each of them.

    A script that calls the API without `if __name__ == "__main__"` would begin again in every run.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main

"""A pytest plugin that moves the clock, for tests/test_collection.py."""

import os
import time

_SECONDS = float(os.environ["QKABLATE_TEST_CLOCK_SHIFT"])
_time, _time_ns = time.time, time.time_ns
time.time = lambda: _time() + _SECONDS
time.time_ns = lambda: _time_ns() + int(_SECONDS * 1e9)

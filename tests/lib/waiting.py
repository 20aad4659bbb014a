"""Wait for another thread or process, within a generous limit."""

import time
from collections.abc import Callable
from typing import TypeVar

Found = TypeVar("Found")


def wait_for(find: Callable[[], Found], seconds: float = 120) -> Found:
    """Wait until a function returns something true, and return it. The limit allows for a busy machine: only a
    failing test takes that long."""
    deadline = time.monotonic() + seconds
    while not (found := find()):
        assert time.monotonic() < deadline, f"gave up after {seconds} s"
        time.sleep(0.005)
    return found

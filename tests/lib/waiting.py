"""Wait for another thread or process: as long as it takes, within a generous limit."""

import time
from collections.abc import Callable
from typing import TypeVar

Found = TypeVar("Found")


def wait_for(find: Callable[[], Found], seconds: float = 120) -> Found:
    """Wait until a function returns something true, and return it. A machine may be busy, so only what will never
    happen takes all these seconds."""
    deadline = time.monotonic() + seconds
    while not (found := find()):
        assert time.monotonic() < deadline, f"waited {seconds} s in vain"
        time.sleep(0.005)
    return found

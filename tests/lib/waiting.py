"""Waiting for what another thread or process does: as long as it takes, and not for ever."""

import time
from collections.abc import Callable
from typing import TypeVar

Found = TypeVar("Found")


def wait_for(find: Callable[[], Found], seconds: float = 120) -> Found:
    """What a function finds, as soon as it finds something. A machine may be busy with much else,
    so only what will never come takes these seconds."""
    deadline = time.monotonic() + seconds
    while not (found := find()):
        assert time.monotonic() < deadline, f"waited {seconds} s in vain"
        time.sleep(0.005)
    return found

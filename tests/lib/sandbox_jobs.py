"""Harmless and hostile jobs for `tests/base/test_sandbox.py`, by name."""

import os
import signal
import threading
import time
from typing import Any


def prepare(given: Any):
    if given == "broken":
        raise RuntimeError("some\nwords")

    def do(job: list) -> Any:
        name, *rest = job
        return JOBS[name](given, *rest)

    return do


def loop() -> None:
    while True:
        pass


def eat(size: int) -> int:
    return len(bytearray(size))


def nest(depth: int) -> int:
    return 1 + nest(depth - 1) if depth else 0


def fail(words: str) -> None:
    raise RuntimeError(words)


JOBS = {
    "given": lambda given: given,
    "double": lambda given, text: text * 2,
    "loop": lambda given: loop(),
    "sleep": lambda given, seconds: time.sleep(seconds),
    "eat": lambda given, size: eat(size),
    "nest": lambda given, depth: nest(depth),
    "fail": lambda given, words: fail(words),
    "signal": lambda given, number: os.kill(os.getpid(), number),
    "kill the fork server": lambda given: os.killpg(0, signal.SIGKILL),
    "processes": lambda given: [os.getsid(0), os.getpid()],
    "threads": lambda given: threading.active_count(),
}

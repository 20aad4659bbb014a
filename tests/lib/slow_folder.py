"""A folder that does not respond, as on a network: every listing and every open blocks."""

from __future__ import annotations

import builtins
import io
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

CALLS = {
    "list": ((os, "scandir"), (os, "listdir")),
    "open": ((io, "open"), (builtins, "open"), (os, "open")),
}


class SlowFolder:
    def __init__(self, folder: Path):
        self.folder = str(folder)
        self.is_asked = threading.Event()
        self._answers = threading.Event()

    def answer(self) -> None:
        self._answers.set()

    def slow(self, call: Callable) -> Callable:
        def waits(path=".", *rest, **options):
            if isinstance(path, (str, Path)) and str(path).startswith(self.folder):
                self.is_asked.set()
                assert self._answers.wait(60)
            return call(path, *rest, **options)

        return waits


@contextmanager
def slow_folder(folder: Path, *kinds: str) -> Iterator[SlowFolder]:
    """Within the context, calls of these kinds ("list", "open") block until `answer`."""
    found = SlowFolder(folder)
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in (each for kind in kinds for each in CALLS[kind]):
            patch.setattr(owner, name, found.slow(getattr(owner, name)))
        try:
            yield found
        finally:
            found.answer()

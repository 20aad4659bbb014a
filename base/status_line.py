"""A line of a terminal that the next one overwrites: the progress of something slow."""

from __future__ import annotations

import shutil
import sys
from typing import TextIO

CLEARS = "\x1b[K"  # the rest of a terminal's line


class StatusLine:
    """One line of a terminal that is overwritten by the next one."""

    def __init__(self, file: TextIO | None = None):
        self._file = sys.stderr if file is None else file
        self._is_shown = False

    def show(self, words: str) -> None:
        """Without words the line is cleared."""
        if not self._file.isatty() or not (words or self._is_shown):
            return
        room = shutil.get_terminal_size().columns - 1
        self._file.write(f"\r{CLEARS}{words[:room]}")
        self._file.flush()
        self._is_shown = bool(words)

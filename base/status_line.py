"""A status line in the terminal that shows the progress of a slow operation."""

from __future__ import annotations

import shutil
import sys
from typing import TextIO

CLEARS = "\x1b[K"  # clears the rest of the line


class StatusLine:
    """A line in the terminal that each call of `show` overwrites."""

    def __init__(self, file: TextIO | None = None):
        self._file = sys.stderr if file is None else file
        self._is_shown = False

    def show(self, words: str) -> None:
        """Show these words if the file is a terminal. With no words, clear the line."""
        if not self._file.isatty() or not (words or self._is_shown):
            return
        room = shutil.get_terminal_size().columns - 1
        self._file.write(f"\r{CLEARS}{words[:room]}")
        self._file.flush()
        self._is_shown = bool(words)

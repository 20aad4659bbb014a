"""Text in a terminal: word wrap for an answer that arrives in pieces, and waiting for it while a long
prompt is read. Output to a file or a pipe is not changed."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.handle import Handle

PROGRESS_S = 0.5  # seconds between two looks at a prompt that is being read
PIECES = re.compile(r"\x1b\[[0-9;]*m|\n|[^\S\n]+|[^\s\x1b]+|\x1b")


class WordWrap:
    """Break lines between words, in a text that arrives in pieces. A word is held back until it is
    complete."""

    def __init__(self, width: int):
        self.width = width
        self._column = 0
        self._blanks = ""  # before the word
        self._word = ""
        self._cells = 0  # of the word; escape sequences take none

    def push(self, text: str) -> str:
        """The text that can be written now."""
        out = ""
        for piece in PIECES.findall(text):
            if piece == "\n":
                out += self.flush() + "\n"
                self._column = 0
            elif piece.isspace():
                out += self._end_word()
                self._blanks += piece
            elif piece.startswith("\x1b"):
                self._word += piece
            else:
                out += self._grow(piece)
        return out

    def flush(self) -> str:
        """The text that is held back: the last word of a line, or of the text."""
        out = self._end_word() + self._blanks
        self._blanks = ""
        return out

    def _grow(self, letters: str) -> str:
        """Yield the parts of a word. Chinese and Japanese may be broken between any two characters."""
        from rich.cells import cell_len

        if letters.isascii():
            self._word += letters
            self._cells += len(letters)
            return ""
        out = ""
        for letter in letters:
            cells = cell_len(letter)
            if cells > 1:
                out += self._end_word()
            self._word += letter
            self._cells += cells
        return out

    def _end_word(self) -> str:
        if not self._word:
            return ""
        out = self._blanks + self._word
        column = self._column + len(self._blanks) + self._cells
        if column > self.width and self._column:
            out = "\n" + self._word
            column = self._cells
        # The terminal itself breaks a word that is wider than a line
        self._column = column if column <= self.width else column % self.width
        self._blanks = self._word = ""
        self._cells = 0
        return out


def wait_for_text(handle: Handle, show: Callable[[str], None]) -> None:
    """Wait until an answer begins. Meanwhile show the progress of a long prompt."""
    try:
        while not handle.wait_for_text(PROGRESS_S):
            if handle.prefill.is_long:
                show(f"    reading: {handle.prefill.words}")
    finally:
        show("")

"""Output of answers in a terminal: word wrap for text that arrives in pieces, and a progress line while a
long prompt is prefilled. Output to a file or a pipe is not wrapped."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.handle import Handle

PROGRESS_S = 0.5  # seconds between updates of the progress line
PIECES = re.compile(r"\x1b\[[0-9;]*m|\n|[^\S\n]+|[^\s\x1b]+|\x1b")


class WordWrap:
    """Breaks lines between words in text that arrives in pieces. The last word is held back until it is
    complete."""

    def __init__(self, width: int):
        self.width = width
        self._column = 0
        self._blanks = ""  # whitespace before the word
        self._word = ""
        self._cells = 0  # width of the word, without escape sequences

    def push(self, text: str) -> str:
        """Add a piece and return the text that can be written now."""
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
        """Return the text that was held back. Called at each line break; call it after the last piece, too."""
        out = self._end_word() + self._blanks
        self._blanks = ""
        return out

    def _grow(self, letters: str) -> str:
        """Add letters to the word. Return the text that can be written: a line may break before any wide
        character, such as a Chinese or Japanese one."""
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
        # The terminal itself wraps a word that is wider than a line
        self._column = column if column <= self.width else column % self.width
        self._blanks = self._word = ""
        self._cells = 0
        return out


def wait_for_text(handle: Handle, show: Callable[[str], None]) -> None:
    """Wait until an answer begins or ends, and show the progress of a long prompt until then."""
    try:
        while not handle.wait_for_text(PROGRESS_S):
            if handle.prefill.is_long:
                show(f"    reading: {handle.prefill.words}")
    finally:
        show("")

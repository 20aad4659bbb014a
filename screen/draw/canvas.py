"""A canvas collects lines of text from top to bottom, in the colours of a theme.

A line is never wider than the canvas: words that do not fit are left out or wrapped.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from rich.cells import cell_len

from screen.draw import style
from screen.draw.style import GLYPHS, NAMES, Line, Palette, Pen, count, shorten, wrap

BACK = "close"  # the action of a click on a page's note
BEYOND = 1.01  # a bar higher than this multiple of its room ends in an arrow
Legend = Iterable[tuple[str, str, str]]  # (glyph, ink, meaning)


class Figure(NamedTuple):
    """A column of a table."""

    title: str
    width: int
    rank: int = 0  # columns with the highest rank are left out first
    meaning: str = ""
    is_text: bool = False  # left-aligned, may be shortened
    bar: bool = False  # draw a vertical rule before the column

    def cell(self, text: str) -> str:
        if self.is_text:
            return f"{shorten(text, self.width - 1):<{self.width}}"
        cell = f"{text:>{self.width}}"
        return f" │{cell[2:]}" if self.bar else cell


def fitting(figures: Iterable[Figure], width: int) -> list[Figure]:
    """Return the columns that fit. Those with the highest rank are left out first."""
    shown = list(figures)
    while shown and sum(figure.width for figure in shown) > width:
        shown.remove(max(shown, key=lambda figure: figure.rank))
    return shown


def in_columns(figures: Iterable[Figure], texts: Mapping[str, str]) -> str:
    """Format texts by title, each in its column."""
    return "".join(figure.cell(texts[figure.title]) for figure in figures)


class Canvas:
    """Lines of one width, in the colours of a theme."""

    def __init__(self, p: Palette, width: int, height: int):
        self.p = p
        self.width = width
        self.height = height
        self.lines: list[Line] = []
        self.names = 9  # width of the names in `entry`
        self.has_keys = True  # False in a log, which has no keys
        self.text = p.text
        self.muted = p.muted
        self.faint = p.faint
        self.accent = p.accent
        self.bad = p.bad

    @property
    def lines_left(self) -> int:
        """Number of lines left; negative if there are too many."""
        return self.height - len(self.lines)

    def pen(self) -> Pen:
        """Return a pen for a new line, in the colour of text."""
        pen = Pen(self.text)
        self.lines.append(pen.line)
        return pen

    def heading(self, title: str, note: str = "", legend: Legend = (), do: str = "") -> None:
        """Draw a rule with a title on the left, and a note and a legend on the right.

        A note without an action is left out if the legend would only fit without it.
        """
        pen = self.pen().put("── ", self.faint)
        pen.put(shorten(title, self.width - 8), bold=True).put(" ")
        right = Pen()
        room = self.width - pen.width - 3
        marks = [*legend]
        needed = sum(cell_len(meaning) + 2 for *_, meaning in marks)
        if note and cell_len(note) < room - (0 if do or needed > room else needed):
            right.put(f" {note}", self.muted, do=do)
        for glyph, hue, meaning in marks:
            if right.width + cell_len(meaning) + 2 <= room:
                right.put(f" {glyph}", hue).put(meaning, self.muted)
        right.put(" " * bool(right.line)).put("──", self.faint)
        pen.put("─" * (self.width - pen.width - right.width), self.faint)
        pen.line += right.line

    def title(self, title: str, note: str = "Esc back", legend: Legend = ()) -> None:
        """Draw the first line of a page. A click on the note leaves the page."""
        self.heading(title, note if self.has_keys else "", legend, BACK)

    def legend(self, *kinds: int) -> Legend:
        hues = {style.BLOCKED: self.bad, style.FAILED: self.bad, style.EMPTY: self.muted}
        return [(GLYPHS[kind], hues.get(kind, self.text), NAMES[kind]) for kind in kinds]

    def say(
        self, words: str, hue: str = "", bold: bool = False, indent: int = 1, do: str = ""
    ) -> None:
        """Draw wrapped text. Empty text draws no line."""
        for part in wrap(words, self.width - indent - 1) if words else ():
            self.pen().to(indent).put(part, hue, bold, do)

    def entry(self, name: str, words: str, hue: str = "", names: int = 0) -> None:
        """Draw a name with wrapped text next to it."""
        names = names or self.names
        for i, part in enumerate(wrap(words, self.width - names - 2) if words else ()):
            self.pen().put(f" {'' if i else name:<{names}}", self.muted).put(part, hue)

    def entries(self, entries: Mapping[str, str], hue: str = "") -> None:
        for name, words in entries.items():
            self.entry(name, words, hue)

    def axis(self, *labels: tuple[int, str]) -> None:
        """Draw labels below a chart, each at a column."""
        pen = self.pen()
        for column, label in labels:
            pen.to(column).put(label, self.muted)

    def bars(
        self,
        bars: Sequence[tuple[float | None, str]],
        tall: int,
        left: int,
        label: str,
        hue: str = "",
    ) -> Pen:
        """Draw vertical bars next to each other, each a height (1: `tall` lines) and a colour.

        A bar that is too high ends in an arrow. Return the pen of the last line, which begins with
        the label.
        """
        for row in reversed(range(tall)):
            pen = self.pen().put("" if row else label, hue).to(left)
            for height, color in bars:
                if row == tall - 1 and height is not None and height > BEYOND:
                    pen.put("↑")
                else:
                    pen.bar(None if height is None else height * tall, row, color)
        return pen

    def cut(self, note: str, do: str) -> None:
        """Replace the lines that do not fit with their number. A click on it runs `do`."""
        hidden = -self.lines_left
        if hidden > 0:
            del self.lines[self.height - 1 :]
            more = f" ↓ {count(hidden + 1, 'more line')}{note}"
            self.pen().put(more, self.accent, do=do)

    # --- tables

    def columns(self, figures: Sequence[Figure], room: int = 1, more: str = "") -> list[Figure]:
        """Draw the titles of the columns, and return the columns that fit.

        Leave `room` cells free, and write `more` there.
        """
        shown = fitting(figures, self.width - room)
        titles = {each.title: each.title for each in shown}
        self.row(shown, titles, self.muted).put(more, self.muted)
        return shown

    def row(
        self,
        shown: Sequence[Figure],
        texts: Mapping[str, str],
        hue: str = "",
        bold: bool = False,
        mark: str = " ",
    ) -> Pen:
        """Draw a row from texts by column title. A mark precedes it if the first column is text."""
        pen = self.pen()
        if shown and shown[0].is_text:
            pen.put(mark, self.accent)
        return pen.put(in_columns(shown, texts), hue, bold)

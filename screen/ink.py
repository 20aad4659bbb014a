"""Colours, a pen, figures, text."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from rich.cells import cell_len, chop_cells, set_cell_size
from rich.segment import Segment
from rich.style import Style
from textual.color import Color
from textual.theme import Theme

# Prompts and answers come from anywhere. A terminal would obey control characters, and characters without a width of
# their own would shift what stands beside them. The former are shown as pictures (␛), the latter left out.
_INVISIBLE = (*range(0x80, 0xA0), 0xAD, *range(0x200B, 0x2010), *range(0x2028, 0x202F), *range(0x2060, 0x2070), 0xFEFF)
_UNSAFE = dict.fromkeys((*_INVISIBLE, *range(0xFE00, 0xFE10), *range(0xD800, 0xE000), *range(0xE0000, 0xE0080)))


def clean(text: str) -> str:
    """Text that may stand in a cell of the screen."""
    return text.translate(_UNSAFE)


# Okabe and Ito's hues, which colour-blind people can tell apart, without grey and black. They fill; words have the
# theme's own colour, since yellow on white cannot be read.
HUES = ("#e69f00", "#56b4e9", "#009e73", "#cc79a7", "#0072b2", "#f0e442", "#d55e00")


@lru_cache(4096)
def style(ink: str | None, back: str | None = None, bold: bool = False, reverse: bool = False, do: str = "") -> Style:
    """`do` is the action of a click."""
    return Style(color=ink, bgcolor=back, bold=bold, reverse=reverse, meta={"do": do} if do else None)


@dataclass(frozen=True)
class Palette:
    """The colours of a theme, as drawing needs them."""

    text: str
    muted: str
    faint: str
    accent: str
    bad: str
    back: str
    bar: str  # behind the status line and the footer

    @staticmethod
    def of(theme: Theme) -> Palette:
        """From a theme, with its words moved towards black or white: some themes' own are hard to read."""
        variables = theme.to_color_system().generate()
        names = ("foreground", "background", "text-accent", "text-error")
        text, back, accent, bad = (Color.parse(variables.get(name, "ansi_default")) for name in names)
        if any(color.ansi is not None for color in (text, back, accent, bad)):
            return DARK if theme.dark else LIGHT  # the terminal's own colours: there are no numbers to mix
        far = Color.parse("white" if theme.dark else "black")
        text, accent, bad = (color.blend(far, 0.3) for color in (text, accent, bad))
        inks = (text, back.blend(text, 0.7), back.blend(text, 0.3), accent, bad, back, back.blend(text, 0.1))
        return Palette(*(color.hex6.lower() for color in inks))

    def fill(self, request: int | None) -> str:
        number = request or 0  # neighbours in a slot are often as many numbers apart as there are hues
        return HUES[(number + number // len(HUES)) % len(HUES)]

    def cell(self, kind: int, request: int | None, reverse: bool = False) -> Style:
        if kind == EMPTY:
            return style(self.faint, reverse=reverse)
        if kind == BLOCKED:
            return style(self.bad, mixed(self.back, self.bad, 0.18), reverse=reverse)
        hue = self.fill(request)
        # A full block on its own colour has no seams, whatever the font.
        return style(hue, {DECODE: hue, PREFILL: mixed(self.back, hue, 0.3)}.get(kind), reverse=reverse)


DARK = Palette("#e0e0e0", "#949494", "#505050", "#ffc473", "#d17e92", "#121212", "#272727")
LIGHT = Palette("#202020", "#6c6c6c", "#b0b0b0", "#8a5a17", "#77263a", "#ffffff", "#e4e4e4")


@lru_cache(256)
def mixed(back: str, fill: str, part: float) -> str:
    return Color.parse(back).blend(Color.parse(fill), part).hex6.lower()


@lru_cache(16)
def ink_on(fill: str) -> str:
    """What can be read on a hue."""
    return "#000000" if Color.parse(fill).brightness > 0.4 else "#ffffff"


Line = list[Segment]


class Pen:
    """Writes a line from left to right, and knows how far it has come."""

    def __init__(self) -> None:
        self.line: Line = []
        self.width = 0

    def put(self, text: str, ink: str | Style | None = None, bold: bool = False, do: str = "") -> Pen:
        how = ink if isinstance(ink, Style) else style(ink, bold=bold, do=do)
        if self.line and self.line[-1].style is how:
            text_before = self.line.pop().text
            self.line.append(Segment(text_before + text, how))
        else:
            self.line.append(Segment(text, how))
        self.width += cell_len(text)
        return self

    def to(self, column: int) -> Pen:
        return self.put(" " * max(0, column - self.width))


def number(value: float | None) -> str:
    """Three digits that matter, and no more: 0.82, 12.6, 340, 1,799."""
    if value is None:
        return "–"
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def span(seconds: float | None) -> str:
    """A duration with its unit."""
    if seconds is None:
        return "–"
    return f"{number(1000 * seconds)} ms" if seconds < 1 else f"{number(seconds)} s"


def shorten(text: str, width: int) -> str:
    """One line of at most `width` cells; an ellipsis where it was cut."""
    text = " ".join(text.split())
    return text if cell_len(text) <= width else set_cell_size(text, max(0, width - 1)) + "…" * (width > 0)


def wrap(text: str, width: int) -> list[str]:
    """Lines of at most `width` cells, broken between words where that is possible."""
    lines = []
    for paragraph in text.split("\n"):
        line = ""
        for word in re.findall(r"\s*\S+|\s+$", paragraph):
            if cell_len(line + word) <= width:
                line += word
                continue
            if line:
                lines.append(line)
            *full, line = chop_cells(word.lstrip(), max(1, width)) or [""]
            lines += full
        lines.append(line)
    return lines


# What a slot did in a step. The glyphs tell them apart without any colour.
PREFILL, DECODE, HELD, BLOCKED, GHOST, EMPTY = range(6)
GLYPHS = "▒█┈╳▚·"
NAMES = ("prefill", "decode", "held", "blocked", "ghost", "empty")
REUSED, REMEMBERED = "▓", "░"  # rows of a slot that came from, or still belong to, an earlier request
Legend = Iterable[tuple[str, str | Style, str]]  # (glyph, ink, meaning)


def legend(p: Palette, *kinds: int) -> Legend:
    inks = {BLOCKED: p.bad, EMPTY: p.muted}
    return [(GLYPHS[kind], inks.get(kind, p.text), NAMES[kind]) for kind in kinds]


def heading(p: Palette, width: int, title: str, note: str = "", legend: Legend = (), do: str = "") -> Line:
    """A rule with a title at its left, and at its right a note and what the glyphs mean: as much as finds room."""
    pen, right = Pen().put("── ", p.faint).put(shorten(title, width - 8), p.text, True).put(" "), Pen()
    room = width - pen.width - 3
    if note and cell_len(note) < room:
        right.put(f" {note}", p.muted, do=do)
    for glyph, ink, meaning in legend:
        if right.width + cell_len(meaning) + 2 <= room:
            right.put(f" {glyph}", ink).put(meaning, p.muted)
    right.put(" " * bool(right.line)).put("──", p.faint)
    return [*pen.put("─" * (width - pen.width - right.width), p.faint).line, *right.line]


def entry(p: Palette, width: int, name: str, text: str, ink: str = "", names: int = 9) -> list[Line]:
    """A name, and beside it a text of as many lines as it needs."""
    lines = []
    for part in wrap(text, width - names - 2) if text else ():
        lines.append(Pen().put(f" {name:<{names}}", p.muted).put(part, ink or p.text).line)
        name = ""
    return lines


def axis(p: Palette, *labels: tuple[int, str]) -> Line:
    """Labels under a picture, each at its column."""
    pen = Pen()
    for column, label in labels:
        pen.to(column).put(label, p.muted)
    return pen.line

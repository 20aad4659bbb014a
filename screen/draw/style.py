"""Drawing primitives: colours, pens, numbers, wrapped text, and a glyph for each kind of work.

All untrusted text goes through `clean`, so that no prompt or answer can move the cursor. Text has
the theme's own colours, and hues only fill cells. Glyphs distinguish the kinds even without colour.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from rich.cells import cell_len, chop_cells, set_cell_size
from rich.segment import Segment
from rich.style import Style
from textual.color import Color
from textual.theme import Theme

# Unicode names of invisible letters and marks
EMPTY_NAMES = re.compile("FILLER|SELECTOR|GRAPHEME JOINER|VOWEL INHERENT")
# Code points that will never be visible. Any other unassigned one may be an emoji that is newer
# than this Python
RESERVED = re.compile("[\u2065\ufdd0-\ufdef\ufff0-\ufff8\U000e0000-\U000e0fff]")
# Removed from ordinary text: variation selectors, and joiners between two characters outside ASCII,
# as in a family emoji. Terminals disagree on the width of joined emoji
ORDINARY = re.compile(
    "(?<=[^\x00-\x7f\u200c\u200d])[\u200c\u200d](?=[^\x00-\x7f\u200c\u200d]|$)"
    "|(?<=[^\\s\ufe0e\ufe0f\u200c\u200d])[\ufe0e\ufe0f]"
)
UNUSUAL = re.compile(r"[^\n -~]")
CONTROLS = re.compile("[\x00-\x1f\x7f-\x9f]")
PICTURES = {"\t": "    ", "\r": "", "\x7f": "␡"}


def clean(text: str) -> str:
    """Make text safe for the screen or a line of the log.

    A terminal obeys control characters. Other characters are invisible or change the writing
    direction, so a prompt could hide words. All of these are replaced by something visible: ␛, or
    <U+202E>. A newline stays, and a tab becomes spaces.
    """
    return UNUSUAL.sub(lambda found: visible(found[0]), ORDINARY.sub("", text))


@lru_cache(4096)
def visible(character: str) -> str:
    """Return the character if it is visible, otherwise a visible replacement."""
    code = ord(character)
    if character in PICTURES:
        return PICTURES[character]
    if code < 32:
        return chr(0x2400 + code)
    category = unicodedata.category(character)
    # Formatting characters (Cf) are invisible, except Arabic number signs (AN)
    hides = category in ("Cc", "Cf", "Cs", "Zl", "Zp")
    if category == "Cf" and unicodedata.bidirectional(character) == "AN":
        hides = False
    if category == "Cn":
        hides = code & 0xFFFE == 0xFFFE or RESERVED.match(character)
    if category in ("Lo", "Mn"):
        hides = EMPTY_NAMES.search(unicodedata.name(character, ""))
    return f"<U+{code:04X}>" if hides else character


# Okabe and Ito's hues for colour-blind readers, without grey and black. Hues only fill cells,
# because yellow text on white is unreadable
HUES = ("#e69f00", "#56b4e9", "#009e73", "#cc79a7", "#0072b2", "#f0e442", "#d55e00")


@lru_cache(4096)
def style(
    color: str | None,
    back: str | None = None,
    bold: bool = False,
    reverse: bool = False,
    do: str = "",
) -> Style:
    """Return a style from the cache. `do` is the action to run when the text is clicked."""
    return Style(
        color=color, bgcolor=back, bold=bold, reverse=reverse, meta={"do": do} if do else None
    )


class Palette(NamedTuple):
    """The colours of a theme, for drawing."""

    text: str
    muted: str
    faint: str
    accent: str
    bad: str
    back: str
    bar: str  # background of the status line and the footer

    @staticmethod
    def from_theme(theme: Theme) -> Palette:
        """Return a theme's colours, with text colours moved towards black or white for contrast."""
        variables = theme.to_color_system().generate()
        names = ("foreground", "background", "text-accent", "text-error")
        text, back, accent, bad = (
            Color.parse(variables.get(name, "ansi_default")) for name in names
        )
        if any(color.ansi is not None for color in (text, back, accent, bad)):
            # The terminal's own colours cannot be blended
            return DARK if theme.dark else LIGHT
        far = Color.parse("white" if theme.dark else "black")
        text, accent, bad = (color.blend(far, 0.3) for color in (text, accent, bad))
        colors = (
            text,
            back.blend(text, 0.7),
            back.blend(text, 0.3),
            accent,
            bad,
            back,
            back.blend(text, 0.1),
        )
        return Palette(*(color.hex6.lower() for color in colors))

    def fill(self, request: int | None) -> str:
        # Do not repeat the hues in the same order: with seven slots, a slot's next request is often
        # the one seven numbers later
        number = request or 0
        return apart(HUES[(number + number // len(HUES)) % len(HUES)], self.back)

    def cell(self, kind: int, request: int | None, reverse: bool = False) -> Style:
        if kind in (EMPTY, REMEMBERED, UNSEEN):
            return style(self.faint if kind == EMPTY else self.muted, reverse=reverse)
        if kind in (BLOCKED, FAILED):
            return style(self.bad, mixed(self.back, self.bad, 0.18), reverse=reverse)
        hue = self.fill(request)
        if kind == REUSED:
            return style(mixed(self.back, hue, 0.6), mixed(self.back, hue, 0.15), reverse=reverse)
        # On a background of its own colour, a full block shows no seams in any font
        back = self.ground(kind, request) if kind in (DECODE, PREFILL) else None
        return style(hue, back, reverse=reverse)

    def ground(self, kind: int, request: int) -> str:
        """Return the background of a cell. A digit drawn in the cell keeps it."""
        return self.fill(request) if kind == DECODE else mixed(self.back, self.fill(request), 0.3)


DARK = Palette("#e0e0e0", "#949494", "#505050", "#ffc473", "#d17e92", "#121212", "#272727")
LIGHT = Palette("#202020", "#6c6c6c", "#b0b0b0", "#8a5a17", "#77263a", "#ffffff", "#e4e4e4")


@lru_cache(256)
def mixed(back: str, fill: str, part: float) -> str:
    return Color.parse(back).blend(Color.parse(fill), part).hex6.lower()


@lru_cache(64)
def apart(hue: str, back: str) -> str:
    """Return the hue, darker or lighter if it would be invisible on this background."""
    bright = Color.parse(back).brightness
    near = abs(Color.parse(hue).brightness - bright) < 0.25
    return mixed(hue, "#000000" if bright > 0.5 else "#ffffff", 0.3) if near else hue


@lru_cache(64)
def text_color_on(fill: str) -> str:
    """Return black or white, whichever is readable on this hue."""
    return "#000000" if Color.parse(fill).brightness > 0.4 else "#ffffff"


Line = list[Segment]
EIGHTHS = " ▁▂▃▄▅▆▇█"


class Pen:
    """Writes a line from left to right, and counts its cells."""

    def __init__(self, color: str | None = None) -> None:
        self.line: Line = []
        self.width = 0
        self._color = color  # the default of `put`

    def put(self, text: str, color: str | Style = "", bold: bool = False, do: str = "") -> Pen:
        text = CONTROLS.sub("·", text)  # a terminal would obey them
        how = color if isinstance(color, Style) else style(color or self._color, bold=bold, do=do)
        before = self.line.pop().text if self.line and self.line[-1].style is how else ""
        self.line.append(Segment(before + text, how))
        self.width += cell_len(text)
        return self

    def to(self, column: int) -> Pen:
        return self.put(" " * max(0, column - self.width))

    def bar(self, height: float | None, row: int, hue: str) -> Pen:
        """Draw one cell of a vertical bar that is `height` lines high; `row` counts from the
        bottom. None draws nothing, but any number, even 0, draws something."""
        least = int(row == 0 and height is not None)
        # Round ties up in spite of floating-point error in the sum
        eighths = max(least, min(8, round(8 * ((height or 0.0) - row) + 1e-6)))
        return self.put(EIGHTHS[max(0, eighths)], style(hue, hue) if eighths == 8 else hue)


def number(value: float | None) -> str:
    """Format a number with three digits, without decimals from 100 on: 0.82, 12.6, 340, 1,799."""
    if value is None:
        return "–"
    return f"{value:.2f}" if value < 9.995 else f"{value:.1f}" if value < 99.95 else f"{value:,.0f}"


def span(seconds: float | None) -> str:
    """Format a duration with its unit."""
    if seconds is None:
        return "–"
    return f"{number(1000 * seconds)} ms" if seconds < 1 else f"{number(seconds)} s"


def count(many: int, thing: str) -> str:
    """Format a number with its noun: "1 token", "2,048 tokens"."""
    return f"{many:,} {thing}{'s' * (many != 1)}"


def listed(names: Sequence[str], most: int) -> str:
    """Join the names, at most `most` of them: "r1, r2, r5 and 3 more"."""
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def in_time(step_s: float) -> str:
    """Format the time limit on a step's prompt tokens, which applies in addition to the budget."""
    return f", and {span(step_s)} while somebody decodes" if step_s else ""


def shorten(text: str, width: int) -> str:
    """Shorten text to one line of at most `width` cells, with an ellipsis at the cut."""
    text = " ".join(text.split())
    return (
        text
        if cell_len(text) <= width
        else set_cell_size(text, max(0, width - 1)) + "…" * (width > 0)
    )


def wrap(text: str, width: int) -> list[str]:
    """Wrap text to lines of at most `width` cells, between words where possible."""
    # Do not split a number from its unit, or a term of a sum
    lines = []
    for paragraph in text.split("\n"):
        line = ""
        for word in re.findall(
            r"\s*(?:\+ [a-z]+ \d\S*|\S+(?: (?:ms|s|%)(?!\w)\S*)?)|\s+$", paragraph
        ):
            if cell_len(line + word) > width:
                *full, word = chop_cells(word.lstrip(), max(1, width)) or [""]
                lines += [line, *full] if line else full
                line = ""
            line += word
        lines.append(line)
    return lines


# The kinds of cells: what a slot did in a step; rows reused from an earlier request, and rows that
# a free slot remembers; steps that the screen has missed, and steps that raised an exception
NAMES = ("prefill", "decode", "held", "blocked", "ghost", "free", "reused", "remembered")
NAMES += ("unseen", "failed")
PREFILL, DECODE, HELD, BLOCKED, GHOST, EMPTY, REUSED, REMEMBERED, UNSEEN, FAILED = range(10)
GLYPHS = "▒█┈╳▚·▓░?✗"
SMALL = "⁰¹²³⁴⁵⁶⁷⁸⁹⁺"  # numbers that fit in a cell; the last one means ten or more

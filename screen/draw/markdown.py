"""Render a model's Markdown as lines of a terminal.

While an answer grows, only its last block is rendered again. A link shows its text and its address.
HTML and images are shown as source, so that no word of an answer is hidden.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache

from markdown_it import MarkdownIt
from markdown_it.token import Token
from rich.console import Console
from rich.markdown import Markdown
from rich.segment import Segment
from rich.style import Style
from rich.syntax import RICH_SYNTAX_THEMES, ANSISyntaxTheme
from rich.theme import Theme
from textual.color import Color

from screen.draw.style import Line, Palette, clean, wrap

# Highlighted languages; malicious code can keep other lexers busy for a long time
LEXERS = ("python", "bash", "sh", "c", "cpp", "go", "java", "javascript", "json", "rust", "sql")
DEEPEST = 16  # maximum nesting level; beyond it, Rich would drop text, so the source is shown
PARSER = MarkdownIt("commonmark", {"html": False})
PARSER.enable(["strikethrough", "table"]).disable(["image", "reference"])


def lines_of(text: str, width: int, p: Palette, hue: str, grows: bool) -> Iterator[Line]:
    """Yield the lines of an answer. `grows`: the last block is not complete, so do not cache it."""
    *before, last = blocks(clean(text)) or [""]
    for block in before:
        yield from drawn(block, width, p, hue)
        yield []
    yield from (drawn.__wrapped__ if grows else drawn)(last, width, p, hue)


def blocks(text: str) -> list[str]:
    """Split text into blocks that can be rendered on their own.

    A block ends at an empty line outside of code, before a line without indentation, because
    earlier lines cannot affect how that line is rendered.
    """
    found: list[list[str]] = [[]]
    fence = ""
    before = "text"
    for line in text.split("\n"):
        if not (before.strip() or fence) and line[:1].strip():
            found.append([])
        found[-1].append(line)
        before = line
        mark = re.match(r"\s*(`{3,}|~{3,})", line)
        if mark and not fence:
            fence = mark[1]
        elif mark and line.strip() == mark[1] and mark[1].startswith(fence):
            fence = ""
    joined = ("\n".join(lines).strip("\n") for lines in found)
    return [block for block in joined if block]


@lru_cache(2048)
def drawn(text: str, width: int, p: Palette, hue: str) -> list[Line]:
    """Render a block with Rich, in our colours."""
    console = Console(width=width - 2, theme=theme_of(p, hue), _environ={})
    block = Markdown("", hyperlinks=False, code_theme=Colours(p))
    block.parsed = parse(text)
    if max((token.level for token in block.parsed), default=0) > DEEPEST:
        return [[Segment(f" {line}", Style(color=hue))] for line in wrap(text, width - 2)]
    lines = console.render_lines(block, style=Style(color=hue), pad=False)
    for end in (0, -1):  # Rich puts empty lines around a list
        while lines and not "".join(segment.text for segment in lines[end]).strip():
            del lines[end]
    return [[Segment(" "), *line] for line in lines]


def parse(text: str) -> list[Token]:
    """Parse a block, keeping line breaks.

    The parsed text is cleaned, because an entity may encode a control character.
    """
    found = PARSER.parse(text)
    for token in found:
        token.info = token.info if token.info in LEXERS else ""
        token.tag = "h2" if token.tag == "h1" else token.tag  # Rich centres h1
        for child in token.children or ():
            child.content = clean(child.content)
            child.type = "hardbreak" if child.type == "softbreak" else child.type
    return found


class Colours(ANSISyntaxTheme):
    """The colours of code, with a background that sets it apart."""

    def __init__(self, p: Palette):
        is_dark = Color.parse(p.back).brightness < 0.5
        super().__init__(RICH_SYNTAX_THEMES["ansi_dark" if is_dark else "ansi_light"])
        self._ground = Style(bgcolor=p.bar)

    def get_background_style(self) -> Style:
        return self._ground


@lru_cache(8)
def theme_of(p: Palette, hue: str) -> Theme:
    bold = Style(color=hue, bold=True)
    accent = Style(color=p.accent)
    quiet = Style(color=p.muted)
    styles = dict.fromkeys(("h1", "h2", "h3", "h4", "h5", "h6", "table.header"), bold)
    styles |= dict.fromkeys(("code", "link"), accent)
    names = ("hr", "block_quote", "link_url", "table.border", "item.bullet", "item.number")
    styles |= dict.fromkeys(names, quiet)
    return Theme({f"markdown.{name}": style for name, style in styles.items()})

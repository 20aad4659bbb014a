"""Markdown as a model writes it, in lines of a terminal.

The problem. An answer grows ten times a second, may be long, and may hold anything: HTML, links that
say one thing and lead elsewhere, control characters behind an entity.

What this file keeps. Only the last block of an answer that grows is drawn anew. A link is its text and
its address, and nothing opens it. HTML, images and definitions are shown as they are written, so no
word of an answer is hidden.

Where next: `pages/talk.py`, the conversation.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache

from markdown_it import MarkdownIt
from markdown_it.token import Token
from rich.console import Console
from rich.markdown import CodeBlock, Markdown
from rich.segment import Segment
from rich.style import Style
from rich.syntax import Syntax
from rich.theme import Theme
from textual.color import Color

from screen.ink import Line, Palette, clean

# Code in these languages is coloured. Other lexers may take long for code that was made for that
LEXERS = ("python", "bash", "sh", "c", "cpp", "go", "java", "javascript", "json", "rust", "sql")
PARSER = MarkdownIt("commonmark", {"html": False})
PARSER.enable(["strikethrough", "table"]).disable(["image", "reference"])


def lines_of(text: str, width: int, p: Palette, hue: str, grows: bool) -> Iterator[Line]:
    """`grows`: more of the last block may come."""
    *before, last = blocks(clean(text)) or [""]
    for block in before:
        yield from drawn(block, width, p, hue)
        yield []
    yield from (drawn.__wrapped__ if grows else drawn)(last, width, p, hue)


def blocks(text: str) -> list[str]:
    """Cut before each line whose form no line before it has a say in: the first one behind an empty
    line, if it is not indented and not in code."""
    found: list[list[str]] = [[]]
    fence = ""
    for line in text.split("\n"):
        is_after = bool(found[-1]) and not found[-1][-1].strip()
        if is_after and not fence and line.strip() and not line.startswith(" "):
            found.append([])
        found[-1].append(line)
        mark = re.match(r"\s*(`{3,}|~{3,})", line)
        if mark and not fence:
            fence = mark[1]
        elif mark and line.strip() == mark[1] and mark[1].startswith(fence):
            fence = ""
    joined = ("\n".join(lines).strip("\n") for lines in found)
    return [block for block in joined if block]


@lru_cache(2048)
def drawn(text: str, width: int, p: Palette, hue: str) -> list[Line]:
    """A block, as Rich draws it in our colours."""
    console = Console(width=width - 2, theme=theme_of(p, hue), _environ={})
    block = Markdown("", hyperlinks=False)
    block.elements = Markdown.elements | {"fence": Code, "code_block": Code}
    block.parsed = read(text)
    block.p = p
    lines = console.render_lines(block, style=Style(color=hue), pad=False)
    if lines and not "".join(segment.text for segment in lines[0]).strip():  # before a list
        del lines[0]
    return [[Segment(" "), *map(without_links, line)] for line in lines]


def without_links(segment: Segment) -> Segment:
    return Segment(segment.text, segment.style and segment.style.clear_meta_and_links())


def read(text: str) -> list[Token]:
    """A line of an answer stays a line. An entity may be a character that is not to be drawn."""
    found = PARSER.parse(text)
    for token in found:
        token.info = token.info if token.info in LEXERS else ""
        for child in token.children or ():
            child.content = clean(child.content)
            child.type = "hardbreak" if child.type == "softbreak" else child.type
    return found


class Code(CodeBlock):
    """Code on a ground of its own."""

    @classmethod
    def create(cls, markdown: Markdown, token: Token) -> Code:
        is_dark = Color.parse(markdown.p.back).brightness < 0.5
        code = cls(token.info or "text", "ansi_dark" if is_dark else "ansi_light")
        code.ground = markdown.p.bar
        return code

    def __rich_console__(self, console, options) -> Iterator[Syntax]:
        yield Syntax(
            str(self.text).rstrip(),
            self.lexer_name,
            theme=self.theme,
            word_wrap=True,
            padding=(0, 1),
            background_color=self.ground,
        )


@lru_cache(8)
def theme_of(p: Palette, hue: str) -> Theme:
    bold = Style(color=hue, bold=True)
    accent = Style(color=p.accent)
    quiet = Style(color=p.muted)
    styles = dict.fromkeys(("h1", "h2", "h3", "h4", "h5", "h6", "table.header"), bold)
    styles |= dict.fromkeys(("code", "link"), accent)
    styles |= dict.fromkeys(("hr", "block_quote", "link_url", "table.border"), quiet)
    styles |= dict.fromkeys(("item.bullet", "item.number"), quiet)
    return Theme({f"markdown.{name}": style for name, style in styles.items()})

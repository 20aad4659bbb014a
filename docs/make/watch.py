"""The screen at work, as a picture that moves:

    python docs/make/watch.py docs/watch-dark.svg docs/watch-light.svg

The screen runs a burst without a terminal, some steps at a time, and is drawn after each of these.
Most lines of a picture are as they were in the one before, so each is kept once. There is no script
in it: styles show one picture after the other. Where nothing may move, the last one stands.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from functools import partial
from itertools import groupby
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import tui
from parts.files import write_whole
from screen.app import Screen
from screen.room import EngineRoom
from screen.session import Session
from screen.state import State

SIZE = (100, 30)
BURST = 24
STEPS = (1, 1, 1, 1, 1, 1, 2, 2, 2, 2, *[6] * 18)  # before each picture: slow at first, then faster
LAST = 8  # so many pictures long the last one stays
SHOWN = 0.45  # seconds of a picture
CELL, LINE, FOOT = 12, 24, 19  # pixels here; words stand on FOOT
THEIR_CELL, THEIR_LINE = 12.2, 24.4  # and as Textual draws
RECT = re.compile(r'<rect fill="(#\w+)" x="([\d.]+)" y="([\d.]+)" width="([\d.]+)"')
TEXT = re.compile(
    r'class="[^"]*-(r\d+)" x="([\d.]+)" y="([\d.]+)" textLength="([\d.]+)"[^>]*>(.*?)</text>'
)
STYLE = re.compile(r"-(r\d+) \{ (.*?) \}")


class Filmed(Screen):
    """A screen that plays a burst by itself, and keeps its pictures."""

    def __init__(self, session: Session, theme: str):
        super().__init__(session)
        self.pictures: list[str] = []
        self._begin = f"{theme} pause burst{BURST}"

    async def play(self, script: str) -> None:
        await super().play(self._begin)
        for count in STEPS:
            await super().play(f"step{count}")
            await self.take_picture()
            self.pictures.append(self.picture)
        self.exit(0)

    def exit(self, *arguments, **options) -> None:
        """A picture does not end this screen."""
        if len(self.pictures) == len(STEPS):
            super().exit(*arguments, **options)


def film(theme: str) -> list[str]:
    arguments = tui.parse_arguments(["--model", "demo"])
    room = EngineRoom(partial(tui.load_engine, arguments))
    session = Session(room, State("demo"))
    room.start()
    screen = Filmed(session, theme)
    try:
        screen.run(headless=True, size=SIZE)
    finally:
        room.stop(10)
    return screen.pictures


class Names:
    """Short names for what is written many times: s0, s1, ..."""

    def __init__(self, letter: str) -> None:
        self.letter = letter
        self.names: dict[str, str] = {}

    def of(self, what: str) -> str:
        return self.names.setdefault(what, f"{self.letter}{len(self.names)}")


def lines_of(picture: str, styles: Names) -> list[str]:
    """A picture as lines of SVG, each without its place: what is behind the words, and the words."""
    fills = {name: fill.replace(" ", "") for name, fill in STYLE.findall(picture)}
    lines = [""] * SIZE[1]
    for fill, x, y, wide in RECT.findall(picture):
        name = styles.of(f"fill:{fill}")
        lines[round(float(y) / THEIR_LINE)] += (
            f'<path class="{name}" d="M{cells(x)}-{FOOT}h{cells(wide)}v{LINE}h-{cells(wide)}"/>'
        )
    for style, x, y, wide, words in TEXT.findall(picture):
        words = words.replace("&#160;", " ")
        if words.strip():
            name = styles.of(fills[style])
            # Blocks may come from another font, with another width
            fixed = "" if words.isascii() else f' textLength="{cells(wide)}"'
            text = f'<text class="{name}" x="{cells(x)}"{fixed}>{words}</text>'
            lines[int(float(y) / THEIR_LINE)] += text
    return lines


def cells(pixels: str) -> int:
    return round(float(pixels) / THEIR_CELL) * CELL


def draw(pictures: Sequence[str]) -> str:
    """All pictures in one. A line that stays for some pictures is written once."""
    styles = Names("s")
    moments = Names("m")
    body = []
    whole = len(pictures) + LAST
    drawn = [lines_of(picture, styles) for picture in pictures]
    for row in range(SIZE[1]):
        shown = [lines[row] for lines in drawn]
        first = 0
        for line, same in groupby(shown):
            end = first + len([*same])
            move = f' transform="translate(0 {row * LINE + FOOT})"'
            if (first, end) == (0, len(pictures)):
                body.append(f"<g{move}>{line}</g>")
            elif line:
                last = "visible" if end == len(pictures) else "hidden"
                until = whole if end == len(pictures) else end
                name = moments.of(f"{100 * first / whole:.2f} {100 * until / whole:.2f} {last}")
                body.append(f'<g class="m {name}"{move}>{line}</g>')
            first = end
    wide, tall = SIZE[0] * CELL, SIZE[1] * LINE
    seconds = whole * SHOWN
    looks = "".join(f".{name}{{{style}}}" for style, name in styles.names.items())
    moves = "".join(moving(name, moment) for moment, name in moments.names.items())
    back = max(RECT.findall(pictures[0]), key=lambda rect: float(rect[3]))[0]
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {tall}">
<style>text{{font:20px ui-monospace,Menlo,Consolas,"DejaVu Sans Mono",monospace;white-space:pre}}
{looks}
.m{{animation:{seconds:.1f}s step-end infinite}}{moves}
@media(prefers-reduced-motion:reduce){{.m{{animation:none!important}}}}</style>
<rect width="100%" height="100%" fill="{back}"/>
{chr(10).join(body)}
</svg>
"""


def moving(name: str, moment: str) -> str:
    """CSS: shown from one moment to another. Where nothing moves, only the last picture is."""
    begin, end, last = moment.split()
    frames = f"0%{{visibility:hidden}}{begin}%{{visibility:visible}}"
    if begin == "0.00":
        frames = "0%{visibility:visible}"
    if end != "100.00":
        frames += f"{end}%{{visibility:hidden}}"
    return f".{name}{{visibility:{last};animation-name:{name}}}@keyframes {name}{{{frames}}}"


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("dark", type=Path)
    parser.add_argument("light", type=Path)
    args = parser.parse_args()
    for theme, path in (("dark", args.dark), ("light", args.light)):
        write_whole(path, draw(film(theme)))
    return 0


if __name__ == "__main__":
    sys.exit(main())

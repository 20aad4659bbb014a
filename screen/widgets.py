"""Textual widgets: a pane, and the prompt box.

A pane repaints only rows that have changed, and the screen uses at most a tenth of a core. A pane
that cannot be drawn shows the error, and the others keep working.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from rich.style import Style
from textual import events
from textual.geometry import Offset, Region
from textual.strip import Strip
from textual.widget import Widget
from textual.widgets import TextArea

from base.error_reports import describe, show_fault
from cli.terminal_chat import History
from screen.draw.canvas import Canvas
from screen.draw.style import Line, clean, shorten
from screen.state import State

SHARE = 0.1  # share of a core that the screen may use
LONGEST = 0.5  # maximum seconds between two calls


def thrifty(look: Callable[[], None]) -> Callable[[], None]:
    """Wrap `look` to skip calls while this thread has used more than its share of a core since the last.

    On a slow machine the screen is drawn less often, and the engine is not slowed down.
    """
    looked = -LONGEST
    used = 0.0

    def look_or_wait() -> None:
        nonlocal looked, used
        now = time.monotonic()
        spent = time.thread_time()
        if now - looked >= LONGEST or spent - used <= SHARE * (now - looked):
            looked = now
            used = spent
            look()

    return look_or_wait


class Pane(Widget):
    """A widget that shows the lines that a function draws from the state.

    Only rows that have changed are painted again. `wheel` is the action of the mouse wheel, called
    with -1 or 1.
    """

    def __init__(self, draw: Callable[[State, Canvas], None], id: str, wheel: str = ""):
        super().__init__(id=id)
        self._draw = draw
        self._wheel = wheel
        # For each row: its line and style, and the strip rendered from them
        self._drawn: list[tuple[Line, Style] | None] = []
        self._strips: list[Strip] = []
        self._fault = ""  # the error of the last draw, if it failed

    def paint(self) -> None:
        width, height = self.size
        if not (self.display and width and height):
            return
        lines = self._lines(width, height)
        lines += [[]] * (height - len(lines))
        if len(self._strips) != height:
            self._drawn = [None] * height
            self._strips = [Strip.blank(width)] * height
        base = self.rich_style
        rows = []
        for y in range(height):
            if self._drawn[y] != (lines[y], base):
                self._drawn[y] = (lines[y], base)
                self._strips[y] = Strip(lines[y]).adjust_cell_length(width).apply_style(base)
                rows.append(Region(0, y, width, 1))
        if rows:
            self.refresh(*rows)

    def _lines(self, width: int, height: int) -> list[Line]:
        """Return the drawn lines, or the error if drawing fails."""
        on = Canvas(self.app.palette, width, height)
        try:
            self._draw(self.app.state, on)
            self._fault = ""
        except Exception as error:
            if self._fault != describe(error):  # drawn ten times a second, reported once
                self._fault = describe(error)
                show_fault(f"the pane {self.id!r} cannot be drawn", error)
            on.lines.clear()
            words = shorten(f" ✗ {self.id}: {clean(self._fault)}; E shows where", width)
            on.pen().put(words, on.bad)
        return on.lines

    def render_line(self, y: int) -> Strip:
        if y < len(self._strips):
            return self._strips[y]
        return Strip.blank(self.size.width, self.rich_style)

    def on_resize(self) -> None:
        self._strips = []
        self.paint()

    def on_hide(self) -> None:
        """Drop the strips, so that old lines do not flash when the pane is shown again."""
        self._strips = []

    async def on_click(self, event: events.Click) -> None:
        if do := event.style.meta.get("do"):
            await self.app.run_action(do)
        elif self.id == "timeline":
            await self.app.run_action(f"point({event.x - 4}, {event.y - 1})")

    async def on_mouse_scroll_up(self) -> None:
        if self._wheel:
            await self.app.run_action(f"{self._wheel}(-1)")

    async def on_mouse_scroll_down(self) -> None:
        if self._wheel:
            await self.app.run_action(f"{self._wheel}(1)")


class PromptBox(TextArea):
    """The prompt box.

    A refused prompt is put back. Up in the first line recalls the previous prompt, Down in the last
    line the next one.
    """

    BINDINGS = (
        ("escape", "app.escape"),
        ("tab", "app.complete"),
        ("enter", "app.submit"),
        ("ctrl+j,shift+enter,alt+enter", "newline"),
        ("ctrl+z", "app.suspend_process"),
        ("pageup", "app.leaf(-1)"),
        ("pagedown", "app.leaf(1)"),
    )

    def __init__(self, earlier: History):
        super().__init__(
            id="prompt",
            compact=True,
            highlight_cursor_line=False,
            soft_wrap=False,
            placeholder="i to type, Enter to fire, ctrl+j for a new line, Esc to leave",
        )
        self.cursor_blink = False
        self.earlier = earlier
        self._at = len(earlier.questions)  # index of the recalled prompt
        self._draft = ""  # the unfinished prompt, saved by Up

    @property
    def value(self) -> str:
        return self.text

    @property
    def tall(self) -> int:
        """The number of lines that the text needs."""
        return self.wrapped_document.height if self.soft_wrap else 1

    def put(self, text: str) -> None:
        """Replace the text, with the cursor at its end, so that Ctrl-U deletes all of it."""
        self.load_text(clean(text))
        self.move_cursor(self.document.end)
        self.fold(self.soft_wrap)

    def fold(self, typing: bool) -> None:
        """Show only the beginning of the text, in one line, while the box has no focus."""
        self.soft_wrap = typing
        if not typing:
            self.scroll_to(0, 0, animate=False)
        self.app.paint()

    def scroll_cursor_visible(self, center: bool = False, animate: bool = False) -> Offset:
        return super().scroll_cursor_visible(center, animate) if self.soft_wrap else Offset()

    def insert_text(self, text: str) -> None:
        """Insert at the cursor, or in place of the selection."""
        self.replace(clean(text), *self.selection, maintain_selection_offset=False)

    def fired(self) -> None:
        """Remember the accepted text and clear the box."""
        self.earlier.add(self.value)
        self._at = len(self.earlier.questions)
        self.put("")

    def recall(self, by: int) -> None:
        """Recall an earlier or a later prompt. After the last one comes the unfinished prompt."""
        questions = self.earlier.questions
        at = max(0, min(self._at + by, len(questions)))
        if self._at == len(questions):
            self._draft = self.value
        if at != self._at:
            self._at = at
            self.put([*questions, self._draft][at])

    def action_delete_to_start_of_line(self) -> None:
        self.delete((0, 0), self.cursor_location, maintain_selection_offset=False)

    def action_newline(self) -> None:
        self.insert_text("\n")

    def continues(self) -> bool:
        """Replace a backslash before the cursor with a line break, as shells do.

        Return True if there was one.
        """
        row, column = self.cursor_location
        if not self.document[row][:column].endswith("\\"):
            return False
        backslash = (row, column - 1)
        self.replace("\n", backslash, (row, column), maintain_selection_offset=False)
        return True

    def action_cursor_up(self, select: bool = False) -> None:
        if select or not self.navigator.is_first_wrapped_line(self.cursor_location):
            super().action_cursor_up(select)
        else:
            self.recall(-1)

    def action_cursor_down(self, select: bool = False) -> None:
        if select or not self.navigator.is_last_wrapped_line(self.cursor_location):
            super().action_cursor_down(select)
        else:
            self.recall(1)

    def on_text_area_changed(self) -> None:
        if self.tall != self.size.height:
            self.app.paint()

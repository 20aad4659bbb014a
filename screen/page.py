"""A page of the screen is one record: its key, command, script word, log lines, and drawing.

Each file in `screen/pages/` defines a record, and the table in `keys.py` lists them. Experiments
are pages, too; `tui.py` lists them. Footer, help, palette and completion are derived from the
records.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from screen.draw.canvas import Canvas
from screen.draw.style import DARK
from screen.engine_view import View
from screen.state import State

if TYPE_CHECKING:
    from screen.commands import Session

NOTHING_RAN = "Nothing has run yet. b fires a burst."
NOTHING_ENDED = "Nothing has ended yet. b fires a burst."
LOG = (100, 40)  # width and height of a page in a log


class Key(NamedTuple):
    keys: str  # Textual's names
    show: str
    action: str
    label: str
    help: str  # for a pair of keys, the first one's text explains both
    # rank in the footer: low ranks are shown first, 0 is never shown
    footer: int = 0


class Page(NamedTuple):
    """A page and every way to open it. The simplest page sets only the first five fields."""

    name: str  # also the name of its command
    key: str
    label: str
    help: str
    draw: Callable[[State, Canvas], None]  # any number of lines: a page can be scrolled
    footer: int = 0
    # Run the command with its arguments, before the page opens. Returns a message for the user, or
    # raises ValueError
    obey: Callable[[Session, str], str | None] | None = None
    example: str = ""  # example of the arguments
    words: Sequence[str] = ()  # completions of the arguments
    explains: Sequence[tuple[str, str]] = ()  # (word, meaning) for the help
    # Parse the argument of the script word; ValueError if it is wrong
    read: Callable[[str], object] | None = None
    # Lines for the log in place of the page
    log_lines: Callable[[State], Sequence[str]] | None = None
    # Draws a part of the page as a pane of the main screen
    pane: Callable[[State, Canvas], None] | None = None
    # Keys while the page is open: key -> an action of the screen, or a function
    own: Mapping[str, str | Callable[[State], None]] = {}
    # called for each new view, with the previous one
    on_view: Callable[[State, View], None] | None = None
    # Called ten times a second while the page is open; returns True if the page must be redrawn
    poll: Callable[[Session], bool] | None = None
    leave: Callable[[Session], None] | None = None  # called when the page is closed
    # While the page is open, its key runs the command again instead of closing the page
    repeats: bool = False
    is_live: bool = False  # shows the effect of a command, so no message is needed
    has_request: bool = False  # shows the open request
    is_view: bool = False  # its pane and the prompt box replace the other panes
    # While `State.strip` is set, its pane is below the others, and the page controls the engine
    is_strip: bool = False
    strip_keys: Callable[[State], Sequence[Key]] | None = None  # shown in the footer
    hint: str = ""  # shown in the timeline before the first step
    is_early: bool = False  # can be opened while the model loads
    disturbs: bool = False  # the command changes the engine, which must be in this process

    @property
    def shortcut(self) -> Key:
        show = {"question_mark": "?"}.get(self.key, self.key)
        action = f"page('{self.name}')"
        return Key(self.key, show, action, self.label, self.help, self.footer)

    def in_log(self, state: State) -> Sequence[str]:
        """Return the page as lines for the log."""
        if self.log_lines:
            return self.log_lines(state)
        on = Canvas(DARK, *LOG)
        on.has_keys = False
        self.draw(state, on)
        return ["".join(segment.text for segment in line).rstrip() for line in on.lines]

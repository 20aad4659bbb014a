"""A page of the screen is one record: its key, command, script word, log lines, and drawing.

A file in `screen/pages/` makes a record, and the table in `keys.py` lists them; experiments are pages,
too, and `tui.py` lists them. Footer, help, palette and completion follow from it.
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
LOG = (100, 40)  # the size of a page in a log


class Key(NamedTuple):
    keys: str  # Textual's names
    show: str
    action: str
    label: str
    help: str  # the first of a pair explains both
    # rank in the footer: low ranks are shown first, 0 never
    footer: int = 0


class Page(NamedTuple):
    """A page and all ways to it. The simplest page has the first five fields."""

    name: str  # also of the command
    key: str
    label: str
    help: str
    draw: Callable[[State, Canvas], None]  # any number of lines: a page can be scrolled
    footer: int = 0
    # The command with its arguments: runs before the page opens and returns words for the user, or
    # raises a ValueError
    obey: Callable[[Session, str], str | None] | None = None
    example: str = ""  # of its arguments
    words: Sequence[str] = ()  # completed as its arguments
    explains: Sequence[tuple[str, str]] = ()  # words of its own, with their meaning, for the help
    # Parse the argument of a script's word; ValueError if it is wrong
    read: Callable[[str], object] | None = None
    # Lines for the log in place of the page
    log_lines: Callable[[State], Sequence[str]] | None = None
    # A part of the page as a pane of the main screen
    pane: Callable[[State, Canvas], None] | None = None
    # Keys while the page is open: each an action of the screen, or a function
    own: Mapping[str, str | Callable[[State], None]] = {}
    on_view: Callable[[State, View], None] | None = None  # with the view before
    # Ten times a second while the page is open. True: the picture has changed
    poll: Callable[[Session], bool] | None = None
    leave: Callable[[Session], None] | None = None  # when the page is closed
    # On the open page its key runs the command again; otherwise the key closes the page
    repeats: bool = False
    is_live: bool = False  # shows the engine at work, so keys need no message
    has_request: bool = False  # shows the open request
    is_view: bool = False  # its pane replaces the others, with the prompt box
    # While `State.strip` is set, its pane is below the others, and it has the keyboard and the engine
    is_strip: bool = False
    strip_keys: Callable[[State], Sequence[Key]] | None = None  # in the footer meanwhile
    hint: str = ""  # in the timeline before the first step
    is_early: bool = False  # can be opened while the model loads
    disturbs: bool = False  # the command changes the engine, so it must be our own

    @property
    def shortcut(self) -> Key:
        show = {"question_mark": "?"}.get(self.key, self.key)
        action = f"page('{self.name}')"
        return Key(self.key, show, action, self.label, self.help, self.footer)

    def in_log(self, state: State) -> Sequence[str]:
        """The page as lines of a log."""
        if self.log_lines:
            return self.log_lines(state)
        on = Canvas(DARK, *LOG)
        on.has_keys = False
        self.draw(state, on)
        return ["".join(segment.text for segment in line).rstrip() for line in on.lines]

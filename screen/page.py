"""What a page of the screen is: one record, from which all else follows.

The problem. A page has a key, a command, a word in a script, a line in a log, keys of its own while
it is open, and a place in footer, help, palette and completion. If each of these were a table, a page
would be named in all of them.

What this file keeps. A file in `screen/pages/` knows a `Desk`, the state and a paper, and makes a
record. It is found in the table of keys (`keys.py`). Nothing else knows a page by its name.

Where next: `pages/totals.py`, a small page; `keys.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from screen.ink import DARK
from screen.paper import Paper
from screen.room import Ask, EngineRoom, Finding
from screen.state import State

LOG = (100, 40)  # the size of a page in a log


class Desk(Protocol):
    """What a page may ask of a session."""

    state: State
    room: EngineRoom
    stays: bool  # a trial with a page goes on until the page is left
    heard: bool  # the view shows the effect of every wish
    kept: dict[str, Any]  # by page: what it remembers of this session

    def asks(self, count: int) -> list[Ask]: ...

    def check_alone(self, what: str) -> None: ...

    def check_load(self, why: str) -> None: ...

    def try_out(self, what: str, trial: Callable[[EngineRoom], Iterator[Finding]]) -> None: ...

    def is_trying(self, name: str) -> bool: ...


class Key(NamedTuple):
    keys: str  # as Textual names them
    show: str
    action: str
    label: str
    help: str  # of a pair of keys, the first explains both
    # The keys of the lowest ranks are shown first, while there is room; 0: never in the footer
    footer: int = 0


class Page(NamedTuple):
    """A page, and all that leads to it. The simplest has the first five fields."""

    name: str  # and its command's
    key: str
    label: str
    help: str
    draw: Callable[[State, Paper], None]  # as many lines as it takes: a page can be scrolled
    footer: int = 0
    # What the command does before the page opens, with what stands behind it. Answers with what to
    # tell the user; a ValueError says what is wrong
    obey: Callable[[Desk, str], str | None] | None = None
    example: str = ""  # of what may stand behind the command
    words: Sequence[str] = ()  # that completion knows there
    read: Callable[[str], object] | None = None  # what a script may say there; ValueError if not
    tell: Callable[[State], Sequence[str]] | None = (
        None  # the lines of a log; else those of the page
    )
    # Keys of its own while it is open: a line to obey, or what else they do
    own: Mapping[str, str | Callable[[State], None]] = {}
    look: Callable[[Desk], None] | None = None  # ten times a second, while the page is open
    leave: Callable[[Desk], None] | None = None  # when the page is closed
    repeats: bool = False  # its key does it once more while the page is open; else it closes it
    is_live: bool = False  # shows what the engine does, and needs no words for what a key has done
    has_request: bool = False  # shows the open request
    is_early: bool = False  # says something while the model loads
    disturbs: bool = False  # does something to the engine, which must be our own

    @property
    def shortcut(self) -> Key:
        show = {"question_mark": "?"}.get(self.key, self.key)
        action = f"page('{self.name}')"
        return Key(self.key, show, action, self.label, self.help, self.footer)

    def told(self, state: State) -> Sequence[str]:
        """What the page says, in lines of a log."""
        if self.tell:
            return self.tell(state)
        on = Paper(DARK, *LOG)
        self.draw(state, on)
        return ["".join(segment.text for segment in line).rstrip() for line in on.lines]

"""Our solutions of stages 9 to 12. `start.py` makes blank chapters from these files, and no engine
imports them. A student's own chapters are found first."""

from course import overlay

if book := overlay.opened():
    __path__.insert(0, str(book.folder))

"""Stages 9 to 12, written by us. `start.py` makes blank chapters of these files; no engine imports
them. Those of a student's folder are found first."""

from course import overlay

if book := overlay.opened():
    __path__.insert(0, str(book.folder))

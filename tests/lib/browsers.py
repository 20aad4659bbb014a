"""A real browser for the tests of the page, and what they ask of it."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), ""
)
needs_browser = pytest.mark.skipif(
    not CHROMIUM, reason="there is no Chromium; apt-get install chromium"
)
DESK = {"width": 1280, "height": 900}
PHONE = {"width": 390, "height": 844}
SCREENS = [PHONE, {"width": 820, "height": 1180}, {"width": 1280, "height": 800}]
ASTRAY = (Path(__file__).parent / "astray.js").read_text()


def until(tab, true: str, seconds: float = 60) -> None:
    """Until an expression is true. (Playwright's own way to wait would need `eval` in the page.)"""
    deadline = time.monotonic() + seconds
    while not tab.evaluate(true):
        failed = any(line.startswith("an error: ") for line in tab.said)
        assert not failed and time.monotonic() < deadline, (true, tab.said)
        tab.wait_for_timeout(30)


def in_place(tab, least: int) -> None:
    """Nothing is astray, in light and in dark, and so many boxes have been measured."""
    for scheme in ("dark", "light"):
        tab.emulate_media(color_scheme=scheme)
        measured, found = tab.evaluate(ASTRAY)
        assert not found, "\n".join(found)
        assert measured > least

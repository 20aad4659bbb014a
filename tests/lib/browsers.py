"""A real browser for the tests of the page, and helpers to wait and check."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), ""
)
needs_node = pytest.mark.skipif(not shutil.which("node"), reason="there is no node")
needs_browser = pytest.mark.skipif(
    not CHROMIUM, reason="there is no Chromium; apt-get install chromium"
)
needs_pyodide = pytest.mark.skipif(
    "NANOBATCH_PYODIDE" not in os.environ,
    reason="NANOBATCH_PYODIDE names no folder; see the top of tests/web/test_simulate.py",
)
DESK = {"width": 1280, "height": 900}
PHONE = {"width": 390, "height": 844}
SCREENS = [PHONE, {"width": 820, "height": 1180}, {"width": 1280, "height": 800}]
WEB = Path(__file__).parents[2] / "web"
FRAME = "new Promise((drawn) => requestAnimationFrame(() => requestAnimationFrame(drawn)))"
ASTRAY = (Path(__file__).parent / "misplaced_elements.js").read_text()


def until(tab, true: str, seconds: float = 60) -> None:
    """Wait until an expression is true. (Playwright's own way to wait would need `eval` in the page.)"""
    deadline = time.monotonic() + seconds
    while not tab.evaluate(true):
        failed = any(line.startswith("an error: ") for line in tab.said)
        assert not failed and time.monotonic() < deadline, (true, tab.said)
        tab.wait_for_timeout(30)


def shows(tab, place: str, words: str) -> None:
    """Wait until an element's text contains these words."""
    text = f"document.querySelector({json.dumps(place)})?.textContent"
    until(tab, f"{text}?.includes({json.dumps(words)})")


def choose(tab, number: int) -> None:
    """Select a request, and wait until it is open."""
    tab.evaluate(f"nanobatch.choose({number})")
    until(tab, f"document.querySelector('[data-request] .chip')?.textContent === '{number}'")


def in_place(tab, least: int) -> None:
    """Assert that the page has more than `least` boxes, and that none overlaps or overflows, in the light
    and in the dark theme."""
    for scheme in ("dark", "light"):
        tab.emulate_media(color_scheme=scheme)
        measured, found = tab.evaluate(ASTRAY)
        assert not found, "\n".join(found)
        assert measured > least


def in_place_everywhere(tab, least: int) -> None:
    """Check the layout at each size in `SCREENS`, after a redraw."""
    for size in SCREENS:
        tab.set_viewport_size(size)
        tab.evaluate(FRAME)
        in_place(tab, least)


def in_node(script: str, asked: Any) -> Any:
    """Run a script in Node with the page's modules but without a page. Return the value that it passes to
    `tell`."""
    tools = (
        'import { readFileSync } from "node:fs";\n'
        "const asked = JSON.parse(readFileSync(0, 'utf8'));\n"
        "const tell = (what) => console.log(JSON.stringify(what));\n"
    )
    text = tools + script.replace('from "./', f'from "{WEB}/')
    command = ["node", "--input-type=module", "-e", text]
    said = subprocess.run(
        command, input=json.dumps(asked), capture_output=True, text=True, timeout=120
    )
    assert not said.returncode, said.stderr
    return json.loads(said.stdout)

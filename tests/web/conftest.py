"""The browser for the tests of the page. Without Playwright they are skipped."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from browsers import CHROMIUM, DESK

# Options for a container with few resources
FEW_NEEDS = ["--no-sandbox", "--disable-dev-shm-usage"]


@pytest.fixture(scope="session")
def browser() -> Iterator:
    playwright = pytest.importorskip("playwright.sync_api", reason="pip install -e '.[browser]'")
    with playwright.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=FEW_NEEDS)
        yield browser
        browser.close()


@pytest.fixture
def opens(browser) -> Iterator:
    """Yield a function that opens a page. Afterwards assert that no page opened a dialog or logged an error.
    (An offline page logs one for each request.)"""
    contexts, said = [], []

    def opened(address: str | Path, *, offline: bool = True, **how):
        context = browser.new_context(**{"viewport": DESK} | how)
        context.set_offline(offline)
        contexts.append(context)
        tab = context.new_page()
        tab.on("dialog", lambda dialog: said.append(f"a dialog: {dialog.message}"))
        tab.on("pageerror", lambda error: said.append(f"an error: {error}"))
        tab.on("console", lambda m: said.append(m.text) if m.type == "error" else None)
        tab.goto(f"file://{address}" if isinstance(address, Path) else address)
        tab.said = said
        return tab

    yield opened
    for context in contexts:
        context.close()
    assert said == []

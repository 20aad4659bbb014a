"""Fixtures for the tests of the screen."""

import asyncio

import pytest
from screen_stage import Stage


@pytest.fixture(autouse=True)
def fast_keys(monkeypatch):
    """Shorten Textual's waits for idle to 2 ms. It would wait at least 20 ms after each key."""

    async def go_on(*times: float) -> None:
        await asyncio.sleep(0.002)

    monkeypatch.setattr("textual.app.wait_for_idle", go_on)


@pytest.fixture
def stage() -> Stage:
    return Stage().load()

"""Fixtures for whatever is seen on the screen."""

import asyncio

import pytest
from screen_stage import Stage


@pytest.fixture(autouse=True)
def fast_keys(monkeypatch):
    """Textual waits 50 ms after each key of several, until nothing moves. Here it waits once, after
    the last."""

    async def go_on(*times: float) -> None:
        await asyncio.sleep(0.002)

    monkeypatch.setattr("textual.app.wait_for_idle", go_on)


@pytest.fixture
def stage() -> Stage:
    return Stage().load()

"""`/watch`: everything that a screen shows, ten times a second, for a screen elsewhere.

A whole view takes a hundred kilobytes, so a frame has only the changes since the watcher's last one
(`watch_frames.py`). When nothing happens, there is one frame a second. A watcher that reads too
slowly is dropped. Texts are only for those who may read them (`auth.may_read`). Watching changes
nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from engine import watch_frames
from engine.watch_frames import Frame
from server.http import HTTPRequest
from server.protocol_adapter import event

MAX_WATCHERS = 16  # at the same time
WATCH_S = 0.1  # seconds between frames
WATCH_TIMEOUT_S = 5.0  # a watcher that has not taken a frame for this long is dropped


async def watch(
    request: HTTPRequest, hello: dict[str, Any], look: Callable[[Frame | None], Frame | None]
) -> None:
    """Send frames until the server ends. A watcher that leaves cancels this.

    `hello`: sent first; its `texts` says whether this watcher may read texts.
    `look`: a frame since the one before. None ends the stream.
    """
    sender = watch_frames.Sender(hello["texts"])
    last = None
    rest = 0.0  # seconds without a change
    request.begin_events()
    request.connection.patience = WATCH_TIMEOUT_S
    await request.write(b"event: hello\n" + event({"protocol": watch_frames.PROTOCOL} | hello))
    while frame := look(last):
        rest = rest + WATCH_S if last and state_of(last) == state_of(frame) else 0.0
        if rest % 1.0 < WATCH_S:  # when nothing happens, one a second
            await request.write(event(sender.pack(frame)))
        last = frame
        await asyncio.sleep(WATCH_S)


def state_of(frame: Frame) -> tuple:
    """Equal for two frames if nothing has happened between them."""
    return frame.engine.seen, frame.engine.planned, frame.server.seen, frame.server.open

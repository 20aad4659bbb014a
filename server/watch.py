"""`/watch`: stream everything that a screen shows to a remote screen, ten times a second.

A complete view takes a hundred kilobytes, so a frame contains only the changes since the watcher's last
frame (`watch_frames.py`). When nothing happens, one frame is sent per second. A watcher that reads too
slowly is disconnected. Texts are sent only to watchers that may read them (`auth.may_read`). Watching
has no effect on the engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from engine import watch_frames
from engine.watch_frames import Frame
from server.http import HTTPRequest
from server.protocol_adapter import event

MAX_WATCHERS = 16  # concurrent watchers
WATCH_S = 0.1  # seconds between frames
WATCH_TIMEOUT_S = 5.0  # a watcher whose send buffer is full this long is disconnected


async def watch(
    request: HTTPRequest, hello: dict[str, Any], look: Callable[[Frame | None], Frame | None]
) -> None:
    """Send frames until `look` returns None. A watcher that hangs up cancels this coroutine.

    `hello`: the first event. Its `texts` says whether this watcher may read texts.
    `look`: takes the previous frame and returns the next one.
    """
    sender = watch_frames.Sender(hello["texts"])
    last = None
    rest = 0.0  # seconds without a change
    request.begin_events()
    request.connection.patience = WATCH_TIMEOUT_S
    await request.write(b"event: hello\n" + event({"protocol": watch_frames.PROTOCOL} | hello))
    while frame := look(last):
        rest = rest + WATCH_S if last and state_of(last) == state_of(frame) else 0.0
        if rest % 1.0 < WATCH_S:  # once a second while nothing changes
            await request.write(event(sender.pack(frame)))
        last = frame
        await asyncio.sleep(WATCH_S)


def state_of(frame: Frame) -> tuple:
    """Return a value that is equal for two frames if nothing happened between them."""
    return frame.engine.seen, frame.engine.planned, frame.server.seen, frame.server.open

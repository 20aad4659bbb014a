"""`/watch`: everything that a screen shows, ten times a second, for a screen in another process or on
another machine.

The problem. Watchers must cost the askers next to nothing. A whole view is a hundred kilobytes, a
watcher may stop reading, and a view holds every client's text.

The way out. A frame has only the changes since the watcher's last frame (`wire.py`). Without changes
there is one frame a second. A watcher that reads too slowly is dropped. Texts are for watchers who
may read texts (`http.may_read`), figures for all the others.

The invariant: watching changes nothing. There are at most `MAX_WATCHERS`, and each holds one frame at a
time.

Where next: `screen/remote_client.py`, the other end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from server import watch_frames
from server.adapter import event
from server.http import HTTPRequest
from server.watch_frames import Frame

MAX_WATCHERS = 16  # so many at most
WATCH_S = 0.1  # each gets a frame so often
WATCH_TIMEOUT_S = 5.0  # a watcher that has not taken a frame for so long is dropped


async def watch(
    request: HTTPRequest, hello: dict[str, Any], look: Callable[[Frame | None], Frame | None]
) -> None:
    """Until the server ends. A watcher that leaves cancels this.

    `hello`: what is told at first; its `texts` says whether this watcher may read texts.
    `look`: a frame of what has happened since the one before. None ends the stream.
    """
    sender = watch_frames.Sender(hello["texts"])
    last = None
    rest = 0.0  # for so many seconds nothing has happened
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
    """The same for two frames, if nothing has happened between them."""
    return frame.engine.seen, frame.engine.planned, frame.door.seen, frame.door.open

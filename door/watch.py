"""`/watch`: everything that a screen shows, ten times a second, for a screen in another process or on
another machine.

The problem. Watchers must cost the askers next to nothing. A whole view is a hundred kilobytes, a
watcher may stop reading, and a view holds every client's text.

The way out. A frame has only the changes since the watcher's last frame (`wire.py`). Without changes
there is one frame a second. A watcher that reads too slowly is dropped. Texts are for watchers who
may read texts (`http.may_read`), figures for all the others.

The invariant: watching changes nothing. There are at most `WATCHERS`, and each holds one frame at a
time.

Where next: `screen/remote.py`, the other end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NamedTuple

from door import wire
from door.http import Visit
from door.journal import DoorView
from door.protocol import event
from parts.api.engine import AnyEngine
from parts.api.loop import Loop

WATCHERS = 16  # so many at most
WATCH_S = 0.1  # each gets a frame so often
WATCH_STUCK_S = 5.0  # a watcher that has not taken a frame for so long is dropped


class Watched(NamedTuple):
    """An engine and its loop, and the door."""

    name: str  # the model's
    engine: AnyEngine
    loop: Loop
    texts: bool  # may this watcher read texts?
    look: Callable[[int], DoorView]  # at the door, since so many calls had ended
    is_over: Callable[[], bool]  # does the server end?


async def watch(watched: Watched, visit: Visit) -> None:
    """Until the server ends. A watcher that leaves cancels this."""
    engine = watched.engine
    loop = watched.loop
    sender = wire.Sender(watched.texts)
    seen = None  # the engine at the last look
    met = None  # the door at the last look
    rest = 0.0  # for so many seconds nothing has happened
    visit.begin_events()
    visit.connection.patience = WATCH_STUCK_S
    await visit.write(b"event: hello\n" + event(hello_of(watched)))
    while not watched.is_over():
        before = seen
        seen = engine.snapshot(seen)
        last = met
        met = watched.look(met.seen if met else 0)
        still = before and (before.seen, before.planned) == (seen.seen, seen.planned)
        if still and (last.seen, last.open) == (met.seen, met.open):
            rest += WATCH_S
        else:
            rest = 0.0
        if rest % 1.0 < WATCH_S:  # when nothing happens, one a second
            await visit.write(
                event(sender.pack(wire.Frame(loop.paused, loop.stepping, loop.slow, seen, met)))
            )
        await asyncio.sleep(WATCH_S)


def hello_of(watched: Watched) -> dict:
    return {
        "protocol": wire.PROTOCOL,
        "model": watched.name,
        "summary": watched.engine.summary,
        "texts": watched.texts,
    }

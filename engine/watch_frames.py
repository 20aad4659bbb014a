"""Frames for watchers as JSON: `Sender` packs a frame, `Receiver` rebuilds the same frozen views.

A view is packed as a list of its fields without their names, which would triple the size of a frame. The
types of the fields define how to rebuild it. Frames are incremental: they contain the events since the last
frame, and only the new text of open requests. The invariant: `Receiver.unpack(Sender.pack(frame))` equals
the frame, up to JSON's types. `PROTOCOL` detects a peer of a different version.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import fields, is_dataclass, replace
from functools import cache
from typing import Any, NamedTuple, get_args, get_origin, get_type_hints

from base.validation import shown
from engine.server_snapshot import ServerView
from engine.snapshot import RequestView, Snapshot

STEPS = 4096  # maximum number of unread steps that are kept
ENDS = 500  # maximum number of unread ended requests that are kept
LARGEST = 2**64  # largest number in a frame
SLOTS = 4096  # the command line's limit


class Frame(NamedTuple):
    """The state of the loop, the engine and the server, as a watcher receives it."""

    paused: bool
    stepping: int
    slow: float
    engine: Snapshot
    server: ServerView


def packed(value: Any) -> Any:
    """Convert a value for JSON: a view to the list of its fields, any other unsupported type to a string."""
    names = names_of(type(value))
    return [getattr(value, name) for name in names] if names else str(value)


ENCODE = json.JSONEncoder(separators=(",", ":"), default=packed).encode


@cache
def names_of(kind: type) -> tuple[str, ...]:
    """Return the field names of a dataclass or NamedTuple, in order; empty for other types."""
    if is_dataclass(kind):
        return tuple(field.name for field in fields(kind))
    return getattr(kind, "_fields", ())


@cache
def hints_of(kind: type) -> tuple[Any, ...]:
    """Return the types of the fields in `names_of`."""
    names = names_of(kind)
    hints = get_type_hints(kind) if names else {}
    return tuple(hints[name] for name in names)


def unpack(kind: Any, data: Any) -> Any:
    """Rebuild a view of this type. Raise ValueError if the data do not match."""
    if (hints_of(kind) or get_origin(kind) is tuple) and not isinstance(data, list):
        raise ValueError(f"a frame has {shown(data)} instead of a list")
    if hints := hints_of(kind):
        return kind(*(unpack(hint, one) for hint, one in zip(hints, data, strict=True)))
    if get_origin(kind) is tuple:
        hints = get_args(kind)
        if hints[1:] == (...,):
            return tuple(unpack(hints[0], one) for one in data)
        return tuple(unpack(hint, one) for hint, one in zip(hints, data, strict=True))
    return plain(kind, data)


def plain(kind: Any, data: Any) -> Any:
    """Return the data if it is a plain value (number, bool, string or None) of this type; `Any` allows
    anything. Raise ValueError otherwise, or if a number is too large."""
    if kind is Any:
        return data
    kinds = get_args(kind) or (kind,)  # the types of a union, or a single type
    if float in kinds:  # JSON may write 1.0 as 1
        kinds += (int,)
    if (isinstance(data, bool) and bool not in kinds) or not isinstance(data, kinds):
        raise ValueError(f"a frame has {shown(data)} instead of {kind}")
    if isinstance(data, (int, float)) and not abs(data) <= LARGEST:
        raise ValueError(f"a frame has the number {shown(data)}")
    return data


def _shape(kind: Any) -> Any:
    """Return all names and types inside a view, recursively."""
    inner = [_shape(hint) for hint in (hints_of(kind) or get_args(kind))]
    return (
        str(getattr(kind, "__name__", kind)),
        names_of(kind) if is_dataclass(kind) else (),
        inner,
    )


PROTOCOL = zlib.crc32(repr(_shape(Frame)).encode())  # changes with the fields


class Sender:
    """The server's end of a connection to one watcher. It remembers how much of each open request's text
    has been sent. `texts`: False leaves out texts and clients."""

    def __init__(self, texts: bool):
        self._texts = texts
        self._sent: dict[int, tuple[int, int]] = {}  # by request: characters and tokens sent

    def pack(self, frame: Frame) -> str:
        engine = frame.engine
        server = frame.server
        if not self._texts:
            opened = tuple(map(without_texts, server.open))
            server = replace(server, open=opened, ended=tuple(map(without_texts, server.ended)))
            engine = replace(engine, faults=("",) * len(engine.faults))
        before = self._sent
        self._sent = {r.id: (len(r.text), len(r.lengths)) for r in engine.requests}
        requests = tuple(self._cut(request, before) for request in engine.requests)
        ended = tuple(self._cut(request, before) for request in engine.ended)
        engine = replace(engine, requests=requests, ended=ended)
        return ENCODE(frame._replace(engine=engine, server=server))

    def _cut(self, request: RequestView, sent: dict[int, tuple[int, int]]) -> RequestView:
        if not self._texts:  # lengths are removed, too, because they reveal much of a text
            return replace(
                request,
                prompt="",
                text="",
                lengths=(),
                candidates=(),
                client="",
                origin=None,
                error=request.error and "error",
            )
        # An origin may have any type, and JSON does not support all keys of a dict
        if isinstance(request.origin, dict):
            request = replace(request, origin=str(request.origin))
        if request.id not in sent:
            return request
        characters, tokens = sent[request.id]
        text = request.text[characters:]
        return replace(request, prompt="", text=text, lengths=request.lengths[tokens:])


def without_texts(record):
    return replace(record, client="", message="")


class Receiver:
    """The watcher's end of a connection. It joins the texts of successive frames."""

    def __init__(self) -> None:
        self._known: dict[int, RequestView] = {}

    def unpack(self, data: list) -> Frame:
        """Rebuild a frame, with the full text of each open request."""
        frame = unpack(Frame, data)
        engine = frame.engine
        check_slots(engine)
        requests = tuple(map(self._join, engine.requests))
        ended = tuple(map(self._join, engine.ended))
        self._known = {request.id: request for request in requests}
        return frame._replace(engine=replace(engine, requests=requests, ended=ended))

    def _join(self, request: RequestView) -> RequestView:
        if request.id not in self._known:
            return request
        known = self._known[request.id]
        text = known.text + request.text
        lengths = known.lengths + request.lengths
        return replace(request, prompt=known.prompt, text=text, lengths=lengths)


def check_slots(engine: Snapshot) -> None:
    """Raise ValueError for more slots than an engine can have, and for slots that do not exist."""
    count = engine.limits.slots
    if not 1 <= count <= SLOTS or [slot.slot for slot in engine.slots] != [*range(count)]:
        raise ValueError(f"a frame has {len(engine.slots)} slots, and {count:,} in its limits")
    named = {request.slot for request in (*engine.requests, *engine.ended)} - {None}
    for step in engine.steps:
        pairs = (*step.admitted, *step.prefill, *step.decode, *step.held, *step.drafts)
        named |= {slot for slot, *_ in pairs} | {*step.ghosts, *step.blocked}
    if named and not 0 <= min(named) <= max(named) < count:
        raise ValueError(f"a frame names slots from {min(named)} to {max(named)} of {count}")


# --- frames waiting to be drawn -----------------------------------------------------------------------


def join_frames(before: Frame | None, frame: Frame) -> Frame:
    """Join two frames into one with the later state and the events of both."""
    new = frame.engine
    if before is None:  # the first frame: earlier events do not count as missed
        new = replace(new, missed=0, missed_ends=0, faults=())
        return frame._replace(engine=new, server=replace(frame.server, missed=0))
    old = before.engine
    steps = (*old.steps, *new.steps)
    faults = (*old.faults, *new.faults)
    ended = (*old.ended, *new.ended)
    calls = (*before.server.ended, *frame.server.ended)
    requests = {request.id: request for request in (*old.requests, *new.requests)}
    for request in ended:
        requests.pop(request.id, None)
    # Bounded, because events would pile up while a stopped terminal draws nothing
    engine = replace(
        new,
        requests=tuple(requests.values()),
        ended=ended[-ENDS:],
        steps=steps[-STEPS:],
        faults=faults[-ENDS:],
        missed=old.missed + new.missed + len(steps[:-STEPS]),
        missed_ends=old.missed_ends + new.missed_ends + len(ended[:-ENDS]),
    )
    missed = before.server.missed + frame.server.missed + len(calls[:-ENDS])
    server = replace(frame.server, ended=calls[-ENDS:], missed=missed)
    return frame._replace(engine=engine, server=server)


def without_events(frame: Frame) -> Frame:
    """Return the same state without the events that led to it."""
    engine = replace(
        frame.engine, requests=(), ended=(), missed_ends=0, steps=(), missed=0, faults=()
    )
    return frame._replace(engine=engine, server=replace(frame.server, ended=(), missed=0))

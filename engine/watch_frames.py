"""Frames for watchers as JSON: `Sender` packs a frame, `Receiver` rebuilds the same frozen views.

A view is packed as a list of its fields without names: most of a frame are steps, and names would
triple its size. The types of the fields say how to rebuild it. Frames are differences: events since
the frame before, and of open requests only new text. The invariant:
`Receiver.unpack(Sender.pack(frame))` equals the frame, after JSON. `PROTOCOL` detects another
version.
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

STEPS = 4096  # unread steps that are kept, the newest
ENDS = 500  # unread ends of requests that are kept
LARGEST = 2**64  # largest number in a frame
SLOTS = 4096  # as in the command line


class Frame(NamedTuple):
    """Everything that a watcher receives at a time."""

    paused: bool
    stepping: int
    slow: float
    engine: Snapshot
    server: ServerView


def packed(value: Any) -> Any:
    """For types that JSON lacks: a view becomes the list of its fields, anything else a string."""
    names = names_of(type(value))
    return [getattr(value, name) for name in names] if names else str(value)


ENCODE = json.JSONEncoder(separators=(",", ":"), default=packed).encode


@cache
def names_of(kind: type) -> tuple[str, ...]:
    """The fields of a dataclass or a NamedTuple, in order; empty for other types."""
    if is_dataclass(kind):
        return tuple(field.name for field in fields(kind))
    return getattr(kind, "_fields", ())


@cache
def hints_of(kind: type) -> tuple[Any, ...]:
    """The types of these fields."""
    names = names_of(kind)
    hints = get_type_hints(kind) if names else {}
    return tuple(hints[name] for name in names)


def unpack(kind: Any, data: Any) -> Any:
    """Rebuild a view of this type. ValueError if the data do not fit."""
    if (hints_of(kind) or get_origin(kind) is tuple) and not isinstance(data, list):
        raise ValueError(f"a frame has {shown(data)} where a list belongs")
    if hints := hints_of(kind):
        return kind(*(unpack(hint, one) for hint, one in zip(hints, data, strict=True)))
    if get_origin(kind) is tuple:
        hints = get_args(kind)
        if hints[1:] == (...,):
            return tuple(unpack(hints[0], one) for one in data)
        return tuple(unpack(hint, one) for hint, one in zip(hints, data, strict=True))
    return plain(kind, data)


def plain(kind: Any, data: Any) -> Any:
    """A number, a string or None, as the type says. `Any` is anything."""
    if kind is Any:
        return data
    kinds = get_args(kind) or (kind,)  # of a union
    if float in kinds:  # JSON may write 1.0 as 1
        kinds += (int,)
    if (isinstance(data, bool) and bool not in kinds) or not isinstance(data, kinds):
        raise ValueError(f"a frame has {shown(data)} where {kind} belongs")
    if isinstance(data, (int, float)) and not abs(data) <= LARGEST:
        raise ValueError(f"a frame has the number {shown(data)}")
    return data


def _shape(kind: Any) -> Any:
    """All names and types inside a view."""
    inner = [_shape(hint) for hint in (hints_of(kind) or get_args(kind))]
    return (
        str(getattr(kind, "__name__", kind)),
        names_of(kind) if is_dataclass(kind) else (),
        inner,
    )


PROTOCOL = zlib.crc32(repr(_shape(Frame)).encode())  # another version has other fields


class Sender:
    """The server's end, for one watcher: remembers how much of each open request's text has been
    sent."""

    def __init__(self, texts: bool):
        self._texts = texts
        self._sent: dict[int, tuple[int, int]] = {}  # by request: characters of its text, tokens

    def pack(self, frame: Frame) -> str:
        engine = frame.engine
        server = frame.server
        if not self._texts:  # no texts
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
        if not self._texts:  # lengths of pieces would reveal much of a text
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
        # An origin may be anything, and JSON cannot write all keys
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
    """The watcher's end: joins the texts."""

    def __init__(self) -> None:
        self._known: dict[int, RequestView] = {}

    def unpack(self, data: list) -> Frame:
        """Rebuild a frame, with the whole text of each open request."""
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
    """Refuse more slots than an engine can have, and slots that do not exist."""
    count = engine.limits.slots
    if not 1 <= count <= SLOTS or [slot.slot for slot in engine.slots] != [*range(count)]:
        raise ValueError(f"a frame has {len(engine.slots)} slots, and {count:,} in its limits")
    named = {request.slot for request in (*engine.requests, *engine.ended)} - {None}
    for step in engine.steps:
        pairs = (*step.admitted, *step.prefill, *step.decode, *step.held, *step.drafts)
        named |= {slot for slot, *_ in pairs} | {*step.ghosts, *step.blocked}
    if named and not 0 <= min(named) <= max(named) < count:
        raise ValueError(f"a frame names slots from {min(named)} to {max(named)} of {count}")


# --- frames that wait to be drawn ---------------------------------------------------------------------


def join_frames(before: Frame | None, frame: Frame) -> Frame:
    """Two frames as one: the later state, with the events of both."""
    new = frame.engine
    if before is None:  # what ended long before is no news
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
    # A screen in a stopped terminal draws nothing, and all this would pile up
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
    """The same state without the events that led to it."""
    engine = replace(
        frame.engine, requests=(), ended=(), missed_ends=0, steps=(), missed=0, faults=()
    )
    return frame._replace(engine=engine, server=replace(frame.server, ended=(), missed=0))

"""The way of every request over HTTP: may the request come in, how its body is read, and the way
back.

The problem. A port of this machine is open to every program here, and to every page in the browser.
A request may be malformed, huge, or never end; an answer may never be read.

What this file keeps. Each wait has a limit, and so has each size. Nothing here knows models or
engines. `uvicorn` speaks HTTP (with the parser `httptools`), and `starlette` knows pages.
The limits that both leave open are set here.

Where next: `bridge.py`, for the requests that ask for an answer.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import re
import socket
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from operator import attrgetter
from typing import Any, NamedTuple, Protocol
from urllib.parse import urlsplit

import uvicorn
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from door.fields import Refusal
from door.journal import Call, Journal
from door.protocol import dump
from parts.checks import shown

CONNECTIONS = 512  # open at once; one more gets a 429
SWEEP_S = 0.5  # so often the door looks for clients that are silent or stuck
HEAD_S = 30.0  # a connection waits so long for its first request, or for the rest of one
IDLE_S = 75.0  # and so long for another one
HEAD = 2**16  # bytes of a request before its body
BODY = 4 * 2**20  # bytes; a prompt that fills a slot of 8,192 tokens has about 50,000
LONG = 2**14  # bytes of a body; a longer one may take seconds to turn into tokens
BODIES = 2**28  # bytes of all bodies together; another long one gets a 429
AHEAD = 2**14  # bytes read before their turn, about
REQUESTS = 128  # that come before their turn; `uvicorn` keeps two kilobytes for each
BODY_S = 30.0  # a body must have come by then
PART = 2**14  # bytes of an answer sent at a time
STUCK_S = 60.0  # a client whose line is full for so long has taken less than 48 KiB, and is ended
SLOW_S = 5.0  # one whose line is full for so long is slow
LAG = 2**25  # bytes waiting for all slow clients together; beyond, the client with most is ended
FAREWELL_S = 2.0  # a client that is still sending has so long to read why we do not listen
PING_S = 10.0  # in so long a silence, a comment says that we are still here
PROGRESS_S = 0.4  # in so long a silence before the first word, a comment tells the progress
PING = b": ping\n\n"
# So long after a client's last word the door tries whether the client still listens. Several probes
# may come before an answer, but some clients refuse more than five.
PROBES_S = (0.0, 0.01, 0.1, 0.5)
PROBE = b"HTTP/1.1 100 Continue\r\n\r\n"
LOOPBACK = ("localhost", "127.0.0.1", "[::1]")


class Options(NamedTuple):
    """How the door is opened."""

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    watch_key: str | None = None
    allow_hosts: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()  # more names of the model; a star is any

    @property
    def names(self) -> list[str]:
        """This server's names, as they stand in a URL."""
        own = f"[{self.host}]" if ":" in self.host else self.host
        return [name.lower() for name in (*LOOPBACK, own, *self.allow_hosts)]


class Told(Protocol):
    """The part of an answer that this file needs."""

    lag: int  # bytes waiting for a client that reads too slowly

    def progress(self) -> bytes: ...  # for a stream that waits for its first word


class Gone(Exception):
    """The client has hung up."""


class Visit:
    """One request at the door, and the way back to its client."""

    def __init__(self, request: Request, number: int, send: Callable, journal: Journal):
        self.request = request
        self.number = number
        self.status: int | None = None  # of the answer, once it has begun
        self.is_news = False  # a look at /health is none
        self.size = 0  # bytes of the body, as long as the body is kept
        self.connection: Connection = request.state.connection()
        self._is_old = request.scope["http_version"] == "1.0"
        self.send_head = send  # for the head of the answer
        self._send = send  # for the body of the answer
        self._journal = journal
        self.left = 0  # bytes of the answer still to be sent
        # While the answer is a stream: when the stream last said something
        self._wrote: float | None = None
        # A refusal's body: a protocol may have a form of its own
        self.error: Callable[[Refusal], dict] = attrgetter("body")

    @property
    def call(self) -> Call:
        return self._journal.open[self.number]

    def note(self, **changes) -> None:
        self._journal.note(self.number, **changes)

    async def send(self, message: dict) -> None:
        """Pass on a part of the answer."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.note(status=self.status)
            await self.send_head(message)
        else:
            await self._send_body(message)

    async def _send_body(self, message: dict) -> None:
        """In parts: each part waits until the client has taken most of the parts before. So a large
        answer is in memory once, and not once more in the transport."""
        left = memoryview(message.get("body", b""))
        while len(left) > PART:
            if self.connection.lost.is_set():
                raise Gone
            await self._send(message | {"body": left[:PART], "more_body": True})
            left = left[PART:]
            self.left = len(left)
        await self._send(message | {"body": left})

    async def begin_events(self, id: str = "") -> None:
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),  # so that no proxy holds the stream back
        ]
        if id:
            headers.append((b"x-request-id", id.encode()))
        # Uvicorn would write in chunks, and HTTP/1.0 knows none. After a HEAD uvicorn writes no body
        if self._is_old:
            self.request.scope["method"] = "HEAD"
        await self.send({"type": "http.response.start", "status": 200, "headers": headers})
        self._wrote = time.monotonic()

    async def write(self, body: bytes, more: bool = True) -> None:
        """A part of a stream, or the end. `write` waits while the client takes nothing."""
        if self._is_old:
            self.connection.transport.write(body)
        await self._send({"type": "http.response.body", "body": body, "more_body": more})
        self._wrote = time.monotonic() if more else None

    def push(self, body: bytes) -> None:
        """A part of a stream, at once: while the connection is not blocked, `write` has nothing to
        wait for.

        So the coroutine runs to the end here. Waking a task for each token would cost more than all
        else.
        """
        for _ in self.write(body).__await__():
            pass

    async def break_silence(self, now: float, answer: Told | None) -> None:
        """Write something into a silent stream: proxies close silent connections, and people
        wonder."""
        if self._wrote is None or self.connection.is_blocked:
            return
        silence = now - self._wrote
        if silence > PING_S:
            await self.write(PING)
        elif silence > PROGRESS_S and answer and (said := answer.progress()):
            await self.write(said)

    def probe(self) -> None:
        """Write something harmless. If the client is gone, the second write fails."""
        if self.status is None:
            self.connection.transport.write(PROBE)
        elif self._wrote is not None and not self.connection.is_blocked:
            self.push(PING)


# --- may it come in? ----------------------------------------------------------------------------


def for_pages(app: Callable, options: Options) -> CORSMiddleware:
    """Pages of this server's names may ask, and may read the answers."""
    names = "|".join(map(re.escape, options.names))
    return CORSMiddleware(
        app,
        allow_origin_regex=rf"https?://({names})(:\d+)?",
        allow_methods=("GET", "POST", "OPTIONS"),
        allow_headers=("*",),
        expose_headers=("X-Request-Id", "Retry-After"),
    )


def check_host(request: Request, options: Options) -> None:
    """Refuse a host that is none of this server's names. A page's owner may let the page's name point
    to this machine, and the browser then takes us for a part of the page."""
    host = request.headers.get("host", "")
    if without_port(host).lower() not in options.names:
        words = f"the Host {shown(host)} is none of this server's names; --allow-host adds one"
        raise Refusal(403, words, "host_not_allowed")


def guard(request: Request, options: Options, pages: CORSMiddleware, connections: int) -> None:
    """Refuse requests beyond the limit, and requests from pages that may not ask.

    A browser sends requests for any page that the user looks at. So a page must be of this machine,
    or come from the very address it asks. An address, because the owner of a page may let the
    page's name point to us: then a name proves nothing, unless there is a key.

    A page that asks sees only the answers to its own requests. A page that watches sees everybody's
    texts, so the page must be ours, or know a key: this machine may have other servers, and anybody
    may have written their pages.
    """
    if connections > CONNECTIONS:
        words = f"{CONNECTIONS} connections are open already"
        raise Refusal(429, words, "rate_limit_exceeded", Retry_After="1", Connection="close")
    origin = request.headers.get("origin", "")
    host = request.headers.get("host", "")
    is_ours = origin in ("", f"http://{host}", f"https://{host}")
    is_own = is_ours and (options.api_key is not None or is_address(without_port(host)))
    if origin and not is_own and not pages.is_allowed_origin(origin):
        words = f"pages from {shown(origin)} may not ask here; --allow-host adds one"
        raise Refusal(403, words, "origin_not_allowed")
    path = request.scope["path"]
    keys = [options.api_key]
    if path == "/watch":
        keys.append(options.watch_key)
    knows_key = any(has_key(request, key) for key in keys if key)
    is_free = not options.api_key or path in ("/", "/health")
    if not is_free and not knows_key:
        words = "no API key, or a wrong one; give it as 'Authorization: Bearer KEY'"
        raise Refusal(401, words, "invalid_api_key", WWW_Authenticate="Bearer")
    if path == "/watch" and not is_ours and not knows_key:
        words = f"pages from {shown(origin)} may watch with a key alone; --watch-key sets one"
        raise Refusal(403, words, "origin_not_allowed")


def has_key(request: Request, key: str) -> bool:
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer":
        given = request.headers.get("x-api-key", "")  # as Anthropic's clients send it
    # In constant time
    return hmac.compare_digest(given.strip().encode("latin-1"), key.encode())


def without_port(host: str) -> str:
    return re.sub(r":\d+$", "", host)


def is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True


def network_of(address: str) -> str:
    """Who asks, for the policy `fair`. One machine or one household counts once, with however many
    addresses: all addresses with 127 in front are this machine's, and a /64 of IPv6 is one line's."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return address
    found = getattr(found, "ipv4_mapped", None) or found
    if found.is_loopback:
        return "127.0.0.1"
    if found.version == 4:
        return str(found)
    return str(ipaddress.IPv6Network((int(found), 64), strict=False))


def may_read(request: Request, options: Options) -> bool:
    """May this watcher read everybody's prompts and answers?

    Where there is a key, only the watch key allows it. Else this machine itself may. (A proxy here
    that changes the host's name and adds no header looks like this machine.)
    """
    if options.api_key or options.watch_key:
        return options.watch_key is not None and has_key(request, options.watch_key)
    name = without_port(request.headers.get("host", ""))
    signs = ("forwarded", "x-forwarded", "x-real-ip", "via")
    has_proxy = any(header.startswith(signs) for header in request.headers)
    is_here = request.client is not None and ipaddress.ip_address(request.client.host).is_loopback
    return is_here and not has_proxy and name.lower() in LOOPBACK


# --- connections --------------------------------------------------------------------------------


class Line:
    """A connection's transport, for `uvicorn`. Closing is different here, and so is the end of
    reading.

    A system that closes a connection with unread bytes sends a reset. The client's system then
    throws away our last words, if the client has not read them yet. So we close our own direction
    first, and throw away all that the client still sends.

    `uvicorn` stops reading when a request comes before its turn, and would then not notice a client
    hanging up. So we read on for a while.
    """

    def __init__(self, transport: asyncio.Transport):
        self.is_unread = False  # is the client in the middle of a request?
        self._transport = transport
        self._has_left = False
        self._room: int | None = None  # so many bytes are still read before reading stops

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def is_closing(self) -> bool:
        return self._has_left or self._transport.is_closing()

    def write(self, data: bytes) -> None:
        if not self.is_closing():  # `asyncio` would log each write to a client that is gone
            self._transport.write(data)

    def close(self) -> None:
        if not self.is_unread:
            self._transport.close()
        elif not self.is_closing():
            self._has_left = True
            with suppress(OSError):  # the client has hung up
                self._transport.write_eof()
            self._transport.resume_reading()
            asyncio.get_running_loop().call_later(FAREWELL_S, self._transport.close)

    def pause_reading(self) -> None:
        self._room = AHEAD

    def resume_reading(self) -> None:
        self._room = None
        self._transport.resume_reading()

    def took(self, size: int) -> None:
        """So many bytes have been read."""
        if self._room is not None:
            self._room -= size
            if self._room < 0:
                self._transport.pause_reading()


class Connection(HttpToolsProtocol):
    """One client's connection: `uvicorn`'s, with an end to clients that are silent, stuck, or never
    finish a request.

    The overridden methods are `asyncio`'s (bytes come, writing pauses) and `httptools`' (a message
    begins, ends).
    """

    def __init__(self, app_state: dict, **how):
        # Weak, because a connection with a reference to itself would stay until the collector comes
        super().__init__(app_state=app_state | {"connection": weakref.ref(self)}, **how)
        self.patience = STUCK_S
        self._waiting = 0  # requests whose visits have not begun
        self._in_head = False
        self._head = 0  # bytes of an incomplete head, about
        self._blocked_since: float | None = None  # since then the client has taken too little
        self._silent_since: float | None = time.monotonic()  # since then a whole request is awaited
        self._visit: Visit | None = None  # the running one
        self._is_half_closed = False  # the client says nothing more
        self.lost = asyncio.Event()  # the client has hung up

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(Line(transport))

    def connection_lost(self, error: Exception | None) -> None:
        super().connection_lost(None)  # with an error, `uvicorn` would keep its timer for `IDLE_S`
        self.cycle = None  # requests before their turn refer to this connection
        self.pipeline.clear()
        self.lost.set()

    def eof_received(self) -> bool:
        """The client says nothing more. The client has closed the whole connection, or only its own
        half, and waits for answers (true). Our probes will tell.

        A client that speaks HTTP/1.0 counts as gone: nothing can be written before its answer.
        """
        has_asked = bool(self._visit or self._waiting) and not self.transport.is_unread
        self._is_half_closed = has_asked and self.scope["http_version"] == "1.1"
        if self._is_half_closed:
            for delay in PROBES_S:
                asyncio.get_running_loop().call_later(delay, self._probe)
        return self._is_half_closed

    def _probe(self) -> None:
        if self._visit and not self.transport.is_closing():
            self._visit.probe()

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if not self._visit and self._silent_since is None:
            self._silent_since = time.monotonic()
        is_body = self.transport.is_unread and not self._in_head
        if not is_body:
            # Java's client offers HTTP/2 in its first request. Behind such an offer `httptools`
            # reads no body.
            data = re.sub(rb"(?i)\nupgrade:", b"\nx-grade:", data)
        super().data_received(data)
        self.transport.took(len(data))
        if self._in_head and not is_body:
            self._head += len(data)
            if self._head > HEAD and not self.transport.is_closing():
                self.send_400_response("The request's head is too long.")

    def on_message_begin(self) -> None:
        self.transport.is_unread = True
        self._in_head = True
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Headers may stand behind a body, too. Those are not kept, because nothing bounds their
        number."""
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Add the host. Of several headers `Host` Starlette reads the first one."""
        self._waiting += 1
        if self._waiting > REQUESTS:
            raise ValueError("too many requests before their turn")  # `httptools` stops here
        # A whole address, as through a proxy: the address's host takes the header's place
        if not self.url.startswith(b"/"):
            self.headers.insert(0, (b"host", urlsplit(self.url).netloc))
        self.headers.append((b"host", b"localhost"))  # for HTTP/1.0, which needs no such header
        super().on_headers_complete()
        self._in_head = False
        self._head = 0

    def on_message_complete(self) -> None:
        self.transport.is_unread = False
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """An answer may have begun before the rest of the request turned out to be no HTTP. Then we
        say nothing more."""
        if self._visit or not self._in_head:
            self.transport.close()
        else:
            super().send_400_response(msg)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._blocked_since = time.monotonic()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._blocked_since = None

    @property
    def is_blocked(self) -> bool:
        """Has the client taken so little that more bytes would only pile up?"""
        return self._blocked_since is not None

    def begin_visit(self, visit: Visit) -> None:
        self._waiting -= 1
        self._visit = visit
        self._silent_since = None
        self.patience = STUCK_S

    def end_visit(self, visit: Visit) -> None:
        if self._visit is visit:
            self._visit = None
        if self._is_half_closed and not (self._visit or self._waiting):
            self.transport.close()

    @property
    def unsent(self) -> int:
        """Bytes that the system does not take, because the client reads too slowly."""
        return self.transport.get_write_buffer_size()

    def is_slow(self, now: float) -> bool:
        return self.is_blocked and now - self._blocked_since > SLOW_S

    def end_if_stuck(self, now: float) -> None:
        """`uvicorn` would wait for ever for a whole request, and for an answer to be taken."""
        if self.transport.is_closing() and self._silent_since is None:
            self._silent_since = now
        if self.is_blocked and now - self._blocked_since > self.patience:
            self.end_slow()
        elif self._silent_since is not None and now - self._silent_since > HEAD_S:
            self.transport.abort()

    def end_slow(self) -> None:
        """Without a last word: a last word would wait behind all bytes before."""
        if self._visit:
            self._visit.note(reason="too_slow", hung_up=True)
        self.transport.abort()


def server(app: Callable) -> uvicorn.Server:
    """`uvicorn` as the door needs it: HTTP and nothing else."""
    config = uvicorn.Config(
        app,
        http=Connection,
        interface="asgi3",
        ws="none",
        lifespan="off",
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=int(IDLE_S),
        timeout_graceful_shutdown=2,
        log_config=None,
        log_level="critical",
        access_log=False,
    )
    return uvicorn.Server(config)


async def sweep(
    connections: set[Connection], visits: set[Visit], answers: Mapping[int, Told]
) -> None:
    """Now and then: ping silent streams, and end connections that never send a whole request, or
    never take an answer. `answers`: by the number of the visit."""
    while True:
        await asyncio.sleep(SWEEP_S)
        await look_after(list(connections), list(visits), answers)


async def look_after(
    connections: Sequence[Connection], visits: Sequence[Visit], answers: Mapping[int, Told]
) -> None:
    """Once. A function of its own, because a sleeping loop would keep the last visit in memory."""
    now = time.monotonic()
    for visit in visits:
        await visit.break_silence(now, answers.get(visit.number))
    for connection in connections:
        connection.end_if_stuck(now)
    lags = {each: each.unsent for each in connections if each.is_slow(now)}
    for visit in visits:
        answer = answers.get(visit.number)
        if visit.connection in lags:
            lags[visit.connection] += visit.left + (answer.lag if answer else 0)
    while sum(lags.values()) > LAG:
        last = max(lags, key=lags.get)
        last.end_slow()
        del lags[last]


# --- sockets, bodies, answers -------------------------------------------------------------------


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens. OSError if the port is taken, or if the host is none of this
    machine's."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # So small that a client that does not read is noticed
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**17)
        listener.bind(address)
        listener.listen(128)
    except OSError:
        listener.close()
        raise
    return listener


async def read_body(visit: Visit, visits: Iterable[Visit]) -> bytes:
    """The whole body. `visits`: all running ones, with bodies of their own."""
    request = visit.request
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if (
        kind != "application/json"
        or request.headers.get("content-encoding", "identity") != "identity"
    ):
        words = f"the body is of type {shown(kind)}, or compressed"
        words += "; give plain JSON as 'Content-Type: application/json'"
        raise Refusal(415, words, "unsupported_media_type")
    check_size(int(request.headers.get("content-length", 0)))
    try:
        async with asyncio.timeout(BODY_S):
            parts = []
            async for part in request.stream():
                parts.append(part)
                visit.size += len(part)
                check_size(visit.size)
                if visit.size > LONG and sum(each.size for each in visits) > BODIES:
                    words = f"more than {BODIES:,} bytes of bodies are being read already"
                    raise Refusal(429, words, "rate_limit_exceeded", Retry_After="1")
            return b"".join(parts)
    except TimeoutError:
        words = f"the body has not come within {BODY_S:.0f} s"
        raise Refusal(408, words, "request_timeout", Connection="close") from None


def check_size(bytes: int) -> None:
    if bytes > BODY:
        raise Refusal(413, f"the body has more than {BODY:,} bytes", "request_too_large")


def reply(body: dict, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(dump(body), status, headers, media_type="application/json")


def refused(visit: Visit, refusal: Refusal) -> Response:
    visit.is_news = True
    visit.note(
        reason=refusal.code or str(refusal.status),
        message=refusal.message,
        status=visit.status or refusal.status,
    )
    return reply(visit.error(refusal), refusal.status, refusal.headers)

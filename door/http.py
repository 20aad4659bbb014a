"""What every request over HTTP goes through, whatever it wants: may it come in, its body, and the way back.

The problem. A port on this machine is open to every program on it, and to every page in its browser. What comes in may
be malformed, huge, or never end; what goes out may never be read.

What this file keeps. Each wait has a limit, and so has each size. Nothing here knows models or engines.

Where next: `bridge.py`, for the requests that ask for an answer.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

import uvicorn
from h11 import ERROR, SEND_BODY, LocalProtocolError
from starlette.requests import Request
from starlette.responses import Response
from uvicorn.protocols.http.h11_impl import H11Protocol

from door.journal import Call, Journal
from door.openai import Refusal, dump
from parts.checks import shown

CONNECTIONS = 512  # open at once; one more gets a 429
SWEEP_S = 0.5  # so often the door looks for clients that are silent or stuck
HEAD_S, IDLE_S = 30.0, 75.0  # a connection waits so long for its first request, and for another one
BODY = 4 * 2**20  # bytes; a prompt that fills a slot of 8,192 tokens has about 50,000
AHEAD = 2**16  # bytes of requests that come before their turn, about
BODY_S = 30.0  # a body must have come by then
STUCK_S = 60.0  # a client that takes nothing for so long is gone
FAREWELL_S = 2.0  # a client that is still sending has so long to read why we do not listen
PING_S, PING = 10.0, b": ping\n\n"  # in a long silence, a comment says so often that we are still here
LOOPBACK = ("localhost", "127.0.0.1", "::1")


class Options(NamedTuple):
    """How the door is opened."""

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    watch_key: str | None = None
    allow_hosts: tuple[str, ...] = ()


class Gone(Exception):
    """The client has hung up."""


class Visit:
    """One request at the door, and the way back to its client."""

    def __init__(self, request: Request, number: int, send: Any, journal: Journal):
        self.request, self.number, self.status = request, number, None
        self.is_news = False  # a look at /health is none
        self._send, self._journal = send, journal
        self._cycle = send.__self__  # uvicorn's own view of this request
        self._is_chunked = request.scope["http_version"] >= "1.1"
        self.patience, self._waits_since = STUCK_S, None  # `_waits_since`: a write has begun then
        self._wrote: float | None = None  # while this is a stream: when it last said something

    @property
    def call(self) -> Call:
        return self._journal.open[self.number]

    def note(self, **changes) -> None:
        self._journal.note(self.number, **changes)

    async def send(self, message: dict) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.note(status=self.status)
            if self.status != 403:
                message = message | {"headers": [*message["headers"], *for_pages(self.request)]}
        self._waits_since = time.monotonic()
        await self._send(message)
        self._waits_since = None

    async def begin_events(self, id: str = "") -> None:
        headers = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
        headers |= {"X-Accel-Buffering": "no"} | ({"X-Request-Id": id} if id else {})  # so that no proxy holds it back
        await self.send({"type": "http.response.start", "status": 200, "headers": encoded(headers)})
        self._wrote = time.monotonic()

    async def write(self, body: bytes, more: bool = True) -> None:
        """It waits while the client takes nothing. A timer for each token would cost more than all else here."""
        if more and self.flows:
            self.push(body)
            return
        await self.send({"type": "http.response.body", "body": body, "more_body": more})
        self._wrote = time.monotonic() if more else None

    @property
    def flows(self) -> bool:
        """Does the client keep up, so that what is pushed is on its way at once?"""
        flow = self._cycle.flow
        return self._waits_since is None and not (flow.write_paused or self._cycle.disconnected)

    def push(self, body: bytes) -> None:
        """A part of a stream. `h11` would spend more on its bookkeeping than the system on sending."""
        self._wrote = time.monotonic()
        if body:  # a chunk without bytes would be the last one
            self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(body), body) if self._is_chunked else body)

    def break_silence(self, now: float) -> None:
        """Proxies close a connection on which nothing moves."""
        if self._wrote is not None and now - self._wrote > PING_S and self.flows:
            self.push(PING)

    def is_stuck(self, now: float) -> bool:
        """Has the client taken nothing for longer than we are patient?"""
        return self._waits_since is not None and now - self._waits_since > self.patience


# --- may it come in? ---------------------------------------------------------------------------------------------


def take_target(scope: dict) -> None:
    """`GET http://127.0.0.1:8000/health`, as through a proxy: its host takes the place of the header's."""
    scheme, _, rest = scope["raw_path"].decode().partition("://")
    host, slash, path = rest.partition("/")
    if scheme.lower() in ("http", "https") and host:
        scope["path"] = unquote(slash + path) or "/"
        scope["headers"] = [header for header in scope["headers"] if header[0] != b"host"] + [(b"host", host.encode())]


def guard(request: Request, options: Options, local: bool, connections: int) -> None:
    """Refuse what is too much, and what does not belong here. `local`: the door is open to this machine alone.

    A browser sends requests for any page that its user looks at. So a page must be of this machine. On the loopback
    the host's name must be ours, too, since a page's own name may be given the address 127.0.0.1.
    """
    if connections > CONNECTIONS:
        words = f"{CONNECTIONS} connections are open already"
        raise Refusal(429, words, "rate_limit_exceeded", Retry_After="1", Connection="close")
    names = {name.lower() for name in (*LOOPBACK, options.host, *options.allow_hosts)}
    host, origin, path = request.headers.get("host", ""), request.headers.get("origin", ""), request.scope["path"]
    if local and host and hostname(f"//{host}") not in names:
        words = f"the Host {shown(host)} is none of this server's names; --allow-host adds one"
        raise Refusal(403, words, "host_not_allowed")
    if origin and hostname(origin) not in names and origin.partition("//")[2] != host:
        words = f"pages from {shown(origin)} may not ask here; --allow-host adds one"
        raise Refusal(403, words, "origin_not_allowed")
    keys = [options.api_key, options.watch_key if path == "/watch" else None]
    free = not keys[0] or request.method == "OPTIONS" or path == "/health"
    if not free and not any(has_key(request, key) for key in keys if key):
        words = "no API key, or a wrong one; give it as 'Authorization: Bearer KEY'"
        raise Refusal(401, words, "invalid_api_key", WWW_Authenticate="Bearer")


def may_read(request: Request, options: Options) -> bool:
    """May this watcher read everybody's prompts and answers? With the watch key, or from this machine itself."""
    if options.watch_key and has_key(request, options.watch_key):
        return True
    forwarded = any(name in request.headers for name in ("forwarded", "x-forwarded-for", "x-real-ip", "via"))
    local = hostname(f"//{request.headers.get('host', 'localhost')}") in LOOPBACK  # else it came through a proxy
    return local and not forwarded and ipaddress.ip_address(request.client.host).is_loopback


# --- connections ---------------------------------------------------------------------------------------------------


class Farewell:
    """A transport that takes leave of a client which is still sending.

    A system that closes a connection with bytes unread sends a reset, and a reset throws away what the client has not
    read yet: our last words. So we say that nothing more comes from us, and throw away what comes from the client.
    """

    def __init__(self, transport: asyncio.Transport, is_unread: Callable[[], bool]):
        self._transport, self._is_unread, self._has_left = transport, is_unread, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def is_closing(self) -> bool:
        return self._has_left or self._transport.is_closing()

    def write(self, data: bytes) -> None:
        if not self._has_left:
            self._transport.write(data)

    def close(self) -> None:
        if not self._is_unread():
            self._transport.close()
        elif not self.is_closing():
            self._has_left = True
            with suppress(OSError):  # the client has hung up
                self._transport.write_eof()
            self._transport.resume_reading()
            asyncio.get_running_loop().call_later(FAREWELL_S, self._transport.close)


class Protocol(H11Protocol):
    """uvicorn's own, but for what it does about bytes that are no HTTP, and for its farewell."""

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(Farewell(transport, self._is_unread))

    def _is_unread(self) -> bool:
        """Is there more of the client's request, or behind it, than was read?"""
        return self.conn.their_state in (SEND_BODY, ERROR) or bool(self.conn.trailing_data[0])

    def data_received(self, data: bytes) -> None:
        if not self.transport.is_closing():
            super().data_received(data)

    def send_400_response(self, message: str) -> None:
        """An answer may have gone out before its request's body was complete. To what comes behind it, we say nothing.

        `uvicorn` would try to answer, and print a traceback.
        """
        with suppress(LocalProtocolError):
            super().send_400_response(message)
        self.transport.close()


def server(app: Callable) -> uvicorn.Server:
    """It speaks HTTP, in the thread that runs it, and leaves the rest to the door."""
    manners = {"timeout_keep_alive": int(IDLE_S), "timeout_graceful_shutdown": 2}
    silent = {"log_config": None, "log_level": "critical", "access_log": False, "server_header": False}
    plain = {"interface": "asgi3", "http": Protocol, "ws": "none", "lifespan": "off", "proxy_headers": False}
    return uvicorn.Server(uvicorn.Config(app, **manners, **silent, **plain))


async def sweep(connections: set[H11Protocol], visits: set[Visit]) -> None:
    """Now and then: pings, and an end to connections that never send a whole request, or never take an answer.

    `uvicorn` would wait for them for ever. Nor does it read on behind a request that comes before its turn, and so it
    would not notice that the client hangs up.
    """
    silent: dict[H11Protocol, float] = {}
    while True:
        await asyncio.sleep(SWEEP_S)
        now, found = time.monotonic(), list(connections)
        for visit in visits:
            visit.break_silence(now)
        stuck = {id(visit.request.scope) for visit in visits if visit.is_stuck(now)}
        calm = [c for c in found if not c.cycle or c.cycle.response_complete]
        idle = [c for c in calm if not c.timeout_keep_alive_task or c.transport.is_closing()]
        silent = {connection: silent.get(connection, now) for connection in idle}
        for connection in found:
            if connection.flow.read_paused and len(connection.conn.trailing_data[0]) < AHEAD:
                connection.flow.resume_reading()
            if id(connection.scope) in stuck or now - silent.get(connection, now) > HEAD_S:
                connection.transport.abort()


# --- sockets, bodies, headers ------------------------------------------------------------------------------------


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens. OSError if the port is taken, or if the host is none of this machine's."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**17)  # a client that does not read is noticed
        listener.bind(address)
        listener.listen(128)
    except OSError:
        listener.close()
        raise
    return listener


async def read_body(request: Request) -> bytes:
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind != "application/json" or request.headers.get("content-encoding", "identity") != "identity":
        words = f"the body is of type {shown(kind)}, or compressed; give plain JSON as 'Content-Type: application/json'"
        raise Refusal(415, words, "unsupported_media_type")
    body, too_large = bytearray(), Refusal(413, f"the body has more than {BODY:,} bytes", "request_too_large")
    length = request.headers.get("content-length", "0")
    if length.isdecimal() and int(length[:20]) > BODY:
        raise too_large
    try:
        async with asyncio.timeout(BODY_S):
            async for chunk in request.stream():
                body += chunk
                if len(body) > BODY:
                    raise too_large
    except TimeoutError:
        words = f"the body has not come within {BODY_S:.0f} s"
        raise Refusal(408, words, "request_timeout", Connection="close") from None
    return bytes(body)


async def hang_up(request: Request) -> None:
    """Until the client hangs up."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def reply(body: dict, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(dump(body), status, headers, media_type="application/json")


def refused(visit: Visit, refusal: Refusal) -> Response:
    visit.is_news = True
    reason = refusal.code or str(refusal.status)
    visit.note(reason=reason, message=refusal.message, status=visit.status or refusal.status)
    return reply(refusal.body, refusal.status, refusal.headers)


def for_pages(request: Request) -> list[tuple[bytes, bytes]]:
    """The headers that let a page read our answers. Whether it may ask at all, the door has decided before."""
    headers = {}
    if origin := request.headers.get("origin"):
        headers = {"Access-Control-Allow-Origin": origin, "Vary": "Origin"}
        headers["Access-Control-Expose-Headers"] = "X-Request-Id, Retry-After"
        if request.method == "OPTIONS":
            wanted = request.headers.get("access-control-request-headers", "authorization, content-type")
            headers |= {"Access-Control-Allow-Methods": "GET, POST, OPTIONS", "Access-Control-Allow-Headers": wanted}
            headers["Access-Control-Max-Age"] = "600"
    return encoded(headers)


def encoded(headers: dict[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.lower().encode(), value.encode("latin-1")) for name, value in headers.items()]


def has_key(request: Request, key: str) -> bool:
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    right = hmac.compare_digest(given.strip().encode("latin-1"), key.encode())  # in constant time
    return right and scheme.lower() == "bearer"


def hostname(url: str) -> str:
    try:
        return (urlsplit(url).hostname or "").rstrip(".")
    except ValueError:
        return ""

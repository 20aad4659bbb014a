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
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

from starlette.requests import Request
from starlette.responses import Response

from parts.checks import shown
from parts.journal import Call, Journal
from parts.openai import Refusal, dump

BODY = 4 * 2**20  # bytes; a prompt that fills a slot of 8,192 tokens has about 50,000
BODY_S = 30.0  # a body must have come by then
STUCK_S = 60.0  # a client that takes nothing for so long is gone
LOOPBACK = ("localhost", "127.0.0.1", "::1")


class Options(NamedTuple):
    """How the door is opened."""

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str = ""
    watch_key: str = ""
    allow_hosts: tuple[str, ...] = ()


class Gone(Exception):
    """The client has hung up."""


class Visit:
    """One request at the door, and the way back to its client."""

    def __init__(self, request: Request, number: int, send: Any, journal: Journal):
        self.request, self.number, self.status, self.is_news = request, number, None, True
        self._send, self._journal = send, journal
        self._cycle = send.__self__  # uvicorn's own view of this request
        self._is_chunked = request.scope["http_version"] == "1.1"
        self.patience, self._waits_since = STUCK_S, None  # `_waits_since`: a write has begun then

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
        await self._send(message)

    async def begin_events(self, id: str = "") -> None:
        headers = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
        headers |= {"X-Accel-Buffering": "no"} | ({"X-Request-Id": id} if id else {})  # so that no proxy holds it back
        await self.send({"type": "http.response.start", "status": 200, "headers": encoded(headers)})

    async def write(self, body: bytes, more: bool = True) -> None:
        """It waits while the client takes nothing. A timer for each token would cost more than all else here."""
        if more and self.flows:
            self.push(body)
            return
        self._waits_since = time.monotonic()
        await self._send({"type": "http.response.body", "body": body, "more_body": more})
        self._waits_since = None

    @property
    def flows(self) -> bool:
        """Does the client keep up, so that what is pushed is on its way at once?"""
        flow = self._cycle.flow
        return self._is_chunked and self._waits_since is None and not (flow.write_paused or self._cycle.disconnected)

    def push(self, body: bytes) -> None:
        """A chunk in the middle of a stream. `h11` would spend more on its bookkeeping than the system on sending."""
        self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(body), body))

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


def guard(request: Request, options: Options, local: bool) -> None:
    """Refuse what does not belong here. `local`: the door is open to this machine alone.

    A browser sends requests for any page that its user looks at. So a page must be of this machine. On the loopback
    the host's name must be ours, too, since a page's own name may be given the address 127.0.0.1.
    """
    names = {name.lower() for name in (*LOOPBACK, options.host, *options.allow_hosts)}
    host, origin, path = request.headers.get("host", ""), request.headers.get("origin", ""), request.scope["path"]
    if local and host and hostname(f"//{host}") not in names:
        words = f"the Host {shown(host)} is none of this server's names; --allow-host adds one"
        raise Refusal(403, words, "host_not_allowed")
    if origin and hostname(origin) not in names and urlsplit(origin).netloc != host:
        words = f"pages from {shown(origin)} may not ask here; --allow-host adds one"
        raise Refusal(403, words, "origin_not_allowed")
    keys = [options.api_key, options.watch_key if path == "/watch" else ""]
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


# --- sockets, bodies, headers ------------------------------------------------------------------------------------


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens. OSError if the port is taken, or if the host is none of this machine's."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(
            socket.SOL_SOCKET, socket.SO_SNDBUF, 2**17
        )  # so that a client that does not read is noticed
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

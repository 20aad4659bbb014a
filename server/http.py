"""HTTP/1.1 on asyncio: connections, requests, bodies, responses, limits.

`h11` parses and writes the grammar of HTTP; sockets, timeouts and limits are here. Nothing here
knows models or engines. Next: `auth.py`, which requests are refused; `stream.py`, what is
written.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import math
import re
import resource
import socket
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from contextlib import suppress
from email.utils import formatdate
from http import HTTPStatus
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import parse_qsl, unquote, urlsplit

import h11

from base.error_reports import LOG, show_fault
from base.validation import shown
from engine.server_snapshot import RequestRecord
from server.access_log import RequestLog
from server.body_reader import APIError
from server.protocol_adapter import dump

if TYPE_CHECKING:
    from server.model_pool import Ticket
    from server.stream import AnswerWriter

MAX_CONNECTIONS = 512  # connections with a request in work; one more gets a 429
# Further connections; beyond, the one that has been idle longest is ended
MAX_IDLE_CONNECTIONS = 64
OTHER_FILES = 128  # open files that are no connections: weights, logs, pipes
ACCEPT_LOG_S = 60.0  # seconds between two log lines about connections that could not be accepted
SWEEP_S = 0.5  # seconds between two looks for silent streams and slow clients
HEAD_TIMEOUT_S = 30.0  # to send the head of the first request
IDLE_TIMEOUT_S = 75.0  # to send the next request
MAX_HEAD_BYTES = 2**16  # bytes of a request before its body
MAX_BODY_BYTES = 4 * 2**20  # bytes; a prompt that fills a slot of 8,192 tokens has about 50,000
LONG_BODY_BYTES = 2**14  # bytes; a longer body may take seconds to tokenize
MAX_BODIES_BYTES = 2**28  # bytes of all bodies together; another long one gets a 429
READ_AHEAD_BYTES = 2**14  # bytes read before their turn, about
BODY_TIMEOUT_S = 30.0  # to send the body
CHUNK_BYTES = 2**14  # bytes of a response written at a time
WRITE_TIMEOUT_S = 60.0  # a send buffer full this long (less than 48 KiB taken) ends the connection
SLOW_AFTER_S = 5.0  # a send buffer full this long marks a client as slow
# Bytes waiting for all slow clients; beyond, the client with most is ended
MAX_UNSENT_BYTES = 2**25
LINGER_S = 2.0  # a client that is still sending gets this long to read why it was refused
PING_S = 10.0  # seconds of silence until a stream gets a comment
PROGRESS_S = 0.4  # seconds of silence until it gets the progress of its prompt
PING = b": ping\n\n"
# No connection can be accepted
OUT_OF_FILES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
LOOPBACK = ("localhost", "127.0.0.1", "[::1]")


class Options(NamedTuple):
    """The server's options."""

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    watch_key: str | None = None
    allow_hosts: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()  # more names of the model; a star is any
    # Addresses of proxies whose X-Forwarded-For counts (`forwarded_for.py`)
    trusted_proxies: tuple[ipaddress.IPv4Network | ipaddress.IPv6Network, ...] = ()
    max_tokens: int | None = None  # of answers to requests that name no limit; None: the slot's end


class ClientGone(Exception):
    """The client has hung up."""


def bad_http(words: str) -> APIError:
    return APIError(400, f"invalid HTTP: {words}", "invalid_http")


class Reply(NamedTuple):
    """A complete response."""

    body: bytes
    status: int = 200
    headers: Mapping[str, str] = {}
    type: str = "application/json"

    @property
    def head(self) -> dict[str, str]:
        own = {"Content-Type": self.type, "Content-Length": str(len(self.body))}
        return own | dict(self.headers)


class HTTPRequest:
    """One request, and the way back to its client."""

    def __init__(self, connection: Connection, head: h11.Request, request_log: RequestLog):
        self.connection = connection
        self.method = head.method.decode()
        # By lower-case name
        self.headers = {name.decode(): value.decode("latin-1") for name, value in head.headers}
        self.headers.setdefault("host", "localhost")  # HTTP/1.0 needs no such header
        # Two lengths can smuggle one request inside another (RFC 9112, 6.3)
        if {"content-length", "transfer-encoding"} <= self.headers.keys():
            raise bad_http("it has both Content-Length and Transfer-Encoding")
        target = head.target.decode()
        if not target.startswith("/"):
            target = self._read_address(target)
        # The name by which the client knows this server
        self.host = re.sub(r":\d+$", "", self.headers["host"]).lower()
        path, _, query = target.partition("?")
        self.path = unquote(path)
        self.query = dict(parse_qsl(query))
        self.status: int | None = None  # of the response, once it has begun
        self.is_logged = False  # not so for /health
        self.size = 0  # bytes of the body, while it is in memory
        self.left = 0  # bytes of the response not written yet
        # While the engine works for this request, or a model is loaded for it
        self.answer: AnswerWriter | Ticket | None = None
        # CORS headers, for a page that may read the response
        self.shared: Mapping[str, str] = {}
        # The body of an error, in the protocol's form
        self.error: Callable[[APIError], dict] = attrgetter("body")
        # When the stream last wrote; None if the response is no stream
        self._wrote: float | None = None
        self._request_log = request_log
        self._number = request_log.open_record(
            connection.client, f"{self.method} {self.path}"[:200]
        )

    def _read_address(self, target: str) -> str:
        """An absolute address, as sent to a proxy: its host replaces the Host header."""
        with suppress(ValueError):
            address = urlsplit(target)
            if address.hostname and address.path:
                self.headers["host"] = address.netloc
                return address.path
        raise bad_http(f"{shown(target)} is no address")

    @property
    def record(self) -> RequestRecord:
        return self._request_log.open[self._number]

    def update_record(self, **changes) -> None:
        self._request_log.update(self._number, **changes)

    def note_hang_up(self) -> None:
        reason = self.record.reason or "hung_up"
        self.update_record(hung_up=True, status=self.status or 499, reason=reason)

    def end(self) -> RequestRecord:
        return self._request_log.close_record(self._number, is_kept=self.is_logged)

    async def reply(self, reply: Reply) -> None:
        """Send a complete response in chunks. Each chunk waits until the client has taken most of
        those before, so a large response is in memory once, and not again in the transport. So does
        the head: thousands of responses without a body would pile up."""
        await self.connection.drain()
        self._begin(reply.status, reply.head)
        left = memoryview(b"" if self.method == "HEAD" else reply.body)
        while left:
            await self.connection.drain()
            self.connection.send(h11.Data(left[:CHUNK_BYTES]))
            left = left[CHUNK_BYTES:]
            self.left = len(left)
        self.connection.send(h11.EndOfMessage())

    def _begin(self, status: int, headers: dict[str, str]) -> None:
        self.status = status
        self.update_record(status=status)
        self.connection.send_head(status, headers | self.shared)

    def begin_events(self, id: str = "") -> None:
        headers = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
        headers["X-Accel-Buffering"] = "no"  # so that nginx does not buffer the stream
        if id:
            headers["X-Request-Id"] = id
        self._begin(200, headers)
        self._wrote = time.monotonic()

    async def write(self, body: bytes) -> None:
        """Send a part of a stream; wait while the client takes nothing."""
        await self.connection.drain()
        self.push(body)

    def push(self, body: bytes) -> None:
        """Send a part of a stream at once."""
        self.connection.send(h11.Data(body))
        self._wrote = time.monotonic()

    def end_events(self) -> None:
        self._wrote = None
        self.connection.send(h11.EndOfMessage())

    def keep_alive(self, now: float) -> None:
        """Write something into a silent stream: proxies close silent connections, and people
        wonder."""
        if self._wrote is None or self.connection.is_blocked:
            return
        silence = now - self._wrote
        if silence > PING_S:
            self.push(PING)
        elif silence > PROGRESS_S and self.answer and (said := self.answer.progress()):
            self.push(said)


# --- connections ----------------------------------------------------------------------------------


class Connection(asyncio.Protocol):
    """One client's connection: its requests are answered one after the other.

    The first methods are callbacks of asyncio. They only record what has happened, and `_talk`
    acts.
    """

    def __init__(self, serve: Callable[[Connection, h11.Request], Awaitable], all: set[Connection]):
        """`all`: the open connections."""
        self.patience = WRITE_TIMEOUT_S
        self.request: HTTPRequest | None = None  # the running one
        self._serve = serve
        self._all = all
        self._http = h11.Connection(h11.SERVER, MAX_HEAD_BYTES)
        self._news = asyncio.Event()  # bytes have come
        self._room = asyncio.Event()  # the client takes what we write
        self.blocked_since = math.inf  # when the send buffer filled up
        self._taken = 0  # events of requests so far
        self.is_leaving = False  # the connection is closing
        self._is_lost = False
        # Since when it has waited for a whole request, or for its client to take a whole response;
        # inf while a request is in work
        self.idle_since = time.monotonic()
        self._room.set()

    def connection_made(self, transport: asyncio.Transport) -> None:
        self.transport = transport
        peer = transport.get_extra_info("peername")
        self.client = peer[0] if peer else ""
        self._all.add(self)
        self.task = asyncio.ensure_future(self._live())
        if len(self._all) > MAX_CONNECTIONS + MAX_IDLE_CONNECTIONS:
            # This new one, if all others have a request in work
            last = min(self._all, key=attrgetter("idle_since"))
            self._all.discard(last)
            last.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self._is_lost = True
        self._all.discard(self)
        self.task.cancel()  # whatever it waits for

    def data_received(self, data: bytes) -> None:
        if self.is_leaving:
            return
        self._take(data)
        self._news.set()
        if self._ahead > READ_AHEAD_BYTES:
            self.transport.pause_reading()

    def _take(self, data: bytes) -> None:
        """Some clients send blank lines before a request, which h11 would refuse."""
        if self._http.their_state is h11.IDLE and not self._ahead:
            data = data.lstrip(b"\r\n")
        if data:  # no bytes would mean the end of the connection
            self._http.receive_data(data)

    def pause_writing(self) -> None:
        self._room.clear()
        self.blocked_since = time.monotonic()

    def resume_writing(self) -> None:
        self._room.set()
        self.blocked_since = math.inf

    # --- one request after the other

    async def _live(self) -> None:
        try:
            with suppress(asyncio.CancelledError):  # the client has hung up
                await self._talk()
                await self._leave()
        finally:
            self.abort()

    async def _talk(self) -> None:
        patience = HEAD_TIMEOUT_S
        try:
            while True:
                async with asyncio.timeout(patience):
                    head = await self.receive()
                self.idle_since = math.inf
                try:
                    await self._serve(self, head)
                finally:
                    self.idle_since = time.monotonic()
                if self._http.our_state is not h11.DONE or not self._has_request():
                    break
                rest = self._http.trailing_data[0]
                self._http = h11.Connection(h11.SERVER, MAX_HEAD_BYTES)
                self._take(rest)
                patience = IDLE_TIMEOUT_S
                await asyncio.sleep(0)  # other tasks get a turn: many requests may have come
        except APIError as refusal:
            said = reply(refusal.body, refusal.status)
            self.send_head(said.status, said.head | {"Connection": "close"})
            self.send(h11.Data(said.body))
        except (ClientGone, TimeoutError):
            pass

    async def receive(self) -> Any:
        """The next event of a request: its head, a piece of its body, or its end."""
        self._taken += 1
        if self._taken % 4 == 0:
            await asyncio.sleep(0)  # so may parts of one
        while (event := self._next()) is h11.NEED_DATA:
            if self._http.they_are_waiting_for_100_continue:
                self.send_continue()
            self._news.clear()
            self.transport.resume_reading()
            await self._news.wait()
        # So that a hang-up during the answer is noticed
        if type(event) is h11.EndOfMessage and self._ahead <= READ_AHEAD_BYTES:
            self.transport.resume_reading()
        return event

    @property
    def _ahead(self) -> int:
        """Bytes received that are not part of a request yet."""
        return len(self._http.trailing_data[0])

    def _next(self) -> Any:
        try:
            return self._http.next_event()
        except h11.RemoteProtocolError as error:
            error.__traceback__ = None  # a frame of h11 in it refers to the error
            # After the colon follows a line of the client's, as Python writes bytes
            raise bad_http(str(error).partition(": bytearray")[0]) from None

    def _has_request(self) -> bool:
        """Whether the whole request has come. Discard what was not read of its body, if that is a
        few pieces."""
        with suppress(APIError):
            for _ in range(4):
                if self._http.their_state is h11.SEND_BODY:
                    self._next()
        return self._http.their_state not in (h11.SEND_BODY, h11.ERROR)

    async def _leave(self) -> None:
        """Close without a reset. Closing a socket with unread bytes sends a reset, and the client's
        system then discards our last response if the client has not read it yet. So close our
        direction first, and discard what the client still sends."""
        self.is_leaving = True
        self.transport.resume_reading()
        with suppress(OSError):  # the client has hung up
            self.transport.write_eof()
        await asyncio.sleep(LINGER_S)
        self.transport.close()  # once everything has been sent
        await asyncio.sleep(HEAD_TIMEOUT_S)

    # --- sending

    def send_head(self, status: int, headers: dict[str, str]) -> None:
        """Send the head of a response. A client that has not sent its whole request must reconnect."""
        headers = {"Date": formatdate(usegmt=True)} | headers
        if not self._has_request():
            headers["Connection"] = "close"
        reason = HTTPStatus(status).phrase
        # Some echo what the client sent, which was decoded in the same way
        lines = [(name, value.encode("latin-1")) for name, value in headers.items()]
        self.send(h11.Response(status_code=status, headers=lines, reason=reason))

    def send_continue(self) -> None:
        self.send(h11.InformationalResponse(status_code=100, headers=[]))

    def send(self, event: h11.Event) -> None:
        data = self._http.send(event)
        # asyncio would log each write to a closed connection
        if not self.transport.is_closing():
            self.transport.write(data)

    async def drain(self) -> None:
        """Wait while the client takes too little. Nothing is in work meanwhile, unless the engine
        still answers."""
        if self.is_blocked:
            before = self.idle_since
            if not (self.request and self.request.answer):
                self.idle_since = min(before, self.blocked_since)
            try:
                async with asyncio.timeout(self.patience):
                    await self._room.wait()
            except TimeoutError:
                self.end_slow()
            self.idle_since = before
        if self.transport.is_closing():
            raise ClientGone

    @property
    def is_blocked(self) -> bool:
        """Whether the send buffer is full, so that more bytes would only pile up."""
        return not self._room.is_set()

    def end_slow(self) -> None:
        """Abort: a last message would wait behind all bytes before it."""
        if self.request:
            self.request.update_record(reason="too_slow", hung_up=True)
        self.abort()

    def abort(self) -> None:
        """subtle: asyncio's transport cannot be aborted after it was closed and then sent the rest."""
        if not self._is_lost:
            self.transport.abort()


class AcceptFailures:
    """Exception handler of the event loop: when no more files can be opened, asyncio reports a
    hundred failures to accept each second. Log one line a minute."""

    def __init__(self) -> None:
        self._told = -math.inf

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if not isinstance(error, OSError) or error.errno not in OUT_OF_FILES:
            loop.default_exception_handler(context)
        elif loop.time() - self._told >= ACCEPT_LOG_S:
            self._told = loop.time()
            words = f"connections cannot be accepted: {error.strerror}; raise the limit (ulimit -n)"
            LOG.error("nanobatch: %s", words)


async def sweep(requests: Collection[HTTPRequest]) -> None:
    """Ping silent streams and end slow clients, periodically. A fault ends one round only."""
    while True:
        await asyncio.sleep(SWEEP_S)
        try:
            sweep_once(list(requests))
        except Exception as error:
            show_fault("a look for silent streams and slow clients failed", error)


def sweep_once(requests: Iterable[HTTPRequest]) -> None:
    """One sweep. A function of its own, because a sleeping loop would keep the last request in
    memory."""
    now = time.monotonic()
    lags = {}
    for request in requests:
        request.keep_alive(now)
        connection = request.connection
        if now - connection.blocked_since > SLOW_AFTER_S:
            unsent = connection.transport.get_write_buffer_size()
            lags[connection] = unsent + request.left + (request.answer.lag if request.answer else 0)
    while sum(lags.values()) > MAX_UNSENT_BYTES:
        last = max(lags, key=lags.get)
        last.end_slow()
        del lags[last]


# --- sockets, bodies, answers ---------------------------------------------------------------------


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. OSError if the port is taken, or the host is not this machine's."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    allow_open_files(MAX_CONNECTIONS + MAX_IDLE_CONNECTIONS + OTHER_FILES)
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Small, so that a client that does not read is noticed
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**17)
        listener.bind(address)
        listener.listen(128)
    except OSError:
        listener.close()
        raise
    return listener


def allow_open_files(count: int) -> None:
    """Raise this process's limit of open files, if it is lower and may be raised. A Mac starts programs
    with 256, and `accept` would fail before a 429 can be sent."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY:
        count = min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < count:
        resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))


async def read_body(request: HTTPRequest, requests: Iterable[HTTPRequest]) -> bytes:
    """The whole body. `requests`: all that are running, with bodies of their own."""
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    coding = request.headers.get("content-encoding", "identity").lower()
    if kind != "application/json" or coding != "identity":
        words = f"the body is of type {shown(kind)}, or compressed"
        words += "; give plain JSON as 'Content-Type: application/json'"
        raise APIError(415, words, "unsupported_media_type")
    check_size(int(request.headers.get("content-length", 0)))
    parts = []
    request.connection.idle_since = time.monotonic()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            while type(part := await request.connection.receive()) is h11.Data:
                parts.append(part.data)
                request.size += len(part.data)
                check_size(request.size)
                total = sum(each.size for each in requests)
                if request.size > LONG_BODY_BYTES and total > MAX_BODIES_BYTES:
                    words = f"more than {MAX_BODIES_BYTES:,} bytes of bodies are being read already"
                    raise APIError(429, words, "rate_limit_exceeded", Retry_After="1")
    except TimeoutError:
        words = f"the body has not come within {BODY_TIMEOUT_S:.0f} s"
        raise APIError(408, words, "request_timeout") from None
    request.connection.idle_since = math.inf
    return b"".join(parts)


def check_size(bytes: int) -> None:
    if bytes > MAX_BODY_BYTES:
        raise APIError(413, f"the body has more than {MAX_BODY_BYTES:,} bytes", "request_too_large")


def reply(body: dict, status: int = 200, headers: Mapping[str, str] = {}) -> Reply:
    return Reply(dump(body), status, headers)


def refused(request: HTTPRequest, refusal: APIError) -> Reply:
    request.is_logged = True
    request.update_record(
        reason=refusal.code or str(refusal.status),
        message=refusal.message,
        status=request.status or refusal.status,
    )
    return reply(request.error(refusal), refusal.status, refusal.headers)

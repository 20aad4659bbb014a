"""HTTP/1.1 on asyncio: connections, requests, bodies, responses, limits.

`h11` parses and serializes HTTP; this module handles sockets, timeouts and limits. It knows nothing
of models or engines. Next: `auth.py` (which requests are refused) and `stream.py` (what is written).
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

MAX_CONNECTIONS = 512  # connections with a request in progress; one more gets a 429
# Additional idle connections; over this limit the one that has been idle longest is closed
MAX_IDLE_CONNECTIONS = 64
OTHER_FILES = 128  # open files other than connections: weights, logs, pipes
ACCEPT_LOG_S = 60.0  # minimum seconds between log lines about connections that cannot be accepted
SWEEP_S = 0.5  # seconds between checks for silent streams and slow clients
HEAD_TIMEOUT_S = 30.0  # seconds for the client to send the first request's head
IDLE_TIMEOUT_S = 75.0  # seconds for the client to send the next request's head
MAX_HEAD_BYTES = 2**16  # size limit of a request's head
MAX_BODY_BYTES = 4 * 2**20  # a prompt that fills a slot of 8,192 tokens has about 50,000 bytes
LONG_BODY_BYTES = 2**14  # a longer body may take seconds to tokenize
MAX_BODIES_BYTES = 2**28  # total size of bodies in memory; over it, another long body gets a 429
READ_AHEAD_BYTES = 2**14  # approximate limit of bytes received but not parsed yet
BODY_TIMEOUT_S = 30.0  # seconds for the client to send a body
CHUNK_BYTES = 2**14  # a response is written in chunks of this size
# A client that reads less than 48 KiB of a full send buffer in this time is disconnected
WRITE_TIMEOUT_S = 60.0
SLOW_AFTER_S = 5.0  # a send buffer full this long marks a client as slow
# Unsent bytes of all slow clients; over this limit the client with the most is disconnected
MAX_UNSENT_BYTES = 2**25
LINGER_S = 2.0  # a refused client that is still sending has this long to read the error
# Seconds of silence before any stream gets a comment. While a prompt waits or is read, comments with its progress
# come earlier: after a tenth of the time since the last event
PING_S = 10.0
PROGRESS_S = 0.4  # minimum seconds of silence before a stream gets the progress of its prompt
PING = b": ping\n\n"
# Errors of `accept` when resources are exhausted
OUT_OF_FILES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
LOOPBACK = ("localhost", "127.0.0.1", "[::1]")


class Options(NamedTuple):
    """The server's options."""

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    watch_key: str | None = None
    allow_hosts: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()  # additional names of the model; "*" matches any name
    # Proxies whose X-Forwarded-For is trusted (`forwarded_for.py`)
    trusted_proxies: tuple[ipaddress.IPv4Network | ipaddress.IPv6Network, ...] = ()
    max_tokens: int | None = None  # default max_tokens of an answer; None: the rest of the slot


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
    """One request, with methods that send the response."""

    def __init__(self, connection: Connection, head: h11.Request, request_log: RequestLog):
        self.connection = connection
        self.method = head.method.decode()
        # Lower-case name -> value
        self.headers = {name.decode(): value.decode("latin-1") for name, value in head.headers}
        self.headers.setdefault("host", "localhost")  # HTTP/1.0 does not require a Host
        # Conflicting lengths allow request smuggling (RFC 9112, 6.3)
        if {"content-length", "transfer-encoding"} <= self.headers.keys():
            raise bad_http("it has both Content-Length and Transfer-Encoding")
        target = head.target.decode()
        if not target.startswith("/"):
            target = self._read_address(target)
        # The host without its port
        self.host = re.sub(r":\d+$", "", self.headers["host"]).lower()
        path, _, query = target.partition("?")
        self.path = unquote(path)
        self.query = dict(parse_qsl(query))
        self.status: int | None = None  # set when the response begins
        self.is_logged = False  # True for a request of an answer, or a refused one
        self.size = 0  # size of the body in bytes while it is in memory
        self.left = 0  # size of the unwritten part of the response in bytes
        # Set while the engine works on this request, or while its model is being loaded
        self.answer: AnswerWriter | Ticket | None = None
        # CORS headers to add to the response
        self.shared: Mapping[str, str] = {}
        # Builds the body of an error response in the protocol's format
        self.error: Callable[[APIError], dict] = attrgetter("body")
        # When the stream last wrote; None if the response is not a stream
        self._wrote: float | None = None
        self._told = 0.0  # when the stream last wrote an event, not only a comment
        self._request_log = request_log
        self._number = request_log.open_record(
            connection.client, f"{self.method} {self.path}"[:200]
        )

    def _read_address(self, target: str) -> str:
        """Return the path and the query of an absolute URL, whose host replaces the Host header."""
        with suppress(ValueError):
            address = urlsplit(target)
            if address.hostname and address.path:
                self.headers["host"] = address.netloc
                return f"{address.path}?{address.query}"
        raise bad_http(f"{shown(target)} is not an address")

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
        """Send a complete response in chunks.

        Each chunk waits until the client has received most of the previous ones, so the transport
        does not hold a second copy of a large response. The head waits too, because otherwise
        thousands of responses without a body would pile up.
        """
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
        self._wrote = self._told = time.monotonic()

    async def write(self, body: bytes) -> None:
        """Send a part of a stream, after waiting until the send buffer has room."""
        await self.connection.drain()
        self.push(body)

    def push(self, body: bytes) -> None:
        """Send a part of a stream without waiting."""
        self.connection.send(h11.Data(body))
        self._wrote = time.monotonic()
        if not body.startswith(b":"):
            self._told = self._wrote

    def end_events(self) -> None:
        self._wrote = None
        self.connection.send(h11.EndOfMessage())

    def keep_alive(self, now: float) -> None:
        """Write progress or a ping to a silent stream, because proxies close silent connections and users want
        to see that something happens.

        Comments become less frequent: Go's best-known client, go-openai, gives up after 300 lines without an
        event, which are 22 minutes.
        """
        if self._wrote is None or self.connection.is_blocked:
            return
        silence = now - self._wrote
        if silence <= PROGRESS_S:
            return
        said = self.answer.progress() if self.answer else b""
        is_event = not said.startswith(b":")  # the client asked for progress in events
        if silence > PING_S:
            self.push(said or PING)
        elif said and (is_event or silence > (now - self._told) / 10):
            self.push(said)


# --- connections ----------------------------------------------------------------------------------


class Connection(asyncio.Protocol):
    """One client's connection. Its requests are answered one after another.

    The first methods are asyncio callbacks. They only record events; `_talk` handles them.
    """

    def __init__(self, serve: Callable[[Connection, h11.Request], Awaitable], all: set[Connection]):
        """`all`: the set of open connections, which this one joins."""
        self.patience = WRITE_TIMEOUT_S
        self.request: HTTPRequest | None = None  # the request in progress
        self._serve = serve
        self._all = all
        self._http = h11.Connection(h11.SERVER, MAX_HEAD_BYTES)
        self._news = asyncio.Event()  # data has been received
        self._room = asyncio.Event()  # the send buffer has room
        self.blocked_since = math.inf  # when the send buffer filled up
        self._taken = 0  # number of HTTP events handled
        self.is_leaving = False  # the connection is closing
        self._is_lost = False
        # Since when the connection has waited for a complete request or for the client to receive a
        # complete response; inf while a request is in progress
        self.idle_since = time.monotonic()
        self._room.set()

    def connection_made(self, transport: asyncio.Transport) -> None:
        self.transport = transport
        peer = transport.get_extra_info("peername")
        self.client = peer[0] if peer else ""
        self._all.add(self)
        self.task = asyncio.ensure_future(self._live())
        if len(self._all) > MAX_CONNECTIONS + MAX_IDLE_CONNECTIONS:
            # Close the new connection itself if all others have a request in progress
            last = min(self._all, key=attrgetter("idle_since"))
            self._all.discard(last)
            last.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self._is_lost = True
        self._all.discard(self)
        self.task.cancel()  # regardless of what it is waiting for

    def data_received(self, data: bytes) -> None:
        if self.is_leaving:
            return
        self._take(data)
        self._news.set()
        if self._ahead > READ_AHEAD_BYTES:
            self.transport.pause_reading()

    def _take(self, data: bytes) -> None:
        """Pass data to h11. Strip the blank lines that some clients send before a request, because h11
        would refuse them."""
        if self._http.their_state is h11.IDLE and not self._ahead:
            data = data.lstrip(b"\r\n")
        if data:  # h11 treats empty data as the end of the connection
            self._http.receive_data(data)

    def pause_writing(self) -> None:
        self._room.clear()
        self.blocked_since = time.monotonic()

    def resume_writing(self) -> None:
        self._room.set()
        self.blocked_since = math.inf

    # --- one request after another

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
                await asyncio.sleep(0)  # let other tasks run between pipelined requests
        except APIError as refusal:
            said = reply(refusal.body, refusal.status)
            self.send_head(said.status, said.head | {"Connection": "close"})
            with suppress(h11.LocalProtocolError):  # the response to HEAD has no body
                self.send(h11.Data(said.body))
        except (ClientGone, TimeoutError):
            pass

    async def receive(self) -> Any:
        """Return the next event of a request: its head, a part of its body, or its end."""
        self._taken += 1
        if self._taken % 4 == 0:
            await asyncio.sleep(0)  # let other tasks run between the parts of a request
        while (event := self._next()) is h11.NEED_DATA:
            if self._http.they_are_waiting_for_100_continue:
                self.send_continue()
            self._news.clear()
            self.transport.resume_reading()
            await self._news.wait()
        # Keep reading, so that a hang-up during the answer is noticed
        if type(event) is h11.EndOfMessage and self._ahead <= READ_AHEAD_BYTES:
            self.transport.resume_reading()
        return event

    @property
    def _ahead(self) -> int:
        """The number of bytes received but not parsed yet."""
        return len(self._http.trailing_data[0])

    def _next(self) -> Any:
        try:
            return self._http.next_event()
        except h11.RemoteProtocolError as error:
            error.__traceback__ = None  # break a cycle: one of its h11 frames refers to the error
            # Cut off the client's line, which h11 appends as a bytearray
            raise bad_http(str(error).partition(": bytearray")[0]) from None

    def _has_request(self) -> bool:
        """Return True if the complete request has been received. Discard up to four unread parts of its
        body."""
        with suppress(APIError):
            for _ in range(4):
                if self._http.their_state is h11.SEND_BODY:
                    self._next()
        return self._http.their_state not in (h11.SEND_BODY, h11.ERROR)

    async def _leave(self) -> None:
        """Close the connection without a reset.

        Closing a socket that has unread bytes sends a reset, and the client's system then discards
        the last response if the client has not read it yet. So close only the sending side first, and
        discard what the client still sends.
        """
        self.is_leaving = True
        self.transport.resume_reading()
        with suppress(OSError):  # the client has hung up
            self.transport.write_eof()
        await asyncio.sleep(LINGER_S)
        self.transport.close()  # closes after everything has been sent
        await asyncio.sleep(HEAD_TIMEOUT_S)

    # --- sending

    def send_head(self, status: int, headers: dict[str, str]) -> None:
        """Send the head of a response. Close the connection afterwards if the request is incomplete."""
        headers = {"Date": formatdate(usegmt=True)} | headers
        if not self._has_request():
            headers["Connection"] = "close"
        reason = HTTPStatus(status).phrase
        # Some values echo the client's headers, which were decoded as latin-1
        lines = [(name, value.encode("latin-1")) for name, value in headers.items()]
        self.send(h11.Response(status_code=status, headers=lines, reason=reason))

    def send_continue(self) -> None:
        self.send(h11.InformationalResponse(status_code=100, headers=[]))

    def send(self, event: h11.Event) -> None:
        data = self._http.send(event)
        # asyncio logs a warning for each write to a closed connection
        if not self.transport.is_closing():
            self.transport.write(data)

    async def drain(self) -> None:
        """Wait until the send buffer has room. Raise ClientGone if the connection is closed. It counts as idle
        while it waits, unless the engine is still working on an answer."""
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
        """True if the send buffer is full."""
        return not self._room.is_set()

    def end_slow(self) -> None:
        """Disconnect a slow client without an error message, which would only wait in the full buffer."""
        if self.request:
            self.request.update_record(reason="too_slow", hung_up=True)
        self.abort()

    def abort(self) -> None:
        """Close the connection immediately.

        subtle: `abort` fails on an asyncio transport that was closed and has already sent everything.
        """
        if not self._is_lost:
            self.transport.abort()


class AcceptFailures:
    """Exception handler of the event loop that limits the log to one line a minute when the process is
    out of file descriptors: asyncio then reports a hundred failed `accept` calls a second."""

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
    """Ping silent streams and disconnect slow clients periodically. An exception ends only the current round."""
    while True:
        await asyncio.sleep(SWEEP_S)
        try:
            sweep_once(list(requests))
        except Exception as error:
            show_fault("the check for silent streams and slow clients failed", error)


def sweep_once(requests: Iterable[HTTPRequest]) -> None:
    """Run one round of `sweep`. It is a separate function because the sleeping loop's locals would
    keep the last request alive."""
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


# --- sockets, bodies, responses -------------------------------------------------------------------


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket. Raise OSError if the port is in use or the host is not local."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    allow_open_files(MAX_CONNECTIONS + MAX_IDLE_CONNECTIONS + OTHER_FILES)
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # A small send buffer, so that a client that stops reading is noticed soon
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**17)
        listener.bind(address)
        listener.listen(128)
    except OSError:
        listener.close()
        raise
    return listener


def allow_open_files(count: int) -> None:
    """Raise this process's limit on open files to `count` if possible. With the default on macOS, 256,
    `accept` would fail before a 429 could be sent."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY:
        count = min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < count:
        resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))


async def read_body(request: HTTPRequest, requests: Iterable[HTTPRequest]) -> bytes:
    """Return the complete body. `requests`: all open requests, whose bodies share a memory limit."""
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
        words = f"the body did not arrive within {BODY_TIMEOUT_S:.0f} s"
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

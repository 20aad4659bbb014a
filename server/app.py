"""The HTTP server: a bound socket, the routes, and the thread that serves them.

    POST -> guard -> read the body -> parse.py -> submit.py -> stream.py: events, or one JSON
            |_ server's thread, asyncio _|_ worker threads __|_ server's thread ____________|

The engine's thread must not be disturbed by malformed, huge or slow requests, so HTTP is spoken in
a thread of its own, and worker threads parse JSON and tokenize. After each commit the engine's
thread wakes the server's thread if there is new output. The socket is bound first; until the model
is loaded, clients get 503.

The invariant: each request ends with an answer, or when the client hangs up. Afterwards it holds no
slot.

Next: the way of one request, downwards: `APIServer._complete`, `parse.py`, `submit.py`, `stream.py`.
Then `protocol_adapter.py`, what the protocols share; `access_log.py`, records of requests.
"""

from __future__ import annotations

import asyncio
import ipaddress
import math
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

import h11
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4

from base.error_reports import describe, show_fault
from base.validation import shown
from engine.handle import Handle
from engine.loop import Loop
from engine.server_view import ServerView
from engine.snapshot import Snapshot
from engine.watch_frames import Frame
from sampling_params import advised
from server import anthropic, auth, embeddings, http, live_page, openai, responses
from server.access_log import HangUps, RequestLog, hang_up_advice, prefill_line, request_line
from server.body_reader import APIError, check_model, without_folders
from server.forwarded_for import seen_through
from server.http import ClientGone, Connection, HTTPRequest, Options, Reply, refused, reply
from server.metrics import ServerMetrics
from server.parse import ServedModel, count_tokens
from server.protocol_adapter import ProtocolAdapter, shutting_down
from server.stream import AnswerWriter
from server.submit import Submission
from server.watch import MAX_WATCHERS, watch
from text.grammar import SANDBOX_LIMITS

if TYPE_CHECKING:
    from nanobatch import Engine

PROTOCOLS = {
    "/v1/chat/completions": openai.ChatCompletion,
    "/v1/completions": openai.Completion,
    "/v1/embeddings": embeddings.Embedding,
    "/v1/responses": responses.Response,
    "/v1/messages": anthropic.Message,
}
COUNT = "/v1/messages/count_tokens"
MODELS = "/v1/models"  # and below it any name of the model
# A handler returns a response, or writes one
Answering = Callable[[HTTPRequest], Awaitable[Reply | None]]
DRAIN_S = 20.0  # seconds for running requests after a signal to end


class APIServer:
    """A bound socket. `start` begins to serve; `open` provides an engine and the loop that steps
    it."""

    def __init__(self, options: Options):
        self.options = options
        self.request_log = RequestLog()
        self.metrics = ServerMetrics()
        self.served: ServedModel | None = None  # None while the model is being loaded
        self.loop: Loop | None = None
        self.log: Callable[[str], None] | None = None  # receives a line for each request
        self.advise: Callable[[str], None] = lambda words: None  # receives advice for the owner
        self._hang_ups = HangUps()
        self.draining = False
        self.watchers = 0
        self._socket = http.listen(options.host, options.port)
        host, port = self._socket.getsockname()[:2]
        self.address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        self._born = int(time.time())
        self._requests: set[HTTPRequest] = set()
        self._free: tuple[float, int | None] = (-math.inf, None)  # bytes, and when they were free
        self._scraped: Snapshot | None = None  # the engine at the last scrape of /metrics
        self._pool = ThreadPoolExecutor(4, "server")  # parses bodies
        # For long bodies, so that short ones need not wait
        self._slow_pool = ThreadPoolExecutor(2, "server, long")
        # These wait for the sandbox. Two more are for grammars known already
        self._grammar_pool = ThreadPoolExecutor(SANDBOX_LIMITS.at_once + 2, "server, grammars")
        self.is_local = ipaddress.ip_address(host).is_loopback  # listens on loopback only
        self._routes = self._make_routes()
        self._connections: set[Connection] = set()
        self._events = asyncio.new_event_loop()
        self._is_over = asyncio.Event()
        self._submissions: set[Submission] = set()  # of requests that are not answered yet
        self._writers: dict[int, AnswerWriter] = {}  # by request id
        self._thread = threading.Thread(target=self._run, name="server", daemon=True)
        self._ended = threading.Event()

    def _make_routes(self) -> dict[str, tuple[str, Answering]]:
        """By path: the methods and the handler."""
        looks = {MODELS: self._models, "/health": self._health}
        looks |= {"/metrics": self._metrics, "/": self._page}
        return {
            COUNT: ("POST", self._count),
            **{
                path: ("POST", partial(self._complete, speaks))
                for path, speaks in PROTOCOLS.items()
            },
            **{path: ("GET, HEAD", look) for path, look in looks.items()},
            "/watch": ("GET", self._watch),  # the answer to a HEAD would never end
        }

    # --- for other threads

    def start(self) -> APIServer:
        self._thread.start()
        return self

    def open(self, engine: Engine, loop: Loop, name: str) -> None:
        """From here on requests are answered."""
        self.loop = loop
        names = (name, "default", *self.options.aliases)
        defaults = advised(engine.text.folder)
        self.served = ServedModel(engine, names, defaults, self.options.max_tokens)
        engine.on_commit = self._on_commit

    def _on_commit(self, handles: list[Handle]) -> None:
        """In the engine's thread: wake the server's thread, once for all requests with new output."""
        woken = []
        for handle in handles:
            writer = self._writers.get(handle.id)
            # A whole answer is sent at its end
            if writer and (writer.is_stream or handle.request.finish_reason):
                woken.append(writer)
        if woken:
            with suppress(RuntimeError):  # the server has ended
                self._events.call_soon_threadsafe(self._wake, woken)

    def _wake(self, writers: list[AnswerWriter]) -> None:
        for writer in writers:
            writer.has_output.set()

    @property
    def warning(self) -> str:
        """A line about access, if everybody has it; else empty."""
        if self.is_local or self.options.api_key:
            return ""
        readers = "who has the watch key" if self.options.watch_key else "this machine"
        return (
            f"without --api-key everybody who reaches {self.address} may ask and see figures, "
            f"but only {readers} may read texts; pages of other hosts may not (--allow-host)"
        )

    def wait(self, signals: SimpleQueue) -> bool:
        """Wait for a signal in this queue and return True; False if the server's thread ends first.

        subtle: Python handles a signal when the main thread runs. A signal that arrives just before
        the main thread goes to sleep is handled when it wakes up.
        """
        while not self._ended.is_set():
            with suppress(Empty):
                signals.get(timeout=0.5)
                return True
        return False

    def drain(self, patience: float, is_hurried: Callable[[], bool] = lambda: False) -> None:
        """Refuse new requests and let running ones end, for `patience` seconds or until
        `is_hurried`."""
        self.draining = True
        if self.loop:
            self.loop.slow = 0.0
            self.loop.resume()  # a paused engine would never end
        deadline = time.monotonic() + patience
        while self._submissions and time.monotonic() < deadline and not is_hurried():
            time.sleep(0.02)

    def close(self) -> None:
        """End running requests with an error, and close the socket."""
        self.draining = True
        for submission in list(self._submissions):
            submission.cancel()
        if self._thread.ident:
            with suppress(RuntimeError):  # the thread has ended already
                self._events.call_soon_threadsafe(self._is_over.set)
            self._ended.wait(5)
        else:
            self._events.close()
        if self.served:
            self.served.engine.on_commit = None
        for pool in (self._pool, self._slow_pool, self._grammar_pool):
            pool.shutdown(wait=False, cancel_futures=True)
        self._socket.close()

    @property
    def changes(self) -> int:
        """Counts all changes of the request log."""
        return self.request_log.changes

    def look(self, since: int = 0) -> ServerView:
        """The server now, and the requests that ended after number `since`."""
        opened, ended, count = self.request_log.look(since)
        return ServerView(
            address=self.address,
            draining=self.draining,
            connections=len(self._connections),
            watchers=self.watchers,
            open=opened,
            ended=ended,
            missed=count - since - len(ended),
            seen=count,
            free_memory=self._free_memory(),
        )

    def _free_memory(self) -> int | None:
        """Measured once a second: the system writes it anew each time that it is read."""
        looked, free = self._free
        if self.served and time.monotonic() > looked + 1.0:
            free = self.served.engine.free_memory
            self._free = time.monotonic(), free
        return free

    # --- in the server's thread

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._events) as runner:
                runner.run(self._listen())
        finally:
            self._ended.set()

    async def _listen(self) -> None:
        self._events.set_exception_handler(http.AcceptFailures())
        sweeper = asyncio.ensure_future(http.sweep(self._requests))
        logger = asyncio.ensure_future(self._log_prefills())
        serve = seen_through(self._serve, self.options.trusted_proxies)
        connect = partial(Connection, serve, self._connections)
        server = await self._events.create_server(connect, sock=self._socket)
        await self._is_over.wait()
        server.close()
        deadline = time.monotonic() + http.LINGER_S
        while self._connections:
            for connection in list(self._connections):
                if time.monotonic() > deadline:  # the client has not taken everything
                    connection.abort()
                elif not connection.request:
                    connection.transport.close()
            await asyncio.sleep(0.01)
        sweeper.cancel()
        logger.cancel()

    async def _log_prefills(self) -> None:
        """A log line for each long prompt, then one every `LOG_S`."""
        while True:
            await asyncio.sleep(1)
            self._log_prefills_once(time.monotonic())

    def _log_prefills_once(self, now: float) -> None:
        # A function of its own, because a sleeping loop would keep the last request in memory
        for request in list(self._requests) if self.log else ():
            prefill = request.answer and request.answer.prefill_to_log(now)
            if prefill and request.record.id:
                self.log(prefill_line(request.record, prefill))

    async def _serve(self, connection: Connection, head: h11.Request) -> None:
        """Serve one request and record its outcome."""
        began = time.perf_counter()
        request = connection.request = HTTPRequest(connection, head, self.request_log)
        if request.path.startswith("/v1/messages"):
            request.error = anthropic.error
        self._requests.add(request)
        try:
            await self._answer(request)
        except (ClientGone, asyncio.CancelledError):
            request.note_hang_up()
            raise
        finally:
            connection.request = None
            self._requests.discard(request)
            request.note(latency_s=time.perf_counter() - began)
            record = request.end()
            if request.is_logged:
                self.metrics.count(record)
                if self.log:
                    self.log(request_line(record))

    async def _answer(self, request: HTTPRequest) -> None:
        """Turn an exception into a response."""
        try:
            reply = self._admit(request)
            if not reply:
                reply = await self._find(request)(request)
            if not reply:
                request.end_events()
        except APIError as refusal:
            reply = refused(request, refusal)
        except ClientGone:
            raise
        # A fault of ours: only this client notices
        except Exception as error:
            show_fault("a request over HTTP failed", error)
            words = without_folders(describe(error))
            reply = refused(request, APIError(500, words, "internal_error"))
        if reply and request.status is None:
            await request.reply(reply)

    def _admit(self, request: HTTPRequest) -> Reply | None:
        """The reply to a preflight; None if the request may go on."""
        connections = sum(each.idle_since == math.inf for each in self._connections)
        preflight = auth.admit(request, self.options, self.is_local, connections)
        if not preflight and request.path not in ("/", "/health", "/metrics"):
            if self.served is None:
                raise APIError(
                    503, "the model is being loaded; try again", "loading", Retry_After="1"
                )
            if self.draining:
                raise shutting_down()
        return preflight

    def _find(self, request: HTTPRequest) -> Answering:
        """The handler of this path."""
        path = request.path
        known = MODELS if path.startswith(f"{MODELS}/") else path
        if known not in self._routes:
            words = f"there is no {shown(path)} here; there is {', '.join(self._routes)}"
            raise APIError(404, words, "unknown_url")
        methods, answer = self._routes[known]
        if request.method not in methods.split(", "):
            words = f"{shown(request.method)} is not a method of {path}; use {methods}"
            raise APIError(405, words, "method_not_allowed", Allow=methods)
        return answer

    # --- the small routes

    async def _models(self, request: HTTPRequest) -> Reply:
        own, default, *more = self.served.names
        engine = self.served.engine
        facts = {"max_len": engine.sched.max_len, "quantization": engine.model.quantization}
        told = partial(openai.model, created=self._born, **facts)
        name = request.path[len(MODELS) + 1 :]
        if name:
            check_model(name, self.served.names)
            return reply(told(own if name == default else name))
        names = [own, *(each for each in more if each != "*")]
        return reply({"object": "list", "data": [told(each) for each in names]})

    async def _health(self, request: HTTPRequest) -> Reply:
        status = "loading" if self.served is None else "draining" if self.draining else "ok"
        if self.loop and not self.loop.is_alive:
            status = "stopped"
        code = 200 if status == "ok" else 503
        if code == 200 and self.served.engine.lifecycle.is_unloaded:
            status = "unloaded"  # the next request waits for the weights
        found = {"status": status}
        if self.served:
            found["arithmetic"] = self.served.engine.model.arithmetic
        return reply(found, code)

    async def _metrics(self, request: HTTPRequest) -> Reply:
        seen = self.served.engine.snapshot(self._scraped) if self.served else None
        # The next scrape may never come, so keep no texts and steps for it
        self._scraped = seen and replace(seen, requests=(), ended=(), steps=())
        gauges = {
            "http_connections": len(self._connections),
            "watchers": self.watchers,
            "paused_seconds": self.loop.paused_s if self.loop else 0.0,
        }
        text = self.metrics.text(seen, gauges)
        return Reply(text.encode(), type=CONTENT_TYPE_PLAIN_0_0_4)

    async def _page(self, request: HTTPRequest) -> Reply:
        """The page holds no data of this server, which it requests like any other client."""
        text, policy = live_page.live()
        headers = {"Content-Security-Policy": policy, "X-Content-Type-Options": "nosniff"}
        headers |= {"Cache-Control": "no-cache", "Referrer-Policy": "no-referrer"}
        return Reply(text.encode(), headers=headers, type="text/html; charset=utf-8")

    async def _watch(self, request: HTTPRequest) -> None:
        if self.watchers >= MAX_WATCHERS:
            raise APIError(
                429, f"{MAX_WATCHERS} watch already", "rate_limit_exceeded", Retry_After="5"
            )
        hello = {"model": self.served.names[0], "summary": self.served.engine.summary}
        hello["texts"] = auth.may_read(request, self.options)
        hello["temperature"] = self.served.defaults["temperature"]
        self.watchers += 1
        try:
            await watch(request, hello, self._frame)
        finally:
            self.watchers -= 1

    def _frame(self, before: Frame | None) -> Frame | None:
        """Everything now, with the events since a frame before. None when the server ends."""
        if self.draining:
            return None
        loop = self.loop
        engine = self.served.engine.snapshot(before and before.engine)
        server = self.look(before.server.seen if before else 0)
        return Frame(loop.paused, loop.stepping, loop.slow, engine, server)

    # --- a prompt and its answer

    async def _count(self, request: HTTPRequest) -> Reply:
        """Count the tokens of a prompt."""
        body = await http.read_body(request, self._requests)
        pool = self._slow_pool if len(body) > http.LONG_BODY_BYTES else self._pool
        parse_request = partial(anthropic.parse_request, is_count=True)
        tokens = await self._events.run_in_executor(
            pool, count_tokens, self.served, parse_request, body
        )
        return reply({"input_tokens": tokens})

    async def _complete(
        self, protocol: type[ProtocolAdapter], request: HTTPRequest
    ) -> Reply | None:
        """From a body to its answer, whole or streamed. A client that hangs up cancels this at any
        point."""
        request.is_logged = True
        body = await http.read_body(request, self._requests)
        if self.draining:  # meanwhile
            raise shutting_down()
        submission = Submission(self.served, protocol, request.connection.client)
        self._submissions.add(submission)
        pool = self._slow_pool if len(body) > http.LONG_BODY_BYTES else self._pool
        try:
            await self._events.run_in_executor(pool, submission.parse_and_submit, body)
            body = b""  # free a large body while the answer runs
            request.size = 0
            if not submission.choices:
                await self._events.run_in_executor(self._grammar_pool, submission.submit)
            writer = request.answer = AnswerWriter(submission, self._writers)
            requests = tuple(choice.handle.id for choice in writer.choices)
            request.note(id=writer.id, requests=requests, stream=writer.is_stream)
            if writer.is_stream:
                return await writer.stream(request)
            return await writer.whole()
        except (ClientGone, asyncio.CancelledError):
            request.note_hang_up()  # before the answer is cancelled, which is another reason
            self._advise_after_hang_up(request, submission)
            raise
        finally:
            submission.cancel()
            self._submissions.discard(submission)
            if request.answer:
                request.answer.end()
                request.answer.account(request, self.metrics)
            request.answer = None

    def _advise_after_hang_up(self, request: HTTPRequest, submission: Submission) -> None:
        """Advise the owner when a client hangs up on the same long prompt for the second time."""
        if self.draining or not submission.choices:
            return
        handle = submission.choices[0].handle
        prefill = handle.prefill
        if not prefill.is_long:
            return
        client = request.record.client
        if self._hang_ups.add(client, handle.request.prompt) == 2:
            self.advise(hang_up_advice(client, time.time() - request.record.at, prefill))

"""The door: a bound socket, and the way of each HTTP request from there to its answer.

The problem. A request over a network is a stranger's: it may be malformed, huge, slow, or gone in
the middle of its answer. None of this may disturb the engine's thread, because all other requests
depend on that thread.

    POST -> guard -> read the body -> understand it (openai.py) -> engine.submit -> pieces -> events, or one JSON
            |______ the door's thread, asyncio _____|__ a few threads ______|_______ the door's thread _______|

The way out. A thread of the door's own speaks HTTP. A few threads beside it do the slow work:
reading JSON and turning text into tokens. After each commit the engine's thread wakes the door's
thread, if an answer has news. The socket is bound first. Until the model is loaded, clients get
503.

The invariant: each request at the door ends with an answer, or when the client hangs up. Afterwards
the request holds no slot.

Next: `bridge.py`, the way of one request; `fields.py`, how a body is read; `protocol.py`, the wishes
of all protocols; `choice.py`, the items of an answer; `request_log.py`, the door's memory.
"""

from __future__ import annotations

import asyncio
import ipaddress
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from queue import Empty, SimpleQueue

import h11
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4

from runtime.engine_protocol import AnyEngine
from runtime.errors import describe, show_fault
from runtime.handle import Handle
from runtime.loop import Loop
from runtime.snapshot import Snapshot
from runtime.validation import shown
from server import anthropic, auth, embeddings_api, http, live_page, openai, responses
from server.access_log import HangUps, RequestLog, ServerView, impatient
from server.adapter import ProtocolAdapter, ending
from server.completion import Answer, ServedModel, count
from server.http import Connection, Gone, HTTPRequest, Options, Reply, refused, reply
from server.metrics import ServerMetrics
from server.proxy import seen_through
from server.schema import APIError, check_model
from server.watch import MAX_WATCHERS, watch
from server.watch_frames import Frame
from text.grammar import SANDBOX_LIMITS

PROTOCOLS = {
    "/v1/chat/completions": openai.ChatCompletion,
    "/v1/completions": openai.Completion,
    "/v1/embeddings": embeddings_api.Embedding,
    "/v1/responses": responses.Response,
    "/v1/messages": anthropic.Message,
}
COUNT = "/v1/messages/count_tokens"
MODELS = "/v1/models"  # and, behind a slash, any name of the model
# A route's: returns a response, or writes through the visit
Answering = Callable[[HTTPRequest], Awaitable[Reply | None]]
DRAIN_S = 20.0  # when the server is told to end, running requests may go on for so long


class APIServer:
    """A bound socket at first. `start` lets clients in; `open` gives the door an engine and the loop
    that steps the engine."""

    def __init__(self, options: Options):
        self.options = options
        self.request_log = RequestLog()
        self.metrics = ServerMetrics()
        self.served: ServedModel | None = None  # None while the model is being loaded
        self.loop: Loop | None = None
        self.log: Callable[[str], None] | None = None  # takes a line for each request
        self.hint: Callable[[str], None] = lambda words: None  # takes advice for the owner
        self._hang_ups = HangUps()
        self.draining = False
        self.watchers = 0
        self._socket = http.listen(options.host, options.port)
        host, port = self._socket.getsockname()[:2]
        self.address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        self._born = int(time.time())
        self._requests: set[HTTPRequest] = set()
        self._scraped: Snapshot | None = None  # the engine at the last look at /metrics
        self._pool = ThreadPoolExecutor(4, "server")  # reads bodies
        # For long bodies, so that no short one waits behind them
        self._slow_pool = ThreadPoolExecutor(2, "server, long")
        # These wait for a process that tries a grammar. Two more are for grammars known already
        self._grammar_pool = ThreadPoolExecutor(SANDBOX_LIMITS.at_once + 2, "server, grammars")
        self.is_local = ipaddress.ip_address(host).is_loopback  # open to this machine alone
        self._routes = self._make_routes()
        self._connections: set[Connection] = set()
        self._events = asyncio.new_event_loop()
        self._is_over = asyncio.Event()
        self._open: dict[int, Answer] = {}  # by request id
        self._thread = threading.Thread(target=self._run, name="server", daemon=True)
        self._ended = threading.Event()

    def _make_routes(self) -> dict[str, tuple[str, Answering]]:
        """By path: the methods, and what answers."""
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

    # --- what any other thread may call

    def start(self) -> APIServer:
        self._thread.start()
        return self

    def open(self, engine: AnyEngine, loop: Loop, name: str) -> None:
        """From here on requests are answered."""
        self.loop = loop
        names = (name, "default", *self.options.aliases)
        self.served = ServedModel(engine, names, engine.text.advice)
        engine.on_commit = self._on_commit

    @property
    def _answers(self) -> list[Answer]:
        """Those that the engine is at work for."""
        answers = [request.answer for request in list(self._requests)]
        return [answer for answer in answers if answer]

    def _on_commit(self, handles: list[Handle]) -> None:
        """In the engine's thread: wake the door's thread, once for all requests with new output."""
        woken = []
        for handle in handles:
            answer = self._open.get(handle.id)
            if answer and answer.waits_for(handle):
                woken.append(answer)
        if woken:
            with suppress(RuntimeError):  # the door is shut already
                self._events.call_soon_threadsafe(self._wake, woken)

    def _wake(self, answers: list[Answer]) -> None:
        for answer in answers:
            answer.wake()

    @property
    def warning(self) -> str:
        """A line about who may come in, if everybody may; else nothing."""
        if self.is_local or self.options.api_key:
            return ""
        readers = "who has the watch key" if self.options.watch_key else "this machine"
        return (
            f"without --api-key everybody who reaches {self.address} may ask and see figures, "
            f"but only {readers} may read texts; pages of other hosts may not (--allow-host)"
        )

    def wait(self, signals: SimpleQueue) -> bool:
        """Wait for a signal in this queue: True. False if the door's thread ends before.

        subtle: Python handles a signal when the main thread runs. A signal just before the main
        thread goes to sleep is handled when the thread wakes up."""
        while not self._ended.is_set():
            with suppress(Empty):
                signals.get(timeout=0.5)
                return True
        return False

    def drain(self, patience: float, is_hurried: Callable[[], bool] = lambda: False) -> None:
        """Refuse new requests, and let running ones end: for so many seconds, or until somebody
        hurries."""
        self.draining = True
        if self.loop:
            self.loop.slow = 0.0
            self.loop.resume()  # a paused engine would never end
        deadline = time.monotonic() + patience
        while self._answers and time.monotonic() < deadline and not is_hurried():
            time.sleep(0.02)

    def close(self) -> None:
        """End running requests with an error, and let go of the socket."""
        self.draining = True
        for answer in self._answers:
            answer.cancel()
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

    def look(self, since: int = 0) -> ServerView:
        """The door now, and the calls that have ended since the watcher had seen `since` of them."""
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
        )

    # --- the way in: from here on all runs in the door's thread

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
                    connection.transport.abort()
                elif not connection.request:
                    connection.transport.close()
            await asyncio.sleep(0.01)
        sweeper.cancel()
        logger.cancel()

    async def _log_prefills(self) -> None:
        """A line for each long prompt when it is known to be long, then one every `LOG_S`."""
        while True:
            await asyncio.sleep(1)
            self._log_prefills_once(time.monotonic())

    def _log_prefills_once(self, now: float) -> None:
        # A function of its own, because a sleeping loop would keep the last visit in memory
        for request in list(self._requests) if self.log else ():
            prefill = request.answer and request.answer.prefill_to_log(now)
            if prefill and request.record.id:
                self.log(request.record.prefill_line(prefill))

    async def _serve(self, connection: Connection, head: h11.Request) -> None:
        """Each request comes through here: a visit begins, and its outcome is written down."""
        began = time.perf_counter()
        request = connection.request = HTTPRequest(connection, head, self.request_log)
        if request.path.startswith("/v1/messages"):
            request.error = anthropic.error
        self._requests.add(request)
        try:
            await self._answer(request)
        except (Gone, asyncio.CancelledError):
            request.note(hung_up=True, status=request.status or 499)
            raise
        finally:
            connection.request = None
            self._requests.discard(request)
            request.note(latency_s=time.perf_counter() - began)
            record = request.end()
            if request.is_logged:
                self.metrics.count(record)
                if self.log:
                    self.log(record.line)

    async def _answer(self, request: HTTPRequest) -> None:
        """An exception on a request's way becomes the answer."""
        try:
            reply = auth.share(request, self.options)
            if not reply:
                self._admit(request)
                reply = await self._find(request)(request)
            if not reply:
                request.end_events()
        except APIError as refusal:
            reply = refused(request, refusal)
        except Gone:
            raise
        # A fault of ours: this client is told, and the others do not notice
        except Exception as error:
            show_fault("a request over HTTP failed", error)
            reply = refused(request, APIError(500, describe(error), "internal_error"))
        if reply and request.status is None:
            await request.reply(reply)

    def _admit(self, request: HTTPRequest) -> None:
        if self.is_local:
            auth.check_host(request, self.options)
        connections = sum(each.has_request and not each.is_leaving for each in self._connections)
        auth.guard(request, self.options, connections)
        if request.path not in ("/", "/health", "/metrics"):
            if self.served is None:
                raise APIError(
                    503, "the model is being loaded; try again", "loading", Retry_After="1"
                )
            if self.draining:
                raise ending()

    def _find(self, request: HTTPRequest) -> Answering:
        """What answers on this path."""
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
        told = partial(openai.model, created=self._born, max_len=self.served.engine.sched.max_len)
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
        if code == 200 and self.served.engine.is_released:
            status = "unloaded"  # the next request is answered, but waits for the weights
        return reply({"status": status}, code)

    async def _metrics(self, request: HTTPRequest) -> Reply:
        seen = self.served.engine.snapshot(self._scraped) if self.served else None
        # The next look may never come. So no texts and steps are kept for it
        self._scraped = seen and replace(seen, requests=(), ended=(), steps=())
        gauges = {
            "http_connections": len(self._connections),
            "watchers": self.watchers,
            "paused_seconds": self.loop.paused_s if self.loop else 0.0,
        }
        text = self.metrics.text(seen, gauges)
        return Reply(text.encode(), type=CONTENT_TYPE_PLAIN_0_0_4)

    async def _page(self, request: HTTPRequest) -> Reply:
        """The page holds no data of this server. It asks as any watcher and any client does."""
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
        """Everything now, with the events since a frame before. None, once the server ends."""
        if self.draining:
            return None
        loop = self.loop
        engine = self.served.engine.snapshot(before and before.engine)
        door = self.look(before.door.seen if before else 0)
        return Frame(loop.paused, loop.stepping, loop.slow, engine, door)

    # --- a prompt and its answer

    async def _count(self, request: HTTPRequest) -> Reply:
        """How many tokens a prompt has."""
        body = await http.read_body(request, self._requests)
        pool = self._slow_pool if len(body) > http.LONG_BODY_BYTES else self._pool
        parse_request = partial(anthropic.parse_request, is_count=True)
        tokens = await self._events.run_in_executor(pool, count, self.served, parse_request, body)
        return reply({"input_tokens": tokens})

    async def _complete(
        self, protocol: type[ProtocolAdapter], request: HTTPRequest
    ) -> Reply | None:
        """From a body to its answer, whole or as a stream. A client that hangs up cancels this,
        wherever it is."""
        request.is_logged = True
        body = await http.read_body(request, self._requests)
        if self.draining:  # meanwhile
            raise ending()
        answer = Answer(self.served, protocol, request.record.client, self._open)
        request.answer = answer
        pool = self._slow_pool if len(body) > http.LONG_BODY_BYTES else self._pool
        try:
            await self._events.run_in_executor(pool, answer.ask, body)
            body = b""  # a large body is not kept while the answer runs
            request.size = 0
            if not answer.choices:
                await self._events.run_in_executor(self._grammar_pool, answer.submit)
            requests = tuple(choice.handle.id for choice in answer.choices)
            request.note(id=answer.adapter.id, requests=requests, stream=answer.parsed.stream)
            if answer.parsed.stream:
                return await answer.stream(request)
            return await answer.whole()
        except (Gone, asyncio.CancelledError):
            self._note_hang_up(request, answer)
            raise
        finally:
            answer.cancel()
            answer.forget()
            if request.record.requests:
                answer.account(request, self.metrics)
            request.answer = None

    def _note_hang_up(self, request: HTTPRequest, answer: Answer) -> None:
        """Advise the owner when a client hangs up on the same long prompt for the second time."""
        if self.draining or not answer.choices:
            return
        handle = answer.choices[0].handle
        prefill = handle.prefill
        if not prefill.is_long:
            return
        client = request.record.client
        if self._hang_ups.add(client, handle.request.prompt) == 2:
            self.hint(impatient(client, time.time() - request.record.at, prefill))

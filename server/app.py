"""The HTTP server: the listening socket, the routes, and the thread that serves them.

    POST -> guard -> read the body -> tokenize_request.py -> submit.py -> stream.py: events, or one JSON
            |_ server's thread, asyncio _|_ worker threads __|_ server's thread ____________|

Malformed, huge or slow requests must not disturb the engine's thread, so HTTP has a thread of its
own, and worker threads parse JSON and tokenize. After each commit the engine's thread wakes the
server's thread if there is new output. The socket is bound before the model is loaded; until then
clients get 503.

The invariant: every request ends with a response, or when its client hangs up, and occupies no slot
afterwards.

Next: follow one request through `APIServer._complete`, `tokenize_request.py`, `submit.py` and `stream.py`.
Then `model_pool.py` (which models are loaded), `protocol_adapter.py` (what the protocols share),
`status.py` (models, health, metrics) and `access_log.py` (records of requests).
"""

from __future__ import annotations

import asyncio
import ipaddress
import math
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

import h11

from base.error_reports import describe, show_fault
from base.validation import shown
from engine.handle import Handle
from engine.loop import Loop
from engine.server_snapshot import ServerView
from server import anthropic, auth, embeddings, http, openai, responses
from server.access_log import HangUps, RequestLog, hang_up_advice, prefill_line, request_line
from server.body_reader import APIError, read_json, without_folders
from server.forwarded_for import seen_through
from server.http import ClientGone, Connection, HTTPRequest, Options, Reply, refused, reply
from server.model_pool import ModelPool, PooledModel, ServedModel, Ticket
from server.protocol_adapter import ParsedRequest, ProtocolAdapter, shutting_down
from server.status import MODELS, Answering, Status
from server.stream import AnswerWriter
from server.submit import Submission
from server.tokenize_request import count_tokens
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
DRAIN_S = 20.0  # seconds that running requests get to finish after a shutdown signal
LOADING_S = 0.5  # seconds to wait for a model before a stream starts with SSE comments


class APIServer:
    """The HTTP server. `start` starts serving on the bound socket; `open` or `open_pool` provides the models."""

    def __init__(self, options: Options):
        self.options = options
        self.request_log = RequestLog()
        self.models: ModelPool | None = None  # None until `open` or `open_pool`
        self.log: Callable[[str], None] | None = None  # called with each line of the log
        self.advise: Callable[[str], None] = lambda words: None  # called with advice for the owner
        self._hang_ups = HangUps()
        self.draining = False
        self._socket = http.listen(options.host, options.port)
        host, port = self._socket.getsockname()[:2]
        self.address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        self._requests: set[HTTPRequest] = set()
        self._free: tuple[float, int | None] = (-math.inf, None)  # measured at, free bytes
        self._status = Status(self)
        self._pool = ThreadPoolExecutor(4, "server")  # parses and tokenizes bodies
        # For long bodies, so that short ones do not wait behind them
        self._slow_pool = ThreadPoolExecutor(2, "server, long")
        # Threads that wait for the sandbox, and two more for grammars that are already compiled
        self._grammar_pool = ThreadPoolExecutor(SANDBOX_LIMITS.at_once + 2, "server, grammars")
        self.is_local = ipaddress.ip_address(host).is_loopback  # listens on loopback only
        self._routes = self._make_routes()
        self._connections: set[Connection] = set()
        self._events = asyncio.new_event_loop()
        self._is_over = asyncio.Event()
        self._submissions: set[Submission] = set()  # one for each unfinished request
        self._writers: dict[Handle, AnswerWriter] = {}
        self._thread = threading.Thread(target=self._run, name="server", daemon=True)
        self._ended = threading.Event()

    def _make_routes(self) -> dict[str, tuple[str, Answering]]:
        """Return path -> (methods, handler)."""
        return {
            COUNT: ("POST", self._count),
            **{
                path: ("POST", partial(self._complete, speaks))
                for path, speaks in PROTOCOLS.items()
            },
            **self._status.routes(),
        }

    # --- called by other threads

    def start(self) -> APIServer:
        self._thread.start()
        return self

    def open(self, engine: Engine, loop: Loop, name: str) -> None:
        """Start answering requests with this engine."""
        self.open_pool(ModelPool.of_one(engine, loop, name, **self.pool_options))

    @property
    def pool_options(self) -> dict:
        return {"aliases": self.options.aliases, "max_tokens": self.options.max_tokens}

    def open_pool(self, models: ModelPool) -> None:
        """Start answering requests with these models."""
        models.on_load = self._listen_to
        for served in models.loaded:
            self._listen_to(served)
        self.models = models

    def _listen_to(self, served: ServedModel) -> None:
        self._status.metrics.add_model(served.name)
        served.engine.on_commit = self._on_commit

    def _on_commit(self, handles: list[Handle]) -> None:
        """Wake the server's thread once for all requests with new output. Runs in the engine's thread, or in the
        thread that cancels a request."""
        woken = []
        for handle in handles:
            writer = self._writers.get(handle)
            # An answer that is not streamed is sent when it is complete
            if writer and (writer.is_stream or handle.request.finish_reason):
                woken.append(writer)
        if woken:
            with suppress(RuntimeError):  # the server has shut down
                self._events.call_soon_threadsafe(self._wake, woken)

    def _wake(self, writers: list[AnswerWriter]) -> None:
        for writer in writers:
            writer.has_output.set()

    @property
    def warning(self) -> str:
        """A warning if anybody on the network may send requests; otherwise empty."""
        if self.is_local or self.options.api_key:
            return ""
        readers = "who has the watch key" if self.options.watch_key else "this machine"
        return (
            f"without --api-key everybody who can reach {self.address} may send requests and see figures, "
            f"but only {readers} may read texts; pages of other hosts may not (--allow-host)"
        )

    def wait(self, signals: SimpleQueue) -> bool:
        """Wait for a signal in this queue. Return False if the server's thread stops first.

        subtle: Python runs signal handlers only while the main thread executes. A signal that arrives
        just before the main thread blocks is handled when the wait times out.
        """
        while not self._ended.is_set():
            with suppress(Empty):
                signals.get(timeout=0.5)
                return True
        return False

    def drain(self, patience: float, is_hurried: Callable[[], bool] = lambda: False) -> None:
        """Refuse new requests and wait until running ones finish, for `patience` seconds or until
        `is_hurried` returns True."""
        self.draining = True
        for served in self.models.loaded if self.models else ():
            served.loop.slow = 0.0
            served.loop.resume()  # a paused engine would never finish its requests
        deadline = time.monotonic() + patience
        while self._submissions and time.monotonic() < deadline and not is_hurried():
            time.sleep(0.02)

    def close(self) -> None:
        """Cancel running requests with an error and close the socket."""
        self.draining = True
        for submission in list(self._submissions):
            submission.cancel()
        if self._thread.ident:
            with suppress(RuntimeError):  # the event loop is already closed
                self._events.call_soon_threadsafe(self._is_over.set)
            self._ended.wait(5)
        else:
            self._events.close()
        for served in self.models.loaded if self.models else ():
            served.engine.on_commit = None
        for pool in (self._pool, self._slow_pool, self._grammar_pool):
            pool.shutdown(wait=False, cancel_futures=True)
        self._socket.close()

    @property
    def changes(self) -> int:
        """The number of changes to the request log so far."""
        return self.request_log.changes

    @property
    def connections(self) -> int:
        return len(self._connections)

    def view(self, since: int = 0) -> ServerView:
        """Return a snapshot of the server with the requests that finished after number `since`."""
        opened, ended, count = self.request_log.records(since)
        return ServerView(
            address=self.address,
            draining=self.draining,
            connections=self.connections,
            watchers=self._status.watchers,
            open=opened,
            ended=ended,
            missed=count - since - len(ended),
            seen=count,
            free_memory=self._free_memory(),
        )

    def _free_memory(self) -> int | None:
        """Return the free memory, measured at most once a second because each measurement costs time."""
        looked, free = self._free
        loaded = self.models.loaded if self.models else ()
        if loaded and time.monotonic() > looked + 1.0:
            free = loaded[0].engine.lifecycle.free_memory
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
                if time.monotonic() > deadline:  # the client did not receive everything in time
                    connection.abort()
                elif not connection.request:
                    connection.transport.close()
            await asyncio.sleep(0.01)
        sweeper.cancel()
        logger.cancel()

    async def _log_prefills(self) -> None:
        """Log the prefill progress of each long prompt, every `LOG_S` seconds (`stream.py`)."""
        while True:
            await asyncio.sleep(1)
            self._log_prefills_once(time.monotonic())

    def _log_prefills_once(self, now: float) -> None:
        # A separate function, because the sleeping loop's locals would keep the last request alive
        for request in list(self._requests) if self.log else ():
            prefill = request.answer and request.answer.prefill_to_log(now)
            if prefill and request.record.id:
                self.log(prefill_line(request.record, prefill))

    async def _serve(self, connection: Connection, head: h11.Request) -> None:
        """Serve one request and record the outcome."""
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
            request.update_record(latency_s=time.perf_counter() - began)
            record = request.end()
            if request.is_logged:
                self._status.metrics.count(record)
                if self.log:
                    self.log(request_line(record))

    async def _answer(self, request: HTTPRequest) -> None:
        """Answer one request, and turn an exception into an error response."""
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
        # A bug in the server: only this client gets an error
        except Exception as error:
            show_fault("a request over HTTP failed", error)
            words = without_folders(describe(error))
            reply = refused(request, APIError(500, words, "internal_error"))
        if reply and request.status is None:
            await request.reply(reply)

    def _admit(self, request: HTTPRequest) -> Reply | None:
        """Return the reply to a CORS preflight, or None if the request may proceed."""
        connections = sum(each.idle_since == math.inf for each in self._connections)
        preflight = auth.admit(request, self.options, self.is_local, connections)
        if not preflight and request.path not in ("/", "/health", "/metrics"):
            if self.models is None:
                raise APIError(
                    503, "the model is being loaded; try again", "loading", Retry_After="1"
                )
            if self.draining:
                raise shutting_down()
        return preflight

    def _find(self, request: HTTPRequest) -> Answering:
        """Return the handler for the request's path."""
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

    # --- a prompt and its answer

    async def _count(self, request: HTTPRequest) -> Reply:
        """Count the tokens in a prompt."""
        body = await http.read_body(request, self._requests)
        model, parsed = await self._in_worker(body, self._parse_count, body)
        async with self._lent(request, self.models.borrow(model)) as served:
            tokens = await self._in_worker(body, count_tokens, served, anthropic.Message, parsed)
        return reply({"input_tokens": tokens})

    def _parse_count(self, body: bytes) -> tuple[PooledModel, ParsedRequest]:
        reader = read_json(body)
        model = self.models.named(reader.get("model"))
        return model, anthropic.parse_request(reader, is_count=True)

    def _in_worker(self, body: bytes, act: Callable, *given: object) -> asyncio.Future:
        """Run `act` in a worker thread of the pool for short or long bodies."""
        pool = self._slow_pool if len(body) > http.LONG_BODY_BYTES else self._pool
        return self._events.run_in_executor(pool, act, *given)

    @asynccontextmanager
    async def _lent(
        self, request: HTTPRequest, lent: ServedModel | Ticket
    ) -> AsyncIterator[ServedModel]:
        """Keep a model loaded inside the `with` block, after waiting for it if necessary."""
        try:
            yield await self._loaded(request, lent) if isinstance(lent, Ticket) else lent
        finally:
            if isinstance(lent, Ticket):
                self.models.leave(lent)
            else:
                self.models.give_back(lent)

    async def _loaded(
        self, request: HTTPRequest, ticket: Ticket, is_stream: bool = False
    ) -> ServedModel:
        """Wait until a model is loaded. A streaming client receives SSE comments in the meantime."""
        is_over = asyncio.Event()

        def wake() -> None:
            with suppress(RuntimeError):  # the server has shut down
                self._events.call_soon_threadsafe(is_over.set)

        ticket.wake = wake
        request.answer = ticket
        if not ticket.is_over:
            with suppress(TimeoutError):
                async with asyncio.timeout(LOADING_S):
                    await is_over.wait()
        if not ticket.is_over:
            if is_stream:
                request.begin_events()
            await is_over.wait()
        request.answer = None
        if ticket.refusal:
            raise ticket.refusal
        return ticket.served

    async def _complete(
        self, protocol: type[ProtocolAdapter], request: HTTPRequest
    ) -> Reply | None:
        """Read a body and answer it, with a single response or a stream. A hang-up cancels this
        coroutine at any point."""
        request.is_logged = True
        body = await http.read_body(request, self._requests)
        if self.draining:  # shutdown may have started while the body was read
            raise shutting_down()
        submission = Submission(self.models, protocol, request.connection.client)
        self._submissions.add(submission)
        try:
            await self._in_worker(body, submission.parse_and_submit, body)
            if submission.ticket:
                is_stream = submission.request.stream
                submission.served = await self._loaded(request, submission.ticket, is_stream)
                await self._in_worker(body, submission.parse_prompts)
            body = b""  # free a large body while the answer is generated
            request.size = 0
            if not submission.choices:
                await self._events.run_in_executor(self._grammar_pool, submission.submit)
            writer = request.answer = AnswerWriter(submission, self._writers)
            requests = tuple(choice.handle.id for choice in writer.choices)
            facts = {"id": writer.id, "requests": requests, "stream": writer.is_stream}
            request.update_record(model=submission.model, **facts)
            if writer.is_stream:
                return await writer.stream(request)
            return await writer.whole()
        except APIError as refusal:
            if request.status is None:
                raise
            # The stream started while the model was being loaded
            request.update_record(reason=refusal.code, message=refusal.message)
            adapter = protocol(submission.request, "", "")
            await request.write(adapter.fail(refusal))
        except (ClientGone, asyncio.CancelledError):
            request.note_hang_up()  # before `cancel` below, so that the recorded reason is the hang-up
            self._advise_after_hang_up(request, submission)
            raise
        finally:
            submission.cancel()
            self._submissions.discard(submission)
            request.update_record(model=submission.model)
            if isinstance(request.answer, AnswerWriter):
                request.answer.end()
                request.answer.account(request, self._status.metrics)
            request.answer = None
            submission.give_back()

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

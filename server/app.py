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
of all protocols; `choice.py`, the items of an answer; `journal.py`, the door's memory.
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
from server import anthropic, embeddings_api, http, live_page, openai, responses
from server.access_log import DoorView, Figures, HangUps, Journal, impatient
from server.adapter import Speaks, ending
from server.completion import Answer, Served, count
from server.http import Connection, Gone, Options, Reply, Visit, refused, reply
from server.schema import APIError, check_model
from server.watch import WATCHERS, watch
from server.watch_frames import Frame
from text.grammar import TRIAL

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
Answering = Callable[[Visit], Awaitable[Reply | None]]
DRAIN_S = 20.0  # when the server is told to end, running requests may go on for so long


class APIServer:
    """A bound socket at first. `start` lets clients in; `open` gives the door an engine and the loop
    that steps the engine."""

    def __init__(self, options: Options):
        self.options = options
        self.journal = Journal()
        self.figures = Figures()
        self.served: Served | None = None  # None while the model is being loaded
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
        self._visits: set[Visit] = set()
        self._scraped: Snapshot | None = None  # the engine at the last look at /metrics
        self._pool = ThreadPoolExecutor(4, "door")  # reads bodies
        # For long bodies, so that no short one waits behind them
        self._slow_pool = ThreadPoolExecutor(2, "door, long")
        # These wait for a process that tries a grammar. Two more are for grammars known already
        self._grammar_pool = ThreadPoolExecutor(TRIAL.at_once + 2, "door, grammars")
        self.is_local = ipaddress.ip_address(host).is_loopback  # open to this machine alone
        self._routes = self._make_routes()
        self._connections: set[Connection] = set()
        self._events = asyncio.new_event_loop()
        self._is_over = asyncio.Event()
        self._open: dict[int, Answer] = {}  # by request id
        self._thread = threading.Thread(target=self._run, name="door", daemon=True)
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
        self.served = Served(engine, names, engine.text.advice)
        engine.on_commit = self._on_commit

    @property
    def _answers(self) -> list[Answer]:
        """Those that the engine is at work for."""
        answers = [visit.answer for visit in list(self._visits)]
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

    def look(self, since: int = 0) -> DoorView:
        """The door now, and the calls that have ended since the watcher had seen `since` of them."""
        opened, ended, count = self.journal.look(since)
        return DoorView(
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
        sweeper = asyncio.ensure_future(http.sweep(self._visits))
        logger = asyncio.ensure_future(self._log_prefills())
        connect = partial(Connection, self._serve, self._connections)
        server = await self._events.create_server(connect, sock=self._socket)
        await self._is_over.wait()
        server.close()
        deadline = time.monotonic() + http.FAREWELL_S
        while self._connections:
            for connection in list(self._connections):
                if time.monotonic() > deadline:  # the client has not taken everything
                    connection.transport.abort()
                elif not connection.visit:
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
        for visit in list(self._visits) if self.log else ():
            prefill = visit.answer and visit.answer.prefill_to_log(now)
            if prefill and visit.call.id:
                self.log(visit.call.prefill_line(prefill))

    async def _serve(self, connection: Connection, request: h11.Request) -> None:
        """Each request comes through here: a visit begins, and its outcome is written down."""
        began = time.perf_counter()
        visit = connection.visit = Visit(connection, request, self.journal)
        if visit.path.startswith("/v1/messages"):
            visit.error = anthropic.error
        self._visits.add(visit)
        try:
            await self._answer(visit)
        except (Gone, asyncio.CancelledError):
            visit.note(hung_up=True, status=visit.status or 499)
            raise
        finally:
            connection.visit = None
            self._visits.discard(visit)
            visit.note(latency_s=time.perf_counter() - began)
            call = visit.end()
            if visit.is_news:
                self.figures.count(call)
                if self.log:
                    self.log(call.line)

    async def _answer(self, visit: Visit) -> None:
        """An exception on a request's way becomes the answer."""
        try:
            reply = http.share(visit, self.options)
            if not reply:
                self._admit(visit)
                reply = await self._find(visit)(visit)
            if not reply:
                visit.end_events()
        except APIError as refusal:
            reply = refused(visit, refusal)
        except Gone:
            raise
        # A fault of ours: this client is told, and the others do not notice
        except Exception as error:
            show_fault("a request over HTTP failed", error)
            reply = refused(visit, APIError(500, describe(error), "internal_error"))
        if reply and visit.status is None:
            await visit.reply(reply)

    def _admit(self, visit: Visit) -> None:
        if self.is_local:
            http.check_host(visit, self.options)
        connections = sum(each.has_asked and not each.is_leaving for each in self._connections)
        http.guard(visit, self.options, connections)
        if visit.path not in ("/", "/health", "/metrics"):
            if self.served is None:
                raise APIError(
                    503, "the model is being loaded; try again", "loading", Retry_After="1"
                )
            if self.draining:
                raise ending()

    def _find(self, visit: Visit) -> Answering:
        """What answers on this path."""
        path = visit.path
        known = MODELS if path.startswith(f"{MODELS}/") else path
        if known not in self._routes:
            words = f"there is no {shown(path)} here; there is {', '.join(self._routes)}"
            raise APIError(404, words, "unknown_url")
        methods, answer = self._routes[known]
        if visit.method not in methods.split(", "):
            words = f"{shown(visit.method)} is not a method of {path}; use {methods}"
            raise APIError(405, words, "method_not_allowed", Allow=methods)
        return answer

    # --- the small routes

    async def _models(self, visit: Visit) -> Reply:
        own, default, *more = self.served.names
        engine = self.served.engine
        facts = {"max_len": engine.sched.max_len, "quantization": engine.model.view.form}
        told = partial(openai.model, created=self._born, **facts)
        asked = visit.path[len(MODELS) + 1 :]
        if asked:
            check_model(asked, self.served.names)
            return reply(told(own if asked == default else asked))
        names = [own, *(name for name in more if name != "*")]
        return reply({"object": "list", "data": [told(name) for name in names]})

    async def _health(self, visit: Visit) -> Reply:
        status = "loading" if self.served is None else "draining" if self.draining else "ok"
        if self.loop and not self.loop.is_alive:
            status = "stopped"
        code = 200 if status == "ok" else 503
        if code == 200 and self.served.engine.is_released:
            status = "unloaded"  # the next request is answered, but waits for the weights
        return reply({"status": status}, code)

    async def _metrics(self, visit: Visit) -> Reply:
        seen = self.served.engine.snapshot(self._scraped) if self.served else None
        # The next look may never come. So no texts and steps are kept for it
        self._scraped = seen and replace(seen, requests=(), ended=(), steps=())
        gauges = {
            "http_connections": len(self._connections),
            "watchers": self.watchers,
            "paused_seconds": self.loop.paused_s if self.loop else 0.0,
        }
        text = self.figures.text(seen, gauges)
        return Reply(text.encode(), type=CONTENT_TYPE_PLAIN_0_0_4)

    async def _page(self, visit: Visit) -> Reply:
        """The page holds no data of this server. It asks as any watcher and any client does."""
        text, policy = live_page.live()
        headers = {"Content-Security-Policy": policy, "X-Content-Type-Options": "nosniff"}
        headers |= {"Cache-Control": "no-cache", "Referrer-Policy": "no-referrer"}
        return Reply(text.encode(), headers=headers, type="text/html; charset=utf-8")

    async def _watch(self, visit: Visit) -> None:
        if self.watchers >= WATCHERS:
            raise APIError(429, f"{WATCHERS} watch already", "rate_limit_exceeded", Retry_After="5")
        hello = {"model": self.served.names[0], "summary": self.served.engine.summary}
        hello["texts"] = http.may_read(visit, self.options)
        hello["temperature"] = self.served.defaults["temperature"]
        self.watchers += 1
        try:
            await watch(visit, hello, self._frame)
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

    async def _count(self, visit: Visit) -> Reply:
        """How many tokens a prompt has."""
        body = await http.read_body(visit, self._visits)
        pool = self._slow_pool if len(body) > http.LONG else self._pool
        understand = partial(anthropic.understand, is_count=True)
        tokens = await self._events.run_in_executor(pool, count, self.served, understand, body)
        return reply({"input_tokens": tokens})

    async def _complete(self, protocol: type[Speaks], visit: Visit) -> Reply | None:
        """From a body to its answer, whole or as a stream. A client that hangs up cancels this,
        wherever it is."""
        visit.is_news = True
        body = await http.read_body(visit, self._visits)
        if self.draining:  # meanwhile
            raise ending()
        answer = Answer(self.served, protocol, visit.call.client, self._open)
        visit.answer = answer
        pool = self._slow_pool if len(body) > http.LONG else self._pool
        try:
            await self._events.run_in_executor(pool, answer.ask, body)
            body = b""  # a large body is not kept while the answer runs
            visit.size = 0
            if not answer.choices:
                await self._events.run_in_executor(self._grammar_pool, answer.submit)
            requests = tuple(choice.handle.id for choice in answer.choices)
            visit.note(id=answer.shape.id, requests=requests, stream=answer.wish.stream)
            if answer.wish.stream:
                return await answer.stream(visit)
            return await answer.whole()
        except (Gone, asyncio.CancelledError):
            self._note_hang_up(visit, answer)
            raise
        finally:
            answer.cancel()
            answer.forget()
            if visit.call.requests:
                answer.account(visit, self.figures)
            visit.answer = None

    def _note_hang_up(self, visit: Visit, answer: Answer) -> None:
        """Advise the owner when a client hangs up on the same long prompt for the second time."""
        if self.draining or not answer.choices:
            return
        handle = answer.choices[0].handle
        prefill = handle.prefill
        if not prefill.is_long:
            return
        client = visit.call.client
        if self._hang_ups.add(client, handle.request.prompt) == 2:
            self.hint(impatient(client, time.time() - visit.call.at, prefill))

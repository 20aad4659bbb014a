"""The door: a bound socket, and the way of each HTTP request from there to its answer.

The problem. A request over a network is a stranger's: it may be malformed, huge, slow, or gone in
the middle of its answer. None of this may disturb the engine's thread, because all other requests
depend on that thread.

    POST -> guard -> read the body -> understand it (openai.py) -> engine.submit -> pieces -> events, or one JSON
            |______ the door's thread, asyncio _____|__ a few threads ______|_______ the door's thread _______|

The way out. `uvicorn` speaks HTTP in a thread of the door's own. A few threads beside it do the slow
work: reading JSON and turning text into tokens. After each commit the engine's thread wakes the
door's thread, if an answer has news. The socket is bound first. Until the model is loaded, clients
get 503.

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

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, Response

from door import embeddings, http, messages, openai, page, responses
from door.bridge import Answer, Mailbox, Served, count, defaults_of
from door.fields import Refusal
from door.http import Gone, Options, Visit, refused, reply
from door.journal import DoorView, Figures, Journal
from door.protocol import Speaks, check_model, ending
from door.watch import WATCHERS, Watched, watch
from parts.api.engine import AnyEngine
from parts.api.faults import describe, show_fault
from parts.api.loop import Loop
from parts.api.views import Snapshot
from parts.checks import shown
from parts.text.grammar import TRIAL

PROTOCOLS = {
    "/v1/chat/completions": openai.ChatCompletion,
    "/v1/completions": openai.Completion,
    "/v1/embeddings": embeddings.Embedding,
    "/v1/responses": responses.Response,
    "/v1/messages": messages.Message,
}
COUNT = "/v1/messages/count_tokens"
MODELS = "/v1/models"  # and, behind a slash, any name of the model
# A route's: returns a response, or writes through the visit
Answering = Callable[[Visit], Awaitable[Response | None]]
DRAIN_S = 20.0  # when the server is told to end, running requests may go on for so long


class Door:
    """A bound socket at first. `start` lets clients in; `open` gives the door an engine and the loop
    that steps the engine."""

    def __init__(self, options: Options):
        self.options = options
        self.journal = Journal()
        self.figures = Figures()
        self.served: Served | None = None  # None while the model is being loaded
        self.loop: Loop | None = None
        self.log: Callable[[str], None] | None = None  # takes a line for each request
        self.draining = False
        self.watchers = 0
        self._socket = http.listen(options.host, options.port)
        host, port = self._socket.getsockname()[:2]
        self.address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        self._born = int(time.time())
        self._visits: set[Visit] = set()
        self._answers: dict[int, Answer] = {}  # by the number of the call
        self._scraped: Snapshot | None = None  # the engine at the last look at /metrics
        self._pool = ThreadPoolExecutor(4, "door")  # reads bodies
        # For long bodies, so that no short one waits behind them
        self._slow_pool = ThreadPoolExecutor(2, "door, long")
        # These wait for a process that tries a grammar. Two more are for grammars known already
        self._grammar_pool = ThreadPoolExecutor(TRIAL.at_once + 2, "door, grammars")
        self.is_local = ipaddress.ip_address(host).is_loopback  # open to this machine alone
        self._routes = self._make_routes()
        self._pages = http.for_pages(self._answer, options)
        self._server = http.server(self._serve)
        self._thread = threading.Thread(target=self._run, name="door", daemon=True)
        self._ended = threading.Event()

    def _make_routes(self) -> dict[str, tuple[str, Answering]]:
        """By path: the methods, and what answers."""
        routes = {COUNT: ("POST", self._count)}
        for path, protocol in PROTOCOLS.items():
            routes[path] = ("POST", partial(self._complete, protocol))
        looks = {MODELS: self._models, "/health": self._health, "/metrics": self._metrics}
        for path, answer in (looks | {"/": self._page}).items():
            routes[path] = ("GET, HEAD", answer)
        routes["/watch"] = ("GET", self._watch)  # the answer to a HEAD would never end
        return routes

    # --- what any other thread may call

    def start(self) -> Door:
        self._thread.start()
        return self

    def open(self, engine: AnyEngine, loop: Loop, name: str) -> None:
        """From here on requests are answered."""
        self.loop = loop
        names = (name, "default", *self.options.aliases)
        self.served = Served(engine, names, defaults_of(engine))
        engine.on_commit = self._on_commit

    def _on_commit(self) -> None:
        if self._answers:  # then the door's thread runs, and has a mailbox
            self._mailbox.post()

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
        for answer in list(self._answers.values()):
            answer.cancel()
        self._server.should_exit = True
        if self._thread.ident:
            self._ended.wait(5)
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
            connections=self._count_connections(),
            watchers=self.watchers,
            open=opened,
            ended=ended,
            missed=count - since - len(ended),
            seen=count,
        )

    # --- the way in: from here on all runs in the door's thread

    def _run(self) -> None:
        try:
            asyncio.run(self._listen())
        finally:
            self._ended.set()

    async def _listen(self) -> None:
        self._mailbox = Mailbox(asyncio.get_running_loop(), self._answers)
        connections = self._server.server_state.connections
        sweeper = asyncio.ensure_future(http.sweep(connections, self._visits, self._answers))
        await self._server.serve([self._socket])
        sweeper.cancel()
        for connection in list(connections):  # their clients have not taken everything
            connection.transport.abort()
        await asyncio.sleep(0)

    async def _serve(self, scope: dict, receive: Callable, send: Callable) -> None:
        """Each request comes through here: a visit begins, and its outcome is written down."""
        began = time.perf_counter()
        request = Request(scope, receive)
        client = request.client.host if request.client else ""
        number = self.journal.begin(client, f"{request.method} {scope['path']}"[:200])
        visit = Visit(request, number, send, self.journal)
        scope["state"]["visit"] = visit
        if scope["path"].startswith("/v1/messages"):
            visit.error = messages.error
        visit.connection.begin_visit(visit)
        self._visits.add(visit)
        try:
            await self._pages(scope, receive, send)
        finally:
            self._end(visit, began)

    def _end(self, visit: Visit, began: float) -> None:
        self._visits.discard(visit)
        del visit.request.scope["state"]["visit"]  # each refers to the other
        visit.connection.end_visit(visit)
        visit.note(latency_s=time.perf_counter() - began)
        call = self.journal.end(visit.number, is_kept=visit.is_news)
        if visit.is_news:
            self.figures.count(call)
            if self.log:
                self.log(call.line)

    async def _answer(self, scope: dict, receive: Callable, send: Callable) -> None:
        """An exception on a request's way becomes the answer. `send` adds the headers for pages of
        other origins."""
        visit: Visit = scope["state"]["visit"]
        visit.send_head = send
        request = visit.request
        response = None
        try:
            self._admit(request)
            response = await self._find(request)(visit)
            if response:
                await response(scope, receive, visit.send)
        except Refusal as refusal:
            response = refused(visit, refusal)
        except (ClientDisconnect, Gone):
            visit.note(hung_up=True, status=visit.status or 499)
        # A fault of ours: this client is told, and the others do not notice
        except Exception as error:
            show_fault("a request over HTTP failed", error)
            response = refused(visit, Refusal(500, describe(error), "internal_error"))
        if response and visit.status is None:
            await response(scope, receive, visit.send)

    def _admit(self, request: Request) -> None:
        if self.is_local:
            http.check_host(request, self.options)
        http.guard(request, self.options, self._pages, self._count_connections())
        if request.scope["path"] not in ("/", "/health", "/metrics"):
            if self.served is None:
                raise Refusal(
                    503, "the model is being loaded; try again", "loading", Retry_After="1"
                )
            if self.draining:
                raise ending()

    def _count_connections(self) -> int:
        return len(self._server.server_state.connections)

    def _find(self, request: Request) -> Answering:
        """What answers on this path."""
        path = request.scope["path"]
        known = MODELS if path.startswith(f"{MODELS}/") else path
        if known not in self._routes:
            words = f"there is no {shown(path)} here; there is {', '.join(self._routes)}"
            raise Refusal(404, words, "unknown_url")
        methods, answer = self._routes[known]
        if request.method not in methods.split(", "):
            words = f"{shown(request.method)} is not a method of {path}; use {methods}"
            raise Refusal(405, words, "method_not_allowed", Allow=methods)
        return answer

    # --- the small routes

    async def _models(self, visit: Visit) -> Response:
        own, default, *more = self.served.names
        told = partial(openai.model, created=self._born, max_len=self.served.engine.sched.max_len)
        asked = visit.request.scope["path"][len(MODELS) + 1 :]
        if asked:
            check_model(asked, self.served.names)
            return reply(told(own if asked == default else asked))
        names = [own, *(name for name in more if name != "*")]
        return reply({"object": "list", "data": [told(name) for name in names]})

    async def _health(self, visit: Visit) -> Response:
        status = "loading" if self.served is None else "draining" if self.draining else "ok"
        if self.loop and not self.loop.is_alive:
            status = "stopped"
        code = 200 if status == "ok" else 503
        if code == 200 and self.served.engine.is_released:
            status = "unloaded"  # the next request is answered, but waits for the weights
        return reply({"status": status}, code)

    async def _metrics(self, visit: Visit) -> Response:
        seen = self.served.engine.snapshot(self._scraped) if self.served else None
        # The next look may never come. So no texts and steps are kept for it
        self._scraped = seen and replace(seen, requests=(), ended=(), steps=())
        gauges = {
            "http_connections": self._count_connections(),
            "watchers": self.watchers,
            "paused_seconds": self.loop.paused_s if self.loop else 0.0,
        }
        text = self.figures.text(seen, gauges)
        return Response(text, headers={"content-type": CONTENT_TYPE_PLAIN_0_0_4})

    async def _page(self, visit: Visit) -> Response:
        """The page holds no data of this server. It asks as any watcher and any client does."""
        text, policy = page.live()
        headers = {"content-security-policy": policy, "x-content-type-options": "nosniff"}
        headers |= {"cache-control": "no-cache", "referrer-policy": "no-referrer"}
        return HTMLResponse(text, headers=headers)

    async def _watch(self, visit: Visit) -> None:
        if self.watchers >= WATCHERS:
            raise Refusal(429, f"{WATCHERS} watch already", "rate_limit_exceeded", Retry_After="5")
        watched = Watched(
            self.served.names[0],
            self.served.engine,
            self.loop,
            texts=http.may_read(visit.request, self.options),
            look=self.look,
            is_over=lambda: self.draining,
        )
        self.watchers += 1
        try:
            await watch(watched, visit)
        finally:
            self.watchers -= 1

    # --- a prompt and its answer

    async def _count(self, visit: Visit) -> Response:
        """How many tokens a prompt has."""
        body = await http.read_body(visit, self._visits)
        pool = self._slow_pool if len(body) > http.LONG else self._pool
        events = asyncio.get_running_loop()
        understand = partial(messages.understand, is_count=True)
        tokens = await events.run_in_executor(pool, count, self.served, understand, body)
        return reply({"input_tokens": tokens})

    def _submit(self, answer: Answer, visit: Visit) -> None:
        """In one of a few threads, when its turn comes. The client may be gone by then."""
        if visit.connection.lost.is_set():
            raise Gone
        answer.submit()

    async def _complete(self, protocol: type[Speaks], visit: Visit) -> Response | None:
        """From a body to its answer, whole or as a stream, while somebody listens."""
        visit.is_news = True
        answer = Answer(self.served, protocol, http.network_of(visit.call.client))
        events = asyncio.get_running_loop()
        tasks = []
        try:
            body = await http.read_body(visit, self._visits)
            if self.draining:  # meanwhile
                raise ending()
            self._answers[visit.number] = answer
            pool = self._slow_pool if len(body) > http.LONG else self._pool
            await events.run_in_executor(pool, answer.ask, body)
            body = b""  # a large body is not kept while the answer runs
            visit.size = 0
            if not answer.choices:
                await events.run_in_executor(self._grammar_pool, self._submit, answer, visit)
            requests = tuple(choice.handle.id for choice in answer.choices)
            visit.note(id=answer.shape.id, requests=requests, stream=answer.wish.stream)
            work = answer.stream(visit) if answer.wish.stream else answer.whole(self._slow_pool)
            tasks.append(asyncio.ensure_future(work))
            tasks.append(asyncio.ensure_future(visit.connection.lost.wait()))
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if not tasks[0].done():
                raise Gone
            return tasks[0].result()
        finally:
            while tasks:  # a task keeps its exception, and the exception keeps this frame
                tasks.pop().cancel()
            answer.cancel()
            if visit.call.requests:
                answer.account(visit, self.figures)
            self._answers.pop(visit.number, None)

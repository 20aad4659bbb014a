"""The door: a bound socket, and the way of each HTTP request from there to its answer.

The problem. A request over a network is a stranger's: it may be malformed, huge, slow, or gone in the middle of its
answer. None of that may reach the thread that steps, for all other requests wait for it.

    POST -> guard -> read the body -> understand it (openai.py) -> engine.submit -> pieces -> events, or one JSON
            |______ the door's thread, asyncio _____|__ a few threads ______|_______ the door's thread _______|

How it hangs together. `uvicorn` speaks HTTP in a thread of the door's own. What may take long, reading JSON and turning
text into tokens, is done by a few threads beside it. After each commit the thread that steps wakes the door's thread,
if one of the answers has news. The socket is bound first. Until the model is loaded, clients get 503.

The invariant: each request at the door ends with an answer, or with its client's hang-up, and frees its slots.

Next: `bridge.py`, the way of one request; `openai.py`, what a body may ask for; `journal.py`, what is remembered of it.
"""

from __future__ import annotations

import asyncio
import ipaddress
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from door import http, openai
from door.bridge import Answer, Mailbox, Served, defaults_of
from door.http import Gone, Options, Visit, refused, reply
from door.journal import DoorView, Figures, Journal, LogFile
from door.openai import Refusal, ending
from door.watch import WATCHERS, Watched, watch
from parts.api.engine import AnyEngine
from parts.api.faults import describe, show_fault
from parts.api.loop import Loop
from parts.checks import shown

DRAIN_S = 20.0  # what runs when the server is told to end may go on so long


class Door:
    """A bound socket at first; `start` lets clients in, and `open` lets them ask an engine that a loop steps."""

    def __init__(self, options: Options, log: LogFile | None = None):
        self.options, self.journal, self.figures, self._log = options, Journal(), Figures(), log
        self._socket = http.listen(options.host, options.port)
        host, port = self._socket.getsockname()[:2]
        self.address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        self._is_local = ipaddress.ip_address(host).is_loopback
        self.served: Served | None = None  # None while the model is being loaded
        self.loop: Loop | None = None
        self.draining = False
        self._born = int(time.time())
        self._visits: set[Visit] = set()
        self._answers: dict[int, Answer] = {}  # by the number of the call
        self.watchers, self._scraped = 0, None  # `_scraped`: the snapshot of the last look at /metrics
        self._pool = ThreadPoolExecutor(4, "door")  # reads bodies
        self._server = http.server(self._serve)
        self._thread, self._ended = threading.Thread(target=self._run, name="door", daemon=True), threading.Event()
        self._routes: dict[str, tuple[str, Callable]] = {
            "/v1/chat/completions": ("POST", partial(self._complete, True)),
            "/v1/completions": ("POST", partial(self._complete, False)),
            "/v1/models": ("GET", self._models),
            "/health": ("GET", self._health),
            "/metrics": ("GET", self._metrics),
            "/watch": ("GET", self._watch),
        }

    # --- what any other thread may call

    def start(self) -> Door:
        self._thread.start()
        return self

    def open(self, engine: AnyEngine, loop: Loop, name: str) -> None:
        """From here on requests are answered."""
        self.loop, self.served = loop, Served(engine, name, defaults_of(engine))
        engine.on_commit = self._on_commit

    def _on_commit(self) -> None:
        if self._answers:  # then the door's thread runs, and has a mailbox
            self._mailbox.post()

    def wait(self) -> None:
        """Until the door's thread has ended. subtle: `join` would forget a thread if Ctrl-C came out of it (3.11)."""
        self._ended.wait()

    def drain(self, patience: float, is_hurried: Callable[[], bool] = lambda: False) -> None:
        """Refuse what comes, and let what runs go on to its end: for so many seconds, or until somebody hurries."""
        self.draining = True
        if self.loop:
            self.loop.slow = 0.0
            self.loop.resume()  # what is paused would never end
        deadline = time.monotonic() + patience
        while self._answers and time.monotonic() < deadline and not is_hurried():
            time.sleep(0.02)

    def close(self) -> None:
        """End with an error what still runs, and let go of the socket."""
        self.draining = True
        for answer in list(self._answers.values()):
            answer.cancel()
        self._server.should_exit = True
        if self._thread.ident:
            self._ended.wait(5)
        if self.served:
            self.served.engine.on_commit = None
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._socket.close()

    def look(self, since: int = 0) -> DoorView:
        """What can be seen at the door, and what has happened there since the watcher had seen `since` ended calls."""
        opened, ended, count = self.journal.look(since)
        state = (self.address, self.draining, len(self._server.server_state.connections), self.watchers)
        return DoorView(*state, opened, ended, count - since - len(ended), count)

    # --- the way in: from here on all runs in the door's thread

    def _run(self) -> None:
        try:
            asyncio.run(self._listen())
        finally:
            self._ended.set()

    async def _listen(self) -> None:
        self._mailbox = Mailbox(asyncio.get_running_loop(), self._answers)
        sweeper = asyncio.ensure_future(http.sweep(self._server.server_state.connections, self._visits))
        await self._server.serve([self._socket])
        sweeper.cancel()

    async def _serve(self, scope: dict, receive: Callable, send: Callable) -> None:
        """Each request comes through here, and whatever is raised on its way becomes its answer."""
        client = scope["client"][0] if scope.get("client") else ""
        number, began = self.journal.begin(client, f"{scope['method']} {scope['path']}"[:200]), time.perf_counter()
        visit = Visit(Request(scope, receive), number, send, self.journal)
        self._visits.add(visit)
        try:
            http.take_target(scope)
            http.guard(visit.request, self.options, self._is_local, len(self._server.server_state.connections))
            response = await self._route(visit.request)(visit)
        except Refusal as refusal:
            response = refused(visit, refusal)
        except (ClientDisconnect, Gone):
            response = None
            visit.note(hung_up=True, status=visit.status or 499)
        except Exception as error:  # a fault of ours: this client is told, and the others do not notice
            show_fault("a request over HTTP failed", error)
            response = refused(visit, Refusal(500, describe(error), "internal_error"))
        if response and visit.status is None:
            await response(scope, receive, visit.send)
        self._visits.discard(visit)
        visit.note(latency_s=time.perf_counter() - began)
        if visit.is_news:
            call = self.journal.end(number)
            self.figures.count(call)
            if self._log:
                self._log.write(call.line)
        else:
            self.journal.forget(number)

    def _route(self, request: Request) -> Callable:
        path = request.scope["path"]
        route = "/v1/models" if path.startswith("/v1/models/") else path
        if route not in self._routes:
            words = f"there is no {shown(path)} here; there is {', '.join(self._routes)}"
            raise Refusal(404, words, "unknown_url")
        method, handler = self._routes[route]
        methods = ["GET", "HEAD"] if method == "GET" and route != "/watch" else [method]
        if request.method == "OPTIONS":
            return partial(self._options, ", ".join([*methods, "OPTIONS"]))
        if request.method not in methods:
            words = f"{shown(request.method)} is not a method of {path}; use {method}"
            raise Refusal(405, words, "method_not_allowed", Allow=", ".join([*methods, "OPTIONS"]))
        if path not in ("/health", "/metrics") and self.served is None:
            raise Refusal(503, "the model is being loaded; try again", "loading", Retry_After="1")
        if path not in ("/health", "/metrics") and self.draining:
            raise ending()
        return handler

    # --- the small routes

    async def _options(self, allow: str, visit: Visit) -> Response:
        return Response(status_code=204, headers={"Allow": allow})

    async def _models(self, visit: Visit) -> Response:
        name, max_len = self.served.name, self.served.engine.sched.max_len
        asked = visit.request.scope["path"].removeprefix("/v1/models").removeprefix("/")
        if not asked:
            return reply(openai.models(name, self._born, max_len))
        openai.check_model(asked, (name, "default"))
        return reply(openai.model(name, self._born, max_len))

    async def _health(self, visit: Visit) -> Response:
        status = "loading" if self.served is None else "draining" if self.draining else "ok"
        if self.loop and not self.loop.is_alive:
            status = "stopped"
        return reply({"status": status}, 200 if status == "ok" else 503)

    async def _metrics(self, visit: Visit) -> Response:
        self._scraped = self.served.engine.snapshot(self._scraped) if self.served else None
        gauges = {"http_connections": len(self._server.server_state.connections), "watchers": self.watchers}
        gauges["paused_seconds"] = self.loop.paused_s if self.loop else 0.0
        text = self.figures.text(self._scraped, gauges)
        return Response(text, media_type="text/plain; version=0.0.4")

    async def _watch(self, visit: Visit) -> None:
        if self.watchers >= WATCHERS:
            raise Refusal(429, f"{WATCHERS} watch already", "rate_limit_exceeded", Retry_After="5")
        watched = Watched(
            self.served.name,
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

    async def _complete(self, chat: bool, visit: Visit) -> Response | None:
        """From a body to its answer, whole or as a stream, while somebody listens."""
        visit.is_news = True
        body, events = await http.read_body(visit.request), asyncio.get_running_loop()
        if self.draining:  # meanwhile
            raise ending()
        answer = self._answers[visit.number] = Answer(self.served)
        tasks = []
        try:
            await events.run_in_executor(self._pool, answer.ask, chat, body, visit.call.client)
            requests = tuple(handle.id for handle in answer.handles)
            visit.note(id=answer.shape.id, requests=requests, stream=answer.wish.stream)
            work = answer.stream(visit) if answer.wish.stream else answer.whole()
            tasks = [asyncio.ensure_future(work), asyncio.ensure_future(http.hang_up(visit.request))]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if not tasks[0].done():
                raise Gone
            return tasks[0].result()
        finally:
            for task in tasks:
                task.cancel()
            answer.cancel()
            if visit.call.requests:
                answer.account(visit, self.figures)
            del self._answers[visit.number]

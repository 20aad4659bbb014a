"""The HTTP server, for programs that speak OpenAI's protocol. We call it the *door*, and an HTTP request a *visit*.

    python serve.py --model demo
    curl http://127.0.0.1:8000/v1/chat/completions -d '{"messages": [{"role": "user", "content": "Why batch?"}]}' \
        -H 'Content-Type: application/json'

The problem. A request over a network is a stranger's: it may be malformed, huge, slow, or gone in the middle of its
answer. None of that may reach the thread that steps, for all other requests wait for it.

    POST -> guard -> read the body -> understand it (parts/openai.py) -> engine.submit -> pieces -> events, or one JSON
            |______ the door's thread, asyncio _____|__ a few threads ______________|_______ the door's thread _______|

How it hangs together. `uvicorn` speaks HTTP in a thread of the door's own. What may take long, reading JSON and turning
text into tokens, is done by a few threads beside it. The thread that steps calls a request's listener, which does one
thing: it wakes the door's thread. The socket is bound first. Until the model is loaded, clients get 503.

The invariant: each request at the door ends with an answer, or with its client's hang-up, and frees its slots.

Before this: `ask.py`, the smallest user of the engine. Next: `parts/bridge.py`, the way of one request;
`parts/openai.py`, what a body may ask for; `parts/journal.py`, what is remembered of all this.
"""

from __future__ import annotations

# It comes first, so that Ctrl-C is quiet during the other imports, too.
from parts import program  # isort: split

import argparse
import asyncio
import gc
import ipaddress
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from parts import http, openai
from parts.api.listen import describe
from parts.bridge import Answer, Mailbox, Served, defaults_of
from parts.checks import one_line, read_whole, shown
from parts.device import blas
from parts.http import Gone, Options, Visit, refused, reply
from parts.journal import DoorView, Figures, Journal, LogFile
from parts.openai import Refusal, ending
from parts.watch import watch
from sched import POLICIES

if TYPE_CHECKING:  # they need MLX, which is loaded when the socket has been bound
    from nanobatch import Engine
    from parts.api.loop import Loop

DRAIN_S = 20.0  # what runs when the server is told to end may go on so long


# --- the door ------------------------------------------------------------------------------------------------------


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
            "/watch": ("GET", partial(watch, self)),
        }

    # --- what any other thread may call

    def start(self) -> Door:
        self._thread.start()
        return self

    def open(self, engine: Engine, loop: Loop, name: str) -> None:
        """From here on requests are answered."""
        self.loop, self.served = loop, Served(engine, name, defaults_of(engine))

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
        self._mailbox = Mailbox(asyncio.get_running_loop())
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

    # --- a prompt and its answer

    async def _complete(self, chat: bool, visit: Visit) -> Response | None:
        """From a body to its answer, whole or as a stream, while somebody listens."""
        visit.is_news = True
        body, events = await http.read_body(visit.request), asyncio.get_running_loop()
        if self.draining:  # meanwhile
            raise ending()
        answer = self._answers[visit.number] = Answer(self.served, self._mailbox)
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


# --- the command line ----------------------------------------------------------------------------------------------


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """A wrong value gets one line and exit code 2, before anything is loaded."""
    parser = program.Parser("serve.py", description="Answer programs that speak OpenAI's protocol.")
    add = parser.add_argument
    add("--model", default="demo", help="a model folder, a hub id such as owner/name, or 'demo'")
    add("--host", default="127.0.0.1", help="the address to listen on (default: 127.0.0.1, for this machine alone)")
    add("--port", default="8000", help="0 takes any that is free (default: 8000)")
    add("--slots", default="4", help="sequences that run at once (default: 4)")
    add("--max-len", help="length of a slot, prompt and answer together (default: 8192, or what the model allows)")
    add("--policy", default=next(iter(POLICIES)), choices=POLICIES, help="when the next in line is admitted")
    add("--max-queue", default="256", help="requests that may wait; more are refused with 429 (default: 256)")
    parser.add_keys()
    add("--log-file", metavar="FILE", help="where a line for each request goes (default: standard error)")
    args = parser.parse_args(arguments)
    try:
        args.port = read_whole("--port", args.port, 0, 65535)
        args.slots = read_whole("--slots", args.slots, 1, 4096)
        args.max_len = args.max_len and read_whole("--max-len", args.max_len, 2, 2**24)
        args.max_queue = read_whole("--max-queue", args.max_queue, 1, 10**6)
        program.check_model(args.model)
        args.log = open(args.log_file, "a", encoding="utf-8") if args.log_file else sys.stderr  # noqa: SIM115
    except (ValueError, OSError) as error:
        parser.error(str(error))
    return args


def follow(args: argparse.Namespace) -> int:
    """On every rank but the first (`parts/ranks/ranks.py`): no door, but a share of the model."""
    try:
        return load(args).follow()
    except (ValueError, OSError, RuntimeError) as error:
        print(f"nanobatch: {one_line(error)}", file=sys.stderr)
        return 2


def main(arguments: list[str] | None = None) -> int:
    args = parse_arguments(arguments)
    if program.rank():
        return follow(args)
    options = Options(args.host, args.port, args.api_key, args.watch_key, tuple(args.allow_host))
    log = LogFile(args.log)
    try:
        door = Door(options, log)
    except OSError as error:  # the port is taken
        print(f"nanobatch: --host {args.host} --port {args.port}: {error.strerror or error}", file=sys.stderr)
        return 2

    signals = []  # the first lets answers end, the second ends them, and more change nothing

    def leave(number: int, _) -> None:
        if door.served is None:
            os._exit(0)  # a download, or a layer that is being read, cannot be interrupted, but it can be left
        signals.append(number)
        if len(signals) == 1:
            raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, leave)
    signal.signal(signal.SIGINT, leave)
    door.start()
    engine, code = None, 0
    try:
        engine = load(args)
        name = program.name_of(args.model)
        door.open(engine, engine.serving().start(), name)
        print(f"nanobatch: {name} at {door.address}/v1; {engine.summary}", file=sys.stderr, flush=True)
        door.wait()
    except KeyboardInterrupt:
        door.drain(DRAIN_S, lambda: len(signals) > 1)
    except (ValueError, OSError, RuntimeError) as error:
        print(f"nanobatch: {one_line(error)}", file=sys.stderr)
        code = 2
    for each in (signal.SIGTERM, signal.SIGINT):  # the rest is short, and half done it would end in a crash
        signal.signal(each, signal.SIG_IGN)
    door.close()
    log.close()
    if engine:
        engine.close()
    return code


def load(args: argparse.Namespace, report: Callable[[str], None] | None = None, **how) -> Engine:
    """This is the first code to import MLX. The screen gives a clock and a report."""
    if report:
        report("starting MLX")
        blas.say = report  # before MLX is imported, its matrix product may have to be compiled
    from nanobatch import Engine

    sizes = {"slots": args.slots, "max_len": args.max_len, "usual_len": 8192}
    options = {"policy": args.policy, "max_queue": args.max_queue}
    engine = Engine.load(args.model, report=report, **options, **sizes, **how)
    engine.runner.warm_up()
    if engine.text.has_template:
        with suppress(ValueError):
            engine.text.render([{"role": "user", "content": "compiles the template"}])
    gc.collect()
    gc.freeze()  # what loading has left is never garbage, so the collector need not search it in mid-step
    return engine


if __name__ == "__main__":
    program.run(main)

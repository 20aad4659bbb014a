"""The door: programs that speak OpenAI's protocol ask the engine, over HTTP.

    python serve.py --model demo
    curl http://127.0.0.1:8000/v1/chat/completions -d '{"messages": [{"role": "user", "content": "Why batch?"}]}' \
        -H 'Content-Type: application/json'

The problem. A request over a network is a stranger's: it may be malformed, huge, slow, or gone in the middle of its
answer. None of that may reach the thread that steps, for all other requests wait for it.

    POST -> guard -> read the body -> understand it (parts/openai.py) -> engine.submit -> pieces -> events, or one JSON
            |______ the door's thread, asyncio _____|__ a few threads ______________|_______ the door's thread _______|

How it hangs together. `uvicorn` speaks HTTP in a thread of the door's own. What may take long, reading JSON and turning
text into tokens, is done by a few threads beside it. The thread that steps calls a request's listener, which does one
thing: it wakes the door's thread. The socket is bound before the model is loaded; until then the answer is 503.

The invariant: each request at the door ends with an answer, or with its client's hang-up. Then its slots are free.

Before this: `ask.py`, the smallest user of the engine. Next: `parts/openai.py`, what a body may ask for;
`parts/journal.py`, what is remembered of all this.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import hmac
import ipaddress
import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urlsplit

import uvicorn
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from parts import openai, wire
from parts.answers import describe
from parts.checks import read_whole, shown
from parts.journal import Call, DoorView, Figures, Journal, LogFile
from parts.openai import Refusal, Shape, Wish, Words, dump, event
from sched import POLICIES, QueueFull

if TYPE_CHECKING:  # they need MLX, which is loaded when the socket has been bound
    from nanobatch import Engine, Handle
    from parts.loop import Loop
    from parts.text import Prompt

BODY = 4 * 2**20  # bytes; a prompt that fills a slot of 8,192 tokens has about 50,000
BODY_S = 30.0  # a body must have come by then
DRAIN_S = 20.0  # what runs when the server is told to end may go on so long
STUCK_S = 60.0  # a client that takes nothing for so long is gone
HEAD_S, IDLE_S = 30.0, 75.0  # a connection waits so long for its first request, and for another one
PING_S = 10.0  # in a long silence, a comment says so often that we are still here
WATCH_S, WATCH_STUCK_S, WATCHERS = 0.1, 5.0, 16
CONNECTIONS = 512
PING, TOO_LONG = b": ping\n\n", "context_length_exceeded"
LOOPBACK = ("localhost", "127.0.0.1", "::1")


class Options(NamedTuple):
    """How the door is opened."""

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str = ""
    watch_key: str = ""
    allow_hosts: tuple[str, ...] = ()


# --- one request ---------------------------------------------------------------------------------------------------


class Answer:
    """One request's choices, as they come from the engine. The engine's thread only wakes the door's."""

    def __init__(self, events: asyncio.AbstractEventLoop):
        self.handles: list[Handle] = []
        self.left, self.n = 0, 1  # choices that have not ended; choices of each prompt
        self.times: list[list[float]] = []  # for each choice, when its pieces came here
        self._pieces: deque[tuple[int, str | None]] = deque()  # (choice, text); None: the choice has ended
        self._events, self._news = events, asyncio.Event()

    def submit(self, engine: Engine, asks: Sequence[tuple], n: int, stream: bool, origin: str) -> None:
        """A choice for each (prompt, sampling). All get in line, or none does."""
        self.left, self.n, self.times = len(asks), n, [[] for _ in asks]
        try:
            for index, ask in enumerate(asks):
                # Without streaming, the thread is woken once, at the end, and not for each token.
                listener = partial(self._tell, index) if stream else None
                ended = partial(self._tell, index, piece=None)
                self.handles.append(engine.submit(*ask, listener, origin=origin, ended=ended))
        except BaseException:
            self.cancel()
            raise

    def _tell(self, index: int, handle: Handle, piece: str | None) -> None:
        """In the engine's thread, which must not wait."""
        self._events.call_soon_threadsafe(self._take, index, piece)

    def _take(self, index: int, piece: str | None) -> None:
        if piece is None:
            self.left -= 1
        else:
            self.times[index].append(time.perf_counter())
        self._pieces.append((index, piece))
        self._news.set()

    async def news(self) -> list[tuple[int, str | None]]:
        """What has come since, neighbouring pieces joined. Empty after a long silence."""
        if not self._pieces:
            self._news.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(PING_S):
                    await self._news.wait()
        joined: list[tuple[int, str | None]] = []
        while self._pieces:
            index, piece = self._pieces.popleft()
            if piece and joined and joined[-1][0] == index:
                piece = joined.pop()[1] + piece
            joined.append((index, piece))
        return joined

    def cancel(self) -> None:
        for handle in self.handles if self.left else ():
            handle.cancel()

    def usage(self) -> dict:
        metrics = [handle.metrics for handle in self.handles]
        return openai.usage(metrics[:: self.n], metrics)

    def failure(self, draining: bool) -> Refusal | None:
        """What to say if a choice has ended without being complete."""
        for handle in self.handles:
            if handle.finish_reason == "error":
                return Refusal(500, f"request {handle.id} failed: {handle.error}", "failed")
            if handle.finish_reason == "cancelled":
                words = "the server is ending" if draining else f"request {handle.id} was cancelled"
                return Refusal(503 if draining else 500, words, "cancelled")
        return None


class Gone(Exception):
    """The client has hung up, or takes nothing any more."""


class Visit:
    """One request at the door, and the way back to its client."""

    def __init__(self, request: Request, number: int, send: Callable, journal: Journal):
        self.request, self.number, self.status, self.is_news = request, number, None, True
        self._send, self._journal = send, journal

    @property
    def call(self) -> Call:
        return self._journal.open[self.number]

    async def send(self, message: dict) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self._journal.note(self.number, status=self.status)
            if self.status != 403:
                message = message | {"headers": [*message["headers"], *for_pages(self.request)]}
        await self._send(message)

    async def begin_events(self, id: str = "") -> None:
        headers = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
        headers |= {"X-Accel-Buffering": "no"} | ({"X-Request-Id": id} if id else {})  # so that no proxy holds it back
        await self.send({"type": "http.response.start", "status": 200, "headers": encoded(headers)})

    async def write(self, body: bytes, patience: float = STUCK_S, more: bool = True) -> None:
        """Gone, if the client takes nothing for so many seconds."""
        try:
            async with asyncio.timeout(patience):
                await self._send({"type": "http.response.body", "body": body, "more_body": more})
        except TimeoutError:
            raise Gone from None


# --- the door ------------------------------------------------------------------------------------------------------


class Door:
    """A bound socket at first; `start` lets clients in, and `open` lets them ask an engine that a loop steps."""

    def __init__(self, options: Options, log: LogFile | None = None):
        self.options, self.journal, self.figures, self._log = options, Journal(), Figures(), log
        self._socket = listen(options.host, options.port)
        host, port = self._socket.getsockname()[:2]
        self.address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        self._is_local = ipaddress.ip_address(host).is_loopback
        self._hosts = {name.lower() for name in (*LOOPBACK, host, options.host, *options.allow_hosts)}
        self.engine: Engine | None = None
        self.loop: Loop | None = None
        self.name, self.draining = "", False  # `name`: of the model
        self._suffix, self._born = secrets.token_hex(2), int(time.time())
        self._answers: dict[int, Answer] = {}  # by the number of the call
        self._watchers, self._scraped = 0, None  # `_scraped`: the snapshot of the last look at /metrics
        self._pool = ThreadPoolExecutor(4, "door")  # reads bodies
        manners = {"timeout_keep_alive": int(IDLE_S), "timeout_graceful_shutdown": 2, "limit_concurrency": CONNECTIONS}
        silent = {"log_config": None, "log_level": "critical", "access_log": False, "server_header": False}
        plain = {"interface": "asgi3", "http": "h11", "ws": "none", "lifespan": "off", "loop": "asyncio", "proxy_headers": False}
        self._server = uvicorn.Server(uvicorn.Config(self._serve, **manners, **silent, **plain))
        self._thread = threading.Thread(target=self._run, name="door", daemon=True)
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

    def open(self, engine: Engine, loop: Loop, name: str) -> None:
        """From here on requests are answered."""
        self._defaults = defaults_of(engine)
        self.loop, self.name, self.engine = loop, name, engine

    def wait(self) -> None:
        self._thread.join()

    def drain(self, patience: float) -> None:
        """Refuse what comes, and let what runs go on to its end, for so many seconds at most."""
        self.draining = True
        if self.loop:
            self.loop.resume()  # what is paused would never end
        deadline = time.monotonic() + patience
        while self._answers and time.monotonic() < deadline:
            time.sleep(0.02)

    def close(self) -> None:
        """End with an error what still runs, and let go of the socket."""
        self.draining = True
        for answer in list(self._answers.values()):
            answer.cancel()
        self._server.should_exit = True
        if self._thread.is_alive():
            self._thread.join(5)
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._socket.close()

    def look(self, since: int = 0) -> DoorView:
        """What can be seen at the door, and what has happened there since so many calls had ended."""
        opened, ended, count = self.journal.look(since)
        state = (self.address, self.draining, len(self._server.server_state.connections), self._watchers)
        return DoorView(*state, opened, ended, count - since - len(ended), count)

    # --- the way in: from here on all runs in the door's thread

    def _run(self) -> None:
        asyncio.run(self._listen())

    async def _listen(self) -> None:
        sweeper = asyncio.ensure_future(self._sweep())
        await self._server.serve([self._socket])
        sweeper.cancel()

    async def _sweep(self) -> None:
        """Close connections that never send a whole request: `uvicorn` would wait for it for ever."""
        silent: dict = {}
        while True:
            await asyncio.sleep(1)
            now, found = time.monotonic(), list(self._server.server_state.connections)
            found = [c for c in found if not c.cycle or (c.cycle.response_complete and not c.timeout_keep_alive_task)]
            silent = {connection: silent.get(connection, now) for connection in found}
            for connection, since in silent.items():
                if now - since > HEAD_S:
                    connection.transport.abort()

    async def _serve(self, scope: dict, receive: Callable, send: Callable) -> None:
        """Each request comes through here, and whatever is raised on its way becomes its answer."""
        client = scope["client"][0] if scope.get("client") else ""
        number, began = self.journal.begin(client, f"{scope['method']} {scope['path']}"[:200]), time.perf_counter()
        visit = Visit(Request(scope, receive), number, send, self.journal)
        try:
            self._guard(visit.request)
            response = await self._route(visit.request)(visit)
        except Refusal as refusal:
            response = refused(visit, refusal)
        except (ClientDisconnect, Gone):
            response = None
            self.journal.note(number, hung_up=True, status=499 if visit.status is None else visit.status)
        except Exception as error:  # a fault of ours: this client is told, and the others do not notice
            response = refused(visit, Refusal(500, describe(error), "internal_error"))
        if response and visit.status is None:
            await response(scope, receive, visit.send)
        self.journal.note(number, latency_s=time.perf_counter() - began)
        if visit.is_news:
            call = self.journal.end(number)
            self.figures.count(call)
            if self._log:
                self._log.write(call.line)
        else:
            self.journal.forget(number)

    def _guard(self, request: Request) -> None:
        """Let nobody in who does not belong.

        A browser sends requests for any page that its user looks at. So a page must be of this machine. On the loopback
        the host's name must be ours, too, since a page's own name may be given the address 127.0.0.1.
        """
        host, origin, path = request.headers.get("host", ""), request.headers.get("origin", ""), request.scope["path"]
        if self._is_local and host and hostname(f"//{host}") not in self._hosts:
            words = f"the Host {shown(host)} is none of this server's names; --allow-host adds one"
            raise Refusal(403, words, "host_not_allowed")
        if origin and hostname(origin) not in self._hosts and urlsplit(origin).netloc != host:
            words = f"pages from {shown(origin)} may not ask here; --allow-host adds one"
            raise Refusal(403, words, "origin_not_allowed")
        keys = [self.options.api_key, self.options.watch_key if path == "/watch" else ""]
        free = not keys[0] or request.method == "OPTIONS" or path == "/health"
        if not free and not any(has_key(request, key) for key in keys if key):
            words = "no API key, or a wrong one; give it as 'Authorization: Bearer KEY'"
            raise Refusal(401, words, "invalid_api_key", WWW_Authenticate="Bearer")

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
        if path not in ("/health", "/metrics") and self.engine is None:
            raise Refusal(503, "the model is being loaded; try again", "loading", Retry_After="1")
        if path not in ("/health", "/metrics") and self.draining:
            raise Refusal(503, "the server is ending", "draining", Retry_After="5")
        return handler

    # --- the small routes

    async def _options(self, allow: str, visit: Visit) -> Response:
        visit.is_news = False
        return Response(status_code=204, headers={"Allow": allow})

    async def _models(self, visit: Visit) -> Response:
        visit.is_news = False
        name, max_len = self.name, self.engine.sched.max_len
        asked = visit.request.scope["path"].removeprefix("/v1/models").removeprefix("/")
        if not asked:
            return reply(openai.models(name, self._born, max_len))
        openai.check_model(asked, (name, "default"))
        return reply(openai.model(name, self._born, max_len))

    async def _health(self, visit: Visit) -> Response:
        visit.is_news = False
        status = "loading" if self.engine is None else "draining" if self.draining else "ok"
        if self.loop and not self.loop.is_alive:
            status = "stopped"
        return reply({"status": status}, 200 if status == "ok" else 503)

    async def _metrics(self, visit: Visit) -> Response:
        visit.is_news = False
        self._scraped = self.engine.snapshot(self._scraped) if self.engine else None
        paused_s = self.loop.paused_s if self.loop else 0.0
        text = self.figures.text(self._scraped, len(self._server.server_state.connections), paused_s)
        return Response(text, media_type="text/plain; version=0.0.4")

    # --- a prompt and its answer

    async def _complete(self, chat: bool, visit: Visit) -> Response | None:
        """From a body to its answer, whole or as a stream, while somebody listens."""
        body, events = await read_body(visit.request), asyncio.get_running_loop()
        answer = self._answers[visit.number] = Answer(events)
        tasks = []
        try:
            wish, shape = await events.run_in_executor(self._pool, self._ask, chat, body, answer, visit.call.client)
            requests = tuple(handle.id for handle in answer.handles)
            self.journal.note(visit.number, id=shape.id, requests=requests, stream=wish.stream)
            work = self._stream(visit, answer, wish, shape) if wish.stream else self._whole(answer, wish, shape)
            tasks = [asyncio.ensure_future(work), asyncio.ensure_future(hang_up(visit.request))]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if not tasks[0].done():
                raise Gone
            return tasks[0].result()
        finally:
            for task in tasks:
                task.cancel()
            answer.cancel()
            self._account(visit, answer)
            del self._answers[visit.number]

    def _ask(self, chat: bool, body: bytes, answer: Answer, client: str) -> tuple[Wish, Shape]:
        """Understand a body and put its prompts in line. In a thread of its own: a long prompt takes a while."""
        from nanobatch import Sampling

        engine = self.engine
        wish = openai.understand(body, chat, (self.name, "default"))
        asks = []
        try:
            engine.text.check_ids(wish.settings["logit_bias"])
            for prompt in wish.prompts:
                read = self._read(prompt)
                room = engine.sched.max_len - len(read.ids)
                settings = self._defaults | wish.settings | {"max_tokens": min(wish.max_tokens or room, room)}
                for i in range(wish.n):
                    seed = {"seed": settings["seed"] + i} if type(settings.get("seed")) is int else {}
                    asks.append((read, Sampling(**settings | seed)))
            if len(asks) > engine.sched.max_queue:
                raise ValueError(f"n = {len(asks)} choices, but the line holds {engine.sched.max_queue}")
            answer.submit(engine, asks, wish.n, wish.stream, client)
        except ValueError as error:
            raise openai.of_sampling(error) from None
        except QueueFull as error:
            raise Refusal(429, str(error), "rate_limit_exceeded", Retry_After="1") from None
        except RuntimeError:  # it has been closed meanwhile
            raise Refusal(503, "the server is ending", "draining", Retry_After="5") from None
        return wish, Shape(chat, answer.handles[0].id, self._suffix, self.name, wish.usage)

    def _read(self, prompt: str | list) -> Prompt:
        """A prompt's tokens, if there is room for one more."""
        text, max_len = self.engine.text, self.engine.sched.max_len
        param = "messages" if isinstance(prompt, list) and isinstance(prompt[0], dict) else "prompt"
        size = sum(len(m["content"]) for m in prompt) if param == "messages" else len(prompt)
        least = size // text.longest if param == "messages" or isinstance(prompt, str) else size
        try:
            read = text.read(prompt) if least < max_len else None  # else it would take long, and all for nothing
        except ValueError as error:
            raise Refusal(400, str(error), "invalid_value", param) from None
        except BaseException as error:  # a tokenizer's panic
            raise Refusal(400, f"the prompt cannot be read: {describe(error)}", "invalid_value", param) from None
        if read is None or len(read.ids) >= max_len:
            tokens = f"at least {least:,}" if read is None else f"{len(read.ids):,}"
            words = f"this model's maximum context length is {max_len:,} tokens, but the {param} have {tokens}"
            raise Refusal(400, f"{words}; give less, or start the server with a larger --max-len", TOO_LONG, param)
        return read

    async def _whole(self, answer: Answer, wish: Wish, shape: Shape) -> Response:
        while answer.left:
            await answer.news()
        if failure := answer.failure(self.draining):
            raise failure
        choices = []
        for index, handle in enumerate(answer.handles):
            words = None
            if wish.settings["logprobs"] is not None:
                words = Words(self.engine.text)
                words.take(handle.tokens, handle.logprobs)
                words = words.finish(handle.text)
            choices.append(shape.choice(index, handle.text, handle.finish_reason, words))
        return reply(shape.whole(choices, answer.usage()), headers={"X-Request-Id": shape.id})

    async def _stream(self, visit: Visit, answer: Answer, wish: Wish, shape: Shape) -> None:
        """Server-sent events: for each piece of text one, or for several that have come together."""
        await visit.begin_events(shape.id)
        measured = wish.settings["logprobs"] is not None
        words = [Words(self.engine.text) if measured else None for _ in answer.handles]
        length = [0] * len(words)  # of each choice's text so far
        await visit.write(b"".join(event(first) for i in range(len(words)) if (first := shape.first(i))))
        ended = 0
        while ended < len(words):
            bodies = []
            for index, piece in await answer.news():
                handle, own, said = answer.handles[index], words[index], []
                if piece is None:
                    if failure := answer.failure(self.draining):
                        self.journal.note(visit.number, reason=failure.code, message=failure.message)
                        await visit.write(event(failure.body) + event("[DONE]"), more=False)
                        return
                    ended += 1
                    said = own.finish(handle.text) if own else []
                elif own:
                    own.take(list(handle.tokens), list(handle.logprobs))
                    length[index] += len(piece)
                    said = own.release(length[index])
                if piece or said:
                    bodies.append(shape.piece(index, piece or "", said if own else None))
                if piece is None:
                    bodies.append(shape.last(index, handle.finish_reason))
            await visit.write(b"".join(map(event, bodies)) or PING)
        total = event(shape.total(answer.usage())) if wish.usage else b""
        await visit.write(total + event("[DONE]"), more=False)

    def _account(self, visit: Visit, answer: Answer) -> None:
        """What is remembered of a call. A stream's times are those at the door; without one, the engine's own."""
        handles = answer.handles
        if not visit.call.requests:  # it was refused
            return
        all_of, total = [handle.metrics for handle in handles], answer.usage()
        first = all_of[0]
        began = time.perf_counter() - (time.time() - visit.call.at)
        for handle, own, times in zip(handles, all_of, answer.times, strict=False):
            self.figures.times(times[0] - began if times else own.ttft_s, times or handle.times)
        ttft = answer.times[0][0] - began if answer.times[0] else first.ttft_s
        reading = (first.ttft_s or 0.0) - (first.queued_s or 0.0)
        self.journal.note(
            visit.number,
            reason=visit.call.reason or worst(handle.finish_reason for handle in handles),
            prompt_tokens=total["prompt_tokens"],
            cached_tokens=total["prompt_tokens_details"]["cached_tokens"],
            tokens=total["completion_tokens"],
            ttft_s=ttft,
            prompt_tps=(first.prompt_tokens - first.cached_tokens) / reading if reading > 0 else None,
            generation_tps=first.tokens_per_s,
        )

    # --- those who watch

    async def _watch(self, visit: Visit) -> None:
        """Differences of all that can be seen, ten a second. Everybody's texts pass here: see `_may_read`."""
        if self._watchers >= WATCHERS:
            raise Refusal(429, f"{WATCHERS} watch already", "rate_limit_exceeded", Retry_After="5")
        visit.is_news = False
        texts, gone = self._may_read(visit.request), asyncio.ensure_future(hang_up(visit.request))
        sender, engine, door, rest = wire.Sender(texts), None, None, 0.0
        self._watchers += 1
        try:
            await visit.begin_events()
            hello = {"protocol": wire.PROTOCOL, "model": self.name, "summary": self.engine.summary, "texts": texts}
            await visit.write(b"event: hello\n" + event(hello), WATCH_STUCK_S)
            while not (gone.done() or self.draining):
                before, engine = engine, self.engine.snapshot(engine)
                seen, door = door, self.look(door.seen if door else 0)
                still = before and before.seen == engine.seen and before.planned == engine.planned
                rest = rest + WATCH_S if still and seen.seen == door.seen and not door.open else 0.0
                if rest % 1.0 < WATCH_S:  # when nothing happens, one a second
                    frame = wire.Frame(self.loop.paused, self.loop.stepping, engine, door)
                    await visit.write(event(sender.pack(frame)), WATCH_STUCK_S)
                await asyncio.wait([gone], timeout=WATCH_S)
            await visit.write(b"", more=False)
        finally:
            self._watchers -= 1
            gone.cancel()

    def _may_read(self, request: Request) -> bool:
        """May this watcher read everybody's prompts and answers? With the watch key, or from this machine itself."""
        if self.options.watch_key and has_key(request, self.options.watch_key):
            return True
        forwarded = any(name in request.headers for name in ("forwarded", "x-forwarded-for", "x-real-ip", "via"))
        local = hostname(f"//{request.headers.get('host', 'localhost')}") in LOOPBACK  # else it came through a proxy
        return local and not forwarded and ipaddress.ip_address(request.client.host).is_loopback


# --- small helpers -------------------------------------------------------------------------------------------------


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens. OSError if the port is taken, or if the host is none of this machine's."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**17)  # so that we notice who does not read
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
    visit._journal.note(visit.number, reason=reason, message=refusal.message, status=visit.status or refusal.status)
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


def worst(reasons: Iterable[str | None]) -> str:
    """Of the reasons why several choices ended, the one that speaks for all."""
    found = set(reasons)
    return next((reason for reason in ("error", "cancelled", "length", "stop") if reason in found), "")


def defaults_of(engine: Engine) -> dict[str, float]:
    """What a request gets that says nothing: OpenAI's temperature of 1, or what the model's makers advise."""
    from nanobatch import Sampling
    from parts.checkpoint import read_json

    path = engine.text.folder / "generation_config.json"
    advice = read_json(path) if path.exists() else {}
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    defaults = {"temperature": 1.0} | {name: advice[name] for name in names if advice.get(name) is not None}
    if advice.get("do_sample") is False:
        defaults["temperature"] = 0.0
    try:
        Sampling(**defaults)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return defaults


# --- the command line ----------------------------------------------------------------------------------------------


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:
        print(f"nanobatch: {' '.join(message.split())}", file=sys.stderr)
        sys.exit(2)


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """A wrong value gets one line and exit code 2, before anything is loaded."""
    parser = Parser("serve.py", description="Answer programs that speak OpenAI's protocol.")
    add = parser.add_argument
    add("--model", default="demo", help="a model folder, a hub id such as owner/name, or 'demo'")
    add("--host", default="127.0.0.1", help="the address to listen on (default: 127.0.0.1, for this machine alone)")
    add("--port", default="8000", help="0 takes any that is free (default: 8000)")
    add("--slots", default="4", help="sequences that run at once (default: 4)")
    add(
        "--max-len",
        help="length of a slot, prompt and answer together (default: 8192, or what the model or memory allows)",
    )
    add("--policy", default=next(iter(POLICIES)), choices=POLICIES, help="when the next in line is admitted")
    add("--max-queue", default="256", help="requests that may wait; more are refused with 429 (default: 256)")
    add(
        "--api-key", default=os.environ.get("NANOBATCH_API_KEY", ""), help="clients must give it (or NANOBATCH_API_KEY)"
    )
    add("--watch-key", default=os.environ.get("NANOBATCH_WATCH_KEY", ""), help="lets /watch show texts elsewhere, too")
    add("--allow-host", action="append", default=[], metavar="NAME", help="a proxy's name; may be repeated")
    add("--log-file", metavar="FILE", help="where a line for each request goes (default: standard error)")
    args = parser.parse_args(arguments)
    try:
        args.port = read_whole("--port", args.port, 0, 65535)
        args.slots = read_whole("--slots", args.slots, 1, 4096)
        args.max_len = args.max_len and read_whole("--max-len", args.max_len, 2, 2**24)
        args.max_queue = read_whole("--max-queue", args.max_queue, 1, 10**6)
        folder = args.model == "demo" or (args.model and Path(args.model).expanduser().is_dir())
        if not folder and (args.model.count("/") != 1 or args.model[0] in "./~"):
            raise ValueError(f"--model {args.model!r} is neither a folder nor a hub id of the form owner/name")
        args.log = open(args.log_file, "a", encoding="utf-8") if args.log_file else sys.stderr  # noqa: SIM115
    except (ValueError, OSError) as error:
        parser.error(str(error))
    return args


def main(arguments: list[str] | None = None) -> int:
    args = parse_arguments(arguments)
    options = Options(args.host, args.port, args.api_key, args.watch_key, tuple(args.allow_host))
    log = LogFile(args.log)
    try:
        door = Door(options, log)
    except OSError as error:  # the port is taken
        print(f"nanobatch: --host {args.host} --port {args.port}: {error.strerror or error}", file=sys.stderr)
        return 2

    def leave(*_) -> None:
        if door.engine is None:
            os._exit(0)  # a download, or a layer that is being read, cannot be interrupted, but it can be left
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, leave)
    signal.signal(signal.SIGINT, leave)
    door.start()
    engine, code = None, 0
    try:
        engine = load(args)
        name = Path(args.model).name if Path(args.model).expanduser().is_dir() else args.model
        door.open(engine, engine.serving().start(), name)
        print(f"nanobatch: {name} at {door.address}/v1; {engine.summary}", file=sys.stderr, flush=True)
        door.wait()
    except KeyboardInterrupt:
        with suppress(KeyboardInterrupt):  # a second signal does not wait
            door.drain(DRAIN_S)
    except (ValueError, OSError, RuntimeError) as error:
        print(f"nanobatch: {' '.join(str(error).split())}", file=sys.stderr)
        code = 2
    with suppress(KeyboardInterrupt):
        door.close()
        log.close()
        if engine:
            engine.close()
    return code


def load(args: argparse.Namespace) -> Engine:
    """This is the first code to import MLX."""
    from nanobatch import Engine

    sizes = {"slots": args.slots, "max_len": args.max_len, "usual_len": 8192}
    engine = Engine.load(args.model, policy=args.policy, max_queue=args.max_queue, **sizes)
    engine.runner.warm_up()
    if engine.text.has_template:
        with suppress(ValueError):
            engine.text.render([{"role": "user", "content": "compiles the template"}])
    gc.collect()
    gc.freeze()  # what loading has left is never garbage, so the collector need not search it in mid-step
    return engine


if __name__ == "__main__":
    sys.exit(main())

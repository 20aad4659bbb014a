"""A client for an engine in another process, over the server's `/watch`.

A thread receives changes of the view as server-sent events (`engine/watch_frames.py`) and collects
them until the screen polls. Prompts are ordinary HTTP requests, each on its own connection; closing
it cancels the request. Nothing else can be changed, because other clients use the engine as well.
After a disconnect the last view stays, and the thread retries.
"""

from __future__ import annotations

import http.client
import json
import queue
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import chain
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit

from base.installation import command
from base.validation import read_whole, shown
from cli.chat_model import REMEDY, Outgrown
from cli.http_client import base_of, error_in, read_events, refusal, request, why
from engine import watch_frames
from screen.draw.style import clean
from screen.engine_client import EngineClient
from screen.engine_view import View
from screen.workload import Ask

if TYPE_CHECKING:
    from nanobatch import Engine

RETRY_S = 1.0
SILENT_S = 5.0  # timeout: a server sends something every second
MODELS = 1000  # maximum number of model names accepted from a server
SENDERS = 64  # maximum number of requests in flight; others wait in this client


class Loading(ValueError):
    """The server has not loaded its model yet."""


class NotLoaded(Loading):
    """The server loads this model at its next request."""


def address_of(text: str) -> tuple[str, int]:
    """Parse [HOST:]PORT."""
    host, _, port = text.rpartition(":")
    return host.strip("[]") or "127.0.0.1", read_whole("--serve", port, 0, 65535)


class RemoteEngineClient(EngineClient):
    """A client that watches a server.

    It supports one reader: `view_since` returns everything new since the last call.
    """

    def __init__(self, url: str, key: str = "", ask_key: str = ""):
        """`key` is for watching, `ask_key` for firing prompts."""
        super().__init__()
        self.url = base_of("--watch", url)
        self._key = key
        self._ask_key = ask_key or key
        self.own: dict[int, socket.socket] = {}  # closing a socket cancels its request
        self._frame: watch_frames.Frame | None = None  # changes since the last call of `view_since`
        self._is_fresh = False  # the first frame of the connection has not arrived yet
        self._is_blind = False  # the frames have no texts
        self._models: tuple[str, ...] = ()  # names of the server's models
        self._model = ""  # the watched model, once the server has named it
        self._stream_line: socket.socket | None = None  # the connection of the frames
        self._is_switching = False  # another model was chosen since the last `_connect`
        self._epoch = 0
        self._lost_at: float | None = None  # when the server went away
        self._asks: queue.Queue[tuple[Ask, int]] = queue.Queue()
        self._senders = 0
        self._cancels = 0
        self._ending = threading.Event()
        # Requests that have ended recently
        self._over: deque[int] = deque(maxlen=2**12)
        self._came = threading.Condition(self._lock)  # notified when a frame arrives
        self.update_view(watches=True, done=(f"asking {self.url}",))

    def start(self) -> None:
        """Connect once in this thread, so that a wrong address or key raises ValueError at once."""
        events = None
        try:
            events = self._connect()
        except Loading:
            pass
        except (OSError, http.client.HTTPException) as error:
            raise ValueError(
                f"--watch {self.url}: {why(error)}; is a server there? ({command('serve.py')})"
            ) from None
        threading.Thread(target=self._run, args=(events,), name="watch", daemon=True).start()

    def drain(self) -> None:
        """Do nothing: this screen has no server of its own."""

    def stop(self, patience: float) -> bool:
        self._ending.set()
        self.cancel(None)
        return True

    def view_since(self, since: View | None = None) -> View:
        with self._lock:
            frame = self._frame
            if frame is None:
                return self._known
            self._frame = watch_frames.without_events(frame)
            gone = None if self._lost_at is None else time.monotonic() - self._lost_at
            return self._known._replace(epoch=self._epoch, gone_s=gone, **frame._asdict())

    # --- watching

    def _run(self, events: Iterator[watch_frames.Frame] | None) -> None:
        while not self._ending.is_set():
            try:
                for frame in events or self._connect():
                    if self._ending.is_set():
                        return
                    self._receive_frame(frame)
                raise ConnectionError("it has ended")
            except Exception as error:  # keep the thread alive and retry
                if not self._is_switching:
                    words = clean(why(error).removeprefix(f"--watch {self.url}: "))
                    (self._sleep if isinstance(error, NotLoaded) else self._lose)(words)
            events = None
            if not self._is_switching:
                self._ending.wait(RETRY_S)

    def _connect(self) -> Iterator[watch_frames.Frame]:
        """Connect, check that the server is a nanobatch of this version, and return its frames."""
        with self._lock:
            self._is_switching = False
            self._over.clear()  # engines number their requests independently
            query = f"?model={quote(self._model)}" if self._model else ""
        answer = self._request("GET", f"/watch{query}", self._key, SILENT_S)
        self._stream_line = answer.line
        if answer.status != 200:
            words, code = refusal(answer)
            error = Loading if answer.status == 503 else ValueError
            if code == "not_loaded":
                error = NotLoaded
                if clean(words) != self.asleep:
                    self._models = self._names()
            raise error(f"--watch {self.url}: {words}")
        events = read_events(answer)
        hello = next(events, {})
        is_ours = isinstance(hello, dict) and isinstance(hello.get("model"), str)
        if not is_ours or hello.get("protocol") != watch_frames.PROTOCOL:
            raise ValueError(
                f"--watch {self.url}: not a nanobatch server, or one of another version"
            )
        with self._lock:
            if self._is_switching:
                raise ConnectionError("another model was chosen in the meantime")
            self._is_fresh = True
            names = hello.get("models")
            if isinstance(names, list) and all(isinstance(name, str) for name in names):
                self._models = tuple(names[:MODELS])
                self._model = hello["model"] if len(names) > 1 else ""
            self.update_view(model=clean(f"{hello['model']} @ {urlsplit(self.url).netloc}"))
            self._is_blind = not hello.get("texts")
            if isinstance(usual := hello.get("temperature"), (int, float)):
                self.update_view(temperature=usual)
            if self._is_blind:
                self.fault(
                    "only figures are shown, no texts: those need the server's --watch-key, as --key"
                )
        receiver = watch_frames.Receiver()
        return (receiver.unpack(event) for event in events)

    def _names(self) -> tuple[str, ...]:
        """Ask for the names of the models, because a refusal does not contain them."""
        with self._request("GET", "/health", "", SILENT_S) as answer:
            found = json.loads(answer.read(2**20))
        return tuple(dict(found.get("models", {})))[:MODELS]

    def _receive_frame(self, frame: watch_frames.Frame) -> None:
        with self._lock:
            if self._is_fresh:
                self._is_fresh = False
                self._lost_at = None
                self._frame = None
                self._epoch += 1
                self.update_view(is_new=bool(self.asleep))
                self.asleep = ""
            self._frame = watch_frames.join_frames(self._frame, frame)
            self._over += (request.id for request in frame.engine.ended)
            self._came.notify_all()
            self.update_view(stage="ready")

    def _lose(self, reason: str) -> None:
        """Record that the server is gone. Called every second, to update the seconds shown."""
        with self._lock:
            self.asleep = ""
            if self._frame is None:
                self.update_view(done=(f"asking {self.url}", reason))
            elif self._lost_at is None:
                self._lost_at = time.monotonic()
                self.fault(f"{self.url} is gone: {reason}; trying again")
            else:
                self.update_view()

    def _sleep(self, reason: str) -> None:
        """Record that the model is not loaded. The last view stays until a request loads it."""
        with self._came:
            if self._is_switching or reason == self.asleep:
                return
            self.asleep = reason
            self._lost_at = None
            if self._frame is None:
                self.update_view(done=(f"asking {self.url}", reason))
            else:
                self.fault(reason)
            self._came.notify_all()

    def _request(
        self, method: str, path: str, key: str, patience: float, body: str | None = None
    ) -> http.client.HTTPResponse:
        return request(self.url, method, path, key, patience, body)

    # --- commands

    def end_experiment(self, name: str) -> None:
        """Do nothing: no experiment can run here."""

    def inspect(
        self, page: str, measure: Callable[[Engine], object], off_the_clock: bool = False
    ) -> None:
        """Do nothing: only the server can inspect its engine."""

    def watch_model(self, name: str) -> str:
        """Reconnect to watch another model of the server."""
        with self._lock:
            if len(self._models) < 2:
                return super().watch_model(name)
            if not name:
                # Before the first frame, the server would show its first model
                at = self._models.index(self._model) if self._model in self._models else 0
                name = self._models[(at + 1) % len(self._models)]
            elif name not in self._models:
                raise ValueError(
                    f"the server has no {shown(name)}; it has {', '.join(self._models)}"
                )
            self._model = name
            self._is_switching = True
            self.asleep = ""  # that was about another model
        with suppress(OSError):
            self._stream_line.shutdown(socket.SHUT_RDWR)
        return name

    def fire(self, asks: Sequence[Ask]) -> None:
        for ask in asks:
            self.posted += 1
            self._asks.put((ask, self._cancels))
            if self._senders < SENDERS:
                self._senders += 1
                threading.Thread(target=self._send, name="ask", daemon=True).start()

    def cancel(self, request: int | None) -> None:
        """Cancel one of this screen's requests, or all of them, by closing connections."""
        self._cancels += request is None  # also drops requests that have no number yet
        for number, line in list(self.own.items()):
            if request in (None, number):
                self.own.pop(number, None)
                with suppress(OSError):
                    line.shutdown(socket.SHUT_RDWR)

    def _send(self) -> None:
        while True:
            ask, cancels = self._asks.get()
            with self._came:  # wait, because a loading server refuses requests
                self._came.wait_for(lambda: self._known.stage == "ready" or self.asleep)
            try:
                if cancels == self._cancels:
                    self._stream(ask, cancels)
                elif ask.question:
                    self.refuse(ask, "it was cancelled")
            except Exception as error:
                self.refuse(ask, error if isinstance(error, Outgrown) else why(error))
            with self._lock:
                self.update_view(handled=self._known.handled + 1)

    def _stream(self, ask: Ask, cancels: int) -> None:
        """Send a request and read its stream to the end.

        Then wait for the last frame, because the screen takes the text from the frames.
        """
        body = {
            **({"model": self._model} if self._model else {}),
            "max_tokens": ask.max_tokens,
            "temperature": ask.temperature,
            "seed": ask.seed,
            "stream": True,
        }
        if ask.schema:
            body["guided_json"] = ask.schema
        routes = {
            "/v1/chat/completions": {
                "messages": ask.messages or [{"role": "user", "content": ask.prompt}]
            },
            "/v1/completions": {"prompt": ask.prompt},
        }
        for route, prompt in routes.items():
            answer = self._request("POST", route, self._ask_key, 60, json.dumps(body | prompt))
            with answer.line, answer:
                if answer.status != 200:
                    words, code = refusal(answer)
                else:
                    events = read_events(answer)
                    id = answer.getheader("X-Request-Id")
                    first = {}
                    if not id:  # the stream began while the model was being loaded
                        first = next(
                            events, {"error": {"message": "the server has ended the stream"}}
                        )
                        id = first.get("id")
                    if "error" not in first:
                        number = int(id.split("-")[1])
                        self.own[number] = answer.line
                        return self._read_stream(ask, cancels, number, chain((first,), events))
                    words, code = error_in(first)
            if code == "context_length_exceeded" and len(ask.messages) > 2:
                raise Outgrown(f"{words}; {REMEDY}")
            if "no chat template" not in words:
                break
            self.update_view(has_chat=False)
        raise ValueError(words)

    def _read_stream(
        self, ask: Ask, cancels: int, number: int, events: Iterator[dict[str, Any]]
    ) -> None:
        with self._came:  # until its frames arrive, the view shows another engine's requests
            self._came.wait_for(lambda: not self.asleep, SILENT_S)
        self.note_answer(ask, number)
        text = ""
        try:
            for event in events:
                if cancels != self._cancels:
                    break
                for choice in event.get("choices", ()):
                    text += choice.get("delta", {}).get("content") or choice.get("text") or ""
                if self._is_blind:
                    self.note_answer(ask, number, text)
        except (OSError, http.client.HTTPException):
            if number in self.own:  # otherwise it was cancelled here
                raise
        finally:
            if self._is_blind:
                self.note_answer(ask, number, text, True)
            self.own.pop(number, None)
        with self._came:
            self._came.wait_for(lambda: number in self._over or self._lost_at is not None, SILENT_S)

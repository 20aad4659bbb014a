"""A server as a user starts it, and clients for the server tests.

`Server` is `serve.py` in a separate process. `ask` sends a plain request; `Line` is a raw socket for
bytes that no client library would send.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NamedTuple

from waiting import wait_for

ROOT = Path(__file__).parents[2]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES, EMBEDDINGS = "/v1/responses", "/v1/embeddings"
MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
JSON = {"Content-Type": "application/json"}


class Server:
    """`serve.py` in a separate process, on a free port."""

    program = ROOT / "serve.py"
    patience = 120.0  # seconds for an answer; a busy machine takes a few

    def __init__(self, *arguments: str, wait: bool = True, **environment: str):
        own = () if "--model" in arguments or "--config" in arguments else ("--model", "demo")
        command = [sys.executable, str(self.program), "--port", "0", *own, *arguments]
        with tempfile.NamedTemporaryFile(suffix=".log", delete=False) as log:
            self.log = Path(log.name)
            self.process = subprocess.Popen(
                command, stderr=log, stdout=log, env=os.environ | environment, cwd="/"
            )
        self.host, self.port = "127.0.0.1", 0
        if wait:
            self.wait()

    def wait(self) -> None:
        """Wait until the server prints its address."""
        self.address = self.says(r"at (http://\S+)/v1")[1]
        self.host, self.port = self.address.removeprefix("http://").rsplit(":", 1)
        self.port = int(self.port)

    def says(self, pattern: str) -> re.Match:
        def find() -> re.Match | None:
            found = re.search(pattern, self.log.read_text())
            assert found or self.process.poll() is None, self.log.read_text()
            return found

        return wait_for(find)

    def stop(self, by: int = signal.SIGTERM) -> int:
        if self.process.poll() is None:
            self.process.send_signal(by)
        try:
            return self.process.wait(60)
        finally:
            self.process.kill()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *exception) -> None:
        self.stop()
        self.log.unlink(missing_ok=True)

    # --- clients

    def ask(self, path: str, body: object = None, method: str = "", **headers: str) -> Reply:
        """Send one request on its own connection. A body that is not bytes is sent as JSON."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=self.patience)
        data = body if isinstance(body, (bytes, type(None))) else json.dumps(body).encode()
        headers = {name.replace("_", "-"): value for name, value in headers.items()}
        try:
            connection.request(
                method or ("GET" if body is None else "POST"), path, data, JSON | headers
            )
            answer = connection.getresponse()
            return Reply(
                answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read()
            )
        finally:
            connection.close()

    def chat(self, text: str = "Count from 3 to 7.", **fields) -> Reply:
        return self.ask(CHAT, {"messages": [{"role": "user", "content": text}], **fields})

    def complete(self, prompt: object = "Once upon a time", **fields) -> Reply:
        return self.ask(
            COMPLETIONS, {"prompt": prompt, "max_tokens": 8, "ignore_eos": True, **fields}
        )

    def gauge(self, name: str) -> float:
        return float(
            re.search(
                rf"^nanobatch_{name}(?:{{.*}})? (\S+)$", self.ask("/metrics").body.decode(), re.M
            )[1]
        )

    def is_idle(self) -> bool:
        """Wait until all slots are free and the queue is empty. Return False after a timeout."""
        names = ("requests_running", "requests_waiting")
        with suppress(AssertionError):
            return wait_for(lambda: not any(map(self.gauge, names)))
        return False

    def line(self, client: str = "") -> Line:
        return Line(self.host, self.port, client=client)


def free_ports(count: int) -> list[int]:
    """Return unused ports. They are lower than those that the system assigns, so that no other program gets
    one of them before the test does."""
    with ExitStack() as held:
        ports = []
        while len(ports) < count:
            port = random.SystemRandom().randrange(20_000, 30_000)
            trial = held.enter_context(socket.socket())
            with suppress(OSError):
                trial.bind(("127.0.0.1", port))
                ports.append(port)
        return ports


def hail(process: subprocess.Popen, by: int) -> None:
    """Send a signal every few milliseconds until the process has exited."""
    deadline = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < deadline:
        process.send_signal(by)
        time.sleep(0.003)


class Reply(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> dict:
        return json.loads(self.body)

    @property
    def error(self) -> dict:
        return self.json["error"]

    @property
    def events(self) -> list:
        """The parsed data of a stream's events. Where an event has a name, it must equal its type."""
        assert self.status == 200, self
        assert self.headers["content-type"].startswith("text/event-stream"), self.headers
        events = []
        for block in self.body.decode().strip().split("\n\n"):
            lines = dict(
                line.split(": ", 1) for line in block.split("\n") if not line.startswith(":")
            )
            if not lines:
                continue
            event = lines["data"] if lines["data"] == "[DONE]" else json.loads(lines["data"])
            assert "event" not in lines or lines["event"] == event["type"], block
            events.append(event)
        return events


class Line:
    """A raw connection that sends exactly the given bytes."""

    def __init__(self, host: str, port: int, receive: int = 0, client: str = ""):
        """`receive` is the size of the receive buffer, and `client` the local address."""
        self.socket = socket.socket()
        if receive:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive)
        self.socket.settimeout(60)
        if client:
            self.socket.bind((client, 0))
        self.socket.connect((host, port))
        self.rest = b""

    def send(self, text: str | bytes) -> Line:
        self.socket.sendall(
            text if isinstance(text, bytes) else text.replace("\n", "\r\n").encode()
        )
        return self

    def post(
        self, path: str, body: object, *headers: str, host: str = "localhost", version: str = "1.1"
    ) -> Line:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        lines = [
            f"POST {path} HTTP/{version}",
            f"Host: {host}",
            "Content-Type: application/json",
            *headers,
        ]
        return self.send("\n".join([*lines, f"Content-Length: {len(data)}", "", ""])).send(data)

    def until(self, mark: bytes) -> bytes:
        """Read up to and including a mark."""
        while mark not in self.rest:
            more = self.socket.recv(65536)
            assert more, f"closed before {mark!r}: {self.rest[-300:]!r}"
            self.rest += more
        head, self.rest = self.rest.split(mark, 1)
        return head + mark

    def reply(self) -> Reply:
        """Read one response with a Content-Length."""
        head = self.until(b"\r\n\r\n").decode()
        headers = dict(line.lower().split(": ", 1) for line in head.split("\r\n")[1:] if line)
        length = int(headers.get("content-length", 0))
        while len(self.rest) < length:
            self.rest += self.socket.recv(65536)
        body, self.rest = self.rest[:length], self.rest[length:]
        return Reply(int(head.split()[1]), headers, body)

    def everything(self) -> bytes:
        """Read to the end of the connection."""
        while more := self.socket.recv(65536):
            self.rest += more
        return self.rest

    def hang_up(self) -> None:
        self.socket.close()

    __del__ = hang_up

"""What the door costs: the same prompts by `Engine.generate`, through HTTP, and through HTTP while
somebody watches.

The problem. Parsing, writing and waking threads take time of the processor that computes.

The way out. The door is opened in front of an engine in this process, as the screen opens it. The
clients are another process, which parses as little as possible, so the processor time that is
counted is the server's alone.

What this file keeps. Each way gets as many prompts of the same lengths, all of them new, so no way
finds what another has computed.

Where next: `door/door.py`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from urllib.parse import urlsplit

from door.door import Door
from door.http import Options
from measure.figures import Figures
from measure.peers import Errand
from measure.turns import beside, in_turn, processes
from nanobatch import Engine, Sampling

# The clients: so many raw sockets in one process. It prints how long all took, and each stream's
# time to its first token.
CLIENTS = """
import json, selectors, socket, sys, time
port, bodies = json.load(sys.stdin)
selector, first = selectors.DefaultSelector(), {}
sockets = [socket.create_connection(("127.0.0.1", port)) for _ in bodies]
start = time.perf_counter()
for i, (s, body) in enumerate(zip(sockets, map(json.dumps, bodies))):
    s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    selector.register(s, selectors.EVENT_READ, [i, b"", time.perf_counter()])
    head = "POST /v1/completions HTTP/1.1\\r\\nHost: localhost\\r\\nConnection: close\\r\\n"
    s.sendall(f"{head}Content-Length: {len(body)}\\r\\n\\r\\n{body}".encode())
while selector.get_map():
    for key, _ in selector.select():
        data = key.fileobj.recv(65536)
        i, before, sent = key.data
        key.data[1] += data
        if i not in first and b'"text"' in key.data[1]:
            first[i] = time.perf_counter() - sent
        if not data:
            selector.unregister(key.fileobj)
            assert b"[DONE]" in before, before
print(json.dumps([time.perf_counter() - start, list(first.values())]))
"""
WATCHER = """
import urllib.request
news = urllib.request.urlopen("{}/watch")
while news.read1(65536): pass
"""


Times = tuple[float, list[float]]  # of all prompts together, and to each first token


def door_figures(engine: Engine, asks: Callable[[], list[Errand]], tokens: int) -> Figures:
    """`asks` makes new ones, and each answer has so many tokens."""
    settings = {"max_tokens": tokens, "ignore_eos": True}
    door = Door(Options(port=0)).start()

    def generate() -> Times:
        began = time.perf_counter()
        results = engine.generate([ask.prompt for ask in asks()], Sampling(**settings))
        seconds = time.perf_counter() - began
        return seconds, [result.metrics.ttft_s for result in results]

    def stream() -> Times:
        same = settings | {"temperature": 0, "stream": True}
        bodies = [{"prompt": ask.prompt, **same} for ask in asks()]
        said = subprocess.check_output(
            [sys.executable, "-c", CLIENTS],
            input=json.dumps([urlsplit(door.address).port, bodies]),
            text=True,
        )
        return json.loads(said)

    def timed(way: Callable[[], Times]) -> list[tuple[float, float, float]]:
        spent = time.process_time()
        seconds, first = way()
        return [(seconds, median(first), time.process_time() - spent)]

    loop = engine.serving()
    with loop:
        door.open(engine, loop, "bench")
        over_http = partial(timed, stream)
        watched = beside(partial(processes, WATCHER.format(door.address), 1), over_http)
        bursts = in_turn(partial(timed, generate), over_http, watched)
    door.close()
    figures = {}
    rates = []
    for name, found in zip(("generate", "HTTP", "watched HTTP"), bursts, strict=True):
        seconds, first_s, cpu_s = map(median, zip(*found, strict=True))
        many = len(asks()) * tokens
        rates.append(many / seconds)
        figures[f"{name} tokens/s"] = rates[-1]
        figures[f"{name} first token ms"] = 1e3 * first_s
        figures[f"{name} processor us a token"] = 1e6 * cpu_s / many
    figures["HTTP / generate"] = rates[1] / rates[0]
    figures["watched HTTP / HTTP"] = rates[2] / rates[1]
    return figures

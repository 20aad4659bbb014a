"""What the door costs: the same prompts through HTTP and through `engine.generate`, on one engine,
in turn.

    python measure/door_price.py [--model demo] [--slots 8] [--tokens 64] [--rounds 3]

For 1, 8 and 32 streams at once: tokens/s both ways, their ratio, and the CPU time that a token
takes more through HTTP (of the server's process alone; the clients are another one). Then, for one
request at a time, how much later the first token is there. Last, what watchers cost. The door is
opened in this process, as the screen opens it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from door.door import Door
from door.http import Options
from nanobatch import Engine, Sampling

# The clients: so many raw sockets in one process, which parse as little as possible. It prints
# seconds, tokens, and each stream's time to its first token.
CLIENTS = """
import json, selectors, socket, sys, time
port, count, tokens = map(int, sys.argv[1:4])
sockets, selector, began, first = [], selectors.DefaultSelector(), {}, {}
for i in range(count):
    s = socket.create_connection(("127.0.0.1", port))
    s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    selector.register(s, selectors.EVENT_READ, [i, b""])
    sockets.append(s)
start = time.perf_counter()
for i, s in enumerate(sockets):
    body = json.dumps({"prompt": f"Tell me a story about fox {i}.", "max_tokens": tokens, "ignore_eos": True,
                       "temperature": 0, "stream": True}).encode()
    head = "POST /v1/completions HTTP/1.1\\r\\nHost: localhost\\r\\nConnection: close\\r\\n"
    head += "Content-Length: %d\\r\\n\\r\\n"
    began[i] = time.perf_counter()
    s.sendall((head % len(body)).encode() + body)
left = count
while left:
    for key, _ in selector.select():
        data = key.fileobj.recv(65536)
        key.data[1] += data
        if key.data[0] not in first and b'"text"' in key.data[1]:
            first[key.data[0]] = time.perf_counter() - began[key.data[0]]
        if not data:
            selector.unregister(key.fileobj)
            assert b"[DONE]" in key.data[1], key.data[1]
            left -= 1
print(json.dumps({"seconds": time.perf_counter() - start, "first": list(first.values())}), flush=True)
"""


def story(number: int) -> str:
    """As the clients ask for it."""
    return f"Tell me a story about fox {number}."


class Prices:
    """What is measured: an engine, and a door in front of it."""

    def __init__(self, engine: Engine, address: str, tokens: int, rounds: int):
        self.engine = engine
        self.address = address
        self.sampling = Sampling(max_tokens=tokens, ignore_eos=True)
        self.tokens = tokens
        self.rounds = rounds

    def clients(self, count: int, tokens: int = 0) -> dict:
        """So many streams at once: how long all of them took, and when each had its first token."""
        port = urlsplit(self.address).port
        command = [sys.executable, "-c", CLIENTS, str(port), str(count), str(tokens or self.tokens)]
        return json.loads(subprocess.run(command, capture_output=True, check=True).stdout)

    def streams(self, count: int) -> str:
        prompts = [story(number) for number in range(count)]

        def generate() -> float:
            began = time.perf_counter()
            self.engine.generate(prompts, self.sampling)
            return time.perf_counter() - began

        def stream() -> float:
            return self.clients(count)["seconds"]

        def measure(answer: Callable[[], float]) -> None:
            spent = time.process_time()
            seconds[answer].append(answer())
            cpu[answer].append(time.process_time() - spent)

        ways = (generate, stream)
        seconds = {way: [] for way in ways}
        cpu = {way: [] for way in ways}
        for _ in range(self.rounds):
            for way in ways:
                measure(way)
        all_tokens = count * self.tokens
        plain, http = (all_tokens / median(seconds[way]) for way in ways)
        more = (median(cpu[stream]) - median(cpu[generate])) / all_tokens
        return (
            f"{count:3} streams: {plain:6.0f} tokens/s by generate, {http:6.0f} by HTTP, "
            f"ratio {http / plain:.2f}; {1e6 * more:+.0f} us of CPU a token"
        )

    def first_token(self) -> str:
        alone = []
        first = []
        for _ in range(20):
            result = self.engine.submit(story(0), self.sampling).result()
            alone.append(result.metrics.ttft_s)
            first += self.clients(1)["first"]
        return f"first token: {1000 * (median(first) - median(alone)):+.2f} ms through HTTP"

    def watcher(self) -> str:
        rates = {False: [], True: []}
        for is_watched in (False, True) * self.rounds * 2:
            command = ["curl", "-sN", f"{self.address}/watch"] if is_watched else ["true"]
            watcher = subprocess.Popen(command, stdout=subprocess.DEVNULL)
            time.sleep(0.3)
            rates[is_watched].append(8 * 256 / self.clients(8, 256)["seconds"])
            watcher.kill()
            watcher.wait()
        watched = median(rates[True])
        unwatched = median(rates[False])
        less = 1 - watched / unwatched
        return f"a watcher at 8 streams: {watched:.0f} tokens/s instead of {unwatched:.0f}, {less:.1%} less"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    door = Door(Options(port=0)).start()
    with Engine.load(args.model, slots=args.slots, max_len=512, reuse=False) as engine:
        loop = engine.serving()
        with loop:
            door.open(engine, loop, args.model)
            prices = Prices(engine, door.address, args.tokens, args.rounds)
            prices.clients(args.slots)  # warm up
            for count in (1, 8, 32):
                print(prices.streams(count), flush=True)
            print(prices.first_token(), flush=True)
            print(prices.watcher())
        door.close()


if __name__ == "__main__":
    main()

"""What the door costs: the same prompts through HTTP and through `engine.generate`, on one engine,
in turn.

    python tools/door_price.py [--model demo] [--slots 8] [--tokens 64] [--rounds 3]
    python tools/door_price.py --beside mlx_lm      # serve.py and mlx_lm.server, in turn

For 1, 8 and 32 streams at once: tokens/s both ways, their ratio, and the CPU time that a token
takes more through HTTP (of the server's process alone; the clients are another one). Then, for one
request at a time, how much later the first token is there. Last, what watchers cost. The door is
opened in this process, as the screen opens it.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "lib")]

from doors import Server  # noqa: E402

from door.door import Door  # noqa: E402
from door.http import Options  # noqa: E402
from nanobatch import Engine, Sampling  # noqa: E402
from parts.device.mlx import mx  # noqa: E402
from parts.model.find import find  # noqa: E402

# The clients: so many raw sockets in one process, which parse as little as possible. It prints
# seconds, tokens, and each stream's time to its first token.
CLIENTS = """
import json, selectors, socket, sys, time
port, count, tokens, rounds = map(int, sys.argv[1:5])
for number in range(rounds):
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


def clients(port: int, count: int, tokens: int, rounds: int = 1) -> list[dict]:
    command = [sys.executable, "-c", CLIENTS, *map(str, (port, count, tokens, rounds))]
    return [
        json.loads(line)
        for line in subprocess.run(command, capture_output=True, check=True).stdout.splitlines()
    ]


# mlx-lm's own server, over the BLAS that ours puts under MLX.
PEER = """
import sys
sys.path[:0] = [sys.argv.pop(1)]
from parts.device import mlx as device
from mlx_lm import server
server.main()
"""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def beside(args: argparse.Namespace) -> None:
    """Our server and mlx_lm.server, each in a process of its own: the same weights in float32,
    greedy, as streams."""
    folder = find(args.model)
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as stack:
        copy = shutil.copytree(folder, Path(temporary) / "model")
        # Mlx-lm computes in the type that it finds, and all others are slow
        for file in copy.glob("*.safetensors"):
            weights = {name: w.astype(mx.float32) for name, w in mx.load(str(file)).items()}
            mx.save_safetensors(str(file), weights, {"format": "mlx"})
        own, peer = (
            stack.enter_context(Server("--model", str(copy), "--slots", str(args.slots))),
            free_port(),
        )
        command = [sys.executable, "-c", PEER, str(ROOT), "--model", str(copy), "--port", str(peer)]
        command += [
            "--decode-concurrency",
            str(args.slots),
            "--prompt-concurrency",
            str(args.slots),
        ]
        process = subprocess.Popen([*command, "--log-level", "ERROR"], stderr=subprocess.DEVNULL)
        stack.callback(process.kill)
        while True:
            with suppress(ConnectionError):
                socket.create_connection(("127.0.0.1", peer)).close()
                break
            assert process.poll() is None, "mlx_lm.server has ended"
            time.sleep(0.1)
        for port in (own.port, peer):
            clients(port, args.slots, args.tokens)  # warm up
        for count in (1, 8):
            rates, first = {own.port: [], peer: []}, {own.port: [], peer: []}
            for _ in range(args.rounds):
                for port in rates:
                    (found,) = clients(port, count, args.tokens)
                    rates[port].append(count * args.tokens / found["seconds"])
                    first[port].append(1000 * statistics.median(found["first"]))
            ours, theirs = (statistics.median(rates[port]) for port in rates)
            print(
                f"{count:3} streams: {ours:6.0f} tokens/s by serve.py, {theirs:6.0f} by mlx_lm.server, ratio "
                f"{ours / theirs:.2f}; first token after {statistics.median(first[own.port]):.0f} ms and "
                f"{statistics.median(first[peer]):.0f} ms",
                flush=True,
            )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--beside", choices=["mlx_lm"], help="compare with this server instead")
    args = parser.parse_args()
    if args.beside:
        beside(args)
        return 0
    engine = Engine.load(args.model, slots=args.slots, max_len=512, reuse=False)
    loop = engine.serving()
    door = Door(Options(port=0)).start()
    port = int(re.search(r"(\d+)$", door.address)[1])
    with loop:
        door.open(engine, loop, args.model)
        sampling = Sampling(max_tokens=args.tokens, ignore_eos=True)
        clients(port, args.slots, args.tokens)  # warm up
        for count in (1, 8, 32):
            prompts, rates, cpu = (
                [f"Tell me a story about fox {i}." for i in range(count)],
                ([], []),
                ([], []),
            )
            for _ in range(args.rounds):
                clock, spent = time.perf_counter(), time.process_time()
                engine.generate(prompts, sampling)
                rates[0].append(count * args.tokens / (time.perf_counter() - clock))
                cpu[0].append((time.process_time() - spent) / count / args.tokens)
                spent = time.process_time()
                rates[1].append(
                    count * args.tokens / clients(port, count, args.tokens)[0]["seconds"]
                )
                cpu[1].append((time.process_time() - spent) / count / args.tokens)
            (plain, http), (own, more) = (
                (map(statistics.median, rates)),
                (map(statistics.median, cpu)),
            )
            print(
                f"{count:3} streams: {plain:6.0f} tokens/s by generate, {http:6.0f} by HTTP, ratio {http / plain:.2f}; "
                f"{1e6 * (more - own):+.0f} us of CPU a token"
            )
        alone, first = [], []
        for _ in range(20):
            result = engine.submit(
                engine.text.read("Tell me a story about fox 0."), sampling
            ).result()
            alone.append(result.metrics.ttft_s)
            first += clients(port, 1, args.tokens)[0]["first"]
        print(
            f"first token: {1000 * (statistics.median(first) - statistics.median(alone)):+.2f} ms through HTTP"
        )
        watchers = [0, 1, 0, 1]
        rates = {0: [], 1: []}
        for count in watchers * args.rounds:
            watching = [
                subprocess.Popen(
                    ["curl", "-sN", f"{door.address}/watch"], stdout=subprocess.DEVNULL
                )
                for _ in range(count)
            ]
            time.sleep(0.3)
            rates[count].append(8 * 256 / clients(port, 8, 256)[0]["seconds"])
            for process in watching:
                process.kill()
                process.wait()
        watched, unwatched = statistics.median(rates[1]), statistics.median(rates[0])
        less = 100 * (1 - watched / unwatched)
        print(
            f"a watcher at 8 streams: {watched:.0f} tokens/s instead of {unwatched:.0f}, {less:.1f} % less"
        )
    door.close()
    engine.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())

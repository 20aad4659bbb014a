"""The soak of the door: many clients at once, a third of them hang up at some moment, some send
what is wrong.

    python tools/soak_http.py --requests 2000
    python tools/soak_http.py --requests 1000 --ranks 2     # one model over two processes

It starts a server of its own. In the end each request has been answered or was hung up on, all
slots are free, answers that were not cut off are those that the same request gets alone, and memory
has not grown since a quarter of them had come, but for the thousand calls and ends that are kept.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "tests" / "lib"), str(HERE)]

from doors import CHAT, COMPLETIONS, ROOT, Server  # noqa: E402
from soak import Report as Slope  # noqa: E402
from soak import resident  # noqa: E402

BAD = [
    (CHAT, b"{"),
    (CHAT, {"messages": [], "stream": True}),
    (CHAT, {"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function"}]}),
    (COMPLETIONS, {"prompt": "x" * 100_000}),
    (COMPLETIONS, {"prompt": ["a", 5]}),
    (COMPLETIONS, {"prompt": "x", "stop": 5}),
    (COMPLETIONS, {"prompt": "x", "logit_bias": {"99999999": 1}}),
    ("/v1/embeddings", {"input": "x"}),
]
CHAIN = {f"a{n}": {"items": {"$ref": f"#/$defs/a{n + 1}"}} for n in range(700)}
HOSTILE = [  # grammars that take much, or fail when the answer has begun
    {"guided_json": {"$ref": "#/$defs/a0", "$defs": CHAIN | {"a700": {}}}},
    {"guided_json": {"type": "object", "properties": {f"k{n}": {} for n in range(1500)}}},
    {"guided_json": {"allOf": [{"multipleOf": p} for p in (2, 3, 5, 7, 11)]}},
    {"guided_regex": "((a{1,500}){1,500}){1,500}"},
    {"guided_regex": "(" * 8000},
    {"guided_grammar": "start: a0" + "".join(f"\na{n}: a{n + 1} a{n + 1}" for n in range(40))},
    {"guided_grammar": 'start: start start | start start start | "a" | '},
    {"guided_choice": ["x" * 200] * 150},
]
GRAMMARS = [
    {"guided_choice": ["yes", "no", "perhaps"]},
    {"guided_regex": "[0-9]{1,3}(, [0-9]{1,3}){2,8}"},
    {"guided_json": {"type": "array", "items": {"type": "integer"}, "maxItems": 5}},
]
PROMPTS = [
    "Count from {n} to {m}.",
    "Tell me a story about fox number {n}.",
    "Spell the word lantern.",
    "What is {n} + 4?",
]


@dataclass
class Report:
    answered: int = 0
    refused: int = 0
    hung_up: int = 0
    compared: int = 0
    faults: list[str] = field(default_factory=list)  # what went wrong
    memory: Slope = field(default_factory=Slope)


def make_case(number: int) -> dict:
    dice = random.Random(number)
    text = dice.choice(PROMPTS).format(n=number % 50, m=number % 50 + 9)
    body = {
        "messages": [{"role": "user", "content": text}],
        "max_tokens": dice.choice([1, 8, 30, 60]),
    }
    if dice.random() < 0.5:
        body |= {"temperature": 1.2, "seed": number}
    if dice.random() < 0.3:
        body |= {"stop": ["fox", ", 1"]}
    if dice.random() < 0.2:
        body |= {"logprobs": True, "top_logprobs": 3}
    if dice.random() < 0.2:
        body |= dice.choice(GRAMMARS)
    return body


def text_of(reply, stream: bool) -> str:
    if not stream:
        return reply.json["choices"][0]["message"]["content"]
    events = reply.events
    assert events[-1] == "[DONE]", events[-1]
    return "".join(event["choices"][0]["delta"].get("content", "") for event in events[:-1])


def soak(
    server: Server, requests: int, clients: int = 16, cases: int = 40, seed: int = 0, log=None
) -> Report:
    report, lock, alone = Report(), threading.Lock(), {}
    for number in range(cases):
        alone[number] = text_of(server.ask(CHAT, make_case(number)), False)
    numbers = iter(range(requests))

    def client() -> None:
        while True:
            with lock:
                number = next(numbers, None)
            if number is None:
                return
            try:
                outcome = one(random.Random(seed * 10**6 + number))
            except Exception as error:
                with lock:
                    report.faults.append(f"request {number}: {type(error).__name__}: {error}")
                continue
            with lock:
                setattr(report, outcome, getattr(report, outcome) + 1)
                report.compared += outcome == "answered"
                if number % 50 == 0:
                    report.memory.rss.append((number, resident(server.process.pid)))
                if log and number % 500 == 499:
                    print(
                        f"{number + 1:,} asked, {report.memory.rss[-1][1]:.1f} MiB",
                        file=log,
                        flush=True,
                    )

    def one(dice: random.Random) -> str:
        kind, case, stream = dice.random(), dice.randrange(cases), dice.random() < 0.6
        if kind < 0.08:
            reply = server.ask(*dice.choice(BAD))
            assert reply.status in (400, 404) and reply.error["message"], reply
            return "refused"
        if kind < 0.1:
            reply = server.ask(CHAT, make_case(0) | {"max_tokens": 8} | dice.choice(HOSTILE))
            assert reply.status in (200, 400, 500), reply
            assert reply.status == 200 or reply.error["message"], reply
            return "refused"
        if kind < 0.42:
            line = server.line()
            data = json.dumps(
                make_case(case) | {"stream": stream, "max_tokens": 900, "ignore_eos": True}
            )
            head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
            # In its head, its body, or later
            sent = dice.choice([10, len(head) + 20, len(head) + len(data)])
            line.send((head + data)[:sent].encode())
            time.sleep(dice.choice([0, 0.01, 0.1, 0.5]))
            line.hang_up()
            return "hung_up"
        reply = server.ask(CHAT, make_case(case) | {"stream": stream})
        assert reply.status == 200, reply
        text = text_of(reply, stream)
        assert text == alone[case], f"{text!r} instead of {alone[case]!r}"
        return "answered"

    threads = [threading.Thread(target=client) for _ in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if not server.is_idle():
        report.faults.append("a slot is not free")
    if server.process.poll() is not None:
        report.faults.append("the server is gone")
    return report


@contextmanager
def ring(size: int) -> Iterator[dict[str, str]]:
    """Ranks that follow, in processes of their own, and the environment of the one that leads. All
    exit with 0."""
    with ExitStack() as stack:
        if size == 1:
            yield {}
            return
        with ExitStack() as ports:
            sockets = [
                ports.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(size)
            ]
            hosts = [[f"127.0.0.1:{each.getsockname()[1]}"] for each in sockets]
        file = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "hosts.json"
        file.write_text(json.dumps(hosts))
        command, followers = [sys.executable, str(ROOT / "serve.py"), "--slots", "8"], []
        for rank in range(1, size):
            environment = os.environ | {"MLX_RANK": str(rank), "MLX_HOSTFILE": str(file)}
            followers.append(subprocess.Popen(command, env=environment))
            stack.callback(followers[-1].kill)
        yield {"MLX_RANK": "0", "MLX_HOSTFILE": str(file)}
        codes = [follower.wait(30) for follower in followers]
        assert not any(codes), codes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=1)
    args = parser.parse_args()
    began = time.monotonic()
    with ring(args.ranks) as environment, Server("--slots", "8", **environment) as server:
        # The ring's threads look for numbers all the time
        server.patience *= 1 if args.ranks == 1 else 10
        report = soak(server, args.requests, seed=args.seed, log=sys.stdout)
        code = server.stop()
    memory = [size for _, size in sorted(report.memory.rss)]
    before, after = memory[len(memory) // 4], memory[-1]
    print(
        f"{args.requests:,} requests in {time.monotonic() - began:.0f} s: {report.answered:,} answered as alone, "
        f"{report.refused:,} refused, {report.hung_up:,} hung up, {len(report.faults)} wrong; exit code {code}; "
        f"{before:.1f} MiB after a quarter, {after:.1f} at the end, {report.memory.slope:+.2f} per 1,000 requests"
    )
    print(*report.faults[:10], sep="\n")
    return 1 if report.faults or code or after > 1.05 * before else 0


if __name__ == "__main__":
    sys.exit(main())

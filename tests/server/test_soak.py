"""Many concurrent clients over HTTP. A third of them hang up at random moments, and some send invalid
requests. `NANOBATCH_SOAK=20000 python -m pytest tests/server/test_soak.py` runs the long form.

The server has the demo model with a chat template that supports tools and reasoning, configured as if it had
been made for embeddings. All routes are used, streamed and not. At the end each request has been answered or
refused, or its client has hung up, all slots are free, complete answers equal those that the same request gets
alone (reasoning, text, calls and tokens), and no more files are open than at the start.

Memory is measured in an idle second after each round (`serve_memory.py`). From the second of nine rounds to the
last, the bytes in use after a collection may grow by 1 MiB, and from the second third of the rounds to the last,
the resident set after a trim by 15 MiB.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hostile import asked
from parrot import FLAT, SCHEMAS, TOOLS
from serve_memory import Weight
from servers import (
    CHAT,
    COMPLETIONS,
    COUNT,
    EMBEDDINGS,
    MESSAGES,
    RESPONSES,
    ROOT,
    Server,
    free_ports,
)
from soak import IN_USE, JUDGED, ROUNDS, SOAK, growth, run_rounds
from streams import WITHOUT_STREAM, ask
from tooluse import random_ask
from waiting import wait_for

BAD = [
    (CHAT, {"messages": [], "stream": True}),
    (CHAT, {"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function"}]}),
    (COMPLETIONS, {"prompt": "x" * 100_000}),
    (EMBEDDINGS, {"input": ["x", ""]}),
    ("/v1/responses", {"input": [{"type": "computer_call"}], "stream": True}),
    ("/v1/responses", {"input": [{"role": "user", "content": ""}] * 5000}),
    ("/v1/messages", {"max_tokens": 9, "messages": [{"role": "user", "content": [{"type": []}]}]}),
    (CHAT, {"messages": [{"role": "user", "content": "x"}], "model": "gpt-5"}),
]
MUCH = (
    "deep lists of references",
    "1,500 that may be left out",
    "a common multiple of 2,310",
    "nested repeats",
    "rules that double",
    "many ways to read it",
)
HOSTILE = [  # grammars that are expensive, or fail after the answer has begun
    *(asked(name, 0) for name in MUCH),
    {"guided_regex": "(" * 8000},
    {"guided_choice": ["x" * 200] * 150},
]
GRAMMARS = [
    # The first three take megabytes
    {"guided_json": {"enum": [f"w{n} x{n * 7}" for n in range(1500)]}},
    {"guided_json": {"properties": {f"k{n}": {"maximum": n * n} for n in range(300)}}},
    {"guided_json": {"const": "ab " * 500}},
    {"guided_choice": ["yes", "no", "perhaps"]},
    {"guided_regex": "[0-9]{1,3}(, [0-9]{1,3}){2,8}"},
    {"guided_json": {"type": "array", "items": {"type": "integer"}, "maxItems": 5}},
]
SAID = [{"role": "user", "content": "x"}]
# Requests that cause much work with few bytes, or with about as many as the server accepts
HEAVY = [
    (CHAT, {"messages": [{"role": "user", "content": ""}] * 130_000}),
    (CHAT, b'{"messages":[{"role":"user","content":"x"}],"metadata":[' + b"[]," * 10**6 + b"[]]}"),
    (CHAT, b'{"messages":' + b"[" * 900 + b"]" * 900 + b"}"),
    (CHAT, {"messages": SAID, "stop": ["a"] * 100_000}),
    (CHAT, {"messages": [{"role": "user", "content": "\ufdfa\u0301👩‍👧" * 100_000}]}),
    (COMPLETIONS, {"prompt": ["x"] * 500_000}),
    (COMPLETIONS, {"prompt": [5] * 500_000}),
    (COMPLETIONS, b"x" * 5_000_000),
]
# Not HTTP, not valid for this server, or 300 requests in one packet. No reply to them is checked
RAW = [
    b"hello\r\n\r\n",
    b"GET /" + b"x" * 70_000,
    b"GET /%1b]0;x%07%e2%80%ae HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" * 300,
]
# The demo's template, with tools as in Qwen 3 Coder and optional reasoning.
# A call in JSON within its marks is parsed, too
TEMPLATE = """\
{{- bos_token }}
{%- for tool in tools or [] %}{{ '<|system|>' + tool | tojson + '<|end|>' }}{% endfor %}
{%- for message in messages %}
    {{- '<|' + ('user' if message.role == 'tool' else message.role) + '|>' }}
    {%- if message.reasoning_content %}{{ '<think>' + message.reasoning_content + '</think>' }}{% endif %}
    {{- message.content }}
    {%- for call in message.tool_calls or [] %}
        {{- '<tool_call>\\n<function=' + call.function.name + '>\\n' }}
        {%- for key, value in call.function.arguments | items %}
            {{- '<parameter=' + key + '>\\n' + value | string + '\\n</parameter>\\n' }}
        {%- endfor %}
        {{- '</function>\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|end|>' }}
{%- endfor %}
{{- '<|assistant|>' }}{% if enable_thinking %}{{ '<think>' }}{% endif %}
"""
# A small model does not write calls on its own, so a regular expression forces it to
LOOK = (
    r"\n<tool_call>\n\{\"name\": \"get_time\", \"arguments\": \{\"n\": [1-9]{1,9}\}\}\n</tool_call>"
)
CALLING = f"So[a-z ]{{2,20}}({LOOK}){{1,3}}"
THINKING = r"[a-z ]{2,30}\n</think>\n\n"
# Route -> the fields that make its answers long
ENDLESS = {
    CHAT: {"max_tokens": 900, "ignore_eos": True},
    COMPLETIONS: {"max_tokens": 900, "ignore_eos": True},
    RESPONSES: {"max_output_tokens": 900},
    MESSAGES: {"max_tokens": 900},
}
# Answers that are still running when the client hangs up
LONG = [
    (CHAT, {"messages": SAID, "logprobs": True, "top_logprobs": 20, "n": 8}),
    (CHAT, {"messages": [{"role": "user", "content": "x " * 400}], "logprobs": True}),
    (CHAT, {"messages": SAID, "tools": TOOLS, "chat_template_kwargs": {"enable_thinking": True}}),
    (RESPONSES, {"input": "x " * 300, "tools": FLAT, "reasoning": {"effort": "high"}}),
    (RESPONSES, {"input": "x", "tools": FLAT, "tool_choice": "required"}),
    (MESSAGES, {"messages": SAID, "tools": SCHEMAS, "tool_choice": {"type": "any"}}),
]
PROGRESS = {"messages": [{"role": "user", "content": "y " * 400}], "return_progress": True}
# MiB by which the bytes in use may grow. 16,000 requests added 0.7, and 100 bytes each of 10,000 would be 0.7 more.
HELD = 1.0
RESIDENT = 15.0  # MiB by which the resident set may grow (`growth`)
PROMPTS = [
    "Count from {n} to {m}.",
    "Tell me a story about fox number {n}.",
    "Spell the word lantern.",
    "What is {n} + 4?",
]


@dataclass
class Report:
    counts: Counter[str] = field(default_factory=Counter)  # answered, refused, hung up, failed
    faults: list[str] = field(default_factory=list)
    weights: list[Weight] = field(default_factory=list)


class Weighed(Server):
    """A server that reports its memory."""

    program = ROOT / "tests" / "lib" / "serve_memory.py"
    weighings = 0

    def weigh(self) -> Weight:
        """Measure the memory after the server has been idle for a second."""
        self.is_idle()
        time.sleep(1)
        self.weighings += 1
        self.process.send_signal(signal.SIGUSR1)
        found = self.says(rf"weighing {self.weighings}: (\S+) MiB in use, (\S+) resident")
        return Weight(float(found[1]), float(found[2]))


def talker(folder: Path) -> Path:
    """Return a folder with the demo model, a template for tools and reasoning, and the config of an embedding
    model."""
    folder.mkdir()
    for file in (ROOT / "demo" / "model").iterdir():
        (folder / file.name).symlink_to(file)
    (folder / "chat_template.jinja").unlink()
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_lasttoken": true}')
    return folder


def make_case(number: int) -> tuple[str, dict]:
    """Return a route and a body. Answers that must be reproducible have a seed, or greedy decoding where
    the protocol has no seed."""
    dice = random.Random(number)
    text = dice.choice(PROMPTS).format(n=number % 50, m=number % 50 + 9)
    length = dice.choice([1, 20, 60, 150, 250])
    path = dice.choice(
        [CHAT, CHAT, COMPLETIONS, *WITHOUT_STREAM, "tools", "tools", "tools", "tools"]
    )
    if path == EMBEDDINGS:
        texts = [f"{text} {n}" for n in range(dice.choice([1, 5, 40]))]
        return path, {"input": texts, "encoding_format": dice.choice(["float", "base64"])}
    if path == COMPLETIONS:
        return path, {"prompt": text, "max_tokens": length, "seed": number}
    if path == COUNT:
        return path, {"messages": [{"role": "user", "content": text}], "tools": SCHEMAS}
    if path == CHAT:
        return path, make_chat(dice, text) | {"max_tokens": length, "seed": number}
    asked = random_ask(number, length, tools=1)
    while len(json.dumps(asked.body)) > 1500:  # the model's context is short
        number += 1000
        asked = random_ask(number, length, tools=1)
    thinks = {
        CHAT: {"chat_template_kwargs": {"enable_thinking": True}},
        RESPONSES: {"reasoning": {"effort": "high"}, "temperature": 0},
        MESSAGES: {"thinking": {"type": "enabled", "budget_tokens": 1024}, "temperature": 0},
    }[asked.path]
    if dice.random() < 0.7:
        thinks = {} if asked.path == CHAT else {"temperature": 0}
    return asked.path, asked.body | thinks


def make_chat(dice: random.Random, text: str) -> dict:
    body: dict = {"messages": [{"role": "user", "content": text}]}
    if dice.random() < 0.5:
        body |= {"temperature": 1.2}
    if dice.random() < 0.3:
        body |= {"stop": ["fox", ", 1"]}
    if dice.random() < 0.2:
        body |= {"logprobs": True, "top_logprobs": 3}
    if dice.random() < 0.2:
        body |= {"frequency_penalty": dice.choice([-0.5, 0.5, 2]), "presence_penalty": 0.5}
    kind = dice.randrange(4)
    if kind == 1:
        body |= dice.choice(GRAMMARS)
    elif kind == 2:
        thinks = dice.random() < 0.5
        body |= {"chat_template_kwargs": {"enable_thinking": thinks}}
        body |= {"tools": TOOLS, "guided_regex": (THINKING if thinks else "") + CALLING}
    elif kind == 3:
        function = {"name": "get_weather", "arguments": '{"city": "Paris"}'}
        call = {"id": "abcdefghi", "type": "function", "function": function}
        own = {"role": "assistant", "content": "", "reasoning_content": "Hm.", "tool_calls": [call]}
        result = {"role": "tool", "tool_call_id": "abcdefghi", "content": "A fox."}
        body["messages"] += [own, result]
        body |= {"tools": TOOLS}
    return body


def ask_grammar(server: Server, dice: random.Random) -> str:
    """Ask for an answer under a hostile grammar. Return the outcome: "answered" or "refused"."""
    reply = server.ask(CHAT, {"messages": SAID, "max_tokens": 8} | dice.choice(HOSTILE))
    if reply.status == 200:
        return "answered"
    assert reply.status in (400, 500) and reply.error["message"], reply
    return "refused"


def attack(server: Server, dice: random.Random) -> str:
    """Send something hostile. Return the outcome: "answered", "refused" or "hung up"."""
    kind = dice.randrange(7)
    if kind == 6:
        return ask_grammar(server, dice)
    if kind < 2:
        reply = server.ask(*dice.choice(BAD if kind else HEAVY))
        assert reply.status in (400, 404, 413) and len(reply.error["message"]) < 600, reply
        return "refused"
    line = server.line()
    line.socket.settimeout(server.patience)
    if kind == 2:
        # The server may close the connection before everything is sent
        with suppress(OSError):
            line.send(dice.choice(RAW))
            line.socket.shutdown(socket.SHUT_WR)
            line.everything()
    else:
        path, body = dice.choice(LONG)
        stream = dice.random() < 0.8
        if stream and dice.random() < 0.3:
            path, body = CHAT, PROGRESS
        line.post(path, body | {"stream": stream} | ENDLESS[path])
        if kind == 3:  # half-closed, and never read
            line.socket.shutdown(socket.SHUT_WR)
        time.sleep(dice.choice([0, 0.05, 0.5]))
        if kind == 4:  # a reset instead of an orderly close
            linger = b"\x01\x00\x00\x00\x00\x00\x00\x00"
            line.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    line.hang_up()
    return "hung up"


def hang_up(server: Server, dice: random.Random, path: str, body: dict) -> None:
    """Hang up within the head of a request, within its body, or later."""
    line = server.line()
    data = json.dumps(body | ENDLESS.get(path, {}))
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
    sent = dice.choice([10, len(head) + 20, len(head) + len(data)])
    line.send((head + data)[:sent].encode())
    time.sleep(dice.choice([0, 0.01, 0.1, 0.5]))
    line.hang_up()


def soak(
    server: Weighed, requests: int, clients: int, cases: int, rounds: int, hostile: float = 0.0
) -> Report:
    """Run clients in rounds. `hostile` is the share of attacks; with 0, some requests are invalid and a third
    of the clients hang up."""
    report, lock = Report(), threading.Lock()
    alone = [ask(server, *make_case(number), False) for number in range(cases)]

    def client(numbers: Iterator[int]) -> None:
        for number in numbers:
            try:
                outcome = one(random.Random(number))
            except Exception as error:
                outcome = "failed"
                report.faults.append(f"request {number}: {type(error).__name__}: {error}")
            with lock:
                report.counts[outcome] += 1

    def one(dice: random.Random) -> str:
        kind, case, stream = dice.random(), dice.randrange(cases), dice.random() < 0.6
        path, body = make_case(case)
        if kind < hostile:
            return attack(server, dice)
        if not hostile and kind < 0.08:
            reply = server.ask(*dice.choice(BAD))
            assert reply.status in (400, 404) and reply.error["message"], reply
            return "refused"
        if not hostile and kind < 0.1:
            return ask_grammar(server, dice)
        if not hostile and kind < 0.42:
            form = {} if path in WITHOUT_STREAM else {"stream": stream}
            hang_up(server, dice, path, body | form)
            return "hung up"
        found = ask(server, path, body, stream)
        assert found == alone[case], f"case {case}: {found} instead of {alone[case]}"
        return "answered"

    files = open_files(server)
    report.weights = run_rounds(client, requests, clients, server.weigh, rounds)
    assert server.is_idle(), "a slot is not free"
    wait_for(lambda: open_files(server) <= files)
    return report


def open_files(server: Server) -> int:
    """Return the number of open files, or 0 on a system without /proc."""
    try:
        return len(os.listdir(f"/proc/{server.process.pid}/fd"))
    except FileNotFoundError:
        return 0


def check(report: Report, requests: int) -> None:
    print(f"\n{dict(report.counts)}, {report.weights}", file=sys.stderr)
    assert not report.faults, report.faults[:5]
    grown = growth(report.weights)
    if not SOAK:  # the history of requests grows by at most half of this
        assert grown.in_use < IN_USE, report.weights
    elif requests >= JUDGED:
        assert grown.in_use < HELD and grown.resident < RESIDENT, report.weights


@pytest.fixture
def model(tmp_path) -> Path:
    return talker(tmp_path / "talker")


SHORT = {"clients": 8, "cases": 25, "rounds": 2}
LONG_FORM = {"clients": 16, "cases": 120, "rounds": ROUNDS}


def test_soak(model):
    requests = SOAK or 48
    with Weighed("--slots", "8", "--model", str(model)) as server:
        report = soak(server, requests, **(LONG_FORM if SOAK else SHORT))
        assert server.stop() == 0
    check(report, requests)
    counts = report.counts
    assert counts["answered"] > requests / 4 and counts["hung up"] > requests / 8
    assert counts["refused"] > requests / 40


def test_soak_with_hostile_clients(model):
    requests = SOAK or 30
    sizes = {"clients": 8, "cases": 12, "rounds": 1, "hostile": 0.33}
    if SOAK:
        sizes = LONG_FORM | {"clients": 64, "hostile": 0.1}
    with Weighed("--slots", "8", "--model", str(model)) as server:
        server.patience *= 10
        report = soak(server, requests, **sizes)
        assert server.stop() == 0
    check(report, requests)
    counts = report.counts
    assert counts["answered"] > requests / 3 and counts["hung up"] > requests / 40
    assert counts["refused"] > requests / 40


@pytest.mark.skipif(not SOAK, reason="a long form: NANOBATCH_SOAK=1000")
def test_soak_over_two_ranks(model, tmp_path):
    arguments = ("--slots", "8", "--model", str(model))
    with (
        two_ranks(tmp_path, arguments) as environment,
        Weighed(*arguments, **environment) as server,
    ):
        server.patience *= 10  # the threads of the ring poll continuously
        report = soak(server, SOAK, **LONG_FORM)
        assert server.stop() == 0
    check(report, SOAK)


@contextmanager
def two_ranks(folder: Path, arguments: tuple[str, ...]) -> Iterator[dict[str, str]]:
    """Start rank 1, and yield the environment of rank 0."""
    file = folder / "hosts.json"
    file.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in free_ports(2)]))
    environment = {"MLX_HOSTFILE": str(file)}
    command = [sys.executable, str(ROOT / "serve.py"), *arguments]
    with subprocess.Popen(command, env=os.environ | environment | {"MLX_RANK": "1"}) as follower:
        try:
            yield environment | {"MLX_RANK": "0"}
            assert follower.wait(30) == 0
        finally:
            follower.kill()

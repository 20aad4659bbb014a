"""Requests that have ended and clients that have left leave nothing in memory.

The garbage collector is off in these tests, so reference cycles stay and are counted.
`NANOBATCH_LEAKS=50` sends more requests of each kind.
"""

import gc
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import count

import pytest
from long_forms import number_of
from parrot import FLAT, SCHEMAS, TOOLS, Taught, said
from servers import CHAT, COMPLETIONS, MESSAGES, RESPONSES
from waiting import wait_for

from base import error_reports
from text.grammar import Grammar

OURS = ("server.", "text.", "engine.", "base.", "cli.", "nanobatch", "sched", "sampling", "h11.")
# A bounded number of these is kept for watchers
KEPT = ("RequestRecord", "Metrics", "RequestView", "StepView")
REQUESTS = number_of("LEAKS", 4)
MANY = 4  # concurrent requests
SAID = [said("x " * 300)]
NUMBERS = count()
LETTERS = {"guided_regex": "[a-z]{200}"}
BODIES = {
    "chat": (CHAT, {"messages": SAID, "max_tokens": 4}),
    "completions": (COMPLETIONS, {"prompt": "x " * 300, "max_tokens": 4}),
    "responses": (RESPONSES, {"input": "x " * 300, "max_output_tokens": 4}),
    "messages": (MESSAGES, {"messages": SAID, "max_tokens": 4}),
    "tools": (CHAT, {"messages": SAID, "max_tokens": 9, "tools": TOOLS, "tool_choice": "required"}),
    "items": (RESPONSES, {"input": "x", "tools": FLAT, "max_output_tokens": 4}),
    "blocks": (MESSAGES, {"messages": SAID, "tools": SCHEMAS, "max_tokens": 4}),
    "choices": (CHAT, {"messages": SAID, "max_tokens": 4, "n": 3, "logprobs": True} | LETTERS),
}
VECTORS = ("/v1/embeddings", {"input": ["x " * 100] * 40})
WRONG = {
    "no JSON": (CHAT, b"{", 400),
    "no grammar": (CHAT, {"messages": SAID, "guided_regex": "("}, 400),
    "no setting": (MESSAGES, {"messages": SAID, "max_tokens": 4, "temperature": -1}, 400),
    "no path": ("/v1/x", {}, 404),
}


@pytest.fixture(scope="module")
def taught() -> Iterator[Taught]:
    with Taught(is_taught=False, slots=12, max_len=2048) as taught:
        for path, body in BODIES.values():  # create the objects that are created only once
            for stream in (False, True):
                taught.ask(path, body | {"stream": stream})
        taught.ask(*VECTORS)
        yield taught


@pytest.fixture
def census(taught) -> Iterator[Callable[[], None]]:
    """Yield a function that asserts that there are no more of our objects than at the start."""

    def found() -> Counter[str]:
        kinds: Counter[str] = Counter()
        for kind, many in Counter(map(type, gc.get_objects())).items():
            if str(kind.__module__).startswith(OURS) and kind.__qualname__ not in KEPT:
                kinds[f"{kind.__module__}.{kind.__qualname__}"] += many
        return kinds

    def check() -> None:
        """Retry, because the server notices a hang-up after a moment."""
        until = time.monotonic() + 60
        while (left := found() - before) and time.monotonic() < until:
            time.sleep(0.1)
        assert not left

    wait_for(lambda: is_quiet(taught))
    gc.collect()
    gc.disable()
    before = found()
    yield check
    gc.enable()


def is_quiet(taught: Taught) -> bool:
    api = taught.parrot.api
    return not (api._requests or api._connections or taught.parrot.engine.has_work)


@pytest.mark.parametrize("kind", BODIES)
def test_no_leak_from_ended_requests(taught, census, kind):
    """Regression: a stream and its answer referred to each other, and a connection to itself. Each cycle kept
    a handle and its grammar until the collector ran, which depends on the number of objects and not on their
    size."""
    path, body = BODIES[kind]
    for number in range(REQUESTS):
        assert taught.ask(path, body | {"stream": bool(number % 2)}).status == 200
    census()


def test_no_leak_from_embeddings(taught, census):
    """Clients also hang up while most of a request's texts are not queued yet."""
    for _ in range(10):
        assert taught.ask(*VECTORS).status == 200
    taught.parrot.loop.pause()
    lines = [taught.line().post(*VECTORS) for _ in range(MANY)]
    wait_for(
        lambda: sum(bool(call.requests) for call in taught.parrot.api.request_log.records()[0])
    )
    for line in lines:
        line.hang_up()
    wait_for(lambda: not taught.parrot.api.request_log.records()[0])
    taught.parrot.loop.resume()
    census()


@pytest.mark.parametrize("kind", WRONG)
def test_no_leak_from_refused_requests(taught, census, kind):
    """A task keeps its exception, which keeps the frame that awaited the task."""
    path, body, status = WRONG[kind]
    for _ in range(REQUESTS):
        assert taught.ask(path, body).status == status
    census()


@pytest.mark.parametrize("kind", ["messages", "tools", "choices"])
def test_no_leak_from_hang_ups(taught, census, kind):
    """Hang up in the queue, during prefill, and during decode. (Regression: in decode a parser and its
    generator referred to each other.)"""
    path, body = BODIES[kind]
    body = body | {"max_tokens": 100}
    request_log, loop = taught.parrot.api.request_log, taught.parrot.loop
    for phase in ("free", "prefill", "decode"):
        loop.pause()
        lines = []
        for number in range(MANY):
            asked = json.dumps(body | {"stream": bool(number % 2)})
            asked = asked.replace("x ", f"{next(NUMBERS)} ", 1)  # so that no prompt is cached
            lines.append(taught.line().post(path, asked.encode()))
        wait_for(lambda: sum(bool(call.requests) for call in request_log.records()[0]) == MANY)
        reach(taught, phase)
        for line in lines:
            line.hang_up()
        wait_for(lambda: not request_log.records()[0])
        loop.resume()
    census()


def reach(taught: Taught, phase: str) -> None:
    """Step until a slot is in this phase."""
    engine, loop = taught.parrot.engine, taught.parrot.loop

    def is_there() -> bool:
        if any(slot.phase == phase for slot in engine.snapshot().slots):
            return True
        loop.step()
        wait_for(lambda: not loop.stepping)
        return False

    wait_for(is_there)


@pytest.mark.parametrize("kind", ["chat", "choices"])
def test_no_leak_from_failed_answers(taught, census, kind, monkeypatch):
    """A handle keeps its exception, and the exception keeps the frames that it passed through."""
    path, body = BODIES[kind]
    monkeypatch.setattr(error_reports.LOG, "disabled", True)  # pytest keeps log records

    def fail(*arguments):
        raise RuntimeError("the device is on fire")

    if kind == "choices":
        monkeypatch.setattr(Grammar, "mask", fail)
    else:
        monkeypatch.setattr(taught.parrot.engine.runner, "start_forward", fail)
    for number in range(REQUESTS):
        assert b"on fire" in taught.ask(path, body | {"stream": bool(number % 2)}).body
    census()


def test_no_leak_from_a_kept_connection(taught, census):
    """Regression: the response to a connection's last request was kept as long as the connection."""
    line = taught.line()
    path, body = BODIES["choices"]
    for number in range(8):
        line.post(path, body | {"stream": bool(number % 2)})
        if number % 2:
            line.until(b"0\r\n\r\n")
        else:
            assert line.reply().status == 200
    line.hang_up()
    census()


def test_no_leak_from_incomplete_requests(taught, census):
    """Incomplete, pipelined and invalid requests leave nothing in memory."""
    taught.parrot.loop.pause()
    data = json.dumps(BODIES["chat"][1])
    head = f"POST {CHAT} HTTP/1.1\nHost: localhost\nContent-Length: {len(data)}\n\n"
    more = "GET /v1/models HTTP/1.1\nHost: localhost\n\n" * 3
    parts = (
        "GET /v1/models HTTP/1.1\nHo",
        head + data[:100],
        head + data + more,
        "\x16\x03 no HTTP\n\n",
    )
    for text in parts:
        taught.line().send(text).hang_up()
    line = taught.line().send(f"POST {CHAT} HTTP/1.1\nHost: localhost\nContent-Length: 5000000\n\n")
    assert line.reply().status == 413
    line.hang_up()
    wait_for(lambda: is_quiet(taught))
    taught.parrot.loop.resume()
    census()

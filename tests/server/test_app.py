"""A server in this process, on a small random model, that tests pause and break."""

import asyncio
import errno
import gc
import json
import math
import os
import queue
import random
import re
import signal
import socket
import sys
import threading
import time
import warnings
from collections import Counter
from contextlib import ExitStack, suppress
from dataclasses import fields, replace
from itertools import pairwise, takewhile
from types import SimpleNamespace

import h11
import pytest
from checkpoints import make_checkpoint
from here import Here
from processes import python
from servers import COMPLETIONS, Line
from waiting import wait_for

from base.sandbox import BusyError, Sandbox
from engine import prefill_progress
from engine.handle import TokenLogprob
from engine.loop import Loop
from engine.server_snapshot import RequestRecord
from kernels import device
from nanobatch import Engine
from sampling_params import SamplingParams
from server import http, openai, protocol_adapter, tokenize_request
from server import stream as answer_stream
from server.access_log import AccessLog, RequestLog, request_line
from server.anthropic import Message
from server.app import APIServer
from server.body_reader import BodyReader, read_json
from server.choice import Change, Choice, Item, Word, Words
from server.http import LONG_BODY_BYTES, Options
from server.openai import ChatCompletion
from server.protocol_adapter import ParsedRequest
from server.responses import Response
from server.stream import AnswerWriter
from server.submit import Submission
from text.grammar import Grammars
from text.tool_formats import FORMATS, OutputFormat
from text.tool_parser import OutputParser

BODY = {"prompt": "Hello", "max_tokens": 60, "ignore_eos": True}


def test_log_reports_progress_of_long_prompts(here, monkeypatch):
    """Regression: a request was logged only when it ended, so the log showed nothing during the ten minutes
    of a long prompt."""
    monkeypatch.setattr(prefill_progress, "LONG_S", -1.0)  # every unfinished prompt counts as long
    lines = queue.Queue()
    here.api.log = lines.put
    here.loop.pause()
    line = here.line().post(COMPLETIONS, BODY | {"stream": True})
    told = lines.get(timeout=60)
    assert re.search(r"request_id=cmpl-\d+-\w+ client=\S+ event=prefill prefilled=0", told), told
    assert "prompt_tokens=" in told and "Hello" not in told
    time.sleep(1.5)
    assert lines.empty(), "one line in ten seconds"
    here.loop.resume()
    line.until(b"[DONE]")
    assert "status=200" in lines.get(timeout=60)


def test_owner_is_advised_once_of_a_second_hang_up(here, monkeypatch):
    monkeypatch.setattr(prefill_progress, "LONG_S", -1.0)
    hints = []
    here.api.advise = hints.append
    here.loop.pause()
    for count, prompt in enumerate(("Hello", "Other", "Hello", "Hello"), 1):
        line = here.line().post(COMPLETIONS, BODY | {"prompt": prompt, "stream": True})
        line.until(b": prompt 0/")
        line.hang_up()
        wait_for(lambda: not here.api.view().open)
        assert len(hints) == (count > 2), hints
    assert re.match(r"127.0.0.1 hung up twice on the same prompt, after \d+ s, with 0 of", hints[0])
    here.loop.resume()


@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_silent_streams_get_pings(here, monkeypatch, version):
    """Proxies close silent connections, and a stream may be silent for minutes in a full queue or a pause.
    nginx uses HTTP/1.0 towards the server."""
    monkeypatch.setattr(http, "PING_S", 0.3)
    here.loop.slow = 20  # steps per second, so that the answer does not end before the pause
    line = here.line().post(COMPLETIONS, BODY | {"stream": True}, version=version)
    line.until(b"data: ")
    here.loop.pause()
    line.until(b": ping\n\n")
    line.until(b": ping\n\n")
    here.loop.slow = 0.0
    here.loop.resume()
    assert b"[DONE]" in line.until(b"[DONE]")


@pytest.mark.parametrize("kind", [b":", b"data:"])
def test_comments_of_a_long_wait_are_few(monkeypatch, kind):
    """Regression: go-openai gives up after 300 lines without an event, which was 75 seconds of a prompt. So
    comments become less frequent, but gradually, for users who watch them. A client that asked for events
    still gets them often."""
    now, sent = [0.0], []
    monkeypatch.setattr(http, "time", SimpleNamespace(monotonic=lambda: now[0]))
    connection = SimpleNamespace(client="", is_blocked=False, send_head=lambda *head: None)
    connection.send = lambda event: sent.append((now[0], event.data))
    head = h11.Request(method="POST", target="/", headers=[("Host", "localhost")])
    request = http.HTTPRequest(connection, head, RequestLog())
    request.answer = SimpleNamespace(progress=lambda: kind + b" prompt 1/2\n\n")
    request.begin_events()
    for _ in range(2 * 20 * 60):  # twenty minutes
        now[0] += http.SWEEP_S
        request.keep_alive(now[0])
    times = [at for at, _ in sent]
    assert times[:9] == [0.5 * (n + 1) for n in range(9)]
    for early, late in pairwise(times):
        assert late - early <= min(10.5, late / 10 + 0.5)
    lines = b"".join(data for _, data in sent).count(b"\n")
    assert lines < 300 if kind == b":" else lines == 2 * 2 * 20 * 60


def test_busy_streams_get_no_pings(here):
    """Some clients take any line for data, so a ping before the first token would distort their time to first
    token."""
    assert b"ping" not in here.complete(stream=True).body


@pytest.mark.parametrize("how", ["paused", "slow"])
def test_shutdown_ends_a_pause_and_slow_motion(here, how):
    """In a pause or in slow motion, open answers could not finish within the shutdown timeout, so a shutdown
    ends both."""
    if how == "paused":
        here.loop.pause()
    else:
        here.loop.slow = 0.2
    line = here.line().post(COMPLETIONS, BODY)
    submitted(here)
    here.api.drain(10)
    assert line.reply().json["choices"][0]["finish_reason"] == "length"


def test_failed_answer_is_an_error_and_the_next_is_right(here, engine, monkeypatch):
    expected = here.complete(seed=1).json["choices"][0]["text"]
    begin, calls = engine.runner.start_forward, []

    def fail(order):
        calls.append(order)
        if len(calls) == 3:
            raise RuntimeError("the device is on fire")
        return begin(order)

    monkeypatch.setattr(engine.runner, "start_forward", fail)
    reply = here.complete()
    assert (reply.status, reply.error["code"]) == (500, "failed")
    assert reply.error["type"] == "server_error" and "on fire" in reply.error["message"]
    assert here.complete(seed=1).json["choices"][0]["text"] == expected
    assert here.api.view().ended[1].reason == "failed"


def test_the_memory_that_is_free_now(here, monkeypatch):
    """Regression: watchers got the amount of memory that was free when the server started."""
    assert here.api.view().free_memory > 1_000_000
    monkeypatch.setattr(device, "free_memory", lambda: 5_000_000)
    wait_for(lambda: here.api.view().free_memory == 5_000_000)  # it is measured once a second


def test_errors_name_no_folder_of_the_server(here, engine, monkeypatch):
    """Error messages contain the name of a file, but not its path on the server."""
    where = "/home/a user/models--owner/model.safetensors"

    def fail(*arguments):
        raise FileNotFoundError(2, "No such file or directory", where)

    monkeypatch.setattr(engine.text, "unfit", f"{where}: the chat template loops; mend it.")
    said = [here.chat().body]
    monkeypatch.setattr(engine.runner, "start_forward", fail)
    said += [here.complete().body, here.complete(stream=True).body]
    monkeypatch.setattr(openai, "read_prompts", fail)
    said.append(here.complete().body)
    for each in said:
        assert b"model.safetensors" in each and b"home" not in each and b"owner" not in each, each


def test_seed_of_a_later_choice_stays_in_range(here):
    """Regression: the largest seed with two choices got a 400 about a seed that the client had not sent."""
    body = {"prompt": "Hello", "temperature": 1, "max_tokens": 20}
    last = here.ask(COMPLETIONS, body | {"seed": 2**64 - 1, "n": 2})
    first = here.ask(COMPLETIONS, body | {"seed": 0})
    assert last.json["choices"][1]["text"] == first.json["choices"][0]["text"]


def test_ctrl_c_in_another_thread_ends_the_wait(here):
    """Regression: Python handles a signal when its main thread runs. A signal that reached another thread,
    or arrived just before the main thread went to sleep, was not handled, and a busy server did not shut
    down."""

    main = threading.get_ident()

    def is_waiting() -> bool:
        frame, functions = sys._current_frames()[main], set()
        while frame is not None:
            functions.add(frame.f_code)
            frame = frame.f_back
        return APIServer.wait.__code__ in functions

    def strike() -> None:
        wait_for(is_waiting)
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)

    thread = threading.Thread(target=strike)
    thread.start()
    give_up = threading.Timer(60, here.api._ended.set)
    give_up.start()
    with pytest.raises(KeyboardInterrupt):
        here.api.wait(queue.SimpleQueue())
    give_up.cancel()
    thread.join()
    assert not here.api._ended.is_set(), "nothing was heard of Ctrl-C until the server had ended"


def test_metrics_keep_no_texts_between_scrapes(here):
    """The snapshot that is kept for the next scrape contains no texts, because there may never be another
    scrape."""
    here.complete()
    assert here.gauge("step_seconds_count") == here.gauge("step_seconds_count") > 5
    kept = here.api._status._scraped[here.api.models.default.served.engine]
    assert kept.steps == kept.ended == kept.requests == () and kept.seen.ended == 1
    assert b'quantile="0.5"' not in here.ask("/metrics").body, "no step since the last look"
    here.complete()
    assert b'quantile="0.5"' in here.ask("/metrics").body


def test_answer_ready_before_submit_returns_is_sent(here, engine):
    """An answer that is complete before `submit` returns is sent, although no further commit reports it."""
    submit = engine.submit

    def slow(*arguments, **options):
        handle = submit(*arguments, **options)
        handle.result(timeout=60)
        return handle

    engine.submit = slow
    for stream in (False, True):
        reply = here.complete(max_tokens=3, stream=stream)
        assert reply.status == 200 and b"length" in reply.body


@pytest.mark.parametrize(
    "owner, name, times",
    [(openai, "read_prompts", 1), (AnswerWriter, "_usage", 2)],  # usage is also called for the log
)
def test_internal_error_is_a_traceback_and_a_500(here, monkeypatch, caplog, owner, name, times):
    """A KeyError in our code is not reported as a missing field of the body."""

    def broken(*arguments):
        raise KeyError("of ours")

    monkeypatch.setattr(owner, name, broken)
    reply = here.complete()
    assert (reply.status, reply.error["code"]) == (500, "internal_error")
    assert "KeyError" in reply.error["message"]
    monkeypatch.undo()
    assert "in broken" in caplog.text and caplog.text.count("Traceback") == times
    caplog.clear()
    assert here.complete(temperature="hot").status == 400 and here.complete().status == 200
    assert caplog.text == ""


def test_close_ends_all_connections(engine):
    """Regression: Python warned about each connection that was still open: "unclosed transport"."""
    gc.collect()  # collect what other tests have left
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", ResourceWarning)
        with Here(engine) as here:
            line = Line(here.host, here.port, receive=4096)
            line.post(COMPLETIONS, BODY | {"stream": True, "n": 16, "logprobs": 20})
            line.until(b"\r\n\r\n")
            (connection,) = here.api._connections
            while not connection.is_blocked:
                time.sleep(0.005)
        del here, connection
        gc.collect()
    assert not said, [str(each.message) for each in said]
    line.hang_up()


@pytest.mark.parametrize("stream", [False, True])
def test_cancelled_answer_is_an_error(here, engine, stream):
    """An answer cancelled from the screen ends with an error, not with `finish_reason` "stop"."""
    here.loop.pause()
    line = here.line().post(COMPLETIONS, BODY | {"stream": stream})
    (request,) = submitted(here)
    engine.cancel(engine.registry.open[request])
    if stream:
        assert b"finish_reason" not in line.until(b'"code":"cancelled"')
    else:
        reply = line.reply()
        assert (reply.status, reply.error["code"]) == (503, "cancelled")


def test_reader_that_takes_nothing_is_dropped(here, monkeypatch):
    monkeypatch.setattr(http, "WRITE_TIMEOUT_S", 0.3)
    line = Line(here.host, here.port, receive=4096)
    line.post(COMPLETIONS, BODY | {"stream": True, "logprobs": 20, "n": 16, "max_tokens": 100})
    ended = wait_for(lambda: here.api.view().ended)
    assert ended[0].hung_up and ended[0].reason == "too_slow" and not here.api.view().open
    line.hang_up()


def submitted(here) -> tuple[int, ...]:
    """Return the requests of the only open call, as soon as they are queued."""
    return wait_for(lambda: [call.requests for call in here.api.view().open if call.requests])[0]


def narrow(here) -> None:
    """Shrink the send buffers of all connections, so that each write waits for the client."""
    for connection in here.api._connections:
        connection.transport.set_write_buffer_limits(0)
        own = connection.transport.get_extra_info("socket")
        own.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2048)


def test_slowest_reader_is_ended_when_too_much_waits(here, monkeypatch):
    """Regression: the unsent data of slow clients had no limit, and 40 of them took 5.7 MiB each."""
    body = BODY | {"max_tokens": 300, "temperature": 1, "seed": 7}
    expected = here.ask(COMPLETIONS, body).json["choices"][0]["text"]
    monkeypatch.setattr(http, "SWEEP_S", 0.05)
    monkeypatch.setattr(http, "SLOW_AFTER_S", 0.1)
    here.loop.pause()
    lines = []
    for top in (10, 1):
        line = Line(here.host, here.port, receive=2048)
        lines.append(line.post(COMPLETIONS, body | {"stream": True, "logprobs": top}))
        line.until(b"\r\n\r\n")
    narrow(here)
    here.loop.resume()
    answers = [request.answer for request in here.api._requests]
    wait_for(
        lambda: all(choice.handle.finish_reason for each in answers for choice in each.choices)
    )
    most, least = sorted(answer.lag for answer in answers)[::-1]
    assert most > 1.2 * least > 1_000
    monkeypatch.setattr(http, "MAX_UNSENT_BYTES", most + least // 2)
    ended = wait_for(lambda: [call for call in here.api.view().ended if call.reason == "too_slow"])
    time.sleep(0.2)  # a few sweeps later
    assert len(ended) == 1 and len(here.api.view().open) == 1
    said = lines[1].until(b"[DONE]")
    texts = [json.loads(text) for text in re.findall(rb"data: (\{.*\})", said)]
    assert "".join(text["choices"][0]["text"] for text in texts) == expected
    for line in lines:
        line.hang_up()


def test_large_answer_is_sent_in_chunks(here):
    """Regression: the whole answer was buffered in the transport. It was cut off after a minute, however
    steadily the client read, and the call had been recorded as ended long before."""
    here.loop.pause()
    line = Line(here.host, here.port, receive=2048)
    line.post(COMPLETIONS, BODY | {"logprobs": 20, "n": 8, "max_tokens": 100})
    (connection,) = wait_for(lambda: here.api._connections)
    narrow(here)
    here.loop.resume()
    size = int(re.search(rb"Content-Length: (\d+)", line.until(b"\r\n\r\n"))[1])
    moments = set()
    while size > len(line.rest):
        if connection.is_blocked and connection.request:
            assert connection.transport.get_write_buffer_size() <= http.CHUNK_BYTES
            moments.add(connection.blocked_since)
        line.rest += line.socket.recv(2**12)
    assert len(moments) > 5 and size > 10 * http.CHUNK_BYTES, (len(moments), size)
    assert len(json.loads(line.rest)["choices"]) == 8
    line.hang_up()


def test_hang_up_during_a_large_answer_is_recorded(here):
    """Regression: the log said that the client had received everything."""
    here.loop.pause()
    line = Line(here.host, here.port, receive=2048)
    line.post(COMPLETIONS, BODY | {"logprobs": 20, "n": 8, "max_tokens": 100})
    wait_for(lambda: here.api.view().open)
    narrow(here)
    here.loop.resume()
    line.until(b"\r\n\r\n")
    line.hang_up()
    ended = wait_for(lambda: here.api.view().ended)
    assert ended[0].hung_up and ended[0].status == 200 and ended[0].tokens > 100


def test_uneven_reader_gets_every_piece_in_order(here):
    """Pieces are written at once while the client keeps up, and are queued while it does not."""
    body = BODY | {"max_tokens": 120, "temperature": 1, "seed": 7}
    whole = here.ask(COMPLETIONS, body).json["choices"][0]["text"]
    here.loop.pause()
    line = Line(here.host, here.port, receive=2048).post(COMPLETIONS, body | {"stream": True})
    line.until(b"\r\n\r\n")
    (connection,) = here.api._connections
    narrow(here)
    here.loop.resume()
    wait_for(lambda: connection.is_blocked)
    said = b""
    while b"[DONE]" not in said:
        piece = line.socket.recv(600)
        assert piece, said[-300:]
        said += piece
        time.sleep(0.002)
    texts = re.findall(rb"data: (\{.*\})", said)
    assert "".join(json.loads(text)["choices"][0]["text"] for text in texts) == whole


def test_body_has_a_timeout(here, monkeypatch):
    monkeypatch.setattr(http, "BODY_TIMEOUT_S", 0.2)
    line = here.line().send(
        f"POST {COMPLETIONS} HTTP/1.1\nHost: localhost\nContent-Length: 100\n\n{{"
    )
    assert line.reply().status == 408


def test_connection_without_a_request_is_closed(here, monkeypatch):
    """A connection that sends no complete head in time is closed. One that is kept alive after a response has
    a longer timeout."""
    monkeypatch.setattr(http, "HEAD_TIMEOUT_S", 1.0)
    silent, slow = here.line(), here.line().send("GET /health HTT")
    kept = here.line().send("GET /health HTTP/1.1\nHost: localhost\n\n")
    assert kept.reply().status == 200
    for line in (silent, slow):
        assert line.everything() == b""
    assert kept.send("GET /health HTTP/1.1\nHost: localhost\n\n").reply().status == 200


def fill(here, line: Line, requests: int, what: str = "GET /metrics") -> None:
    """Send requests whose responses overflow the buffers of both sides, read no response, and wait until the
    server ends the connection."""
    (connection,) = wait_for(lambda: here.api._connections)
    own = connection.transport.get_extra_info("socket")
    own.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2048)
    line.send(f"{what} HTTP/1.1\nHost: localhost\n\n" * requests)
    wait_for(lambda: not here.api.view().connections)
    line.hang_up()


@pytest.mark.parametrize("what, requests", [("GET /metrics", 100), ("HEAD /health", 1000)])
def test_unread_responses_end_the_connection(here, monkeypatch, what, requests):
    """Regression: only streams had a write timeout. The next response on a blocked connection hung, and
    unread responses without a body piled up."""
    monkeypatch.setattr(http, "WRITE_TIMEOUT_S", 0.2)
    fill(here, Line(here.host, here.port, receive=2048), requests, what)


def test_connection_lost_in_its_close_leaves_no_traceback(here, monkeypatch, caplog):
    """Aborting an asyncio transport fails if it was closed and has sent the rest since."""
    monkeypatch.setattr(http, "LINGER_S", 0.05)
    line = Line(here.host, here.port, receive=2048)
    (connection,) = wait_for(lambda: here.api._connections)
    own = connection.transport.get_extra_info("socket")
    own.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2048)
    line.send("GET / HTTP/1.1\nHost: localhost\nConnection: close\n\n")
    line.socket.settimeout(5)
    with suppress(TimeoutError):
        while not connection.transport.is_closing():
            line.rest += line.socket.recv(2**14 if connection.request else 1)
    line.everything()
    wait_for(connection.task.done)
    connection.task = None
    assert not caplog.records


def test_blocked_client_does_not_end_the_sweeper(here, monkeypatch):
    """Regression: the sweeper read the lag of a request that was not parsed yet, and died. From then on there
    were no pings, and no limit on slow clients."""
    monkeypatch.setattr(http, "SLOW_AFTER_S", 0.0)
    goes_on = threading.Event()
    read = openai.read_prompts
    monkeypatch.setattr(openai, "read_prompts", lambda asked: goes_on.wait(20) and read(asked))
    line = here.line().post(COMPLETIONS, BODY)
    wait_for(lambda: here.api._submissions)
    (request,) = here.api._requests
    request.connection.pause_writing()
    http.sweep_once([request])
    request.connection.resume_writing()
    goes_on.set()
    assert line.reply().status == 200


def test_failed_sweep_is_a_traceback_and_the_next_one_runs(here, monkeypatch, caplog):
    monkeypatch.setattr(http, "SWEEP_S", 0.02)
    sweep, failed = http.sweep_once, []

    def fail(requests):
        if not failed:
            failed.append(1)
            raise KeyError("of ours")
        sweep(requests)

    monkeypatch.setattr(http, "sweep_once", fail)
    monkeypatch.setattr(http, "PING_S", 0.1)
    here.loop.pause()
    line = here.line().post(COMPLETIONS, BODY | {"stream": True})
    line.until(b": prompt 0/")
    here.loop.resume()
    assert failed and caplog.text.count("Traceback") == 1


def test_unread_response_keeps_no_idle_connection(engine, monkeypatch):
    """An idle connection with unread responses is aborted after a timeout, because a close waits until
    everything has been sent, perhaps forever."""
    monkeypatch.setattr(http, "HEAD_TIMEOUT_S", 1.0)
    monkeypatch.setattr(http, "IDLE_TIMEOUT_S", 1)
    with Here(engine) as here:
        fill(here, Line(here.host, here.port, receive=2048), 5)


@pytest.mark.parametrize("what", ["a pipelined request", "a long body"])
def test_hang_up_is_noticed_after(here, what):
    """Regression: a pipelined request, or a long body in one piece, stopped the server from reading, so it
    did not notice that the client hung up."""
    here.loop.pause()
    is_long = what == "a long body"
    line = here.line().post(COMPLETIONS, BODY | {"user": "x" * 30_000 * is_long})
    submitted(here)
    if not is_long:
        line.send("GET /health HTTP/1.1\nHost: localhost\n\n")
        (connection,) = here.api._connections
        wait_for(lambda: connection._http.trailing_data[0])
    line.hang_up()
    wait_for(lambda: not here.api.view().open)


def test_read_ahead_is_bounded(here):
    """One packet can contain 14,000 requests. The number of bytes that are read ahead is bounded, and each
    request is answered."""
    here.loop.pause()
    line = here.line().post(COMPLETIONS, BODY)
    submitted(here)
    (connection,) = here.api._connections
    flood = "HEAD /health HTTP/1.1\nHost: localhost\n\n" * 500
    line.send(flood)
    wait_for(lambda: not connection.transport.is_reading())
    line.send(flood * 3)
    assert len(connection._http.trailing_data[0]) <= http.READ_AHEAD_BYTES + len(flood)
    here.loop.resume()
    assert line.reply().status == 200
    for _ in range(2000):
        line.until(b"HTTP/1.1 200 OK\r\n")


def test_all_bodies_together_have_a_limit(here, monkeypatch):
    """Regression: 512 connections with 4 MiB of unfinished body each took two gigabytes."""
    monkeypatch.setattr(http, "MAX_BODIES_BYTES", 10 * LONG_BODY_BYTES)
    head = f"POST {COMPLETIONS} HTTP/1.1\nHost: localhost\nContent-Length: 1000000\n\n"
    lines = [here.line().send(head).send(b"x" * 4 * LONG_BODY_BYTES) for _ in range(4)]
    wait_for(lambda: any(call.status == 429 for call in here.api.view().ended))
    assert here.complete(max_tokens=1).status == 200
    for line in lines:
        line.hang_up()
    wait_for(lambda: not here.api.view().open)
    assert here.complete(user="x" * 5 * LONG_BODY_BYTES, max_tokens=1).status == 200


@pytest.mark.parametrize("what", ["chunks of a body", "refused chunks", "requests"])
def test_packet_with_thousands_of_parts_blocks_nobody(here, what):
    """Regression: the server's thread processed a whole packet in one turn, even if it contained 40,000
    one-byte chunks."""
    seen = [0]

    def look() -> None:
        """Record the number of unprocessed bytes in each turn of the server's thread."""
        for connection in here.api._connections:
            seen.append(len(connection._http.trailing_data[0]))
        if not is_over:
            here.api._events.call_soon(look)

    is_over = False
    path = COMPLETIONS if what == "chunks of a body" else "/nowhere"
    flood = f"POST {path} HTTP/1.1\nHost: localhost\nTransfer-Encoding: chunked\n\n"
    flood += "1\nx\n" * 5_000 + "0\n\n"
    if what == "requests":
        flood = "GET /health HTTP/1.1\nHost: localhost\n\n" * 500
    line = here.line()
    here.api._events.call_soon_threadsafe(look)
    assert line.send(flood).reply().status in (200, 400, 404)
    if what == "requests":
        for _ in range(499):
            assert line.reply().status == 200
    is_over = True
    assert max(seen) > 2_000, "nothing has come in one piece"
    assert max(before - after for before, after in pairwise(seen)) < 100


def test_trailers_have_a_limit(here):
    """Regression: the headers that may follow a chunked body had no limit, and 38 MB of them took 660 MB of
    memory."""
    head = f"POST {COMPLETIONS} HTTP/1.1\nHost: localhost\nTransfer-Encoding: chunked\n\n"
    data = json.dumps(BODY).encode()
    body = f"{len(data):x}\r\n".encode() + data + b"\r\n0\r\n"
    assert here.line().send(head).send(body).send("A: b\n\n").reply().status == 200
    line = here.line().send(head).send(body).send("A: b\n" * 20_000)
    assert line.reply().status == 400
    assert line.everything() == b""


def test_many_preflights_on_one_connection(here):
    """Regression: a preflight, which no route answers, was counted as a pending request forever."""
    line = here.line()
    head = f"OPTIONS {COMPLETIONS} HTTP/1.1\nHost: localhost\nOrigin: http://localhost\n"
    for _ in range(150):
        assert line.send(f"{head}Access-Control-Request-Method: POST\n\n").reply().status == 200
    assert line.post(COMPLETIONS, BODY).reply().status == 200


def test_invalid_bytes_after_an_answer_leave_no_traceback(here, caplog):
    """A request is refused before its body has arrived, and the rest of the body may be malformed."""
    line = here.line().send(
        "POST /nope HTTP/1.1\nHost: localhost\nTransfer-Encoding: chunked\n\n1\nx\n"
    )
    assert line.reply().status == 404
    assert line.send("no number\n").everything() == b""
    assert here.ask("/health").status == 200 and not caplog.records


def test_503_while_the_model_is_loading(engine):
    server = Here.__new__(Here)
    server.api = APIServer(Options(port=0)).start()
    server.host, server.port = server.api._socket.getsockname()
    assert server.ask("/health").status == 503
    reply = server.complete()
    assert (reply.status, reply.error["code"]) == (503, "loading")
    assert reply.headers["retry-after"]
    server.loop = Loop(engine).start()
    server.api.open(engine, server.loop, "small")
    with server:
        assert server.ask("/health").status == server.complete().status == 200


@pytest.mark.parametrize("alias", ["gpt-4o", "*"])
def test_alias(engine, alias):
    """Some clients can only request their vendor's model names."""
    with Here(engine, aliases=(alias,)) as here:
        known = ["small"] + [alias] * (alias != "*")
        assert [model["id"] for model in here.ask("/v1/models").json["data"]] == known
        for name in (*known, "default"):
            reply = here.complete(model=name)
            assert (reply.status, reply.json["model"]) == (200, "small")
        assert here.ask(f"/v1/models/{known[-1]}").json["id"] == known[-1]
        reply = here.complete(model="gpt-5/at-all")
        assert reply.status == (200 if alias == "*" else 404)
        assert alias == "*" or "--alias" in reply.error["message"]
        assert here.complete(model=5).status == 400


def test_max_tokens_of_requests_without_their_own(engine):
    """Regression: Codex sends no max_tokens, and a small model repeated its calls until the slot was full."""
    with Here(engine, max_tokens=5) as here:
        body = {"prompt": "Hello", "ignore_eos": True}
        for asked, length in ((None, 5), (-1, 5), (3, 3), (9, 9)):
            reply = here.ask(COMPLETIONS, body | {"max_tokens": asked})
            assert reply.json["usage"]["completion_tokens"] == length
            assert reply.json["choices"][0]["finish_reason"] == "length"
        full = here.ask(COMPLETIONS, body | {"prompt": [65] * 125})
        assert full.json["usage"]["completion_tokens"] == 3  # the space left in the slot


def test_health_is_503_once_the_loop_has_ended(here):
    """A server whose loop has ended is not healthy, because every request would hang."""
    assert here.ask("/health").json == {"status": "ok", "arithmetic": "float"}
    here.loop.stop()
    assert here.ask("/health").status == 503


def test_choices_are_queued_all_or_none(engine):
    """All choices of a request are queued, or none."""
    engine.sched.max_queue = 3  # next to two free slots
    with Here(engine) as here:
        here.loop.pause()
        first = here.line().post(COMPLETIONS, BODY | {"n": 3})
        wait_for(lambda: engine.snapshot().waiting == 3)
        reply = here.complete(n=3)
        assert (reply.status, reply.error["code"]) == (429, "rate_limit_exceeded"), reply
        assert reply.headers["retry-after"] == "1"
        many = here.complete(n=4)
        # Four choices never fit into this queue
        assert many.status == 400 and "queue" in many.error["message"]
        assert engine.snapshot().waiting == 3
        here.loop.resume()
        assert len(first.reply().json["choices"]) == 3


@pytest.mark.parametrize(
    "text", ["fox", "", 'a "quote"\n\\', '"\0"', "\0", "日本 🦊", "half \ud83e", "data: [DONE]\n\n"]
)
@pytest.mark.parametrize("chat", [True, False])
def test_event_from_a_pattern_equals_the_whole_event(chat, text):
    """A stream inserts its text into a precomputed event. Text that looks like the placeholder does not break
    it."""
    speaks = openai.ChatCompletion if chat else openai.Completion
    shape = speaks(protocol_adapter.ParsedRequest([], usage=True), "7-ab", 'a "model"')

    def tell(index: int, words: list | None) -> bytes:
        return shape.changed(index, Change("delta", Item("content"), text, words))

    for index in (0, 3, 0):
        (choice,) = json.loads(tell(index, None).removeprefix(b"data: "))["choices"]
        written = choice["delta"]["content"] if chat else choice["text"]
        assert (choice["index"], written) == (index, text.replace("\ud83e", "?"))
        said = json.loads(tell(index, []).removeprefix(b"data: "))
        said["choices"][0]["logprobs"] = None
        assert tell(index, None) == protocol_adapter.event(said)


def test_exactly_the_requests_over_the_limit_are_refused(here, monkeypatch):
    """Regression: a refused client that had not hung up yet still counted, so all others were refused, too.
    The status is 429, which clients retry, because a plain 503 looks like a server that is shutting down."""
    monkeypatch.setattr(http, "MAX_CONNECTIONS", 2)
    idle = [here.line() for _ in range(3)]
    for line in idle:  # a connection without an active request does not count
        assert line.post(COMPLETIONS, BODY | {"max_tokens": 1}).reply().status == 200
    here.loop.pause()
    served = [line.post(COMPLETIONS, BODY) for line in idle[:2]]
    wait_for(lambda: sum(bool(call.requests) for call in here.api.view().open) == 2)
    refused = idle[2].post(COMPLETIONS, BODY).reply()
    assert (refused.status, refused.error["type"]) == (429, "rate_limit_error")
    assert (refused.headers["retry-after"], refused.headers["connection"]) == ("1", "close")
    here.loop.resume()
    assert [line.reply().status for line in served] == [200, 200]
    assert here.complete().status == 200


@pytest.mark.parametrize(
    "what",
    [
        "nothing",
        "GET /health HTTP/1.1\nHost: localhost\n\n",
        "half a body",
        "GET / HTTP/1.1\nHost: localhost\n\n"
        * 5,  # more responses than the server sends before the client reads
    ],
)
def test_idle_connections_keep_nobody_out(here, monkeypatch, what):
    """Regression: idle connections either used up the limit on open files, so that no client could connect,
    or counted towards the limit on connections, so that every client got a 429."""
    monkeypatch.setattr(http, "MAX_CONNECTIONS", 20)
    monkeypatch.setattr(http, "MAX_IDLE_CONNECTIONS", 10)
    head = f"POST {COMPLETIONS} HTTP/1.1\nHost: localhost\nContent-Length: 100\n\n{{"
    sent = {"nothing": "", "half a body": head}.get(what, what)
    here.loop.pause()
    working = here.line().post(COMPLETIONS, BODY)
    submitted(here)
    with ExitStack() as stack:
        for _ in range(50):
            line = Line(here.host, here.port, receive=2048)
            stack.callback(line.hang_up)
            with suppress(OSError):  # the server may have closed it
                line.send(sent)
        wait_for(lambda: here.api.view().connections == 30)
        # On a busy machine the server may still be reading what these lines sent
        wait_for(lambda: sum(each.idle_since < math.inf for each in [*here.api._connections]) == 29)
        here.loop.resume()
        assert here.complete().status == 200
        assert working.reply().status == 200  # the oldest connection, but its request is active


def test_newest_connection_is_aborted_if_all_are_active(here, monkeypatch):
    monkeypatch.setattr(http, "MAX_CONNECTIONS", 1)
    monkeypatch.setattr(http, "MAX_IDLE_CONNECTIONS", 0)
    here.loop.pause()
    working = here.line().post(COMPLETIONS, BODY)
    submitted(here)
    assert here.line().everything() == b""
    here.loop.resume()
    assert working.reply().status == 200


def test_accept_failures_are_one_line_a_minute(here, monkeypatch, caplog):
    """Regression: at the limit on open files, `accept` failed a hundred times a second, and each failure was
    logged with a traceback."""
    accept = socket.socket.accept
    failed = []

    def fail(listener: socket.socket):
        if len(failed) < 3:
            failed.append(1)
            raise OSError(errno.EMFILE, "Too many open files")
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", fail)
    assert here.complete().status == 200
    assert len(failed) == 3
    said = [record.getMessage() for record in caplog.records]
    assert said == [
        "nanobatch: connections cannot be accepted: Too many open files; raise the limit (ulimit -n)"
    ]


def test_log_lines_are_in_the_order_of_their_times():
    """Regression: each line had its request's arrival time, but was written after the lines of later
    requests."""
    begun = RequestRecord(1, 1_000_000_000.0, "127.0.0.1", "POST /v1/completions", status=200)
    long, short = (request_line(replace(begun, latency_s=seconds)) for seconds in (9.0, 1.0))
    assert short < long and long.startswith("time=20")


def test_shutdown_does_not_wait_for_an_unread_log():
    """Writing to a full pipe blocks the log's thread, but not the shutdown."""
    reader, writer = os.pipe()
    with open(writer, "w") as pipe, open(reader, "rb") as end:
        with AccessLog(pipe) as log:
            for number in range(900):
                log.add(f"line={number} {'x' * 100}")
            began = time.monotonic()
        assert time.monotonic() - began < 60, "it has waited for the reader"
        said = b""
        while b"line=899 " not in said:  # let the log's thread finish
            said += end.read1(65536)
        assert said.count(b"line=") == 900


def test_log_counts_lost_lines():
    log = AccessLog(sys.stderr, room=1)
    for number in range(4):
        log.add(f"line={number}")
    assert log._lines.get() == "line=0"
    log.add("line=4")
    assert log._lines.get() == "lost_lines=3 line=4"
    log.add("line=5")
    assert log._lines.get() == "line=5"


def test_long_prompt_blocks_no_other_thread(engine):
    """Other threads run while a long prompt is tokenized, which needs a method of the tokenizer that releases
    the GIL."""
    looks, done = Counter(), threading.Event()

    # Count turns instead of timing them: how long this thread waits also depends on the machine
    def watch() -> None:
        while not done.wait(0.002):
            looks["meanwhile"] += 1

    thread = threading.Thread(target=watch)
    thread.start()
    engine.text.encode("so long " * 100_000)
    done.set()
    thread.join()
    assert looks["meanwhile"] > 20


@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/messages/count_tokens"])
def test_only_the_start_of_an_oversized_prompt_is_tokenized(tmp_path, path):
    """Regression: a body of 4 MB was tokenized completely, which takes 1.4 GB, before it was refused."""
    sizes = []

    class Noted:
        def __init__(self, tokenizer):
            self.tokenizer = tokenizer

        def __getattr__(self, name: str):
            return getattr(self.tokenizer, name)

        def encode_batch(self, texts: list[str], **how):
            sizes.extend(map(len, texts))
            return self.tokenizer.encode_batch(texts, **how)

    folder = make_checkpoint(tmp_path)
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    words = "so long " * 400_000
    chat = {"messages": [{"role": "user", "content": words}]}
    with Engine.load(folder, slots=2, max_len=128, chunk=32) as engine, Here(engine) as here:
        engine.text.longest = 10**6  # as if one token stood for a million blanks
        engine.text.tokenizer = Noted(engine.text.tokenizer)
        reply = here.ask(path, {"prompt": words} if path == COMPLETIONS else chat)
    words = "maximum context length is 128 tokens"
    if path != COMPLETIONS:
        words = "prompt is too long: at least"
    assert reply.status == 400 and words in reply.body.decode()
    assert 0 < sum(sizes) <= 200_000


def test_error_in_a_stream_has_its_code():
    """A stream that began while its model was loaded ends with the error that a response would have had.
    Regression: in Responses each was a `server_error`, which Codex tries again."""
    parsed = ParsedRequest(["x"])
    long = protocol_adapter.APIError(400, "no", "context_length_exceeded", "input")
    for error, code in (
        (long, "context_length_exceeded"),
        (protocol_adapter.APIError(400, "no", "invalid_value"), "invalid_prompt"),
        (protocol_adapter.APIError(429, "no", "rate_limit_exceeded"), "rate_limit_exceeded"),
        (protocol_adapter.APIError(503, "no", "loading"), "server_error"),
    ):
        said = Response(parsed, "1", "m").fail(error).decode()
        assert f'"error":{{"code":"{code}","message":"no"}}' in said
    said = ChatCompletion(parsed, "1", "m").fail(long).decode()
    assert '"type":"invalid_request_error","param":"input","code":"context_length_exceeded"' in said
    assert '"type":"invalid_request_error"' in Message(parsed, "1", "m").fail(long).decode()


def test_short_bodies_do_not_wait_for_long_ones(here, monkeypatch):
    """Regression: four long prompts kept all tokenizing threads busy for seconds."""
    read, goes_on = openai.read_prompts, threading.Event()

    def slow(asked):
        if len(asked.fields.get("user", "")) >= LONG_BODY_BYTES:
            assert goes_on.wait(20)
        return read(asked)

    monkeypatch.setattr(openai, "read_prompts", slow)
    lines = [
        here.line().post(COMPLETIONS, BODY | {"user": "x" * LONG_BODY_BYTES}) for _ in range(6)
    ]
    assert here.complete(max_tokens=1).status == 200
    goes_on.set()
    assert [line.reply().status for line in lines] == [200] * 6


def test_engine_gets_the_client_address(here):
    """The engine receives the client's address, even if the request has a grammar and is submitted by another
    thread."""
    line = here.line("127.0.0.2")
    line.post(COMPLETIONS, {"prompt": "Hello", "guided_choice": ["yes", "no"], "max_tokens": 9})
    assert line.reply().status == 200
    assert here.api.models.default.served.engine.snapshot().ended[-1].client == "127.0.0.2"
    assert wait_for(lambda: here.api.view().ended)[-1].client == "127.0.0.2"


@pytest.mark.parametrize("seed", range(2))
def test_cached_tokens_reveal_no_other_clients_prompt(here, seed):
    """Regression: the count of cached tokens confirmed a guessed prompt, sixteen tokens at a time. Send 40
    requests of two clients with common prefixes."""
    dice = random.Random(seed)
    said = {"127.0.0.2": [], "127.0.0.3": []}
    reused = told = 0
    for _ in range(40):
        client = dice.choice([*said])
        prompt = [65 + dice.randrange(2) for _ in range(3)] * 30
        prompt = prompt[: dice.randrange(20, 90)]
        line = here.line(client).post(COMPLETIONS, BODY | {"prompt": prompt, "max_tokens": 2})
        usage = line.reply().json["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        known = [
            sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(prompt, each)))  # noqa: B905
            for each in said[client]
        ]
        assert cached <= max(known, default=0)
        said[client].append(prompt)
        told += cached > 0
        reused += (
            here.api.models.default.served.engine.snapshot().ended[-1].metrics.cached_tokens
            > cached
        )
    assert told and reused


def token_counts(here) -> list[float]:
    """Return the number of prompt tokens, of prefilled tokens and of cached tokens."""
    text = here.ask("/metrics").body.decode()
    names = ("prompt_tokens", "prefill_tokens", "cached_prompt_tokens")
    lines = [re.findall(rf"(?m)^nanobatch_{name}_total(?:{{.*}})? (\S+)$", text) for name in names]
    return [sum(map(float, found)) for found in lines]


def test_progress_and_metrics_reveal_no_other_clients_prompt(here, monkeypatch):
    """Regression: each correctly guessed token moved `processed` and two counters by one."""
    monkeypatch.setattr(http, "SWEEP_S", 0.01)
    monkeypatch.setattr(http, "PROGRESS_S", 0.0)
    prompt = [65 + place % 7 for place in range(120)]
    body = BODY | {"max_tokens": 1}
    assert here.line("127.0.0.2").post(COMPLETIONS, body | {"prompt": prompt}).reply().status == 200
    before = token_counts(here)
    here.api.models.default.served.engine.set_budget(34, 32)
    here.loop.slow = 2.5  # steps per second
    guess = [*prompt[:45], *[90] * 75]
    asked = body | {"prompt": guess, "stream": True, "return_progress": True}
    said = here.line("127.0.0.3").post(COMPLETIONS, asked).until(b"[DONE]")
    here.loop.slow = 0.0
    seen = {int(done) for done in re.findall(rb'"processed":(\d+)', said)}
    # Only whole chunks are reported
    assert len(seen) > 2 and all(done in (0, 32, 64, 120) for done in seen), seen
    assert here.api.models.default.served.engine.snapshot().ended[-1].metrics.cached_tokens == 45
    after = wait_for(lambda: not here.api.view().open and token_counts(here))
    assert [now - then for now, then in zip(after, before, strict=True)] == [120, 120, 0]


def test_right_guess_hides_none_of_the_clients_own_rows(here):
    """Regression: a longer correct guess took the other client's slot. Then nothing was reported as cached,
    not even what the client had sent before."""
    prompt = [65 + place % 7 for place in range(90)]
    other = [*prompt[:30], *[90] * 60]

    def cached(client: str, asked: list[int]) -> int:
        body = BODY | {"prompt": asked, "max_tokens": 1}
        usage = here.line(client).post(COMPLETIONS, body).reply().json["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"]

    assert cached("127.0.0.2", prompt) == cached("127.0.0.3", other) == 0
    assert cached("127.0.0.3", [*prompt[:60], *[91] * 15]) == 30


def test_client_gone_before_its_turn_is_not_served(here, monkeypatch):
    """Regression: a hundred grammars of five seconds each were compiled, although their clients had long
    hung up."""
    asked, goes_on = [], threading.Event()

    def slow(answer):
        asked.append(answer)
        assert goes_on.wait(20)
        raise openai.APIError(400, "made too late")

    monkeypatch.setattr(Submission, "submit", slow)
    body = {"prompt": "Hello", "guided_regex": "[a-z]+"}
    at_once = here.api._grammar_pool._max_workers
    lines = [here.line().post(COMPLETIONS, body) for _ in range(at_once)]
    wait_for(lambda: len(asked) == at_once)
    lines += [here.line().post(COMPLETIONS, body) for _ in range(5)]
    wait_for(lambda: here.api.view().connections == at_once + 5)
    wait_for(lambda: all(v.is_logged and not v.size for v in list(here.api._requests)))
    time.sleep(0.2)
    for line in lines[at_once:]:
        line.hang_up()
    wait_for(lambda: here.api.view().connections <= at_once)
    goes_on.set()
    wait_for(lambda: not here.api.view().open)
    assert len(asked) == at_once


def test_client_gone_while_its_body_is_parsed_borrows_no_model(here, monkeypatch):
    """Regression: the worker thread borrowed the model after the request had ended. It was never given back,
    so the model could not be unloaded any more."""
    begun, goes_on, is_done = threading.Event(), threading.Event(), threading.Event()
    parse = Submission.parse_and_submit

    def slow(submission, body):
        begun.set()
        assert goes_on.wait(20)
        parse(submission, body)
        is_done.set()

    monkeypatch.setattr(Submission, "parse_and_submit", slow)
    line = here.line().post(COMPLETIONS, BODY)
    assert begun.wait(20)
    line.hang_up()
    wait_for(lambda: not here.api.view().open)
    goes_on.set()
    assert is_done.wait(20) and here.api.models.default.requests == 0


def test_choices_share_one_compiled_grammar(here, monkeypatch):
    """Regression: with `n` > 1 a grammar was compiled once per choice, and another client waited 15 s for its
    schema."""
    made = []
    make = Grammars.grammar

    def counted(self, source):
        made.append(source)
        return make(self, source)

    monkeypatch.setattr(Grammars, "grammar", counted)
    parsed = {"prompt": "A", "guided_regex": "[a-z]{9}", "n": 5, "temperature": 1, "max_tokens": 60}
    said = [choice["text"] for choice in here.ask(COMPLETIONS, parsed).json["choices"]]
    assert len({*said}) == 5 and len(made) == 1
    assert all(re.fullmatch("[a-z]{9}", text) for text in said)


def test_slow_grammar_is_a_client_error(here, engine, monkeypatch, caplog):
    """No traceback is logged, because a slow grammar is not a fault of the server."""
    monkeypatch.setattr(Grammars, "_judge", lambda *_: "")  # as if the sandbox had accepted it
    end = engine.text.tokenizer.token_to_id("!")
    many_ways = 'start: a "!"\na: a a | a a a | /[a-z ]/ | '
    parsed = {"prompt": "Once", "guided_grammar": many_ways, "logit_bias": {end: -100}}
    reply = here.ask(COMPLETIONS, parsed | {"max_tokens": 110})
    error = reply.json["error"]
    assert reply.status == 400 and error["param"] == "guided_grammar"
    assert error["message"].startswith("grammar: it ")
    streamed = here.ask(COMPLETIONS, parsed | {"stream": True, "max_tokens": 110})
    failure = next(event["error"] for event in streamed.events if "error" in event)
    assert streamed.status == 200 and failure["message"].startswith("grammar: it ")
    assert here.ask(COMPLETIONS, {"prompt": "Once", "max_tokens": 3}).status == 200
    assert not caplog.records


def test_busy_sandbox_is_503_with_retry_after(here, monkeypatch):
    def busy(self, job):
        raise BusyError("too many others are being checked; try again")

    monkeypatch.setattr(Sandbox, "run", busy)
    reply = here.ask(COMPLETIONS, {"prompt": "Once", "guided_regex": "[a-z]"})
    assert reply.status == 503 and reply.headers["retry-after"] == "1"
    assert (
        reply.json["error"]["message"]
        == "the grammar: too many others are being checked; try again"
    )
    monkeypatch.undo()
    assert here.ask(COMPLETIONS, {"prompt": "Once", "guided_regex": "[a-z]"}).status == 200


def test_too_many_messages_are_refused_before_the_template(engine, monkeypatch):
    """The number of messages is limited, because a template took 90 us for each of 130,000 empty ones."""
    asked = []
    monkeypatch.setattr(engine.text, "encode_prompt", asked.append)
    body = json.dumps({"messages": [{"role": "user", "content": ""}] * 2049}).encode()
    with pytest.raises(protocol_adapter.APIError):
        openai.ChatCompletion.parse_request(read_json(body))
    assert not asked


def test_log_probabilities_shorten_the_answer(here):
    """Regression: 128 choices of 1,000 tokens with 20 log probabilities each took 170 MB of JSON and
    blocked the server for 18 s."""
    most = tokenize_request.MAX_LOGPROBS // 16
    for asked, expected in (({"logprobs": 20}, most // 21), ({"logprobs": 0}, most)):
        body = json.dumps({"prompt": "x", "n": 16, **asked}).encode()
        parsed = openai.parse_request(read_json(body), False)
        assert tokenize_request.most_tokens(parsed) == expected
    plain = openai.parse_request(BodyReader({"prompt": "x", "n": 16}), False)
    assert tokenize_request.most_tokens(plain) > 10**9


def test_large_answer_is_serialized_in_another_thread(here, monkeypatch):
    """Regression: serializing megabytes of JSON in the thread that serves all clients blocked them all."""
    wrote, write = [], protocol_adapter.dump_large

    def noted(body) -> bytes:
        wrote.append(threading.current_thread().name)
        return write(body)

    monkeypatch.setattr(answer_stream, "dump_large", noted)
    said = here.complete(logprobs=5).json["choices"][0]["logprobs"]
    assert said["tokens"] and wrote and wrote[0] not in ("server", "MainThread")
    assert protocol_adapter.dump({"a": ["é", 1.5]}) == write({"a": ["é", 1.5]})


def test_paused_reader_gets_log_probabilities_in_parts(here, monkeypatch):
    """Regression: everything that was generated during the pause became one event of megabytes."""
    monkeypatch.setattr(answer_stream, "PIECES", 10)
    goes_on = threading.Event()
    output = AnswerWriter._output

    async def held(answer):
        while not goes_on.is_set():
            await asyncio.sleep(0.01)
        await output(answer)

    monkeypatch.setattr(AnswerWriter, "_output", held)
    body = BODY | {"max_tokens": 100, "logprobs": 2, "temperature": 1, "seed": 7, "stream": True}
    line = here.line().post(COMPLETIONS, body)
    line.until(b"\r\n\r\n")
    (answer,) = [request.answer for request in here.api._requests]
    wait_for(lambda: all(choice.handle.finish_reason for choice in answer.choices))
    words = sum(type(each) is Word for each in gc.get_objects())
    assert words == 0, "texts are made of tokens when they are written"
    goes_on.set()
    said = line.until(b"[DONE]").decode()
    events = [json.loads(text) for text in re.findall(r"data: (\{.*\})", said)]
    counts = [len((e["choices"][0]["logprobs"] or {"tokens": ()})["tokens"]) for e in events]
    assert sum(counts) == 100 and max(counts) <= 40  # a piece may consist of several tokens


def test_log_probabilities_cost_the_same_late_as_early():
    """Regression: each event read all tokens so far, which took 12 us for the 50th and 1,602 us for the
    8,000th."""
    looked = []

    class Watched(list):
        def __getitem__(self, place):
            found = list.__getitem__(self, place)
            looked.append(len(found) if isinstance(place, slice) else 1)
            return found

        def __iter__(self):
            looked.append(len(self))
            return list.__iter__(self)

    text = SimpleNamespace(
        stream=lambda stops: SimpleNamespace(push=lambda token: "a", open=0), after=lambda *_: []
    )
    handle = SimpleNamespace(tokens=Watched(), logprobs=Watched())
    words = Words(text, handle)
    for token in range(500):
        handle.tokens.append(token)
        handle.logprobs.append(TokenLogprob(-1.0, ()))
        assert [word.text for word in words.release(1)] == ["a"]
    assert sum(looked) == 2 * 500


def streamed(text: str, shape, watch=lambda choice: None) -> bytes:
    """Return the events of an answer that arrives one character at a time."""
    handle = SimpleNamespace(finish_reason="stop", text=text)
    choice = Choice(handle, OutputParser(OutputFormat(None, FORMATS[0]), {"add": {}}), None)
    watch(choice)
    said = b""
    for piece in [*text, None]:
        for change in choice.grow(piece):
            said += shape.changed(0, change)
    return said


@pytest.mark.parametrize("shape", [ChatCompletion, Response, Message])
@pytest.mark.parametrize(
    "text", ["a" * 300, '<tool_call>{"name": "add", "arguments": {"a": "' + "x" * 300]
)
def test_piece_costs_the_same_late_as_early(shape, text, monkeypatch):
    """Regression: each event of a response joined the whole answer so far, which blocked the thread that
    serves all clients for half a minute in an answer of 100,000 characters."""
    joined = []
    monkeypatch.setattr(Item, "text", property(lambda item: joined.append(1) or ""))
    said = streamed(text, shape(ParsedRequest(["x"]), "1-x", "small"))
    assert said.count(b"data: ") >= 300 and len(joined) < 10


def test_call_costs_the_same_however_many_there_are():
    """Regression: each tool call counted all calls before it."""
    looked = []

    class Watched(list):
        def __iter__(self):
            looked.append(len(self))
            return list.__iter__(self)

        def __reversed__(self):
            for item in list.__reversed__(self):
                looked.append(1)
                yield item

    def watch(choice: Choice) -> None:
        choice.items = Watched()

    text = 'So.<tool_call>{"name": "add", "arguments": {}}</tool_call>' * 200
    said = streamed(text, ChatCompletion(ParsedRequest(["x"]), "1-x", "small"), watch)
    assert b'"index":199,"id"' in said and sum(looked) < 2000


def test_every_sampling_param_is_available_over_http():
    """Every field of SamplingParams can be set in a request."""
    by_another_way = {"max_tokens", "stop", "logit_bias", "logprobs", "grammar", "embeds"}
    assert {field.name for field in fields(SamplingParams)} - by_another_way == {*openai.PLAIN}


def test_open_files_are_allowed_for_all_connections():
    """The server raises the limit on open files. On macOS it is 256, which is half the number of connections
    that a server accepts."""
    code = (
        "import resource; from server import http\n"
        "_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)\n"
        "for soft, most in ((256, hard), (100, 300)):\n"
        "    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, most))\n"
        "    http.listen('127.0.0.1', 0).close()\n"
        "    print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])\n"
    )
    done = python(code)
    assert done.stdout.split() == ["704", "300"], done.stderr

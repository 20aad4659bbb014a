"""Frames for watchers: packed at one end, the same views at the other."""

import json
import threading
import time

import pytest
from here import Here
from servers import Line, Server

from nanobatch import SamplingParams
from runtime.snapshot import RequestView, Snapshot
from server import watch as watch_module
from server import watch_frames
from server.access_log import RequestLog, RequestRecord, ServerView

LONG = SamplingParams(max_tokens=60, ignore_eos=True)


def over_the_wire(
    sender: watch_frames.Sender, receiver: watch_frames.Receiver, frame: watch_frames.Frame
) -> watch_frames.Frame:
    return receiver.take(json.loads(sender.pack(frame)))


def server_view(request_log: RequestLog, since: int = 0) -> ServerView:
    opened, ended, count = request_log.look(since)
    return ServerView(
        "http://127.0.0.1:8000", False, 3, 1, opened, ended, count - since - len(ended), count
    )


def test_frames_survive_the_wire(engine):
    """Requests that wait, run, end and are cancelled, and texts that grow between two frames."""
    request_log, sender, receiver = RequestLog(), watch_frames.Sender(True), watch_frames.Receiver()
    number = request_log.begin("127.0.0.1", "POST /v1/completions")
    request_log.note(number, status=400, reason="invalid_value", message="temperature = 'x'")
    request_log.end(number)
    request_log.begin("10.0.0.1", "POST /v1/chat/completions")
    handles = [engine.submit(f"prompt {n}", LONG, client="10.0.0.1") for n in range(5)]
    seen, grew = None, 0
    for step in range(300):
        seen = engine.snapshot(seen)
        frame = watch_frames.Frame(False, 0, 0.0, seen, server_view(request_log))
        assert over_the_wire(sender, receiver, frame) == frame
        grew += any(request.text for request in seen.requests)
        if step == 20:
            handles[4].cancel()
        engine.step()
    assert grew > 20 and seen.finished == 5


def test_only_new_text_is_sent(engine):
    """An answer of 8,000 tokens would else be sent ten times a second, as long as it grows."""
    sender, seen, sizes = watch_frames.Sender(True), None, []
    engine.submit("a prompt of some length " * 2, LONG)
    while engine.step() or not sizes:
        seen = engine.snapshot(seen)
        sizes.append(
            len(
                json.dumps(
                    json.loads(
                        sender.pack(
                            watch_frames.Frame(False, 0, 0.0, seen, server_view(RequestLog()))
                        )
                    )[3][7]
                )
            )
        )
    assert sizes[0] > 50 and max(sizes[5:-2]) < sizes[0] + 200
    assert "of some length" not in sender.pack(
        watch_frames.Frame(False, 0, 0.0, engine.snapshot(seen), server_view(RequestLog()))
    )


def test_frames_without_texts(engine):
    request_log = RequestLog()
    request_log.note(request_log.begin("10.9.8.7", "POST /x"), message="a secret message")
    engine.submit("a secret prompt", LONG, client="10.9.8.7", origin="10.9.8.7")
    engine.registry.note("a secret fault", ValueError("of a text"))
    engine.step()
    told = watch_frames.Sender(False).pack(
        watch_frames.Frame(False, 0, 0.0, engine.snapshot(), server_view(request_log))
    )
    assert "secret" not in told and "10.9.8.7" not in told
    assert "secret" in watch_frames.Sender(True).pack(
        watch_frames.Frame(False, 0, 0.0, engine.snapshot(), server_view(request_log))
    )


@pytest.mark.parametrize(
    "origin", [None, "10.0.0.1", 7, {("a", 1): {2}}, [{3}], object(), "half \ud83e"]
)
def test_origin_may_be_anything(engine, origin):
    engine.submit("a prompt", LONG, origin=origin)
    frame = watch_frames.Frame(False, 0, 0.0, engine.snapshot(), server_view(RequestLog()))
    (request,) = over_the_wire(
        watch_frames.Sender(True), watch_frames.Receiver(), frame
    ).engine.requests
    assert request.origin == origin or isinstance(request.origin, (str, list))


def test_other_version_is_noticed():
    """The fields are sent without their names: those of another version would be taken for ours."""
    assert watch_frames._shape(Snapshot) != watch_frames._shape(RequestView) and "steps_s" in repr(
        watch_frames._shape(Snapshot)
    )
    with pytest.raises(ValueError):
        watch_frames.unpack(RequestRecord, [1, 2, 3])


def test_request_log_is_bounded():
    request_log = RequestLog()
    for n in range(3000):
        request_log.note(request_log.begin("x", "GET /"), status=404)
        request_log.end(n + 1)
    view = server_view(request_log, 10)
    assert (view.seen, len(view.ended), view.missed) == (3000, 1000, 1990)
    assert [call.number for call in server_view(request_log, 2998).ended] == [2999, 3000]


def test_request_log_is_thread_safe():
    request_log, faults, done = RequestLog(), [], threading.Event()

    def look() -> None:
        while not done.is_set():
            try:
                request_log.look(0)
            except RuntimeError as error:  # a collection changed during iteration
                faults.append(error)

    thread = threading.Thread(target=look)
    thread.start()
    for _ in range(3000):
        request_log.end(request_log.begin("x", "GET /"))
    done.set()
    thread.join()
    assert not faults


# --- /watch ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server():
    with Server("--api-key", "key", "--watch-key", "eye", "--allow-host", "llm.example") as server:
        yield server


def watch(server: Server, *headers: str, host: str = "localhost"):
    line = server.line().send("\n".join(["GET /watch HTTP/1.1", f"Host: {host}", *headers, "", ""]))
    line.until(b"event: hello\ndata: ")
    return line, json.loads(line.until(b"\n\n"))


@pytest.mark.parametrize(
    ("headers", "host", "texts"),
    [
        (["Authorization: Bearer key"], "localhost", False),  # it may come through a proxy
        (["Authorization: Bearer key"], "llm.example", False),
        (["Authorization: Bearer key", "X-Forwarded-For: 10.0.0.1"], "localhost", False),
        (["Authorization: Bearer eye"], "localhost", True),
        (["Authorization: Bearer eye", "X-Forwarded-For: 10.0.0.1"], "llm.example", True),
    ],
)
def test_watch_key_shows_texts(server, headers, host, texts):
    """Behind a plain proxy on this machine everybody seems to be this machine, so the key that asks
    showed everybody's prompts."""
    line, hello = watch(server, *headers, host=host)
    assert hello["texts"] is texts
    line.hang_up()


# What nginx 1.22 sent for `GET /watch`: the least that `proxy_pass` needs, and what most people add.
PLAIN_NGINX = [
    "Host: 127.0.0.1:8000",
    "Connection: close",
    "User-Agent: curl/7.88.1",
    "Accept: */*",
]
USUAL_NGINX = [
    "Host: llm.example",
    "X-Real-IP: 127.0.0.1",
    "X-Forwarded-For: 127.0.0.1",
    "X-Forwarded-Proto: http",
    *PLAIN_NGINX[1:],
]


@pytest.mark.parametrize(
    ("keys", "key", "head", "texts"),
    [
        ({"api_key": "key"}, "key", PLAIN_NGINX, False),
        ({"api_key": "key", "watch_key": "eye"}, "key", PLAIN_NGINX, False),
        ({"api_key": "key", "watch_key": "eye"}, "eye", PLAIN_NGINX, True),
        ({"watch_key": "eye"}, "", PLAIN_NGINX, False),
        ({}, "", PLAIN_NGINX, True),  # nothing tells it from this machine: docs/server.md says so
        ({}, "", USUAL_NGINX, False),
        ({}, "", ["Host: llm.example", *PLAIN_NGINX[1:]], False),
        ({}, "", [*PLAIN_NGINX, "X-Forwarded-Host: llm.example"], False),
        ({}, "", [*PLAIN_NGINX, "Forwarded: for=10.0.0.1"], False),
        ({}, "", [*PLAIN_NGINX, "Via: 1.1 proxy"], False),
    ],
)
def test_texts_through_a_local_proxy(engine, keys, key, head, texts):
    head = [*head, f"Authorization: Bearer {key}"] if key else head
    with Here(engine, allow_hosts=("llm.example",), **keys) as here:
        line = here.line().send("\n".join(["GET /watch HTTP/1.0", *head, "", ""]))
        line.until(b"event: hello\ndata: ")
        assert json.loads(line.until(b"\n\n"))["texts"] is texts
        line.hang_up()


OWN, NEIGHBOUR = "http://localhost:8000", "http://localhost:3000"


@pytest.mark.parametrize(
    ("keys", "origin", "key", "told"),
    [
        ({}, "", "", "texts"),  # no page: tui.py --watch, curl; and a page that asks its own server
        ({}, OWN, "", "texts"),
        ({}, "https://localhost:8000", "", "texts"),  # a proxy on this machine speaks TLS
        ({}, NEIGHBOUR, "", "refused"),
        ({}, "https://localhost:3000", "", "refused"),
        ({}, "http://localhost", "", "refused"),
        ({}, "http://127.0.0.1:8000", "", "refused"),  # the same server by another name
        ({}, "http://localhost:8000.evil.example", "", "refused"),
        ({}, "http://llm.example", "", "refused"),  # though --allow-host names it
        ({}, f"{OWN}, {NEIGHBOUR}", "", "refused"),
        ({}, "null", "", "refused"),  # a file, or a frame in a sandbox
        ({"watch_key": "eye"}, NEIGHBOUR, "", "refused"),
        ({"watch_key": "eye"}, NEIGHBOUR, "wrong", "refused"),
        ({"watch_key": "eye"}, NEIGHBOUR, "eye", "texts"),
        ({"watch_key": "eye"}, OWN, "", "figures"),
        ({"api_key": "key"}, NEIGHBOUR, "key", "figures"),
        ({"api_key": "key", "watch_key": "eye"}, NEIGHBOUR, "eye", "texts"),
    ],
)
def test_foreign_page_needs_a_key_to_watch(engine, keys, origin, key, told):
    """Any page of this machine, on whatever port, read everybody's prompts and answers."""
    head = ["GET /watch HTTP/1.1", "Host: localhost:8000"]
    head += [f"Origin: {origin}"] if origin else []
    head += [f"Authorization: Bearer {key}"] if key else []
    with Here(engine, allow_hosts=("llm.example",), **keys) as here:
        line = here.line().send("\n".join([*head, "", ""]))
        if told == "refused":
            reply = line.reply()
            assert reply.status == 403 and reply.error["code"] == "origin_not_allowed"
        else:
            line.until(b"event: hello\ndata: ")
            assert json.loads(line.until(b"\n\n"))["texts"] is (told == "texts")
        line.hang_up()


def test_stalled_watcher_is_dropped(engine, monkeypatch):
    """Its frames would pile up in memory, and its snapshots cost time for nothing."""
    monkeypatch.setattr(watch_module, "WATCH_TIMEOUT_S", 0.3)
    with Here(engine) as here:
        line = Line(here.host, here.port, receive=4096)
        line.send("GET /watch HTTP/1.1\nHost: localhost\n\n").until(b"event: hello")
        deadline = time.monotonic() + 60
        most = 0
        while time.monotonic() < deadline and not (most and here.api.look().watchers == 0):
            most = max(most, here.api.look().watchers)
            engine.submit("x", SamplingParams(max_tokens=100, ignore_eos=True)).result()
        assert most == 1 and here.api.look().watchers == 0
        line.hang_up()

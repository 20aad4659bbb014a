"""Frames for watchers: unpacking yields the views that were packed."""

import json
import threading
import time

import pytest
from here import Here
from servers import Line

from engine import watch_frames
from engine.server_snapshot import RequestRecord, ServerView
from engine.snapshot import RequestView, Snapshot
from nanobatch import SamplingParams
from server import watch as watch_module
from server.access_log import RequestLog

LONG = SamplingParams(max_tokens=60, ignore_eos=True)


def over_the_wire(
    sender: watch_frames.Sender, receiver: watch_frames.Receiver, frame: watch_frames.Frame
) -> watch_frames.Frame:
    return receiver.unpack(json.loads(sender.pack(frame)))


def server_view(request_log: RequestLog, since: int = 0) -> ServerView:
    opened, ended, count = request_log.records(since)
    return ServerView(
        "http://127.0.0.1:8000", False, 3, 1, opened, ended, count - since - len(ended), count
    )


def frame_of(seen: Snapshot, request_log: RequestLog | None = None) -> watch_frames.Frame:
    view = server_view(request_log or RequestLog())
    return watch_frames.Frame(False, 0, 0.0, seen, view)


def test_frames_survive_the_wire(engine):
    """Send requests that wait, run, end and are cancelled, and texts that grow between two frames."""
    request_log, sender, receiver = RequestLog(), watch_frames.Sender(True), watch_frames.Receiver()
    number = request_log.open_record("127.0.0.1", "POST /v1/completions")
    request_log.update(number, status=400, reason="invalid_value", message="temperature = 'x'")
    request_log.close_record(number)
    request_log.open_record("10.0.0.1", "POST /v1/chat/completions")
    handles = [engine.submit(f"prompt {n}", LONG, client="10.0.0.1") for n in range(5)]
    seen, grew = None, 0
    for step in range(300):
        seen = engine.snapshot(seen)
        frame = frame_of(seen, request_log)
        assert over_the_wire(sender, receiver, frame) == frame
        grew += any(request.text for request in seen.requests)
        if step == 20:
            handles[4].cancel()
        engine.step()
    assert grew > 20 and seen.finished == 5


def test_only_new_text_is_sent(engine):
    """A growing answer of 8,000 tokens is not sent as a whole ten times a second."""
    sender, seen, sizes = watch_frames.Sender(True), None, []
    engine.submit("a prompt of some length " * 2, LONG)
    while engine.step() or not sizes:
        seen = engine.snapshot(seen)
        packed = json.loads(sender.pack(frame_of(seen)))
        sizes.append(len(json.dumps(packed[3][7])))
    assert sizes[0] > 50 and max(sizes[5:-2]) < sizes[0] + 200
    assert "of some length" not in sender.pack(frame_of(engine.snapshot(seen)))


def test_frames_without_texts(engine):
    request_log = RequestLog()
    request_log.update(request_log.open_record("10.9.8.7", "POST /x"), message="a secret message")
    engine.submit("a secret prompt", LONG, client="10.9.8.7", origin="10.9.8.7")
    engine.registry.record_fault("a secret fault", ValueError("of a text"))
    engine.step()
    frame = frame_of(engine.snapshot(), request_log)
    told = watch_frames.Sender(False).pack(frame)
    assert "secret" not in told and "10.9.8.7" not in told
    assert "secret" in watch_frames.Sender(True).pack(frame)


@pytest.mark.parametrize(
    "origin", [None, "10.0.0.1", 7, {("a", 1): {2}}, [{3}], object(), "half \ud83e"]
)
def test_origin_may_be_anything(engine, origin):
    engine.submit("a prompt", LONG, origin=origin)
    frame = frame_of(engine.snapshot())
    received = over_the_wire(watch_frames.Sender(True), watch_frames.Receiver(), frame)
    (request,) = received.engine.requests
    assert request.origin == origin or isinstance(request.origin, (str, list))


def test_other_version_is_noticed():
    """Fields are sent without their names, so a frame of another version is recognized by the shape of its
    classes."""
    shape = watch_frames._shape(Snapshot)
    assert shape != watch_frames._shape(RequestView) and "steps_s" in repr(shape)
    with pytest.raises(ValueError):
        watch_frames.unpack(RequestRecord, [1, 2, 3])


def test_request_log_is_bounded():
    request_log = RequestLog()
    for n in range(3000):
        request_log.update(request_log.open_record("x", "GET /"), status=404)
        request_log.close_record(n + 1)
    view = server_view(request_log, 10)
    assert (view.seen, len(view.ended), view.missed) == (3000, 1000, 1990)
    assert [call.number for call in server_view(request_log, 2998).ended] == [2999, 3000]


def test_request_log_is_thread_safe():
    request_log, faults, done = RequestLog(), [], threading.Event()

    def look() -> None:
        while not done.is_set():
            try:
                request_log.records(0)
            except RuntimeError as error:  # a collection changed during iteration
                faults.append(error)

    thread = threading.Thread(target=look)
    thread.start()
    for _ in range(3000):
        request_log.close_record(request_log.open_record("x", "GET /"))
    done.set()
    thread.join()
    assert not faults


def test_stalled_watcher_is_dropped(engine, monkeypatch):
    """A watcher that reads nothing is disconnected, because its frames would pile up in memory."""
    monkeypatch.setattr(watch_module, "WATCH_TIMEOUT_S", 0.3)
    with Here(engine) as here:
        line = Line(here.host, here.port, receive=4096)
        line.send("GET /watch HTTP/1.1\nHost: localhost\n\n").until(b"event: hello")
        large = SamplingParams(max_tokens=100, ignore_eos=True, logprobs=100)  # makes large frames
        deadline = time.monotonic() + 60
        most = 0
        while time.monotonic() < deadline and not (most and here.api.view().watchers == 0):
            most = max(most, here.api.view().watchers)
            engine.submit("x", large).result()
        assert most == 1 and here.api.view().watchers == 0
        line.hang_up()

"""The screen with real clients: those of its own server (`--serve`), or of a server that it watches
(`--watch`)."""

import copy
import http.client
import json
import math
import operator
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import reduce
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest
from screen_stage import Show, Stage, drawn, like_golden, plain, show
from servers import CHAT, COMPLETIONS, ROOT, Line, Server, free_ports
from waiting import wait_for

import tui
from cli.chat_model import REMEDY
from engine import watch_frames
from engine.server_snapshot import RequestRecord, ServerView
from nanobatch import SamplingParams
from screen.app import panes_of
from screen.commands import PlainLog, Session, run_plain
from screen.draw import answers, status, style
from screen.engine_client import LocalEngineClient
from screen.engine_view import View
from screen.pages import http_requests, request_details
from screen.remote_client import RemoteEngineClient
from screen.state import State
from screen.workload import Ask
from server.app import APIServer
from server.http import Options
from tui import MENU

LONG = {"prompt": "Hello", "max_tokens": 60, "ignore_eos": True}


class Watched(Server):
    """A session with its own or a watched server, and a client of that server."""

    def __init__(self, client, address: str):
        self.client, self.session = client, Session(client, State("small"), MENU)
        self.host, port = address.removeprefix("http://").split(":")
        self.port = int(port)

    @property
    def state(self) -> State:
        return self.session.state

    def sees(self, what):
        """Update the view until the condition holds."""
        deadline = time.monotonic() + 60
        while not (found := what(self.state)):
            assert time.monotonic() < deadline, (self.state.view, self.state.calls)
            time.sleep(0.02)
            self.session.refresh()
        return found

    def answer(self, prompt: str) -> str:
        return next((request.text for request in self.state.ended if request.prompt == prompt), "")

    def drawn(self, width: int = 120) -> str:
        return "\n".join(plain(drawn(http_requests.draw_clients, self.state, width, 30)))


@contextmanager
def serving(engine):
    """Yield a session on this engine with its own server, as `tui.py --serve` starts it."""
    api = APIServer(Options(port=0)).start()
    client = LocalEngineClient(lambda report, clock: engine, api, "small")
    client.start()
    try:
        yield Watched(client, api.address)
    finally:
        api.close()
        client.loop.stop()


@contextmanager
def watching(server: Server, *keys: str):
    client = RemoteEngineClient(server.address, *keys)
    client.start()
    try:
        yield Watched(client, server.address)
    finally:
        client.stop(1)


@pytest.fixture(scope="module")
def server():
    with Server() as server:
        yield server


@pytest.fixture(params=["--serve", "--watch"])
def watched(request):
    how = serving if request.param == "--serve" else watching
    with how(
        request.getfixturevalue("engine" if request.param == "--serve" else "server")
    ) as watched:
        watched.sees(lambda state: state.view.stage == "ready")
        yield watched


# --- what both show -----------------------------------------------------------------------------


def test_refused_http_requests_are_shown(watched):
    """Requests that the server refused are shown, although the engine's own snapshot does not contain them."""
    seen = len(watched.state.calls)
    assert watched.complete(n=0).status == 400
    assert watched.ask("/v1/nothing", {}).status == 404
    calls = watched.sees(lambda state: len(state.calls) == seen + 2 and state.calls[seen:])
    assert [call.status for call in calls] == [400, 404] and "n = 0" in calls[0].message
    assert re.search(r"127.0.0.1 +/completions +400 +\w+: n = 0", watched.drawn())
    lines = drawn(http_requests.draw_clients, watched.state, 120, 30)
    assert {segment.style.color.name for segment in lines[-1] if segment.text.strip()} == {
        style.DARK.bad
    }


def test_http_requests_are_shown_with_their_client(watched):
    seen = len(watched.state.calls)
    answer = watched.complete("Once upon a time")
    call = watched.sees(lambda state: len(state.calls) > seen and state.calls[seen])
    number = call.requests[0]
    request = watched.sees(lambda state: number in state.requests and state.requests[number])
    assert (request.text, request.reason) == (answer.json["choices"][0]["text"], "length")
    assert call.status == 200 and call.tokens == 8 and call.id == answer.json["id"]
    watched.state.opened = number
    text = " ".join("\n".join(plain(drawn(request_details.draw, watched.state, 100, 20))).split())
    assert "from 127.0.0.1" in text and f"r{number}" in watched.drawn()


def test_a_client_that_hangs_up_is_marked(watched):
    line = Line(watched.host, watched.port).post(
        COMPLETIONS, LONG | {"max_tokens": 900, "stream": True}
    )
    line.until(b"data: ")
    watched.sees(lambda state: any(call.stream for call in state.view.server.open))
    assert " open" in watched.drawn()
    line.hang_up()
    call = watched.sees(lambda state: state.calls and state.calls[-1].hung_up and state.calls[-1])
    number = call.requests[0]
    assert f"╳r{number}" in watched.drawn() and "1 hung up" in watched.drawn()
    watched.sees(lambda state: number in state.requests and state.requests[number].reason)
    watched.state.opened = number
    for draw in (answers.draw_streams, request_details.draw):
        text = " ".join("\n".join(plain(drawn(draw, watched.state, 100, 30))).split())
        assert "hung up" in text and "cancelled" not in text, text


def test_cancelling_all_ends_ones_own_requests_alone(watched):
    line = Line(watched.host, watched.port).post(
        COMPLETIONS, LONG | {"prompt": "Stay", "stream": True}
    )
    line.until(b"data: ")
    for _ in range(6):
        watched.session.obey("/set max=900")
        watched.session.obey("Tell me a long story about a fox.")
    number = watched.sees(
        lambda state: next((r for r in state.requests.values() if r.prompt == "Stay"), None)
    ).id
    if not watched.state.requests[number].reason:
        with pytest.raises(ValueError, match=f"r{number} is a client's"):
            watched.session.obey(f"/cancel {number}")
    watched.session.obey("/cancel all")
    watched.sees(lambda state: watched.session.settled)
    reasons = {r.id: r.reason for r in watched.state.ended}
    assert reasons[number] == "length" and b"[DONE]" in line.until(b"[DONE]")
    assert "cancelled" in reasons.values()
    line.hang_up()


# --- its own server -----------------------------------------------------------------------------


def test_quitting_ends_a_pause_for_clients(engine):
    with serving(engine) as it:
        it.sees(lambda state: state.view.stage == "ready")
        it.session.obey("/pause")
        it.sees(lambda state: state.view.paused)
        line = it.line().post(COMPLETIONS, LONG)
        it.sees(lambda state: state.view.engine.waiting == 1)
        it.session.obey("/step 3")
        it.sees(lambda state: len(state.history) == 3 and not state.view.stepping)
        it.client.drain()
        assert line.reply().json["choices"][0]["finish_reason"] == "length"
        with pytest.raises(OSError):
            it.complete()


def test_loading_says_that_clients_get_503():
    api = APIServer(Options(port=0)).start()
    try:
        client = LocalEngineClient(lambda report, clock: None, api)
        state = State()
        state.absorb(client.view_since())
        text = "\n".join(plain(drawn(status.draw_loading, state, 100, 30)))
        assert f"{api.address}/v1 is open, and answers 503 until then" in text
        it = Watched(client, api.address)
        it.complete()
        assert [call.status for call in it.sees(lambda state: state.calls)] == [503]
    finally:
        api.close()


def test_a_server_without_a_terminal_drains_on_a_signal():
    (port,) = free_ports(1)
    command = [sys.executable, str(ROOT / "tui.py"), "--serve", str(port), "--plain"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, cwd="/", **pipes)
    try:
        while "policy" not in process.stdout.readline():
            assert process.poll() is None
        line = Line("127.0.0.1", port).post(
            CHAT, {"messages": [{"role": "user", "content": "Count from 3 to 7."}]}
        )
        refused = tui.main(["--serve", str(port)])
        assert line.reply().status == 200
        line = Line("127.0.0.1", port).post(COMPLETIONS, LONG | {"stream": True})
        line.until(b"data: ")
        process.send_signal(signal.SIGTERM)
        assert b"[DONE]" in line.everything()
        said = process.communicate(timeout=60)[0]
    finally:
        process.kill()
    assert (process.returncode, refused) == (0, 2)
    assert "r1 (127.0.0.1) waits: Count from 3 to 7." in said and "ends (length): 60 tokens" in said


def test_a_taken_port_is_one_line_and_exit_code_2(capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        assert tui.main(["--serve", address]) == 2
    said = f"nanobatch: --serve {address}: Address already in use; choose another port, or 0 for a free one\n"
    assert capsys.readouterr().err == said


# --- another server -----------------------------------------------------------------------------


def test_a_watched_server_answers_a_prompt(server):
    with watching(server) as it:
        it.sees(lambda state: state.view.stage == "ready")
        assert it.state.model.startswith("demo @ 127.0.0.1:")
        it.session.obey("Count from 3 to 7.")
        it.sees(lambda state: it.session.settled)
        assert it.answer("Count from 3 to 7.") == "3, 4, 5, 6, 7." and it.state.calls[-1].stream
        it.session.obey("word " * 2000)
        fault = it.sees(lambda state: state.faults and state.faults[-1])
        assert (
            "not fired" in fault.message
            and "context length" in fault.message
            and fault.prompt.startswith("word")
        )


def test_a_prompt_is_settled_only_with_its_answer(server, monkeypatch):
    """Regression: the stream of a prompt could end before the frame that reports its end, so a script quit
    without the answer."""
    take = watch_frames.Receiver.unpack
    monkeypatch.setattr(
        watch_frames.Receiver, "unpack", lambda self, event: (time.sleep(0.5), take(self, event))[1]
    )
    with watching(server) as it:
        it.sees(lambda state: state.view.stage == "ready")
        it.session.obey("Count from 5 to 9.")
        it.sees(lambda state: it.session.settled)
        assert it.answer("Count from 5 to 9.") == "5, 6, 7, 8, 9."


def test_a_prompt_waits_for_a_loading_server(engine):
    """Regression: the prompt was refused with a 503 instead of being sent after loading."""
    api = APIServer(Options(port=0)).start()
    client = RemoteEngineClient(api.address)
    client.start()
    it = Watched(client, api.address)
    it.session.obey("Hello")
    it.sees(lambda state: any("being loaded" in line for line in state.view.done))
    with (loop := engine.serving()):
        api.open(engine, loop, "small")
        try:
            it.sees(lambda state: state.view.stage == "ready" and it.session.settled)
        finally:
            client.stop(1)
            api.close()
    assert [(r.prompt, bool(r.text)) for r in it.state.ended] == [("Hello", True)]
    assert not it.state.faults


@pytest.fixture
def unloaded():
    with Server("--model", "a=demo", "--model", "b=demo", "--slots", "2") as server:
        yield server


def test_a_watched_server_loads_its_models_on_demand(unloaded, monkeypatch):
    """Regression: a prompt waited until the model was loaded, which only a prompt causes. A model that was
    not loaded was shown as a lost server."""
    said = "is not loaded; its next request loads it"
    with watching(unloaded) as it:
        it.sees(lambda state: state.view.done[-1:] == (f"a {said}",))
        assert it.session.obey("/model") == "b is watched from here on"
        it.sees(lambda state: state.view.done[-1:] == (f"b {said}",))
    with watching(unloaded) as it:
        lines = []
        assert run_plain(it.session, "burst1", lines.append) == 0
        assert any(re.search(r"r1 ends \(\w+\): \d+ tokens", line) for line in lines), lines
    with watching(unloaded) as it:
        it.sees(lambda state: state.model.startswith("a @"))
        it.session.obey("/model b")
        fault = it.sees(lambda state: state.faults and state.faults[-1])
        assert fault.message == f"b {said}" and it.state.view.gone_s is None
        # The header is missing if the stream begins while the model is being loaded
        monkeypatch.setattr(http.client.HTTPResponse, "getheader", lambda self, name: None)
        it.session.obey("Count from 3 to 7.")
        it.sees(lambda state: it.session.settled and state.model.startswith("b @"))
        assert it.answer("Count from 3 to 7.") == "3, 4, 5, 6, 7." and it.state.faults == [fault]


@contextmanager
def answering(reply):
    """Yield a server that answers each request with `reply(path)`, a status and a body. Without a reply, its
    models `a` and `b` are not loaded."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.rfile.read(int(self.headers["Content-Length"] or 0))
            name = self.path.partition("model=")[2] or "a"
            words = f"{name} is not loaded; its next request loads it"
            asleep = 503, sse(error={"message": words, "code": "not_loaded"})[6:]
            health = 200, b'{"models": {"a": "on disk", "b": "on disk"}}'
            status, body = reply(self.path) or (health if self.path == "/health" else asleep)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET

        def log_message(self, *more):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        try:
            yield SimpleNamespace(address=f"http://127.0.0.1:{server.server_port}")
        finally:
            server.shutdown()


def sse(**fields) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def test_pages_of_unloaded_models_are_answered_in_a_log(monkeypatch):
    """Regression: they were dropped without a word, and the log did not say that the newly chosen model is not
    loaded."""
    typed = ["/totals", "/model b", "/totals", "/errors"]
    monkeypatch.setattr("screen.commands.read_lines", lambda rest: (b"", typed, False))
    lines = []
    with answering(lambda path: None) as server, watching(server) as it:
        assert run_plain(it.session, "", lines.append) == 0
    a, b = (f"{name} is not loaded; its next request loads it" for name in "ab")
    assert lines[:3] == [f"loading: asking {server.address}", a, a]
    assert lines[3:6] == ["b is watched from here on", b, b] and "rrors" in lines[6], lines


def test_the_last_frame_of_an_unloaded_model_is_not_awaited(stage):
    """Regression: requests in the last frame kept the session busy for ever. Regression: an engine loaded long
    ago was taken for a new one if the model watched before it was not loaded."""
    stage.obey("/burst 2")
    engine = stage.turns(3).engine.snapshot()
    frame = watch_frames.Frame(False, 0, 0.0, engine, canned_server())
    hello = {"protocol": watch_frames.PROTOCOL, "model": "b", "models": ["a", "b"], "texts": True}
    stream = sse(**hello) + f"data: {watch_frames.Sender(True).pack(frame)}\n\n".encode()
    streams = [stream]
    lines = []

    def reply(path):
        return (200, streams.pop()) if path == "/watch?model=b" and streams else None

    with answering(reply) as server, watching(server) as it:
        it.sees(lambda state: it.client.asleep.startswith("a "))
        it.session.obey("/model b")
        log = PlainLog(it.session, lines.append)
        wait_for(lambda: log.refresh() or it.client.asleep.startswith("b "))
        log.refresh()
        assert it.state.view.busy and it.session.settled and not it.state.view.is_new
    assert lines[-1].endswith("b is not loaded; its next request loads it")
    assert not any("r1 waits" in line for line in lines), lines


def test_a_refusal_after_loading_counts_like_one_before():
    """Regression: once the stream had begun, a model without a chat template got no plain prompt, and a
    conversation that is too long could not be shortened with /drop."""
    plain_only = {"message": "this model has no chat template; give it plain text"}
    too_long = {"message": "too long", "code": "context_length_exceeded"}
    replies = {"/v1/chat/completions": plain_only, "/v1/completions": too_long}

    def reply(path):
        return path in replies and (200, b": loading a\n\n" + sse(error=replies[path]))

    talk = [{"role": role, "content": "Hi"} for role in ("user", "assistant", "user")]
    with answering(reply) as server, watching(server) as it:
        it.client.fire([Ask("Hi", 8, 0.0, 1, question=1, messages=talk)])
        fault = it.sees(lambda state: state.faults and state.faults[-1])
        assert fault.message == f"too long; {REMEDY}" and not it.state.view.has_chat


def test_a_prompt_refused_before_the_first_frame_is_logged():
    session = Session(RemoteEngineClient("http://127.0.0.1:1"), State(), MENU)
    lines = []
    log = PlainLog(session, lines.append)
    session.client.fault("not fired: a cannot be loaded")
    log.refresh()
    assert lines[-1] == "not fired: a cannot be loaded"


def test_a_model_can_be_chosen_during_a_reconnect(unloaded):
    """Regression: the server's answer to the previous choice replaced the newer one."""
    for name in "ab":
        unloaded.complete(model=name)
    with watching(unloaded) as it:
        it.sees(lambda state: state.model.startswith("b @"))
        request, paths = it.client._request, []

        def choose(method, path, *more):
            paths.append(path)
            answer = request(method, path, *more)
            if len(paths) == 1:
                it.session.obey("/model b")
            return answer

        it.client._request = choose
        it.session.obey("/model a")
        it.sees(lambda state: len(paths) == 2 and state.view.epoch == 2)
        assert paths[1] == "/watch?model=b" and it.state.model.startswith("b @")


def test_a_watched_view_is_complete(server):
    """No step or token is missing, even if several frames arrive between two updates of the view."""
    with watching(server) as it:
        it.sees(lambda state: state.view.stage == "ready")
        first = it.state.history[-1].step if it.state.history else 0
        ends = len(it.state.ended)
        for _ in range(4):
            it.complete(max_tokens=30)
            time.sleep(0.25)  # meanwhile the view is not updated
        it.sees(lambda state: len(state.ended) == ends + 4)
        steps = [column.step for column in it.state.history if column.step > first]
        # With drafts, a step produces several tokens
        assert steps == list(range(first + 1, first + 1 + len(steps))) and len(steps) >= 60
        assert sum(column.tokens for column in it.state.history if column.step > first) == 120
        assert not it.state.faults


def test_a_lost_server_is_shown_and_reconnected():
    port = str(*free_ports(1))
    with Server("--port", port) as first, watching(first) as it:
        it.sees(lambda state: state.view.stage == "ready")
        it.complete()
        it.sees(lambda state: state.ended and state.history)
        first.process.kill()
        it.sees(lambda state: (state.view.gone_s or 0) > 1)
        assert re.search(r"✗ gone for \d+ s", plain(drawn(status.draw_status, it.state, 80, 1))[0])
        assert (
            "is gone" in it.state.faults[-1].message
            and len(it.state.faults) == 1
            and it.state.ended
        )
        it.session.obey("Nobody hears this.")
        assert (
            "not fired" in it.sees(lambda state: len(state.faults) > 1 and state.faults[-1]).message
        )
        with Server("--port", port):
            it.sees(lambda state: state.view.gone_s is None)
            assert (it.state.ended, it.state.history) == ([], [])
            it.complete()
            it.sees(lambda state: len(state.ended) == 1)


def test_a_server_that_only_hangs_is_gone_too(server, monkeypatch):
    monkeypatch.setattr("screen.remote_client.SILENT_S", 1.5)
    with watching(server) as it:
        it.sees(lambda state: state.view.stage == "ready")
        server.process.send_signal(signal.SIGSTOP)
        it.sees(lambda state: state.view.gone_s is not None)
        server.process.send_signal(signal.SIGCONT)
        it.sees(lambda state: state.view.gone_s is None)


HOSTILE = (
    4_000_000_000,
    -1,
    0,
    10**400,
    1e308,
    math.inf,
    math.nan,
    None,
    True,
    "x\x1b[31m",
    [],
    {},
)


def places_of(data: object, path: tuple[int, ...] = ()) -> Iterator[tuple[int, ...]]:
    """Yield the path to each value in nested lists."""
    if path:
        yield path
    for i, each in enumerate(data if isinstance(data, list) else ()):
        yield from places_of(each, (*path, i))


def test_hostile_frames_do_no_harm(stage):
    """A frame with one wrong value is refused, or drawn without control characters. Regression: `slots:
    4000000000` was accepted."""
    stage.obey("/burst 6")
    engine = stage.turns(12).engine.snapshot()
    data = json.loads(
        watch_frames.Sender(True).pack(watch_frames.Frame(False, 0, 0.0, engine, canned_server()))
    )
    places = [*places_of(data)]
    dice = random.Random(1)
    refused = 0
    for _ in range(100):
        hostile = copy.deepcopy(data)
        *path, last = dice.choice(places)
        reduce(operator.getitem, path, hostile)[last] = dice.choice(HOSTILE)
        try:
            frame = watch_frames.Receiver().unpack(hostile)
        except ValueError:
            refused += 1
            continue
        state = State("small")
        state.absorb(View(stage="ready", watches=True, epoch=1, **frame._asdict()))
        for draw in panes_of(MENU).values():
            for line in plain(drawn(draw, state, 120, 40)):
                assert "\x1b" not in line
    assert 30 < refused < 95, refused


def test_a_hostile_server_is_a_line_on_the_screen(server):
    """After an impossible frame the client reconnects, as after a lost connection."""
    with watching(server) as it:
        it.sees(lambda state: state.view.stage == "ready")
        take = watch_frames.Receiver.unpack
        with pytest.MonkeyPatch.context() as patch:

            def lie(receiver: watch_frames.Receiver, data: list) -> watch_frames.Frame:
                data[3][1][0] = 4_000_000_000
                return take(receiver, data)

            patch.setattr(watch_frames.Receiver, "unpack", lie)
            it.sees(lambda state: state.view.gone_s is not None)
        assert "4,000,000,000 in its limits; trying again" in it.state.faults[-1].message
        it.sees(lambda state: state.view.gone_s is None)


@pytest.mark.parametrize(
    "url",
    ["ftp://x", "http://", "http://h:99999", "http://user:pw@h", "http://h/?a=1", ""],
)
def test_a_wrong_address_is_one_line_and_exit_code_2(url, capsys):
    with pytest.raises(SystemExit) as left:
        tui.parse_arguments([f"--watch={url}"])
    said = capsys.readouterr().err
    assert left.value.code == 2 and said.startswith("nanobatch: --watch ") and said.count("\n") == 1


def test_no_server_is_one_line_and_exit_code_2(capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, but not listening
        assert tui.main(["--watch", f"127.0.0.1:{taken.getsockname()[1]}"]) == 2
    said = capsys.readouterr().err
    assert "refused" in said and "is a server there?" in said and said.count("\n") == 1
    other = [sys.executable, "-u", "-m", "http.server", "0", "--bind", "127.0.0.1"]
    with subprocess.Popen(
        other, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        port = re.search(r"port (\d+)", process.stdout.readline())[1]
        assert tui.main(["--watch", f"127.0.0.1:{port}"]) == 2
        process.kill()
    said = capsys.readouterr().err
    assert "404" in said and said.count("\n") == 1


def test_watching_needs_no_mlx(server, tmp_path):
    """`--watch` does not import MLX, which a laptop may not have, and which takes a second to import."""
    code = "import sys, tui; code = tui.main(sys.argv[1:]); print(code, [m for m in sys.modules if m[:3] == 'mlx'])"
    picture = tmp_path / "picture.svg"
    command = [sys.executable, "-c", code, "--watch", server.address, "--screenshot", str(picture)]
    done = subprocess.run(
        [*command, "--script", "wait"], capture_output=True, text=True, timeout=120, cwd=ROOT
    )
    assert done.stdout.split("\n")[0] == "0 []", done.stdout + done.stderr
    text = re.sub("<[^>]*>", "", picture.read_text()).replace("&#160;", " ").replace("\xa0", " ")
    assert "demo @ 127.0.0.1" in text and "Clients of" in text


# --- the pane -----------------------------------------------------------------------------------


def canned_server() -> ServerView:
    chat, complete = "POST /v1/chat/completions", "POST /v1/completions"
    figures = {"prompt_tokens": 1204, "cached_tokens": 1088, "tokens": 64}
    figures |= {"ttft_s": 0.0312, "generation_tps": 58.2}
    asked = RequestRecord(7, 0.0, "10.1.2.3", chat, "chatcmpl-7-7f3a", (7,), True, 200)
    done = RequestRecord(2, 0.0, "127.0.0.1", complete, "cmpl-2-7f3a", (2, 3), status=200)
    wrong = RequestRecord(3, 0.0, "192.168.100.200", complete, status=400, reason="invalid_value")
    message = "temperature = 'hot', but it must be a number from 0 to 1,000,000; \x1b[31m[/foo]"
    ended = (
        replace(done, reason="stop", latency_s=1.13, **figures),
        replace(wrong, message=message, latency_s=0.002),
        replace(asked, number=4, hung_up=True, reason="cancelled", latency_s=0.5, **figures),
    )
    calls = (asked, RequestRecord(8, 0.0, "2001:db8::1234:5678:9abc", chat))
    return ServerView("http://127.0.0.1:8000", False, 3, 1, calls, ended, 0, 3)


def test_the_clients_pane_is_as_drawn():
    async def scenario(it: Show):
        views = [canned_server(), replace(canned_server(), ended=())]
        it.stage.client.server = SimpleNamespace(view=lambda since: views[bool(since)], changes=0)
        it.stage.obey("/burst 3")
        await it.turns(30)
        it.app.paint()
        await it.pilot.pause()
        like_golden("clients-120x40", it.text())
        await it.press("h")
        like_golden("clients-sheet-120x40", it.text())
        assert "␛[31m[/foo]" in it.text()

    show(scenario, Stage(slots=4), (120, 40))


def test_a_slow_screen_counts_what_it_misses(engine, monkeypatch):
    """If a stopped terminal blocks the screen, the receiving thread keeps a bounded number of steps and
    requests, and counts the others."""
    monkeypatch.setattr(watch_frames, "STEPS", 20)
    monkeypatch.setattr(watch_frames, "ENDS", 5)
    server = canned_server()
    seen = handled = None
    for number in range(6):
        for _ in range(3):
            engine.submit([number], SamplingParams(max_tokens=4, ignore_eos=True)).result()
        seen = engine.snapshot(seen)
        handled = watch_frames.join_frames(handled, watch_frames.Frame(False, 0, 0.0, seen, server))
    assert [step.step for step in handled.engine.steps][-1] == engine.registry.steps.count
    assert (
        len(handled.engine.steps) == 20
        and handled.engine.missed == engine.registry.steps.count - 20
    )
    assert [view.id for view in handled.engine.ended] == list(range(14, 19))
    assert handled.engine.missed_ends == 13 and len(handled.server.ended) == 5
    assert handled.server.missed == 6 * len(server.ended) - 5


def test_clients_are_counted_beyond_those_that_are_kept():
    """Regression: the count stopped at "2,000 ended", with a falling number of refused ones."""
    state, server = State(), canned_server()
    for number in range(1, 1001):
        state.absorb(View(server=replace(server, seen=3 * number)))
    assert len(state.calls) == State.REMEMBERED
    heading = plain(drawn(http_requests.draw_clients, state, 120, 12))[0]
    assert "2 open · 3,000 ended · 1,000 refused · 1,000 hung up" in heading
    state.absorb(View(server=replace(server, ended=(), seen=0), epoch=1))  # another process
    assert (
        "0 ended · 0 refused · 0 hung up"
        in plain(drawn(http_requests.draw_clients, state, 120, 12))[0]
    )


# --- a conversation -----------------------------------------------------------------------------


@pytest.mark.parametrize("keys", [(), ("--api-key", "key", "--watch-key", "eye")], ids=len)
def test_a_conversation_with_a_watched_server(keys):
    """With the API key only, `/watch` contains no texts, so the conversation gets its answers from the API."""
    sizes = ("--model", "demo", "--slots", "2", "--max-len", "96")
    with Server(*sizes, *keys) as server, watching(server, *keys[1:2]) as watched:
        watched.sees(lambda state: state.view.stage == "ready")
        if keys:
            with pytest.raises(ValueError, match="no API key, or a wrong one"), watching(server):
                pass
        session, talk = watched.session, watched.state.chats.open
        session.has_chats = watched.state.chatting = True
        for question in ("Count from 3 to 5.", "Count from 7 to 9."):
            session.obey(question)
            watched.sees(lambda state: not (talk.runs or talk.waiting))
        messages = talk.messages("x")
        second = talk.turns[1].request
        assert messages[1]["content"] == "3, 4, 5."
        headers = {"Authorization": "Bearer key"} if keys else {}
        alone = server.ask(CHAT, {"messages": messages[:3], "temperature": 0}, **headers)
        text = alone.json["choices"][0]["message"]["content"]
        watched.sees(lambda state: talk.turns[1].request.text == text)
        assert second.metrics.cached_tokens > 0
        session.obey("word " * 70)
        watched.sees(lambda state: talk.why)
        assert "/drop" in talk.why and talk.waiting and len(talk.turns) == 2

"""`ask.py --url`: a running server answers instead of a model loaded by `ask.py`."""

import http.client
import json
import re
import socket
import threading
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from parrot import THOUGHT, Taught, said
from waiting import wait_for

import ask
from cli.server_model import ServerModel
from cli.terminal_chat import Dialogue


@pytest.fixture(scope="module")
def server():
    with Taught(slots=2, max_len=1024, aliases=("code",), api_key="hush") as server:
        yield server


def run(capsys: pytest.CaptureFixture, server: Taught, *arguments: str) -> tuple[int, str, str]:
    code = ask.main([*arguments, "--url", f"{server.address}/v1"])
    return code, *capsys.readouterr()


@pytest.fixture(autouse=True)
def key(monkeypatch):
    monkeypatch.setenv("NANOBATCH_API_KEY", "hush")


def test_prompts_are_answered_in_their_order(server, capsys):
    code, out, err = run(capsys, server, "say: It is 8.", f"say: {THOUGHT}So.", "--model", "code")
    assert (code == 0 and "parrot @ 127.0.0.1" in err) or "code @ 127.0.0.1" in err
    assert re.fullmatch(
        r"--- 1: say: It is 8\.\nIt is 8\.\n    \[stop: \d+ tokens, TTFT \d+ ms, \d+ tokens/s\]\n"
        r"--- 2: say: <think> .*\nIt is easy\.\nSo\.\n    \[stop: .*\]\n",
        out,
    ), out


def test_settings_are_the_servers_unless_given(server, capsys):
    run(capsys, server, "say: Yes, and so on.", "--max-tokens", "3", "--stop", "x", "--seed", "4")
    sampling = server.parrot.engine.snapshot().ended[-1]
    assert sampling.max_tokens == 3
    code, out, _ = run(capsys, server, "--raw", "Once", "--max-tokens", "5")
    assert code == 0 and "[length: 5 tokens" in out


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            ["--model", "cod"],
            r"--url http://\S+: the model 'cod' does not exist here; there is 'parrot'",
        ),
        (["--api-key", "wrong"], r"--url http://\S+: .*key"),
        (["--temperature", "-1"], "temperature = -1"),
        (["word " * 2000], "maximum context length is 1024 tokens"),
    ],
    ids=["model", "key", "setting", "length"],
)
def test_a_refused_request_is_one_line(server, capsys, arguments, line):
    code, out, err = run(capsys, server, "Why?", *arguments)
    assert code == 2 and not out and err.count("\n") == 1
    assert re.search(line, err), err


@pytest.mark.parametrize("url", ["ftp://x", "http://h:99999", "http://h/?a=1", ""])
def test_a_wrong_address_is_one_line(url, capsys):
    with pytest.raises(SystemExit) as left:
        ask.parse_arguments([f"--url={url}", "Why?"])
    err = capsys.readouterr().err
    assert left.value.code == 2 and err.startswith("nanobatch: --url ") and err.count("\n") == 1


def test_no_server_is_one_line(capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, but not listening
        assert ask.main(["Why?", "--url", f"127.0.0.1:{taken.getsockname()[1]}"]) == 2
    err = capsys.readouterr().err
    assert "refused" in err and "is a server there?" in err and err.count("\n") == 1


def talk(server: Taught, *lines: str) -> tuple[Dialogue, str]:
    """Type these lines, and return the dialogue and its output."""
    typed = iter(lines)
    written: list[str] = []

    def read(asked: str) -> str:
        try:
            return next(typed)
        except StopIteration:
            raise EOFError from None

    model = ServerModel(server.address, "hush", None, {"max_tokens": 200})
    dialogue = Dialogue(model, read, written.append)
    assert dialogue.run() == 0
    return dialogue, "".join(written)


def test_conversation_goes_on_with_its_cached_tokens(server):
    dialogue, out = talk(server, f"say: {THOUGHT}It is 8.", "say: Yes.", "/set temperature=0.5")
    assert dialogue.talk.turns[1] == {
        "role": "assistant",
        "content": "It is 8.",
        "reasoning_content": "It is easy.",
    }
    assert dialogue.talk.turns[3]["content"] == "Yes."
    assert "It is easy.\nIt is 8." in re.sub(r"\x1b\[2?2m", "", out) and "\x1b[2m" in out
    assert "were still in the slot" in out
    assert "temperature=0.5 top_p=default" in out and "max_tokens=200" in out


def test_conversation_that_outgrows_the_slot_waits_for_drop(server):
    long = "say: " + "word " * 120
    dialogue, out = talk(server, long, long, "/drop")
    assert "tokens are left: /drop and /new make room" in out
    assert "/drop forgets the oldest question" in out and "forgotten: 'say: word" in out
    assert len(dialogue.talk.turns) == 2 and not dialogue.waiting


# --- a server with canned responses -------------------------------------------------------------


@contextmanager
def answering(*pieces: bytes | threading.Event):
    """Yield the address of a server that lists its models once, and answers one request with these pieces. It
    waits for an event among them."""
    listed = b'{"data": [{"id": "other"}]}'
    head = b"HTTP/1.1 200 OK\r\nConnection: close\r\n"
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            for body in ((listed,), pieces):
                line, _ = listener.accept()
                with line, line.makefile("rb") as file:
                    file.readline()
                    fields = http.client.parse_headers(file)
                    file.read(int(fields.get("Content-Length", 0)))
                    line.sendall(head + b"\r\n")
                    for piece in body:
                        if isinstance(piece, bytes):
                            line.sendall(piece)
                        else:
                            assert piece.wait(60)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread.join(60)


def event(text: str, **fields) -> bytes:
    choice = {"delta": {"content": text}, **fields}
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


def test_progress_of_a_long_prompt_is_shown():
    go_on = threading.Event()
    shown = []

    def show(words: str) -> None:
        shown.append(words)
        if "512" in words:
            go_on.set()

    comment = b": prompt 512/2048, 182 tokens/s\n\n"
    with answering(comment, go_on, event("Yes."), event("", finish_reason="stop")) as url:
        answer = ServerModel(url, "", None, {}).ask([said("x")], {})
        answer.wait_for_text(show)
        assert [part.text for part in answer] == ["Yes."]
        result = answer.result()
    assert shown[-2:] == ["    prompt 512/2048, 182 tokens/s", ""]
    assert result.error is None
    assert (result.text, result.finish_reason, result.metrics.output_tokens) == ("Yes.", "stop", 1)


def test_events_of_other_servers_are_read():
    """Some servers end lines with CRLF (sse-starlette), and some write no space after the colon. Regression:
    an event without data ended the answer."""
    yes = event("Yes.").replace(b"data: ", b"data:")
    end = event("", finish_reason="stop") + b"data: [DONE]\n\n"
    with answering((b"data:\n\n" + yes + end).replace(b"\n", b"\r\n")) as url:
        answer = ServerModel(url, "", None, {}).ask([said("x")], {})
        assert [part.text for part in answer] == ["Yes."]
        assert answer.result().error is None


def test_no_note_about_tokens_left_without_the_length_of_a_slot():
    """Only some servers report the length, as `max_model_len`."""
    with answering(event("Yes."), event("", finish_reason="stop")) as url:
        _, out = talk(SimpleNamespace(address=url), "Why?")
    assert "Yes." in out and "first token after" in out and "left" not in out


@pytest.mark.parametrize(
    ("last", "line"),
    [
        (b"", "the server closed the connection"),
        (b'data: {"error": {"message": "request 3 failed"}}\n\n', "request 3 failed"),
        (b"data: [5\n\n", "Expecting"),
        (b"data: [5]\n\n", "'list' object"),
    ],
)
def test_an_answer_that_fails_is_a_line_and_exit_code_1(capsys, last, line):
    with answering(event("Ye"), last) as url:
        assert ask.main(["Why?", "--url", url]) == 1
    out, err = capsys.readouterr()
    assert "Ye\n    [error: 1 tokens" in out
    assert f"request 1: {line}" in err


def test_a_stopped_answer_stays(server):
    """Cancelling keeps the text so far and closes the connection, so the server stops generating."""
    model = ServerModel(server.address, "hush", None, {"ignore_eos": True})
    answer = model.ask([said("Once. " * 20)], {})
    parts = iter(answer)
    first = next(parts).text
    answer.cancel()
    result = answer.result()
    assert result.finish_reason == "cancelled" and result.text.startswith(first)
    assert wait_for(lambda: not server.parrot.engine.sched.running)

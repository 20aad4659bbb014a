"""A real server process with the demo model, tested with the openai client where it suffices, otherwise
with plain requests and raw sockets."""

import asyncio
import contextlib
import json
import re
import signal
import socket
import subprocess
import sys
import time

import openai
import pytest
from processes import run
from servers import CHAT, COMPLETIONS, ROOT, Server, free_ports, hail
from waiting import wait_for

COUNT = "3, 4, 5, 6, 7."
LONG = {"max_tokens": 400, "ignore_eos": True}  # takes seconds, unless the client hangs up


def user(text: str) -> list[dict]:
    return [{"role": "user", "content": text}]


def say(text: str = "Count from 3 to 7.", **fields) -> dict:
    return {"messages": user(text), **fields}


# --- answers --------------------------------------------------------------------------------------


def test_openai_client_whole_answer(client):
    answer = client.chat.completions.create(
        model="default", messages=user("Count from 3 to 7."), temperature=0
    )
    (choice,) = answer.choices
    assert choice.message.content == COUNT and choice.message.role == "assistant"
    assert (choice.finish_reason, choice.index, choice.logprobs) == ("stop", 0, None)
    assert (answer.object, answer.model) == ("chat.completion", "demo")
    assert abs(answer.created - time.time()) < 60
    assert re.fullmatch(r"chatcmpl-\d+-[0-9a-f]{4}", answer.id)
    used = answer.usage
    assert used.total_tokens == used.prompt_tokens + used.completion_tokens


def test_openai_client_stream(client):
    stream = client.chat.completions.create(
        model="demo",
        messages=user("Count from 3 to 7."),
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert len({(chunk.id, chunk.object, chunk.created, chunk.model) for chunk in chunks}) == 1
    assert chunks[0].object == "chat.completion.chunk"
    first = chunks[0].choices[0].delta
    assert (first.role, first.content) == ("assistant", "")
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])
    # A busy machine may merge several tokens into one event
    assert text == COUNT and len(chunks) >= 3
    *running, last = [chunk.choices[0].finish_reason for chunk in chunks[:-1]]
    assert last == "stop" and not any(running)
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens > 5
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_completion_prompts(server, client):
    whole = client.completions.create(model="demo", prompt="Once upon", max_tokens=6, temperature=0)
    assert whole.object == "text_completion" and re.fullmatch(r"cmpl-\d+-[0-9a-f]{4}", whole.id)
    both = client.completions.create(
        model="demo", prompt=["Once upon", "Two"], max_tokens=6, temperature=0
    )
    assert [choice.index for choice in both.choices] == [0, 1]
    assert both.choices[0].text == whole.choices[0].text
    from_ids = server.complete([[5, 6, 7], [8, 9]], temperature=0).json
    assert len(from_ids["choices"]) == 2 and from_ids["usage"]["prompt_tokens"] == 5
    assert server.complete([5, 6, 7], temperature=0).json["choices"][0] == from_ids["choices"][0]


def test_event_stream_ends_with_done(server):
    reply = server.chat(stream=True)
    assert reply.headers["content-type"].startswith("text/event-stream")
    assert reply.headers["cache-control"] == "no-cache" and reply.body.endswith(b"data: [DONE]\n\n")
    assert reply.headers["x-request-id"] == reply.events[0]["id"]


def test_choices_have_consecutive_seeds(server):
    """Choice i has seed + i. With one seed, the n choices of a seeded request would all be the same."""
    fields = {"temperature": 1.5, "max_tokens": 12, "ignore_eos": True}
    three = server.chat("Tell me a story.", n=3, seed=5, **fields).json
    assert [choice["index"] for choice in three["choices"]] == [0, 1, 2]
    alone = [
        server.chat("Tell me a story.", seed=5 + i, **fields).json["choices"][0] for i in range(3)
    ]
    texts = [choice["message"]["content"] for choice in three["choices"]]
    assert texts == [choice["message"]["content"] for choice in alone] and len(set(texts)) == 3
    assert three["usage"]["completion_tokens"] == 36
    prompt = server.chat("Tell me a story.", max_tokens=1).json["usage"]["prompt_tokens"]
    assert three["usage"]["prompt_tokens"] == prompt  # counted once, not once for each choice


def test_logprob_tokens_join_to_the_answer(server):
    whole = server.chat(logprobs=True, top_logprobs=3, temperature=0).json["choices"][0]
    entries = whole["logprobs"]["content"]
    assert "".join(entry["token"] for entry in entries) == whole["message"]["content"]
    for entry in entries:
        assert bytes(entry["bytes"]).decode() == entry["token"] and len(entry["top_logprobs"]) == 3
        assert entry["top_logprobs"][0]["logprob"] == entry["logprob"] <= 0  # greedy
    streamed = server.chat(logprobs=True, top_logprobs=3, temperature=0, stream=True).events[:-1]
    parts = [event["choices"][0]["logprobs"] for event in streamed]
    assert [entry for part in parts if part for entry in part["content"]] == entries
    older = server.complete(logprobs=2, temperature=0).json["choices"][0]
    tokens = older["logprobs"]["tokens"]
    assert "".join(tokens) == older["text"]
    assert {len(older["logprobs"][name]) for name in ("token_logprobs", "top_logprobs")} == {8}
    assert older["logprobs"]["text_offset"] == [len("".join(tokens[:i])) for i in range(8)]


@pytest.mark.parametrize("count", [1, 3])
def test_broken_character_is_in_streamed_logprobs(server, count):
    """If an answer ends within a character, that character is sent at the end, together with the entries of
    its tokens."""
    # Byte F0 starts a sequence of four bytes
    asked = {"logit_bias": {"177": 1000}, "temperature": 0, "max_tokens": count}
    whole = server.chat(logprobs=True, **asked).json["choices"][0]
    assert whole["message"]["content"] == "\ufffd" * count
    streamed = server.chat(logprobs=True, stream=True, **asked).events[:-1]
    parts = [event["choices"][0]["logprobs"] for event in streamed]
    entries = [entry for part in parts if part for entry in part["content"]]
    assert entries == whole["logprobs"]["content"]
    assert "".join(entry["token"] for entry in entries) == "\ufffd" * count


def test_logprobs_0(server):
    """`logprobs: 0` is not `false`, although the two are equal in Python."""
    said = server.complete(logprobs=0, temperature=0).json["choices"][0]["logprobs"]
    assert len(said["token_logprobs"]) == 8 and said["top_logprobs"] == [{}] * 8
    assert server.complete(logprobs=False).json["choices"][0]["logprobs"] is None


def test_max_tokens_is_cut_to_the_room(server):
    reply = server.chat(max_tokens=10**9)
    assert reply.status == 200 and reply.json["choices"][0]["message"]["content"] == COUNT
    cut = server.chat(max_completion_tokens=3).json["choices"][0]
    assert cut["finish_reason"] == "length"


def test_content_parts_and_developer_role(server):
    parts = [{"type": "text", "text": "Count from 3 "}, {"type": "text", "text": "to 7."}]
    reply = server.ask(CHAT, {"messages": user(parts), "temperature": 0})
    assert reply.json["choices"][0]["message"]["content"] == COUNT
    for role in ("system", "developer"):
        said = [{"role": role, "content": "Be kind."}, *user("Count from 3 to 7.")]
        assert server.ask(CHAT, {"messages": said, "max_tokens": 1}).status == 200
    turns = [*user("Hello."), {"role": "assistant", "content": "Hi."}, *user("Count from 3 to 7.")]
    assert server.ask(CHAT, {"messages": turns}).status == 200


def test_answer_message_as_input(server):
    """A client sends an answer back as input for the next turn. litellm wraps our `"refusal": null` in an
    object, which must be accepted, too."""
    own = {"role": "assistant", "content": "Hello."}
    turns = [*user("Hi."), own, *user("Count from 3 to 7.")]
    nothing = {"refusal": None, "tool_calls": None, "annotations": []}
    for kept in (nothing, {"provider_specific_fields": {"refusal": None}}):
        turns[1] = own | kept
        reply = server.ask(CHAT, {"messages": turns, "max_tokens": 1})
        assert reply.status == 200, reply
    turns[1] |= {"provider_specific_fields": {"refusal": "No."}}
    assert server.ask(CHAT, {"messages": turns, "max_tokens": 1}).status == 400


def test_fields_of_other_servers_in_messages_are_ignored(server):
    """They are names, ids, cache hints and copies of the content, and change no token of the prompt."""
    own = {"role": "assistant", "content": "Hello."}
    hint = {"id": "msg_1", "timestamp": 1_790_000_000, "cache_control": {"type": "ephemeral"}}
    copies = {"parsed": {"a": 1}, "reasoning_details": [{"type": "reasoning.encrypted"}]}
    lengths = []
    for mine, theirs in (({}, {}), (hint, hint | copies)):
        turns = [*user("Hi."), own | theirs, user("Count from 3 to 7.")[0] | mine]
        reply = server.ask(CHAT, {"messages": turns, "max_tokens": 1})
        assert reply.status == 200, reply
        lengths.append(reply.json["usage"]["prompt_tokens"])
    assert lengths[0] == lengths[1]


def test_assistant_message_without_content(server):
    """Other servers send null for an answer without text, and a refusal in a field of its own."""

    def length(**own) -> int:
        turns = [*user("Hi."), {"role": "assistant", **own}, *user("Count from 3 to 7.")]
        reply = server.ask(CHAT, {"messages": turns, "max_tokens": 1})
        assert reply.status == 200, reply
        return reply.json["usage"]["prompt_tokens"]

    empty = length(content="")
    assert length(content=None) == length(content=None, tool_calls=[]) == empty
    assert length(content=None, refusal="I cannot.") == length(content="I cannot.") > empty


REFUSED = {  # field: values
    "model": [5],
    "stream": ["yes", 1],
    "stream_options": [5, {"include_usage": "yes"}, {"include_obfuscation": True}],
    "service_tier": ["priority", 5],
    "parallel_tool_calls": ["no", 0],
    "max_tokens": [0, -2, 1.5, "5", True],
    "max_completion_tokens": [0, "5"],
    "verbosity": ["loud"],
    "temperature": [-1, "hot", 10**400],
    "top_p": [1.1],
    "top_k": [-2],
    "min_p": [2],
    "seed": ["x", 2**70],
    "n": [0, "2"],
    "stop": [5, [None], ""],
    "logprobs": ["x", 3],
    "top_logprobs": [1.5, 2],
    "logit_bias": [5, {"x": 1}, {"99999999": 1}, {"5": None}],
    "repetition_penalty": [0],
    "ignore_eos": [1],
    "tools": [[{"type": "function", "function": {"name": "f"}}]],
    "functions": [[{"name": "f"}]],
    "response_format": [{"type": "json_schema", "json_schema": {}}, {"type": "grammar"}, 5],
    "guided_regex": [5, "a" * 40_000],
    "guided_choice": [[5], {}],
    "guided_grammar": [5],
    "structured_outputs": [
        5,
        {"regex": 5},
        {"regex": "(a"},
        {"json": {}, "choice": ["a"]},
        {"x": 1},
    ],
    "presence_penalty": [2.5, True],
    "frequency_penalty": [-2.5, 10**400],
    "best_of": [3],
    "echo": [True],
    "suffix": ["x"],
    "chat_template_kwargs": [5],
    "modalities": [["text", "audio"]],
    "audio": [{"voice": "x"}],
    "whatever": [1],
    "messages": [None, [], {}, "x", [5], [{}], [{"role": "user"}]],
}
FIELDS = [name for name in REFUSED if name != "messages"]


@pytest.mark.parametrize(
    "fields",
    [
        {"top_k": -1},
        {"top_p": 0},
        {"tools": [], "tool_choice": "none"},
        {"response_format": {"type": "text"}},
        {"stream_options": {"include_usage": True, "continuous_usage_stats": True}, "stream": True},
        {"stream_options": {"include_obfuscation": False}, "max_completion_tokens": 9},
        {"presence_penalty": -2, "frequency_penalty": 0.4, "service_tier": "flex"},
        {"user": "me", "metadata": {"a": "b"}, "store": False, "best_of": 1},
        {"store": True, "prompt_cache_options": {"mode": "explicit"}, "cache_prompt": True},
        {"max_tokens": -1, "max_completion_tokens": 4, "structured_outputs": {}},
        {"logit_bias": {}, "stop": [], "functions": [], "parallel_tool_calls": True},
        {"length_penalty": 1.0, "reasoning_effort": "none", "verbosity": "high"},
        dict.fromkeys(FIELDS),
    ],
)
def test_neutral_values_are_accepted(server, fields):
    reply = server.chat(**({"max_tokens": 4} | fields))
    assert reply.status == 200, reply.body


# --- what is refused ------------------------------------------------------------------------------


MESSAGES = [
    {"role": "tool", "content": "x", "tool_call_id": "1"},
    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]},
    {"role": "user", "content": [{"type": "text"}]},
    {"role": "user", "content": [5]},
    {"role": "user", "content": 5},
    {"role": "alien", "content": "x"},
    {"role": 5, "content": "x"},
    {"role": "user", "content": "\ud800"},
    {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]},
]


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in REFUSED.items() for value in values]
)
def test_unsupported_fields_are_refused(server, name, value):
    """An unsupported field or value is refused by name instead of being ignored."""
    reply = server.chat(**{"max_tokens": 4, "stream": True, name: value})
    assert reply.status == 400, (name, value, reply)
    error = reply.error
    assert error["type"] == "invalid_request_error" and error["code"], error
    assert error["param"] == name
    assert 0 < len(error["message"]) < 500 and "\n" not in error["message"]


@pytest.mark.parametrize("message", MESSAGES)
def test_unreadable_message_is_refused(server, message):
    reply = server.ask(CHAT, {"messages": [message]})
    assert reply.status == 400 and reply.error["param"] == "messages", reply


@pytest.mark.parametrize(
    "prompt", [None, "", ["a", ""], [[]], [5, "a"], [[5, None]], {}, [-1], [2**70], "\ud800"]
)
def test_unreadable_prompt_is_refused(server, prompt):
    reply = server.complete(prompt)
    assert reply.status == 400 and reply.error["param"] == "prompt", reply


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"\xff\xfe",
        b'{"messages": "\xff"}',
        b"[" * 100_000,
        b'{"a":' * 40_000,
        b'{"messages": NaN}',
        b'{"temperature": Infinity}',
        b'{"metadata": {"a": -1e999}}',
        b'{"n": ' + b"9" * 5000 + b"}",
        b"\x00" * 100,
    ],
)
def test_body_must_be_a_json_object(server, body):
    for path in (CHAT, COMPLETIONS):
        reply = server.ask(path, body)
        assert reply.status == 400 and reply.error["code"] == "invalid_json", reply
        assert "sys." not in reply.error["message"]  # as in Python's own message


def test_byte_order_mark_is_skipped(server):
    """Editors on Windows write a byte order mark, and `curl -d @body.json` sends it."""
    assert server.ask(CHAT, b"\xef\xbb\xbf" + json.dumps(say(max_tokens=1)).encode()).status == 200


def test_oversized_prompt_is_400_before_the_stream(server):
    for text in ("one two three " * 1000, "x" * 3_000_000):
        reply = server.chat(text, stream=True)
        assert reply.status == 400 and reply.error["code"] == "context_length_exceeded"
        assert "maximum context length is 1024 tokens" in reply.error["message"]


def test_oversized_body_is_413(server):
    assert server.ask(CHAT, b'{"a": "' + b"x" * 5_000_000 + b'"}').status == 413
    line = server.line().send(
        f"POST {CHAT} HTTP/1.1\nHost: localhost\nTransfer-Encoding: chunked\n\n"
    )
    chunk = b"10000\r\n" + b"x" * 65536 + b"\r\n"
    for _ in range(70):
        line.send(chunk)
    assert line.reply().status == 413
    assert server.chat().status == 200


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"messages": [{"role": "user", "content": ""}] * 2049}, "2,049 messages"),
        (say([{"type": "text", "text": ""}] * 2048), "2,049 messages and parts"),
        (say(metadata=[[]] * 100_000), "100,0"),
        (say("[" * 100_000), "100,0"),
    ],
)
def test_counts_in_a_body_are_limited(server, body, message):
    """Regression: a template took five seconds for a body of 4 MB with 130,000 empty messages, and four such
    bodies delayed another request by 24 seconds."""
    reply = server.ask(CHAT, body)
    assert reply.status in (400, 413) and message in reply.error["message"], reply.error


def test_errors_become_client_exceptions(client):
    ask = client.chat.completions.create
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        ask(model="gpt-4", messages=user("x"))
    with pytest.raises(openai.BadRequestError, match="temperature"):
        ask(model="demo", messages=user("x"), temperature=-1)
    with pytest.raises(openai.BadRequestError, match="not made for embeddings"):
        client.embeddings.create(model="demo", input="x")
    with pytest.raises(openai.NotFoundError, match="there is no"):
        client.moderations.create(model="demo", input="x")


def test_unknown_paths_and_methods(server):
    for path in ("/v1", "/v1/audio", f"{CHAT}/", "/..%2f", "/%ff%00", "//"):
        reply = server.ask(path)
        assert reply.status == 404 and CHAT in reply.error["message"], path
    for path, allow in ((CHAT, "POST"), ("/v1/models", "GET, HEAD")):
        for method in ("PUT", "DELETE", "PATCH", "GET" if path == CHAT else "POST"):
            reply = server.ask(path, method=method)
            assert (reply.status, reply.headers["allow"]) == (405, allow)
            assert reply.error["type"] == "invalid_request_error"


def test_content_type_must_be_json(server):
    body = json.dumps(say()).encode()
    assert server.ask(CHAT, body, Content_Type="text/plain").status == 415
    assert server.ask(CHAT, body, Content_Encoding="gzip").status == 415
    assert server.ask(CHAT, body, Content_Type="application/json; charset=utf-8").status == 200


# --- HTTP details ---------------------------------------------------------------------------------


def test_http_1_0_chunks_and_expect(server):
    old = server.line().post(CHAT, say(temperature=0), version="1.0").everything()
    assert old.startswith(b"HTTP/1.1 200") and COUNT.encode() in old
    stream = server.line().post(CHAT, say(temperature=0, stream=True), version="1.0").everything()
    assert stream.endswith(b"data: [DONE]\n\n")
    data = json.dumps(say(temperature=0)).encode()
    chunks = b"".join(
        f"{len(data[i : i + 7]):x}\r\n".encode() + data[i : i + 7] + b"\r\n"
        for i in range(0, len(data), 7)
    )
    line = server.line().send(
        f"POST {CHAT} HTTP/1.1\nHost: localhost\nTransfer-Encoding: chunked\n\n"
    )
    assert COUNT in line.send(chunks + b"0\r\n\r\n").reply().body.decode()
    line = server.line().send(
        f"POST {CHAT} HTTP/1.1\nHost: localhost\nExpect: 100-continue\nContent-Length: {len(data)}\n\n"
    )
    assert line.until(b"\r\n\r\n").startswith(b"HTTP/1.1 100")
    assert COUNT in line.send(data).reply().body.decode()


def test_http_2_upgrade_is_ignored(server):
    """Regression: Java's HttpClient offers an upgrade to HTTP/2 in its first request, and the parser took the
    body for another protocol."""
    offer = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAEAAEAA")
    line = server.line()
    for _ in range(2):
        assert COUNT in line.post(CHAT, say(temperature=0), *offer).reply().body.decode()


@pytest.mark.parametrize("blank", ["\r\n", "\n\r\n\n"])
def test_blank_lines_before_a_request(server, blank):
    """Regression: old clients send a blank line after a body, and their next request got a 400."""
    line = server.line().send(blank.encode())
    health = f"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n{blank}".encode()
    line.post(CHAT, say(max_tokens=2)).send(blank.encode() + health * 2)
    assert [line.reply().status for _ in range(3)] == [200] * 3
    assert line.send(blank.encode()).send(health).reply().status == 200


def test_absolute_target(server):
    """A client with `http_proxy` sends an absolute target. Its host replaces the Host header, which may
    contradict it."""

    def ask(target: str, host: str = "localhost") -> tuple[int, str]:
        reply = server.line().send(f"GET {target} HTTP/1.1\nHost: {host}\n\n").reply()
        return reply.status, reply.json.get("error", {}).get("code", "")

    own = (f"{server.address}/v1/models", "HTTP://LOCALHOST/v1/models?x=1")
    for target in (*own, "http://[::1]:80/v1/models/demo"):
        assert ask(target) == ask(target, "evil.example") == (200, ""), target
    assert ask(f"{server.address}/watch?model=no") == (404, "model_not_found"), "the query counts"
    for host in ("evil.example", "127.0.0.1@evil.example", "localhost.evil.example:8000"):
        assert ask(f"http://{host}/v1/models") == (403, "host_not_allowed"), host
    for target in ("*", "http://[/v1/models", "http://@/v1/models", "http:///v1/models"):
        said = server.line().send(f"GET {target} HTTP/1.1\nHost: localhost\n\n").everything()
        assert said.startswith(b"HTTP/1.1 400"), target
        assert b"\r\nConnection: close\r\n" in said  # anything sent after it is not answered
    chat = server.line().post(f"{server.address}{CHAT}", say(temperature=0)).reply()
    assert chat.json["choices"][0]["message"]["content"] == COUNT


def test_keep_alive_and_pipelining(server):
    line = server.line()
    for _ in range(3):
        assert line.post(CHAT, say(max_tokens=2)).reply().status == 200
    for _ in range(3):
        line.post(CHAT, say(max_tokens=2))
    line.send("GET /health HTTP/1.1\nHost: localhost\n\n")
    assert [line.reply().status for _ in range(4)] == [200] * 4


def test_head_has_no_body(server):
    for path in ("/health", "/v1/models", "/metrics"):
        reply = server.ask(path, method="HEAD")
        assert (reply.status, reply.body) == (200, b"")
        assert int(reply.headers["content-length"]) > 0
    assert server.ask("/watch", method="HEAD").status == 405  # its body would never end


def test_invalid_http_is_400(server):
    for text in ("hello\n\n", "GET\n\n", "POST / HTTP/1.1\nContent-Length: -5\n\n"):
        said = server.line().send(text).everything()
        assert said.startswith(b"HTTP/1.1 400")
    known = "POST / HTTP/1.1\nHost: localhost\nTransfer-Encoding: gzip\n\n"
    assert b"Only Transfer-Encoding: chunked" in server.line().send(known).everything()
    for endless in ("GET /", "GET / HTTP/1.1\nA: ", "GET / HTTP/1.1\n" + "A: b\n" * 15_000):
        endless += "x" * 70_000
        assert server.line().send(endless).everything().startswith(b"HTTP/1.1 400")
    assert server.ask("/health").status == 200


@pytest.mark.parametrize("order", [1, -1])
def test_two_lengths_are_refused(server, order):
    """Regression: the connection was kept open, although a proxy in front may disagree about where the body
    ends."""
    lengths = ["Content-Length: 4", "Transfer-Encoding: chunked"][::order]
    head = "\n".join([f"POST {CHAT} HTTP/1.1", "Host: localhost", *lengths])
    said = server.line().send(head + "\n\n0\n\nGET /health HTTP/1.1\nHost: localhost\n\n")
    said = said.everything()
    assert said.startswith(b"HTTP/1.1 400") and said.count(b"HTTP/1.1") == 1
    assert b"both Content-Length and Transfer-Encoding" in said


@pytest.mark.parametrize(
    ("said", "status"),
    [
        ("GET /" + "x" * 70_000, 400),
        ("HEAD x HTTP/1.1\nHost: localhost\n\n", 400),  # its error has no body
        (f"POST {CHAT} HTTP/1.0\nContent-Length: 5000000\nContent-Type: application/json\n\n", 413),
        (
            f"POST {CHAT} HTTP/1.1\nHost: elsewhere.example\nConnection: close\nContent-Length: 900000\n\n",
            403,
        ),
    ],
)
def test_error_reaches_a_client_that_is_still_sending(server, said, status):
    """The server reads on before it closes, because closing a connection with unread bytes sends a reset,
    which discards the response."""
    line = server.line().send(said)
    line.until(b"HTTP/1.1 ")
    for _ in range(8):  # the server has responded, and the rest arrives only now
        line.send(b"x" * 32_768)
        time.sleep(0.01)
    assert line.everything().startswith(str(status).encode())
    line.hang_up()
    assert server.ask("/health").status == 200


@pytest.mark.parametrize("sent", [10, -1])
def test_incomplete_request_does_not_count(server, sent):
    data = json.dumps(say()).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
    line = server.line().send((head.encode() + data)[:sent])
    line.socket.shutdown(socket.SHUT_WR)
    assert line.everything() == b""


@pytest.mark.parametrize(("stream", "abrupt"), [(False, True), (True, False)])
def test_hang_up_frees_slot_and_queue(server, stream, abrupt):
    """There are twice as many requests as slots, so queued requests must be removed, too."""
    lines = [
        server.line().post(CHAT, say("Tell me a long story.", stream=stream, **LONG))
        for _ in range(8)
    ]
    if stream:
        lines[0].until(b'"content":"')
    wait_for(lambda: server.gauge("requests_running"))
    before = server.gauge("generated_tokens_total")
    for line in lines:
        if abrupt:  # a reset instead of an orderly close
            line.socket.setsockopt(
                socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00"
            )
        line.hang_up()
    assert server.is_idle()
    generated = server.gauge("generated_tokens_total") - before
    assert generated < len(lines) * LONG["max_tokens"] / 2, "they were answered all the same"
    line = server.says(r"(?m)^.*=hung_up.*$")[0]
    assert "cancelled" not in line and "hung_up=true" not in line


def test_streams_at_once_equal_answers_alone(server):
    async def all_of_them() -> list[str]:
        client = openai.AsyncOpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0)

        async def one(n: int) -> str:
            stream = await client.chat.completions.create(
                model="demo",
                messages=user(f"Count from {n} to {n + 9}."),
                temperature=0,
                stream=True,
                max_tokens=64,
            )
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

        return await asyncio.gather(*(one(n) for n in range(36)))

    texts = asyncio.run(all_of_them())
    alone = [
        server.chat(f"Count from {n} to {n + 9}.", temperature=0, max_tokens=64)
        for n in range(0, 36, 9)
    ]
    assert [reply.json["choices"][0]["message"]["content"] for reply in alone] == texts[::9]
    assert all(texts) and server.is_idle()


# --- metrics, the log, and watching ---------------------------------------------------------------


def test_metrics_count_requests(server):
    before = server.ask("/metrics").body.decode()
    server.chat(max_tokens=3, temperature=0)
    server.chat(temperature=-1)
    after = server.ask("/metrics").body.decode()

    def value(text: str, name: str) -> float:
        return next(
            (float(line.split()[-1]) for line in text.splitlines() if line.startswith(name + " ")),
            0.0,
        )

    def of(name: str, labels: str = "") -> str:
        return f'nanobatch_{name}{{model="demo"{labels}}}'

    def grew(name: str) -> float:
        return value(after, name) - value(before, name)

    assert grew(of("http_requests_total", ',reason="length",status="200"')) == 1
    assert grew(of("http_requests_total", ',reason="invalid_value",status="400"')) == 1
    assert grew(of("generated_tokens_total")) == 3
    sources = ("slot", "other_slot", "disk")
    cached = [grew(of("cached_prompt_tokens_total", f',source="{each}"')) for each in sources]
    read = grew(of("prompt_tokens_total")) - sum(cached)
    assert grew(of("prefill_tokens_total")) == read > 0
    assert value(after, of("prompt_tokens_per_second")) == 0, "nothing is being read"
    assert grew(of("time_to_first_token_seconds_count")) == 1
    assert grew(of("token_gap_seconds_count")) == 2 and grew(of("step_seconds_count")) >= 3
    for line in after.splitlines():
        told = (
            r"# HELP \w+ .+|# TYPE \w+ (counter|gauge|histogram|summary)|\w+(\{[^}]*\})? [-+.\de]+"
        )
        assert re.fullmatch(told, line), line


def test_log_line_per_request(server):
    reply = server.chat("Tell me of a secretword.", max_tokens=3)
    line = server.says(rf"(?m)^.*{reply.json['id']}.*$")[0]
    for field in (
        "client=127.0.0.1",
        f"route={CHAT}",
        "status=200",
        "finish_reason=length",
        " tokens=3 ",
        "ttft=0.",
    ):
        assert field in line
    for field in (
        "prompt_tokens",
        "cached_tokens",
        "prompt_tps",
        "generation_tps",
        "total_tps",
        "latency",
    ):
        assert f" {field}=" in line
    assert "secretword" not in server.log.read_text()
    server.ask("/a%0ab=%22c")
    assert '"/a?b=' in server.says(r"route=(\S*a\?b\S*)")[0]


# --- startup and shutdown -------------------------------------------------------------------------


def test_taken_port_is_one_line(server):
    """The port is reported, although the model does not exist either."""
    done = run("serve.py", "--port", server.port, "--model", "no/such-model")
    lines = done.stderr.splitlines()
    assert done.returncode == 2 and len(lines) == 1 and str(server.port) in lines[0], done


def test_first_signal_drains_and_second_ends_streams():
    with Server() as server:
        assert server.says("loading demo; ") and server.says("reading")
        line = server.line().post(CHAT, say("Tell me a long story.", stream=True, **LONG))
        line.until(b'"content":"')
        server.process.send_signal(signal.SIGTERM)
        wait_for(lambda: server.ask("/health").status != 200)
        reply = server.chat()
        assert (reply.status, reply.error["code"]) == (503, "draining")
        server.process.send_signal(signal.SIGTERM)
        rest = line.everything()
        assert b'"error":' in rest and b'"finish_reason":"' not in rest
        assert server.process.wait(60) == 0


def test_many_signals_end_a_busy_server():
    """Regression: a third signal raised an exception in `close`, which left a traceback, work on the device,
    and an arbitrary exit code."""
    with Server() as server:
        line = server.line().post(CHAT, say("Tell me a long story.", stream=True, **LONG))
        line.until(b'"content":"')
        hail(server.process, signal.SIGINT)
        assert server.process.wait(60) == 0, server.log.read_text()
        assert "Traceback" not in server.log.read_text()
        assert b"[DONE]" in line.everything()


SIGNALS_AT_LINES = """
import os, signal, sys, threading
from pathlib import Path
sys.path[:0] = [os.getcwd(), "tests/lib"]
import serve
from checkpoints import make_checkpoint
from server import app
from nanobatch import Engine, Tokenizer
from models.load import read_model

folder = make_checkpoint(Path(sys.argv[1]), seed=1)
parts = read_model(folder), Tokenizer(folder, 272)
serve.load = lambda args, **how: Engine(*parts, slots=2, max_len=128)
WATCHED = {module.__file__ for module in (threading, serve, app)}
ended = 0
for at in map(int, sys.argv[2:]):
    server = serve.APIServer(serve.Options(port=0))
    lines = iter(range(10**9))
    second = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))

    def trace(frame, event, _):
        if frame.f_code.co_filename not in WATCHED:
            return None
        if event == "line" and server.models and next(lines) == at:
            sys.settrace(None)
            second.start()
            signal.raise_signal(signal.SIGINT)
        return trace

    sys.settrace(trace)
    code = serve.serve(server, serve.parse_arguments(["--port", "0"]))
    second.cancel()
    ended += code == 0
print(ended)
"""


def test_signal_at_any_line_ends_the_server(tmp_path):
    """Regression: at some lines of Python's own `wait`, Ctrl-C left its lock held, so that no other signal
    ended the server. At others the lock was released twice, and the exit code was 2."""
    lines = ["0", "4", "8", "20"]  # 20 was one of these lines
    done = run("-c", SIGNALS_AT_LINES, tmp_path / "model", *lines)
    assert (done.returncode, done.stdout) == (0, f"{len(lines)}\n"), done.stderr[-2000:]


HANGS = """
import sys, time
import serve
def say(text, is_last=True):
    if "/v1;" in text:
        time.sleep(600)
serve.say = say
sys.exit(serve.main(sys.argv[1:]))
"""


def test_second_signal_ends_a_blocked_server():
    """The server blocks while it prints, as when standard error is a full pipe that nobody reads."""
    (port,) = free_ports(1)
    command = [sys.executable, "-c", HANGS, "--port", str(port)]
    process = subprocess.Popen(command, cwd=ROOT)
    server = Server.__new__(Server)
    server.host, server.port = "127.0.0.1", port

    def is_up() -> bool:
        with contextlib.suppress(ConnectionRefusedError):
            return server.ask("/health").status == 200

    try:
        wait_for(is_up)
        process.send_signal(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.5)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()

"""`/v1/embeddings`, as OpenAI's clients use it."""

import base64
import math
import threading
from array import array
from collections.abc import Iterator

import numpy as np
import openai
import pytest
from parrot import Taught
from servers import CHAT
from waiting import wait_for

from engine.handle import Handle
from nanobatch import SamplingParams
from step_output import unit_vector

EMBED = SamplingParams(embeds=True)
PATH = "/v1/embeddings"
TEXTS = ["Why batch?", "What is a slot?", "Why batch?", "x" * 300]


@pytest.fixture(scope="module")
def here() -> Iterator[Taught]:
    with Taught(slots=2, max_len=512) as here:
        yield here


@pytest.fixture(scope="module")
def wanted(here) -> dict[str, list[float]]:
    """The vector of each text, as the engine computes it."""
    results = [here.parrot.engine.submit(text, EMBED).result(60) for text in TEXTS]
    return {text: unit_vector(result.vector) for text, result in zip(TEXTS, results, strict=True)}


def vectors(reply) -> list[list[float]]:
    assert reply.status == 200, reply.body
    data = reply.json["data"]
    assert [entry["index"] for entry in data] == list(range(len(data)))
    return [entry["embedding"] for entry in data]


def test_embeddings_in_order(here, wanted):
    reply = here.ask(PATH, {"input": TEXTS, "model": "parrot", "user": "anna"})
    assert vectors(reply) == [wanted[text].tolist() for text in TEXTS]
    body = reply.json
    tokens = sum(len(text) + 1 for text in TEXTS)  # each text and its BOS
    assert body["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
    assert (body["object"], body["model"]) == ("list", "parrot")
    assert vectors(here.ask(PATH, {"input": TEXTS[0]})) == [wanted[TEXTS[0]].tolist()]
    assert {*body} == {"object", "data", "model", "usage"}
    assert {*body["data"][0]} == {"object", "index", "embedding"}
    (written,) = vectors(here.ask(PATH, {"input": TEXTS[0], "encoding_format": "base64"}))
    assert [*array("f", base64.b64decode(written))] == wanted[TEXTS[0]].tolist()
    ids = list(here.parrot.engine.text.encode(TEXTS[1]))
    for given in (ids, [ids]):
        assert vectors(here.ask(PATH, {"input": given})) == [wanted[TEXTS[1]].tolist()]


def test_embeddings_with_the_openai_client(here, wanted):
    client = openai.OpenAI(base_url=f"{here.address}/v1", api_key="none", max_retries=0)
    found = client.embeddings.create(model="parrot", input=TEXTS)
    for text, entry in zip(TEXTS, found.data, strict=True):
        np.testing.assert_array_equal(np.float32(entry.embedding), np.float32(wanted[text]))
    short = client.embeddings.create(model="parrot", input=TEXTS[0], dimensions=8)
    first = np.array(wanted[TEXTS[0]][:8])
    np.testing.assert_allclose(short.data[0].embedding, first / np.linalg.norm(first), atol=1e-6)


def test_thousands_of_texts_leave_room_for_a_chat(here, wanted):
    """The texts of a request are queued a few at a time, so a chat does not wait for all of them."""
    loop, engine = here.parrot.loop, here.parrot.engine
    many = [TEXTS[n % 3] for n in range(150)]
    found = []
    asked = threading.Thread(target=lambda: found.append(here.ask(PATH, {"input": many})))
    loop.pause()
    asked.start()
    wait_for(lambda: engine.sched.waiting)
    in_line = len(engine.sched.waiting)
    loop.resume()
    chat = here.ask(CHAT, {"messages": [{"role": "user", "content": "say: 8."}]})
    open_then = asked.is_alive()
    asked.join()
    assert in_line <= 4 and chat.status == 200 and open_then
    assert vectors(found[0]) == [wanted[text].tolist() for text in many]


def test_finished_texts_make_room_for_the_rest(here, wanted, monkeypatch):
    """The next texts are submitted even if the first ones end before `submit` returns, when no further commit
    reports it."""
    submit = here.parrot.engine.submit

    def slow(*arguments, **options):
        handle = submit(*arguments, **options)
        handle.result(timeout=60)
        return handle

    monkeypatch.setattr(here.parrot.engine, "submit", slow)
    many = [TEXTS[n % 3] for n in range(15)]
    assert vectors(here.ask(PATH, {"input": many})) == [wanted[text].tolist() for text in many]


def test_full_queue_is_429_and_keeps_no_text(here, monkeypatch):
    monkeypatch.setattr(here.parrot.engine.sched, "max_queue", 1)
    here.parrot.loop.pause()
    try:
        assert here.ask(PATH, {"input": TEXTS * 3}).status == 429
    finally:
        here.parrot.loop.resume()
    assert here.is_idle()


def test_queue_full_later_is_429_too(here, monkeypatch):
    engine = here.parrot.engine
    submit = engine.submit
    count = iter(range(10**6))

    def fill(*arguments, **options):
        if next(count) == 6:
            monkeypatch.setattr(engine.sched, "max_queue", -100)
        return submit(*arguments, **options)

    monkeypatch.setattr(engine, "submit", fill)
    reply = here.ask(PATH, {"input": TEXTS * 50})
    assert reply.status == 429 and "max_queue" in reply.error["message"]
    monkeypatch.undo()
    assert here.is_idle() and len(vectors(here.ask(PATH, {"input": TEXTS}))) == 4


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "input is missing"),
        ({"input": ""}, "none of them empty"),
        ({"input": []}, "none of them empty"),
        ({"input": ["a", ""]}, "none of them empty"),
        ({"input": ["a", [1]]}, "none of them empty"),
        ({"input": {"text": "a"}}, "none of them empty"),
        ({"input": ["a"] * 2049}, "2,049 prompts, but at most 2,048 are allowed"),
        ({"input": [999_999]}, "outside the vocabulary"),
        ({"input": "x" * 600}, "maximum context length is 512"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "dimensions": 65}, "dimensions = 65"),
        ({"input": "a", "encoding_format": "int8"}, "float, base64"),
        ({"input": "a", "stream": True}, "stream = True is not supported"),
        ({"input": "a", "model": "gpt"}, "does not exist here"),
    ],
)
def test_unsupported_embedding_fields_are_refused(here, body, words):
    reply = here.ask(PATH, body)
    assert reply.status in (400, 404) and words in reply.error["message"], reply.body
    assert here.is_idle()


def test_model_without_embeddings_is_400(here, monkeypatch):
    monkeypatch.setattr(here.parrot.engine, "embeds", False)
    reply = here.ask(PATH, {"input": "a"})
    assert reply.status == 400
    assert "not made for embeddings: its folder has no 1_Pooling" in reply.error["message"]
    assert "--embeddings" in reply.error["message"]


def test_vector_with_nan_is_500(here, monkeypatch):
    """Regression: a list of NaN was returned with a 200, whereas a chat fails on the same text."""
    monkeypatch.setattr(
        Handle, "vector", property(lambda _: [1.0, math.nan], lambda *_: None), False
    )
    reply = here.ask(PATH, {"input": "a"})
    assert reply.status == 500 and "not finite" in reply.error["message"], reply.body


def test_hang_up_leaves_no_text_queued(here):
    here.parrot.loop.pause()
    line = here.line().post(PATH, {"input": TEXTS * 20})
    wait_for(lambda: here.parrot.engine.sched.waiting)
    line.hang_up()
    wait_for(lambda: not here.parrot.engine.has_work)
    here.parrot.loop.resume()
    assert here.is_idle()

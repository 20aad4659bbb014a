"""Structured output: response_format and vLLM's guided fields, with a real server process."""

import json
import re
import threading
from collections import Counter

import pytest
from hostile import HOSTILE, asked
from jsonschema import validate
from long_forms import IS_LONG
from processes import resident
from pydantic import BaseModel, Field
from servers import CHAT, COMPLETIONS

PET = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[A-Z][a-z]{1,9}$"},
        "age": {"type": "integer", "minimum": 0, "maximum": 30},
        "likes": {"type": "array", "items": {"enum": ["bones", "sleep"]}, "maxItems": 2},
    },
    "required": ["name", "age", "likes"],
    "additionalProperties": False,
}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "pet", "schema": PET, "strict": True}}


def say(**fields) -> dict:
    messages = [{"role": "user", "content": "Tell me a story about a dog."}]
    return {"messages": messages, "max_tokens": 300, "seed": 3, **fields}


@pytest.mark.parametrize("strict", [True, None])
def test_answer_follows_its_schema(server, strict):
    form = {"type": "json_schema", "json_schema": {"name": "pet", "schema": PET, "strict": strict}}
    reply = server.ask(CHAT, say(response_format=form, temperature=1))
    (choice,) = reply.json["choices"]
    assert choice["finish_reason"] == "stop"
    validate(json.loads(choice["message"]["content"]), PET)


def test_json_object(server):
    asked = say(response_format={"type": "json_object"}, max_tokens=60)
    (choice,) = server.ask(CHAT, asked).json["choices"]
    assert choice["message"]["content"].startswith("{")


@pytest.mark.parametrize(
    "field, value, pattern",
    [
        ("guided_json", {"type": "integer", "minimum": 5, "maximum": 7}, "[567]"),
        ("guided_json", '{"enum": ["x"]}', '"x"'),
        ("guided_regex", "[0-9]{2}[ab]", "[0-9]{2}[ab]"),
        ("guided_choice", ["yes", "no"], "yes|no"),
        ("guided_grammar", 'start: "(" /[a-c]{1,3}/ ")"', r"\([a-c]{1,3}\)"),
        ("structured_outputs", {"json": {"enum": ["x"]}}, '"x"'),
        ("structured_outputs", {"regex": "[0-9]{2}[ab]", "json": None}, "[0-9]{2}[ab]"),
        ("structured_outputs", {"choice": ["yes", "no"]}, "yes|no"),
        ("structured_outputs", {"grammar": 'start: "(" "a" ")"'}, r"\(a\)"),
        # llama.cpp's form of a schema
        ("response_format", {"type": "json_object", "schema": {"enum": ["x"]}}, '"x"'),
    ],
)
def test_fields_of_vllm_and_llama_cpp(server, field, value, pattern):
    for path, body in ((CHAT, say()), (COMPLETIONS, {"prompt": "A", "max_tokens": 40})):
        (choice,) = server.ask(path, body | {field: value}).json["choices"]
        text = choice["message"]["content"] if path == CHAT else choice["text"]
        assert re.fullmatch(pattern, text) and choice["finish_reason"] == "stop", text


@pytest.mark.parametrize(
    "fields, param, words",
    [
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}},
            "response_format",
            "Invalid type: x",
        ),
        ({"response_format": {"type": "yaml"}}, "response_format", "json_object"),
        ({"guided_regex": "(a"}, "guided_regex", "unclosed group"),
        ({"guided_choice": []}, "guided_choice", "must be"),
        ({"guided_grammar": "start: x"}, "guided_grammar", "unknown name"),
        ({"guided_json": {"type": "x"}}, "guided_json", "Invalid type: x"),
        ({"structured_outputs": {"regex": "(a"}}, "structured_outputs", "unclosed group"),
        ({"structured_outputs": {"json_object": True}}, "structured_outputs", "not supported"),
        ({"guided_regex": "a", "response_format": SCHEMA}, "response_format", "exclusive"),
        (
            {"structured_outputs": {"regex": "a"}, "guided_regex": "a"},
            "structured_outputs",
            "exclusive",
        ),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos", "grammar"),
    ],
)
def test_invalid_grammar_is_400(server, fields, param, words):
    reply = server.ask(CHAT, say(stream=True, **fields))
    assert (reply.status, reply.error["param"]) == (400, param), reply.body
    assert words in reply.error["message"] and "\n" not in reply.error["message"]


class Dog(BaseModel):
    name: str = Field(max_length=12)
    age: int = Field(ge=0, le=20)


@pytest.mark.filterwarnings("ignore:Pydantic serializer")  # the client's own, about `parsed`
def test_openai_client_parse(client):
    messages = say()["messages"]
    answer = client.chat.completions.parse(
        model="demo", messages=messages, response_format=Dog, max_tokens=100, seed=1
    )
    dog = answer.choices[0].message.parsed
    assert isinstance(dog, Dog) and 0 <= dog.age <= 20
    # The message, which contains the parsed object, is input for the next turn
    messages = [*messages, answer.choices[0].message, *messages]
    assert client.chat.completions.create(model="demo", messages=messages, max_tokens=1).choices


SOME = ["a large divisor", "1,500 that may be left out", "many ways to read it", "nested repeats"]
TRIED = sorted(HOSTILE) if IS_LONG else SOME


@pytest.mark.parametrize("name", TRIED)
def test_hostile_grammars_block_nobody(server, name):
    """Regression: four hostile schemas occupied all threads that parse bodies. Each grammar is spelled
    differently, so that no verdict comes from the cache."""
    plain = {"prompt": "Once upon a time", "max_tokens": 85, "ignore_eos": True, "temperature": 0}
    expected = server.ask(COMPLETIONS, plain).json["choices"][0]["text"]
    before, answers, is_over = resident(server.process.pid), Counter(), threading.Event()

    def attack(client: int) -> None:
        number = client
        while not is_over.is_set():
            number += 10
            parsed = {"prompt": "A story", "max_tokens": 85, **asked(name, number)}
            answers[server.ask(COMPLETIONS, parsed).status] += 1

    attackers = [threading.Thread(target=attack, args=(client,)) for client in range(5)]
    for thread in attackers:
        thread.start()
    for number in range(3):
        events = server.ask(COMPLETIONS, plain | {"stream": True}).events[:-1]
        assert "".join(event["choices"][0]["text"] for event in events) == expected
        small = {"type": "integer", "minimum": number}
        reply = server.ask(COMPLETIONS, plain | {"ignore_eos": False, "guided_json": small})
        assert reply.status == 200 and int(reply.json["choices"][0]["text"]) >= number
    is_over.set()
    for thread in attackers:
        thread.join()
    assert answers.total() and answers.keys() <= {200, 400, 503}
    assert resident(server.process.pid) - before < 200 * 2**20
    assert "Traceback" not in server.log.read_text()

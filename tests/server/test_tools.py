"""Tools and reasoning with other templates, hostile bodies, required calls, and random requests. The
protocols themselves are tested in `test_conformance.py`."""

import json

import openai
import pytest
from jsonschema import validate
from long_forms import number_of
from parrot import CALL, CALLS, FLAT, PARIS, SCHEMAS, TOOLS, Taught, said
from servers import CHAT, COUNT, MESSAGES, RESPONSES
from streams import ask
from tooluse import PATHS, check, random_ask

from text.tool_formats import HARMONY_ENDS, HARMONY_MARKS


@pytest.fixture(scope="module")
def taught():
    with Taught() as taught:
        yield taught


def test_openai_client_assembles_both_protocols(taught):
    """OpenAI's client reads fields of events that others ignore, and raises if one is missing."""
    client = openai.OpenAI(base_url=f"{taught.address}/v1", api_key="none", max_retries=0)
    text = f"say: <think>Easy.</think>I look.\n{CALLS}"
    both = {"model": "default", "parallel_tool_calls": True}
    with client.responses.stream(**both, input=text, tools=FLAT) as stream:
        kinds = [event.type for event in stream]
        output = stream.get_final_response().output
    assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
    names = ["reasoning", "message", "function_call", "function_call"]
    assert [item.type for item in output] == names and output[1].content[0].text == "I look."
    assert json.loads(output[2].arguments) == {"city": "Paris"}
    messages = [{"role": "user", "content": text}]
    with client.chat.completions.stream(**both, messages=messages, tools=TOOLS) as stream:
        assert sum(1 for _ in stream) > 5
        message = stream.get_final_completion().choices[0].message
    assert message.content == "I look." and len(message.tool_calls) == 2
    assert json.loads(message.tool_calls[0].function.arguments) == {"city": "Paris"}


# --- models with other formats --------------------------------------------------------------------

TURNS = """\
{%- for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content }}\
{% for call in message.tool_calls or [] %}CALL{% endfor %}{{ '<|im_end|>\\n' }}{% endfor %}\
{{ '<|im_start|>assistant\\n' }}"""
LISTED = "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
LLAMA = '{{ \'{"name": "\' + call.function.name + \'", "parameters": \' }}{{ call.function.arguments | tojson }}}'
MISTRAL = "[TOOL_CALLS]{{ call.function.name }}[ARGS]{{ call.function.arguments | tojson }}"
XML = "<tool_call><function={{ call.function.name }}></function></tool_call>"
TAGS = """<tool_call>
<function={{ call.function.name }}>
{% for key, value in call.function.arguments | items %}<parameter={{ key }}>
{{ value }}
</parameter>
{% endfor %}</function>
</tool_call>"""
GLM = """<tool_call>{{ call.function.name }}
{% for key, value in call.function.arguments | items %}<arg_key>{{ key }}</arg_key>
<arg_value>{{ value }}</arg_value>
{% endfor %}</tool_call>"""


def with_calls(written: str) -> str:
    return LISTED + TURNS.replace("CALL", written)


def test_unknown_tool_format_is_named():
    with Taught(template=with_calls(XML)) as server:
        reply = server.ask(CHAT, {"messages": [said("x")], "tools": TOOLS})
    assert (reply.status, reply.error["param"]) == (400, "tools")
    assert "<function=is_called>" in reply.error["message"]


def test_template_that_opens_reasoning():
    template = TURNS.replace("assistant\\n' }}", "assistant\\n<think>\\n' }}") + "{# </think> #}"
    with Taught(template=template) as taught:
        body = {"messages": [said("Hm.\n</think>\n\nYes.")]}
        message = taught.ask(CHAT, body).json["choices"][0]["message"]
        (request,) = taught.parrot.engine.snapshot().ended
    assert (message["reasoning_content"], message["content"]) == ("Hm.", "Yes.")
    assert request.is_thinking, "those who watch would take the thought for the answer"


def test_reasoning_can_be_enabled():
    """A model that does not reason by default can be told to in each protocol."""
    asleep = "{{ '<think>\\n' if enable_thinking else '<think></think>' }}{# </think> #}"
    with Taught(template=TURNS + asleep) as taught:

        def thinks(path: str, **fields) -> bool:
            body = {"messages": [said("Hm.</think>Yes.")], **fields}
            if path == RESPONSES:
                body["input"] = body.pop("messages")
            text = taught.ask(path, body).body.decode()
            assert "Yes." in text
            return "</think>" not in text

        assert not thinks(CHAT) and thinks(CHAT, chat_template_kwargs={"enable_thinking": True})
        for effort, is_thinking in ((None, False), ("none", False), ("low", True), ("high", True)):
            assert thinks(RESPONSES, reasoning={"effort": effort}) == is_thinking
        assert not thinks(RESPONSES) and not thinks(MESSAGES, max_tokens=99)
        for kind in ("enabled", "disabled", "adaptive"):
            is_thinking = thinks(MESSAGES, max_tokens=99, thinking={"type": kind})
            assert is_thinking == (kind == "enabled")


GPT_OSS = """<|start|>assistant to=functions.{{ call.function.name }}<|channel|>commentary json<|message|>\
{{ call.function.arguments | tojson }}<|call|>"""
AS_GPT_OSS = with_calls(GPT_OSS).replace(
    "{% for call", "{% if message.thinking %}[{{ message.thinking }}]{% endif %}{% for call"
)
AS_GPT_OSS += "{{ reasoning_effort }}{# <|channel|>analysis<|message|> #}"


GEMMA = """<|tool_call>call:{{ call.function.name }}{{ '{' }}\
{% for key, value in call.function.arguments | dictsort %}{{ key }}:{{ value }}{% endfor %}{{ '}' }}<tool_call|>"""


def test_call_of_gemma():
    marks = ["<|tool_call>", "<tool_call|>", '<|"|>']
    with Taught(template=with_calls(GEMMA), marks=marks) as server:
        asked = said('I look.<|tool_call>call:get_weather{city:<|"|>Paris<|"|>}<tool_call|>')
        choice = server.ask(CHAT, {"messages": [asked], "tools": TOOLS}).json["choices"][0]
        (call,) = choice["message"]["tool_calls"]
        assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", "I look.")
        assert json.loads(call["function"]["arguments"]) == PARIS


def test_messages_of_harmony():
    """gpt-oss ends its answer with one of two tokens, and its messages with a third."""
    marks = [*HARMONY_MARKS, *HARMONY_ENDS]
    thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    header = "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
    with Taught(template=AS_GPT_OSS, marks=marks) as server:
        asked = said(f'{thought}{header}{{"city": "Paris"}}<|call|><|start|>')
        choice = server.ask(CHAT, {"messages": [asked], "tools": TOOLS}).json["choices"][0]
        message = choice["message"]
        (call,) = message["tool_calls"]
        assert choice["finish_reason"] == "tool_calls"
        assert (message["reasoning_content"], message["content"]) == ("Hm.", None)
        assert json.loads(call["function"]["arguments"]) == PARIS
        asked = said(f"{thought}<|channel|>final<|message|>It is 8.<|return|>")
        body = {"messages": [asked], "stream": True}
        events = server.ask(CHAT, body).events[:-1]
        deltas = [event["choices"][0]["delta"] for event in events if event["choices"]]
        for name, text in (("reasoning_content", "Hm."), ("content", "It is 8.")):
            assert "".join(delta.get(name) or "" for delta in deltas) == text
        # The template expects the reasoning before a call under another name
        render = server.parrot.engine.text.render
        calls = [{"function": {"name": "get_weather", "arguments": PARIS}}]
        turn = {"role": "assistant", "content": "", "reasoning_content": "Hm.", "tool_calls": calls}
        assert "[Hm.]<|start|>assistant to=functions.get_weather" in render([said("x"), turn])
        tokens = []
        for effort in ("none", "high"):
            body = {"messages": [said("x")], "reasoning_effort": effort}
            tokens.append(server.ask(CHAT, body).json["usage"]["prompt_tokens"])
        assert tokens[1] - tokens[0] == len("high")


# --- other cases ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": [said("x")]}),
        (RESPONSES, {"input": "x"}),
        (MESSAGES, {"messages": [said("x")], "max_tokens": 9}),
    ],
)
def test_failed_stream_ends_with_an_error(taught, path, body, monkeypatch):
    engine = taught.parrot.engine

    def fail(*arguments):
        raise RuntimeError("the device is on fire")

    monkeypatch.setattr(engine.runner, "start_forward", fail)
    said = taught.ask(path, body | {"stream": True}).body.decode()
    monkeypatch.undo()
    assert "the device is on fire" in said
    assert 'finish_reason":"stop' not in said and "completed" not in said
    last = {CHAT: "[DONE]", RESPONSES: "response.failed", MESSAGES: "event: error"}
    assert last[path] in said.strip().split("\n\n")[-1]
    assert taught.ask(path, body).status == 200


def test_waiting_stream_reports_progress(taught):
    """Progress is sent in comments, which no client takes for events. Regression: a waiting stream sent
    nothing for minutes."""
    body = {"messages": [said("Yes.")], "stream": True}
    taught.parrot.loop.pause()
    line = taught.line().post(CHAT, body)
    assert b"/" in line.until(b": prompt 0/") + line.until(b"\n\n")
    taught.parrot.loop.resume()
    assert b"prompt_progress" not in line.until(b"[DONE]")


def test_waiting_stream_reports_its_position():
    with Taught(slots=1) as taught:
        taught.parrot.loop.pause()
        lines = []
        for _ in range(3):
            lines.append(taught.line().post(CHAT, {"messages": [said("Yes.")], "stream": True}))
            lines[-1].until(b"\r\n\r\n")
        assert lines[2].until(b" before you").endswith(b", 2 before you")
        taught.parrot.loop.resume()
        for line in lines:
            line.until(b"[DONE]")


def test_anthropic_thread_is_refused(taught):
    """Anthropic's tool runner tries `thread` first, and continues without it if it gets this error code."""
    body = {"messages": [said("Yes.")], "max_tokens": 9, "thread": {"type": "create"}}
    reply = taught.ask(MESSAGES, body)
    assert reply.status == 400 and "thread" in reply.error["message"]
    assert reply.error["details"]["error_code"] == "thread_unsupported_request"


DEEP = json.loads("[" * 200 + "]" * 200)
X = {"messages": [said("x")]}
HOSTILE = {
    CHAT: [
        X | {"tools": TOOLS * 65},
        X | {"tools": DEEP},
        X | {"tools": TOOLS, "tool_choice": DEEP},
        {"messages": [{"role": "assistant", "tool_calls": DEEP}]},
        {"messages": [{"role": "tool", "tool_call_id": {}, "content": "x"}]},
        X | {"x\n" * 900: 1},
        {"messages": [said("x") | {"x\n" * 900: 1}]},
    ],
    RESPONSES: [
        {"input": [{"type": DEEP}]},
        {"input": [{"type": {}, "role": {}}]},
        {"input": [{"role": "user", "content": "x"}] * 2049},
        {"input": [{"type": "reasoning", "content": 5}]},
        {"input": "x", "text": {"format": DEEP}},
        {"input": "x", "reasoning": 5},
        {"input": "x", "tools": FLAT, "tool_choice": {"type": {}}},
    ],
    MESSAGES: [
        {"messages": [{"role": "user", "content": [{"type": {}}]}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": {}}]}]},
        {"messages": [said("x")] * 2049},
        X | {"system": DEEP},
        X | {"thinking": DEEP},
        X | {"tools": SCHEMAS, "tool_choice": {"type": []}},
        X | {"stop_sequences": [""]},
    ],
}


@pytest.mark.parametrize(
    ("path", "body"), [(path, body) for path, bodies in HOSTILE.items() for body in bodies]
)
def test_hostile_bodies_are_refused(taught, path, body):
    reply = taught.ask(path, {"max_tokens": 9} | body if path == MESSAGES else body)
    assert reply.status == 400 and 0 < len(reply.error["message"]) < 700
    assert "\n" not in reply.error["message"] and len(reply.body) < 1000
    if path == MESSAGES:
        assert taught.ask(COUNT, body).status == 400 or "stop" in str(body)


def test_streamed_call_comes_piece_by_piece(taught):
    """A call's arguments are streamed, because they may be a whole file, for which a client would wait a
    minute."""
    text = CALL.replace("Paris", "Paris " * 20)
    events = taught.ask(CHAT, {"messages": [said(text)], "tools": TOOLS, "stream": True}).events
    # Neighbouring pieces may be merged
    assert sum("tool_calls" in str(event) for event in events) > 3


def test_call_ids_fit_every_template(taught):
    """Mistral's templates require ids of nine letters or digits."""
    body = {"messages": [said(CALLS)], "tools": TOOLS, "parallel_tool_calls": True}
    calls = taught.ask(CHAT, body).json["choices"][0]["message"]["tool_calls"]
    assert all(len(call["id"]) == 9 and call["id"].isalnum() for call in calls)


CUT = ("length", "max_tokens", "incomplete")
BARE = '{"name": "get_weather", "arguments": {"city": "Paris"}}'


def body_of(path: str, text: str, length: int = 300, **fields) -> dict:
    if path == RESPONSES:
        return {"input": f"say: {text}", "tools": FLAT, "max_output_tokens": length, **fields}
    tools = TOOLS if path == CHAT else SCHEMAS
    return {"messages": [said(text)], "tools": tools, "max_tokens": length, **fields}


@pytest.mark.parametrize("path", PATHS)
def test_unmarked_call_in_each_protocol(taught, path):
    """Regression: five agents each wrote the correct call in a code block, and stopped there because it was
    not recognized."""
    for text in (f"I look.\n\n{BARE}", f"I look.\n```json\n{BARE}\n```\nAnd so on."):
        body = body_of(path, text)
        found = ask(taught, path, body, False)
        assert found == ask(taught, path, body, True)
        assert found.text == "I look." and found.reason in ("tool_calls", "tool_use", "completed")
        ((name, given),) = found.calls
        assert name == "get_weather" and json.loads(given) == PARIS
    for text in (BARE.replace("get_weather", "get_wind"), f"It is {BARE}."):
        found = ask(taught, path, body_of(path, text), False)
        assert found.text == text and not found.calls


@pytest.mark.parametrize(
    ("path", "call"),
    [(CHAT, CALL), (RESPONSES, BARE), (MESSAGES, f"```json\n{BARE}\n```")],
    ids=["marked", "bare", "block"],
)
def test_truncated_call_is_no_content(taught, path, call):
    """Regression: the beginning of a truncated call was left in the content, as `<tool_call>\\n{"name": "`."""
    for length in range(9, len("I look.\n" + call) - 20, 19):
        body = body_of(path, f"I look.\n{call}", length)
        found = ask(taught, path, body, False)
        assert found == ask(taught, path, body, True)
        assert found.text == "I look." and len(found.calls) <= 1
        assert found.reason in CUT


# --- required calls -------------------------------------------------------------------------------

SIZE = {"type": "object", "properties": {"size": {"$ref": "#/$defs/S"}, "hot": {"type": "boolean"}}}
SIZE |= {"required": ["size", "hot"], "additionalProperties": False}
SIZE |= {"$defs": {"S": {"enum": ["small", "large {"]}}}
PICK = [
    {"type": "function", "function": {"name": name, "parameters": SIZE}} for name in ("tea", "mug")
]
HERMES = '<tool_call>{{ {"name": call.function.name, "arguments": call.function.arguments} | tojson }}</tool_call>'
OLD_MISTRAL = '[TOOL_CALLS][{{ {"name": call.function.name, "arguments": call.function.arguments} | tojson }}]'
THINKING = with_calls(HERMES).replace(
    "assistant\\n' }}", "assistant\\n<think>\\n' }}{# </think> #}"
)


@pytest.mark.parametrize(
    "template",
    map(with_calls, [HERMES, LLAMA, MISTRAL, OLD_MISTRAL, TAGS, GLM]),
    ids=["Hermes", "Llama 3", "Mistral", "older Mistral", "Qwen 3 Coder", "GLM"],
)
def test_required_call_always_comes(template):
    """A grammar forces the call, because a model with random weights never writes one on its own."""
    named = {"type": "function", "function": {"name": "mug"}}
    with Taught(template=template, is_taught=False) as server:
        for seed in range(4):
            names = ["mug"] if seed == 3 else ["tea", "mug"]
            body = {"messages": [said("x")], "tools": PICK, "seed": seed, "temperature": 9}
            body |= {"tool_choice": named if seed == 3 else "required"}
            body |= {"parallel_tool_calls": False, "max_tokens": 200}
            found = ask(server, CHAT, body, stream=seed % 2 == 1)
            assert found.reason == "tool_calls" and not found.text
            ((name, arguments),) = found.calls
            validate(json.loads(arguments), SIZE)
            assert name in names


HAS_MARKS = ["<tool_call>", "</tool_call>", "<think>", "</think>"]
ASKS = number_of("TOOLS", 6)


@pytest.mark.parametrize("marks", [(), HAS_MARKS], ids=["letters", "added"])
def test_random_requests_with_tools(marks):
    """Regression: Qwen's <tool_call> is an added token that is not special, so each required call was refused
    with a 400. NANOBATCH_TOOLS=1000 runs the long form."""
    with Taught(template=with_calls(HERMES), is_taught=False, marks=marks) as server:
        assert set(marks) <= set(server.parrot.engine.text.marks)
        complete = 0
        for seed in range(ASKS):
            found = check(server, random_ask(seed, max_tokens=250))
            complete += bool(found.calls) and found.reason not in CUT
        assert complete >= ASKS // 6


FIVE = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": [5]}}}
ONLY_FIVE = [
    {"response_format": FIVE},
    {"guided_choice": ["5"]},
    {"guided_regex": "5"},
    {"guided_grammar": 'start: SPACE\nSPACE: "5"'},  # a name that our own grammar has, too
]


def test_reasoning_can_end_under_a_grammar():
    """Regression: the mask forbade the token </think>, so reasoning went on until max_tokens."""
    with Taught(template=THINKING, is_taught=False, marks=HAS_MARKS) as server:
        end = server.parrot.engine.text.tokenizer.token_to_id("</think>")
        ask = {"messages": [said("x")], "max_tokens": 60, "logit_bias": {str(end): 20}}
        for fields in (*ONLY_FIVE, {"tools": PICK, "tool_choice": "required"}):
            answer = server.ask(CHAT, ask | fields).json
            message = answer["choices"][0]["message"]
            assert message["content"] == "5" or message["tool_calls"][0]["function"]["name"]
            assert message.get("reasoning_content", "").count("think") == 0
            usage = answer["usage"]
            thought = usage["completion_tokens_details"]["reasoning_tokens"]
            assert 0 < thought < usage["completion_tokens"]


TREE = {"type": "object", "properties": {"size": {"enum": ["s", "l"]}, "of": {"$ref": "#"}}}
TWICE = {"type": "object", "properties": {"a": {"enum": [1, 2]}, "b": {"$ref": "#/properties/a"}}}
AT_ONCE = {
    "$ref": "#/$defs/N",
    "$defs": {"N": {"type": "object", "properties": {"n": {"const": 5}}}},
}


@pytest.mark.parametrize(
    ("template", "schema"),
    [
        (HERMES, TREE),
        (HERMES, TWICE | {"required": ["a", "b"]}),
        (HERMES, AT_ONCE),
        (MISTRAL, TREE),
    ],
)
def test_recursive_schema_of_arguments(template, schema):
    """Regression: within a call's schema, "#" referred to the whole call. A recursive schema became an
    endless nesting of calls, and a reference to another field was refused with a 400."""
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    body = {"messages": [said("x")], "tools": tools, "tool_choice": "required", "max_tokens": 400}
    body |= {"parallel_tool_calls": False, "temperature": 1}
    with Taught(template=with_calls(template), is_taught=False) as server:
        for seed in range(5):
            found = ask(server, CHAT, body | {"seed": seed}, stream=False)
            if found.reason == "tool_calls":
                ((_, arguments),) = found.calls
                return validate(json.loads(arguments), {"type": "object", **schema})
        pytest.fail("no call is complete")


def test_reasoning_before_a_forced_answer():
    """The grammar applies only after the reasoning. Regression: a choice was written as the reasoning of a
    model whose prompt opens it, and the content was empty."""
    with Taught(template=THINKING, is_taught=False) as server:
        text = server.parrot.engine.text
        assert text.output_format.reasoning and text.encode_prompt([said("x")]).is_thinking
        ask = {"messages": [said("x")], "temperature": 0, "max_tokens": 30}
        for fields in ONLY_FIVE:  # its reasoning never ends
            message = server.ask(CHAT, ask | fields).json["choices"][0]["message"]
            assert message["content"] == "" and len(message["reasoning_content"]) > 5
        # Regression: the limit of 32,768 characters was applied to the translation, too
        choices = [f"{number:04}" for number in range(4000)]
        assert server.ask(CHAT, ask | {"guided_choice": choices}).status == 200
        large = {"guided_choice": choices * 3}
        for wrong in ({"guided_choice": [5]}, {"guided_regex": "(a"}, {"guided_json": "[]"}, large):
            reply = server.ask(CHAT, ask | wrong)
            assert (reply.status, reply.error["param"]) == (400, *wrong), reply.body


def test_unsupported_schema_of_arguments_is_refused(taught):
    wrong = {"type": "object", "properties": {"x": {"type": "number", "multipleOf": "no"}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": wrong}}]
    body = {"messages": [said("x")], "tools": tools, "tool_choice": "required"}
    reply = taught.ask(CHAT, body)
    assert reply.status == 400 and reply.error["param"] == "tools", reply


def test_invalid_form_in_other_protocols(taught):
    wrong = {"type": "json_schema", "name": "a", "schema": {"type": "number", "multipleOf": "no"}}
    for form in (wrong, {"type": "xml"}, {"type": "json_schema"}, 5):
        reply = taught.ask(RESPONSES, {"input": "x", "text": {"format": form}})
        assert (reply.status, reply.error["param"]) == (400, "text")
        body = {"messages": [said("x")], "max_tokens": 99, "output_config": {"format": form}}
        assert taught.ask(MESSAGES, body).status == 400


def test_oversized_tools_are_refused_before_the_template(taught, monkeypatch):
    """Regression: template and tokenizer took seconds for 4 MB of tools."""
    asked = []
    monkeypatch.setattr(taught.parrot.engine.text, "encode_prompt", asked.append)
    function = {"name": "f", "description": "x" * 1_000_000}
    body = {"messages": [said("x")], "tools": [{"type": "function", "function": function}]}
    assert taught.ask(CHAT, body).error["code"] == "context_length_exceeded" and not asked
    calls = [{"id": "1", "function": {"name": "f", "arguments": "{}"}}] * 3000
    body = {"messages": [{"role": "assistant", "tool_calls": calls}]}
    assert "3,001" in taught.ask(CHAT, body).error["message"] and not asked

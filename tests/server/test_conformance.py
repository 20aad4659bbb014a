"""Chat with tools and reasoning, Responses, Messages and Embeddings follow their protocols.

The tests were written from the protocols' documentation, before the code. The model answers what the
prompt tells it to (`tests/lib/parrot.py`).
"""

import json
import re

import pytest
from openai.types.responses import Response
from parrot import CALL, CALLS, FLAT, PARIS, SCHEMAS, THOUGHT, TOOLS, Taught, said
from parrot import IN_TAGS as TEMPLATE
from servers import (
    CHAT,
    COMPLETIONS,
    COUNT,
    MESSAGES,
    RESPONSES,
    Reply,
    Server,
)
from streams import ask, streamed_message

from server import anthropic
from server.body_reader import BodyReader

SEVERAL = {"type": "auto", "disable_parallel_tool_use": False}


@pytest.fixture(scope="module")
def server():
    with Taught() as server:
        yield server


@pytest.fixture(scope="module")
def tagged():
    """A server whose template writes calls as XML tags."""
    with Taught(template=TEMPLATE) as server:
        yield server


def refused(reply: Reply, status: int = 400, *words: str) -> dict:
    assert reply.status == status, reply
    error = reply.error
    missing = [word for word in words if word not in error["message"]]
    assert not missing, (missing, error)
    return error


# --- chat: tools ----------------------------------------------------------------------------------


def chat(server: Server, text: str = CALL, **fields) -> Reply:
    return server.ask(CHAT, {"messages": [said(text)], "tools": TOOLS, "max_tokens": 400, **fields})


def choice(reply: Reply) -> dict:
    assert reply.status == 200, reply
    return reply.json["choices"][0]


def deltas(reply: Reply) -> list[dict]:
    events = reply.events
    assert events.pop() == "[DONE]"
    return [event["choices"][0]["delta"] for event in events if event["choices"]]


def test_call_is_a_tool_calls_entry(server):
    found = choice(chat(server))
    assert found["finish_reason"] == "tool_calls"
    message = found["message"]
    assert message["role"] == "assistant" and message["content"] is None
    (call,) = message["tool_calls"]
    assert set(call) == {"id", "type", "function"} and call["type"] == "function" and call["id"]
    assert call["function"]["name"] == "get_weather"
    assert json.loads(call["function"]["arguments"]) == PARIS


def test_one_call_unless_parallel_calls_are_requested(server):
    for fields in ({}, {"parallel_tool_calls": False}):
        whole = chat(server, CALLS, **fields)
        assert len(choice(whole)["message"]["tool_calls"]) == 1
        assert choice(whole)["finish_reason"] == "tool_calls"
        assert whole.json["usage"]["completion_tokens"] < len(CALLS) - 20, "it goes on calling"


def test_answer_without_a_call_has_no_tool_calls(server):
    found = choice(chat(server, "No."))
    assert found["finish_reason"] == "stop" and "tool_calls" not in found["message"]


def test_streamed_call_is_head_then_arguments(server):
    first, *rest = deltas(chat(server, stream=True))
    assert first["role"] == "assistant"
    calls = [delta["tool_calls"][0] for delta in rest if delta.get("tool_calls")]
    assert calls[0]["index"] == 0 and calls[0]["type"] == "function" and calls[0]["id"]
    assert calls[0]["function"] == {"name": "get_weather", "arguments": ""}
    assert len(calls) > 1 and all(set(call) == {"index", "function"} for call in calls[1:])
    assert json.loads("".join(call["function"]["arguments"] for call in calls)) == PARIS
    assert not any(delta.get("content") for delta in rest)


def test_streamed_calls_have_two_indices(server):
    found = deltas(chat(server, CALLS, stream=True, parallel_tool_calls=True))
    calls = [delta["tool_calls"][0] for delta in found if "tool_calls" in delta]
    begun = [(call["index"], call["function"]["name"]) for call in calls if "id" in call]
    assert begun == [(0, "get_weather"), (1, "get_time")]


def test_stream_equals_whole_answer(server):
    text = f"{THOUGHT}I look.\n{CALLS}"
    whole = choice(chat(server, text))["message"]
    found = deltas(chat(server, text, stream=True))
    assert "".join(d.get("content") or "" for d in found) == whole["content"] == "I look."
    reasoning = "".join(d.get("reasoning_content") or "" for d in found)
    assert reasoning == whole["reasoning_content"] == "It is easy."


def conversation(**changes) -> list[dict]:
    function = {"name": "get_weather", "arguments": '{"city": "Paris"}'}
    call = {"id": "call_1", "type": "function", "function": function}
    assistant = {"role": "assistant", "content": None, "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "call_1", "content": "17 degrees"}
    return [said(CALL), assistant | changes.get("assistant", {}), result | changes.get("tool", {})]


def test_tool_result_in_chat(server):
    parts = [{"type": "text", "text": "17 "}, {"type": "text", "text": "degrees"}]
    own = {"content": "I look.", "reasoning_content": "It is easy.", "refusal": None}
    for changes in ({}, {"tool": {"content": parts}}, {"assistant": own}):
        body = {"messages": conversation(**changes), "tools": TOOLS}
        message = choice(server.ask(CHAT, body))["message"]
        assert message["content"] == "The tool says: 17 degrees"


def test_history_with_invalid_arguments(server):
    """Regression: once a model had written arguments that are not JSON, all later turns got a 400. vLLM shows
    the template {}; here the model sees its own text."""

    def ask_after(arguments):
        function = {"name": "get_weather", "arguments": arguments}
        call = {"id": "call_1", "type": "function", "function": function}
        messages = conversation(assistant={"tool_calls": [call]})
        return server.ask(CHAT, {"messages": messages, "tools": TOOLS})

    def tokens(arguments):
        return ask_after(arguments).json["usage"]["prompt_tokens"]

    for text in ("{", "5", '"x"', "no JSON"):
        assert tokens(text) == tokens({"arguments": text})
    assert tokens('{"city": "a\nb"}') == tokens({"city": "a\nb"})
    assert tokens("") == tokens("null") == tokens({})
    for arguments in (5, None, ["x"]):
        refused(ask_after(arguments), 400, "arguments")


def test_tool_result_without_an_id_is_refused(server):
    messages = conversation(tool={"tool_call_id": None})
    refused(server.ask(CHAT, {"messages": messages, "tools": TOOLS}), 400, "tool_call_id")


def test_tool_choice_none(server):
    found = choice(chat(server, tool_choice="none"))
    assert found["finish_reason"] == "stop" and "get_weather" in found["message"]["content"]


def test_invalid_tool_choice_is_refused(server):
    unknown = {"type": "function", "function": {"name": "nothing"}}
    for wrong in ("always", 5, {"type": "function"}, unknown):
        assert (
            refused(chat(server, tool_choice=wrong), 400, "tool_choice")["param"] == "tool_choice"
        )


def test_tool_choice_required_needs_tools(server):
    refused(server.ask(CHAT, {"messages": [said("x")], "tool_choice": "required"}), 400, "tools")


def test_invalid_tools_are_refused(server):
    wrong = [5, [5], [{"type": "function"}], [{"type": "function", "function": {"name": "a b"}}]]
    wrong.append([{"type": "function", "function": {"name": "a", "parameters": 5}}])
    wrong.append([{"type": "function", "function": {"name": ""}}])
    wrong.append([{"type": "web_search"}])
    for kind in ("string", ["object", "null"]):
        wrong.append(
            [{"type": "function", "function": {"name": "a", "parameters": {"type": kind}}}]
        )
    for tools in wrong:
        assert refused(chat(server, tools=tools), 400, "tools")["param"] == "tools", tools


def test_tool_without_parameters_and_strict(server):
    tools = [{"type": "function", "function": {"name": "now", "strict": True}}]
    assert choice(chat(server, "No.", tools=tools))["message"]["content"] == "No."


def test_each_choice_has_its_calls(server):
    choices = chat(server, n=2).json["choices"]
    ids = {each["message"]["tool_calls"][0]["id"] for each in choices}
    assert len(ids) == 2 and {each["index"] for each in choices} == {0, 1}


# --- chat: reasoning and progress -----------------------------------------------------------------


def test_reasoning_content(server):
    for tools in ([], TOOLS):
        message = choice(chat(server, f"{THOUGHT}Yes.", tools=tools))["message"]
        assert (message["reasoning_content"], message["content"]) == ("It is easy.", "Yes.")


def test_names_of_reasoning_in_messages(server):
    """vLLM and Ollama have other names for reasoning. A client may send two with the same text."""

    def length(**own) -> int:
        turns = [said("x"), {"role": "assistant", "content": "Yes.", **own}, said("Yes.")]
        reply = server.ask(CHAT, {"messages": turns})
        assert reply.status == 200, reply
        return reply.json["usage"]["prompt_tokens"]

    plain = length(reasoning_content="It is easy.")
    assert plain > length()
    assert length(reasoning="It is easy.") == length(thinking="It is easy.") == plain
    assert length(reasoning="It is easy.", reasoning_content="It is easy.") == plain


def test_reasoning_is_streamed_before_content(server):
    found = deltas(chat(server, f"{THOUGHT}Yes.", tools=[], stream=True))
    kinds = [next(iter(delta)) for delta in found[1:] if any(delta.values())]
    assert len(kinds) > 1 and kinds == sorted(kinds, reverse=True)
    assert set(kinds) == {"reasoning_content", "content"}


def test_usage_counts_reasoning_tokens(server):
    body = f"{THOUGHT}Yes."
    usage = chat(server, body, tools=[]).json["usage"]
    assert usage["completion_tokens_details"]["reasoning_tokens"] == len(THOUGHT) - 2
    events = chat(
        server, body, tools=[], stream=True, stream_options={"include_usage": True}
    ).events
    assert events[-2]["usage"]["completion_tokens_details"] == usage["completion_tokens_details"]


def test_reasoning_can_be_disabled(server):
    plain = chat(server, "Yes.", tools=[]).json["usage"]["prompt_tokens"]
    options = {"enable_thinking": False}
    reply = chat(server, "Yes.", tools=[], chat_template_kwargs=options)
    assert reply.json["usage"]["prompt_tokens"] == plain + len("<think>\n\n</think>\n\n")


def test_log_probabilities_cover_reasoning_and_calls(server):
    text = f"{THOUGHT}Yes."
    found = choice(chat(server, text, tools=[], logprobs=True))["logprobs"]["content"]
    assert "".join(token["token"] for token in found) == text


def test_return_progress(server):
    for path, prompt in ((CHAT, {"messages": [said("Yes.")]}), (COMPLETIONS, {"prompt": "x" * 99})):
        options = {"return_progress": True, "stream": True, "max_tokens": 4}
        options |= {"stream_options": {"include_usage": True}}
        events = server.ask(path, prompt | options).events
        found = [event["prompt_progress"] for event in events if "prompt_progress" in event]
        assert found and all(set(p) == {"total", "cache", "processed", "time_ms"} for p in found)
        assert found[-1]["processed"] == found[-1]["total"]
        assert found[0]["total"] == events[-2]["usage"]["prompt_tokens"]
        counts = [p["processed"] for p in found]
        assert counts == sorted(counts) and found[-1]["time_ms"] >= 0
    refused(chat(server, return_progress=True), 400, "stream")


# --- Responses ------------------------------------------------------------------------------------


def respond(server: Server, text: str = "Yes.", **fields) -> Reply:
    return server.ask(RESPONSES, {"model": "default", "input": f"say: {text}", **fields})


def output(reply: Reply) -> list[dict]:
    assert reply.status == 200, reply
    return reply.json["output"]


def test_response_object(server):
    body = respond(server).json
    assert body["object"] == "response" and body["id"].startswith("resp_")
    assert body["status"] == "completed" and body["error"] is body["incomplete_details"] is None
    (message,) = body["output"]
    assert (message["type"], message["role"]) == ("message", "assistant")
    assert message["status"] == "completed" and message["id"].startswith("msg_")
    (part,) = message["content"]
    assert (part["type"], part["text"], part["annotations"]) == ("output_text", "Yes.", [])


def test_response_repeats_the_request(server):
    options = {"instructions": "Be kind.", "temperature": 0.5, "top_p": 0.9}
    options |= {"max_output_tokens": 99, "metadata": {"a": "b"}, "tools": FLAT}
    body = respond(server, **options).json
    for name in ("instructions", "temperature", "top_p", "max_output_tokens", "metadata"):
        assert body[name] == options[name], name
    assert [tool["name"] for tool in body["tools"]] == ["get_weather", "get_time"]
    assert body["tool_choice"] == "auto" and body["parallel_tool_calls"] is False
    assert body["previous_response_id"] is None and body["store"] is False
    assert body["truncation"] == "disabled" and body["text"]["format"] == {"type": "text"}


def items(server: Server, *given: dict, **fields) -> Reply:
    return server.ask(RESPONSES, {"model": "default", "input": [*given], **fields})


def test_input_items(server):
    parts = [{"type": "input_text", "text": "say: "}, {"type": "input_text", "text": "Yes."}]
    for content in ("say: Yes.", parts):
        for kind in ({}, {"type": "message"}):
            reply = items(server, kind | {"role": "user", "content": content})
            assert output(reply)[0]["content"][0]["text"] == "Yes."


def test_output_items_as_input(server):
    first = output(respond(server, f"{THOUGHT}Yes."))
    last = {"role": "user", "content": "say: Again."}
    reply = items(server, {"role": "developer", "content": "x"}, said("Yes."), *first, last)
    assert output(reply)[0]["content"][0]["text"] == "Again."


def test_instructions_are_in_the_prompt(server):
    plain = respond(server).json["usage"]["input_tokens"]
    assert respond(server, instructions="Be kind.").json["usage"]["input_tokens"] > plain + 8


def test_reasoning_message_and_two_calls_are_four_items(server):
    found = output(
        respond(server, f"{THOUGHT}I look.\n{CALLS}", tools=FLAT, parallel_tool_calls=True)
    )
    kinds = ["reasoning", "message", "function_call", "function_call"]
    assert [item["type"] for item in found] == kinds
    assert len({item["id"] for item in found}) == 4
    assert found[2]["call_id"] != found[3]["call_id"]


def test_function_call_output_in_responses(server):
    (call,) = output(respond(server, CALL, tools=FLAT))
    for value in ("17 degrees", [{"type": "input_text", "text": "17 degrees"}]):
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": value}
        reply = items(server, said(CALL), call, result, tools=FLAT)
        assert output(reply)[0]["content"][0]["text"] == "The tool says: 17 degrees"


def test_reasoning_item(server):
    item, message = output(respond(server, f"{THOUGHT}Yes."))
    assert item["type"] == "reasoning" and item["summary"] == [] and item["id"].startswith("rs_")
    assert item["content"] == [{"type": "reasoning_text", "text": "It is easy."}]
    assert message["content"][0]["text"] == "Yes."


def test_response_has_the_required_fields(server):
    """Regression: `cache_write_tokens` was missing, which OpenAI's client requires if it checks strictly."""
    text = f"{THOUGHT}I look.\n{CALL}"
    Response.model_validate(respond(server, text, tools=FLAT).json)
    last = respond(server, text, tools=FLAT, stream=True).events[-1]
    assert last["type"] == "response.completed"
    Response.model_validate(last["response"])


def test_truncated_response_is_incomplete(server):
    body = respond(server, "A long answer.", max_output_tokens=4).json
    events = respond(server, "A long answer.", max_output_tokens=4, stream=True).events
    assert events[-1]["type"] == "response.incomplete"
    for found in (body, events[-1]["response"]):
        assert found["status"] == found["output"][0]["status"] == "incomplete"
        assert found["incomplete_details"] == {"reason": "max_output_tokens"}


def test_stored_state_is_refused(server):
    refused(respond(server, previous_response_id="resp_1"), 400, "previous_response_id")
    refused(respond(server, conversation="conv_1"), 400, "conversation")
    refused(respond(server, background=True), 400, "background")
    reference = {"type": "item_reference", "id": "msg_1"}
    refused(items(server, reference), 400, "item_reference", "set store to false")


def test_store_is_accepted_and_answered_with_false(server):
    """Nothing is stored, and the response says so."""
    assert respond(server, store=True).json["store"] is False
    events = respond(server, store=True, stream=True).events
    assert events[0]["response"]["store"] is events[-1]["response"]["store"] is False


def test_neutral_values_are_accepted(server):
    neutral = {"store": False, "previous_response_id": None, "truncation": "disabled"}
    neutral |= {"include": ["reasoning.encrypted_content"], "prompt_cache_key": "x"}
    neutral |= {"prompt_cache_options": {"mode": "explicit", "ttl": "30m"}}
    neutral |= {"client_metadata": {"x-codex-window-id": "x"}}
    neutral |= {"reasoning": None, "text": {"format": {"type": "text"}}, "user": "me", "tools": []}
    neutral |= {"parallel_tool_calls": True, "tool_choice": "auto", "stream_options": None}
    assert respond(server, **neutral).status == 200


def test_unsupported_fields_of_responses_are_refused(server):
    refused(respond(server, tools=[{"type": "web_search"}]), 400, "web_search")
    refused(respond(server, truncation="auto"), 400, "truncation")
    refused(respond(server, include=["file_search_call.results"]), 400, "include")
    refused(respond(server, max_tool_calls=3), 400, "max_tool_calls")
    image = {"type": "input_image", "image_url": "data:"}
    refused(items(server, {"role": "user", "content": [image]}), 400, "input_image")
    refused(items(server, {"type": "computer_call"}), 400, "computer_call")


def test_invalid_input_is_refused(server):
    for wrong in (None, 5, [], [5], [{}], [{"role": "wizard", "content": "x"}]):
        refused(server.ask(RESPONSES, {"model": "default", "input": wrong}), 400, "input")
    refused(items(server, {"type": "function_call_output", "output": "x"}), 400, "call_id")


def test_unknown_names_in_responses(server):
    assert refused(respond(server, model="gpt-5"), 404)["code"] == "model_not_found"
    wrong = {"type": "function", "name": "nothing"}
    refused(respond(server, tools=FLAT, tool_choice=wrong), 400, "tool_choice")
    assert server.ask("/v1/responses/resp_1").status == 404


def test_tool_choice_none_in_responses(server):
    assert output(respond(server, CALL, tools=FLAT, tool_choice="none"))[0]["type"] == "message"


TEXT = ["content_part.added", "output_text.delta", "output_text.done", "content_part.done"]
TEXT = ["created", "in_progress", "output_item.added", *TEXT, "output_item.done", "completed"]


def once(events: list[dict]) -> list[str]:
    """Return the types of the events without `response.`, with repetitions collapsed."""
    kinds = [event["type"].removeprefix("response.") for event in events]
    return [kind for kind, before in zip(kinds, [None, *kinds], strict=False) if kind != before]


def test_streamed_response_events(server):
    events = respond(server, stream=True).events
    assert once(events) == TEXT
    assert [event["sequence_number"] for event in events] == list(range(len(events)))


def test_streamed_text_joins_to_the_item(server):
    events = respond(server, "Count to three.", stream=True).events
    text = "".join(e["delta"] for e in events if e["type"] == "response.output_text.delta")
    by_type = {event["type"].removeprefix("response."): event for event in events}
    assert text == by_type["output_text.done"]["text"] == "Count to three."
    assert by_type["content_part.done"]["part"]["text"] == text
    item = by_type["output_item.done"]["item"]
    assert item["content"][0]["text"] == text and item["status"] == "completed"
    last = by_type["completed"]["response"]
    assert last["output"] == [item] and last["usage"]["output_tokens"] > 0
    assert by_type["created"]["response"]["status"] == "in_progress"
    assert by_type["created"]["response"]["id"] == last["id"]
    delta = by_type["output_text.delta"]
    assert (delta["item_id"], delta["output_index"], delta["content_index"]) == (item["id"], 0, 0)


def test_streamed_function_call(server):
    events = respond(server, CALL, tools=FLAT, stream=True).events
    kinds = ["created", "in_progress", "output_item.added", "function_call_arguments.delta"]
    kinds += ["function_call_arguments.done", "output_item.done", "completed"]
    assert once(events) == kinds
    added = events[2]["item"]
    assert added["type"] == "function_call" and added["arguments"] == ""
    assert added["status"] == "in_progress" and added["name"] == "get_weather"
    arguments = "".join(e["delta"] for e in events if e["type"].endswith("arguments.delta"))
    done = next(e for e in events if e["type"].endswith("arguments.done"))
    assert done["arguments"] == arguments and json.loads(arguments) == PARIS
    item = events[-1]["response"]["output"][0]
    assert (item["id"], item["call_id"]) == (added["id"], added["call_id"])


# --- Messages -------------------------------------------------------------------------------------


def message(server: Server, text: str = "Yes.", path: str = MESSAGES, **fields) -> Reply:
    body = {"model": "default", "max_tokens": 300, "messages": [said(text)]}
    headers = {"anthropic_version": "2023-06-01", "anthropic_beta": "x"}
    return server.ask(path, body | fields, **headers)


def content(reply: Reply) -> list[dict]:
    assert reply.status == 200, reply
    return reply.json["content"]


def test_message_object(server):
    body = message(server).json
    assert (body["type"], body["role"]) == ("message", "assistant")
    assert body["id"].startswith("msg_") and body["model"]
    assert body["content"] == [{"type": "text", "text": "Yes."}]
    assert (body["stop_reason"], body["stop_sequence"]) == ("end_turn", None)
    assert body["usage"]["output_tokens"] == 5 and body["usage"]["input_tokens"] >= 1


def test_cached_tokens_are_counted_separately(server):
    usages = [message(server, "The same again.").json["usage"] for _ in range(2)]
    sums = [u["input_tokens"] + u["cache_read_input_tokens"] for u in usages]
    assert sums[0] == sums[1] and usages[1]["cache_read_input_tokens"] > 0


def test_system_as_text_or_blocks(server):
    block = {"type": "text", "text": "Be kind.", "cache_control": {"type": "ephemeral"}}
    counts = []
    for system in ("Be kind.", [block]):
        counts.append(message(server, path=COUNT, system=system).json["input_tokens"])
    assert counts[0] == counts[1] > message(server, path=COUNT).json["input_tokens"] + 8


def claude_code(version: str, question: str) -> dict:
    """Return a conversation's first request as Claude Code sends it. The version ends with a hash of the
    question."""
    texts = [
        f"x-anthropic-billing-header: cc_version=2.1.197.{version}; cc_entrypoint=sdk-cli; cch=00000;",
        "You are a Claude agent, built on Anthropic's Claude Agent SDK.",
        "\nYou are an interactive agent that helps users with software engineering tasks.\n\n"
        "# Tone and style\nOnly use emojis if the user explicitly requests it.",
    ]
    reminder = "<system-reminder>\nToday's date is 2026-11-20.\n</system-reminder>\n"
    blocks = [{"type": "text", "text": text} for text in (reminder, f"say: {question}")]
    system = [{"type": "text", "text": text} for text in texts]
    system[1]["cache_control"] = system[2]["cache_control"] = {"type": "ephemeral"}
    agents = {"role": "system", "content": "Available agent types for the Agent tool:\n- claude"}
    messages = [{"role": "user", "content": blocks}, agents]
    return {"model": "default", "max_tokens": 99, "system": system, "messages": messages}


def test_second_conversation_of_claude_code_reads_only_what_is_new(server):
    """Regression: the first block of Claude Code's system prompt differs in each conversation, so everything
    after it was prefilled again. So was the system message that follows the first question."""
    first, second = claude_code("c8b", "Yes."), claude_code("4f0", "No.")
    server.ask(MESSAGES, first)
    usage = server.ask(MESSAGES, second).json["usage"]
    text = server.parrot.engine.text
    prompts = []
    for body in (first, second):
        chat = anthropic.parse_request(BodyReader(body)).prompts[0]
        prompts.append(text.encode_prompt(chat, 4096).ids)
    alike = [one == other for one, other in zip(*prompts, strict=False)]
    common = alike.index(False)
    assert usage["cache_read_input_tokens"] == common
    assert usage["input_tokens"] == len(prompts[1]) - common < common / 4
    assert "Available agent types" in text.tokenizer.decode(prompts[0][:common])


def test_only_the_first_question_changes_places_with_the_system():
    """Later system messages keep their places, because they may refer to the messages before them."""
    roles = ["user", "system", "system", "assistant", "user", "system"]
    messages = [{"role": role, "content": f"{n}"} for n, role in enumerate(roles)]
    body = {"model": "default", "max_tokens": 9, "system": "x", "messages": messages}
    chat = anthropic.parse_request(BodyReader(body)).prompts[0]
    assert "".join(message["content"] for message in chat.messages) == "x120345"


def test_request_is_called_by_its_last_user(server):
    """Regression: Claude Code ends with a system message ("Available agent types ..."), so all its requests
    were shown with the same text."""
    system = {"role": "system", "content": "Available agent types: none."}
    message(server, messages=[said("Yes."), said("No."), system])
    assert server.parrot.engine.snapshot().ended[-1].prompt == "say: No."


def test_attribution_is_dropped_only_from_the_first_system_block(server):
    line, *rules = claude_code("c8b", "Yes.")["system"]
    counts = [
        message(server, path=COUNT, system=system).json["input_tokens"]
        for system in (rules, [line, *rules], [*rules, line], [line, line], line["text"])
    ]
    assert counts[0] == counts[1] and counts[2] > counts[0] + 40
    assert counts[3] == counts[4] > message(server, path=COUNT).json["input_tokens"] + 40
    user = message(server, path=COUNT, messages=[{"role": "user", "content": [line]}])
    assert user.json["input_tokens"] > 40
    assert message(server, path=COUNT, system=[line]).status == 200
    refused(message(server, system=[line | {"text": 5}, *rules]), 400, "system[0].text")


def test_content_as_blocks(server):
    blocks = [{"type": "text", "text": "say: "}, {"type": "text", "text": "Yes."}]
    blocks[1]["cache_control"] = {"type": "ephemeral"}
    reply = message(server, messages=[{"role": "user", "content": blocks}])
    assert content(reply)[0]["text"] == "Yes."


def test_tool_use_block(server):
    reply = message(server, f"I look.\n{CALL}", tools=SCHEMAS)
    text, use = content(reply)
    assert text == {"type": "text", "text": "I look."}
    assert set(use) == {"type", "id", "name", "input"} and use["type"] == "tool_use"
    assert (use["name"], use["input"]) == ("get_weather", PARIS)
    assert reply.json["stop_reason"] == "tool_use"


def test_tool_use_with_infinity_is_valid_json(server):
    """Python writes NaN and Infinity, which other JSON parsers reject."""
    for number in ("NaN", "1e999"):
        reply = message(server, CALL.replace('"Paris"', number), tools=SCHEMAS)
        assert b"NaN" not in reply.body and b"Infinity" not in reply.body
        assert content(reply)[0]["input"] == {}


def with_result(**result) -> list[dict]:
    use = {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": PARIS}
    block = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "17 degrees"} | result
    assistant = {"role": "assistant", "content": [{"type": "text", "text": "I look."}, use]}
    return [said(CALL), assistant, {"role": "user", "content": [block]}]


def test_tool_result_block(server):
    parts = [{"type": "text", "text": "17 degrees"}]
    for result in ({}, {"content": parts}, {"is_error": True}):
        reply = message(server, messages=with_result(**result), tools=SCHEMAS)
        assert content(reply) == [{"type": "text", "text": "The tool says: 17 degrees"}]


def test_empty_tool_result_with_text(server):
    reply = message(server, messages=with_result(content=None), tools=SCHEMAS)
    assert reply.status == 200
    messages = with_result()
    messages[2]["content"].append({"type": "text", "text": "say: And you?"})
    assert content(message(server, messages=messages, tools=SCHEMAS))[0]["text"] == "And you?"


def test_max_tokens_is_required_in_messages(server):
    reply = message(server, max_tokens=None)
    refused(reply, 400, "max_tokens")
    assert reply.json["type"] == "error" and reply.error["type"] == "invalid_request_error"


def test_stop_reasons_of_messages(server):
    assert message(server, max_tokens=2).json["stop_reason"] == "max_tokens"
    body = message(server, "One, two, three.", stop_sequences=["four", ", thr"]).json
    assert (body["stop_reason"], body["stop_sequence"]) == ("stop_sequence", ", thr")
    assert body["content"][0]["text"] == "One, two"


def test_thinking_block(server):
    thinking, text = content(message(server, f"{THOUGHT}Yes."))
    assert thinking["type"] == "thinking" and thinking["thinking"] == "It is easy."
    assert "signature" in thinking and text["text"] == "Yes."


def test_streamed_thinking_is_signed_as_the_whole_block(server):
    """A signature comes right before the end. AI SDK drops reasoning without one."""
    reply = message(server, f"{THOUGHT}Yes.", stream=True)
    assert streamed_message(reply)["content"] == content(message(server, f"{THOUGHT}Yes."))
    types = [e["delta"]["type"] for e in reply.events if e["type"] == "content_block_delta"]
    assert types.count("signature_delta") == 1
    assert types[types.index("signature_delta") - 1] == "thinking_delta"


def test_thinking_blocks_as_input(server):
    first = content(message(server, f"{THOUGHT}Yes."))
    messages = [said("x"), {"role": "assistant", "content": first}, said("Again.")]
    assert content(message(server, messages=messages))[0]["text"] == "Again."


def test_thinking_enabled_or_disabled(server):
    plain = message(server, path=COUNT).json["input_tokens"]
    enabled = {"type": "enabled", "budget_tokens": 1024}
    assert message(server, path=COUNT, thinking=enabled).json["input_tokens"] == plain
    disabled = message(server, path=COUNT, thinking={"type": "disabled"}).json["input_tokens"]
    assert disabled == plain + len("<think>\n\n</think>\n\n")
    refused(message(server, thinking={"type": "later"}), 400, "thinking")


def test_streamed_message_events(server):
    reply = message(server, stream=True)
    events = [event for event in reply.events if event["type"] != "ping"]
    kinds = ["message_start", "content_block_start", "content_block_delta"]
    kinds += ["content_block_stop", "message_delta", "message_stop"]
    assert once(events) == kinds
    assert re.findall(rb"event: (\w+)", reply.body)[0] == b"message_start"
    start = events[0]["message"]
    assert start["content"] == [] and start["stop_reason"] is None
    assert start["usage"]["input_tokens"] > 0
    assert events[-2]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert events[-2]["usage"]["output_tokens"] == 5


def test_streamed_call_is_partial_json(server):
    fields = {"tools": SCHEMAS, "tool_choice": SEVERAL, "stream": True}
    events = message(server, f"I look.\n{CALLS}", **fields).events
    begun = [e for e in events if e["type"] == "content_block_start"]
    ended = [e["index"] for e in events if e["type"] == "content_block_stop"]
    assert [e["index"] for e in begun] == ended == [0, 1, 2]
    use = begun[1]["content_block"]
    assert (use["type"], use["name"], use["input"]) == ("tool_use", "get_weather", {})
    found = [e for e in events if e["type"] == "content_block_delta" and e["index"] == 1]
    assert {e["delta"]["type"] for e in found} == {"input_json_delta"}
    assert json.loads("".join(e["delta"]["partial_json"] for e in found)) == PARIS
    assert events[-2]["delta"]["stop_reason"] == "tool_use"


def test_tool_choice_in_messages(server):
    for kind in ("auto", {"type": "always"}, {"type": "tool", "name": "x"}):
        refused(message(server, tools=SCHEMAS, tool_choice=kind), 400, "tool_choice")
    none = message(server, CALL, tools=SCHEMAS, tool_choice={"type": "none"})
    assert content(none)[0]["type"] == "text"
    single = {"type": "auto", "disable_parallel_tool_use": True}
    for fields in ({}, {"tool_choice": {"type": "auto"}}, {"tool_choice": single}):
        assert len(content(message(server, CALLS, tools=SCHEMAS, **fields))) == 1
    assert len(content(message(server, CALLS, tools=SCHEMAS, tool_choice=SEVERAL))) == 2


def test_unsupported_blocks_and_tools_are_refused(server):
    image = {"type": "image", "source": {}}
    refused(message(server, messages=[{"role": "user", "content": [image]}]), 400, "image")
    search = {"type": "web_search_20250305", "name": "web_search"}
    refused(message(server, tools=[search]), 400, "web_search_20250305")
    refused(message(server, container="x"), 400, "container")
    refused(message(server, mcp_servers=[{"url": "x"}]), 400, "mcp_servers")


def test_invalid_messages_are_refused(server):
    use = {"type": "tool_use", "id": "x", "name": "get_weather", "input": 5}
    result = {"type": "tool_result", "content": "x"}
    wrong = [None, 5, [], [5], [{"role": "wizard", "content": "x"}], [{"role": "user"}]]
    wrong += [[{"role": "assistant", "content": [use]}], [{"role": "user", "content": [result]}]]
    wrong += [[said("x"), {"role": "assistant", "content": "It is"}]]  # a prefilled answer
    for messages in wrong:
        refused(message(server, messages=messages), 400, "message")


def test_neutral_values_are_accepted_in_messages(server):
    neutral = {"metadata": {"user_id": "x"}, "service_tier": "auto", "stop_sequences": []}
    neutral |= {"temperature": 1.0, "top_k": 5, "top_p": 0.9, "stream": False, "tools": []}
    # As Claude Code sends it
    keep = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
    neutral |= {"output_config": {"effort": "high"}, "context_management": keep}
    neutral |= {"cache_control": {"type": "ephemeral"}}
    neutral |= {"messages": [said("Yes."), {"role": "system", "content": "x"}, said("Yes.")]}
    assert message(server, **neutral, path=f"{MESSAGES}?beta=true").status == 200


def test_unknown_model_is_404_in_messages(server):
    reply = message(server, model="claude-sonnet-4-5")
    refused(reply, 404, "claude-sonnet-4-5")
    assert reply.error["type"] == "not_found_error"


def test_count_tokens(server):
    usage = message(server, "Count me.", tools=SCHEMAS).json["usage"]
    body = {"model": "default", "messages": [said("Count me.")], "tools": SCHEMAS}
    count = server.ask(COUNT, body).json
    assert count == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}


def test_oversized_message_is_counted(server):
    """Agents search the error for Anthropic's words to shorten the conversation, and need the number."""
    long = [said("x" * 5000)]
    count = message(server, path=COUNT, messages=long).json["input_tokens"]
    assert count > 5000
    most = server.ask("/v1/models").json["data"][0]["max_model_len"] - 1
    reply = message(server, messages=long)
    refused(reply, 400, f"prompt is too long: {count} tokens > {most} maximum", "--max-len")
    assert reply.error["type"] == "invalid_request_error"


# --- names and penalties --------------------------------------------------------------------------


def test_model_names(server):
    (listed,) = server.ask("/v1/models").json["data"]
    assert listed["max_model_len"] > 0 and listed["quantization"] == "float32"
    for name in (listed["id"], "default"):
        assert server.ask(f"/v1/models/{name}").json == listed
    refused(server.ask("/v1/models/gpt-5"), 404, "gpt-5")


# --- calls in tags, as Qwen 3 Coder writes them ---------------------------------------------------

LINES = 'One line,\n a < b, "two" </parameter> and a\\n.\n'
IN_TAGS = f"""<tool_call>
<function=write>
<parameter=text>
{LINES}
</parameter>
<parameter=times>
3
</parameter>
<parameter=of>
{{"deep": [1, true]}}
</parameter>
<parameter=on>
True
</parameter>
</function>
</tool_call>"""
WRITTEN = {"text": LINES, "times": 3, "of": {"deep": [1, True]}, "on": True}
KINDS = {"text": "string", "times": "integer", "of": "object", "on": "boolean"}
WRITE = {"type": "object", "properties": {name: {"type": kind} for name, kind in KINDS.items()}}
WRITE |= {"required": ["times", "on"]}
WRITES = {"name": "write", "description": "It writes.", "parameters": WRITE}


def test_tagged_arguments_have_the_schema_types(tagged):
    tools = [{"type": "function", "function": WRITES}]
    body = {"messages": [said(f"I write.\n{IN_TAGS}\n{IN_TAGS}")], "max_tokens": 999}
    for stream in (False, True):
        found = ask(tagged, CHAT, body | {"tools": tools, "parallel_tool_calls": True}, stream)
        assert found.text == "I write."
        assert [json.loads(given) for _, given in found.calls] == [WRITTEN, WRITTEN]


def test_tagged_call_in_messages(tagged):
    tools = [{"name": "write", "description": "It writes.", "input_schema": WRITE}]
    thinking = {"type": "enabled", "budget_tokens": 1024}
    first = content(message(tagged, THOUGHT + IN_TAGS, tools=tools, thinking=thinking))
    assert [block["type"] for block in first] == ["thinking", "tool_use"]
    assert first[1]["input"] == WRITTEN
    result = {"type": "tool_result", "tool_use_id": first[1]["id"], "content": "done"}
    turns = [said(IN_TAGS), {"role": "assistant", "content": first}]
    turns.append({"role": "user", "content": [result]})
    again = content(message(tagged, messages=turns, tools=tools, thinking=thinking))
    assert again == [{"type": "text", "text": "The tool says: done"}]

"""OpenAI's Responses: what a body asks for, and the events of the answer.

    POST /v1/responses   {"model": "default", "input": "Why batch?"}

The problem. An answer is a list of *items* here: a thought, a message, calls of functions. A stream
tells of each item that it is added, how it grows, and that it is done.

    response.created  in_progress
    response.output_item.added      content_part.added  output_text.delta ...  output_text.done  content_part.done
    response.output_item.done
    response.completed              the whole response once more

What this file keeps. The server remembers nothing: a conversation comes whole each time. What would
need a memory (`previous_response_id`, `store`) is refused. A body is understood completely, as in
`openai.py`.

Where next: `messages.py`, the same in Anthropic's words.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from door.protocol import (
    Refusal,
    Said,
    Speaks,
    Usage,
    Wish,
    bad,
    boolean,
    call_of,
    check_length,
    check_model,
    choose_tools,
    named_event,
    new_id,
    number,
    read_json,
    read_schema,
    read_text,
    read_tools,
    refuse_what_cannot_be_kept,
)
from parts.checks import shown
from parts.text.speech import Part
from parts.text.tokens import Chat

PLAIN = ("temperature", "top_p")
KNOWN = {
    *PLAIN,
    "model",
    "input",
    "instructions",
    "max_output_tokens",
    "parallel_tool_calls",
    "reasoning",
    "stream",
    "text",
    "tool_choice",
    "tools",
}
NEUTRAL = {
    "include": (["reasoning.encrypted_content"],),  # thoughts come as they are
    "service_tier": ("auto", "default"),
    "stream_options": ({"include_obfuscation": False},),
    "truncation": ("disabled",),
}
# What needs a memory, which this server has not
MEMORY = ("previous_response_id", "store", "conversation", "background")
TEXTS = ("input_text", "output_text", "text")
ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}


# --- what a body asks for -----------------------------------------------------------------------


def understand(body: bytes, names: Sequence[str]) -> Wish:
    asked = {name: value for name, value in read_json(body).items() if value is not None}
    for name in MEMORY:
        if asked.get(name):
            words = f"{name} = {shown(asked[name])} needs a memory, and this server keeps nothing"
            words += "; leave it out, and send the whole conversation as input"
            raise Refusal(400, words, "unsupported_parameter", name)
    refuse_what_cannot_be_kept(asked, KNOWN | set(MEMORY), NEUTRAL)
    check_model(asked.get("model", names[0]), names)
    kind = asked.get("tool_choice", "auto")
    name = None
    if isinstance(kind, dict):
        name = kind.get("name")
        kind = kind.get("type")
    tools, must_call = choose_tools(read_tools(asked.get("tools")), kind, name)
    parallel = asked.get("parallel_tool_calls") is None or boolean(asked, "parallel_tool_calls")
    most = "max_output_tokens"
    return Wish(
        [Chat(read_input(asked), tools, hints=read_reasoning(asked))],
        settings={name: asked[name] for name in PLAIN if name in asked} | read_format(asked),
        max_tokens=number(asked, most, 1, 2**63 - 1) if most in asked else None,
        stream=boolean(asked, "stream"),
        must_call=must_call,
        is_single=not parallel,
        asked=asked,
    )


def read_reasoning(asked: dict[str, Any]) -> dict[str, Any]:
    """`effort` is a hint, and so is what a summary should be like: thoughts are told whole."""
    reasoning = asked.get("reasoning", {})
    if not isinstance(reasoning, dict):
        raise bad("reasoning", reasoning, "an object")
    effort = reasoning.get("effort")
    return {} if effort is None else {"enable_thinking": effort != "none"}


def read_format(asked: dict[str, Any]) -> dict[str, Any]:
    text = asked.get("text", {})
    if not isinstance(text, dict):
        raise bad("text", text, "an object")
    schema = read_schema("text", text.get("format"), None)
    return {} if schema is None else {"grammar": {"json": schema}}


def read_input(asked: dict[str, Any]) -> list[dict]:
    """The items of a conversation as messages."""
    messages = []
    instructions = asked.get("instructions")
    if instructions:
        text = read_text("instructions", instructions, "instructions", TEXTS)
        messages.append({"role": "system", "content": text})
    items = asked.get("input")
    if isinstance(items, str):
        return [*messages, {"role": "user", "content": items}]
    check_length("input", items, "content")
    for i, item in enumerate(items):
        place = f"input[{i}]"
        if not isinstance(item, dict):
            raise bad(place, item, "an item, which is an object", "input")
        read_item(place, item, messages)
    return messages


def read_item(place: str, item: dict, messages: list[dict]) -> None:
    """A thought, a message and calls that follow each other are one message of a template."""
    kind = item.get("type", "message")
    if kind == "message":
        role = item.get("role")
        if not isinstance(role, str) or role not in ROLES:
            raise bad(f"{place}.role", role, f"one of {', '.join(ROLES)}", "input")
        text = read_text(place, item.get("content"), "input", TEXTS)
        if role == "assistant":
            own = own_message(messages, "content")
            own["content"] = text
        else:
            messages.append({"role": ROLES[role], "content": text})
    elif kind == "reasoning":
        parts = item.get("content") or item.get("summary") or ""
        text = read_text(place, parts, "input", ("reasoning_text", "summary_text"))
        own_message(messages, "reasoning_content")["reasoning_content"] = text
    elif kind == "function_call":
        call = call_of(place, item.get("call_id"), item.get("name"), item.get("arguments"))
        own_message(messages, "").setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        id = item.get("call_id")
        if not isinstance(id, str):
            raise bad(f"{place}.call_id", id, "the id of a call", "input")
        text = read_text(place, item.get("output"), "input", TEXTS)
        messages.append({"role": "tool", "tool_call_id": id, "content": text})
    else:
        words = f"{place} is of type {shown(kind)}, which is not supported here"
        raise Refusal(400, words, "unsupported_content", "input")


def own_message(messages: list[dict], field: str) -> dict:
    """The assistant's message that an item belongs to. `field`: it must not have one yet."""
    last = messages[-1] if messages else {}
    is_open = last.get("role") == "assistant" and not last.get(field)
    if not is_open or (field and "tool_calls" in last):
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


# --- the bodies of the answer -------------------------------------------------------------------

# For each kind of a part: the events of a text, and the type of the item's part that has it
TEXT_EVENTS = {"answer": "output_text", "thought": "reasoning_text"}


class Shape:
    """One response. Its items grow as parts of the answer come; a whole answer grows the same
    way, and nobody hears the events."""

    def __init__(self, wish: Wish, number: int, suffix: str, model: str):
        self.id = f"resp_{number}_{suffix}"
        self._own = f"{number}_{suffix}"
        self._asked = wish.asked
        self._model = model
        self._created = int(time.time())
        self._sent = 0  # so many events
        self._items: list[dict] = []
        self._kind = ""  # of the open item; empty if there is none
        self._text: list[str] = []  # of the open item
        self._reason = ""

    def first(self, choices: int, usage: Usage) -> bytes:
        body = self._body("in_progress")
        return self._event("created", response=body) + self._event("in_progress", response=body)

    def part(self, index: int, part: Part, words: Any = None) -> bytes:
        if part.kind == "call":
            return self._close("completed") + self._open("arguments", part.text)
        said = b""
        if part.kind != self._kind:
            said = self._close("completed") + self._open(part.kind)
        self._text.append(part.text)
        return said + self._tell("delta", delta=part.text)

    def last(self, index: int, reason: str, stop: str | None) -> bytes:
        self._reason = reason
        return self._close("incomplete" if reason == "length" else "completed")

    def close(self, usage: Usage) -> bytes:
        status = "incomplete" if self._reason == "length" else "completed"
        return self._event(status, response=self._body(status, usage))

    def fail(self, refusal: Refusal) -> bytes:
        body = self._body("failed")
        body["error"] = {"code": "server_error", "message": refusal.message}
        return self._event("failed", response=body)

    def whole(self, choices: Sequence[Said], usage: Usage) -> dict:
        (said,) = choices
        for part in said.parts:
            self.part(0, part)
        self.last(0, said.reason, said.stop)
        return self._body("incomplete" if said.reason == "length" else "completed", usage)

    # --- items

    def _open(self, kind: str, name: str = "") -> bytes:
        """Add an item. `name`: of the function that it calls."""
        self._kind = kind
        self._text = []
        own = f"{self._own}_{len(self._items)}"
        if kind == "arguments":
            item = {"type": "function_call", "id": f"fc_{own}", "call_id": new_id(), "name": name}
            item["arguments"] = ""
        elif kind == "thought":
            item = {"type": "reasoning", "id": f"rs_{own}", "summary": [], "content": []}
        else:
            item = {"type": "message", "id": f"msg_{own}", "role": "assistant", "content": []}
        item["status"] = "in_progress"
        self._items.append(item)
        said = self._event("output_item.added", **self._place("output_index"), item=item)
        if kind in TEXT_EVENTS:
            said += self._tell_part("added")
        return said

    def _close(self, status: str) -> bytes:
        if not self._kind:
            return b""
        text = "".join(self._text)
        item = self._items[-1]
        if self._kind in TEXT_EVENTS:
            said = self._tell("done", text=text) + self._tell_part("done")
            grown = {"content": [self._content()]}
        else:
            said = self._tell("done", arguments=text, name=item["name"])
            grown = {"arguments": text}
        item = self._items[-1] = item | grown | {"status": status}
        self._kind = ""
        return said + self._event("output_item.done", **self._place("output_index"), item=item)

    def _content(self) -> dict:
        text = {"type": TEXT_EVENTS[self._kind], "text": "".join(self._text)}
        return text | ({"annotations": [], "logprobs": []} if self._kind == "answer" else {})

    # --- events

    def _place(self, *names: str) -> dict:
        """Where an event belongs."""
        last = len(self._items) - 1
        place = {"item_id": self._items[-1]["id"], "output_index": last, "content_index": 0}
        return {name: place[name] for name in names}

    def _tell(self, what: str, **fields: Any) -> bytes:
        """Of the open item's text or arguments."""
        if self._kind not in TEXT_EVENTS:
            place = self._place("item_id", "output_index")
            return self._event(f"function_call_arguments.{what}", **place, **fields)
        place = self._place("item_id", "output_index", "content_index")
        if self._kind == "answer":
            place["logprobs"] = []
        return self._event(f"{TEXT_EVENTS[self._kind]}.{what}", **place, **fields)

    def _tell_part(self, what: str) -> bytes:
        place = self._place("item_id", "output_index", "content_index")
        return self._event(f"content_part.{what}", **place, part=self._content())

    def _event(self, kind: str, **fields: Any) -> bytes:
        body = {"type": f"response.{kind}", "sequence_number": self._sent, **fields}
        self._sent += 1
        return named_event(body)

    def _body(self, status: str, usage: Usage | None = None) -> dict:
        asked = self._asked
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"}
            if status == "incomplete"
            else None,
            "instructions": asked.get("instructions"),
            "max_output_tokens": asked.get("max_output_tokens"),
            "metadata": asked.get("metadata", {}),
            "model": self._model,
            "output": self._items,
            "parallel_tool_calls": asked.get("parallel_tool_calls", True),
            "previous_response_id": None,
            "reasoning": asked.get("reasoning", {"effort": None, "summary": None}),
            "store": False,
            "temperature": asked.get("temperature"),
            "text": asked.get("text", {"format": {"type": "text"}}),
            "tool_choice": asked.get("tool_choice", "auto"),
            "tools": asked.get("tools", []),
            "top_p": asked.get("top_p"),
            "truncation": "disabled",
            "usage": usage and written(usage),
        }


def written(usage: Usage) -> dict:
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.cached},
        "output_tokens": usage.answer,
        "output_tokens_details": {"reasoning_tokens": usage.thought},
        "total_tokens": usage.prompt + usage.answer,
    }


RESPONSES = Speaks(lambda body, names: understand(body, names), Shape, "text")

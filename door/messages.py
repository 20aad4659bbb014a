"""Anthropic's Messages: what a body asks for, and the events of the answer.

    POST /v1/messages                {"model": "default", "max_tokens": 99, "messages": [...]}
    POST /v1/messages/count_tokens   how many tokens that would be

The problem. A message is a list of *blocks* here: text, thinking, the use of a tool. The result of
a tool is a block in the user's next message. A stream tells of each block that it starts, how it
grows, and that it stops.

    message_start  content_block_start  content_block_delta ...  content_block_stop  message_delta  message_stop

What this file keeps. A body is understood completely, as in `openai.py`. Errors have Anthropic's
form.

Where next: `bridge.py`, the way of a request to the engine and back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from door.choice import Change, Choice, Item
from door.protocol import (
    Refusal,
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
    number,
    read_json,
    read_schema,
    read_stop,
    read_text,
    read_tools,
    refuse_what_cannot_be_kept,
)
from parts.text.speech import loads
from parts.text.tokens import Chat

PLAIN = ("temperature", "top_p", "top_k")
KNOWN = {
    *PLAIN,
    "max_tokens",
    "messages",
    "model",
    "output_config",
    "stop_sequences",
    "stream",
    "system",
    "thinking",
    "tool_choice",
    "tools",
}
KEEP = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
NEUTRAL = {"service_tier": ("auto", "standard_only"), "context_management": (KEEP,)}
THINKING = ("enabled", "adaptive", "disabled")
# How Anthropic calls what others call "none", "auto", "required" and "function"
CHOICES = {"none": "none", "auto": "auto", "any": "required", "tool": "function"}
REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
ERRORS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}


def error(refusal: Refusal) -> dict:
    kind = ERRORS.get(refusal.status, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": refusal.message}}


# --- what a body asks for -----------------------------------------------------------------------


def understand(body: bytes, names: Sequence[str], is_count: bool = False) -> Wish:
    """`is_count`: nothing is to be answered, so a length need not be given."""
    asked = {name: value for name, value in read_json(body).items() if value is not None}
    refuse_what_cannot_be_kept(asked, KNOWN, NEUTRAL)
    check_model(asked.get("model", names[0]), names)
    if "max_tokens" not in asked and not is_count:
        raise bad("max_tokens", None, "the most tokens of an answer")
    choice = asked.get("tool_choice", {"type": "auto"})
    if not isinstance(choice, dict):
        raise bad("tool_choice", choice, "an object with a type")
    kind = choice.get("type")
    kind = CHOICES.get(kind) if isinstance(kind, str) else None
    tools = read_tools(asked.get("tools"), schema="input_schema", type="custom")
    tools, must_call = choose_tools(tools, kind, choice.get("name"))
    settings = {name: asked[name] for name in PLAIN if name in asked}
    settings["stop"] = read_stop(asked.get("stop_sequences", []), "stop_sequences")
    config = asked.get("output_config", {})  # beside a schema it has an effort, which is a hint
    if not isinstance(config, dict):
        raise bad("output_config", config, "an object")
    schema = read_schema("output_config", config.get("format"), None)
    if schema is not None:
        settings["grammar"] = {"json": schema}
    return Wish(
        [Chat(read_messages(asked), tools, hints=read_thinking(asked))],
        settings=settings,
        max_tokens=number(asked, "max_tokens", 1, 2**63 - 1) if "max_tokens" in asked else None,
        stream=boolean(asked, "stream"),
        must_call=must_call,
        is_single=boolean(choice, "disable_parallel_tool_use", "tool_choice"),
    )


def read_thinking(asked: dict[str, Any]) -> dict[str, Any]:
    """How long a thought may be is a hint."""
    thinking = asked.get("thinking", {"type": "adaptive"})
    kind = thinking.get("type") if isinstance(thinking, dict) else None
    if kind not in THINKING:
        raise bad("thinking", thinking, f"an object whose type is one of {', '.join(THINKING)}")
    return {} if kind == "adaptive" else {"enable_thinking": kind == "enabled"}


def read_messages(asked: dict[str, Any]) -> list[dict]:
    found = []
    if system := asked.get("system"):
        found.append({"role": "system", "content": read_text("system", system, "system")})
    messages = asked.get("messages")
    check_length("messages", messages, "content")
    for i, message in enumerate(messages):
        place = f"messages[{i}]"
        role = message.get("role") if isinstance(message, dict) else None
        if role not in ("user", "assistant", "system"):
            raise bad(f"{place}.role", role, "user, assistant or system", "messages")
        content = message.get("content")
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if not isinstance(blocks, list) or not all(isinstance(block, dict) for block in blocks):
            raise bad(f"{place}.content", content, "a text or a list of blocks", "messages")
        if role == "system":
            found.append({"role": role, "content": read_text(place, blocks, "messages")})
        else:
            found += read_own(place, blocks) if role == "assistant" else read_user(place, blocks)
    if found[-1]["role"] == "assistant":
        words = "the last message is the assistant's, but an answer cannot be begun by the client"
        raise Refusal(400, words, "unsupported_content", "messages")
    return found


def read_user(place: str, blocks: list[dict]) -> list[dict]:
    """Results of tools are messages of their own, and stand before what the user says."""
    results = []
    texts = []
    for block in blocks:
        if block.get("type") != "tool_result":
            texts.append(block)
            continue
        id = block.get("tool_use_id")
        if not isinstance(id, str):
            raise bad(f"{place}: tool_use_id", id, "the id of a tool_use", "messages")
        text = read_text(place, block.get("content") or "", "messages")
        results.append({"role": "tool", "tool_call_id": id, "content": text})
    if texts or not results:
        results.append({"role": "user", "content": read_text(place, texts, "messages")})
    return results


def read_own(place: str, blocks: list[dict]) -> list[dict]:
    """What the assistant has thought, said, and called."""
    texts = []
    message: dict[str, Any] = {"role": "assistant"}
    for block in blocks:
        kind = block.get("type")
        if kind == "thinking":
            thought = read_text(place, block.get("thinking"), "messages")
            message["reasoning_content"] = message.get("reasoning_content", "") + thought
        elif kind == "tool_use":
            call = call_of(place, block.get("id"), block.get("name"), block.get("input"))
            message.setdefault("tool_calls", []).append(call)
        elif kind != "redacted_thinking":
            texts.append(block)
    return [message | {"content": read_text(place, texts, "messages")}]


# --- the bodies of the answer -------------------------------------------------------------------

# For each kind of item: the type of its block's delta, and its field
DELTAS = {
    "answer": ("text_delta", "text"),
    "thought": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}


class Message:
    """The bodies of one answer."""

    def __init__(self, wish: Wish, number: int, suffix: str, model: str):
        self.id = f"msg_{number}_{suffix}"
        self._model = model
        self._end: dict[str, str | None] = {"stop_reason": None, "stop_sequence": None}

    def whole(self, choices: Sequence[Choice], usage: Usage) -> dict:
        self.last(0, choices[0])
        return self._message([block(item) for item in choices[0].items], usage)

    def first(self, choices: int, usage: Usage) -> bytes:
        return named_event({"type": "message_start", "message": self._message([], usage)})

    def tell(self, index: int, change: Change) -> bytes:
        kind, item, text, _ = change
        told = {"type": f"content_block_{kind}", "index": item.place}
        if kind == "start":
            told["content_block"] = block(item)
        if kind == "delta":
            type, field = DELTAS[item.kind]
            told["delta"] = {"type": type, field: text}
        return named_event(told)

    def last(self, index: int, choice: Choice) -> bytes:
        self._end = ended(choice)
        return b""

    def close(self, usage: Usage) -> bytes:
        delta = {"type": "message_delta", "delta": self._end, "usage": written(usage)}
        return named_event(delta) + named_event({"type": "message_stop"})

    def fail(self, refusal: Refusal) -> bytes:
        return named_event(error(refusal))

    def _message(self, blocks: list[dict], usage: Usage) -> dict:
        head = {"id": self.id, "type": "message", "role": "assistant", "model": self._model}
        return head | {"content": blocks, **self._end, "usage": written(usage)}


def block(item: Item) -> dict:
    """An item, as far as it has come."""
    if item.kind == "answer":
        return {"type": "text", "text": item.text}
    if item.kind == "thought":
        # A signature would prove that the thought is the model's own, and nobody checks it here
        return {"type": "thinking", "thinking": item.text, "signature": ""}
    given = loads(item.text)
    given = given if isinstance(given, dict) else {}  # what was cut off is no object
    return {"type": "tool_use", "id": item.id, "name": item.name, "input": given}


def ended(choice: Choice) -> dict[str, str | None]:
    stop = choice.handle.stop
    if stop is not None and choice.reason == "stop":
        return {"stop_reason": "stop_sequence", "stop_sequence": stop}
    return {"stop_reason": REASONS[choice.reason], "stop_sequence": None}


def written(usage: Usage) -> dict:
    """What was cached is not counted among the input."""
    return {
        "input_tokens": usage.prompt - usage.cached,
        "cache_read_input_tokens": usage.cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage.answer,
    }


MESSAGES = Speaks(lambda body, names: understand(body, names), Message, "output_config")
COUNT = Speaks(lambda body, names: understand(body, names, is_count=True), Message, "")

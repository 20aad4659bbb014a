"""OpenAI's protocol: what a request's body asks for, and the bodies of the answers.

The problem. Every client speaks this protocol, and each in its own way. Some send a field as null
and mean that it is not there, some send wishes that ask for nothing (`"presence_penalty": 0`,
`"tools": []`), and some send wishes that we cannot fulfil. A client that gets an answer to another
question than its own does not notice.

What this file keeps. A body is understood completely, or refused with a status, a message and the
field's name. No field is ignored if it asks for something. Nothing here knows sockets or engines:
dictionaries in, dictionaries out.

Where next: `bridge.py`, which reads and writes them.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from typing import Any, ClassVar

from door.choice import Change, Choice, Item, Word
from door.protocol import (
    Progress,
    Refusal,
    Speaks,
    Usage,
    Wish,
    bad,
    boolean,
    call_of,
    check_count,
    check_length,
    check_model,
    choose_tools,
    dump,
    event,
    number,
    read_json,
    read_schema,
    read_stop,
    read_text,
    read_tools,
    refuse_what_cannot_be_kept,
)
from parts.text.tokens import Chat

ROLES = ("system", "developer", "user", "assistant", "tool")
# The most of each in one request
N, CHOICES, BIASES, TOP = 16, 128, 1000, 20

# These go to `Sampling` as they are, and it checks them.
PLAIN = ("temperature", "top_p", "top_k", "min_p", "seed", "repetition_penalty", "ignore_eos")
KNOWN = {
    *PLAIN,
    "model",
    "stream",
    "stream_options",
    "max_tokens",
    "max_completion_tokens",
    "n",
    "stop",
    "logprobs",
    "logit_bias",
    "return_progress",
}
# What an answer must be: a name of vLLM's, and what `Sampling.grammar` calls it.
GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "lark",
}
KNOWN |= {"response_format", *GUIDED}
OF_CHAT = {
    *KNOWN,
    "messages",
    "top_logprobs",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "chat_template_kwargs",
}
OF_COMPLETIONS = {*KNOWN, "prompt"}
# What else asks for nothing.
NEUTRAL = {
    "best_of": (1,),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "service_tier": ("auto", "default"),
    "typical_p": (1,),
    "length_penalty": (1,),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "add_generation_prompt": (True,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
}


# --- what a body asks for -----------------------------------------------------------------------


def understand(body: bytes, chat: bool, names: Sequence[str]) -> Wish:
    """The body of POST /v1/chat/completions, or of POST /v1/completions. `names`: the models that
    are here."""
    given = read_json(body)
    asked = {name: value for name, value in given.items() if value is not None}
    refuse_what_cannot_be_kept(asked, OF_CHAT if chat else OF_COMPLETIONS, NEUTRAL)
    check_model(asked.get("model", names[0]), names)
    wish = read_chat(asked) if chat else Wish(read_prompts(asked.get("prompt")))
    prompts = wish.prompts
    stream = boolean(asked, "stream")
    options = asked.get("stream_options", {})
    if not isinstance(options, dict):
        raise bad("stream_options", options, "an object")
    lengths = [
        number(asked, name, 1, 2**63 - 1)
        for name in ("max_tokens", "max_completion_tokens")
        if name in asked
    ]
    n = number(asked, "n", 1, N) if "n" in asked else 1
    if n * len(prompts) > CHOICES:
        words = f"{len(prompts)} prompts with n = {n} each, but one request has at most {CHOICES} choices"
        raise Refusal(400, words, "invalid_value", "n")
    settings = {name: asked[name] for name in PLAIN if name in asked}
    if type(asked.get("top_k")) is int and asked["top_k"] == -1:
        settings["top_k"] = 0  # as other servers write "all"
    if asked.get("top_p") == 0 and not isinstance(asked["top_p"], bool):
        settings["top_p"] = 1e-9  # the likeliest token alone
    settings |= {
        "stop": read_stop(asked.get("stop", [])),
        "logit_bias": read_bias(asked.get("logit_bias", {})),
    }
    if grammar := read_grammar(asked):
        settings["grammar"] = grammar
    settings["logprobs"] = chat_logprobs(asked) if chat else completions_logprobs(asked)
    progress = boolean(asked, "return_progress")
    if progress and not stream:
        words = "return_progress is given without stream; set stream to true"
        raise Refusal(400, words, "invalid_value", "return_progress")
    return wish._replace(
        settings=settings,
        max_tokens=min(lengths, default=None),
        n=n,
        stream=stream,
        usage=boolean(options, "include_usage", "stream_options"),
        progress=progress,
    )


def read_chat(asked: dict[str, Any]) -> Wish:
    """The messages, and what goes into the template beside them."""
    messages = asked.get("messages")
    check_length("messages", messages, "content")
    messages = [read_message(f"messages[{i}]", message) for i, message in enumerate(messages)]
    options = asked.get("chat_template_kwargs", {})
    if not isinstance(options, dict):
        raise bad("chat_template_kwargs", options, "an object")
    hints = {"enable_thinking": False} if asked.get("reasoning_effort") == "none" else {}
    kind = asked.get("tool_choice", "auto")
    name = None
    if isinstance(kind, dict):
        function = kind.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        kind = kind.get("type")
    tools, must_call = choose_tools(read_tools(asked.get("tools"), "function"), kind, name)
    parallel = asked.get("parallel_tool_calls") is None or boolean(asked, "parallel_tool_calls")
    chat = Chat(messages, tools, options, hints)
    return Wish([chat], must_call=must_call, is_single=not parallel)


def read_message(place: str, message: Any) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise bad(place, message, "an object with a role and a content", "messages")
    role = message.get("role")
    if role not in ROLES:
        raise bad(f"{place}.role", role, f"one of {', '.join(ROLES)}", "messages")
    known = {"role", "content", "name"}
    # Templates know no developer: it is the newer name of the system's role.
    read = {"role": "system" if role == "developer" else role, "content": ""}
    if role == "tool":
        known.add("tool_call_id")
        if not isinstance(message.get("tool_call_id"), str):
            what = "the id of a call"
            raise bad(f"{place}.tool_call_id", message.get("tool_call_id"), what, "messages")
        read["tool_call_id"] = message["tool_call_id"]
    if role == "assistant":
        known |= {"tool_calls", "reasoning_content"}
        read |= read_own(place, message)
    for name in message.keys() - known:
        said = message[name]  # audio, ...
        if any(said.values()) if isinstance(said, dict) else said:
            words = f"{place}.{name[:40]} is not supported here; leave it out"
            raise Refusal(400, words, "unsupported_parameter", "messages")
    if message.get("content") is not None or "tool_calls" not in read:
        read["content"] = read_text(place, message.get("content"), "messages")
    return read


def read_own(place: str, message: dict) -> dict[str, Any]:
    """What an assistant has thought, and which tools were called."""
    read = {}
    thought = message.get("reasoning_content")
    if thought:
        read["reasoning_content"] = read_text(place, thought, "messages")
    calls = message.get("tool_calls")
    if not calls:
        return read
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise bad(f"{place}.tool_calls", calls, "a list of calls", "messages")
    read["tool_calls"] = []
    for call in calls:
        function = call.get("function")
        function = function if isinstance(function, dict) else {}
        given = call_of(place, call.get("id"), function.get("name"), function.get("arguments"))
        read["tool_calls"].append(given)
    return read


def read_prompts(prompt: Any) -> list:
    """A text, a list of texts, token ids, or a list of those: as a list of prompts."""
    what = "a text, a list of texts, or token ids"

    def are_ids(value: Any) -> bool:
        return (
            isinstance(value, list) and bool(value) and all(type(token) is int for token in value)
        )

    prompts = [prompt] if isinstance(prompt, str) or are_ids(prompt) else prompt
    if not isinstance(prompts, list) or not prompts:
        raise bad("prompt", prompt, what)
    check_count("prompt", len(prompts), "prompts", CHOICES)
    if not (all(isinstance(one, str) for one in prompts) or all(are_ids(one) for one in prompts)):
        raise bad("prompt", prompt, what)
    if "" in prompts:
        raise Refusal(
            400, "the prompt is empty; give at least one token", "invalid_value", "prompt"
        )
    return prompts


def read_bias(bias: Any) -> dict[int, float]:
    if isinstance(bias, dict):
        check_count("logit_bias", len(bias), "entries", BIASES)
    if not isinstance(bias, dict) or not all(re.fullmatch(r"-?[0-9]{1,18}", key) for key in bias):
        raise bad("logit_bias", bias, "an object that maps token ids, as strings, to numbers")
    return {int(key): value for key, value in bias.items()}


def chat_logprobs(asked: dict[str, Any]) -> int | None:
    wanted = boolean(asked, "logprobs")
    top = number(asked, "top_logprobs", 0, TOP) if "top_logprobs" in asked else 0
    if top and not wanted:
        words = "top_logprobs is given without logprobs; set logprobs to true"
        raise Refusal(400, words, "invalid_value", "top_logprobs")
    return top if wanted else None


def completions_logprobs(asked: dict[str, Any]) -> int | None:
    wanted = asked.get("logprobs")  # 0: the tokens' own, and no others beside them
    return None if wanted is None or wanted is False else number(asked, "logprobs", 0, TOP)


def read_grammar(asked: dict[str, Any]) -> dict[str, Any] | None:
    """`response_format`, or one of vLLM's four: as `Sampling.grammar`. None if there is none.

    A schema holds, or it is refused: `strict` changes nothing.
    """
    found = {kind: asked[name] for name, kind in GUIDED.items() if name in asked}
    schema = read_schema("response_format", asked.get("response_format"), "json_schema")
    if schema is not None:
        found["schema"] = schema
    if len(found) > 1:
        words = f"response_format and {', '.join(GUIDED)} exclude each other; give one of them"
        raise Refusal(400, words, "invalid_value", "response_format")
    for kind, source in found.items():
        return {"json" if kind == "schema" else kind: source}
    return None


def of_sampling(error: ValueError, settings: dict[str, Any], form: str) -> Refusal:
    """What `Sampling` or the engine said, with the field that it names. `form`: the one that has a
    JSON schema."""
    name = re.match(r"\w*", str(error))[0]
    if name == "grammar":
        names = {"json": form, "lark": "guided_grammar"}
        # Without one of the body's, it is a grammar of calls
        kind = next(iter(settings.get("grammar", ())), "")
        name = names.get(kind, f"guided_{kind}") if kind else "tools"
    return Refusal(
        400,
        str(error),
        "invalid_value",
        name if name in {*OF_CHAT, *OF_COMPLETIONS, form} else None,
    )


# --- the bodies of the answers ------------------------------------------------------------------


HOLE = "\0"  # where a text will be; no model is named so


class Completion:
    """The bodies of an answer to /v1/completions. The chunks of a stream look like the whole."""

    prefix = "cmpl"
    kind = "text_completion"
    kind_of_chunk = "text_completion"
    silence: ClassVar = {"text": ""}  # of a chunk that says nothing

    def __init__(self, wish: Wish, number: int, suffix: str, model: str):
        self.id = f"{self.prefix}-{number}-{suffix}"
        self._usage = {"usage": None} if wish.usage else {}
        self._head = {"id": self.id, "created": int(time.time()), "model": model}
        # By choice: the event of a piece of text, but for the text
        self._around: dict[int, list[bytes]] = {}

    def whole(self, choices: Sequence[Choice], usage: Usage) -> dict:
        entries = []
        for index, choice in enumerate(choices):
            entries.append(self._entry(index, self._own(choice), choice.words, choice.reason))
        return self._head | {"object": self.kind, "choices": entries, "usage": written(usage)}

    def first(self, choices: int, usage: Usage) -> bytes:
        return b""

    def tell(self, index: int, change: Change) -> bytes:
        """A stream has thousands of pieces of text. What their events have in common is written
        once."""
        if change.kind != "delta":
            return b""
        if change.words is not None:
            return self._chunk(index, self._said(change.text), change.words)
        if index not in self._around:
            self._around[index] = self._chunk(index, self._said(HOLE)).split(dump(HOLE))
        return dump(change.text).join(self._around[index])

    def progress(self, progress: Progress) -> bytes:
        """As llama.cpp tells it."""
        told = {
            "total": progress.total,
            "cache": progress.cached,
            "processed": progress.read,
            "time_ms": round(progress.seconds * 1000),
        }
        return self._chunk(0, self.silence, prompt_progress=told)

    def last(self, index: int, choice: Choice) -> bytes:
        return self._chunk(index, self.silence, reason=choice.reason)

    def close(self, usage: Usage) -> bytes:
        done = event("[DONE]")
        if not self._usage:
            return done
        own = {"object": self.kind_of_chunk, "choices": [], "usage": written(usage)}
        return event(self._head | own) + done

    def fail(self, refusal: Refusal) -> bytes:
        return event(refusal.body) + event("[DONE]")

    def _own(self, choice: Choice) -> dict:
        return {"text": choice.text("answer")}

    def _said(self, text: str) -> dict:
        return {"text": text}

    def _words(self, words: Sequence[Word]) -> dict:
        def best(top: Sequence[tuple[str, float]]) -> dict[str, float]:
            # Of two with one text, the likelier stays
            return {text: finite(logprob) for text, logprob in reversed(top)}

        return {
            "tokens": [word.text for word in words],
            "token_logprobs": [finite(word.logprob) for word in words],
            "top_logprobs": [best(word.top) for word in words],
            "text_offset": [word.offset for word in words],
        }

    def _chunk(
        self,
        index: int,
        said: dict,
        words: Sequence[Word] | None = None,
        reason: str | None = None,
        **more: Any,
    ) -> bytes:
        entry = self._entry(index, said, words, reason)
        own = {"object": self.kind_of_chunk, "choices": [entry]}
        return event(self._head | own | self._usage | more)

    def _entry(
        self, index: int, said: dict, words: Sequence[Word] | None, reason: str | None
    ) -> dict:
        logprobs = None if words is None else self._words(words)
        return {"index": index, **said, "logprobs": logprobs, "finish_reason": reason}


class ChatCompletion(Completion):
    """The bodies of an answer in a chat: a message, and in a stream, how it grows."""

    prefix = "chatcmpl"
    kind = "chat.completion"
    kind_of_chunk = "chat.completion.chunk"
    silence: ClassVar = {"delta": {}}

    def first(self, choices: int, usage: Usage) -> bytes:
        """Who speaks."""
        said = {"delta": {"role": "assistant", "content": ""}}
        return b"".join(self._chunk(index, said) for index in range(choices))

    def tell(self, index: int, change: Change) -> bytes:
        kind, item, text, words = change
        if item.kind == "answer":
            return super().tell(index, change)
        if item.kind == "thought":
            delta = {"reasoning_content": text}
        else:
            call = called(item) if kind == "start" else {"function": {"arguments": text}}
            delta = {"tool_calls": [{"index": item.nth, **call}]}
        # Of a thought only the text is told
        is_told = kind == "delta" or (kind == "start" and item.kind == "call")
        return self._chunk(index, {"delta": delta}, words) if is_told else b""

    def _own(self, choice: Choice) -> dict:
        text = choice.text("answer")
        thought = choice.text("thought")
        calls = [called(item) for item in choice.items if item.kind == "call"]
        message = {"role": "assistant", "content": None if calls and not text else text}
        message["refusal"] = None
        if thought:
            message["reasoning_content"] = thought
        if calls:
            message["tool_calls"] = calls
        return {"message": message}

    def _said(self, text: str) -> dict:
        return {"delta": {"content": text}}

    def _words(self, words: Sequence[Word]) -> dict:
        def entry(text: str, logprob: float) -> dict:
            spelled = list(text.encode(errors="replace"))
            return {"token": text, "logprob": finite(logprob), "bytes": spelled}

        content = []
        for word in words:
            likely = [entry(text, logprob) for text, logprob in word.top]
            content.append(entry(word.text, word.logprob) | {"top_logprobs": likely})
        return {"content": content, "refusal": None}


def called(item: Item) -> dict:
    """A call, as far as it has come."""
    function = {"name": item.name, "arguments": item.text}
    return {"id": item.id, "type": "function", "function": function}


def finite(logprob: float) -> float:
    return max(logprob, -9999.0)  # JSON has no infinity


def written(usage: Usage) -> dict:
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.answer,
        "total_tokens": usage.prompt + usage.answer,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
        "completion_tokens_details": {"reasoning_tokens": usage.thought},
    }


def models(name: str, created: int, max_len: int) -> dict:
    return {"object": "list", "data": [model(name, created, max_len)]}


def model(name: str, created: int, max_len: int) -> dict:
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "nanobatch",
        "max_model_len": max_len,
    }


CHAT = Speaks(lambda body, names: understand(body, True, names), ChatCompletion, "response_format")
COMPLETIONS = Speaks(
    lambda body, names: understand(body, False, names), Completion, "response_format"
)

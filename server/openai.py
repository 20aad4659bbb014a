"""OpenAI's protocol: the wish of a body, and the bodies of the answers.

    POST /v1/chat/completions   {"messages": [{"role": "user", "content": "Why batch?"}]}
    POST /v1/completions        {"prompt": "Once upon a time"}

The problem. Every client speaks this protocol, and each in its own way. Some send null for a field
and mean no field. Some send wishes for nothing (`"presence_penalty": 0`, `"tools": []`), and some
send wishes that we cannot fulfil.

What this file keeps. A body is understood completely, or refused with a status, a message and the
field's name. Nothing here knows sockets or engines.

Where next: `bridge.py`, the way of a request to the engine and back.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

from server.adapter import Progress, Speaks, Usage, Wish, dump, event
from server.choice import Change, Choice, Item, Word
from server.schema import (
    APIError,
    Field,
    Given,
    call_of,
    check_count,
    choose_tools,
    conversation,
    invalid,
    read_body,
    read_form,
    read_stop,
    read_tools,
)
from text.tokenizer import Chat

# Templates know no developer: it is the newer name of the system's role.
ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
# The most of each in one request
N = 16
CHOICES = 128
BIASES = 1000
TOP = 20

FIELDS = {
    "n": Field(int, 1, 1, N),
    "max_tokens": Field(int, None, 1),
    "max_completion_tokens": Field(int, None, 1),
    "logit_bias": Field(dict, {}),
    "stream": Field(bool, False),
    "stream_options": Field(dict, {}),
    "return_progress": Field(bool, False),
}
CHAT_FIELDS = FIELDS | {
    "logprobs": Field(bool, False),
    "top_logprobs": Field(int, 0, 0, TOP),
    "parallel_tool_calls": Field(bool, False),
    "chat_template_kwargs": Field(dict, {}),
    "reasoning_effort": Field(),
}
# These go to `SamplingParams` as they are, and are checked there.
PLAIN = ("temperature", "top_p", "top_k", "min_p", "seed", "ignore_eos")
PLAIN += ("repetition_penalty", "presence_penalty", "frequency_penalty")
# The form of an answer: vLLM's name of the field, and the name in `SamplingParams.grammar`.
GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "lark",
}
# Fields and values that ask for nothing.
NEUTRAL = {
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "service_tier": ("auto", "default", "flex"),
    "typical_p": (1,),
    "length_penalty": (1,),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "add_generation_prompt": (True,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
}


# --- the wish of a body -------------------------------------------------------------------------


def understand(body: bytes, names: Sequence[str], is_chat: bool) -> Wish:
    """The body of POST /v1/chat/completions, or of POST /v1/completions. `names`: those of the
    model that is here."""
    asked = read_body(body, names)
    given = asked.table(CHAT_FIELDS if is_chat else FIELDS)
    wish = read_chat(asked, given) if is_chat else Wish(read_prompts(asked))
    prompts = len(wish.prompts)
    n = given["n"]
    if n * prompts > CHOICES:
        words = (
            f"{prompts} prompts with n = {n} each, but one request has at most {CHOICES} choices"
        )
        raise invalid("n", words)
    if given["return_progress"] and not given["stream"]:
        words = "return_progress is given without stream; set stream to true"
        raise invalid("return_progress", words)
    lengths = [given["max_tokens"], given["max_completion_tokens"]]
    top = read_top(given) if is_chat else read_logprobs(asked)
    wish = wish._replace(
        settings=read_settings(asked, given["logit_bias"]) | {"logprobs": top},
        max_tokens=min(filter(None, lengths), default=None),
        n=n,
        stream=given["stream"],
        usage=read_usage(given["stream_options"]),
        progress=given["return_progress"],
    )
    asked.refuse_rest(NEUTRAL | {"best_of": (1, n)})
    return wish


def read_usage(options: dict) -> bool:
    """Whether the last event of a stream has the usage."""
    if not options:
        return False
    asked = Given(options, "stream_options")
    usage = asked.read("include_usage", bool, False)
    asked.refuse_rest(ignored=["continuous_usage_stats"])  # more of the same, for vLLM's clients
    return usage


def read_settings(asked: Given, bias: dict) -> dict[str, Any]:
    """For `SamplingParams`."""
    settings = asked.some(PLAIN)
    if type(settings.get("top_k")) is int and settings["top_k"] == -1:
        settings["top_k"] = 0  # as other servers write "all"
    if settings.get("top_p") == 0 and not isinstance(settings["top_p"], bool):
        settings["top_p"] = 1e-9  # the likeliest token alone
    settings["stop"] = read_stop(asked, "stop")
    check_count("logit_bias", len(bias), "entries", BIASES)
    if not all(re.fullmatch(r"-?[0-9]{1,18}", token) for token in bias):
        raise asked.bad("logit_bias", "an object that maps token ids, as strings, to numbers")
    settings["logit_bias"] = {int(token): bias[token] for token in bias}
    # A schema holds, or is refused: `strict` changes nothing
    forms = []
    for name, value in asked.some(GUIDED).items():
        forms.append({GUIDED[name]: value})
    if form := read_form(asked, "response_format", "json_schema"):
        forms.append(form)
    if len(forms) > 1:
        words = f"response_format and {', '.join(GUIDED)} exclude each other; give one of them"
        raise invalid("response_format", words)
    if forms:
        settings["grammar"] = forms[0]
    return settings


def read_logprobs(asked: Given) -> int | None:
    """How many log probabilities /v1/completions wants beside each token's own. None: not even
    that one."""
    if asked.get("logprobs") is False:
        return None
    return asked.whole("logprobs", 0, TOP)


def read_top(given: Mapping[str, Any]) -> int | None:
    """The same for a chat."""
    if given["logprobs"]:
        return given["top_logprobs"]
    if given["top_logprobs"]:
        words = "top_logprobs is given without logprobs; set logprobs to true"
        raise invalid("top_logprobs", words)
    return None


def read_chat(asked: Given, given: Mapping[str, Any]) -> Wish:
    """The messages, and everything else that a template takes."""
    messages = [read_message(message) for message in conversation(asked, "messages")]
    hints = {"enable_thinking": False} if given["reasoning_effort"] == "none" else {}
    tools, must_call = choose_tools(asked, read_tools(asked, "function"), "function")
    is_single = not given["parallel_tool_calls"] and bool(tools)
    chat = Chat(messages, tools, given["chat_template_kwargs"], hints)
    return Wish([chat], must_call=must_call, is_single=is_single)


def read_message(message: Given) -> dict[str, Any]:
    role = ROLES[message.one_of("role", ROLES)]
    read: dict[str, Any] = {"role": role}
    if role == "tool":
        read["tool_call_id"] = message.read("tool_call_id", str)
    if role == "assistant":
        if thought := message.text("reasoning_content", ""):
            read["reasoning_content"] = thought
        for call in message.items("tool_calls", []):
            id = call.read("id", str)
            calls = read.setdefault("tool_calls", [])
            calls.append(call_of(id, call.inner("function")))
    read["content"] = message.text("content", "" if "tool_calls" in read else None)
    message.refuse_rest(ignored=["name"])
    return read


def read_prompts(asked: Given, name: str = "prompt", most: int = CHOICES) -> list:
    """A text, a list of texts, token ids, or a list of lists of ids: as a list of prompts."""

    def are_ids(value: Any) -> bool:
        is_list = isinstance(value, list) and bool(value)
        return is_list and all(type(token) is int for token in value)

    prompt = asked.get(name)
    prompts = [prompt] if isinstance(prompt, str) or are_ids(prompt) else prompt
    wrong = asked.bad(name, "a text, a list of texts, or token ids, and none of them empty")
    if not isinstance(prompts, list) or not prompts or "" in prompts:
        raise wrong
    check_count(name, len(prompts), "prompts", most)
    are_texts = all(isinstance(one, str) for one in prompts)
    if not are_texts and not all(map(are_ids, prompts)):
        raise wrong
    return prompts


# --- the bodies of the answers ------------------------------------------------------------------


HOLE = "\0"  # where a text will be; no model is named so


class Completion(Speaks):
    """The bodies of an answer to /v1/completions. The chunks of a stream look like the whole."""

    understand = staticmethod(partial(understand, is_chat=False))
    prompt = "prompt"
    form = "response_format"
    prefix = "cmpl-"
    kind = "text_completion"
    kind_of_chunk = "text_completion"
    silence: ClassVar = {"text": ""}  # of a chunk that says nothing

    def __init__(self, wish: Wish, name: str, model: str):
        super().__init__(wish, name, model)
        self._usage = {"usage": None} if wish.usage else {}
        self._head = {"id": self.id, "created": int(time.time()), "model": model}
        # By choice: the event of a piece of text, but for the text
        self._around: dict[int, list[bytes]] = {}

    def whole(self, choices: Sequence[Choice], usage: Usage) -> dict:
        entries = []
        for index, choice in enumerate(choices):
            own = self._own(choice)
            entries.append(self._entry(index, own, choice.words, choice.reason))
        return {
            **self._head,
            "object": self.kind,
            "choices": entries,
            "usage": written(usage),
        }

    def changed(self, index: int, change: Change) -> bytes:
        """A stream has thousands of pieces of text. The common part of their events is written
        once."""
        if change.kind != "delta":
            return b""
        if change.words is not None:
            return self._chunk(index, self._said(change.text), change.words)
        if index not in self._around:
            event = self._chunk(index, self._said(HOLE))
            self._around[index] = event.split(dump(HOLE))
        return dump(change.text).join(self._around[index])

    def progress(self, progress: Progress) -> bytes:
        """In llama.cpp's form; of a long prompt, two more figures."""
        prefill = progress.prefill
        told = {
            "total": prefill.total,
            "cache": prefill.cached,
            "processed": prefill.done,
            "time_ms": round(progress.seconds * 1000),
        }
        if prefill.is_long and prefill.tokens_per_s is not None:
            told["tokens_per_second"] = round(prefill.tokens_per_s, 1)
            told["left_ms"] = round(prefill.left_s * 1000)
        return self._chunk(0, self.silence, prompt_progress=told)

    def last(self, index: int, choice: Choice) -> bytes:
        return self._chunk(index, self.silence, reason=choice.reason)

    def close(self, usage: Usage) -> bytes:
        done = event("[DONE]")
        if not self._usage:
            return done
        last = {
            **self._head,
            "object": self.kind_of_chunk,
            "choices": [],
            "usage": written(usage),
        }
        return event(last) + done

    def fail(self, refusal: APIError) -> bytes:
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
    """The bodies of an answer in a chat: a message, or the pieces of a message in a stream."""

    understand = staticmethod(partial(understand, is_chat=True))
    prompt = "messages"
    prefix = "chatcmpl-"
    kind = "chat.completion"
    kind_of_chunk = "chat.completion.chunk"
    silence: ClassVar = {"delta": {}}

    def first(self, choices: int, usage: Usage) -> bytes:
        """Who speaks."""
        said = {"delta": {"role": "assistant", "content": ""}}
        return b"".join(self._chunk(index, said) for index in range(choices))

    def changed(self, index: int, change: Change) -> bytes:
        kind, item, text, words = change
        if item.kind == "answer":
            return super().changed(index, change)
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
    """A call so far."""
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


def model(name: str, created: int, max_len: int, quantization: str) -> dict:
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "nanobatch",
        "max_model_len": max_len,
        "quantization": quantization,
    }

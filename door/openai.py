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
from itertools import takewhile
from typing import Any, NamedTuple

from door.protocol import (
    Progress,
    Refusal,
    Said,
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
    new_id,
    number,
    read_json,
    read_schema,
    read_stop,
    read_text,
    read_tools,
    refuse_what_cannot_be_kept,
)
from parts.api.handle import TokenLogprob
from parts.text.speech import Part
from parts.text.tokens import Chat, Text

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


# --- the tokens of an answer as text ------------------------------------------------------------


class Word(NamedTuple):
    """One token of an answer: its text, where that begins in the answer, and what the model thought
    of it."""

    text: str
    offset: int
    logprob: float
    top: list[tuple[str, float]]


class Words:
    """An answer's tokens as texts that join to the answer, as they come.

    A token is often no text by itself: its bytes may end within a character, and a decoder drops
    the space before a first word. So each token's text is what it adds to those before it. A token
    whose text may be cut off by a stop text waits, as its text does.
    """

    def __init__(self, text: Text):
        self._text, self._stream = text, text.stream(())
        self._tokens: list[int] = []
        self._waiting: list[Word] = []
        # Characters: of all texts so far, and of those that have been shown
        self._length = self._shown = 0

    def take(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprob]) -> None:
        """The answer's tokens so far, of which only those are looked at that are new.

        The newest may lack its log probability for a moment.
        """
        known = len(self._tokens)
        for token, (logprob, top, _) in zip(tokens[known:], logprobs[known:], strict=False):
            before = self._tokens[-4:]
            piece = self._stream.push(token)
            others = [id for id, _ in top if id != token]
            texts = dict(zip(others, self._text.after(before, others), strict=True))
            likely = [(texts.get(id, piece), value) for id, value in top]
            self._tokens.append(token)
            self._waiting.append(Word(piece, self._length, logprob, likely))
            self._length += len(piece)

    def release(self, count: int) -> list[Word]:
        """Those whose text has been shown, now that so many more characters have."""
        self._shown += count
        # One without a text of its own waits for the text after it: it may be the end token, which
        # is not shown.
        ends = (w.offset + max(len(w.text), 1) for w in self._waiting)
        ready = sum(1 for _ in takewhile(lambda end: end <= self._shown, ends))
        # If the answer ends within a character, what is shown of that belongs to the last token.
        ready = min(ready, len(self._waiting) - self._stream.open)
        released, self._waiting = self._waiting[:ready], self._waiting[ready:]
        return released

    def finish(self, text: str) -> list[Word]:
        """The rest, when the answer is complete. Tokens behind its end, such as a stop text's, are
        left out."""
        left = [w for w in self._waiting if w.offset < len(text)]
        # Cut off, or what a broken character becomes
        last = [w._replace(text=text[w.offset :]) for w in left[-1:]]
        self._waiting = []
        return left[:-1] + last


def finite(logprob: float) -> float:
    return max(logprob, -9999.0)  # JSON has no infinity


def chat_words(words: Sequence[Word]) -> dict:
    def entry(text: str, logprob: float) -> dict:
        return {
            "token": text,
            "logprob": finite(logprob),
            "bytes": list(text.encode(errors="replace")),
        }

    content = [
        entry(w.text, w.logprob) | {"top_logprobs": [entry(*likely) for likely in w.top]}
        for w in words
    ]
    return {"content": content, "refusal": None}


def completions_words(words: Sequence[Word]) -> dict:
    def best(top: Sequence[tuple[str, float]]) -> dict[str, float]:
        # Of two with one text, the likelier stays
        return {text: finite(logprob) for text, logprob in reversed(top)}

    return {
        "tokens": [w.text for w in words],
        "token_logprobs": [finite(w.logprob) for w in words],
        "top_logprobs": [best(w.top) for w in words],
        "text_offset": [w.offset for w in words],
    }


# --- the bodies of the answers ------------------------------------------------------------------


HOLE = "\0"  # where a text will be; no model is named so


class Shape:
    """The bodies of one answer. `chat` decides between the two shapes; a stream's chunks differ
    from a whole answer."""

    def __init__(
        self, chat: bool, number: int, suffix: str, model: str, streamed_usage: bool = False
    ):
        self.chat, self.usage = chat, {"usage": None} if streamed_usage else {}
        self.id = f"{'chatcmpl' if chat else 'cmpl'}-{number}-{suffix}"
        self.kind = "chat.completion" if chat else "text_completion"
        self.head = {
            "id": self.id,
            "object": self.kind,
            "created": int(time.time()),
            "model": model,
        }
        # By choice: the event of a piece, but for its text
        self._around: dict[int, list[bytes]] = {}
        self._calls: dict[int, int] = {}  # by choice: so many tools have been called before

    def whole(self, choices: Sequence[Said], usage: Usage) -> dict:
        entries = [self._choice(index, said) for index, said in enumerate(choices)]
        return self.head | {"choices": entries, "usage": written(usage)}

    def _choice(self, index: int, said: Said) -> dict:
        own = message_of(said) if self.chat else {"text": said.text("answer")}
        logprobs = self.words(said.words)
        return {"index": index, **own, "logprobs": logprobs, "finish_reason": said.reason}

    def words(self, words: Sequence[Word] | None) -> dict | None:
        if words is None:
            return None
        return chat_words(words) if self.chat else completions_words(words)

    def first(self, choices: int, usage: Usage) -> bytes:
        """What a stream says before the first word: in a chat, who speaks."""
        if not self.chat:
            return b""
        said = {"delta": {"role": "assistant", "content": ""}}
        return b"".join(event(self._chunk(index, said)) for index in range(choices))

    def part(self, index: int, part: Part, words: Sequence[Word] | None) -> bytes:
        if part.kind == "answer":
            return self.piece(index, part.text, words)
        if part.kind == "thought":
            return event(self._chunk(index, {"delta": {"reasoning_content": part.text}}, words))
        call = {}
        if part.kind == "call":
            self._calls[index] = self._calls.get(index, -1) + 1
            call = {"id": new_id(), "type": "function"}
        name = {"name": part.text, "arguments": ""} if call else {"arguments": part.text}
        call = {"index": self._calls[index], **call, "function": name}
        return event(self._chunk(index, {"delta": {"tool_calls": [call]}}, words))

    def piece(self, index: int, text: str, words: Sequence[Word] | None) -> bytes:
        """The event of a piece of text. A stream has thousands, so what they have in common is
        written once."""
        if words is not None:
            return event(self._piece(index, text, words))
        if index not in self._around:
            self._around[index] = event(self._piece(index, HOLE)).split(dump(HOLE))
        return dump(text).join(self._around[index])

    def _piece(self, index: int, text: str, words: Sequence[Word] | None = None) -> dict:
        return self._chunk(
            index, {"delta": {"content": text}} if self.chat else {"text": text}, words
        )

    def progress(self, progress: Progress) -> bytes:
        """As llama.cpp tells it."""
        told = {
            "total": progress.total,
            "cache": progress.cached,
            "processed": progress.read,
            "time_ms": round(progress.seconds * 1000),
        }
        said = {"delta": {"content": None}} if self.chat else {"text": ""}
        return event(self._chunk(0, said) | {"prompt_progress": told})

    def last(self, index: int, reason: str, stop: str | None) -> bytes:
        return event(self._chunk(index, {"delta": {}} if self.chat else {"text": ""}, None, reason))

    def close(self, usage: Usage) -> bytes:
        done = event("[DONE]")
        if not self.usage:
            return done
        return event(self._head() | {"choices": [], "usage": written(usage)}) + done

    def fail(self, refusal: Refusal) -> bytes:
        return event(refusal.body) + event("[DONE]")

    def _head(self) -> dict:
        return self.head | ({"object": "chat.completion.chunk"} if self.chat else {})

    def _chunk(
        self, index: int, said: dict, words: Sequence[Word] | None = None, reason: str | None = None
    ) -> dict:
        choice = {"index": index, **said, "logprobs": self.words(words), "finish_reason": reason}
        return self._head() | {"choices": [choice]} | self.usage


def message_of(said: Said) -> dict:
    """A choice of a chat."""
    calls = []
    for name, arguments in said.calls:
        function = {"name": name, "arguments": arguments}
        calls.append({"id": new_id(), "type": "function", "function": function})
    text = said.text("answer")
    message = {"role": "assistant", "content": None if calls and not text else text}
    message["refusal"] = None
    if thought := said.text("thought"):
        message["reasoning_content"] = thought
    if calls:
        message["tool_calls"] = calls
    return {"message": message}


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


CHAT = Speaks(
    lambda body, names: understand(body, True, names),
    lambda wish, *own: Shape(True, *own, wish.usage),
    "response_format",
)
COMPLETIONS = Speaks(
    lambda body, names: understand(body, False, names),
    lambda wish, *own: Shape(False, *own, wish.usage),
    "response_format",
)

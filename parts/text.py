"""Text to token ids and back: the tokenizer, the chat template, and the stream that a listener sees.

The problem. Tokens are not characters. One emoji may take four tokens, a stop string may begin in the middle of one
token and end in another, and a model that speaks in turns wants its prompts wrapped exactly as in its training.

What this file keeps. The pieces of a `TextStream` join to the decoded whole, no piece ends within a character, and no
part of a stop string gets out. The cost of a token does not depend on how long the answer is already.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import tokenizers

from parts.checkpoint import ModelError, read_json

# What a terminal obeys instead of showing it: C0 and C1 control characters, but for the tab and the newline, and the
# marks that turn the direction of writing.
CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    """Prompts and answers come from anywhere, and none may move the cursor or set the title of who reads them."""
    return CONTROLS.sub("", text)


class Text:
    """A model's tokenizer, chat template and end tokens."""

    def __init__(self, folder: Path, vocabulary: int):
        path = folder / "tokenizer.json"
        if not path.exists():
            raise ModelError(f"{path} is missing; save the model's tokenizer in the fast format (tokenizer.json).")
        try:
            self.tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises a bare Exception
            raise ModelError(f"{path} is not a tokenizer ({error}); download it again.") from None
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        largest = max(self.tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        if largest >= vocabulary:
            raise ModelError(f"{path} has the token id {largest}, but the embedding ends at {vocabulary - 1}.")
        self.folder, self._silent = folder, special_ids(self.tokenizer)
        config = folder / "tokenizer_config.json"
        older = folder / "special_tokens_map.json"
        self.config = (read_json(older) if older.exists() else {}) | (read_json(config) if config.exists() else {})
        self.end_tokens = self._end_tokens()

    def _end_tokens(self) -> frozenset[int]:
        """Every id that ends an answer: the union of config, generation config and tokenizer, each an int or a list."""
        ids: set[int] = set()
        for name in ("config.json", "generation_config.json"):
            path = self.folder / name
            value = read_json(path).get("eos_token_id") if path.exists() else None
            for token in value if isinstance(value, list) else [] if value is None else [value]:
                if type(token) is not int:
                    raise ModelError(f"{path}: eos_token_id = {value!r}, but it must be a token id or a list of them.")
                ids.add(token)
        token = self.tokenizer.token_to_id(self.special("eos_token")) if self.special("eos_token") else None
        return frozenset(ids if token is None else ids | {token})

    def special(self, name: str) -> str:
        """`bos_token` or `eos_token` as the tokenizer's config spells it; empty if it has none."""
        value = self.config.get(name)
        value = value.get("content") if isinstance(value, dict) else value
        return value if isinstance(value, str) else ""

    def stream(self, stops: Sequence[str]) -> TextStream:
        return TextStream(self.tokenizer, stops, self._silent)

    def encode(self, text: str) -> list[int]:
        """A plain text, with the BOS that the tokenizer adds by itself: one, even if the text has it already."""
        ids = self._ids(text, True)
        bos = self.tokenizer.token_to_id(self.special("bos_token")) if self.special("bos_token") else None
        return ids[1:] if bos is not None and ids[:2] == [bos, bos] else ids

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """A conversation, through the model's own template. What the template writes is all: no BOS is added to it."""
        return self._ids(self.render(messages), False)

    def _ids(self, text: str, add_special_tokens: bool) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:  # half a surrogate pair: bytes that were no UTF-8, read as text
            raise ValueError(f"the prompt is no valid text at character {error.start}; give UTF-8") from None
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    @property
    def has_template(self) -> bool:
        return self._source is not None

    @cached_property
    def _source(self) -> str | None:
        """The template's text: a file of its own, or in the config, alone or as one of several with names."""
        path = self.folder / "chat_template.jinja"
        if path.is_file():
            return path.read_text(encoding="utf-8")
        source = self.config.get("chat_template")
        if isinstance(source, list):
            named = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
            source = named.get("default", next(iter(named.values()), None))
        return source if isinstance(source, str) else None

    @cached_property
    def _template(self):
        """Compiled as Hugging Face compiles it, in a sandbox: a template comes with the weights, from anywhere."""
        import jinja2.ext
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        class Generation(jinja2.ext.Extension):
            """{% generation %} marks what the assistant said, for those who train. Here it is what it encloses."""

            tags: ClassVar = {"generation"}

            def parse(self, parser):
                line = next(parser.stream).lineno
                return jinja2.nodes.Scope(
                    parser.parse_statements(["name:endgeneration"], drop_needle=True), lineno=line
                )

        def raise_exception(message: str):
            raise jinja2.TemplateError(message)

        def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
            return json.dumps(
                value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
            )

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation]
        )
        environment.filters["tojson"] = tojson
        environment.globals["raise_exception"] = raise_exception
        environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
        try:
            return environment.from_string(self._source)
        except jinja2.TemplateError as error:
            raise ModelError(f"the chat template in {self.folder} is broken ({error}); give plain text.") from None

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The text that the template makes of a conversation, up to where the assistant is to speak."""
        for message in messages:
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
                raise ValueError(f"a chat message is {message!r}, but it must be a mapping with a role and a content")
        if not self.has_template:
            raise ValueError("this model has no chat template; give it a plain text")
        specials = {name: self.special(name) for name in self.config if name.endswith("_token") and self.special(name)}
        messages = [{key: value for key, value in message.items() if value is not None} for message in messages]
        template = self._template
        try:
            return template.render(
                messages=messages, add_generation_prompt=True, tools=None, documents=None, **specials
            )
        except Exception as error:  # a template is a program of somebody else's: anything can come out of it
            raise ValueError(f"the chat template refuses these messages: {' '.join(str(error).split())}") from None


class TextStream:
    """The text of one answer as it grows: `push` tokens, get pieces; `finish` gives what was held back.

    Each token is decoded behind the few before it, because a decoder may put or drop a space between two tokens; what
    it yields beyond theirs is new. Three kinds of tokens wait:

        b"\\xf0\\x9f"  bytes that end within a character: until it is complete, or broken for good
        <0xF0>       byte tokens, as tokenizers made from SentencePiece have them: one broken byte in a run of them
                     spoils how the whole run decodes, so the run waits for its end
        "Hel"        text that a stop string may begin with: until it is clear whether it does

    (`tokenizers` has a DecodeStream, which knows the first kind. The second makes it show text that the whole does not
    have, or raise.)
    """

    def __init__(
        self, tokenizer: tokenizers.Tokenizer, stops: Sequence[str] = (), silent: frozenset[int] | None = None
    ):
        """`silent` are the special tokens' ids, for those who have asked the tokenizer already."""
        self._tokenizer, self._stops = tokenizer, stops
        self._silent = special_ids(tokenizer) if silent is None else silent
        self._falls_back = tokenizer.token_to_id("<0x00>") is not None
        self._context: list[int] = []  # the last tokens whose text is out
        self._behind = ""  # their text
        self._waiting: list[int] = []  # tokens whose text is not
        self._held = ""  # text that is out of the decoder, but may be the beginning of a stop string
        self._decoded = 0  # how many characters are out of the decoder
        self.stopped = False

    def push(self, token: int) -> str:
        """The text that can be shown now, perhaps none. After it, `stopped` tells whether a stop string came."""
        name = self._tokenizer.id_to_token(token)
        if name is None or token in self._silent:
            return ""
        self._waiting.append(token)
        if self._falls_back and len(name) == 6 and name.startswith("<0x"):
            return ""
        text, count = self._decode(self._context + self._waiting), len(self._waiting)
        if text.endswith("\ufffd") and not self._falls_back:
            count = self._complete()
            if count == 0:
                return ""
            text = self._decode(self._context + self._waiting[:count])
        piece = text[len(self._behind) :]
        self._context += self._waiting[:count]
        self._behind, self._waiting = text, self._waiting[count:]
        if len(self._context) > 16:  # not every time: as long as it only grows, its text is known
            self._context = self._context[-1:] if self._falls_back else self._context[-4:]
            self._behind = self._decode(self._context)
        return self._release(piece)

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=True)

    def _complete(self) -> int:
        """How many of the waiting tokens end at a character's end, if not all of them.

        A character has at most four bytes. Where the text can be cut without changing it, what stands before the cut
        stays as it is, broken or not, whatever follows.
        """
        text = self._decode(self._waiting)
        for count in range(len(self._waiting) - 1, max(len(self._waiting) - 5, 0), -1):
            if self._decode(self._waiting[:count]) + self._decode(self._waiting[count:]) == text:
                return count
        return 0

    def _release(self, piece: str) -> str:
        self._decoded += len(piece)
        if not self._stops:
            return piece
        text = self._held + piece
        found = [(place + len(stop), place) for stop in self._stops if (place := text.find(stop)) >= 0]
        if found:  # the one that is complete first, however the text was cut into tokens
            self.stopped, self._held = True, ""
            return text[: min(found)[1]]
        keep = max((overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self, tokens: list[int]) -> str:
        """What is left at the end: what might have become a stop string, and bytes of a character that never came."""
        if self.stopped:
            return ""
        shown = self._release(self._decode(tokens)[self._decoded :])
        held, self._held = self._held, ""
        return shown + held


def special_ids(tokenizer: tokenizers.Tokenizer) -> frozenset[int]:
    return frozenset(token for token, added in tokenizer.get_added_tokens_decoder().items() if added.special)


def overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` that `stop` begins with, short of all of it."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[len(text) - length :]):
            return length
    return 0

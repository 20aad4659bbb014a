"""From text to token ids: a model's tokenizer, chat template, end tokens and grammars.

A chat model needs prompts in exactly the format of its training, so its own chat template formats
them. Template and tokenizer come from an untrusted author and are checked in a child process before
they are used (`untrusted_model_files.py`). `detokenizer.py` turns token ids back into text.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers

from base.untrusted_files import ModelError, check_plain, check_size, read_json_if_any, read_text
from base.validation import one_line, shown
from models.gguf_file import is_gguf
from text.detokenizer import StreamingDetokenizer, special_ids, without_panics
from text.gguf_tokenizer import GgufText
from text.grammar import Grammar, Grammars
from text.tool_formats import (
    HARMONY_ENDS,
    HARMONY_MARKS,
    HARMONY_REASONING,
    MARKS,
    PROBE,
    TOOLS,
    OutputFormat,
)
from text.tool_parser import detect_format

OURS = Path(__file__).resolve().parents[1] / "demo" / "model"


FIRST = 100_000  # encode at least this many characters before judging the length of a prompt


class TooLongError(ValueError):
    """Raised for a prompt far over the limit. `tokens`: a lower bound on its length."""

    def __init__(self, tokens: int):
        super().__init__(f"the prompt has more than {tokens:,} tokens")
        self.tokens = tokens


class Prompt(NamedTuple):
    """A prompt as token ids."""

    ids: tuple[int, ...]
    shown: str  # for display: the text, or the last message of a chat
    is_thinking: bool = False  # the prompt ends with an opening reasoning mark
    folder: Path | None = None  # the model whose tokenizer encoded it


class ChatPrompt(NamedTuple):
    """A conversation and the other variables of a chat template."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    options: Mapping[str, Any] = {}  # variables that the template must support
    hints: Mapping[str, Any] = {}  # variables that the template may ignore


class Tokenizer:
    """A model's tokenizer, chat template and end tokens.

    `unfit`: why the chat template cannot be used, in one line; else empty.
    """

    def __init__(self, folder: Path, vocabulary: int):
        self.folder = folder
        gguf = GgufText(folder) if is_gguf(folder) else None
        if gguf:
            path = folder
            self.config = gguf.config
        else:
            path = folder / "tokenizer.json"
            if not path.exists():
                raise ModelError(
                    f"{path} is missing; save the model's tokenizer in the fast format (tokenizer.json)."
                )
            check_plain(path)
            check_size(path)
            older = read_json_if_any(folder / "special_tokens_map.json")
            self.config = older | read_json_if_any(folder / "tokenizer_config.json")
        self._source, self.unfit = self._try_out(path)
        try:
            if gguf:
                self.tokenizer = without_panics(gguf.tokenizer)
            else:
                self.tokenizer = without_panics(tokenizers.Tokenizer.from_file, str(path))
            self.tokenizer.no_truncation()
            self.tokenizer.no_padding()
            largest = max(self.tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
            silent = special_ids(self.tokenizer)
        except Exception as error:  # tokenizers raises a bare Exception
            raise ModelError(
                f"{path} is not a tokenizer ({one_line(error)}); download it again."
            ) from None
        if largest >= vocabulary:
            raise ModelError(
                f"{path} has the token id {largest}, but the embedding ends at {vocabulary - 1}."
            )
        self.vocabulary = vocabulary
        # Marks of tool calls and reasoning are shown, even if they are special tokens
        id_of = self.tokenizer.token_to_id
        self._silent = silent - {id_of(mark) for mark in MARKS}
        self.end_tokens = gguf.end_tokens if gguf else self._end_tokens()
        if all(id_of(mark) is not None for mark in HARMONY_MARKS):
            self._silent -= {id_of(mark) for mark in HARMONY_MARKS}
            self.end_tokens |= {id_of(mark) for mark in HARMONY_ENDS} - {None}
        self._grammars = Grammars(self.tokenizer, vocabulary, self.end_tokens)

    def _end_tokens(self) -> frozenset[int]:
        """Return all ids that end an answer, from config.json (and its part about the text),
        generation_config.json and the tokenizer's config."""
        ids: set[int] = set()
        paths = [self.folder / name for name in ("config.json", "generation_config.json")]
        parts = [(path, read_json_if_any(path)) for path in paths]
        if isinstance(text := parts[0][1].get("text_config"), dict):
            parts.append((paths[0], text))
        for path, fields in parts:
            value = fields.get("eos_token_id")
            for token in value if isinstance(value, list) else [] if value is None else [value]:
                if type(token) is not int:
                    raise ModelError(
                        f"{path}: eos_token_id = {shown(value)}, but it must be a token id or a list of them."
                    )
                ids.add(token)
        return frozenset(ids | ({self._special_id("eos_token")} - {None}))

    def special(self, name: str) -> str:
        """Return a special token, such as `bos_token`, from the tokenizer's config; empty if it has none."""
        value = self.config.get(name)
        value = value.get("content") if isinstance(value, dict) else value
        return value if isinstance(value, str) else ""

    def _special_id(self, name: str) -> int | None:
        with suppress(UnicodeEncodeError):  # a lone surrogate
            return self.tokenizer.token_to_id(self.special(name)) if self.special(name) else None

    def stream(self, stops: Sequence[str]) -> StreamingDetokenizer:
        return StreamingDetokenizer(self.tokenizer, stops, self._silent)

    def ask(self, prompt: str, raw: bool = False) -> list[int]:
        """Encode a prompt that a person typed: as a user message, or as plain text if `raw` is set or
        there is no template.

        Raise if the template is unfit, because the model was trained on no other prompt format. An empty
        prompt gets no tokens, not even BOS, so that the engine refuses it.
        """
        if prompt:
            self._check_known(prompt)
        if self._source is not None and prompt and not raw:
            return self.encode_chat([{"role": "user", "content": prompt}])
        return self.encode(prompt) if prompt else []

    def _check_known(self, prompt: str) -> None:
        """Refuse a prompt that has only unknown tokens, because the answer could not depend on it."""
        unknown = getattr(self.tokenizer.model, "unk_token", None)
        none = unknown and self.tokenizer.token_to_id(unknown)
        if all(token == none for token in self._ids(prompt, False)):
            raise ValueError(
                f"the model's tokenizer covers no character of {shown(prompt)}; "
                "write it in a language that the model knows"
            )

    def encode(self, text: str, room: float = math.inf) -> list[int]:
        """Encode plain text, with BOS if the tokenizer adds it, but never twice."""
        self._check_length(text, room)
        ids = self._ids(text, True)
        bos = self._special_id("bos_token")
        return ids[1:] if bos is not None and ids[:2] == [bos, bos] else ids

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Encode a conversation with the model's own template, which writes BOS itself."""
        return self._ids(self.render(messages), False)

    def _check_length(self, text: str, room: float) -> None:
        """Refuse a text far beyond `room` tokens by encoding only its start, because encoding 1 MB
        takes 350 MB of memory.

        Each round doubles the start. Tokens near the cut may differ from those of the full text, so
        the start must exceed the limit by a quarter.
        """
        size = max(FIRST, 8 * room)
        while size < len(text):
            tokens = len(self._ids(text[: int(size)], False))
            if tokens > 1.25 * room:
                raise TooLongError(int(tokens / 1.25))
            size *= 2

    def encode_prompt(
        self,
        prompt: str | Sequence[int] | Sequence[Mapping[str, Any]] | ChatPrompt | Prompt,
        room: float = math.inf,
    ) -> Prompt:
        """Encode a text, chat messages or token ids. A `Prompt` is returned unchanged if it is for this
        model.

        `room`: raise TooLongError for a text far beyond this many tokens.
        """
        if isinstance(prompt, Prompt):
            if prompt.folder not in (None, self.folder):
                models = f"{prompt.folder.name}, and this engine serves {self.folder.name}"
                raise ValueError(f"the prompt was tokenized for {models}; tokenize it again")
            self.check_ids((min(prompt.ids), max(prompt.ids)))
            return prompt
        if isinstance(prompt, Sequence) and prompt and isinstance(prompt[0], Mapping):
            prompt = ChatPrompt(prompt)
        ids = prompt
        shown = "token ids"
        if isinstance(prompt, ChatPrompt):
            text = self.render(*prompt)
            self._check_length(text, room)
            ids = self._ids(text, False)
            # Some clients end with a system message
            said = [each for each in prompt.messages if each.get("role") != "system"]
            shown = str((said or prompt.messages)[-1].get("content"))
        elif isinstance(prompt, str):
            ids = self.encode(prompt, room) if prompt else ()
            shown = prompt
        is_list = isinstance(ids, Sequence) and not isinstance(ids, (bytes, bytearray))
        if not is_list or any(type(i) is not int for i in ids):
            raise ValueError(
                f"a prompt is a text, chat messages or token ids, not this {type(prompt).__name__}"
            )
        if not ids:
            raise ValueError("the prompt is empty; give at least one token")
        self.check_ids((min(ids), max(ids)))
        return Prompt(tuple(ids), shown, self.is_thinking(ids), self.folder)

    @cached_property
    def longest(self) -> int:
        """The length of the longest token in characters."""
        return max(map(len, self.tokenizer.get_vocab(with_added_tokens=True)), default=1)

    def after(self, before: Sequence[int], tokens: Sequence[int]) -> list[str]:
        """Return the text that each of `tokens` would add after `before`. Special tokens are shown by
        name."""
        decode = self.tokenizer.decode
        known = len(decode(before, skip_special_tokens=False))
        longer = [[*before, token] for token in tokens]
        return [decode(ids, skip_special_tokens=False)[known:] for ids in longer]

    def check_ids(self, ids: Iterable[int]) -> None:
        for token in ids:
            # MLX does not check bounds: a wrong id would read other memory
            if not 0 <= token < self.vocabulary:
                words = f"token id {shown(token)} is outside the vocabulary of {self.vocabulary}"
                raise ValueError(words)

    def _ids(self, text: str, add_special_tokens: bool) -> list[int]:
        try:
            text.encode()
        # a lone surrogate, from bytes that were not UTF-8
        except UnicodeEncodeError as error:
            raise ValueError(
                f"the prompt is not valid text at character {error.start}; give UTF-8"
            ) from None
        try:
            # Not `encode`, which holds the GIL: 2 MB of text would stop all threads for 4 s.
            return without_panics(
                self.tokenizer.encode_batch, [text], add_special_tokens=add_special_tokens
            )[0].ids
        # For example, if a character has no token and there is no unknown token
        except Exception as error:
            why = f"the model's tokenizer cannot read this prompt ({one_line(error)})"
            raise ValueError(f"{why}; rephrase it, or give token ids") from None

    def grammar(self, source: Mapping[str, Any]) -> Grammar:
        """Compile `SamplingParams.grammar`. This may take a second."""
        return self._grammars.grammar(source)

    @cached_property
    def marks(self) -> dict[str, int]:
        """The tokens that a grammar must name by id: marks of tool calls and reasoning, and all other
        added tokens that llguidance treats as special."""
        decoder = self.tokenizer.get_added_tokens_decoder()
        added = {token.content: id for id, token in decoder.items()}
        special = self._grammars.special(added.values())
        return {text: id for text, id in added.items() if text in MARKS or id in special}

    @property
    def has_template(self) -> bool:
        return self._source is not None and not self.unfit

    def _try_out(self, path: Path) -> tuple[str | None, str]:
        """Check template and tokenizer in a child process. Return the template's source and the
        one-line reason why it cannot be used (empty if it can)."""
        from text.untrusted_model_files import SAMPLES, TemplateChecker

        source, for_tools, place = self._find_template()
        why = ""
        texts: list[str] = []
        with TemplateChecker() as child:
            # The demo model's template ships with nanobatch, so it is trusted
            if source is not None and not is_ours(source, "chat_template.jinja"):
                samples = [*map(self._variables, SAMPLES), self._variables(PROBE, TOOLS)]
                why, texts = child.template(source, samples)
                if for_tools is not None and not why:
                    # "+" keeps the whitespace at both ends of a template
                    both = [text.removesuffix("\n") for text in (for_tools, source)]
                    joint = "{% if tools +%}" + "{%+ else +%}".join(both) + "{%+ endif %}"
                    fault, more = child.template(joint, samples)
                    if not fault:
                        source = joint
                        texts += more
            is_known = not is_gguf(path) and is_ours(path.read_bytes(), path.name)
            if not is_known and (fault := child.tokenizer(path, texts)):
                raise ModelError(f"{path}: the tokenizer {fault}; take another model.")
        return source, why and f"{place}: the chat template {why}; fix it, or give plain text."

    def _find_template(self) -> tuple[str | None, str | None, Path]:
        """Return the chat template, a separate one for chats with tools (each None if missing), and their file.

        They are in separate files, or in the tokenizer's config as a string or a list of named templates.
        Some multimodal models have theirs only in chat_template.json.
        """
        path = self.folder / "chat_template.jinja"
        source = read_text(path) if path.exists() else self.config.get("chat_template")
        for_tools = None
        more = self.folder / "additional_chat_templates" / "tool_use.jinja"
        if not path.exists():
            path = self.folder if is_gguf(self.folder) else self.folder / "tokenizer_config.json"
        elif more.exists():
            for_tools = read_text(more)
        if source is None:
            path = self.folder / "chat_template.json"
            source = read_json_if_any(path).get("chat_template")
        if isinstance(source, list):
            named = {
                str(entry.get("name")): entry.get("template")
                for entry in source
                if isinstance(entry, dict)
            }
            source = named.get("default", next(iter(named.values()), None))
            for_tools = named.get("tool_use")
        source, for_tools = (
            text if isinstance(text, str) else None for text in (source, for_tools)
        )
        return source, for_tools, path

    def _variables(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
    ) -> dict[str, Any]:
        """Return the variables of a template."""
        specials = {
            name: self.special(name)
            for name in self.config
            if name.endswith("_token") and self.special(name)
        }
        return {
            "messages": messages,
            "add_generation_prompt": True,
            "tools": list(tools) or None,
            "documents": None,
            **specials,
        }

    @cached_property
    def _template(self) -> Any:
        from text.chat_template import Template

        return Template(self._source)

    @cached_property
    def output_format(self) -> OutputFormat:
        """The model's notation for reasoning and tool calls."""
        return detect_format(self._source, self.render)

    def is_thinking(self, prompt: Sequence[int]) -> bool:
        """True if the prompt ends with an opening reasoning mark, which some templates write."""
        if not self.output_format.reasoning:
            return False
        end = without_panics(self.tokenizer.decode, list(prompt[-16:]), skip_special_tokens=False)
        return self.output_format.is_thinking(end)

    def render(self, *given: Any) -> str:
        """Render a conversation up to the start of the assistant's answer. `given`: the fields of a
        `ChatPrompt`."""
        messages, tools, options, hints = ChatPrompt(*given)
        for message in messages:
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
                raise ValueError(
                    f"a chat message is {shown(message)}, but it must be a mapping with a role and a content"
                )
        if self.unfit:
            raise ModelError(self.unfit)
        if self._source is None:
            raise ValueError("this model has no chat template; give it plain text")
        for name in options:
            if not isinstance(name, str) or name not in self._source:
                raise ValueError(f"the chat template does not know {shown(name)}; leave it out")
        hints = {name: value for name, value in hints.items() if name in self._source}
        messages = [
            {key: value for key, value in message.items() if value is not None}
            for message in messages
        ]
        # gpt-oss's template reads reasoning from "thinking", and only in messages with calls
        if HARMONY_REASONING[0] in self._source:
            for message in messages:
                if "reasoning_content" in message and not message.get("content"):
                    message["thinking"] = message["reasoning_content"]
        try:
            variables = {**hints, **options, **self._variables(messages, tools)}
            return self._template.render(variables)
        except Exception as error:  # a template may raise anything
            raise ValueError(
                f"the chat template refuses these messages: {one_line(error)}"
            ) from None


def is_ours(data: str | bytes, name: str) -> bool:
    """True if this is the demo model's file of this name, which ships with nanobatch."""
    data = data.encode(errors="replace") if isinstance(data, str) else data
    path = OURS / name
    return path.exists() and data == path.read_bytes()

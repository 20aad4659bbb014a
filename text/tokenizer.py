"""Text to token ids and back: the tokenizer, the chat template, and the stream of text that a
handle gets.

The problem. Tokens are not characters. One emoji may take four tokens, a stop string may begin in
the middle of one token and end in another, and a model that speaks in turns wants its prompts
wrapped exactly as in its training.

What this file keeps. The pieces of a `StreamingDetokenizer` join to the decoded whole. No piece ends within a
character, and no part of a stop string is ever shown. The cost of a token does not depend on how
long the answer is already.

Where next: `models/config.py`, which reads the rest of a model folder.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers

from runtime.files import ModelError, check_plain, check_size, read_json_if_any, read_text
from runtime.gguf_file import is_gguf
from runtime.sampling_params import advised
from runtime.validation import one_line, shown
from text.gguf_tokenizer import GgufText
from text.grammar import Grammar, Grammars
from text.tool_parser import MARKS, PROBE, TOOLS, Speech, beginning, learn

OURS = Path(__file__).resolve().parents[1] / "demo" / "model"


FIRST = 100_000  # characters of a prompt that are tokenized at first, at least


class TooLongError(ValueError):
    """A prompt far beyond the tokens that there is room for. `tokens`: it has at least as many."""

    def __init__(self, tokens: int):
        super().__init__(f"the prompt has more than {tokens:,} tokens")
        self.tokens = tokens


class Prompt(NamedTuple):
    """A prompt that has been read."""

    ids: tuple[int, ...]
    shown: str  # as a person would read it
    is_thinking: bool = False  # the template has begun a thought, which the answer goes on with


class Chat(NamedTuple):
    """A conversation, and what else a template is given."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    options: Mapping[str, Any] = {}  # other variables, which the template has to know
    hints: Mapping[str, Any] = {}  # and some that it need not know


class Tokenizer:
    """A model's tokenizer, chat template and end tokens.

    `unfit`: why there is a chat template that is not used, in one line; else empty.
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
                self.tokenizer = calmly(gguf.tokenizer)
            else:
                self.tokenizer = calmly(tokenizers.Tokenizer.from_file, str(path))
            self.tokenizer.no_truncation()
            self.tokenizer.no_padding()
            largest = max(self.tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
            silent = special_ids(self.tokenizer)
        except Exception as error:  # the library raises a bare Exception
            raise ModelError(
                f"{path} is not a tokenizer ({one_line(error)}); download it again."
            ) from None
        if largest >= vocabulary:
            raise ModelError(
                f"{path} has the token id {largest}, but the embedding ends at {vocabulary - 1}."
            )
        self.vocabulary = vocabulary
        # Marks of calls and thoughts are shown, even where they are special tokens
        self._silent = silent - {self.tokenizer.token_to_id(mark) for mark in MARKS}
        self.end_tokens = gguf.end_tokens if gguf else self._end_tokens()
        self._grammars = Grammars(self.tokenizer, vocabulary, self.end_tokens)

    def _end_tokens(self) -> frozenset[int]:
        """Every id that ends an answer, be it named by the config, the generation config or the
        tokenizer's config."""
        ids: set[int] = set()
        for name in ("config.json", "generation_config.json"):
            path = self.folder / name
            value = read_json_if_any(path).get("eos_token_id")
            for token in value if isinstance(value, list) else [] if value is None else [value]:
                if type(token) is not int:
                    raise ModelError(
                        f"{path}: eos_token_id = {shown(value)}, but it must be a token id or a list of them."
                    )
                ids.add(token)
        return frozenset(ids | ({self._special_id("eos_token")} - {None}))

    def special(self, name: str) -> str:
        """`bos_token` or `eos_token` as the tokenizer's config spells it; empty if it has none."""
        value = self.config.get(name)
        value = value.get("content") if isinstance(value, dict) else value
        return value if isinstance(value, str) else ""

    def _special_id(self, name: str) -> int | None:
        with suppress(UnicodeEncodeError):  # half a surrogate pair, which is no token
            return self.tokenizer.token_to_id(self.special(name)) if self.special(name) else None

    def stream(self, stops: Sequence[str]) -> StreamingDetokenizer:
        return StreamingDetokenizer(self.tokenizer, stops, self._silent)

    def ask(self, prompt: str, raw: bool = False) -> list[int]:
        """A prompt as a person types it: one message of a user, or plain text if it is `raw` or
        there is no template.

        An unfit template is refused, since its model knows no other form of a question.
        An empty prompt has no tokens, not even BOS, so the engine refuses it.
        """
        if prompt:
            self._check_known(prompt)
        if self._source is not None and prompt and not raw:
            return self.encode_chat([{"role": "user", "content": prompt}])
        return self.encode(prompt) if prompt else []

    def _check_known(self, prompt: str) -> None:
        """A prompt of which nothing is left would still get an answer, which has nothing to do with
        it."""
        unknown = getattr(self.tokenizer.model, "unk_token", None)
        none = unknown and self.tokenizer.token_to_id(unknown)
        if all(token == none for token in self._ids(prompt, False)):
            raise ValueError(
                f"the model's tokenizer knows no character of {shown(prompt)}; "
                "write it in a language that the model has read"
            )

    def encode(self, text: str, room: float = math.inf) -> list[int]:
        """A plain text, with BOS if the tokenizer adds it by itself, and with one BOS if the text
        has its own, too."""
        self._check_length(text, room)
        ids = self._ids(text, True)
        bos = self._special_id("bos_token")
        return ids[1:] if bos is not None and ids[:2] == [bos, bos] else ids

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """A conversation, through the model's own template. No BOS is added to what the template
        writes."""
        return self._ids(self.render(messages), False)

    def _check_length(self, text: str, room: float) -> None:
        """Refuse a text far beyond so many tokens after a part of it: to tokenize 1 MB takes 350 MB.

        Twice as much is looked at each time. Near the cut the tokens of the whole may be others, so
        a part must be well beyond.
        """
        size = max(FIRST, 8 * room)
        while size < len(text):
            tokens = len(self._ids(text[: int(size)], False))
            if tokens > 1.25 * room:
                raise TooLongError(int(tokens / 1.25))
            size *= 2

    def read(
        self,
        prompt: str | Sequence[int] | Sequence[Mapping[str, Any]] | Chat | Prompt,
        room: float = math.inf,
    ) -> Prompt:
        """A prompt is a text, chat messages, or ids as they are. One that has been read stays as it
        is, unless it was read for another model.

        `room`: TooLongError is raised for a text far beyond so many tokens.
        """
        if isinstance(prompt, Prompt):
            self.check_ids((min(prompt.ids), max(prompt.ids)))
            return prompt
        if isinstance(prompt, Sequence) and prompt and isinstance(prompt[0], Mapping):
            prompt = Chat(prompt)
        ids = prompt
        shown = "token ids"
        if isinstance(prompt, Chat):
            text = self.render(*prompt)
            self._check_length(text, room)
            ids = self._ids(text, False)
            shown = str(prompt.messages[-1].get("content"))
        elif isinstance(prompt, str):
            ids = self.encode(prompt, room) if prompt else ()
            shown = prompt
        is_list = isinstance(ids, Sequence) and not isinstance(ids, (bytes, bytearray))
        if not is_list or any(type(i) is not int for i in ids):
            raise ValueError(
                f"a prompt is a text, chat messages or token ids, not {type(prompt).__name__} like this"
            )
        if not ids:
            raise ValueError("the prompt is empty; give at least one token")
        self.check_ids((min(ids), max(ids)))
        return Prompt(tuple(ids), shown, self.is_thinking(ids))

    @cached_property
    def advice(self) -> dict[str, float]:
        """The settings of a request that says nothing itself."""
        return advised(self.folder)

    @cached_property
    def longest(self) -> int:
        """The characters of the longest token."""
        return max(map(len, self.tokenizer.get_vocab(with_added_tokens=True)), default=1)

    def after(self, before: Sequence[int], tokens: Sequence[int]) -> list[str]:
        """The text that each of some tokens would add to those before it. A special token is shown
        by its name."""
        decode = self.tokenizer.decode
        known = len(decode(before, skip_special_tokens=False))
        longer = [[*before, token] for token in tokens]
        return [decode(ids, skip_special_tokens=False)[known:] for ids in longer]

    def check_ids(self, ids: Iterable[int]) -> None:
        for token in ids:
            if not 0 <= token < self.vocabulary:  # MLX checks no bounds: it would read other memory
                words = f"token id {shown(token)} is outside the vocabulary of {self.vocabulary}"
                raise ValueError(words)

    def _ids(self, text: str, add_special_tokens: bool) -> list[int]:
        try:
            text.encode()
        # Half a surrogate pair, which bytes that are no UTF-8 become as text
        except UnicodeEncodeError as error:
            raise ValueError(
                f"the prompt is no valid text at character {error.start}; give UTF-8"
            ) from None
        try:
            # Not `encode`, which keeps Python's lock: 2 MB of text would stop all threads for 4 s.
            return calmly(
                self.tokenizer.encode_batch, [text], add_special_tokens=add_special_tokens
            )[0].ids
        except Exception as error:  # a character that it does not know, if it has no token for such
            why = f"the model's tokenizer cannot read this prompt ({one_line(error)})"
            raise ValueError(f"{why}; give other words, or token ids") from None

    def grammar(self, source: Mapping[str, Any]) -> Grammar:
        """What a request's answer must be, from `SamplingParams.grammar`. It may take a second."""
        return self._grammars.grammar(source)

    @cached_property
    def marks(self) -> dict[str, int]:
        """The tokens that a grammar has to name by their ids: marks of calls and thoughts, and every
        other added token that the grammar library takes for special."""
        decoder = self.tokenizer.get_added_tokens_decoder()
        added = {token.content: id for id, token in decoder.items()}
        special = self._grammars.special(added.values())
        return {text: id for text, id in added.items() if text in MARKS or id in special}

    @property
    def has_template(self) -> bool:
        return self._source is not None and not self.unfit

    def _try_out(self, path: Path) -> tuple[str | None, str]:
        """Try template and tokenizer in a child process, before either is used here. Returns the
        template's text, and in one line why it cannot be used."""
        from text.template_check import TRIALS, TryOut

        source, for_tools, place = self._find_template()
        why = ""
        texts: list[str] = []
        with TryOut() as child:
            # The demo's own came with this file, and is as good as this file
            if source is not None and not is_ours(source, "chat_template.jinja"):
                trials = [*map(self._variables, TRIALS), self._variables(PROBE, TOOLS)]
                why, texts = child.template(source, trials)
                if for_tools is not None and not why:
                    # "+" keeps the white space that a template begins or ends with
                    both = [text.removesuffix("\n") for text in (for_tools, source)]
                    joint = "{% if tools +%}" + "{%+ else +%}".join(both) + "{%+ endif %}"
                    fault, more = child.template(joint, trials)
                    if not fault:
                        source = joint
                        texts += more
            is_known = not is_gguf(path) and is_ours(path.read_bytes(), path.name)
            if not is_known and (fault := child.tokenizer(path, texts)):
                raise ModelError(f"{path}: the tokenizer {fault}; take another model.")
        return source, why and f"{place}: the chat template {why}; mend it, or give plain text."

    def _find_template(self) -> tuple[str | None, str | None, Path]:
        """The template's text, the one for chats with tools, if it is another, and their place. It
        is a file of its own, or in the config, alone or as one of several with names."""
        path = self.folder / "chat_template.jinja"
        source = read_text(path) if path.exists() else self.config.get("chat_template")
        for_tools = None
        more = self.folder / "additional_chat_templates" / "tool_use.jinja"
        if not path.exists():
            path = self.folder if is_gguf(self.folder) else self.folder / "tokenizer_config.json"
        elif more.exists():
            for_tools = read_text(more)
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
        """What a template can ask for."""
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
    def speech(self) -> Speech:
        """How the model marks its thoughts, and calls of tools."""
        return learn(self._source, self.render)

    def is_thinking(self, prompt: Sequence[int]) -> bool:
        """Does a prompt open a thought at its end, as some templates do?"""
        end = calmly(self.tokenizer.decode, list(prompt[-16:]), skip_special_tokens=False)
        return self.speech.is_thinking(end)

    def render(self, *given: Any) -> str:
        """The text that the template makes of a conversation. It ends where the assistant's answer
        begins. `given`: the messages, and what else a `Chat` has."""
        messages, tools, options, hints = Chat(*given)
        for message in messages:
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
                raise ValueError(
                    f"a chat message is {shown(message)}, but it must be a mapping with a role and a content"
                )
        if self.unfit:
            raise ModelError(self.unfit)
        if self._source is None:
            raise ValueError("this model has no chat template; give it a plain text")
        for name in options:
            if not isinstance(name, str) or name not in self._source:
                raise ValueError(f"the chat template knows no {shown(name)}; leave it out")
        hints = {name: value for name, value in hints.items() if name in self._source}
        messages = [
            {key: value for key, value in message.items() if value is not None}
            for message in messages
        ]
        try:
            variables = {**hints, **options, **self._variables(messages, tools)}
            return self._template.render(variables)
        except Exception as error:  # a template is another author's program, and may raise anything
            raise ValueError(
                f"the chat template refuses these messages: {one_line(error)}"
            ) from None


def is_ours(data: str | bytes, name: str) -> bool:
    """Is this what the demo has in its file of this name? That came with the program."""
    data = data.encode(errors="replace") if isinstance(data, str) else data
    path = OURS / name
    return path.exists() and data == path.read_bytes()


class StreamingDetokenizer:
    """The text of one answer as it grows: `push` takes a token and returns a piece, `finish`
    returns what is left.

    A decoder may put or drop a space between two tokens. So each token is decoded together with the
    few before it, and the text beyond theirs is new. Three kinds of tokens wait:

        b"\\xf0\\x9f"  bytes that end within a character wait until it is complete, or broken for good
        <0xF0>       byte tokens, which tokenizers made from SentencePiece have, wait until the run of them ends,
                     because one broken byte spoils how the whole run decodes
        "Hel"        text that a stop string may begin with waits until it is clear whether it does

    (`tokenizers` has a DecodeStream, which handles the first kind. With the second kind it raises,
    or shows text that the decoded whole does not have.)
    """

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        stops: Sequence[str] = (),
        silent: frozenset[int] | None = None,
    ):
        """`silent` holds the ids of the special tokens, if the caller has them already."""
        self._tokenizer = tokenizer
        self._begun = dict.fromkeys(stops, "")  # as much of each as the text so far ends with
        self._silent = special_ids(tokenizer) if silent is None else silent
        self._falls_back = tokenizer.token_to_id("<0x00>") is not None
        self._context: list[int] = []  # the last tokens whose text is final
        self._behind = ""  # their text
        self._waiting: list[int] = []  # the tokens whose text is not
        self._held = ""  # text that is final, but may be the beginning of a stop string
        self._decoded = 0  # how many characters are final
        self.stop: str | None = None  # the stop string that has come

    @property
    def open(self) -> int:
        """So many tokens have yet to become text: they may be completed by the next one, or stay
        broken."""
        return len(self._waiting)

    def push(self, token: int) -> str:
        """The text that can be shown now, perhaps none. `stop` then says which stop string has
        come."""
        name = self._tokenizer.id_to_token(token)
        if name is None or token in self._silent:
            return ""
        self._waiting.append(token)
        if self._falls_back and len(name) == 6 and name.startswith("<0x"):
            return ""
        text = self._decode(self._context + self._waiting)
        count = len(self._waiting)
        if text.endswith("\ufffd") and not self._falls_back:
            count = self._complete()
            if count == 0:
                return ""
            text = self._decode(self._context + self._waiting[:count])
        piece = text[len(self._behind) :]
        self._context += self._waiting[:count]
        self._behind = text
        self._waiting = self._waiting[count:]
        # Not every time, because the text of a context that only grows is known
        if len(self._context) > 16:
            self._context = self._context[-1:] if self._falls_back else self._context[-4:]
            self._behind = self._decode(self._context)
        return self._release(piece)

    def _decode(self, tokens: list[int]) -> str:
        tokens = [token for token in tokens if token not in self._silent]
        return calmly(self._tokenizer.decode, tokens, skip_special_tokens=False)

    def _complete(self) -> int:
        """How many of the waiting tokens form a text that no later token can change; not all of
        them do.

        A character has at most four bytes, so a cut is tried before each of the last four tokens.
        If the two sides of a cut decode to the same text as the whole does, the text before the cut
        is final, broken or not.
        """
        text = self._decode(self._waiting)
        for count in range(len(self._waiting) - 1, max(len(self._waiting) - 5, 0), -1):
            if self._decode(self._waiting[:count]) + self._decode(self._waiting[count:]) == text:
                return count
        return 0

    def _release(self, piece: str) -> str:
        self._decoded += len(piece)
        text = self._held + piece
        found = []
        for stop, begun in self._begun.items():
            grown = begun + piece
            if stop in grown:
                behind = len(grown) - grown.index(stop) - len(stop)  # so many characters follow
                found.append((behind, len(stop), stop))
            # Each stop string has its own: who looked through all that is held, for each token, would
            # look through the longest stop string as often as there are others
            self._begun[stop] = beginning(stop, grown)
        if found:
            # The stop string that is complete first counts, however the text was cut into tokens
            behind, length, self.stop = max(found)
            self._held = ""
            return text[: len(text) - behind - length]
        self._held = max(self._begun.values(), key=len, default="")
        return text.removesuffix(self._held)

    def finish(self, tokens: list[int]) -> str:
        """What is left at the end: a text that did not become a stop string, and the bytes of a
        broken character."""
        if self.stop is not None:
            return ""
        shown = self._release(self._decode(tokens)[self._decoded :])
        held, self._held = self._held, ""
        return shown + held


def calmly(function: Callable, *arguments: Any, **options: Any) -> Any:
    """Call a function of the tokenizer. If its Rust panics, that is no Exception: it would pass all
    that catch one."""
    try:
        return function(*arguments, **options)
    except BaseException as error:
        # Ctrl-C is none, nor is the SystemExit of a signal's handler
        if type(error).__name__ != "PanicException":
            raise
        raise RuntimeError(f"the tokenizer failed: {error}") from None


def special_ids(tokenizer: tokenizers.Tokenizer) -> frozenset[int]:
    return frozenset(
        token for token, added in tokenizer.get_added_tokens_decoder().items() if added.special
    )

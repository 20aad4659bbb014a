"""The models that a terminal chat can use: an engine in this process or a server (`server_model.py`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any, Protocol

from cli.text_output import wait_for_text
from text.tool_formats import OutputFormat
from text.tool_parser import OutputParser, ParsedPart

if TYPE_CHECKING:
    from engine.handle import Handle, Result
    from nanobatch import Engine
    from sampling_params import SamplingParams

# Settings that /set can change
SETTABLE = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "max_tokens")
REMEDY = "/drop forgets the oldest question and asks again, /new starts over"
LEAST = 16  # minimum number of free tokens for an answer


class Outgrown(ValueError):
    """Raised for a conversation that no longer fits in a slot."""


def outgrown(tokens: int, length: int) -> str:
    """Return the message for a conversation that does not fit in a slot."""
    return (
        f"with this question the conversation has {tokens:,} tokens, and a slot holds {length:,}, "
        f"answer included: {REMEDY}"
    )


class Answer(Protocol):
    """An answer that is being generated. Iterating over it yields its parts as they arrive."""

    id: int

    def __iter__(self) -> Iterator[ParsedPart]: ...

    def wait_for_text(self, show: Callable[[str], None]) -> None:
        """Wait until the answer begins. `show` receives the progress of a long prompt."""

    def cancel(self) -> None: ...

    def result(self) -> Result: ...


class ChatModel(Protocol):
    @property
    def length(self) -> int:
        """The number of tokens in a slot; 0 if it is unknown."""

    def settings(self, changes: Mapping[str, Any]) -> Mapping[str, Any]:
        """Validate changed settings. Return the values of all settings in SETTABLE."""

    def size_of(self, text: str) -> str:
        """Describe the length of an attached text."""

    def ask(self, messages: Sequence[Mapping[str, str]], changes: Mapping[str, Any]) -> Answer:
        """Submit a conversation with changed settings. Raise Outgrown if it does not fit in a slot."""


class EngineModel:
    """The model of an engine in this process."""

    def __init__(self, engine: Engine, sampling: SamplingParams):
        self._engine = engine
        self._sampling = sampling

    @property
    def length(self) -> int:
        return self._engine.sched.max_len

    def settings(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        sampling = replace(self._sampling, **changes)  # validates all values
        return {name: getattr(sampling, name) for name in SETTABLE}

    def size_of(self, text: str) -> str:
        return f"{len(self._engine.text.encode(text)):,} tokens"

    def ask(
        self, messages: Sequence[Mapping[str, str]], changes: Mapping[str, Any]
    ) -> EngineAnswer:
        ids = self._engine.text.encode_chat(messages)
        room = self.length - len(ids)
        if room < LEAST:
            raise Outgrown(outgrown(len(ids), self.length))
        sampling = replace(self._sampling, **changes)
        most = min(sampling.max_tokens or room, room)
        handle = self._engine.submit(ids, replace(sampling, max_tokens=most))
        return EngineAnswer(handle, self._engine.text.output_format)


class EngineAnswer:
    def __init__(self, handle: Handle, output_format: OutputFormat):
        self.id = handle.id
        self._handle = handle
        self._format = output_format

    def __iter__(self) -> Iterator[ParsedPart]:
        parser = OutputParser(self._format, is_thinking=self._handle.is_thinking)
        for piece in chain(self._handle, [None]):
            yield from parser.push(piece)

    def wait_for_text(self, show: Callable[[str], None]) -> None:
        wait_for_text(self._handle, show)

    def cancel(self) -> None:
        self._handle.cancel()

    def result(self) -> Result:
        return self._handle.result()

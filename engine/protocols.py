"""Protocols for the parts of an engine, so that handles, loops and programs need no MLX and run with fakes
in tests."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol


class Grammar(Protocol):
    """Where an answer is in its grammar (`text/grammar.py`)."""

    @property
    def is_complete(self) -> bool: ...

    def forced(self) -> list[int]: ...

    def masks(self, draft: Sequence[int]) -> list[bytes]: ...

    def accept(self, token: int) -> None: ...


class Detokenizer(Protocol):
    """Makes text of the tokens of one answer (`text/tokenizer.py`)."""

    stop: str | None

    def push(self, token: int) -> str: ...

    def finish(self, tokens: Sequence[int]) -> str: ...


class TokenizerProtocol(Protocol):
    """Makes tokens of text, and text of tokens (`text.tokenizer.Tokenizer`)."""

    end_tokens: frozenset[int]
    has_template: bool
    folder: Path

    def read(self, prompt: Any) -> tuple[tuple[int, ...], str, bool]: ...

    def ask(self, text: str) -> list[int]: ...

    def check_ids(self, ids: Collection[int]) -> None: ...

    def grammar(self, source: Mapping) -> Grammar: ...

    def stream(self, stops: Sequence[str]) -> Detokenizer: ...

    def after(self, before: Sequence[int], tokens: Sequence[int]) -> list[str]: ...


class RunnerProtocol(Protocol):
    """The device half of an engine (`runner.Runner`)."""

    slab: Any  # None for a runner without one

    def begin(self, batch: Any) -> Any: ...

    def finish(self, launched: Any, rows: Any) -> Any: ...

    def reset(self) -> None: ...

    def warm_up(self) -> None: ...
